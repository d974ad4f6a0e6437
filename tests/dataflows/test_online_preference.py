"""Preference learning from samples: pairs, refreshed references, games, mixtures, and that each
learns."""

import copy
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from preset_runs import Shared, mean, preset_config

from rljax import setup as build
from rljax.components import resolve
from rljax.config import NAMESPACES, AlgorithmConfig
from rljax.errors import InputError
from rljax.rollout import AgainstOpponent, GeometricMixture, sampled_by_actor
from rljax.sampler import SecondModel, generate
from rljax.setup.dry_run import check_fields_read
from rljax.shaping.pairs import bradley_terry, choose_pairs, higher_wins, win_probabilities
from rljax.validation import validate

LOSSES = {
    "online_dpo()": "dpo(beta=0.1)",
    "online_dpo(rejected='random', refresh_every=4)": "dpo(beta=0.1)",
    "sppo()": "sppo(eta=10.0)",
    "xpo()": "xpo(beta=0.1, alpha=1e-4)",
    "nash_md(preference='bradley_terry(scale=4.0)')": "nash_md(beta=0.02)",
}


def mark_of(dataflow: str) -> float:
    """Mean reward of the last five of 40 steps; it begins near 0.3. Nash-MD learns from half of the
    rows, one at a time."""
    return 0.65 if dataflow.startswith("nash_md") else 0.85


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("online"))
    yield runs
    runs.close()


def config_of(dataflow: str, seed: int = 0, **changes):
    config = preset_config("grpo", seed)
    config.dataflow, config.steps = dataflow, 40
    other = "nash_md(beta=0.02)" if dataflow.startswith("nash_md") else "dpo(beta=0.1)"
    config.algorithm = AlgorithmConfig(preference_loss=LOSSES.get(dataflow, other))
    config.actor_optimizer.lr = 4e-3
    for name, value in changes.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        setattr(node, path[-1], value)
    return config


def started(shared, config):
    run = shared.run(config)
    seed = config.seed
    run.begin(run.setup.main, jax.device_put(shared.start(seed), run.setup.model.shardings()))
    return run


def learned(shared, config, steps: int, sign: float = 1.0):
    """Mean reward of the policy's own samples, step by step, and the last step's metrics."""
    config.actor_optimizer.lr *= sign
    run = started(shared, config)
    rows = [run.step() for _ in range(steps)]
    assert not sum(r["skipped_steps"] for r in rows)
    return [float(r["reward/mean"]) for r in rows], rows[-1]


# -- learning --

QUICK = ("online_dpo()",)  # the slow lane has the others, on three seeds


@pytest.mark.slow
@pytest.mark.parametrize("dataflow", lanes(QUICK, [name for name in LOSSES if name not in QUICK]))
def test_the_reward_rises(shared, dataflow):
    rewards, last = learned(shared, config_of(dataflow), 40)
    assert mean(rewards[:2]) < 0.5 and mean(rewards[-5:]) > mark_of(dataflow), rewards
    # The reference of sppo() is the policy that sampled.
    assert abs(last["ref_kl/k1"]) < 1e-5 if dataflow == "sppo()" else last["ref_kl/k1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dataflow", LOSSES)
def test_the_reward_rises_on_other_seeds(shared, dataflow, seed):
    rewards, _ = learned(shared, config_of(dataflow, seed), 40)
    assert mean(rewards[-5:]) > mark_of(dataflow), rewards


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataflow", lanes(["online_dpo()"], ["nash_md(preference='higher_wins()')"])
)
def test_with_its_sign_flipped_it_does_not(shared, dataflow):
    rewards, _ = learned(shared, config_of(dataflow), 12, sign=-1.0)
    assert mean(rewards[-3:]) < 0.45, rewards


@pytest.mark.slow
def test_a_game_tells_whose_sample_won(shared):
    """As it stands the loss pushes what the policy wrote up where it won: with the two confused,
    XPO's bonus rewards what the reference writes."""
    config = config_of("xpo()", algorithm__preference_loss="xpo(beta=0.1, alpha=0.5)")
    run = started(shared, config)
    run.step()
    first = run.step()
    assert 0 < first["pair/policy_won_fraction"] < 1 and first["exploration"] < 0
    reference = run.roles["reference"]
    prompts = run.source.draw(8)
    theirs = reference.generate(prompts, jax.random.key(1), run.setup.rollouts.sampling, n=4)

    def likelihood():
        logps = run.roles["actor"].logprobs(theirs)
        return float(jnp.sum(jnp.where(theirs.mask > 0, logps, 0.0)) / jnp.sum(theirs.mask))

    before = likelihood()
    for _ in range(5):
        run.step()
    assert likelihood() < before - 0.2


# -- pairs --


def test_pairs_by_hand():
    scores = jnp.array([[0.0, 1.0, 3.0], [1.0, 1.0, 1.0], [5.0, 2.0, 4.0], [5.0, 0.0, 0.0]])
    live = jnp.array([[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 0]]) > 0
    pairs = choose_pairs(scores, live, jax.random.key(0))
    np.testing.assert_array_equal(pairs.keep, [True, False, True, False])
    np.testing.assert_array_equal(pairs.chosen[pairs.keep], [2, 2])  # the failed 5.0 is not best
    np.testing.assert_array_equal(pairs.rejected[pairs.keep], [0, 1])
    np.testing.assert_allclose(pairs.margin, [3, 0, 2, 0])
    far = choose_pairs(scores, live, jax.random.key(0), min_margin=2.5)
    np.testing.assert_array_equal(far.keep, [True, False, False, False])
    garbage = choose_pairs(jnp.where(live, scores, jnp.nan), live, jax.random.key(0))
    np.testing.assert_array_equal(garbage.keep, pairs.keep)
    np.testing.assert_array_equal(garbage.margin, pairs.margin)


@pytest.mark.slow
def test_a_random_rejected_sample_is_never_the_chosen_nor_a_failed_one():
    scores = jnp.tile(jnp.array([[0.0, 1.0, 3.0, 9.0]]), (400, 1))
    live = jnp.tile(jnp.array([[True, True, True, False]]), (400, 1))
    pairs = choose_pairs(scores, live, jax.random.key(0), rejected="random")
    assert set(np.asarray(pairs.chosen)) == {2} and set(np.asarray(pairs.rejected)) == {0, 1}
    assert np.mean(np.asarray(pairs.rejected) == 0) == pytest.approx(0.5, abs=0.08)


def test_win_probabilities_by_hand():
    """The worked example: rows beat columns."""
    table = jnp.array([[0.5, 0.9, 0.6], [0.1, 0.5, 0.3], [0.4, 0.7, 0.5]])

    def wins(first, second):
        return table[None]

    live = jnp.ones((1, 3), bool)
    found = win_probabilities(jnp.zeros((1, 3)), live, wins)
    np.testing.assert_allclose(found[0], [2 / 3, 0.3, 0.53333], rtol=1e-4)
    without = win_probabilities(jnp.zeros((1, 3)), live.at[0, 1].set(False), wins)
    np.testing.assert_allclose(without[0], [0.55, 0, 0.45], rtol=1e-6)
    scores = jnp.array([[1.0, -0.5, jnp.nan]])
    judged = win_probabilities(scores, live.at[0, 2].set(False), bradley_terry)
    p = 1 / (1 + math.exp(-1.5))
    np.testing.assert_allclose(judged[0], [(0.5 + p) / 2, (1.5 - p) / 2, 0], rtol=1e-6)
    np.testing.assert_allclose(
        higher_wins(jnp.array([1.0, 2, 2]), jnp.array([2.0, 2, 1])), [0, 0.5, 1]
    )


def test_pairing_refuses_what_it_cannot_do():
    scores, live = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(InputError, match="rejected"):
        choose_pairs(scores, live, jax.random.key(0), rejected="second")
    with pytest.raises(InputError, match="min_margin"):
        choose_pairs(scores, live, jax.random.key(0), min_margin=-1.0)
    with pytest.raises(InputError, match="scale"):
        bradley_terry(scores, scores, scale=0.0)


# -- the mixture --


@pytest.mark.slow
def test_the_mixture_is_geometric(shared):
    """Frequencies of the first word against softmax((1 - w) z + w z_ref), and the log-probs."""
    config = config_of("nash_md()", sampler__max_response_tokens=1)
    run = started(shared, config)
    actor, model = run.roles["actor"], run.setup.model
    moved = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(7), x.shape), actor.state.params
    )
    actor = dataclasses.replace(actor, state=dataclasses.replace(actor.state, params=moved))
    reference, weight, n = run.roles["reference"], 0.3, 2048
    prompts = run.source.draw(2)
    sampling = dataclasses.replace(run.setup.rollouts.sampling, temperature=0.8)
    batch = GeometricMixture(actor, reference, weight).generate(
        prompts, jax.random.key(0), sampling, n=n
    )
    at = np.asarray(prompts.lengths) - 1
    logits = [
        np.asarray(model.logits(params, batch))[::n][np.arange(2), at].astype(np.float64)
        for params in (moved, reference.params)
    ]
    z = ((1 - weight) * logits[0] + weight * logits[1]) / 0.8
    want = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    words = np.asarray(batch.tokens)[np.arange(2 * n), np.repeat(at + 1, n)].reshape(2, n)
    counts = np.stack([np.bincount(w, minlength=want.shape[1]) for w in words]) / n
    assert np.abs(counts - want).max() < 0.04
    alone = [np.exp(x / 0.8) / np.exp(x / 0.8).sum(-1, keepdims=True) for x in logits]
    assert min(np.abs(x - want).max() for x in alone) > 0.08  # neither model alone draws so
    said = np.asarray(batch.sampler_logprobs)[np.arange(2 * n), np.repeat(at + 1, n)]
    np.testing.assert_allclose(said, np.log(want)[np.repeat([0, 1], n), words.ravel()], atol=2e-5)
    assert np.all(np.asarray(batch.policy_version)[np.asarray(batch.mask) > 0] == -1)


@pytest.mark.slow
def test_the_ends_of_the_mixture_are_the_two_models(shared):
    run = started(shared, config_of("nash_md()"))
    actor, reference = run.roles["actor"], run.roles["reference"]
    moved = jax.tree.map(lambda x: x * 1.1, reference.params)
    prompts, key, sampling = run.source.draw(4), jax.random.key(3), run.setup.rollouts.sampling

    def drawn(params, second):
        batch = generate(
            actor.model, params, prompts.tokens, prompts.lengths, key, sampling, n=8, second=second
        )
        return np.asarray(batch.tokens)

    one, other = drawn(reference.params, None), drawn(moved, None)
    assert (one != other).any()
    for weight, want in ((0.0, one), (1.0, other)):
        second = SecondModel(actor.model, moved, weight)
        np.testing.assert_array_equal(drawn(reference.params, second), want)


@pytest.mark.slow
def test_two_samplers_take_turns(shared):
    run = started(shared, config_of("xpo()"))
    actor, reference = run.roles["actor"], run.roles["reference"]
    prompts, key, sampling = run.source.draw(4), jax.random.key(3), run.setup.rollouts.sampling
    batch = AgainstOpponent(actor, reference).generate(prompts, key, sampling, n=6)
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(4), 6))
    np.testing.assert_array_equal(sampled_by_actor(batch), [True, False] * 12)
    ours = actor.generate(prompts, key, sampling, n=3)
    np.testing.assert_array_equal(batch.tokens[0::2], ours.tokens)
    # Equal weights here: what differs is the draw.
    assert (np.asarray(batch.tokens[0::2]) != np.asarray(batch.tokens[1::2])).any()
    with pytest.raises(InputError, match="even"):
        AgainstOpponent(actor, reference).generate(prompts, key, sampling, n=3)


# -- the reference that follows --


def weights(role):
    params = role.params if hasattr(role, "params") else role.state.params
    return [np.asarray(x) for x in jax.tree.leaves(params)]


def same(one, other) -> bool:
    return all((a == b).all() for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_the_reference_follows_every_so_many_optimizer_steps(shared):
    run = started(shared, config_of("online_dpo(refresh_every=2)"))
    start = weights(run.roles["reference"])
    run.step()
    assert same(weights(run.roles["reference"]), start)
    run.step()
    copy = weights(run.roles["reference"])
    assert not same(copy, start) and same(copy, weights(run.roles["actor"]))
    run.step()  # donates the actor's arrays: the copy has its own
    assert same(weights(run.roles["reference"]), copy)
    assert not same(copy, weights(run.roles["actor"]))
    saved = build.role_arrays(run.roles)["reference"]
    assert same([np.asarray(x) for x in jax.tree.leaves(saved)], copy)


@pytest.mark.slow
def test_a_step_without_pairs_moves_nothing(shared):
    run = started(shared, config_of("online_dpo(min_margin=2.0, refresh_every=1)"))
    before, reference = weights(run.roles["actor"]), weights(run.roles["reference"])
    metrics = run.step()
    assert metrics["pair/kept_fraction"] == 0 and metrics["empty_steps"] == 1
    assert same(before, weights(run.roles["actor"]))
    assert same(reference, weights(run.roles["reference"]))


# -- what does not fit --


@pytest.mark.parametrize(
    ("dataflow", "changes", "words"),
    [
        ("online_dpo()", {"algorithm__preference_loss": "kto()"}, "examples of 1 rows"),
        ("nash_md()", {"algorithm__preference_loss": "dpo()"}, "have 1"),
        ("online_dpo()", {"algorithm__preference_loss": "xpo()"}, "chosen_is_policy"),
        (
            "online_dpo()",
            {"batch__samples_per_prompt": 1, "batch__sequences_per_optimizer_step": 16},
            "2 or more",
        ),
        (
            "xpo()",
            {"batch__samples_per_prompt": 7, "batch__sequences_per_optimizer_step": 112},
            "half are",
        ),
        ("sppo(preference='bradly_terry()')", {}, "bradley_terry"),
        (
            "online_dpo()",
            {
                "batch__prompts_per_step": 15,
                "batch__samples_per_prompt": 8,
                "batch__sequences_per_optimizer_step": 30,
            },
            "do not divide",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_loads(dataflow, changes, words):
    config = config_of(dataflow)
    config.algorithm.preference_loss = LOSSES.get(dataflow.split("(")[0] + "()", "sppo()")
    assert validate(config_of("online_dpo()")) == []
    for name, value in changes.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        setattr(node, path[-1], value)
    with pytest.raises(InputError, match=words):
        validate(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataflow", "changes", "said"),
    [
        ("online_dpo()", {"kl_in_reward": 0.1}, r"algorithm.kl_in_reward=0.1; .* does not read it"),
        ("sppo()", {"filters": ("live_groups()",)}, r"algorithm.filters=.* does not read it"),
    ],
)
def test_what_nothing_reads_is_said_before_weights_are_made(dataflow, changes, said):
    config = config_of(dataflow)
    check_fields_read(build.build(config))
    for name, value in changes.items():
        setattr(config.algorithm, name, value)
    with pytest.raises(InputError, match=said):
        check_fields_read(build.build(config))


def test_options_are_checked_like_any_others():
    with pytest.raises(InputError, match="rejected"):
        resolve("online_dpo(rejected='second')", NAMESPACES["dataflow"])


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(shared):
    """What a checkpoint keeps of the roles, the reference that has moved among them, is all."""
    whole = started(shared, config_of("online_dpo(rejected='random', refresh_every=2)"))
    for _ in range(3):
        whole.step()
    arrays = jax.device_get(build.role_arrays(whole.roles))
    position, progress = whole.source.get_state(), copy.deepcopy(whole.progress)
    again = started(shared, config_of("online_dpo(rejected='random', refresh_every=2)"))
    again.roles = build.with_arrays(again.roles, jax.device_put(arrays))
    again.source.set_state(position)
    again.progress = progress
    for _ in range(2):
        want, got = whole.step(), again.step()
        assert want["loss"] == got["loss"] and want["reward/mean"] == got["reward/mean"]
    for name in ("actor", "reference"):
        assert same(weights(whole.roles[name]), weights(again.roles[name]))


@pytest.mark.slow
def test_the_reference_of_adapters_shares_their_base(shared):
    run = started_with_adapters(shared)
    actor, reference = run.roles["actor"], run.roles["reference"]
    moved = jax.tree.map(lambda x: x + 0.5, actor.state.params)
    actor = dataclasses.replace(actor, state=dataclasses.replace(actor.state, params=moved))
    now = reference.follow(actor, when=True)
    adapters, base = run.setup.model.split(now.params)
    assert same([np.asarray(x) for x in jax.tree.leaves(adapters)], weights(actor))
    _, before = run.setup.model.split(reference.params)
    pairs = zip(jax.tree.leaves(base), jax.tree.leaves(before), strict=True)
    assert all(one is other for one, other in pairs)


def started_with_adapters(shared):
    config = config_of("online_dpo(refresh_every=1)")
    config.lora.rank, config.lora.base = 2, "float32"
    run = shared.run(config)
    run.begin(run.setup.main, build.initial_params(config, run.setup.model))
    return run
