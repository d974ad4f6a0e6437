"""One response, finished or so far, and what is said of it.

What lives here: what a caller of the stream holds. What does not: slots and queues (stream).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.batch import FinishReason
from rljax.sampler.engine import Prefix
from rljax.sampler.requests import Sampling


@dataclasses.dataclass(eq=False)  # a sample is itself: two requests may ask for the same
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
    drawn: int = 0  # tokens since the prompt, or since the last `resume` that set new limits
    interrupted: int = 0  # tokens of an interruption that were forced
    keep: bool = False  # on finishing, leave what was read in `partial`, for `resume`
    partial: "Partial | None" = None

    @property
    def ids(self) -> np.ndarray:
        """Prompt and response."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    def contains(self, marker: Sequence[int]) -> bool:
        """Whether the response has these tokens in a row."""
        size = len(marker)
        rows = (self.tokens[i : i + size] for i in range(len(self.tokens) - size + 1))
        return any(row == list(marker) for row in rows)

    def hear(self, more: Sequence[int], version: int) -> None:
        """Take tokens that the policy did not choose, and be unfinished again."""
        self.tokens += [int(token) for token in more]
        for numbers in (self.logprobs, self.log_kept, self.entropy):
            numbers += [0.0] * len(more)
        self.chosen += [False] * len(more)
        self.versions += [version] * len(more)
        self.finish_reason = self.partial = None

    def drop_last(self, count: int) -> None:
        """Forget the last `count` tokens."""
        for name in ("tokens", "logprobs", "log_kept", "entropy", "chosen", "versions"):
            values = getattr(self, name)
            del values[len(values) - count :]


@dataclasses.dataclass(frozen=True)
class Partial:
    """A paused sample and, unless parameters changed, what was read of it."""

    sample: Sample
    prefix: Prefix | None
    version: int


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens of one sample: the last `count` of its lists; `sample.finish_reason` once it is
    done."""

    sample: Sample
    count: int
