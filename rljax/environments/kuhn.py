"""Exact exploitability of a policy of Kuhn poker: the gain of the best responses to it."""

import itertools
from collections.abc import Mapping

from rljax.environments.games import chips
from rljax.tasks.games import DEALS

HISTORIES = ("", "p", "b", "pb")  # after which somebody moves; whose length is even: the first
# Information of a seat as it moves: its card and the moves so far.
SITUATIONS = tuple((card, history) for card in "JQK" for history in HISTORIES)
_MOVES = ("p", "b", "")  # "": no move of the game, which loses 2


def log_of(card: str, history: str) -> str:
    """The log that a seat reads at a card and a history, in the style "short"."""
    before = f"{card}p" if history == "pb" else ""  # its own first move
    return f"{before}{card}{history}"


def exploitability(policy: Mapping[tuple[str, str], tuple[float, float]]) -> float:
    """Returns (the best first seat's gain against the policy + the best second seat's gain) / 2, in
    chips per game. 0: an equilibrium; 0.458: both moves equally likely.

    `policy` gives for each of the SITUATIONS the probabilities of p and b; the rest up to 1 are
    texts that are no moves.
    """
    full = {
        situation: (*policy[situation], max(0.0, 1.0 - sum(policy[situation])))
        for situation in SITUATIONS
    }
    return sum(_best_answer(full, seat) for seat in (0, 1)) / 2


def _best_answer(policy: dict, seat: int) -> float:
    """Returns the greatest mean that a seat can win against the policy, over its
    64 pure strategies."""
    situations = [situation for situation in SITUATIONS if len(situation[1]) % 2 == seat]
    gains = []
    for moves in itertools.product(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), repeat=len(situations)):
        play = {**policy, **dict(zip(situations, moves, strict=True))}
        mean = sum(_value(play, "", deal) for deal in DEALS) / len(DEALS)
        gains.append(mean if seat == 0 else -mean)
    return max(gains)


def _value(policy: dict, history: str, deal: str) -> float:
    """Returns the expected chips of the first player from a history on."""
    won = chips(history, deal)
    if won is not None:
        return won
    seat, total = len(history) % 2, 0.0
    for move, probability in zip(_MOVES, policy[deal[seat], history], strict=True):
        if probability > 0:
            lost = 2.0 if seat else -2.0
            total += probability * (_value(policy, history + move, deal) if move else lost)
    return total
