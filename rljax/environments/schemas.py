"""JSON schemas of tools, from a function's type hints and docstring, and the check of a call's
arguments.

`schema_of` returns what OpenAI's API and chat templates call a tool; for functions with types and
descriptions of their arguments it is what `transformers` makes of them, with defaults beside.
"""

import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

from rljax.errors import InputError
from rljax.files import parse_json

_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):[ \t]*$", re.MULTILINE
)
_ARGUMENT = re.compile(r"^([ \t]+)\*{0,2}(\w+)[ \t]*(?:\([^\n]*?\))?[ \t]*:[ \t]*(.*)$")
_FIELD = re.compile(r"^[ \t]*:param (?:[^:\n]* )?(\w+):[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(\[.*?\])\s*\)\s*$", re.DOTALL)


# Keys of a tool that are for a decoder or a provider: a model is not told of them.
_NOT_TOLD = {"strict", "cache_control", "defer_loading", "allowed_callers"}
_NOT_TOLD |= {"eager_input_streaming", "input_examples"}


def told_of(tools: Sequence[Mapping]) -> list[dict]:
    """Returns the tools of a client in the form that a chat template is given: without flags of a
    decoder, and without nulls."""

    def told(value: Mapping) -> dict:
        return {k: v for k, v in value.items() if v is not None and k not in _NOT_TOLD}

    return [
        {
            k: told(v) if k == "function" and isinstance(v, Mapping) else v
            for k, v in told(tool).items()
        }
        for tool in tools
    ]


def schema_of(function: Callable, *, hidden: Iterable[str] = ()) -> dict:
    """{"type": "function", "function": {name, description, parameters}}; `hidden` names parameters
    that the policy does not set. Raises InputError for a function without a readable signature, or
    with a type that has no schema."""
    name = name_of(function)
    location = f"tool {name!r}"
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(_annotated(function), include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InputError(
            f"{location} has no signature that can be read",
            rule=str(error),
            fix="wrap it in a function with type hints",
        ) from None
    hidden = set(hidden)
    description, descriptions = _described(function)
    properties, required = {}, []
    for parameter in parameters.values():
        if parameter.name in hidden:
            continue
        _check_kind(parameter, hints, location)
        parameter_location = f"{location}: parameter {parameter.name!r}"
        property_ = _schema(hints[parameter.name], parameter_location)
        if text := descriptions.get(parameter.name):
            if choices := _choices(text):
                property_["enum"] = choices
                text = _CHOICES.sub("", text).strip()
            property_["description"] = text
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif (default := _plain_default(parameter.default)) is not None and _is_json(default):
            property_["default"] = default
        properties[parameter.name] = property_
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    function_schema = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function_schema}


def name_of(function: Callable) -> str:
    """Returns the name of a tool: the function's, or that of an object's class."""
    inner = _inner(function)
    names = (getattr(f, "__name__", "") for f in (function, inner))
    return next(filter(None, names), type(inner).__name__)


def _inner(function: Callable) -> Callable:
    """Returns the function or object inside of decorators and of functools.partial."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return inner


def _described(function: Callable) -> tuple[str, dict[str, str]]:
    """Returns (description, {parameter: its text}) by the docstrings of the function, of the one
    inside a functools.partial, and of the __call__ of an object: the first that has a text."""
    texts = [
        inspect.getdoc(outer)
        for outer in (function, _inner(function))
        # The docstring of a partial is that of the class, unless it was given one.
        if not isinstance(outer, functools.partial) or "__doc__" in vars(outer)
    ]
    texts.append(inspect.cleandoc(_annotated(function).__doc__ or ""))
    parsed = [_docstring(text) for text in texts if text]
    descriptions: dict[str, str] = {}
    for _, of_parameters in reversed(parsed):
        descriptions |= of_parameters
    return next((text for text, _ in parsed if text), ""), descriptions


def _annotated(function: Callable) -> Callable:
    """Returns the object that carries the type hints: the function, or the __call__ of an
    object."""
    inner = _inner(function)
    if inspect.isfunction(inner) or inspect.ismethod(inner) or inspect.isbuiltin(inner):
        return inner
    return type(inner).__call__


def _check_kind(parameter: inspect.Parameter, hints: Mapping, location: str) -> None:
    parameter_location = f"{location}: parameter {parameter.name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        rule = "a call names its arguments"
        fix = "write each parameter out, without * and /"
        raise InputError(
            f"{parameter_location} has no name in a call", value=str(parameter), rule=rule, fix=fix
        )
    if parameter.name not in hints:
        raise InputError(
            f"{parameter_location} has no type hint",
            rule="the policy is told the types of a tool's parameters",
            fix=f"write {parameter.name}: str, int, float, bool, list[str], ...",
        )


def _schema(hint: object, location: str) -> dict:
    """The JSON schema of a type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (typing.Any, object):
        return {}
    if hint is None or hint in _NAMES:
        return {"type": _NAMES[type(None) if hint is None else hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _members(hint, location)
    if origin is typing.Annotated:
        return _schema(arguments[0], location)
    if origin is typing.Literal:
        return _literal(arguments, location)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, location)
    kind = origin or hint
    if kind in (list, Sequence, set, frozenset, Iterable) or kind is tuple:
        items = [a for a in arguments if a is not Ellipsis]
        if kind is tuple and len(items) > 1:
            schemas = [_schema(item, location) for item in items]
            return {"type": "array", "prefixItems": schemas}
        return {"type": "array"} | ({"items": _schema(items[0], location)} if items else {})
    if kind in (dict, Mapping):
        if arguments and arguments[0] is not str:
            raise _unknown(hint, location)
        value_schema = (
            {"additionalProperties": _schema(arguments[1], location)} if arguments else {}
        )
        return {"type": "object"} | value_schema
    raise _unknown(hint, location)


def _members(hint: type[enum.Enum], location: str) -> dict:
    """The schema of an enumeration: the values of its members, which the tool receives."""
    values = [member.value for member in hint]
    kinds = list(dict.fromkeys(map(type, values)))
    if not kinds or not set(kinds) <= set(_NAMES):
        raise _unknown(hint, location)
    names = [_NAMES[kind] for kind in kinds]
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _literal(values: tuple, location: str) -> dict:
    kinds = {type(value) for value in values}
    if not kinds <= set(_NAMES):
        raise _unknown(typing.Literal[values], location)
    schema = {"enum": [value for value in values if value is not None]}
    names = sorted(_NAMES[kind] for kind in kinds - {type(None)})
    if names:
        schema = {"type": names[0] if len(names) == 1 else names} | schema
    return schema | ({"nullable": True} if type(None) in kinds else {})


def _union(arguments: tuple, location: str) -> dict:
    schemas = [_schema(a, location) for a in arguments if a is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(set(schema) == {"type"} for schema in schemas):
        schema = {"type": sorted(schema["type"] for schema in schemas)}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in arguments else {})


def _unknown(hint: object, location: str) -> InputError:
    return InputError(
        f"{location} has a type that JSON cannot say",
        value=hint,
        rule="types are int, float, str, bool, list, dict[str, ...], Literal, Optional, unions, "
        "and an Enum of texts or numbers",
        fix="take a text or a number, and make the object from it inside",
    )


def _plain_default(default: object) -> object:
    """Returns a default; of a member of an enumeration its value."""
    return default.value if isinstance(default, enum.Enum) else default


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


# -- docstrings


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns (description, {parameter: its text}) of a docstring in Google's style, with Sphinx's
    :param x:, or without either."""
    sections = [*_SECTION.finditer(text)]
    description = text[: sections[0].start()] if sections else text
    descriptions: dict[str, list[str]] = {}
    ends = [section.start() for section in sections[1:]] + [len(text)]
    for section, end in zip(sections, ends, strict=False):
        if section[1] in ("Args", "Arguments", "Parameters"):
            _read_arguments(text[section.end() : end].splitlines(), descriptions)
    description_lines = []
    current: list[str] | None = None
    for line in description.splitlines():
        if field := _FIELD.match(line):
            current = descriptions.setdefault(field[1], [])
            current.append(field[2])
        elif line.lstrip().startswith((":return", ":rtype", ":raise", ":type")):
            current = []
        elif current is not None and line.strip():
            current.append(line.strip())
        elif current is None:
            description_lines.append(line)
    return "\n".join(description_lines).strip(), {
        name: " ".join(lines).strip() for name, lines in descriptions.items()
    }


def _read_arguments(lines: Sequence[str], descriptions: dict[str, list[str]]) -> None:
    """Adds the descriptions of the arguments in a section: `name (type): text` at the least
    indentation, where deeper lines continue the one before."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return
    least = min(len(line) - len(line.lstrip()) for line in filled)
    current: list[str] = []
    for line in filled:
        match = _ARGUMENT.match(line)
        if match and len(match[1]) == least:
            current = descriptions.setdefault(match[2], [])
            current.append(match[3])
        else:
            current.append(line.strip())


def _choices(text: str) -> list | None:
    """Returns the list of `(choices: ["a", "b"])` at the end of a parameter's text, or None."""
    match = _CHOICES.search(text)
    if not match:
        return None
    try:
        return parse_json(match[1], "choices")
    except InputError:
        return None


# -- arguments of a call


def parameters_of(name: str, schemas: Sequence[Mapping]) -> Mapping[str, Mapping]:
    """The schemas of a tool's parameters by name; empty for a tool that none of `schemas` names."""
    for schema in schemas:
        function = schema.get("function", schema)
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def checked_arguments(schema: Mapping, arguments: Mapping) -> tuple[dict, str]:
    """Returns (the arguments of a call by the tool's schema, the problem with them in words
    for the policy or ""). A text that is a number, a boolean or JSON becomes one if its
    parameter is no text."""
    function = schema.get("function", schema)
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    problems = []
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    unknown = [name for name in arguments if name not in properties]
    if unknown and parameters.get("additionalProperties") in (None, False):
        names = ", ".join(properties) or "none"
        problems.append(f"unknown: {', '.join(map(_short, unknown[:8]))} (parameters: {names})")
    checked = dict(arguments)
    for name, value in arguments.items():
        if name in properties:
            checked[name] = coerced(value, properties[name])
            if wrong := _wrong(checked[name], properties[name], 0):
                problems.append(f"{name} {wrong}")
    return checked, "; ".join(problems)


def _short(name: str) -> str:
    """Returns a name that the policy wrote, without characters that could form a special token."""
    return re.sub(r"[^\w.-]", "?", name[:40])


def _kinds(schema: Mapping) -> list[str]:
    """Returns the types that a schema allows; an empty list allows any type."""
    kinds = schema.get("type", [])
    kinds = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
    for option in schema.get("anyOf", ()):
        option_kinds = _kinds(option)
        if not option_kinds:
            return []
        kinds += option_kinds
    if kinds and schema.get("nullable"):
        kinds.append("null")
    return kinds


_WRITTEN = {
    "integer": re.compile(r"[+-]?\d{1,400}(?:\.0*)?"),
    "number": re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,4})?"),
}


def coerced(value: object, schema: Mapping) -> object:
    """The value in its schema's type if it is a text of such a value, else as it is."""
    kinds = _kinds(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value) if "number" not in kinds else value
    if not isinstance(value, str) or "string" in kinds:
        return None if value == "null" and "null" in kinds and not schema.get("enum") else value
    text = value.strip()
    if "integer" in kinds and _WRITTEN["integer"].fullmatch(text):
        return int(text.partition(".")[0])
    if "number" in kinds and _WRITTEN["number"].fullmatch(text):
        return float(text)
    if text.lower() in ("true", "false") and "boolean" in kinds:
        return text.lower() == "true"
    if text.lower() in ("null", "none") and "null" in kinds:
        return None
    if not kinds or {"array", "object"} & set(kinds):
        try:
            return json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return value
    return value


_TYPES = {
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def _wrong(value: object, schema: Mapping, depth: int) -> str:
    """Checks a value against a schema -> the violated rule; "" where it fits, or where the schema
    cannot be read."""
    kinds = _kinds(schema)
    if value is None and (schema.get("nullable") or "null" in kinds):
        return ""
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {json.dumps(schema['enum'], ensure_ascii=False)[:400]}"
    if "const" in schema and value != schema["const"]:
        return f"must be {json.dumps(schema['const'], ensure_ascii=False)[:400]}"
    checkable = [kind for kind in kinds if kind in _TYPES]
    if (
        checkable
        and len(checkable) == len(kinds)
        and not any(_TYPES[kind](value) for kind in checkable)
    ):
        return f"must be {_article(' or '.join(checkable))}"
    if "anyOf" in schema:
        reasons = [_wrong(value, option, depth + 1) for option in schema["anyOf"]]
        return reasons[0] if all(reasons) else ""
    if depth > 32:
        return ""
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for number, item in enumerate(value):
            if wrong := _wrong(item, schema["items"], depth + 1):
                return f"item {number + 1} {wrong}"
    if isinstance(value, dict) and isinstance(schema.get("properties"), Mapping):
        missing = [name for name in schema.get("required", ()) if name not in value]
        if missing:
            return f"lacks {', '.join(missing)}"
        for name, item in value.items():
            if name in schema["properties"]:
                if wrong := _wrong(item, schema["properties"][name], depth + 1):
                    return f"{name} {wrong}"
    return ""


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
