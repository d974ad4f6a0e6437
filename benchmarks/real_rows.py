"""Rows and reward that the benchmarks of a real model share.

python benchmarks/real_rows.py FOLDER   writes sums_train.jsonl and sums_test.jsonl there

Imports neither rljax nor JAX when it is read: the processes of the peers and of the reward read it,
too.
"""

import functools
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

APART = 1_000_003  # rows between the beginnings of two seeds, as in rljax's streams


def sums() -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows): sums of two numbers of two digits, as chat messages."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rows = []
    for a, b in pairs[:2200]:
        prompt = f"What is {a} + {b}? Reply with the number only."
        rows.append({"prompt": [{"role": "user", "content": prompt}], "ground_truth": str(a + b)})
    return rows[:2000], rows[2000:]


def last_number(response: str, ground_truth: str) -> float:
    """1 if the last number of the response is the ground truth."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def write_rows(path: Path, rows: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@functools.cache
def read_rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


@functools.cache
def _order(count: int, number: int) -> list[int]:
    order = list(range(count))
    random.Random(f"pass {number}").shuffle(order)
    return order


def row_at(rows: Sequence[dict], index: int) -> dict:
    """Row `index` of an endless series: the rows in an order of their own for each pass."""
    pass_number, position = divmod(index, len(rows))
    return rows[_order(len(rows), pass_number)[position]]


def rows_of_seed(path: str, seed: int, count: int) -> list[dict]:
    """The first `count` rows of a seed, those that `task` gives a run of rljax with this seed."""
    rows = read_rows(path)
    return [row_at(rows, seed * APART + i) for i in range(count)]


def task(path: str, reward: str):
    """The rows of a file as a stream of rljax, which takes them in the order of `rows_of_seed`."""
    from rljax.tasks import Stream, Task
    from rljax.tasks.task import TEXT

    rows = read_rows(path)
    return Task(TEXT, Stream(lambda index: row_at(rows, index)), rows[:1], reward=reward)


def reward_function(text: str) -> Callable[[str, str], float]:
    """The function that "FILE.py:NAME" names."""
    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), sums(), strict=True):
        write_rows(folder / f"sums_{name}.jsonl", rows)


if __name__ == "__main__":
    main()
