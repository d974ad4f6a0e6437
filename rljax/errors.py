"""InputError: the one exception whose message is written for users.

Launchers print an `InputError` as plain text without a traceback; every other exception is a bug
of ours.
"""

import re

_LONGEST_WORD, _LONGEST_TEXT = 1_000, 20_000  # characters: a name may have a million


def _readable(text: str) -> str:
    """The text as any terminal can print it, without its endless parts. A file's name need not be
    UTF-8."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    cut = re.sub(rf"\S{{{_LONGEST_WORD},}}+", lambda m: f"{m[0][:200]}...{m[0][-50:]}", text)
    return cut if len(cut) <= _LONGEST_TEXT else f"{cut[:_LONGEST_TEXT]}..."


class InputError(ValueError):
    """Bad input from the user: says what is wrong, which value, which rule, and how to fix it."""

    def __init__(self, what: str, *, value: object = None, rule: str = "", fix: str = ""):
        text = what
        if value is not None:
            shown = repr(value)
            text += f": got {shown if len(shown) <= 200 else shown[:200] + '...'}"
        if rule:
            text += f"; {rule}"
        if fix:
            text += f". Fix: {fix}"
        super().__init__(_readable(text))
