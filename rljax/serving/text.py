"""The text of one response while its tokens come, one at a time.

Decides which part of the text may be sent already. The pieces do not depend on how the tokens came
in dispatches, so a streamed text and a whole one are the same. A token costs the same at any place
of a response: the server's event loop does this work for every token of every client.
"""

from collections.abc import Callable, Sequence

from rljax.sampler.stop_strings import HALF

HELD_TOKENS = 16  # after so many without a whole character at their end, there is none to come
OPEN_TOKENS = 3  # the last ones may begin a character: one has four bytes at most


class StopStrings:
    """Stop strings with what finding them character by character needs, built once for a
    request."""

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self.stops]

    def begin(self) -> list[int]:
        """How many characters of each stop string the text ends with, at its beginning."""
        return [0] * len(self.stops)

    def advance(self, matched: list[int], new: str) -> int | None:
        """Brings `matched` from the text so far to that with `new` behind it. Returns how many
        characters before the end of `new` the first complete stop string begins, if any does."""
        back = None
        for i, (stop, borders) in enumerate(zip(self.stops, self._borders, strict=True)):
            at = matched[i]
            for place, character in enumerate(new):
                while at and stop[at] != character:
                    at = borders[at - 1]
                at += stop[at] == character
                if at == len(stop):
                    back = max(back or 0, len(new) - place - 1 + len(stop))
                    break
            matched[i] = at
        return back


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`: the longest shorter beginning that it also ends with (Knuth,
    Morris and Pratt 1977)."""
    borders, at = [0], 0
    for character in stop[1:]:
        while at and stop[at] != character:
            at = borders[at - 1]
        at += stop[at] == character
        borders.append(at)
    return borders


class TextStream:
    """Pieces that can be sent: never half a character, never what may become a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: StopStrings):
        """`decode`: ids -> text."""
        self._decode, self._stops = decode, stops
        self._matched = stops.begin()
        # Tokens of a window are decoded together: what one adds may depend on the one before it (a
        # leading space). ids[:read] are in the text; ids[start:read] are there as context.
        self._ids: list[int] = []
        self._start = self._read = 0
        self._before = ""  # the text of ids[start:read]
        self._held = ""
        self._ended = False
        self.characters = 0  # of the text so far, held back or not

    def push(self, token: int) -> str:
        """Takes one more token; returns the text that can be sent now."""
        self._ids.append(token)
        window = self._decode(self._ids[self._start :])
        new = window[len(self._before) :]
        if new and not window.endswith(HALF):
            self._move(len(self._ids))
        elif len(self._ids) - self._read >= HELD_TOKENS:
            # Bytes that are no text: held for ever, each token would decode all before it again.
            end = len(self._ids) - OPEN_TOKENS
            new = self._decode(self._ids[self._start : end])[len(self._before) :]
            if new:
                self._move(end)
            else:  # special tokens: no context for what comes
                del self._ids[self._read : end]
        else:
            return ""
        return self._release(new, final=False)

    def finish(self) -> str:
        """Ends the stream; returns the rest of the text."""
        new = self._decode(self._ids[self._start :])[len(self._before) :]
        self._move(len(self._ids))
        return self._release(new, final=True)

    def _move(self, read: int) -> None:
        self._start, self._read = self._read, read
        self._before = self._decode(self._ids[self._start : read])

    def _release(self, new: str, final: bool) -> str:
        self.characters += len(new)
        if self._ended:
            return ""
        self._held += new
        back = self._stops.advance(self._matched, new)
        self._ended = back is not None
        size = len(self._held) - (0 if final else max(self._matched, default=0))
        if self._ended:
            size = len(self._held) - back
        out, self._held = self._held[:size], self._held[size:]
        return out
