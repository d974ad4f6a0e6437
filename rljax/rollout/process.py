"""ProcessScorer: a frozen process reward model's scores of lines, as rewards of tokens.

The formulas are rljax.shaping.steps; the outcome reward is rljax.rollout.reward. Axes: B rows,
S tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, FinishReason
from rljax.components import Component
from rljax.learn import map_microbatches
from rljax.models.model import Model
from rljax.shaping.steps import line_ends, process_reward_metrics


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


def token_scores(model: Model, params, batch: Batch, rows: int) -> jax.Array:
    """The scalar head after each token, at most `rows` rows at once: [B, S]. No gradient."""
    plain = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)
    one = lambda part: model.token_scores(params, part)[..., 0]  # noqa: E731
    scores = map_microbatches(one, plain, rows if batch.rows % rows == 0 else batch.rows)
    return jax.lax.stop_gradient(scores)


class ProcessScorer:
    """Adds scores of lines and dense rewards to a batch that has its outcome rewards (host verb).

    `lines` is line_ids with its options. `reward` is dense_step_rewards with its options, or the
    user's function from the batch to rewards [B, S]. The model reads the policy's tokens.
    """

    def __init__(
        self, model: Model, params, rows: int, tokenizer, *, lines: Component, reward: Component
    ):
        self.model, self.params, self.lines = model, params, lines
        self.texts = TokenTexts(tokenizer)
        self.rows, self.reward = rows, reward

    def __call__(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Returns (the batch with step_ids, process_rewards, 0 except at the ends of lines, and the
        dense rewards added; metrics). A score that is not finite counts as 0 (process/finite)."""
        tokens, mask, finish = fetch((batch.tokens, batch.mask, batch.finish_reason))
        truncated = finish == FinishReason.LENGTH
        step_ids = self.lines(self.texts(tokens, mask), mask, truncated)
        placed = place((step_ids, line_ends(step_ids)), self.model.mesh)
        batch, metrics = _with_line_scores(
            self.params, batch, *placed, model=self.model, rows=self.rows, reward=self.reward
        )
        return batch, {name: float(x) for name, x in fetch(metrics).items()}


@functools.partial(jax.jit, static_argnames=("model", "rows", "reward"))
def _with_line_scores(
    params, batch: Batch, step_ids, ends, *, model: Model, rows: int, reward: Component
) -> tuple[Batch, dict[str, jax.Array]]:
    """The batch with scores at the ends of lines and dense rewards computed from them; metrics."""
    scores = token_scores(model, params, batch, rows)
    finite = jnp.all(jnp.where(ends, jnp.isfinite(scores), True))
    scores = jnp.where(ends & jnp.isfinite(scores), scores, 0.0)
    batch = batch.replace(step_ids=step_ids, process_rewards=scores)
    rewards = reward(batch)
    threshold = {k: v for k, v in reward.options.items() if k == "pass_above"}
    metrics = process_reward_metrics(batch, rewards, **threshold)
    return batch.replace(rewards=rewards), {**metrics, "process/finite": finite * 1.0}
