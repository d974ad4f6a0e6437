"""Makes everything that a command prints printable, from whatever file, folder or model it came.

`printable_streams` covers all that Python prints, warnings, logs and tracebacks included, and
`Terminal` what rich draws, whose own escape codes must arrive. `streams_without_readers` keeps work
from ending with the reader of what it prints.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator

import rich.console
from rich.segment import Segment

from rljax.errors import printable

LOG = logging.getLogger("rljax")


class _Printable:
    """A text stream that shows control characters as escapes. Rich finds the stream itself under
    `rich_proxied_file`."""

    def __init__(self, stream):
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str):
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def printable_streams() -> Iterator[None]:
    """Makes all that Python writes to standard output and error within the block printable."""
    with contextlib.ExitStack() as stack:
        for name, redirect in (
            ("stdout", contextlib.redirect_stdout),
            ("stderr", contextlib.redirect_stderr),
        ):
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, _Printable):
                stack.enter_context(redirect(_Printable(stream)))
        yield


def open_closed_streams() -> None:
    """Lets the standard streams with which a process was started closed (`>&-`) read and write
    nothing. Their numbers are taken, lest a file that is opened later gets one of them, and with it
    what others print."""
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    closed = [name for name in modes if getattr(sys, name) is None]
    for name in closed:
        number = list(modes).index(name)
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    for name in closed:
        setattr(sys, name, open(os.devnull, modes[name]))


class _Outlasting:
    """A text stream that discards what is written once nobody reads it any more."""

    def __init__(self, stream, name: str):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        self._or_discard(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._or_discard(self._stream.flush)

    def _or_discard(self, action, *arguments) -> None:
        try:
            action(*arguments)
        except BrokenPipeError:  # of a pipe, as `| head` or a `tee` that was killed leaves it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            LOG.warning("nobody reads the %s any more: the work goes on without it", self._name)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@contextlib.contextmanager
def streams_without_readers() -> Iterator[None]:
    """Lets the block go on when the pipe to which it prints has lost its reader, with a warning.
    What is printed is discarded from then on, also after the block."""
    with contextlib.ExitStack() as stack:
        for name, redirect, shown in (
            ("stdout", contextlib.redirect_stdout, "standard output"),
            ("stderr", contextlib.redirect_stderr, "standard error"),
        ):
            stream = getattr(sys, name)
            # Below the stream that escapes, under which rich finds it.
            is_printable = isinstance(stream, _Printable)
            below = stream.rich_proxied_file if is_printable else stream
            if stream is not None and not isinstance(below, _Outlasting):
                outlasting = _Outlasting(below, shown)
                stack.enter_context(
                    redirect(_Printable(outlasting) if is_printable else outlasting)
                )
        yield


class Terminal(rich.console.Console):
    """A console of rich whose text is made printable."""

    def __init__(self, **options):
        # Not the stream that escapes: a live display takes standard output for itself.
        stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        super().__init__(**{"file": stream, **options})

    def render(self, renderable, options=None) -> Iterator[Segment]:
        """Yields the segments of rich with printable text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
