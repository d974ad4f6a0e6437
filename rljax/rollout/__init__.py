"""Rollouts: prompts -> scored trajectories."""

from rljax.rollout.against import Mixture, Versus, wrote_itself
from rljax.rollout.judge import MeshJudge
from rljax.rollout.process import ProcessScorer
from rljax.rollout.reward import (
    EarlyScores,
    ModelScorer,
    Reward,
    RewardReport,
    ScoredRow,
    sample_scored,
)

__all__ = [
    "EarlyScores",
    "MeshJudge",
    "Mixture",
    "ModelScorer",
    "ProcessScorer",
    "Reward",
    "RewardReport",
    "ScoredRow",
    "Versus",
    "sample_scored",
    "wrote_itself",
]
