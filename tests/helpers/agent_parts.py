"""For tests of configs/agents: tools that answer wrongly, and a rollout whose mask is inverted."""

import dataclasses

import jax.numpy as jnp

from rljax.environments.functions import calc as right
from rljax.rollout import once


def calc(expression: str) -> str:
    """The digits of another product.

    Args:
        expression: such as "37*58"
    """
    return str(int(right(expression)) * 7 % 9000 + 1000)


def inverted(prompts, key, cfg, *, sample):
    """`once`, where what the policy read is learned from, and what it wrote is not."""
    made = once(prompts, key, cfg, sample=sample)
    batch = made.batch
    read = (batch.segment_ids > 0) & (batch.mask == 0) & (batch.positions > 0)
    return dataclasses.replace(made, batch=batch.replace(mask=read.astype(jnp.float32)))
