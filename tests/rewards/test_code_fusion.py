"""The SandboxFusion client against a local server that runs programs, and one that fails."""

import http.server
import json
import threading

import pytest
from judge_server import skip_waits

from rljax.errors import InputError
from rljax.rewards import sandbox_fusion
from rljax.rewards.pool.pool import RewardPool
from rljax.rewards.sandbox.tiers import ProcessLimits, run_program, sandbox_tier

IO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def run_code(body: dict) -> dict:
    """As the server does it: program -> status, result of the run."""
    assert body["language"] == "python" and body["memory_limit_MB"] > 0
    limits = ProcessLimits(
        timeout_s=body["run_timeout"], memory_bytes=body["memory_limit_MB"] << 20
    )
    result = run_program(body["code"], body["stdin"], limits=limits)
    over = result.status == "timeout"
    run = {
        "status": "TimeLimitExceeded" if over else "Finished",
        "execution_time": result.seconds,
        "return_code": None if over else result.exit_code,
        "stdout": result.stdout.decode(),
        "stderr": result.stderr.decode(),
    }
    status = "Success" if result.status == "ok" else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": run}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if callable(fault):
            return fault(self)
        if isinstance(fault, dict):
            return self.answer(200, json.dumps(fault).encode())
        if isinstance(fault, int):
            return self.answer(fault, b"busy")
        assert self.path == "/v1/run_code"
        return self.answer(200, json.dumps(run_code(body)).encode())

    def answer(self, status: int, data: bytes, length: int | None = None, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # a client that hangs up is part of the tests


@pytest.fixture
def server():
    try:
        sandbox_tier()
    except InputError as error:
        pytest.skip(str(error))
    with Server(("127.0.0.1", 0), Handler) as made:
        made.seen, made.faults = [], []
        made.url = f"http://127.0.0.1:{made.server_port}/v1/"
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def score(server, response, tests, **options):
    options = {"timeout_s": 60.0, "total_timeout_s": 300.0, **options}
    return sandbox_fusion(response, json.dumps(tests), url=server.url, **options)


# -- programs


@pytest.mark.parametrize(
    "program, tests, expected, part",
    [
        (ADD, IO, 1, "tests_passed"),
        ("print(3)", IO, -1, "tests_failed"),
        ("1 / 0", IO, -1, "tests_error"),
        ("while True: pass", {"inputs": ["1"], "outputs": ["1"]}, -1, "tests_timeout"),
        ("raise MemoryError", IO, -1, "tests_limit"),
        (
            "def f(a, b): return a + b",
            {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"},
            1,
            "tests_passed",
        ),
        (
            "class Solution:\n    def f(self, a): return (a, 'x')",
            {"inputs": [[1]], "outputs": [[1, "x"]], "fn_name": "f"},
            1,
            "tests_passed",
        ),
        ("def f(a): return a", ["assert f(1) == 1", "assert f([2]) == [2]"], 1, "tests_passed"),
        (
            "def f(a): return a",
            {"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"},
            -1,
            "tests_failed",
        ),
        ("import os\nos._exit(0)", ["assert f(1) == 1"], -1, "tests_error"),
        (
            "class Any(int):\n    def __eq__(self, o): return True\ndef f(a): return Any(9)",
            ["assert f(1) == 1"],
            -1,
            "tests_failed",
        ),
        ("def f(a): return object()", ["assert f(1) == 1"], -1, "tests_error"),
        ("def f(a, b): return b[a]", ["assert f((1, 2), {(1, 2): 3}) == 3"], 1, "tests_passed"),
        (
            "def f(a): return 3",
            {"inputs": [[1]], "outputs": [[3]], "fn_name": "f"},
            1,
            "tests_passed",
        ),
        ("def f(a): return 3", ["assert f(1) == [3]"], -1, "tests_failed"),
    ],
)
def test_programs_are_scored_by_the_server(server, program, tests, expected, part):
    limit_s = 2.0 if part == "tests_timeout" else 60.0
    parts = score(server, f"```python\n{program}\n```", tests, timeout_s=limit_s)
    assert parts["score"] == expected and parts[part] >= 1, parts
    sent = [body for path, body in server.seen]
    assert all(body["run_timeout"] == limit_s and body["language"] == "python" for body in sent)
    if "outputs" in tests:  # no expected output goes to the server
        assert all(
            set(body)
            == {"code", "stdin", "language", "run_timeout", "compile_timeout", "memory_limit_MB"}
            for body in sent
        )


@pytest.mark.parametrize(
    "tests",
    [
        ["assert abs(f(1) - 1) < 1e-6"],
        ["x = 1\nassert f(x) == 1"],
        ["assert f(1)"],
        {"asserts": ["assert f(1) == 1"], "setup": "import math"},
        ["assert f(1) == {1, 2}"],
        ["assert f(1) == 1", "assert g(1) == 1"],
        ["assert f(f(1)) == 1"],
    ],
)
def test_asserts_that_would_run_beside_the_program_are_refused(server, tests):
    with pytest.raises(InputError, match="sandbox_fusion"):
        score(server, "def f(a): return a", tests)
    assert server.seen == []


def test_other_languages_take_stdin_tests(server):
    done = {
        "status": "Finished",
        "execution_time": 0.1,
        "return_code": 0,
        "stdout": "7",
        "stderr": "",
    }
    compiled = {"status": "Success", "compile_result": {**done, "stdout": None}, "run_result": done}
    failed = {"status": "Failed", "compile_result": {**done, "return_code": 1}, "run_result": None}
    server.faults[:] = [compiled, failed]
    tests = {"inputs": ["", ""], "outputs": ["7", "7"]}
    parts = score(server, "```cpp\nint main(){}\n```\n```python\nno\n```", tests, language="cpp")
    assert parts["pass_rate"] == 0.5 and parts["tests_error"] == 1
    assert server.seen[0][1]["code"] == "int main(){}\n"
    with pytest.raises(InputError, match="stdin tests only"):
        score(server, "x", ["assert f(1) == 1"], language="cpp")


# -- faults


def cut(handler):
    handler.answer(200, b'{"status": "Succ', length=1000)


def close(handler):
    handler.close_connection = True
    handler.connection.close()


GOOD = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "3", "stderr": ""}


@pytest.mark.parametrize(
    "faults",
    [
        [429, 429, 503],
        [500, 502, 504],
        [cut],
        [close, close],
        [lambda handler: handler.answer(200, b"[1]")],
        [lambda handler: handler.answer(200, b"{")],
    ],
)
def test_a_burst_of_faults_passes(server, faults):
    server.faults[:] = faults
    assert score(server, ADD, IO)["score"] == 1.0
    assert len(server.seen) == 2 + len(faults)


def test_each_attempt_waits_longer(server, monkeypatch):
    waits = skip_waits(monkeypatch)
    server.faults[:] = [503] * 4
    score(server, ADD, {"inputs": ["1 2"], "outputs": ["3"]})
    longest = [0.25, 0.5, 1.0, 2.0]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))


def test_retry_after_is_kept(server, monkeypatch):
    waits = skip_waits(monkeypatch)
    server.faults[:] = [lambda handler: handler.answer(429, b"", Retry_After="100")]
    score(server, ADD, {"inputs": ["1 2"], "outputs": ["3"]})
    (wait,) = waits
    assert 100 <= wait <= 101


NO_ANSWERS = (
    {},
    {"status": "SandboxError", "message": "no pod"},
    {"status": "Success", "run_result": None},
    {"status": "Success", "run_result": "Finished"},
    {"status": "Success", "run_result": {**GOOD, "stdout": 3}},
    {"status": "Success", "run_result": {**GOOD, "return_code": "0"}},
    {"status": "Success", "run_result": {**GOOD, "return_code": True}},
    {"status": "Success", "run_result": {**GOOD, "execution_time": float("nan")}},
    {"status": "Failed", "run_result": GOOD},
)


def test_an_answer_that_says_nothing_of_the_program_is_no_score(server):
    with RewardPool(f"sandbox_fusion(url={server.url!r})", workers=1) as pool:
        for answer in NO_ANSWERS:
            server.faults[:] = [answer] * 9
            (found,) = pool.score([{"response": ADD, "ground_truth": json.dumps(IO)}])
            assert found.status == "error" and "EndpointError" in found.message, (answer, found)


def test_exhausted_attempts_are_an_error_and_never_a_zero(server):
    server.faults[:] = [503] * 99
    reward = f"sandbox_fusion(url={server.url!r}, attempts=2, scale='binary')"
    with RewardPool(reward, workers=2) as pool:
        found = pool.score([{"response": ADD, "ground_truth": json.dumps(IO)}] * 3)
        assert {one.status for one in found} == {"error"}
        assert all("after 2" in one.message and "503" in one.message for one in found)
        server.faults.clear()
        found = pool.score([{"response": ADD, "ground_truth": json.dumps(IO)}] * 8)
    assert [one.value for one in found] == [1.0] * 8
