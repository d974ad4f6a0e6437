"""What the simulation of a run counts, against the run: dispatches, decode steps, live slots and
the age of every token, exactly. Weights stay as they are, so that a response's length follows from
its key alone."""

import jax
import numpy as np
import pytest
from tiny_run import tiny_config

from rljax.plan.simulate import Load, Seconds, simulate
from rljax.setup import build
from rljax.training.run import Run

STEPS, GROUPS, SAMPLES, SLOTS = 6, 4, 4, 6


def a_run(tmp_path, eta: int, ahead: int):
    """Of a run that learns nothing, by step: lengths [P n], metrics."""
    fields = dict(sft__steps=0, evaluate__every_steps=0, actor_optimizer__lr=0.0, steps=STEPS)
    fields |= dict(rollouts__max_staleness=eta, rollouts__ahead=ahead, sampler__loop="host")
    fields |= dict(sampler__slots=SLOTS, sampler__max_response_tokens=40)
    config = tiny_config(tmp_path, **fields, rollouts__clock="logical(1)")
    with Run(build(config, devices=jax.devices()[:1]), tmp_path) as run:
        run.checkpoints.prepare()
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        if run.source.in_flight is None:
            run.source.in_flight = run.source._flight()
        take, lengths, found = run.source.next, [], []

        def next_one(step, roles):
            batch, metrics = take(step, roles)
            lengths.append(np.asarray(batch.mask).sum(axis=1).astype(int))
            found.append(metrics)
            return batch, metrics

        run.source.next = next_one
        for _ in range(STEPS):
            run.step()
    return np.concatenate(lengths), found


@pytest.fixture(scope="module")
def of_keys(tmp_path_factory):
    """The lengths of all samples, in the order of their tickets; metrics of the run at eta 0."""
    return a_run(tmp_path_factory.mktemp("eta"), 0, 0)


def simulated(lengths, eta: int, ahead: int):
    left = iter(np.concatenate([lengths, np.ones(GROUPS * SAMPLES * (eta + 1), int)]).tolist())
    load = Load(
        GROUPS,
        SAMPLES,
        SLOTS,
        lambda rng, count: np.array([next(left) for _ in range(count)]),
        score_dispatches=1,
    )
    return simulate(load, Seconds(1.0, 1.0, 1.0), eta, ahead, steps=STEPS, warm=0)


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "ahead"), [(0, 0), (1, 1), (2, 1)])
def test_a_run_is_counted_as_it_runs(tmp_path, of_keys, eta, ahead):
    lengths, found = of_keys
    assert len(set(lengths.tolist())) > 8 and lengths.max() == 40
    of_run, found = (lengths, found) if eta == 0 else a_run(tmp_path, eta, ahead)
    outcome = simulated(lengths, eta, ahead)
    counted = [(row["slots/dispatches"], row["slots/decode_steps"]) for row in found]
    assert list(outcome.counts) == counted
    steps = np.array([row["slots/decode_steps"] for row in found])
    live = np.array([row["slots/live_share"] for row in found])
    assert outcome.live_share == pytest.approx((live * steps).sum() / steps.sum())
    tokens = of_run.reshape(STEPS, -1).sum(axis=1)
    ages = np.array([row["staleness/steps_mean"] for row in found])
    assert outcome.mean_age == pytest.approx((ages * tokens).sum() / tokens.sum())
    assert outcome.max_age == max(row["staleness/steps_max"] for row in found)
