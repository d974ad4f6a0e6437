"""Runs of the presets' tiny variants that share what they can: one reward pool, one start, and
the compiled sampler."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from conftest import REPO

from rljax import setup as build
from rljax.config.flags import load_config_file
from rljax.training.run import Run

PRESETS = sorted(p.stem for p in (REPO / "configs" / "presets").glob("*.py"))


def preset_config(name: str, seed: int = 0):
    config = load_config_file(str(REPO / "configs" / "presets" / f"{name}.py") + ":tiny")
    config.seed, config.compilation_cache = seed, ""
    return config


class Shared:
    """A reward role and, per seed, the weights after the supervised steps."""

    def __init__(self, folder: Path):
        self.folder, self.starts, self.reward = folder, {}, None

    def start(self, seed: int):
        if seed not in self.starts:
            with self.run(preset_config("grpo", seed)) as run:
                run.begin(run.phase, build.initial_params(run.config, run.setup.model))
                for _ in range(run.config.sft.steps):
                    run.step()
                self.starts[seed] = jax.device_get(run.roles["actor"].state.params)
        return self.starts[seed]

    def run(self, config) -> Run:
        built = build.build(config, jax.devices()[:1])
        if self.reward is None:
            self.reward = build.reward_role(built, config.reward.function)
        return Run(built, self.folder, reward=self.reward)

    def train(self, name: str, seed: int, steps: int = 0, sign: float = 1.0, **algorithm):
        """Mean score of every step of a preset, held-out accuracy before and after, all metrics."""
        config = preset_config(name, seed)
        config.steps = steps or config.steps
        config.actor_optimizer.lr *= sign
        config.algorithm = dataclasses.replace(config.algorithm, **algorithm)
        params = jax.device_put(self.start(seed))
        with self.run(config) as run:
            run.begin(run.setup.main, jax.device_put(params, run.setup.model.shardings()))
            before = run.evaluate()["eval/accuracy"]
            rows = [run.step() for _ in range(config.steps)]
            after = run.evaluate()["eval/accuracy"]
        return [float(r["reward/mean"]) for r in rows], before, after, rows

    def close(self):
        if self.reward is not None:
            self.reward.close()


def mean(x) -> float:
    return float(np.mean(x))
