"""Columns of a row that may hold its ground truth."""

import math
from collections.abc import Mapping

# Of several that hold one, the first is read.
PLAIN_ANSWERS = ("ground_truth", "answer", "solution")
ANSWERS = ("reward_model", *PLAIN_ANSWERS)


def held_answers(row: Mapping) -> list[str]:
    """Returns the columns of a row that hold a ground truth. A `solution` that is empty or NaN, as
    a table writes a gap, holds none."""
    columns = [name for name in ANSWERS if row.get(name) is not None]
    value = row.get("solution")
    is_gap = value in ([], {}) or isinstance(value, float) and math.isnan(value)
    return [name for name in columns if name != "solution" or not is_gap]
