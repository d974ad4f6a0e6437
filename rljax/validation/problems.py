"""Parts that rljax.validation's checks share."""

import math
from collections.abc import Iterable

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, OptimizerConfig, value_of
from rljax.config.checks import Problems, check_bare_name
from rljax.config.schema import FIELDS
from rljax.errors import InputError
from rljax.learn.optimizers import learning_rate


class ConfigProblems(Problems):
    """Problems of one config."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def check_field(self, ok: object, field: str, rule: str, fix: str) -> bool:
        """Adds a problem, with the value that the field has, unless `ok`; returns `ok`."""
        return self.check(bool(ok), field, value_of(self.config, field), rule, fix)


def shards_of(config: Config) -> int:
    """Returns the number of shards of the rows of a batch; 1 where a size is not known."""
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.expert)
    return math.prod(sizes) if min(sizes) > 0 else 1


def resolve_field(problems: Problems, field: str, text: str, home: str) -> Component | None:
    """Returns the component that a field names; None, and a problem, if there is none."""
    named = field in FIELDS and FIELDS[field].component == home
    if named and not check_bare_name(field, text, problems):
        return None
    try:
        return resolve(text, NAMESPACES[home])
    except InputError as error:
        problems.add(field, text, error)
        return None


def resolved(text: str, home: str) -> Component | None:
    """Returns the component that a text names; None for "", and where there is none, which another
    check reports."""
    try:
        return resolve(text, NAMESPACES[home]) if text else None
    except InputError:
        return None


def check_call(
    problems: Problems, field: str, component: Component, called: Iterable[str], fix: str
) -> None:
    """Adds a problem unless the component can be called with these arguments and its options."""
    try:
        component.signature.bind(*called, **component.options)
    except TypeError as error:
        rule = f"it is called with ({', '.join(called)}): {error}"
        problems.check(False, field, component.text, rule, fix)


def check_schedule(problems: Problems, field: str, text: str) -> None:
    """Adds a problem unless a text names a schedule whose options fit."""
    if resolve_field(problems, field, text, "schedule") is None:
        return
    try:
        learning_rate(OptimizerConfig(lr=1.0, schedule=text), 100)
    except InputError as error:
        problems.add(field, text, error)
    except TypeError as error:
        problems.check(False, field, text, f"cannot be called: {error}", f"{field}='cosine()'")
