"""A model with more rows than its tokenizer has ids: it draws, scores and searches as if its head
ended with them, and trainer and sampler agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import EOS, LONGEST, NEW, ROOM, VOCAB, forward, log_softmax, prompts, tiny

from rljax.batch import batch_from_rows
from rljax.data.text.tokenizer import CharTokenizer
from rljax.mesh import make_mesh
from rljax.models.model import Model
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate
from rljax.search import Search
from rljax.search.lines import best_of_n
from rljax.search.mcts import mcts

KNOWN = 19  # of VOCAB rows
# All of this is of the head: one layer, which decoding unrolls, is below it.
shallow = functools.partial(tiny, layers=1, kinds=())
ASKED = Sampling(max_response_tokens=NEW, stop_ids=(EOS,))
TOKENS, LENGTHS = prompts(vocab=KNOWN)


@functools.cache
def pair(tied=False):
    """(the model that knows KNOWN ids, the one that ends with them, weights of each). What is drawn
    of the rows behind would be most of the softmax."""
    whole = shallow(known_ids=KNOWN, tie_embeddings=tied)
    cut = shallow(vocab_size=KNOWN, tie_embeddings=tied)
    params = whole.init(jax.random.key(3))
    of_cut = {**params, "embedding": params["embedding"][:KNOWN]}
    if not tied:
        of_cut["head"] = params["head"][:, :KNOWN]
        params = {**params, "head": params["head"].at[:, KNOWN:].multiply(4.0)}
    return whole, cut, params, of_cut


def same(one, other):
    for name in ("tokens", "mask", "segment_ids", "finish_reason"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    names = ("sampler_logprobs", "sampler_log_kept", "entropy")
    for name in (name for name in names if getattr(one, name) is not None):
        mask = np.asarray(one.mask) > 0
        pairs = [np.asarray(getattr(x, name))[mask] for x in (one, other)]
        np.testing.assert_allclose(*pairs, atol=2e-5, err_msg=name)


BIASED = dict(top_k=5, top_p=0.9, min_p=0.01, logit_bias=((3, 2.0), (KNOWN - 1, 1.0)))
ODD = tuple(range(1, KNOWN, 2))
# How tokens are chosen and how they are decoded do not know of each other: each meets one.
CASES = {
    "tied, slots, rules": (dataclasses.replace(ASKED, **BIASED), Decoding(slots=3)),
    "host, allowed": (dataclasses.replace(ASKED, allowed_ids=ODD), Decoding(loop="host", slots=3)),
    "whole batch": (ASKED, Decoding()),
    "tied, greedy": (dataclasses.replace(ASKED, temperature=0.0), Decoding()),
    "slots, rules": (dataclasses.replace(ASKED, **BIASED), Decoding(slots=3)),
    "drafts": (dataclasses.replace(ASKED, temperature=0.3), Decoding(draft_tokens=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes([*CASES][:1], [*CASES][1:]))
def test_it_draws_as_if_its_head_ended_there(case):
    whole, cut, params, of_cut = pair(case.startswith("tied"))
    asked, decoding = CASES[case]

    def run(*model):
        return jax.device_get(
            generate(*model, TOKENS, LENGTHS, jax.random.key(0), asked, n=3, decoding=decoding)
        )

    batch = run(whole, params)
    assert batch.tokens.max() < KNOWN and (batch.mask > 0).sum() > 50
    if asked.allowed_ids:
        assert set(batch.tokens[batch.mask > 0].tolist()) <= {*ODD}
    same(batch, run(cut, of_cut))


@pytest.mark.parametrize(
    "mesh", lanes([dict(data=2, fsdp=2, tensor=2)], [dict(), dict(fsdp=8)]), ids=str
)
def test_trainer_and_sampler_agree(mesh):
    one = shallow(known_ids=KNOWN)
    model = one if not mesh else Model(one.config, make_mesh(**mesh))
    params = model.init(jax.random.key(3))
    batch = generate(model, params, TOKENS, LENGTHS, jax.random.key(0), ASKED, n=3)
    found = jax.jit(model.logprobs)(params, batch)
    tokens, mask, drawn, entropy = jax.device_get(
        (batch.tokens, batch.mask, batch.sampler_logprobs, batch.entropy)
    )
    assert tokens.max() < KNOWN
    for ours, theirs in zip(found, (drawn, entropy), strict=True):
        np.testing.assert_allclose(np.asarray(ours)[mask > 0], theirs[mask > 0], atol=2e-5)


@pytest.mark.slow
def test_they_agree_to_the_bit_where_the_model_is_batch_invariant():
    model = shallow(known_ids=KNOWN, batch_invariant=True)
    params = model.init(jax.random.key(3))
    batch = generate(model, params, TOKENS, LENGTHS, jax.random.key(0), ASKED, n=2)
    logp, _ = jax.jit(model.logprobs)(params, batch)
    mask = np.asarray(batch.mask) > 0
    np.testing.assert_array_equal(np.asarray(logp)[mask], np.asarray(batch.sampler_logprobs)[mask])


@pytest.mark.slow
def test_rows_behind_get_no_gradient_from_the_head():
    model = shallow(known_ids=KNOWN)
    params = model.init(jax.random.key(3))
    ids = jnp.asarray(TOKENS % KNOWN)
    batch = batch_from_rows(ids, jnp.asarray(LENGTHS), jnp.ones(ids.shape))

    def total(params):
        return jnp.sum(model.logprobs(params, batch)[0][:, 1:])

    gradients = jax.jit(jax.grad(total))(params)
    assert not np.any(gradients["head"][:, KNOWN:]) and np.any(gradients["head"][:, :KNOWN])
    assert not np.any(gradients["embedding"][KNOWN:])

    def readout(params):
        return jnp.sum(model.readout(params, batch)[1] ** 2)

    assert not np.any(jax.jit(jax.grad(readout))(params)["head"][:, KNOWN:])


SEARCHES = {
    "rollouts": functools.partial(mcts, simulations=3, width=3, rollouts=True),
    "columns": functools.partial(mcts, simulations=4, width=3),
    "best of n": functools.partial(best_of_n, samples=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", lanes(["best of n"], ["columns", "rollouts"]))
def test_a_search_finds_what_it_would_find_there(method):
    whole, cut, params, of_cut = pair()

    def scored(rows, responses):
        return np.array([len(ids) for ids, _ in responses], float)

    search = Search(SEARCHES[method], None, scored)
    short = dataclasses.replace(ASKED, max_response_tokens=4)
    prompts = TOKENS[:2], LENGTHS[:2]

    def run(*model):
        found = generate(*model, *prompts, jax.random.key(0), short, search=search)
        return jax.device_get(found)

    batch = run(whole, params)
    assert batch.tokens.max() < KNOWN
    same(batch, run(cut, of_cut))


@pytest.mark.slow
def test_a_sampler_takes_them_from_its_tokenizer():
    """The model comes from no config: the tokenizer of `decode` says which ids there are."""
    model = shallow()
    params = model.init(jax.random.key(3))
    tokenizer = CharTokenizer("abcdefghijklmnopq")  # and two ids of its own
    assert tokenizer.vocab_size == KNOWN
    decodes = (tokenizer.decode, functools.partial(tokenizer.decode, skip_special_tokens=False))
    drawn = []
    for decode in (*decodes, None, lambda ids: "x"):
        sampler = Sampler(Engine(model, 4, ROOM), key=jax.random.key(0), decode=decode)
        samples = sampler.submit(TOKENS[1, : LENGTHS[1]], ASKED, n=8)
        list(sampler.run(params))
        drawn.append([sample.tokens.tolist() for sample in samples])
    assert drawn[0] == drawn[1] and max(map(max, drawn[0])) < KNOWN
    assert drawn[2] == drawn[3] and max(map(max, drawn[2])) >= KNOWN
    # The log-probs are of what could be drawn.
    prompt = TOKENS[1, : LENGTHS[1]]
    sample = next(s for s in samples if len(s.tokens))
    known = dataclasses.replace(model, config=dataclasses.replace(model.config, known_ids=KNOWN))
    sampler = Sampler(Engine(model, 4, ROOM), key=jax.random.key(0), decode=tokenizer.decode)
    (sample,) = sampler.submit(prompt, ASKED)
    list(sampler.run(params))
    logits = forward(known, params, [np.concatenate([prompt, sample.tokens])])[0]
    want = log_softmax(logits[len(prompt) - 1 : -1])[np.arange(len(sample.tokens)), sample.tokens]
    np.testing.assert_allclose(sample.logprobs, want, atol=2e-5)


def test_all_ids_are_one_model():
    assert shallow(known_ids=VOCAB).config == shallow().config and shallow().config.ids == VOCAB
    assert shallow(known_ids=KNOWN).config.ids == KNOWN
    with pytest.raises(ValueError, match="known_ids"):
        shallow(known_ids=VOCAB + 1)
    assert LONGEST + NEW == ROOM
