"""The accepted answers of a ground truth: one text, or several.

A ground truth with several targets is a list of texts, or an object that holds some: {"target":
[...]}, SQuAD's {"text": [...], "answer_start": [...]}, TriviaQA's {"value": ..., "aliases": [...]},
or a list of such. It may be JSON text, which is how a row of data holds it. A list of numbers is
one target, `[1, 2]`.
"""

import json

from rljax.rewards.pool.foreign import GroundTruth

# The keys by which an object of answers is known -> those that hold them.
_OBJECTS = (
    ({"target"}, ("target",)),
    ({"text", "answer_start"}, ("text",)),
    ({"value", "aliases"}, ("value", "aliases")),
)
_UNKNOWN = "<unk>"  # TriviaQA's test split has no answers


def targets(ground_truth: object) -> list[str]:
    """The accepted answers of "a", ["a", "b"] or an object of answers, the last two also as JSON
    text. Raises ValueError if there is none, and for an object of a row that is none of those;
    TypeError for an answer that is no text."""
    if isinstance(ground_truth, str):
        ground_truth = _value_of(ground_truth)
    if isinstance(ground_truth, dict):
        return _of_objects([ground_truth])
    if hasattr(ground_truth, "tolist"):  # an array of parquet
        ground_truth = ground_truth.tolist()
    texts = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not isinstance(texts, list | tuple):
        check_text(texts)
    if _objects(texts):
        return _of_objects(texts)
    return _checked(texts)


def only_target(ground_truth: object) -> str:
    """The one accepted answer. Raises ValueError where there are several, and as `targets`."""
    only, *others = targets(ground_truth)
    if others:
        raise ValueError(f"ground_truth {ground_truth!r:.80} has several targets; one is compared")
    return only


def _checked(texts: list) -> list[str]:
    if not texts:
        raise ValueError("ground_truth has no target")
    for target in texts:
        check_text(target)
    return list(texts)


def _of_objects(values: list) -> list[str]:
    """Returns the answers of objects, and of texts among them, each once."""
    texts = []
    for value in values:
        for name in _keys(value) if isinstance(value, dict) else ():
            inner = value[name]
            inner = inner.tolist() if hasattr(inner, "tolist") else inner
            texts += inner if isinstance(inner, list | tuple) else [inner] * (inner is not None)
        if not isinstance(value, dict):
            texts.append(value)
    return list(dict.fromkeys(_checked([target for target in texts if target != _UNKNOWN])))


def _keys(value: dict) -> tuple[str, ...]:
    for markers, names in _OBJECTS:
        if markers <= value.keys():
            return names
    raise ValueError(
        f"ground_truth is an object of {', '.join(sorted(map(str, value)))[:200]}, and none of"
        ' these is known to hold its answers: write {"target": [...]}, or a text; JSON that is the'
        " answer itself is compared by json_match()"
    )


def _value_of(text: str) -> object:
    """Returns the value of a text that is JSON of several targets, else the text: "[1]" is a
    target. An object of a row is no text, whatever it holds."""
    value = text.value if isinstance(text, GroundTruth) else text
    if isinstance(value, dict) or isinstance(value, list) and _objects(value):
        return value
    if text.strip()[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict):
        is_other_form = any(markers <= value.keys() for markers, _ in _OBJECTS[1:])
        listed = "target" in value and (value.keys() == {"target"} or _texts(value["target"]))
        return value if listed or is_other_form else text
    # A list of texts and other values is no text either: `targets` refuses it.
    listed = any(isinstance(item, str) for item in value)
    are_objects = [
        isinstance(item, dict) and any(k <= item.keys() for k, _ in _OBJECTS) for item in value
    ]
    return value if listed or are_objects and all(are_objects) else text


def _objects(values: list | tuple) -> bool:
    return any(isinstance(item, dict) for item in values)


def _texts(value: object) -> bool:
    value = [value] if isinstance(value, str) else value
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def check_text(ground_truth: object) -> None:
    """Raises TypeError for a ground truth that is no text."""
    # 72 == "72" is False without an error: a whole data set would score 0.
    if not isinstance(ground_truth, str):
        raise TypeError(
            f"ground_truth must be text, got {type(ground_truth).__name__} {ground_truth!r:.80}"
        )
