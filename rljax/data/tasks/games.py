"""Rows for the games of rljax.environments.games: guess_number, tic_tac_toe, kuhn_poker.

A game has no held-out prompts: both splits are all of its deals. Worked examples teach the form of
a move, not which one is good: they are positions of random play, each with a random move.
"""

import itertools
import random

from rljax.data.tasks.task import Task, check_range

CELLS = "123456789"
DEALS = tuple("".join(deal) for deal in itertools.permutations("JQK", 2))


def guess_number(
    *, high: int = 16, turns: int = 4, worked_examples: int = 512, seed: int = 0
) -> Task:
    """Rows with a `secret` from 1 to `high`. Worked examples answer a game of up to `turns` guesses
    with any number and a line break."""
    check_range("guess_number", "high", high, 2, 999)
    check_range("guess_number", "turns", turns, 1, 20)
    opening = f"Guess my number, 1 to {high}."
    rows = [
        {
            "prompt": opening,
            "ground_truth": str(secret),
            "data_source": "guess_number",
            "extra_info": {"secret": secret},
            "index": secret - 1,
        }
        for secret in range(1, high + 1)
    ]
    rng = random.Random(f"guess_number/{seed}")
    shown = []
    for _ in range(worked_examples):
        secret, log = rng.randint(1, high), opening
        for _ in range(rng.randrange(turns)):
            guess = rng.choice([n for n in range(1, high + 1) if n != secret])
            log += f"{guess}\n" + ("higher" if guess < secret else "lower")
        shown.append({"prompt": log, "completion": f"{rng.randint(1, high)}\n"})
    alphabet = "0123456789\n" + "".join(sorted({*opening, *"higherlower"} - {*"0123456789"}))
    return Task(alphabet, rows, rows, shown, shown[: max(1, worked_examples // 8)])


def tic_tac_toe(*, games: int = 64, worked_examples: int = 1024, seed: int = 0) -> Task:
    """Rows of `games` games that differ in nothing but their seeds. Worked examples mark any free
    cell after random play, as the environment shows it with style='short'."""
    check_range("tic_tac_toe", "games", games, 1, 100_000)
    rows = [
        {"prompt": "." * 9, "ground_truth": "draw", "data_source": "tic_tac_toe", "index": i}
        for i in range(games)
    ]
    rng = random.Random(f"tic_tac_toe/{seed}")
    shown = [_legal_move(rng) for _ in range(worked_examples)]
    return Task(f"{CELLS}.xo", rows, rows, shown, shown[: max(1, worked_examples // 8)])


def _legal_move(rng: random.Random) -> dict:
    """The log of the player to move after some random moves, and any free cell."""
    board, logs = ["."] * 9, ["", ""]
    moves = rng.sample(range(9), rng.randint(1, 9))
    for number, cell in enumerate(moves):
        mark = "xo"[number % 2]
        logs[number % 2] += "".join(board) + mark
        if number == len(moves) - 1:
            return {"prompt": logs[number % 2], "completion": CELLS[cell]}
        logs[number % 2] += CELLS[cell]
        board[cell] = mark
    raise AssertionError("there is at least one move")


def kuhn_poker() -> Task:
    """The six deals of Kuhn poker: `deal` "KQ" gives the first seat the king. Worked examples pass
    and bet equally often wherever somebody moves."""
    rows = [
        {
            "prompt": deal,
            "ground_truth": deal,
            "data_source": "kuhn_poker",
            "extra_info": {"deal": deal},
            "index": i,
        }
        for i, deal in enumerate(DEALS)
    ]
    logs = [
        before.format(card) for card in "JQK" for before in ("{0}", "{0}p", "{0}b", "{0}p{0}pb")
    ]
    shown = [{"prompt": log, "completion": move} for log in logs for move in "pb"]
    return Task("JQKpb", rows, rows, shown, shown)
