"""PRIME: an implicit reward model learns beside the policy, and rewards every token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_runs import Shared, preset_config

from rljax.arrays import fetch
from rljax.dataflows.prime import prime
from rljax.errors import InputError
from rljax.losses.implicit_reward import implicit_reward_classification
from rljax.losses.policy import PolicyOutputs
from rljax.setup import initial_params
from rljax.validation import validate

BETA = 0.05


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The roles, the batch and the algorithm of a step: the implicit model has left the
    reference."""
    shared = Shared(tmp_path_factory.mktemp("prime"))
    with shared.run(config := preset_config("prime")) as run:
        run.begin(run.setup.main, initial_params(config, run.setup.model))
        implicit = run.roles["implicit"]
        left = jax.tree.map(lambda x: 1.1 * x, implicit.state.params)
        state = dataclasses.replace(implicit.state, params=left)
        roles = {**run.roles, "implicit": dataclasses.replace(implicit, state=state)}
        batch, _ = run.source.next(0, roles)
        yield roles, batch, run.setup.algorithm
    shared.close()


def called(step, batch=None, **options):
    """The page's roles and metrics, and the batch that its advantage read."""
    roles, sampled, cfg = step

    @jax.jit  # op by op, every operation would compile by itself
    def page(batch, roles):
        seen = {}

        def reading(rewarded):
            seen["batch"] = rewarded
            seen["advantages"] = cfg.advantage(rewarded)
            return seen["advantages"]

        new, metrics = prime.page(batch, None, cfg.replace(advantage=reading), **roles, **options)
        return new, metrics, seen

    given = {name: roles[name] for name in ("actor", "implicit", "reference")}
    return page(sampled if batch is None else batch, given)


def rated(role, batch, reference) -> np.ndarray:
    logprobs = jax.jit(lambda role, batch: role.logprobs(batch))
    gap = logprobs(role, batch) - logprobs(reference, batch)
    return np.where(np.asarray(batch.mask) > 0, BETA * np.asarray(gap), 0.0)


@pytest.mark.slow
def test_tokens_are_rewarded_before_or_after_the_models_step(step):
    roles, batch, _ = step
    right = jnp.arange(len(batch.scores)) % 2  # half of each group: all are inside of the range
    batch = batch.replace(scores=right.astype(jnp.float32))
    for update in ("before", "after"):
        new, metrics, seen = called(step, batch, update=update)
        by = new["implicit"] if update == "before" else roles["implicit"]
        process = seen["batch"].process_rewards
        np.testing.assert_allclose(process, rated(by, batch, roles["reference"]), atol=1e-6)
        assert np.abs(process).max() > 1e-5 and metrics["implicit/grad_norm"] > 0
        # What is logged is the cross-entropy of the outcomes, over the rows that are kept.
        kept = np.asarray(seen["batch"].mask).any(axis=1)
        ours = batch.replace(ref_logprobs=roles["reference"].logprobs(batch))
        policy = PolicyOutputs(roles["implicit"].logprobs(batch), jnp.zeros_like(batch.mask))
        loss, _ = implicit_reward_classification(policy, ours, beta=BETA)
        np.testing.assert_allclose(
            metrics["implicit/loss"], np.asarray(loss)[kept].mean(), rtol=1e-4
        )


@pytest.mark.slow
def test_the_share_of_the_process_by_hand(step):
    """Distances from the mean of the prompt's samples, of q and of the outcomes."""
    roles, batch, _ = step
    _, metrics, seen = called(step, update="after")
    q = rated(roles["implicit"], batch, roles["reference"]).sum(axis=1)
    apart = [
        sum(np.abs(x[rows] - x[rows].mean()).sum() for rows in np.arange(len(x)).reshape(-1, 8))
        for x in (q, np.asarray(batch.scores, np.float64))
    ]
    share = apart[0] / sum(apart)
    assert 0 < share < 1 and metrics["implicit/process_share"] == pytest.approx(share, rel=1e-4)


def test_prompts_outside_of_the_range_train_neither_model(step):
    """All of their rows right: no step of either."""
    roles, batch, _ = step
    right = batch.replace(scores=jnp.ones_like(batch.scores))
    new, metrics, _ = called(step, right)
    assert metrics["implicit/empty_steps"] == 1 == metrics["empty_steps"]
    for name in ("actor", "implicit"):
        before, after = (fetch(role.state.params) for role in (roles[name], new[name]))
        jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
def test_a_group_that_is_all_right_still_learns_from_its_process(step):
    """Without the filter: its outcomes have no advantage, its tokens have."""
    roles, batch, cfg = step
    plain = (roles, batch, cfg.replace(baseline_filters=()))
    first = np.asarray(batch.group) == 0
    scores = jnp.where(first, 1.0, batch.scores)
    last = batch.rewards != 0
    batch = batch.replace(scores=scores, rewards=jnp.where(last, scores[:, None], 0.0))
    _, _, seen = called(plain, batch)
    policy = np.asarray(batch.mask[first]) > 0
    assert np.std(np.asarray(seen["advantages"])[first][policy]) > 1e-4


def test_what_it_needs_is_asked_for_by_name():
    config = preset_config("prime")
    config.rollouts.max_staleness = 1
    with pytest.raises(InputError, match="max_staleness.*one version"):
        validate(config)
    config = preset_config("prime")
    config.roles = ()
    with pytest.raises(InputError, match="argument: 'implicit'"):
        validate(config)
