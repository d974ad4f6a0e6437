"""The text of a response in which tool calls may stand, while its tokens come.

What is content for sure is sent at once; from where a call may begin on, all waits for the end.
"""

import json
import uuid
from collections.abc import Sequence

from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.calls import Format
from rljax.sampler.stop_strings import text_before_stop
from rljax.serving.text import StopStrings, TextStream


class CallStream:
    """As `TextStream`; once it is finished, `calls` are those of the response, as OpenAI's API
    writes them, and `reasoning` what the format keeps apart."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: Format,
        stops: Sequence[str],
        schemas: Sequence[dict] | None,
    ):
        """`stops`: the client's. `schemas`: its tools; None: calls are not wanted."""
        self._tokenizer, self._format, self._stops, self._schemas = tokenizer, form, stops, schemas
        self._text = TextStream(form.decoder(tokenizer), StopStrings((*stops, *form.starts)))
        self._tokens: list[int] = []
        self._sent: list[str] = []
        self._space = ""  # at the end of what was sent: a call may follow, and take it away
        self.calls: list[dict] = []
        self.reasoning = ""

    @property
    def characters(self) -> int:
        return self._text.characters

    def push(self, token: int) -> str:
        """Takes one more token; returns the text that can be sent now."""
        self._tokens.append(token)
        new = self._space + self._text.push(token)
        if not self._format.starts:
            return ""
        sent = new.rstrip()
        self._space = new[len(sent) :]
        self._sent.append(sent)
        return sent

    def finish(self) -> str:
        """Ends the stream; returns the rest of the content."""
        text = self._format.decode(self._tokenizer, self._tokens)
        text = text_before_stop(text, self._stops)
        parsed = self._format.parse(text, self._schemas or ())
        self.reasoning = parsed.reasoning
        content = parsed.content
        if parsed.problem and self._schemas is not None:
            content = text  # the client gets what its calls would have been as they are
        elif self._schemas is not None:
            self.calls = [_as_openai(call) for call in parsed.calls]
        return content[sum(map(len, self._sent)) :]


def _as_openai(call) -> dict:
    # Nine letters and digits: some templates take no other ids back.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id or uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
