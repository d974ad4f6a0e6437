"""Continuations of the rows of a batch: the same in both loops, with all that was recorded of the
prefix, within the limits of the whole response."""

import dataclasses

import jax
import numpy as np
import pytest
from sampler_cases import LONGEST, prompts, recurrent, rounding, shallow, tiny, weights
from test_branch import decode

from rljax.batch import FinishReason
from rljax.errors import InputError
from rljax.sampler import Decoding, Sampling, branch, generate

ASKED = Sampling(max_response_tokens=12)
KEY = jax.random.key(5)
HOW = {
    "device": Decoding(),
    "device, slots": Decoding(slots=3),
    "host": Decoding(loop="host"),
    "host, pages": Decoding(loop="host", slots=4, page_tokens=4),
}
ROWS, AT = [5, 0, 5, 2], [3, 11, 8, 0]


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("window", "recurrent")]


@pytest.fixture(scope="module", params=["whole", *OTHERS])
def model(request):
    return {"whole": tiny, "window": lambda: tiny(window=4), "recurrent": recurrent}[
        request.param
    ]()


def rows_of(model, asked=ASKED, **how):
    tokens, lengths = prompts(4)
    batch = generate(model, weights(model), tokens, lengths, KEY, asked, n=2, version=3, **how)
    return batch, np.repeat(lengths, 2)


def branches(model, batch, starts, asked=ASKED, rows=ROWS, at=AT, key=KEY, **how):
    out = branch(model, weights(model), batch, rows, at, starts, key, asked, n=3, version=4, **how)
    return jax.device_get(out)


def assert_equal(one, two, atol=2e-5):
    for name in ("tokens", "mask", "segment_ids", "group", "finish_reason", "policy_version"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    for name in ("sampler_logprobs", "sampler_log_kept", "entropy"):
        inside = one.segment_ids > 0
        ours, theirs = (np.where(inside, getattr(x, name), 0) for x in (one, two))
        np.testing.assert_allclose(ours, theirs, atol=atol, err_msg=name)


@pytest.mark.slow
def test_both_loops_draw_the_same_and_keep_what_was_recorded(model):
    """With the cache, in pages, and with every prefix read anew."""
    batch, starts = rows_of(model)
    out = {name: branches(model, batch, starts, decoding=how) for name, how in HOW.items()}
    one, batch = out["device"], jax.device_get(batch)
    for other in out.values():
        assert_equal(one, other, rounding(model))
    assert one.tokens.shape == (12, batch.tokens.shape[1])
    np.testing.assert_array_equal(one.group, np.repeat(batch.group[ROWS], 3))
    for i in range(12):
        row, at = ROWS[i // 3], AT[i // 3]
        begin, end = starts[row] + at, starts[row] + 12
        for name in ("tokens", "sampler_logprobs", "entropy", "policy_version"):
            np.testing.assert_array_equal(
                getattr(one, name)[i, :begin], getattr(batch, name)[row, :begin], err_msg=name
            )
        np.testing.assert_array_equal(
            one.mask[i],
            (np.arange(one.mask.shape[1]) >= begin) & (np.arange(one.mask.shape[1]) < end),
        )
        assert set(one.policy_version[i, begin:end]) == {4}
    # Nothing but its own row, place and number decides a draw.
    alone = branches(model, batch, starts, rows=[5], at=[8])
    np.testing.assert_array_equal(alone.tokens, one.tokens[6:9])
    assert len({tuple(tokens) for tokens in one.tokens[:3].tolist()}) == 3
    moved = branches(model, batch, starts, key=jax.random.key(6))
    assert (moved.tokens != one.tokens).any()


@pytest.mark.slow
def test_thinking_and_stop_strings_are_those_of_the_whole_response(model):
    think = dataclasses.replace(
        ASKED,
        thinking_tokens=(2, 9),
        end_of_thinking_ids=(7,),
        interrupt_ids=(9, 8, 7),
        stop_strings=("ab", "x", "ef", "m"),
    )
    how = dict(decoding=Decoding(decode=decode))
    batch, starts = rows_of(model, think, **how)
    sizes = np.asarray((batch.segment_ids > 0).sum(1)) - starts
    rows = np.flatnonzero(sizes > 2).tolist()
    at = [int(sizes[row]) // 2 for row in rows]
    inputs = (model, batch, starts, think, rows, at)
    one = branches(*inputs, **how)
    for other in (Decoding(loop="host", decode=decode), Decoding(slots=3, decode=decode)):
        assert_equal(one, branches(*inputs, decoding=other), rounding(model))
    reasons = {FinishReason(int(i)) for i in one.finish_reason}
    assert {FinishReason.STOP, FinishReason.LENGTH} & reasons and len(reasons) > 1


@pytest.mark.parametrize(
    "change, problem",
    [
        (dict(rows=[8]), "rows of a branch"),
        (dict(at=[12]), "branch at"),
        (dict(at=[-1]), "branch at"),
        (dict(at=[1, 2]), "rows, at and starts"),
        (dict(rows=[], at=[]), "rows, at and starts"),
        (dict(asked=dataclasses.replace(ASKED, max_response_tokens=13)), "max_response_tokens"),
        (dict(asked=dataclasses.replace(ASKED, max_response_tokens=3)), "branch at"),
    ],
)
def test_bad_branches_of_rows_are_refused(change, problem):
    model = shallow()
    batch, starts = rows_of(model)
    assert batch.tokens.shape[1] == LONGEST + 12
    starts = starts if "asked" not in change or "at" in problem else starts + LONGEST
    with pytest.raises(InputError, match=problem):
        branches(model, batch, starts, **{"rows": [1], "at": [4], **change})
