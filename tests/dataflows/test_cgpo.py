"""CGPO: rewards under judges, its three optimizers, several tasks at once, baseline responses."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPO, lanes, worked_example
from explained import unexplained
from golden_checks.common import response_batch
from preset_runs import Shared, mean, preset_config
from tiny_run import assert_same_run

from rljax import setup as build
from rljax.arrays import fetch
from rljax.batch import take_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, to_dict
from rljax.contracts import spec
from rljax.data.online.prompts import Prompts
from rljax.dataflows.cgpo import cgpo, choose
from rljax.errors import InputError
from rljax.learn import weighted_loss
from rljax.losses.policy import PolicyOutputs
from rljax.plan.programs import programs_of
from rljax.rollout import make_sample
from rljax.rollout.rules.baseline_response import task_of, with_baseline_response
from rljax.setup.dry_run import check_fields_read
from rljax.setup.role_table import abstract_roles
from rljax.shaping.constrained import (
    GroupedResponses,
    calibrated_rewards,
    codpo,
    constrained_rewards,
    crpg,
    crraft,
    kl_factors,
)
from rljax.validation import validate


def logit(p):
    p = np.asarray(p, float)
    return np.log(p / (1 - p))


def responses(
    rewards, compliant, log_ratios=0.0, *, live=True, tokens=1, baseline=0.0, fallback=False
):
    """One prompt, or several: rewards [P, K] or [K]."""
    rewards = np.atleast_2d(np.asarray(rewards, np.float32))

    def whole(x, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(x, dtype), rewards.shape))

    def each(x, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(x, dtype), rewards.shape[:1]))

    return GroupedResponses(
        jnp.asarray(rewards),
        whole(compliant, bool),
        whole(log_ratios, np.float32),
        whole(tokens, np.int32),
        whole(live, bool),
        each(baseline, np.float32),
        each(fallback, bool),
    )


# -- the worked examples --


def test_calib():
    example = worked_example("cgpo.calib")
    x, want = example["inputs"], example["outputs"]
    kl_max = example["params"]["kl_max"]
    calibrated = calibrated_rewards(jnp.float32(x["reward"]), jnp.float32(x["baseline_reward"]))
    factor = kl_factors(jnp.float32(x["logratio"]), kl_max=kl_max)
    np.testing.assert_allclose(calibrated, want["calib"], rtol=1e-6)
    np.testing.assert_allclose(factor, want["kl_factor"], rtol=1e-6)
    weights = jax.jit(lambda pair: crpg(pair, kl_max=kl_max).weights)
    for compliant, name in ((True, "pass_reward"), (False, "fail_reward")):
        reward = factor * constrained_rewards(calibrated, jnp.array(compliant))
        np.testing.assert_allclose(reward, want[name], rtol=1e-6)
        # And so the optimizer sees it: two samples, of which one is worth 0, have +-R~/2.
        pair = responses(
            [x["reward"], 0.0],
            [compliant, False],
            [x["logratio"], 0.0],
            baseline=x["baseline_reward"],
        )
        np.testing.assert_allclose(weights(pair), [[want[name] / 2, -want[name] / 2]], rtol=1e-6)


def learned(batch, logprobs, samples_per_prompt, optimizers, weights=(1.0,)):
    """The loss that update makes of a batch, and its gradient by `logprobs` [B, S]. tokens[:, 0] is
    the row's number."""
    batch = batch.replace(
        tokens=jnp.broadcast_to(jnp.arange(batch.rows)[:, None], batch.mask.shape)
    )

    def loss(logprobs):
        chosen = choose(batch, samples_per_prompt, optimizers, weights)
        examples = chosen.examples
        own = logprobs[examples.tokens[:, 0]]
        value, metrics = chosen.loss(PolicyOutputs(own, jnp.zeros_like(own)), examples)
        together = spec(chosen.loss).rows
        live = jnp.any((examples.mask > 0).reshape(-1, together * examples.mask.shape[1]), axis=1)
        mean = live / jnp.maximum(jnp.sum(live), 1)
        return weighted_loss(value, metrics, examples, mean)[0]

    # One program: op by op, every operation would compile by itself.
    return jax.jit(jax.value_and_grad(loss))(logprobs)


def one_token_batch(rewards, compliant, logps, ref, *, baseline_compliant=0.0):
    """One prompt whose samples are one token each, and its baseline response: logps [K + 1]."""
    rows = len(logps)
    scores = [*rewards, 0.0]
    return response_batch(
        np.ones((rows, 1)),
        np.float32,
        scores=scores,
        rewards=np.reshape(scores, (-1, 1)),
        reward_parts=[[c] for c in [*compliant, baseline_compliant]],
        task=None,
        old_logprobs=np.reshape(logps, (-1, 1)),
        ref_logprobs=np.reshape(ref, (-1, 1)),
    ).replace(task=jnp.zeros((rows,), jnp.int32))


def chosen_by(batch, samples_per_prompt, optimizer):
    """The targets and the examples of an optimizer, by one program."""

    @jax.jit
    def program(batch):
        chosen = choose(batch, samples_per_prompt, [optimizer], (1.0,))
        return chosen.targets[0], chosen.examples

    return program(batch)


def test_crpg():
    example = worked_example("cgpo.crpg")
    x, want = example["inputs"], example["outputs"]
    r, logps = x["r_tilde"], x["seq_logp"]
    compliant = [value > 0 for value in r]
    scores = [logit(value) if value > 0 else 3.0 for value in r]
    batch = one_token_batch(scores, compliant, [*logps, 0], [*logps, 0])
    optimizer = resolve("crpg(kl_max=1.0)", NAMESPACES["constrained"])
    advantages = chosen_by(batch, 5, optimizer)[1].advantages
    np.testing.assert_allclose(advantages[:, 0], want["adv"], atol=1e-6)
    loss, gradient = learned(batch, batch.old_logprobs, 5, [optimizer])
    assert float(loss) == pytest.approx(want["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient[:4, 0], -np.array(want["adv"]) / 4, atol=1e-6)
    assert gradient[4, 0] == 0


def test_codpo():
    example = worked_example("cgpo.codpo")
    x, p, want = example["inputs"], example["params"], example["outputs"]
    length = x["length_pos"]

    # Log-probs of a row are spread over as many tokens as the positive one has.
    def spread(rows):
        return np.repeat(np.reshape([*rows, 0.0], (-1, 1)) / length, length, axis=1)

    batch = response_batch(
        np.ones((5, length)),
        np.float32,
        scores=[*x["rewards"], 0.0],
        rewards=np.zeros((5, length)),
        reward_parts=[[c] for c in [*x["compliant"], 0]],
        old_logprobs=spread(x["logp"]),
        ref_logprobs=spread(x["ref_logp"]),
    ).replace(task=jnp.zeros((5,), jnp.int32))
    text = f"codpo(beta={p['beta']}, nll_coef={p['lam']})"
    optimizer = resolve(text, NAMESPACES["constrained"])
    targets, _ = chosen_by(batch, 5, optimizer)
    np.testing.assert_array_equal(targets.rows, [[want["pos"], want["neg"]]])
    loss, gradient = learned(batch, batch.old_logprobs, 5, [optimizer])
    assert float(loss) == pytest.approx(want["loss"], abs=1e-6)
    h = p["beta"] * ((-3 + 3.2) - (-4 + 3.5))
    push = p["beta"] / (1 + math.exp(h))
    np.testing.assert_allclose(gradient[1], -push - p["lam"] / length, rtol=1e-5)
    np.testing.assert_allclose(gradient[3], push, rtol=1e-5)
    np.testing.assert_array_equal(gradient[np.array([0, 2, 4])], 0)
    alone, _ = learned(
        batch, batch.old_logprobs, 5, [resolve("codpo(nll_coef=0.0)", NAMESPACES["constrained"])]
    )
    assert float(alone) == pytest.approx(want["dpo_term"], abs=1e-6)
    assert float(loss - alone) == pytest.approx(want["sft_term"], abs=1e-6)


def test_crraft():
    example = worked_example("cgpo.crraft")
    x, want = example["inputs"], example["outputs"]
    logps, kl = np.array(x["seq_logp"]), np.array(x["kl"])
    scores = logit(x["calib_reward"])
    batch = one_token_batch(scores, x["compliant"], [*logps, 0], [*(logps - kl), 0])
    optimizer = resolve(f"crraft(kl_max={example['params']['kl_max']})", NAMESPACES["constrained"])
    program = jax.jit(lambda batch: choose(batch, 5, [optimizer], (1.0,)).targets[0])
    assert program(batch).rows.tolist() == [[want["chosen"]]]
    # What is kept shows as each of them is chosen once the better ones are gone.
    kept = [i for i in range(4) if _only(batch, program, i) == i]
    assert kept == want["kept"]
    loss, gradient = learned(batch, batch.old_logprobs, 5, [optimizer])
    assert float(loss) == pytest.approx(want["loss"], abs=1e-5)
    np.testing.assert_allclose(gradient[:, 0], [-0.6, 0, 0, 0, 0], atol=1e-6)


def _only(batch, program, row: int):
    """Which row is chosen where sample `row` alone has a known reward; None: skipped."""
    known = (np.arange(5) == row) | (np.arange(5) == 4)
    targets = program(batch.replace(mask=np.asarray(batch.mask) * known[:, None]))
    return int(targets.rows[0, 0]) if targets.keep[0, 0] else None


# -- against loops, in words of the paper --


def by_loops(name, options, prompts):
    """(sum over the prompts of a task, examples, d / d log pi {(prompt, row): number})."""
    total, count, gradient = 0.0, 0, {}

    def add(p, row, weight):  # weight * -log pi
        nonlocal total
        total -= weight * prompts[p]["logp"][row]
        gradient[p, row] = gradient.get((p, row), 0.0) - weight

    if name == "crpg":
        reward = {}
        for p, one in enumerate(prompts):
            for i in one["live"]:
                calibrated = 1 / (1 + math.exp(one["baseline"] - one["reward"][i]))
                factor = max(1 - (one["logp"][i] - one["ref"][i]) / options["kl_max"], 0)
                if options.get("cap_kl_factor"):
                    factor = min(factor, 1)
                reward[p, i] = factor * calibrated if one["good"][i] else 0.0
        mean = sum(reward.values()) / max(len(reward), 1)
        for (p, i), value in reward.items():
            add(p, i, value - mean)
        return total, len(reward), gradient
    for p, one in enumerate(prompts):
        good = [i for i in one["live"] if one["good"][i]]
        bad = [i for i in one["live"] if not one["good"][i]]
        if name == "codpo":
            if not good:
                continue
            best = max(good, key=lambda i: one["reward"][i])
            worst = min(bad or one["live"], key=lambda i: one["reward"][i])

            def delta(i, one=one):
                return one["logp"][i] - one["ref"][i]

            h = options["beta"] * (delta(best) - delta(worst))
            total += math.log1p(math.exp(-h))
            push = options["beta"] / (1 + math.exp(h))
            gradient[p, best] = gradient.get((p, best), 0.0) - push
            gradient[p, worst] = gradient.get((p, worst), 0.0) + push
            add(p, best, options["nll_coef"] / one["tokens"][best])
        else:
            near = [i for i in good if one["logp"][i] - one["ref"][i] <= options["kl_max"]]
            if near:
                best = max(near, key=lambda i: one["reward"][i])
                add(p, best, 1 / (1 + math.exp(one["baseline"] - one["reward"][best])))
            elif one["known"] and one["fallback"]:
                add(p, len(one["reward"]), 0.5)
            else:
                continue
        count += 1
    return total, count, gradient


OPTIMIZERS = (
    ("crpg", {"kl_max": 1.5}),
    ("codpo", {"beta": 0.3, "nll_coef": 0.7}),
    ("crraft", {"kl_max": 0.6}),
    ("crpg", {"kl_max": 0.7, "cap_kl_factor": True}),
)


def random_batch(
    rng, prompts: int, samples: int, columns: int, tasks: int, *, ties: bool, passing: float
):
    """A batch with failed rewards, parts that do not apply, garbage at mask 0; and what the loops
    read of it."""
    rows, each = prompts * (samples + 1), samples + 1
    lengths = rng.integers(1, columns, rows)
    mask = (np.arange(columns) >= 1) & (np.arange(columns) <= lengths[:, None])
    failed = rng.random(rows) < 0.15
    mask = mask * ~failed[:, None]
    scores = rng.integers(-1, 2, rows) if ties else rng.normal(size=rows)
    parts = np.where(rng.random((rows, 2)) < passing, 1.0, 0.0)
    parts = np.where(rng.random((rows, 2)) < 0.2, np.nan, parts)
    garbage = np.where(rng.random(mask.shape) < 0.5, np.nan, 1e30)
    logp = np.where(mask, -rng.exponential(0.4, mask.shape), garbage)
    ref = np.where(mask, logp + rng.normal(0, 0.4, mask.shape), garbage)
    scores = np.where(failed, np.nan, scores)
    task = np.repeat(rng.integers(0, tasks, prompts), each)
    batch = response_batch(
        mask,
        np.float32,
        scores=scores,
        rewards=np.zeros(mask.shape),
        reward_parts=parts,
        old_logprobs=logp,
        ref_logprobs=ref,
    ).replace(task=jnp.asarray(task, jnp.int32))
    good = np.all(np.isnan(parts) | (parts == 1), axis=1)

    def inside(x):
        return np.where(mask, x, 0).sum(axis=1)

    told = []
    for p in range(prompts):
        own, last = slice(p * each, (p + 1) * each), p * each + samples
        live = [i for i in range(samples) if not failed[p * each + i] and not failed[last]]
        told.append(
            {
                "live": live,
                "reward": scores[own][:-1],
                "good": good[own],
                "logp": inside(logp)[own],
                "ref": inside(ref)[own],
                "tokens": lengths[own],
                "baseline": scores[last],
                "known": not failed[last],
                "fallback": good[last],
                "task": task[own][0],
            }
        )
    return batch, told, logp, mask


@pytest.mark.slow
@pytest.mark.parametrize("samples", lanes([4], [1, 2, 5]))
@pytest.mark.parametrize("passing", lanes([0.6], [0.0, 1.0]))
def test_any_mixture_of_tasks_is_what_the_loops_say(samples, passing):
    rng = np.random.default_rng(int(10 * passing) + samples)
    for names, ties in itertools.product([(0,), (1,), (2,), (3, 1), (0, 1, 2)], (False, True)):
        chosen = [OPTIMIZERS[i] for i in names]
        batch, told, logp, mask = random_batch(
            rng, 7, samples, 4, len(names), ties=ties, passing=passing
        )
        texts = [f"{n}({', '.join(f'{k}={v}' for k, v in o.items())})" for n, o in chosen]
        components = [resolve(text, NAMESPACES["constrained"]) for text in texts]
        weights = tuple(rng.uniform(0.1, 1, len(names)))
        with jax.enable_x64(True):
            batch = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), batch)
            loss, gradient = learned(batch, jnp.asarray(logp), samples + 1, components, weights)
        want, slope = 0.0, np.zeros(len(mask))
        for task, (name, options) in enumerate(chosen):
            own = [p for p, one in enumerate(told) if one["task"] == task]
            total, count, by_row = by_loops(name, options, [told[p] for p in own])
            if count:
                want += weights[task] * total / count
            for (p, row), value in by_row.items():
                slope[own[p] * (samples + 1) + row] += weights[task] * value / count
        np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient, slope[:, None] * mask, rtol=1e-5, atol=1e-6)


def test_no_violating_sample_is_made_more_likely():
    rng = np.random.default_rng(0)
    shape = (40, 6)
    some = responses(
        rng.normal(size=shape),
        rng.random(shape) < 0.4,
        rng.normal(0, 3, shape),
        live=rng.random(shape) < 0.9,
    )
    violating = np.asarray(some.live) & ~np.asarray(some.compliant)
    weights = jax.jit(lambda some: crpg(some, kl_max=2.0).weights)(some)
    assert np.all(np.asarray(weights)[violating] <= 0)
    for optimizer in (codpo, crraft):
        targets = jax.device_get(jax.jit(optimizer)(some))
        rows = np.minimum(targets.rows, shape[1] - 1)
        raised = (targets.weights > 0) & targets.keep & (targets.rows < shape[1])
        assert not np.any(raised & np.take_along_axis(violating, rows, axis=1))


# -- the page and its rollout --


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("cgpo"))
    yield runs
    runs.close()


def small(**changes):
    config = preset_config("cgpo")
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 8, 4
    config.batch.sequences_per_optimizer_step = 32
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def step(shared):
    """The run of the preset, and a batch of its rollout."""
    with shared.run(small()) as run:
        run.begin(run.setup.main, jax.device_put(shared.start(0)))
        batch, metrics = run.source.next(0, run.roles)
        yield run, batch, metrics


def paged(step, batch=None, steps=None, **options):
    run, sampled, _ = step
    roles = {name: run.roles[name] for name in ("actor", "reference")}
    cfg = run.setup.algorithm
    cfg = cfg.replace(steps=dataclasses.replace(cfg.steps, **(steps or {})))
    # One program: op by op, every operation would compile by itself.
    page = jax.jit(lambda batch, roles: cgpo.page(batch, None, cfg, **roles, **options))
    return page(sampled if batch is None else batch, roles)


def both(optimizer: str):
    return (("first_letter", optimizer), ("two_letters", optimizer))


def params_of(new):
    return fetch(new["actor"].state.params)


def texts_of(run, batch):
    tokens, mask = fetch((batch.tokens, batch.mask))
    return [
        run.setup.tokenizer.decode(t[m > 0].tolist()) for t, m in zip(tokens, mask, strict=True)
    ]


@pytest.mark.slow
def test_the_last_row_of_a_prompt_is_the_references_greedy_response(step):
    run, batch, metrics = step
    task, group = fetch((batch.task, batch.group))
    np.testing.assert_array_equal(group, np.repeat(np.arange(8), 4))
    assert set(task) == {0, 1} and np.all(task.reshape(8, 4) == task[::4, None])
    last = np.arange(32) % 4 == 3
    mask = fetch(batch.mask) > 0
    of_nobody = np.array(
        [np.all(v[m] == -1) for v, m in zip(fetch(batch.policy_version), mask, strict=True)]
    )
    np.testing.assert_array_equal(of_nobody, last)
    baseline = take_rows(batch, np.flatnonzero(last))
    length = fetch(jnp.sum(baseline.segment_ids, axis=1) - jnp.sum(baseline.mask, axis=1))
    width = int(length.max())
    tokens = np.where(np.arange(width) < length[:, None], fetch(baseline.tokens)[:, :width], 0)
    asked = Prompts(tokens.astype(np.int32), length.astype(np.int32), ())
    greedy = run.roles["reference"].generate(
        asked, jax.random.key(0), run.setup.rollouts.sampling.greedy()
    )
    assert texts_of(run, greedy) == texts_of(run, baseline)
    right = float(np.mean(fetch(baseline.scores)))
    assert metrics["baseline/reward"] == pytest.approx(right)
    assert metrics["baseline/failed_fraction"] == 0
    # The reports are of the policy's samples alone.
    mean = np.mean(fetch(batch.reward_parts)[~last])
    assert metrics["reward/part/compliant"] == pytest.approx(mean)


@pytest.mark.slow
def test_a_text_of_the_data_is_the_baseline_response(shared, step):
    run = step[0]
    prompts = run.source.draw(4)
    written = ["a", "abcd", None, ""]
    records = tuple(
        dataclasses.replace(r, extra_info={} if text is None else {"baseline_response": text})
        for r, text in zip(prompts.records, written, strict=True)
    )
    scored = []

    def reward(batch, prompts):
        scored.append(batch.rows)
        return run.reward(batch, prompts)

    def rollout(records):
        given = {name: run.roles[name] for name in ("actor", "reference")}
        sample = make_sample(given["actor"], reward, run.setup.rollouts.sampling)
        given |= dict(reward=reward, sample=sample, draw=None, tokenizer=run.setup.tokenizer)
        asked = dataclasses.replace(prompts, records=records)
        cfg = run.setup.rollouts.replace(samples_per_prompt=3)
        return with_baseline_response(asked, jax.random.key(1), cfg, **given)

    done = rollout(records)
    assert scored == [8, 4] and len(done.report.rows) == 8
    baseline = take_rows(done.batch, slice(2, None, 3))
    texts = texts_of(run, baseline)
    assert texts[0] == "a" and texts[1] == "abc" and texts[3] == ""  # cut like a sample: 3 tokens
    finish = fetch(baseline.finish_reason)
    assert [finish[i] for i in (0, 1, 3)] == [0, 1, 0]
    assert np.all(fetch(jnp.sum(baseline.mask, axis=1))[[0, 1, 3]] == [2, 3, 1])
    truths = [r.ground_truth for r in records]
    assert fetch(baseline.scores)[0] == float(truths[0] == "a")
    whole = rollout(
        tuple(dataclasses.replace(r, extra_info={"baseline_response": "b"}) for r in records)
    )
    assert texts_of(run, take_rows(whole.batch, slice(2, None, 3))) == ["b"] * 4
    # The prompts stand before the texts.
    starts = done.prompts.lengths
    for row, (tokens, start) in enumerate(zip(fetch(baseline.tokens), starts, strict=True)):
        np.testing.assert_array_equal(tokens[:start], done.prompts.tokens[row, :start])
    with pytest.raises(InputError, match="no task for data source"):
        task_of(records[0], ("math*", "json"))


@pytest.mark.slow
def test_prompts_without_a_compliant_sample_are_skipped_or_fall_back(step):
    _, batch, _ = step
    last = (jnp.arange(batch.rows) % 4 == 3)[:, None]
    violating = batch.replace(reward_parts=jnp.where(last, 1.0, 0.0))
    before = fetch(step[0].roles["actor"].state.params)
    new, metrics = paged(step, violating, tasks=both("codpo()"))
    assert metrics["cgpo/skipped_prompts"] == 8 and metrics["empty_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, params_of(new), before)
    new, metrics = paged(step, violating, tasks=both("crraft()"))
    fallbacks = [metrics[f"cgpo/baseline_fallbacks/{name}"] for name, _ in both("")]
    assert metrics["cgpo/skipped_prompts"] == 0 and sum(fallbacks) == 8 and min(fallbacks) > 0
    assert metrics["cgpo/compliant_fraction"] == 0
    logps = [
        jnp.sum(jnp.where(last & (batch.mask > 0), actor.logprobs(batch), 0.0))
        for actor in (step[0].roles["actor"], new["actor"])
    ]
    assert logps[1] > logps[0]  # of the baseline responses
    none = violating.replace(reward_parts=jnp.zeros_like(batch.reward_parts))
    _, metrics = paged(step, none, tasks=both("crraft()"))
    assert metrics["cgpo/skipped_prompts"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("together", [dict(), dict(microbatch_rows=4, packing=None)])
def test_the_gradient_norm_of_each_task_is_that_of_the_task_alone(step, together):
    """Of a mean over samples and of one over pairs; 2 optimizer steps in the batch change none."""
    tasks = (("first_letter", "crpg()"), ("two_letters", "codpo()"))
    norms = ["cgpo/grad_norm/first_letter", "cgpo/grad_norm/two_letters"]
    _, metrics = paged(
        step, tasks=tasks, task_weights=(0.3, 0.7), gradient_norms=True, steps=together
    )
    _, twice = paged(step, tasks=tasks, gradient_norms=True, steps=dict(rows=16))
    for weights, name in zip(((1.0, 0.0), (0.0, 1.0)), norms, strict=True):
        _, alone = paged(step, tasks=tasks, task_weights=weights)
        assert name not in alone and alone["grad_norm"] > 1e-3
        for found in (metrics, twice):
            assert found[name] == pytest.approx(float(alone["grad_norm"]), rel=1e-4)
    assert metrics["grad_norm"] <= 0.3 * metrics[norms[0]] + 0.7 * metrics[norms[1]] + 1e-6
    assert unexplained(metrics) == set()


@pytest.mark.slow
def test_the_gradient_norm_of_a_single_task_is_that_of_the_step(step):
    _, metrics = paged(
        step,
        tasks=both("codpo()")[:1] + (("two*", ""),),
        gradient_norms=True,
        task_weights=(0.0, 1.0),
    )
    assert metrics["cgpo/grad_norm/two*"] == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
    assert abs(metrics["cgpo/grad_norm/first_letter"] - metrics["grad_norm"]) > 1e-3


@pytest.mark.slow
def test_microbatches_and_single_tasks_change_no_gradient(step):
    """Examples of three rows, one at a time; two tasks with one optimizer weigh by task."""
    tasks = (("first_letter", "codpo()"), ("two_letters", "crpg()"))
    whole, metrics = paged(step, tasks=tasks)
    small, other = paged(step, tasks=tasks, steps=dict(microbatch_rows=4, packing=None))
    assert metrics["loss"] == pytest.approx(float(other["loss"]), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(other["grad_norm"]), rel=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params_of(whole), params_of(small)
    )
    one, only = paged(step, tasks=tasks, task_weights=(0.0, 1.0))
    assert only["pair_loss"] == 0 < abs(only["likelihood_loss"])


def test_what_does_not_fit_is_refused_before_anything_is_compiled():
    def refused(match, dataflow="cgpo()", **changes):
        config = small(dataflow=dataflow)
        for name, value in changes.items():
            node, _, field = name.partition("__")
            setattr(getattr(config, node), field, value)
        with pytest.raises(InputError, match=match):
            validate(config)
            check_fields_read(build.build(config, jax.devices()[:1]))

    refused("kl_max", "cgpo(optimizer='crpg(kl_max=0.0)')")
    refused("beta", "cgpo(optimizer='codpo(beta=-1.0)')")
    refused("crpgg", "cgpo(optimizer='crpgg()')")
    refused(r"tasks=\(\('first_letter', 'crpg\(\)'\),\)", "cgpo(tasks=('first_letter', 'crpg()'))")
    refused("pairs of a data source", "cgpo(tasks=(('first_letter',),))")
    refused("task_weights", "cgpo(task_weights=(0.5, 0.5))")
    refused("trust_region", algorithm__trust_region=0.1, algorithm__old_logprobs="sampler")
    refused("one version", rollouts__max_staleness=1)
    refused("nothing.*reads|not read", algorithm__advantage="rloo()")


def test_its_programs_are_planned():
    """Decoding of the samples, decoding of the baseline responses by the reference, learning."""
    config = small()
    setup = build.build(config, jax.devices()[:1])
    calls = programs_of(setup, abstract_roles(setup))
    names = [call.name for call in calls]
    assert names == ["sft", "generate", "generate 2", "learn"]
    # 24 samples and 8 baseline responses are decoded, and 32 rows are learned from.
    leaves = [jax.tree.leaves(call.arguments) for call in calls]
    rows = [{x.shape[0] for x in each if np.ndim(x)} for each in leaves]
    assert 24 in rows[1] and 24 not in rows[2] and 8 in rows[2] and 32 in rows[3]


# -- learning --


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("optimizer", ["crpg(kl_max=20.0)", "codpo()", "crraft(kl_max=20.0)"])
def test_two_tasks_comply_in_the_end(shared, optimizer, seed):
    """Each task has a rule of its own, and all learn by one optimizer."""
    tasks = (("first_letter", optimizer), ("two_letters", optimizer))
    config = preset_config("cgpo", seed)
    config.dataflow = f"cgpo(tasks={tasks!r})"
    with shared.run(config) as run:
        run.begin(run.setup.main, jax.device_put(shared.start(seed), run.setup.model.shardings()))
        rows = [run.step() for _ in range(config.steps)]
    for name, _ in tasks:
        complies = [float(r[f"cgpo/compliant_fraction/{name}"]) for r in rows]
        assert mean(complies[-5:]) >= 0.95 and mean(complies[:2]) < 0.93, complies
    rewards = [float(r["reward/mean"]) for r in rows]
    assert mean(rewards[-5:]) > 0.85, rewards
    assert unexplained(*rows) == set()


@pytest.mark.slow
def test_a_killed_run_is_bitwise_the_uninterrupted_one(tmp_path):
    folders = []
    for name, kills in (("whole", 0), ("killed", 2)):
        config = small(run_dir=str(tmp_path / name), steps=12)
        config.checkpoint.every_steps = 2
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(to_dict(config)))
        command = [
            sys.executable,
            str(REPO / "tests/helpers/killed_runs.py"),
            str(file),
            str(kills),
            "0",
        ]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests/helpers")]),
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        folders.append(tmp_path / name)
    assert_same_run(*folders[::-1])
