"""Environments of other libraries. Each library is imported when its environment is named."""

from rljax.environments.adapters.classes import of_class
from rljax.environments.adapters.gymnasium_envs import gymnasium
from rljax.environments.adapters.gymnasium_vectors import gymnasium_vector
from rljax.environments.adapters.mcp_servers import mcp
from rljax.environments.adapters.openenv_servers import openenv
from rljax.environments.adapters.programs import program
from rljax.environments.adapters.textarena_games import textarena
from rljax.environments.adapters.tinker_envs import tinker
from rljax.environments.adapters.verifiers_tasks import verifiers

__all__ = [
    "gymnasium",
    "gymnasium_vector",
    "mcp",
    "of_class",
    "openenv",
    "program",
    "textarena",
    "tinker",
    "verifiers",
]
