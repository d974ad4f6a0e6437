"""Faults in a step: what is not finite is not learned from, and a failed reward is no score."""

import contextlib
import json
import logging
import math
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import flat_bytes, metrics_rows, newest_step, summary, tiny_config, train_on_one

from rljax.advantages import group_relative
from rljax.batch import Batch, FinishReason, batch_from_rows
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.learn.state import new_train_state, optimizer_step
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_params
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import Reward
from rljax.setup import build as build_setup
from rljax.setup import role_arrays
from rljax.tracking.trackers import open_tracking
from rljax.training import bad_batch
from rljax.training.loop import one_step
from rljax.training.progress import Progress
from rljax.training.replay import replay
from rljax.training.run import Run
from rljax.training.scores import check_scores, require_scores

ONE = jax.devices()[:1]

LOSSES = '''
import jax.numpy as jnp
from rljax.losses.policy import ppo_clip

def nan_from(policy, batch, *, version):
    """ppo_clip that is NaN once the policy has taken `version` optimizer steps."""
    loss, metrics = ppo_clip(policy, batch)
    return jnp.where(batch.policy_version.max() >= version, jnp.nan, 1.0) * loss, metrics
'''
# In a module of its own: a worker that imports JAX takes seconds to start.
REWARDS = '''
import time

def by_letter(response):
    """r raises, h hangs, n is NaN, i infinite; a digit is its own score."""
    if "r" in response:
        raise ValueError("no luck")
    if "h" in response:
        time.sleep(600)
    return {"n": float("nan"), "i": float("inf")}.get(response) or float(response)

def by_answer(response, ground_truth):
    """Raises, hangs or returns NaN for some prompts and some of their samples."""
    kind = (len(response) + int(ground_truth[-1])) % 4
    if kind == 0:
        raise ValueError("no luck")
    if kind == 1 and response[:1] == "9":
        time.sleep(600)
    return float("nan") if kind == 1 else len(set(response)) / 8

def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def of_even_starts(completions, completion_ids, **kwargs):
    """Says nothing of the others."""
    return [None if ids[0] % 2 else 1.0 for ids in completion_ids]

def never(response):
    raise RuntimeError("the judge is down")
'''


@pytest.fixture(scope="module", autouse=True)
def parts(tmp_path_factory):
    """The modules `fault_losses` and `fault_rewards`: those above."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "fault_losses.py").write_text(LOSSES)
    (folder / "fault_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


# -- one optimizer step --


def train_state(optimizer):
    params = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([[0.5]])}
    return new_train_state(params, optimizer)


BAD = {
    "nan loss": (math.nan, 1.0),
    "inf loss": (math.inf, 1.0),
    "nan gradient": (1.0, math.nan),
    "inf gradient": (1.0, math.inf),
    "gradient whose norm overflows": (1.0, 1e30),
}


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-1))
STEP = jax.jit(lambda state, gradient, loss: optimizer_step(state, gradient, loss, OPTIMIZER))


@pytest.mark.parametrize("loss, bad", BAD.values(), ids=BAD.keys())
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(loss, bad):
    optimizer, step = OPTIMIZER, STEP
    good = jax.tree.map(jnp.ones_like, train_state(optimizer).params)
    worse = {**good, "w": good["w"].at[1].set(bad)}
    state, _ = step(train_state(optimizer), good, 1.0)
    before = flat_bytes((state.params, state.opt_state))
    for times in (1, 2, 3):
        state, metrics = step(state, worse, loss)
        assert flat_bytes((state.params, state.opt_state)) == before
        counters = (int(state.step), int(state.skipped), int(state.skipped_in_a_row))
        assert counters == (1, times, times)
        assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (0.0, 0.0)
    state, metrics = step(state, good, 1.0)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 3, 0)
    assert float(metrics["grad_norm"]) == 2.0
    # Two good steps, as if the bad ones had not been between them.
    straight = train_state(optimizer)
    for _ in range(2):
        straight, _ = step(straight, good, 1.0)
    assert flat_bytes((state.params, state.opt_state)) == flat_bytes(
        (straight.params, straight.opt_state)
    )


# -- a run whose loss becomes NaN: steps 3 and later --

NAN, CURED = "fault_losses.nan_from(version=4)", "fault_losses.nan_from(version=1000)"
MODEL = "decoder(layers=1, embed=48, mlp=96, heads=3, kv_heads=3, head_dim=16)"


def nan_config(folder, **fields):
    """One learning program for every run here; two steps of GRPO are finite."""
    return tiny_config(folder, algorithm__policy_loss=NAN, model=MODEL, sft__steps=0, **fields)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run that stopped by itself, and what it said."""
    folder = tmp_path_factory.mktemp("broken")
    with pytest.raises(InputError) as error:
        train_on_one(nan_config(folder))
    return folder, str(error.value)


@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped_and_counted_until_there_are_too_many(broken):
    folder, _ = broken
    rows = metrics_rows(folder)
    assert [r["step"] for r in rows] == list(range(1, 6))
    # Two optimizer steps each; max_skipped_in_a_row=5 is reached in the third bad one.
    assert [r["skipped_steps"] for r in rows] == [0.0, 0.0, 2.0, 2.0, 2.0]
    assert [r["skipped_in_a_row"] for r in rows] == [0.0, 0.0, 2.0, 4.0, 6.0]
    assert all(math.isfinite(v) for r in rows for v in r.values() if isinstance(v, float))
    # The evaluation of step 4 is that of step 2: the same parameters.
    evaluated = {r["step"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r}
    assert sorted(evaluated) == [2, 4] and evaluated[4] == evaluated[2]


def test_then_the_run_goes_back_to_the_last_good_checkpoint_and_stops_with_the_reason(broken):
    folder, message = broken
    assert newest_step(folder) == 2  # none was made in the bad steps
    assert message.startswith("stopped at step 5: 6 optimizer steps in a row were not finite")
    assert "max_skipped_in_a_row=5; rolled back to the checkpoint of step 2" in message
    found = summary(folder)
    assert found["status"] == message and found["steps"] == 2
    # (Nothing has taught the policy to end its responses.)
    del found["faults"]["truncated"]
    assert found["faults"] == {"skipped_steps": 6.0, "rollbacks": 1.0}


def test_the_exported_policy_is_that_of_the_checkpoint(broken):
    folder, _ = broken
    with Run(build_setup(nan_config(folder), ONE), folder) as run:
        run.load(2)
        kept = flat_bytes(run.roles["actor"].state.params)
        exported = load_params(folder / "policy", run.setup.model)
    assert flat_bytes(exported) == kept


def test_the_first_bad_batch_is_kept_for_a_replay(broken, tmp_path):
    folder, _ = broken
    assert bad_batch.kept_steps(folder) == [3]
    assert 'href="bad/"' in (folder / "report.html").read_text()
    kept = folder / "bad" / "00000003.npz"
    with np.load(kept) as file:
        assert file["tokens"].shape == (16, 13) and file["policy_version"].max() == 4
    with pytest.raises(InputError, match="fault_losses"):
        replay(shutil.copytree(folder, tmp_path / "moved"))  # no run that began here
    path = bad_batch.path_of(tmp_path / "bad", 3)
    path.parent.mkdir(parents=True)
    for data in (b"", kept.read_bytes()[: kept.stat().st_size // 2], b"PK" * 40):
        path.write_bytes(data)
        with pytest.raises(InputError, match="cannot be read as a batch"):
            bad_batch.read(tmp_path, 3, None)
    np.savez(path, tokens=np.zeros((2, 3), np.int32), colour=np.zeros(2))
    with pytest.raises(InputError, match="colour"):
        bad_batch.read(tmp_path, 3, None)


@pytest.mark.slow
def test_the_run_goes_on_when_the_cause_is_gone(broken, tmp_path):
    folder, _ = broken
    allowed = ("algorithm.policy_loss",)
    changed = dict(algorithm__policy_loss=CURED, checkpoint__allow_changed=allowed)
    config = tiny_config(folder, model=MODEL, sft__steps=0, **changed)
    found = train_on_one(config)
    assert (found["status"], found["steps"]) == ("finished", 6)
    assert [r["skipped_steps"] for r in metrics_rows(folder)] == [0.0] * 6


def test_parameters_do_not_move_in_bad_steps_and_few_of_them_do_not_stop_a_run(tmp_path):
    config = nan_config(tmp_path, max_skipped_in_a_row=100)
    with (
        Run(build_setup(config, ONE), tmp_path) as run,
        open_tracking((), tmp_path, {}) as tracking,
    ):
        run.start(tracking)
        run.begin(run.setup.main, run.roles["actor"].state.params)
        arrays = []
        for _ in range(4):
            one_step(run)
            state = role_arrays(run.roles)["actor"]
            arrays.append(flat_bytes((state.params, state.opt_state)))
        assert int(state.skipped) == 4 and int(state.step) == 4
    assert arrays[0] != arrays[1] == arrays[2] == arrays[3]


@pytest.mark.slow
def test_a_run_that_ends_in_bad_steps_is_finished_evaluated_and_saved(tmp_path):
    found = train_on_one(nan_config(tmp_path, max_skipped_in_a_row=100, steps=4))
    del found["faults"]["truncated"]
    assert found["status"] == "finished" and found["faults"] == {"skipped_steps": 4.0}
    assert newest_step(tmp_path) == 4 and found["accuracy_after"]["n"] == 16
    with pytest.raises(InputError, match="is a finished run"):
        train_on_one(nan_config(tmp_path, max_skipped_in_a_row=100, steps=4))


# -- rewards --

LETTERS = CharTokenizer("0123456789rhni>")


def rollouts(responses: list[str], groups: list[int]) -> tuple[Batch, Prompts]:
    """A batch of these responses to the prompts ">" and their groups."""
    records = [
        PromptRecord(">", np.asarray(LETTERS.encode(">"), np.int32), "", "", {}, i)
        for i in range(max(groups) + 1)
    ]
    rows = [LETTERS.encode(">") + LETTERS.encode(r) for r in responses]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros(tokens.shape, np.float32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, 1 : len(row)] = 1
    batch = batch_from_rows(
        jnp.asarray(tokens),
        jnp.asarray([len(r) for r in rows], jnp.int32),
        jnp.asarray(mask),
        group=jnp.asarray(groups, jnp.int32),
        finish_reason=jnp.full((len(rows),), int(FinishReason.STOP), jnp.int32),
    )
    return batch, Prompts.from_records(records, length=1)


@pytest.fixture(scope="module")
def judge():
    pool = RewardPool("fault_rewards.by_letter", workers=2, timeout_s=1.5)
    reward = Reward(pool, LETTERS, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    yield reward
    reward.close()


@pytest.mark.slow
def test_a_failed_reward_leaves_its_group_and_changes_nobody_elses_advantage(judge):
    responses = ["1", "r", "4", "7", "n", "2", "h", "22", "i", "9", "3", "5", "rr", "8", "0", "6"]
    groups = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 1, 2, 1]
    failed = [i for i, r in enumerate(responses) if set(r) & set("rhni")]
    fine = [i for i in range(16) if i not in failed]
    before, prompts = rollouts(responses, groups)
    advantages = jax.jit(group_relative)
    batch, report = judge(before, prompts)

    assert report.metrics()["reward/errors"] == 4.0 and report.metrics()["reward/timeouts"] == 1.0
    statuses = [row["status"] for row in report.examples]
    assert [s != "ok" for s in statuses] == [i in failed for i in range(16)]
    assert {statuses[responses.index(r)] for r in "rni"} == {"error"}
    assert statuses[responses.index("h")] == "timeout"
    assert all(math.isnan(report.examples[i]["reward"]) for i in failed)  # not a score of 0

    mask, group = np.asarray(batch.mask), np.asarray(batch.group)
    assert mask[failed].sum() == 0 and np.isfinite(np.asarray(batch.rewards)).all()
    assert np.array_equal(mask[fine], np.asarray(before.mask)[fine])
    assert np.array_equal(group[fine], np.asarray(groups)[fine])
    assert len(set(group[failed]) | set(groups)) == len(failed) + 3  # each is alone

    alone, prompts = rollouts([responses[i] for i in fine], [groups[i] for i in fine])
    scores = np.zeros(alone.tokens.shape, np.float32)
    for row, i in enumerate(fine):
        scores[row, len(responses[i])] = float(responses[i])
    expected = advantages(alone.replace(rewards=jnp.asarray(scores)))
    found = np.asarray(advantages(batch))
    width = expected.shape[1]
    np.testing.assert_allclose(found[fine][:, :width], np.asarray(expected), rtol=1e-6, atol=1e-7)
    assert not found[failed].any() and np.abs(np.asarray(expected)).max() > 1
    # A 0 in its place would have moved its siblings.
    zeros = batch.replace(group=jnp.asarray(groups, jnp.int32), mask=before.mask)
    assert np.abs(np.asarray(advantages(zeros))[fine] - found[fine]).max() > 0.1


def test_failed_rewards_are_counted_in_a_run_and_everything_stays_finite(tmp_path):
    config = nan_config(
        tmp_path, reward__function="fault_rewards.by_answer", reward__timeout_s=0.3, steps=2
    )
    config.reward.workers = 2
    found = train_on_one(config)
    assert found["status"] == "finished"
    rows = [r for r in metrics_rows(tmp_path) if r["phase"] == "rl"]
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
    faults = {k: sum(r[k] for r in rows) for k in ("reward/errors", "reward/timeouts")}
    failing = sum(r["reward/errors"] + r["reward/timeouts"] > 0 for r in rows)
    counted = {k: v for k, v in faults.items() if v} | {"reward/failing_steps": failing}
    assert counted == found["faults"]
    assert faults["reward/errors"] > 0 and sum(faults.values()) < 16 * len(rows)
    assert any(r["eval/failed_fraction"] > 0 for r in rows if "eval/failed_fraction" in r)
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    shown = [s for s in map(json.loads, samples) if s["status"] != "ok"]
    assert shown and all(s["reward"] == "nan" and s["message"] for s in shown)


@pytest.mark.slow
def test_a_reward_that_abstains_is_counted_in_a_run_and_is_no_failure(tmp_path):
    """Alone it masks what it says nothing of; beside another one every sample is learned from."""
    names = ("fault_rewards.right", "fault_rewards.of_even_starts")
    rewards = {"alone": names[1], "mixed": f"mixture(rewards={names!r}, weights=(1.0, 0.5))"}
    rows = {}
    for name, function in rewards.items():
        config = nan_config(tmp_path / name, steps=1, reward__function=function)
        assert train_on_one(config)["status"] == "finished"
        rows[name] = [r for r in metrics_rows(tmp_path / name) if r["phase"] == "rl"][0]
        assert (rows[name]["reward/errors"], rows[name]["reward/timeouts"]) == (0.0, 0.0)
    mixed, alone = rows["mixed"], rows["alone"]
    silent = mixed["reward/abstained/of_even_starts"]
    assert 0 < silent < 16 and "reward/abstained" not in mixed
    assert alone["reward/abstained"] == silent and alone["reward/mean"] == 1.0
    assert mixed["reward/mean"] == pytest.approx(
        mixed["reward/part/right"] + 0.5 * (1 - silent / 16)
    )


@pytest.mark.slow
def test_a_step_whose_rewards_all_fail_learns_nothing_and_the_third_in_a_row_ends_the_run(tmp_path):
    config = tiny_config(
        tmp_path, algorithm__policy_loss=CURED, reward__function="fault_rewards.never", sft__steps=0
    )
    with (
        Run(build_setup(config, ONE), tmp_path) as run,
        open_tracking((), tmp_path, {}) as tracking,
    ):
        run.start(tracking)  # evaluates: every reward fails
        assert run.progress.accuracy_before is None
        before = flat_bytes(run.roles["actor"].state.params)
        for step in range(3):
            metrics = one_step(run)
            with pytest.raises(InputError) if step == 2 else contextlib.nullcontext() as error:
                check_scores(run, metrics)
            assert (metrics["grad_norm"], metrics["loss"]) == (0.0, 0.0)
            assert metrics["reward/errors"] == 16.0 and metrics["skipped_steps"] == 0.0
            assert "reward/mean" not in metrics and "reward/max" not in metrics  # not 0
            assert all(math.isfinite(v) for v in metrics.values() if isinstance(v, float))
        assert flat_bytes(run.roles["actor"].state.params) == before
        assert run.evaluate() == {"eval/failed_fraction": 1.0}
        stop = str(error.value)
        assert "stopped at step 3: no reward of 3 steps in a row was a score" in stop
        assert "RuntimeError: the judge is down (" in stop and "fault_rewards.py:" in stop
        assert "; prompt '" in stop and "; response '" in stop and "; ground_truth '" in stop
        assert run.progress.faults == {"reward/errors": 48.0}
        with pytest.raises(InputError, match="no reward of this run was a score: all 48 failed"):
            require_scores(run)
        run.unscored_steps = 2
        check_scores(run, {**metrics, "reward/errors": 15.0})  # one score, and it goes on
        assert run.unscored_steps == 0


def test_time_limits_that_hit_the_long_responses_are_warned_of_once(caplog):
    run = types.SimpleNamespace(
        unscored_steps=0, late_samples=0.0, late_and_longer=0.0, progress=Progress("rl", {"rl": 1})
    )
    step = {"reward/errors": 0.0, "batch/completions": 16.0, "reward/timeouts": 3.0}
    with caplog.at_level(logging.WARNING, "rljax"):
        for longer in (1.0, 0.7):
            check_scores(run, {**step, "reward/timeout_longer_fraction": longer})
        assert not caplog.records  # too few of them to say
        for _ in range(3):
            check_scores(run, {**step, "reward/timeout_longer_fraction": 0.8})
    (said,) = caplog.records
    assert "9 responses were over the limits of the reward, and 83 % of the time" in said.message
    assert "on_timeout=0.0" in said.message
