"""Preference learning from samples: pairs, refreshed references, games, mixtures, and that each
learns."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_runs import Shared, mean, preset_config

from rljax import build
from rljax.components import resolve
from rljax.config import HOMES
from rljax.errors import InputError
from rljax.pairing import bradley_terry, choose_pairs, higher_wins, win_probabilities
from rljax.roles import Mixture, Versus, wrote_itself
from rljax.sampler import Mixed, rollout
from rljax.validation import validate

LOSSES = {
    "online_dpo()": "dpo(beta=0.1)",
    "online_dpo(rejected='random', refresh_every=4)": "dpo(beta=0.1)",
    "sppo()": "sppo(eta=10.0)",
    "xpo()": "xpo(beta=0.1, alpha=1e-4)",
    "nash_md()": "nash_md(beta=0.02)",
}
LEARNING_RATES = {"nash_md()": 6e-3}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("online"))
    yield runs
    runs.close()


def config_of(dataflow: str, seed: int = 0, **changes):
    config = preset_config("grpo", seed)
    config.dataflow, config.steps = dataflow, 40
    config.algorithm.preference_loss = LOSSES.get(dataflow, "dpo(beta=0.1)")
    config.algorithm.kl_in_loss = 0.0
    config.actor_optimizer.lr = LEARNING_RATES.get(dataflow, 3e-3)
    for name, value in changes.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        setattr(node, path[-1], value)
    return config


def started(shared, config):
    run = shared.run(config)
    seed = config.seed
    run.begin_rl(jax.device_put(shared.start(seed), run.setup.model.shardings()))
    return run


def learned(shared, config, steps: int, sign: float = 1.0):
    """Mean reward of the policy's own samples, step by step, and the last step's metrics."""
    config.actor_optimizer.lr *= sign
    run = started(shared, config)
    rows = [run.rl_step() for _ in range(steps)]
    assert not sum(r["skipped_steps"] for r in rows)
    return [float(r["reward/mean"]) for r in rows], rows[-1]


# -- learning --


@pytest.mark.parametrize("dataflow", LOSSES)
def test_the_reward_rises(shared, dataflow):
    rewards, last = learned(shared, config_of(dataflow), 40)
    assert mean(rewards[:2]) < 0.6 and mean(rewards[-5:]) > 0.85, rewards
    assert last["ref_kl/k1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dataflow", LOSSES)
def test_the_reward_rises_on_other_seeds(shared, dataflow, seed):
    rewards, _ = learned(shared, config_of(dataflow, seed), 40)
    assert mean(rewards[-5:]) > 0.85, rewards


@pytest.mark.parametrize("dataflow", ["online_dpo()", "nash_md()"])
def test_with_its_sign_flipped_it_does_not(shared, dataflow):
    rewards, _ = learned(shared, config_of(dataflow), 12, sign=-1.0)
    assert mean(rewards[-3:]) < 0.45, rewards
