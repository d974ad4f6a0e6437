"""Tree search as decoding: greedy at a budget of one, one call for all sentences, rows that do not
depend on each other, a planted leaf, values of every kind of model."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import EOS, prompts, tiny, weights

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.models.model import Model
from rljax.sampler import Decoding, Sampling, generate
from rljax.search import Search, Value, mcts
from rljax.search.columns import Columns
from rljax.search.evaluators import Forked, padded_paths
from rljax.search.mcts import _CHOICE, _NOISE, _ROLLOUT, _stream
from rljax.search.problem import SearchProblem

MODEL = tiny(layers=1, kinds=tiny().config.kinds[:1])
SAMPLING = Sampling(max_response_tokens=5, stop_ids=(EOS,))
PROMPTS, LENGTHS = prompts(4, longest=6)
KEY = jax.random.key(0)
PURPOSES = (_NOISE, _CHOICE, _ROLLOUT)


@functools.cache
def judge(reads: str = "outcome", line_ids: tuple[int, ...] = ()) -> Value:
    """A scalar head of random weights on a body of its own."""
    model = Model(MODEL.config, MODEL.mesh, "scalar")
    params = model.init(jax.random.key(9))
    params["head"] = jax.random.normal(jax.random.key(4), params["head"].shape)
    return Value(model, params, reads, line_ids)


def decoded(sampling=SAMPLING, value=None, scored=None, slots=0, key=KEY, **options):
    """The batch of `generate` by mcts; without options, of `generate` alone."""
    search = Search(functools.partial(mcts, **options), value, scored) if options else None
    inputs = (MODEL, weights(MODEL), PROMPTS, LENGTHS, key, sampling)
    return jax.tree.map(np.asarray, generate(*inputs, search=search, decoding=Decoding(slots)))


@pytest.fixture(scope="module")
def calls():
    """How often an evaluator was asked since the list was cleared."""
    counted = []

    def counting(original):
        def asked(self, leaves):
            counted.append(int(leaves.live.sum()))
            return original(self, leaves)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Columns, Forked):
            patch.setattr(kind, "__call__", counting(kind.__call__))
        yield counted


@pytest.mark.slow
@pytest.mark.parametrize("width", lanes([3], [1]))
def test_a_budget_of_one_is_greedy_decoding(width):
    greedy = decoded(SAMPLING.greedy())
    found = decoded(value=judge(), simulations=1, width=width)
    for name in ("tokens", "mask", "finish_reason", "segment_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(greedy, name))


@pytest.mark.slow
def test_one_call_for_all_sentences_whose_rows_are_those_of_each_alone(calls):
    calls.clear()
    options = dict(value=judge(), simulations=12, width=3)
    together, most = decoded(**options), 5 * 12
    tokens, longest = together.mask.sum(), int(together.mask.sum(axis=1).max())
    # A simulation of all live rows is one call, of the policy and the value model together.
    assert 12 <= len(calls) <= 12 * longest <= most and max(calls) == len(LENGTHS)
    asked = sum(calls)
    assert asked < 12 * tokens  # the subtrees that were kept needed none
    calls.clear()
    alone = decoded(**options, slots=1)
    assert len(calls) == sum(calls) == asked
    for name in ("tokens", "finish_reason", "target_ids"):
        np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))
    for name in ("target_probs", "search_values"):
        ours, theirs = getattr(together, name), getattr(alone, name)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    # What the search says stands at the tokens that it chose.
    shares = together.target_probs.sum(axis=-1)
    np.testing.assert_allclose(shares, together.mask, atol=1e-5)
    chosen = (together.target_ids == together.tokens[..., None]) & (together.target_probs > 0)
    most = together.target_probs.max(axis=-1)
    own = np.where(chosen, together.target_probs, 0).max(axis=-1)
    np.testing.assert_array_equal(own, most)


@pytest.mark.slow
def test_exploration_is_a_function_of_the_key_and_off_where_sampling_is_greedy():
    options = dict(value=judge(), simulations=12, width=3)
    explored = dict(noise_fraction=0.5, visit_temperature=1.0)
    one, again = (decoded(**options, **explored) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    other = decoded(**options, **explored, key=jax.random.key(1))
    assert not np.array_equal(one.tokens, other.tokens)
    # The log-probs of the draws: N / sum N.
    at = (one.mask > 0) & (one.sampler_logprobs < 0)
    drawn = np.where(one.target_ids == one.tokens[..., None], one.target_probs, 0).max(axis=-1)
    np.testing.assert_allclose(np.exp(one.sampler_logprobs[at]), drawn[at], rtol=1e-4)
    assert at.any()
    quiet = decoded(SAMPLING.greedy(), **options, **explored)
    np.testing.assert_array_equal(quiet.tokens, decoded(**options).tokens)


def planted(rows: int, seed: int = 0):
    """(scored, the best response of each row) among the 2^6 responses of two tokens: one leaf is
    worth 1, the others up to 0.4."""
    rng = np.random.default_rng(seed)
    worth = rng.uniform(0, 0.4, (rows, 64))
    best = rng.integers(0, 64, rows)
    worth[np.arange(rows), best] = 1.0

    def leaf(ids):
        return int("".join(str(int(token) - 2) for token in ids), 2)

    def scored(which, responses):
        return np.array([worth[r, leaf(ids)] for r, (ids, _) in zip(which, responses, strict=True)])

    return scored, [[int(bit) + 2 for bit in f"{leaf:06b}"] for leaf in best]


def test_noise_choices_and_rollouts_have_draws_of_their_own():
    rows = np.asarray(jax.random.key_data(jax.random.split(KEY, 4)))
    streams = [tuple(key) for p in PURPOSES for key in _stream(rows, p).tolist()]
    assert len({*streams, *map(tuple, rows.tolist())}) == 4 * len(PURPOSES) + 4


@pytest.mark.slow
def test_it_finds_the_planted_leaf_that_greedy_decoding_misses():
    """By rollouts of a policy that is nearly indifferent, which its greedy choice does not show."""
    rows = 100
    sampling = Sampling(max_response_tokens=6, allowed_ids=(2, 3), temperature=50.0)
    scored, best = planted(rows)
    one = np.full((rows, 1), 5, np.int32), np.ones(rows, np.int32)
    inputs = (MODEL, weights(MODEL), *one, KEY)
    greedy = np.asarray(generate(*inputs, sampling.greedy()).tokens)[:, 1:]
    missed = [row for row in range(rows) if greedy[row].tolist() != best[row]]
    assert len(missed) >= 90
    search = Search(
        functools.partial(mcts, simulations=512, width=2, exploration=2.5), scored=scored
    )
    found = generate(*inputs, sampling, search=search)
    tokens = np.asarray(found.tokens)[:, 1:]
    assert [tokens[row].tolist() for row in range(rows)] == best
    assert (np.asarray(found.finish_reason) == FinishReason.LENGTH).all()


@pytest.mark.slow
def test_the_best_leaf_is_a_complete_response():
    scored, _ = planted(4)
    sampling = Sampling(max_response_tokens=6, allowed_ids=(2, 3))
    options = dict(scored=scored, simulations=6, width=2)
    leaf = decoded(sampling, **options, answer="best_leaf")
    emitted = decoded(sampling, **options)

    def worth(batch):
        ids = [batch.tokens[row, n : n + 6] for row, n in enumerate(LENGTHS)]
        return scored(range(4), [(one, 1) for one in ids])

    assert (worth(leaf) >= worth(emitted)).all() and (leaf.mask.sum(axis=1) == 6).all()
    first = leaf.target_ids[..., 0] == leaf.tokens
    assert first[leaf.mask > 0].all() and (leaf.target_probs[..., 0] == leaf.mask).all()


def test_a_failed_reward_says_nothing():
    """The first simulation of every row fails, and all others are worth -1: a failed one is neither
    a 0 in the mean nor the best response."""
    sampling = Sampling(max_response_tokens=6, allowed_ids=(2, 3))

    def failing():
        number = itertools.count()
        return lambda rows, _: np.full(len(rows), -1.0 if next(number) else np.nan)

    for answer in ("visits", "best_leaf"):
        options = dict(simulations=6, width=2, answer=answer)
        found = decoded(sampling, scored=failing(), **options)
        np.testing.assert_array_equal(found.search_values, -found.mask)


def test_a_process_model_is_read_at_the_ends_of_lines():
    value = judge("process", line_ids=(7,))
    task = SearchProblem(MODEL, weights(MODEL), PROMPTS, LENGTHS, None, SAMPLING, Decoding(), value)
    at_ends, everywhere = task.evaluator(3), dataclasses.replace(task, value=judge()).evaluator(3)
    texts = [[3, 4], [3, 7], [7, 5, 6], [7, EOS]]

    def value_at(model, paths):
        return np.asarray(model(padded_paths(paths, [True] * 4)).value)

    cut = [[], [3, 7], [7], [7]]
    want = np.where([0, 1, 1, 1], value_at(everywhere, cut), 0.0)
    np.testing.assert_allclose(value_at(at_ends, texts), want, atol=1e-5)
    # The same after the roots have moved along the texts, one token at a time.
    for i in range(2):
        tokens, live = np.array([text[i] for text in texts], np.int32), np.ones(4, bool)
        at_ends.move_root(tokens, None, live)
    rest = [[], [], [6], []]
    np.testing.assert_allclose(value_at(at_ends, rest)[:3], want[:3], atol=1e-5)  # 3 has ended


@pytest.mark.smoke
def test_what_cannot_be_searched_is_refused():
    with pytest.raises(InputError, match="no value model, no reward"):
        decoded(simulations=4)
    with pytest.raises(InputError, match="simulations"):
        decoded(value=judge(), simulations=0)
    with pytest.raises(InputError, match="width"):
        decoded(value=judge(), width=1000)
    with pytest.raises(InputError, match="critic has no score"):
        decoded(value=judge("critic"), rollouts=True)
    with pytest.raises(InputError, match="stop_strings"):
        decoded(dataclasses.replace(SAMPLING, stop_strings=("x",)), value=judge(), width=2)
