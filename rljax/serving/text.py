"""The text of one response while its tokens come, one at a time.

Decides which part of the text may be sent already. The pieces do not depend on how the tokens came
in dispatches, so a streamed text and a whole one are the same.
"""

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what decoders write for bytes that are no character, or not yet one


class TextStream:
    """Pieces that can be sent: never half a character, never what may become a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()):
        """`decode`: ids -> text."""
        self._decode, self._stops = decode, tuple(stops)
        # Tokens of a window are decoded together: what one adds may depend on the one before it (a
        # leading space). ids[:read] are in the text; ids[start:read] are there as context.
        self._ids: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self._ended = False
        self.characters = 0  # of the text so far, held back or not

    def push(self, token: int) -> str:
        """Takes one more token; returns the text that can be sent now."""
        self._ids.append(token)
        new, window = self._new()
        if not new or window.endswith(HALF):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(new, final=False)

    def finish(self) -> str:
        """Ends the stream; returns the rest of the text."""
        new, _ = self._new()
        self._start = self._read = len(self._ids)
        return self._release(new, final=True)

    def _new(self) -> tuple[str, str]:
        before = self._decode(self._ids[self._start : self._read])
        window = self._decode(self._ids[self._start :])
        return window[len(before) :], window

    def _release(self, new: str, final: bool) -> str:
        self.characters += len(new)
        if self._ended:
            return ""
        self._held += new
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        self._ended = bool(starts)
        if starts:
            size = min(starts)
        else:
            size = len(self._held) - (0 if final else self._beginning())
        out, self._held = self._held[:size], self._held[size:]
        return out

    def _beginning(self) -> int:
        """How many of the last characters are the beginning of a stop string."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )
