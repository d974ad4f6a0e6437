"""Policy losses: (policy, batch, **options) -> (loss [B, S], metrics of that shape or [B]).

The formulas, unreduced: rljax.learn masks and averages. `policy` holds logprobs [B, S] and entropy
[B, S]; every other array is a constant of the batch. A loss declares in its contract what it reads,
and whether it handles batch.weights itself (`applies_weights`) or needs all rows of the optimizer
step at once (`whole_step`).

    tokens.py     a ratio per token
    sequences.py  a ratio, or a residual, per sequence
    selection.py  tokens picked by statistics of the whole step
"""

from rljax.losses.policy.common import PolicyOutputs
from rljax.losses.policy.selection import clip_cov, kl_cov, m2po, ppo_high_entropy
from rljax.losses.policy.sequences import (
    gmpo,
    gspo,
    gspo_token,
    gvpo,
    real,
    topr,
    trajectory_balance,
    vespo,
)
from rljax.losses.policy.tokens import (
    chord_phi,
    cispo,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    dro,
    dynamic_fine_tuning,
    fipo,
    gpg,
    luffy,
    negative_log_likelihood,
    policy_gradient,
    ppo_clip,
    sapo,
)

__all__ = [
    "PolicyOutputs",
    "chord_phi",
    "cispo",
    "clip_cov",
    "decoupled_ppo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "dynamic_fine_tuning",
    "fipo",
    "gmpo",
    "gpg",
    "luffy",
    "gspo",
    "gspo_token",
    "gvpo",
    "kl_cov",
    "m2po",
    "negative_log_likelihood",
    "policy_gradient",
    "ppo_clip",
    "ppo_high_entropy",
    "real",
    "sapo",
    "topr",
    "trajectory_balance",
    "vespo",
]
