"""A call is read back as it was written, whatever texts its arguments hold: the marks of its own
format and of others, quotes, fences, newlines."""

import json
import random
import re

import pytest
from conftest import lanes
from spent import spent
from tool_families import write_tool_family
from written_calls import (
    AMBIGUOUS,
    OWN_MARK,
    PYTHON_CODE,
    WRITERS,
    python_block,
    random_text,
    random_value,
    types_of,
)

from rljax.data.text.tokenizer import load_tokenizer
from rljax.environments.calls import parser

READ = [pytest.param(writer, name, id=writer.__name__) for writer, name in WRITERS.items()]
ONE_CALL = ("llama3", "harmony", "gemma_code")  # to a turn
FRONT = ("", "I look.\n", "<think>\nf?\n</think>\n\n", 'It\'s "x":\n')


@pytest.mark.parametrize("count", lanes([500], [2_000]))
@pytest.mark.parametrize("writer, name", READ)
def test_random_calls_are_read_as_they_were_written(writer, name, count):
    form, rng = parser(name, None), random.Random(f"calls of {writer.__name__}")
    wrong, told_apart, mark = [], 0, OWN_MARK.get(writer)
    for _ in range(count):
        arguments = {k: random_value(rng) for k in rng.sample("abc", rng.randrange(4))}
        if mark and rng.random() < 0.1:
            arguments["c"] = random_text(rng) + mark + random_text(rng)
            told_apart += not ambiguous(writer, arguments)
        parsed = form.parse(rng.choice(FRONT) + writer("f", arguments), types_of(arguments))
        read = [(call.name, call.arguments) for call in parsed.calls]
        same = read == [("f", arguments)] and not parsed.problem
        if not same and not (writer in AMBIGUOUS and ambiguous(writer, arguments)):
            wrong.append((arguments, parsed))
    assert wrong == []
    assert told_apart > count // 40 or not mark


def ambiguous(writer, value) -> bool:
    """Returns whether one of the texts holds its own mark and the call's continuation."""
    if isinstance(value, dict):
        return any(ambiguous(writer, one) for one in value.values())
    if isinstance(value, list):
        return any(ambiguous(writer, one) for one in value) or ambiguous(writer, json.dumps(value))
    return isinstance(value, str) and re.search(AMBIGUOUS[writer], value) is not None


@pytest.mark.parametrize("writer, name", [p for p in READ if p.id not in ONE_CALL])
def test_two_calls_behind_each_other(writer, name):
    """An argument of the first hides nothing of the second."""
    form, rng = parser(name, None), random.Random(f"pairs of {writer.__name__}")
    for _ in range(300):
        both = [{"a": random_text(rng), "b": random_text(rng)} for _ in range(2)]
        if writer in AMBIGUOUS and any(ambiguous(writer, one) for one in both):
            continue
        text = "\n".join(writer("f", arguments) for arguments in both)
        parsed = form.parse(text, types_of(both[0]))
        assert [call.arguments for call in parsed.calls] == both, text


@pytest.mark.parametrize(
    "family, writer",
    [
        ("gemma4", "gemma4"),
        ("qwen3_coder", "qwen3_coder"),
        ("deepseek_v31", "deepseek_v31"),
        ("mistral_args", "mistral_args"),
        ("qwen3", "hermes"),
    ],
)
def test_the_writers_write_what_templates_do(tmp_path, family, writer):
    tokenizer = load_tokenizer(write_tool_family(tmp_path, family))
    (writer,) = (one for one in WRITERS if one.__name__ == writer)
    arguments = {"a": 'x "y"\n```', "b": 3, "c": [True, "z"]}
    call = {
        "id": "id0000000",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    whole = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert "".join(writer("f", arguments).split()) in "".join(whole.split())


def test_a_tag_holds_any_text_but_its_own_end():
    """A turn stops at the tag's end, so nothing behind it could be part of the argument."""
    form, rng = parser("tag(name='search', argument='text')", None), random.Random("tags")
    for _ in range(2_000):
        text = random_text(rng).replace("</search>", "</ search>").strip()
        parsed = form.parse(f"I look.\n<search>{text}</search>", types_of({"text": ""}))
        assert [c.arguments for c in parsed.calls] == [{"text": text}] and not parsed.problem


# -- blocks of Python


@pytest.mark.parametrize("front", ["", "I try.\n", "First:\n```python\nx = 0\n```\nand then\n"])
def test_a_block_of_python_is_its_code(front):
    form, rng = parser("python", None), random.Random("code")
    codes = list(PYTHON_CODE)
    for _ in range(500):
        text = random_text(rng).replace("\\", "\\\\")
        codes.append('x = """' + text.replace('"', '\\"') + '"""\nprint(x)')
        codes.append(f"x = {text!r}\n# {text!r}\nprint(x)")
    for code in codes:
        for end in ("", "\n", "\nThat is it."):
            parsed = form.parse(front + python_block(code) + end)
            assert [c.arguments for c in parsed.calls] == [{"code": code}], (code, parsed)
            assert not parsed.problem


def test_an_empty_block_is_a_call():
    for text in ("```python\n```", "```py\n```\n", "So:\n```python\n```"):
        parsed = parser("python", None).parse(text)
        assert [c.arguments for c in parsed.calls] == [{"code": ""}] and not parsed.problem


def test_a_block_without_an_end():
    form = parser("python", None)
    assert form.parse("```python\nx = 1").problem
    # One that goes on with another was none.
    parsed = form.parse("Write ```python\nlike so.\n```python\nx = 1\n```")
    assert [c.arguments["code"] for c in parsed.calls] == ["x = 1"]
    # A string without an end hides no fence.
    for code in ('x = """a', "x = '''a", 'x = "a', "don't", '"\\"' * 9):
        (call,) = form.parse(python_block(code)).calls
        assert call.arguments == {"code": code}


@pytest.mark.parametrize("name", lanes(["python", "qwen3_coder"], ["gemma", "deepseek_v3"]))
def test_hostile_ends_take_linear_time(name):
    """Marks that end nothing: ten times as many take about ten times as long, 40 to leave room."""
    form = parser(name, None)
    pieces = (
        '\\"',
        '"""',
        "\\'''",
        "'",
        "#",
        "\\\n",
        "\n```x",
        "```python\n",
        "\n```python\n",
        '<|"|>',
        '<|"|>,',
        '<|"|>}x',
        "<escape>]x",
        "</parameter>",
        "</parameter>\n<parameter=q>",
        "</parameter></function>",
        "</｜DSML｜parameter>",
        "</｜DSML｜parameter><",
    )
    fronts = {
        "python": "```python\n",
        "gemma": '<|tool_call>call:f{a:[<|"|>',
        "deepseek_v3": '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
    }

    def seconds(text) -> float:
        with spent() as found:
            form.parse(text, types_of({"a": "", "b": ""}))
        return found[0]

    for piece in pieces:
        short, long = (fronts[name] + piece * (n // len(piece)) for n in (20_000, 200_000))
        # Asked again where the machine was busy with other things.
        tries = (seconds(long) < 40 * max(seconds(short), 1e-3) for _ in range(2))
        assert any(tries), (name, piece)
