"""Policies on disk and how they are sampled, for evaluation, datagen, serving and commands."""

from rljax.policies.sampling import (
    ROWS_PER_CALL,
    Completion,
    Policy,
    filled_chunks,
    sample_all,
    warn_of_failed_rewards,
)
from rljax.policies.saved import SavedPolicy, load_named_policy, load_policy

__all__ = [
    "ROWS_PER_CALL",
    "Policy",
    "Completion",
    "SavedPolicy",
    "filled_chunks",
    "load_named_policy",
    "load_policy",
    "sample_all",
    "warn_of_failed_rewards",
]
