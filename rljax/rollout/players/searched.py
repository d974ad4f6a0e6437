"""Searched responses: an actor whose tokens are those that a tree search chooses.

Axes: B = P n rows, n samples of each of P prompts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, batch_from_rows, row_scores
from rljax.data.online.prompts import Prompts
from rljax.models.model import Model
from rljax.roles.models import Actor
from rljax.sampler import Sampling
from rljax.search import Search
from rljax.shaping.scores import apply_shaping


@dataclasses.dataclass(frozen=True)
class SearchActor:
    """An actor whose `generate` searches. `search_of(prompts, n)` is the Search of n responses to
    each prompt."""

    actor: Actor
    search_of: Callable[[Prompts, int], Search]

    @property
    def model(self) -> Model:
        """The actor's model."""
        return self.actor.model

    def generate(
        self,
        prompts,
        key,
        sampling: Sampling,
        *,
        n: int = 1,
        finished: Callable | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Batch:
        """Samples n trajectories per prompt (host verb) -> Batch of P n rows. All rows are searched
        to their ends, together, so that none is told of as `finished` before the others."""
        return self.actor.generate(prompts, key, sampling, n=n, search=self.search_of(prompts, n))


def scored_by(reward: Callable, prompts: Prompts, n: int, mesh, shaping: Sequence = ()) -> Callable:
    """Returns the function of a Search that scores complete responses: scored(rows, [(ids, finish
    reason)]) -> [len(rows)], NaN where the reward failed. Row p n + s answers prompt p. Scores are
    shaped by the rules of `shaping`, as those are of which a critic learns."""

    def scored(rows: Sequence[int], responses: Sequence[tuple[Sequence[int], int]]) -> np.ndarray:
        # A few shapes: filled up with the last one.
        pairs = list(zip(rows, responses, strict=True))
        pairs += [pairs[-1]] * (_power_of_two(len(pairs)) - len(pairs))
        selected, count = prompts.select([row // n for row, _ in pairs]), len(pairs)
        columns = selected.tokens.shape[1] + _power_of_two(max(len(ids) for _, (ids, _) in pairs))
        tokens, mask = np.zeros((count, columns), np.int32), np.zeros((count, columns), np.float32)
        lengths = np.array(selected.lengths, np.int32)
        for i, (_, (ids, _)) in enumerate(pairs):
            start, end = lengths[i], lengths[i] + len(ids)
            tokens[i, :start], tokens[i, start:end] = selected.tokens[i, :start], ids
            mask[i, start:end], lengths[i] = 1, end
        batch = batch_from_rows(
            tokens,
            lengths,
            mask,
            group=np.arange(count, dtype=np.int32),
            finish_reason=np.array([reason for _, (_, reason) in pairs], np.int32),
        )
        batch, _ = reward(place(fetch(batch), mesh), selected)
        scores = row_scores(apply_shaping(batch, shaping)) if shaping else batch.scores
        scores, mask = fetch((scores, batch.mask))
        return np.where((mask > 0).any(axis=1), scores, np.nan)[: len(rows)].astype(np.float64)

    return scored


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
