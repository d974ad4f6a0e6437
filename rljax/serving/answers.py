"""The JSON of answers: completions, chat completions, their chunks, and errors."""

import dataclasses
import json
import time
import uuid

from rljax.batch import FinishReason
from rljax.data.text.tokenizer import Tokenizer
from rljax.sampler import Sampling
from rljax.sampler.stop_strings import HALF
from rljax.serving.call_stream import CallStream
from rljax.serving.fields import ParsedRequest
from rljax.serving.text import Offsets, StopStrings, TextStream, bytes_of, text_stream
from rljax.serving.worker import TokenChunk

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.INTERRUPT: "stop"}


def error_body(message: str, kind: str, *, code: str | None = None):
    """Returns the JSON of an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@dataclasses.dataclass(frozen=True)
class Delta:
    """The addition of one piece to a choice: text, and its tokens with the offset of each."""

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    offsets: list[int]
    reason: str | None
    calls: list[dict] = dataclasses.field(default_factory=list)  # with the last piece
    reasoning: str = ""


class Answer:
    """The answer to one request, built from its pieces as they come."""

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str):
        self.request, self._tokenizer, self._model = request, tokenizer, model
        count = len(request.requests) * request.n
        stops, form = StopStrings(request.stops), request.calls
        self._texts = [
            text_stream(tokenizer, stops)
            if form is None
            else CallStream(tokenizer, form, request.stops, request.tools, request.begun)
            for _ in range(count)
        ]
        self._offsets = [Offsets(tokenizer, text) for text in self._texts]
        self.left = count  # choices that are not finished
        self.prompt_logprobs: list[list[float]] = []  # of each prompt, where they are asked for
        # Of each choice's prompt and response, where others than the sampled tokens are asked for.
        self.likeliest: list[tuple[list[float], list[list[tuple[int, float]]]]] = []
        self.completion_tokens = 0
        self._deltas: list[list[Delta]] = [[] for _ in range(count)]
        name = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._version = 0

    def take(self, piece: TokenChunk) -> Delta:
        """Adds a piece to the answer and returns what it adds to its choice."""
        text = self._texts[piece.sample]
        echo_length = len(self._echo(piece.sample))
        parts, offsets = [], []
        for token in piece.tokens:
            if self.request.logprobs and not self.request.chat:
                offset, part = self._offsets[piece.sample].push(token)
                offsets.append(echo_length + offset)
            else:
                part = text.push(token)
            parts.append(part)
        reason, call_fields = None, {}
        if piece.finish_reason is not None:
            parts.append(text.finish())
            self.left -= 1
            reason = REASONS[piece.finish_reason]
            if isinstance(text, CallStream):
                reason = "tool_calls" if text.calls and reason == "stop" else reason
                call_fields = {"calls": text.calls, "reasoning": text.reasoning}
        self.completion_tokens += len(piece.tokens)
        self._version = max(self._version, piece.version)
        text_sent = "".join(parts)
        delta = Delta(
            piece.sample, text_sent, piece.tokens, piece.logprobs, offsets, reason, **call_fields
        )
        if not self.request.stream:
            self._deltas[piece.sample].append(delta)
        return delta

    def unsampled(self) -> list[Delta]:
        """Ends every choice without a token; returns the deltas. For requests that only echo their
        prompts."""
        deltas = [Delta(i, "", [], [], [], REASONS[FinishReason.LENGTH]) for i in range(self.left)]
        self._deltas, self.left = [[delta] for delta in deltas], 0
        return deltas

    def sequences(self) -> list[tuple[list[int], Sampling]]:
        """Returns (the ids of prompt and response, Sampling) of every choice, when none is left."""
        joined = [self._joined(deltas) for deltas in self._deltas]
        requests = [self.request.requests[delta.choice // self.request.n] for delta in joined]
        return [
            ([*ids, *delta.tokens], sampling)
            for (ids, sampling), delta in zip(requests, joined, strict=True)
        ]

    def encoded(self) -> str:
        """Returns the whole answer as JSON text, once nothing is left."""
        # Piece by piece, which json.dumps would not do: it keeps all other threads waiting, and
        # log-probs of many samples are long.
        choices = [self._choice(self._joined(deltas)) for deltas in self._deltas]
        body = self._with_head(choices, "chat.completion") | {"usage": self.usage()}
        return "".join(json.JSONEncoder().iterencode(body))

    def chunk(self, delta: Delta, *, first: bool) -> dict:
        """Returns the JSON of one server-sent chunk. `first`: the first chunk of its choice."""
        chunk = self._with_head([self._choice(delta, first=first, delta=True)])
        if not self.request.usage:
            return chunk
        return chunk | {"usage": self.usage() if self.request.usage == "each" else None}

    def usage_chunk(self) -> dict:
        """Returns the JSON of the chunk that holds nothing but the counts of tokens."""
        return self._with_head([]) | {"usage": self.usage()}

    def usage(self) -> dict:
        """Returns the counts of tokens that were read and sampled, EOS included. A prompt counts
        once, however many samples it has."""
        prompt = sum(len(ids) for ids, _ in self.request.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }

    def _with_head(self, choices: list, chat_kind: str = "chat.completion.chunk") -> dict:
        kind = chat_kind if self.request.chat else "text_completion"
        version = f"version-{self._version}"
        return self._head | {"object": kind, "choices": choices, "system_fingerprint": version}

    def _echo(self, choice: int) -> str:
        return self.request.echo[choice // self.request.n]

    def _joined(self, deltas: list[Delta]) -> Delta:
        lists = ("tokens", "logprobs", "offsets")
        joined = {name: [x for delta in deltas for x in getattr(delta, name)] for name in lists}
        text = "".join(delta.text for delta in deltas)
        return dataclasses.replace(deltas[-1], text=text, **joined)

    def _choice(self, piece: Delta, *, first: bool = True, delta: bool = False) -> dict:
        choice = {"index": piece.choice, "finish_reason": piece.reason, "logprobs": None}
        if not self.request.chat:
            choice["text"] = (self._echo(piece.choice) if first else "") + piece.text
            if self.request.logprobs:
                of_prompt = self._prompt_tokens(piece.choice) if first else ([], [], [])
                tokens, logprobs, offsets = of_prompt
                choice["logprobs"] = {
                    "tokens": [self._token(token) for token in [*tokens, *piece.tokens]],
                    "token_logprobs": [*logprobs, *piece.logprobs],
                    "top_logprobs": self._top_logprobs(piece, bool(tokens)),
                    "text_offset": [*offsets, *piece.offsets],
                }
            return choice
        message = {"role": "assistant"} if first else {}
        message["content"] = piece.text or (None if piece.calls else "")
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            numbered = [{"index": i} | call for i, call in enumerate(piece.calls)]
            message["tool_calls"] = numbered if delta else piece.calls
        choice["delta" if delta else "message"] = message
        if self.request.logprobs:
            choice["logprobs"] = {
                "content": [
                    self._chat_entry(token, logprob)
                    | {"top_logprobs": [self._chat_entry(*pair) for pair in likeliest]}
                    for token, logprob, likeliest in zip(
                        piece.tokens, piece.logprobs, self._likeliest(piece), strict=True
                    )
                ]
            }
        return choice

    def _prompt_tokens(self, choice: int) -> tuple[list[int], list[float | None], list[int]]:
        """Returns the tokens of an echoed prompt, their log-probs and offsets; the first token has
        no log-prob, because nothing predicts it."""
        if not (self.prompt_logprobs or self.request.prompt_logprobs and self.likeliest):
            return [], [], []
        prompt = choice // self.request.n
        scored = self.likeliest[choice][0] if self.likeliest else self.prompt_logprobs[prompt]
        ids = self.request.requests[prompt][0]
        text = Offsets(self._tokenizer, TextStream(self._tokenizer.decode, StopStrings()))
        offsets = [text.push(token)[0] for token in ids]
        return list(ids), [None, *scored[1 : len(ids)]], offsets

    def _likeliest(self, piece: Delta) -> list[list[tuple[int, float]]]:
        """Returns the likeliest (token, log-prob) at each of a piece's tokens; none where none were
        asked for, or the prompt and the whole response are not known yet."""
        if not self.likeliest:
            return [[] for _ in piece.tokens]
        return self.likeliest[piece.choice][1][-len(piece.tokens) :] if piece.tokens else []

    def _top_logprobs(self, piece: Delta, with_prompt: bool) -> list[dict | None] | None:
        """Returns {text: log-prob} at each token; a sampled one is there with its own log-prob."""
        if not self.likeliest:
            return None
        response_entries = [
            self._logprobs_by_text([*likeliest, (token, logprob)])
            for token, logprob, likeliest in zip(
                piece.tokens, piece.logprobs, self._likeliest(piece), strict=True
            )
        ]
        if not with_prompt:
            return response_entries
        scored, tops = self.likeliest[piece.choice]
        ids = self.request.requests[piece.choice // self.request.n][0]
        prompt_entries = [
            self._logprobs_by_text([*tops[t], (ids[t], scored[t])]) for t in range(1, len(ids))
        ]
        return [None, *prompt_entries, *response_entries]

    def _logprobs_by_text(self, pairs: list[tuple[int, float]]) -> dict[str, float]:
        """Returns the log-probs by the tokens' texts. The last token has its own text, as among the
        tokens of the answer; another one whose text is taken, or half a character, is called
        token_id:NUMBER."""
        last_token, last_logprob = pairs[-1]
        by_text, last_text = {}, self._token(last_token)
        for token, logprob in pairs[:-1]:
            text = last_text if token == last_token else self._token(token)
            is_taken = text in (last_text, *by_text) or HALF in text
            name = f"token_id:{token}" if is_taken and token != last_token else text
            by_text[name] = logprob
        return by_text | {last_text: last_logprob}

    def _token(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _chat_entry(self, token: int, logprob: float) -> dict:
        raw = bytes_of(self._tokenizer, token)
        raw = None if raw is None else list(raw)
        return {"token": self._token(token), "logprob": logprob, "bytes": raw}
