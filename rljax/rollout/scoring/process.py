"""ProcessScorer: a frozen process reward model's scores of lines, as rewards of tokens.

The formulas are rljax.shaping.steps; the outcome reward is rljax.rollout.scoring.reward.
Axes: B rows, S tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.arrays import fetch, moved_rows, place, weights_of
from rljax.batch import LIMITS, Batch
from rljax.components import Component
from rljax.learn import map_microbatches
from rljax.metric import Metric
from rljax.models.model import Model
from rljax.shaping.steps import line_ends, process_reward_metrics

METRICS = {"process/finite": Metric("1 where all line scores are finite", "0 or 1", "1")}


class TokenTexts:
    """The text of each token, "" for special ones, so that newlines can be found among ids."""

    def __init__(self, tokenizer):
        self._text = functools.cache(lambda i: tokenizer.decode([i]))

    def __call__(self, tokens: np.ndarray, mask: np.ndarray) -> list[list[str]]:
        """The token texts of every row, up to its last policy token; "" where the mask is 0."""
        out = []
        for row, chosen in zip(tokens, mask > 0, strict=True):
            stop = int(np.max(np.flatnonzero(chosen), initial=-1)) + 1
            out.append([self._text(int(row[t])) if chosen[t] else "" for t in range(stop)])
        return out


def _read(batch: Batch) -> Batch:
    return Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)


def token_scores(model: Model, params, batch: Batch, rows: int) -> jax.Array:
    """Computes the scalar head after each token, at most `rows` rows at once -> [B, S]
    float32. No gradient."""
    inputs = _read(batch)

    def one(part):
        return model.token_scores(params, part)[..., 0]

    scores = map_microbatches(one, inputs, rows if batch.rows % rows == 0 else batch.rows)
    return jax.lax.stop_gradient(scores)


class ProcessScorer:
    """Adds scores of lines and dense rewards to a batch that has its outcome rewards (host verb).

    `lines` is line_ids with its options. `reward` is dense_step_rewards with its options, or the
    user's function from the batch to rewards [B, S]. The model reads the policy's tokens. `home` is
    the mesh of the batches, where the model has another one.
    """

    def __init__(
        self,
        model: Model,
        params,
        rows: int,
        tokenizer,
        *,
        lines: Component,
        reward: Component,
        home: Mesh | None = None,
    ):
        self.model, self.params, self.lines = model, params, lines
        self.texts = TokenTexts(tokenizer)
        self.rows, self.reward, self.home = rows, reward, home or model.mesh

    def __call__(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Returns (the batch with step_ids, process_rewards, 0 except at the ends of lines, and the
        dense rewards added; metrics). A score that is not finite counts as 0 (process/finite)."""
        tokens, mask, finish = fetch((batch.tokens, batch.mask, batch.finish_reason))
        truncated = np.isin(finish, LIMITS)
        step_ids = self.lines(self.texts(tokens, mask), mask, truncated)
        placed = place((step_ids, line_ends(step_ids)), self.home)
        weights, options = weights_of(self.params, "process_model"), dict(rows=self.rows)
        if self.home == self.model.mesh:
            batch, metrics = _with_line_scores(
                weights, batch, *placed, model=self.model, reward=self.reward, **options
            )
        else:
            rows = moved_rows(_read(batch), self.model.mesh, "process_model")
            scores = _token_scores(weights, rows, model=self.model, **options)
            scores = moved_rows(scores, self.home, "process_model")
            batch, metrics = _with_rewards(scores, batch, *placed, reward=self.reward)
        return batch, {name: float(x) for name, x in fetch(metrics).items()}


@functools.partial(jax.jit, static_argnames=("model", "rows", "reward"))
def _with_line_scores(
    params, batch: Batch, step_ids, ends, *, model: Model, rows: int, reward: Component
) -> tuple[Batch, dict[str, jax.Array]]:
    """The batch with scores at the ends of lines and dense rewards computed from them; metrics."""
    return _rewarded(token_scores(model, params, batch, rows), batch, step_ids, ends, reward)


def _rewarded(scores, batch: Batch, step_ids, ends, reward: Component):
    finite = jnp.all(jnp.where(ends, jnp.isfinite(scores), True))
    scores = jnp.where(ends & jnp.isfinite(scores), scores, 0.0)
    batch = batch.replace(step_ids=step_ids, process_rewards=scores)
    rewards = reward(batch)
    threshold = {k: v for k, v in reward.options.items() if k == "pass_above"}
    metrics = process_reward_metrics(batch, rewards, **threshold)
    return batch.replace(rewards=rewards), {**metrics, "process/finite": finite * 1.0}


@functools.partial(jax.jit, static_argnames=("model", "rows"))
def _token_scores(params, batch: Batch, *, model: Model, rows: int) -> jax.Array:
    return token_scores(model, params, batch, rows)


@functools.partial(jax.jit, static_argnames="reward")
def _with_rewards(scores, batch: Batch, step_ids, ends, *, reward: Component):
    return _rewarded(scores, batch, step_ids, ends, reward)
