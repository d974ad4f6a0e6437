"""Unit tests of a program on a SandboxFusion server: the reward `sandbox_fusion`.

What lives here: POST {url}/run_code with a deadline, retries and a cap, and verdicts from what it
answers. What does not: the forms of tests and scores (`code_forms`), our own sandbox (`sandbox`).
The interface: bytedance.github.io/SandboxFusion, as verl and others call it.

    {"code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB"} ->
    {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result": R, "run_result":
    R}, R = null or {"status": "Finished" | "Error" | "TimeLimitExceeded", "execution_time",
    "return_code", "stdout", "stderr"}

Outputs and returned values are compared here, so the server never sees an expected one.
"""

import ast
import contextlib
import http.client
import json
import math
import random
import secrets
import socket
import threading
import time
import urllib.parse
from typing import Literal

from rljax.errors import InputError
from rljax.rewards.code_forms import (
    Tests,
    Verdict,
    extract_program,
    read_tests,
    same_output,
    same_value,
)
from rljax.rewards.code_run import score_parts

_RETRIED = (408, 425, 429)  # and every 5xx
_BACKOFF_S = (0.1, 5.0)  # before the second attempt, doubling, up to
_COMPILE_TIMEOUT_S = 30.0

# Put behind the program: calls its function with the arguments on stdin, prints the value.
_CALL = """
if True:
    import json as _json, sys as _sys
    _function = globals().get({name!r}) or getattr(Solution(), {name!r})
    _value = _function(*_json.loads(_sys.stdin.read()))
    _sys.stdout.write("\\n" + {mark!r} + _json.dumps(_value) + "\\n")
"""


class EndpointError(RuntimeError):
    """A server gave no usable answer in the time and the attempts that it had."""


def post_json(
    url: str,
    body: dict,
    *,
    timeout_s: float,
    attempts: int = 5,
    max_body_bytes: int = 16 << 20,
    headers: dict[str, str] | None = None,
) -> dict:
    """POST a JSON object and return the one that comes back, in `timeout_s` s for all attempts.

    Tried again, each time later: no connection, 408, 425, 429, 5xx, a body that ends early or is no
    JSON object. Retry-After is kept to. Any other status ends it at once. Raises EndpointError.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("an endpoint's url", value=url, rule="it starts with http:// or https://")
    data = json.dumps(body).encode()
    deadline = time.monotonic() + timeout_s
    pause, problem = _BACKOFF_S[0], "no attempt"
    for attempt in range(1, attempts + 1):
        wait = 0.0
        try:
            status, after, raw = _post_once(parts, data, deadline, max_body_bytes, headers or {})
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if status == 200:
                try:
                    answer = json.loads(raw)
                    if isinstance(answer, dict):
                        return answer
                    problem = f"a JSON {type(answer).__name__} instead of an object"
                except (ValueError, RecursionError) as error:
                    problem = f"no JSON: {error}"
            else:
                problem = f"status {status}: {raw[:200].decode(errors='replace')}"
                if status not in _RETRIED and status < 500:
                    break
                wait = after
        left = deadline - time.monotonic()
        wait = max(wait, random.uniform(0.5, 1.0) * pause)
        if attempt == attempts or wait >= left:
            break
        time.sleep(wait)
        pause = min(2 * pause, _BACKOFF_S[1])
    raise EndpointError(f"{url}, {attempt} attempts in {timeout_s} s: {problem}"[:500])


def _post_once(parts, data: bytes, deadline: float, max_body_bytes: int, headers: dict):
    """(status, seconds of Retry-After, body). Raises OSError or HTTPException."""
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    left = max(0.001, deadline - time.monotonic())
    connection = kind[parts.scheme](parts.hostname, parts.port, timeout=left)
    connection.connect()
    sock, passed = connection.sock, threading.Event()  # the connection forgets it, the answer not

    def end():  # a server that sends a byte a second never meets the socket's own timeout
        passed.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        path = parts.path or "/"
        path += f"?{parts.query}" if parts.query else ""
        sent = {"Content-Type": "application/json", "Connection": "close", **headers}
        connection.request("POST", path, data, sent)
        response = connection.getresponse()
        raw = response.read(max_body_bytes + 1)
        if passed.is_set():
            raise TimeoutError("the time is over")
        if len(raw) > max_body_bytes:
            raise http.client.HTTPException(f"a body of more than {max_body_bytes} bytes")
        if response.length:
            raise http.client.IncompleteRead(raw, response.length)
        return response.status, _seconds(response.getheader("Retry-After")), raw
    finally:
        timer.cancel()
        connection.close()


def _seconds(text: str | None) -> float:
    try:
        found = float(text or 0)
    except ValueError:  # a date
        return 0.0
    return found if math.isfinite(found) and found > 0 else 0.0


# -- verdicts


def _run_code(url: str, body: dict, timeout_s: float, attempts: int) -> tuple[str, str, float, str]:
    """(status, stdout, seconds, message); status as of a Verdict, "passed" meaning it ran.
    Raises EndpointError where the server, not the program, is at fault."""
    answer = post_json(url, body, timeout_s=timeout_s, attempts=attempts)
    status = answer.get("status")
    compiled, run = (_result(answer, name) for name in ("compile_result", "run_result"))
    if status not in ("Success", "Failed"):
        raise EndpointError(f"{url}: status {status!r}: {str(answer.get('message'))[:200]}")
    for stage, found in (("compiling", compiled), ("running", run)):
        if found is None:
            continue
        if found["status"] == "TimeLimitExceeded":
            return "timeout", "", found["execution_time"], f"{stage} took too long"
        if found["status"] != "Finished" or found["return_code"] != 0:
            last = found["stderr"].strip().rpartition("\n")[2][:500]
            kind = "memory" if last.startswith("MemoryError") else "error"
            return kind, "", found["execution_time"], last or f"{stage} failed"
    if run is None or status != "Success":
        raise EndpointError(f"{url}: status {status!r} without a result of the run")
    return "passed", run["stdout"], run["execution_time"], ""


def _result(answer: dict, name: str) -> dict | None:
    """One result with the types that it must have."""
    found = answer.get(name)
    if found is None:
        return None
    fields = {"status": str, "execution_time": float, "return_code": int, "stdout": str,
              "stderr": str}  # fmt: skip
    if not isinstance(found, dict):
        raise EndpointError(f"{name} is a {type(found).__name__}")
    out = {}
    for field, kind in fields.items():
        value = found.get(field)
        # The server leaves out what does not apply: no exit code after a timeout.
        value = {"return_code": -1}.get(field, kind()) if value is None else value
        kind = (int, float) if kind is float else kind
        if isinstance(value, bool) or not isinstance(
            value, (int, float) if kind is float else kind
        ):
            raise EndpointError(f"{name}.{field} is {value!r:.100}")
        out[field] = value
    if not math.isfinite(out["execution_time"]):
        raise EndpointError(f"{name}.execution_time is {out['execution_time']}")
    return out


def _as_calls(tests: Tests) -> Tests:
    """Asserts of the form f(literals) == literal as calls. InputError for any other one."""
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
                json.dumps(inputs[-1])
                outputs.append(ast.literal_eval(compared))
            elif not (isinstance(node, ast.Expr) and getattr(node.value, "func", None)):
                raise ValueError
        except (AttributeError, ValueError, TypeError, AssertionError):
            raise InputError(
                "a test cannot be run by sandbox_fusion",
                value=ast.unparse(node),
                rule="there, a test is stdin and stdout, or `assert f(literals) == literal`: any "
                "other would run in the program's own process, which can make it pass",
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


def _verdict(program: str, given, expected, tests: Tests, ask, same) -> Verdict:
    mark = secrets.token_hex(16)
    if tests.kind == "calls":
        program = f"{program}\n{_CALL.format(name=tests.function, mark=mark)}"
        given = json.dumps(given)
    status, stdout, seconds, message = ask(program, given)
    if status != "passed":
        return Verdict(status, seconds, message)
    found: object = stdout
    if tests.kind == "calls":
        try:
            found = json.loads(stdout.rpartition(mark)[2] if mark in stdout else "")
        except (ValueError, RecursionError):
            return Verdict("error", seconds, "the program ended before it answered")
    if same(found, expected):
        return Verdict("passed", seconds)
    return Verdict("failed", seconds, f"wrong: {found!r:.200}")


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
    """As `code_tests`, run by a SandboxFusion server at `url`, in any language that it has.

    Raises EndpointError, so that the sample is masked, where the server gives no usable answer
    within `total_timeout_s` for all tests; `timeout_s` is the program's own time per test.
    Languages but Python take stdin tests only.
    """
    tests = read_tests(ground_truth)
    if language != "python" and tests.kind != "stdin":
        raise InputError("sandbox_fusion: language", value=language, rule="stdin tests only")
    tests = _as_calls(tests) if tests.kind == "asserts" else tests
    prefix = (extra_info or {}).get("prefix", "") if isinstance(extra_info, dict) else ""
    program = extract_program(response, prefix, tests.function, language)
    deadline = time.monotonic() + total_timeout_s
    limits = {"run_timeout": timeout_s, "compile_timeout": _COMPILE_TIMEOUT_S}

    def ask(code: str, stdin: str):
        body = {"code": code, "stdin": stdin, "language": language, "memory_limit_MB": memory_mb}
        left = max(0.0, deadline - time.monotonic())
        return _run_code(f"{url.rstrip('/')}/run_code", body | limits, left, attempts)

    def same(found, expected) -> bool:
        if tests.kind == "calls":
            return same_value(found, expected, float_tolerance)
        return same_output(found, expected, compare, float_tolerance)

    verdicts = [
        _verdict(program, given, expected, tests, ask, same)
        for given, expected in zip(tests.inputs, tests.outputs, strict=True)
    ]
    return score_parts(verdicts, scale)
