"""The accepted answers of a ground truth: one text, or several.

A ground truth with several targets is a list of texts or {"target": [...]}, or one of these as JSON
text, which is how a row of data holds it. A list of numbers is one target, `[1, 2]`.
"""

import json


def targets(ground_truth: object) -> list[str]:
    """The accepted answers of "a", ["a", "b"] or {"target": ...}, the last two also as JSON text.
    Raises ValueError if there is none, and TypeError for an answer that is no text."""
    if isinstance(ground_truth, str):
        ground_truth = _from_json(ground_truth)
    if isinstance(ground_truth, dict):
        if "target" not in ground_truth:
            raise ValueError(f"ground_truth has no 'target': {sorted(map(str, ground_truth))}")
        ground_truth = ground_truth["target"]
    if hasattr(ground_truth, "tolist"):  # an array of parquet
        ground_truth = ground_truth.tolist()
    texts = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not isinstance(texts, list | tuple):
        check_text(texts)
    if not texts:
        raise ValueError("ground_truth has no target")
    for target in texts:
        check_text(target)
    return list(texts)


def only_target(ground_truth: object) -> str:
    """The one accepted answer. Raises ValueError where there are several, and as `targets`."""
    only, *more = targets(ground_truth)
    if more:
        raise ValueError(f"ground_truth {ground_truth!r:.80} has several targets; one is compared")
    return only


def _from_json(text: str) -> object:
    """The value of a text that is JSON of several targets, else the text: "[1]" is a target."""
    if text.strip()[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict):
        listed = "target" in value and (value.keys() == {"target"} or _texts(value["target"]))
        return value if listed else text
    # What holds texts and others is no text either: `targets` refuses it.
    return value if any(isinstance(one, str) for one in value) else text


def _texts(value: object) -> bool:
    value = [value] if isinstance(value, str) else value
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def check_text(ground_truth: object) -> None:
    """Raises TypeError for a ground truth that is no text."""
    # 72 == "72" is False without an error: a whole data set would score 0.
    if not isinstance(ground_truth, str):
        raise TypeError(
            f"ground_truth must be text, got {type(ground_truth).__name__} {ground_truth!r:.80}"
        )
