"""A server on eight devices: the layout of its weights changes no token, and a swap brings new ones
there."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from tiny_tokenizer import write_tokenizer

from rljax.config import Config
from rljax.config.service_options import ServeOptions
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Sampling
from rljax.serving.saved import make_worker, serve
from rljax.serving.worker import Ticket

SIZES = dict(layers=1, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.5)
OPTIONS = ServeOptions("-", slots=8, tokens=48, steps=4, chunk_tokens=8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def policies(tokenizer):
    """The same policy on one device, and split over eight as a policy is that was opened there."""

    def on(devices):
        size = -(-tokenizer.vocab_size // 8) * 8
        model = Model(decoder(size, **SIZES), make_mesh(1, -1, 1, devices=devices))
        return SavedPolicy(Config(), model, model.init(jax.random.key(3)), tokenizer, None)

    return on(jax.devices()[:1]), on(jax.devices())


def answers(worker, tokenizer) -> list[tuple[list[int], list[float]]]:
    """(tokens, log-probs) of ten seeded samples of three prompts, asked at once."""
    found, left, ended = {}, 10, threading.Event()

    def take(i, piece):
        nonlocal left
        tokens, logprobs = found.setdefault(i, ([], []))
        tokens += piece.tokens
        logprobs += piece.logprobs
        left -= piece.finish_reason is not None
        if not left:
            ended.set()

    for i in range(10):
        prompt = tokenizer.encode("the answer is 42")[: 3 + i % 3]
        # Seeds whose draws fall on no edge of two tokens by less than what layouts round.
        request = (prompt, Sampling(seed=100 + i, max_response_tokens=12))
        worker.submit(Ticket(lambda piece, i=i: take(i, piece)), [request], 1).result(60)
    assert ended.wait(120)
    return [found[i] for i in range(10)]


def assert_same(some, others):
    assert [tokens for tokens, _ in some] == [tokens for tokens, _ in others]
    for (_, a), (_, b) in zip(some, others, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_a_layout_changes_no_answer_and_a_swap_goes_through_it(policies, tokenizer):
    alone, split = policies
    want = []
    for policy, layout in (
        (alone, ""),
        (split, "mesh(data=4, tensor=2)"),
        (split, "mesh(data=2, fsdp=2, tensor=2)"),
    ):
        worker = make_worker(policy, dataclasses.replace(OPTIONS, layout=layout))
        try:
            got = [answers(worker, tokenizer)]
            worker.swap(jax.tree.map(lambda x: x + 0.05, policy.params))
            got.append(answers(worker, tokenizer))
            scored = worker.prompt_logprobs([(tokenizer.encode("the answer"), Sampling())])
        finally:
            worker.close()
        if not want:
            want = [*got, scored]
            assert want[0][0][0] != want[1][0][0]
        for i in (0, 1):
            assert_same(got[i], want[i])
        np.testing.assert_allclose(scored, want[2], atol=2e-5)


def test_a_layout_that_does_not_fit_is_refused_with_the_sizes_that_do(policies):
    for layout, words in (("mesh(data=3)", "divide the 8 devices"), ("jit(x=1)", "sampler.layout")):
        with pytest.raises(InputError, match=words):
            make_worker(policies[1], dataclasses.replace(OPTIONS, layout=layout))
    # What can be said without the model is said before it is loaded.
    for how, words in (
        (dict(layout="auto"), "--layout: got 'auto'"),
        (dict(layout="bogus"), "bogus"),
        (dict(pages=4), "without page_tokens"),
    ):
        with pytest.raises(InputError, match=words):
            serve(dataclasses.replace(OPTIONS, **how))
