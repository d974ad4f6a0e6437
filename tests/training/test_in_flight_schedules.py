"""Whole runs in flight under random delays, dead groups and resumes: the bound holds in all of them
and is reached, nothing is lost, nothing waits for ever."""

import json
import random

import jax
import numpy as np
import pytest
from tiny_run import tiny_config

from rljax.setup import build
from rljax.training.run import Run

SMALL = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "ahead", "seed"), [(2, 2, 0), (4, 4, 1), (3, 1, 2)])
def test_the_bound_holds_whatever_comes_when(tmp_path, eta, ahead, seed):
    chance, steps = random.Random(seed), 10
    config = tiny_config(
        tmp_path / "run",
        model=SMALL,
        sft__steps=0,
        evaluate__every_steps=0,
        steps=steps,
        sampler__slots=12,
        rollouts__max_staleness=eta,
        rollouts__ahead=ahead,
        reward__function="in_flight_rewards.slow(fails=0.1)",
        reward__workers=2,
        algorithm__collect="active(max_rounds=4)",
        algorithm__policy_loss="cispo(behaviour='sampler')",
    )
    ages, trained = [], []
    with Run(build(config, devices=jax.devices()[:1]), tmp_path) as run:
        run.checkpoints.prepare()
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        tickets = run.source.in_flight.tickets
        take = tickets.train

        def train(chosen, failed=0):
            trained.extend(chosen)
            take(chosen, failed)

        tickets.train = train
        for _ in range(steps):
            metrics = run.step()
            ages.append(metrics["staleness/steps_max"])
            assert tickets.trained + tickets.failed == len(trained) == 4 * tickets.step
            if chance.random() < 0.4:  # as a checkpoint has it
                run.source.set_state(json.loads(json.dumps(run.source.get_state())))
        assert tickets.admitted == len(trained) + tickets.dropped + len(tickets.open)
    assert max(ages) <= eta and (max(ages) == eta or ahead < eta)
    assert len(set(trained)) == len(trained) and not set(trained) & tickets.open.keys()
    if ahead == eta:  # the order of the data, whatever the clock
        assert trained == sorted(trained)
    assert np.isfinite(metrics["loss"])
