"""Environments: what the policy plays with. `environment.function` names one of these functions or
your own; contract.py says what such a function is."""

from rljax.environments.adapters import (
    gymnasium,
    gymnasium_vector,
    mcp,
    of_class,
    openenv,
    program,
    textarena,
    tinker,
    verifiers,
)
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
