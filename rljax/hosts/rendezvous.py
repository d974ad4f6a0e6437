"""The meeting of hosts before JAX connects them, so that a host that is missing, comes twice or
calls the wrong address is named after seconds; JAX's own start waits, and then names nobody.

The first host listens at the coordinator's port; every other one says who it is, and all hear at
once that everybody is there, or what is wrong. Then the port is free again, for JAX.

Other callers, such as a scanner of ports, are passed over: what they send is read up to a limit, in
bytes and in time, and ignored unless it has the form of a host's message.
"""

import contextlib
import dataclasses
import json
import re
import selectors
import socket
import sys
import time
from collections.abc import Iterator

from rljax.errors import InputError
from rljax.files import json_object
from rljax.hosts.cluster import MOST_HOSTS, Cluster

PATIENCE_S = 30.0  # between two messages about who is missing
ANSWER_S = 10.0  # a caller that says nothing for so long is no host of ours
MOST_CALLERS = 128  # that have not said who they are; the longest silent one is closed first
_LONGEST_HELLO = 4096  # bytes
_LONGEST_NAME = 400  # bytes, with the address, in JSON
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)
_SAME = "start the same command on every host (of a TPU VM: --worker=all)"


class HostsLate(InputError):
    """An error for hosts that did not come in time: another start may find them there."""

    exit_code = 171  # as where a host has failed: see rljax.hosts.shutdown


def meet(cluster: Cluster, timeout_s: float) -> list[str]:
    """Waits until all hosts have come; returns their addresses. Raises, on all of them that have
    come, HostsLate if one does not come within timeout_s, and InputError if two are the same."""
    label = f"host {cluster.host} of {cluster.hosts}"
    say(f"{label}, coordinator {cluster.coordinator}, found by {cluster.found_by}; waiting")
    reply = _listen(cluster, timeout_s) if cluster.host == 0 else _call(cluster, timeout_s)
    if "error" in reply:
        raise (HostsLate if reply.get("late") else InputError)(**reply["error"])
    return reply["addresses"]


def lines(connection: socket.socket, most: int, deadline: float) -> Iterator[bytes]:
    """Yields the lines that the other side sends, each of at most `most` bytes. Raises TimeoutError
    at the deadline, a time of time.monotonic, and ValueError for a longer line."""
    buffer = b""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(65_536)
        if not data:
            return
        *complete, buffer = (buffer + data).split(b"\n")
        if max(map(len, [buffer, *complete])) > most:
            raise ValueError(f"a line has more than {most} bytes")
        yield from complete
        if time.monotonic() > deadline:
            raise TimeoutError("it says no end")


def say(text: str) -> None:
    """Prints a line of the hosts to standard error."""
    print(f"hosts: {text}", file=sys.stderr, flush=True)


def _plain(name: str) -> str:
    """The name of a machine as a line of text can hold it."""
    return _NO_NAME.sub("_", name[:255])


def _port(cluster: Cluster) -> tuple[str, int]:
    address, _, port = cluster.coordinator.rpartition(":")
    return address.strip("[]"), int(port)


# -- the first host --


def _listen(cluster: Cluster, timeout_s: float) -> dict:
    address, port = _port(cluster)
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        problem = f"the first host cannot listen at port {port}"
        fix = "end the process that holds the port, or choose another one"
        raise InputError(problem, value=error.strerror, fix=fix) from None
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        guests = _Guests(cluster, address)
        deadline, next_notice = time.monotonic() + timeout_s, time.monotonic() + PATIENCE_S
        while not guests.reply:
            for key, _ in selector.select(1.0):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        caller, (peer, *_) = server.accept()
                        _notice_a_dead_machine(caller, idle_s=10)
                        selector.register(caller, selectors.EVENT_READ, (peer, time.monotonic()))
                elif not guests.hear(key.fileobj, key.data[0]):
                    _hang_up(selector, key.fileobj)
            _hang_up_on_strangers(selector, {server, *guests.numbers})
            if not guests.missing() and not guests.reply:
                guests.reply = {"addresses": [guests.addresses[k] for k in range(cluster.hosts)]}
            elif time.monotonic() > deadline:
                problem = f"not all hosts have come within {timeout_s:g} s"
                value = f"missing: {guests.missing_names()}"
                guests.refuse(problem, value=value, fix=_SAME, late=True)
            elif time.monotonic() > next_notice:
                guests.tell_missing()
                next_notice += PATIENCE_S
        _hang_up_on_strangers(selector, {server, *guests.numbers}, max_strangers=0)
        guests.answer()
        return guests.reply


def _hang_up(selector: selectors.BaseSelector, caller: socket.socket) -> None:
    selector.unregister(caller)
    caller.close()


def _hang_up_on_strangers(
    selector: selectors.BaseSelector,
    identified: set[socket.socket],
    max_strangers: int = MOST_CALLERS,
) -> None:
    """Closes the connections of callers that have not said who they are: those that were silent for
    ANSWER_S, and all above `max_strangers` of them."""
    strangers = [key for key in selector.get_map().values() if key.fileobj not in identified]
    strangers.sort(key=lambda key: key.data[1], reverse=True)
    for number, key in enumerate(strangers):
        if number >= max_strangers or time.monotonic() > key.data[1] + ANSWER_S:
            _hang_up(selector, key.fileobj)


def _notice_a_dead_machine(connection: socket.socket, idle_s: int) -> None:
    """Lets the system probe a connection that was silent for `idle_s`, and give it up 15 s later,
    because a machine that was taken away closes no connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", idle_s), ("INTVL", 5), ("CNT", 3)):
        if option := getattr(socket, f"TCP_KEEP{name}", None):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclasses.dataclass(frozen=True)
class _Hello:
    """The message in which a host says which one it is."""

    host: int
    hosts: int
    name: str

    @classmethod
    def read(cls, data: bytes) -> "_Hello":
        """Reads the message of a host. Raises ValueError for bytes that no host sends."""
        fields = json_object(data.decode(), "a caller's word")
        hello = cls(fields.get("host"), fields.get("hosts"), fields.get("name", ""))
        numbers = type(hello.host) is int and type(hello.hosts) is int
        if not numbers or not 0 <= hello.host < hello.hosts <= MOST_HOSTS:
            raise ValueError("it numbers no host")
        if not isinstance(hello.name, str) or hello.name != _plain(hello.name):
            raise ValueError("its name is none of a machine")
        return hello


class _Guests:
    """The hosts that have come to the first one."""

    def __init__(self, cluster: Cluster, address: str):
        self.cluster = cluster
        self.addresses = {0: address}  # number of a host -> its address
        self.numbers: dict[socket.socket, int | None] = {}  # of callers; None of a refused one
        self.reply: dict = {}

    def missing(self) -> list[int]:
        return [k for k in range(self.cluster.hosts) if k not in self.addresses]

    def missing_names(self) -> str:
        missing = self.missing()
        remainder = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return ", ".join(f"host {k}" for k in missing[:8]) + remainder

    def hear(self, caller: socket.socket, address: str) -> bool:
        """Reads a caller's message; returns whether its connection stays open. That of a
        stranger, such as a scanner of ports, does not; a host that has ended is forgotten, and
        may come again."""
        try:
            caller.settimeout(ANSWER_S)
            data = caller.recv(_LONGEST_HELLO)
            if caller in self.numbers:
                if not data:
                    self._forget(caller)
                return bool(data)
            hello = _Hello.read(data)
        except OSError:
            self._forget(caller)
            return False
        except ValueError:
            return False
        self._come(caller, address, hello)
        return True

    def _forget(self, caller: socket.socket) -> None:
        host = self.numbers.pop(caller, None)
        if host is not None:
            say(f"host {host} ({self.addresses.pop(host)}) has gone again; waiting for it")

    def _come(self, caller: socket.socket, address: str, hello: _Hello) -> None:
        self.numbers[caller] = None
        host, hosts = hello.host, hello.hosts
        address = f"{hello.name} {address}".strip()
        if hosts != self.cluster.hosts:
            problem = "the hosts do not agree on how many there are"
            value = f"host 0 says {self.cluster.hosts}, host {host} at {address} says {hosts}"
            self.refuse(problem, value=value, fix="give every host the same number")
        elif host in self.addresses:
            problem = f"two hosts say that they are host {host}"
            first = self.addresses[host] or "the first host"
            value = f"{first} and {address}"
            self.refuse(problem, value=value, fix="number the hosts 0, 1, 2, ..., each once")
        else:
            self.addresses[host], self.numbers[caller] = address, host

    def refuse(self, what: str, *, value: str, fix: str, late: bool = False) -> None:
        self.reply = {"error": {"what": what, "value": value, "fix": fix}, "late": late}

    def tell_missing(self) -> None:
        arrived = self.cluster.hosts - len(self.missing())
        text = (
            f"{arrived} of {self.cluster.hosts} hosts are here; missing: {self.missing_names()}. "
        )
        say(text + _SAME)
        self._send({"say": text + _SAME})

    def answer(self) -> None:
        """Sends all callers the outcome; they hang up first, so that the port is free at once."""
        self._send(self.reply)
        for guest in self.numbers:
            with contextlib.suppress(OSError):
                guest.settimeout(ANSWER_S)
                guest.recv(1)
            guest.close()

    def _send(self, message: dict) -> None:
        for guest in self.numbers:
            with contextlib.suppress(OSError):
                guest.sendall(json.dumps(message).encode() + b"\n")


# -- the others --


def _checked(message: dict, hosts: int) -> dict:
    """Returns a message of the first host. Raises ValueError for one that it never sends."""
    error, addresses = message.get("error"), message.get("addresses")
    if isinstance(message.get("say"), str) and message["say"].isprintable():
        return {"say": message["say"]}
    if isinstance(error, dict) and set(error) == {"what", "value", "fix"}:
        if all(isinstance(text, str) for text in error.values()):
            return {"error": error, "late": message.get("late") is True}
    if isinstance(addresses, list) and len(addresses) == hosts:
        if all(isinstance(text, str) for text in addresses):
            return {"addresses": addresses}
    raise ValueError("something else answers there")


def _call(cluster: Cluster, timeout_s: float) -> dict:
    start, next_notice, last = time.monotonic(), time.monotonic() + PATIENCE_S, ""
    deadline = start + timeout_s + PATIENCE_S
    hello = {"host": cluster.host, "hosts": cluster.hosts, "name": _plain(socket.gethostname())}
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(_port(cluster), timeout=5.0) as server:
                _notice_a_dead_machine(server, idle_s=15)
                server.sendall(json.dumps(hello).encode())
                longest = _LONGEST_HELLO + _LONGEST_NAME * cluster.hosts
                for line in lines(server, longest, deadline):
                    message = _checked(json_object(line.decode(), "its answer"), cluster.hosts)
                    if "say" not in message:
                        return message
                    say(message["say"])
                last = "it hung up"  # the first host has ended, or somebody else listens there
        except (OSError, ValueError) as error:
            last = str(error)
        if time.monotonic() > next_notice:
            waited = time.monotonic() - start
            say(
                f"host {cluster.host} has had no answer from {cluster.coordinator} for "
                f"{waited:.0f} s ({last}): does host 0 run there, and is the port open?"
            )
            next_notice += PATIENCE_S
        time.sleep(0.2)
    raise HostsLate(
        f"host {cluster.host} had no answer from the coordinator within {timeout_s:g} s",
        value=f"{cluster.coordinator}: {last}",
        fix="check that host 0 runs there and that the port is open between the hosts; " + _SAME,
    )
