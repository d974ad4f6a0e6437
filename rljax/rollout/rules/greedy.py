"""The rollout of ReMax: every row's value is the score of the greedy response to its prompt."""

import jax
import jax.numpy as jnp

from rljax.batch import Batch, row_scores
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import contract
from rljax.metric import Metric
from rljax.rollout.rollout import RolloutText, of_inner, run_rollout
from rljax.shaping.scores import apply_shaping

METRICS = {
    "remax/greedy_reward": Metric(
        "mean score of the greedy responses, the baseline", "score", "rises"
    )
}


@contract(
    safe=True,
    fills=("values",),
    needs_groups=of_inner("needs_groups"),
    drops_dead=of_inner("drops_dead"),
    on_device=of_inner("on_device"),
)
def greedy_baseline(
    prompts, key, cfg, *, actor, reward, sample, draw, inner: RolloutText = "once()"
):
    """The rollout `inner` with values: the score of the prompt's greedy response, shaped like those
    of the samples (arXiv 2310.10505)."""
    inner = resolve(inner, NAMESPACES["collect"])
    arguments = dict(actor=actor, reward=reward, sample=sample, draw=draw)
    result = run_rollout(inner, prompts, key, cfg, **arguments)
    greedy, _ = sample(result.prompts, key, n=1, sampling=cfg.sampling.greedy())
    scores = row_scores(apply_shaping(greedy, cfg.reward_shaping))
    has_score = jnp.any(greedy.mask > 0, axis=1)
    batch = with_greedy_baseline(result.batch, scores, has_score)
    mean = mean_of_known(greedy.scores, has_score)
    return result.replace(batch=batch, metrics={**result.metrics, "remax/greedy_reward": mean})


@jax.jit
def mean_of_known(scores: jax.Array, known: jax.Array) -> jax.Array:
    """Returns the mean of the scores [P] that are known [P] bool; 0 without any."""
    return jnp.sum(jnp.where(known, scores, 0.0)) / jnp.maximum(jnp.sum(known), 1)


@jax.jit
def with_greedy_baseline(batch: Batch, scores: jax.Array, known: jax.Array) -> Batch:
    """Returns the batch [B, S] with values [B, S] = the greedy score [P] of the row's prompt. Rows
    whose prompt has no known [P] bool greedy score are masked, as rows with a failed reward are."""
    # A row whose own reward failed has a group of its own and mask 0.
    prompt = jnp.where(batch.group < scores.shape[0], batch.group, 0)
    keep = known[prompt].astype(jnp.float32)
    values = jnp.where(batch.mask > 0, scores[prompt][:, None], 0.0)
    return batch.replace(mask=batch.mask * keep[:, None], values=values)
