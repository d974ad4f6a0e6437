"""What is wrong with a config, gathered so that all of it can be said at once."""

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.errors import InputError


class Problems(list):
    """Collects what is wrong; each entry names the field, the value, the rule and the fix."""

    def check(self, ok: bool, field: str, value, rule: str, fix: str = "") -> bool:
        if not ok:
            self.add(field, value, rule + (f". Fix: {fix}" if fix else ""))
        return ok

    def add(self, field: str, value, text: object) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        self.append(f"{field}={shown}: {text}")


def value_of(config, name: str):
    """The value of a dotted field."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def resolve_field(problems: Problems, field: str, text: str, home: str):
    try:
        return resolve(text, NAMESPACES[home])
    except InputError as error:
        problems.add(field, text, error)
        return None
