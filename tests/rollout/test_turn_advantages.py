"""Episodes as advantages read them: turns numbered over rewritten histories, states, seats, and
self-play with the running mean of each seat."""

import json

import jax
import numpy as np
import pytest
from test_episodes import PROMPTS, SAMPLES, actor, config_of, played
from tiny_run import checkpoint_bytes, train_on_one

from rljax import advantages
from rljax.batch import first_of_sequence
from rljax.errors import InputError
from rljax.validation import validate

__all__ = ["actor"]  # a fixture


def on_devices(batch):
    return jax.tree.map(jax.numpy.asarray, batch)


@pytest.mark.slow
def test_an_episode_that_begins_anew_has_two_rows_of_one_sequence(actor, tmp_path):
    config = config_of("tiny_environments.begins_anew()", history="rewrite", max_rows=2)
    batch, report, metrics = played(actor, config, tmp_path)
    assert metrics["drift/new_rows"] == 2 and len(report.rows) == PROMPTS * SAMPLES // 2
    chosen = batch.mask > 0
    first, second = batch.step_ids[::2], batch.step_ids[1::2]
    assert set(first[chosen[::2]]) == {1, 2} and set(second[chosen[1::2]]) == {3, 4}
    np.testing.assert_array_equal(batch.episode, np.arange(16) // 2)
    np.testing.assert_array_equal(batch.finish_reason, np.repeat(batch.finish_reason[1::2], 2))
    # Both rows together have the return; each token of both has the episode's advantage.
    totals = (batch.rewards * batch.mask).sum(axis=1).reshape(-1, 2).sum(axis=1)
    np.testing.assert_allclose(np.repeat(totals, 2), batch.scores, atol=1e-6)
    got = np.asarray(advantages.rloo(on_devices(batch)))
    mean = totals.reshape(PROMPTS, -1).mean(axis=1).repeat(2)
    want = np.repeat((totals - mean) * 2, 2)  # two episodes to a prompt: n / (n - 1)
    np.testing.assert_allclose(
        got[chosen], np.broadcast_to(want[:, None], got.shape)[chosen], atol=1e-5
    )
    assert np.asarray(first_of_sequence(on_devices(batch))).tolist() == [True, False] * 8


def by_hand(batch, gamma: float, omega: float) -> np.ndarray:
    """GiGPO without the std, turn by turn: [B, S]."""
    turns, returns = {}, {}
    for row in range(len(batch.mask)):
        count = batch.step_ids[row].max()
        at = [np.flatnonzero(batch.step_ids[row] == k) for k in range(1, count + 1)]
        paid = [batch.rewards[row, columns].sum() for columns in at]
        for k in range(count):
            to_go = sum(gamma ** (j - k) * paid[j] for j in range(k, count))
            turns[row, k], returns[row, k] = at[k], to_go
    out = np.zeros(batch.mask.shape)
    for (row, k), columns in turns.items():
        group = np.flatnonzero(batch.group == batch.group[row])
        state = batch.state_ids[row, columns[0]]
        anchor = [
            returns[other]
            for other, where in turns.items()
            if other[0] in group and batch.state_ids[other[0], where[0]] == state
        ]
        step = returns[row, k] - np.mean(anchor) if state > 0 else 0.0
        out[row, columns] = batch.scores[row] - batch.scores[group].mean() + omega * step
    return out * batch.mask


@pytest.mark.slow
def test_gigpo_anchors_the_states_of_an_environment(actor, tmp_path):
    """A config of grpo with gigpo is valid, and its advantages are those of the formula by hand."""
    config = config_of("tiny_environments.count_letter()")
    config.algorithm.advantage = "gigpo(std='none', gamma=0.9, omega=2.0)"
    assert validate(config) == []
    batch, _, _ = played(actor, config, tmp_path)
    states = batch.state_ids[batch.mask > 0]
    assert (states == 0).any() and len(set(states.tolist())) > 2
    got = advantages.gigpo(on_devices(batch), std="none", gamma=0.9, omega=2.0)
    np.testing.assert_allclose(got, by_hand(batch, 0.9, 2.0), atol=1e-5)
    for name in ("turn_leave_one_out()", "turn_group()"):
        config.algorithm.advantage = name
        assert validate(config) == []


def test_rows_are_counted_as_episodes_before_anything_runs():
    config = config_of("tiny_environments.two_seats()")
    config.batch.samples_per_prompt = 2  # one episode: nothing to compare
    config.batch.sequences_per_optimizer_step = 8
    config.algorithm.advantage = "rloo()"
    with pytest.raises(InputError, match="compares the episodes of a prompt"):
        validate(config)
    config.batch.samples_per_prompt, config.batch.sequences_per_optimizer_step = 4, 16
    assert validate(config) == []
    config.algorithm.advantage = "optimal_token_baseline()"
    with pytest.raises(InputError, match="compares single rows"):
        validate(config)


@pytest.mark.slow
def test_self_play_takes_off_the_mean_of_the_seat(tmp_path):
    """The baseline of a step is that of the steps before it, and a checkpoint keeps it; the run
    shows its episodes."""
    config = config_of("tiny_environments.toll()")
    config.dataflow, config.steps = "self_play(decay=0.5)", 2
    config.algorithm.advantage, config.algorithm.policy_loss = "reinforce()", "policy_gradient()"
    config.run_dir, config.samples_every_steps = str(tmp_path), 1
    config.checkpoint.every_steps, config.evaluate.prompts = 2, 2
    train_on_one(config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = rows[-2:]
    assert first["seat_baseline/0"] == first["seat_baseline/1"] == 0
    paid = first["episode/return"]  # of the first seat; the game is zero-sum
    assert paid >= 1
    assert second["seat_baseline/0"] == pytest.approx(paid, rel=1e-5)
    assert second["seat_baseline/1"] == pytest.approx(-paid, rel=1e-5)
    saved = [x for path, x in checkpoint_bytes(tmp_path, 2).items() if "seat_baseline" in path]
    ((kind, shape, data),) = saved
    state = np.frombuffer(data, kind).reshape(shape)
    twice = 0.25 * paid + 0.5 * second["episode/return"]
    np.testing.assert_allclose(state, [[twice, 0.75], [-twice, 0.75]], rtol=1e-5)
    records = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert {r["seat"] for r in records} == {"first", "second"} and {r["step"] for r in records} == {
        1,
        2,
    }
    assert "<h2>Episodes" in (tmp_path / "report.html").read_text()
