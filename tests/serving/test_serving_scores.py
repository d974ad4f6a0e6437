"""What the endpoint says of tokens that it did not sample, and swaps of parameters under load:
every token is one that the parameters which it names would have drawn."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_server import NAME, make_sampler, tiny_server
from tiny_tokenizer import write_tokenizer

from rljax.batch import batch_from_rows
from rljax.data.text.tokenizer import load_tokenizer
from rljax.sampler import Sampling
from rljax.serving.worker import Ticket, Worker

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def served(tokenizer):
    with tiny_server(tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[3]}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scores(served):
    """(params, ids) -> log softmax of the logits after ids[:t], [t, V], at temperature 1."""
    model = served[0].model

    @jax.jit
    def all_scores(params, tokens, lengths):
        batch = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
        return jax.nn.log_softmax(model.logits(params, batch))

    def of(params, ids):
        row = np.zeros((1, served[0].tokens), np.int32)
        row[0, : len(ids)] = ids
        logp = all_scores(params, row, np.array([len(ids)], np.int32))[0]
        return np.asarray(logp)[: len(ids) - 1]

    return of


@pytest.mark.parametrize(
    "rules",
    [{}, {"temperature": 0.3}, {"temperature": 2, "top_p": 0.5}, {"logit_bias": {"7": 50}}],
    ids=str,
)
def test_log_probs_are_those_of_the_model_whatever_the_rules_of_the_draw(
    client, served, scores, tokenizer, rules
):
    """OpenAI's API and vLLM give log softmax(logits) of an echoed prompt, of sampled tokens and of
    the likeliest ones, whole and streamed, in completions and in chats."""
    prompt = tokenizer.encode("the answer")
    request = dict(model=NAME, prompt=prompt, max_tokens=6, seed=2, **rules)
    request["extra_body"] = {"ignore_eos": True}
    told = client.completions.create(**request, echo=True, logprobs=3).choices[0].logprobs
    streamed = client.completions.create(**request, logprobs=0, stream=True)
    streamed = [x for piece in streamed for x in piece.choices[0].logprobs.token_logprobs]
    bias = tuple((int(k), float(v)) for k, v in rules.get("logit_bias", {}).items())
    sampling = Sampling(**rules | {"logit_bias": bias}, seed=2, max_response_tokens=6)
    sampler = make_sampler(served[0], tokenizer)
    (sample,) = sampler.submit(prompt, sampling)
    list(sampler.run(served[1]))
    drawn = sample.tokens.tolist()
    want = scores(served[1], [*prompt, *drawn])
    own = want[np.arange(len(want)), [*prompt, *drawn][1:]]
    np.testing.assert_allclose(told.token_logprobs[1:], own, atol=1e-4)
    np.testing.assert_allclose(streamed, own[len(prompt) - 1 :], atol=1e-4)
    for t, top in enumerate(told.top_logprobs[1:]):
        best = np.sort(want[t])[-3:]
        np.testing.assert_allclose(sorted(top.values())[-3:], best, atol=1e-4)


@pytest.mark.parametrize("likeliest", [1, 5])
def test_the_likeliest_tokens_stand_beside_an_echoed_prompt_and_its_response(
    served, client, scores, tokenizer, likeliest
):
    prompt = tokenizer.encode("the answer is 42")
    answer = client.completions.create(
        model=NAME, prompt=prompt, echo=True, logprobs=likeliest, max_tokens=6, seed=2, n=2
    )
    for choice in answer.choices:
        told = choice.logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs)
        assert told.top_logprobs[0] is None and told.token_logprobs[0] is None
        want = scores(served[1], prompt)
        for t, top in enumerate(told.top_logprobs[1 : len(prompt)]):
            highest = np.sort(want[t])[::-1][:likeliest]
            np.testing.assert_allclose(sorted(top.values())[::-1][:likeliest], highest, atol=1e-4)
            own = told.token_logprobs[t + 1]
            np.testing.assert_allclose(own, want[t, prompt[t + 1]], atol=1e-4)
            # How public harnesses ask whether a continuation is the greedy one.
            assert (own == max(top.values())) == (prompt[t + 1] == want[t].argmax())
        for text, logprob, top in zip(
            told.tokens[len(prompt) :],
            told.token_logprobs[len(prompt) :],
            told.top_logprobs[len(prompt) :],
            strict=True,
        ):
            assert top[text] == logprob
            others = [name for name in top if name != text and "\ufffd" in name]
            assert not others and len(top) in (likeliest, likeliest + 1)


def test_a_chat_lists_the_likeliest_tokens_in_order(client):
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "how many"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    for one in answer.choices[0].logprobs.content:
        tops = [top.logprob for top in one.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops)[::-1]
        assert one.token == one.top_logprobs[0].token  # greedy
        np.testing.assert_allclose(one.logprob, tops[0], atol=1e-4)


def test_what_load_generators_ask_for(client):
    """Responses of a set length, and the tokens so far in every chunk of a stream."""
    request = dict(
        model=NAME,
        messages=[{"role": "user", "content": "how many"}],
        max_tokens=30,
        stream=True,
        extra_body={"ignore_eos": True},
        seed=1,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    told = [chunk.usage.completion_tokens for chunk in client.chat.completions.create(**request)]
    assert told == sorted(told) and told[-1] == 30 and len(set(told)) > 3
    del request["extra_body"]
    *_, last = client.chat.completions.create(**request, logit_bias={"1": 100})  # an end token
    assert last.usage.completion_tokens == 1


@pytest.mark.slow
def test_swaps_at_random_times_tear_no_weights(served, tokenizer, scores):
    """Six versions, swapped from a thread while eight others ask. Each token's log-prob is that of
    the version that it names after all tokens before it, and of no other version."""
    engine, params, *_ = served
    versions = {0: params}
    for number in range(1, 6):
        keys = iter(jax.random.split(jax.random.key(number), len(jax.tree.leaves(params))))

        def noise(x):
            return x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype)  # noqa: B023

        versions[number] = jax.tree.map(noise, params)
    worker = Worker(make_sampler(engine, tokenizer), params, max_waiting=60)
    done, swaps = threading.Event(), [0]

    def swap():
        rng, number = np.random.default_rng(0), 0
        while not done.is_set():
            time.sleep(rng.uniform(0, 0.02))
            number += 1
            # Old keys and values would make a log-prob one of no version.
            worker.swap(versions[number % 6], number, keep_cache=False)
            swaps[0] = number

    def ask(i):
        ended, pieces = threading.Event(), []

        def take(piece):
            pieces.append(piece)
            if piece.finish_reason is not None:
                ended.set()

        prompt = tokenizer.encode("the answer is")[: 2 + i % 3]
        sampling = Sampling(seed=i, max_response_tokens=60)
        worker.submit(Ticket(take), [(prompt, sampling)], 1).result(60)
        assert ended.wait(120)
        return prompt, pieces

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(ask, range(24)))
    finally:
        done.set()
        swapper.join()
        worker.close()
    named, checked = set(), 0
    for prompt, pieces in answers:
        ids = [*prompt, *(token for piece in pieces for token in piece.tokens)]
        want = {v: scores(versions[v], ids) for v in {p.version % 6 for p in pieces}}
        at = len(prompt)
        for piece in pieces:
            for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
                own = want[piece.version % 6][at - 1, token]
                np.testing.assert_allclose(logprob, own, atol=1e-4)
                at, checked = at + 1, checked + 1
            named.add(piece.version)
        assert [p.version for p in pieces] == sorted(p.version for p in pieces)
    assert checked > 1000 and len(named) > 4, (checked, swaps, named)
