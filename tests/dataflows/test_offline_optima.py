"""Where offline losses end: ref e^(r/beta) / Z, on bandits and trees small enough to know it.

The parameters are the logits and values themselves; the losses and the loop of steps are those of
training. Batches are exact: every action or leaf occurs, weighed as it would in endless data.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_checks.common import response_batch

from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference import dpo
from rljax.losses.q_function import dqo_policy, dqo_value, dro_policy, dro_value

CLOSE = 0.02  # of every probability
REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
REWARD = np.array([0.0, 1.0, 0.5, 1.5])


def optimum(reference, reward, beta: float):
    weight = reference * np.exp(np.asarray(reward) / beta)
    return weight / weight.sum()


def descend(loss, params, *, steps: int = 1500, lr: float = 0.02):
    optimizer = optax.adam(optax.cosine_decay_schedule(lr, steps))

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, length=steps)[0][0]

    return run(params)


def one_token(actions: int, **fields):
    """A row per action: the action is its only token."""
    return response_batch(np.ones((actions, 1)), jnp.float32, **fields)


def choices(logits):
    """The policy of a bandit, each row being one action."""
    logp = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(logp) * logp)
    return PolicyOutputs(logp[:, None], jnp.full((len(logp), 1), entropy))


def far(found, wanted) -> float:
    return float(np.abs(np.asarray(found) - wanted).max())


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_dpo_on_exact_preferences(beta):
    """P(a beats b) = sigmoid(r_a - r_b): both orders of every pair, each with its probability."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    rows = np.array(pairs).reshape(-1)
    share = np.array([1 / (1 + math.exp(REWARD[b] - REWARD[a])) for a, b in pairs])
    log_ref = np.log(REFERENCE)[rows]
    batch = one_token(len(rows), ref_logprobs=log_ref[:, None])

    def loss(logits, sign=1.0):
        logp = jax.nn.log_softmax(logits)[rows][:, None]
        value, _ = dpo(PolicyOutputs(logp, jnp.zeros_like(logp)), batch, beta=beta)
        return sign * jnp.mean(share * value)

    wanted = optimum(REFERENCE, REWARD, beta)
    start = jnp.log(jnp.asarray(REFERENCE, jnp.float32))
    assert far(REFERENCE, wanted) > 0.15  # it has somewhere to go
    assert far(jax.nn.softmax(descend(loss, start)), wanted) < CLOSE
    gone = jax.nn.softmax(descend(functools.partial(loss, sign=-1.0), start, steps=200))
    assert far(gone, wanted) > 0.2


@pytest.mark.parametrize("gradient", ["rescaled", "exact"])
@pytest.mark.parametrize("data", [REFERENCE, np.full(4, 0.25)], ids=["of_reference", "of_others"])
def test_dro_whoever_wrote_the_data(data, gradient):
    tau = 0.7
    batch = one_token(4, ref_logprobs=np.log(REFERENCE)[:, None], rewards=REWARD[:, None])

    def loss(params):
        policy = choices(params["logits"])
        fixed = jax.lax.stop_gradient(params)

        def values(value):
            return jnp.full((4, 1), 1.0) * value

        at = batch.replace(
            values=values(fixed["value"]), old_logprobs=choices(fixed["logits"]).logprobs
        )
        learn, _ = dro_policy(policy, at, tau=tau, gradient=gradient)
        value, _ = dro_value(values(params["value"]), at, tau=tau)
        return jnp.sum(jnp.asarray(data) * (learn + value))

    start = {"logits": jnp.log(jnp.asarray(REFERENCE, jnp.float32)), "value": jnp.zeros(())}
    found = descend(loss, start)
    wanted = optimum(REFERENCE, REWARD, tau)
    assert far(jax.nn.softmax(found["logits"]), wanted) < CLOSE
    value = tau * math.log(np.sum(REFERENCE * np.exp(REWARD / tau)))
    assert float(found["value"]) == pytest.approx(value, abs=CLOSE)


# -- DQO on a tree of two choices: three actions, then two --

FIRST = np.array([0.5, 0.3, 0.2])
SECOND = np.array([[0.7, 0.3], [0.5, 0.5], [0.2, 0.8]])
LEAVES = np.array([[1.0, 0.0], [0.5, -1.0], [0.0, 1.5]])


def tree_optimum(beta: float):
    """(policy of the first choice, of the second, V of the root, V of the nodes)."""
    nodes = beta * np.log(np.sum(SECOND * np.exp(LEAVES / beta), axis=1))
    root = beta * math.log(np.sum(FIRST * np.exp(nodes / beta)))
    second = np.stack([optimum(s, r, beta) for s, r in zip(SECOND, LEAVES, strict=True)])
    return optimum(FIRST, nodes, beta), second, root, nodes


PATHS = [(a, b) for a in range(3) for b in range(2)]


def tree_rows(params):
    """Log-probs, entropies and values of the six trajectories, two tokens each: [6, 2]."""
    first = jax.nn.log_softmax(params["first"])
    second = jax.nn.log_softmax(params["second"], axis=-1)

    def entropy(logp):
        return -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    a, b = np.array(PATHS).T
    logp = jnp.stack([first[a], second[a, b]], axis=1)
    spread = jnp.stack([jnp.broadcast_to(entropy(first), (6,)), entropy(second)[a]], axis=1)
    values = jnp.stack([jnp.broadcast_to(params["root"], (6,)), params["nodes"][a]], axis=1)
    return PolicyOutputs(logp, spread), values


@pytest.mark.parametrize(
    "options",
    [dict(lam=1.0), dict(lam=0.5), dict(one_step=True)],
    ids=["lambda_1", "lambda_0.5", "one_step"],
)
def test_dqo_on_a_tree(options):
    """Data of the reference, weighed back to the policy token by token or path by path."""
    beta = 0.5
    a, b = np.array(PATHS).T
    log_ref = np.log(np.stack([FIRST[a], SECOND[a, b]], axis=1))
    rewards = np.stack([np.zeros(6), LEAVES[a, b]], axis=1)
    share = jnp.asarray(FIRST[a] * SECOND[a, b], jnp.float32)[:, None]
    batch = response_batch(np.ones((6, 2)), jnp.float32, ref_logprobs=log_ref, rewards=rewards)
    options = dict(beta=beta, behaviour="ref", is_cap=1e6, **options)

    def loss(params):
        policy, values = tree_rows(params)
        fixed, fixed_values = tree_rows(jax.lax.stop_gradient(params))
        at = batch.replace(values=fixed_values, old_logprobs=fixed.logprobs, entropy=fixed.entropy)
        learn, _ = dqo_policy(policy, at, **options)
        value, _ = dqo_value(values, at, **options)
        return jnp.sum(share * (learn + value))

    start = {
        "first": jnp.log(jnp.asarray(FIRST, jnp.float32)),
        "second": jnp.log(jnp.asarray(SECOND, jnp.float32)),
        "root": jnp.zeros(()),
        "nodes": jnp.zeros(3),
    }
    found = descend(loss, start, steps=4000)
    first, second, root, nodes = tree_optimum(beta)
    assert far(FIRST, first) > 0.05 and far(SECOND, second) > 0.15
    assert far(jax.nn.softmax(found["first"]), first) < CLOSE
    assert far(jax.nn.softmax(found["second"], axis=-1), second) < CLOSE
    assert float(found["root"]) == pytest.approx(root, abs=CLOSE)
    np.testing.assert_allclose(found["nodes"], nodes, atol=CLOSE)
