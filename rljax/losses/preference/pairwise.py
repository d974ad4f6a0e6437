"""One function per loss type of a pair: (pair, knobs) -> the loss of each pair, [N]; dpo adds them.

A score is f'(pi/ref) of an f-divergence; for the reverse KL it is the log-ratio Delta = log
pi(y|x) - log ref(y|x), h = beta (score_w - score_l), r = beta score, and eps is
knobs.label_smoothing. Axes: N pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.losses.preference.common import log_sigmoid_smoothed


class PairSums(NamedTuple):
    """Sums over the policy tokens of the chosen and the rejected rows, [N] each."""

    chosen_logps: jax.Array
    rejected_logps: jax.Array
    ref_chosen_logps: jax.Array
    ref_rejected_logps: jax.Array
    chosen: jax.Array  # scores
    rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array
    chosen_nll: jax.Array  # length mean of -log pi of the chosen row
    step_nll: jax.Array  # its mean over pairs is the mean over all chosen tokens of the step


class Knobs(NamedTuple):
    """The options that loss types read beside the pair."""

    beta: float
    label_smoothing: float
    discopop_tau: float
    delta: jax.Array | float


def _h(pair: PairSums, knobs: Knobs) -> jax.Array:
    return knobs.beta * (pair.chosen - pair.rejected)


def _length_means(pair: PairSums) -> jax.Array:
    return pair.chosen / pair.chosen_tokens - pair.rejected / pair.rejected_tokens


def sigmoid(pair: PairSums, knobs: Knobs) -> jax.Array:
    """-(1 - eps) log sigmoid(h) - eps log sigmoid(-h), [N]: DPO, arXiv 2305.18290;
    eps > 0 is cDPO."""
    return log_sigmoid_smoothed(_h(pair, knobs), knobs.label_smoothing)


def sigmoid_norm(pair: PairSums, knobs: Knobs) -> jax.Array:
    """The sigmoid loss of length means of the scores, [N] (Tulu 3, arXiv 2411.15124)."""
    return log_sigmoid_smoothed(knobs.beta * _length_means(pair), knobs.label_smoothing)


def hinge(pair: PairSums, knobs: Knobs) -> jax.Array:
    """max(0, 1 - h), [N]: SLiC-HF, arXiv 2305.10425."""
    return jax.nn.relu(1 - _h(pair, knobs))


def ipo(pair: PairSums, knobs: Knobs) -> jax.Array:
    """(score_w / |y_w| - score_l / |y_l| - 1 / (2 beta))^2, [N]: IPO,
    arXiv 2310.12036, length means."""
    return (_length_means(pair) - 1 / (2 * knobs.beta)) ** 2


def ipo_sum(pair: PairSums, knobs: Knobs) -> jax.Array:
    """(score_w - score_l - 1 / (2 beta))^2, [N]: IPO, arXiv 2310.12036, on sums."""
    return (pair.chosen - pair.rejected - 1 / (2 * knobs.beta)) ** 2


def exo_pair(pair: PairSums, knobs: Knobs) -> jax.Array:
    """KL((sigmoid(h), sigmoid(-h)) || (1 - eps, eps)), [N]: EXO,
    arXiv 2402.00856; needs eps > 0."""
    h, eps = _h(pair, knobs), knobs.label_smoothing
    chosen_term = jax.nn.sigmoid(h) * (jax.nn.log_sigmoid(h) - jnp.log1p(-eps))
    return chosen_term + jax.nn.sigmoid(-h) * (jax.nn.log_sigmoid(-h) - jnp.log(eps))


def nca_pair(pair: PairSums, knobs: Knobs) -> jax.Array:
    """-log sigmoid(r_w) - (log sigmoid(-r_w) + log sigmoid(-r_l)) / 2, [N]: NCA,
    arXiv 2402.05369."""
    chosen, rejected = knobs.beta * pair.chosen, knobs.beta * pair.rejected
    negatives = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
    return -jax.nn.log_sigmoid(chosen) - 0.5 * negatives


def robust(pair: PairSums, knobs: Knobs) -> jax.Array:
    """[-(1 - eps) log sigmoid(h) + eps log sigmoid(-h)] / (1 - 2 eps), [N]: arXiv 2403.00409."""
    h, eps = _h(pair, knobs), knobs.label_smoothing
    clean = -(1 - eps) * jax.nn.log_sigmoid(h) + eps * jax.nn.log_sigmoid(-h)
    return clean / (1 - 2 * eps)


def bco_pair(pair: PairSums, knobs: Knobs) -> jax.Array:
    """-log sigmoid(r_w - delta) - log sigmoid(delta - r_l), [N]: BCO, arXiv 2404.04656; delta is
    the running mean of the rewards."""
    chosen, rejected = knobs.beta * pair.chosen, knobs.beta * pair.rejected
    delta = jax.lax.stop_gradient(knobs.delta)
    return -jax.nn.log_sigmoid(chosen - delta) - jax.nn.log_sigmoid(delta - rejected)


def sppo_hard(pair: PairSums, knobs: Knobs) -> jax.Array:
    """(score_w - 1/(2 beta))^2 + (score_l + 1/(2 beta))^2, [N]: SPPO with win probabilities 1 and
    0, arXiv 2405.00675."""
    half = 0.5 / knobs.beta
    return (pair.chosen - half) ** 2 + (pair.rejected + half) ** 2


def apo_zero(pair: PairSums, knobs: Knobs) -> jax.Array:
    """1 - sigmoid(r_w) + sigmoid(r_l), [N]: APO-zero, arXiv 2408.06266."""
    # sigmoid(-x), not 1 - sigmoid(x): the difference loses its digits where x is large.
    return jax.nn.sigmoid(-knobs.beta * pair.chosen) + jax.nn.sigmoid(knobs.beta * pair.rejected)


def apo_down(pair: PairSums, knobs: Knobs) -> jax.Array:
    """sigmoid(r_w) + 1 - sigmoid(r_w - r_l), [N]: APO-down, arXiv 2408.06266."""
    return jax.nn.sigmoid(knobs.beta * pair.chosen) + jax.nn.sigmoid(-_h(pair, knobs))


def discopop(pair: PairSums, knobs: Knobs) -> jax.Array:
    """-(1 - m) log sigmoid(h) + m exp(-h), m = sigmoid(h / tau), [N]: DiscoPOP,
    arXiv 2406.08414."""
    h = _h(pair, knobs)
    blend = jax.nn.sigmoid(h / knobs.discopop_tau)
    # For h far below 0, m exp(-h) is tiny times huge; -h stops before exp overflows.
    exponential = jnp.exp(jnp.where(-h > 80.0, 80.0, -h))
    return -jax.nn.log_sigmoid(h) * (1 - blend) + exponential * blend


def rpo(pair: PairSums, knobs: Knobs) -> jax.Array:
    """-log pi(y_w|x) / |y_w|, [N]: the supervised term of Iterative RPO, arXiv 2404.19733."""
    return pair.chosen_nll


# -- these are statistics of all pairs of the optimizer step


def sft(pair: PairSums, knobs: Knobs) -> jax.Array:
    """-log pi, averaged over all chosen tokens of the optimizer step, [N] (MPO,
    arXiv 2411.10442)."""
    return pair.step_nll


def aot(pair: PairSums, knobs: Knobs) -> jax.Array:
    """The sigmoid loss between order statistics, sort(log pi_w/pi_l) - sort(log ref_w/ref_l), [N]:
    AOT, arXiv 2406.05882."""
    policy = jnp.sort(pair.chosen_logps - pair.rejected_logps)
    reference = jnp.sort(pair.ref_chosen_logps - pair.ref_rejected_logps)
    return log_sigmoid_smoothed(knobs.beta * (policy - reference), knobs.label_smoothing)


def aot_unpaired(pair: PairSums, knobs: Knobs) -> jax.Array:
    """The sigmoid loss between order statistics, sort(Delta_w) - sort(Delta_l), [N]: AOT,
    arXiv 2406.05882, where chosen and rejected need not belong together."""
    delta = jnp.sort(pair.chosen_logps - pair.ref_chosen_logps)
    delta = delta - jnp.sort(pair.rejected_logps - pair.ref_rejected_logps)
    return log_sigmoid_smoothed(knobs.beta * delta, knobs.label_smoothing)


PER_PAIR = {
    loss.__name__: loss
    for loss in (
        sigmoid,
        sigmoid_norm,
        hinge,
        ipo,
        ipo_sum,
        exo_pair,
        nca_pair,
        robust,
        bco_pair,
        sppo_hard,
        apo_zero,
        apo_down,
        discopop,
        rpo,
    )
}
WHOLE_STEP = {loss.__name__: loss for loss in (sft, aot, aot_unpaired)}
LOSSES = PER_PAIR | WHOLE_STEP
