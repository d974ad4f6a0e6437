"""Runs whose samples outlive the step in which they began."""

import zlib

import jax
import numpy as np
import pytest
from tiny_run import REPO, metrics_rows, policy_bytes, saved_state, tiny_config, train_on_one

from rljax.config.flags import load_config_file
from rljax.setup import build, prompt_order
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
def test_tokens_are_never_older_than_the_bound(tmp_path, ahead):
    # (While scores are waited for, decoding goes on.)
    bound = dict(rollouts__max_staleness=2, rollouts__ahead=ahead, rollouts__clock="logical(4)")
    bound |= dict(sampler__slots=12)
    found, _ = batches_of(a_config(tmp_path, "r", **bound), tmp_path / "a", 8)
    ages = [metrics["staleness/steps_max"] for _, metrics in found]
    assert max(ages) == (2 if ahead == 2 else max(ages)) and max(ages) >= 1
    assert any(metrics["staleness/partial_fraction"] > 0 for _, metrics in found)


@pytest.mark.slow
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


REWARDS = """
import zlib

def half_dead(responses, prompt):
    dead = zlib.crc32(prompt.encode()) % 2
    return [0.5 if dead else float(i) for i in range(len(responses))]

def half_dead_alone(response, prompt):
    return zlib.crc32(prompt.encode()) % 2 or zlib.crc32(response.encode()) / 2**33
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eta", "ahead", "reward"),
    [
        (2, 2, "half_dead_alone"),
        pytest.param(1, 1, "half_dead", marks=pytest.mark.slow),
        pytest.param(2, 1, "half_dead", marks=pytest.mark.slow),
    ],
)
def test_active_sampling_pulls_until_every_group_is_live(tmp_path, monkeypatch, eta, ahead, reward):
    """Half of the groups are dead. Each is replaced as it is known, so that every step is full; in
    the order of the data no live group is lost or comes twice (arXiv 2512.13961)."""
    (tmp_path / "half_dead_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    # (The model and the slots of test_in_flight_checkpoints.py: its programs are these.)
    how = dict(rollouts__max_staleness=eta, rollouts__ahead=ahead, sampler__slots=10)
    how |= dict(model="decoder(layers=1, embed=48, mlp=96, heads=3, kv_heads=3, head_dim=16)")
    how |= dict(reward__function=f"half_dead_rewards.{reward}", algorithm__collect="active()")
    config, steps = a_config(tmp_path, "run", **how), 6
    found, _ = batches_of(config, tmp_path / "a", steps)
    setup = build(config, devices=jax.devices()[:1])
    records = prompt_order(config, setup.data).take(200)
    order = [one.prompt_text for one in records if zlib.crc32(one.prompt_text.encode()) % 2 == 0]
    trained, dropped = [], 0
    for batch, metrics in found:
        scores, mask = batch.scores.reshape(4, 4), batch.mask.reshape(4, -1)
        assert all(len(set(group)) > 1 for group in scores.tolist()) and mask.any(axis=1).all()
        assert metrics["staleness/steps_max"] <= eta
        assert metrics["batch/prompts"] == 4 + metrics["queue/dropped"]
        ends = batch.tokens[::4, :6]  # "83051>": a character is a token
        trained += [setup.tokenizer.decode(row.tolist()) for row in ends]
        dropped += metrics["queue/dropped"]
    assert len(set(trained)) == 4 * steps
    if ahead == eta:
        assert trained == order[: 4 * steps]
    else:  # a group that ended late may be one that is trained later
        assert set(trained) <= set(order[: 4 * (steps + ahead)])
    assert dropped >= 4  # of about as many as were trained


@pytest.mark.slow
def test_the_stale_part_of_a_response_is_masked_where_the_config_says_so(tmp_path):
    """The same samples; without the mask of what older weights wrote than the newest part."""
    how = dict(rollouts__max_staleness=2, rollouts__ahead=2, rollouts__clock="logical(1)")
    how |= dict(sampler__slots=12, actor_optimizer__lr=0.0)  # the same draws, whatever is masked
    runs = {
        kind: batches_of(
            a_config(tmp_path, kind, **how, rollouts__partial_mask=kind), tmp_path / f"b{kind}", 4
        )[0]
        for kind in ("none", "stale")
    }
    masked = 0
    for (whole, plain), (cut, metrics) in zip(runs["none"], runs["stale"], strict=True):
        np.testing.assert_array_equal(whole.tokens, cut.tokens)
        np.testing.assert_array_equal(whole.policy_version, cut.policy_version)
        np.testing.assert_array_equal(whole.scores, cut.scores)
        newest = np.where(whole.mask > 0, whole.policy_version, -1).max(axis=1, keepdims=True)
        stale = (whole.mask > 0) & (whole.policy_version < newest)
        np.testing.assert_array_equal(cut.mask, np.where(stale, 0, whole.mask))
        assert np.isclose(metrics["staleness/masked_fraction"], stale.sum() / whole.mask.sum())
        assert metrics["staleness/partial_fraction"] == plain["staleness/partial_fraction"]
        assert "staleness/masked_fraction" not in plain
        masked += stale.sum()
    assert masked > 0


@pytest.mark.slow
def test_weighed_tokens_of_up_to_four_steps_ago_teach_what_new_ones_do(tmp_path):
    """configs/sweep_staleness.py, seed 0: the reward of the last 20 steps within 0.05."""
    last = {}
    for eta in (0, 4):
        config = load_config_file(str(REPO / "configs" / "sweep_staleness.py"))
        config.run_dir, config.trackers, config.compilation_cache = str(tmp_path / str(eta)), (), ""
        config.rollouts.max_staleness = eta
        config.rollouts.ahead = eta if eta else -1
        config.algorithm.correction = "rollout_correction(level='token', upper=2.0)"
        train_on_one(config)
        rows = [row for row in metrics_rows(config.run_dir) if row["phase"] == "rl"]
        assert max(row.get("staleness/steps_max", 0) for row in rows) == eta
        assert np.mean([row["reward/mean"] for row in rows[:5]]) < 0.5
        last[eta] = np.mean([row["reward/mean"] for row in rows[-20:]])
    assert last[4] > last[0] - 0.05 and last[0] > 0.9
