"""Unit tests of a program in the sandbox, and the reward that they give.

`run_tests`, one result per test, and the reward `code_tests`. The forms of tests are in
`code_forms`.

No expected output is ever in a process that a response controls:
  stdin    the program gets the input; its output is compared here
  calls    the program gets the arguments and sends a value as plain data; it is compared here
  asserts  the tests run in a sandboxed process of their own; a call in them goes to the program's
           process and comes back as plain data, made of Python's own types
so nothing that a program does to its own process (patching builtins, reading frames, its exit
code, printing "passed") makes a wrong answer right. What that costs: tests may not hand the
program functions, classes or objects of their own (a date, say), catch exception classes that the
program defines, extend its classes, read what a function prints, or use +, <, `in`, `with` or
x[i] = y on an object of the program; such a test is a failed test, whatever the program.
What stays in a program's power: names that a test uses without defining or importing them are the
program's, and two of the program's own objects are equal when the program says so.
What a weak test lets through, here as in any Python: a function may change its arguments, so a test
that works the expected value out of an argument behind the call compares with what the program left
of it (`assert squares(xs) == [x * x for x in xs]` passes for one that empties xs and returns []);
an empty value where every element is compared (`np.allclose(f(x), 9.0)`, `all(...)`, a loop over
what was returned); nan where a difference must not be large (`assert not abs(f(x) - 2) > 1e-6`);
any value of one of two kinds where a test asks for a type, a length or truth alone. Write such
tests with values that are literals, and ask for the length.
"""

import functools
import json
import reprlib
import time
from collections.abc import Sequence
from typing import Literal

from rljax.contracts import Permission, contract
from rljax.errors import InputError
from rljax.rewards.sandbox.process import library_path
from rljax.rewards.sandbox.tiers import Process, ProcessLimits, sandbox_tier
from rljax.rewards.sandbox.values import WireError, encode
from rljax.rewards.unit_tests.code_cases import check_imports
from rljax.rewards.unit_tests.code_forms import (
    CaseResult,
    Compare,
    Scale,
    Tests,
    extract_program,
    has_fence,
    read_tests,
    readings,
    same_output,
    same_value,
    unit_test_score,
)

_LATE = CaseResult("timeout", 0.0, "over the limit of the pool")
_OVER = "the tests before it used up the time of all"
# A test that has less than this left is not begun: starting a program takes a part of it.
_LEAST_S = 0.05
_ANSWER_BYTES = 1 << 20  # bytes of a value, plus 16 times the arguments and the right value
_MOST_OF_NAMES = 1 << 20  # characters of the values that a program's names have


def run_tests(
    program: str,
    tests: Tests,
    *,
    timeout_s: float = 3.0,
    total_timeout_s: float = 8.0,
    memory_mb: int = 1024,
    compare: Compare = "lines",
    float_tolerance: float = 0.0,
    stop_at_failure: bool = False,
    allow_unsafe_execution: Permission = False,
) -> list[CaseResult]:
    """One result per test, in order: each within `timeout_s`, all within `total_timeout_s` seconds.

    A test whose time the others used up is a timeout. With `stop_at_failure` the tests behind the
    first that does not pass are not run, and the list ends there. Raises InputError if this machine
    has no sandbox, and SandboxError if it failed: never the program's fault, so no result.
    """
    for name, value in (("timeout_s", timeout_s), ("total_timeout_s", total_timeout_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InputError(
                f"code tests: {name}",
                value=value,
                fix=f"{name}=10, or another number of seconds above 0",
            )
    if not float_tolerance >= 0:
        raise InputError(
            "code tests: float_tolerance",
            value=float_tolerance,
            fix="float_tolerance=1e-6, or 0 for exact numbers",
        )
    if compare not in ("lines", "tokens", "exact"):
        raise InputError("code tests: compare", value=compare, fix="write lines, tokens or exact")
    tier = sandbox_tier(allow_unsafe_execution)  # before the clock: the first call tries them
    session = _Session(program, tests, tier, timeout_s, total_timeout_s, memory_mb << 20)
    if tests.kind == "stdin":

        def same(output, want):
            return same_output(output, want, compare, float_tolerance)

        return session.run(lambda first: _run_stdin(session, first, same), stop_at_failure)
    if tests.kind == "calls":

        def same(output, want):
            return same_value(output, want, float_tolerance)

        return session.run(lambda first: _run_calls(session, first, same), stop_at_failure)
    check_imports((tests.setup, *tests.inputs), tests.function, library_path())
    return session.run(lambda first: _run_asserts(session, first), stop_at_failure)


class _Session:
    """The tests of one program, and the time that is left for them."""

    def __init__(self, program, tests, tier, timeout_s, total_timeout_s, memory_bytes):
        self.program, self.tests, self.tier = program, tests, tier
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self.deadline = time.monotonic() + total_timeout_s
        self.readings = {"list", "bare"}  # readings in which all tests so far have passed

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def limit(self) -> float:
        """Returns the seconds that the next test may take."""
        return min(self.timeout_s, self.left())

    def limits(self) -> ProcessLimits:
        """Returns the limits of a process that runs one test, or all that are left."""
        wall = max(_LEAST_S, self.limit() if self.tests.kind == "stdin" else self.left())
        return ProcessLimits(timeout_s=wall, cpu_s=wall + 1.0, memory_bytes=self.memory_bytes)

    def run(self, run_from, stop_at_failure: bool) -> list[CaseResult]:
        """Returns the results of all tests. `run_from(first)` yields results from test `first` on,
        and ends when its process does."""
        results: list[CaseResult] = []
        while len(results) < len(self.tests):
            if self.left() < _LEAST_S:
                missing = len(self.tests) - len(results)
                return results + [CaseResult("timeout", 0.0, _OVER)] * missing
            for result in run_from(len(results)):
                results.append(result)
                if stop_at_failure and result.status != "passed":
                    return results
                if self.left() < _LEAST_S:
                    break
        return results


def _run_stdin(session: _Session, first: int, same):
    tests = session.tests
    header = {"mode": "script", "source": session.program, "judge": True}
    with Process(header, session.limits(), session.tier, stdin=tests.inputs[first]) as process:
        result = process.wait()
    if result.status != "ok":
        yield CaseResult(result.status, result.seconds, result.message)
        return
    output = result.stdout.decode(errors="replace")
    if same(output, tests.outputs[first]):
        yield CaseResult("passed", result.seconds)
    else:
        yield CaseResult("failed", result.seconds, f"wrong output: {output[:200]!r}")


# -- a program that answers


def _ended(process: Process, seconds: float) -> CaseResult:
    """Returns the result of a program that ended, or was ended, instead of answering."""
    result = process.wait()
    if result.status == "ok":
        return CaseResult("error", seconds, "the program ended before it answered")
    if result.status == "timeout":
        return CaseResult("timeout", seconds, "over the limit of time")
    return CaseResult(result.status, seconds, result.message)


def _load(process: Process, deadline: float) -> dict | str | None:
    """Returns the names of a program that has run to its end, the text of what it raised,
    or None if it ended."""
    reply = process.receive(deadline)
    if reply is None:
        return None
    if isinstance(reply.get("loaded"), dict):
        return reply["loaded"]
    return str(reply.get("text", "the program said nothing"))[:500]


def _raised(text: str, seconds: float) -> CaseResult:
    return CaseResult("memory" if text.startswith("MemoryError") else "error", seconds, text)


def _run_calls(session: _Session, first: int, same):
    tests, name = session.tests, session.tests.function
    header = {"mode": "calls", "source": session.program, "names": [name], "judge": True}
    began = time.monotonic()
    with Process(header, session.limits(), session.tier) as process:
        deadline = time.monotonic() + session.limit()
        names = _load(process, deadline)
        if not isinstance(names, dict) or name not in names:
            missing = f"NameError: the program defines no {name}"
            failure = _ended(process, time.monotonic() - began) if names is None else None
            failure = failure or _raised(missing if isinstance(names, dict) else names, 0.0)
            # Each test runs the program anew, so each would end like this one.
            yield from [failure] * (len(tests) - first)
            return
        for arguments, expected in zip(tests.inputs[first:], tests.outputs[first:], strict=True):
            answer = _call(process, names[name], arguments, expected, deadline)
            seconds = time.monotonic() - began
            if answer is None:
                yield _ended(process, seconds)
                return
            yield _judge(session, answer, expected, seconds, same)
            began = time.monotonic()
            deadline = began + session.limit()


def _call(
    process: Process, function: object, values: Sequence, expected: object, deadline: float
) -> dict | None:
    try:
        target = function["v"][0]
    except (TypeError, KeyError, IndexError):
        return {"raised": "TypeError", "text": "TypeError: it is not callable"}
    arguments = [encode(value) for value in values]
    process.send({"do": "call", "target": target, "args": arguments, "kwargs": {}})
    # A value that is far larger than the right one is not read: that would take our time.
    most_bytes = _ANSWER_BYTES + 16 * len(json.dumps([arguments, encode(expected)]))
    return process.receive(deadline, most_bytes)


def _judge(session: _Session, answer: dict, expected: object, seconds: float, same) -> CaseResult:
    if "value" not in answer:
        return _raised(str(answer.get("text"))[:500], seconds)
    value = answer["value"]
    matching = readings(session.tests, value, expected, same)
    if matching & session.readings:
        session.readings &= matching
        return CaseResult("passed", seconds)
    return CaseResult("failed", seconds, f"wrong: {reprlib.repr(value)}")


# -- tests that run in a process of their own


def _run_asserts(session: _Session, first: int):
    tests = session.tests
    header = {"mode": "calls", "source": session.program, "names": tests.names}
    header["judge"] = "Solution" in tests.names  # LeetCode's form; HumanEval's and MBPP's import
    began = time.monotonic()
    with Process(header, session.limits(), session.tier) as program:
        deadline = time.monotonic() + session.limit()
        names = _load(program, deadline)
        if not isinstance(names, dict):
            failure = _ended(program, time.monotonic() - began) if names is None else None
            failure = failure or _raised(names, time.monotonic() - began)
            yield from [failure] * (len(tests) - first)
            return
        units = [{"source": source} for source in tests.inputs[first:]]
        if tests.setup.strip():
            units.insert(0, {"source": tests.setup, "setup": True})
        # A program that answers by itself may send more: `all`, say, which is Python's.
        names = {name: value for name, value in names.items() if name in tests.names}
        if len(json.dumps(names)) > _MOST_OF_NAMES:
            yield from [_raised("its names hold too much", 0.0)] * (len(tests) - first)
            return
        header = {"mode": "check", "units": units, "names": names, "modules": tests.modules}
        with Process(header, session.limits(), session.tier) as checker:
            deadline = time.monotonic() + session.limit()  # its start is not the program's time
            for unit in units:
                result = _relay(checker, program, deadline, began)
                if unit.get("setup") and result.status == "passed":
                    continue
                yield result
                if unit.get("setup") or checker.ended or program.ended:
                    return
                began = time.monotonic()
                deadline = began + session.limit()


def _relay(checker: Process, program: Process, deadline: float, began: float) -> CaseResult:
    """Carries requests of the tests to the program, and its answers back, until one
    test has its result."""
    while True:
        request = checker.receive(deadline)
        if request is None:
            return _ended(checker, time.monotonic() - began)
        if "verdict" in request:
            seconds = time.monotonic() - began
            return CaseResult(request["verdict"], seconds, request["text"])
        program.send(request)
        answer = program.receive(deadline)
        if answer is None:
            return _ended(program, time.monotonic() - began)
        try:
            checker.send(answer)
        except WireError as error:  # it grew when it was written anew
            program.kill("error", f"a value that cannot be sent: {error}")
            return _ended(program, time.monotonic() - began)


# -- the reward


def _tier(allow_unsafe_execution: bool) -> dict[str, str]:
    """Tries the sandbox and returns its tier. Without a sandbox nothing can be scored, so the pool
    raises InputError when it is made, not sample by sample."""
    return {"sandbox_tier": sandbox_tier(allow_unsafe_execution)}


@contract(
    safe=True,
    reads="answer",
    prepare=lambda options: functools.partial(_tier, options["allow_unsafe_execution"]),
    rubrics=False,
    on_timeout=lambda options: score_parts([_LATE], options["scale"]),
    truth="specification",
)
def code_tests(
    response: str,
    ground_truth: str,
    extra_info: dict | None = None,
    *,
    scale: Literal["signed", "binary", "fraction"] = "signed",
    timeout_s: float = 3.0,
    total_timeout_s: float = 8.0,
    memory_mb: int = 1024,
    compare: Literal["lines", "tokens", "exact"] = "lines",
    float_tolerance: float = 0.0,
    fenced: bool = False,
    allow_unsafe_execution: Permission = False,
) -> dict:
    """The unit tests of ground_truth on the program of a response: signed +1 if all pass, else -1;
    binary 1 or 0; fraction the share that passes.

    Parts: pass_rate, and the numbers tests, tests_passed, tests_failed, tests_error,
    tests_timeout, tests_limit (memory, output, killed). A program that does not run, or not in
    time, fails its tests: that is a score. A sandbox or a ground truth that is at fault raises: no
    score. `total_timeout_s` must be below the pool's own limit per sample.
    rljax.rewards.unit_tests.code_forms documents the forms of ground_truth. extra_info["prefix"]
    goes before a program that only completes it. `fenced`: a response without a ``` fence holds no
    program and fails its tests, and the part extracted says whether there is one.
    """
    tests = read_tests(ground_truth)
    if fenced and not has_fence(response):
        missing = [CaseResult("failed", 0.0, "no fenced program")] * len(tests)
        return {**score_parts(missing, scale), "extracted": 0.0}
    prefix = (extra_info or {}).get("prefix", "") if isinstance(extra_info, dict) else ""
    program = extract_program(response, prefix, tests.function)
    results = run_tests(
        program,
        tests,
        timeout_s=timeout_s,
        total_timeout_s=total_timeout_s,
        memory_mb=memory_mb,
        compare=compare,
        float_tolerance=float_tolerance,
        allow_unsafe_execution=allow_unsafe_execution,
    )
    return score_parts(results, scale) | ({"extracted": 1.0} if fenced else {})


def score_parts(results: Sequence[CaseResult], scale: Scale) -> dict[str, float]:
    """A score and its numeric parts, from the results of one program. Raises InputError
    without results."""
    passed = [result.status == "passed" for result in results]
    score = unit_test_score(passed, scale)
    counts = {name: 0.0 for name in ("passed", "failed", "error", "timeout", "limit")}
    for result in results:
        counts[result.status if result.status in counts else "limit"] += 1.0
    return {
        "score": score,
        "pass_rate": sum(passed) / len(passed),
        "tests": float(len(passed)),
        **{f"tests_{name}": count for name, count in counts.items()},
    }
