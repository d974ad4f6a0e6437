"""Environments: what the policy plays with. `environment.function` names one of these functions or
your own; contract.py says what such a function is."""

from rljax.environments.adapters.classes import of_class
from rljax.environments.adapters.gymnasium_envs import gymnasium
from rljax.environments.adapters.gymnasium_vectors import gymnasium_vector
from rljax.environments.adapters.mcp_servers import mcp
from rljax.environments.adapters.openenv_servers import openenv
from rljax.environments.adapters.programs import program
from rljax.environments.adapters.textarena_games import textarena
from rljax.environments.adapters.tinker_envs import tinker
from rljax.environments.adapters.verifiers_tasks import verifiers
from rljax.environments.contract import Call, Done, Opening, Reply, Turn
from rljax.environments.games import guess_number, kuhn_poker, tic_tac_toe
from rljax.environments.repair import repair
from rljax.environments.toolbox import tools

__all__ = [
    "Call",
    "Done",
    "Opening",
    "Reply",
    "Turn",
    "guess_number",
    "gymnasium",
    "gymnasium_vector",
    "kuhn_poker",
    "mcp",
    "of_class",
    "openenv",
    "program",
    "repair",
    "textarena",
    "tic_tac_toe",
    "tinker",
    "tools",
    "verifiers",
]
