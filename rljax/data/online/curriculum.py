"""Draws prompts from a weighted mixture of sources, without those that are solved.

Each source is a grain dataset (`loader`). The draws are ours, because a mixture of grain takes
turns by shares that stay the same, and leaves nothing out for what was scored meanwhile.
"""

import collections
import logging
from collections.abc import Sequence

import numpy as np

from rljax.data.online.loader import Loader
from rljax.data.online.prompts import PromptRecord
from rljax.data.online.stream import Stream
from rljax.errors import InputError

LOG = logging.getLogger("rljax")


def mixture(name: str, weights: Sequence[float], sources: int) -> np.ndarray:
    """Normalises weights [sources] to chances [sources] that sum to 1; () means equal chances.
    Raises InputError, under the name of the field, unless there is one weight of at least 0 for
    each source, and not all are 0."""
    shares = np.asarray(weights if len(weights) else [1.0] * sources, np.float64)
    if len(shares) != sources or (shares < 0).any() or shares.sum() <= 0:
        raise InputError(
            name,
            value=tuple(weights),
            rule=f"{sources} weights >= 0, one for data.train and one "
            "for each of data.sources, not all 0",
            fix=f"{(1.0,) * sources}, or () to draw from all alike",
        )
    return shares / shares.sum()


def _prompt_id(item: PromptRecord | dict) -> int:
    """Returns the id of a prompt, or of a row of a file that is learned from ({"prompt_id",
    "item"})."""
    return item.prompt_id if isinstance(item, PromptRecord) else item["prompt_id"]


class Curriculum:
    """An endless order of prompts like Loader's, from several sources and with prompts retired.

    The source of draw i is a function of (seed, i): chance w0 + (w1 - w0) min(i / horizon, 1). Each
    source is a Loader of its own. A prompt whose pass rate over all its samples has reached
    `retire_at` is skipped from its source's next epoch on (No-Positive-Resampling, arXiv
    2510.13786); `drop` skips for good. The state is JSON.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[PromptRecord | dict] | Stream],
        *,
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (),
        final_weights: Sequence[float] = (),
        horizon_prompts: int = 1,
        retire_at: float = 0.0,
    ):
        self.batch_size, self.seed, self.retire_at = batch_size, seed, retire_at
        self.position, self.horizon = 0, horizon_prompts
        self._start = mixture("data.weights", weights, len(sources))
        self._end = mixture("data.final_weights", final_weights or weights, len(sources))
        self._loaders: list[Loader] = [
            Loader(items, batch_size=1, seed=(seed + 7919 * i) % 2**32)
            for i, items in enumerate(sources)
        ]
        # A stream's prompts come once: they have no ids, and none is retired.
        self._ids = [
            set() if isinstance(items, Stream) else {_prompt_id(item) for item in items}
            for items in sources
        ]
        self._passes: dict[int, list[int]] = {}  # prompt_id -> [right, samples]
        self._retired: set[int] = set()
        self._dropped: set[int] = set()

    def chances(self) -> np.ndarray:
        """Returns the chance of each source for the next draw, [sources]."""
        share = min(self.position / self.horizon, 1.0)
        return (1 - share) * self._start + share * self._end

    @property
    def epoch(self) -> float:
        """Returns the passes over the source that has been read most often."""
        return max(loader.epoch for loader in self._loaders)

    @property
    def items_per_epoch(self) -> float:
        """Returns the draws, at the current chances, until the first source has been read once."""
        pairs = zip(self._loaders, self.chances(), strict=True)
        return min(loader.items_per_epoch / p for loader, p in pairs if p > 0)

    @property
    def dropped(self) -> int:
        """Returns the number of rows of streams that were passed over."""
        return sum(loader.dropped for loader in self._loaders)

    @property
    def streamed(self) -> bool:
        """Returns whether a source is a stream."""
        return any(loader.streamed for loader in self._loaders)

    @property
    def counts(self) -> collections.Counter[str]:
        """Returns the numbers of rows of streams that were passed over, by reason, and that were
        cut."""
        counts = collections.Counter()
        for loader in self._loaders:
            counts.update(loader.counts)  # with those that are 0
        return counts

    @property
    def skipped(self) -> int:
        """Returns the number of prompts that are not drawn any more."""
        return len(self._retired | self._dropped)

    def __iter__(self):
        return self

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """Returns the next `count` prompts. Raises InputError if a stream has no usable row for
        long (`Loader.take`)."""
        return [self._draw() for _ in range(count)]

    def _draw(self) -> PromptRecord | dict:
        raw = np.random.Philox(np.random.SeedSequence([self.seed, 1, self.position])).random_raw()
        edges = np.cumsum(self.chances())
        source = min(int(np.searchsorted(edges, raw / 2**64, side="right")), len(edges) - 1)
        self.position += 1
        loader, ids = self._loaders[source], self._ids[source]
        while True:
            if ids and loader.position % len(ids) == 0 and loader.position:
                self._retire(ids)
            item = loader.take(1)[0]
            if not ids or _prompt_id(item) not in self._retired | self._dropped:
                return item

    def _retire(self, ids: set[int]) -> None:
        """Leaves out the solved prompts at the border of a source's epochs, unless all are."""
        if not self.retire_at:
            return
        solved = {
            i
            for i in ids & self._passes.keys()
            if self._passes[i][0] >= self.retire_at * self._passes[i][1]
        }
        if ids <= solved | self._dropped:
            LOG.warning("every prompt of a source has reached the pass rate %g", self.retire_at)
            solved = set()
        self._retired = (self._retired - ids) | solved

    def record(self, outcomes: Sequence[tuple[int, float]], correct_at: float) -> None:
        """Records (prompt_id, score) of every scored sample; a sample passes if its score is at
        least `correct_at`."""
        for prompt, score in outcomes:
            entry = self._passes.setdefault(prompt, [0, 0])
            entry[0] += int(score >= correct_at)
            entry[1] += 1

    def drop_above(self, pass_rate: float) -> int:
        """Skips for good the prompts whose recorded pass rate is above `pass_rate`, in [0, 1];
        returns their number. Raises InputError if that leaves a source without prompts."""
        solved = {
            i for i, (passed, samples) in self._passes.items() if passed > pass_rate * samples
        }
        for ids in self._ids:
            if ids and ids <= solved:
                raise InputError(
                    "data.drop_above_pass_rate leaves a source without prompts",
                    value=pass_rate,
                    fix="raise it, or use harder prompts",
                )
        self._dropped |= solved
        return len(solved)

    def get_state(self) -> dict:
        """Returns the state from which `set_state` goes on, JSON-serialisable."""
        return {
            "position": self.position,
            "loaders": [loader.get_state() for loader in self._loaders],
            "passes": {str(k): v for k, v in self._passes.items()},
            "retired": sorted(self._retired),
            "dropped": sorted(self._dropped),
        }

    def set_state(self, state: dict) -> None:
        """Goes on from `state`. Raises InputError for another kind of state, for another number of
        sources and for a source in another order."""
        if set(state) != set(self.get_state()):
            fix = "resume with the data settings of the checkpoint, or start a new run"
            raise InputError("this is not a curriculum's state", value=sorted(state), fix=fix)
        if len(state["loaders"]) != len(self._loaders):
            raise InputError(
                "the curriculum's state is of another number of sources",
                value=len(state["loaders"]),
                rule=f"the data have {len(self._loaders)}",
                fix="resume with the data settings of the checkpoint, or start a new run",
            )
        for loader, saved in zip(self._loaders, state["loaders"], strict=True):
            loader.set_state(saved)
        self.position = state["position"]
        self._passes = {int(k): list(v) for k, v in state["passes"].items()}
        self._retired, self._dropped = set(state["retired"]), set(state["dropped"])
