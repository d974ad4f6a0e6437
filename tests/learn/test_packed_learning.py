"""Packed passes: every token is where it should be, and nothing that is learned changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reader import Reader
from test_policy_losses import LOSSES as POLICY_LOSSES
from test_preference_losses import LOSSES as PREFERENCE_LOSSES
from toy import objective as policy_objective

from rljax import learn
from rljax.arrays import place
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.learn import Objective
from rljax.learn.packing import Packing, pack, packing_for
from rljax.losses import policy, preference
from rljax.losses import reward_model as reward_losses
from rljax.losses import value as value_losses
from rljax.mesh import make_mesh, row_shards
from rljax.models.builtin import decoder
from rljax.models.model import Model

VOCAB = 11
REDUCTIONS = [
    learn.token_mean,
    learn.seq_mean_token_sum,
    learn.seq_mean_token_mean,
    learn.prompt_mean,
    learn.positive_token_mean,
]


def mesh(*sizes):
    return make_mesh(*(sizes or (1, 1, 1)), devices=jax.devices()[: int(np.prod(sizes or 1))])


def groups(seed, prompts=4, samples=3, prompt=9, response=7, dtype=np.float64, spread=1.0) -> Batch:
    """Random prompts with ragged responses: tool replies, rows whose reward failed, an empty
    response, a prompt that two groups have, one of full length."""
    rng = np.random.default_rng(seed)
    b, s = prompts * samples, prompt + response
    before = np.repeat(rng.integers(1, prompt + 1, prompts), samples)
    after = np.minimum(rng.geometric(1 / (spread * response / 2), b), response)
    before[:samples], after[0] = prompt, response
    after[b // 2] = 0
    column, total = np.arange(s), before + after
    words = rng.integers(1, VOCAB, (prompts, s)).repeat(samples, axis=0)
    words[-samples:] = words[:samples]
    own = column >= before[:, None]
    tokens = np.where(own, rng.integers(1, VOCAB, (b, s)), words)
    real = column < total[:, None]
    mask = own & real
    mask &= rng.random((b, s)) > 0.15
    mask[1] = False

    def draw(scale):
        return rng.normal(size=(b, s)) * scale

    group = np.arange(b) // samples
    group[1] = b
    whole = dict(
        tokens=np.where(real, tokens, 0),
        segment_ids=real,
        positions=np.where(real, column, 0),
        group=group,
    )
    numbers = dict(
        mask=mask,
        advantages=draw(1),
        old_logprobs=draw(0.3) - 2.4,
        sampler_logprobs=draw(0.3) - 2.4,
        ref_logprobs=draw(0.3) - 2.4,
        weights=1 + draw(0.1),
        values=draw(1),
        returns=draw(1),
        sum_pi_squared=np.abs(draw(0.2)) + 0.1,
        rewards=draw(1),
        process_rewards=draw(1),
        scores=rng.integers(0, 2, b),
    )
    whole = {name: jnp.asarray(x.astype(np.int32)) for name, x in whole.items()}
    numbers = {name: jnp.asarray(x.astype(dtype)) for name, x in numbers.items()}
    return Batch(**whole, **numbers).check()


def packings(batch: Batch, prompt: int, shared: bool):
    """Small ones, so that there are several microbatches and a group does not fit a row."""
    s = batch.tokens.shape[1]
    size = max(prompt, s - prompt) if shared else s
    yield Packing(size, 6, 1, 5, shared, mesh())
    yield Packing(size + 3, 12, 1, 20, shared, mesh())


QUICK = {"xla_backend_optimization_level": 0}
_pack = jax.jit(
    lambda b, live, packing, k: pack(b, packing, live=live, rows_per_example=k),
    static_argnums=(2, 3),
    compiler_options=QUICK,
)


def check_packed(batch: Batch, live, packing: Packing, together: int) -> dict:
    """Asserts the rule of packed rows for every token -> {microbatches, distinct tokens}."""
    packed = jax.device_get(_pack(batch, live, packing, together))
    rows, columns, homes = packed.rows, packed.columns, packed.homes
    width = packing.blocks * packing.block_tokens
    flat = {
        f.name: getattr(rows, f.name).reshape(-1, width)
        for f in dataclasses.fields(rows)
        if getattr(rows, f.name) is not None and f.name != "prefix_blocks"
    }
    taken, held = np.zeros(flat["tokens"].shape, int), np.asarray(live)
    assert np.array_equal(homes >= 0, held)
    for b in np.flatnonzero(held):
        length, home = int(np.sum(batch.segment_ids[b] > 0)), homes[b]
        at = columns[b, :length]
        for name in ("tokens", "positions", "mask"):
            assert np.array_equal(flat[name][home, at], getattr(batch, name)[b, :length]), name
        ids = flat["segment_ids"][home, at]
        blocks = at // packing.block_tokens
        changes = np.flatnonzero(np.diff(ids) | np.diff(blocks)) + 1  # where the rest begins
        assert len(changes) <= (1 if packing.shared else 0)
        for piece in np.split(np.arange(length), changes):
            assert np.all(np.diff(at[piece]) == 1) and len(set(blocks[piece])) == 1
        taken[home, at] += 1
        if packing.shared:
            rest = np.arange(length) >= (changes[0] if len(changes) else length)
            rest |= len(changes) == 0
            assert np.array_equal(flat["previous"][home, at][1:], at[:-1])
            names = flat["prefix_ids"][home, at]
            if len(changes):
                assert set(names[~rest]) <= {0} and set(names[rest]) == {ids[0]}
                home_block = rows.prefix_blocks.reshape(-1, packing.blocks)[home, blocks[rest]]
                assert set(home_block) == {blocks[0]}
            else:
                assert not names.any()
    used = taken > 0
    assert np.array_equal(flat["segment_ids"] > 0, used)  # nothing else is real
    assert flat["segment_ids"].max() <= packing.block_tokens  # however long the rows are
    # Only a prefix is several rows' own, and segments of a packed row are pieces.
    sequences = packed.sequences.reshape(-1, packed.sequences.shape[-1])
    for unit, members in enumerate(sequences):
        here = members[members < batch.rows]
        assert sorted(here) == sorted(np.flatnonzero(homes == unit))
        if together > 1:
            assert np.array_equal(here[::together] + 1, here[1::together])
    last = max(homes.max(), 0)
    assert packed.count == (last // packing.rows + 1 if held.any() else 0)
    return {"count": int(packed.count), "computed": int(used.sum())}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_every_token_is_packed_once_and_a_prompt_once_for_its_rows(shared):
    for seed in range(6):
        batch = groups(seed, prompts=4, samples=4, dtype=np.float32)
        live = np.any(np.asarray(batch.mask) > 0, axis=1)
        for packing in packings(batch, 9, shared):
            found = check_packed(batch, live, packing, 1)
            lengths = np.sum(np.array(batch.segment_ids), axis=1)[live]
            assert found["computed"] <= lengths.sum()
            if not shared:
                assert found["computed"] == lengths.sum()
            pairs = np.repeat(live.reshape(-1, 2).any(axis=1), 2)
            check_packed(batch, pairs, packing, 2)
    if shared:  # one row has room for all: what is computed are prompts once, and the responses
        batch = groups(1, dtype=np.float32)
        live = np.any(np.asarray(batch.mask) > 0, axis=1)
        found = check_packed(batch, live, Packing(16, 20, 1, 20, True, mesh()), 1)
        chosen = [tuple(row[:n]) for row, n in zip(*_prompts(batch), strict=True)]
        rest = np.sum(np.array(batch.segment_ids), axis=1) - _prompts(batch)[1]
        prompts = {c for c, alive in zip(chosen, live, strict=True) if alive}
        assert found["computed"] == sum(map(len, prompts)) + rest[live].sum()


def _prompts(batch):
    """Tokens, and how many come before the first policy token (of rows that have one)."""
    mask = np.array(batch.mask) > 0
    length = np.sum(np.array(batch.segment_ids), axis=1)
    return np.array(batch.tokens), np.where(mask.any(axis=1), mask.argmax(axis=1), length)


def both(batch: Batch, aim: Objective, packing: Packing, params):
    """Loss, gradient and metrics of the plain rows, and of the packed ones."""
    return _learned(params, batch, aim, None), _learned(params, batch, aim, packing)


@functools.partial(jax.jit, static_argnums=(2, 3), compiler_options=QUICK)
def _learned(params, batch, aim, packing):
    return learn.loss_and_gradient(params, batch, aim, batch.rows, packing)[:3]


def assert_exact(plain, packed):
    loss, gradient, metrics = packed
    assert 0 < metrics.pop("positions_filled") <= 1 and metrics.pop("positions") > 0
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(packed), strict=True):
        wide = a.dtype == jnp.float64  # but for counts, which are float32
        np.testing.assert_allclose(b, a, rtol=1e-6 if wide else 1e-5, atol=1e-9)
    assert loss.dtype == jnp.float64
    assert all(g.dtype == jnp.float64 for g in jax.tree.leaves(gradient))


@functools.wraps(preference.bco)
def _bco(policy, batch):
    return preference.bco(policy, batch, 0.1, jnp.full(batch.rows, 0.4, batch.mask.dtype))


def policy_cases():
    for i, (name, (loss, _, _)) in enumerate(POLICY_LOSSES.items()):
        aim = policy_objective(
            Reader(),
            loss,
            REDUCTIONS[i % len(REDUCTIONS)],
            corrected=not spec(loss).applies_weights,
            whole_step=spec(loss).whole_step,
        )
        yield f"policy {name}", aim
    # Its own table gives each row of a batch a number by its place, which microbatches change.
    losses = {**PREFERENCE_LOSSES, "bco": _bco}
    for name, loss in losses.items():
        aim = policy_objective(Reader(), loss, learn.token_mean, whole_step=spec(loss).whole_step)
        yield f"preference {name}", dataclasses.replace(aim, rows_per_example=spec(loss).rows)


def scalar_cases():
    def terms(loss, read):
        return lambda x, b: ([(out := loss(read(x, b), b))[0]], out[1])

    for name in ("squared_error", "huber", "clipped"):
        if (loss := getattr(value_losses, name, None)) is not None:
            whole = terms(loss, lambda x, b: x)
            yield f"value {name}", Objective(Reader().values, whole, (learn.token_mean,), (False,))

    def last(x, b):
        return x[jnp.arange(b.rows), jnp.sum(b.segment_ids > 0, axis=1) - 1]

    yield (
        "scores",
        Objective(
            Reader().token_scores,
            terms(reward_losses.bradley_terry, last),
            (learn.token_mean,),
            (False,),
            rows_per_example=2,
        ),
    )


CASES = {**dict(policy_cases()), **dict(scalar_cases())}
# The pairs of dpo_sigmoid are in test_rows_that_no_block_holds_are_refused..., too.
FEW = ("policy gspo",)


@pytest.mark.parametrize(
    "name", [c if c in FEW else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_every_loss_is_exact_in_packed_rows(name):
    with jax.enable_x64(True):
        params = Reader().params(VOCAB)
        plain = packed = None
        for seed in range(3):
            batch = groups(seed, samples=6 if "preference tpo" in name else 4)
            for packing in packings(batch, 9, shared=True):
                plain, packed = both(batch, CASES[name], packing, params)
                assert_exact(plain, packed)
        unshared = next(packings(batch, 9, shared=False))
        assert_exact(*both(batch, CASES[name], unshared, params))
        assert float(jnp.abs(plain[1]["embed"]).max()) > 0


def test_the_shape_of_a_microbatch_follows_the_step():
    def made(*sizes, **how):
        return packing_for(*sizes, mesh(), **how)

    assert made(16, 160, 16, prompt_tokens=32, samples=8) is None  # one small microbatch anyway
    group = made(32, 160, 32, prompt_tokens=32, samples=8)
    assert (group.block_tokens, group.blocks, group.full_rows) == (128, 17, 16)
    long = made(64, 16384, 1, prompt_tokens=512, samples=8)  # a block for a prompt would be empty
    assert (long.shared, long.block_tokens, long.blocks) == (False, 16384, 1)
    # Responses shorter than their prompt stand several to a block, and groups stay whole.
    prompts = made(64, 1024 + 128, 16, prompt_tokens=1024, samples=8)
    assert (prompts.shared, prompts.block_tokens, prompts.blocks) == (True, 1024, 2)
    assert prompts.full_rows == 8
    pairs = made(64, 512, 16, prompt_tokens=256, samples=2, rows_per_example=2)
    assert (pairs.shared, pairs.block_tokens, pairs.blocks) == (True, 256, 12)
    alone = made(64, 512, 16)
    assert (alone.shared, alone.block_tokens, alone.blocks) == (False, 512, 8)


@pytest.mark.parametrize("shared", [True, False])
def test_a_row_that_was_packed_before_keeps_its_segments(shared):
    """Two segments a row, the first of them in a prefix that rows share up to its third token."""
    ids = np.repeat([[1, 1, 1, 1, 2, 2, 2, 0]], 4, axis=0)
    batch = Batch(
        tokens=np.tile(np.arange(8), (4, 1)),
        segment_ids=ids,
        positions=np.tile([0, 1, 2, 3, 0, 1, 2, 0], (4, 1)),
        mask=np.tile(np.float32([0, 0, 0, 1, 0, 1, 1, 0]), (4, 1)),
    )
    packing = Packing(8, 4, 1, 4, shared, mesh())
    packed = jax.device_get(_pack(batch, np.ones(4, bool), packing, 1))
    names = packed.rows.segment_ids.reshape(packed.homes.max() + 1, -1)
    for home, columns in zip(packed.homes, packed.columns, strict=True):
        own = [(at // 8, names[home, at]) for at in columns[:7]]
        assert len(set(own[4:])) == len(set(own[:3])) == 1 and own[3] != own[4]
        assert (own[0] == own[3]) == (not shared)
        if shared:  # the fourth token alone continues what stands in the prefix
            continued = packed.rows.prefix_ids.reshape(names.shape)[home, columns[:7]]
            assert continued.tolist() == [0, 0, 0, own[0][1], 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks, shared", [pytest.param(2, False, marks=pytest.mark.slow), (6, True)]
)
def test_pairs_are_packed_as_well_as_single_rows(blocks, shared):
    batch = groups(0, prompts=16, samples=4, prompt=5, response=3, dtype=np.float32)
    live = np.ones(batch.rows, bool)
    packing = Packing(64, blocks, 1, 64, shared, mesh())
    single = check_packed(batch, live, packing, 1)["count"]
    assert check_packed(batch, live, packing, 2)["count"] <= single + 1


def test_rows_that_no_block_holds_are_refused_and_an_example_gets_its_blocks():
    batch = groups(0, dtype=np.float32)
    with pytest.raises(InputError, match="rows of 16 tokens in blocks of 7.*blocks of 8 tokens"):
        pack(batch, Packing(7, 9, 1, 9, True, mesh()))
    narrow = Packing(9, 2, 1, 1, True, mesh())
    with jax.enable_x64(True):
        batch = groups(0, samples=4)
        aim, params = CASES["preference dpo_sigmoid"], Reader().params(VOCAB)
        assert_exact(*both(batch, aim, narrow, params))


@pytest.mark.slow
def test_an_empty_batch_computes_nothing():
    with jax.enable_x64(True):
        batch = groups(0)
        empty = batch.replace(mask=jnp.zeros_like(batch.mask))
        aim, packing = CASES["policy ppo_clip"], next(packings(batch, 9, shared=True))
        assert int(pack(empty, packing).count) == 0
        _, (loss, gradient, _) = both(empty, aim, packing, Reader().params(VOCAB))
        assert float(loss) == 0 and not any(np.any(x) for x in jax.tree.leaves(gradient))


_count = jax.jit(lambda b, p: pack(b, p).count, static_argnums=1)


def test_one_program_serves_all_lengths_and_computes_what_they_need():
    packing = packing_for(256, 160, 256, mesh(), prompt_tokens=32, samples=8)
    counts, programs = [], set()
    for spread in (0.02, 0.5, 100.0):
        batch = groups(0, 32, 8, 32, 128, np.float32, spread=spread)
        counts.append(int(_count(batch, packing)))
        programs.add(_count._cache_size())
    assert len(programs) == 1
    tokens = packing.rows * packing.blocks * packing.block_tokens
    assert counts[0] <= 2 and counts[0] < counts[1] < counts[2]
    assert counts[2] * tokens < 0.9 * 256 * 160  # full responses, their prompts once


@pytest.mark.parametrize(
    "prompts, samples, prompt, response",
    [
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((8, 8, 47, 12), (16, 8, 23, 8), (9, 5, 50, 11), (8, 8, 128, 24))
        ),
        (16, 6, 30, 70),
        (30, 3, 96, 9),
    ],
)
def test_a_step_of_full_length_takes_the_microbatches_that_are_promised(
    prompts, samples, prompt, response
):
    """What is left over of a block of rests holds none of another prompt."""
    rows, columns = prompts * samples, prompt + response
    how = dict(prompt_tokens=prompt, samples=samples)
    packing = packing_for(rows, columns, rows, mesh(), **how)
    column = np.broadcast_to(np.arange(columns), (rows, columns))
    words = np.repeat(np.arange(prompts), samples)[:, None] + 1
    words = np.where(column < prompt, words, 7).astype(np.int32)
    real, mask = np.ones((rows, columns), np.int32), (column >= prompt).astype(np.float32)
    batch = Batch(words, real, column.astype(np.int32), mask)
    promised = -(-rows // packing.full_rows)
    assert packing.shared and int(_count(batch, packing)) == promised


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [dict(data=2, fsdp=2, tensor=2), pytest.param(dict(fsdp=4, context=2), marks=pytest.mark.slow)],
)
def test_eight_devices_pack_to_the_gradient_of_one(sizes):
    """Every device decides alike where a sequence goes; a packed row is one device's."""
    config = decoder(
        VOCAB + 1, layers=1, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.3
    )
    one, many = mesh(), make_mesh(**sizes)
    batch, model = groups(0, prompts=4, samples=4, dtype=np.float32), Model(config, one)
    params = model.init(jax.random.key(0))

    def gradient(model, params, batch, packing):
        aim = policy_objective(model, policy.ppo_clip, learn.seq_mean_token_mean)
        run = jax.jit(lambda p, b: learn.loss_and_gradient(p, b, aim, b.rows, packing)[:2])
        return jax.device_get(run(params, batch))

    plain = gradient(model, params, batch, None)
    spread = Model(config, many)
    placed = jax.device_put(jax.device_get(params), spread.shardings())
    packing = Packing(12, 6, row_shards(many), 8, True, many)
    packed = gradient(spread, placed, place(jax.device_get(batch), many), packing)
    for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
