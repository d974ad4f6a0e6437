"""Policy losses: (policy, batch, **options) -> (loss [B, S], metrics of that shape or [B]).

What lives here: the formulas, unreduced. What does not: masking and averaging (rljax.learn),
models. `policy` holds logprobs [B, S] and entropy [B, S]; every other array is a constant of the
batch. tokens.py: a ratio per token; sequences.py: a ratio per sequence; selection.py: tokens picked
by statistics of the whole step. A loss may be marked `applies_weights` or `whole_step` (common.py).
"""

from rljax.losses.policy.common import Policy, log_ratio
from rljax.losses.policy.selection import clip_cov, kl_cov, ppo_high_entropy
from rljax.losses.policy.sequences import gmpo, gspo, gspo_token, gvpo, vespo
from rljax.losses.policy.tokens import (
    cispo,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    dro,
    dynamic_fine_tuning,
    gpg,
    negative_log_likelihood,
    policy_gradient,
    ppo_clip,
    sapo,
)

__all__ = [
    "Policy",
    "cispo",
    "clip_cov",
    "decoupled_ppo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "dynamic_fine_tuning",
    "gmpo",
    "gpg",
    "gspo",
    "gspo_token",
    "gvpo",
    "kl_cov",
    "log_ratio",
    "negative_log_likelihood",
    "policy_gradient",
    "ppo_clip",
    "ppo_high_entropy",
    "sapo",
    "vespo",
]
