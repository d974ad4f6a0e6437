"""CGPO: rewards under judges, its three optimizers, several tasks at once, baseline responses."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from golden_checks.common import response_batch

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import spec
from rljax.dataflows.cgpo import choose
from rljax.errors import InputError
from rljax.learn import weighted_loss
from rljax.losses.policy import Policy
from rljax.shaping.constrained import (
    Responses,
    calibrated_rewards,
    codpo,
    constrained_rewards,
    crpg,
    crraft,
    kl_factors,
)


def logit(p):
    p = np.asarray(p, float)
    return np.log(p / (1 - p))


def responses(rewards, compliant, log_ratios=0.0, *, live=True, tokens=1, baseline=0.0, fallback=False):
    """One prompt, or several: rewards [P, K] or [K]."""
    rewards = np.atleast_2d(np.asarray(rewards, np.float32))
    whole = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x, dtype), rewards.shape))  # noqa: E731
    each = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x, dtype), rewards.shape[:1]))  # noqa: E731
    return Responses(
        jnp.asarray(rewards), whole(compliant, bool), whole(log_ratios, np.float32),
        whole(tokens, np.int32), whole(live, bool), each(baseline, np.float32),
        each(fallback, bool),
    )  # fmt: skip


# -- the worked examples --


def test_calib():
    example = worked_example("cgpo.calib")
    x, want = example["inputs"], example["outputs"]
    kl_max = example["params"]["kl_max"]
    calibrated = calibrated_rewards(jnp.float32(x["reward"]), jnp.float32(x["baseline_reward"]))
    factor = kl_factors(jnp.float32(x["logratio"]), kl_max=kl_max)
    np.testing.assert_allclose(calibrated, want["calib"], rtol=1e-6)
    np.testing.assert_allclose(factor, want["kl_factor"], rtol=1e-6)
    for compliant, name in ((True, "pass_reward"), (False, "fail_reward")):
        reward = factor * constrained_rewards(calibrated, jnp.array(compliant))
        np.testing.assert_allclose(reward, want[name], rtol=1e-6)
        # And so the optimizer sees it: two samples, of which one is worth 0, have +-R~/2.
        pair = responses(
            [x["reward"], 0.0], [compliant, False], [x["logratio"], 0.0],
            baseline=x["baseline_reward"],
        )  # fmt: skip
        got = crpg(pair, kl_max=kl_max).weights
        np.testing.assert_allclose(got, [[want[name] / 2, -want[name] / 2]], rtol=1e-6)


def learned(batch, logprobs, samples_per_prompt, optimizers, weights=(1.0,)):
    """The loss that update makes of a batch, and its gradient by `logprobs` [B, S]. tokens[:, 0] is
    the row's number."""
    batch = batch.replace(tokens=jnp.broadcast_to(jnp.arange(batch.rows)[:, None], batch.mask.shape))

    def loss(logprobs):
        chosen = choose(batch, samples_per_prompt, optimizers, weights)
        examples = chosen.examples
        own = logprobs[examples.tokens[:, 0]]
        value, metrics = chosen.loss(Policy(own, jnp.zeros_like(own)), examples)
        together = spec(chosen.loss).rows
        live = jnp.any((examples.mask > 0).reshape(-1, together * examples.mask.shape[1]), axis=1)
        mean = live / jnp.maximum(jnp.sum(live), 1)
        return weighted_loss(value, metrics, examples, mean)[0]

    return jax.value_and_grad(loss)(logprobs)


def one_token_batch(rewards, compliant, logps, ref, *, baseline_compliant=0.0):
    """One prompt whose samples are one token each, and its baseline response: logps [K + 1]."""
    rows = len(logps)
    scores = [*rewards, 0.0]
    return response_batch(
        np.ones((rows, 1)), np.float32, scores=scores, rewards=np.reshape(scores, (-1, 1)),
        reward_parts=[[c] for c in [*compliant, baseline_compliant]], task=None,
        old_logprobs=np.reshape(logps, (-1, 1)), ref_logprobs=np.reshape(ref, (-1, 1)),
    ).replace(task=jnp.zeros((rows,), jnp.int32))  # fmt: skip


def test_crpg():
    example = worked_example("cgpo.crpg")
    x, want = example["inputs"], example["outputs"]
    r, logps = x["r_tilde"], x["seq_logp"]
    compliant = [value > 0 for value in r]
    scores = [logit(value) if value > 0 else 3.0 for value in r]
    batch = one_token_batch(scores, compliant, [*logps, 0], [*logps, 0])
    optimizer = resolve("crpg(kl_max=1.0)", NAMESPACES["constrained"])
    advantages = choose(batch, 5, [optimizer], (1.0,)).examples.advantages
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
    spread = lambda rows: np.repeat(np.reshape([*rows, 0.0], (-1, 1)) / length, length, axis=1)  # noqa: E731
    batch = response_batch(
        np.ones((5, length)), np.float32, scores=[*x["rewards"], 0.0],
        rewards=np.zeros((5, length)), reward_parts=[[c] for c in [*x["compliant"], 0]],
        old_logprobs=spread(x["logp"]), ref_logprobs=spread(x["ref_logp"]),
    ).replace(task=jnp.zeros((5,), jnp.int32))  # fmt: skip
    text = f"codpo(beta={p['beta']}, nll_coef={p['lam']})"
    optimizer = resolve(text, NAMESPACES["constrained"])
    chosen = choose(batch, 5, [optimizer], (1.0,))
    np.testing.assert_array_equal(chosen.targets[0].rows, [[want["pos"], want["neg"]]])
    loss, gradient = learned(batch, batch.old_logprobs, 5, [optimizer])
    assert float(loss) == pytest.approx(want["loss"], abs=1e-6)
    h = p["beta"] * ((-3 + 3.2) - (-4 + 3.5))
    push = p["beta"] / (1 + math.exp(h))
    np.testing.assert_allclose(gradient[1], -push - p["lam"] / length, rtol=1e-5)
    np.testing.assert_allclose(gradient[3], push, rtol=1e-5)
    np.testing.assert_array_equal(gradient[np.array([0, 2, 4])], 0)
    alone, _ = learned(batch, batch.old_logprobs, 5, [resolve("codpo(nll_coef=0.0)", NAMESPACES["constrained"])])
    assert float(alone) == pytest.approx(want["dpo_term"], abs=1e-6)
    assert float(loss - alone) == pytest.approx(want["sft_term"], abs=1e-6)


def test_crraft():
    example = worked_example("cgpo.crraft")
    x, want = example["inputs"], example["outputs"]
    logps, kl = np.array(x["seq_logp"]), np.array(x["kl"])
    scores = logit(x["calib_reward"])
    batch = one_token_batch(scores, x["compliant"], [*logps, 0], [*(logps - kl), 0])
    optimizer = resolve(f"crraft(kl_max={example['params']['kl_max']})", NAMESPACES["constrained"])
    targets = choose(batch, 5, [optimizer], (1.0,)).targets[0]
    assert targets.rows.tolist() == [[want["chosen"]]]
    # What is kept shows as each of them is chosen once the better ones are gone.
    kept = [i for i in range(4) if _only(batch, optimizer, i) == i]
    assert kept == want["kept"]
    loss, gradient = learned(batch, batch.old_logprobs, 5, [optimizer])
    assert float(loss) == pytest.approx(want["loss"], abs=1e-5)
    np.testing.assert_allclose(gradient[:, 0], [-0.6, 0, 0, 0, 0], atol=1e-6)


def _only(batch, optimizer, row: int):
    """Which row is chosen where sample `row` alone has a known reward; None: the prompt is skipped."""
    known = (jnp.arange(5) == row) | (jnp.arange(5) == 4)
    targets = choose(batch.replace(mask=batch.mask * known[:, None]), 5, [optimizer], (1.0,)).targets[0]
    return int(targets.rows[0, 0]) if targets.keep[0, 0] else None


# -- against loops, in words of the paper --


def by_loops(name, options, prompts):
    """(sum of the terms of each prompt, examples, d / d log pi {(prompt, row): number}) of a task."""
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
            delta = lambda i, one=one: one["logp"][i] - one["ref"][i]  # noqa: E731
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


def random_batch(rng, prompts: int, samples: int, columns: int, tasks: int, *, ties: bool, passing: float):
    """A batch with failed rewards, empty parts, garbage at mask 0; and what the loops read of it."""
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
        mask, np.float32, scores=scores, rewards=np.zeros(mask.shape), reward_parts=parts,
        old_logprobs=logp, ref_logprobs=ref,
    ).replace(task=jnp.asarray(task, jnp.int32))  # fmt: skip
    good = np.all(np.isnan(parts) | (parts == 1), axis=1)
    inside = lambda x: np.where(mask, x, 0).sum(axis=1)  # noqa: E731
    told = []
    for p in range(prompts):
        own, last = slice(p * each, (p + 1) * each), p * each + samples
        live = [i for i in range(samples) if not failed[p * each + i] and not failed[last]]
        told.append({
            "live": live, "reward": scores[own][:-1], "good": good[own], "logp": inside(logp)[own],
            "ref": inside(ref)[own], "tokens": lengths[own], "baseline": scores[last],
            "known": not failed[last], "fallback": good[last], "task": task[own][0],
        })  # fmt: skip
    return batch, told, logp, mask


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("passing", [0.0, 0.6, 1.0])
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
        rng.normal(size=shape), rng.random(shape) < 0.4, rng.normal(0, 3, shape),
        live=rng.random(shape) < 0.9,
    )  # fmt: skip
    violating = some.live & ~some.compliant
    assert np.all(np.asarray(crpg(some, kl_max=2.0).weights)[np.asarray(violating)] <= 0)
    for optimizer in (codpo, crraft):
        targets = optimizer(some)
        rows = jnp.minimum(targets.rows, shape[1] - 1)
        raised = (targets.weights > 0) & targets.keep & (targets.rows < shape[1])
        assert not np.any(raised & jnp.take_along_axis(violating, rows, axis=1))
