"""The endpoint, asked by the `openai` client over a real socket: what it answers is what the engine
gives alone, whoever else asks."""

import dataclasses
import functools
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from conftest import REPO, lanes
from prometheus_client.parser import text_string_to_metric_families
from spent import at_most
from tiny_server import NAME, SLOT_TOKENS, SLOTS, make_sampler, tiny_server
from tiny_tokenizer import write_tokenizer

from rljax.batch import FinishReason
from rljax.config import Config
from rljax.config.service_options import ServeOptions
from rljax.data.text.ends import text_before_stop
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy
from rljax.sampler import Sampling
from rljax.serving.fields import RequestLimits, read_chat, read_completion
from rljax.serving.metrics import prometheus_text
from rljax.serving.saved import check_options, example_request, make_worker, serve
from rljax.serving.text import Offsets, StopStrings, TextStream, bytes_of
from rljax.serving.worker import Ticket, Worker
from rljax.tracking import compiles

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def served(tokenizer):
    """(engine, params, worker, address): one server for the whole file."""
    with tiny_server(tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[3]}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def alone(served, tokenizer):
    """What the engine gives for a request when nobody else asks."""
    engine, params, *_ = served
    sampler = make_sampler(engine, tokenizer)

    def ask(prompt, n=1, **options):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        options = {"stop_ids": tokenizer.eos_ids, "max_response_tokens": 16, **options}
        samples = sampler.submit(ids, Sampling(**options), n=n)
        list(sampler.run(params, raw_logprobs=True))
        return samples

    return ask


def text_of(sample, tokenizer) -> str:
    return text_before_stop(tokenizer.decode(sample.tokens), sample.sampling.stop_strings)


def wait_until(true, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def streamed(client, **request) -> dict[int, dict]:
    """A streamed completion put together again, by choice."""
    found: dict[int, dict] = {}
    for chunk in client.completions.create(model=NAME, stream=True, **request):
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"text": "", "logprobs": [], "reason": None})
            assert one["reason"] is None
            one["text"] += choice.text
            one["reason"] = choice.finish_reason
            if choice.logprobs:
                one["logprobs"] += choice.logprobs.token_logprobs
    return found


# -- under load

LETTERS = "the answer is 42 and how many apples"


def mixed_requests(count: int) -> list[dict]:
    """Requests of every kind; each is a function of its number."""
    rng = np.random.default_rng(0)
    requests = []
    for i in range(count):
        size = int(rng.integers(1, 30))
        one = {"prompt": LETTERS[:size], "seed": i, "max_tokens": int(rng.integers(1, 40))}
        one["logprobs"] = 0  # texts of a random model are alike; these are not
        kind = i % 6
        if kind == 1:
            one |= {"temperature": 0.0}
        elif kind == 2:
            one |= {"n": 3, "top_p": 0.8, "temperature": 0.7}
        elif kind == 3:
            one |= {"stop": ["a", "zz"], "extra_body": {"top_k": 20}}
        elif kind == 4:
            one |= {"prompt": rng.integers(5, 200, 45).tolist()}
        elif kind == 5:
            one |= {"logit_bias": {"40": 5.0, "41": 4.0}, "extra_body": {"min_p": 0.02}}
        requests.append(one)
    return requests


def in_sampling(request: dict) -> dict:
    more = request.get("extra_body", {})
    return {
        "prompt": request["prompt"],
        "n": request.get("n", 1),
        "seed": request["seed"],
        "max_response_tokens": request["max_tokens"],
        "temperature": request.get("temperature", 1.0),
        "top_p": request.get("top_p", 1.0),
        "top_k": more.get("top_k", 0),
        "min_p": more.get("min_p", 0.0),
        "stop_strings": tuple(request.get("stop", ())),
        "logit_bias": tuple((int(k), v) for k, v in request.get("logit_bias", {}).items()),
    }


def bad_requests(client) -> list:
    """Calls that must be refused, with the words that the refusal must hold."""

    def ask(**more):
        request = {"model": NAME, "prompt": "the", "max_tokens": 4, **more}
        return functools.partial(client.completions.create, **request)

    return [
        (ask(max_tokens=SLOT_TOKENS), "do not fit a slot"),
        (ask(prompt=[5] * SLOT_TOKENS), "do not fit a slot"),
        (ask(prompt=[]), "prompt"),
        (ask(prompt=""), "at least one token"),
        (ask(prompt=[100_000]), "ids from 0 to"),
        (ask(prompt=["the", 3]), "prompt"),
        (ask(n=0), "at least 1"),
        (ask(n=65), "at most 64"),
        (ask(temperature=-1), "temperature"),
        (ask(top_p=0), "top_p"),
        (ask(seed=2**63), "seed"),
        (ask(stop=[""]), "no empty string"),
        (ask(logprobs=6), "logprobs: got 6"),
        (ask(logprobs=2, stream=True), "logprobs: got 2"),
        (ask(max_tokens=0), "max_tokens: got 0"),
        (ask(best_of=4), "best_of"),
        (ask(logit_bias={"100000": 1}), "logit_bias"),
        (ask(presence_penalty=0.5), "presence_penalty"),
        (ask(extra_body={"top_q": 3}), "top_q"),
        (ask(extra_body={"stream_options": {"x": 1}}), "stream_options.x"),
    ]


def test_each_of_many_mixed_requests_gets_what_the_engine_gives_it_alone(
    served, client, alone, tokenizer
):
    """24 requests over 4 slots from 8 threads, half of them streamed, refusals among them."""
    requests = mixed_requests(24)

    def ask(i):
        if i % 2:
            return streamed(client, **requests[i])
        answer = client.completions.create(model=NAME, **requests[i])
        return {
            c.index: {
                "text": c.text,
                "reason": c.finish_reason,
                "logprobs": c.logprobs.token_logprobs,
            }
            for c in answer.choices
        }

    def refused(case):
        call, words = case
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert words in caught.value.body["message"], caught.value.body
        assert caught.value.body["type"] == "invalid_request_error"

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, i) for i in range(24)]
        refusals = list(threads.map(refused, bad_requests(client)))
        answers = [answer.result(timeout=120) for answer in answers]
    assert len(refusals) == 20
    reasons, groups = set(), []
    for request, answer in zip(requests, answers, strict=True):
        samples = alone(**in_sampling(request))
        assert sorted(answer) == list(range(len(samples)))
        for i, sample in enumerate(samples):
            assert answer[i]["text"] == text_of(sample, tokenizer), request
            assert answer[i]["reason"] == REASONS[sample.finish_reason]
            reasons.add(answer[i]["reason"])
            np.testing.assert_allclose(answer[i]["logprobs"], sample.logprobs, atol=1e-5)
        if request.get("n"):
            groups.append(len({tuple(answer[i]["logprobs"]) for i in answer}))
    assert reasons == {"stop", "length"} and sum(size > 1 for size in groups) >= 2
    assert served[2].sampler.pending == 0


# -- completions


def test_prompts_come_as_text_texts_ids_or_lists_of_ids(client, alone, tokenizer):
    text, other = "the answer", "how many"
    ids = tokenizer.encode(text)

    def ask(prompt, **more):
        return client.completions.create(model=NAME, prompt=prompt, seed=7, max_tokens=6, **more)

    want = [text_of(alone(p, seed=7, max_response_tokens=6)[0], tokenizer) for p in (text, other)]
    assert [c.text for c in ask(text).choices] == want[:1]
    assert [c.text for c in ask(ids).choices] == want[:1]
    assert [c.text for c in ask([text, other]).choices] == want
    both = ask([ids, tokenizer.encode(other)], n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert [both.choices[i].text for i in (0, 2)] == want
    size = len(ids) + len(tokenizer.encode(other))
    assert both.usage.prompt_tokens == size
    assert both.usage.total_tokens == size + both.usage.completion_tokens


def test_echo_repeats_the_prompt_and_the_default_is_sixteen_tokens(client, alone, tokenizer):
    request = dict(model=NAME, prompt="the answer", seed=5, echo=True, logit_bias={"1": -100})
    answer = client.completions.create(**request)
    sample = alone("the answer", seed=5, logit_bias=((1, -100.0),))[0]
    assert answer.choices[0].text == "the answer" + text_of(sample, tokenizer)
    assert answer.usage.completion_tokens == len(sample.tokens) <= 16
    assert streamed(client, **{k: v for k, v in request.items() if k != "model"})[0]["text"] == (
        answer.choices[0].text
    )


def test_logprobs_stand_beside_their_tokens(client, alone, tokenizer):
    request = dict(model=NAME, prompt="the answer", seed=2, max_tokens=12, logprobs=0)
    choice = client.completions.create(**request).choices[0]
    sample = alone("the answer", seed=2, max_response_tokens=12)[0]
    told = choice.logprobs
    np.testing.assert_allclose(told.token_logprobs, sample.logprobs, atol=1e-5)
    assert told.tokens == [tokenizer.decode([i], skip_special_tokens=False) for i in sample.tokens]
    whole = [t for t in zip(told.tokens, told.text_offset, strict=True) if "\ufffd" not in t[0]]
    found = [t for t, at in whole if choice.text[at:].startswith(t)]
    assert len(found) >= 3
    assert told.text_offset == sorted(told.text_offset)


def test_echo_with_logprobs_scores_the_prompt_as_the_sampler_scores_its_tokens(
    client, alone, tokenizer
):
    """What was sampled after a prompt gets the same log-probs when it is echoed as a prompt."""
    for temperature in (1.0, 0.7, 0.0):
        sample = alone("the answer", temperature=temperature, seed=9, max_response_tokens=12)[0]
        prompt = tokenizer.encode("the answer")
        request = dict(
            model=NAME,
            prompt=[*prompt, *sample.tokens.tolist()],
            temperature=temperature,
            logprobs=0,
            echo=True,
        )
        choice = client.completions.create(**request, max_tokens=0).choices[0]
        told = choice.logprobs
        assert told.token_logprobs[0] is None and len(told.tokens) == len(request["prompt"])
        np.testing.assert_allclose(
            told.token_logprobs[len(prompt) :], sample.logprobs, atol=1e-4, rtol=1e-4
        )
        assert (
            choice.text == tokenizer.decode(request["prompt"]) and choice.finish_reason == "length"
        )
        assert told.text_offset[: len(prompt)] == [
            len(tokenizer.decode(prompt[:i])) for i in range(len(prompt))
        ]
        more = client.completions.create(**request, max_tokens=5, n=2, seed=1)
        for one in more.choices:
            assert one.logprobs.token_logprobs[: len(told.tokens)] == told.token_logprobs
            assert len(one.logprobs.tokens) > len(told.tokens)
    assert more.usage.completion_tokens <= 10


def test_echo_with_logprobs_streams_and_takes_several_prompts(client, tokenizer):
    request = dict(prompt=["the answer", "how many"], echo=True, logprobs=0, max_tokens=3, seed=1)
    whole = client.completions.create(model=NAME, **request)
    pieces = streamed(client, **request)
    for choice in whole.choices:
        assert pieces[choice.index]["text"] == choice.text
        assert pieces[choice.index]["logprobs"] == choice.logprobs.token_logprobs
    nothing = streamed(client, **(request | {"max_tokens": 0}))
    assert [nothing[i]["text"] for i in (0, 1)] == request["prompt"]
    assert [len(nothing[i]["logprobs"]) for i in (0, 1)] == [
        len(tokenizer.encode(p)) for p in request["prompt"]
    ]
    with pytest.raises(openai.BadRequestError, match="ids from 0"):
        client.completions.create(
            model=NAME, prompt=[5, 10**6], echo=True, logprobs=0, max_tokens=0
        )


def test_a_seed_repeats_and_its_absence_does_not(client):
    def ask(**more):
        return client.completions.create(model=NAME, prompt="the", max_tokens=24, **more)

    assert ask(seed=1).choices[0].text == ask(seed=1).choices[0].text
    assert ask(seed=1).choices[0].text != ask(seed=2).choices[0].text
    assert ask().choices[0].text != ask().choices[0].text
    # Of 64 bits, as OpenAI and vLLM take them; no two of these are one seed of 32.
    texts = [ask(seed=seed).choices[0].text for seed in (0, -1, -(2**63), 2**32, 2**40, 2**63 - 1)]
    assert len(set(texts)) == len(texts) and ask(seed=-1).choices[0].text == texts[1]


def test_usage_of_a_stream_comes_last_and_only_where_asked(client):
    request = dict(model=NAME, prompt="the", seed=3, max_tokens=9, stream=True)
    chunks = list(client.completions.create(**request, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    whole = client.completions.create(**{**request, "stream": False})
    assert chunks[-1].usage == whole.usage
    assert all(c.choices for c in client.completions.create(**request))


class Unread:
    """A tokenizer that no request may reach; rendered chats are long."""

    def encode(self, text, add_special_tokens=False):
        raise AssertionError("a text was tokenized before its request was checked")

    def render_chat(self, messages, variables):
        assert variables is None, "a chat was rendered before its request was checked"
        return "x" * 20_000


def test_what_is_too_much_is_refused_before_any_work():
    prompts = [
        {"n": 2**31 - 1},
        {"prompt": ["the"] * 65},
        {"prompt": ["the"] * 8, "n": 9},
        {"n": 0},
        {"prompt": "x" * 20_000},
        {"prompt": ["the", "x" * 20_000]},
        {"prompt": [5] * 97},
        {"prompt": [[5], [5] * 96]},
        {"max_tokens": 96},
        {"max_tokens": 2**31 - 1},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1001},
        {"stop": ["x", "x" * 10**6]},
        {"logit_bias": {str(i): 1 for i in range(301)}},
        {"prompt": [[5]] * 10**5},
    ]
    for more in prompts:
        with pytest.raises(InputError):
            read_completion({"prompt": "the"} | more, Unread(), NAME, RequestLimits(96, 64))
    chat = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {}}
    for more in ({"n": 65}, {"max_tokens": 96}, {"messages": chat["messages"] * 4097}):
        with pytest.raises(InputError):
            read_chat(chat | more, Unread(), NAME, RequestLimits(96, 64))
    with pytest.raises(InputError, match="20000 characters.*do not fit a slot"):
        read_chat(chat | {"chat_template_kwargs": None}, Unread(), NAME, RequestLimits(96, 64))


# -- chat

MESSAGES = [{"role": "system", "content": "the"}, {"role": "user", "content": "how many apples?"}]


def test_chat_goes_through_the_template_and_streams_the_same(client, alone, tokenizer):
    request = dict(model=NAME, messages=MESSAGES, seed=4, max_tokens=20, n=2, logprobs=True)
    answer = client.chat.completions.create(**request)
    ids = tokenizer.encode_chat(MESSAGES)
    samples = alone(ids, n=2, seed=4, max_response_tokens=20)
    for choice, sample in zip(answer.choices, samples, strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == text_of(sample, tokenizer)
        assert choice.finish_reason == REASONS[sample.finish_reason]
        told = choice.logprobs.content
        np.testing.assert_allclose([t.logprob for t in told], sample.logprobs, atol=1e-5)
        raw = [bytes(t.bytes) for t in told]  # also of a part of a character
        assert all(
            b.decode() == t.token for b, t in zip(raw, told, strict=True) if "\ufffd" not in t.token
        )
        shown = zip(raw, sample.tokens.tolist(), strict=True)
        text = b"".join(b for b, token in shown if token not in tokenizer.special_ids)
        assert text.decode(errors="replace") == choice.message.content
    assert answer.usage.prompt_tokens == len(ids)
    text = {0: "", 1: ""}
    roles = []
    for chunk in client.chat.completions.create(**request, stream=True):
        delta = chunk.choices[0].delta
        text[chunk.choices[0].index] += delta.content or ""
        roles += [delta.role] if delta.role else []
    assert text == {i: c.message.content for i, c in enumerate(answer.choices)}
    assert roles == ["assistant"] * 2


def test_chat_without_a_limit_fills_the_slot(client, tokenizer):
    bias = {str(i): -100 for i in tokenizer.eos_ids}
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, logit_bias=bias)
    assert answer.usage.total_tokens == SLOT_TOKENS
    assert answer.choices[0].finish_reason == "length"
    short = dict(model=NAME, messages=MESSAGES, logit_bias=bias, max_completion_tokens=3)
    assert client.chat.completions.create(**short).usage.completion_tokens == 3


@pytest.mark.parametrize(
    "more,words",
    [
        ({"messages": []}, "message"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_chat_refuses_what_it_cannot_honour(client, more, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, **more})
    assert words in caught.value.body["message"]


# -- HTTP


def post(address: str, raw: bytes) -> tuple[int, dict]:
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", raw, kind, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


HALF_PAIR = b'{"prompt": "\\ud800"}'


def test_what_is_no_request_gets_an_error_of_the_usual_shape(served, client):
    address = served[3]
    for raw in (b"", b"{", b"[1]", b'"x"', b'{"prompt": "\xff"}', b"[" * 100_000, HALF_PAIR):
        status, body = post(address, raw)
        assert status == 400 and set(body["error"]) == {"message", "type", "param", "code"}, raw
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="the")
    assert caught.value.body["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=NAME, input="x")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"{address}/v1/completions", timeout=60)


def test_models_health_and_metrics(served, client):
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with urllib.request.urlopen(f"{served[3]}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok"}
    with urllib.request.urlopen(f"{served[3]}/metrics.json", timeout=60) as answer:
        told = json.load(answer)
    assert told["slots"] == SLOTS and told["tokens"] > 0 and 0 < told["slot_occupancy"] <= 1
    with urllib.request.urlopen(f"{served[3]}/metrics", timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.read().decode()))
    values = {s.name: (f.type, s.value) for f in families for s in f.samples}
    assert len(values) == len(told) and values["rljax_slots"] == ("gauge", SLOTS)
    assert values["rljax_tokens_total"] == ("counter", told["tokens"])


# -- the decode thread


def hold(worker):
    """Keep the decode thread from its next dispatch until the result is called."""
    there, release = hold_later(worker)
    assert there.wait(120)
    return release


def hold_later(worker):
    """(an event that shows that the decode thread is held, a function that lets it go)."""
    import threading

    go, there = threading.Event(), threading.Event()
    worker._call(lambda: (there.set(), go.wait(120)))
    return there, go.set


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_slot(served, stream):
    """By hand: a request, and the socket closed before its answer is complete."""
    worker, address = served[2], served[3]
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(
        dict(prompt="the", max_tokens=SLOT_TOKENS - 8, n=8, stream=stream, logit_bias=NEVER_ENDS)
    ).encode()
    before = worker.sampler.live_slot_steps
    release = hold(worker)
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: not worker._commands.empty())  # the request is queued
        begun, go_on = hold_later(worker)
        release()
        assert begun.wait(120) and worker.sampler.pending == 8
    wait_until(lambda: not worker._commands.empty())  # it is heard that nobody reads
    go_on()
    wait_until(lambda: worker.sampler.pending == 0)
    assert worker.sampler.live_slot_steps - before < 8 * (SLOT_TOKENS - 8)
    assert worker._tickets == {}


NEVER_ENDS = {"1": -100, "2": -100}  # <|im_end|>, <|endoftext|>


def test_more_than_the_stated_bound_is_told_to_come_back(served, client):
    worker = served[2]
    release = hold(worker)

    def ask(n):
        return client.completions.create(model=NAME, prompt="the", n=n, max_tokens=2, seed=1)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, 64)
        wait_until(lambda: not worker._commands.empty())
        second = threads.submit(ask, 2)
        wait_until(lambda: worker._commands.qsize() == 2)
        release()
        assert len(first.result(60).choices) == 64
        with pytest.raises(openai.InternalServerError) as caught:
            second.result(60)
    assert caught.value.status_code == 503 and caught.value.body["code"] == "overloaded"
    assert caught.value.response.headers["retry-after"] == "1"
    assert len(ask(2).choices) == 2


def test_new_parameters_take_over_between_dispatches(served, client, tokenizer, alone):
    engine, params, worker, _ = served
    moved = jax.tree.map(lambda x: x + 0.1, params)
    request = dict(model=NAME, prompt="the answer", seed=9, max_tokens=20)
    before = client.completions.create(**request)
    version = worker.swap(moved)
    try:
        after = client.completions.create(**request)
        sampler = make_sampler(engine, tokenizer)
        sample = sampler.submit(
            tokenizer.encode("the answer"),
            Sampling(seed=9, max_response_tokens=20, stop_ids=tokenizer.eos_ids),
        )[0]
        list(sampler.run(moved))
        assert after.choices[0].text == text_of(sample, tokenizer) != before.choices[0].text
        assert after.system_fingerprint == f"version-{version}" != before.system_fingerprint
        for served_before in (version, version - 1):
            with pytest.raises(ValueError, match="a number above that of the last ones"):
                worker.swap(params, served_before)
    finally:
        worker.swap(params)
    assert client.completions.create(**request).choices[0].text == before.choices[0].text


def test_logits_that_are_not_finite_are_an_error_of_the_request(served, client):
    _, params, worker, _ = served
    worker.swap(jax.tree.map(lambda x: x * np.nan, params))
    try:
        with pytest.raises(openai.InternalServerError, match="logits are not finite"):
            client.completions.create(model=NAME, prompt="the")
        with pytest.raises(openai.APIError, match="logits are not finite"):
            list(client.completions.create(model=NAME, prompt="the", stream=True))
    finally:
        worker.swap(params)
    assert client.completions.create(model=NAME, prompt="the", max_tokens=3).choices


def test_a_failed_decoder_tells_those_who_wait_and_those_who_come(served, tokenizer):
    from rljax.serving.app import in_background, make_app

    engine, params, *_ = served
    worker = Worker(make_sampler(engine, tokenizer), params)
    with in_background(make_app(worker, tokenizer, NAME)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(model=NAME, prompt="the", max_tokens=2).choices
            worker.swap({"not": "a model"})
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="decoder failed"):
                    client.completions.create(model=NAME, prompt="the", max_tokens=2)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{address}/health", timeout=60)
    worker.close()


def test_closing_ends_what_is_unfinished(served, tokenizer):
    engine, params, *_ = served
    worker, pieces = Worker(make_sampler(engine, tokenizer), params), []
    go = hold(worker)
    worker.submit(Ticket(pieces.append), [([3, 4], Sampling(max_response_tokens=90))], 2)
    worker._commands.put(None)
    late = worker.submit(Ticket(pieces.append), [([3, 4], Sampling())], 1)  # behind the end
    go()
    worker.close()
    assert "has ended" in str(late.exception(timeout=60))
    assert [p.finish_reason for p in pieces[-2:]] == [FinishReason.ABORT] * 2
    after = worker.submit(Ticket(pieces.append), [], 1)
    assert "has ended" in str(after.exception(timeout=60))


# -- text


def pushed(tokenizer, ids, stops=()) -> list[str]:
    stream = TextStream(tokenizer.decode, StopStrings(stops))
    return [*map(stream.push, ids), stream.finish()]


def test_a_character_is_sent_whole(tokenizer):
    text = "né 한 🙂 x"
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([i]) for i in ids)
    parts = pushed(tokenizer, ids)
    assert "".join(parts) == text and not any("\ufffd" in part for part in parts)
    cut = pushed(tokenizer, ids[:-3])  # ends within the smiley: only the end may say so
    assert "".join(cut) == tokenizer.decode(ids[:-3])
    assert not any("\ufffd" in part for part in cut[:-1])


@pytest.mark.parametrize("stops", [(), ("a",), ("the", "he "), ("\n\n", "is 4", "apples")])
def test_pieces_add_up_to_the_text_before_the_stop(tokenizer, stops):
    rng = np.random.default_rng(len(stops))
    text = tokenizer.encode("the answer is 42\n\nand how many apples, the is")
    for _ in range(60):
        ids = rng.choice([*text, *range(tokenizer.vocab_size)], rng.integers(1, 40)).tolist()
        assert "".join(pushed(tokenizer, ids, stops)) == text_before_stop(
            tokenizer.decode(ids), stops
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_string_that_begins_within_itself_is_found(seed):
    """Texts of two letters, in which the end of one beginning of the stop is that of another."""
    rng = np.random.default_rng(seed)
    text = "abacababacabad" if seed == 0 else "".join(rng.choice(["a", "b"], 60))
    stop = "abacabad" if seed == 0 else text[40:50]
    matcher = StopStrings([stop])
    matched = matcher.begin()
    for end, character in enumerate(text, start=1):
        found = matcher.advance(matched, character)
        assert (found is not None) == text[:end].endswith(stop)
        if found is not None:
            assert found == len(stop)
            break


def test_the_beginning_of_a_stop_string_is_held_back(tokenizer):
    ids = [i for c in "xx<en> <end>" for i in tokenizer.encode(c)]
    parts = pushed(tokenizer, ids, ("<end>",))
    assert parts[:6] == ["x", "x", "", "", "", "<en>"]
    assert "".join(parts) == "xx<en> "


def offsets_of(tokenizer, ids) -> list[int]:
    offsets = Offsets(tokenizer, TextStream(tokenizer.decode, StopStrings()))
    return [offsets.push(token)[0] for token in ids]


def first_characters(data: bytes) -> list[int]:
    """The character of each byte in the text of these bytes, U+FFFD for what is none."""
    found, count = [], 0
    while data:
        size = len(data)
        for end in range(1, len(data) + 1):
            try:
                data[:end].decode()
                size = end
                break
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    size = error.end
                    break
        found += [count] * size
        count, data = count + 1, data[size:]
    return found


def test_a_token_begins_where_its_character_does_also_behind_bytes_of_none(tokenizer):
    rng, special = np.random.default_rng(0), tokenizer.special_ids
    raw = {i: bytes_of(tokenizer, i) for i in range(tokenizer.vocab_size) if i not in special}
    ids = {data: i for i, data in raw.items()}
    texts = [
        "é한🙂 x".encode(),
        b"\xff" * 40 + b"the",
        b"\xe4\xbda\xe4\xe4\xbd\xa0",
        b"\xef\xbf\xbda",
    ]
    texts += [bytes(rng.choice([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x61], 30)) for _ in range(100)]
    for data in texts:
        tokens = [ids[data[i : i + 1]] for i in range(len(data))]
        text = tokenizer.decode(tokens)
        assert text == data.decode(errors="replace")
        assert offsets_of(tokenizer, tokens) == first_characters(data), data
        # A special token is no text, and parts no character.
        parted = [t for token in tokens for t in (token, min(special))]
        assert offsets_of(tokenizer, parted)[::2] == first_characters(data), data
    for _ in range(100):
        tokens = rng.choice(list(raw), 30).tolist()
        data = b"".join(raw[i] for i in tokens)
        starts = np.cumsum([0, *(len(raw[i]) for i in tokens[:-1])])
        want = np.array(first_characters(data))[starts].tolist()
        assert offsets_of(tokenizer, tokens) == want


def test_offsets_of_a_vocabulary_that_falls_back_to_bytes(tmp_path):
    """It writes U+FFFD for every byte of a run that is no text, which shows as the run ends."""
    write_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    first = 1 + max(one["id"] for one in saved["added_tokens"])
    vocabulary = {one["content"]: one["id"] for one in saved["added_tokens"]}
    vocabulary |= {f"<0x{byte:02X}>": first + byte for byte in range(256)} | {"a": first + 256}
    saved["model"] = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    saved["decoder"] = {
        "type": "Sequence",
        "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    saved |= {"pre_tokenizer": None, "normalizer": None, "post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = load_tokenizer(tmp_path)
    a = first + 256
    smile = [first + byte for byte in "🙂".encode()]
    assert [bytes_of(tokenizer, i) for i in (smile[1], a)] == [b"\x9f", b"a"]
    assert offsets_of(tokenizer, [a, *smile, a, *smile]) == [0, 1, 1, 1, 1, 2, 3, 3, 3, 3]
    broken = [a, *smile[:3], a, first + 0xFF, a]
    assert tokenizer.decode(broken) == "a\ufffd\ufffd\ufffda\ufffda"
    assert offsets_of(tokenizer, broken)[4:] == [4, 5, 6]


@pytest.mark.parametrize("case", ["bytes", "special", "text", "stop"])
def test_a_token_costs_the_same_at_any_place_of_a_response(tokenizer, case):
    """Also where the tokens so far are no text, no character of their own, or nearly a stop."""
    half = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd"]
    tail = tokenizer.encode("the answer is 漢🙂 and 42")
    stops = ("x" * 1000, "x" * 999 + "y")
    start, stops = {
        "bytes": (half * 8, ()),
        "special": ([1, 2] * 500, ()),
        "text": (tail * 60, ("zz",)),
        "stop": (tokenizer.encode("x" * 3000), stops),
    }[case]
    read = 0

    def decode(ids):
        nonlocal read
        read += len(ids)
        return tokenizer.decode(ids)

    stream = TextStream(decode, StopStrings(stops))
    parts = [stream.push(i) for i in [*start, *tail]] + [stream.finish()]
    text = tokenizer.decode([*start, *tail])
    assert "".join(parts) == text_before_stop(text, stops)
    assert read < 60 * len([*start, *tail])


@pytest.mark.parametrize("stop", ["x" * 1000, "xy" * 500, "x" * 500 + "y" + "x" * 499])
def test_stop_strings_cost_the_same_for_every_character(stop):
    """Sixteen of the longest, in a text that is always near the end of one of them."""
    matcher = StopStrings([stop[: 1000 - i] + "z" for i in range(16)])

    matched = matcher.begin()
    with at_most(5):  # it is 0.1
        for _ in range(2000):
            assert matcher.advance(matched, stop[:4]) is None


# -- the launcher


@pytest.mark.slow
def test_a_policy_is_served_in_the_dtype_that_its_run_sampled_in(served, tokenizer):
    engine, params, *_ = served
    config = Config()
    policy = SavedPolicy(config, engine.model, params, tokenizer, None)
    for of_run, flag, dtype in (
        ("", "", "float32"),
        ("bfloat16", "", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("", "float16", "float16"),
    ):
        config.sampler.dtype = of_run
        worker = make_worker(policy, ServeOptions("-", slots=2, tokens=16, dtype=flag))
        try:
            assert worker.sampler.engine.model.config.dtype == dtype
        finally:
            worker.close()
    with pytest.raises(InputError, match="--dtype=float8: one of float32, bfloat16, float16"):
        check_options(ServeOptions("-", dtype="float8"))


@pytest.mark.parametrize("alphabet", ["abc>", "0123456789+-*/()=", "\"'\\ $`!é漢🙂"])
def test_the_command_that_is_printed_asks_in_the_alphabet_of_the_model(alphabet):
    tokenizer = CharTokenizer(alphabet)
    *command, body = shlex.split(example_request("http://localhost:8000", tokenizer))
    assert command[-2:] == ["content-type: application/json", "-d"]
    assert tokenizer.encode(json.loads(body)["prompt"])


WORKERS = [(96, dict(page_tokens=4, pages=15)), (0, {}), (96, {})]


@pytest.mark.parametrize("how", lanes(WORKERS[:1], WORKERS[1:]), ids=str)
def test_the_first_requests_compile_nothing(served, tokenizer, how):
    """What a client waits for is its own tokens: alone, with others, with every option."""
    cache, paged = how
    engine, params, *_ = served
    policy = SavedPolicy(Config(), engine.model, params, tokenizer, None)
    options = ServeOptions("-", slots=3, tokens=48, steps=2, chunk_tokens=8)
    options = dataclasses.replace(options, prefix_cache_tokens=cache, **paged)
    worker, pieces = make_worker(policy, options), []
    statistics = worker.statistics()
    assert statistics["tokens"] == statistics["dispatches"] == 0  # those of clients alone
    compiles.watch()
    before = compiles.count()
    more = dict(top_k=5, top_p=0.5, min_p=0.1, logit_bias=((7, 2.0),), stop_strings=("zz",))
    more |= dict(max_response_tokens=20)
    requests = [
        [([5], Sampling(max_response_tokens=3))],
        [([5] * 30, Sampling(max_response_tokens=9, stop_ids=tokenizer.eos_ids))] * 2,
        [([5] * i + [6], Sampling(seed=i, temperature=0.5 * i, **more)) for i in range(7)],
    ]
    for request in requests:
        ticket = Ticket(pieces.append)
        worker.submit(ticket, request, 2).result(60)
        wait_until(lambda ticket=ticket: not ticket.unfinished)
    ticket, seen = Ticket(pieces.append), len(pieces)
    worker.submit(ticket, requests[2], 1).result(60)
    wait_until(lambda: len(pieces) > seen)
    worker.abort(ticket).result(60)
    worker.close()
    assert len(pieces) > 20 and compiles.count() == before, compiles.names(before)
    assert (worker.sampler.cache.hits > 0) == bool(cache)
    if paged:  # fewer than the slots would take: 36
        named = prometheus_text(worker.statistics())
        assert "rljax_pages_used_ratio" in named and "rljax_preemptions_total" in named


def health(port: int) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except urllib.error.URLError:
        return 0, {}


@pytest.mark.slow
def test_the_launcher_serves_a_model_folder(tmp_path):
    """/health says when it is loading; the address is printed once everything answers."""
    from tiny_gsm8k import write_model

    folder = write_model(tmp_path / "model", "qwen3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen: got '127.0.0.1:{port}'"):
            serve(ServeOptions(str(folder), port=port))
    line = [sys.executable, f"{REPO}/launchers/serve.py", f"--model={folder}", f"--port={port}"]
    env = {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    options = dict(env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    flags = ["--slots=2", "--tokens=64", "--kv_dtype=bfloat16", "--compilation_cache="]
    process = subprocess.Popen([*line, *flags], **options)
    try:
        said = []
        wait_until(lambda: said.append(health(port)) or said[-1][0], timeout_s=200)
        assert said[-1] == (503, said[-1][1]) and said[-1][1]["status"] == "loading"
        address = re.search(r"http://\S+", process.stdout.readline()).group()
        # Between both stands what requests that say nothing get, of the model's own defaults.
        lines = iter(process.stdout.readline, "")
        example = shlex.split(next(line for line in lines if line.startswith("curl")))
        assert health(port) == (200, {"status": "ok"})
        assert example[:2] == ["curl", f"{address}/completions"]
        assert post(address.removesuffix("/v1"), example[-1].encode())[0] == 200
        with openai.OpenAI(base_url=address, api_key="none", timeout=200) as client:
            assert [m.id for m in client.models.list()] == ["model"]
            ask = dict(model="model", messages=MESSAGES, max_tokens=5, seed=1)
            answers = [client.chat.completions.create(**ask) for _ in range(2)]
            assert answers[0].choices[0].message == answers[1].choices[0].message
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
    bad = ["--slots=0", "--port=99999"]
    done = subprocess.run([*line[:-1], *bad], **options, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--slots=0" in done.stderr and "--port=99999" in done.stderr
