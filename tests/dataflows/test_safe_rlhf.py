"""Safe-RLHF: a reward under a constraint on a cost, weighed by a multiplier that learns."""

import ast
import difflib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import worked_example
from golden_checks.common import response_batch
from preset_runs import Shared, preset_config

from rljax import setup as build
from rljax.advantages import gae
from rljax.advantages.returns import lagrangian
from rljax.dataflows import ppo, safe_rlhf
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.steps import (
    compute_advantages,
    shape_rewards,
    use_costs_as_rewards,
    use_lagrangian_advantage,
)
from rljax.learn import Steps
from rljax.roles import Critic, Multiplier

# -- formulas


def multiplier(initial=1.0, *, lr=0.1, threshold=0.0, maximum=5.0, window=1) -> Multiplier:
    state = {"log": jnp.log(initial), "costs": jnp.zeros(window), "seen": jnp.zeros(())}
    return Multiplier(state, lr, threshold, maximum)


renewed = jax.jit(Multiplier.update)


def episodes(costs, live=None):
    """A row for each cost, at its second of three tokens, which is its last policy token."""
    live = np.ones(len(costs)) if live is None else np.asarray(live)
    mask = live[:, None] * [[1, 1, 0]]
    at_last = np.where([[0, 1, 0]], np.asarray(costs, float)[:, None], np.nan)
    return response_batch(mask, jnp.float32, costs=np.where([[1, 0, 0]], 0.0, at_last))


def test_worked_example_of_the_combined_advantage():
    example = worked_example("safe_rlhf.adv")
    x, p = example["inputs"], example["params"]
    found = lagrangian(*(jnp.asarray(x[n]) for n in ("adv_reward", "adv_cost")), p["lam"])
    np.testing.assert_allclose(found, example["outputs"]["adv"], atol=1e-6)


def test_worked_example_of_the_multiplier():
    example = worked_example("safe_rlhf.lambda")
    p = example["params"]
    role = multiplier(
        p["lambda_init"], lr=p["lr"], threshold=p["threshold"], maximum=p["lambda_max"]
    )
    for cost, want in zip(
        example["inputs"]["episode_cost"], example["outputs"]["lambda_after"], strict=True
    ):
        role, metrics = renewed(role, episodes([cost]))
        assert float(role.value) == pytest.approx(want, rel=1e-5)
        assert float(metrics["multiplier/lambda"]) == float(role.value)


def test_the_multiplier_waits_for_a_window_of_episodes():
    """Five episodes: failed ones do not count, the oldest fall out."""
    role = multiplier(2.0, window=5, threshold=0.5, lr=0.3)
    role, metrics = renewed(role, episodes([1.0, 9.0, -3.0], live=[1, 0, 1]))
    assert float(role.value) == pytest.approx(2.0) and float(role.state["seen"]) == 2
    assert float(metrics["cost/mean"]) == -1 == float(metrics["multiplier/window_cost"])
    assert float(metrics["cost/unsafe_fraction"]) == 0.5
    role, _ = renewed(role, episodes([4.0, 5.0]))
    assert float(role.value) == pytest.approx(2.0)
    role, metrics = renewed(role, episodes([7.0, 6.0, 8.0], live=[1, 0, 1]))
    window = [-3.0, 4.0, 5.0, 7.0, 8.0]
    np.testing.assert_array_equal(role.state["costs"], window)
    want = np.log(2.0) + 0.3 * 2.0 * (np.mean(window) - 0.5)
    assert float(role.state["log"]) == pytest.approx(min(want, np.log(5.0)), rel=1e-6)
    assert float(metrics["multiplier/window_cost"]) == pytest.approx(np.mean(window))
    role, _ = renewed(role, episodes(np.arange(9.0)))  # more than the window at once
    np.testing.assert_array_equal(role.state["costs"], [4, 5, 6, 7, 8])
    before = float(role.value)
    role, _ = renewed(
        role, episodes([0.0, 0.0], live=[0, 0])
    )  # nothing new, and a step all the same
    assert float(role.value) == pytest.approx(min(5.0, before * np.exp(0.3 * before * 5.5)))


def test_a_multiplier_of_zero_stays_zero():
    role, _ = renewed(multiplier(0.0), episodes([30.0]))
    assert float(role.value) == 0 and not np.isnan(float(role.state["log"]))


def algorithm(advantage, **fields) -> Algorithm:
    nothing = dict(policy_loss=None, value_loss=None, reduction=None, steps=Steps(1, 1))
    return Algorithm(advantage=advantage, **nothing, **fields)


def weighed(batch, cfg, role, **options):
    cfg = use_lagrangian_advantage(cfg, role, **{"kl_split": 1.0, "clip": 50.0, **options})
    return compute_advantages(batch, shape_rewards(batch, cfg), cfg)


def rewards_alone(seen: list):
    """An advantage that is the rewards themselves, which it keeps."""

    def advantage(batch):
        seen.append(batch.rewards)
        return batch.rewards, batch.rewards

    return advantage


def test_worked_example_of_kl_in_reward_and_cost():
    example = worked_example("safe_rlhf.kl_shaping")
    x, p, want = (example[k] for k in ("inputs", "params", "outputs"))
    kl, seen = np.asarray([x["kl"]]), []
    last = np.arange(kl.shape[1]) == kl.shape[1] - 1
    batch = response_batch(
        np.ones_like(kl),
        jnp.float32,
        old_logprobs=kl - 2,
        ref_logprobs=np.full_like(kl, -2.0),
        rewards=x["reward"] * last[None],
        costs=x["cost"] * last[None],
    )
    cfg = algorithm(rewards_alone(seen), kl_in_reward=p["beta"])
    found = weighed(batch, cfg, multiplier(2.0), kl_split=p["split"], clip=p["clip"])
    np.testing.assert_allclose(seen[0][0], want["token_reward"], atol=1e-6)
    np.testing.assert_allclose(seen[1][0], want["token_cost"], atol=1e-6)
    np.testing.assert_allclose(found.advantages[0], want["combined_lambda2"], atol=1e-6)
    np.testing.assert_allclose(found.returns[0], want["token_reward"], atol=1e-6)
    np.testing.assert_allclose(found.cost_returns[0], want["token_cost"], atol=1e-6)
    # Sums beyond the clip are held there, of rewards and costs alike.
    weighed(batch.replace(costs=batch.costs * 1e3), cfg, multiplier(2.0), clip=1.25)
    assert float(seen[2][0, -1]) == 1.25 and float(seen[3][0, -1]) == -1.25


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("split", [1.0, 0.5])
def test_kl_weighs_the_same_for_every_multiplier(lam, split):
    """The KL takes kl_split beta of itself from the combined advantage, whatever lambda is."""
    rng = np.random.default_rng(0)
    fields = {
        name: rng.normal(size=(3, 6))
        for name in ("rewards", "costs", "values", "cost_values", "old_logprobs", "ref_logprobs")
    }
    batch = response_batch(rng.random((3, 6)) > 0.2, jnp.float32, **fields)
    estimate = functools.partial(gae, lam=0.9, whiten=False)
    without = weighed(batch, algorithm(estimate), multiplier(lam))
    with_kl = weighed(batch, algorithm(estimate, kl_in_reward=0.7), multiplier(lam), kl_split=split)
    kl = batch.replace(
        rewards=batch.old_logprobs - batch.ref_logprobs, values=jnp.zeros_like(batch.values)
    )
    np.testing.assert_allclose(
        without.advantages - with_kl.advantages, split * 0.7 * estimate(kl)[0], atol=1e-6
    )
    # Each critic learns the returns of its own rewards.
    want = estimate(use_costs_as_rewards(batch))[1]
    np.testing.assert_allclose(without.cost_returns, want, atol=1e-6)


# -- the page


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The roles and the batch of a step, and the algorithm of the preset."""
    shared = Shared(tmp_path_factory.mktemp("safe_rlhf"))
    config = preset_config("safe_rlhf")
    config.batch.prompts_per_step = config.batch.sequences_per_optimizer_step = 16
    config.roles = (config.roles[0], "multiplier=lagrange_multiplier(window=16)")
    with shared.run(config) as run:
        run.begin(run.setup.main, build.initial_params(config, run.setup.model))
        batch, metrics = run.source.next(0, run.roles)
        yield run, batch, metrics
    shared.close()


@pytest.mark.slow
def test_costs_come_with_the_rewards(step):
    """At the last token: 1 where more than a letter was said, else -1."""
    run, batch, metrics = step
    ends = np.asarray(batch.mask).cumsum(axis=1) == np.asarray(batch.mask).sum(1, keepdims=True)
    last = ends & (np.asarray(batch.mask) > 0)
    costs = np.asarray(batch.costs)
    assert (costs[~last] == 0).all() and set(costs[last]) == {1.0, -1.0}
    said = [
        run.setup.tokenizer.decode(t[m > 0].tolist())
        for t, m in zip(np.asarray(batch.tokens), np.asarray(batch.mask), strict=True)
    ]
    np.testing.assert_array_equal(costs[last] > 0, [len(text) > 1 for text in said])
    assert metrics["reward/part/cost"] == pytest.approx(costs[last].mean())


@pytest.mark.slow
def test_each_critic_has_its_returns_and_the_actor_both(step):
    run, batch, _ = step
    cfg, keep = run.setup.algorithm, np.asarray(batch.mask) > 0
    roles = {n: x for n, x in run.roles.items() if n in inspect.signature(safe_rlhf).parameters}
    assert set(roles) == {"actor", "critic", "cost_critic", "multiplier", "reference"}
    advantages, losses = {}, {}
    for name, critic in (("rewards", "critic"), ("costs", "cost_critic")):
        values = jax.jit(Critic.values)(roles[critic], batch)
        own = batch.replace(rewards=getattr(batch, name), values=values)
        advantages[name], returns = map(np.asarray, gae(own, lam=0.95, whiten=False))
        losses[critic] = np.where(keep, 0.5 * (values - returns) ** 2, 0.0).sum() / keep.sum()
    window = np.asarray(batch.costs).sum(axis=1).mean()
    new, metrics = safe_rlhf(batch, jax.random.key(0), cfg, **roles)  # no KL yet: log-probs agree
    assert float(metrics["ref_kl/k3"]) == 0
    lam = float(new["multiplier"].value)
    assert lam == pytest.approx(np.exp(0.1 * window), rel=1e-5)  # it moves before it weighs
    want = (advantages["rewards"] - lam * advantages["costs"]) / (1 + lam)
    assert float(metrics["advantage/mean"]) == pytest.approx(want[keep].mean(), abs=1e-6)
    assert float(metrics["advantage/std"]) == pytest.approx(want[keep].std(), rel=1e-4)
    assert float(metrics["loss"]) == pytest.approx(-want[keep].mean(), abs=1e-5)
    assert float(metrics["cost/mean"]) == pytest.approx(window)
    for critic, loss in losses.items():
        assert float(metrics[f"{critic}/vf_loss"]) == pytest.approx(loss, rel=1e-4)


# -- size


def page_lines(program) -> list[str]:
    """The statements of a page, one in a line, docstring aside: their layout does not count."""
    (page,) = ast.parse(inspect.getsource(program.page)).body
    if isinstance(page.body[0], ast.Expr):
        del page.body[0]
    return [line.strip() for line in ast.unparse(page).splitlines()]


def test_ppo_becomes_safe_rlhf_in_twenty_lines():
    """Lines that go and lines that come."""
    compared = difflib.ndiff(*(page_lines(program) for program in (ppo, safe_rlhf)))
    changed = [line for line in compared if line.startswith(("+ ", "- "))]
    assert 10 < len(changed) <= 20, changed
    assert not set(page_lines(safe_rlhf)) <= set(page_lines(ppo))
    for program in (ppo, safe_rlhf):  # all of it: a page calls no function of its own file
        module = ast.parse(inspect.getsource(inspect.getmodule(program.page)))
        assert sum(isinstance(node, ast.FunctionDef) for node in module.body) == 1
