"""update.py: any split, order or layout of the rows gives the same gradient; bad steps change
nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import objective

from rljax import learn as update
from rljax.arrays import place
from rljax.batch import Batch, batch_from_rows
from rljax.errors import InputError
from rljax.learn import objective as learning
from rljax.learn import state as train_state
from rljax.losses import policy
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model

REDUCTIONS = [
    update.token_mean,
    update.seq_mean_token_sum,
    update.seq_mean_token_mean,
    update.prompt_mean,
]
ROWS, COLUMNS = 8, 10


VOCAB = 12


class Bigram:
    """The smallest language model: logits of a token are the row of its predecessor. Compiles at
    once."""

    def logprobs(self, params, batch):
        logits = jax.nn.log_softmax(params[jnp.roll(batch.tokens, 1, axis=1)])
        logp = jnp.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
        return logp, -jnp.sum(jnp.exp(logits) * logits, axis=-1)


read = jax.jit(Bigram.logprobs, static_argnums=0)


@pytest.fixture(scope="module")
def model() -> Bigram:
    return Bigram()


@pytest.fixture(scope="module")
def params():
    return jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))


@pytest.fixture(scope="module")
def transformer() -> Model:
    config = decoder(
        VOCAB, layers=2, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.3
    )
    return Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def weights(transformer):
    return transformer.init(jax.random.key(0))


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Uneven lengths, a tool reply in mid-response, an empty row, groups out of order."""
    rng = np.random.default_rng(0)
    lengths = np.array([10, 7, 9, 5, 10, 6, 8, 3])
    column = np.arange(COLUMNS)[None]
    mask = (column >= 2) & (column < lengths[:, None])
    mask[0, 4:6] = False
    mask[7] = False
    made = batch_from_rows(
        jnp.asarray(rng.integers(0, VOCAB, (ROWS, COLUMNS)), jnp.int32),
        jnp.asarray(lengths),
        jnp.asarray(mask, jnp.float32),
        group=jnp.array([0, 1, 0, 2, 1, 2, 0, 1], jnp.int32),
    )

    def normal(s):
        return jnp.asarray(rng.normal(size=(ROWS, COLUMNS)) * s, jnp.float32)

    return made.replace(
        advantages=normal(1), old_logprobs=normal(0.3) - 2.4, weights=1 + normal(0.1)
    )


def step(model, params, batch, reduction, microbatch_rows=ROWS, loss=policy.ppo_clip, **traits):
    return learned(params, batch, aim_of(model, loss, reduction, **traits), microbatch_rows)


aim_of = functools.cache(objective)  # equal ones share their programs


@functools.partial(jax.jit, static_argnums=(2, 3))
def learned(params, batch, aim, microbatch_rows):
    return update.loss_and_gradient(params, batch, aim, microbatch_rows)[:3]


@functools.partial(jax.jit, static_argnums=(2, 3, 4), static_argnames="trust_region")
def fitted(state, batch, aim, optimizer, steps, **options):
    return update.fit(state, batch, aim, optimizer=optimizer, steps=steps, **options)


def assert_same(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.__name__)
def test_any_microbatch_split_gives_the_same_loss_gradient_and_metrics(
    model, params, batch, reduction
):
    whole = step(model, params, batch, reduction)
    assert float(optax.tree.norm(whole[1])) > 1e-3
    # A reduction weighs the whole step before it is split: one of them meets every split.
    for rows in (1, 2, 4) if reduction is update.token_mean else (2,):
        assert_same(step(model, params, batch, reduction, rows), whole)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.__name__)
def test_row_order_and_garbage_under_the_mask_change_nothing(model, params, batch, reduction):
    whole = step(model, params, batch, reduction)
    order = np.random.default_rng(1).permutation(ROWS)
    mixed = jax.tree.map(lambda x: np.asarray(x)[order], batch)
    assert_same(step(model, params, mixed, reduction), whole)
    spoilt = {
        name: np.where(batch.mask > 0, batch.__dict__[name], np.float32(np.nan))
        for name in ("advantages", "old_logprobs", "weights")
    }
    with jax.debug_nans(False):
        assert_same(step(model, params, batch.replace(**spoilt), reduction), whole, rtol=0)


@pytest.mark.smoke
def test_appended_padding_columns_change_nothing(model, params, batch):
    whole = step(model, params, batch, update.token_mean)

    def widen(x):
        return x if x.ndim == 1 else np.pad(x, ((0, 0), (0, 3)), constant_values=0)

    assert_same(step(model, params, jax.tree.map(widen, batch), update.token_mean), whole)


def pack(batch: Batch, pairs) -> Batch:
    """Two rows of the batch side by side in each row, as segments 1 and 2."""

    def join(name, a, b):
        value = np.asarray(batch.__dict__[name])
        return np.concatenate([value[a], value[b] * (2 if name == "segment_ids" else 1)])

    fields = {}
    for field in dataclasses.fields(batch):
        value = batch.__dict__[field.name]
        if value is not None and value.ndim == 2:
            rows = [join(field.name, a, b) for a, b in pairs]
            fields[field.name] = np.stack(rows)
    return Batch(**fields).check()


PAIRS = [(0, 3), (1, 2), (4, 7), (5, 6)]


@pytest.mark.parametrize("reduction", REDUCTIONS[:3], ids=lambda r: r.__name__)
def test_reductions_count_the_segments_of_packed_rows(model, params, batch, reduction):
    whole = step(model, params, batch, reduction)
    assert_same(step(model, params, pack(batch, PAIRS), reduction), whole)


def test_packed_rows_give_the_gradient_of_unpacked_ones(transformer, weights, batch):
    """Through the transformer: attention and positions must not cross a segment's border."""
    whole = step(transformer, weights, batch, update.token_mean)
    packed = step(transformer, weights, pack(batch, PAIRS), update.token_mean)
    assert_same(packed, whole, rtol=1e-4)


@pytest.mark.slow  # test_packed_learning and test_sharding have a transformer on eight devices
@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1), (1, 4, 2)])
def test_eight_devices_give_the_gradient_of_one(transformer, weights, batch, sizes):
    mesh = make_mesh(*sizes)
    shards = sizes[0] * sizes[1]
    whole = step(transformer, weights, batch, update.token_mean)
    spread = dataclasses.replace(transformer, mesh=mesh)
    placed = jax.device_put(jax.device_get(weights), spread.shardings())
    rows = place(jax.device_get(batch), mesh)
    got = step(spread, placed, rows, update.token_mean, shards)
    assert_same(jax.device_get(got), jax.device_get(whole), rtol=1e-4)


def test_an_empty_batch_gives_exactly_zero(model, params, batch):
    empty = batch.replace(mask=jnp.zeros_like(batch.mask))
    for reduction in REDUCTIONS:
        loss, gradient, metrics = step(model, params, empty, reduction)
        assert float(loss) == 0 and float(optax.tree.norm(gradient)) == 0
        assert all(np.isfinite(float(v)) for v in metrics.values())


def test_first_minibatch_of_ppo_is_the_policy_gradient(model, params, batch):
    """At pi = pi_old the ratio is 1: nothing is clipped and the gradient is REINFORCE's."""
    on_policy = batch.replace(old_logprobs=read(model, params, batch)[0], weights=None)
    _, ppo, metrics = step(model, params, on_policy, update.token_mean)
    _, plain, _ = step(model, params, on_policy, update.token_mean, loss=policy.policy_gradient)
    assert_same(ppo, plain, rtol=1e-4)
    assert float(metrics["pg_clipfrac"]) == 0 and abs(float(metrics["ppo_kl"])) < 1e-6


def test_epochs_and_minibatches_take_the_steps_they_say(model, params, batch):
    optimizer = optax.sgd(0.1)
    aim = aim_of(model, policy.ppo_clip, update.token_mean)
    state = train_state.new_train_state(params, optimizer)

    def run(steps):
        return fitted(state, batch, aim, optimizer, steps)

    got, metrics, _ = run(update.Steps(rows=4, microbatch_rows=2, epochs=2))
    assert int(got.step) == 4 and float(metrics["optimizer_steps"]) == 4
    by_hand = state
    for _ in range(2):
        for part in (slice(0, 4), slice(4, 8)):
            minibatch = jax.tree.map(lambda x, part=part: np.asarray(x)[part], batch)
            by_hand, *_ = fitted(by_hand, minibatch, aim, optimizer, update.Steps(4, 4))
    assert_same(got.params, by_hand.params)
    with pytest.raises(InputError, match="must divide 8 rows"):
        run(update.Steps(rows=3, microbatch_rows=3))


def test_a_loss_per_row_is_averaged_over_the_rows_that_have_tokens(batch):
    per_row = jnp.arange(8.0)
    weights = learning._row_weights(batch, 1)
    total, sums = update.weighted_loss(per_row, {"m": per_row}, batch, weights)
    assert float(total) == pytest.approx(np.arange(7).mean())
    assert float(sums["m"][0] / sums["m"][1]) == pytest.approx(3.0)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_non_finite_step_changes_nothing_but_the_counters(bad):
    optimizer = optax.adam(0.1)
    params = {"w": jnp.array([1.0, 2.0])}
    state = train_state.new_train_state(params, optimizer)
    good = {"w": jnp.array([0.5, -0.5])}
    stepped = jax.jit(functools.partial(train_state.optimizer_step, optimizer=optimizer))
    state, _ = stepped(state, good, jnp.float32(1.0))
    gradient = {"w": jnp.array([jnp.inf, 0.0])} if bad == "gradient" else good
    loss = jnp.float32(jnp.nan if bad == "loss" else 1.0)
    after, metrics = stepped(state, gradient, loss)
    assert (after.params["w"] == state.params["w"]).all()
    for a, b in zip(
        jax.tree.leaves(after.opt_state), jax.tree.leaves(state.opt_state), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert (int(after.skipped), int(after.skipped_in_a_row), int(after.step)) == (1, 1, 1)
    assert all(np.isfinite(float(v)) for v in metrics.values())
    again, _ = stepped(after, good, jnp.float32(1.0))
    assert (int(again.skipped), int(again.skipped_in_a_row), int(again.step)) == (1, 0, 2)
    assert not (again.params["w"] == state.params["w"]).any()


def test_a_loss_per_row_and_a_term_per_token_are_reduced_each_by_its_shape(model, params, batch):
    def terms(now, part):
        return (jnp.sum(jnp.where(part.mask > 0, now.logprobs, 0), axis=1), -0.1 * now.entropy), {}

    aim = objective(model, terms, update.token_mean, update.token_mean)
    logp, entropy = map(np.asarray, read(model, params, batch))
    mask, weights = np.asarray(batch.mask), np.asarray(batch.weights)
    for rows in (8, 2):
        loss, *_ = learned(params, batch, aim, rows)
        per_row = np.where(mask > 0, logp, 0).sum(axis=1)[:7].mean()
        weighted = (mask * weights * entropy).sum() / mask.sum()
        assert float(loss) == pytest.approx(per_row - 0.1 * weighted, rel=1e-5)


@pytest.mark.slow
def test_a_loss_of_the_whole_step_has_the_gradient_of_one_microbatch(model, params, batch):
    """A loss that looks at all rows at once (here: its largest log-probs weigh double)."""

    def largest_count_double(now, part):
        logp = jax.lax.stop_gradient(jnp.where(part.mask > 0, now.logprobs, -jnp.inf))
        edge = jnp.sort(logp, axis=None)[-12]
        loss = -now.logprobs * jnp.where(logp >= edge, 2.0, 1.0) - 0.1 * now.entropy
        return loss, {"doubled": (logp >= edge).astype(jnp.float32)}

    options = dict(loss=largest_count_double, whole_step=True)
    whole = step(model, params, batch, update.token_mean, **options)
    for rows in (1, 2, 4):
        assert_same(step(model, params, batch, update.token_mean, rows, **options), whole)
    split = step(model, params, batch, update.token_mean, 2, loss=largest_count_double)
    assert abs(float(split[2]["doubled"]) - float(whole[2]["doubled"])) > 1e-3  # why it is needed


def test_the_trust_region_stops_the_rest_of_the_batch(model, params, batch):
    optimizer = optax.sgd(3.0)
    start = batch.replace(old_logprobs=read(model, params, batch)[0])
    aim = aim_of(model, policy.ppo_clip, update.token_mean)
    steps = update.Steps(rows=4, microbatch_rows=4, epochs=3)
    state = train_state.new_train_state(params, optimizer)

    def run(trust_region):
        return fitted(state, start, aim, optimizer, steps, trust_region=trust_region)

    free, metrics, _ = run(1e6)
    assert int(free.step) == 6 and float(metrics["trust_region_stopped_steps"]) == 0
    held, metrics, _ = run(1e-5)
    assert int(held.step) == 1 and float(metrics["trust_region_stopped_steps"]) == 5
    assert int(held.skipped) == 0


def test_a_step_without_policy_tokens_moves_nothing(model, params, batch):
    """Momentum of earlier steps would move the weights on a gradient of 0."""
    optimizer = optax.adam(0.1)
    aim = aim_of(model, policy.ppo_clip, update.token_mean)

    def run(state, batch):
        return fitted(state, batch, aim, optimizer, update.Steps(8, 8))

    state, *_ = run(train_state.new_train_state(params, optimizer), batch)
    after, metrics, _ = run(state, batch.replace(mask=jnp.zeros_like(batch.mask)))
    assert float(metrics["empty_steps"]) == 1 and int(after.step) == 1
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_the_correct_rows_weigh_in_the_positive_example_loss(batch):
    scores = jnp.array([1.0, 0, 0, 1, 0, 0, 0.5, 1])
    weights = np.asarray(update.positive_token_mean(batch.replace(scores=scores)))
    right = np.asarray(batch.mask) * (np.asarray(scores) >= 1)[:, None]
    np.testing.assert_allclose(weights, right / right.sum())
    none = update.positive_token_mean(batch.replace(scores=jnp.zeros(8)))
    assert (np.asarray(none) == 0).all()
