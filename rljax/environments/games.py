"""Games: guess a number, tic-tac-toe and Kuhn poker, alone or against oneself.

Each takes the text of a move as it comes; reasoning before it and white space do not count, and a
text that is no move loses. Rows are the tasks of the same names (rljax.tasks.games). `style`
"words" explains the game, for models that read; "short" writes a position in a few characters, for
models of a few layers.
"""

import random
from typing import Literal

from rljax.contracts import contract
from rljax.environments.contract import Turn
from rljax.reasoning import answer_of
from rljax.tasks.games import LINES
from rljax.tasks.task import check_choice

MARKS = ("x", "o")
PLAYERS = ("first", "second")
_HELP_TIC_TAC_TOE = "Tic-tac-toe. You are {}. Answer with the number of a free cell, 1 to 9.\n"
_HELP_KUHN = (
    "Kuhn poker: cards J < Q < K, one each, an ante of 1 each. Answer p to pass (check or fold) or "
    "b to bet 1 (or call). Your card is {}. Moves so far: {}.\n"
)


@contract(safe=True)
def guess_number(secret, *, high: int = 16, turns: int = 4, price: float = 0.05):
    """A number from 1 to `high`, found by halving. The score is 1 - price x (guesses before the
    right one), and 0 after `turns` wrong ones."""
    message = f"Guess my number, 1 to {high}."
    for turn in range(turns):
        reply = yield message
        text = answer_of(reply).strip()
        guess = int(text) if text.isdecimal() and len(text) < 10 else 0
        if guess == secret:
            return 1.0 - price * turn
        message = "higher" if guess < secret else "lower"
    return 0.0


# -- tic-tac-toe


@contract(safe=True, seats=lambda options: MARKS if options["opponent"] == "self" else ("",))
def tic_tac_toe(
    seed,
    sample_seed,
    *,
    opponent: Literal["self", "random"] = "self",
    style: Literal["words", "short"] = "words",
):
    """Three in a row. 1 for the winner, -1 for the loser, 0 for a draw; a text that is no move is
    -1 for the player that writes it and 0 for the other.

    Against "self" both seats, x and o, are the policy. Against "random" it has the mark that `seed`
    gives it, and the other player's free cells are drawn by `sample_seed`. Raises InputError for
    another opponent or style.
    """
    check_choice("tic_tac_toe", "style", style, "words", "short")
    check_choice("tic_tac_toe", "opponent", opponent, "self", "random")
    board, rng = ["."] * 9, random.Random(sample_seed)
    policy_mark = MARKS[random.Random(seed).randrange(2)] if opponent == "random" else ""
    for number in range(9):
        mark, other = MARKS[number % 2], MARKS[1 - number % 2]
        if policy_mark and mark != policy_mark:
            cell = rng.choice([i for i in range(9) if board[i] == "."])
        else:
            position = _position(board, mark, style)
            reply = yield Turn(position, state="".join(board), seat="" if policy_mark else mark)
            cell = free_cell(reply, board)
        if cell is None:
            return -1.0 if policy_mark else {mark: -1.0, other: 0.0}
        board[cell] = mark
        if any(all(board[int(i)] == mark for i in line) for line in LINES):
            if policy_mark:
                return 1.0 if mark == policy_mark else -1.0
            return {mark: 1.0, other: -1.0}
    return 0.0 if policy_mark else dict.fromkeys(MARKS, 0.0)


def free_cell(reply: str, board: list[str]) -> int | None:
    """The index of the free cell that a reply names; None if it names none."""
    text = answer_of(reply).strip()
    cell = "123456789".find(text) if len(text) == 1 else -1
    return cell if cell >= 0 and board[cell] == "." else None


def _position(board: list[str], mark: str, style: str) -> str:
    if style == "short":
        return "".join(board) + mark
    rows = "\n".join("".join(board[i : i + 3]) for i in (0, 3, 6))
    has_moved = board.count(mark) > 0
    return f"{'' if has_moved else _HELP_TIC_TAC_TOE.format(mark)}{rows}\n"


# -- Kuhn poker


@contract(safe=True, seats=PLAYERS)
def kuhn_poker(deal, *, style: Literal["words", "short"] = "words"):
    """Poker with three cards and two moves, p (pass) and b (bet), against oneself: each seat gets
    the chips that it wins, -2 to 2. A text that is no move loses 2. `deal`: "KQ" gives the king
    to the first seat. `rljax.environments.kuhn.exploitability` measures the distance of a policy
    from equilibrium."""
    check_choice("kuhn_poker", "style", style, "words", "short")
    history = ""
    while (won := chips(history, deal)) is None:
        seat = len(history) % 2
        position = f"{deal[seat]}{history}"
        if style == "words":
            position = _HELP_KUHN.format(deal[seat], history or "none")
        reply = yield Turn(position, state=(deal[seat], history), seat=PLAYERS[seat])
        move = answer_of(reply).strip()
        if move not in ("p", "b"):
            won = 2.0 if seat else -2.0
            break
        history += move
    return {PLAYERS[0]: won, PLAYERS[1]: -won}


def chips(history: str, deal: str) -> float | None:
    """Returns the chips that the first player wins at the end of a history of Kuhn poker; None
    before the end."""
    sign = 1.0 if "JQK".index(deal[0]) > "JQK".index(deal[1]) else -1.0
    ends = {"pp": sign, "bp": 1.0, "pbp": -1.0, "bb": 2 * sign, "pbb": 2 * sign}
    return ends.get(history)
