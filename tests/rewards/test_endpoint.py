"""The client of chat endpoints against a server on this machine that does whatever servers do."""

import contextlib
import email.utils
import json
import math
import os
import threading
import time
import types

import pytest
from judge_server import closed_port, completion, raw_server, reset, serving, skip_waits
from processes import wait_until

from rljax.errors import InputError
from rljax.rewards.judges import endpoint_state
from rljax.rewards.judges.endpoint import EndpointError, chat, post_json, strict_json
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout.scoring.report import error_kind

GOOD = completion('{"score": 5}')
MESSAGES = [{"role": "user", "content": "?"}]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


# -- the table of faults: each is (what a server does, what becomes of the sample) -----------------


def always(status=200, found=GOOD, **headers):
    return lambda request, n: (status, headers, found)


def first(times, status, **headers):
    """That status so many times, and then an answer."""
    return lambda request, n: (status, headers, {}) if n < times else (200, {}, GOOD)


def trickle(connection, over, start=b"", byte=b" "):
    """A byte every 50 ms, for ever."""
    connection.sendall(start)
    while not over.wait(0.05):
        connection.sendall(byte)


def flood(connection, over, start, piece):
    """As fast as it is read, for ever."""
    connection.sendall(start)
    while not over.is_set():
        connection.sendall(piece)


def say(*parts, then=None):
    def talk(connection, over):
        for part in parts:
            connection.sendall(part)
        if then:
            time.sleep(0.05)
            then(connection)

    return talk


def verdict(text):
    return always(found=completion(text))


MEGABYTE = b" " * (1 << 20)
SERVED = {
    "an answer": (always(), "ok"),
    "two 429, then an answer": (first(2, 429, **{"Retry-After": "0.1"}), "ok"),
    "two 503, then an answer": (first(2, 503), "ok"),
    "408, then an answer": (first(1, 408), "ok"),
    "one bad verdict, then an answer": (
        lambda r, n: (200, {}, GOOD if n else completion("I would say 5")),
        "ok",
    ),
    "429 for ever": (always(429, {}), "rate_limited"),
    "429 until tomorrow": (always(429, {}, **{"Retry-After": "86400"}), "rate_limited"),
    "500 for ever": (always(500, {}), "server_error"),
    "400": (always(400, {"error": "no such field"}), "rejected"),
    "401": (always(401, {}), "rejected"),
    "404": (always(404, b"not here"), "rejected"),
    "a redirect": (always(302, {}, Location="http://127.0.0.1:1/v1"), "rejected"),
    "truncated JSON": (always(found=json.dumps(GOOD)[:-7].encode()), "malformed"),
    "NaN in the answer": (always(found=b'{"choices": NaN}'), "malformed"),
    "a list": (always(found=[]), "malformed"),
    "no choices": (always(found={"choices": []}), "malformed"),
    "choices of another type": (always(found={"choices": "abc"}), "malformed"),
    "content null": (always(found=completion(None)), "malformed"),
    "content a number": (always(found=completion(5)), "malformed"),
    "bytes that are no UTF-8": (always(found=b'{"choices": "\xff\xfe"}'), "malformed"),
    "brackets 100,000 deep": (always(found=b"[" * 100_000), "malformed"),
    "HTML": (always(found=b"<html>down for maintenance</html>"), "malformed"),
    "cut at max_tokens": (
        always(found=completion('{"score": 5}', finish_reason="length")),
        "verdict",
    ),
    "a score of NaN": (verdict('{"score": NaN}'), "verdict"),
    "an infinite score": (verdict('{"score": 1e999}'), "verdict"),
    "a score too high": (verdict('{"score": 11}'), "verdict"),
    "a score below 0": (verdict('{"score": -0.1}'), "verdict"),
    "a score as text": (verdict('{"score": "5"}'), "verdict"),
    "a score that is true": (verdict('{"score": true}'), "verdict"),
    "no score": (verdict('{"grade": 5}'), "verdict"),
    "two scores": (verdict('{"score": 5, "score": 10}'), "verdict"),
    "a score of 5,000 digits": (verdict('{"score": ' + "1" * 5000 + "}"), "verdict"),
    "a lone surrogate": (verdict('{"score": "\ud800"}'), "verdict"),
    "an empty answer": (verdict(""), "verdict"),
    "100 MB, announced": (always(found=b"{}", **{"Content-Length": str(100 << 20)}), "too_large"),
}
RAW = {
    "silence": (lambda connection, over: over.wait(), "timeout"),
    "slow loris in the status": (lambda c, o: trickle(c, o, b"HTTP/1.1 200 "), "timeout"),
    "slow loris in the headers": (lambda c, o: trickle(c, o, HEAD + b"X-A: "), "timeout"),
    "slow loris in the body": (
        lambda c, o: trickle(c, o, HEAD + b"Content-Length: 9999\r\n\r\n{"),
        "timeout",
    ),
    "100 Continue for ever": (
        lambda c, o: trickle(c, o, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        "timeout",
    ),
    "100 MB, not announced": (say(HEAD + b"\r\n", *[MEGABYTE] * 100), "too_large"),
    "chunks without end": (
        lambda c, o: flood(
            c, o, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + MEGABYTE + b"\r\n"
        ),
        "too_large",
    ),
    "headers without end": (lambda c, o: flood(c, o, HEAD, b"X-A: b\r\n"), "malformed"),
    "a header without end": (lambda c, o: flood(c, o, HEAD + b"X-A: ", b"b" * 999), "malformed"),
    "no HTTP": (say(b"\x00\xff\xfe garbage \xf0\x9f\r\n\r\n"), "malformed"),
    "a body cut off": (say(HEAD + b"Content-Length: 500\r\n\r\n{"), "unreachable"),
    "a chunk cut off": (say(HEAD + b"Transfer-Encoding: chunked\r\n\r\n500\r\n{"), "unreachable"),
    "closed without a word": (say(), "unreachable"),
    "reset at once": (say(then=reset), "unreachable"),
    "reset in mid-body": (say(HEAD + b"Content-Length: 50\r\n\r\n{", then=reset), "unreachable"),
}


def elsewhere(servers: dict[str, str], timeout_s: float) -> dict:
    """The score of a sample for each server, none of which costs a worker."""
    text = f"judges.elsewhere(timeout_s={timeout_s})"
    with RewardPool(text, workers=4, timeout_s=timeout_s + 300.0) as pool:
        before = {worker.process.pid for worker in pool._supervisor.workers}
        scores = pool.score(
            [{"response": "r", "prompt": "p", "extra_info": url} for url in servers.values()]
        )
        assert {worker.process.pid for worker in pool._supervisor.workers} == before
    return dict(zip(servers, scores, strict=True))


def test_every_fault_ends_with_its_kind_and_no_worker_is_lost():
    """Those that would go on for ever end at the deadline, the others long before theirs."""
    wanted = {}
    with contextlib.ExitStack() as stack:
        for name, (answer, kind) in SERVED.items():
            wanted[name] = kind, stack.enter_context(serving(answer)).base_url
        for name, (talk, kind) in RAW.items():
            wanted[name] = kind, stack.enter_context(raw_server(talk))
        wanted["refused"] = "unreachable", f"http://127.0.0.1:{closed_port()}/v1"
        endless = {name: url for name, (kind, url) in wanted.items() if kind == "timeout"}
        others = {name: url for name, (kind, url) in wanted.items() if kind != "timeout"}
        scores = elsewhere(endless, 1.0) | elsewhere(others, 300.0)
    found = {n: "ok" if s.status == "ok" else error_kind(s.message) for n, s in scores.items()}
    assert found == {name: kind for name, (kind, _) in wanted.items()}
    assert {s.status for s in scores.values()} == {"ok", "error"}
    for name, score in scores.items():
        assert score.value == 0.5 if score.status == "ok" else math.isnan(score.value), name


@pytest.mark.slow
def test_two_hundred_samples_of_which_a_fifth_fail():
    """The fault is a function of the sample, so every count is known."""
    faults = ((500, {}, {}), (400, {}, {}), (200, {}, b"{"), (200, {}, completion('{"score": 99}')))

    def answer(request, n):
        number = int(request["messages"][0]["content"].split("sample ")[1].split('"')[0])
        if number % 5 == 0:
            return faults[number // 5 % 4]
        return 200, {}, completion(json.dumps({"score": number % 11}))

    with serving(answer) as server:
        url = server.base_url
        text = f"judge(base_url={url!r}, model='m', attempts=2)"
        with RewardPool(text, workers=4) as pool:
            scores = pool.score([{"response": f"sample {i}", "prompt": ""} for i in range(200)])
    for i, score in enumerate(scores):
        assert (score.status == "error") == (i % 5 == 0), (i, score)
        if score.status == "ok":
            assert score.value == i % 11 / 10
    kinds = [error_kind(s.message) for s in scores if s.status != "ok"]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "server_error": 10,
        "rejected": 10,
        "malformed": 10,
        "verdict": 10,
    }
    assert len(server.requests) == 160 + 10 + 3 * 10 * 2  # 400 is not asked again, the others once


def test_as_many_requests_in_flight_as_workers_and_never_more():
    """The first three wait for each other: with fewer at once, none would be answered."""
    three = threading.Barrier(3)

    def answer(request, n):
        if n < 3:
            three.wait()
        return 200, {}, GOOD

    with serving(answer) as server:
        text = f"judge(base_url={server.base_url!r}, model='m', timeout_s=60.0)"
        with RewardPool(text, workers=3, timeout_s=70.0) as pool:
            scores = pool.score([{"response": str(i), "prompt": ""} for i in range(30)])
    assert {s.value for s in scores} == {0.5} and server.most_at_once == 3


# -- one request --


def ask(base_url, **options):
    return chat(MESSAGES, base_url=base_url, model="m", **{"timeout_s": 60.0, **options})


def test_what_is_final_is_asked_once_and_what_is_not_as_often_as_allowed():
    for status, times in (
        (400, 1),
        (401, 1),
        (403, 1),
        (404, 1),
        (422, 1),
        (301, 1),
        (409, 2),
        (429, 2),
        (500, 2),
        (502, 2),
        (504, 2),
    ):
        with serving(always(status, {})) as server:
            with pytest.raises(EndpointError, match=f"HTTP {status}"):
                post_json(f"{server.base_url}/x", {}, attempts=2, timeout_s=60.0)
            assert len(server.requests) == times, status


def test_a_redirect_is_not_followed():
    with serving(always()) as other:
        there = f"{other.base_url}/chat/completions"
        with serving(always(307, {}, Location=there)) as server:
            with pytest.raises(EndpointError, match="redirects are not followed"):
                ask(server.base_url)
        assert other.requests == []


@pytest.fixture
def waits(monkeypatch):
    return skip_waits(monkeypatch)


def test_the_server_says_how_long_to_wait(waits):
    def in_an_hour():
        return email.utils.formatdate(time.time() + 3600, usegmt=True)

    for wait, least, most in ((lambda: "400", 400, 401), (in_an_hour, 3000, 3601)):
        waits.clear()

        def answer(request, n, wait=wait):
            return (429, {"Retry-After": wait()}, {}) if n == 0 else (200, {}, GOOD)

        with serving(answer) as server:
            assert ask(server.base_url, timeout_s=10_000.0)
        (waited,) = waits
        assert least <= waited <= most
    waits.clear()
    with serving(always(503, {}, **{"Retry-After": "600"})) as server:
        with pytest.raises(EndpointError, match="no time is left after 1"):
            ask(server.base_url, timeout_s=300.0)
        assert waits == [] and len(server.requests) == 1  # not waited for: it could not help


def test_the_deadline_is_that_of_all_attempts_together(waits):
    with serving(always(500, {})) as server:
        with pytest.raises(EndpointError, match="no time is left after") as error:
            post_json(f"{server.base_url}/x", {}, attempts=1000, timeout_s=100.0)
        assert 80 < sum(waits) < 100  # the longest wait is 8 s
        assert f"after {len(server.requests)})" in str(error.value)
        assert len(server.requests) == len(waits) + 1


def test_the_key_is_sent_and_never_shown(monkeypatch):
    key = "sk-very-secret-123"
    monkeypatch.setenv("JUDGE_KEY", key)
    echo = {"error": f"Incorrect API key provided: {key}"}
    with serving(always(401, echo)) as server:
        with pytest.raises(EndpointError, match="Incorrect API key provided") as found:
            ask(server.base_url, api_key_env="JUDGE_KEY")
        assert server.headers[0]["Authorization"] == f"Bearer {key}"
        assert key not in str(found.value) and "***" in str(found.value)
        with pytest.raises(EndpointError, match="'NO_SUCH_KEY' is not set"):
            ask(server.base_url, api_key_env="NO_SUCH_KEY")
        assert "Authorization" not in server.headers[1]
    with serving(always(found=f'{{"{key}": 1, "{key}": 2}}'.encode())) as server:
        with pytest.raises(EndpointError, match="malformed") as found:
            ask(server.base_url, api_key_env="JUDGE_KEY", attempts=1)
        assert key not in str(found.value)
    with serving(verdict(f"the key is {key}")) as server:
        text = (
            f"judge(base_url={server.base_url!r}, model='m', attempts=1, api_key_env='JUDGE_KEY')"
        )
        with RewardPool(text, workers=1) as pool:
            (score,) = pool.score([{"response": "r", "prompt": "p"}])
        assert "verdict: " in score.message and key not in score.message
        assert server.headers[0]["Authorization"] == f"Bearer {key}"
    for bad in ("sk-\nX-Admin: 1", "sk-\u20ac"):
        monkeypatch.setenv("JUDGE_KEY", bad)
        with pytest.raises(InputError, match="Authorization") as found:
            ask("http://127.0.0.1:1/v1", api_key_env="JUDGE_KEY")
        assert "sk-" not in str(found.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://a/v1",
        "http:///v1",
        "http://a:b@h/v1",
        "http://h:99999/v1",
        "http://h/v1 x",
        "http://h\r\nX: 1/v1",
    ],
)
def test_an_address_that_is_none(url):
    with pytest.raises(InputError, match="address"):
        ask(url)


def test_what_the_request_holds():
    with serving(always()) as server:
        ask(f"{server.base_url}/")
        ask(server.base_url, body='{"max_tokens": null, "max_completion_tokens": 9, "seed": 1}')
        ask(server.base_url, schema={"type": "object"})
        post_json(f"{server.base_url}/x?y=1", {"z": "\ud800 \u20ac"})
    plain, merged, formed, posted = server.requests
    assert plain == {
        "path": "/v1/chat/completions",
        "model": "m",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 1024,
    }
    assert "max_tokens" not in merged and merged["max_completion_tokens"] == 9
    assert formed["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert posted == {"path": "/v1/x?y=1", "z": "\ud800 \u20ac"}
    for body in ("[1]", "{", '{"a": NaN}'):
        with pytest.raises(InputError, match="body"):
            ask(server.base_url, body=body)
    for wrong in ({"timeout_s": 0}, {"timeout_s": math.nan}, {"attempts": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            ask(server.base_url, **wrong)


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", "1e400", '{"a":1,"a":1}', "{", "", b"\xff", b"[1]x"]
)
def test_json_is_the_standards(text):
    with pytest.raises(ValueError):
        strict_json(text)
    assert strict_json('{"a": [1, 2.5, null, "NaN"]}') == {"a": [1, 2.5, None, "NaN"]}


# -- the cache --


def test_answers_are_kept_for_other_processes_and_runs(tmp_path):
    def answer(request, n):
        said = request["messages"][0]["content"]
        return 200, {}, completion("nonsense" if "bad" in said else json.dumps({"score": 4}))

    samples = [{"response": f"r{i}", "prompt": ""} for i in range(12)]
    with serving(answer) as server:
        options = f"base_url={server.base_url!r}, model='m', cache={str(tmp_path)!r}, attempts=1"
        for total in (12, 12):  # another pool: other processes
            with RewardPool(f"judge({options})", workers=2) as pool:
                assert {s.value for s in pool.score(samples)} == {0.4}
            assert len(server.requests) == total
        with RewardPool(f"judge({options}, scale=5)", workers=1) as pool:
            assert pool.score(samples[:1])[0].value == 0.8  # another question
            assert len(server.requests) == 13
            for _ in range(2):  # what was no verdict is not kept
                assert pool.score([{"response": "bad", "prompt": ""}])[0].status == "error"
            assert len(server.requests) == 15
        warm = f"""judge({options}, body='{{"temperature": 1}}')"""
        with RewardPool(warm, workers=1) as pool:
            pool.score(samples[:1] * 2)
            assert len(server.requests) == 17  # chance is not kept
    files = [p for p in tmp_path.rglob("*.json") if not p.name.startswith("breaker")]
    assert len(files) == 13 and list(tmp_path.rglob("*.half")) == []


def test_a_damaged_answer_in_the_cache_is_asked_for_again(tmp_path):
    with serving(always()) as server:
        ask(server.base_url, cache=str(tmp_path))
        (kept,) = [p for p in tmp_path.rglob("*.json") if not p.name.startswith("breaker")]
        for damage in ("", '{"text": 5', "{}", "[]"):
            kept.write_text(damage)
            ask(server.base_url, cache=str(tmp_path))
        assert len(server.requests) == 5
        ask(server.base_url, cache=str(tmp_path))
        assert len(server.requests) == 5
    blocked = tmp_path / "file"
    blocked.write_text("")
    with serving(always()) as server, pytest.raises(InputError, match="cannot be written"):
        ask(server.base_url, cache=str(blocked))


# -- the circuit breaker --


@pytest.mark.parametrize("shared", [False, True])
def test_an_endpoint_that_is_down_is_left_alone_for_a_while(tmp_path, monkeypatch, shared):
    broken, now = threading.Event(), [1e9]
    broken.set()
    clock = types.SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr(endpoint_state, "time", clock)

    def answer(request, n):
        return (500, {}, {}) if broken.is_set() else (200, {}, GOOD)

    options = dict(breaker_failures=3, breaker_s=1.5, attempts=1, timeout_s=60.0)
    options["cache"] = str(tmp_path) if shared else ""
    with serving(answer) as server:

        def kind():
            try:
                # Another question each time: the cache is not what this is about.
                return chat(
                    [{"role": "user", "content": os.urandom(8).hex()}],
                    base_url=server.base_url,
                    model="m",
                    **options,
                )
            except EndpointError as error:
                return error.kind

        assert [kind() for _ in range(5)] == ["server_error"] * 3 + ["circuit_open"] * 2
        now[0] += 1.4
        assert kind() == "circuit_open"
        assert len(server.requests) == 3
        now[0] += 0.2
        assert [kind() for _ in range(2)] == ["server_error", "circuit_open"]  # one probe
        now[0] += 1.6
        broken.clear()
        assert [kind() for _ in range(3)] == ['{"score": 5}'] * 3
        assert len(server.requests) == 7
        broken.set()
        assert kind() == "server_error"
        broken.clear()
        assert kind() == '{"score": 5}'  # not in a row
        broken.set()
        assert [kind() for _ in range(4)] == ["server_error"] * 3 + ["circuit_open"]


def test_half_open_lets_one_call_through(tmp_path):
    hold = threading.Event()

    def answer(request, n):
        if n == 0:
            return 500, {}, {}
        hold.wait()
        return 200, {}, GOOD

    options = dict(breaker_failures=1, breaker_s=0.2, attempts=1, timeout_s=60.0)
    with serving(answer) as server:
        with pytest.raises(EndpointError, match="server_error"):
            ask(server.base_url, **options)
        time.sleep(0.3)
        probe = threading.Thread(target=ask, args=(server.base_url,), kwargs=options)
        probe.start()
        wait_until(lambda: len(server.requests) == 2, "the probe")
        with pytest.raises(EndpointError, match="another call is trying"):
            ask(server.base_url, **options)
        hold.set()
        probe.join()
        assert ask(server.base_url, **options) == '{"score": 5}'


def test_what_says_nothing_of_the_endpoint_does_not_open_the_breaker():
    with serving(lambda r, n: (400, {}, {}) if n % 2 else (200, {}, b"{")) as server:
        for _ in range(6):
            with pytest.raises(EndpointError, match="rejected|malformed"):
                ask(server.base_url, breaker_failures=2, attempts=1)
        assert len(server.requests) == 6


def test_workers_that_name_a_folder_share_the_breaker(tmp_path):
    """24 calls by three processes: without sharing each would have to find out by itself."""
    with serving(always(500, {})) as server:
        text = (
            f"judge(base_url={server.base_url!r}, model='m', attempts=1, cache={str(tmp_path)!r})"
        )
        with RewardPool(text, workers=3) as pool:
            scores = pool.score([{"response": str(i), "prompt": ""} for i in range(40)])
    kinds = [error_kind(s.message) for s in scores]
    assert set(kinds) == {"server_error", "circuit_open"}
    assert 8 <= kinds.count("server_error") <= 10  # the eighth opens it; two may be in flight
