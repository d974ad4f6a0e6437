"""Requests to a `RewardPool` and its results: jobs, their calls, and scores.

Plain records that two threads share.
"""

import collections
import math
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field

_REASONS, _SHOWN = 3, 300  # reasons of failures in a line, characters of one


@dataclass(frozen=True)
class Score:
    """The result of one sample. Unless status is "ok", `value` is NaN and `parts` is empty.

    With status "ok" and `over_limit`, the sample passed a limit of time or memory, and `value` is
    what its reward declares for that (`on_timeout`). `seconds` is the time of the call that scored
    it, alone or with its group. `ended_s` is the time.monotonic() at which the score was known; NaN
    if nobody looked at the clock.
    """

    value: float
    parts: dict[str, float]
    status: str  # "ok" | "timeout" | "error" | "abstained", by None
    seconds: float
    message: str = ""
    ended_s: float = field(default=math.nan, compare=False)
    over_limit: bool = False

    @property
    def failure(self) -> str:
        """Returns the status and its message; "" of a score that did not fail."""
        return "" if self.status == "ok" else f"{self.status}: {self.message}"


def counted_failures(failures: Sequence[str]) -> str:
    """Returns the most frequent of these texts with their counts, such as "error: no answer (2 of
    3); timeout: 60 s (1 of 3)"; the text alone where all are equal."""
    counts = collections.Counter(failures)
    texts = []
    for text, count in counts.most_common(_REASONS):
        share = f" ({count:,} of {len(failures):,})" if len(counts) > 1 else ""
        texts.append(f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}{share}")
    others = len(counts) - len(texts)
    return "; ".join([*texts, *([f"and other reasons: {others:,}"] if others else [])])


class Job:
    """The request of one caller: a score per sample, and `done` when the last is known."""

    def __init__(self, count: int):
        self.scores: list[Score | None] = [None] * count
        self.left = count
        self.failure: BaseException | None = None  # a failure of the pool, not of a sample
        self.ended = False
        self.done: queue.SimpleQueue = queue.SimpleQueue()  # unlike an Event safe in handlers

    def end(self, failure: BaseException | None = None) -> None:
        """Marks the job as ended: no further score will come. `failure` is an error of the
        pool itself."""
        if not self.ended:
            self.failure, self.ended = failure, True
            self.done.put(None)


@dataclass(eq=False)
class RewardCall:
    """A call of the reward in a worker: the pickled fields of the samples at `rows` of a job."""

    job: Job
    rows: tuple[int, ...]
    blob: bytes
    number: int = -1
