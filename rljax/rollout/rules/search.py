"""Rollouts by search: the tokens of the samples are those that a tree search chooses, and the batch
has what it found there (target_ids, target_probs, search_values).

Axes: B = P n rows, n samples of each of P prompts.
"""

import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.contracts import component_in, contract, spec
from rljax.data.online.prompts import Prompts
from rljax.metric import Metric
from rljax.rollout.players.searched import SearchActor, scored_by
from rljax.rollout.rollout import Rollout
from rljax.rollout.sample import require_sampler
from rljax.search import Search, Value

METRICS = {
    "search/value": Metric(
        "what the simulations of a search found, mean over the tokens",
        "reward",
        "rises; far from reward/mean: the value model or the rollouts mislead it",
    ),
    "search/agreement": Metric(
        "share of the simulations that went to the token that was chosen",
        "share",
        "rises, as search and policy agree",
    ),
}

SearchText = component_in(NAMESPACES["search"])

_TARGETS = ("target_ids", "target_probs", "search_values")


def _targets(options: dict) -> int:
    return spec(resolve(options["method"], NAMESPACES["search"])).targets


def _fills(options: dict) -> tuple[str, ...]:
    """Beams and the best of n samples have no shares of visits."""
    return _TARGETS if _targets(options) else ()


def _searched(prompts, key, cfg, actor, sample, method: str, value: Value | None) -> Rollout:
    component: Component = resolve(method, NAMESPACES["search"])
    outcome = require_sampler(sample, by="search()").outcome_alone().score

    def search_of(prompts: Prompts, n: int) -> Search:
        scored = scored_by(outcome, prompts, n, actor.model.mesh, cfg.reward_shaping)
        return Search(component, value, scored)

    searching, n = SearchActor(actor, search_of), cfg.samples_per_prompt
    batch, report = sample(prompts, key, n=n, actor=searching)
    return Rollout(batch, prompts, report, _metrics(batch))


def _metrics(batch: Batch) -> dict[str, float]:
    """Returns search/value, the mean of the values that the simulations found, and
    search/agreement, the mean share of them that went to the token that was chosen. A method
    without a tree has neither."""
    if batch.target_ids is None:
        return {}
    mask, values, probs, ids, tokens = fetch(
        (batch.mask, batch.search_values, batch.target_probs, batch.target_ids, batch.tokens)
    )
    count = max(float((mask > 0).sum()), 1.0)
    shares = np.where(ids == tokens[..., None], probs, 0).max(axis=-1, initial=0)

    def mean(x):
        return float(np.where(mask > 0, x, 0).sum() / count)

    return {"search/value": mean(values), "search/agreement": mean(shares)}


@contract(safe=True, fills=_fills, targets=_targets, searches=True)
def search(prompts, key, cfg, *, actor, sample, method: SearchText = "mcts()"):
    """Samples by tree search (rljax.search.mcts): a text that has not ended is worth the reward of
    a response that the policy samples from there."""
    return _searched(prompts, key, cfg, actor, sample, method, None)


@contract(safe=True, fills=_fills, targets=_targets, searches=True)
def critic_search(prompts, key, cfg, *, actor, critic, sample, method: SearchText = "mcts()"):
    """Samples by tree search: a text that has not ended is worth what the critic says, one that has
    its reward."""
    value = Value(critic.model, critic.state.weights, "critic")
    return _searched(prompts, key, cfg, actor, sample, method, value)


@contract(safe=True, fills=_fills, targets=_targets, searches=True)
def guided_search(prompts, key, cfg, *, actor, guide, sample, method: SearchText = "mcts()"):
    """Samples by tree search: a text that has not ended is worth what the role `guide` says, a
    reward model of a folder (config.roles = ("guide=value_model(folder=...)",))."""
    return _searched(prompts, key, cfg, actor, sample, method, guide.value)
