"""Prompts -> trajectories, on the trainer's mesh, with the trainer's own parameter arrays."""

from rljax.sampler.engine import Engine
from rljax.sampler.requests import Sampling
from rljax.sampler.rollout import Mixed, generate
from rljax.sampler.stream import Sampler

__all__ = ["Engine", "Mixed", "Sampler", "Sampling", "generate"]
