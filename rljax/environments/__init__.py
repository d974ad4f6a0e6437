"""Environments: what the policy plays with. `environment.function` names one of these functions or
your own; contract.py says what such a function is."""

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
    "kuhn_poker",
    "repair",
    "tic_tac_toe",
    "tools",
]
