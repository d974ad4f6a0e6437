"""Connections whose clients do not do their part, before an application of five lines, and who
may ask at all."""

import asyncio
import collections
import functools
import json
import logging
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hostile_requests import Hostile, answers, exchange, mutated_cases

pytest.importorskip("uvicorn")
from rljax.serving.app import in_background
from rljax.serving.connections import CHUNK_LINES, ConnectionLimits, connections_for
from rljax.serving.guard import Guard

HANG_S = 120  # of a machine that does other work too
QUICK = ConnectionLimits(headers_s=0.3, body_s=0.3, write_s=0.3, shutdown_s=0.3)
STEADY = ConnectionLimits(headers_s=2.0, body_s=HANG_S, write_s=HANG_S, shutdown_s=0.3)
PATIENT = ConnectionLimits(connections=3, headers_s=HANG_S)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n\r\n"


class Counting:
    """Answers with the size of the body; on /long with more than any buffer holds."""

    def __init__(self):
        self.ended = threading.Event()

    async def __call__(self, scope, receive, send):
        try:
            size, more = 0, True
            while more:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
            # What follows a good answer to CONNECT would be no HTTP.
            status = 405 if scope["method"] == "CONNECT" else 200
            await send({"type": "http.response.start", "status": status, "headers": []})
            if scope["path"] == "/wait":
                await asyncio.sleep(3600)
            for _ in range(2000 if scope["path"] == "/long" else 0):
                await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
            await send({"type": "http.response.body", "body": b"%d" % size})
        finally:
            self.ended.set()


@pytest.fixture(scope="module")
def quick():
    with in_background(Counting(), limits=QUICK) as address:
        yield int(address.rpartition(":")[2])


@pytest.fixture(scope="module")
def steady():
    """Ends what never comes, and waits for what does."""
    with in_background(Counting(), limits=STEADY) as address:
        yield int(address.rpartition(":")[2])


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)


def read_all(connection: socket.socket) -> bytes:
    raw = b""
    while part := connection.recv(65536):
        raw += part
    return raw


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\n",
        GET,
        GET + b"X: ",
        GET + b"\r\n" + GET,
        GET + b"Content-Length: 9\r\n\r\nx",
        CHUNKED + b"\r\n",
        CHUNKED + b"\r\n8\r\nx",
        CHUNKED + b"\r\n1\r\nx\r\n0\r\n",
        b"HEAD" + GET[3:] + b"Content-Length: 9\r\n\r\n",
    ],
)
@pytest.mark.parametrize("drips", [False, True])
def test_half_a_request_is_not_waited_for(quick, begun, drips):
    """Whatever part is missing, and also where a byte comes now and then."""
    with connect(quick) as connection:
        connection.sendall(begun)
        end = threading.Event()

        def drip():
            while drips and not end.wait(0.05):
                try:
                    connection.sendall(b"x" if b"\r\n\r\n" in begun else b"y: \r\n")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            raw = read_all(connection)
        except ConnectionResetError:
            raw = b""  # closed over what still came
        finally:
            end.set()
            thread.join()
    *_, (status, _, body) = answers(raw) or [(408, {}, b"")]
    assert status in (400, 408)  # 400: what dripped is no chunk
    if body:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_nothing_is_logged_of_requests_with_some_bytes_changed(quick, caplog, count):
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    try:
        with ThreadPoolExecutor(20) as threads:
            raws = list(threads.map(functools.partial(exchange, quick), mutated_cases(count)))
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == []
    statuses = collections.Counter(raw[9:12] for raw in raws)
    assert set(statuses) <= {b"200", b"100", b"400", b"405", b"408", b""}
    assert statuses[b"200"] > count / 20 and statuses[b"400"] > count / 20


def test_who_reads_nothing_is_not_written_to_for_ever():
    app = Counting()
    with in_background(app, limits=QUICK) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert app.ended.wait(HANG_S)


def test_whoever_is_one_too_many_is_told_and_later_served():
    with in_background(Counting(), limits=PATIENT) as address:
        port = int(address.rpartition(":")[2])

        def ask():
            return answers(exchange(port, Hostile("", GET + CLOSE)))

        idle = [connect(port) for _ in range(3)]
        wait_until(lambda: [status for status, *_ in ask()] == [503])
        (_, headers, body) = ask()[0]
        assert headers["retry-after"] == "1" and json.loads(body)["error"]["code"] == "overloaded"
        idle += [connect(port) for _ in range(3)]
        wait_until(lambda: ask() == [])  # twice as many: closed without a word
        for connection in idle:
            connection.close()
        wait_until(lambda: [status for status, *_ in ask()] == [200])


def wait_until(true):
    end = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_there_are_files_for_every_connection():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert connections_for(20) == 104
        resource.setrlimit(resource.RLIMIT_NOFILE, (999, hard))
        assert connections_for(20) == 104 and connections_for(1000) == 333
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_chunks_are_read_unless_they_are_dust(steady):
    def ask(size: int, count: int, end: bytes):
        chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
        return answers(exchange(steady, Hostile("", CHUNKED + CLOSE + chunk * count + end)))

    status, _, body = ask(2**12, 200, end=b"0\r\n\r\n")[0]
    assert (status, body) == (200, b"%d" % (200 * 2**12))
    refused = ask(1, CHUNK_LINES, end=b"")  # answered though the body does not end
    assert [status for status, *_ in refused] in ([400], [])  # [] where sending met the close


def test_the_end_of_a_server_ends_its_requests_without_a_traceback(caplog):
    app, logger = Counting(), logging.getLogger("uvicorn.error")
    with in_background(app, limits=QUICK) as address:
        logger.addHandler(caplog.handler)
        connection = connect(int(address.rpartition(":")[2]))
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(100)  # it runs
    logger.removeHandler(caplog.handler)
    assert app.ended.wait(HANG_S)
    assert not any(record.exc_info for record in caplog.records)
    connection.close()


# -- who may ask

HOME = "http://localhost:3000"


@pytest.mark.parametrize(
    "host,origin,options,status",
    [
        ("localhost:8000", None, {}, 200),
        ("127.0.0.1", None, {}, 200),
        ("[::1]:80", None, {}, 200),
        ("192.168.0.7:8000", None, {}, 200),
        (socket.gethostname(), None, {}, 200),
        ("LOCALHOST", None, {}, 200),
        ("me.localhost:1", None, {}, 200),
        ("evil.example", None, {}, 403),
        ("evil.example:8000", None, {}, 403),
        ("127.0.0.1.evil.example", None, {}, 403),
        ("localhost.evil.example", None, {}, 403),
        ("evil-localhost", None, {}, 403),
        ("a.localhost:8000", None, {}, 200),
        ("[::1", None, {}, 403),
        ("", None, {}, 403),
        ("evil.example#localhost", None, {}, 403),
        ("gpu.example:80", None, {"hosts": ["gpu.example"]}, 200),
        ("gpu.example", None, {"hosts": ["GPU.example"]}, 200),
        ("gpu.example", None, {"hosts": ["example"]}, 403),
        ("a.b", None, {"hosts": ["*"]}, 200),
        ("localhost:8000", "http://localhost:8000", {}, 200),
        ("localhost:8000", "https://evil.example", {}, 403),
        ("localhost", "null", {}, 403),
        ("localhost:8000", HOME, {}, 403),
        ("localhost:8000", HOME, {"origins": [HOME]}, 200),
        ("localhost", "", {}, 403),
        ("localhost", f"{HOME}.evil.example", {"origins": [HOME]}, 403),
        ("localhost", "https://evil.example", {"origins": ["*"]}, 200),
        ("evil.example", "http://evil.example", {}, 403),
        ("evil.example", HOME, {"origins": [HOME]}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(host, origin, options, status):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent = []

    async def send(message):
        sent.append(message)

    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(app, **options)({"type": "http", "headers": raw}, None, send))
    assert sent[0]["status"] == status
    if status == 403:
        message = json.loads(sent[1]["body"])["error"]["message"]
        assert "--allowed_" in message
