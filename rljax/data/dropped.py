"""Reasons for which encoding drops rows: each of its counts, declared once."""

from collections.abc import Mapping
from typing import NamedTuple


class Reason(NamedTuple):
    """Texts of a reason. `limit`, `max_tokens`, `overlong` and `cut`, the values of overlong that
    cut a row, are filled in."""

    said: str  # stands behind the count of rows: "8 ties"
    rule: str  # of the error where no row is left
    fix: str  # of the same error


REASONS = {
    "dropped_overlong": Reason(
        "over {limit}",
        "max_tokens is {max_tokens}, overlong is {overlong!r}",
        "raise max_tokens (of a run: offline.max_tokens){cut}",
    ),
    "dropped_empty": Reason(
        "with nothing to learn",
        "a row needs a token to learn within max_tokens={max_tokens}, behind its prompt",
        "write completions that are not empty, or raise max_tokens (of a run: offline.max_tokens)",
    ),
    "dropped_identical": Reason(
        "of two equal completions",
        "'chosen' and 'rejected' are the same text: there is nothing to prefer",
        "write two different completions into each row; a mistake in a script may write one twice",
    ),
    "dropped_tie": Reason(
        "ties",
        "a tie prefers neither completion",
        "offline.ties='both_orders', which learns that both are as good, or rows with a better one",
    ),
}


def reasons(counts: Mapping[str, float], limit: str) -> str:
    """Returns a text such as "1 over 128 tokens, 8 ties" of the rows that were dropped. `limit` is
    the largest length of a row as a text, such as "128 tokens"."""
    counted = ((counts.get(name), reason.said) for name, reason in REASONS.items())
    return ", ".join(f"{n:,} {said.format(limit=limit)}" for n, said in counted if n)
