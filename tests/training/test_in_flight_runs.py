"""Runs whose samples outlive the step in which they began."""

import jax
import numpy as np
import pytest
from tiny_run import metrics_rows, policy_bytes, saved_state, tiny_config, train_on_one

from rljax.setup import build
from rljax.training import sources
from rljax.training.run import Run


def a_config(tmp_path, name: str, **fields):
    """No supervised steps, so that responses have lengths of all kinds."""
    plain = dict(sft__steps=0, evaluate__every_steps=0, sampler__loop="host", steps=5)
    return tiny_config(tmp_path / name, **{**plain, **fields})


def batches_of(config, tmp_path, steps: int, monkeypatch=None) -> list:
    """The batches of a run's first steps, and the run."""
    found = []
    with Run(build(config, devices=jax.devices()[:1]), tmp_path) as run:
        run.checkpoints.prepare()
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        take = run.source.next

        def next_one(step, roles):
            batch, metrics = take(step, roles)
            found.append((jax.tree.map(np.asarray, batch), metrics))
            return batch, metrics

        run.source.next = next_one
        for _ in range(steps):
            run.step()
        return found, jax.tree.map(np.asarray, run.roles["actor"].state.weights)


def test_without_staleness_tickets_sample_what_the_hosts_loop_samples(tmp_path, monkeypatch):
    """Bit by bit: tokens, log-probs, rewards, weights."""
    config = a_config(tmp_path, "plain")
    want, weights = batches_of(config, tmp_path / "a", 4)
    make = sources.RolloutSource.__init__

    def with_tickets(self, *args):
        make(self, *args)
        self.in_flight = self._flight()

    monkeypatch.setattr(sources.RolloutSource, "__init__", with_tickets)
    found, others = batches_of(config, tmp_path / "b", 4)
    for (batch, _), (other, metrics) in zip(want, found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)
        assert metrics["staleness/steps_max"] == 0 == metrics["queue/open"]
    jax.tree.map(np.testing.assert_array_equal, weights, others)


@pytest.mark.parametrize("ahead", [1, 2])
def test_tokens_are_never_older_than_the_bound(tmp_path, ahead):
    bound = dict(rollouts__max_staleness=2, rollouts__ahead=ahead, sampler__slots=12)
    bound |= dict(rollouts__clock="logical(4)")  # how old they become is then no matter of speed
    found, _ = batches_of(a_config(tmp_path, "r", **bound), tmp_path / "a", 8)
    ages = [metrics["staleness/steps_max"] for _, metrics in found]
    assert max(ages) == (2 if ahead == 2 else max(ages)) and max(ages) >= 1
    assert any(metrics["staleness/partial_fraction"] > 0 for _, metrics in found)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Killed between two steps, with groups in flight: the same tokens, weights and metrics, as
    what counts is decided by dispatches and not by the clock."""
    how = dict(rollouts__max_staleness=2, rollouts__ahead=2, rollouts__clock="logical(2)")
    how |= dict(sampler__slots=12, checkpoint__every_steps=2)
    train_on_one(a_config(tmp_path, "whole", **how, steps=6))
    train_on_one(a_config(tmp_path, "parts", **how, steps=4))
    again = a_config(tmp_path, "parts", **how, steps=6, checkpoint__allow_changed=("steps",))
    train_on_one(again)
    assert policy_bytes(tmp_path / "whole") == policy_bytes(tmp_path / "parts")
    # (Step 4 was the last one once, and was evaluated.)
    names = ("whole", "parts")
    whole, parts = (metrics_rows(tmp_path / name) for name in names)
    assert whole[4:] == parts[4:] and whole[:3] == parts[:3]
    saved = [saved_state(tmp_path / name, 6)["sources"]["rl"]["in_flight"] for name in names]
    for state in saved:
        for group in state["groups"].values():
            del group["scores"]  # which tell their seconds
    assert saved[0] == saved[1] and saved[0]["groups"]
