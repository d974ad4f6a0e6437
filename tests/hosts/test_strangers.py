"""Whoever calls the coordinator's port, or answers in its place, and is no host of the run: it is
passed over, in bounded time, and the hosts meet all the same.
"""

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from on_hosts import free_port
from processes import wait_until

from rljax.doctor.network import hosts_network
from rljax.errors import InputError
from rljax.hosts import rendezvous as meeting
from rljax.hosts.cluster import MOST_HOSTS, Cluster
from rljax.hosts.rendezvous import meet


def host(number: int, port: int, count: int = 2) -> Cluster:
    return Cluster(f"127.0.0.1:{port}", count, number, "a test")


def hello(**said) -> bytes:
    return json.dumps({"host": 1, "hosts": 2, "name": "x"} | said).encode()


WORDS = [
    b'{"host": 1e400}',
    b'{"host": 1e400, "hosts": 2}',
    b'{"host": 1, "hosts": 1e400}',
    b"[" * 4000,
    b"[" * 2000 + b"]" * 2000,
    b'{"host":' * 500 + b"1" + b"}" * 500,
    b'{"a":' * 800,
    b"null",
    b"5",
    b'"host"',
    b"[]",
    b"[1, 2]",
    b"{}",
    b"true",
    b"NaN",
    b"",
    b"\0" * 99,
    b'{"host": NaN, "hosts": 2}',
    b'{"host": Infinity, "hosts": 2}',
    b"\xff\xfe\x00",
    b'"\xff"',
    b'{"host": ' + b"9" * 4000 + b"}",
    b'{"host": 1, "hosts": 2',
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-x\r\n",
    b"{" * 4096,
    b"x" * 100_000,
    hello(host=None),
    hello(host="1"),
    hello(host=1.0),
    hello(host=True),
    hello(host=[1]),
    hello(host={}),
    hello(host=-1),
    hello(host=2),
    hello(host=10**30),
    hello(hosts=None),
    hello(hosts="2"),
    hello(hosts=2.0),
    hello(hosts=0),
    hello(hosts=-2),
    hello(hosts=True),
    hello(hosts=MOST_HOSTS + 1),
    hello(hosts=10**300),
    hello(name=5),
    hello(name=[]),
    hello(name=None),
    hello(name="\x1b[2J"),
    hello(name="a b"),
    hello(name="x" * 256),
    hello(name="\u202e"),
    hello(name="\ud800"),
    hello(name={"a": 1}),
]


def say(port: int, word: bytes) -> bytes:
    """Says something at the port -> what is answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as caller:
        with contextlib.suppress(OSError):  # it may have hung up at a part of it
            caller.sendall(word)
            caller.shutdown(socket.SHUT_WR)
            return caller.recv(100)
    return b""


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    return False


@contextlib.contextmanager
def waiting_first_host(port: int):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, host(0, port), 120.0)
        wait_until(lambda: listens(port), "the first host to listen")
        yield first


def test_strangers_are_passed_over():
    port = free_port()
    with waiting_first_host(port) as first:
        for word in WORDS:
            assert say(port, word) == b"" and not first.done(), word
        assert meet(host(1, port), 60.0) == first.result(60)


def test_many_silent_callers_keep_nobody_out(monkeypatch):
    """More of them than the first host holds; the longest silent ones are hung up on."""
    monkeypatch.setattr(meeting, "ANSWER_S", 60.0)  # not since they are silent
    port, callers = free_port(), []
    with waiting_first_host(port) as first, contextlib.ExitStack() as stack:
        for _ in range(meeting.MOST_CALLERS + 40):
            caller = socket.create_connection(("127.0.0.1", port), timeout=120)
            callers.append(stack.enter_context(caller))
        for caller in callers[:30]:
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""
        assert not first.done()
        assert meet(host(1, port), 60.0) == first.result(60)


def test_a_caller_that_says_nothing_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_S", 0.5)
    port = free_port()
    with waiting_first_host(port) as first:
        assert say_nothing(port) == b""
        meet(host(1, port), 60.0)
        assert first.result(60)


def say_nothing(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as caller:
        return caller.recv(1)


# -- a stranger in the first host's place --

ANSWERS = [
    b"{}",
    b"null",
    b"[]",
    b"5",
    b'"say"',
    b"[" * 4000,
    b"\xff",
    b'{"say": 1e400}',
    b'{"say": []}',
    b'{"say": "\\u001b[2J"}',
    b'{"error": 5}',
    b'{"error": {}}',
    b'{"error": {"what": "x"}}',
    b'{"error": {"what": "x", "value": 1, "fix": "y"}}',
    b'{"error": {"self": 1}}',
    b'{"error": {"what": "a", "value": "b", "fix": "c", "rule": "d"}}',
    b'{"addresses": 1e400}',
    b'{"addresses": []}',
    b'{"addresses": ["a"]}',
    b'{"addresses": [1, 2]}',
    b'{"addresses": "ab"}',
    b'{"addresses": {"0": "a", "1": "b"}}',
    b"HTTP/1.1 400 Bad Request",
    b"x" * 1_000_000,
    b"",
]


def test_a_stranger_in_the_place_of_the_first_host_is_passed_over(monkeypatch, capsys):
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            for word in [*ANSWERS, b'{"addresses": ["one", "two"]}']:
                caller, _ = server.accept()
                with caller, contextlib.suppress(OSError):
                    caller.recv(4096)
                    caller.sendall(word + b"\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert meet(host(1, port), 60.0) == ["one", "two"]
        thread.join(30)
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("piece", [b" ", b"x" * 60_000, b'{"say": "x"}\n'])
def test_a_stranger_that_never_ends_ends_at_the_deadline(monkeypatch, piece):
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            server.settimeout(0.2)
            while not over.is_set():
                with contextlib.suppress(OSError):
                    caller, _ = server.accept()
                    with caller:
                        while not over.is_set():
                            caller.sendall(piece)
                            time.sleep(0.02)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(InputError, match="no answer from the coordinator within 1 s"):
            meet(host(1, server.getsockname()[1]), 1.0)
        over.set()
        thread.join(30)


# -- the ports that `rljax doctor --hosts` looks at --


def two_ports() -> int:
    """A port that is free, and the one above it as well: hosts of one machine share neither. Below
    those from which the system takes the ports of callers."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError):
            for each in (port, port + 1):
                socket.create_server(("", each)).close()
            return port


def test_the_doctor_passes_strangers_over():
    """At a port at which the hosts call each other, while they do."""
    port, other = two_ports(), two_ports()
    while abs(port - other) < 2:
        other = two_ports()
    env = [
        {"RLJAX_COORDINATOR": f"127.0.0.1:{port}", "RLJAX_HOSTS": "2", "RLJAX_HOST": str(k)}
        for k in range(2)
    ]
    words = [
        b'{"rljax": 1e400}',
        b"[" * 4000,
        b'{"rljax": 77}',
        b'{"rljax": "1"}',
        b'{"rljax": true}',
        b'{"rljax": [1]}',
        b"\xff",
        b"null",
        b"5",
        b"[]",
        b'{"rljax": ' + b"9" * 4000 + b"}",
        b"",
        b"x" * 10_000,
    ]
    said = threading.Event()

    def come_late():
        """Meets the first host, and comes to the other port behind the strangers."""
        findings = hosts_network(env[1], (other,), 120.0)
        return [next(findings), next(findings), *(said.wait(120) and findings)]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: list(hosts_network(env[0], (other,), 120.0)))
        second = pool.submit(come_late)
        wait_until(lambda: listens(other), "the first host to listen at the other port")
        for word in words:
            with contextlib.suppress(OSError):
                say(other, word + b"\n")
        said.set()
        findings = [*first.result(200), *second.result(200)]
    assert [f.name for f in findings] == ["hosts", "port", "port"] * 2, findings
