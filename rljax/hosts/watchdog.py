"""Watches the hosts from a thread: ends this one when another has failed, and never lets a run
stand still in silence.

Every host reports every few seconds where it is. If the hosts that are furthest behind have given
no sign of life for longer than their phase may take, all write the stacks of their threads into the
run folder and the first host names which stand where; at twice that time all end.
"""

import contextlib
import dataclasses
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rljax import heartbeat
from rljax.heartbeat import CurrentPhase
from rljax.hosts.exchange import FIRST_FAILED, Exchange, Failure
from rljax.hosts.shutdown import Ending

NOW = "rljax/now/"  # + number: JSON of where that host is
LOOK_S = 1.0  # between two looks, for up to 16 hosts
# Phases that read and write long files, in which moved bytes are a sign of life.
OF_FILES = ("save", "load", "reference_logprobs", "programs", "rest", "export", "finish")
MOVED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Seen:
    """The phase that a host reported, the reason for which it was told to stop, and the time at
    which this host read it."""

    current: CurrentPhase
    stop: str
    text: str
    read_s: float

    def silent_s(self, now: float) -> float:
        """Returns the seconds since its last sign of life; a host without a report gives none."""
        return self.current.silent_s + now - self.read_s


def behind(seen: Mapping[int, Seen]) -> list[int]:
    """Returns the hosts that the others wait for: the furthest behind, without those that
    only wait."""
    earliest = min(host.current.entered for host in seen.values())
    last = [k for k, host in seen.items() if host.current.entered == earliest]
    return [k for k in last if not seen[k].current.waiting] or last


def stall(seen: Mapping[int, Seen], now: float) -> float:
    """Returns how long the hosts that are behind have been silent, as a multiple of the allowed
    time; below 1 nothing is wrong."""
    return min(seen[k].silent_s(now) / seen[k].current.limit_s for k in behind(seen))


def described(seen: Mapping[int, Seen], names: tuple[str, ...], now: float) -> str:
    """Returns a text such as "host 3 (10.0.0.7) stands in reward, step 120, for 312 s; 63 hosts
    wait in learn"."""
    last = behind(seen)
    labels = [names[k] for k in last[:4]] + [f"{len(last) - 4} more"] * (len(last) > 4)
    current = seen[last[0]].current
    silent = min(seen[k].silent_s(now) for k in last)
    text = f"{', '.join(labels)} stand{'s' * (len(last) == 1)} in {current.phase}"
    text += f", step {current.step}, for {silent:.0f} s ({current.limit_s:.0f} s are allowed)"
    waiting: dict[str, int] = {}
    for k, host in seen.items():
        if k not in last:
            waiting[host.current.phase] = waiting.get(host.current.phase, 0) + 1
    for phase, count in waiting.items():
        text += f"; {count} host{'s wait' if count > 1 else ' waits'} in {phase}"
    return text


class Watchdog:
    """The thread that watches the others for one host. `folder` gets the stacks; `stall_s` as
    in config.hosts."""

    def __init__(
        self,
        exchange: Exchange,
        ending: Ending,
        folder: Path,
        stall_s: float,
        know: Callable[[dict[int, str]], None],
    ):
        self.exchange, self.ending, self.know = exchange, ending, know
        self.folder, self.stall_s = folder, stall_s
        self.seen: dict[int, Seen] = {}
        self.reported = -1  # phases entered by those behind when a stall was reported
        self.moved = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        """Starts the thread; returns itself."""
        self.thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread, and removes the report of this host: another run may follow."""
        self.over.set()
        self.thread.join(5.0)
        with contextlib.suppress(Exception):  # the store may be gone
            self.exchange.client.delete(f"{NOW}{self.exchange.index}")

    @property
    def stop_reason(self) -> str:
        """Reason for which any host was told to stop, as soon as this one hears of it; the hosts
        have not agreed on a place yet."""
        return next((host.stop for host in self.seen.values() if host.stop), "")

    def _watch(self) -> None:
        wait_s = LOOK_S * max(1.0, self.exchange.count / 16)
        while not self.over.is_set():
            try:
                failure = self.exchange.client.get(FIRST_FAILED, wait_s)
                if failure is not None:
                    self.ending.follow(Failure.read(failure))
                    return
                self._look()
            except Exception as error:
                # The store is gone: JAX ends this process in a moment, or it is over already.
                if self.over.wait(wait_s):
                    return
                if "UNAVAILABLE" not in str(error):
                    print(f"hosts: the watchdog: {error}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        current = heartbeat.current(self.stall_s)
        if current.phase in OF_FILES and self._bytes_moved():
            heartbeat.still_moving()
            current = dataclasses.replace(current, silent_s=0.0)
        reason = self.exchange.asked()
        message = json.dumps([dataclasses.astuple(current), reason])
        self.exchange.client.set(f"{NOW}{self.exchange.index}", message)
        now = time.monotonic()
        for key, text in self.exchange.client.list(NOW).items():
            k = int(key.rpartition("/")[2])
            if k not in self.seen or self.seen[k].text != text:
                phase, stop = json.loads(text)
                self.seen[k] = Seen(CurrentPhase(*phase), stop, text, now)
        self.know({k: f"{s.current.phase}, step {s.current.step}" for k, s in self.seen.items()})
        if len(self.seen) == self.exchange.count:
            self._judge(now)

    def _judge(self, now: float) -> None:
        lateness, entered = stall(self.seen, now), self.seen[behind(self.seen)[0]].current.entered
        text = described(self.seen, self.exchange.names, now)
        if lateness >= 2:
            self.ending.stalled(f"nothing moves: {text}")
        if lateness >= 1 and entered != self.reported:
            self.reported = entered
            self._write_stacks(text)
            if not self.exchange.index:
                hint = f"the stacks of all hosts are in {self.folder}"
                print(f"hosts: {text}; {hint}", file=sys.stderr, flush=True)
        if lateness < 1 and self.reported >= 0 and entered != self.reported:
            self.reported = -1
            if not self.exchange.index:
                print("hosts: all hosts go on", file=sys.stderr, flush=True)

    def _write_stacks(self, text: str) -> None:
        path = self.folder / f"host-{self.exchange.index:03d}.stacks.txt"
        with open(path, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _bytes_moved(self) -> bool:
        """Returns whether this process has read or written much since the last look."""
        try:
            with open("/proc/self/io") as file:
                lines = dict(line.split(": ") for line in file.read().splitlines())
        except OSError:  # not Linux
            return False
        previous, self.moved = self.moved, int(lines["rchar"]) + int(lines["wchar"])
        return self.moved > previous + MOVED_BYTES
