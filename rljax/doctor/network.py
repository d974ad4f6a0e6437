"""Checks the hosts of a run: whether all come, and reach each other both ways. Every host runs this
at the same time, as it would run `rljax train`.

They meet at the coordinator's port, as a run does. Then each listens at every port that is checked,
calls all others there, and counts the hosts that have called it.
"""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence

from rljax.doctor.finding import Finding, broken, fine
from rljax.errors import InputError
from rljax.files import json_object

_CALL_S = 3.0  # for one call
_MESSAGE_BYTES = 4096  # of the longest message
_CALLERS = 16  # that are answered at a time
_OPEN = "open the port between the hosts in both directions (firewall, security group)"


def hosts_network(
    env: MutableMapping[str, str], ports: Sequence[int], timeout_s: float
) -> Iterator[Finding]:
    """Yields findings of ports and names that do not work between this host and the others."""
    from rljax.hosts.cluster import find  # with JAX
    from rljax.hosts.rendezvous import meet

    try:
        cluster = find(env)
    except InputError as error:
        return (yield _problem("hosts_variables_wrong", error))
    if cluster is None:
        fix = "on every host RLJAX_COORDINATOR=ADDRESS_OF_HOST_0:8476, RLJAX_HOSTS and RLJAX_HOST; "
        fix += "TPU VMs, srun and SkyPilot set their own"
        problem = "--hosts, and nothing says that there are several"
        return (yield broken("hosts_not_named", problem, fix))
    name, _, port = cluster.coordinator.rpartition(":")
    try:
        info = socket.getaddrinfo(name.strip("[]"), int(port), proto=socket.IPPROTO_TCP)
    except (OSError, ValueError) as error:  # ValueError: a name that no server can be asked for
        problem = f"the coordinator's name {name} is not known here: {error}"
        fix = "give its address, or an entry in DNS or /etc/hosts"
        return (yield broken("host_unknown", problem, fix))
    try:
        met_hosts = meet(cluster, timeout_s)
    except InputError as error:
        return (yield _problem("hosts_do_not_meet", error))
    addresses = [info[0][4][0], *(line.rpartition(" ")[2] for line in met_hosts[1:])]
    yield fine("hosts", f"all {cluster.hosts} have come: {', '.join(addresses)}")
    for checked_port in dict.fromkeys((int(port), *ports)):
        yield from _both_ways(checked_port, addresses, cluster.host, timeout_s)


def _problem(name: str, error: InputError) -> Finding:
    problem, fix = error.parts
    return broken(name, problem, fix or "start the same command on every host")


def _both_ways(
    port: int, addresses: Sequence[str], host: int, timeout_s: float
) -> Iterator[Finding]:
    # Hosts that share a machine have ports of their own, each one above that of the host before.
    ports = [port + addresses[:peer].count(addresses[peer]) for peer in range(len(addresses))]
    peers = {peer for peer in range(len(addresses)) if peer != host}
    try:
        server = socket.create_server(("", ports[host]))
    except OSError as error:
        problem = f"port {ports[host]} of this host cannot be listened at: {error.strerror}"
        fix = f"end the process that has it (ss -ltnp 'sport = :{ports[host]}'), "
        return (yield broken("port_taken", problem, f"{fix}or use another port"))
    callers: set[int] = set()
    problems = dict.fromkeys(peers, "")
    deadline = time.monotonic() + timeout_s
    arguments = (server, callers, host, peers)
    threading.Thread(target=_answer_callers, args=arguments, daemon=True).start()
    while time.monotonic() < deadline and (problems or callers < peers):
        for peer in list(problems):
            try:
                _call(addresses[peer], ports[peer], host)
                del problems[peer]
            except (OSError, ValueError) as error:
                problems[peer] = str(error) or type(error).__name__
        time.sleep(0.1)
    server.close()
    for peer, reason in problems.items():
        problem = f"host {peer} is not reached at {addresses[peer]}:{ports[peer]}: {reason}"
        yield broken("host_unreachable", problem, _OPEN)
    for peer in sorted(peers - callers):
        problem = f"host {peer} ({addresses[peer]}) has not called port {ports[host]} of this host"
        yield broken("host_does_not_reach_us", f"{problem} within {timeout_s:g} s", _OPEN)
    if not problems and callers == peers:
        yield fine("port", f"{port}: reached and called by all other hosts")


def _call(address: str, port: int, host: int) -> None:
    """Tells a host that this one reaches it, and waits for its answer."""
    with socket.create_connection((address, port), timeout=_CALL_S) as connection:
        _send_number(connection, host)
        if _received_number(connection) is None:
            raise ValueError("something else answers there")


def _answer_callers(server: socket.socket, callers: set[int], host: int, peers: set[int]) -> None:
    """Adds the peers that call to `callers`, and answers them, until the server is closed. A caller
    that is not among the peers is ignored."""

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            number = _received_number(connection)
            if number in peers:
                _send_number(connection, host)
                callers.add(number)

    with concurrent.futures.ThreadPoolExecutor(_CALLERS) as pool, contextlib.suppress(OSError):
        while True:
            pool.submit(answer, server.accept()[0])


def _send_number(connection: socket.socket, host: int) -> None:
    connection.sendall(json.dumps({"rljax": host}).encode() + b"\n")


def _received_number(connection: socket.socket) -> int | None:
    """Returns the number that the other side gives as its own; None if it is no host of the run."""
    from rljax.hosts.rendezvous import lines

    line = next(lines(connection, _MESSAGE_BYTES, time.monotonic() + _CALL_S), b"null")
    number = json_object(line.decode(), "a caller's word").get("rljax")
    return number if type(number) is int else None
