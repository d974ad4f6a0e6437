"""Roles: pytrees with traceable verbs, and the `program` that jits a dataflow.

models: Actor, Critic, RewardModel, Reference. teachers: several References. state: small roles that
hold what outlives a step. role: what every role answers. layout: where training keeps its arrays.
program: jit.
"""

from rljax.roles.layout import start_training, training_layout
from rljax.roles.models import Actor, Critic, Reference, RewardModel
from rljax.roles.pretraining import Pretraining
from rljax.roles.program import program
from rljax.roles.role import Role
from rljax.roles.state import (
    Baseline,
    EntropyController,
    EntropySchedule,
    KLController,
    Multiplier,
    SeatBaseline,
)
from rljax.roles.teachers import SelfTeacher, Teachers

__all__ = [
    "Actor",
    "Baseline",
    "Critic",
    "EntropyController",
    "EntropySchedule",
    "KLController",
    "Multiplier",
    "Pretraining",
    "Reference",
    "RewardModel",
    "Role",
    "SeatBaseline",
    "SelfTeacher",
    "Teachers",
    "program",
    "start_training",
    "training_layout",
]
