"""The hosts of a run: one process each, all running the same command and the same programs in the
same order.

Only this package imports what JAX has for several processes. A decision of the host program is made
from values that all hosts have: config, data, arrays that `rljax.arrays.fetch` brings, and what
`gather`, `share` and `agree` return. With one process each of these is the identity. With several,
each may raise HostFailed if another host has ended, and RuntimeError if the hosts are at different
places of the program.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax._src import distributed, xla_bridge

from rljax import heartbeat
from rljax.errors import InputError
from rljax.hosts.client import Client
from rljax.hosts.cluster import Cluster, environment, find
from rljax.hosts.console import ConsoleCopy
from rljax.hosts.exchange import Exchange, HostFailed
from rljax.hosts.rendezvous import meet, say
from rljax.hosts.shutdown import STOPPED, Ending, saved
from rljax.hosts.stopping import Notices, StopAgreed, Stops
from rljax.hosts.watchdog import Watchdog

__all__ = [
    "STOPPED",
    "Client",
    "Cluster",
    "Exchange",
    "HostFailed",
    "StopAgreed",
    "agree",
    "asked_to_stop",
    "client",
    "count",
    "environment",
    "fail",
    "first",
    "gather",
    "index",
    "may_stop",
    "mine",
    "names",
    "raise_if_failed",
    "refuse_several",
    "saved",
    "say",
    "share",
    "start",
    "stop_agreed",
    "stop_here",
    "telling",
    "wait",
    "watched",
]
JAX_START_S = 300  # all hosts are there by then: what is left is one connection each

_exchange: Exchange | None = None
_ending: Ending | None = None
_watchdog: Watchdog | None = None
_stops = Stops()


def start(init_timeout_s: float = 1800, heartbeat_s: float = 30, env=os.environ) -> None:
    """Finds the hosts of this run and connects them; with one process it does nothing and needs
    no network.

    Call it before JAX looks at a device. Raises InputError if hosts do not come.
    """
    if _exchange is not None:
        return
    if distributed.global_state.client is not None:  # whoever calls us has connected them
        labels = [f"host {k}" for k in range(distributed.global_state.num_processes)]
        _connect(labels, heartbeat_s)
        return
    cluster = find(env)
    if cluster is None:
        return
    if xla_bridge.backends_are_initialized():
        problem = f"JAX was used before the {cluster.hosts} hosts were connected"
        fix = "call rljax.hosts.start() at the top of your program"
        raise InputError(problem, rule="devices of other hosts are seen only after that", fix=fix)
    addresses = meet(cluster, init_timeout_s)
    host = cluster.coordinator.rpartition(":")[0]
    for name in ("no_grpc_proxy", "no_proxy"):  # a proxy in between is a hang
        os.environ[name] = ",".join(filter(None, [os.environ.get(name, ""), host]))
    jax.config.update("jax_check_proxy_envs", False)  # it warns of the variables just set
    # Its handler of SIGTERM and ours exclude each other.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.hosts,
        cluster.host,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=JAX_START_S,
        heartbeat_timeout_seconds=int(heartbeat_s),
    )
    labels = [f"host {k} ({address})" for k, address in enumerate(addresses)]
    _connect(labels, heartbeat_s)


def _connect(labels: list[str], heartbeat_s: float) -> None:
    global _exchange, _ending
    state, names = distributed.global_state, tuple(labels)
    _exchange = Exchange(Client(), state.process_id, state.num_processes, names)
    _ending = Ending(_exchange, heartbeat_s)


def refuse_several(what: str) -> None:
    """Raises InputError if several hosts run together: `what` is work for one of them."""
    cluster = None if _exchange is not None else find(os.environ)
    if cluster is not None or count() > 1:
        number, source = (cluster.hosts, cluster.found_by) if cluster else (count(), "this run")
        problem = f"{what} runs on one host"
        rule = "each of them would do the same work and write the same files"
        fix = "run it on one host, with RLJAX_HOSTS=1"
        raise InputError(problem, value=f"{number} hosts, found by {source}", rule=rule, fix=fix)


def count() -> int:
    """Returns the number of hosts."""
    return 1 if _exchange is None else _exchange.count


def index() -> int:
    """Returns the number of this host, from 0."""
    return 0 if _exchange is None else _exchange.index


def first() -> bool:
    """Returns whether this is the host that writes files and speaks to trackers."""
    return index() == 0


def names() -> tuple[str, ...]:
    """Returns the names of the hosts, for messages."""
    return (socket.gethostname(),) if _exchange is None else _exchange.names


def client() -> Client | None:
    """Returns the key-value store of the hosts; None with one process."""
    return None if _exchange is None else _exchange.client


def gather(value) -> list:
    """Returns the JSON value of every host, in their order. Floats, NaN too, come bit for bit."""
    return [value] if _exchange is None else _gathered(value, _caller())


def share(value):
    """Returns the JSON value of the first host; those that the others pass are ignored."""
    if _exchange is None:
        return value
    return _gathered(None if _exchange.index else value, _caller())[0]


def agree(flag: bool, where: str = "") -> bool:
    """Returns whether `flag` is true on any host. `where` names the call in the program; hosts with
    different ones are an error."""
    if _exchange is None:
        return bool(flag)
    return any(_gathered(bool(flag), where or _caller()))


def wait(name: str, timeout_s: float = 1800) -> None:
    """Waits for all hosts. Raises InputError that names those that do not come."""
    if _exchange is not None:
        _exchange.wait(name, timeout_s)


def mine(groups: int) -> list[int]:
    """Returns the indices of `groups` pieces of work that are this host's: every count()-th, from
    index() on."""
    return list(range(index(), groups, count()))


def raise_if_failed() -> None:
    """Raises HostFailed if another host has said that it ended."""
    if _exchange is not None:
        _exchange.raise_if_failed()


def fail(error: BaseException) -> None:
    """Says why this host ends, here and to the others, and ends its process; does nothing with
    one process.

    The exit codes are those of `rljax.hosts.shutdown`.
    """
    if _ending is not None:
        _ending.fail(error)


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Tells an error inside the block to the other hosts at once, before this one cleans up."""
    try:
        yield
    except (HostFailed, StopAgreed):
        raise
    except BaseException as error:
        if _ending is not None:
            _ending.tell_of(error)
        raise


@contextlib.contextmanager
def watched(
    folder: Path, stall_s: float, told: Callable[[], str | None], keep: Callable[[], object]
) -> Iterator[None]:
    """Lets the hosts watch each other in the block, and keep what they print in `folder`; does
    nothing with one process.

    `told` returns the name of a signal once this host is to stop; `keep` puts the files of the
    folder where they stay, before an early end.
    """
    global _watchdog
    if _exchange is None or _ending is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    heartbeat.at_start()
    if not os.isatty(1):  # a display that is drawn anew is no log
        log = str(folder / f"host-{index():03d}.log")
        _ending.console = ConsoleCopy(log, _exchange.index, _exchange.names)
    _exchange.asked, _ending.keep = Notices(told), keep
    notices = _exchange.asked
    know = _ending.console.know if _ending.console else lambda phases: None
    _watchdog = Watchdog(_exchange, _ending, folder, stall_s, know).start()
    try:
        yield
    except BaseException as error:
        fail(error)
    finally:
        _watchdog.stop()
        _watchdog, _exchange.asked, _exchange.agreed = None, lambda: "", ""
        notices.over.set()
        if _ending.console is not None:
            _ending.console.close()
            _ending.console = None


def asked_to_stop() -> str:
    """Returns why any host was told to stop; "" if none was, or where none may. Hosts hear of it at
    different times: an exchange then raises StopAgreed on all of them."""
    if _exchange is None or _watchdog is None or not _stops.allowed:
        return ""
    return _exchange.asked() or _watchdog.stop_reason


def stop_agreed(told: str | None) -> str:
    """Exchanges why the hosts stop here; returns the reason, "" if they do not. `told` is what this
    host was told."""
    if _exchange is None:
        return told or ""
    _exchange.gather(None, "stop_agreed")
    return _exchange.agreed


def may_stop() -> contextlib.AbstractContextManager:
    """Lets the hosts stop in the block: every exchange raises StopAgreed on all of them alike, once
    any of them was told to stop. Does nothing with one process."""
    return _stops.may_stop()


def stop_here() -> None:
    """Raises StopAgreed on all hosts if they may stop, and one of them was told to."""
    if _exchange is not None and _stops.allowed:
        _gathered(None, "stop_here")


def _gathered(value, caller: str) -> list:
    values = _exchange.gather(value, caller)
    if _stops.allowed and _exchange.agreed:
        raise StopAgreed(_exchange.agreed)
    return values


def _caller() -> str:
    """Returns the caller of an exchange: file and function."""
    code = sys._getframe(2).f_code
    return f"{os.path.basename(code.co_filename)}:{code.co_qualname}"
