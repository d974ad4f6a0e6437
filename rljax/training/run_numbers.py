"""Numbers in which the runs of one program differ: inputs of the program, a value for each run.

A field of the config that declares `per_run` is such a number, or a text of components whose
numbers are. A number that is 0 is none of them: it switches a part of the program off.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, value_of
from rljax.config.schema import FIELDS
from rljax.dataflows.algorithm import Algorithm

OWN_FIELDS = ("seed", "run_dir")  # of each run, beside its numbers
TEMPERATURE = "sampler.temperature"


class RunNumber(NamedTuple):
    """The place of a number in the config."""

    field: str  # dotted
    index: int = 0  # of a component among those of the field
    option: str = ""  # of a component

    def __str__(self):
        return self.field + f", {self.option}" * bool(self.option)


def split_numbers(config: Config) -> tuple[dict[str, object], dict[RunNumber, float]]:
    """Returns what is compiled into the program of a run, {field: value}, and its numbers that are
    inputs of the program."""
    compiled: dict[str, object] = {}
    numbers: dict[RunNumber, float] = {}
    for field, declared in FIELDS.items():
        value = value_of(config, field)
        if field in OWN_FIELDS:
            continue
        compiled[field] = value
        if not declared.per_run:
            continue
        if not isinstance(value, str | tuple):
            if value:
                compiled[field], numbers[RunNumber(field)] = "a number", value
            continue
        components = []
        for i, text in enumerate((value,) if isinstance(value, str) else value):
            if not text:
                continue
            component = resolve(text, NAMESPACES[declared.component])
            of_component = component.numbers()
            options = {**component.defaults(), **component.options}
            components.append((component.name, {**options, **dict.fromkeys(of_component, "")}))
            numbers |= {RunNumber(field, i, name): x for name, x in of_component.items()}
        compiled[field] = components
    return compiled, numbers


def different_numbers(configs: Sequence[Config]) -> list[dict[RunNumber, float]]:
    """Returns for each config the numbers in which these differ; all else is equal in them."""
    split = [split_numbers(config)[1] for config in configs]
    differ = [place for place in split[0] if len({numbers[place] for numbers in split}) > 1]
    return [{place: numbers[place] for place in differ} for numbers in split]


def with_numbers(algorithm: Algorithm, numbers: Mapping[RunNumber, jax.Array]) -> Algorithm:
    """Returns the algorithm with these numbers, scalars that may be traced."""
    fields: dict[str, object] = {}
    for place, value in numbers.items():
        section, _, name = place.field.rpartition(".")
        if section != "algorithm":
            continue
        if not place.option:
            fields[name] = value
            continue
        present = fields.get(name, getattr(algorithm, name))
        many = isinstance(present, tuple)
        components: list[Component] = list(present) if many else [present]
        components[place.index] = components[place.index].with_options({place.option: value})
        fields[name] = tuple(components) if many else components[0]
    return algorithm.replace(**fields)


def numbers_of(section: str, numbers: Mapping[RunNumber, jax.Array]) -> dict[str, jax.Array]:
    """Returns {field: number, a scalar} of a section of the config."""
    of_section = {place.field.rpartition("."): x for place, x in numbers.items()}
    return {name: x for (before, _, name), x in of_section.items() if before == section}


@dataclasses.dataclass(frozen=True)
class RunOptimizer:
    """The optimizer of a role, made of a section of the config and the number of its steps."""

    role: str
    section: str
    fields: tuple[tuple[str, object], ...]
    total_steps: int
