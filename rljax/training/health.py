"""Limits that a run compares its metrics with: the ranges that the user's functions declare, and
those of the precision that sampler and trainer compute with."""

import sys

from rljax.components import names_file, parse_component, resolve
from rljax.config import Config
from rljax.config.trust import own_components
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.metric import Metric


def own_metrics(config: Config) -> dict[str, Metric]:
    """Returns the metrics in the contracts of the user's functions that a config names. Functions
    that a run calls are imported by now; no others are imported."""
    metrics: dict[str, Metric] = {}
    for text in sorted(own_components(config)):
        name = parse_component(text)[0]
        if not names_file(name) and name.rpartition(".")[0] not in sys.modules:
            continue  # it only looks like a function's name: data.jsonl
        try:
            metrics |= spec(resolve(text, "")).metrics
        except InputError:
            continue
    return metrics


def narrowest_numbers(config: Config, mesh) -> str:
    """Returns the `numbers` of `health_warnings` for a run of this config. On accelerators products
    of float32 are coarser by default, about as those of bfloat16."""
    sampler, trainer = config.sampler, config.model_settings.dtype
    computed = (trainer, sampler.dtype or trainer)
    dtypes = (*computed, sampler.kv_dtype, sampler.weight_dtype)
    if config.rollouts.replay or config.rollouts.max_staleness:
        return ""
    if "int8" in dtypes:
        return "int8"
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if "bfloat16" in dtypes or "float32" in computed and not on_cpu:
        return "bfloat16"
    return "float16" if "float16" in dtypes else "float32"
