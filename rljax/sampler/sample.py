"""Sample: one response, finished or so far, with everything recorded about its tokens.

Callers of the stream hold these; slots and queues are in `stream`.
"""

import base64
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rljax.batch import FinishReason
from rljax.sampler.engine import Prefix
from rljax.sampler.prompt_images import PromptImages
from rljax.sampler.requests import Sampling
from rljax.sampler.stop_strings import find_stop

# The record of a token of the response, its fields side by side: a dispatch's tokens are one copy.
RECORD = np.dtype(
    [
        ("ids", np.int32),
        ("logprobs", np.float32),
        ("log_kept", np.float32),
        ("entropy", np.float32),
        ("versions", np.int32),
        ("chosen", np.bool_),
    ],
    align=True,
)
_FIRST_ROOM = 64  # tokens
# Counts of a Sample by their names in its state.
_COUNTS = {
    "turn": "turn_start",
    "begun": "begun",
    "drawn": "drawn",
    "resumed": "resumed",
    "interrupted": "interrupted",
    "branched": "branched",
}


@dataclasses.dataclass(eq=False)  # equal by identity: two requests may be the same
class Sample:
    """One response, finished or so far. Times are seconds of time.monotonic().

    The numbers of its tokens are arrays [tokens of the response]: views that are good until the
    sample goes on."""

    id: int
    prompt: np.ndarray  # ids
    sampling: Sampling
    key: np.ndarray  # [2] uint32
    finish_reason: FinishReason | None = None
    error: str = ""  # why it was aborted
    submitted_s: float = 0.0
    first_token_s: float = 0.0
    turn_start: int = 0  # tokens of the response before those that stop strings are looked for in
    begun: int = 0  # tokens of the response before those that `sampling` is about
    drawn: int = 0  # tokens since the prompt, or since new limits came
    resumed: int = 0  # how often it was resumed
    interrupted: int = 0  # tokens of an interruption that were forced
    branched: int = 0  # tokens of the response that are those of the sample it continues
    budget_key: np.ndarray | None = None  # [2], decides the thinking budget; None: `key`
    keep: bool = False  # on finishing, leave what was read in `partial`, for `resume`
    hold: bool = False  # on finishing, keep the slot, for `deliver`
    partial: "Partial | None" = None
    images: PromptImages | None = None  # of its prompt
    cached: int = 0  # while it does not decode: tokens cached in its slot or beside the slots
    lost: int = 0  # tokens that were cached, and have to be read again
    _records: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(_FIRST_ROOM, RECORD))
    _count: int = 0

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of the response [N]: int32."""
        return self._records["ids"][: self._count]

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probs of the response's tokens [N] in nats, when they were drawn: float32."""
        return self._records["logprobs"][: self._count]

    @property
    def log_kept(self) -> np.ndarray:
        """Log-probs [N] minus those with which the tokens were drawn (0 without
        a rule): float32."""
        return self._records["log_kept"][: self._count]

    @property
    def entropy(self) -> np.ndarray:
        """Entropy of each choice [N] in nats: float32."""
        return self._records["entropy"][: self._count]

    @property
    def chosen(self) -> np.ndarray:
        """Choices of the policy [N]: bool; False: a token that was forced, or a tool's."""
        return self._records["chosen"][: self._count]

    @property
    def versions(self) -> np.ndarray:
        """Version of the parameters that drew each token [N]: int32."""
        return self._records["versions"][: self._count]

    @property
    def size(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + self._count

    @property
    def ids(self) -> np.ndarray:
        """Prompt and response [size]: int32."""
        return np.concatenate([self.prompt, self.tokens])

    def contains(self, marker: Sequence[int]) -> bool:
        """Returns whether these tokens stand in a row in the part that `sampling` is about."""
        tokens = self.tokens[self.begun :].tolist()
        size, marker = len(marker), list(marker)
        return any(tokens[i : i + size] == marker for i in range(len(tokens) - size + 1))

    def copy(self) -> "Sample":
        """Returns the same request, at the same point."""
        return dataclasses.replace(self, _records=self._records.copy())

    def part(self, start: int, end: int) -> "Sample":
        """Returns a copy whose response is tokens [start, end) of prompt and response, and whose
        prompt is what stands before them."""
        prompt_tokens = len(self.prompt)
        records = self._records[start - prompt_tokens : end - prompt_tokens].copy()
        branched = max(0, self.branched - (start - prompt_tokens))
        return dataclasses.replace(
            self, prompt=self.ids[:start], branched=branched, _records=records, _count=end - start
        )

    def continued(
        self, at: int, request_id: int, key: np.ndarray, sampling: Sampling | None = None, **how
    ) -> "Sample":
        """Returns a new request that goes on behind the first `at` tokens of the response, with
        their records. It has the thinking budget of this sample. `key` [2] decides its draws.
        `sampling`: a new turn begins at `at`, with these limits; None: the limits of this sample,
        as far as it had not used them up there."""
        later = self._records[at : self._count]
        budget_key = self.key if self.budget_key is None else self.budget_key
        sample = Sample(
            request_id,
            self.prompt,
            self.sampling,
            key,
            turn_start=self.turn_start,
            begun=self.begun,
            drawn=self.drawn - len(later),
            branched=at,
            budget_key=budget_key,
            interrupted=self.interrupted - int(np.count_nonzero(~later["chosen"])),
            **how,
        )
        sample.record(self._records[:at])
        if sampling is not None:
            sample.limit(sampling)
        return sample

    def get_state(self) -> dict:
        """Returns the state of the sample as JSON. `from_state` makes the sample again, but for the
        images of its prompt, which are the data's."""
        max_tokens = self.sampling.max_response_tokens
        return {
            **{name: getattr(self, field) for name, field in _COUNTS.items()},
            "id": self.id,
            "hold": self.hold,
            "key": _text(self.key, np.uint32),
            "prompt": _text(self.prompt, np.int32),
            "max_response_tokens": max_tokens,
            "stop_strings": list(self.sampling.stop_strings),
            "budget_key": None if self.budget_key is None else _text(self.budget_key, np.uint32),
            "finish_reason": None if self.finish_reason is None else int(self.finish_reason),
            "tokens": _text(self._records[: self._count], RECORD),
        }

    @classmethod
    def from_state(cls, state: dict, sampling: Sampling) -> "Sample":
        """Returns the sample of a state, with the rules that it was sampled by. Raises KeyError,
        TypeError or ValueError for what is no state."""
        max_tokens, reason = int(state["max_response_tokens"]), state["finish_reason"]
        stops = tuple(state.get("stop_strings", sampling.stop_strings))
        limits = dict(max_response_tokens=max_tokens, stop_strings=stops)
        budget = state["budget_key"]
        sample = cls(
            int(state["id"]),
            _array(state["prompt"], np.int32),
            dataclasses.replace(sampling, **limits),
            _array(state["key"], np.uint32),
            hold=bool(state["hold"]),
            finish_reason=None if reason is None else FinishReason(reason),
            budget_key=None if budget is None else _array(budget, np.uint32),
            **{field: int(state[name]) for name, field in _COUNTS.items()},
        )
        sample.record(_array(state["tokens"], RECORD))
        if sample.key.shape != (2,) or not 0 <= sample.drawn <= min(max_tokens, sample._count):
            raise ValueError(f"sample {sample.id} has drawn {sample.drawn} tokens of {max_tokens}")
        return sample

    def record(self, new: np.ndarray) -> None:
        """Appends the records [N] (RECORD) of tokens."""
        end = self._count + len(new)
        if end > len(self._records):
            room = np.zeros(max(end, 2 * len(self._records)), RECORD)
            room[: self._count] = self._records[: self._count]
            self._records = room
        self._records[self._count : end] = new
        self._count = end

    def append_observation(self, more: Sequence[int], version: int) -> None:
        """Appends tokens that the policy did not choose, and makes the sample unfinished again."""
        self.resumed += 1
        if self.finish_reason is not None and self.interrupted:
            self.interrupted = len(self.sampling.interrupt_ids)  # a phrase that was cut is over
        records = np.zeros(len(more), RECORD)
        records["ids"], records["versions"] = more, version
        self.record(records)
        if len(more) or self.finish_reason is not None:
            self.turn_start = self._count
        self.finish_reason = self.partial = None
        self.error = ""

    def limit(self, sampling: Sampling) -> None:
        """Sets the limits of what comes next."""
        self.sampling, self.drawn, self.interrupted = sampling, 0, 0
        self.turn_start = self.begun = self._count

    def drop_last(self, count: int) -> None:
        """Removes the last `count` tokens, which were all drawn or forced."""
        self.drawn -= count
        remaining = self._count - count
        self.interrupted -= count - int(np.count_nonzero(self.chosen[remaining:]))
        self._count = remaining

    def cut(self, new: int, decode: Callable) -> int:
        """Ends the sample at a stop string; returns how many of its `new` tokens are beyond it."""
        if not self.sampling.stop_strings or not new:
            return 0
        ids = self.tokens[self.turn_start :].tolist()
        remaining = find_stop(ids, self.sampling.stop_strings, decode, len(ids) - new)
        if remaining is None:
            return 0
        self.drop_last(len(ids) - remaining)
        self.finish_reason = FinishReason.STOP
        return len(ids) - remaining

    def forget(self) -> None:
        """Notes that what was read of it is gone."""
        self.lost, self.cached = max(self.lost, self.cached), 0


def _text(array: np.ndarray, dtype) -> str:
    """Returns the bytes of an array [N] as text of JSON."""
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def _array(text: str, dtype) -> np.ndarray:
    """Returns the array of a `_text`."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


@dataclasses.dataclass(frozen=True)
class Partial:
    """A paused sample, a copy of how it stood then and, unless parameters changed, what was
    read of it."""

    sample: Sample
    prefix: Prefix | None
    version: int | None
    then: Sample

    def take(self) -> Sample:
        """Returns the sample to go on with: itself the first time, afterwards a new one in the
        state at the pause."""
        unchanged = self.sample.resumed == self.then.resumed
        return self.sample if unchanged else self.then.copy()


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens of one sample: the last `count` of its arrays; `sample.finish_reason` once it
    is done."""

    sample: Sample
    count: int
