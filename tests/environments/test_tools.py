"""Tools: what a call gets for an answer, whatever the policy wrote, and the environment of them."""

import asyncio
import dataclasses
import datetime
import decimal
import functools
import json
import time
from collections.abc import Callable

import numpy as np
import pytest

from rljax.components import resolve
from rljax.contracts import contract, spec
from rljax.environments import Call, Opening, Reply, tools
from rljax.environments.toolbox import MOST_CHARACTERS, toolbox
from rljax.errors import InputError
from rljax.rewards.pool.calling import prepare
from rljax.rewards.sandbox.tiers import ALL_TIERS, SandboxError

HERE = __name__


def multiply(a: int, b: int = 2, *, times: int = 1) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second one.
    """
    return a * b * times


def look(kind: str, at: list[int] | None = None):
    """Returns something of a kind."""
    things = {
        "text": "as it is",
        "number": 0.5,
        "nothing": None,
        "object": {"a": [1, None], "ä": "ß"},
        "set": {1},
        "huge": "x" * 10_000_000,
        "half": "\ud800",
        "digits": 10**5000,
        "circle": (circle := []),
    }
    circle.append(circle)
    return things[kind]


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def fails(how: str) -> str:
    """Fails."""
    if how == "exit":
        raise SystemExit(3)
    if how == "deep":
        return fails(how)
    if how == "sandbox":
        raise SandboxError("none is left")
    raise Mute if how == "mute" else ZeroDivisionError("by\nzero")


def counter(*, start: int = 0) -> Callable:
    """A tool that remembers."""
    count = start

    def count_on(by: int) -> int:
        """Counts on."""
        nonlocal count
        count += by
        return count

    return count_on


@contract(repeatable=False)
def news() -> str:
    """What has just happened."""
    return time.ctime()


@dataclasses.dataclass
class Point:
    x: int


async def waits(key: str, *, times: int = 1) -> str:
    """Waits."""
    for _ in range(times):
        await asyncio.sleep(0)
    if key == "exit":
        raise SystemExit(3)
    return {"a": "found"}[key] * times


async def waiting_counter(*, start: int = 0) -> Callable:
    """A tool that is made, and called, by waiting; its lock belongs to one event loop."""
    count, lock = [start], asyncio.Lock()

    async def count_on(by: int) -> int:
        """Counts on."""
        async with lock:
            count[0] += by
        return count[0]

    return count_on


def yields(key: str):
    """Yields."""
    yield key


async def yields_later(key: str):
    """Yields."""
    yield key


def said(box, name, **arguments):
    message = box.answer(Call(name, arguments))
    assert message["role"] == "tool" and message["name"] == name
    return message["content"]


# -- what the policy is shown


def test_a_tool_is_shown_by_its_signature_and_docstring():
    (schema,) = toolbox([f"{HERE}.multiply"]).schemas
    shown = schema["function"]
    assert schema["type"] == "function" and shown["name"] == "multiply"
    assert shown["description"].startswith("Multiplies two numbers")
    assert shown["parameters"]["properties"]["a"]["type"] == "integer"
    assert shown["parameters"]["required"] == ["a"]


def test_what_the_config_binds_is_not_shown_and_cannot_be_given():
    box = toolbox([f"{HERE}.multiply(a=3, times=10)"])
    parameters = box.schemas[0]["function"]["parameters"]
    assert "a" not in parameters["properties"] and "times" not in parameters["properties"]
    assert "required" not in parameters
    assert said(box, "multiply", b=2) == "60"
    assert "unknown: times" in said(box, "multiply", b=2, times=5)


def test_a_maker_is_called_once_an_episode():
    text = f"{HERE}.counter(start=5)"
    one, other = toolbox([text]), toolbox([text])
    assert [said(one, "count_on", by=2) for _ in range(2)] == ["7", "9"]
    assert said(other, "count_on", by=2) == "7"


def test_functions_of_a_file_and_functions_themselves(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def shout(text: str) -> str:\n    'Shouts.'\n    return text.upper()\n")
    box = toolbox([f"{file}:shout", multiply])
    assert said(box, "shout", text="a") == "A" and said(box, "multiply", a=2) == "4"


@pytest.mark.parametrize(
    "functions, message",
    [
        ((), "needs functions"),
        ("python()", "needs functions"),
        ((f"{HERE}.multiply", f"{HERE}.multiply(times=2)"), "two tools are called 'multiply'"),
        (("pyton()",), "did you mean python"),
        (("math.sqrt",), "component"),
        ((f"{HERE}.multiply(c=1)",), "no option 'c'"),
        ((f"{HERE}.yields",), "'yields' is a generator"),
        ((yields_later,), "'yields_later' is a generator"),
        ((functools.partial(yields_later),), "'yields_later' is a generator"),
    ],
)
def test_a_toolbox_that_cannot_be(functions, message):
    with pytest.raises(InputError, match=message):
        toolbox(functions)


# -- answers


@pytest.mark.parametrize(
    "kind, text",
    [
        ("text", "as it is"),
        ("number", "0.5"),
        ("nothing", "null"),
        ("object", '{"a": [1, null], "ä": "ß"}'),
        ("half", "?"),
        ("set", "[1]"),
        ("circle", "[[...]]"),
    ],
)
def test_results_are_texts_or_json(kind, text):
    assert said(toolbox([look]), "look", kind=kind) == text


@pytest.mark.parametrize(
    "value, text",
    [
        ({"count": np.int64(3)}, '{"count": 3}'),
        ([np.float32(1.5), np.bool_(True), np.str_("a")], '[1.5, true, "a"]'),
        ((np.arange(3), {"of": np.ones(1)}), '[[0, 1, 2], {"of": [1.0]}]'),
        (np.float64(2.5), "2.5"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        (np.float64("inf"), "inf"),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        ({"born": datetime.date(2020, 1, 1)}, '{"born": "2020-01-01"}'),
        (datetime.date(2020, 1, 1), "2020-01-01"),
        (decimal.Decimal("1.50"), "1.50"),
        ([decimal.Decimal("1.50"), None], '["1.50", null]'),
        ({1}, "[1]"),
        ({"plum", "apple", "fig"}, '["apple", "fig", "plum"]'),
        ({"of": {10, 9.5, 2}}, '{"of": [2, 9.5, 10]}'),
        ({(1, 2): {"b", "a"}}, "{(1, 2): ['a', 'b']}"),
        ({frozenset("ab"), 1, None}, '[1, null, ["a", "b"]]'),
        (Point(1), "Point(x=1)"),
        ({"at": [Point(1)]}, '{"at": ["Point(x=1)"]}'),
        (b"abc", "b'abc'"),
        (1 + 2j, "(1+2j)"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({datetime.date(2020, 1, 1): 3}, "{datetime.date(2020, 1, 1): 3}"),
        ({"count": 3}, '{"count": 3}'),
        (True, "true"),
    ],
)
def test_a_result_that_json_does_not_have_is_no_failure(value, text):
    def look() -> object:
        """Looks."""
        return value

    assert toolbox([look]).answer(Call("look", {})) == {
        "role": "tool",
        "name": "look",
        "content": text,
    }


def test_no_answer_holds_the_address_of_an_object():
    def look(how: str) -> object:
        """Looks."""
        if how == "error":
            raise ValueError(object())
        return {"as": [object()]} if how == "json" else object()

    plain = "<object object at 0x...>"
    for how, text in (("", plain), ("json", f'{{"as": ["{plain}"]}}'), ("error", plain)):
        content = toolbox([look]).answer(Call("look", {"how": how}))["content"]
        assert content.endswith(text), content


def test_an_async_tool_is_awaited():
    for box in (toolbox([f"{HERE}.waits(times=2)"]), toolbox([f"{HERE}.waits(times=2)", multiply])):
        assert said(box, "waits", key="a") == "foundfound"
        assert box.answer(Call("waits", {"key": "b"}))["content"] == "Error: KeyError: 'b'"
        assert box.answer(Call("waits", {"key": "exit"}))["failure"] == "failed"
        assert said(box, "waits", key="a") == "foundfound"  # the loop lives on
        parameters = box.schemas[0]["function"]["parameters"]
        assert list(parameters["properties"]) == ["key"]
    box = toolbox([f"{HERE}.waiting_counter(start=5)"])
    assert [said(box, "count_on", by=2) for _ in range(2)] == ["7", "9"]

    async def in_a_loop():
        return said(box, "count_on", by=1)

    assert asyncio.run(in_a_loop()) == "10"


def test_a_long_answer_keeps_its_head_and_its_tail():
    text = said(toolbox([look]), "look", kind="huge")
    assert len(text) < MOST_CHARACTERS + 100
    assert f"[{10_000_000 - MOST_CHARACTERS} characters cut]" in text
    assert text.startswith("xxx") and text.endswith("xxx")


@pytest.mark.parametrize(
    "function, call, failure, text",
    [
        (multiply, Call("divide", {}), "unknown", "no tool divide; there are multiply"),
        (multiply, Call("", {}), "unknown", "no tool ; there"),
        (multiply, Call("<|end|>", {}), "unknown", "no tool ??end??; there"),
        (multiply, Call("x" * 10**6, {}), "unknown", "no tool"),
        (multiply, Call("multiply", {}), "failed", "missing: a"),
        (multiply, Call("multiply", {"a": 1, "c": 2}), "failed", "unknown: c (parameters: a, b"),
        (multiply, Call("multiply", {"a": "seven"}), "failed", "a must be an integer"),
        (multiply, Call("multiply", {"a": True}), "failed", "a must be an integer"),
        (multiply, Call("multiply", {"a": 1.5}), "failed", "a must be an integer"),
        (look, Call("look", {"kind": "x", "at": ["1"]}), "failed", "at item 1 must be an integer"),
        (look, Call("look", {"kind": "x"}), "failed", "KeyError: 'x'"),
        (look, Call("look", {"kind": "digits"}), "failed", "ValueError"),
        (fails, Call("fails", {"how": "exit"}), "failed", "SystemExit: 3"),
        (fails, Call("fails", {"how": "deep"}), "failed", "RecursionError"),
        (fails, Call("fails", {"how": "mute"}), "failed", "Error: Mute"),
        (fails, Call("fails", {"how": "else"}), "failed", "ZeroDivisionError: by\nzero"),
    ],
)
def test_a_failure_is_an_answer(function, call, failure, text):
    message = toolbox([function]).answer(call)
    assert message["failure"] == failure and message["content"].startswith("Error: ")
    assert text in message["content"] and len(message["content"]) < 1000


def test_a_text_that_says_a_number_is_one():
    assert said(toolbox([multiply]), "multiply", a="7", b=3.0) == "21"


def test_what_the_machine_lacks_is_no_answer():
    with pytest.raises(SandboxError):
        toolbox([fails]).answer(Call("fails", {"how": "sandbox"}))


def test_an_answer_bears_the_id_of_its_call():
    box = toolbox([multiply])
    message = box.answer(Call("multiply", {"a": 2}, id="call_7"))
    assert message == {"role": "tool", "name": "multiply", "tool_call_id": "call_7", "content": "4"}
    assert "tool_call_id" not in box.answer(Call("multiply", {"a": 2}))


# -- the environment


def test_tools_answers_until_a_reply_has_no_call():
    episode = tools(functions=(f"{HERE}.multiply", f"{HERE}.counter()"))
    opening = next(episode)
    assert isinstance(opening, Opening) and opening.messages is None
    assert [s["function"]["name"] for s in opening.tools] == ["multiply", "count_on"]
    calls = [Call("multiply", {"a": 3}), Call("count_on", {"by": 1}), Call("nothing", {})]
    answers = episode.send(Reply("Let me see.", calls=calls))
    assert [m["content"] for m in answers[:2]] == ["6", "1"] and answers[2]["failure"] == "unknown"
    assert episode.send(Reply("", calls=calls[1:2]))[0]["content"] == "2"
    with pytest.raises(StopIteration) as end:
        episode.send(Reply("It is 6."))
    assert end.value.value is None  # reward.function scores it


def test_tools_is_repeatable_where_its_tools_are():
    component = resolve(f"tools(functions=('{HERE}.multiply',))", "rljax.environments")
    assert spec(component).repeatable and spec(component).on_limit is None
    assert not spec(resolve(f"tools(functions=('{HERE}.news',))", "rljax.environments")).repeatable


def test_a_worker_makes_its_tools_before_the_first_clock_starts():
    component = resolve("tools(functions=('python(session=True)',))", "rljax.environments")
    assert prepare(component)["sandbox_tier"] in ALL_TIERS
    assert prepare(resolve(f"tools(functions=('{HERE}.news',))", "rljax.environments")) == {}


# -- python


@pytest.fixture(scope="module")
def cells():
    return toolbox(["python(session=True, timeout_s=60.0)"])


@pytest.mark.parametrize(
    "code, text",
    [
        ("print(6 * 7)", "42"),
        ("6 * 7", "42"),
        ("x = 1", "[no output]"),
        ("import math\nmath.factorial(5)", "120"),
        ("object()", "<object object at 0x...>"),
        ("", "[no output]"),
        ("'\ud800'", "surrogates not allowed"),
    ],
)
def test_python_answers_with_what_a_program_prints(code, text):
    assert text in said(toolbox(["python()"]), "python", code=code)


def test_python_shows_where_a_program_fails():
    text = said(
        toolbox(["python()"]), "python", code="print('so far')\ndef f(x):\n    return 1 / x\nf(0)"
    )
    assert text.startswith("so far\nTraceback")
    assert 'File "code", line 3, in f\n    return 1 / x' in text
    assert text.endswith("ZeroDivisionError: division by zero") and "_run" not in text
    assert "SyntaxError" in said(toolbox(["python()"]), "python", code="1 +")


def test_a_program_without_an_end_is_stopped():
    text = said(toolbox(["python(timeout_s=2.0)"]), "python", code="print('a')\nwhile True: pass")
    assert text.startswith("a\nThe program was stopped")


def test_a_flood_is_cut_and_a_program_sees_no_file_of_ours(tmp_path):
    box = toolbox(["python()"])
    assert len(said(box, "python", code="print('x' * 10**9)")) < 100_000
    (tmp_path / "secret").write_text("treasure")
    assert "treasure" not in said(box, "python", code=f"open({str(tmp_path / 'secret')!r}).read()")
    assert "Error" in said(box, "python", code="import os; os.fork()")


def test_each_call_is_a_program_of_its_own():
    box = toolbox(["python()"])
    said(box, "python", code="x = 1")
    assert "NameError" in said(box, "python", code="x")


def test_a_session_keeps_names_and_shows_output_once(cells):
    said(cells, "python", code="import random\nprint('once')\nx = random.random()")
    first = said(cells, "python", code="x")
    assert "NameError" in said(cells, "python", code="y = 5\nz")
    assert said(cells, "python", code="x") == first and 0 < float(first) < 1
    assert "stopped" in said(
        toolbox(["python(session=True, timeout_s=0.3)"]), "python", code="while True: pass"
    )
    assert said(cells, "python", code="print(y)") == "5"  # what ran before the error stays


def test_a_session_forgets_a_cell_that_was_stopped():
    box = toolbox(["python(session=True, timeout_s=3.0)"])
    said(box, "python", code="a = 1")
    assert "stopped" in said(box, "python", code="a = 2\nwhile True: pass")
    assert said(box, "python", code="a") == "1"


def test_sessions_of_two_episodes_do_not_meet(cells):
    said(cells, "python", code="mine = 1")
    assert "NameError" in said(toolbox(["python(session=True)"]), "python", code="mine")


# -- search


@pytest.fixture
def corpus(tmp_path):
    pytest.importorskip("bm25s")
    lines = [f"Room {n} belongs to {name}." for n, name in enumerate(["Ada", "Bo", "Cy", "Ada"])]
    (tmp_path / "rooms.txt").write_text("\n\n".join(lines))
    rows = [{"title": "Cats", "contents": "They purr."}, {"text": "Dogs bark."}]
    (tmp_path / "pets.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_search_finds_the_texts_that_fit(corpus):
    box = toolbox([f"search(corpus='{corpus}/rooms.txt', k=2)"])
    assert said(box, "search", query="whose is room 2?").startswith(
        "[1] Room 2 belongs to Cy.\n[2]"
    )
    # Equal scores: in the order of the file.
    assert said(box, "search", query="ada").split("\n") == [
        "[1] Room 0 belongs to Ada.",
        "[2] Room 3 belongs to Ada.",
    ]
    assert said(box, "search", query="elephants") == "Nothing was found."
    for nothing in ("", "?!", "\x00", "\u2028"):
        assert said(box, "search", query=nothing) == "Nothing was found."
    assert "Room" in said(box, "search", query="room " * 1_000_000)


def test_search_reads_rows_with_titles(corpus):
    box = toolbox([f"search(corpus='{corpus}/pets.jsonl', k=5)"])
    assert said(box, "search", query="cats") == "[1] Cats: They purr."
    assert said(box, "search", query="bark dogs") == "[1] Dogs bark."


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "", "has no text"),
        ("a.csv", "a", "unknown kind of corpus"),
        ("a.jsonl", '{"text": 1}', "a.jsonl:1: this row has no text"),
        ("a.jsonl", '{"text"', "not valid JSON"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_a_corpus_that_is_none(name, content, message, tmp_path):
    pytest.importorskip("bm25s")
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        toolbox([f"search(corpus='{path}')"])


def test_search_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match="pip install 'bm25s>="):
        toolbox([f"search(corpus='{tmp_path}/a.txt')"])
