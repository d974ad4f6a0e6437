"""Makes everything that a command prints printable, from whatever file, folder or model it came.

`printable_streams` covers all that Python prints, warnings, logs and tracebacks included, and
`Terminal` what rich draws, whose own escape codes must arrive.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator

import rich.console
from rich.segment import Segment

from rljax.errors import printable


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
