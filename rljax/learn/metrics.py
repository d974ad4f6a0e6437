"""Metrics that describe a batch, as functions of the batch alone."""

import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch, FinishReason
from rljax.losses.kl import kl_estimate
from rljax.metric import Metric

METRICS = {
    "reward/mean": Metric(
        "mean score of the step's completions",
        "score",
        "rises, with noise; flat for long: too hard, too easy, or a wrong format",
    ),
    "reward/std": Metric("spread of the scores", "score", "above 0, or nothing is learned"),
    "reward/min": Metric("lowest score", "score"),
    "reward/max": Metric("highest score", "score", "above reward/mean, or nothing is learned"),
    "reward/length_correlation": Metric(
        "correlation of score and length",
        "-1 to 1",
        "steady; far above 0, longer answers are rewarded",
    ),
    "shaped_reward/mean": Metric(
        "mean score after shaping and KL penalty, which is what is learned from", "score", "rises"
    ),
    "advantage/mean": Metric("mean advantage over tokens", "", "near 0"),
    "advantage/std": Metric("spread of the advantages", "", "above 0, or nothing is learned"),
    "advantage/min": Metric("lowest advantage", "", "above -10"),
    "advantage/max": Metric("highest advantage", "", "below 10"),
    "advantage/zero_fraction": Metric(
        "tokens without an advantage, which teach nothing", "share", "below 0.7"
    ),
    "advantage/length_correlation": Metric(
        "correlation of advantage and length",
        "-1 to 1",
        "near 0; far from it, length itself is learned",
    ),
    "group/zero_advantage_fraction": Metric(
        "prompts whose samples have equal scores and teach nothing",
        "share",
        "below 0.7; more: other prompts, or dynamic sampling",
    ),
    "group/all_right_fraction": Metric(
        "prompts whose samples all score at least evaluate.correct_at",
        "share",
        "rises as it learns",
    ),
    "group/all_wrong_fraction": Metric(
        "prompts of whose samples none scores at least evaluate.correct_at",
        "share",
        "falls as it learns",
    ),
    "group/singletons": Metric(
        "samples without a group, as their reward failed or a filter took them", "samples", "few"
    ),
    "response_tokens/mean": Metric(
        "length of the responses", "tokens", "well below sampler.max_response_tokens"
    ),
    "response_tokens/min": Metric("shortest response", "tokens"),
    "response_tokens/max": Metric("longest response", "tokens"),
    "prompt_tokens/mean": Metric(
        "length of the prompts; of episodes what stands before the first turn", "tokens"
    ),
    "response/truncated_fraction": Metric(
        "responses cut off at sampler.max_response_tokens, or episodes at a limit of theirs",
        "share",
        "below 0.1; more: a higher limit, or the end is not learned",
    ),
    "response/interrupted_fraction": Metric(
        "responses interrupted before their end", "share", "near 0"
    ),
    "staleness/mean": Metric(
        "optimizer steps that the sampler's weights are behind, of tokens that this run sampled",
        "optimizer steps",
        "0 on-policy",
    ),
    "staleness/max": Metric(
        "most optimizer steps behind, of any token", "optimizer steps", "below 8"
    ),
    "value/mean": Metric("mean value by the critic", "score", "near return/mean"),
    "return/mean": Metric("mean return that the critic learns", "score", "rises"),
    "explained_variance": Metric(
        "share of the returns' variance that the critic explains",
        "share",
        "rises towards 1; below 0 it is worse than a constant",
    ),
    "ref_kl/k1": Metric(
        "distance to the reference, mean of log policy - log reference",
        "nats per token",
        "rises slowly; a jump: check samples for gibberish",
    ),
    "ref_kl/k3": Metric(
        "distance to the reference by an estimate that is never negative",
        "nats per token",
        "below 0.1 with a KL term; above 1 it is another model",
    ),
}


def _spread(prefix: str, x, counted) -> dict:
    """Returns mean, std, min and max of x where `counted`."""
    n = jnp.maximum(jnp.sum(counted), 1)
    mean = jnp.sum(jnp.where(counted, x, 0.0)) / n
    variance = jnp.sum(jnp.where(counted, x - mean, 0.0) ** 2) / n
    any_counted = jnp.any(counted)
    return {
        f"{prefix}/mean": mean,
        f"{prefix}/std": jnp.sqrt(variance),
        f"{prefix}/min": jnp.where(any_counted, jnp.min(jnp.where(counted, x, jnp.inf)), 0.0),
        f"{prefix}/max": jnp.where(any_counted, jnp.max(jnp.where(counted, x, -jnp.inf)), 0.0),
    }


def _group_metrics(scores, right, live, group) -> dict:
    """Returns the shares of groups whose rewards [B] are all equal, which teach nothing, and of
    those whose rows are all, or none, `right` [B]. Groups of one are not counted."""
    same_group = (group[:, None] == group[None, :]) & live[None, :] & live[:, None]
    size = jnp.sum(same_group, axis=1)
    low = jnp.min(jnp.where(same_group, scores[None, :], jnp.inf), axis=1)
    high = jnp.max(jnp.where(same_group, scores[None, :], -jnp.inf), axis=1)
    # Shares of the rows of a group add up to 1.
    share = jnp.where(live & (size > 1), 1.0 / jnp.maximum(size, 1), 0.0)
    groups = jnp.maximum(jnp.sum(share), 1e-9)
    no_signal = share * (low == high)
    any_right = jnp.any(same_group & right[None, :], axis=1)
    any_wrong = jnp.any(same_group & ~right[None, :], axis=1)
    return {
        "group/zero_advantage_fraction": jnp.sum(no_signal) / groups,
        "group/all_right_fraction": jnp.sum(share * ~any_wrong) / groups,
        "group/all_wrong_fraction": jnp.sum(share * ~any_right) / groups,
        "group/singletons": jnp.sum(live & (size == 1)).astype(jnp.float32),
    }


def _correlation(x, y, counted):
    """Pearson correlation of x and y over the rows `counted`; 0 if one of the two is constant."""
    n = jnp.maximum(jnp.sum(counted), 1)
    x = jnp.where(counted, x - jnp.sum(jnp.where(counted, x, 0.0)) / n, 0.0)
    y = jnp.where(counted, y - jnp.sum(jnp.where(counted, y, 0.0)) / n, 0.0)
    variances = jnp.sum(x * x) * jnp.sum(y * y)
    return jnp.where(
        variances > 1e-12, jnp.sum(x * y) / jnp.sqrt(jnp.maximum(variances, 1e-12)), 0.0
    )


def _counted_tokens(batch: Batch):
    """Returns the policy tokens of each row's sequence [B], and whether a row counts [B]: the first
    row of each sequence that has policy tokens."""
    tokens = batches.sequence_sum(batch.mask, batch)
    return tokens, batches.first_of_sequence(batch) & (tokens > 0)


def _prompt_tokens(batch: Batch):
    """Returns the number of tokens before the first one that the policy chose: [B]. A turn that is
    not learned from, and tokens that a row continues from another one, are the policy's, too."""
    chosen = batch.mask > 0 if batch.step_ids is None else (batch.mask > 0) | (batch.step_ids > 0)
    before = (jnp.cumsum(chosen, axis=1) == 0) & (batch.segment_ids > 0)
    tokens = jnp.sum(before, axis=1)
    return tokens if batch.kept_tokens is None else tokens - batch.kept_tokens


def sample_metrics(batch: Batch, version=None, *, correct_at: float = 1.0) -> dict:
    """Returns lengths and finish reasons of a batch [B, S], and metrics of rewards and groups where
    there are rewards: scalars.

    `version` is the trainer's, in optimizer steps; with it the staleness of a token that this run
    sampled is how many steps it is behind, NaN if there is none. A score of at least `correct_at`
    is right.
    """
    batch.require("finish_reason", by="sample_metrics")
    tokens, live = _counted_tokens(batch)
    rows = jnp.maximum(jnp.sum(live), 1)
    lengths = _spread("response_tokens", tokens, live)
    del lengths["response_tokens/std"]
    metrics = {
        **lengths,
        "prompt_tokens/mean": jnp.sum(jnp.where(live, _prompt_tokens(batch), 0)) / rows,
        "response/truncated_fraction": jnp.sum(live & batches.truncated(batch)) / rows,
        "response/interrupted_fraction": jnp.sum(
            live & (batch.finish_reason == FinishReason.INTERRUPT)
        )
        / rows,
    }
    if batch.rewards is not None:
        scores = batches.sequence_sum(batch.rewards, batch)
        metrics |= _spread("reward", scores, live)
        # The reward's own, which rewards of lines and of turns do not change.
        outcomes = scores if batch.scores is None else batch.scores
        metrics |= _group_metrics(scores, outcomes >= correct_at, live, batch.group)
        metrics["reward/length_correlation"] = _correlation(scores, tokens, live)
    if version is not None and batch.policy_version is not None:
        age = (version - batch.policy_version).astype(jnp.float32)
        of_run = batch.mask * (batch.policy_version >= 0)
        ages = {"mean": batches.masked_mean(age, of_run), "max": batches.masked_max(age, of_run)}
        known = jnp.any(of_run > 0)
        metrics |= {f"staleness/{k}": jnp.where(known, x, jnp.nan) for k, x in ages.items()}
    return metrics


def reference_kl(batch: Batch, logprobs) -> dict:
    """Returns k1 and k3 of `logprobs` [B, S] to ref_logprobs, means over policy tokens
    in nats: scalars."""
    policy, reference = (jnp.where(batch.mask > 0, x, 0.0) for x in (logprobs, batch.ref_logprobs))
    return {
        f"ref_kl/{kind}": batches.masked_mean(kl_estimate(policy, reference, kind), batch.mask)
        for kind in ("k1", "k3")
    }


def batch_metrics(batch: Batch, shaped: Batch, version=None, *, correct_at: float = 1.0) -> dict:
    """Returns `sample_metrics`, and metrics of shaped rewards, of advantages, and of values if
    there are any: scalars.

    `shaped` [B, S] is the batch whose rewards the advantages were taken of: a KL penalty may
    be in them.
    """
    batch.require("rewards", "advantages", "finish_reason", "group", by="batch_metrics")
    tokens, live = _counted_tokens(batch)
    shaped_scores = batches.sequence_sum(shaped.rewards, shaped)
    rows = jnp.maximum(jnp.sum(live), 1)
    metrics = {
        **sample_metrics(batch, version, correct_at=correct_at),
        "shaped_reward/mean": jnp.sum(jnp.where(live, shaped_scores, 0.0)) / rows,
        **_spread("advantage", batch.advantages, batch.mask > 0),
        "advantage/zero_fraction": batches.masked_mean(
            (batch.advantages == 0).astype(jnp.float32), batch.mask
        ),
        "advantage/length_correlation": _correlation(
            batches.sequence_sum(batch.advantages, batch) / jnp.maximum(tokens, 1), tokens, live
        ),
    }
    if batch.values is not None and batch.returns is not None:
        residual = batches.masked_variance(batch.returns - batch.values, batch.mask)
        total = batches.masked_variance(batch.returns, batch.mask)
        metrics["value/mean"] = batches.masked_mean(batch.values, batch.mask)
        metrics["return/mean"] = batches.masked_mean(batch.returns, batch.mask)
        metrics["explained_variance"] = jnp.where(
            total > 0, 1 - residual / jnp.maximum(total, 1e-12), 0.0
        )
    if batch.ref_logprobs is not None and batch.old_logprobs is not None:
        metrics |= reference_kl(batch, batch.old_logprobs)
    return metrics
