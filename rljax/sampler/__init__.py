"""Samples trajectories from prompts on the trainer's mesh, with its own parameter arrays."""

from rljax.sampler.engine import Engine
from rljax.sampler.generate import SecondModel, generate
from rljax.sampler.requests import Decoding, Sampling
from rljax.sampler.stream import Sampler

__all__ = ["Decoding", "Engine", "SecondModel", "Sampler", "Sampling", "generate"]
