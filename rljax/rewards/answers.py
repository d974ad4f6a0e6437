"""Rewards for answers that are lists or JSON objects, item by item.

What lives here: pure functions of strings, linear in the length of the response. What does not: one
answer as a text or number (`rules`), expressions (`countdown`).
"""

import json
import math
import re

from rljax.rewards.countdown import answer_text

MAX_CHARACTERS = 100_000  # of the text that is parsed


def list_match(response: str, ground_truth: str, *, partial: float = 0.0) -> float:
    """1 if the items are those of the ground truth in its order, else partial * agree / longer.

    Items are parted by commas, semicolons or blanks, maybe in square brackets; numbers are equal
    as they are written. The list is what the last <answer>...</answer> holds, else the whole
    response. agree = positions with the same item, longer = the larger number of items.
    """
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"list_match: partial must lie in [0, 1), got {partial!r}")
    theirs = _items(ground_truth)
    if not theirs:
        raise ValueError(f"ground_truth {ground_truth!r:.80} holds no items")
    ours = _items(answer_text(response)[:MAX_CHARACTERS])
    if ours == theirs:
        return 1.0
    agree = sum(a == b for a, b in zip(ours, theirs, strict=False))
    return partial * agree / max(len(ours), len(theirs))


def _items(text: str) -> list[str]:
    return [item for item in re.split(r"[\s,;\[\]]+", text.strip()) if item]


def json_fields(response: str, ground_truth: str, *, partial: float = 0.0) -> dict:
    """1 if the response holds the JSON object of the ground truth, else
    partial * (keys with the right value) / (keys of either).

    The object is that of the last ```json fence, else of the last <answer>, else the outermost
    {...} of the response. Texts are equal after stripping, numbers as numbers (1 and 1.0, not "1"),
    lists in order, objects key by key. Parts: valid_json, fields_right (the share).
    """
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"json_fields: partial must lie in [0, 1), got {partial!r}")
    try:
        theirs = json.loads(ground_truth)
    except ValueError as error:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is not JSON") from error
    if not isinstance(theirs, dict) or not theirs:
        raise ValueError(f"ground_truth {ground_truth!r:.80} is not a JSON object with keys")
    ours = _object(response)
    if ours is None:
        return {"score": 0.0, "valid_json": 0.0, "fields_right": 0.0}
    right = sum(key in ours and _same(ours[key], value) for key, value in theirs.items())
    share = right / len({*ours, *theirs})
    score = 1.0 if share == 1.0 else partial * share
    return {"score": score, "valid_json": 1.0, "fields_right": share}


def _object(response: str) -> dict | None:
    """The JSON object that the response holds."""
    fences = re.findall(r"```(?:json)?[ \t]*\n(.*?)```", response[-MAX_CHARACTERS:], re.DOTALL)
    text = fences[-1] if fences else answer_text(response)[-MAX_CHARACTERS:]
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        # No huge numbers: int() of a long digit string takes quadratic time, and is refused.
        found = json.loads(text[start : end + 1], parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, bool) or isinstance(theirs, bool) or ours is None or theirs is None:
        return ours is theirs
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        try:
            return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return ours == theirs
    if isinstance(ours, str) and isinstance(theirs, str):
        return ours.strip() == theirs.strip()
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return set(ours) == set(theirs) and all(_same(ours[k], theirs[k]) for k in theirs)
    return False
