"""Rewards for the form of a response: tags in order, JSON against a schema or a reference."""

import functools
import itertools
import json
import math
import re
import unicodedata

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.files import parse_json, read_text
from rljax.reasoning import beginning_of


@contract(safe=True, probed=True, on_timeout=0.0)
def format_tags(
    response: str,
    prompt: str = "",
    *,
    tags: tuple[PlainText, ...] = ("think", "answer"),
    partial: float = 0.0,
    only: bool = True,
) -> dict:
    """1 if each <tag>...</tag> stands exactly once, in this order, with text in it, and (`only`)
    nothing but space around them; else `partial` times the share of tags that stand so alone.

    Parts: tag/<name> for each (once, closed after it is opened, not blank), ordered. `partial`
    below 1 keeps the right form apart. A <think> with which the prompt ends belongs to the
    response. Raises InputError without tags, and unless 0 <= partial < 1.
    """
    if not tags or not 0.0 <= partial < 1.0:
        raise InputError(
            "format_tags",
            value=(tags, partial),
            rule="at least one tag, and 0 <= partial < 1",
            fix="format_tags(tags=('think', 'answer'), partial=0.0)",
        )
    if isinstance(prompt, str):
        response = beginning_of(prompt) + response
    spans = {tag: _span(response, tag) for tag in tags}
    right = [span for span in spans.values() if span is not None]
    share = len(right) / len(tags)
    ordered = share == 1.0 and all(a[1] <= b[0] for a, b in zip(right[:-1], right[1:], strict=True))
    around = _around(response, right) if ordered and only else ""
    parts = {f"tag/{tag}": float(span is not None) for tag, span in spans.items()}
    complete = ordered and not around.strip()
    return {"score": 1.0 if complete else partial * share, "ordered": float(ordered), **parts}


def _span(text: str, tag: str) -> tuple[int, int] | None:
    """Returns the span from the opening tag to behind the closing one; None unless each
    stands once, around text."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening), text.index(closing)
    if not _holds_text(text[start + len(opening) : end]):
        return None
    return start, end + len(closing)


_FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # letters and a symbol that show nothing


def _holds_text(text: str) -> bool:
    """Returns whether anything is to be seen: U+200B and its kin are no text."""
    return any(unicodedata.category(c)[0] in "LNPS" and c not in _FILLERS for c in text)


def _around(text: str, spans: list[tuple[int, int]]) -> str:
    starts = [0, *(end for _, end in spans)]
    ends = [*(start for start, _ in spans), len(text)]
    return "".join(text[a:b] for a, b in zip(starts, ends, strict=True))


_NOTHING = object()
_ATTEMPTS = 20
_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n")


def find_json(response: str) -> object:
    """The JSON value of a response: all of it, else its last fenced block, else what begins at the
    first { or [ that begins JSON (of 20). Raises ValueError if there is none, and for a value on
    which readers disagree: NaN, or a name that stands twice in an object."""
    texts = [response.strip()]
    fences = list(_FENCE.finditer(response))
    for opening in reversed(fences):
        block, end, _ = response[opening.end() :].partition("```")
        if end:
            texts.append(block.strip())
            break
    decoder = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_once)
    for text in texts:
        value = _decoded(decoder, text, whole=True)
        if value is not _NOTHING:
            return value
    for opening in itertools.islice(re.finditer(r"[{\[]", response), _ATTEMPTS):
        value = _decoded(decoder, response[opening.start() :], whole=False)
        if value is not _NOTHING:
            return value
    raise ValueError("the response holds no JSON")


def _decoded(decoder: json.JSONDecoder, text: str, *, whole: bool) -> object:
    try:
        return decoder.decode(text) if whole else decoder.raw_decode(text)[0]
    except _Ambiguous:  # not what stands inside of it, either
        raise
    except (ValueError, RecursionError):  # a number of too many digits is a ValueError
        return _NOTHING


class _Ambiguous(ValueError):
    """Raised for a beginning of JSON that is a value on which readers do not agree."""


def _refuse(constant: str) -> None:
    raise _Ambiguous(f"{constant} is not JSON")


def _once(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _Ambiguous("a name stands twice in an object")
    return value


@contract(safe=True, reads="answer", probed=True, rubrics=False, on_timeout=0.0)
def json_schema(
    response: str, extra_info: dict | None = None, *, schema: str = "", parsed: float = 0.0
) -> dict:
    """1 if the JSON in the response (`find_json`) is valid by the schema, `parsed` if it holds
    other JSON, else 0. Parts: parsed, valid.

    `schema`: JSON text or the path of a .json file; without it extra_info["schema"], text or
    object. Nothing is fetched: a remote $ref is an error. Needs the extra [rewards]. Raises
    InputError without a schema, and for one that is not valid.
    """
    source = schema or (extra_info or {}).get("schema", "")
    if not source:
        raise InputError("json_schema has no schema", fix="json_schema(schema='schema.json')")
    validator = _validator(source if isinstance(source, str) else json.dumps(source))
    try:
        value = find_json(response)
    except ValueError:
        return {"score": 0.0, "parsed": 0.0, "valid": 0.0}
    try:
        valid = validator.is_valid(value)
    except RecursionError:  # nested deeper than the schema can be followed
        valid = False
    return {"score": 1.0 if valid else float(parsed), "parsed": 1.0, "valid": float(valid)}


@functools.lru_cache(maxsize=256)
def _validator(schema: str):
    try:
        import jsonschema
        from referencing import Registry
    except ImportError as error:
        raise InputError(
            "the reward json_schema needs jsonschema, which is not installed",
            rule=str(error),
            fix="pip install 'jsonschema>=4.20'",
        ) from None
    fix = "JSON text of a schema, or the path of a .json file"
    inline = schema.strip().startswith("{") or schema.strip() in ("true", "false")
    try:
        text = schema if inline else read_text(schema)
    except InputError as error:
        raise InputError("json_schema(schema)", rule=str(error), fix=fix) from None
    try:
        loaded = parse_json(text, "the schema")
        kind = jsonschema.validators.validator_for(loaded, jsonschema.Draft202012Validator)
        kind.check_schema(loaded)
    except (ValueError, jsonschema.SchemaError) as error:
        raise InputError(
            "json_schema(schema)",
            value=schema,
            rule=f"{type(error).__name__}: {error}"[:200],
            fix=fix,
        ) from None
    # The library compares each item with each other one where they cannot be sorted.
    kind = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})
    return kind(loaded, registry=Registry())


def _unique_items(validator, unique: bool, items: object, schema: dict):
    """Checks the rule uniqueItems in linear time."""
    import jsonschema

    if unique and validator.is_type(items, "array"):
        if len({json.dumps(_canonical(item), sort_keys=True) for item in items}) < len(items):
            yield jsonschema.ValidationError("has non-unique elements")


def _canonical(value: object) -> object:
    """Returns the value with 1.0 as 1, which is the same number in JSON."""
    if isinstance(value, dict):
        return {name: _canonical(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@contract(safe=True, probed=True, reads="answer", on_timeout=0.0)
def json_match(response: str, ground_truth: str | dict | list, *, partial: bool = True) -> dict:
    """Values that agree / values in either, over the paths to the leaves of two JSON values.

    `{"a": 1, "b": [2, 3]}` has the paths a, b.0, b.1; true is not 1, 1.0 is. What the reference
    lacks counts against the response, so that listing everything does not pay. `partial=False`: 1
    or 0. A response nested more than 100 deep beyond the reference, or of more than 1,000 values
    and four times the reference's, scores 0. Parts: parsed, exact, precision, recall.
    """
    reference = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    zeros = {"score": 0.0, "parsed": 0.0, "exact": 0.0, "precision": 0.0, "recall": 0.0}
    try:
        value = find_json(response)
    except ValueError:
        return zeros
    expected = _leaves(reference)
    depth = max(len(path) for path, _, _ in expected) + _MORE_DEPTH
    leaves = _leaves(value, depth, 4 * len(expected) + _MORE_LEAVES)
    if leaves is None:
        return zeros | {"parsed": 1.0}
    agree = len(leaves & expected)
    exact = float(leaves == expected)
    share = agree / len(leaves | expected)
    return {
        "score": share if partial else exact,
        "parsed": 1.0,
        "exact": exact,
        "precision": agree / len(leaves),
        "recall": agree / len(expected),
    }


_MORE_DEPTH, _MORE_LEAVES = 100, 1000  # bounds of a response that is compared, beyond the reference


def _leaves(value: object, depth: float = math.inf, limit: float = math.inf) -> set[tuple] | None:
    """Returns (path, kind, value) of every leaf; an empty object or list is a leaf. None if leaves
    are deeper than `depth` or more than `limit`, since every leaf holds its whole path."""
    leaves, todo = set(), [((), value)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, dict | list) and node:
            if len(path) >= depth or len(leaves) + len(todo) + len(node) > limit:
                return None
            inside = node.items() if isinstance(node, dict) else enumerate(node)
            todo += [((*path, key), inner) for key, inner in inside]
        else:
            kind = "number" if isinstance(node, int | float) else type(node).__name__
            kind = "bool" if isinstance(node, bool) else kind
            leaves.add((path, kind, json.dumps(node) if isinstance(node, dict | list) else node))
    return leaves
