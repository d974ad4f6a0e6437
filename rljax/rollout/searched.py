"""Rollouts by search: the tokens of the samples are those that a tree search chooses, and the batch
has what it found there (target_ids, target_probs, search_values).

Axes: B = P n rows, n samples of each of P prompts.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, batch_from_rows, row_scores
from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.contracts import component_in, contract, spec
from rljax.data.online.prompts import Prompts
from rljax.models.model import Model
from rljax.roles.models import Actor
from rljax.rollout.reward import Reward
from rljax.rollout.rollout import Rollout
from rljax.rollout.scored import sample_scored
from rljax.sampler import Sampling
from rljax.search import Search, Value
from rljax.shaping.scores import apply_shaping

SearchText = component_in(NAMESPACES["search"])

_TARGETS = ("target_ids", "target_probs", "search_values")


@dataclasses.dataclass(frozen=True)
class Searching:
    """An actor whose `generate` searches. `search_of(prompts, n)` is the Search of n responses to
    each prompt."""

    actor: Actor
    search_of: Callable[[Prompts, int], Search]

    @property
    def model(self) -> Model:
        return self.actor.model

    def generate(
        self, prompts, key, sampling: Sampling, *, n: int = 1, finished: Callable | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Batch:  # fmt: skip
        """n trajectories per prompt (host verb). All rows are searched to their ends, together, so
        that none is told of as `finished` before the others."""
        return self.actor.generate(prompts, key, sampling, n=n, search=self.search_of(prompts, n))


def scored_by(reward: Callable, prompts: Prompts, n: int, mesh, shaping: Sequence = ()) -> Callable:
    """The function of a Search that scores complete responses: scored(rows, [(ids, finish reason)])
    -> [len(rows)], NaN where the reward failed. Row p n + s answers prompt p. Scores are shaped by
    the rules of `shaping`, as those are of which a critic learns."""

    def scored(rows: Sequence[int], responses: Sequence[tuple[Sequence[int], int]]) -> np.ndarray:
        # A few shapes: filled up with the last one.
        pairs = list(zip(rows, responses, strict=True))
        pairs += [pairs[-1]] * (_power_of_two(len(pairs)) - len(pairs))
        asked, count = prompts.select([row // n for row, _ in pairs]), len(pairs)
        columns = asked.tokens.shape[1] + _power_of_two(max(len(ids) for _, (ids, _) in pairs))
        tokens, mask = np.zeros((count, columns), np.int32), np.zeros((count, columns), np.float32)
        lengths = np.array(asked.lengths, np.int32)
        for i, (_, (ids, _)) in enumerate(pairs):
            start, end = lengths[i], lengths[i] + len(ids)
            tokens[i, :start], tokens[i, start:end] = asked.tokens[i, :start], ids
            mask[i, start:end], lengths[i] = 1, end
        batch = batch_from_rows(
            tokens, lengths, mask, group=np.arange(count, dtype=np.int32),
            finish_reason=np.array([reason for _, (_, reason) in pairs], np.int32),
        )  # fmt: skip
        batch, _ = reward(place(fetch(batch), mesh), asked)
        scores = row_scores(apply_shaping(batch, shaping)) if shaping else batch.scores
        scores, mask = fetch((scores, batch.mask))
        return np.where((mask > 0).any(axis=1), scores, np.nan)[: len(rows)].astype(np.float64)

    return scored


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _targets(options: dict) -> int:
    return spec(resolve(options["method"], NAMESPACES["search"])).targets


def _fills(options: dict) -> tuple[str, ...]:
    """Beams and the best of n samples have no shares of visits."""
    return _TARGETS if _targets(options) else ()


def _searched(prompts, key, cfg, actor, reward, method: str, value: Value | None) -> Rollout:
    component: Component = resolve(method, NAMESPACES["search"])
    outcome = reward.outcome_alone() if isinstance(reward, Reward) else reward

    def search_of(prompts: Prompts, n: int) -> Search:
        scored = scored_by(outcome, prompts, n, actor.model.mesh, cfg.reward_shaping)
        return Search(component, value, scored)

    searching, n = Searching(actor, search_of), cfg.samples_per_prompt
    batch, report = sample_scored(searching, reward, prompts, key, cfg.sampling, n=n)
    return Rollout(batch, prompts, report, _metrics(batch))


def _metrics(batch: Batch) -> dict[str, float]:
    """search/value: the mean of what the simulations found; search/agreement: the mean share of
    them that went to the token that was chosen. A method without a tree has neither."""
    if batch.target_ids is None:
        return {}
    mask, values, probs, ids, tokens = fetch(
        (batch.mask, batch.search_values, batch.target_probs, batch.target_ids, batch.tokens)
    )
    count = max(float((mask > 0).sum()), 1.0)
    own = np.where(ids == tokens[..., None], probs, 0).max(axis=-1, initial=0)
    mean = lambda x: float(np.where(mask > 0, x, 0).sum() / count)  # noqa: E731
    return {"search/value": mean(values), "search/agreement": mean(own)}


@contract(safe=True, fills=_fills, targets=_targets, searches=True)
def search(prompts, key, cfg, *, actor, reward, method: SearchText = "mcts()"):
    """Samples by tree search (rljax.search.mcts): a text that has not ended is worth the reward of
    a response that the policy samples from there."""
    return _searched(prompts, key, cfg, actor, reward, method, None)


@contract(safe=True, fills=_fills, targets=_targets, searches=True)
def critic_search(prompts, key, cfg, *, actor, critic, reward, method: SearchText = "mcts()"):
    """Samples by tree search: a text that has not ended is worth what the critic says, one that has
    its reward."""
    value = Value(critic.model, critic.state.weights, "critic")
    return _searched(prompts, key, cfg, actor, reward, method, value)


@contract(safe=True, fills=_fills, targets=_targets, searches=True)
def guided_search(prompts, key, cfg, *, actor, guide, reward, method: SearchText = "mcts()"):
    """Samples by tree search: a text that has not ended is worth what the role `guide` says, a
    reward model of a folder (config.roles = ("guide=value_model(folder=...)",))."""
    return _searched(prompts, key, cfg, actor, reward, method, guide.value)
