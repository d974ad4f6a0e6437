"""Rows for the games of rljax.environments.games: guess_number, tic_tac_toe, kuhn_poker.

A game has no held-out prompts: both splits are all of its deals. Worked examples teach the form of
a move: positions of random play, each with a random move, but for some of guess_number's.
"""

import itertools
import random

from rljax.contracts import contract
from rljax.tasks.task import Task, check_range

CELLS = "123456789"
DEALS = tuple("".join(deal) for deal in itertools.permutations("JQK", 2))


def _row(game: str, index: int, prompt: str, truth: str, **extra: object) -> dict:
    fields = dict(prompt=prompt, ground_truth=truth, data_source=game)
    return {**fields, "extra_info": extra, "index": index}


@contract(safe=True)
def guess_number(
    *,
    high: int = 16,
    turns: int = 4,
    halving_share: float = 0.2,
    worked_examples: int = 1024,
    seed: int = 0,
) -> Task:
    """Rows with a `secret` from 1 to `high`. Worked examples answer a game of up to `turns` guesses
    with a number and a line break: `halving_share` of them halve the interval that is left, the
    others guess any number."""
    check_range("guess_number", "high", high, 2, 999)
    check_range("guess_number", "turns", turns, 1, 20)
    check_range("guess_number", "halving_share", halving_share, 0, 1)
    opening = f"Guess my number, 1 to {high}."
    secrets = range(1, high + 1)
    rows = [_row("guess_number", s - 1, opening, str(s), secret=s) for s in secrets]
    rng = random.Random(f"guess_number/{seed}")
    examples = [_guess(rng, opening, high, turns, halving_share) for _ in range(worked_examples)]
    alphabet = "0123456789\n" + "".join(sorted({*opening, *"higherlower"} - {*"0123456789"}))
    return Task(alphabet, rows, rows, examples, examples[: max(1, worked_examples // 8)])


def _guess(rng: random.Random, log: str, high: int, turns: int, halving_share: float) -> dict:
    """A game so far, of random guesses or of halving, and one more guess."""
    secret, low, top = rng.randint(1, high), 1, high
    halves = rng.random() < 0.5
    for _ in range(rng.randrange(turns)):
        guess = (low + top) // 2 if halves else rng.randint(1, high)
        if guess == secret:
            break
        log += f"{guess}\n" + ("higher" if guess < secret else "lower")
        low, top = (max(low, guess + 1), top) if guess < secret else (low, min(top, guess - 1))
    middle = rng.random() < halving_share
    guess = (low + top) // 2 if middle else rng.randint(1, high)
    return {"prompt": log, "completion": f"{guess}\n"}


LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


@contract(safe=True)
def tic_tac_toe(
    *, games: int = 64, tactics_share: float = 0.2, worked_examples: int = 4096, seed: int = 0
) -> Task:
    """Rows of `games` games that differ only in their seeds. Worked examples are positions of
    random play, as the environment shows them with style='short': `tactics_share` of them answer
    with a cell that completes or blocks a line, if there is one, the others with any free cell."""
    check_range("tic_tac_toe", "games", games, 1, 100_000)
    check_range("tic_tac_toe", "tactics_share", tactics_share, 0, 1)
    rows = [
        {"prompt": "." * 9, "ground_truth": "draw", "data_source": "tic_tac_toe", "index": i}
        for i in range(games)
    ]
    rng = random.Random(f"tic_tac_toe/{seed}")
    examples = [_legal_move(rng, tactics_share) for _ in range(worked_examples)]
    return Task(f"{CELLS}.xo", rows, rows, examples, examples[: max(1, worked_examples // 8)])


def _legal_move(rng: random.Random, tactics_share: float) -> dict:
    """The log of the player to move after some random moves, and a free cell."""
    board, logs = ["."] * 9, ["", ""]
    moves = rng.sample(range(9), rng.randint(1, 9))
    for number, cell in enumerate(moves):
        mark, other = "xo"[number % 2], "ox"[number % 2]
        logs[number % 2] += "".join(board) + mark
        thirds = _thirds(board, mark) or _thirds(board, other)
        if number == len(moves) - 1:
            best = rng.random() < tactics_share and thirds
            return {"prompt": logs[number % 2], "completion": CELLS[best[0] if best else cell]}
        logs[number % 2] += CELLS[cell]
        board[cell] = mark
    raise AssertionError("there is at least one move")


def _thirds(board: list[str], mark: str) -> list[int]:
    """The free cells of lines that hold two of a mark."""
    lines = [[int(i) for i in line] for line in LINES]
    return [
        i
        for line in lines
        for i in line
        if board[i] == "." and sum(board[j] == mark for j in line) == 2
    ]


@contract(safe=True)
def kuhn_poker() -> Task:
    """The six deals of Kuhn poker: `deal` "KQ" gives the first seat the king. Worked examples pass
    and bet equally often at every decision."""
    rows = [_row("kuhn_poker", i, deal, deal, deal=deal) for i, deal in enumerate(DEALS)]
    logs = [form.format(card) for card in "JQK" for form in ("{0}", "{0}p", "{0}b", "{0}p{0}pb")]
    examples = [{"prompt": log, "completion": move} for log in logs for move in "pb"]
    return Task("JQKpb", rows, rows, examples, examples)
