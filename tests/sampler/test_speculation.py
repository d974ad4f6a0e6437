"""Decoding with drafts gives the samples of decoding without: the same tokens, log-probs and ends,
in both loops, whatever is asked; and it takes fewer steps where text repeats itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import (
    EOS,
    NEW,
    ROOM,
    VOCAB,
    forward,
    log_softmax,
    prompts,
    recurrent,
    tiny,
    weights,
)
from test_sampler_families import family
from turn_cases import ROOM as LONG_ROOM
from turn_cases import assert_fresh, play

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.config import LayerKind
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate, speculation
from rljax.sampler.whole_batch import SecondModel

N = 4
COOL = Sampling(max_response_tokens=NEW, temperature=0.3, stop_ids=(EOS,))
FORCED = dict(thinking_tokens=(2, 7), end_of_thinking_ids=(3, 4), interrupt_ids=(5, 6, 7))
TOKENS, LENGTHS = prompts()
SAME = ("tokens", "mask", "segment_ids", "finish_reason", "group")
CLOSE = ("sampler_logprobs", "sampler_log_kept", "entropy")


def batch_of(model, params, asked, tokens=TOKENS, lengths=LENGTHS, **how):
    how = Decoding(decode=str, **how)
    return generate(model, params, tokens, lengths, jax.random.key(1), asked, n=N, decoding=how)


def assert_same_batch(found, want):
    for name in SAME:
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)
    for name in CLOSE:
        np.testing.assert_allclose(
            getattr(found, name), getattr(want, name), atol=2e-5, err_msg=name
        )


ASKED = {
    "cool": COOL,
    "greedy": COOL.greedy(),
    "ruled": dataclasses.replace(
        COOL, temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, logit_bias=((7, 2.0), (9, -3.0))
    ),
    "forced": dataclasses.replace(COOL, **FORCED),
}


RING = dict(layers=1, kinds=(LayerKind(window=6),))


@pytest.mark.parametrize("slots", lanes([5], [0]))
@pytest.mark.parametrize("asked", lanes(["ruled"], ["forced", "cool", "greedy"]))
@pytest.mark.parametrize("layers", lanes([RING], [dict(window=6)]), ids=["ring", "both"])
def test_whole_batches_are_those_without_drafts(asked, slots, layers):
    """Every row at once and refilled slots, with a sliding window, also beside a layer that sees
    all."""
    model, asked = tiny(**layers), ASKED[asked]
    params = weights(model)
    want = batch_of(model, params, asked)
    sizes = (np.asarray(want.mask) > 0).sum(axis=1)
    # Those with rules end in several ways.
    assert len(set(sizes.tolist())) > 2 or asked is not ASKED["ruled"]
    assert_same_batch(batch_of(model, params, asked, slots=slots, draft_tokens=5), want)


@pytest.mark.slow
def test_the_hosts_loop_and_eight_devices_too():
    params = weights(tiny())
    want = batch_of(tiny(), params, COOL)
    assert_same_batch(batch_of(tiny(), params, COOL, loop="host", slots=5, draft_tokens=3), want)
    mesh = make_mesh(4, 2, 1)
    model = dataclasses.replace(tiny(), mesh=mesh)
    split = jax.device_put(params, model.shardings())
    assert_same_batch(batch_of(model, split, COOL, slots=8, draft_tokens=3), want)


CASES = [(0, 3, 4, 0), (6, 3, 5, 0), (0, 6, 3, 26), (9, 12, 8, 0)]  # window, slots, drafts, pages


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes(CASES[1:2], [CASES[0], *CASES[2:]]))
def test_turns_with_drafts_are_those_of_a_fresh_request_without(case):
    """Held, parked, paged, stopped by ids and by strings; drafts come from the whole log."""
    window, slots, drafts, pages = case
    model, rng = tiny(window=window), np.random.default_rng(slots)
    paged = dict(page_tokens=4, pages=pages) if pages else {}
    engine = Engine(model, slots, LONG_ROOM, steps=3, draft_tokens=drafts, **paged)
    sampler = Sampler(engine, chunk_tokens=8, parked_tokens=2 * LONG_ROOM)
    turns = play(sampler, weights(model), rng, asked=dataclasses.replace(COOL, temperature=0.2))
    plain = Sampler(Engine(model, 9, LONG_ROOM, steps=8), chunk_tokens=32)
    assert_fresh(plain, weights(model), turns)
    assert sampler.kept_drafts > 5
    assert 1 < sampler.draft_metrics()["drafts/tokens_per_step"] < 1 + drafts


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    lanes(
        [("gpt_oss", "")],
        [
            ("gemma2", ""),
            ("deepseek_v3", ""),
            ("qwen3", "int8"),
            ("gemma3_text", "int8"),
            ("qwen3_moe", ""),
        ],
    ),
)
def test_families(case):
    """Sinks, rings, soft caps, latents, experts, int8 keys and values."""
    name, kv_dtype = case
    _, model, params = family(name)
    tokens, lengths = prompts(4, 14, seed=2, vocab=min(300, model.config.vocab_size))
    lengths[:] = 14
    tokens[:, 7:] = tokens[:, :7]  # what has stood before goes on as it did
    bias = tuple((int(token), 4.0) for token in np.unique(tokens))
    asked = Sampling(max_response_tokens=10, temperature=0.5, logit_bias=bias)
    how = dict(tokens=tokens, lengths=lengths, slots=3, kv_dtype=kv_dtype)
    drafted = batch_of(model, params, asked, draft_tokens=4, **how)
    assert_same_batch(drafted, batch_of(model, params, asked, **how))


def without_attention(params):
    """A model whose next token depends on the newest alone: greedy, it soon goes in circles."""

    def zero(path, x):
        return x * ("['o']" not in jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(zero, params)


def repeating(model, params, drafts, count=6, new=60):
    """Greedy samples."""
    engine = Engine(model, count, 80, steps=8, draft_tokens=drafts)
    sampler = Sampler(engine, chunk_tokens=16)
    asked = Sampling(max_response_tokens=new, temperature=0.0)
    samples = [sampler.submit(TOKENS[p, : LENGTHS[p]], asked)[0] for p in range(count)]
    list(sampler.run(params))
    return [sample.tokens.tolist() for sample in samples], sampler


def in_circles(model, params, count=6, new=60):
    """The same by hand: what follows each token is known from rows of that token alone."""
    following = [
        int(np.argmax(row[0])) for row in forward(model, params, np.arange(VOCAB)[:, None])
    ]
    rows = []
    for p in range(count):
        row = [following[TOKENS[p, LENGTHS[p] - 1]]]
        while len(row) < new:
            row.append(following[row[-1]])
        rows.append(row)
    return rows


@pytest.mark.slow
def test_text_that_repeats_itself_takes_a_third_of_the_steps():
    model = tiny(layers=1, kinds=())
    params = without_attention(weights(model))
    found, sampler = repeating(model, params, 8)
    assert found == in_circles(model, params) and sum(map(len, found)) == 360
    assert sampler.live_slot_steps + sampler.kept_drafts == 360
    assert 3 * sampler.live_slot_steps <= 360  # without drafts every token is a step of its slot
    assert 3 * sampler.slot_steps <= 360


@pytest.mark.slow
def test_without_drafts_every_token_is_a_step():
    model = tiny(layers=1, kinds=())
    params = without_attention(weights(model))
    found, plain = repeating(model, params, 0)
    assert found == in_circles(model, params)
    assert plain.live_slot_steps == 360 <= plain.slot_steps and plain.draft_metrics() == {}


@pytest.mark.slow
def test_the_law_of_the_samples_with_drafts():
    """Chi-square over 3,000 samples: of the first token, whether or not it is what was drafted, and
    of the second behind a draft that was kept, which the same step drew."""
    model, rows = tiny(layers=1, kinds=()), 3000
    params = weights(model)
    prompt = [5, 6, 7, 8, 5, 6]  # drafts 7, 8, ...
    sampler = Sampler(Engine(model, 64, ROOM, steps=4, draft_tokens=2), key=jax.random.key(2))
    warm = Sampling(max_response_tokens=4, temperature=3.0)
    samples = sampler.submit(prompt, warm, n=rows)
    list(sampler.run(params))

    def chi2(tokens, before):
        law = np.exp(log_softmax(forward(model, params, [before])[0][-1] / 3))
        counts, want = np.bincount(tokens, minlength=VOCAB), law * len(tokens)
        sure = want >= 5  # the rare ones together
        seen = np.append(counts[sure], counts[~sure].sum())
        want = np.append(want[sure], want[~sure].sum())
        seen, want = seen[want > 0], want[want > 0]
        return (np.sum((seen - want) ** 2 / want) - len(want) + 1) / np.sqrt(2 * len(want) - 2)

    firsts = [sample.tokens[0] for sample in samples]
    assert chi2(firsts, prompt) < 4
    behind = [sample.tokens[1] for sample in samples if sample.tokens[0] == 7]
    assert len(behind) > 30 and chi2(behind, [*prompt, 7]) < 4
    assert chi2(firsts, [*prompt, 7]) > 10  # the test can fail
    assert sampler.kept_drafts >= len(behind)


def test_a_draft_is_what_followed_the_latest_occurrence_of_the_newest_tokens():
    history = np.zeros((5, 16), np.int32)
    cases = [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),  # of three
        ([1, 2, 9, 8, 7, 2, 9], [8, 7, 2, 9]),  # of two: no three
        ([3, 4, 5, 6, 3, 4, 7, 3, 4], [7, 3, 4, 7]),  # the latest, again from its start
        ([1, 2, 3, 4, 5], []),
        ([6, 6, 6, 6], [6, 6, 6, 6]),
    ]
    for row, (tokens, _) in zip(history, cases, strict=True):
        row[: len(tokens)] = tokens
    drafts = dataclasses.replace(speculation.empty(5, 16, 4), history=jnp.asarray(history))
    total = jnp.asarray([len(tokens) for tokens, _ in cases])
    ids, count = speculation.look_up(drafts, total, jnp.full(5, 9))
    found = [row[:n].tolist() for row, n in zip(np.asarray(ids), np.asarray(count), strict=True)]
    assert found == [draft for _, draft in cases]
    _, count = speculation.look_up(drafts, total, jnp.asarray([2, 0, -3, 9, 1]))
    assert count.tolist() == [2, 0, 0, 0, 1]  # no further than there is room


def test_what_cannot_be_drafted_is_refused_by_name():
    with pytest.raises(InputError, match="draft_tokens.*recurrent layers"):
        Engine(recurrent(), 2, ROOM, draft_tokens=2)
    model = tiny(window=4)
    cases = ((-1, "from 0"), (65, "to 64"), (1.5, "1.5"), (4, "smallest sliding window, 4"))
    for drafts, words in cases:
        with pytest.raises(InputError, match=words):
            Engine(model, 2, ROOM, draft_tokens=drafts)
    params = weights(tiny())
    second = SecondModel(tiny(), params, 0.5)
    with pytest.raises(InputError, match="two models decode together"):
        generate(
            tiny(),
            params,
            TOKENS,
            LENGTHS,
            jax.random.key(0),
            COOL,
            second=second,
            decoding=Decoding(draft_tokens=2),
        )
