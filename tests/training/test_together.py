"""Runs of several seeds, whose steps one program takes, are the runs of each seed by itself."""

import contextlib
import dataclasses
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import lanes
from tiny_run import (
    checkpoint_bytes,
    flat_bytes,
    metrics_rows,
    newest_step,
    summary,
    tiny_config,
    train_on,
)

from rljax import setup as build
from rljax.errors import InputError
from rljax.plan.memory import MemoryEstimate
from rljax.tracking import compiles
from rljax.training.result import RunStopped
from rljax.training.run import Run
from rljax.training.together import JointProgram, check_memory, check_together, train_together

DIGITS = "regex_match(pattern='[0-4]$')"
FIXED = dict(sft__steps=0, program_steps=3, reward__function=DIGITS, evaluate__every_steps=0)
CASES = {
    "grpo": dict(algorithm__kl_in_loss=0.01),
    "ppo": dict(
        dataflow="ppo",
        algorithm__advantage="gae(lam=0.95)",
        algorithm__kl_in_reward=0.05,
        critic_optimizer__lr=1e-3,
    ),
    "dynamic": dict(algorithm__collect="dynamic(oversample=2.0, max_rounds=1, if_short='fill')"),
}


def trained(configs, devices=1) -> list[str]:
    """Trains the runs together; returns the lines that were said."""
    said = []
    ended = train_together(configs, devices=jax.devices()[:devices], say=said.append)
    assert [run.summary["status"] for run in ended] == ["finished"] * len(configs)
    return said


def assert_near(folder, alone) -> None:
    """Equal samples, and numbers that differ by rounding: products of several runs at once add up
    in another order."""
    rows, wanted = (
        [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics_rows(path)]
        for path in (folder, alone)  # (a run that went on was evaluated where it had stopped)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
    ends = [summary(path)["accuracy_after"] for path in (folder, alone)]
    assert ends[0] == ends[1]
    samples = [(path / "samples.jsonl").read_text() for path in (folder, alone)]
    assert samples[0] == samples[1]
    step = newest_step(alone)
    arrays, wanted = checkpoint_bytes(folder, step), checkpoint_bytes(alone, step)
    for path, (dtype, shape, data) in wanted.items():
        assert arrays[path][:2] == (dtype, shape)
        got, value = (np.frombuffer(x, dtype) for x in (arrays[path][2], data))
        np.testing.assert_allclose(got, value, atol=1e-5, rtol=1e-3, err_msg=path)


@pytest.mark.parametrize("name", lanes([], [*CASES]))
def test_each_run_is_the_one_that_it_is_by_itself(tmp_path, name):
    fields = dict(**FIXED, steps=4, checkpoint__every_steps=4, **CASES[name])
    seeds = (3, 5, 8)
    said = trained([tiny_config(tmp_path / str(s), seed=s, **fields) for s in seeds])
    assert len(said) == 2 and "9 steps of 3 runs" in said[0] and "3 steps of 3 runs" in said[1]
    train_on(1, tiny_config(tmp_path / "alone", seed=5, **fields))
    assert_near(tmp_path / "5", tmp_path / "alone")
    ends = [summary(tmp_path / str(seed)) for seed in seeds]
    assert [end["seed"] for end in ends] == [3, 5, 8]
    assert len({(tmp_path / str(seed) / "samples.jsonl").read_text() for seed in seeds}) == 3


NUMBERS = {  # of two runs that differ from the case of CASES
    "grpo": [
        dict(
            actor_optimizer__lr=2e-3,
            actor_optimizer__beta1=0.8,
            actor_optimizer__weight_decay=0.1,
            actor_optimizer__clip_norm=0.5,
            algorithm__kl_in_loss=0.2,
            algorithm__policy_loss="ppo_clip(clip_low=0.1, clip_high=0.3)",
            sampler__temperature=0.7,
        ),
        dict(actor_optimizer__weight_decay=0.01, sampler__temperature=1.3),
    ],
    "ppo": [
        dict(
            critic_optimizer__lr=2e-3,
            algorithm__advantage="gae(lam=0.7)",
            algorithm__kl_in_reward=0.3,
            algorithm__entropy_coef=0.02,
            algorithm__reward_shaping=("scaled(scale=3.0, shift=0.5)",),
            algorithm__value_loss="squared_error(clip=0.1)",
            algorithm__trust_region=0.5,
        ),
        dict(
            algorithm__entropy_coef=0.01,
            algorithm__reward_shaping=("scaled(scale=2.0, shift=0.25)",),
            algorithm__value_loss="squared_error(clip=0.3)",
            algorithm__trust_region=0.4,
        ),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_runs_of_other_numbers_are_those_that_they_are_by_themselves(tmp_path, name):
    schedule = dict(actor_optimizer__warmup_steps=2, actor_optimizer__schedule="cosine")
    fields = {**FIXED, **schedule, **CASES[name], "steps": 3, "checkpoint__every_steps": 3}
    members = [{**fields, **numbers} for numbers in NUMBERS[name]]
    said = trained([tiny_config(tmp_path / str(i), **one) for i, one in enumerate(members)])
    assert len(said) == 1 and "6 steps of 2 runs" in said[0]
    for i, one in enumerate(members):
        train_on(1, tiny_config(tmp_path / f"alone_{i}", **one))
        assert_near(tmp_path / str(i), tmp_path / f"alone_{i}")


def branching_loss(policy, batch, *, width=1.0):
    loss = -batch.advantages * policy.logprobs
    return (loss * width if width > 0.5 else loss), {}


def numpy_loss(policy, batch, *, width: float = 1.0):
    return -batch.advantages * policy.logprobs * np.exp(width), {}


def formatting_loss(policy, batch, *, width: float = 1.0):
    return -batch.advantages * policy.logprobs, {f"loss/width_{width:.1f}": batch.advantages}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["branching_loss", "numpy_loss", "formatting_loss"])
def test_a_function_that_needs_its_number_on_the_host_is_named(tmp_path, loss):
    members = [
        {**FIXED, "algorithm__policy_loss": f"{__name__}.{loss}(width={width})"}
        for width in (0.7, 0.9)
    ]
    configs = [tiny_config(tmp_path / str(i), **one) for i, one in enumerate(members)]
    with pytest.raises(InputError, match="algorithm.policy_loss, width.*branches on such a number"):
        train_together(configs, devices=jax.devices()[:1], say=lambda line: None)


def opened(folder, seed: int, **fields) -> Run:
    """A run whose last phase has begun."""
    fields |= dict(checkpoint__every_steps=0, **FIXED)
    config = tiny_config(folder / str(seed), seed=seed, **fields)
    run = Run(build.build(config, jax.devices()[:1]), folder / str(seed))
    run.begin(run.setup.main, build.initial_params(config, run.setup.model))
    return run


def behind(run: Run) -> tuple:
    """The samples of the steps that a program has taken, and the weights behind them."""
    return [step.samples for step in run.programs.taken], build.role_arrays(run.roles)


def test_the_place_of_a_run_among_the_others_changes_nothing(tmp_path):
    """Each has numbers of its own, so that those of the first would show."""
    small = dict(model="decoder(layers=1, embed=16, mlp=32, heads=1, kv_heads=1, head_dim=16)")
    numbers = {
        seed: dict(
            actor_optimizer__lr=1e-3 * seed,
            algorithm__policy_loss=f"ppo_clip(clip_low={0.001 * seed}, clip_high={0.002 * seed})",
            sampler__temperature=0.25 * seed,
        )
        for seed in (3, 5, 8)
    }
    orders = ((3, 5, 8), (8, 3), (3, 8))
    found = []
    compiles.watch()
    for order in orders:
        runs = [opened(tmp_path, seed, steps=4, **small, **numbers[seed]) for seed in order]
        with contextlib.ExitStack() as stack:
            for run in runs:
                stack.enter_context(run)
            since = compiles.count()
            numbered = dict(enumerate(runs))
            JointProgram(numbered, 3).take_next(numbered)
            found.append({seed: behind(run) for seed, run in zip(order, runs, strict=True)})
    # The program of the first order, whatever the number of runs that are left.
    assert "jit(_steps_together)" not in compiles.names(since)
    assert all(len(samples) == 3 for samples, _ in found[0].values())
    for seed in (8, 3):
        assert flat_bytes(found[0][seed]) == flat_bytes(found[1][seed])
        assert flat_bytes(found[0][seed]) == flat_bytes(found[2][seed])
    assert flat_bytes(found[0][3]) != flat_bytes(found[0][5])


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_others_as_they_are(tmp_path, monkeypatch):
    """The reference of one run becomes NaN before its first step, and so do its losses."""
    fields = dict(**FIXED, algorithm__kl_in_loss=0.01)
    fields |= dict(steps=6, max_skipped_in_a_row=2, checkpoint__every_steps=6)

    take_next = JointProgram.take_next

    def poisoned(program, runs):
        for run in runs.values():
            if run.config.seed == 5 and not run.progress.rl_steps:
                reference = run.roles["reference"]
                spoiled = jax.tree.map(lambda x: x * np.nan, reference.params)
                run.roles["reference"] = dataclasses.replace(reference, params=spoiled)
        return take_next(program, runs)

    seeds = (3, 5)
    configs = [tiny_config(tmp_path / str(seed), seed=seed, **fields) for seed in seeds]
    monkeypatch.setattr(JointProgram, "take_next", poisoned)
    whole, failed = train_together(configs, devices=jax.devices()[:1], say=lambda line: None)
    assert isinstance(failed, InputError) and "not finite" in str(failed)
    assert summary(tmp_path / "5")["status"] == str(failed)
    monkeypatch.undo()
    assert whole.summary["status"] == "finished"
    train_on(1, tiny_config(tmp_path / "alone", seed=3, **fields))
    assert_near(tmp_path / "3", tmp_path / "alone")


@pytest.mark.slow
def test_what_ends_the_program_is_in_the_summary_of_each_run(tmp_path, monkeypatch):
    def out_of_memory(program, runs):
        raise MemoryError

    monkeypatch.setattr(JointProgram, "take_next", out_of_memory)
    configs = [tiny_config(tmp_path / str(s), seed=s, **FIXED, steps=2) for s in (3, 5)]
    with pytest.raises(MemoryError):
        train_together(configs, devices=jax.devices()[:1])
    assert [summary(tmp_path / str(s))["status"] for s in (3, 5)] == ["failed"] * 2


@pytest.mark.slow
def test_runs_that_were_stopped_at_different_steps_go_on_together(tmp_path):
    fields = dict(**FIXED, checkpoint__every_steps=2)
    spread = dict(checkpoint__allow_changed=("steps",))
    train_on(1, tiny_config(tmp_path / "3", seed=3, steps=2, **fields))
    said = trained(
        [tiny_config(tmp_path / str(s), seed=s, steps=4, **fields, **spread) for s in (3, 5)]
    )
    assert [line.partition(":")[2].partition(" in ")[0] for line in said] == [
        " 4 steps of 2 runs",
        " 2 steps of 1 runs",
    ]
    train_on(1, tiny_config(tmp_path / "alone", seed=3, steps=4, **fields))
    assert_near(tmp_path / "3", tmp_path / "alone")
    assert summary(tmp_path / "5")["rl_steps"] == 4


@pytest.mark.slow
def test_a_signal_stops_all_runs_and_all_go_on(tmp_path):
    fields = dict(**FIXED, steps=9, checkpoint__every_steps=9)
    configs = [tiny_config(tmp_path / str(seed), seed=seed, **fields) for seed in (3, 5)]
    devices = jax.devices()[:1]

    def stop(line):
        signal.raise_signal(signal.SIGTERM)

    for one in train_together(configs, devices=devices, say=stop):
        assert isinstance(one, RunStopped) and one.signal.startswith("SIGTERM")
        assert one.run.summary["rl_steps"] == 3
    trained(configs)
    train_on(1, tiny_config(tmp_path / "alone", seed=5, **fields))
    assert_near(tmp_path / "5", tmp_path / "alone")


@pytest.mark.slow
def test_runs_on_a_mesh_share_its_devices(tmp_path):
    fields = dict(batch__prompts_per_step=8, batch__sequences_per_optimizer_step=32)
    fields |= dict(**FIXED, mesh__data=8, steps=3, checkpoint__every_steps=3)
    configs = [tiny_config(tmp_path / str(seed), seed=seed, **fields) for seed in (3, 5)]
    trained(configs, devices=8)
    train_on(8, tiny_config(tmp_path / "alone", seed=5, **fields))
    assert_near(tmp_path / "5", tmp_path / "alone")


def test_what_one_program_cannot_train_is_refused(tmp_path):
    def check(*changes):
        check_together([tiny_config(tmp_path, **{**FIXED, **one}) for one in changes])

    check(dict(seed=1), dict(seed=2))
    check({}, dict(actor_optimizer__lr=0.1, sampler__temperature=0.7))
    check({}, dict(algorithm__policy_loss="ppo_clip(clip_low=0.1)"))
    with pytest.raises(InputError, match=r"differ in batch.samples_per_prompt: got \[\d+, 2\]"):
        check({}, dict(batch__samples_per_prompt=2))
    with pytest.raises(InputError, match=r"differ in algorithm.kl_in_loss: got \[0.0, 0.1\].*0"):
        check({}, dict(algorithm__kl_in_loss=0.1))
    with pytest.raises(InputError, match=r"differ in algorithm.policy_loss"):
        check({}, dict(algorithm__policy_loss="ppo_clip(dual_clip=None)"))
    with pytest.raises(InputError, match="program_steps=1"):
        check(dict(program_steps=1))
    with pytest.raises(InputError, match="profile"):
        check(dict(profile_steps=(2, 3)))


def test_more_runs_than_fit_are_refused_with_the_number_that_fits():
    memory = MemoryEstimate({"weights": 10 * 2**20}, {}, {}, available=35 * 2**20)
    run = SimpleNamespace(memory=memory)
    check_memory(run, 3)
    with pytest.raises(InputError, match="4 runs together need 41.9 MB.*Fix: 3 runs together"):
        check_memory(run, 4)
