"""Signals of a run: the first is acknowledged at once and answered between two steps; a second
Ctrl-C ends the process."""

import contextlib
import os
import signal
import stat
import sys
import threading

_CURSOR = b"\x1b[?25h"  # a live display hides it


_QUITS = threading.Lock()  # held from the first call of quit_now on


def quit_now(*_) -> None:
    """Ends the process at once and without a traceback: the SIGINT handler of a command. Safe in
    any thread, even while the main one compiles; of two threads one says it."""
    if not _QUITS.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):
        os.write(2, (_CURSOR if os.isatty(2) else b"") + b"\ninterrupted: quit now\n")
    os._exit(128 + signal.SIGINT)


class Signals:
    """SIGTERM, SIGINT and SIGHUP set `received`; the loop saves and leaves between two steps.

    Python calls a handler only when its main thread is back from compiled code, after minutes of
    compiling perhaps: so a thread reads the signals from a pipe and says at once that they have
    arrived. A second SIGINT goes to the handler from before; `quit_now` is called by that thread.
    `abandons`: the loop leaves inside a step, too.
    """

    def __init__(self, *, abandons: bool = False):
        self.answer = "saving" if abandons else "saving after this step"

    def __enter__(self) -> "Signals":
        self.received, self.interrupts, self.old = None, 0, {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            with contextlib.suppress(ValueError):  # not the main thread: signals are not ours
                self.old[number] = signal.signal(number, self._note)
        if self.old:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._old_pipe = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._acknowledge, daemon=True)
            self._thread.start()
        return self

    def _note(self, number, frame) -> None:
        self.received = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        self.interrupts += 1
        if self.interrupts > 1:  # it does not wait for the step to end
            handler = self.old[number]
            (handler if callable(handler) else signal.default_int_handler)(number, frame)

    def _acknowledge(self) -> None:
        interrupts = 0
        while numbers := os.read(self._reader, 64):
            for number in numbers:
                if number not in self.old:
                    continue
                if number == signal.SIGHUP:
                    _leave_closed_terminal()
                if number == signal.SIGINT:
                    interrupts += 1
                    if interrupts > 1:
                        if self.old[number] is quit_now:
                            quit_now()
                        continue
                name = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
                hint = "; Ctrl-C again quits now" if number == signal.SIGINT else ""
                with contextlib.suppress(OSError, ValueError):
                    print(f"{name}: {self.answer}{hint}", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        if self.old:
            signal.set_wakeup_fd(self._old_pipe)
            os.close(self._writer)
            self._thread.join()
            os.close(self._reader)
        for number, handler in self.old.items():
            signal.signal(number, handler)


def _leave_closed_terminal() -> None:
    """Discards all output from now on, because writing to a terminal that is gone is an error."""
    for output in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
