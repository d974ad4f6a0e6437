"""Rollouts: prompts -> scored trajectories. Sampling, rewards, judges, process scores,
opponents."""

from rljax.rollout.against import Mixture, Versus, wrote_itself
from rljax.rollout.judge import MeshJudge
from rljax.rollout.process import ProcessScorer
from rljax.rollout.reward import ModelScorer, Reward, generate_scored

__all__ = [
    "MeshJudge",
    "Mixture",
    "ModelScorer",
    "ProcessScorer",
    "Reward",
    "Versus",
    "generate_scored",
    "wrote_itself",
]
