"""The generators of reasoning-gym by name (the extra `[tasks]`).

Problems and their difficulty, with train and test disjoint; the scores are rljax.rewards.text.gym.
The library takes seconds to import, so it is imported only when the task is named.
"""

import dataclasses
import functools
import hashlib

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.text.gym import is_answer, load_library, packed
from rljax.suggest import near_names
from rljax.tasks.task import TEXT, Problem, Task, procedural

# Items that share one of the library's data sets: some of them are drawn when it is built.
_CHUNK = 256


@contract(safe=True)
def reasoning_gym(
    *,
    name: PlainText,
    difficulty: int = -1,
    size: int = 0,
    test: int = 32,
    worked_examples: int = 16,
    chat: bool = False,
    seed: int = 0,
    **options,
) -> Task:
    """One of reasoning-gym's data sets, scored by its own score_answer.

    `difficulty` 0, 1, 2, ... is the level of its curriculum: every attribute at that level, or at
    its last one; -1 = the data set's defaults. `options` are fields of its config, and win. `size`
    0 is an endless stream, exactly repeatable but for codeio, whose programs draw random numbers
    of their own. Reward: reasoning_gym_score(), evaluation the same: the answer between
    <answer> and </answer>.
    """
    settings = (name, difficulty, size, test, worked_examples, chat, seed)
    return _made(*settings, tuple(sorted(options.items())))


@functools.lru_cache(maxsize=4)
def _made(name, difficulty, size, test, worked_examples, chat, seed, options) -> Task:
    """Returns the task, cached: a run makes it several times, and some generators take half a
    second for an item."""
    config = _config(name, difficulty, dict(options))

    def numbered(split: str, number: int) -> Problem:
        chunk, index = divmod(number, _CHUNK)
        text = f"{seed}/{split}/{chunk}".encode()
        chunk_seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1
        entry = _dataset(name, tuple(sorted(config.items())), chunk_seed)[index]
        answer = entry["answer"]
        # An answer such as Integral(x*cos(x), x) is none: the reward refuses it.
        has_answer = isinstance(answer, str) and answer and is_answer(name, answer)
        return Problem(
            f"{entry['question']}\n\nWrite the final answer between <answer> and </answer>.\n",
            packed(name, config, entry),
            f"<answer>{answer}</answer>" if has_answer else "",
        )

    sizes = dict(prompts=size, test=test, worked_examples=worked_examples)
    scores = dict(reward="reasoning_gym_score()", chat=chat)
    task = procedural(f"reasoning_gym/{name}", numbered=numbered, **scores, **sizes)
    samples = [*task.worked_examples, *task.worked_test, *task.test]
    characters = {c for row in samples for text in row.values() for c in str(text)}
    return dataclasses.replace(task, alphabet=TEXT + "".join(sorted(characters - {*TEXT})))


@functools.lru_cache(maxsize=4)
def _dataset(name: str, config: tuple, seed: int):
    library = load_library()
    return library.create_dataset(name, seed=seed, size=_CHUNK, **dict(config))


def _config(name: str, difficulty: int, options: dict) -> dict:
    """The fields of the data set's config that differ from its defaults. Raises InputError."""
    load_library()
    from reasoning_gym.factory import CURRICULA, DATASETS

    if name == "composite":
        rule = "it mixes other data sets"
        fix = "mix tasks with data.sources and data.weights"
        raise InputError("reasoning_gym(name)", value=name, rule=rule, fix=fix)
    if name not in DATASETS:
        close = " or ".join(near_names(name, DATASETS, 3))
        fix = f"did you mean {close}?" if close else f"use one of {', '.join(sorted(DATASETS))}"
        raise InputError("reasoning-gym has no such data set", value=name, fix=fix)
    kind = DATASETS[name][1]
    fields = [f.name for f in dataclasses.fields(kind) if f.name not in ("seed", "size")]
    for option in options:
        if option not in fields:
            close = near_names(option, fields, 1)
            raise InputError(
                f"reasoning_gym(name={name!r}) has no option {option!r}",
                rule=f"its config has {', '.join(fields)}",
                fix=f"did you mean {close[0]!r}?" if close else "remove it",
            )
    chosen = {}
    if difficulty >= 0:
        if name not in CURRICULA:
            rule = f"{name} has no curriculum"
            fix = f"set its options instead: {', '.join(fields)}"
            raise InputError("reasoning_gym(difficulty)", value=difficulty, rule=rule, fix=fix)
        curriculum = CURRICULA[name]()
        levels = max((len(a.levels) for a in curriculum.attributes.values()), default=1)
        if difficulty >= levels:
            rule = f"{name} has levels 0 to {levels - 1}, of {', '.join(curriculum.attributes)}"
            fix = f"difficulty={levels - 1} or lower, or leave it out"
            raise InputError("reasoning_gym(difficulty)", value=difficulty, rule=rule, fix=fix)
        curriculum.set_global_level(difficulty)
        config = curriculum.generate_configuration({})
        defaults, values = vars(kind()), vars(config)
        chosen = {f: _hashable(values[f]) for f in fields if values[f] != defaults[f]}
    elif difficulty != -1:
        rule = "-1, or from 0 on"
        fix = "leave difficulty out (-1), or set it to 0 or more"
        raise InputError("reasoning_gym(difficulty)", value=difficulty, rule=rule, fix=fix)
    chosen |= options
    try:
        config = kind(**chosen)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, ValueError, TypeError) as error:
        raise InputError(
            f"reasoning_gym(name={name!r}) refuses its options",
            value=chosen,
            rule=str(error) or type(error).__name__,
            fix="change the options",
        ) from None
    return chosen


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
