"""Packing: nothing is lost, rows hold what they may, and a packed example learns as alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes, worked_example
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax import learn as update
from rljax.batch import Batch
from rljax.data.offline.batches import batch_arrays, longest_row
from rljax.data.offline.encode import Example
from rljax.data.offline.packing import pack, pack_examples
from rljax.data.online.loader import Loader
from rljax.data.online.prompts import pad_examples
from rljax.errors import InputError
from rljax.losses.policy import PolicyOutputs, negative_log_likelihood
from rljax.mesh import make_mesh
from rljax.models import attention
from rljax.models.attention_paths import allowed_columns
from rljax.models.builtin import decoder
from rljax.models.model import Model

VOCAB = 23


def random_examples(seed: int, lengths) -> list[Example]:
    rng = np.random.default_rng(seed)
    out = []
    for n in lengths:
        mask = (rng.random(n) < 0.6).astype(np.float32)
        mask[-1] = 1
        out.append(Example(rng.integers(1, VOCAB, n).astype(np.int32), mask))
    return out


# -- which sequence goes where (the peer's own rows: tests/helpers/golden_checks/data.py) --


@pytest.mark.smoke
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 16))
def test_every_token_is_packed_once_and_no_row_is_too_long(lengths, row_tokens):
    for strategy in ("bfd", "bfd_split", "wrapped"):
        rows = pack(lengths, row_tokens, strategy)
        sizes = [sum(p.stop - p.start for p in row) for row in rows]
        assert max(sizes) <= row_tokens and min(sizes) > 0
        found = sorted((p.index, t) for row in rows for p in row for t in range(p.start, p.stop))
        kept = [min(n, row_tokens) if strategy == "bfd" else n for n in lengths]
        assert found == [(i, t) for i, n in enumerate(kept) for t in range(n)]
        if strategy == "wrapped":
            assert all(size == row_tokens for size in sizes[:-1])
        else:  # no two rows would fit into one
            assert all(a + b > row_tokens for a, b in zip(sizes, sizes[1:], strict=False))


def test_the_fullest_row_that_has_room_is_filled_first():
    rows = [[p.index for p in row] for row in pack([6, 7, 2, 3, 1, 5], 8)]
    assert rows == [[1, 4], [0, 2], [5, 3]]
    assert [[p.index for p in row] for row in pack([5, 6, 2], 8)] == [[1, 2], [0]]
    assert [[p.index for p in row] for row in pack([6, 6, 2], 8)] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("lengths", "row_tokens", "strategy", "says"),
    [
        ([3, 0], 8, "bfd", "lengths[1]"),
        ([3], 0, "bfd", "row_tokens"),
        ([3], 2.5, "bfd", "2.5"),
        ([3], 8, "ffd", "'strategy'"),
    ],
)
def test_bad_requests(lengths, row_tokens, strategy, says):
    with pytest.raises(InputError) as caught:
        pack(lengths, row_tokens, strategy)
    assert says in str(caught.value)


def test_efficiency_counts_real_tokens():
    packed = pack_examples(random_examples(0, [5, 3, 4, 4, 2]), 8)
    assert len(packed.rows) == 3 and packed.efficiency == 18 / 24
    assert pack_examples([], 8) == ([], 0.0)
    with pytest.raises(InputError, match="example 1 has 9 tokens"):
        pack_examples(random_examples(0, [5, 9]), 8)


# -- the arrays of packed rows --


@pytest.mark.slow
def test_worked_example():
    example = worked_example("sft.packing")
    given_, want = example["inputs"], example["outputs"]
    # Mask 1 at a first token, as text that is learned whole has it, is taken away.
    items = [Example(np.array([3, 4, 5]), np.array([1, 1, 1])), Example(np.array([6, 7]), [0, 1])]
    arrays = batch_arrays("examples", [items], length=6)
    assert arrays["segment_ids"].tolist() == [given_["segment_ids"]]
    assert arrays["positions"].tolist() == [want["positions"]]
    assert arrays["mask"].tolist() == [want["target_mask"]]
    assert arrays["tokens"].tolist() == [[3, 4, 5, 6, 7, 0]]
    segments, column = jnp.asarray(arrays["segment_ids"]), jnp.arange(6)
    allowed = allowed_columns(segments, segments, column, column, 0)[0] & (segments[0] > 0)[:, None]
    np.testing.assert_array_equal(allowed, np.array(want["attention_mask"], bool))
    batch = Batch(**{k: jnp.asarray(v) for k, v in arrays.items()}).check()
    logp = jnp.asarray([given_["token_logp"]])
    loss, _ = negative_log_likelihood(PolicyOutputs(logp, jnp.zeros_like(logp)), batch)
    for name, reduction in (("token", update.token_mean), ("seq", update.seq_mean_token_mean)):
        total = float(jnp.sum(reduction(batch) * loss))
        assert total == pytest.approx(want[f"loss_{name}_mean"], rel=1e-6)


def test_an_unpacked_row_is_what_padding_makes_of_it():
    items = random_examples(3, [4, 7, 2])
    items = [Example(ids, np.concatenate([[0], mask[1:]])) for ids, mask in items]
    got, want = batch_arrays("examples", items, length=9), pad_examples(items, length=9)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
        assert got[name].dtype == want[name].dtype
    assert longest_row("examples", items) == 7
    assert longest_row("examples", [items]) == 13
    with pytest.raises(InputError, match="13 tokens"):
        batch_arrays("examples", [items], length=12)


@pytest.mark.smoke
def test_packed_rows_resume_exactly():
    items = random_examples(1, [5, 3, 4, 4, 2, 7, 1, 6, 6, 2, 3])
    rows, _ = pack_examples(items, 8)

    def arrays(loader):
        return [batch_arrays("examples", next(loader), length=8) for _ in range(4)]

    straight = Loader(rows, batch_size=3, seed=5)
    want = arrays(straight) + arrays(straight)
    first, second = (Loader(rows, batch_size=3, seed=5) for _ in range(2))
    arrays(first)
    second.set_state(json.loads(json.dumps(first.get_state())))
    for got, expected in zip(arrays(second), want[4:], strict=True):
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(want[:4], want[4:], strict=True))


# -- packed and unpacked learn the same --


@pytest.mark.parametrize("impl", lanes(["xla"], ["reference", "splash"]))
def test_packed_equals_unpacked(monkeypatch, impl):
    # The model leaves the choice of a path to the device; here each path is chosen in turn.
    monkeypatch.setattr(attention, "_choose", lambda *args: impl)
    config = decoder(
        VOCAB, layers=1, embed=16, mlp=32, heads=2, kv_heads=1, head_dim=8, init_std=0.3
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params = model.init(jax.random.key(0))

    @jax.jit
    def learn(params, batch):
        def total(params):
            logprobs, entropy = model.logprobs(params, batch)
            loss, _ = negative_log_likelihood(PolicyOutputs(logprobs, entropy), batch)
            loss = jnp.where(batch.mask > 0, loss, 0.0)
            means = [update.token_mean(batch), update.seq_mean_token_mean(batch)]
            means = jnp.stack([jnp.sum(weights * loss) for weights in means])
            return means[0] + 0.7 * means[1], (means, logprobs)

        return jax.value_and_grad(total, has_aux=True)(params)

    items = random_examples(2, [6, 3, 9, 4, 2, 5])
    rows, efficiency = pack_examples(items, 12)
    assert len(rows) == 3 and efficiency == 29 / 36
    arrays = batch_arrays("examples", [*rows, [], [], []], length=12)  # of one shape: one program
    packed = learn(params, Batch(**{k: jnp.asarray(v) for k, v in arrays.items()}))
    alone = batch_arrays("examples", items, length=12)
    alone = learn(params, Batch(**{k: jnp.asarray(v) for k, v in alone.items()}))
    np.testing.assert_allclose(packed[0][1][0], alone[0][1][0], rtol=1e-5)
    order = [next(i for i, item in enumerate(items) if item is one) for row in rows for one in row]
    found = [
        packed[0][1][1][row][arrays["segment_ids"][row] == 1 + k][1:]
        for row, examples in enumerate(rows)
        for k in range(len(examples))
    ]
    for index, logprobs in zip(order, found, strict=True):
        want = alone[0][1][1][index, 1 : len(items[index].ids)]
        np.testing.assert_allclose(logprobs, want, atol=2e-5)
    top = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(alone[1]))
    for got, want in zip(jax.tree.leaves(packed[1]), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * top)
