"""Records where a step's seconds go: `with timed("generate"):` adds to the Timings that the
enclosing `collect()` yields; `decoding` and `scored` record what ran at the same time.

All clocks are `time.monotonic()`, in seconds.
"""

import contextlib
import contextvars
import dataclasses
import time

from rljax import heartbeat
from rljax.metric import Metric

METRICS = {
    "sync/bytes": Metric(
        "weights written in the layout of decoding, on all devices together",
        "bytes",
        "0 where decoding reads training's own arrays",
    ),
    "sync/seconds": Metric(
        "bringing the weights to that layout, a part of time/generate_s",
        "seconds",
        "small beside time/generate_s; the first one compiles",
    ),
    "drafts/kept": Metric(
        "drafted tokens that were what was drawn",
        "share",
        "above 0.1; below: sampler.draft_tokens costs more than it saves",
    ),
    "drafts/tokens_per_step": Metric(
        "tokens that a decode step gives a sequence, mean", "tokens", "above 1.3 where drafts pay"
    ),
    "time/beside_s": Metric(
        "decoding on rollouts.sampler_devices while the others learned",
        "seconds",
        "near time/learn_s; less: fewer of them, or more prompts ahead; with a long "
        "time/generate_s: more of them, or one mesh",
    ),
    "placement/*/moved_bytes": Metric(
        "rows moved to the devices of {} and back", "bytes", "small: tokens and numbers per token"
    ),
    "placement/*/moved_s": Metric(
        "moving these rows; on several hosts also waiting for those that come back",
        "seconds",
        "small",
    ),
    "placement/*/waited_s": Metric(
        "the step waited for {}, beside which nothing else ran",
        "seconds",
        "small: it runs while samples are scored",
    ),
    "placement/*/weights_bytes": Metric("weights of {} copied to its devices", "bytes"),
    "placement/*/weights_s": Metric("copying these weights", "seconds", "small beside their use"),
}


@dataclasses.dataclass
class Timings:
    """The records of one `collect()`."""

    begun_s: float
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by name
    spans: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    live: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # sequences decoding
    scoring: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # of each sample
    # Of decoding with drafts: steps of a sequence, tokens drafted, drafts kept.
    drafts: dict[str, int] = dataclasses.field(default_factory=dict)
    # By role and name: what roles on devices of their own moved, and how long they were waited for.
    moves: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    # Weights that were brought to the layout of decoding.
    synced_bytes: int = 0
    synced_s: float = 0.0
    beside_s: float = 0.0  # of decoding while weights were learned on other devices
    pages: dict[str, float] = dataclasses.field(default_factory=dict)  # of the last rollout

    @property
    def decoding_s(self) -> float:
        """Seconds of decoding, whether or not the step waited for it."""
        return self.seconds.get("generate", 0.0) + self.beside_s

    def decoding_metrics(self) -> dict[str, float]:
        """Returns metrics of decoding: the seconds that bringing weights to its layout took, how
        long it ran beside learning, how full its pages were, and what drafts gained."""
        synced = {"sync/bytes": float(self.synced_bytes), "sync/seconds": self.synced_s}
        synced |= {"time/beside_s": self.beside_s} if self.beside_s else {}
        return synced | self.pages | draft_metrics(**self.drafts)


def draft_metrics(steps: int = 0, drafted: int = 0, kept: int = 0) -> dict[str, float]:
    """Returns metrics of decoding with drafts: steps of a sequence, tokens drafted, drafts kept; {}
    without steps."""
    if not steps:
        return {}
    per_step = (steps + kept) / steps
    return {"drafts/kept": kept / max(drafted, 1), "drafts/tokens_per_step": per_step}


_timings: contextvars.ContextVar[Timings | None] = contextvars.ContextVar("timings", default=None)


@contextlib.contextmanager
def collect():
    """Yields the Timings in which everything within the block is recorded."""
    token = _timings.set(Timings(time.monotonic()))
    try:
        yield _timings.get()
    finally:
        _timings.reset(token)


@contextlib.contextmanager
def timed(name: str):
    """Adds the seconds of the block to `name`; does nothing outside `collect`."""
    start = time.monotonic()
    try:
        with heartbeat.phase(name):
            yield
    finally:
        timings, end = _timings.get(), time.monotonic()
        if timings is not None:
            timings.seconds[name] = timings.seconds.get(name, 0.0) + end - start
            timings.spans.append((name, start, end))


def spread(name: str, seconds: float) -> None:
    """Makes `name` take `seconds` of this step, its share of work that was done for several steps
    at once. The start of the step moves by the difference."""
    if (timings := _timings.get()) is not None:
        timings.begun_s += timings.seconds.get(name, 0.0) - seconds
        timings.seconds[name] = seconds


def decoding(live: int) -> None:
    """Records the number of live sequences from now on."""
    heartbeat.beat()
    if (timings := _timings.get()) is not None:
        timings.live.append((time.monotonic(), live))


def paged(metrics: dict[str, float]) -> None:
    """Records how full the pages of a rollout were."""
    if (timings := _timings.get()) is not None:
        timings.pages = metrics


def drafted(steps: int = 0, drafted: int = 0, kept: int = 0) -> None:
    """Adds to the steps of sequences that decoded with drafts, the tokens drafted, and the drafts
    that were kept."""
    if (timings := _timings.get()) is not None:
        for name, number in (("steps", steps), ("drafted", drafted), ("kept", kept)):
            timings.drafts[name] = timings.drafts.get(name, 0) + number


def beside(seconds: float) -> None:
    """Adds to the seconds of decoding beside learning, for which the step does not wait."""
    if (timings := _timings.get()) is not None:
        timings.beside_s += seconds


def scored(begun_s: float, ended_s: float) -> None:
    """Records that a sample was scored from `begun_s` to `ended_s`."""
    if (timings := _timings.get()) is not None:
        timings.scoring.append((begun_s, ended_s))


def synced(size: int, seconds: float) -> None:
    """Adds to the bytes and seconds of bringing weights to the layout of decoding."""
    heartbeat.beat()
    if (timings := _timings.get()) is not None:
        timings.synced_bytes += size
        timings.synced_s += seconds


def moved(role: str, **numbers: float) -> None:
    """Adds bytes and seconds to those of a role whose rows or weights were moved."""
    if (timings := _timings.get()) is not None:
        sums = timings.moves.setdefault(role, {})
        for name, number in numbers.items():
            sums[name] = sums.get(name, 0.0) + number
