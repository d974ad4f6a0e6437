"""update.py: any split, order or layout of the rows gives the same gradient; bad steps change
nothing."""

import dataclasses

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
    aim = objective(model, loss, reduction, **traits)
    run = jax.jit(lambda p, b: update.loss_and_gradient(p, b, aim, microbatch_rows)[:3])
    return run(params, batch)


def assert_same(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.__name__)
def test_any_microbatch_split_gives_the_same_loss_gradient_and_metrics(
    model, params, batch, reduction
):
    whole = step(model, params, batch, reduction)
    assert float(optax.tree.norm(whole[1])) > 1e-3
    for rows in (1, 2, 4):
        assert_same(step(model, params, batch, reduction, rows), whole)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.__name__)
def test_row_order_and_garbage_under_the_mask_change_nothing(model, params, batch, reduction):
    whole = step(model, params, batch, reduction)
    order = np.random.default_rng(1).permutation(ROWS)
    assert_same(step(model, params, jax.tree.map(lambda x: x[order], batch), reduction), whole)
    spoilt = {
        name: jnp.where(batch.mask > 0, batch.__dict__[name], jnp.nan)
        for name in ("advantages", "old_logprobs", "weights")
    }
    with jax.debug_nans(False):
        assert_same(step(model, params, batch.replace(**spoilt), reduction), whole, rtol=0)


@pytest.mark.smoke
def test_appended_padding_columns_change_nothing(model, params, batch):
    whole = step(model, params, batch, update.token_mean)

    def widen(x):
        return x if x.ndim == 1 else jnp.pad(x, ((0, 0), (0, 3)), constant_values=0)

    assert_same(step(model, params, jax.tree.map(widen, batch), update.token_mean), whole)


def pack(batch: Batch, pairs) -> Batch:
    """Two rows of the batch side by side in each row, as segments 1 and 2."""

    def join(name, a, b):
        value = batch.__dict__[name]
        if name == "segment_ids":
            return jnp.concatenate([value[a], 2 * value[b]])
        return jnp.concatenate([value[a], value[b]])

    fields = {}
    for field in dataclasses.fields(batch):
        value = batch.__dict__[field.name]
        if value is not None and value.ndim == 2:
            rows = [join(field.name, a, b) for a, b in pairs]
            fields[field.name] = jnp.stack(rows)
    return Batch(**fields).check()


PAIRS = [(0, 3), (1, 2), (4, 7), (5, 6)]


@pytest.mark.parametrize("reduction", REDUCTIONS[:3], ids=lambda r: r.__name__)
def test_reductions_count_the_segments_of_packed_rows(model, params, batch, reduction):
    whole = step(model, params, batch, reduction)
    assert_same(step(model, params, pack(batch, PAIRS), reduction), whole)


def test_packed_rows_give_the_gradient_of_unpacked_ones(transformer, weights, batch):
    """Through the transformer: attention and positions must not cross a segment's border."""
    whole = step(transformer, weights, batch, update.seq_mean_token_mean)
    packed = step(transformer, weights, pack(batch, PAIRS), update.seq_mean_token_mean)
    assert_same(packed, whole, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 4, 2), (2, 2, 2)])
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
    on_policy = batch.replace(old_logprobs=model.logprobs(params, batch)[0], weights=None)
    _, ppo, metrics = step(model, params, on_policy, update.token_mean)

    aim = objective(model, policy.policy_gradient, update.token_mean)
    _, plain, *_ = update.loss_and_gradient(params, on_policy, aim, ROWS)
    assert_same(ppo, plain, rtol=1e-4)
    assert float(metrics["pg_clipfrac"]) == 0 and abs(float(metrics["ppo_kl"])) < 1e-6


def test_epochs_and_minibatches_take_the_steps_they_say(model, params, batch):
    optimizer = optax.sgd(0.1)
    aim = objective(model, policy.ppo_clip, update.token_mean)
    state = train_state.new_train_state(params, optimizer)

    def run(steps):
        return jax.jit(lambda s, b: update.fit(s, b, aim, optimizer=optimizer, steps=steps))(
            state, batch
        )

    got, metrics, _ = run(update.Steps(rows=4, microbatch_rows=2, epochs=2))
    assert int(got.step) == 4 and float(metrics["optimizer_steps"]) == 4
    by_hand = state
    for _ in range(2):
        for part in (slice(0, 4), slice(4, 8)):
            minibatch = jax.tree.map(lambda x, part=part: x[part], batch)
            by_hand, *_ = update.fit(
                by_hand, minibatch, aim, optimizer=optimizer, steps=update.Steps(4, 4)
            )
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
    state, _ = train_state.optimizer_step(state, good, jnp.float32(1.0), optimizer)
    gradient = {"w": jnp.array([jnp.inf, 0.0])} if bad == "gradient" else good
    loss = jnp.float32(jnp.nan if bad == "loss" else 1.0)
    after, metrics = train_state.optimizer_step(state, gradient, loss, optimizer)
    assert (after.params["w"] == state.params["w"]).all()
    for a, b in zip(
        jax.tree.leaves(after.opt_state), jax.tree.leaves(state.opt_state), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert (int(after.skipped), int(after.skipped_in_a_row), int(after.step)) == (1, 1, 1)
    assert all(np.isfinite(float(v)) for v in metrics.values())
    again, _ = train_state.optimizer_step(after, good, jnp.float32(1.0), optimizer)
    assert (int(again.skipped), int(again.skipped_in_a_row), int(again.step)) == (1, 0, 2)
    assert not (again.params["w"] == state.params["w"]).any()


def test_a_loss_per_row_and_a_term_per_token_are_reduced_each_by_its_shape(model, params, batch):
    def terms(now, part):
        return (jnp.sum(jnp.where(part.mask > 0, now.logprobs, 0), axis=1), -0.1 * now.entropy), {}

    aim = objective(model, terms, update.token_mean, update.token_mean)
    for rows in (8, 2):
        loss, *_ = update.loss_and_gradient(params, batch, aim, rows)
        logp, entropy = model.logprobs(params, batch)
        per_row = np.where(batch.mask > 0, logp, 0).sum(axis=1)[:7].mean()
        weighted = np.asarray(batch.mask * batch.weights * entropy).sum() / float(batch.mask.sum())
        assert float(loss) == pytest.approx(per_row - 0.1 * weighted, rel=1e-5)


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
    start = batch.replace(old_logprobs=model.logprobs(params, batch)[0])
    aim = objective(model, policy.ppo_clip, update.token_mean)
    steps = update.Steps(rows=4, microbatch_rows=4, epochs=3)
    state = train_state.new_train_state(params, optimizer)

    def run(trust_region):
        def fit(s, b):
            return update.fit(
                s, b, aim, optimizer=optimizer, steps=steps, trust_region=trust_region
            )

        return jax.jit(fit)(state, start)

    free, metrics, _ = run(1e6)
    assert int(free.step) == 6 and float(metrics["trust_region_stopped_steps"]) == 0
    held, metrics, _ = run(1e-5)
    assert int(held.step) == 1 and float(metrics["trust_region_stopped_steps"]) == 5
    assert int(held.skipped) == 0


def test_a_step_without_policy_tokens_moves_nothing(model, params, batch):
    """Momentum of earlier steps would move the weights on a gradient of 0."""
    optimizer = optax.adam(0.1)
    aim = objective(model, policy.ppo_clip, update.token_mean)
    run = jax.jit(lambda s, b: update.fit(s, b, aim, optimizer=optimizer, steps=update.Steps(8, 8)))
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
