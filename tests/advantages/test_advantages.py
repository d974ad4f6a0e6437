"""Advantage estimators: worked examples, the rules that all of them keep, and their invariants."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled, compiled, lanes, worked_example
from episode_rows import in_several_rows, joined
from golden_checks.common import INTEGERS, response_batch
from namespaces import public_functions

from rljax import advantages as op_by_op
from rljax import batch as batches
from rljax.batch import Batch
from rljax.errors import InputError
from rljax.shaping import resampling

advantages = Compiled(op_by_op)

# The fixture x64 is the same for every example.
FEW = hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


def close(got, want, **options):
    np.testing.assert_allclose(np.asarray(got), want, **{"rtol": 2e-6, "atol": 2e-7, **options})


def outcome(rewards, group=None, mask=None, **fields) -> Batch:
    """Rewards of whole rows, on the last token of each."""
    rewards = np.asarray(rewards, float)
    mask = np.ones((len(rewards), 1)) if mask is None else np.asarray(mask, float)
    last = (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1) & (mask > 0)
    group = np.zeros(len(rewards)) if group is None else group
    return response_batch(mask, group=group, rewards=last * rewards[:, None], **fields)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# -- worked examples


@pytest.mark.usefixtures("x64")
class TestWorkedExamples:
    def test_masked_stats(self):
        example = worked_example("conv.masked_stats")
        x, mask = (jnp.asarray(example["inputs"][k]) for k in ("x", "mask"))
        want = example["outputs"]
        close(batches.masked_mean(x, mask), want["mean"])
        close(batches.masked_variance(x, mask), want["var_biased"])
        close(batches.masked_variance(x, mask, ddof=1), want["var_unbiased"])
        close(batches.whiten(x, mask), want["whiten"])
        close(batches.whiten(x, mask, shift_mean=False), want["whiten_no_shift"])
        spread = jnp.sqrt(batches.masked_variance(x, mask)) + 1e-5  # eps outside of the root
        centred = jnp.where(mask > 0, x - batches.masked_mean(x, mask), 0.0)
        close(centred / spread, want["whiten_biased_eps1e5"])

    def test_gae(self):
        example = worked_example("gae.basic")
        batch = response_batch(**example["inputs"])
        for name, gamma, lam in (
            ("g1_l095", 1, 0.95),
            ("g1_l0", 1, 0),
            ("g1_l1", 1, 1),
            ("g099_l09", 0.99, 0.9),
        ):
            got = advantages.gae(batch, gamma=gamma, lam=lam, whiten=False)
            close(got[0], example["outputs"][f"adv_{name}"])
            close(got[1], example["outputs"][f"ret_{name}"])

    def test_gae_observation_gap(self):
        example = worked_example("gae.observation_gap")
        batch = response_batch(**example["inputs"])
        got = advantages.gae(batch, **example["params"], whiten=False)
        close(got[0], example["outputs"]["adv"])
        close(got[1], example["outputs"]["ret"])

    def test_vapo_lambda(self):
        example = worked_example("gae.vapo_lambda")
        lengths = np.asarray(example["inputs"]["length"])
        mask = np.arange(2000)[None, :] < lengths[:, None]
        # A reward on the last token alone: A of the token before it is lambda.
        batch = outcome(np.ones(6), mask=mask, values=np.zeros(mask.shape))
        got, _ = advantages.vapo_gae(batch, alpha=example["params"]["alpha"], whiten=False)
        close(got[jnp.arange(6), lengths - 2], example["outputs"]["lam"])

    def test_vapo_decoupled(self):
        example = worked_example("gae.vapo_decoupled")
        x, want = example["inputs"], example["outputs"]
        ones = np.ones((1, x["length"]))
        batch = outcome([x["final_reward"]], mask=ones, values=ones * x["value"])
        got, returns = advantages.vapo_gae(batch, **example["params"], whiten=False)
        close(got[0, -4:], want["actor_adv_last4"])
        close(returns[0, [0, -1]], [want["critic_return_first"], want["critic_return_last"]])

    def test_reinforce_baseline(self):
        example = worked_example("adv.reinforce_baseline")
        x = example["inputs"]
        batch = outcome(x["rewards"], mask=x["mask"], values=x["values"])
        for form in ("to_go", "sequence"):
            close(advantages.reinforce(batch, form=form), example["outputs"]["adv"])

    def test_remax(self):
        example = worked_example("adv.remax")
        x = example["inputs"]
        greedy = np.asarray(x["greedy_reward"])[:, None] * np.ones((1, 4))
        batch = outcome(x["rewards"], mask=x["mask"], values=greedy)
        close(advantages.remax(batch), example["outputs"]["adv"])

    def test_rloo(self):
        example = worked_example("adv.rloo")
        batch = outcome(example["inputs"]["rewards"])
        close(advantages.rloo(batch)[:, 0], example["outputs"]["adv"])

    def test_group_basic(self):
        example = worked_example("adv.group_basic")
        batch, want = outcome(**example["inputs"]), example["outputs"]
        eps = example["params"]["eps"]
        for std, name in (
            ("sample", "grpo_std_unbiased"),
            ("population", "grpo_std_biased"),
            ("none", "dr_grpo_centered"),
        ):
            got = advantages.group_relative(batch, std=std, eps=eps, singleton="raw")[:, 0]
            close(got, want[name])
        close(advantages.rloo(batch, singleton="raw")[:, 0], want["rloo"])
        close(advantages.rloo(batch)[:, 0], want["rloo_singleton_zero"])

    def test_reinforce_plus_plus(self):
        example = worked_example("adv.reinforce_pp")
        x, want = example["inputs"], example["outputs"]
        batch = response_batch(x["mask"], rewards=x["token_reward"])
        close(advantages.reinforce_plus_plus(batch), want["adv"])
        close(advantages.reinforce(batch), want["returns"])
        close(advantages.reinforce(batch, gamma=0.9), want["returns_gamma09"])

    @pytest.mark.parametrize("name", ["adv.reinforce_pp_baseline", "adv.batch_norm"])
    def test_centred(self, name):
        example = worked_example(name)
        batch, want = outcome(**example["inputs"]), example["outputs"]
        close(advantages.group_relative(batch, std="none").max(axis=1).max(), 0.5)
        if name == "adv.reinforce_pp_baseline":
            close(advantages.reinforce_plus_plus_baseline(batch), want["adv"])
        else:
            close(advantages.batch_normalised(batch)[:, 0], want["adv"])
            close(advantages.batch_normalised(batch, ddof=1)[:, 0], want["adv_unbiased_std"])

    @pytest.mark.parametrize("name", ["recipe.grpo_full", "recipe.dr_grpo_full", "scalerl.loss"])
    def test_recipes(self, name):
        example = worked_example(name)
        x = example["inputs"]
        batch = outcome(x["rewards"], x["group"], x["response_mask"])
        if name == "scalerl.loss":
            got = advantages.batch_normalised(batch, eps=example["params"]["eps"])
        else:
            got = advantages.group_relative(
                batch, std="sample" if "eps" in example["params"] else "none"
            )
        close(got, np.asarray(example["outputs"]["adv"])[:, None] * np.asarray(x["response_mask"]))

    def test_opo(self):
        example = worked_example("adv.opo")
        lengths = np.asarray(example["inputs"]["lengths"])
        mask = np.arange(40)[None, :] < lengths[:, None]
        got = advantages.opo(outcome(example["inputs"]["rewards"], mask=mask))
        close(got[:, 0], example["outputs"]["adv"])

    def test_gpg(self):
        example = worked_example("adv.gpg")
        batch, want = outcome(**example["inputs"]), example["outputs"]
        close(advantages.gpg(batch)[:, 0], want["adv_paper"])
        close(advantages.gpg(batch, alpha="nonzero")[:, 0], want["adv_verl"])
        close(advantages.gpg(batch, f_norm=2.0)[:, 0], np.asarray(want["adv_paper"]) / 2)
        grpo = advantages.group_relative(batch) * want["alpha_paper"]
        close(advantages.gpg(batch, f_norm="std"), grpo)

    def test_passk(self):
        example = worked_example("adv.grpo_passk")
        batch, want = outcome(example["inputs"]["rewards"]), example["outputs"]
        close(advantages.best_of_group(batch)[:, 0], want["adv"])
        close(advantages.best_of_group(batch, std="sample")[:, 0], want["adv_norm"])

    def test_grpo_process(self):
        example = worked_example("adv.grpo_process")
        x = example["inputs"]
        mask = np.arange(4)[None, :] < np.asarray(x["lengths"])[:, None]
        rewards, steps = np.zeros((2, 4)), np.zeros((2, 4))
        for row, ends in enumerate(x["step_end"]):
            rewards[row, ends] = x["step_rewards"][row]
            steps[row] = np.searchsorted(ends, np.arange(4)) + 1
        batch = response_batch(mask, process_rewards=rewards, step_ids=steps, group=[7, 7])
        close(advantages.group_process(batch), example["outputs"]["adv"])

    def test_vineppo(self):
        example = worked_example("adv.vineppo")
        x, want = example["inputs"], example["outputs"]
        steps = np.asarray(x["step_of_token"]) + 1
        values = np.asarray(want["mc_value"])[steps - 1]
        values[1:][steps[1:] == steps[:-1]] = np.nan  # only a step's first token is read
        mask = np.ones((1, 7))
        batch = outcome([x["final_reward"]], mask=mask, values=values[None], step_ids=steps[None])
        got = advantages.vineppo(batch)
        close(got[0], want["token_adv"])
        close(jnp.sum(got[0, [0, 2, 3, 6]]), want["sum_check"])

    def test_prime(self):
        example = worked_example("prime.advantage")
        x, p = example["inputs"], example["params"]
        batch = outcome(x["acc"], mask=x["mask"], process_rewards=x["token_reward"])
        options = dict(process_coef=p["coef_process"], outcome_coef=p["coef_outcome"])
        close(advantages.prime(batch, **options, whiten=False), example["outputs"]["returns"])
        close(advantages.prime(batch, **options), example["outputs"]["adv"])

    def test_gigpo(self):
        example = worked_example("gigpo")
        x, p, want = example["inputs"], example["params"], example["outputs"]
        # Two tokens per turn, with a tool reply between turns.
        mask, steps, states, rewards = (np.zeros((2, 9)) for _ in range(4))
        for row, (names, gains) in enumerate(zip(x["step_state"], x["step_reward"], strict=True)):
            for k, (name, gain) in enumerate(zip(names, gains, strict=True)):
                turn = slice(3 * k, 3 * k + 2)
                mask[row, turn], steps[row, turn], states[row, turn] = 1, k + 1, 1 + int(name[1:])
                rewards[row, 3 * k + 1] = gain
        batch = response_batch(
            mask, rewards=rewards, step_ids=steps, state_ids=states, group=[4, 4]
        )
        got = advantages.gigpo(batch, gamma=p["gamma"], omega=p["omega"], std=p["norm"])
        for row in range(2):
            close(got[row, ::3][: len(want["adv"][row])], want["adv"][row])
            close(got[row, 1::3][: len(want["adv"][row])], want["adv"][row])

    def test_pf_ppo(self):
        example = worked_example("pf_ppo.weights")
        for kind, want in example["outputs"].items():
            close(resampling.rank_weights(example["inputs"]["N"], kind), want)
        example = worked_example("pf_ppo.batch_reweight")
        scores = jnp.asarray(example["inputs"]["scores"])
        for method in ("pow", "max_min", "max_random"):
            weights = resampling.score_weights(scores, method=method, power=2.0)
            close(weights / weights.sum(), example["outputs"][f"p_{method}"], atol=1e-15)
        example = worked_example("pf_ppo.r2")
        fit = resampling.linear_fit(
            *(jnp.asarray(example["inputs"][k]) for k in ("reward", "score"))
        )
        close(jnp.stack(fit), [example["outputs"][k] for k in ("slope", "intercept", "r2")])


# -- the common suite: one row of the table buys all of it

GROUPED = ("rewards", "group")
# name -> (function of a batch -> [B, S], fields it reads, which groups get exactly 0: of equal
# scores ("dead"), of one ("alone"))
TABLE = {
    "gae": (lambda b: advantages.gae(b, lam=0.9)[0], ("rewards", "values"), ""),
    "gae_returns": (lambda b: advantages.gae(b, lam=0.9)[1], ("rewards", "values"), ""),
    "gae_bootstrap": (
        lambda b: advantages.gae(b, gamma=0.9, lam=0.9, bootstrap_truncated=True)[1],
        ("rewards", "values", "finish_reason"),
        "",
    ),
    "gae_turns": (
        lambda b: advantages.gae(b, gamma=0.9, lam=0.8, time="turn")[1],
        ("rewards", "values", "step_ids"),
        "",
    ),
    "vapo_gae": (lambda b: advantages.vapo_gae(b, alpha=0.5)[0], ("rewards", "values"), ""),
    "vapo_gae_fixed": (
        lambda b: advantages.vapo_gae(b, lam_actor=0.9, lam_critic=0.5)[1],
        ("rewards", "values"),
        "",
    ),
    "reinforce": (lambda b: advantages.reinforce(b, gamma=0.9), ("rewards",), ""),
    "reinforce_sequence": (
        lambda b: advantages.reinforce(b, gamma=0.9, form="sequence"),
        ("rewards",),
        "",
    ),
    "remax": (advantages.remax, ("rewards", "values"), ""),
    "reinforce_plus_plus": (
        functools.partial(advantages.reinforce_plus_plus, gamma=0.9),
        ("rewards",),
        "",
    ),
    "reinforce_plus_plus_baseline": (advantages.reinforce_plus_plus_baseline, GROUPED, ""),
    "group_relative": (advantages.group_relative, GROUPED, "dead alone"),
    "dr_grpo": (functools.partial(advantages.group_relative, std="none"), GROUPED, "dead alone"),
    "group_relative_exclude": (
        functools.partial(advantages.group_relative, exclude_truncated=True),
        (*GROUPED, "finish_reason"),
        "dead alone",
    ),
    "rloo": (advantages.rloo, GROUPED, "dead alone"),
    "opo": (advantages.opo, GROUPED, "dead alone"),
    "gpg": (advantages.gpg, GROUPED, "dead alone"),
    "best_of_group": (
        functools.partial(advantages.best_of_group, std="sample"),
        GROUPED,
        "dead alone",
    ),
    "batch_normalised": (advantages.batch_normalised, GROUPED, "dead alone"),
    "maxrl": (advantages.maxrl, GROUPED, "dead alone"),
    "pass_at_k": (functools.partial(advantages.pass_at_k, k=2), GROUPED, "dead alone"),
    "pkpo": (functools.partial(advantages.pkpo, k=3), GROUPED, "dead alone"),
    "gdpo": (functools.partial(advantages.gdpo, weights=(1.0, 0.5)), ("reward_parts", "group"), ""),
    "group_process": (advantages.group_process, ("process_rewards", "step_ids", "group"), ""),
    "vineppo": (advantages.vineppo, ("rewards", "values", "step_ids"), ""),
    "prime": (advantages.prime, (*GROUPED, "process_rewards"), ""),
    "prime_normalised": (
        functools.partial(advantages.prime, normalise=True),
        (*GROUPED, "process_rewards"),
        "",
    ),
    "gigpo": (advantages.gigpo, (*GROUPED, "step_ids", "state_ids"), "dead alone"),
    "turn_leave_one_out": (
        functools.partial(advantages.turn_leave_one_out, gamma=0.9),
        (*GROUPED, "step_ids"),
        "alone",
    ),
    "turn_group": (
        functools.partial(advantages.turn_group, gamma=0.9),
        (*GROUPED, "step_ids"),
        "alone",
    ),
    "optimal_token_baseline": (
        advantages.optimal_token_baseline,
        (*GROUPED, "old_logprobs", "sum_pi_squared"),
        "alone",
    ),
    "optimal_token_baseline_turns": (
        functools.partial(advantages.optimal_token_baseline, multi_turn=True),
        (*GROUPED, "old_logprobs", "sum_pi_squared"),
        "alone",
    ),
}
TABLE = {name: (compiled(function), *rest) for name, (function, *rest) in TABLE.items()}


def test_every_estimator_has_a_row():
    names = [f.__name__ for f in public_functions(op_by_op)]
    assert [n for n in names if not any(row == n or row.startswith(f"{n}_") for row in TABLE)] == []


# What each of them counts, it counts in a way of its own; the others do as one of these.
OF_EACH_KIND = (
    "gae",
    "vapo_gae",
    "reinforce",
    "reinforce_plus_plus",
    "group_relative",
    "opo",
    "pass_at_k",
    "pkpo",
    "gdpo",
    "vineppo",
    "prime",
    "gigpo",
    "turn_group",
    "optimal_token_baseline_turns",
)


# Of these a few, for what each of them has to itself a program to compile.
FEW_KINDS = ("gae", "reinforce_plus_plus", "group_relative", "prime", "gigpo", "turn_group")


def of_each_kind(names, kinds=OF_EACH_KIND):
    return pytest.mark.parametrize(
        "name", lanes([n for n in names if n in kinds], [n for n in names if n not in kinds])
    )


# Packed rows are meant for these alone.
PACKED = [n for n in TABLE if "group" not in TABLE[n][1] and n != "gae_bootstrap"]


def make(name: str, seed: int = 0, dtype=jnp.float32, **changed) -> Batch:
    """Ten rows of eight columns with a tool gap, a row without tokens, groups of 3, 4, 2 and 1."""
    random = np.random.default_rng(seed)
    shape = (10, 8)
    lengths = np.array([8, 5, 3, 6, 0, 4, 8, 1, 7, 2])
    mask = np.arange(8)[None, :] < lengths[:, None]
    mask[[0, 3, 8], 2] = False
    steps = np.cumsum(random.integers(0, 2, shape), axis=1) + 1
    fields = {
        "rewards": random.normal(size=shape),
        "values": random.normal(size=shape),
        "group": np.array([3, 9, 3, 5, 9, 9, 5, 9, 3, 0]),
        "finish_reason": np.array([0, 1, 0, 0, 0, 1, 0, 0, 0, 1]),
        "process_rewards": random.normal(size=shape),
        "reward_parts": random.normal(size=(10, 2)),
        "step_ids": steps,
        "state_ids": random.integers(0, 2, shape),
        "old_logprobs": -random.uniform(0.1, 2, shape),
        "sum_pi_squared": random.uniform(0.5, 1, shape),
    }
    fields = {k: fields[k] for k in TABLE[name][1]}
    return response_batch(mask, dtype, **{**fields, **changed})


# Rows and columns are moved by numpy, which compiles nothing.
def changed(batch: Batch, change) -> Batch:
    return jax.tree.map(lambda x: jnp.asarray(change(np.asarray(x))), batch)


def take(batch: Batch, rows) -> Batch:
    return changed(batch, lambda x: x[rows])


COLUMNS = 16  # of every batch that the common suite computes: one program for each estimator


def pad(batch: Batch, before: int) -> Batch:
    """Columns of another segment (a prompt, or padding) around the rows; NaN in all floats."""
    width = batch.tokens.shape[1]
    around = (0, 0), (before, COLUMNS - width - before)

    def widen(x):
        if x.ndim < 2 or x.shape[1] != width:
            return x
        return np.pad(x, around, constant_values=np.nan if x.dtype.kind == "f" else 0)

    mask = np.pad(batch.mask, around)
    return changed(batch, widen).replace(mask=jnp.asarray(mask))


def padded(function, batch: Batch, before: int = 0) -> np.ndarray:
    """What `function` makes of the batch within columns of padding, which get 0."""
    got = np.asarray(function(pad(batch, before)))
    inside = np.arange(COLUMNS) - before
    inside = (inside >= 0) & (inside < batch.tokens.shape[1])
    assert (got[:, ~inside] == 0).all()
    return got[:, inside]


@of_each_kind(TABLE)
def test_common(name):
    """Masked entries, padding, order of rows and precision."""
    function, fields, rule = TABLE[name]
    batch = make(name)
    want = padded(function, batch)
    keep = np.asarray(batch.mask) > 0
    assert want.dtype == np.float32 and want.shape == keep.shape
    assert np.isfinite(want).all() and (want[~keep] == 0).all()
    assert np.abs(want[keep]).max() > 0.1

    dirty = {
        f: np.where(keep, x, np.asarray(777 if f in INTEGERS else np.nan, x.dtype))
        for f, x in ((f, np.asarray(getattr(batch, f))) for f in fields)
        if x.shape == keep.shape
    }
    dirty = changed(batch.replace(**dirty), np.asarray)
    np.testing.assert_array_equal(want, padded(function, dirty))
    close(padded(function, batch, before=3), want, rtol=1e-5, atol=1e-6)
    order = np.random.default_rng(1).permutation(10)
    close(padded(function, take(batch, order)), want[order], rtol=2e-5, atol=2e-6)
    with jax.enable_x64(True):
        exact = padded(function, make(name, dtype=jnp.float64))
    assert exact.dtype == np.float64
    close(want, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", TABLE)
def test_a_missing_field_is_named(name):
    function, fields, _ = TABLE[name]
    batch = make(name)
    for field in fields:
        if (name, field) == ("reinforce", "values"):
            continue
        with pytest.raises(InputError, match=field):
            function(Batch(**{**vars(batch), field: None}))


@of_each_kind(TABLE, FEW_KINDS)
def test_constants_get_no_gradient_and_the_width_changes_nothing(name):
    function, fields, _ = TABLE[name]
    batch = make(name)
    floats = {f: getattr(batch, f) for f in fields if getattr(batch, f).dtype.kind == "f"}

    def total(fields):
        got = function(batch.replace(**fields))
        return jnp.sum(got**2), got

    gradient, got = jax.jit(jax.grad(total, has_aux=True))(floats)
    assert all((g == 0).all() for g in jax.tree.leaves(gradient))
    close(got, padded(function, batch), rtol=1e-5, atol=1e-6)  # without a column of padding


@pytest.mark.smoke
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [n for n in TABLE if TABLE[n][2]])
def test_groups_that_teach_nothing_get_exactly_zero(name):
    """(0.1 + 0.1 + 0.1) / 3 is not 0.1: the scores must be compared, not score and mean."""
    function, _, rule = TABLE[name]
    batch = make(name, dtype=jnp.float64)
    group = np.asarray(batch.group)
    if "dead" in rule:
        first = np.cumsum(np.asarray(batch.mask), axis=1) == 1
        rewards = np.where((group == 3)[:, None], first * 0.1, batch.rewards)
        dead = batch.replace(rewards=jnp.asarray(rewards))
        if "finish_reason" in TABLE[name][1]:
            dead = dead.replace(finish_reason=jnp.zeros_like(batch.finish_reason))
        if name == "gigpo":
            dead = dead.replace(state_ids=jnp.arange(80, dtype=jnp.int32).reshape(10, 8))
        got = padded(function, dead)
        assert (got[group == 3] == 0).all()
        assert np.abs(got[group != 3]).max() > 0
    assert (padded(function, batch)[group == 0] == 0).all()


@pytest.mark.smoke
@of_each_kind(PACKED)
def test_packed_rows_equal_rows_apart(name):
    function, fields, _ = TABLE[name]
    batch, empty = make(name), 4  # the row without tokens fills both batches up
    want = padded(function, take(batch, [0, 1, 3, 6] + [empty] * 6))

    def pack(x):
        return np.concatenate([x[[0, 1] + [empty] * 8], x[[3, 6] + [empty] * 8]], axis=1)

    ids = np.repeat(np.array([[1, 2]] * 10, np.int32), 8, axis=1)
    packed = changed(batch, pack).replace(segment_ids=jnp.asarray(ids))
    if packed.step_ids is not None:  # numbered on within the row
        packed = packed.replace(step_ids=packed.step_ids + jnp.asarray((ids - 1) * 8))
    got = np.asarray(function(packed))[:2]
    close(got, np.concatenate([want[:2], want[2:4]], axis=1), rtol=1e-5, atol=1e-6)


@of_each_kind([n for n in TABLE if n != "optimal_token_baseline"])
def test_a_tool_reply_changes_nothing_around_it(name):
    """The plain token baseline is left out: it compares columns; multi_turn is there for that."""
    function, _, _ = TABLE[name]
    batch = make(name)
    want = padded(function, batch)

    def split(x):
        if x.ndim < 2 or x.shape[1] != 8:
            return x
        return widen(x, np.nan if x.dtype.kind == "f" else 5)

    def widen(x, value):
        hole = np.full((10, 3), value, x.dtype)
        inside = np.concatenate([x[:, :4], hole, x[:, 4:]], axis=1)
        return np.where(replied[:, None], inside, np.concatenate([x, hole], axis=1))

    replied = np.arange(10) % 3 > 0  # the other rows have padding there instead
    mask, ids = widen(batch.mask, 0), np.ones((10, 11), np.int32)
    wide = changed(batch, split).replace(mask=jnp.asarray(mask), segment_ids=jnp.asarray(ids))
    got = padded(function, wide)
    inside, behind = np.delete(got, [4, 5, 6], axis=1), got[:, :8]
    close(np.where(replied[:, None], inside, behind), want, rtol=1e-5, atol=1e-6)


@of_each_kind(
    [n for n in TABLE if "optimal_token_baseline" not in n],
    ("gae", "vapo_gae", "group_relative", "pass_at_k", "pkpo", "prime", "gigpo"),
)
def test_an_episode_of_several_rows_counts_once(name):
    """Its advantages are those of the same episode in one row, whatever the order of its rows; and
    an `episode` of one row each changes nothing."""
    function, fields, _ = TABLE[name]
    steps = np.asarray(make("gigpo").step_ids)
    batch = make(name, **{} if "step_ids" in fields else {"step_ids": steps})
    want = padded(function, batch)
    split, parts = in_several_rows(batch)
    assert split.rows > 14 and np.asarray(split.mask).sum() == np.asarray(batch.mask).sum()
    close(joined(function(split), parts), want, rtol=1e-5, atol=1e-6)


# -- invariants

SCORES = st.lists(st.integers(-3, 3).map(lambda n: n / 4), min_size=8, max_size=8)
GROUPS = st.lists(st.integers(0, 2), min_size=8, max_size=8)
SHIFTED = {
    "rloo": advantages.rloo,
    "group_relative": advantages.group_relative,
    "dr_grpo": functools.partial(advantages.group_relative, std="none"),
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "best_of_group": advantages.best_of_group,
    "batch_normalised": advantages.batch_normalised,
    "pass_at_k": functools.partial(advantages.pass_at_k, k=3),
    "pkpo": functools.partial(advantages.pkpo, k=2),
}
MORE_SHIFTED = ("dr_grpo", "gpg", "best_of_group", "batch_normalised", "pass_at_k", "pkpo")


def lengths_mask(lengths):
    return np.arange(4)[None, :] < np.asarray(lengths)[:, None]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", lanes(["rloo", "group_relative", "opo"], MORE_SHIFTED))
@FEW
@hypothesis.given(scores=SCORES, group=GROUPS, shift=st.integers(-2, 2))
def test_shifting_the_rewards_of_a_group_changes_nothing(name, scores, group, shift):
    """N3, N5, N6; the other groups stay as they are, and dead groups are exactly 0."""
    function, group = SHIFTED[name], np.asarray(group)
    mask = lengths_mask([1, 2, 3, 4, 1, 2, 3, 4])
    want = np.asarray(function(outcome(scores, group, mask)))
    moved = np.asarray(scores) + shift * (group == 1)
    close(function(outcome(moved, group, mask)), want, atol=1e-9)
    for g in range(3):
        rows = group == g
        if len(set(np.asarray(scores)[rows])) < 2:
            assert (want[rows] == 0).all()
        elif name not in ("opo", "best_of_group", "pkpo"):
            assert abs(want[rows, 0].sum()) < 1e-9  # centred
    if name == "group_relative":
        scaled = function(outcome(np.asarray(scores) * 7, group, mask))
        close(scaled, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("x64")
@FEW
@hypothesis.given(scores=SCORES, group=GROUPS)
def test_whitened_advantages_have_mean_0_and_std_1(scores, group):
    """N5, for the estimators that whiten; all-equal advantages become zeros."""
    mask = lengths_mask([1, 2, 3, 4, 1, 2, 3, 4])
    parts = np.stack([scores, np.asarray(scores)[::-1]], axis=1)
    batch = outcome(scores, group, mask, reward_parts=parts, values=np.zeros((8, 4)))
    for function in (
        advantages.reinforce_plus_plus,
        advantages.reinforce_plus_plus_baseline,
        advantages.gdpo,
        lambda b: advantages.gae(b)[0],
    ):
        got = np.asarray(function(batch))[mask]
        if np.ptp(got) == 0:
            assert (got == 0).all()
        else:
            assert abs(got.mean()) < 1e-9 and abs(got.std(ddof=1) - 1) < 1e-4


@pytest.mark.usefixtures("x64")
@FEW
@hypothesis.given(seed=st.integers(0, 1000), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_limits_of_gae(seed, gamma):
    """N7: lambda 1 with V = 0 is the return to go, lambda 0 the TD error, returns - V is A."""
    random = np.random.default_rng(seed)
    mask, rewards, values = random.integers(0, 2, (3, 6)), *random.normal(size=(2, 3, 6))
    batch = response_batch(mask, rewards=rewards, values=np.zeros((3, 6)))
    got, _ = advantages.gae(batch, gamma=gamma, whiten=False)
    close(got, advantages.reinforce(batch, gamma=gamma))
    batch = batch.replace(values=jnp.asarray(values))
    td, returns = advantages.gae(batch, gamma=gamma, lam=0.0, whiten=False)
    for row in range(3):
        at = np.flatnonzero(mask[row])
        following = np.append(values[row, at[1:]], 0.0)[: len(at)]
        close(np.asarray(td)[row, at], rewards[row, at] + gamma * following - values[row, at])
    live = mask > 0
    close((np.asarray(returns) - values)[live], np.asarray(td)[live])
    both = advantages.vapo_gae(batch, gamma=gamma, lam_actor=0.0, lam_critic=0.0, whiten=False)
    close(both[0], td)
    close(both[1], returns)


# -- what is special to one of them: the first op by op, as one debugs


@pytest.mark.usefixtures("x64")
class TestSpecial:
    def test_bootstrap_takes_the_last_value_of_truncated_rows_alone(self):
        batch = outcome([0.0, 0.0], values=[[0.5, 0.75], [0.5, 0.75]], mask=np.ones((2, 2)))
        batch = batch.replace(finish_reason=jnp.array([0, 1], jnp.int32))
        got, returns = op_by_op.gae(
            batch, gamma=0.5, lam=1.0, whiten=False, bootstrap_truncated=True
        )
        close(got, [[-0.5, -0.75], [0.25 * 0.75 - 0.5, 0.5 * 0.75 - 0.75]])
        close(returns, [[0, 0], [0.25 * 0.75, 0.375]])

    def test_a_filtered_row_stays_in_the_baseline_or_is_left_out(self):
        example = worked_example("overlong_filter")
        x = example["inputs"]
        batch = outcome(x["rewards"], mask=example["outputs"]["loss_mask"], scores=x["rewards"])
        got = advantages.group_relative(batch, std="none")
        want = np.asarray(example["outputs"]["adv_centered"])
        close(got[[0, 2], 0], want[[0, 2]])
        better = batch.replace(scores=jnp.array([1.0, 2.0, 0.0]))
        close(advantages.group_relative(better, std="none")[:, 0], [0.0, 0.0, -1.0])
        batch = batch.replace(finish_reason=jnp.array([0, 1, 0], jnp.int32))
        got = advantages.group_relative(batch, std="none", exclude_truncated=True)
        close(got[:, 0], [0.5, 0.0, -0.5])

    def test_reinforce_with_a_constant(self):
        batch = outcome([1.0, 0.0], mask=np.ones((2, 3)), values=np.full((2, 3), 9.0))
        close(advantages.reinforce(batch, baseline=0.25), [[0.75] * 3, [-0.25] * 3])
        close(advantages.reinforce(batch, baseline=0.0, gamma=0.5)[0], [0.25, 0.5, 1.0])
        sequence = advantages.reinforce(batch, baseline=0.0, gamma=0.5, form="sequence")
        close(sequence[0], [0.25] * 3)

    def test_vineppo_fills_backwards_and_telescopes(self):
        steps = np.array([[1, 1, 2, 3, 4, 0]])
        values = np.array([[0.25, np.nan, np.nan, 0.75, np.nan, np.nan]])
        batch = outcome([1.0], mask=np.ones((1, 6)), values=values, step_ids=steps)
        # V = 0.25, 0.75, 0.75, then the reward still to come: 1.
        close(advantages.vineppo(batch)[0], [0.5, 0.5, 0.0, 0.25, 0.0, 0.0])

    def test_prime_leaves_empty_rows_out_and_alone_is_zero(self):
        mask = [[1, 1], [1, 0], [0, 0], [1, 1]]
        process = np.array([[0.1, 0.3], [0.5, 0], [9, 9], [1.0, 1.0]])
        batch = outcome([1, 0, 1, 1], [0, 0, 0, 1], mask, process_rewards=process)
        options = dict(process_coef=1.0, outcome_coef=2.0, whiten=False)
        got = np.asarray(advantages.prime(batch, **options))
        close(got[0], [(0.2 - 0.7) + (0.6 - 0.7) + 2, (0.6 - 0.7) + 2])
        assert (got[2:] == 0).all()
        scaled = advantages.prime(
            batch.replace(process_rewards=jnp.asarray(process * 5)), normalise=True
        )
        close(scaled, advantages.prime(batch, normalise=True), rtol=1e-4, atol=1e-4)

    def test_gdpo_ignores_parts_that_do_not_apply(self):
        parts = np.array([[1.0, np.nan], [0.0, 5.0], [0.5, 2.0], [0.2, np.nan]])
        batch = response_batch(np.ones((4, 1)), reward_parts=parts, group=[0, 0, 0, 0])
        options = dict(std="none", whiten=False, weights=(1.0, 2.0))
        got = advantages.gdpo(batch, **options)[:, 0]
        close(got, [0.575, -0.425 + 3.0, 0.075 - 3.0, -0.225])
        with pytest.raises(InputError, match="weights"):
            advantages.gdpo(batch, weights=(1.0,))

    def test_a_group_where_only_the_tail_differs(self):
        """Zero tail: the last column of the longer row has no baseline."""
        mask = [[1, 1], [1, 0]]
        batch = outcome(
            [1.0, 0.0],
            mask=mask,
            old_logprobs=np.log([[0.5, 0.5], [0.5, 0.5]]),
            sum_pi_squared=np.full((2, 2), 0.5),
        )
        got = advantages.optimal_token_baseline(batch, eps=0.0)
        close(got, [[0.5, 1.0], [-0.5, 0.0]])
        got = advantages.optimal_token_baseline(batch, eps=0.0, zero_tail=False)
        close(got, [[0.5, 0.0], [-0.5, 0.0]])
        # A weight of 2 on the first row counts four times.
        weighted = batch.replace(weights=jnp.array([[2.0, 2.0], [1.0, 1.0]]))
        got = advantages.optimal_token_baseline(weighted, eps=0.0)
        close(got, [[0.2, 1.0], [-0.8, 0.0]])

    def test_large_ids_and_many_groups(self):
        ids = np.array([2**31 - 1, -5, 0, -5, 2**31 - 1, 7])
        got = advantages.group_relative(outcome([1, 0, 3, 1, 0, 2], ids), std="none")[:, 0]
        close(got, [0.5, -0.5, 0, 0.5, -0.5, 0])


@pytest.mark.parametrize(
    "function,option",
    [
        (advantages.group_relative, "std"),
        (advantages.group_relative, "singleton"),
        (advantages.rloo, "singleton"),
        (advantages.opo, "singleton"),
        (advantages.gpg, "alpha"),
        (advantages.gpg, "f_norm"),
        (advantages.best_of_group, "std"),
        (advantages.gigpo, "std"),
        (advantages.turn_leave_one_out, "singleton"),
        (advantages.turn_group, "std"),
        (advantages.turn_group, "singleton"),
        (advantages.gae, "time"),
        (advantages.reinforce, "form"),
        (advantages.optimal_token_baseline, "singleton"),
    ],
)
def test_a_misspelt_option_is_refused(function, option):
    batch = make("gigpo", old_logprobs=np.zeros((10, 8)), sum_pi_squared=np.zeros((10, 8)))
    with pytest.raises(InputError, match=option):
        function(batch, **{option: "zeros"})


# -- resampling (E5)


def test_resampling_stays_in_the_group_and_follows_the_weights():
    groups = jnp.asarray(np.tile([4, 0, 9], 400))
    weights = jnp.asarray(np.tile([1.0, 0.0, 0.0, 3.0, 0.0, 0.0], 200))
    resample = jax.jit(resampling.resample)
    draws = np.asarray(resample(jax.random.key(0), weights, groups=groups))
    assert (groups[draws] == groups).all()
    four = draws[np.asarray(groups) == 4]
    assert abs((weights[four] == 3.0).mean() - 0.75) < 0.06
    zeros = draws[np.asarray(groups) == 0]  # all its weights are 0: uniform over its 400 rows
    assert len(set(zeros.tolist())) > 220
    everyone = np.asarray(resample(jax.random.key(1), weights))
    assert (np.asarray(weights)[everyone] > 0).all() and len(set((everyone % 6).tolist())) == 2
    single = resample(jax.random.key(2), jnp.zeros(5), groups=jnp.arange(5))
    assert single.tolist() == [0, 1, 2, 3, 4]


def test_rank_weights_of_groups_of_any_size():
    scores = jnp.array([1.0, 5.0, 1.0, 0.0, 7.0, 1.0])
    groups = jnp.array([2, 1, 2, 2, 2, 2])
    group_rank_weights = compiled(resampling.group_rank_weights)
    bon = group_rank_weights(scores, groups, kind="bon")
    assert bon.tolist() == [0, 1, 0, 0, 1, 0]
    bw = group_rank_weights(scores, groups, kind="bw")
    assert bw.tolist() == [0, 1, 0, 0.5, 0.5, 0]
    tied = group_rank_weights(jnp.zeros(3), jnp.zeros(3, jnp.int32), kind="br")
    assert tied.tolist() == [0.5, 0.25, 0.25]  # the first of equals is the best
    assert [resampling.rank_weights(1, k).tolist() for k in resampling.KINDS] == [[1.0]] * 3
    assert resampling.score_weights(jnp.zeros(4)).tolist() == [pytest.approx(1e-8)] * 4
    for call in (
        lambda: resampling.rank_weights(3, "best"),
        lambda: resampling.score_weights(scores, method="max"),
    ):
        with pytest.raises(InputError, match="one of"):
            call()
