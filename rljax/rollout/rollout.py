"""Rollout: what sampling a step's prompts gives, and the settings that it reads.

A rollout is a function (prompts, key, cfg, *, actor, reward, ...) -> Rollout that
`algorithm.collect` names. Further keyword-only names without a default are handed over where it
asks for them: `draw(n)` gives n further prompts of the data, `tokenizer` the run's, and any other
name the role of that name. Names with a default are its options.
"""

import dataclasses
from collections.abc import Callable
from inspect import signature

import jax.numpy as jnp

from rljax.batch import Batch
from rljax.components import Component
from rljax.data.online.prompts import Prompts
from rljax.rollout.reward import RewardReport
from rljax.sampler import Sampling


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """What a rollout reads as `cfg`. Host values: a change of any recompiles no learning."""

    prompts_per_step: int
    samples_per_prompt: int
    sampling: Sampling
    correct_at: float = 1.0
    reward_shaping: tuple[Callable, ...] = ()

    def replace(self, **fields) -> "RolloutConfig":
        return dataclasses.replace(self, **fields)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Trajectories [B, S] on the mesh, `batch.group` the index into `prompts`; what the reward said
    of every sample, those that were left out too; metrics of the rollout's own."""

    batch: Batch
    prompts: Prompts
    report: RewardReport
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def replace(self, **fields) -> "Rollout":
        return dataclasses.replace(self, **fields)


def run_rollout(rollout, prompts: Prompts, key, cfg: RolloutConfig, **available) -> Rollout:
    """rollout(prompts, key, cfg, ...) with those of `available` that its signature names."""
    names = rollout.parameters if isinstance(rollout, Component) else signature(rollout).parameters
    given = {name: value for name, value in available.items() if name in names}
    return rollout(prompts, key, cfg, **given)


def widened(batch: Batch, columns: int) -> Batch:
    """The batch with padding behind its rows, up to `columns`: every step of a run has one shape,
    so that a shorter response limit recompiles no learning."""
    more = columns - batch.tokens.shape[1]
    if more <= 0:
        return batch
    wide = {}
    for field in dataclasses.fields(batch):
        value = vars(batch)[field.name]
        if value is not None and field.metadata["axes"][:2] == ("B", "S"):
            rest = [(0, 0)] * (value.ndim - 2)
            wide[field.name] = jnp.pad(value, [(0, 0), (0, more), *rest])
    return dataclasses.replace(batch, **wide)
