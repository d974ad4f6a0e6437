"""TextArena's games, each player a seat."""

import functools
import random
from collections.abc import Generator

from rljax.contracts import contract
from rljax.environments.adapters.shared import library
from rljax.environments.contract import Reply, Turn

# Imported before the first clock starts: it takes seconds.
_library = functools.partial(library, "textarena", "textarena", "textarena")


@contract(
    seats=lambda options: tuple(map(str, range(options["players"]))),
    prepare=lambda options: _library,
)
def textarena(seed: int, *, game: str, players: int = 1) -> Generator[Turn, Reply, dict]:
    """A game of TextArena, all of whose `players` the policy plays, as seats "0", "1", ...

    `game`: its id, "GuessTheNumber-v0". A player reads what the game and the others have said
    since it last played, and moves by the answer of its reply, without its reasoning. The outcome
    of a seat is TextArena's reward of the player.
    """
    arena = _library()
    # The game's "-raw" form has no wrappers that repeat the whole history in each observation.
    env = arena.make(game if game.endswith("-raw") else f"{game}-raw")
    draws = _Draws(seed)
    with draws:
        env.reset(num_players=players, seed=seed)
    done = False
    while not done:
        player, messages = env.get_observation()
        reply = yield Turn(_text(env, arena, player, messages), seat=str(player))
        with draws:
            done, _ = env.step(reply.answer)
    rewards, _ = env.close()
    return {str(player): float(rewards[player]) for player in range(players)}


def _text(env, arena, player: int, messages: list) -> str:
    """Joins the messages since then, without those of the player itself, which its log has."""
    lines = []
    for sender, message, _ in messages:
        if sender == arena.GAME_ID:
            lines.append(message)
        elif sender != player:
            lines.append(f"[{env.state.role_mapping.get(sender, f'Player {sender}')}] {message}")
    return "\n".join(lines) or "It is your turn."


class _Draws:
    """The games draw from the one generator of `random`: each gets a state of its own."""

    def __init__(self, seed: int):
        self.own = random.Random(seed).getstate()

    def __enter__(self):
        self.others = random.getstate()
        random.setstate(self.own)

    def __exit__(self, *_):
        self.own = random.getstate()
        random.setstate(self.others)
