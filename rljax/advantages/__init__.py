"""Advantage estimators: batch -> advantages [B, S], or (advantages, returns) where a critic learns.

Pure functions of a batch, by the names that a config writes. All outputs are constants (without
gradient) and 0 where mask is 0. An estimator raises InputError where the batch lacks a field that
it reads. KL penalties in the reward: rljax.losses.kl.

    returns.py   sums of later rewards: GAE, VAPO, REINFORCE, ReMax, REINFORCE++
    groups.py    scores relative to other samples of the prompt: GRPO, RLOO, OPO, GPG, MaxRL, ...
    subsets.py   the best of k samples of the prompt: pass@k training, PKPO
    steps.py     steps of a response, turns of an episode: GRPO with process rewards, VinePPO,
                 PRIME, GiGPO, turns compared with those of siblings
    baseline.py  the baseline per token that minimises the variance
    grouping.py  statistics of groups (no estimators)

Rows may be packed only for the functions of returns.py: `group` belongs to a row.
"""

from collections.abc import Callable

import jax

from rljax.advantages.baseline import optimal_token_baseline
from rljax.advantages.groups import (
    batch_normalised,
    best_of_group,
    gdpo,
    gpg,
    group_relative,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from rljax.advantages.returns import gae, reinforce, reinforce_plus_plus, remax, vapo_gae
from rljax.advantages.steps import (
    gigpo,
    group_process,
    prime,
    turn_group,
    turn_leave_one_out,
    vineppo,
)
from rljax.advantages.subsets import pass_at_k, pkpo
from rljax.batch import Batch

# The type of an estimator, once its options are bound.
Estimator = Callable[[Batch], jax.Array | tuple[jax.Array, jax.Array]]

__all__ = [
    "Estimator",
    "batch_normalised",
    "best_of_group",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "group_process",
    "group_relative",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "pkpo",
    "prime",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "turn_group",
    "turn_leave_one_out",
    "vapo_gae",
    "vineppo",
]
