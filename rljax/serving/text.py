"""The text of one response while its tokens come, one at a time.

Decides which part of the text may be sent already. The pieces do not depend on the dispatches that
gave the tokens, so a streamed text and a whole one are the same. A token costs the same at any
position of a response: the server's event loop does this work for every token of every client.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from rljax.data.text.tokenizer import Tokenizer
from rljax.rewards.on_device.scorer import part_of_a_character
from rljax.sampler.stop_strings import HALF, holds_special, special_texts

HELD_TOKENS = 16  # after so many without a whole character at their end, there is none to come
OPEN_TOKENS = 3  # the last ones may begin a character: one has four bytes at most


class StopStrings:
    """Stop strings, with the tables that find them character by character (Knuth, Morris and Pratt
    1977), built once for a request."""

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self.stops]

    def begin(self) -> list[int]:
        """Returns, for each stop string, how many of its characters an empty text ends with: 0."""
        return [0] * len(self.stops)

    def advance(self, matched: list[int], added: str) -> int | None:
        """Brings `matched` from the text so far to that with `added` behind it. Returns how many
        characters before the end of `added` the first complete stop string begins; None if none
        does."""
        characters_back = None
        for i, (stop, borders) in enumerate(zip(self.stops, self._borders, strict=True)):
            count = matched[i]
            for index, character in enumerate(added):
                while count and stop[count] != character:
                    count = borders[count - 1]
                count += stop[count] == character
                if count == len(stop):
                    characters_back = max(characters_back or 0, len(added) - index - 1 + len(stop))
                    break
            matched[i] = count
        return characters_back


def _borders(stop: str) -> list[int]:
    """Returns, for each beginning of `stop`, the length of the longest shorter beginning that it
    also ends with (Knuth, Morris and Pratt 1977)."""
    borders, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return borders


class TextStream:
    """The text of a response as pieces that can be sent: never half a character, and never the
    beginning of a possible stop string."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: StopStrings,
        hidden: Mapping[int, str] | None = None,
    ):
        """`decode`: ids -> text. `hidden`: the texts of tokens that stop strings see and a reader
        does not; then `decode` writes them, too."""
        self._decode, self._stops, self._hidden = decode, stops, hidden or {}
        self._matched = stops.begin()
        # Tokens of a window are decoded together: what one adds may depend on the one before it (a
        # leading space). ids[:read] are in the text; ids[start:read] are there as context.
        self._ids: list[int] = []
        self._start = self._read = 0
        self._context = ""  # the text of ids[start:read]
        self._held_text = ""
        self._shown: list[bool] = []  # of each character that is held, where some may be hidden
        self._ended = False
        self._new_ids: list[int] = []  # the tokens whose text was read last
        self.characters = 0  # of the text so far, held back or not

    @property
    def whole(self) -> bool:
        """Returns whether all tokens so far are in the text: none is a part of a character."""
        return self._read == len(self._ids)

    def push(self, token: int) -> str:
        """Takes one more token; returns the text that can be sent now."""
        self._ids.append(token)
        window = self._decode(self._ids[self._start :])
        added = window[len(self._context) :]
        if added and not window.endswith(HALF):
            self._move_window(len(self._ids))
        elif len(self._ids) - self._read >= HELD_TOKENS:
            # Bytes that are no text: held for ever, each token would decode all before it again.
            end = len(self._ids) - OPEN_TOKENS
            added = self._decode(self._ids[self._start : end])[len(self._context) :]
            if added:
                self._move_window(end)
            else:  # special tokens: no context for the tokens that follow
                del self._ids[self._read : end]
        else:
            return ""
        return self._release(added, final=False)

    def finish(self) -> str:
        """Ends the stream; returns the rest of the text."""
        added = self._decode(self._ids[self._start :])[len(self._context) :]
        self._move_window(len(self._ids))
        return self._release(added, final=True)

    def _move_window(self, read: int) -> None:
        self._new_ids = self._ids[self._read : read]
        self._start, self._read = self._read, read
        self._context = self._decode(self._ids[self._start : read])

    def _release(self, added: str, final: bool) -> str:
        shown = self._visible(added)
        self.characters += sum(shown) if self._hidden else len(added)
        if self._ended:
            return ""
        self._held_text += added
        self._shown += shown
        characters_back = self._stops.advance(self._matched, added)
        self._ended = characters_back is not None
        size = len(self._held_text) - (0 if final else max(self._matched, default=0))
        if self._ended:
            size = len(self._held_text) - characters_back
        released, self._held_text = self._held_text[:size], self._held_text[size:]
        if self._hidden:
            shown, self._shown = self._shown[:size], self._shown[size:]
            released = "".join(itertools.compress(released, shown))
        return released

    def _visible(self, added: str) -> list[bool]:
        """Returns for each character of the tokens that were read last whether it is shown."""
        if not self._hidden:
            return []
        shown, position = [True] * len(added), 0
        for text in (self._hidden[i] for i in self._new_ids if i in self._hidden):
            position = added.find(text, position)
            if position < 0:
                break
            shown[position : position + len(text)] = [False] * len(text)
            position += len(text)
        return shown


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: Tokenizer) -> dict[int, str]:
    return tokenizer.vocabulary()


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns the bytes of a token, which may be a part of a character; None where the vocabulary
    does not tell them."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if HALF not in text:
        return text.encode()
    return part_of_a_character(_vocabulary(tokenizer).get(token, ""))


def _begun_character(read: bytes) -> bytes:
    """Returns the bytes at the end that begin a character and do not complete it."""
    for size in (3, 2, 1):
        try:
            read[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return read[-size:]
    return b""


class Offsets:
    """Offsets of the tokens of a text, in characters. The parts of a character begin where it
    does; bytes that are no text are read as the characters U+FFFD that stand for them."""

    def __init__(self, tokenizer: Tokenizer, text: TextStream):
        self._tokenizer, self._text = tokenizer, text
        self._characters = 0
        self._begun_bytes = b""  # of a character that is not whole yet

    def push(self, token: int) -> tuple[int, str]:
        """Hands a token to the text; returns the offset where it begins, and the text that can be
        sent now."""
        special = token in self._tokenizer.special_ids
        token_bytes = b"" if special else bytes_of(self._tokenizer, token) or b""
        offset, read_bytes = self._characters, self._begun_bytes + token_bytes
        if self._begun_bytes and token_bytes:  # two characters, if what was begun is none
            offset += len(read_bytes[: len(self._begun_bytes) + 1].decode(errors="replace")) - 1
        self._begun_bytes = _begun_character(read_bytes)
        self._characters += len(
            read_bytes[: len(read_bytes) - len(self._begun_bytes)].decode(errors="replace")
        )
        was_incomplete = not self._text.whole
        sent = self._text.push(token)
        if self._text.whole:  # the text itself is known
            self._characters, self._begun_bytes = self._text.characters, b""
            token_text = token_bytes.decode(errors="replace")
            if was_incomplete and HALF not in token_text:
                offset = self._characters - len(token_text)
        return offset, sent


def text_stream(
    tokenizer: Tokenizer, stops: StopStrings, decode: Callable | None = None, shown: Iterable = ()
) -> TextStream:
    """Returns the stream of a response's text up to its stop strings. `decode`: ids -> text (None:
    without special tokens), which writes the special tokens `shown`. A stop string that holds the
    text of a special token is found, and no other special token becomes visible for that."""
    if not holds_special(tokenizer, stops.stops):
        return TextStream(decode or tokenizer.decode, stops)
    texts = special_texts(tokenizer).items()
    hidden = {i: text for text, i in texts if i not in set(shown)}
    decode_with_special = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return TextStream(decode_with_special, stops, hidden)
