"""Nulls that a table filled in, told from those that a row wrote, in tools and in calls.

A table has one list of keys for all its objects, so that what one of them lacks is null there: in
parquet, in what `Dataset.to_json` writes, in lists of rows that went through one. The rules, which
docs/guides/data_formats.md has in words:

- A null of a tool's schema says nothing and is left out, but for `default` and `const`. Of these it
  was filled in where the schema takes no null, and either the tools of the row have other nulls or
  the key has a value in another row.
- A null argument of a call was filled in where the tool does not declare the argument; or where all
  calls of the source have the key, one of them has a value there, and the tool does not require it.

A null elsewhere in a message means that its key is absent.
"""

import functools
from collections.abc import Callable, Iterable, Mapping

from rljax.data.text.messages import ARGUMENTS

# Keys of a schema that hold schemas by name: below them a key is a name.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("default", "const", "enum", "examples")  # hold values, and not schemas
_NULLABLE = ("default", "const")


class Nulls:
    """Tells which nulls of the rows' tools and calls a table filled in. The function `rows` returns
    the rows, or some of them; it is called when the first null is met."""

    def __init__(self, rows: Callable[[], Iterable[Mapping]] = tuple):
        self._rows = rows

    def tools(self, tools: list[dict]) -> list[dict]:
        """Returns tools without the nulls that were filled in."""
        if not _has_null(tools):
            return tools
        return [self._clean_schema(tool, ("tools",), _has_filled_null(tools)) for tool in tools]

    def messages(self, messages: Iterable, tools: Iterable[Mapping]) -> list:
        """Returns the messages with calls without the nulls that were filled in; `tools` are the
        row's."""
        return [
            {**message, name: self._clean_calls(message[name], tools)}
            if isinstance(message, Mapping)
            and (name := next((n for n in _CALLS if _has_null(message.get(n))), None))
            else message
            for message in messages
        ]

    def _clean_calls(self, calls: object, tools: Iterable[Mapping]) -> object:
        if isinstance(calls, Mapping):
            call = {name: value for name, value in calls.items() if value is not None}
            if isinstance(call.get("function"), Mapping):
                call["function"] = self._clean_calls(call["function"], tools)
            schema = _parameters(call.get("name"), tools)
            for name in ARGUMENTS:
                if isinstance(call.get(name), Mapping):
                    call[name] = self._clean_arguments(call[name], schema, ("arguments",))
            return call
        if not isinstance(calls, list):
            return calls
        return [self._clean_calls(call, tools) for call in calls]

    def _clean_arguments(self, value: object, schema: Mapping | None, path: tuple) -> object:
        schema = schema if isinstance(schema, Mapping) else None
        if isinstance(value, list):
            items = schema and schema.get("items")
            return [self._clean_arguments(item, items, path) for item in value]
        if not isinstance(value, Mapping):
            return value
        declared = _properties(schema)
        arguments = {}
        for name, item in value.items():
            if item is None and self._argument_is_filled(name, schema, declared, path):
                continue
            arguments[name] = self._clean_arguments(item, (declared or {}).get(name), (*path, name))
        return arguments

    def _argument_is_filled(self, name: str, schema, declared, path: tuple) -> bool:
        if declared is not None and name not in declared:
            return not schema.get("additionalProperties")
        if name in ((schema or {}).get("required") or ()):
            return False
        return self._is_filled_somewhere(path, name) or (
            declared is None and self._in_all_of_several_tools(path, name)
        )

    def _clean_schema(
        self, value: object, path: tuple, tools_are_filled: bool, named: bool = False
    ) -> object:
        if isinstance(value, list):
            return [self._clean_schema(item, path, tools_are_filled) for item in value]
        if not isinstance(value, Mapping):
            return value
        schema = {}
        for name, item in value.items():
            is_value = name in _VALUES and not named
            if item is None:
                is_written = _takes_null(value) or not (
                    tools_are_filled or self._is_filled_somewhere(path, name)
                )
                if named or name not in _NULLABLE or not is_written:
                    continue
            if not is_value:
                holds_names = name in _SCHEMAS_BY_NAME and not named
                item = self._clean_schema(item, (*path, name), tools_are_filled, holds_names)
            schema[name] = item
        return schema

    # -- counts of keys and values in the rows --

    def _is_filled_somewhere(self, path: tuple, name: str) -> bool:
        """Returns whether every object at the path has the key, and at least one a value there."""
        objects, keys = self._counts
        present, with_value = keys.get((path, name), (0, 0))
        return present == objects.get(path, 0) and with_value > 0

    def _in_all_of_several_tools(self, path: tuple, name: str) -> bool:
        """Returns whether calls of several tools are there, and all of them have the key."""
        objects, keys = self._counts
        return keys.get((path, name), (0, 0))[0] == objects.get(path, 0) and len(self._names) > 1

    @functools.cached_property
    def _counts(self) -> tuple[dict, dict]:
        """Returns the number of objects at each path, and for each key of a path (the number of
        objects that have it, of those that have a value there)."""
        objects: dict[tuple, int] = {}
        keys: dict[tuple, tuple[int, int]] = {}
        self._names = set()

        def count(value: object, path: tuple) -> None:
            if isinstance(value, (list, tuple)):
                for item in value:
                    count(item, path)
            if not isinstance(value, Mapping):
                return
            objects[path] = objects.get(path, 0) + 1
            for name, item in value.items():
                present, with_value = keys.get((path, name), (0, 0))
                keys[path, name] = present + 1, with_value + (item is not None)
                count(item, (*path, name))

        for row in self._rows():
            extra_info = row.get("extra_info")
            for columns in (row, extra_info if isinstance(extra_info, Mapping) else {}):
                for name, value in columns.items():
                    if not isinstance(value, (list, tuple)):
                        continue
                    if name in TOOLS:
                        count(value, ("tools",))
                    for function in _called_functions(value):
                        self._names.add(str(function.get("name")))
                        for key in ARGUMENTS:
                            count(function.get(key), ("arguments",))
        return objects, keys


TOOLS = ("tools", "tool_defs", "functions")  # columns that hold tools
_CALLS = ("tool_calls", "function_call")


def _called_functions(messages: Iterable) -> Iterable[Mapping]:
    """Yields the functions of all calls of messages."""
    for message in messages:
        for name in _CALLS if isinstance(message, Mapping) else ():
            calls = message.get(name)
            for call in calls if isinstance(calls, (list, tuple)) else [calls]:
                if isinstance(call, Mapping):
                    function = call.get("function")
                    yield function if isinstance(function, Mapping) else call


def _has_null(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(item is None or _has_null(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(map(_has_null, value))


def _has_filled_null(value: object, named: bool = False) -> bool:
    """Returns whether a null in the schema says nothing: nobody writes one there."""
    if isinstance(value, list):
        return any(map(_has_filled_null, value))
    if not isinstance(value, Mapping):
        return False
    return any(
        item is None
        or (named or name not in _VALUES)
        and _has_filled_null(item, name in _SCHEMAS_BY_NAME and not named)
        for name, item in value.items()
        if named or name not in _NULLABLE
    )


def _takes_null(schema: Mapping) -> bool:
    """Returns whether a schema itself says that null is one of its values."""
    types = schema.get("type")
    types = types if isinstance(types, (list, tuple)) else [types]
    alternatives = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return (
        "null" in types
        or bool(schema.get("nullable"))
        or None in (schema.get("enum") or ())
        or any(
            _takes_null(alternative)
            for alternative in alternatives
            if isinstance(alternative, Mapping)
        )
    )


def _parameters(name: object, tools: Iterable[Mapping]) -> Mapping | None:
    """Returns the schema of the arguments of the tool `name`; None where no tool has that name."""
    for tool in tools:
        nested = tool.get("function")
        function = nested if isinstance(nested, Mapping) else tool
        if function.get("name") == name:
            return function.get("parameters") or {}
    return None


def _properties(schema: Mapping | None) -> Mapping | None:
    """Returns the schemas of the names that an object may have; None where the schema lists
    none."""
    declared = (schema or {}).get("properties")
    return declared if isinstance(declared, Mapping) else None
