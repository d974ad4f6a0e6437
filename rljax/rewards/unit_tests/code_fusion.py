"""Unit tests of a program on a SandboxFusion server: the reward `sandbox_fusion`.

Sends POST {url}/run_code and reads results from the answer; our own sandbox is `code_run`. The
interface: bytedance.github.io/SandboxFusion, as verl and others call it.

    {"code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB"} ->
    {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result": R, "run_result":
    R}, R = null or {"status": "Finished" | "Error" | "TimeLimitExceeded", "execution_time",
    "return_code", "stdout", "stderr"}

Outputs and returned values are compared here, so the server never sees an expected one.
"""

import ast
import dataclasses
import functools
import json
import math
import secrets
import time
from typing import Literal

from rljax.contracts import contract
from rljax.errors import InputError
from rljax.rewards.judges.endpoint import EndpointError, post_json
from rljax.rewards.sandbox.values import encode
from rljax.rewards.unit_tests.code_forms import (
    CaseResult,
    Tests,
    extract_program,
    read_tests,
    readings,
    same_output,
    same_value,
)
from rljax.rewards.unit_tests.code_run import score_parts

_MAX_BODY_BYTES = 16 << 20
_COMPILE_TIMEOUT_S = 30.0

# Put behind the program: calls its function with the arguments on stdin, prints the value.
_CALL = """
if True:
    import ast as _ast, json as _json, sys as _sys
    _function = globals().get({name!r}) or getattr(Solution(), {name!r})
    _value = _function(*{read}(_sys.stdin.read()))
    _sys.stdout.write("\\n" + {mark!r} + _json.dumps(_value) + "\\n")
"""


# -- results


def _run_code(url: str, body: dict, timeout_s: float, attempts: int) -> tuple[str, str, float, str]:
    """Returns (status, stdout, seconds, message); the status is that of a CaseResult, where
    "passed" means that the program ran. Raises EndpointError if the server, not the
    program, is at fault."""
    if timeout_s <= 0:
        raise EndpointError("timeout", "the tests before it used up the time of all")
    answer = post_json(
        url, body, timeout_s=timeout_s, attempts=attempts, max_body_bytes=_MAX_BODY_BYTES
    )
    status = answer.get("status")
    compiled, run = (_result(answer, name) for name in ("compile_result", "run_result"))
    if status not in ("Success", "Failed"):
        raise EndpointError(
            "malformed", f"{url}: status {status!r}: {str(answer.get('message'))[:200]}"
        )
    for stage, stage_result in (("compiling", compiled), ("running", run)):
        if stage_result is None:
            continue
        if stage_result["status"] == "TimeLimitExceeded":
            return "timeout", "", stage_result["execution_time"], f"{stage} took too long"
        if stage_result["status"] != "Finished" or stage_result["return_code"] != 0:
            last = stage_result["stderr"].strip().rpartition("\n")[2][:500]
            kind = "memory" if last.startswith("MemoryError") else "error"
            return kind, "", stage_result["execution_time"], last or f"{stage} failed"
    if run is None or status != "Success":
        raise EndpointError("malformed", f"{url}: status {status!r} without a result of the run")
    return "passed", run["stdout"], run["execution_time"], ""


def _result(answer: dict, name: str) -> dict | None:
    """Returns one result, after a check of its types."""
    part = answer.get(name)
    if part is None:
        return None
    fields = {
        "status": str,
        "execution_time": float,
        "return_code": int,
        "stdout": str,
        "stderr": str,
    }
    if not isinstance(part, dict):
        raise EndpointError("malformed", f"{name} is a {type(part).__name__}")
    out = {}
    for field, kind in fields.items():
        value = part.get(field)
        # The server leaves out what does not apply: no exit code after a timeout.
        value = {"return_code": -1}.get(field, kind()) if value is None else value
        kind = (int, float) if kind is float else kind
        if isinstance(value, bool) or not isinstance(
            value, (int, float) if kind is float else kind
        ):
            raise EndpointError("malformed", f"{name}.{field} is {value!r:.100}")
        out[field] = value
    if not math.isfinite(out["execution_time"]):
        raise EndpointError("malformed", f"{name}.execution_time is {out['execution_time']}")
    return out


def _as_calls(tests: Tests) -> Tests:
    """Returns asserts of the form f(literals) == literal as calls. Raises
    InputError for any other one."""
    statements: list[ast.stmt] = []
    for source in tests.inputs:
        for node in ast.parse(source).body:
            check = isinstance(node, ast.FunctionDef) and node.name == "check"
            statements += node.body if check else [node]
    inputs, outputs, names = [], [], set()
    for node in statements:
        try:
            if isinstance(node, ast.Assert):
                (compared,) = node.test.comparators
                assert isinstance(node.test.ops[0], ast.Eq) and not node.test.left.keywords
                names.add(node.test.left.func.id)
                inputs.append([ast.literal_eval(value) for value in node.test.left.args])
                outputs.append(ast.literal_eval(compared))
                json.dumps(outputs[-1])  # a set, say, would never be equal to what comes back
            elif not (isinstance(node, ast.Expr) and getattr(node.value, "func", None)):
                raise ValueError
        except (AttributeError, ValueError, TypeError, AssertionError):
            raise InputError(
                "a test cannot be run by sandbox_fusion",
                value=ast.unparse(node),
                rule="there, a test is stdin and stdout, or `assert f(literals) == literal` with a "
                "value that JSON has: any other would run in the program's own process, which can "
                "make it pass",
                fix="score with code_tests, whose sandbox keeps the two apart",
            ) from None
    called = sorted(names - {tests.function, "candidate"})
    name = tests.function or (called[0] if called else "")
    if not name or set(called) - {name} or tests.setup.strip():
        raise InputError(
            "sandbox_fusion: tests of several functions or of none, or with a setup",
            value=called,
            fix="score with code_tests",
        )
    return Tests("calls", tuple(inputs), tuple(outputs), name)


def _case_result(
    program: str, arguments, expected, tests: Tests, literal: bool, ask, same
) -> CaseResult:
    mark = secrets.token_hex(16)
    if tests.kind == "calls":
        # Arguments of an assert are Python's own: tuples, sets, keys that are numbers.
        reader, write = ("_ast.literal_eval", repr) if literal else ("_json.loads", json.dumps)
        program = f"{program}\n{_CALL.format(name=tests.function, mark=mark, read=reader)}"
        arguments = write(arguments)
    status, stdout, seconds, message = ask(program, arguments)
    if status != "passed":
        return CaseResult(status, seconds, message)
    value: object = stdout
    if tests.kind == "calls":
        try:
            value = json.loads(stdout.rpartition(mark)[2] if mark in stdout else "")
        except (ValueError, RecursionError):
            return CaseResult("error", seconds, "the program ended before it answered")
    if same(value, expected):
        return CaseResult("passed", seconds)
    return CaseResult("failed", seconds, f"wrong: {value!r:.200}")


@contract(reads="answer", rubrics=False, truth="specification", asks="server")
def sandbox_fusion(
    response: str,
    ground_truth: str,
    extra_info: dict | None = None,
    *,
    url: str,
    language: str = "python",
    scale: Literal["signed", "binary", "fraction"] = "signed",
    timeout_s: float = 3.0,
    total_timeout_s: float = 8.0,
    memory_mb: int = 1024,
    attempts: int = 5,
    compare: Literal["lines", "tokens", "exact"] = "lines",
    float_tolerance: float = 0.0,
) -> dict:
    """`code_tests`, run by a SandboxFusion server at `url`, in any language that it has.

    Raises EndpointError, so that the sample is masked, where the server gives no usable answer
    within `total_timeout_s` for all tests; `timeout_s` is the program's own time per test.
    Languages but Python take stdin tests only. Raises InputError for a ground truth without tests,
    or with tests that the server cannot run.
    """
    tests = read_tests(ground_truth)
    if language != "python" and tests.kind != "stdin":
        raise InputError(
            "sandbox_fusion: language",
            value=language,
            rule="stdin tests only",
            fix="language='python', or rows with stdin tests",
        )
    literal = tests.kind == "asserts"
    tests = _as_calls(tests) if literal else tests
    tests = dataclasses.replace(tests, wrapped=False) if literal else tests
    prefix = (extra_info or {}).get("prefix", "") if isinstance(extra_info, dict) else ""
    program = extract_program(response, prefix, tests.function, language)
    deadline = time.monotonic() + total_timeout_s
    limits = {"run_timeout": timeout_s, "compile_timeout": _COMPILE_TIMEOUT_S}

    def ask(code: str, stdin: str):
        body = {"code": code, "stdin": stdin, "language": language, "memory_limit_MB": memory_mb}
        remaining_s = max(0.0, deadline - time.monotonic())
        return _run_code(f"{url.rstrip('/')}/run_code", body | limits, remaining_s, attempts)

    open_readings = {"list", "bare"}  # readings in which all tests so far have passed

    def same(value, expected) -> bool:
        if tests.kind != "calls":
            return same_output(value, expected, compare, float_tolerance)
        compared = functools.partial(same_value, tolerance=float_tolerance)
        matching = readings(tests, encode(value), expected, compared) & open_readings
        if matching:
            open_readings.intersection_update(matching)
        return bool(matching)

    results = [
        _case_result(program, arguments, expected, tests, literal, ask, same)
        for arguments, expected in zip(tests.inputs, tests.outputs, strict=True)
    ]
    return score_parts(results, scale)
