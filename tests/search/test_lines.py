"""Searches without a tree: beams, the best of n, beams of lines with lookahead."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import forward, log_softmax, prompts, tiny, weights

from rljax.errors import InputError
from rljax.models.model import Model
from rljax.sampler import Decoding, Sampling, generate
from rljax.search import Search, Value, beam, best_of_n, lookahead
from rljax.search.evaluators import Forked
from rljax.search.lines import _first_line

MODEL = tiny(layers=1, kinds=tiny().config.kinds[:1])
SAMPLING = Sampling(max_response_tokens=3, allowed_ids=(2, 3, 4))
PROMPTS, LENGTHS = prompts(4, longest=6)


def judge(line_ids=()) -> Value:
    model = Model(MODEL.config, MODEL.mesh, "scalar")
    params = model.init(jax.random.key(9))
    params["head"] = jax.random.normal(jax.random.key(4), params["head"].shape)
    return Value(model, params, "process" if line_ids else "outcome", line_ids)


def decoded(method, sampling=SAMPLING, value=None, scored=None, **options):
    """The responses of each row."""
    search = Search(functools.partial(method, **options), value, scored) if method else None
    inputs = (MODEL, weights(MODEL), PROMPTS, LENGTHS, jax.random.key(0), sampling)
    tokens = np.asarray(generate(*inputs, search=search).tokens)
    most = sampling.max_response_tokens
    return [tokens[row, n : n + most].tolist() for row, n in enumerate(LENGTHS)]


def likeliest():
    """Of all 27 responses of each row, the one with the highest probability."""
    best = []
    for row, length in enumerate(LENGTHS):
        texts = [list(ids) for ids in itertools.product((2, 3, 4), repeat=3)]
        start = PROMPTS[row, :length].tolist()
        logits = forward(MODEL, weights(MODEL), [start + text for text in texts], width=9)
        sums = [
            sum(log_softmax(one[length - 1 + i, [2, 3, 4]])[t - 2] for i, t in enumerate(text))
            for one, text in zip(logits, texts, strict=True)
        ]
        best.append(texts[int(np.argmax(sums))])
    return best


@pytest.mark.slow
def test_one_beam_is_greedy_and_enough_beams_find_the_likeliest_text():
    assert decoded(beam, beams=1, width=1) == decoded(None, SAMPLING.greedy())
    found, best = decoded(beam, beams=9, width=3), likeliest()
    assert found == best


@pytest.mark.slow
def test_the_best_of_n_samples_is_what_the_reward_says():
    asked = []

    def scored(rows, responses):
        asked.append([list(ids) for ids, _ in responses])
        return np.array([sum(ids) for ids, _ in responses], float)

    found = decoded(best_of_n, scored=scored, samples=5, temperature=2.0)
    assert len(asked) == 5 and asked[0] != asked[1]
    for row, ids in enumerate(found):
        assert sum(ids) == max(sum(one[row]) for one in asked)


@pytest.mark.slow
def test_beams_of_lines_keep_what_the_process_model_likes():
    value, options = judge(line_ids=(4,)), dict(step_tokens=2, temperature=2.0)
    found = decoded(lookahead, value=value, beams=2, samples=3, lookahead_tokens=1, **options)
    assert all(set(ids) <= {2, 3, 4} for ids in found)
    again = decoded(lookahead, value=value, beams=2, samples=3, lookahead_tokens=1, **options)
    assert found == again
    with pytest.raises(InputError, match="unfinished"):
        decoded(lookahead, scored=lambda *_: None)


@pytest.mark.parametrize("ahead", lanes([1], [0]))
def test_of_the_continuations_the_one_stays_that_the_process_model_likes_best(ahead, monkeypatch):
    """One round, as what is drawn and what is read of it say."""
    drawn, read, roll, call = [], [], Forked.roll, Forked.__call__

    def rolled(self, leaves, *args, greedy=False):
        out = roll(self, leaves, *args, greedy=greedy)
        drawn.append((greedy, [list(ids) for ids in out]))
        return out

    def asked(self, leaves):
        out = call(self, leaves)
        read.append((leaves.path, leaves.depth, np.asarray(out.value)))
        return out

    monkeypatch.setattr(Forked, "roll", rolled)
    monkeypatch.setattr(Forked, "__call__", asked)
    value = dataclasses.replace(judge(), line_ids=(4,))
    how = dict(beams=1, samples=4, step_tokens=SAMPLING.max_response_tokens, temperature=3.0)
    found = decoded(lookahead, value=value, lookahead_tokens=ahead, **how)
    lines = [[_first_line(ids, {4}) for ids in out] for greedy, out in drawn if not greedy][:4]
    more = [out for greedy, out in drawn if greedy][:4]
    for number, (path, depth, _) in enumerate(read[:4]):  # what is read: the line, and what follows
        for row, line in enumerate(lines[number]):
            text = path[row, : depth[row]].tolist()
            after = more[number][row] if ahead else []
            assert text[: len(line)] == line and text[len(line) :] in ([], after)
    scores = np.stack([values for _, _, values in read[:4]], axis=1)
    best = scores.argmax(axis=1)
    assert len(set(best.tolist())) > 1 and (np.ptp(scores, axis=1) > 0).all()
    for row, ids in enumerate(found):
        line = lines[best[row]][row]
        assert ids[: len(line)] == line


@pytest.mark.slow
def test_slots_that_do_not_divide_the_rows_score_each_row_by_its_own_prompt():
    """Of 4 rows in slots of 3 the last call is filled up with copies."""
    asked = set()

    def scored(rows, responses):
        asked.update(rows)
        return np.array([0.0] * len(rows))

    search = Search(functools.partial(best_of_n, samples=2), None, scored)
    inputs = (MODEL, weights(MODEL), PROMPTS, LENGTHS, jax.random.key(0), SAMPLING)
    whole = generate(*inputs, search=search)
    parts = generate(*inputs, search=search, decoding=Decoding(slots=3))
    assert asked == {0, 1, 2, 3}
    np.testing.assert_array_equal(whole.tokens, parts.tokens)


@pytest.mark.parametrize("method", lanes([beam], [lookahead]))
def test_a_critic_is_not_read_behind_the_end_of_a_text(method, monkeypatch):
    """A text that ends is worth the state before its last token, which a critic knows."""
    read, call = [], Forked.__call__

    def told(self, leaves):
        for row in np.flatnonzero(leaves.live):
            read.append(leaves.path[row, : leaves.depth[row]].tolist())
        return call(self, leaves)

    monkeypatch.setattr(Forked, "__call__", told)
    critic = dataclasses.replace(judge(), reads="critic")
    sampling = dataclasses.replace(SAMPLING, stop_ids=(4,), max_response_tokens=1)
    options = {beam: dict(beams=2, width=3), lookahead: dict(step_tokens=3)}[method]
    found = decoded(method, sampling, value=critic, **options)
    assert read and all(path == [] for path in read)
    read.clear()
    decoded(method, sampling, value=judge(), **options)
    assert [4] in read and all(len(ids) == 1 for ids in found)
