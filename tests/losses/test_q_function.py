"""DQO and DRO: worked examples, the optimum of small trees, constants, masks, packing, learning."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled, lanes, worked_example
from golden_checks.common import response_batch

from rljax.batch import Batch, FinishReason
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.losses import q_function as op_by_op
from rljax.losses.policy import PolicyOutputs

q, F64 = Compiled(op_by_op), jnp.float64
PLAIN = {"is_level": "off"}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def gradient_of(f):
    """Its gradient as one program."""
    return jax.jit(jax.grad(f))


def value_and_gradient(f):
    return jax.jit(jax.value_and_grad(f))


def policy_of(logprobs):
    return PolicyOutputs(logprobs, np.zeros(logprobs.shape, logprobs.dtype))


def row(x, dtype=F64):
    return jnp.asarray(x, dtype)[None]


def three_tokens(name):
    x = worked_example(name)
    i = x["inputs"]
    fields = {
        "rewards": [i["reward"]],
        "ref_logprobs": [i["ref_log_prob"]],
        "old_logprobs": [i["log_prob"]],
        "values": [i["value"]],
    }
    return x, response_batch(np.ones((1, 3)), **fields), row(i["log_prob"]), row(i["value"])


def close(got, want, tol=2e-6):
    np.testing.assert_allclose(np.asarray(got).ravel(), np.ravel(want), rtol=tol, atol=tol)


def test_one_step_example():
    x, batch, logp, values = three_tokens("dqo.onestep")
    want, beta = x["outputs"], x["params"]["beta"]
    batch = batch.replace(entropy=row(x["inputs"]["entropy"]))
    options = {"beta": beta, "one_step": True, **PLAIN}

    def mean(f):
        return lambda a: jnp.mean(f(a, batch, **options)[0])

    loss, grad = value_and_gradient(lambda a: mean(q.dqo_policy)(policy_of(a)))(logp)
    close(loss, want["policy_loss"])
    close(grad, want["grad_log_prob"])
    loss, grad = value_and_gradient(mean(q.dqo_value))(values)
    close(loss, want["value_loss"])
    close(grad, want["grad_value"])
    metrics = q.dqo_policy(policy_of(logp), batch, **options)[1]
    close(metrics["dqo_residual_abs"], np.abs(want["policy_residual"]))
    residual = q.dqo_value(values, batch, **options)[1]["dqo_value_residual"]
    close(residual, want["value_residual"])


def test_lambda_return_example():
    x, batch, logp, values = three_tokens("dqo.lambda")
    want, beta = x["outputs"], x["params"]["beta"]
    close(q.soft_rewards(logp, batch, beta=beta), want["soft_reward"])
    for lam, name in ((1.0, "G_lambda1"), (0.9, "G_lambda09"), (0.0, "G_lambda0")):
        close(op_by_op.lambda_returns(batch, values, logprobs=logp, beta=beta, lam=lam), want[name])
    for lam, name in ((1.0, "value_loss_lambda1"), (0.9, "value_loss_lambda09")):
        close(jnp.mean(q.dqo_value(values, batch, beta=beta, lam=lam, **PLAIN)[0]), want[name])
    close(
        jnp.mean(q.dqo_policy(policy_of(logp), batch, beta=beta, **PLAIN)[0]),
        want["policy_loss_lambda1"],
    )
    behaviour = row(x["inputs"]["behavior_log_prob"])
    close(q.offline_weights(logp, behaviour, batch), [want["is_weight"]] * 3)
    far = q.offline_weights(behaviour + jnp.array([[1.0, 0.5, 0.5]]), behaviour, batch)
    close(far, [want["is_weight_capped_example"]] * 3)
    batch = batch.replace(sampler_logprobs=behaviour)
    loss, metrics = q.dqo_value(values, batch, beta=beta)
    close(jnp.mean(loss), want["weighted_value_loss_lambda1"])
    assert float(jnp.sum(metrics["is_capped"])) == 0
    loss, _ = q.dqo_policy(policy_of(logp), batch, beta=beta)
    close(jnp.mean(loss), want["weighted_policy_loss_lambda1"])


def test_bandit_optimum():
    x = worked_example("dqo.fixed_point")
    want, beta = x["outputs"], x["params"]["beta"]
    r, ref = (np.array(x["inputs"][k])[:, None] for k in ("r", "ref"))
    logp = jnp.log(jnp.asarray(want["pi_star"], F64))[:, None]
    value = jnp.full((3, 1), want["V_star"], F64)
    batch = response_batch(
        np.ones((3, 1)),
        rewards=r,
        ref_logprobs=np.log(ref),
        old_logprobs=logp,
        values=value,
        entropy=np.full((3, 1), want["entropy_pi_star"]),
    )
    for one_step in (True, False):
        options = {"beta": beta, "one_step": one_step, **PLAIN}
        loss, _ = q.dqo_policy(policy_of(logp), batch, **options)
        close(loss, np.zeros(3), tol=1e-10)
    close(q.dqo_value(value, batch, beta=beta, **PLAIN)[0], np.zeros(3), tol=1e-10)
    # In the entropy form only the mean over actions vanishes: r and log ref stay those of one.
    residual = q.dqo_value(value, batch, beta=beta, one_step=True, **PLAIN)[1]["dqo_value_residual"]
    assert abs(float(jnp.sum(jnp.exp(logp) * residual))) < 1e-6 < float(jnp.max(jnp.abs(residual)))


def tree():
    """(example, a batch of its four trajectories, log pi* [4, 2], V* [4, 2])."""
    x = worked_example("dqo.tree_fixed_point")
    i, o = x["inputs"], x["outputs"]
    rows = list(itertools.product(range(2), range(2)))
    ref = np.log([[i["ref_step1"][a], i["ref_step2"][a][b]] for a, b in rows])
    rewards = [[0.0, i["leaf_reward"][a][b]] for a, b in rows]
    beta = x["params"]["beta"]
    # Recomputed: the file rounds to seven digits.
    leaves = np.array(i["leaf_reward"])
    step2 = beta * np.log(np.sum(np.array(i["ref_step2"]) * np.exp(leaves / beta), axis=1))
    root = beta * np.log(np.sum(np.array(i["ref_step1"]) * np.exp(step2 / beta)))
    close(step2, o["V_step2"])
    close(root, o["V_root"])
    values = np.array([[root, step2[a]] for a, _ in rows])
    after = np.stack([values[:, 1], np.zeros(4)], axis=1)
    logp = ref + (np.array(rewards) + after - values) / beta
    close(np.exp(logp[::2, 0]), o["pi_step1"])
    close(np.exp(logp[:, 1]), np.ravel(o["pi_step2"]))
    batch = response_batch(
        np.ones((4, 2)), rewards=rewards, ref_logprobs=ref, old_logprobs=logp, values=values
    )
    return beta, batch, jnp.asarray(logp), jnp.asarray(values)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_every_residual_vanishes_at_the_optimum(lam):
    beta, batch, logp, values = tree()
    close(q.dqo_policy(policy_of(logp), batch, beta=beta, lam=lam, **PLAIN)[0], np.zeros(8), 1e-12)
    close(q.dqo_value(values, batch, beta=beta, lam=lam, **PLAIN)[0], np.zeros(8), 1e-12)
    off = q.dqo_value(values + 0.1, batch, beta=beta, lam=lam, **PLAIN)[0]
    assert float(jnp.max(off)) > 1e-3


def random_batch(seed=0, rows=3, length=7, **extra):
    rng = np.random.default_rng(seed)
    mask = np.ones((rows, length))
    mask[:, 0], mask[1, 3:5], mask[2, 5:] = 0, 0, 0  # prompt, tool output, padding
    names = ("rewards", "ref_logprobs", "old_logprobs", "sampler_logprobs", "values", "entropy")
    fields = {name: rng.normal(size=mask.shape) for name in names}
    return response_batch(mask, **(fields | extra)), jnp.asarray(rng.normal(size=mask.shape))


def test_residuals_of_policy_and_value_are_opposite_at_lambda_one():
    batch, _ = random_batch()
    batch = batch.replace(ref_logprobs=batch.ref_logprobs * 0.3)
    logp = batch.old_logprobs
    value = q.dqo_value(batch.values, batch, beta=0.7, **PLAIN)[1]["dqo_value_residual"]
    # d (residual^2) / d log pi = 2 beta residual
    slope = gradient_of(lambda a: jnp.sum(q.dqo_policy(policy_of(a), batch, beta=0.7, **PLAIN)[0]))
    close(slope(logp) / (2 * 0.7), -np.asarray(value), 1e-10)
    other = gradient_of(
        lambda a: jnp.sum(q.dqo_policy(policy_of(a), batch, beta=0.7, lam=0.5, **PLAIN)[0])
    )
    assert np.abs(other(logp) / 1.4 + value).max() > 1e-2


def n_step_mixture(soft, values, lam, end):
    """(1-lam) sum lam^(n-1) G^(n) + lam^(H-1) G^(H) of one response, from its definition."""
    H = len(soft)
    v = np.append(values, end)
    out = []
    for h in range(H):
        steps = H - h
        G = [sum(soft[h : h + n]) + v[h + n] for n in range(1, steps + 1)]
        mixed = (1 - lam) * sum(lam ** (n - 1) * G[n - 1] for n in range(1, steps))
        out.append(mixed + lam ** (steps - 1) * G[-1])
    return np.array(out)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_lambda_returns_are_the_mixture_of_n_step_returns(bootstrap):
    """With process rewards, tool output in mid-response, and rows that were cut off."""
    batch, logp = random_batch(
        finish_reason=[FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]
    )
    for lam in (0.0, 0.6, 1.0):
        got = op_by_op.lambda_returns(
            batch, batch.values, logprobs=logp, beta=0.3, lam=lam, bootstrap_truncated=bootstrap
        )
        for b in range(3):
            keep = np.asarray(batch.mask[b]) > 0
            r, ref, lp, v = (
                np.asarray(x[b])[keep]
                for x in (batch.rewards, batch.ref_logprobs, logp, batch.values)
            )
            end = v[-1] if bootstrap and b > 0 else 0.0
            want = n_step_mixture(r + 0.3 * (ref - lp), v, lam, end)
            close(np.asarray(got[b])[keep], want, 1e-10)
        assert float(jnp.max(jnp.abs(jnp.where(batch.mask > 0, 0.0, got)))) == 0


def test_bootstrap_reaches_both_one_step_losses():
    batch, _ = random_batch(finish_reason=[FinishReason.LENGTH] * 3)
    options = {"beta": 0.5, "one_step": True, **PLAIN}

    def at_end(x):
        return np.array([x[0, 6], x[1, 6], x[2, 4]])

    pairs = (
        (q.dqo_policy, policy_of(batch.old_logprobs), "dqo_residual_abs"),
        (q.dqo_value, batch.values, "dqo_value_residual"),
    )
    for loss, x, name in pairs:
        plain = loss(x, batch, **options)[0]
        cut = loss(x, batch, **options, bootstrap_truncated=True)[0]
        assert np.abs(at_end(plain) - at_end(cut)).min() > 1e-3, name
        close(plain[0, :6], cut[0, :6], 1e-12)


@pytest.mark.parametrize("level", ["trajectory", "suffix", "token", "off"])
def test_weights(level):
    batch, logp = random_batch()
    got = np.asarray(q.offline_weights(logp, batch.sampler_logprobs, batch, cap=1.5, level=level))
    for b in range(3):
        keep = np.asarray(batch.mask[b]) > 0
        ratio = np.asarray(logp - batch.sampler_logprobs)[b][keep]
        total = {
            "trajectory": np.full(ratio.shape, ratio.sum()),
            "suffix": np.cumsum(ratio[::-1])[::-1],
            "token": ratio,
            "off": np.zeros(ratio.shape),
        }[level]
        close(got[b][keep], np.minimum(np.exp(total), 1.5), 1e-10)
        assert (got[b][~keep] == 0).all()
    huge = q.offline_weights(logp + 1e3, batch.sampler_logprobs, batch, level=level)
    assert np.isfinite(huge).all() and float(huge.max()) <= math.e + 1e-6
    metrics = q.dqo_value(batch.values, batch, beta=0.5, is_level=level, is_cap=1.5)[1]
    capped = np.asarray(metrics["is_capped"])
    assert (level == "off") == (capped.sum() == 0)


def test_correction_off_is_the_plain_loss_and_a_source_is_named():
    batch, logp = random_batch()
    on = q.dqo_policy(policy_of(logp), batch, beta=0.5, behaviour="ref", is_cap=1e9)[0]
    off = q.dqo_policy(policy_of(logp), batch, beta=0.5, is_level="off")[0]
    weights = q.offline_weights(logp, batch.ref_logprobs, batch, cap=1e9)
    close(on, weights * off, 1e-10)
    bare = batch.replace(sampler_logprobs=None)
    close(q.dqo_policy(policy_of(logp), bare, beta=0.5, is_level="off")[0], off, 1e-12)
    with pytest.raises(InputError, match="sampler_logprobs"):
        q.dqo_policy(policy_of(logp), bare, beta=0.5)
    with pytest.raises(InputError, match="one of trajectory"):
        q.dqo_policy(policy_of(logp), batch, beta=0.5, is_level="tokens")
    with pytest.raises(InputError, match="lam"):
        q.dqo_policy(policy_of(logp), batch, beta=0.5, lam=1.5)


@pytest.mark.parametrize("one_step", [True, False])
def test_pushes_up_what_is_better_than_its_log_ratio_says(one_step):
    """sign(-dL/dlog pi) = sign(advantage - beta log-ratio), token by token."""
    batch, logp = random_batch(seed=3)
    beta, keep = 0.4, np.asarray(batch.mask) > 0
    push = -gradient_of(
        lambda a: jnp.sum(q.dqo_policy(policy_of(a), batch, beta=beta, one_step=one_step)[0])
    )(logp)
    v, r = np.asarray(batch.values), np.asarray(batch.rewards)
    G = np.asarray(op_by_op.lambda_returns(batch, batch.values, logprobs=logp, beta=beta, lam=1.0))
    later = v if one_step else G
    for b in range(3):
        at = np.flatnonzero(keep[b])
        following = np.append(later[b][at[1:]], 0.0)
        excess = (
            r[b][at] + following - v[b][at] - beta * np.asarray(logp - batch.ref_logprobs)[b][at]
        )
        np.testing.assert_array_equal(np.sign(push[b][at]), np.sign(excess))
    assert (np.asarray(push)[~keep] == 0).all()


def test_only_the_named_array_gets_a_gradient():
    """A loss of the policy moves no value, and a loss of the value no policy; targets are fixed."""
    batch, logp = random_batch()
    names = ("rewards", "ref_logprobs", "old_logprobs", "sampler_logprobs", "values", "entropy")

    def with_fields(loss, x, **options):
        return gradient_of(
            lambda fields: jnp.sum(loss(x, batch.replace(**fields), **options)[0]) * 1.0
        )({name: batch.__dict__[name] for name in names})

    cases = [
        (q.dqo_policy, policy_of(logp), {"beta": 0.5}),
        (q.dqo_policy, policy_of(logp), {"beta": 0.5, "one_step": True}),
        (q.dqo_value, batch.values, {"beta": 0.5, "lam": 0.7}),
        (q.dqo_value, batch.values, {"beta": 0.5, "one_step": True}),
        (q.dro_policy, policy_of(logp), {"tau": 0.5}),
        (q.dro_value, batch.values, {"tau": 0.5}),
    ]
    for loss, x, options in cases:
        assert "ref_logprobs" in spec(functools.partial(loss, **options)).reads
        for name, gradient in with_fields(loss, x, **options).items():
            assert not np.any(gradient), (loss.__name__, name)
    soft = gradient_of(lambda a: jnp.sum(q.soft_rewards(a, batch, beta=0.5)))(logp)
    weights = gradient_of(lambda a: jnp.sum(q.offline_weights(a, batch.ref_logprobs, batch)))(logp)
    assert not np.any(soft) and not np.any(weights)
    # Bootstrapping from the trained values themselves leaves d L / d V diagonal.
    row = jax.jacobian(lambda v: q.dqo_value(v, batch, beta=0.5, lam=0.7, **PLAIN)[0][0])
    jacobian = jax.jit(row)(batch.values)[:, 0]
    close(jacobian - np.diag(np.diag(jacobian)), np.zeros(49), 1e-12)
    assert np.abs(np.diag(jacobian)).sum() > 0


LOSSES = [
    (q.dqo_policy, {"beta": 0.5, "lam": 0.8}),
    (q.dqo_policy, {"beta": 0.5, "one_step": True, "is_level": "suffix"}),
    (q.dqo_value, {"beta": 0.5, "lam": 0.8, "is_level": "token"}),
    (q.dqo_value, {"beta": 0.5, "one_step": True}),
    (q.dro_policy, {"tau": 0.5}),
    (q.dro_value, {"tau": 0.5}),
]


def input_of(loss, logp, batch):
    return policy_of(logp) if "policy" in loss.__name__ else batch.values


@pytest.mark.parametrize("loss,options", LOSSES)
def test_garbage_off_the_mask_is_never_read(loss, options):
    batch, logp = random_batch()
    names = ("rewards", "ref_logprobs", "old_logprobs", "sampler_logprobs", "values", "entropy")
    bad = np.where(np.asarray(batch.mask) > 0, 0.0, np.nan)
    dirty = batch.replace(**{name: np.asarray(batch.__dict__[name]) + bad for name in names})

    def run(b, x):
        def total(x):
            return jnp.sum(loss(input_of(loss, x, b.replace(values=x)), b, **options)[0])

        return value_and_gradient(total)(x)

    clean, spoilt = (run(b, x) for b, x in ((batch, logp), (dirty, np.asarray(logp) + bad)))
    close(clean[0], spoilt[0], 1e-12)
    close(clean[1], spoilt[1], 1e-12)


@pytest.mark.parametrize("loss,options", LOSSES[:4])
def test_packed_rows_are_the_rows_they_hold(loss, options):
    batch, logp = random_batch()
    size = batch.tokens.shape[1]
    flat = {
        name: value.reshape(1, -1)
        for name in batch.__dataclass_fields__
        if (value := batch.__dict__[name]) is not None
    }
    flat["segment_ids"] = np.repeat(np.arange(1, 4, dtype=np.int32), size)[None]
    packed = Batch(**flat)
    one = loss(input_of(loss, logp, batch), batch, **options)[0]
    other = loss(input_of(loss, logp.reshape(1, -1), packed), packed, **options)[0]
    close(other, np.ravel(one), 1e-10)


def test_tool_output_changes_nothing_around_it():
    batch, logp = random_batch()
    keep = np.flatnonzero(np.asarray(batch.mask[1]) > 0)
    short = jax.tree.map(lambda x: x[1:2, keep] if x.ndim == 2 else x[1:2], jax.device_get(batch))
    logp = np.asarray(logp)
    for loss, options in LOSSES[:4]:
        whole = loss(input_of(loss, logp, batch), batch, **options)[0]
        part = loss(input_of(loss, logp[1:2, keep], short), short, **options)[0]
        close(np.asarray(whole)[1, keep], part, 1e-10)


def test_calibration_metrics():
    batch, logp = random_batch()
    metrics = q.dqo_policy(policy_of(logp), batch, beta=0.5)[1]
    close(metrics["value_at_prompt"], batch.values[:, 1])
    close(metrics["return_at_prompt"], jnp.sum(batch.rewards * batch.mask, axis=1))
    close(metrics["ref_kl"], (logp - batch.ref_logprobs) * batch.mask)
    # The parts of explained variance add up to it.
    metrics = q.dqo_value(batch.values, batch, beta=0.5, **PLAIN)[1]
    n = float(jnp.sum(batch.mask))
    mean = {k: float(jnp.sum(x * batch.mask)) / n for k, x in metrics.items() if x.ndim == 2}
    spread = mean["dqo_target_square"] - mean["dqo_target"] ** 2
    left = mean["dqo_value_residual_square"] - mean["dqo_value_residual"] ** 2
    target = np.asarray(metrics["dqo_target"])[np.asarray(batch.mask) > 0]
    values = np.asarray(batch.values)[np.asarray(batch.mask) > 0]
    assert 1 - left / spread == pytest.approx(1 - np.var(target - values) / np.var(target))


# -- DRO
# ------------------------------------------------------------------------------------------------


def dro_example():
    x = worked_example("dro")
    i = x["inputs"]
    mask = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1]])
    ratio = np.zeros((3, 3))
    ratio[:, 1] = np.array(i["logratio"]) - np.array([0.5, 0.0, -1.0])
    ratio[:, 2] = [0.5, 99.0, -1.0]  # 99 stands at mask 0
    rewards = np.zeros((3, 3))
    rewards[:, 1] = i["reward"]
    values = np.full((3, 3), 77.0)
    values[:, 1] = i["value"]
    batch = response_batch(
        mask,
        rewards=rewards,
        ref_logprobs=np.full((3, 3), -1.0),
        old_logprobs=ratio - 1,
        values=values,
    )
    return x, batch, jnp.asarray(ratio - 1), jnp.asarray(i["value"], F64)


def test_dro_example():
    x, batch, logp, value = dro_example()
    want, tau = x["outputs"], x["params"]["tau"]
    for kind in ("exact", "rescaled"):

        def total(a):
            return jnp.mean(
                q.dro_policy(policy_of(a), batch, value, tau=tau, gradient=kind)[0]  # noqa: B023
            )

        loss, grad = value_and_gradient(total)(logp)
        close(loss, want["loss"])
        close(grad[:, 1], want[f"grad_logratio_{kind}"])
        close(grad[:, 2], np.where(np.asarray(batch.mask[:, 2]) > 0, grad[:, 1], 0.0), 1e-12)
    loss, grad = value_and_gradient(lambda v: jnp.mean(q.dro_value(v, batch, tau=tau)[0]))(value)
    close(loss, want["loss"])
    close(grad, want["grad_value"])
    metrics = q.dro_policy(policy_of(logp), batch, value, tau=tau)[1]
    close(metrics["dro_residual_abs"], np.abs(want["residual"]))


def test_dro_reads_the_value_of_the_prompt():
    x, batch, logp, value = dro_example()
    tau = x["params"]["tau"]
    one = q.dro_policy(policy_of(logp), batch, value, tau=tau)[0]
    close(q.dro_policy(policy_of(logp), batch, tau=tau)[0], one, 1e-12)
    gradient = gradient_of(lambda v: jnp.sum(q.dro_value(v, batch, tau=tau)[0]))(batch.values)
    assert (np.asarray(gradient)[:, 1] != 0).all() and not np.any(np.asarray(gradient)[:, [0, 2]])
    scored = batch.replace(rewards=None, scores=jnp.sum(batch.rewards * batch.mask, axis=1))
    close(q.dro_policy(policy_of(logp), scored, value, tau=tau)[0], one, 1e-12)
    with pytest.raises(InputError, match="tau"):
        q.dro_policy(policy_of(logp), batch, value, tau=0.0)


# -- learning
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_step", lanes([False], [True]))
def test_offline_learning_finds_the_optimum_of_the_tree(one_step):
    """Tables of logits and values, the four trajectories as data, no sampling: pi*, V*."""
    beta, batch, best, best_values = tree()
    first, second = np.repeat([0, 1], 2), np.tile([0, 1], 2)
    options = {"beta": beta, "one_step": one_step, **PLAIN}

    def read(logits):
        table = jax.nn.log_softmax(logits, axis=-1)  # nodes: root, left, right
        logp = jnp.stack([table[0, first], table[first + 1, second]], axis=1)
        entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)
        return logp, jnp.stack([jnp.broadcast_to(entropy[0], (4,)), entropy[first + 1]], axis=1)

    def spread(v):
        return jnp.stack([jnp.broadcast_to(v[0], (4,)), v[first + 1]], axis=1)

    def losses(logits, v):
        logp, entropy = read(logits)
        now = batch.replace(
            values=spread(v), old_logprobs=jax.lax.stop_gradient(logp), entropy=entropy
        )
        # Trajectories weighed by the policy: the target of V is an expectation over it.
        weight = jax.lax.stop_gradient(jnp.exp(jnp.sum(logp, axis=1)))[:, None]
        policy = jnp.sum(q.dqo_policy(PolicyOutputs(logp, entropy), now, **options)[0])
        value = jnp.sum(weight * q.dqo_value(spread(v), now, **options)[0])
        return policy, value

    @jax.jit
    def learn(logits, v):
        def step(_, state):
            logits, v = state
            return (
                logits - 0.3 * jax.grad(lambda x: losses(x, v)[0])(logits),
                v - 0.1 * jax.grad(lambda x: losses(logits, x)[1])(v),
            )

        return jax.lax.fori_loop(0, 3000, step, (logits, v))

    start = (jnp.zeros((3, 2), F64), jnp.zeros((3,), F64))
    logits, v = learn(*start)
    close(read(logits)[0], np.ravel(best), 1e-3)
    close(spread(v), np.ravel(best_values), 1e-3)
    before, after = losses(*start), losses(logits, v)
    assert float(after[0]) < 1e-5 < float(before[0])
    # The entropy form keeps the variance of one action's reward.
    assert float(after[1]) < float(before[1]) and (one_step or float(after[1]) < 1e-5)
