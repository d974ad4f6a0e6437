"""Schemas of tools from type hints and docstrings, as transformers makes them, and the arguments of
calls checked by them."""

import enum
import functools
from typing import Any, Literal, Optional, Union

import pytest

from rljax.environments.schemas import checked_arguments, coerced, schema_of
from rljax.errors import InputError


def multiply(a: float, b: int):
    """
    Multiplies two numbers.

    Both may be negative.

    Args:
        a: The first
            of two factors.
        b: The second one.

    Returns:
        Their product: a number.
    """
    return a * b


def search(query: str, top: int = 3, source: Literal["web", "wiki"] = "wiki", exact: bool = False):
    """Finds texts.

    Args:
        query: What to look for: words.
        top: How many (at most).
        source: Where.
        exact: Word by word.
    """


def shapes(
    rows: list[list[int]],
    table: dict[str, float],
    maybe: Optional[str],  # noqa: UP045
    either: Union[int, str],  # noqa: UP007
    deep: list[Union[int, list[str]]],  # noqa: UP007
    anything: Any,
    pair: tuple[int, str],
    none: str | None = None,
):
    """Shapes.

    Args:
        rows: a
        table: b
        maybe: c
        either: d
        deep: e
        anything: f
        pair: g
        none: h
    """


def chooses(word: str):
    """Chooses.

    Args:
        word: A word. (choices: ["a", "b"])
    """


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(str, enum.Enum):  # noqa: UP042
    S = "s"
    L = "l"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


def members(
    colour: Colour,
    colours: list[Colour],
    level: Level,
    mixed: Mixed,
    either: Colour | int,
    size: Size = Size.S,
    maybe: Optional[Colour] = None,  # noqa: UP045
):
    """Members of enumerations.

    Args:
        colour: a
        colours: b
        level: c
        mixed: d
        either: e
        size: f
        maybe: g
    """


@pytest.mark.parametrize("function", [multiply, search, shapes, chooses, members])
def test_a_schema_is_that_of_transformers(function):
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs = library.get_json_schema(function)
    theirs["function"].pop("return", None)
    ours = schema_of(function)
    for property_ in ours["function"]["parameters"]["properties"].values():
        property_.pop("default", None)  # which ours says beside
    assert ours == theirs


def test_a_call_names_the_value_of_a_member():
    schema = schema_of(members)
    properties = schema["function"]["parameters"]["properties"]
    assert properties["size"]["default"] == "s" and type(properties["size"]["default"]) is str
    given = dict(colour="red", colours=["blue"], level="2", mixed=1, either=3)
    assert checked_arguments(schema, given) == ({**given, "level": 2}, "")
    assert "must be one of" in checked_arguments(schema, {**given, "colour": "RED"})[1]
    assert "must be one of" in checked_arguments(schema, {**given, "level": 3})[1]

    class Odd(enum.Enum):
        PAIR = (1, 2)

    for kind in (Odd, enum.Enum("Nothing", [])):

        def odd(one):
            "Takes one."

        odd.__annotations__["one"] = kind
        with pytest.raises(InputError, match="a type that JSON cannot say"):
            schema_of(odd)


def test_defaults_hidden_parameters_and_other_docstrings():
    def look(query, *, corpus: str, top: int = 3):
        """Looks.

        :param query: what to find,
            in words
        :param top: how many
        :returns: texts
        """

    look.__annotations__["query"] = "str"
    function = schema_of(look, hidden=("corpus",))["function"]
    assert function["description"] == "Looks."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to find, in words"},
            "top": {"type": "integer", "default": 3, "description": "how many"},
        },
        "required": ["query"],
    }

    class Tool:
        def __call__(self, x: int):
            "Doubles."

    assert schema_of(Tool())["function"]["name"] == "Tool"
    partial = functools.partial(look, corpus="c")
    assert set(schema_of(partial, hidden=("corpus",))["function"]["parameters"]["properties"]) == {
        "query",
        "top",
    }

    def typed(x: float):
        """Halves.

        Args:
            x (float, optional): A number.
        """

    described = schema_of(typed)["function"]["parameters"]["properties"]
    assert described == {"x": {"type": "number", "description": "A number."}}

    def plain(x: float):
        "Halves a number: 4 gives 2."

    assert schema_of(plain)["function"]["description"] == "Halves a number: 4 gives 2."

    def nothing():
        pass

    empty = {"type": "object", "properties": {}}
    assert schema_of(nothing)["function"] == {
        "name": "nothing",
        "description": "",
        "parameters": empty,
    }


def no_hint(a, b: int): ...
def stars(*args: int): ...
def more(**options: int): ...
def positions(a: int, /): ...
def an_object(a: functools.partial): ...
def numbered(a: dict[int, str]): ...
def unknown_name(a: "NotThere"): ...  # noqa: F821
def bytes_choice(a: Literal[b"x"]): ...


@pytest.mark.parametrize(
    "function, words",
    [
        (no_hint, "'a' has no type hint"),
        (stars, "has no name in a call"),
        (more, "has no name in a call"),
        (positions, "has no name in a call"),
        (an_object, "JSON cannot say"),
        (numbered, "JSON cannot say"),
        (unknown_name, "no signature that can be read"),
        (bytes_choice, "JSON cannot say"),
        (dict, "no signature that can be read"),
    ],
)
def test_what_no_schema_can_say_is_refused(function, words):
    with pytest.raises(InputError, match=words):
        schema_of(function)


SEARCH = schema_of(search)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments, checked, problem",
    [
        ({"query": "x"}, {"query": "x"}, ""),
        ({"query": "x", "top": "5"}, {"query": "x", "top": 5}, ""),
        ({"query": "x", "top": 5.0, "exact": "True"}, {"query": "x", "top": 5, "exact": True}, ""),
        ({"query": "5"}, {"query": "5"}, ""),
        ({}, None, "missing: query"),
        ({"q": "x"}, None, "missing: query; unknown: q (parameters: query, top, source, exact)"),
        ({"query": 5}, None, "query must be a string"),
        ({"query": "x", "top": "many"}, None, "top must be an integer"),
        ({"query": "x", "top": True}, None, "top must be an integer"),
        ({"query": "x", "source": "book"}, None, 'source must be one of ["web", "wiki"]'),
        ({"query": "x", "exact": 1}, None, "exact must be a boolean"),
        ({"query": None}, None, "query must be a string"),
        ({"query": "x", "<|im_end|>": 1}, None, "unknown: ??im_end??"),
    ],
)
def test_arguments_are_checked_in_words(arguments, checked, problem):
    given = dict(arguments)
    found, told = checked_arguments(SEARCH, arguments)
    assert problem in told and bool(problem) == bool(told)
    assert arguments == given, "the caller's arguments are not changed"
    if checked is not None:
        assert found == checked and all(type(found[k]) is type(checked[k]) for k in checked)


def test_arguments_of_other_shapes():
    schema = schema_of(shapes)
    good = {
        "rows": "[[1, 2], []]",
        "table": {"a": 1},
        "maybe": None,
        "either": "7",
        "deep": [1, ["a"]],
        "anything": {"x": 1},
        "pair": [1, "a"],
    }
    found, problem = checked_arguments(schema, good)
    assert not problem and found["rows"] == [[1, 2], []] and found["either"] == "7"
    for name, value, words in [
        ("rows", [[1], ["a"]], "rows item 2 item 1 must be an integer"),
        ("rows", "[1", "rows must be an array"),
        ("deep", [1, {}], "deep item 2"),
        ("maybe", 3, "maybe must be a string or null"),
        ("table", [1], "table must be an object"),
    ]:
        assert words in checked_arguments(schema, {**good, name: value})[1]


def test_texts_become_what_their_schema_says():
    cases = [
        ("3", "integer", 3),
        ("3.0", "integer", 3),
        ("3.5", "integer", "3.5"),
        ("1e3", "number", 1000.0),
        ("abc", "number", "abc"),
        (" TRUE", "boolean", True),
        ("none", "null", None),
        ('{"a": [1]}', "object", {"a": [1]}),
        ("[" * 10**5, "array", None),
        ("9" * 10**5, "integer", None),
        ("3", "string", "3"),
        ("x" * 99, ["integer", "null"], None),
    ]
    for text, kind, value in cases:
        found = coerced(text, {"type": kind})
        assert found == (text if value is None and kind != "null" else value), (text[:20], kind)


def test_a_partial_and_an_object_are_described_by_the_function_inside():
    def weather(town: str, days: int):
        """Tells the weather.

        Args:
            town: A town.
        """

    partial = functools.partial(functools.partial(weather, days=2))
    shown = schema_of(partial)["function"]
    assert (shown["name"], shown["description"]) == ("weather", "Tells the weather.")
    assert shown["parameters"]["properties"]["town"]["description"] == "A town."
    partial.__name__, partial.__doc__ = "soon", "Of two days."
    shown = schema_of(partial)["function"]
    assert (shown["name"], shown["description"]) == ("soon", "Of two days.")
    assert shown["parameters"]["properties"]["town"]["description"] == "A town."

    class Service:
        def __call__(self, town: str):
            """Serves.

            Args:
                town: A town.
            """

    assert schema_of(Service())["function"]["description"] == "Serves."
    Service.__doc__ = "A service."
    shown = schema_of(Service())["function"]
    assert (shown["name"], shown["description"]) == ("Service", "A service.")
    assert shown["parameters"]["properties"]["town"]["description"] == "A town."
