"""GSM8K and MATH from files: their data, reward and evaluation.

Nothing is downloaded but by `path="tfds:gsm8k"`.
"""

import functools
from collections.abc import Callable, Sequence

from rljax.contracts import PlainText, contract
from rljax.data.rows import maps, offline_samples
from rljax.data.rows.read import read_rows
from rljax.errors import InputError
from rljax.tasks.task import TEXT, Task

_DATA_SETS = {
    "gsm8k": "hf://datasets/openai/gsm8k",
    "math": "hf://datasets/DigitalLearningGmbH/MATH-lighteval",
}


def _caution(name: str, count: int) -> Callable[[dict], str]:
    """Says of a task without a path that its rows are not the data set."""
    return lambda options: (
        ""
        if options["path"]
        else f"data {name}() without a path is a sample of {count} rows of our own, to try the "
        f"pipeline with. The data set is {_DATA_SETS[name]}, or {name}(path='FOLDER')"
    )


@contract(safe=True, caution=_caution("gsm8k", len(offline_samples.GSM8K)))
def gsm8k(
    *, path: str = "", instruction: PlainText = maps.GSM8K_INSTRUCTION, chat: bool = False
) -> Task:
    """GSM8K: rows of {"question", "answer"}, or verl's columns as they are. Reward: gsm8k().

    `path` is a folder with train and test files, a file name with {split}, or "tfds:gsm8k"; "" is
    a sample of 10 rows of our own, to try the pipeline. `chat` writes prompts as messages.
    """

    mapped = functools.partial(maps.gsm8k, instruction=instruction)
    return _public("gsm8k", path, offline_samples.GSM8K, mapped, "answer", chat, "gsm8k()")


@contract(safe=True, caution=_caution("math", len(offline_samples.MATH)))
def math(
    *, path: str = "", instruction: PlainText = maps.MATH_INSTRUCTION, chat: bool = False
) -> Task:
    r"""MATH: rows of {"problem", "solution"} with the answer in \boxed{}, or verl's columns as they
    are. Reward: boxed(). `path` as in gsm8k; "" is a sample of 8 rows of our own."""

    mapped = functools.partial(maps.math, instruction=instruction)
    return _public("math", path, offline_samples.MATH, mapped, "solution", chat, "boxed()")


def _public(
    name: str,
    path: str,
    sample: Sequence[dict],
    mapped: Callable[[dict, int], dict],
    solution: str,  # the key of extra_info that holds it
    chat: bool,
    reward: str,
) -> Task:
    held_out = len(sample) // 4
    splits = {"train": sample[held_out:], "test": sample[:held_out]}
    records, examples = {}, {}
    for split, rows in splits.items():

        def location(i):
            return f"the sample of {name}: row {i}"

        if path:
            source = read_rows(path, split)
            rows, location = source.rows, source.location
        records[split], examples[split] = [], []
        for index, row in enumerate(rows):
            if "reward_model" in row or "ground_truth" in row:  # prepared before
                records[split].append({"data_source": name, **row})
                continue
            try:
                record = mapped(row, index)
            except InputError as error:
                raise error.within(f"{location(index)} ") from None
            prompt = record["prompt"]
            formatted = [{"role": "user", "content": prompt}] if chat else prompt
            records[split].append({**record, "prompt": formatted, "data_source": name})
            completion = record["extra_info"][solution]
            examples[split].append({"prompt": formatted, "completion": completion})
    return Task(
        TEXT, records["train"], records["test"], examples["train"], examples["test"], reward=reward
    )
