"""Fields of requests as clients of OpenAI, vLLM and SGLang send them: values without an effect,
vLLM's ways to continue a turn, and stop strings that are, or hold, special tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_server import NAME, make_sampler, tiny_server
from tiny_tokenizer import write_tokenizer

from rljax.batch import FinishReason
from rljax.config import Config, SamplerConfig
from rljax.data.text.tokenizer import load_tokenizer
from rljax.sampler import Sampling, generate
from rljax.serving.fields import RequestLimits, read_completion
from rljax.serving.text import StopStrings, text_stream
from rljax.setup.decoding import decoding_of
from rljax.setup.scoring import turn_sampling
from rljax.setup.setup import make_sampling

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
ASK = [{"role": "user", "content": "hello"}]
BEGUN = [*ASK, {"role": "assistant", "content": "the cat"}]


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


def chat(client, messages=ASK, **more):
    body = more.pop("extra_body", {})
    return client.chat.completions.create(
        model=NAME, messages=messages, extra_body=body, **{"max_tokens": 1, **more}
    )


def complete(client, **more):
    body = more.pop("extra_body", {})
    return client.completions.create(
        model=NAME, prompt="hello", extra_body=body, **{"max_tokens": 1, **more}
    )


BOTH = [
    ("top_k", -1),
    ("top_k", 0),
    ("min_p", 0.0),
    ("repetition_penalty", 1.0),
    ("length_penalty", 1.0),
    ("presence_penalty", 0),
    ("frequency_penalty", 0.0),
    ("n", 1),
    ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True),
    ("min_tokens", 0),
    ("use_beam_search", False),
    ("best_of", 1),
    ("best_of", None),
    ("logit_bias", {}),
    ("ignore_eos", False),
    ("include_stop_str_in_output", False),
    ("stop_token_ids", []),
    ("stop", []),
    ("seed", None),
    ("user", "u"),
    ("metadata", {"a": "b"}),
    ("store", False),
    ("service_tier", "auto"),
    ("suffix", None),
    ("echo", False),
    ("truncate_prompt_tokens", None),
    ("prompt_logprobs", None),
    ("guided_json", None),
    ("guided_choice", None),
    ("priority", 0),
    ("response_format", {"type": "text"}),
    ("structured_outputs", None),
    ("bad_words", []),
    ("allowed_token_ids", None),
    ("prompt_cache_key", "k"),
    ("logits_processors", []),
    ("stream_options", None),
    ("request_id", "r"),
    ("return_token_ids", False),
    ("no_such_field", None),
    ("logprobs", False),
]
CHAT = [
    ("parallel_tool_calls", True),
    ("functions", None),
    ("functions", []),
    ("tools", []),
    ("function_call", "none"),
    ("tool_choice", "none"),
    ("reasoning_effort", None),
    ("modalities", ["text"]),
    ("audio", None),
    ("prediction", None),
    ("verbosity", "medium"),
    ("safety_identifier", "s"),
    ("add_generation_prompt", True),
    ("continue_final_message", False),
    ("add_special_tokens", False),
    ("documents", None),
    ("documents", []),
    ("chat_template", None),
    ("chat_template_kwargs", {}),
    ("mm_processor_kwargs", {}),
    ("top_logprobs", 0),
    ("include_reasoning", True),
    ("max_completion_tokens", None),
]
COMPLETIONS = [("add_special_tokens", True), ("suffix", ""), ("top_logprobs", 0)]


@pytest.mark.parametrize("ask, fields", [(chat, BOTH + CHAT), (complete, BOTH + COMPLETIONS)])
def test_values_without_an_effect_are_taken(client, ask, fields):
    plain = ask(client, seed=3)
    for name, value in fields:
        body = {"seed": 3, name: value} if name != "seed" else {}
        answer = ask(client, extra_body=body)
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens, name
        if name != "seed":
            one, other = answer.choices[0], plain.choices[0]
            assert one.model_dump() == other.model_dump(), name


@pytest.mark.smoke
@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    "name, value",
    [
        ("repetition_penalty", 1.1),
        ("repetition_penalty", True),
        ("min_tokens", 1),
        ("top_k", -2),
        ("skip_special_tokens", False),
        ("use_beam_search", True),
        ("use_beam_search", 0),
        ("length_penalty", 0.9),
        ("best_of", 2),
        ("guided_json", {"type": "object"}),
        ("response_format", {"type": "json_object"}),
        ("prompt_logprobs", 1),
        ("store", True),
        ("truncate_prompt_tokens", 5),
        ("include_stop_str_in_output", True),
        ("bad_words", ["x"]),
        ("presence_penalty", False),
        ("stop_token_ids", ["x"]),
        ("reasoning_effort", "high"),
        ("no_such_field", 0),
        ("documents", [{"text": "x"}]),
        ("stop_token_ids", [10**6]),
        ("temperature", "0.7"),
        ("top_p", True),
        ("temperature", [1]),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": 20000}),
        ("max_tokens", 0),
        ("stop", ""),
    ],
)
def test_other_values_are_refused_by_name(client, ask, name, value):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={name: value})
    said = caught.value.body["message"]
    assert name in said or name.replace("_token", "") in said
    assert "'this'" not in said  # the value that was sent


@pytest.mark.smoke
def test_a_begun_turn_is_continued(client, tokenizer):
    def prompt_tokens(messages=BEGUN, **fields):
        return chat(client, messages, extra_body=fields).usage.prompt_tokens

    def size(messages=BEGUN, **how):
        return len(tokenizer.encode(tokenizer.render_chat(messages, **how)))

    continued = size(add_generation_prompt=False, continue_final_message=True)
    closed, anew = size(add_generation_prompt=False), size()
    assert continued < closed < anew
    assert prompt_tokens() == continued
    go_on = dict(add_generation_prompt=False, continue_final_message=True)
    assert prompt_tokens(**go_on) == prompt_tokens(continue_final_message=True) == continued
    assert prompt_tokens(continue_final_message=False) == anew
    assert prompt_tokens(add_generation_prompt=True) == anew
    assert prompt_tokens(add_generation_prompt=False) == closed
    assert prompt_tokens(ASK) == prompt_tokens(ASK, add_generation_prompt=True) == size(ASK)
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt"):
        prompt_tokens(add_generation_prompt=True, continue_final_message=True)


# -- stop strings


@pytest.fixture(scope="module")
def mark(tokenizer):
    """(a special token that ends nothing, its text)."""
    (token,) = sorted(tokenizer.special_ids - set(tokenizer.eos_ids))[:1]
    return token, tokenizer.decode([token], skip_special_tokens=False)


def test_a_stop_string_may_be_a_special_token(client, tokenizer, mark):
    token, text = mark
    sure = dict(max_tokens=6, logit_bias={str(token): 100})
    for stop in (text, [text], ["zzz", text]):
        for stream in (False, True):
            answer = chat(client, stop=stop, stream=stream, **sure)
            chunks = list(answer) if stream else [answer]
            choice = chunks[-1].choices[0]
            assert choice.finish_reason == "stop"
            said = choice.delta.content if stream else choice.message.content
            assert not said
        answer = complete(client, stop=stop, **sure)
        assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("stop", "")
        assert answer.usage.completion_tokens == 1
    # As part of a stop string: it is complete with the second token.
    answer = complete(client, stop=text * 2, **sure)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 2
    answer = complete(client, extra_body={"stop_token_ids": [token]}, **sure)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 1


def test_special_tokens_become_stop_ids(tokenizer, mark):
    """A request, a run and its turns stop by their ids, without a look at the text."""
    token, text = mark
    body = {"prompt": "hello", "stop": ["x", text], "stop_token_ids": [5], "ignore_eos": True}
    read = read_completion(body, tokenizer, NAME, RequestLimits(96, 64)).requests[0][1]
    assert set(read.stop_ids) == {5, token}
    config = Config(sampler=SamplerConfig(stop_strings=("x", text)))
    run = make_sampling(config, tokenizer)
    assert run.stop_ids == (*tokenizer.eos_ids, token)
    assert token in turn_sampling(config, run, tokenizer).stop_ids


@pytest.mark.slow
def test_a_batch_ends_at_a_special_token(served, tokenizer, mark):
    """In both loops, by ids and by texts, and with the decoder of a config that names no stops."""
    engine, params, *_ = served
    token, text = mark
    prompt = np.asarray([tokenizer.encode("hello")])
    for stops, count in [((text,), 1), ((text * 2,), 2)]:
        sampling = Sampling(
            temperature=0, max_response_tokens=6, stop_strings=stops, logit_bias=((token, 1e3),)
        )
        for loop in ("device", "host"):
            how = dataclasses.replace(decoding_of(Config(), tokenizer), loop=loop)
            batch = generate(
                engine.model,
                params,
                prompt,
                [prompt.shape[1]],
                jax.random.key(0),
                sampling,
                decoding=how,
            )
            assert int(batch.mask.sum()) == count
            assert batch.finish_reason[0] == FinishReason.STOP


def test_the_sampler_finds_special_tokens_in_its_texts(served, tokenizer, mark):
    engine, params, *_ = served
    token, text = mark
    sampler = make_sampler(engine, tokenizer)
    for stops, count in [((text,), 1), ((text * 3,), 3), (("never", text), 1), (("never",), 8)]:
        sampling = Sampling(
            temperature=0,
            max_response_tokens=8,
            stop_ids=tokenizer.eos_ids,
            stop_strings=stops,
            logit_bias=((token, 1e3),),
        )
        (sample,) = sampler.submit(tokenizer.encode("hello"), sampling)
        list(sampler.run(params))
        assert len(sample.tokens) == count
        stopped = FinishReason.STOP if count < 8 else FinishReason.LENGTH
        assert sample.finish_reason == stopped


def test_text_ends_before_a_stop_string_with_a_special_token(tokenizer, mark):
    token, text = mark
    ids = [*tokenizer.encode("the cat"), token, *tokenizer.encode("sat on")]

    def said(*stops):
        stream = text_stream(tokenizer, StopStrings(stops))
        pieces = [stream.push(i) for i in ids]
        return "".join(pieces) + stream.finish()

    whole = tokenizer.decode(ids)
    assert said() == said(f"{text}xx") == said("xx") == whole and text not in whole
    assert said(text) == said(f"{text}sat") == "the cat"
    assert said(f"cat{text}") == "the "
    assert said(f"{text}xx", "on") == whole[: whole.index("on")]


def test_the_stop_strings_of_the_run_that_is_served(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    end = tokenizer.encode("<|im_start|>")[0]
    stops = ("</answer>", "<|im_start|>")
    body = {"prompt": "1", "stop": ["x"]}
    read = read_completion(body, tokenizer, NAME, RequestLimits(96, 64), stops).requests[0][1]
    assert "</answer>" in read.stop_strings and "x" in read.stop_strings and end in read.stop_ids
    free = {**body, "ignore_eos": True}
    read = read_completion(free, tokenizer, NAME, RequestLimits(96, 64), stops).requests[0][1]
    assert read.stop_strings == ("x",) and end not in read.stop_ids
