"""Policy losses with one ratio per sequence: the value stands at each policy token of a sequence.

Under the reduction seq_mean_token_mean that gives the mean over sequences exactly; a packed row
holds several sequences (batch.segment_*). Losses are (policy, batch, **options) -> (loss [B, S],
metrics) of B rows and S tokens. They raise InputError where the batch lacks a field that their
contract reads.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import AboveZero, NotNegative, Share, contract
from rljax.losses.policy.common import (
    RATIO,
    Behaviour,
    PolicyOutputs,
    at_tokens,
    batch_advantages,
    clip,
    constant,
    drift_metrics,
    indicator,
    keep_near_sequences,
    log_difference,
    log_ratio,
    policy_logprobs,
    ratio_and_near_sequences,
    row_mean,
    sequence_mean,
)
from rljax.losses.policy.selection import high_entropy
from rljax.losses.policy.tokens import ppo_loss
from rljax.metric import Metric

METRICS = {
    "pg_clipfrac_seq": Metric("sequences whose ratio the clip holds back", "share", "below 0.3"),
    "sequence_ratio": Metric(
        "probability of a sequence under the new policy over the old", "ratio", "near 1"
    ),
    "sequence_ratio_max": Metric("largest ratio of a sequence in the step", "ratio", "below 10"),
    "phi": Metric("weight of a sequence (vespo), mean", "ratio", "near 1"),
    "gvpo_residual": Metric("error of the regression on the advantage (gvpo)", "", "falls"),
    "tapered_weight": Metric(
        "importance weight (topr): 1 at good samples, at most 1 at bad ones", "ratio", "above 0.5"
    ),
    "real_margin": Metric(
        "mean log-ratio of a group's right samples less that of its wrong ones (real)",
        "nats per token",
        "rises",
    ),
    "real_groups": Metric(
        "samples of groups with both right and wrong ones, which alone teach (real)",
        "share",
        "above 0.3",
    ),
    "balance_weight": Metric("importance weight of a trajectory", "ratio", "near 1"),
    "balance_residual": Metric("violation of trajectory balance", "nats", "falls"),
}


def _sequence_metrics(ratio, batch: Batch) -> dict:
    """Returns the mean over sequences, and the maximum, of a ratio that stands at each of their
    tokens."""
    return {"sequence_ratio": row_mean(ratio, batch), "sequence_ratio_max": ratio}


@contract(safe=True, reads=ratio_and_near_sequences, reduction="seq_mean_token_mean")
def gspo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: Share = 3e-4,
    clip_high: NotNegative = 4e-4,
    dual_clip: AboveZero | None = None,
    max_sequence_kl: AboveZero | None = None,
    length_normalized: bool = True,
):
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the sequence of log r).

    GSPO, arXiv 2507.18071; reduction seq_mean_token_mean. Under seq_mean_token_sum the same loss is
    LUSPO, which weighs a sequence by its length. length_normalized=False: s is the product of the
    ratios, PPO on whole responses as one action (RLOO, arXiv 2402.14740). dual_clip and
    max_sequence_kl as in ppo_clip. Returns [B, S]. Metrics: pg_clipfrac and its parts (tokens),
    pg_clipfrac_seq, sequence_ratio, sequence_ratio_max, ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="gspo")
    difference = log_difference(policy, batch, by="gspo")
    # The sequence's log-ratio is clamped, not each token's: a far token keeps its gradient.
    per_sequence = sequence_mean if length_normalized else batches.segment_sum
    ratio = jnp.exp(clip(per_sequence(difference, batch), -20.0, 20.0))
    loss, metrics = ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, dual_clip)
    metrics["pg_clipfrac_seq"] = row_mean(metrics["pg_clipfrac"], batch)
    metrics |= _sequence_metrics(ratio, batch)
    if max_sequence_kl is not None:
        by = "gspo(max_sequence_kl)"
        metrics["sequence_keep"] = keep_near_sequences(policy, batch, max_sequence_kl, by=by)
        loss = loss * metrics["sequence_keep"]
    return at_tokens(loss, batch), metrics


@contract(safe=True, reads=RATIO, reduction="seq_mean_token_mean")
def gspo_token(
    policy: PolicyOutputs, batch: Batch, *, clip_low: Share = 3e-4, clip_high: NotNegative = 4e-4
):
    """gspo with s_t = sg(s) pi / sg(pi): same value, but each token's gradient is its own.

    With an advantage that is constant in the sequence the gradient equals gspo's as well; it allows
    advantages per token (arXiv 2507.18071, section 4.3). log s_t is at most 10. Returns [B, S].
    Metrics as gspo.
    """
    advantages = batch_advantages(batch, by="gspo_token")
    difference = log_difference(policy, batch, by="gspo_token")
    logprobs = policy_logprobs(policy, batch)
    mean = jax.lax.stop_gradient(clip(sequence_mean(difference, batch), -20.0, 20.0))
    token_part = logprobs - jax.lax.stop_gradient(logprobs)
    ratio = jnp.exp(clip(mean + token_part, -jnp.inf, 10.0))
    loss, metrics = ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, None)
    metrics["pg_clipfrac_seq"] = row_mean(metrics["pg_clipfrac"], batch)
    return loss, metrics | _sequence_metrics(ratio, batch)


def _gmpo(policy, batch, clip_low: float, clip_high: float, included, tokens, weight, fraction=1.0):
    """Computes GMPO over the included tokens [B, S], where each mean divides by `tokens`, times one
    weight."""
    advantages = batch_advantages(batch, by="gmpo")
    difference = log_difference(policy, batch, by="gmpo")
    sign = jnp.sign(advantages)
    clipped = clip(difference, -clip_low, clip_high)
    # One-sided as in PPO: only what would raise the objective is cut.
    is_clipped = sign * difference > sign * clipped
    bounded = jnp.where(is_clipped, clipped, difference)
    bounded = jnp.where(sign == 0, 0.0, bounded)
    advantage = sequence_mean(jnp.where(included, advantages, 0.0), batch, tokens)
    if fraction < 1:  # only the geometric mean leaves the others out: of no token it is 1
        included = included & (high_entropy(policy, batch, fraction) > 0)
        tokens = jnp.maximum(batches.segment_sum(included.astype(batch.mask.dtype), batch), 1)
    mean = sequence_mean(jnp.where(included, bounded, 0.0), batch, tokens)
    ratio = jnp.exp(clip(mean, -20.0, 20.0))
    metrics = {
        "pg_clipfrac": indicator(is_clipped, batch),
        "pg_clipfrac_upper": indicator(is_clipped & (sign > 0), batch),
        "pg_clipfrac_under": indicator(is_clipped & (sign < 0), batch),
    }
    metrics |= _sequence_metrics(ratio, batch) | drift_metrics(difference)
    return at_tokens(-advantage * ratio * weight, batch), metrics


@contract(
    safe=True,
    reads=RATIO,
    applies_weights=True,
    reduction="seq_mean_token_mean",
    whole_step=lambda options: options["fraction"] < 1,
)
def gmpo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: NotNegative = 0.4,
    clip_high: NotNegative = 0.4,
    fraction: Share = 1.0,
):
    """-A exp(mean over the sequence of d'), d' = log r clipped to [-clip_low, clip_high] one-sided.

    GMPO, arXiv 2507.20673: the geometric mean of clipped ratios; A is the sequence's mean. A
    rollout correction becomes one weight per sequence, exp(mean log w); tokens with w = 0 leave
    every mean, and a sequence that has no other token is exactly 0. fraction < 1:
    the geometric mean is over the `fraction` of the step's tokens with the highest entropy, as in
    ppo_high_entropy; a sequence without one has ratio 1 and no gradient.
    Metrics: pg_clipfrac = pg_clipfrac_upper + pg_clipfrac_under, sequence_ratio, ppo_kl, ppo_k3.
    """
    included = batch.mask > 0
    log_weights = jnp.zeros_like(batch.mask)
    if batch.weights is not None:
        weights = constant(batch.weights, batch)
        included = included & (weights > 0)
        log_weights = jnp.log(jnp.where(included, weights + 1e-10, 1.0))
    token_count = batches.segment_sum(included.astype(batch.mask.dtype), batch)
    tokens = jnp.maximum(token_count, 1)
    weight = jnp.where(token_count > 0, jnp.exp(sequence_mean(log_weights, batch, tokens)), 0.0)
    return _gmpo(policy, batch, clip_low, clip_high, included, tokens, weight, fraction)


def _vespo_weight(log_weight, advantages, k_positive, lam_positive, k_negative, lam_negative):
    """Returns exp(lam) w^k exp(-lam w), k and lam by the sign of A: it is largest where w = k /
    lam."""
    k = jnp.where(advantages >= 0, k_positive, k_negative)
    lam = jnp.maximum(jnp.where(advantages >= 0, lam_positive, lam_negative), 1e-4)
    log_weight = clip(log_weight, math.log(1e-8), 20.0)
    return jnp.exp(lam + k * log_weight - lam * jnp.exp(log_weight))


@contract(safe=True, reads=RATIO, applies_weights=True)
def vespo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    k_positive: NotNegative = 2.0,
    lam_positive: NotNegative = 3.0,
    k_negative: NotNegative = 3.0,
    lam_negative: NotNegative = 2.0,
):
    """-sg(phi(w)) A log pi, phi(w) = exp(lam (1 - w)) w^k, w = the sequence's product of ratios.

    VESPO, arXiv 2602.10693: a smooth bump on the whole sequence's weight in place of a clip. A
    rollout correction multiplies into w (sum of log weights), and is not applied a second time.
    Returns [B, S]. Metrics: phi, the weight, as a mean over sequences; ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="vespo")
    difference = log_ratio(policy, batch, by="vespo")
    total = batches.segment_sum(difference, batch)
    if batch.weights is not None:
        # A token of weight 0 was dropped: it leaves product and loss, and a sequence whose tokens
        # were all dropped is exactly 0.
        included = (batch.mask > 0) & (batch.weights > 0)
        log_weights = jnp.log(jnp.maximum(jnp.where(included, batch.weights, 1.0), 1e-8))
        total = total + batches.segment_sum(jnp.minimum(log_weights, 20.0), batch)
        advantages = jnp.where(included, advantages, 0.0)
    phi = jax.lax.stop_gradient(
        _vespo_weight(total, advantages, k_positive, lam_positive, k_negative, lam_negative)
    )
    metrics = {"phi": row_mean(phi, batch)} | drift_metrics(difference)
    return -phi * advantages * policy_logprobs(policy, batch), metrics


@contract(
    safe=True,
    reads=lambda options: ("advantages", f"{options['behaviour']}_logprobs"),
    corrects_mismatch=lambda options: options["behaviour"] == "sampler",
)
def topr(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    level: Literal["sequence", "token"] = "sequence",
    behaviour: Behaviour = "sampler",
):
    """-sg(w) A log pi, w = 1 where A > 0 and min(prod of the sequence's r, 1) where A < 0.

    Tapered off-policy REINFORCE, arXiv 2503.14286, r = pi / pi_behaviour: good samples are learned
    at full speed however old they are, bad ones no further than they are still likely. The paper's
    A is the reward, +1 or -1, or that less a baseline. level="token" takes each token's own r for
    the product, as ROLL and Trinity-RFT do. Reduction seq_mean_token_sum. Returns [B, S]. Metrics:
    tapered_weight, ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="topr")
    difference = log_difference(policy, batch, by="topr", behaviour=behaviour)
    log_weight = difference if level == "token" else batches.segment_sum(difference, batch)
    weight = jnp.where(advantages < 0, jnp.exp(jnp.minimum(log_weight, 0.0)), 1.0)
    weight = jax.lax.stop_gradient(weight)
    metrics = {"tapered_weight": weight} | drift_metrics(difference)
    return -weight * advantages * policy_logprobs(policy, batch), metrics


def _group_mean(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns the mean of x [B] over the rows of the same group that have policy tokens: [B]."""
    live = (jnp.sum(batch.mask, axis=1) > 0).astype(batch.mask.dtype)
    peers = (batch.group[:, None] == batch.group[None, :]).astype(batch.mask.dtype) * live[None, :]
    return peers @ (live * x) / jnp.maximum(peers @ live, 1)


@contract(safe=True, reads=(*RATIO, "group"), whole_step=True)
def gvpo(policy: PolicyOutputs, batch: Batch, *, beta: AboveZero = 0.1):
    """n / (2 (n - 1)) (A - beta (R - mean R))^2, R = log pi(y) - log pi_old(y), n the group's size.

    GVPO, arXiv 2504.19599: the advantage is the target of a regression on the centred log-ratio of
    whole sequences, so that its optimum is that of the KL-regularised reward. Group means get no
    gradient, which is 0 in sum for centred advantages. Reduction seq_mean_token_mean. Groups of one
    give 0. Rows are unpacked (a row has one group). Returns [B, S]. Metrics: gvpo_residual.
    """
    batch.require("group", by="gvpo")
    advantage = batches.row_sum(batch_advantages(batch, by="gvpo"), batch)
    count = jnp.sum(batch.mask, axis=1)
    advantage = advantage / jnp.maximum(count, 1)
    total = batches.row_sum(log_difference(policy, batch, by="gvpo"), batch)
    centred = total - jax.lax.stop_gradient(_group_mean(total, batch))
    live = (count > 0).astype(batch.mask.dtype)
    peers = (batch.group[:, None] == batch.group[None, :]).astype(batch.mask.dtype)
    size = peers @ live
    scale = jnp.where(size > 1, size / jnp.maximum(size - 1, 1), 0.0)
    residual = advantage - beta * centred
    loss = 0.5 * scale * residual**2
    loss = at_tokens(jnp.broadcast_to(loss[:, None], batch.mask.shape), batch)
    return loss, {"gvpo_residual": jnp.abs(residual)}


def _log_one_plus_sum(x: jax.Array, peers: jax.Array, included: jax.Array) -> jax.Array:
    """Returns log(1 + sum of exp(x) over the included rows of each row's group): x, included [B],
    peers bool [B, B] -> [B]."""
    of_group = jnp.where(peers & included[None, :], x[None, :], -jnp.inf)
    anchor = jnp.zeros_like(x)[:, None]  # exp(0) = 1
    return jax.nn.logsumexp(jnp.concatenate([of_group, anchor], axis=1), axis=1)


@contract(safe=True, reads=(*RATIO, "group"), whole_step=True, reduction="seq_mean_token_mean")
def real(policy: PolicyOutputs, batch: Batch, *, tau: AboveZero = 0.5):
    """log(1 + sum of exp(-s / tau), right rows) + log(1 + sum of exp(s / tau), wrong), by groups.

    s = mean log r of the row. Rewards as labels (REAL), arXiv 2602.05630: the rows of a group are
    classified by their log-ratio, so that the gradient of each is bounded by 1 / tau. Rows with
    A > 0 are right, with A < 0 wrong, which for rewards of 0 and 1 are the paper's labels; A is the
    row's mean, and only its sign counts. Rows with A = 0 and rows without policy tokens have no
    label. A group without both labels gives 0. Under the reduction seq_mean_token_mean the loss is
    the mean over all groups with policy tokens. Rows are unpacked (a row has one group). Returns
    [B, S]. Metrics: real_margin (0 where a group does not teach), real_groups, ppo_kl, ppo_k3.
    """
    batch.require("group", by="real")
    difference = log_difference(policy, batch, by="real")
    count = jnp.sum(batch.mask, axis=1)
    tokens, live = jnp.maximum(count, 1), count > 0
    logit = batches.row_sum(difference, batch) / tokens / tau
    advantage = batches.row_sum(batch_advantages(batch, by="real"), batch)
    right, wrong = live & (advantage > 0), live & (advantage < 0)
    peers = batch.group[:, None] == batch.group[None, :]
    counts = peers.astype(logit.dtype) @ jnp.stack([live, right, wrong], axis=1).astype(logit.dtype)
    size, rights, wrongs = (jnp.maximum(n, 1) for n in counts.T)
    teaches = live & (counts[:, 1] > 0) & (counts[:, 2] > 0)
    loss = _log_one_plus_sum(-logit, peers, right) + _log_one_plus_sum(logit, peers, wrong)
    # A group's loss stands at each of its rows; the mean over rows is to weigh all groups alike.
    groups = jnp.maximum(jnp.sum(live / size), 1)
    loss = jnp.where(teaches, loss, 0.0) * jnp.sum(live) / (groups * size)
    labels = jnp.where(right, 1 / rights, 0.0) - jnp.where(wrong, 1 / wrongs, 0.0)
    margin = tau * (peers.astype(logit.dtype) @ (labels * logit))
    metrics = {
        "real_margin": jnp.where(teaches, margin, 0.0),
        "real_groups": teaches.astype(logit.dtype),
    }
    loss = at_tokens(jnp.broadcast_to(loss[:, None], batch.mask.shape), batch)
    return loss, metrics | drift_metrics(difference)


@contract(
    safe=True,
    reads=lambda options: (
        (*RATIO, "ref_logprobs", "group") if options["log_z"] is None else (*RATIO, "ref_logprobs")
    ),
    whole_step=lambda options: options["log_z"] is None,
)
def trajectory_balance(
    policy: PolicyOutputs,
    batch: Batch,
    log_z: jax.Array | None = None,
    *,
    beta: AboveZero = 15.0,
    weight_max: AboveZero = 10.0,
):
    """w (log Z + mean log pi - beta mean A - mean log ref)^2, w = min(prod r, weight_max): [B, S].

    FlowRL, arXiv 2509.15207: pi matches ref exp(beta reward) / Z instead of maximising the reward.
    Means run over the policy tokens of a row, A is the normalised reward. log_z [B] is the output
    of a head on the prompt and gets a gradient too; None estimates it without a head by the mean of
    beta mean A + mean log ref - mean log pi over the row's group, as trajectory balance with
    asynchrony does (arXiv 2503.18929). Reduction seq_mean_token_mean. Rows are unpacked. Metrics:
    balance_weight, balance_residual.
    """
    count = jnp.maximum(jnp.sum(batch.mask, axis=1), 1)
    loss, metrics = balance(policy, batch, log_z, beta, weight_max, count)
    return at_tokens(jnp.broadcast_to(loss[:, None], batch.mask.shape), batch), metrics


def balance(policy, batch, log_z, beta: float, weight_max: float, count: jax.Array):
    """Returns the loss of trajectory_balance by rows, its means divided by count [B]: [B]."""
    by = "trajectory_balance"
    batch.require("ref_logprobs", by=by)
    logprobs = policy_logprobs(policy, batch)

    def mean(x):
        return batches.row_sum(x, batch) / count

    reward = beta * mean(batch_advantages(batch, by=by))
    ratio = mean(logprobs) - mean(constant(batch.ref_logprobs, batch))
    if log_z is None:
        batch.require("group", by=by)
        log_z = jax.lax.stop_gradient(_group_mean(reward - ratio, batch))
    residual = log_z + ratio - reward
    total = batches.row_sum(log_difference(policy, batch, by=by), batch)
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.minimum(total, 20.0)), weight_max))
    metrics = {"balance_weight": weight, "balance_residual": jnp.abs(residual)}
    return weight * residual**2, metrics
