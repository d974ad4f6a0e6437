"""The default sizes of a batch: as many sequences as the devices learn from in seconds, by the
number of weights. `rljax.train` without a config asks for them; a config has its own."""

import contextlib
import math
import os
from collections.abc import Callable, Collection

import jax

from rljax import hosts
from rljax.chips import chip_of
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, row_tokens, with_overrides
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.data.online.encoded import load_run_tokenizer
from rljax.errors import InputError
from rljax.files import json_object, read_json_object
from rljax.mesh import row_shards
from rljax.models.model import Model
from rljax.runs.store import Store, is_url, local_path
from rljax.runs.units import human_count
from rljax.setup.setup import load_model

FIELDS = ("prompts_per_step", "sequences_per_optimizer_step")  # fields of batch
PROMPTS = (128, 64, 32, 16, 8, 4)
# Seconds that a step may take. FLOPs per second of a CPU core, the share of its peak that an
# accelerator reaches, and its FLOPs per second if the peak is not known.
CPU_STEP_S, STEP_S = 10.0, 60.0
CPU_FLOPS, PEAK_SHARE, OTHER_FLOPS = 1e10, 0.2, 2e13
FLOPS_PER_WEIGHT = 8  # FLOPs of a token per weight: it is sampled (2) and learned from (6)
CACHE_SHARE = 0.25  # share of the memory of all devices for keys and values


def with_default_batch(
    config: Config, unset: Collection[str], devices, check: Callable[[Config], object]
) -> tuple[Config, str]:
    """Returns the config with the `unset` sizes of its batch chosen, and a line that says them (""
    if nothing is chosen). `check` raises InputError for anything else that is wrong.

    A run that goes on keeps the sizes in its config.json. The choice is a function of the model,
    the lengths and the machine, and the same on all hosts.
    """
    if not unset or not _samples(config):
        return config, ""
    if saved := _of_the_run(config.run_dir):
        return _with(config, {name: saved[name] for name in unset if name in saved}), ""
    config = _with(config, _sizes(config, unset, math.inf, 1))
    check(config)
    model = load_model(config, load_run_tokenizer(config), devices)
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(model.abstract()))
    most_rows = _most_rows(config, model, weights, devices)
    sizes = _sizes(config, unset, most_rows, row_shards(model.mesh))
    config = _with(config, sizes)
    batch = config.batch
    sequences = batch.prompts_per_step * batch.samples_per_prompt
    machine = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        machine = f"{_cores()} CPU core{'s' * (_cores() > 1)}"
    return config, (
        f"batch: {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = "
        f"{sequences} sequences a step, of up to {row_tokens(config)} tokens each, chosen for "
        f"{human_count(weights)} weights on {machine}; to change it: "
        f"{', '.join(f'{name}={value}' for name, value in sizes.items())}"
    )


def _samples(config: Config) -> bool:
    """Returns whether the dataflow learns from samples that it draws; False where it is none."""
    with contextlib.suppress(InputError):
        return spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data in SAMPLED
    return False


def _of_the_run(run_dir: str) -> dict:
    """Returns the batch of the config.json of an earlier start in this folder,
    {} if there is none."""
    if not run_dir:
        return {}
    path = f"{run_dir}/config.json"
    try:
        if is_url(run_dir):
            batch = json_object(Store(run_dir).read("config.json"), path).get("batch")
        else:
            batch = read_json_object(local_path(path)).get("batch")
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in batch.items() if type(v) is int} if isinstance(batch, dict) else {}


def _with(config: Config, sizes: dict[str, int]) -> Config:
    return with_overrides(config, {f"batch.{name}": n for name, n in sizes.items()}, "the batch")


def _most_rows(config: Config, model: Model, weights: int, devices) -> float:
    """Returns how many sequences fit the seconds of a step and the memory of the devices."""
    chip, cpu, tokens = chip_of(devices), devices[0].platform == "cpu", row_tokens(config)
    if cpu:  # its devices may be virtual: they share the cores
        speed, seconds = CPU_FLOPS * _cores() * hosts.count(), CPU_STEP_S
    else:
        flops_per_device = PEAK_SHARE * chip.flops_per_s if chip else OTHER_FLOPS
        speed, seconds = flops_per_device * len(devices), STEP_S
    rows = speed * seconds / (FLOPS_PER_WEIGHT * weights * tokens)
    if chip is not None:
        layers = [model.config.of(kind) for kind in model.config.kinds]
        elements = sum(2 * layer.kv_heads * layer.head_dim for layer in layers)
        cached = elements * tokens * 2  # in bfloat16
        rows = min(rows, CACHE_SHARE * chip.hbm_bytes * len(devices) / cached)
    return rows


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sizes(config: Config, unset: Collection[str], most_rows: float, shards: int) -> dict[str, int]:
    """Returns {field of batch: its number}: the most prompts of PROMPTS whose sequences are
    at most `most_rows`, and at most 256 of them in an optimizer step. Both divide over the
    shards of the mesh."""
    batch, out = config.batch, {}
    samples, step = batch.samples_per_prompt, batch.sequences_per_optimizer_step
    if not all(type(n) is int and n > 0 for n in (samples, step, batch.prompts_per_step)):
        return {}  # the check says so
    if "prompts_per_step" in unset:
        fit = [n for n in PROMPTS if n * samples % shards == 0]
        small = [n for n in fit if n * samples <= most_rows]
        out["prompts_per_step"] = small[0] if small else fit[-1] if fit else shards
    sequences = out.get("prompts_per_step", batch.prompts_per_step) * samples
    if "sequences_per_optimizer_step" in unset:
        divisors = (
            n for n in range(min(step, sequences), 0, -1) if sequences % n == 0 and n % shards == 0
        )
        out["sequences_per_optimizer_step"] = next(divisors, sequences)
    return out
