"""Policy losses with one ratio per token: (policy, batch, **options) -> (loss [B, S], metrics).

A is the advantage, r = pi / pi_old with its log clamped to +-20; A, pi_old and every weight are
constants. Metrics are [B, S] too. A loss raises InputError where the batch lacks a field that its
contract reads.
"""

import jax
import jax.numpy as jnp

from rljax.batch import Batch, behaviour_logprobs, is_sampled
from rljax.contracts import AboveZero, NotNegative, Share, contract
from rljax.kernels.gae import discounted_sum
from rljax.losses.policy.common import (
    RATIO,
    Behaviour,
    Level,
    PolicyOutputs,
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
    ratio_at,
)
from rljax.metric import Metric

METRICS = {
    "token_accuracy": Metric("target tokens that are the policy's first choice", "share", "rises"),
    "pg_clipfrac_lower": Metric(
        "tokens of bad samples where the second clip (dual_clip) is active", "share", "near 0"
    ),
    "pg_truncfrac": Metric("tokens whose weight was cut to ratio_max", "share", "near 0"),
    "behaviour_weight": Metric(
        "weight of the trainer's policy over the sampler's, before its cap", "ratio", "near 1"
    ),
    "behaviour_weight_max": Metric(
        "largest weight of the trainer's policy over the sampler's", "ratio", "below 10"
    ),
    "behaviour_weight_capped": Metric("tokens whose weight was capped", "share", "below 0.1"),
    "demonstration_weight": Metric(
        "weight pi / (pi + gamma) of the tokens of demonstrations (luffy), times their share",
        "ratio",
        "rises",
    ),
    "future_kl": Metric(
        "log-ratio of a token and of those behind it, the latter discounted (fipo)",
        "nats",
        "near 0",
    ),
    "fipo_weight": Metric("weight of a token's advantage (fipo), mean", "ratio", "near 1"),
    "fipo_weight_bounded": Metric("tokens whose weight (fipo) was cut to its range", "share"),
    "fipo_skipped": Metric(
        "tokens that enter no sum (fipo), as their ratio is above dual_clip", "share", "near 0"
    ),
}


def _accuracy(policy: PolicyOutputs) -> dict[str, jax.Array]:
    return {} if policy.greedy is None else {"token_accuracy": policy.greedy}


@contract(safe=True, reads_greedy=True)
def negative_log_likelihood(policy: PolicyOutputs, batch: Batch):
    """-log pi(token) [B, S]: supervised fine-tuning. Metrics: token_accuracy."""
    return -policy_logprobs(policy, batch), _accuracy(policy)


@contract(safe=True, reads_greedy=True)
def dynamic_fine_tuning(policy: PolicyOutputs, batch: Batch):
    """-sg(pi(token)) log pi(token): supervised fine-tuning without the 1/pi in its gradient.

    DFT, arXiv 2508.05629: the gradient is that of -pi(token), so that tokens which the policy finds
    impossible do not dominate. Returns [B, S]. Metrics: token_accuracy.
    """
    logprobs = policy_logprobs(policy, batch)
    return -jax.lax.stop_gradient(jnp.exp(logprobs)) * logprobs, _accuracy(policy)


@contract(safe=True, reads_greedy=True)
def chord_phi(policy: PolicyOutputs, batch: Batch):
    """-sg(pi (1 - pi)) log pi: supervised fine-tuning on the tokens of which the policy is unsure.

    The token weights of CHORD-phi, arXiv 2508.11408: neither tokens that the policy writes anyway
    nor those that it finds impossible move it. Largest at pi = 1/2. Returns [B, S]. Metrics:
    token_accuracy.
    """
    logprobs = policy_logprobs(policy, batch)
    weight = jax.lax.stop_gradient(-jnp.exp(logprobs) * jnp.expm1(logprobs))
    return -weight * logprobs, _accuracy(policy)


@contract(safe=True, reads=("advantages",))
def policy_gradient(policy: PolicyOutputs, batch: Batch):
    """-A log pi: [B, S] (REINFORCE)."""
    return -batch_advantages(batch, by="policy_gradient") * policy_logprobs(policy, batch), {}


@contract(safe=True, reads=("advantages",))
def gpg(policy: PolicyOutputs, batch: Batch):
    """-A log pi, the loss of GPG (arXiv 2504.02546), which differs in its advantage: [B, S]."""
    return -batch_advantages(batch, by="gpg") * policy_logprobs(policy, batch), {}


def clipped_surrogate(advantages, ratio, clip_low: float, clip_high: float):
    """Returns max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) [B, S], and whether the second one
    is the larger [B, S]."""
    unclipped = -advantages * ratio
    clipped = -advantages * clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(unclipped, clipped), clipped > unclipped


def ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, dual_clip):
    """Returns the dual-clipped surrogate of a ratio [B, S], and its metrics; `difference` is the
    log-ratio of the tokens, [B, S]."""
    loss, is_clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    metrics = {
        "pg_clipfrac": indicator(is_clipped, batch),
        "pg_clipfrac_upper": indicator(is_clipped & (advantages > 0), batch),
        "pg_clipfrac_under": indicator(is_clipped & (advantages < 0), batch),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        negative = advantages < 0
        metrics["pg_clipfrac_lower"] = indicator(negative & (loss > bound), batch)
        loss = jnp.where(negative, jnp.minimum(loss, bound), loss)
    return loss, metrics | drift_metrics(difference)


@contract(safe=True, reads=ratio_and_near_sequences)
def ppo_clip(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: AboveZero | None = 3.0,
    max_sequence_kl: AboveZero | None = None,
):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip.

    arXiv 1707.06347; dual clip 1912.09729, which is also the cap `delta` of INTELLECT-2's two-sided
    clip (2505.07291); clip_high > clip_low is DAPO's clip-higher, 2503.14476. `max_sequence_kl`
    drops sequences with A < 0 that lie farther than this from the sampler (2512.02556).
    Returns [B, S]. Metrics: pg_clipfrac = pg_clipfrac_upper (r too large, A > 0) +
    pg_clipfrac_under (too small, A < 0), pg_clipfrac_lower (dual clip active), ppo_kl = old - new,
    ppo_k3, sequence_keep.
    """
    advantages = batch_advantages(batch, by="ppo_clip")
    difference = log_ratio(policy, batch, by="ppo_clip")
    ratio = jnp.exp(difference)
    loss, metrics = ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, dual_clip)
    if max_sequence_kl is not None:
        by = "ppo_clip(max_sequence_kl)"
        metrics["sequence_keep"] = keep_near_sequences(policy, batch, max_sequence_kl, by=by)
        loss = loss * metrics["sequence_keep"]
    return loss, metrics


@contract(safe=True, reads=(*RATIO, "policy_version"))
def luffy(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    gamma: AboveZero = 0.1,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: AboveZero | None = None,
):
    """-A pi / (pi + gamma) at the tokens of demonstrations, ppo_clip at those of samples.

    Policy shaping of LUFFY, arXiv 2504.14945: demonstrations (the rollout `with_demonstration`) are
    in the groups of the samples, and their weight, whose gradient is gamma pi / (pi + gamma)^2 by
    log pi, is largest at tokens that the policy finds unlikely. The paper has no clip for samples
    either (clip_high=1e9, clip_low=1.0), and advantages without the deviation. Returns [B, S].
    Metrics: those of ppo_clip, and demonstration_weight.
    """
    advantages = batch_advantages(batch, by="luffy")
    batch.require("policy_version", by="luffy")
    difference = log_ratio(policy, batch, by="luffy")
    ratio = jnp.exp(difference)
    loss, metrics = ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, dual_clip)
    probability = jnp.exp(policy_logprobs(policy, batch))
    weight = probability / (probability + gamma)
    shown = ~is_sampled(batch)
    metrics["demonstration_weight"] = weight * indicator(shown, batch)
    return jnp.where(shown, -advantages * weight, loss), metrics


@contract(safe=True, reads=(*RATIO, "sampler_logprobs"), corrects_mismatch=True)
def decoupled_ppo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: AboveZero | None = None,
    weight_max: AboveZero = 5.0,
):
    """w ppo_clip(pi / pi_old, A) with w = min(pi_old / pi_sampler, weight_max) (AReaL, 2505.24298).

    pi_old is the proximal policy: the weights just before the update, recomputed by the trainer. It
    corrects for the sampler itself: leave the rollout correction off. Returns [B, S]. Metrics as
    ppo_clip, and behaviour_weight, behaviour_weight_max (both before the cap),
    behaviour_weight_capped.
    """
    advantages = batch_advantages(batch, by="decoupled_ppo")
    difference = log_ratio(policy, batch, by="decoupled_ppo")
    behaviour = behaviour_logprobs(batch, by="decoupled_ppo")
    log_weight = constant(batch.old_logprobs, batch) - constant(behaviour, batch)
    weight = jnp.exp(clip(log_weight, -20.0, 20.0))
    ratio = jnp.exp(difference)
    loss, metrics = ppo_loss(advantages, difference, ratio, batch, clip_low, clip_high, dual_clip)
    metrics |= {
        "behaviour_weight": weight,
        "behaviour_weight_max": weight,
        "behaviour_weight_capped": indicator(weight > weight_max, batch),
    }
    return jnp.minimum(weight, weight_max) * loss, metrics


@contract(
    safe=True,
    reads=lambda options: ("advantages", f"{options['behaviour']}_logprobs"),
    corrects_mismatch=lambda options: options["behaviour"] == "sampler",
)
def cispo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: Share | None = None,
    clip_high: NotNegative = 0.28,
    ratio_max: AboveZero | None = None,
    behaviour: Behaviour = "old",
    level: Level = "token",
):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: clips the weight, drops no token's
    gradient.

    CISPO, arXiv 2506.13585. clip_low None leaves the lower side open, as MiniMax does. `ratio_max`
    is an absolute upper bound in place of 1 + clip_high (ScaleRL, 2510.13786, which also takes
    behaviour="sampler"). Returns [B, S]. Metrics: pg_clipfrac (ratio was clipped), ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="cispo")
    difference = log_ratio(policy, batch, by="cispo", behaviour=behaviour)
    ratio = jax.lax.stop_gradient(ratio_at(level, difference, batch))
    low = 0.0 if clip_low is None else 1 - clip_low
    high = 1 + clip_high if ratio_max is None else ratio_max
    weight = clip(ratio, low, high)
    metrics = {"pg_clipfrac": indicator(weight != ratio, batch)} | drift_metrics(difference)
    return -weight * advantages * policy_logprobs(policy, batch), metrics


@contract(safe=True, reads=RATIO)
def sapo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    tau_positive: AboveZero = 1.0,
    tau_negative: AboveZero = 1.05,
    level: Level = "token",
):
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft gate in place of the clip.

    SAPO, arXiv 2511.20347: slope 1 at r = 1 and smoothly to 0 away from it; the larger tau closes
    the gate of negative advantages sooner. Returns [B, S]. Metrics: ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="sapo")
    difference = log_ratio(policy, batch, by="sapo")
    ratio = ratio_at(level, difference, batch)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1)) * (4.0 / tau)
    return -gate * advantages, drift_metrics(difference)


def _influence(difference, advantages, batch, half_life, low, high, ratio_max, safe_ratio):
    """Returns (f, whether it was cut to its range, F, whether a token enters no sum) of fipo, [B,
    S] each, constants."""
    difference = jax.lax.stop_gradient(difference)
    ratio = jnp.exp(difference)
    is_skipped = jnp.zeros(ratio.shape, bool) if ratio_max is None else ratio > ratio_max
    # Within the row: an episode goes on in others, which may be in another microbatch.
    future = discounted_sum(
        jnp.where(is_skipped, 0.0, difference),
        2.0 ** (-1.0 / half_life),
        batch.mask,
        segment_ids=batch.segment_ids,
    )
    raw = jnp.exp(clip(future, -20.0, 20.0))
    weight = clip(raw, 1 - low, 1 + high)
    is_bounded = weight != raw
    if safe_ratio is not None:
        is_unsafe = (advantages < 0) & (ratio > safe_ratio)
        weight = jnp.where(is_unsafe, jnp.minimum(weight, 1.0), weight)
    return weight, is_bounded, future, is_skipped


@contract(safe=True, reads=RATIO)
def fipo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.28,
    dual_clip: AboveZero | None = 10.0,
    half_life: AboveZero = 32.0,
    weight_low: Share = 0.0,
    weight_high: NotNegative = 0.2,
    safe_ratio: AboveZero | None = 10.0,
):
    """ppo_clip of A f in place of A, f = sg(clip(exp(F), 1 - weight_low, 1 + weight_high)).

    F_t = sum over k >= t of 2^(-(k - t) / half_life) log r_k. FIPO, arXiv 2603.19835: a token
    counts more where the update makes what follows it more likely. The sum runs over the policy
    tokens of the row's sequence from t on, without those whose ratio is above dual_clip (None: all
    of them). Where A < 0 and r > safe_ratio, f is at most 1. The defaults are those of the authors'
    script for 32B; for 7B they take weight_low=0.2. Their code also drops a sequence in which
    dual_clip is active at two tokens or more; that is left out here. On policy f = 1. Returns
    [B, S]. Metrics as ppo_clip, and future_kl, fipo_weight, fipo_weight_bounded, fipo_skipped.
    """
    advantages = batch_advantages(batch, by="fipo")
    difference = log_ratio(policy, batch, by="fipo")
    weight, is_bounded, future, is_skipped = _influence(
        difference, advantages, batch, half_life, weight_low, weight_high, dual_clip, safe_ratio
    )
    ratio = jnp.exp(difference)
    loss, metrics = ppo_loss(
        advantages * weight, difference, ratio, batch, clip_low, clip_high, dual_clip
    )
    metrics |= {
        "future_kl": future,
        "fipo_weight": weight,
        "fipo_weight_bounded": indicator(is_bounded, batch),
        "fipo_skipped": indicator(is_skipped, batch),
    }
    return loss, metrics


def _truncated_gradient(policy, batch, advantages, difference, ratio_max: float, has_left):
    """Returns -sg(min(r, ratio_max)) A log pi, and 0 at the tokens that leave the trust region."""
    ratio = jax.lax.stop_gradient(jnp.exp(difference))
    weight = jnp.where(has_left, 0.0, jnp.minimum(ratio, ratio_max))
    metrics = {
        "pg_clipfrac": indicator(has_left, batch),
        "pg_truncfrac": indicator(~has_left & (ratio > ratio_max), batch),
    }
    loss = -advantages * weight * policy_logprobs(policy, batch)
    return loss, metrics | drift_metrics(difference)


def _probabilities(policy: PolicyOutputs, batch: Batch):
    """Returns (pi, pi_old) of the tokens, constants, 1 where there is no policy token."""
    logprobs = jax.lax.stop_gradient(policy_logprobs(policy, batch))
    return jnp.exp(logprobs), jnp.exp(constant(batch.old_logprobs, batch))


@contract(safe=True, reads=RATIO)
def dppo_tv(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    ratio_max: AboveZero = 20.0,
):
    """-sg(min(r, ratio_max)) A log pi, and 0 where pi has left the region |pi - pi_old| already.

    DPPO with total variation, arXiv 2602.04879: left where A > 0 and pi - pi_old > clip_high, or
    A <= 0 and pi_old - pi > clip_low: in probability, so that rare tokens are free to move.
    Returns [B, S]. Metrics: pg_clipfrac (left), pg_truncfrac (ratio_max active), ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="dppo_tv")
    difference = log_ratio(policy, batch, by="dppo_tv")
    pi, pi_old = _probabilities(policy, batch)
    has_left = jnp.where(advantages > 0, pi - pi_old > clip_high, pi_old - pi > clip_low)
    return _truncated_gradient(policy, batch, advantages, difference, ratio_max, has_left)


@contract(safe=True, reads=RATIO)
def dppo_kl(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    clip_low: NotNegative = 0.05,
    clip_high: NotNegative = 0.05,
    ratio_max: AboveZero = 20.0,
):
    """As dppo_tv, by KL(pi_old || pi) of the two-way choice "this token or another".

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q = pi_old, p = pi; a token has left where
    A > 0, p > q and KL > clip_high, or A <= 0, p < q and KL > clip_low (arXiv 2602.04879).
    Returns [B, S]. Metrics as dppo_tv.
    """
    advantages = batch_advantages(batch, by="dppo_kl")
    difference = log_ratio(policy, batch, by="dppo_kl")
    pi, pi_old = _probabilities(policy, batch)
    # A probability that rounds to 1 would give log 0; the other side is then at least one rounding.
    largest = 1 - jnp.finfo(pi.dtype).epsneg
    log_other = jnp.log1p(-jnp.minimum(pi_old, largest)) - jnp.log1p(-jnp.minimum(pi, largest))
    kl = -pi_old * jax.lax.stop_gradient(difference) + (1 - pi_old) * log_other
    rose = (pi > pi_old) & (kl > clip_high)
    fell = (pi < pi_old) & (kl > clip_low)
    has_left = jnp.where(advantages > 0, rose, fell)
    return _truncated_gradient(policy, batch, advantages, difference, ratio_max, has_left)


@contract(safe=True, reads=RATIO)
def dro(policy: PolicyOutputs, batch: Batch, *, beta: AboveZero = 0.1):
    """-A log pi + beta / 2 (log pi - log pi_old)^2: policy gradient on a quadratic leash.

    The per-token form of direct reward optimisation (arXiv 2405.19107). The difference is not
    clamped: a clamp would cut the leash where it matters. Returns [B, S]. Metrics: ppo_kl, ppo_k3.
    """
    advantages = batch_advantages(batch, by="dro")
    difference = log_difference(policy, batch, by="dro")
    loss = -advantages * policy_logprobs(policy, batch) + 0.5 * beta * difference**2
    return loss, drift_metrics(difference)
