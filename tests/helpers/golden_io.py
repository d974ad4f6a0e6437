"""Reads the golden files: one .npz per function of the other project, numpy only, no pickle.

Keys: `__meta__` (JSON: versions, conventions, defaults), `case{i}/label`, `case{i}/edge` (a
degenerate input), `case{i}/input/NAME`, `case{i}/param/NAME` (absent: None), `case{i}/output/NAME`,
`case{i}/grad/NAME`, `case{i}/metric_names` with `case{i}/metric_values`. The numbers i of a file
need not be without gaps: a selection keeps the numbers of the whole.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass
class Case:
    label: str = ""
    inputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    grads: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    edge: bool = False
    optional: bool = False  # whether agreement is: a degenerate input of a further folder


PARTS = {"input": "inputs", "output": "outputs", "grad": "grads"}


def read_cases(path: Path) -> tuple[dict, list[Case]]:
    """(meta, cases in the order of their numbers)."""
    cases: dict[int, Case] = {}
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(file["__meta__"].item())
        for key in file:
            number, _, rest = key.partition("/")
            if not number.startswith("case"):
                continue
            number = int(number.removeprefix("case"))
            case = cases.setdefault(number, Case(params=dict(meta.get("defaults", {}))))
            kind, _, name = rest.partition("/")
            if kind in PARTS:
                getattr(case, PARTS[kind])[name] = file[key]
            elif kind == "param":
                value = file[key]
                text = value.dtype.kind == "U" or value.ndim == 0
                case.params[name] = value.tolist() if text else value
            elif kind == "metric_names":
                values = file[key.replace("metric_names", "metric_values")]
                case.metrics = dict(zip(file[key].tolist(), values.tolist(), strict=True))
            elif kind in ("label", "edge"):
                setattr(case, kind, file[key].item())
            elif kind != "metric_values":
                raise ValueError(f"{path}: unknown key {key}")
    return meta, [cases[number] for number in sorted(cases)]


def same(a: Case, b: Case) -> bool:
    """Whether two cases are one: the same label and the same arrays, bit by bit."""

    def arrays(case):
        parts = (case.inputs, case.params, case.outputs, case.grads, case.metrics)
        return {(i, k): np.asarray(v) for i, part in enumerate(parts) for k, v in part.items()}

    x, y = arrays(a), arrays(b)
    return (
        (a.label, a.edge, x.keys()) == (b.label, b.edge, y.keys())
        and all(x[k].dtype == y[k].dtype and x[k].shape == y[k].shape for k in x)
        and all(x[k].tobytes() == y[k].tobytes() for k in x)
    )
