"""Ends a host when something is wrong: the others are told why, and no end waits for a host that
does not come.

| exit code | meaning | start again? |
|---|---|---|
| 0 | finished | no |
| 2 | InputError: the user's to mend | no |
| 3 | stopped by hand and saved, or not all files could be kept | no |
| 143 | stopped by SIGTERM or by a notice of the cloud, and saved | yes |
| 170 | stalled | yes |
| 171 | this host or another one failed | yes, unless the one that failed ended with 2 |
| 134, 137, 139, ... | ended by JAX, or killed (128 + the signal) | yes |
"""

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax

from rljax import heartbeat
from rljax.errors import InputError
from rljax.hosts.exchange import FIRST_FAILED, Exchange, Failure, HostFailed

INPUT, STOPPED, STALLED, FAILED = 2, 143, 170, 171
GONE = "rljax/gone/"  # + number: a host that knows of the failure and ends
KEEP_S = 5.0  # for what this host has printed to reach a store
GONE_S = 12.0  # how long the first host, which holds the store, waits for the others
LOOK_AWAY_S = 2.0  # often all hosts fail alike, and each reports its own error best
CLEAR_UP_S = 10.0  # what a host that has told of its error may take before it ends
# Files for rljax.pods.supervise, which sets these variables: the Failure as JSON, the last step.
LAST_WORDS, LAST_SAVED = "RLJAX_LAST_WORDS", "RLJAX_LAST_SAVED"
# Messages of a collective whose partner is gone; JAX's heartbeats find out later which one.
_PARTNER_LOST = re.compile("Gloo|NCCL|by peer|Socket closed|UNAVAILABLE|DEADLINE_EXCEEDED")


class Ending:
    """The end of one host, by whichever thread is first."""

    def __init__(self, exchange: Exchange, heartbeat_s: float):
        self.exchange, self.heartbeat_s = exchange, heartbeat_s
        self.console = None  # rljax.hosts.console
        self.keep: Callable[[], object] = lambda: None  # puts this host's files where they stay
        self._first = threading.Lock()  # never released: there is one end
        self._told: tuple[BaseException, float] | None = None  # this host's own error, and when

    def fail(self, error: BaseException) -> None:
        """Ends this process for an error of its own, or of another host."""
        self._first.acquire()
        if _lost_a_partner(error):
            self._named_by_heartbeats()
        self._end_by(error, self.tell_of(error))

    def stalled(self, reason: str) -> None:
        """Ends this process, and all others, because nothing moves any more."""
        self._first.acquire()
        self._end(self.tell(reason, STALLED), STALLED)

    def follow(self, failure: Failure) -> None:
        """Ends this process because another one has failed, unless it is about to do so itself."""
        time.sleep(LOOK_AWAY_S)
        if self._told is None:
            if self._first.acquire(timeout=1.0):
                self._end(failure, _followed(failure))
            return
        # It is clearing up behind an error of its own. The others are gone by now, and JAX ends
        # this process as soon as it misses their heartbeats.
        error, since = self._told
        until = since + min(CLEAR_UP_S, LOOK_AWAY_S + self.heartbeat_s / 2)
        time.sleep(max(0.0, until - time.monotonic()))
        if self._first.acquire(timeout=1.0):
            text = f"hosts: cleared up for {time.monotonic() - since:.0f} s, and ends before all is"
            print(text, file=sys.stderr)
            self._end_by(error, failure)

    def tell_of(self, error: BaseException) -> Failure:
        """Tells the others of an error of this host; returns the failure that counts."""
        if _lost_a_partner(error) or isinstance(error, HostFailed):
            return self._known() or Failure(self.exchange.index, str(error), FAILED)
        self._told = self._told or (error, time.monotonic())
        code, current = INPUT if isinstance(error, InputError) else FAILED, heartbeat.current()
        place = f"(in {heartbeat.died_in() or current.phase}, step {current.step})"
        return self.tell(f"{type(error).__name__}: {error} {place}", code)

    def tell(self, reason: str, code: int) -> Failure:
        """Tells the others a reason and an exit code; returns the failure that counts: the
        first one."""
        failure = Failure(self.exchange.index, reason, code)
        try:
            if self.exchange.client.set_first(FIRST_FAILED, failure.text()):
                return failure
            return self._known() or failure
        except Exception:  # the store is gone, and with it the first host
            return failure

    def _known(self) -> Failure | None:
        text = self.exchange.client.get(FIRST_FAILED, 1.0)
        return Failure.read(text) if text else None

    def _named_by_heartbeats(self) -> None:
        """Waits until it is known which partner is gone, or JAX ends this process."""
        text, until = f"hosts: a host is gone; which, is known in {self.heartbeat_s:g} s", 15.0
        print(text, file=sys.stderr, flush=True)
        deadline = time.monotonic() + self.heartbeat_s + until
        while time.monotonic() < deadline:
            try:
                if self._known():
                    return
            except Exception:  # the first host is gone: JAX ends this process in a moment
                time.sleep(1.0)

    def _end_by(self, error: BaseException, failure: Failure) -> None:
        """Ends this process for an error in it, by what the error is; `failure` counts for all."""
        is_input = isinstance(error, InputError)
        if is_input:
            print(f"error: {error}", file=sys.stderr)
        elif failure.host == self.exchange.index:
            traceback.print_exception(error)
        self._end(failure, INPUT if is_input else _followed(failure), printed=is_input)

    def _end(self, failure: Failure, code: int, *, printed: bool = False) -> None:
        names, index = self.exchange.names, self.exchange.index
        if not printed and (failure.host != index or code == STALLED):
            print(f"hosts: {names[failure.host]}: {failure.reason}", file=sys.stderr, flush=True)
        if path := os.environ.get(LAST_WORDS):
            with open(path, "w") as file:
                file.write(failure.text())
        try:
            if self.console is not None:
                self.console.close()
            sys.stdout.flush()
            sys.stderr.flush()
            thread = threading.Thread(target=self.keep, daemon=True)  # if the store takes them soon
            thread.start()
            keep_until = time.monotonic() + KEEP_S
            self._leave()
            thread.join(max(0.0, keep_until - time.monotonic()))
        finally:
            os._exit(code)

    def _leave(self) -> None:
        """Lets the first host end last, because the store ends with it."""
        client, index = self.exchange.client, self.exchange.index
        client.set(f"{GONE}{index}", "")
        deadline = time.monotonic() + GONE_S
        while not index and time.monotonic() < deadline:
            if len(client.list(GONE)) == self.exchange.count:
                time.sleep(0.2)  # the last one has still to be answered
                return
            time.sleep(0.1)


def _followed(failure: Failure) -> int:
    """The exit code of a host that ends because of it."""
    return STALLED if failure.code == STALLED else FAILED


def _lost_a_partner(error: BaseException) -> bool:
    """Returns whether the error is that of a collective whose partner is gone: never the reason."""
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    return of_jax and _PARTNER_LOST.search(str(error)) is not None


def saved(step: int) -> None:
    """Notes that a checkpoint is complete: restarts are counted anew from there."""
    if path := os.environ.get(LAST_SAVED):
        with open(path, "w") as file:
            file.write(str(step))
