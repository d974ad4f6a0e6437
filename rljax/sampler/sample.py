"""Sample: one response, finished or so far, with everything recorded about its tokens.

Callers of the stream hold these; slots and queues are in `stream`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.batch import FinishReason
from rljax.sampler.engine import Prefix
from rljax.sampler.requests import Sampling

_PER_TOKEN = ("tokens", "logprobs", "log_kept", "entropy", "chosen", "versions")


@dataclasses.dataclass(eq=False)  # equal by identity: two requests may be the same
class Sample:
    """One response, finished or so far. Times are seconds of time.monotonic()."""

    id: int
    prompt: np.ndarray  # ids
    sampling: Sampling
    key: np.ndarray  # [2] uint32
    tokens: list[int] = dataclasses.field(default_factory=list)  # of the response
    logprobs: list[float] = dataclasses.field(default_factory=list)
    log_kept: list[float] = dataclasses.field(default_factory=list)
    entropy: list[float] = dataclasses.field(default_factory=list)
    chosen: list[bool] = dataclasses.field(default_factory=list)  # False: forced, or a tool's
    versions: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""  # why it was aborted
    submitted_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    turn: int = 0  # tokens of the response before those that stop strings are looked for in
    begun: int = 0  # tokens of the response before those that `sampling` is about
    drawn: int = 0  # tokens since the prompt, or since the last `resume` that set new limits
    resumed: int = 0  # how often
    interrupted: int = 0  # tokens of an interruption that were forced
    keep: bool = False  # on finishing, leave what was read in `partial`, for `resume`
    partial: "Partial | None" = None

    @property
    def ids(self) -> np.ndarray:
        """Prompt and response."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    def contains(self, marker: Sequence[int]) -> bool:
        """Whether these tokens stand in a row in the part that `sampling` is about."""
        size, ends = len(marker), len(self.tokens) - len(marker) + 1
        rows = (self.tokens[i : i + size] for i in range(self.begun, ends))
        return any(row == list(marker) for row in rows)

    def copy(self) -> "Sample":
        """The same request, at the same point."""
        lists = {name: list(getattr(self, name)) for name in _PER_TOKEN}
        return dataclasses.replace(self, **lists)

    def append_observation(self, more: Sequence[int], version: int) -> None:
        """Appends tokens that the policy did not choose, and makes the sample unfinished again."""
        self.resumed += 1
        if self.finish_reason is not None and self.interrupted:
            self.interrupted = len(self.sampling.interrupt_ids)  # a phrase that was cut is over
        self.tokens += [int(token) for token in more]
        for numbers in (self.logprobs, self.log_kept, self.entropy):
            numbers += [0.0] * len(more)
        self.chosen += [False] * len(more)
        self.versions += [version] * len(more)
        if more or self.finish_reason is not None:
            self.turn = len(self.tokens)
        self.finish_reason = self.partial = None
        self.error, self.finished_s = "", 0.0

    def drop_last(self, count: int) -> None:
        """Removes the last `count` tokens, which were all drawn or forced."""
        self.drawn -= count
        self.interrupted -= self.chosen[len(self.chosen) - count :].count(False)
        for name in _PER_TOKEN:
            values = getattr(self, name)
            del values[len(values) - count :]


@dataclasses.dataclass(frozen=True)
class Partial:
    """A paused sample, a copy of how it stood then and, unless parameters changed, what was
    read of it."""

    sample: Sample
    prefix: Prefix | None
    version: int | None
    then: Sample

    def take(self) -> Sample:
        """The sample to go on with: itself the first time, afterwards a new one in the state at
        the pause."""
        same = self.sample.resumed == self.then.resumed
        return self.sample if same else self.then.copy()


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens of one sample: the last `count` of its lists; `sample.finish_reason` once it
    is done."""

    sample: Sample
    count: int
