"""The sampler: what is asked is what is done, and a draw depends on its request and position
alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Decoding, Engine, Sampler, Sampling, draw, generate
from rljax.sampler.generate import WHOLE_BATCH
from rljax.sampler.inputs import request_keys
from rljax.sampler.requests import rules_of
from rljax.tracking import compiles

VOCAB, EOS = 13, 1
PROMPTS = np.array([[3, 4, 5, 0], [6, 7, 0, 0], [8, 9, 10, 11]], np.int32)
LENGTHS = np.array([3, 2, 4], np.int32)


def make_model() -> tuple[Model, dict]:
    """One layer, which decoding unrolls: what is drawn of its logits is all that is tested here."""
    config = decoder(
        VOCAB, layers=1, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.5
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    return model, model.init(jax.random.key(3))


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()[0]


@pytest.fixture(scope="module")
def params():
    return make_model()[1]


logprobs = jax.jit(Model.logprobs, static_argnums=0)
truncate = jax.jit(draw._truncate)


def run(
    model, params, *, n=4, seed=0, prompts=PROMPTS, lengths=LENGTHS, decoding=WHOLE_BATCH, **options
):
    how = Sampling(**{"max_response_tokens": 8, "stop_ids": (EOS,), **options})
    key = jax.random.key(seed)
    return generate(model, params, prompts, lengths, key, how, n=n, decoding=decoding)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_the_trainers_at_the_same_temperature(model, params, temperature):
    batch = run(model, params, temperature=temperature)
    logp, _ = logprobs(model, params, batch, temperature)
    difference = np.where(batch.mask > 0, logp - batch.sampler_logprobs, 0)
    assert np.abs(difference).max() < 2e-5
    assert float(batch.mask.sum()) > 12


@pytest.mark.slow
def test_a_dtype_of_its_own_changes_the_log_probs_slightly(model, params):
    """The same arrays, multiplied in bfloat16; in the model's own dtype, bitwise what it was."""
    plain = run(model, params, temperature=0.0)
    for dtype in ("", "float32"):
        same = run(model, params, temperature=0.0, decoding=Decoding(dtype=dtype))
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(same), strict=True):
            np.testing.assert_array_equal(a, b)
    assert model.in_dtype("float32") == model == model.in_dtype("")
    rounded = run(model, params, temperature=0.7, decoding=Decoding(dtype="bfloat16"))
    exact = logprobs(model, params, rounded, 0.7)[0]
    difference = np.abs(np.where(rounded.mask > 0, exact - rounded.sampler_logprobs, 0))
    assert 1e-4 < difference.sum() / rounded.mask.sum() < 0.05
    with pytest.raises(
        InputError, match="sampler dtype.*float8.*one of float32, bfloat16, float16"
    ):
        Decoding(dtype="float8")


@pytest.mark.slow
def test_a_head_that_one_side_rounds_is_a_mismatch_and_one_that_both_round_is_none():
    """A head that only one side rounds adds to the noise of the layers, which are small here. Where
    both round it, or layers are of their own size, a float32 head lowers nothing."""
    config = decoder(64, layers=2, embed=64, mlp=128, heads=4, kv_heads=2, head_dim=8, init_std=0.2)
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1])).in_dtype("bfloat16")
    params = model.init(jax.random.key(0))
    large = params
    params = {**params, "layers": jax.tree.map(lambda x: 0.02 * x, params["layers"])}

    def k3(sampler, trainer, model=model, params=params):
        batch = run(model, params, n=64, decoding=Decoding(head_in_float32=sampler))
        logp = jax.jit(model.in_dtype("", trainer).logprobs)(params, batch)[0]
        x = np.where(batch.mask > 0, logp - batch.sampler_logprobs, 0)
        return float((np.expm1(x) - x).sum() / batch.mask.sum())

    both, one = k3("on", "on"), [k3("off", "on"), k3("on", "off")]
    assert both == k3("", "") < 1e-8 < 1e-7 < min(one)
    assert k3("off", "off") < 1e-8
    both = k3("on", "on", params=large)
    assert both > 1e-5 and k3("off", "off", params=large) == pytest.approx(both, rel=0.05)
    # A head that the model rounds is rounded on both sides.
    rounded = Model(dataclasses.replace(model.config, head_dtype="bfloat16"), model.mesh)
    assert k3("on", "on", rounded) < 1e-8 and k3("on", "off", rounded) < 1e-8


def test_rows_hold_prompt_response_padding_and_eos_is_part_of_the_response(model, params):
    batch = run(model, params)
    tokens, mask, segments = (np.asarray(x) for x in (batch.tokens, batch.mask, batch.segment_ids))
    stops = 0
    for row in range(12):
        p = row // 4
        start, end = LENGTHS[p], int(segments[row].sum())
        np.testing.assert_array_equal(tokens[row, :start], PROMPTS[p, :start])
        assert (mask[row, :start] == 0).all() and (mask[row, start:end] == 1).all()
        assert (mask[row, end:] == 0).all() and (tokens[row, end:] == 0).all()
        response = tokens[row, start:end]
        if batch.finish_reason[row] == FinishReason.STOP:
            stops += 1
            assert response[-1] == EOS and (response[:-1] != EOS).all()
        else:
            assert batch.finish_reason[row] == FinishReason.LENGTH
            assert len(response) == 8 and (response != EOS).all()
    assert 0 < stops < 12
    np.testing.assert_array_equal(batch.group, np.repeat([0, 1, 2], 4))


def test_a_group_differs_two_keys_differ_and_one_key_repeats(model, params):
    a, b, c = run(model, params), run(model, params), run(model, params, seed=1)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert (np.asarray(a.tokens) != np.asarray(c.tokens)).any()
    assert len({tuple(r) for r in np.asarray(a.tokens[:4]).tolist()}) > 1


@pytest.mark.slow
def test_a_draw_does_not_depend_on_its_neighbours_or_on_the_width_of_the_batch(model, params):
    whole = run(model, params)
    wide = np.pad(PROMPTS, ((0, 0), (0, 3)))
    alone = run(model, params, prompts=wide[:1], lengths=LENGTHS[:1])
    ends = np.asarray(whole.segment_ids).sum(axis=1)
    assert (np.asarray(alone.segment_ids).sum(axis=1) == ends[:4]).all()
    for row, end in enumerate(ends[:4]):
        np.testing.assert_array_equal(whole.tokens[row, :end], alone.tokens[row, :end])


def test_greedy_is_the_argmax_of_the_full_forward(model, params):
    batch = run(model, params, temperature=0.0)
    logits = np.asarray(jax.jit(model.logits)(params, batch))
    chosen = np.argmax(logits[:, :-1], axis=-1)
    keep = np.asarray(batch.mask)[:, 1:] > 0
    np.testing.assert_array_equal(np.asarray(batch.tokens)[:, 1:][keep], chosen[keep])


def test_runtime_settings_never_compile_again_and_are_obeyed(model, params):
    compiles.watch()
    run(model, params)
    before = compiles.count()
    run(model, params, temperature=0.3, seed=5)
    greedy = run(model, params, top_k=1, seed=9)
    other_stop = run(model, params, stop_ids=(5, 7))
    never = run(model, params, stop_ids=())
    assert compiles.count() == before, compiles.names(before)
    np.testing.assert_array_equal(greedy.tokens, run(model, params, temperature=0.0).tokens)
    response = np.asarray(other_stop.tokens)[np.asarray(other_stop.mask) > 0]
    assert (
        np.isin(response, [5, 7]).sum() == (other_stop.finish_reason == FinishReason.STOP).sum() > 0
    )
    assert (never.finish_reason == FinishReason.LENGTH).all()


@pytest.mark.slow
def test_the_law_of_the_samples_is_the_softmax():
    """Chi-square over 40,000 draws of one distribution with a heavy head and tokens of probability
    0."""
    logits = jnp.concatenate([jnp.linspace(2.0, -4.0, 100), jnp.full((50,), -jnp.inf)])
    rows = 40_000
    rules = rules_of([Sampling()] * rows, 150)
    keys, places = request_keys(jax.random.key(0), rows), jnp.zeros(rows, jnp.int32)
    drawn = jax.jit(draw.sample)(jnp.broadcast_to(logits, (rows, 150)), keys, places, rules)
    ids, logp = drawn.ids, drawn.logp
    p = np.asarray(jax.nn.softmax(logits))
    counts = np.bincount(ids, minlength=150)
    assert counts[100:].sum() == 0
    chi2 = np.sum((counts[:100] - rows * p[:100]) ** 2 / (rows * p[:100]))
    assert 60 < chi2 < 148  # 99 degrees of freedom, 0.1 % on either side
    np.testing.assert_allclose(logp, np.log(p[ids]), atol=1e-5)


def possible_parts(masses: np.ndarray, share: float, slack: float = 1e-6) -> set[int]:
    """The parts at which the running sum of float64 masses passes a share of their total; two where
    that is within rounding of a border."""
    sums = np.cumsum(masses)
    targets = [(share - slack) * sums[-1], (share + slack) * sums[-1]]
    last = int(np.flatnonzero(masses)[-1])
    return {min(int(np.searchsorted(sums, target, side="right")), last) for target in targets}


@pytest.mark.parametrize("vocab", [7, 128, 4096, 4500, 9001])
def test_a_draw_inverts_the_running_sums_of_groups_blocks_and_tokens(vocab):
    """Vocabularies of one block, of one group of blocks, and with a short last group: the token is
    where float64 puts it, but for targets within the rounding of a border; and it has mass."""
    rng, rows = np.random.default_rng(vocab), 500
    probs = rng.gamma(0.1, size=vocab).astype(np.float32)
    probs[rng.random(vocab) < 0.3] = 0
    probs[-1] = 0
    u = rng.random((rows, 3)).astype(np.float32)
    u[-2:] = [[0, 0, 0], [1 - 2**-23] * 3]
    ids = np.asarray(jax.jit(draw._inverse_cdf)(np.tile(probs, (rows, 1)), u))
    assert (probs[ids] > 0).all()
    size = min(draw.GROUP, -(-vocab // draw.BLOCK) * draw.BLOCK)
    exact, certain = np.zeros(max(size, vocab)), 0
    exact[:vocab] = probs
    first_ids = range(0, len(exact), size)

    def blocks_of(group: int) -> tuple[int, np.ndarray]:
        """The window of a group, which is as long as the others, and its masses by block."""
        start = min(first_ids[group], len(exact) - size)
        masses = np.where(
            np.arange(start, start + size) < first_ids[group], 0, exact[start:][:size]
        )
        return start, masses.reshape(-1, draw.BLOCK)

    for token, shares in zip(ids, u, strict=True):
        tokens = {
            start + block * draw.BLOCK + place
            for group in possible_parts(np.add.reduceat(exact, first_ids), shares[0])
            for start, blocks in [blocks_of(group)]
            for block in possible_parts(blocks.sum(1), shares[1])
            for place in possible_parts(blocks[block], shares[2])
        }
        assert token in tokens
        certain += len(tokens) == 1
    assert certain > 0.9 * rows


def test_the_rounding_of_logits_hardly_moves_a_draw_from_a_large_vocabulary():
    """Other rows beside a request change the last bits of its logits, by 3e-7. With one uniform for
    all levels 5 in 1,000 draws from such logits changed, a response of 100 tokens in four. The
    rounding here is larger, so that 60 draws tell: 7 to 9 of them changed."""
    rows, vocab = 60, 50_000
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocab))
    rounded = logits * (1 + 6e-5 * jax.random.normal(jax.random.key(9), (rows, vocab)))
    keys, places = request_keys(jax.random.key(0), rows), jnp.zeros(rows, jnp.int32)
    rules = rules_of([Sampling()] * rows, vocab)
    step = jax.jit(draw.sample)
    assert (
        np.sum(step(logits, keys, places, rules).ids != step(rounded, keys, places, rules).ids) <= 1
    )


@pytest.mark.slow
def test_a_program_that_does_more_than_rows_ask_draws_the_same():
    """Modes 1 (some row is greedy) and 2 (some row is ruled) give other rows the draw of mode 0."""
    rows, vocab = 64, 300
    logits = 3 * jax.random.normal(jax.random.key(1), (rows, vocab))
    logits = logits.at[:, 9].set(logits[:, 4])  # of equal ones the first is the most likely
    keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(2), rows))
    places = jnp.arange(rows)
    plain = rules_of([Sampling(temperature=0.7)] * rows, vocab)
    greedy = rules_of([Sampling(temperature=0.7), Sampling(temperature=0.0)] * 32, vocab)
    assert [int(draw.mode_of(rules)) for rules in (plain, greedy)] == [0, 1]
    step = jax.jit(draw.sample)
    first, *others = [step(logits, keys, places, plain, mode) for mode in (0, 1, 2)]
    for other in others:
        assert np.array_equal(first.ids, other.ids)
        np.testing.assert_allclose(other.log_kept, 0, atol=1e-5)
    for mode in (1, 2):
        mixed = step(logits, keys, places, greedy, mode)
        assert np.array_equal(mixed.ids[::2], first.ids[::2])
        assert np.array_equal(mixed.ids[1::2], np.argmax(logits, axis=1)[1::2])


def test_the_rules_keep_the_sets_that_sorting_keeps():
    """The order of Hugging Face's and vLLM's samplers: top-k, then top-p of what is left."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(40, 0.3), size=64).astype(np.float32)
    weights = jnp.asarray(probs / probs.max(axis=1, keepdims=True))
    for how in (
        dict(top_k=5),
        dict(top_p=0.8),
        dict(top_k=7, top_p=0.6),
        dict(top_p=0.01),
        dict(min_p=0.2),
        dict(top_k=9, top_p=0.9, min_p=0.05),
    ):
        asked = Sampling(**how)
        kept = np.asarray(truncate(weights, rules_of([asked] * 64, 40))) > 0
        for row in range(64):
            order = np.argsort(-probs[row])[: asked.top_k or 40]
            mass = probs[row][order] / probs[row][order].sum()
            want = order[(np.cumsum(mass) - mass) < asked.top_p]
            want = [w for w in want if probs[row][w] >= asked.min_p * probs[row].max()]
            assert set(np.flatnonzero(kept[row])) == set(want), (how, row)


WIDE = 3 * draw.LARGEST  # a vocabulary of which the largest weights are looked at first


def wide_weights() -> np.ndarray:
    """Rows that are peaked (twice), flat, of few values with many ties, and all equal."""
    rng = np.random.default_rng(0)
    peaked = np.exp(12 * rng.normal(size=(2, WIDE)))
    flat = np.exp(0.01 * rng.normal(size=(1, WIDE)))
    ties = 2.0 ** -rng.integers(0, 4, size=(1, WIDE))
    weights = np.concatenate([peaked, flat, ties, np.ones((1, WIDE))])
    return (weights / weights.max(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    "how",
    [
        dict(top_k=5),
        dict(top_k=draw.LARGEST),
        dict(top_k=draw.LARGEST + 1),
        dict(top_k=WIDE),
        dict(top_p=0.3),
        dict(top_p=0.95),
        dict(top_k=50, top_p=0.6),
        dict(min_p=0.2),
        dict(top_k=2000, top_p=0.99, min_p=0.01),
    ],
)
def test_a_large_vocabulary_keeps_the_sets_that_sorting_keeps(how):
    """Whether the edge is among the largest weights or behind them, and ties at it stay."""
    weights, asked = wide_weights(), Sampling(**how)
    kept = np.asarray(truncate(weights, rules_of([asked] * 5, WIDE))) > 0
    for row, exact in zip(kept, weights.astype(np.float64), strict=True):
        ordered = np.sort(exact)[::-1]
        edge = ordered[asked.top_k - 1] if asked.top_k else 0.0
        inside = ordered[ordered >= edge]
        edge = max(edge, asked.min_p * ordered[0])
        share = np.cumsum(inside) / inside.sum()
        # By what a sum of float32 leaves open.
        at = np.searchsorted(share, asked.top_p + np.array([-1e-5, 1e-5]) * (asked.top_p < 1))
        least, most = inside[np.minimum(at, len(inside) - 1)][::-1]
        assert row[exact >= max(edge, most)].all() and not row[exact < max(edge, least)].any()


def test_a_row_keeps_what_it_keeps_alone_whatever_stands_beside_it():
    weights = wide_weights()
    asked = [Sampling(top_p=0.9), Sampling(), Sampling(top_p=0.9), Sampling(top_k=9), Sampling()]
    together = truncate(weights, rules_of(asked, WIDE))
    for row, one in enumerate(asked):
        alone = truncate(weights[row : row + 1], rules_of([one], WIDE))
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.slow
def test_no_draw_sorts_a_row():
    """Not in the compiled program either: XLA makes a sort of a top-k that it does not know."""
    rows, keys = wide_weights(), request_keys(jax.random.key(0), 5)
    asked = rules_of([Sampling(top_k=5, top_p=0.9, min_p=0.1)] * 5, WIDE)
    places = jnp.arange(5)
    text = jax.jit(draw.sample).lower(rows, keys, places, asked).compile().as_text()
    assert " sort(" not in text and "TopK" in text
    plain = rules_of([Sampling()] * 5, WIDE)
    text = jax.jit(draw.sample, static_argnames="mode").lower(rows, keys, places, plain, mode=0)
    assert " sort(" not in text.compile().as_text()


@pytest.mark.slow
def test_the_next_generate_uses_the_new_parameters_and_records_their_version(model, params):
    moved = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.3), params)
    asked = Sampling(max_response_tokens=8, stop_ids=(EOS,))
    before, after = (
        generate(
            *(model, weights, PROMPTS, LENGTHS, jax.random.key(0), asked),
            n=4,
            version=version,
            decoding=WHOLE_BATCH,
        )
        for weights, version in ((params, 3), (moved, 4))
    )
    assert (np.asarray(before.tokens) != np.asarray(after.tokens)).any()
    assert set(np.asarray(after.policy_version)[np.asarray(after.mask) > 0]) == {4}


@pytest.mark.slow
def test_eight_devices_sample_the_tokens_of_one(model, params):
    import dataclasses

    spread = dataclasses.replace(model, mesh=make_mesh(2, 4, 1))
    placed = jax.device_put(jax.device_get(params), spread.shardings())
    prompts, lengths = np.repeat(PROMPTS, 2, axis=0)[:4], np.repeat(LENGTHS, 2)[:4]
    one = run(model, params, prompts=prompts, lengths=lengths, n=4)
    eight = run(spread, placed, prompts=prompts, lengths=lengths, n=4)
    np.testing.assert_array_equal(one.tokens, eight.tokens)


@pytest.mark.parametrize(
    "options, pattern",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_response_tokens": 0}, "max_resp"),
    ],
)
def test_bad_sampling_is_refused(options, pattern):
    with pytest.raises(InputError, match=pattern):
        Sampling(**options)


def test_an_empty_prompt_is_refused(model, params):
    with pytest.raises(InputError, match="prompt lengths"):
        run(model, params, lengths=np.array([0, 2, 4]))


@pytest.mark.slow
def test_a_stream_of_changing_requests_compiles_at_most_eight_programs(model, params):
    """Temperatures, rules, lengths, groups, stop sets, seeds, long prompts and a ragged last round
    are all runtime values."""
    rng = np.random.default_rng(0)
    sampler = Sampler(Engine(model, 5, 29, steps=7), chunk_tokens=6, prefill_rows=3)
    compiles.watch()
    before = compiles.count()
    asked = []
    for i in range(24):
        how = Sampling(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
            top_k=int(rng.integers(0, 4)),
            top_p=float(rng.uniform(0.3, 1)),
            min_p=float(rng.uniform(0, 0.2)),
            max_response_tokens=int(rng.integers(1, 10)),
            stop_ids=tuple(rng.choice(VOCAB, size=rng.integers(0, 6), replace=False).tolist()),
            logit_bias=((3, 2.0), (4, -1.0)) if i % 3 == 0 else (),
            allowed_ids=(2, 3, 4, 5) if i % 4 == 0 else (),
            seed=i if i % 5 == 0 else None,
        )
        prompt = rng.integers(0, VOCAB, rng.integers(1, 19))
        asked += sampler.submit(prompt, how, n=int(rng.integers(1, 4)))
        if i % 6 == 5:
            sampler.step(params)
    done = list(sampler.run(params))
    assert all(sample.finish_reason is not None for sample in asked) and len(done) <= len(asked)
    assert compiles.count() - before <= 8, compiles.names(before)
    for sample in asked:
        if sample.sampling.allowed_ids:
            assert set(sample.tokens) <= {2, 3, 4, 5}
        assert 1 <= len(sample.tokens) <= sample.sampling.max_response_tokens


@pytest.mark.slow
def test_a_whole_batch_in_few_slots_compiles_once_whatever_is_asked(model, params):
    how = Decoding(slots=5)
    run(model, params, decoding=how)
    before = compiles.count()
    for options in (dict(temperature=0.2), dict(top_p=0.5, min_p=0.1), dict(stop_ids=(4, 5))):
        run(model, params, decoding=how, seed=3, **options)
    assert compiles.count() == before, compiles.names(before)
