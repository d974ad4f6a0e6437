"""Runs that sample on devices of their own while the others learn (rollouts.sampler_devices)."""

import contextlib
import dataclasses
import re

import jax
import numpy as np
import pytest
from tiny_run import metrics_rows, policy_bytes, tiny_config, train_on

from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.keys import stream
from rljax.plan.groups import IN_FLIGHT
from rljax.plan.memory import estimate
from rljax.report.timeline import figure, record_of
from rljax.setup import build
from rljax.setup.abstract import abstract_setup
from rljax.tracking.timing import collect
from rljax.training.run import Run
from rljax.validation import validate

ONE_STEP = dict(
    rollouts__max_staleness=1,
    rollouts__ahead=1,
    rollouts__clock="logical(1)",
    rollouts__sampler_devices=1,
)


def a_config(tmp_path, **fields):
    """No supervised steps, so that responses have lengths of all kinds."""
    plain = dict(sft__steps=0, evaluate__every_steps=0, sampler__loop="host", steps=4)
    return tiny_config(tmp_path, **{**plain, **fields})


@contextlib.contextmanager
def begun(config, devices: int, folder):
    """The run before its first step, and the list of the batches that its steps learn from."""
    with Run(build(config, devices=jax.devices()[:devices]), folder) as run:
        run.checkpoints.prepare()
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        batches, take = [], run.source.next

        def next_one(step, roles):
            batch, metrics = take(step, roles)
            batches.append(jax.tree.map(np.asarray, batch))
            return batch, metrics

        run.source.next = next_one
        yield run, batches


@pytest.mark.slow
def test_one_step_off_policy(tmp_path):
    """From the second step on every token has the weights of the step before: those that one mesh
    would have drawn with them, in the order of the data. They were drawn while the newer weights
    were learned, by a copy, as the others were donated."""
    with begun(a_config(tmp_path, **ONE_STEP), 2, tmp_path) as (run, batches):
        actor, loader = run.roles["actor"], run.source.loader
        begun_at = loader.get_state()
        records = loader.take(8)
        loader.set_state(begun_at)
        want = [drawn(run, actor, records[4 * step :][:4], step) for step in (0, 1)]
        steps = []
        for _ in range(4):
            with collect() as timings:
                steps.append((run.step(), timings))
        assert any(x.is_deleted() for x in jax.tree.leaves(actor.state.params))
    for batch, expected in zip(batches, want, strict=False):
        for name in ("tokens", "mask", "group", "finish_reason"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name), name)
        logprobs = batch.sampler_logprobs, expected.sampler_logprobs
        np.testing.assert_allclose(*logprobs, atol=1e-5)  # prompts were read in other numbers
    for number, (batch, (metrics, timings)) in enumerate(zip(batches, steps, strict=True)):
        lag = min(number, 1)
        assert metrics["staleness/steps_mean"] == metrics["staleness/steps_max"] == lag
        assert len(np.unique(batch.policy_version[batch.mask > 0])) == 1
        weights = sum(x.nbytes for x in jax.tree.leaves(run.roles["actor"].state.weights))
        assert timings.synced_bytes == weights and timings.synced_s > 0
        assert decodes_while_learning(timings) or not number  # which waited for its own samples
    assert sum(timings.beside_s for _, timings in steps) > 0
    record = record_of(steps[-1][1], 4, 1.0)
    assert "sequences decoding" in figure(record)


def drawn(run, actor, records, step: int):
    """What `step` would sample of these prompts with the weights of `actor`, where they lie."""
    prompts = Prompts.from_records(records, length=run.setup.data.prompt_tokens)
    actor = dataclasses.replace(actor, decoding=dataclasses.replace(actor.decoding, mesh=None))
    key, cfg = stream(run.key, "rollout", step), run.setup.rollouts
    batch = actor.generate(prompts, key, cfg.sampling, n=cfg.samples_per_prompt)
    return jax.tree.map(np.asarray, batch)


def decodes_while_learning(timings) -> bool:
    ((_, begin, end),) = [span for span in timings.spans if span[0] == "learn"]
    return any(begin < t < end and live > 0 for t, live in timings.live)


@pytest.mark.slow
def test_new_weights_come_as_soon_as_they_are_learned(tmp_path):
    """By the wall's clock, in what is in flight, on meshes of two devices each; no token is older
    than the bound, and weights are whole on each device that samples."""
    how = dict(rollouts__max_staleness=2, rollouts__sampler_devices=2, sampler__slots=6)
    with begun(a_config(tmp_path, **how), 4, tmp_path) as (run, batches):
        mesh = run.setup.decoding.of(run.setup.model).mesh
        assert list(mesh.devices.flat) == jax.devices()[2:4] and mesh.shape["data"] == 2
        assert list(run.setup.model.mesh.devices.flat) == jax.devices()[:2]
        metrics = [run.step() for _ in range(6)]
        assert run.evaluate()["eval/failed_fraction"] == 0
    ages = [one["staleness/steps_max"] for one in metrics]
    assert max(ages) <= 2 and max(ages) >= 1
    assert np.isfinite([one["loss"] for one in metrics]).all()
    for batch in batches:
        assert (batch.mask.sum(axis=1) > 0).all()


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    how = dict(ONE_STEP, checkpoint__every_steps=2, checkpoint__allow_changed=("steps",))
    how |= dict(rollouts__max_staleness=2, rollouts__ahead=2, sampler__slots=12)
    for name, steps in (("whole", 6), ("parts", 4), ("parts", 6)):
        train_on(2, a_config(tmp_path / name, **how | dict(steps=steps)))
    assert policy_bytes(tmp_path / "whole") == policy_bytes(tmp_path / "parts")
    whole, parts = (metrics_rows(tmp_path / name) for name in ("whole", "parts"))
    assert whole[4:] == parts[4:]


@pytest.mark.parametrize("layout, dtype", [("", ""), ("mesh(fsdp=2)", ""), ("", "bfloat16")])
def test_the_sampler_reads_a_copy_of_its_own(tmp_path, layout, dtype):
    """The same numbers (rounded, where it holds narrow ones), on its devices alone."""
    config = a_config(tmp_path, **ONE_STEP | dict(rollouts__sampler_devices=2))
    config.model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)"
    config.sampler.layout, config.sampler.weight_dtype = layout, dtype
    setup = build(config, devices=jax.devices()[:4])
    params = setup.model.init(jax.random.key(0))
    copy = setup.decoding.weights(setup.model, params)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(copy), strict=True):
        assert y.sharding.device_set == set(jax.devices()[2:4])
        np.testing.assert_array_equal(np.asarray(x.astype(dtype or x.dtype)), np.asarray(y))
    before = jax.tree.map(np.asarray, copy)
    jax.tree.map(lambda x: x.delete(), params)  # as learning does, which writes there
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, copy))


def test_the_memory_of_both_meshes_is_counted_apart(tmp_path):
    split = estimate(abstract_setup(a_config(tmp_path, **ONE_STEP), jax.devices()[:2]))
    one = ONE_STEP | dict(rollouts__sampler_devices=0)
    whole = estimate(abstract_setup(a_config(tmp_path, **one), jax.devices()[:1]))
    sampler, held = dict(split.groups["sampler"]), dict(whole.held)
    assert sampler.pop("weights in the layout of decoding") == held["actor weights"]
    assert sampler == whole.generate | {IN_FLIGHT: held.pop(IN_FLIGHT)}
    assert not split.generate and split.learn == whole.learn and split.held == held
    assert "per device of sampler" in split.line()


REFUSED = [
    (dict(rollouts__sampler_devices=8), 8, "8 devices are there.*1 to 7, or 0"),
    (dict(rollouts__sampler_devices=1), 1, "1 device is there.*0: one mesh"),
    (dict(rollouts__max_staleness=0), 8, "max_staleness=0.*nothing is left to do beside"),
    (dict(rollouts__sampler_devices=-1), 8, "must be >= 0"),
    (dict(placement=("reference=group(devices=1)",)), 8, "one of both"),
    (dict(dataflow="preference"), 8, "no policy samples"),
    (dict(mesh__data=8, mesh__fsdp=1), 8, "needs 8 devices, and 7 .*beside 1 that sample"),
]


@pytest.mark.parametrize("fields, devices, words", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(tmp_path, fields, devices, words):
    config = a_config(tmp_path, **{**ONE_STEP, **fields})
    with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
        validate(config, devices)


@pytest.mark.slow
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tmp_path):
    how = ONE_STEP | dict(rollouts__sampler_devices=3)
    with pytest.raises(InputError, match="16 slots.*over 3.*15.*1, 2, 4, 8, 16.*tensor=3"):
        build(a_config(tmp_path, **how), devices=jax.devices()[:4])
    with pytest.raises(InputError, match="8 sequences.*over 3 devices"):
        build(a_config(tmp_path, **ONE_STEP), devices=jax.devices()[:4])
    wrong = a_config(tmp_path, **how, sampler__layout="mesh(tensor=2)")
    with pytest.raises(InputError, match="sampler.layout does not fit the devices"):
        build(wrong, devices=jax.devices()[:4])
