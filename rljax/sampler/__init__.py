"""Prompts -> trajectories, on the trainer's mesh, with the trainer's own parameter arrays."""

from rljax.sampler.generate import Mixed, Sampling, rollout

__all__ = ["Mixed", "Sampling", "rollout"]
