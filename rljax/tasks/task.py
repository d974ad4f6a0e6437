"""`Task`, and `procedural`, which makes one from a generator of problems."""

import dataclasses
import random
import string
from collections.abc import Callable, Sequence

from rljax.data.online.stream import Stream
from rljax.errors import InputError

# Printable ASCII and the line break: what prompts in English and their answers use.
TEXT = string.digits + string.ascii_letters + string.punctuation + " \n"
_FAR = 2**60  # between the numbers of two attempts at an item: no stream is as long
_ATTEMPTS = 1000  # draws in a row that may be refused before the generator is held to be too small


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, reward and evaluation.

    Rows hold prompt, ground_truth and maybe data_source and extra_info; `train` may be a `Stream`.
    """

    alphabet: str  # every character that prompts and answers use: the tiny tokenizer's vocabulary
    train: Sequence[dict] | Stream
    test: Sequence[dict]
    worked_examples: Sequence[dict] = ()  # prompt, completion: drawn from the train split
    worked_test: Sequence[dict] = ()  # the same of the test split: for a held-out loss
    reward: str = "exact_match()"  # a reward of rljax.rewards, or a dotted name
    # By which a held-out answer is right (a score of at least evaluate.correct_at); "" = reward.
    evaluation: str = ""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One drawn problem. `completion` is a right answer, "" if none is known."""

    prompt: str
    ground_truth: str
    completion: str


def check_range(
    task: str, option: str, value: float, low: float, high: float, why: str = ""
) -> None:
    """Raises InputError unless low <= value <= high."""
    if not low <= value <= high:
        rule, fix = f"{low} to {high}{why}", f"set {option} to a number of this range"
        raise InputError(f"{task}({option})", value=value, rule=rule, fix=fix)


def check_choice(task: str, option: str, value: str, *known: str) -> None:
    """Raises InputError unless the value is one of those known."""
    if value not in known:
        raise InputError(f"{task}({option})", value=value, fix=f"write {' or '.join(known)}")


def procedural(
    name: str,
    draw: Callable[[random.Random], Problem] | None = None,
    *,
    numbered: Callable[[str, int], Problem] | None = None,
    reward: str,
    evaluation: str = "",
    alphabet: str = TEXT,
    chat: bool = False,
    prompts: int = 0,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """The task whose problems `draw` makes from a random generator, or `numbered` from a split and
    a whole number.

    `test` distinct prompts are drawn first, and what equals one of them is never trained on.
    `prompts` 0 is an endless stream; else so many are drawn and repeated ones dropped. Item i of a
    split is a function of (name, seed, split, i). `chat` writes prompts as messages. Raises
    InputError for an option outside of its range, and if `draw` finds too few distinct prompts.
    """
    _check_counts(name, prompts, test, worked_examples)

    def seeded(split: str, number: int) -> Problem:
        # A text as the seed is hashed by sha512: equal in every Python and process.
        return draw(random.Random(f"{name}/{seed}/{split}/{number}"))

    make = numbered or seeded
    held_out: dict[str, Problem] = {}
    for index in range(test):
        problem = _fresh(name, make, "test", index, held_out)
        held_out[problem.prompt] = problem

    def train_problem(index: int) -> Problem:
        return _fresh(name, make, "train", index, held_out)

    def row(problem: Problem, index: int) -> dict:
        prompt, truth = _written(problem.prompt, chat), problem.ground_truth
        return dict(prompt=prompt, ground_truth=truth, data_source=name, extra_info={}, index=index)

    if prompts:
        problems = list({p.prompt: p for p in map(train_problem, range(prompts))}.values())
        train = [row(p, i) for i, p in enumerate(problems)]
    else:
        problems = [train_problem(i) for i in range(worked_examples)]
        train = Stream(lambda index: row(train_problem(index), index))
    return Task(
        alphabet=alphabet,
        train=train,
        test=[row(p, i) for i, p in enumerate(held_out.values())],
        worked_examples=_demonstrations(problems[:worked_examples], chat),
        worked_test=_demonstrations(held_out.values(), chat),
        reward=reward,
        evaluation=evaluation,
    )


def _check_counts(name: str, prompts: int, test: int, worked_examples: int) -> None:
    limits = (("prompts", prompts, 0), ("test", test, 1), ("worked_examples", worked_examples, 0))
    for option, value, low in limits:
        if value < low:
            raise InputError(
                f"{name}({option})", value=value, fix=f"set {option} to at least {low}"
            )


def _fresh(name: str, make: Callable, split: str, index: int, held_out: dict) -> Problem:
    """Returns item `index` of a split, whose prompt is not held out."""
    for attempt in range(_ATTEMPTS):
        problem = make(split, index + attempt * _FAR)
        if problem.prompt not in held_out:
            return problem
    raise InputError(
        f"{name}: no new prompt in {_ATTEMPTS} draws",
        value=f"{len(held_out)} prompts are held out",
        rule="held-out prompts are distinct, and never trained on",
        fix="lower test, or make the problems larger",
    )


def _written(prompt: str, chat: bool) -> str | list[dict]:
    return [{"role": "user", "content": prompt}] if chat else prompt


def _demonstrations(problems, chat: bool) -> list[dict]:
    return [
        {"prompt": _written(p.prompt, chat), "completion": p.completion}
        for p in problems
        if p.completion
    ]
