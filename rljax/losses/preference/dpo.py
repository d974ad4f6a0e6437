"""DPO and its relatives: one or several pairwise losses of the log-ratios to the reference.

Options, f-divergences and weights; the formulas of the loss types are in pairwise.py. Axes: B rows,
S tokens, N = B/2 pairs: rows 2i (chosen) and 2i + 1 (rejected).
"""

import jax
import jax.numpy as jnp

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import AboveZero, PlainText, Share, contract
from rljax.errors import InputError
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference import pairwise
from rljax.losses.preference.common import (
    label_noise,
    one_of,
    pair_metrics,
    positive,
    row_tokens,
    rows_of,
    sequence_logprobs,
    step_token_mean,
)

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def divergence_score(log_ratio: jax.Array, divergence: str = "reverse_kl", alpha: float = 0.5):
    """f'(u), u = exp(log_ratio), which is 0 where policy and reference agree (arXiv 2309.16240), in
    the shape of the log-ratios.

    reverse_kl: log u; forward_kl: 1 - 1/u; js_divergence: log(2u / (1 + u)); alpha_divergence:
    (u^(alpha - 1) - 1) / (alpha - 1), alpha = 1 being the reverse KL and 0 the forward KL.
    Exponents stop at 80, before float32 overflows. Raises InputError for another divergence.
    """
    one_of("divergence", divergence, DIVERGENCES, by="dpo")
    if divergence == "js_divergence":
        return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)
    power = -1.0 if divergence == "forward_kl" else alpha - 1.0
    if divergence == "reverse_kl" or abs(power) < 1e-6:
        return log_ratio
    exponent = power * log_ratio
    return jnp.expm1(jnp.where(exponent > 80.0, 80.0, exponent)) / power


def _length_desensitised(batch: Batch, ld_alpha: float, *, by: str) -> jax.Array:
    """Returns 1 for the first min(|y_w|, |y_l|) tokens of either row, ld_alpha for what is longer:
    [B, S].

    LD-DPO, arXiv 2409.06411.
    """
    tokens = jnp.sum(batch.mask > 0, axis=1)
    shared_length = jnp.repeat(jnp.minimum(*rows_of(tokens, 2, by=by)), 2)
    return jnp.where(batches.segment_order(batch) < shared_length[:, None], 1.0, ld_alpha)


def _pair(
    policy: PolicyOutputs, batch: Batch, divergence: str, alpha: float, ld_alpha: float, *, by: str
):
    """Returns the pairwise.PairSums that the loss types read."""
    batch.require("ref_logprobs", by=by)
    token_weights = 1.0 if ld_alpha == 1 else _length_desensitised(batch, ld_alpha, by=by)
    logps = batches.row_sum(token_weights * policy.logprobs, batch)
    reference = jax.lax.stop_gradient(batches.row_sum(token_weights * batch.ref_logprobs, batch))
    scores, tokens = divergence_score(logps - reference, divergence, alpha), row_tokens(batch)
    nll = rows_of(-sequence_logprobs(policy, batch) / tokens, 2, by=by)[0]
    step_terms = rows_of(-policy.logprobs, 2, by=by)[0], rows_of(batch.mask > 0, 2, by=by)[0]
    columns = (rows_of(x, 2, by=by) for x in (logps, reference, scores, tokens))
    sums = (x for pair in columns for x in pair)
    return pairwise.PairSums(*sums, nll, step_token_mean(*step_terms, batch, 2, by=by))


def _pair_weight(policy: PolicyOutputs, batch: Batch, *, by: str) -> jax.Array:
    """Returns the product over both rows of exp(mean over tokens of log pi - log sum_v pi_v^2),
    without gradient: [N]."""
    batch.require("sum_pi_squared", by=by)
    # Selected before the logarithm: a garbage 0 there would be -inf.
    energy = jnp.log(jnp.where(batch.mask > 0, batch.sum_pi_squared, 1.0))
    aligned = batches.row_sum(policy.logprobs - energy, batch) / row_tokens(batch)
    return jax.lax.stop_gradient(jnp.exp(sum(rows_of(aligned, 2, by=by))))


def _check(losses, weights, label_smoothing: float, *, by: str) -> None:
    if isinstance(losses, str) or not losses:
        raise InputError(
            f"{by}(losses)", value=losses, rule="a tuple of names", fix="losses=('sigmoid',)"
        )
    for name in losses:
        one_of("losses", name, pairwise.LOSSES, by=by)
    if len(weights) not in (0, len(losses)):
        raise InputError(
            f"{by}(loss_weights)",
            value=weights,
            rule=f"one per loss: {len(losses)}, or none",
            fix=f"{by}(loss_weights={(1.0,) * len(losses)})",
        )
    label_noise(label_smoothing, by=by)
    if "exo_pair" in losses and not label_smoothing:
        raise InputError(
            f"{by}(label_smoothing)",
            value=0.0,
            rule="> 0 where exo_pair is a loss",
            fix=f"{by}(label_smoothing=0.001)",
        )
    if "robust" in losses and label_smoothing == 0.5:
        raise InputError(
            f"{by}(label_smoothing)",
            value=0.5,
            rule="< 0.5 where robust is a loss",
            fix=f"{by}(label_smoothing=0.1)",
        )


@contract(
    safe=True,
    reads=lambda options: (
        ("ref_logprobs", "sum_pi_squared") if options["wpo_weighting"] else ("ref_logprobs",)
    ),
    rows=2,
    whole_step=lambda options: bool(set(options["losses"]) & set(pairwise.WHOLE_STEP)),
)
def dpo(
    policy: PolicyOutputs,
    batch: Batch,
    *,
    beta: float = 0.1,
    losses: tuple[PlainText, ...] = ("sigmoid",),
    loss_weights: tuple[float, ...] = (),
    label_smoothing: float = 0.0,
    delta: jax.Array | float = 0.0,
    discopop_tau: AboveZero = 0.05,
    divergence: PlainText = "reverse_kl",
    divergence_alpha: float = 0.5,
    ld_alpha: Share = 1.0,
    wpo_weighting: bool = False,
):
    """sum_i w_i L_i(beta, Delta_w, Delta_l), Delta = log pi(y|x) - log ref(y|x): [N].

    DPO, arXiv 2305.18290: ("sigmoid",) is -log sigmoid(beta (Delta_w - Delta_l)). `losses` are
    names of rljax.losses.preference.pairwise (RPO = ("sigmoid", "rpo")), weighed by `loss_weights`,
    1 each if empty. aot, aot_unpaired and sft are statistics of all pairs of the optimizer step:
    where it is split into microbatches, they cost a forward pass more. MPO (arXiv 2411.10442) is
    losses=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0).

    label_smoothing: the share of wrong labels, read by sigmoid (cDPO), sigmoid_norm, robust,
    exo_pair, aot, aot_unpaired. delta: the running mean reward that bco_pair subtracts. divergence
    (f-DPO): divergence_score. ld_alpha < 1: weight of the tokens past the shorter row's length
    (LD-DPO, arXiv 2409.06411). wpo_weighting: a pair weighs as likely as the policy would sample
    it, from batch.sum_pi_squared (WPO, arXiv 2406.11827). Without a reference: cpo(nll_coef=0).
    Metrics: pair_metrics. Raises InputError for a name, a number of weights or an option out of its
    range, for aot with another divergence than reverse_kl, and where the batch has no ref_logprobs.
    """
    by = "dpo"
    positive("beta", beta, by=by)
    positive("discopop_tau", discopop_tau, by=by)
    _check(losses, loss_weights, label_smoothing, by=by)
    if "aot" in losses and divergence != "reverse_kl":
        raise InputError(
            f"{by}(divergence)",
            value=divergence,
            rule="reverse_kl for aot",
            fix=f"{by}(divergence='reverse_kl'), or leave aot out of losses",
        )
    pair = _pair(policy, batch, divergence, divergence_alpha, ld_alpha, by=by)
    knobs = pairwise.Knobs(beta, label_smoothing, discopop_tau, delta)
    total = jnp.zeros_like(pair.chosen)
    for name, weight in zip(losses, loss_weights or (1.0,) * len(losses), strict=True):
        total = total + weight * pairwise.LOSSES[name](pair, knobs)
    if wpo_weighting:
        total = total * _pair_weight(policy, batch, by=by)
    ratios = (
        pair.chosen_logps - pair.ref_chosen_logps,
        pair.rejected_logps - pair.ref_rejected_logps,
    )
    rewards = tuple(beta * x for x in ratios)
    return total, pair_metrics(rewards, (pair.chosen_logps, pair.rejected_logps))


@contract(safe=True, reads=("ref_logprobs",), rows=2)
def spin(policy: PolicyOutputs, batch: Batch, *, lam: AboveZero = 0.1):
    """-log sigmoid(lam (Delta_real - Delta_generated)): SPIN, arXiv 2401.01335: [N].

    The reference is the previous iterate, which wrote the rejected rows; the chosen ones are the
    data's.
    """
    return dpo(policy, batch, beta=positive("lam", lam, by="spin"))
