"""From a config to the things a run needs. setup: mesh, tokenizer, data, recipe; all that the user
can get wrong about data and folders is found there, before the first compile. roles: weights.
"""

from rljax.setup.roles import (
    initial_params,
    load_scalar,
    optimizer_steps,
    reference_role,
    reward_role,
    rl_roles,
    role_arrays,
    sft_roles,
    text_scorer,
    with_arrays,
)
from rljax.setup.setup import Setup, build, check_length, data_stream, load_model

__all__ = [
    "Setup",
    "build",
    "check_length",
    "initial_params",
    "load_model",
    "load_scalar",
    "optimizer_steps",
    "reference_role",
    "data_stream",
    "reward_role",
    "rl_roles",
    "role_arrays",
    "sft_roles",
    "text_scorer",
    "with_arrays",
]
