"""Samples trajectories from prompts on the trainer's devices: with its own parameter arrays, or
with a copy in a layout of its own."""

from rljax.sampler.engine import Engine
from rljax.sampler.generate import SecondModel, branch, generate, generate_in_program
from rljax.sampler.layout import Layout, held_weights
from rljax.sampler.requests import Decoding, Sampling
from rljax.sampler.stream import Sampler

__all__ = [
    "Decoding",
    "Engine",
    "Layout",
    "SecondModel",
    "Sampler",
    "Sampling",
    "branch",
    "generate",
    "generate_in_program",
    "held_weights",
]
