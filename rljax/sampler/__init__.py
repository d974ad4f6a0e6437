"""Prompts -> trajectories, on the trainer's mesh, with the trainer's own parameter arrays."""

from rljax.sampler.generate import Sampling, rollout

__all__ = ["Sampling", "rollout"]
