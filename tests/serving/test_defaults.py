"""Sampling where nobody says how: of a run as it sampled, of a model folder as its
generation_config.json says, else by the command; and what `rljax chat` says of it."""

import dataclasses

import pytest
from test_chat_command import policy_of
from tool_families import write_tool_family

from rljax.config import Config
from rljax.config.service_options import ChatOptions
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.serving.chat import TEXT_TOKENS, Chat
from rljax.serving.defaults import API_TEMPERATURE, CHAT_TEMPERATURE, defaults_of
from rljax.serving.fields import RequestLimits, read_chat, read_completion


@pytest.fixture(scope="module")
def plain():
    """A policy without a chat template."""
    return policy_of(CharTokenizer("abc "))


def saying(policy, **generation):
    return dataclasses.replace(policy, generation=generation)


@pytest.mark.parametrize(
    ("generation", "fields"),
    [
        ({}, (0.0, 0, 1.0, 0.0)),
        ({"eos_token_id": 2, "max_length": 20}, (0.0, 0, 1.0, 0.0)),
        ({"do_sample": True}, (1.0, 0, 1.0, 0.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, (0.6, 0, 0.9, 0.0)),
        ({"temperature": 0.2, "top_k": 20, "min_p": 0.05, "top_p": None}, (0.2, 20, 1.0, 0.05)),
        ({"top_k": 64, "top_p": 0.95}, (1.0, 64, 0.95, 0.0)),
        ({"top_k": -1}, (0.0, 0, 1.0, 0.0)),
        ({"temperature": 0}, (0, 0, 1.0, 0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, (0.0, 0, 1.0, 0.0)),
    ],
)
def test_a_model_folder_is_asked_as_its_generation_config_says(plain, generation, fields):
    policy = saying(plain, **generation)
    chat = Chat(policy, ChatOptions("", tokens=64))
    turn = chat.sampling
    assert (turn.temperature, turn.top_k, turn.top_p, turn.min_p) == fields
    assert chat.notes[0].startswith(f"temperature {fields[0]:g}")
    assert "--temperature=0" in chat.notes[0] and "(--max_response_tokens)" in chat.notes[1]
    served = defaults_of(policy, API_TEMPERATURE)
    usual = fields[0] if {"temperature", "do_sample"} & generation.keys() else API_TEMPERATURE
    assert tuple(served.fields().values()) == (usual, *fields[1:])


def test_a_run_is_asked_as_it_sampled_and_options_come_first(plain):
    sampler = dataclasses.replace(Config().sampler, temperature=0.9, top_k=7, max_response_tokens=9)
    run = dataclasses.replace(
        plain,
        config=dataclasses.replace(Config(), sampler=sampler),
        step=3,
        generation={"temperature": 0.1},
    )
    turn = Chat(run, ChatOptions("", tokens=64)).sampling
    assert (turn.temperature, turn.top_k, turn.max_response_tokens) == (0.9, 7, 9)
    options = ChatOptions("", tokens=64, temperature=0.0, max_response_tokens=5)
    chat = Chat(saying(plain, temperature=0.6, top_k=3), options)
    assert (chat.sampling.temperature, chat.sampling.top_k, chat.sampling.max_response_tokens) == (
        0.0,
        3,
        5,
    )
    assert chat.notes[0] == "temperature 0, greedy (--temperature)"


@pytest.mark.slow
def test_text_is_continued_for_few_tokens_and_a_chat_for_more(plain, tmp_path):
    chat = Chat(plain, ChatOptions("", tokens=64))
    assert chat.sampling.max_response_tokens == TEXT_TOKENS
    assert chat.notes[1].startswith("no chat template: ")
    templated = policy_of(load_tokenizer(write_tool_family(tmp_path / "family", "qwen2_5")))
    chat = Chat(templated, ChatOptions("", tokens=64))
    assert (
        chat.sampling.temperature == CHAT_TEMPERATURE and chat.sampling.max_response_tokens == 512
    )
    assert len(chat.notes) == 1


def test_what_is_not_done_is_said_and_what_is_wrong_refused(plain):
    asked = {"repetition_penalty": 1.05, "num_beams": 4, "typical_p": 1.0, "temperature": 0.5}
    line = defaults_of(saying(plain, **asked), 1.0).line()
    assert "repetition_penalty=1.05, num_beams=4 is not done" in line and "typical_p" not in line
    for name, value in (
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_p", 0),
        ("min_p", 2),
        ("temperature", -1),
        ("temperature", float("nan")),
    ):
        with pytest.raises(InputError, match=f"generation_config.json.*{name}"):
            defaults_of(saying(plain, **{name: value}), 1.0)


def test_a_request_that_names_nothing_gets_the_defaults(plain, tmp_path):
    tokenizer = load_tokenizer(write_tool_family(tmp_path / "family", "qwen2_5"))
    asked = defaults_of(saying(plain, temperature=0.5, top_k=5, top_p=0.8), 1.0).fields()
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for read, body in ((read_completion, {"prompt": "Hi"}), (read_chat, chat)):
        how = (tokenizer, "m", RequestLimits(999, 4))
        ((_, sampling),) = read(body, *how, defaults=asked).requests
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 5, 0.8)
        given = body | {"temperature": 1.0, "top_k": -1, "top_p": None}
        ((_, sampling),) = read(given, *how, defaults=asked).requests
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 0.8)
        ((_, sampling),) = read(body, *how).requests
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
