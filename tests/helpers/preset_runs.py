"""Runs of the presets' tiny variants that share what they can: one reward pool, one start, and
the compiled sampler."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
from conftest import REPO

from rljax import setup as build
from rljax.config.flags import load_config_file
from rljax.models.huggingface import save_params
from rljax.rollout import player_of
from rljax.training.run import Run

PRESETS = sorted(p.stem for p in (REPO / "configs" / "presets").glob("*.py"))
NEED_TEACHER = ("distil", "mopd")  # these learn nothing without a teacher's folder
NO_REWARD = (*NEED_TEACHER, "sdft")
OWN_START = ("sdft", "sdpo")  # whose supervised steps are of other examples

SEARCHES = ("expert_iteration",)  # whose first samples are a search's, better than the policy's


def preset_config(name: str, seed: int = 0):
    config = load_config_file(str(REPO / "configs" / "presets" / f"{name}.py") + ":tiny")
    config.seed, config.compilation_cache = seed, ""
    return config


def set_teachers(config, folder: str) -> None:
    """Names this policy as the teacher, or as that of each source of prompts."""
    config.teachers = (folder,) * len(config.teacher_sources)
    config.teacher_model = "" if config.teachers else folder


class Shared:
    """The reward of each config's own text and, per seed, the weights after the supervised
    steps, which are those of every such object."""

    starts: ClassVar[dict] = {}

    def __init__(self, folder: Path):
        self.folder, self.rewards = folder, {}

    def start(self, seed: int, name: str = "grpo"):
        key = seed, name if name in OWN_START else "grpo"
        if key not in self.starts:
            with self.run(preset_config(key[1], seed)) as run:
                run.begin(run.phase, build.initial_params(run.config, run.setup.model))
                for _ in range(run.config.sft.steps):
                    run.step()
                self.starts[key] = jax.device_get(run.roles["actor"].state.params)
        return self.starts[key]

    @property
    def reward(self):
        """The reward of the embedded task."""
        config = preset_config("grpo")
        if config.reward.function not in self.rewards:
            with self.run(config):
                pass
        return self.rewards[config.reward.function]

    def run(self, config) -> Run:
        built, text = build.build(config, jax.devices()[:1]), config.reward.function
        if text not in self.rewards:
            self.rewards[text] = build.reward_role(built, text, dense=True)
        return Run(built, self.folder, players=[player_of(self.rewards[text])])

    def teacher(self) -> str:
        """The folder of a policy that the preset grpo has trained."""
        folder = self.folder / "teacher"
        if not folder.exists():
            config = preset_config("grpo")
            with self.run(config) as run:
                params = jax.device_put(self.start(0), run.setup.model.shardings())
                run.begin(run.setup.main, params)
                for _ in range(config.steps):
                    run.step()
                ids = dict(bos_id=None, eos_ids=(1,), pad_id=0)
                save_params(folder, run.setup.model, run.roles["actor"].state.params, **ids)
        return str(folder)

    def train(self, name: str, seed: int, steps: int = 0, sign: float = 1.0, **algorithm):
        """Mean score of every step of a preset, held-out accuracy before and after, all metrics."""
        config = preset_config(name, seed)
        if name in NEED_TEACHER:
            set_teachers(config, self.teacher())
        config.steps = steps or config.steps
        config.actor_optimizer.lr *= sign
        config.algorithm = dataclasses.replace(config.algorithm, **algorithm)
        params = jax.device_put(self.start(seed, name))
        with self.run(config) as run:
            run.begin(run.setup.main, jax.device_put(params, run.setup.model.shardings()))
            before = run.evaluate()["eval/accuracy"]
            rows = [run.step() for _ in range(config.steps)]
            after = run.evaluate()["eval/accuracy"]
        rewards = [] if name in NO_REWARD else [float(r["reward/mean"]) for r in rows]
        return rewards, before, after, rows

    def close(self):
        for reward in self.rewards.values():
            reward.close()


def mean(x) -> float:
    return float(np.mean(x))
