"""A reward for answers that are lists, item by item.

Pure functions of strings, linear in the length of the response.
"""

import re

from rljax.contracts import contract
from rljax.rewards.answers.find import answer_text, marked_answer
from rljax.rewards.text.targets import targets

MAX_CHARACTERS = 100_000  # characters of the text that is parsed


@contract(safe=True, reads="answer", on_timeout=0.0)
def list_match(response: str, ground_truth: str, *, partial: float = 0.0) -> float:
    """1 if the items are those of the ground truth in its order, else partial * agree / longer.

    Items are parted by commas, semicolons or blanks, maybe in square brackets and double quotes;
    numbers are equal as they are written. The list is what the last <answer>...</answer> holds,
    else the whole response. agree = positions with the same item, longer = the larger number of
    items. Of {"target": [...]} the best list counts. Raises ValueError unless 0 <= partial < 1, and
    for a ground truth without items.
    """
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"list_match: partial must lie in [0, 1), got {partial!r}")
    # A list is the items themselves; {"target": [...]} holds several such lists.
    is_nested = ground_truth.lstrip("[ \n").startswith("{")
    lists = targets(ground_truth) if is_nested else [ground_truth]
    accepted = [_items(marked_answer(text) or text) for text in lists]
    if not all(accepted):
        raise ValueError(f"ground_truth {ground_truth!r:.80} holds no items")
    items = _items(answer_text(response)[:MAX_CHARACTERS])
    return max(_agreement(items, expected, partial) for expected in accepted)


def _agreement(items: list[str], expected: list[str], partial: float) -> float:
    if items == expected:
        return 1.0
    agree = sum(a == b for a, b in zip(items, expected, strict=False))
    return partial * agree / max(len(items), len(expected))


def _items(text: str) -> list[str]:
    return [item for item in re.split(r'[\s,;\[\]"]+', text.strip()) if item]
