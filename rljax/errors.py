"""InputError: the one exception whose message is written for users.

Launchers print an `InputError` as plain text without a traceback; every other exception is a bug
of ours.
"""


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
        super().__init__(text)
