"""Pretraining: the examples of a step whose loss is added to that of the actor (PPO-ptx)."""

import dataclasses

import jax

from rljax.batch import Batch
from rljax.learn import Steps
from rljax.roles.role import Role, static_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pretraining(Role):
    """The examples that come with a step's batch, for `Actor.update`, whose objective then has the
    term coef x NLL (PPO-ptx of InstructGPT, arXiv 2203.02155). `steps.rows` of them belong to one
    optimizer step, and `steps` says how they are packed. The run draws others before every step."""

    trained = False

    state: Batch
    coef: float = static_field()
    steps: Steps = static_field()
