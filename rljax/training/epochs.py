"""Number of steps in one pass over the data."""

import math

from rljax.metric import Metric

METRICS = {
    "data/steps_per_epoch": Metric(
        "steps in which the data are passed over once, rounded down", "steps"
    )
}


def steps_per_epoch(items: float, count: int) -> int | None:
    """Returns floor(items / count) for `count` items a step; None for data without end."""
    return None if math.isinf(items) else math.floor(items / count)


def epoch_metrics(loader, count: int) -> dict[str, float]:
    """Returns data/epoch, and data/steps_per_epoch of a step that draws `count` items."""
    steps = steps_per_epoch(loader.items_per_epoch, count)
    known = {} if steps is None else {"data/steps_per_epoch": float(steps)}
    return {"data/epoch": loader.epoch, **known}


def epoch_notes(source, steps: int) -> list[str]:
    """Returns lines such as "7 steps per epoch: 7,500 items, 1,024 a step; 105 steps are 14.3
    epochs" about a source's data; [] for data without end."""
    items, count = source.loader.items_per_epoch, source.count
    whole = steps_per_epoch(items, count)
    if whole is None:
        return []
    unit = "step" if whole == 1 else "steps"
    passes = f"{steps:,} steps are {steps * count / items:.3g} epochs"
    return [f"{whole:,} {unit} per epoch: {items:,.0f} items, {count:,} a step; {passes}"]
