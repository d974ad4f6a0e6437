"""Repair: a broken program and the test that it fails; after a failed try the policy reads the next
failing test."""

import dataclasses
import functools
import string
from typing import Literal

from rljax.contracts import contract
from rljax.environments.contract import Turn
from rljax.errors import InputError
from rljax.reasoning import answer_of
from rljax.rewards.unit_tests.code_forms import Tests, extract_program, read_tests
from rljax.rewards.unit_tests.code_run import run_tests
from rljax.tasks.task import check_choice


@contract(safe=True)
def repair(
    prompt,
    ground_truth,
    *,
    tries: int = 3,
    around: str = "",
    style: Literal["words", "short"] = "words",
    timeout_s: float = 3.0,
):
    """1 for a program that passes all unit tests of `ground_truth` (the forms of code_tests) within
    `tries` tries, else 0; part first_try: 1 if the first one did.

    A reply is, behind its reasoning, a program, its last fenced block where it has one; with
    `around`, such as "def f(x):\\n    return $line", it is what stands at $line. It runs in the
    sandbox, `timeout_s` seconds for a test. After a try that fails the policy reads the first test
    that did. Raises InputError for another style, and for `around` without $line.
    """
    check_choice("repair", "style", style, "words", "short")
    if around and "$line" not in around:
        fix = "put $line where the line of the program belongs, or leave around out"
        raise InputError("repair(around)", value=around, rule="it says where $line stands", fix=fix)
    tests, observation = read_tests(ground_truth), prompt
    for number in range(tries):
        reply = yield Turn(observation, state=observation)
        text = answer_of(reply).strip()
        program = string.Template(around).safe_substitute(line=text) if around else None
        program = program or extract_program(text)
        failing = first_failure(program, tests, timeout_s)
        if failing is None:
            return {"score": 1.0, "first_try": float(number == 0)}
        observation = described(tests, *failing, style)
    return {"score": 0.0, "first_try": 0.0}


def first_failure(program: str, tests: Tests, timeout_s: float) -> tuple[int, str] | None:
    """Returns (the index of the first test that a program fails, how it fails); None if it passes
    all. `timeout_s` is the limit of one test."""
    key = (tests.inputs, tests.outputs, tests.function, tests.setup, tests.kind, tests.wrapped)
    return _first_failure(program, _Equal(repr(key), tests), timeout_s)


@dataclasses.dataclass(frozen=True)
class _Equal:
    """Tests as a key: equal where their text is, since lists of arguments have no hash."""

    text: str
    tests: Tests = dataclasses.field(compare=False)


# Groups of samples try the same lines: a program is run once on the same tests in each worker.
@functools.lru_cache(maxsize=10_000)
def _first_failure(program: str, tests: _Equal, timeout_s: float) -> tuple[int, str] | None:
    verdicts = run_tests(program, tests.tests, timeout_s=timeout_s, stop_at_failure=True)
    last = verdicts[-1]
    return None if last.status == "passed" else (len(verdicts) - 1, last.message or last.status)


def described(tests: Tests, index: int, message: str, style: str) -> str:
    """The text of a test with its right answer, and in "words" what the program did."""
    if tests.kind == "calls":
        input_text = ", ".join(map(repr, tests.inputs[index]))
        expected = tests.outputs[index]
        expected = repr(expected[0] if tests.wrapped else expected)
        if style == "short":
            return f"{input_text}:{expected}>"
        text = f"{tests.function}({input_text}) should be {expected}"
    elif tests.kind == "stdin":
        input_text, expected = tests.inputs[index].strip(), tests.outputs[index].strip()
        if style == "short":
            return f"{input_text}:{expected}>"
        text = f"for the input\n{input_text}\nit should print\n{expected}"
    else:
        text = tests.inputs[index]
    return f"A test fails: {text}\nIt ended with: {message}\nTry again.\n"
