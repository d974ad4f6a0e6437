"""The hosts of a large pod without their devices: threads over a store in memory, and processes of
JAX's coordination service alone."""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from on_hosts import free_port

from rljax.hosts import Exchange


class StoreInMemory:
    """The store that all hosts share, as `client` of one of them: what JAX's coordination service
    is to processes. Counts the messages of every host."""

    def __init__(self, hosts: int):
        self.hosts, self.values, self.changed = hosts, {}, threading.Condition()
        self.come: dict[str, set[int]] = {}
        self.messages: Counter = Counter()
        self.polls: Counter = Counter()  # of these: asked again, as others took long
        self.waits: set[float] = set()  # seconds for which a host waited for a value

    def client(self, index: int) -> "Client":
        return Client(self, index)


class Client:
    """rljax.hosts.Client of one host."""

    def __init__(self, store: StoreInMemory, index: int):
        self.store, self.index = store, index

    @contextlib.contextmanager
    def _locked(self):
        with self.store.changed:
            self.store.messages[self.index] += 1
            yield self.store.changed

    def set(self, key: str, value: str) -> None:
        with self._locked() as changed:
            self.store.values[key] = value
            changed.notify_all()

    def set_first(self, key: str, value: str) -> bool:
        with self._locked() as changed:
            new = key not in self.store.values
            self.store.values.setdefault(key, value)
            changed.notify_all()
        return new

    def get(self, key: str, timeout_s: float) -> str | None:
        with self._locked() as changed:
            self.store.waits.add(timeout_s)
            if not changed.wait_for(lambda: key in self.store.values, timeout_s):
                self.store.polls[self.index] += 2  # this message, and a look for a failed host
            return self.store.values.get(key)

    def delete(self, key: str) -> None:
        with self._locked():
            for name in [n for n in self.store.values if n == key or n.startswith(f"{key}/")]:
                del self.store.values[name]

    def barrier(self, name: str, timeout_s: float) -> list[int]:
        with self._locked() as changed:
            come = self.store.come.setdefault(name, set())
            come.add(self.index)
            changed.notify_all()
            changed.wait_for(lambda: len(come) == self.store.hosts, timeout_s)
            return sorted(set(range(self.store.hosts)) - come)

    def list(self, prefix: str) -> dict[str, str]:
        with self._locked():
            found = self.store.values.items()
            return {key: value for key, value in found if key.startswith(prefix)}


def on_threads(hosts: int, work: Callable[[Exchange], object], *, without=()) -> tuple:
    """work(exchange) on `hosts` threads, but for those `without` -> (the result or the exception of
    each, by number; the store)."""
    store, results = StoreInMemory(hosts), {}
    names = tuple(f"host {k} (10.0.0.{k})" for k in range(hosts))

    def one(k: int) -> None:
        try:
            results[k] = work(Exchange(store.client(k), k, hosts, names))
        except Exception as error:
            results[k] = error

    threads = [
        threading.Thread(target=one, args=(k,), daemon=True)
        for k in range(hosts)
        if k not in without
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    return results, store


# -- processes --


def main(hosts: int, heartbeat_s: int) -> dict:
    """Seconds that `hosts` processes of the coordination service take to start, to pass a barrier,
    to gather, and to end when one of them is killed. They are forked from one that has imported
    JAX and begun nothing: 64 interpreters of their own would need 13 GB."""
    import rljax.hosts

    port, report, write = free_port(), *os.pipe()
    begun, children = time.monotonic(), []
    for k in range(hosts):
        if (child := os.fork()) == 0:
            env = {"RLJAX_COORDINATOR": f"127.0.0.1:{port}", "RLJAX_HOSTS": str(hosts)}
            env |= {"RLJAX_HOST": str(k)}
            try:
                _host(rljax.hosts, env, heartbeat_s, begun, write)
            finally:
                os._exit(1)
        children.append(child)
    os.close(write)
    times, megabytes = {}, []
    with os.fdopen(report) as lines:
        for line in lines:
            said = json.loads(line)
            times[said["what"]] = max(times.get(said["what"], 0.0), said["seconds"])
            megabytes += [said["megabytes"]] if said["what"] == "gather" else []
            if len(megabytes) == hosts:
                break
        victim, killed = children[hosts // 2], time.monotonic()
        os.kill(victim, signal.SIGKILL)
        codes = Counter(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    times["all ended after the kill"] = time.monotonic() - killed
    rounded = {name: round(seconds, 2) for name, seconds in times.items()}
    return {
        "hosts": hosts,
        "seconds": rounded,
        "private_megabytes_each": round(sum(megabytes) / hosts, 1),
        "exit_codes": {str(code): count for code, count in sorted(codes.items())},
    }


def _host(hosts, env: dict, heartbeat_s: int, begun: float, write: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)

    def said(what: str, since: float) -> float:
        now = time.monotonic()
        line = {"what": what, "seconds": now - since, "megabytes": private_megabytes()}
        os.write(write, json.dumps(line).encode() + b"\n")
        return now

    hosts.start(init_timeout_s=300, heartbeat_s=heartbeat_s, env=env)
    now = said("start", begun)
    hosts.wait("first", timeout_s=120)
    now = said("barrier", now)
    rows = [
        [k, 0.5, {"part": 1.0}, "ok", 0.01, ""] for k in range(hosts.index(), 8192, hosts.count())
    ]
    together = hosts.gather(rows)
    assert sum(map(len, together)) == 8192
    said("gather", now)
    hosts.gather("until somebody is killed") and time.sleep(600)


def private_megabytes() -> float:
    """Of this process alone, without what it shares with the one that it was forked from."""
    with open("/proc/self/smaps_rollup") as file:
        pages = [line.split() for line in file if line.startswith("Private_")]
    return sum(int(line[1]) for line in pages) / 1024


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
