"""RAFT: the policy imitates the best of its own samples (arXiv 2304.06767)."""

import jax.numpy as jnp

from rljax.batch import FinishReason, masked_mean, row_scores
from rljax.contracts import contract
from rljax.dataflows.online_dpo import by_prompt, rows_at
from rljax.dataflows.steps import rescaled_steps
from rljax.errors import InputError
from rljax.learn.metrics import sample_metrics
from rljax.losses.policy import negative_log_likelihood
from rljax.metric import Metric
from rljax.roles import program
from rljax.shaping.scores import apply_shaping

METRICS = {
    "raft/reward_kept": Metric(
        "mean score of the samples that are imitated", "score", "above reward/mean"
    ),
    "raft/kept_fraction": Metric("samples that are imitated", "share", "keep / samples_per_prompt"),
    "raft/prompts_without_any": Metric(
        "prompts none of whose samples is imitated", "share", "below 0.7"
    ),
}


@contract(safe=True, reads=("rewards", "scores", "group"), fills=(), compares_samples=True)
@program
def raft(
    batch,
    key,
    cfg,
    *,
    actor,
    reference=None,
    keep: int = 1,
    min_score: float | None = None,
    truncated: bool = False,
):
    """-log pi of the `keep` best samples of each prompt, of equal ones the first. Left out are
    scores of at most `min_score` (None: none), failed rewards and, unless `truncated`, samples that
    ended at the token limit.

    Raises InputError unless 1 <= keep <= batch.samples_per_prompt.
    """
    if not 1 <= keep <= cfg.samples_per_prompt:
        rule = f"1 to batch.samples_per_prompt = {cfg.samples_per_prompt}"
        raise InputError(
            "raft(keep)", value=keep, rule=rule, fix="lower keep, or raise batch.samples_per_prompt"
        )
    batch = apply_shaping(batch, cfg.reward_shaping)
    batch = batch.replace(scores=row_scores(batch))
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    examples, chosen = best_rows(batch, cfg.samples_per_prompt, keep, min_score, truncated)
    metrics = sample_metrics(batch, actor.state.step, correct_at=cfg.correct_at)
    examples = actor.balanced(examples)
    cfg = cfg.replace(steps=rescaled_steps(cfg.steps, batch.rows, examples.rows, 1, actor.row_unit))
    actor, learned = actor.update(examples, negative_log_likelihood, **cfg.update_options())
    return {"actor": actor}, {**metrics, **learned, **chosen}


def best_rows(batch, samples: int, keep: int, min_score: float | None, truncated: bool):
    """Returns (the `keep` best rows of each prompt, masked where fewer can be kept; metrics)."""
    scores, live = by_prompt(batch, samples)
    eligible = live
    if min_score is not None:
        eligible &= scores > min_score
    if not truncated:
        eligible &= (batch.finish_reason != FinishReason.LENGTH).reshape(eligible.shape)
    order = jnp.argsort(jnp.where(eligible, -scores, jnp.inf), axis=1, stable=True)[:, :keep]
    selected = jnp.take_along_axis(eligible, order, axis=1)
    rows = jnp.arange(scores.shape[0])[:, None] * samples + order
    examples = rows_at(batch, rows.reshape(-1), selected.reshape(-1))
    return examples, {
        "raft/reward_kept": masked_mean(jnp.take_along_axis(scores, order, axis=1), selected),
        "raft/kept_fraction": jnp.sum(selected) / jnp.maximum(jnp.sum(live), 1),
        "raft/prompts_without_any": 1 - jnp.mean(jnp.any(selected, axis=1)),
    }
