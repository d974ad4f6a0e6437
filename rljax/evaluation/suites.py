r"""Benchmarks as data: the prompts, extractors and sampling that their papers and public harnesses
use. `rljax evaluate --suite="gsm8k(shots=8),math500"`.

A suite is a function that returns a `Suite`; one of your own is named by its module or file,
`"my_suites.py:my_suite(data='rows.jsonl')"`. Each function of this module is a suite, `data` is any
spec that rljax reads: a file, a folder, hf://datasets/OWNER/NAME. docs/guides/evaluation.md lists
the sources of every prompt and extractor.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from rljax.contracts import PlainText, contract
from rljax.data.rows import maps
from rljax.evaluation import suite_rows as rows

STOP = ("Question:",)  # where a base model begins a question of its own
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark: its questions, and how an answer is scored.

    data, split: where the rows are. record: a row -> {"prompt": text or messages, "ground_truth":
    ...} and the columns that `by` names, or None to leave it out; it raises InputError for a row
    that it cannot read. columns: what a row must have, for that error.
    reward: a reward function as text; an answer is right where the score is at least 1.
    samples of each prompt at `temperature` (0: the greedy response alone) and `top_p`; `stop`:
    texts that end a response and do not belong to it. timeout_s: seconds to score one response.
    answer: extracts from a response what maj@k votes on, None where it has none; None: no maj@k.
    parts: further parts of the score that are averaged, each with the part that weighs a response,
    "" where all weigh the same. by: columns whose values have metrics of their own.
    """

    data: str
    record: Callable[[dict], dict | None]
    reward: str
    columns: tuple[str, ...]
    split: str = "test"
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_response_tokens: int = 2048
    stop: tuple[str, ...] = ()
    timeout_s: float = 10.0
    answer: Callable[[str], str | None] | None = None
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by: tuple[str, ...] = ()


@contract(safe=True)
def gsm8k(
    *,
    data: str = "hf://datasets/openai/gsm8k/main",
    shots: int = 0,
    exemplars: str = "",
    instruction: PlainText = maps.GSM8K_INSTRUCTION,
) -> Suite:
    """GSM8K (Cobbe et al. 2021): the number behind `####`, compared as text without commas.

    shots=0: the question and the instruction, as a chat. shots=8: so many solved questions of the
    training split, or of the file `exemplars`, before "Question: ... Answer:", as text.
    """
    columns = ("question", "answer")
    solved = rows.exemplars(data, exemplars, "train", shots, columns)
    record = functools.partial(rows.gsm8k, instruction=instruction, solved=solved)
    settings = dict(max_response_tokens=1024, stop=STOP if shots else (), answer=rows.marked_answer)
    return Suite(data, record, "gsm8k(method='strict')", columns, **settings)


@contract(safe=True)
def math500(
    *, data: str = "hf://datasets/HuggingFaceH4/MATH-500", instruction: PlainText = BOXED
) -> Suite:
    r"""MATH-500 (Lightman et al. 2023): `\boxed{}`, compared as mathematics. By subject, level."""
    record = functools.partial(rows.boxed, instruction=instruction)
    settings = dict(max_response_tokens=4096, answer=rows.boxed_answer, by=("subject", "level"))
    return Suite(data, record, "math_verify(extraction='boxed')", ("problem", "answer"), **settings)


@contract(safe=True)
def aime24(*, data: str = "hf://datasets/math-ai/aime24", instruction: PlainText = BOXED) -> Suite:
    r"""AIME 2024, 30 problems: an integer from 0 to 999 in `\boxed{}`, avg@32."""
    return _aime(data, instruction)


@contract(safe=True)
def aime25(*, data: str = "hf://datasets/math-ai/aime25", instruction: PlainText = BOXED) -> Suite:
    """AIME 2025, 30 problems, as aime24."""
    return _aime(data, instruction)


def _aime(data: str, instruction: str) -> Suite:
    record = functools.partial(rows.aime, instruction=instruction)
    sampling = dict(samples=32, temperature=0.6, top_p=0.95, max_response_tokens=32768)
    settings = dict(answer=rows.boxed_answer, **sampling)
    return Suite(data, record, "integer_answer(low=0, high=999)", ("problem", "answer"), **settings)


@contract(safe=True)
def mmlu_pro(
    *, data: str = "hf://datasets/TIGER-Lab/MMLU-Pro", shots: int = 0, exemplars: str = ""
) -> Suite:
    """MMLU-Pro (Wang et al. 2024): up to ten choices, "the answer is (X)". By category.

    shots=5, as published: solved questions of the same category from the validation split, or from
    the file `exemplars`, as text; shots=0: the same instruction and question, as a chat.
    """
    columns = ("question", "options", "answer", "category")
    solved = rows.exemplars(data, exemplars, "validation", shots, columns, by="category")
    record = functools.partial(rows.mmlu_pro, solved=solved)
    settings = dict(max_response_tokens=2048, stop=STOP if shots else (), by=("category",))
    return Suite(data, record, "mmlu_pro()", columns, **settings)


@contract(safe=True)
def ifeval(*, data: str = "hf://datasets/google/IFEval/train") -> Suite:
    """IFEval (Zhou et al. 2023): 25 kinds of instructions, strict and loose, by prompt and by
    instruction."""
    parts = {"prompt_loose": ""}
    parts |= dict.fromkeys(("instruction_strict", "instruction_loose"), "instructions")
    columns, settings = ("prompt", "instruction_id_list", "kwargs"), dict(max_response_tokens=1280)
    return Suite(data, rows.ifeval, "instruction_following()", columns, parts=parts, **settings)


@contract(safe=True)
def livecodebench(
    *,
    data: str = "hf://datasets/livecodebench/code_generation_lite/test*.jsonl",
    start: PlainText = "",
    end: PlainText = "",
) -> Suite:
    """LiveCodeBench (Jain et al. 2024): programs run on stdin or as functions against all public
    and private tests; 10 samples at temperature 0.2. By difficulty.

    `start`, `end`: the first and the last day of the contests, such as "2024-08-01".
    """
    for name, day in (("start", start), ("end", end)):
        rows.check_day(name, day)
    record = functools.partial(rows.livecodebench, start=start, end=end)
    reward = (
        "code_tests(scale='binary', timeout_s=6.0, total_timeout_s=110.0, memory_mb=4096, "
        "float_tolerance=1e-12, fenced=True)"
    )
    sampling = dict(samples=10, temperature=0.2, top_p=0.95, max_response_tokens=2000)
    settings = dict(timeout_s=120.0, by=("difficulty",), **sampling)
    return Suite(data, record, reward, ("question_content", "public_test_cases"), **settings)
