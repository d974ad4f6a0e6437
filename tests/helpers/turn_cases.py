"""Episodes of several turns for the tests of the sampler, and what each turn must equal."""

import dataclasses
import itertools

import numpy as np
from sampler_cases import EOS, VOCAB

from rljax.batch import FinishReason
from rljax.sampler import Sampling

ROOM = 80
ASKED = Sampling(max_response_tokens=6, stop_ids=(EOS,))


@dataclasses.dataclass(frozen=True)
class Turn:
    """A finished turn: tokens first to end of the response of a sample, and why it ended."""

    sample: object
    sampling: Sampling
    first: int
    end: int
    reason: FinishReason


def play(sampler, params, rng, *, samples=10, turns=3, asked=ASKED, on_step=None) -> list[Turn]:
    """Random episodes: `turns` turns of each request; replies come late, of 0 to 23 tokens."""
    begun, owed, left, done = {}, {}, {}, []
    for i in rng.permutation(samples).tolist():
        prompt = rng.integers(2, VOCAB, rng.integers(1, 9))
        [sample] = sampler.submit(prompt, asked, request_ids=[i], hold=True)
        left[sample], begun[sample] = turns - 1, 0
    for step in itertools.count(1):
        if not sampler.pending and not owed:
            break
        how = on_step(step) if on_step else dict(params=params)
        for event in sampler.step(**how):
            sample = event.sample
            if sample.finish_reason is not None:
                owed[sample] = step + int(rng.integers(0, 5))
                first, end = begun[sample], len(sample.tokens)
                done.append(Turn(sample, sample.sampling, first, end, sample.finish_reason))
        replies = []
        for sample in [s for s, due in owed.items() if due <= step]:
            del owed[sample]
            if not left[sample]:
                sampler.release(sample)
                continue
            left[sample] -= 1
            more = rng.integers(2, VOCAB, rng.integers(0, 24) if rng.random() < 0.3 else 3)
            reply = dataclasses.replace(asked, max_response_tokens=int(rng.integers(2, 8)))
            replies.append((sample, more.tolist(), reply))
        sampler.deliver(replies)
        begun |= {sample: len(sample.tokens) for sample, _, _ in replies}
        assert step < 1000
    assert sampler.held == sampler.parked == sampler.pending == 0
    assert len(done) == turns * samples
    return done


def assert_fresh(sampler, params, turns, atol: float = 2e-5) -> None:
    """Each turn again, as a request whose prompt is all that came before it."""
    again = []
    for turn in turns:
        prompt = turn.sample.ids[: len(turn.sample.prompt) + turn.first]
        again += sampler.submit(prompt, turn.sampling, request_ids=[turn.sample.id])
    list(sampler.run(params))
    for turn, fresh in zip(turns, again, strict=True):
        where = slice(turn.first, turn.end)
        assert fresh.tokens.tolist() == turn.sample.tokens[where].tolist(), turn
        assert fresh.chosen.tolist() == turn.sample.chosen[where].tolist(), turn
        assert fresh.finish_reason == turn.reason, turn
        for name in ("logprobs", "log_kept", "entropy"):
            ours, theirs = getattr(turn.sample, name)[where], getattr(fresh, name)
            np.testing.assert_allclose(ours, theirs, atol=atol, err_msg=f"{turn} {name}")
