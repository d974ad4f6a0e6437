"""Makes what a run needs from its config. The modules are: mesh, tokenizer, data, algorithm and
phases (setup), roles (role_table), what scores samples (rewards), and the programs on shapes
alone (dry_run)."""

from rljax.setup.from_config import build
from rljax.setup.images import save_tokenizer, stop_ids
from rljax.setup.model_record import check_models, record_models
from rljax.setup.rewards import abstract_scorers, reward_role, text_scorer
from rljax.setup.role_table import (
    RoleInputs,
    abstract_roles,
    make_roles,
    own_roles,
    role_arrays,
    role_names,
    role_table,
    with_arrays,
)
from rljax.setup.scoring import make_episodes, open_players
from rljax.setup.setup import Phase, Setup, check_length, load_model, make_sampling, prompt_order
from rljax.setup.weights import STEP_SEPARATOR, initial_params, load_scalar, step_separator_of

__all__ = [
    "STEP_SEPARATOR",
    "Phase",
    "RoleInputs",
    "Setup",
    "abstract_roles",
    "abstract_scorers",
    "build",
    "check_length",
    "check_models",
    "initial_params",
    "load_model",
    "load_scalar",
    "make_episodes",
    "make_roles",
    "make_sampling",
    "open_players",
    "own_roles",
    "prompt_order",
    "record_models",
    "reward_role",
    "role_arrays",
    "role_names",
    "role_table",
    "save_tokenizer",
    "step_separator_of",
    "stop_ids",
    "text_scorer",
    "with_arrays",
]
