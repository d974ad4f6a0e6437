"""Roles: pytrees with traceable verbs, the `program` that jits a dataflow's learning phase.

models: Actor, Critic, RewardModel, Reference. reward: text in, numbers out (host). judge: a model
that grades text. process: the scores of lines that Reward adds. opponents: who samples beside the
actor. program: jit with donation and pinned layouts. Small roles that hold what outlives a step
(KLController, Baseline) are rljax.controllers.
"""

from rljax.controllers import Baseline, KLController
from rljax.roles.judge import MeshJudge
from rljax.roles.models import (
    Actor,
    Critic,
    Reference,
    RewardModel,
    labels,
    rows_per_example,
    trait,
)
from rljax.roles.opponents import Mixture, Versus, wrote_itself
from rljax.roles.process import ProcessScorer
from rljax.roles.program import (
    TRAINED,
    WITH_OPTIMIZER,
    program,
    start_training,
    training_layout,
)
from rljax.roles.reward import ModelScorer, Reward, generate_scored

__all__ = [
    "TRAINED",
    "WITH_OPTIMIZER",
    "Actor",
    "Baseline",
    "Critic",
    "KLController",
    "MeshJudge",
    "Mixture",
    "ModelScorer",
    "ProcessScorer",
    "Reference",
    "Reward",
    "RewardModel",
    "Versus",
    "generate_scored",
    "labels",
    "program",
    "rows_per_example",
    "start_training",
    "trait",
    "training_layout",
    "wrote_itself",
]
