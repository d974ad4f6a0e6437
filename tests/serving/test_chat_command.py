"""Talking to a policy with tools: what it calls is answered, what was said stays, and limits end a
question."""

import dataclasses
import io
import json
import sys

import jax
import pytest
from tiny_folders import one_device
from tiny_tokenizer import write_json
from tool_families import write_tool_family

from rljax.command.chat import _answer, _lines, _show
from rljax.config import Config
from rljax.config.service_options import ChatOptions
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.policies import SavedPolicy
from rljax.serving.chat import Chat
from rljax.tracking.screen import Terminal

WEATHER = '''
def weather(town: str) -> str:
    """Tells the weather.

    Args:
        town: A town.
    """
    return f"21 in {town}"
'''
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'


def policy_of(tokenizer) -> SavedPolicy:
    """A random model of one layer that knows the tokenizer's ids."""
    config = decoder(
        tokenizer.vocab_size, layers=1, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8
    )
    model = Model(config, one_device())
    return SavedPolicy(Config(), model, model.init(jax.random.key(0)), tokenizer, None)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(WEATHER)
    return f"tools(functions=('{path}:weather',))"


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """(policy, the id of a token that is a whole call)."""
    folder = write_tool_family(tmp_path_factory.mktemp("model") / "family", "qwen2_5")
    content = json.loads((folder / "tokenizer.json").read_text())
    token = {**content["added_tokens"][-1], "id": load_tokenizer(folder).vocab_size}
    content["added_tokens"].append({**token, "content": CALL, "special": False})
    write_json(folder / "tokenizer.json", content)
    tokenizer = load_tokenizer(folder)
    return policy_of(tokenizer), token["id"]


def biased(chat: Chat, ids: list[int], tokens: int) -> None:
    """Turns of so many tokens, all out of `ids`."""
    bias = tuple((i, 100.0) for i in ids)
    chat.sampling = dataclasses.replace(chat.sampling, logit_bias=bias, max_response_tokens=tokens)


@pytest.mark.slow
def test_tools_are_called_and_answered(templated, tools):
    policy, call = templated
    chat = Chat(policy, ChatOptions("", environment=tools, tokens=1024, max_turns=2, system="S"))
    biased(chat, [call], 1)
    made = [("call", "weather(town='Ulm')"), ("answer", "21 in Ulm")]
    assert list(chat.ask("How is it?")) == [*made, *made, ("end", "turns")]
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert chat.messages[2]["tool_calls"][0]["function"]["arguments"] == {"town": "Ulm"}
    (word,) = policy.tokenizer.encode("a")
    biased(chat, [word], 3)
    text = list(chat.ask("And now?"))  # the rest of the chat is read with it
    assert "".join(piece for kind, piece in text if kind == "text") == "aaa"
    assert text[-1] == ("end", "stop")
    assert [m["role"] for m in chat.messages][-2:] == ["user", "assistant"] and len(
        chat.messages
    ) == 8
    chat.forget()
    list(chat.ask("Anew?"))
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]


def test_a_conversation_that_does_not_fit_says_so(templated, tools):
    policy, call = templated
    size = len(policy.tokenizer.encode_chat([{"role": "user", "content": "?"}]))
    chat = Chat(policy, ChatOptions("", tokens=size + 40))
    (word,) = policy.tokenizer.encode("a")
    biased(chat, [word], 99)
    pieces = list(chat.ask("?"))
    assert "".join(p for kind, p in pieces if kind == "text") == "a" * 40
    messages = list(chat.messages)
    with pytest.raises(InputError, match=rf"--tokens={size + 40}, .*/new, .*larger --tokens"):
        list(chat.ask("?"))
    assert chat.messages == messages and len(messages) == 2  # what was said is not forgotten
    with pytest.raises(InputError, match="/new, which forgets what was said$"):
        whole_context = Chat(policy, ChatOptions("", tokens=10**6))
        whole_context.messages = [{"role": "user", "content": "?" * 10**6}]
        list(whole_context.ask("?"))
    chat = Chat(policy, ChatOptions("", environment=tools, tokens=1024, max_turns=99))
    biased(chat, [call], 1)
    assert list(chat.ask("?"))[-1] == ("end", "length")


@pytest.mark.slow
def test_without_a_chat_template_a_tag_calls(tools, capsys):
    from rich.console import Console

    tokenizer = CharTokenizer("".join(map(chr, range(32, 127))) + "\n")
    policy = policy_of(tokenizer)
    options = ChatOptions("", environment=tools, calls="tag(name='weather')", tokens=64, seed=2)
    chat = Chat(policy, options)
    assert chat.sampling.stop_strings == ("</weather>",)
    biased(chat, tokenizer.encode("<weather>U</weather>"[:1]), 4)
    pieces = list(chat.ask("?"))
    assert "".join(p for kind, p in pieces if kind == "text") == "<<<<" and chat.messages == []
    _show(
        Console(), [("text", "[a] "), ("call", "f(x=1)"), ("answer", "y" * 900), ("end", "turns")]
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["[a] ", "[calls f(x=1)]", "y" * 600 + " ...", "[turns]"]
    with pytest.raises(InputError, match="has no 'toolz'"):
        Chat(policy, ChatOptions("", environment="toolz()"))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_byte_of_a_pipe_that_is_no_text_is_an_error(monkeypatch, errors):
    piped = io.TextIOWrapper(io.BytesIO(b"ab>\nabc\xff>\n"), "utf-8", errors)
    monkeypatch.setattr(sys, "stdin", piped)
    lines = _lines()
    with pytest.raises(
        InputError, match="not UTF-8.*0xff|not UTF-8.*udcff.*Fix: write it as UTF-8"
    ):
        list(lines)


def test_a_question_that_cannot_be_asked_does_not_end_a_conversation(capsys):
    policy = policy_of(CharTokenizer("ab"))
    chat = Chat(policy, ChatOptions("", tokens=16))
    biased(chat, policy.tokenizer.encode("a"), 2)
    with pytest.raises(InputError, match=r"'\?' is not in the alphabet"):
        _answer(Terminal(), chat, ["b", "?", "b"])
    assert capsys.readouterr().out.splitlines() == ["aa"]
    _answer(Terminal(), chat, ["b", "?", "b"], goes_on=True)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["aa", "aa"]
    assert shown.err.startswith("error: character '?' is not in the alphabet")
