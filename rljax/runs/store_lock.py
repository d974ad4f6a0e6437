"""The lock of a run folder under a URL, where there is no flock: an object with a heartbeat.

A process that finds one waits to see whether it beats. If two take it at the same moment, or a
holder that was thought dead comes back, the one whose name is gone from it stops.
"""

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rljax.errors import InputError
from rljax.files import json_object, read_json_object
from rljax.runs.folder import HEARTBEAT_S, LOCK, STALE_S, describe_process, held, is_running
from rljax.runs.store import Store

LOG = logging.getLogger("rljax")
LOOK_S = 2.0  # between two looks at whether a heart beats
LONG_DEAD_S = 600.0  # by the clocks of two machines: nobody waits for that


class StoreLock:
    """Holds the run folder of a store for this process; `check` raises if another one has
    taken it."""

    def __init__(self, store: Store):
        self.store = store
        self.own = {**describe_process(), "id": secrets.token_hex(8)}
        self.beats = 0

    @contextlib.contextmanager
    def held(self) -> Iterator["StoreLock"]:
        """Takes the lock for the block. Raises InputError that names its holder."""
        self._wait_for_the_dead()
        self._beat()
        self.check()
        ended = threading.Event()
        thread = threading.Thread(target=self._go_on, args=(ended,), daemon=True, name="lock")
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(OSError):
                if self._holder().get("id") == self.own["id"]:
                    self.store.remove(LOCK)

    def check(self) -> None:
        """Raises InputError if another process has taken the run folder."""
        holder = self._holder()
        if holder and holder.get("id") != self.own["id"]:
            raise held(self.store.url, holder)

    def _holder(self) -> dict:
        try:
            holder = json_object(self.store.read(LOCK), LOCK)
        except (FileNotFoundError, InputError):
            return {}
        return holder if isinstance(holder.get("pid"), int) else {}

    def _wait_for_the_dead(self) -> None:
        holder, deadline = self._holder(), time.monotonic() + STALE_S
        logged = False
        while holder and not _is_dead(holder):
            if is_running(holder):
                raise held(self.store.url, holder)
            if not logged:
                holder_name = f"process {holder['pid']} on host {holder.get('host')}"
                text = "%s was written by %s: waiting whether it still is (%.0f s at most)"
                LOG.warning(text, self.store.url, holder_name, STALE_S)
                logged = True
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)
            current = self._holder()
            if current and (current.get("id"), current.get("beat")) != (
                holder.get("id"),
                holder.get("beat"),
            ):
                raise held(self.store.url, current)
            holder = current

    def _beat(self) -> None:
        self.beats += 1
        text = json.dumps({**self.own, "beat": self.beats, "time": time.time()})
        self.store.put(LOCK, text.encode())

    def _go_on(self, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError, InputError):  # a store that is down for a while
                self.check()  # who has lost it must not take it back
                self._beat()


def _is_dead(holder: dict) -> bool:
    """Returns whether it is known without waiting: a process of this machine that is gone, or one
    whose last sign of life is long past."""
    if holder.get("boot") == describe_process()["boot"]:
        return not is_running(holder)
    last = holder.get("time")
    return isinstance(last, float) and time.time() - last > LONG_DEAD_S


def as_lock_file(path: Path) -> None:
    """Gives a copy of the lock the time of its last heartbeat, as that of a local folder has it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        last = read_json_object(path)["time"]
        os.utime(path, (last, last))
