"""What comes to a port that others can reach: no request ends the server, keeps it from the
others, or is answered by anything but JSON."""

import contextlib
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_requests import (
    COMPLETIONS,
    GOOD,
    Hostile,
    answers,
    body_cases,
    exchange,
    field_cases,
    http_cases,
    json_body,
    mixed_cases,
    request,
    vanishing_cases,
)
from processes import wait_until
from tiny_server import NAME, tiny_server
from tiny_tokenizer import write_tokenizer

from rljax.data.text.tokenizer import load_tokenizer

pytest.importorskip("uvicorn")
MB = 2**20
# Refused while they are sent, so that the answer may be lost on the way.
UNREAD = ("small chunks", "long header", "many headers", "long path", "many lines")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def server(tokenizer):
    with tiny_server(tokenizer) as (_, _, worker, address):
        yield worker, int(address.rpartition(":")[2])


def check(case: Hostile, raw: bytes) -> None:
    """Every answer is good, or an error as OpenAI writes them that says what was wrong."""
    for status, headers, body in answers(raw):
        if b"HEAD" == case.raw[:4] or status == 499:
            continue
        assert status < 500 or status == 503, (case.name, status, body[:500])
        kind = headers["content-type"].partition(";")[0]
        if status >= 400:
            assert kind == "application/json", (case.name, status, body[:500])
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, case.name
            assert error["message"] and len(body) < 3000, (case.name, len(body))
        elif kind == "text/event-stream":
            assert body.endswith(b"data: [DONE]\n\n"), case.name
        elif kind == "application/json":
            json.loads(body, parse_constant=pytest.fail)


class Log(logging.Handler):
    """Tracebacks that the server logs."""

    def __init__(self):
        super().__init__()
        self.tracebacks = []

    def emit(self, record):
        if record.exc_info:
            self.tracebacks.append(self.format(record))


@contextlib.contextmanager
def watched(port: int):
    """Tracebacks that are logged while others ask; all along /health answers."""
    done, log = threading.Event(), Log()

    def ask():
        while not done.wait(0.05):
            raw = exchange(port, Hostile("", request("/health", b"", method="GET")))
            assert answers(raw)[0][0] == 200

    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "rljax")]
    for logger in loggers:
        logger.addHandler(log)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            yield log.tracebacks
        finally:
            done.set()
            asking.result()
            for logger in loggers:
                logger.removeHandler(log)


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def attack(server, cases: list[Hostile]) -> None:
    worker, port = server
    good = Hostile("", request(COMPLETIONS, json_body(GOOD[COMPLETIONS] | {"seed": "7"})))

    def choices():
        return json.loads(answers(exchange(port, good))[0][2])["choices"]

    before, memory = choices(), resident_bytes()
    with watched(port) as tracebacks, ThreadPoolExecutor(6) as threads:
        for case, raw in zip(cases, threads.map(lambda c: exchange(port, c), cases), strict=True):
            check(case, raw)
            assert raw or case.hang_up or case.name in UNREAD, case.name
    assert tracebacks == []
    assert resident_bytes() - memory < 500 * MB
    assert choices() == before
    wait_until(lambda: not worker.sampler.pending and not worker._tickets, "the end of all")


def all_cases() -> list[Hostile]:
    cases = [*field_cases(), *mixed_cases(), *body_cases(), *http_cases()]
    return [*cases, *vanishing_cases()]


@pytest.mark.slow
def test_two_thousand_hostile_requests(server):
    cases = all_cases()
    assert len(cases) >= 2000
    attack(server, cases)


def test_hostile_requests(server):
    """Some of each kind of the same."""
    cases = field_cases()[::61] + mixed_cases(30) + body_cases()[::9]
    cases += http_cases()[::9] + vanishing_cases()[::9]
    assert len(cases) > 120
    attack(server, cases)


def test_a_page_that_is_allowed_can_read_the_answer(server, tokenizer):
    from rljax.serving.app import in_background, make_app

    home = "http://localhost:3000"
    ask = {
        "OPTIONS": [f"Origin: {home}", "Access-Control-Request-Method: POST"],
        "POST": [f"Origin: {home}"],
    }
    with in_background(
        make_app(server[0], tokenizer, NAME, origins=[f"{home.upper()}/"])
    ) as address:
        port = int(address.rpartition(":")[2])
        for method, more in ask.items():
            body = json_body(GOOD[COMPLETIONS])
            raw = exchange(port, Hostile("", request(COMPLETIONS, body, method=method, more=more)))
            status, headers, _ = answers(raw)[0]
            assert status == 200 and headers["access-control-allow-origin"] == home
