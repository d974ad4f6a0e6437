"""Roles: pytrees with traceable verbs, and the `program` that jits a dataflow.

models: Actor, Critic, RewardModel, Reference. state: small roles that hold what outlives a step.
"""

from rljax.roles.models import Actor, Critic, Reference, RewardModel
from rljax.roles.program import (
    TRAINED,
    WITH_OPTIMIZER,
    program,
    start_training,
    training_layout,
)
from rljax.roles.state import Baseline, KLController

__all__ = [
    "TRAINED",
    "WITH_OPTIMIZER",
    "Actor",
    "Baseline",
    "Critic",
    "KLController",
    "Reference",
    "RewardModel",
    "program",
    "start_training",
    "training_layout",
]
