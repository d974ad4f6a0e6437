"""The text of a response in which tool calls may stand, while its tokens come.

Text that is certainly content is sent at once; from where a call may begin on, all waits for the
end.
"""

import json
import uuid
from collections.abc import Sequence

from rljax.data.text.ends import text_before_stop
from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.calls import Format
from rljax.reasoning import LONGEST_MARK, begins_reasoning, closes_reasoning, reasoning_spans
from rljax.sampler.stop_strings import holds_special
from rljax.serving.text import StopStrings, text_stream


class CallStream:
    """The text of a response with tool calls, as `TextStream` gives it for one without. Once it is
    finished, `calls` are those of the response in OpenAI's form, and `reasoning` is the text that
    the format keeps apart from the answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: Format,
        stops: Sequence[str],
        schemas: Sequence[dict] | None,
        begun: str = "",
    ):
        """`stops`: the client's. `schemas`: its tools; None: calls are not wanted. `begun`: as in
        Format.parse."""
        self._tokenizer, self._format, self._stops, self._schemas = tokenizer, form, stops, schemas
        self._begun = begun
        # Whether the text stands within reasoning; None: unknown.
        self._in_reasoning: bool | None = None
        stream_options = dict(decode=form.decoder(tokenizer), shown=form.shown(tokenizer))
        self._text = text_stream(tokenizer, StopStrings(stops), **stream_options)
        self._tokens: list[int] = []
        self._text_so_far = ""  # the text but what may become a stop string
        self._searched = 0  # characters of it in which no reasoning ends, and no call begins
        self._sent = 0  # characters
        self.calls: list[dict] = []
        self.reasoning = ""

    @property
    def characters(self) -> int:
        """Characters of the text so far, those that are held back included."""
        return self._text.characters

    @property
    def whole(self) -> bool:
        """Returns whether all tokens so far are in the text."""
        return self._text.whole

    def push(self, token: int) -> str:
        """Takes one more token; returns the text that can be sent now."""
        self._tokens.append(token)
        self._text_so_far += self._text.push(token)
        if not self._format.starts:
            return ""
        text = self._text_so_far
        if self._in_reasoning is None:
            self._in_reasoning = self._begins(text.lstrip())
        if self._in_reasoning:  # a draft is no call, and is sent as it is
            end = closes_reasoning(text, self._searched)
            self._in_reasoning = end < 0
            self._searched = end if end > 0 else max(self._searched, len(text) - LONGEST_MARK)
        return self._send(len(text) if self._in_reasoning else self._before_calls())

    def _begins(self, text: str) -> bool | None:
        """Returns whether a text begins or goes on with reasoning; None where more has to come. A
        call that comes at once is one, whatever the prompt has begun."""
        if any(text.startswith(start) for start in self._format.starts):
            return False
        if any(start.startswith(text) for start in self._format.starts):
            return None
        if reasoning_spans("?", self._begun) or begins_reasoning(text):
            return True
        return None if len(text) < LONGEST_MARK else False

    def _before_calls(self) -> int:
        """Counts the characters of the text before what is a call, or may become one."""
        text, starts = self._text_so_far, self._format.starts
        positions = [text.find(start, self._searched) for start in starts]
        call_starts = [position for position in positions if position >= 0]
        if call_starts:
            self._searched = min(call_starts)
            return self._searched
        longest_begun = max(map(len, starts)) - 1
        begun_sizes = (
            size
            for size in range(min(longest_begun, len(text) - self._searched), 0, -1)
            if any(start.startswith(text[len(text) - size :]) for start in starts)
        )
        self._searched = len(text) - next(begun_sizes, 0)
        return self._searched

    def _send(self, end: int) -> str:
        """Returns the unsent part of the first `end` characters, without white space at their end:
        a call may follow, and take it away."""
        end = self._sent + len(self._text_so_far[self._sent : end].rstrip())
        piece, self._sent = self._text_so_far[self._sent : end], end
        return piece

    def finish(self) -> str:
        """Ends the stream; returns the rest of the content."""
        text = self._text_so_far + self._text.finish()
        if not holds_special(self._tokenizer, tuple(self._stops)):  # but end tokens, if it has any
            text = self._format.decode(self._tokenizer, self._tokens)
            text = text_before_stop(text, self._stops)
        parsed = self._format.parse(text, self._schemas or (), begun=self._begun)
        self.reasoning = parsed.reasoning if self._format.channels else ""
        if self._schemas is None:
            content = parsed.content if self._format.channels else text
        else:
            content = text if parsed.problem and not parsed.calls else parsed.said
            self.calls = [_as_openai(call) for call in parsed.calls]
        return content[self._sent :]


def _as_openai(call) -> dict:
    # Nine letters and digits: some templates take no other ids back.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id or uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
