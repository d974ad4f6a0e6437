"""Checks that the slots fit on the devices, before anything is allocated."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from rljax import hosts
from rljax.errors import InputError
from rljax.mesh import row_shards
from rljax.models import cache
from rljax.models.cache_pages import Pool
from rljax.models.model import Model
from rljax.runs.units import human_bytes


def of_length(model: Model, tokens: int) -> Model:
    """Returns the model for slots of `tokens` tokens: a rope that follows the length is fixed to
    it, where the model does not say to which, so that no token is rotated anew as its sequence
    grows. Raises InputError if the model holds fewer tokens."""
    config = model.config
    if not any(rope.follows_length for rope in config.ropes):
        return model
    if not config.rope_tokens:
        config = dataclasses.replace(config, rope_tokens=tokens)
        return dataclasses.replace(model, config=config)
    if tokens > config.rope_tokens:
        raise InputError(
            "sampler tokens",
            value=tokens,
            rule=f"at most {config.rope_tokens}, the length that the model's rope is fixed to",
            fix=f"ModelConfig(rope_tokens={tokens}), which changes its numbers",
        )
    return model


def device_bytes(device: jax.Device) -> int | None:
    """Returns the bytes that the backend may still hand out on a device; on CPU what the host has
    free. None if it does not report them."""
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_bytes(name: str = "MemAvailable") -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0]) * 1024 if sizes else None


def device_capacity(device: jax.Device) -> int | None:
    """Returns the bytes of a device's memory, used or not; on CPU the host's. None if it
    does not say."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    return _host_bytes("MemTotal")


def check_whole(name: str, value: int, least: int = 0) -> None:
    """Raises InputError unless a setting of the sampler is a whole number of at least `least`."""
    if not isinstance(value, (int, np.integer)) or not least <= value < 2**31:
        rule = f"a whole number >= {least}, below 2**31"
        raise InputError(
            f"sampler {name}", value=value, rule=rule, fix=f"set {name} to such a number"
        )


def check_pages(page_tokens: int, pages: int) -> None:
    """Raises InputError unless these are whole numbers, and page_tokens is set where pages is."""
    check_whole("page_tokens", page_tokens)
    check_whole("pages", pages)
    if pages and not page_tokens:
        raise InputError("sampler pages without page_tokens", value=pages, fix="page_tokens=128")


def pool_for(model: Model, slots: int, columns: int, page_tokens: int, pages: int) -> Pool | None:
    """Returns the pages of `slots` slots of `columns` tokens, split over devices where the slots
    are; None if page_tokens is 0. Raises InputError for fewer pages than devices."""
    if not page_tokens:
        return None
    shards = row_shards(model.mesh)
    shards = 1 if slots % shards else shards
    if pages and pages < shards:
        rule = f"at least one for each of the {shards} devices that slots are split over"
        raise InputError(
            "sampler pages",
            value=pages,
            rule=rule,
            fix=f"--config.sampler.pages={shards}, or more; 0 makes as many as the slots need",
        )
    count = pages // shards * shards or slots * -(-columns // page_tokens)
    return Pool(page_tokens, count, shards, model.mesh)


def check_whole_rows(pool: Pool | None, tokens: int) -> None:
    """Raises InputError if a row of `tokens` tokens needs more pages than there are."""
    if pool and pool.count < (min_pages := pool.pages_for(tokens - 1) * pool.shards):
        rule = f"at least {min_pages}: {pool.shards} x those of one row of {tokens} tokens"
        raise InputError(
            "sampler pages",
            value=pool.count,
            rule=rule,
            fix=f"--config.sampler.pages={min_pages}, or more; 0 makes as many as the slots need",
        )


def slots_bytes(
    model: Model, slots: int, columns: int, kv_dtype: str = "", pool: Pool | None = None, rings=True
) -> int:
    """Returns the bytes per device of `slots` slots of `columns` tokens, or of their pages."""
    total_bytes = slots * cache.slot_bytes(model.computed, columns, kv_dtype, model.mesh, rings)
    if pool:
        total_bytes = cache.pool_bytes(model.computed, slots, columns, kv_dtype, pool)
    shards, tensor = row_shards(model.mesh), model.mesh.shape["tensor"]
    config = model.computed
    heads = {1} if config.latent else {config.of(kind).kv_heads for kind in config.kinds}
    parts = shards if slots % shards == 0 else 1
    return total_bytes // (parts * (tensor if all(n % tensor == 0 for n in heads) else 1))


def plan(
    model: Model, slots: int, columns: int, kv_dtype: str = "", pool: Pool | None = None
) -> str:
    """Returns the sizes in one sentence."""
    needed_bytes = slots_bytes(model, slots, columns, kv_dtype, pool)
    dtype = kv_dtype or model.config.dtype
    if pool:
        pages = f"{pool.count} pages of {pool.page_tokens} tokens"
        return f"{slots} slots and {pages} need {human_bytes(needed_bytes)} per device ({dtype})"
    slot_size = cache.slot_bytes(model.computed, columns, kv_dtype, model.mesh)
    return (
        f"{slots} slots of {columns} tokens need {human_bytes(needed_bytes)} per device "
        f"({human_bytes(slot_size)} a slot, {dtype})"
    )


def memory_left(mesh: Mesh) -> tuple[int | None, int]:
    """Returns (the bytes that a device of this host has left, None if it does not say; over how
    many devices they are to be shared)."""
    # A device of another host, or one that is only compiled for, does not report its memory.
    local = [d for d in mesh.devices.flat if d in d.client.local_devices()]
    if not local:
        return None, 1
    # The devices that a CPU pretends to have share its memory.
    return device_bytes(local[0]), len(local) if local[0].platform == "cpu" else 1


def check_memory(
    model: Model,
    slots: int,
    columns: int,
    kv_dtype: str = "",
    pool: Pool | None = None,
    beside: int = 0,
) -> None:
    """Raises InputError if the slots alone are larger than what the devices have left: `beside` of
    them are contiguous even where the others are pages. If one of several hosts raises it, the run
    ends on all of them with its message."""
    cache.check_dtype(model.config, kv_dtype)
    free_bytes, sharing = memory_left(model.mesh)
    needed_bytes = slots_bytes(model, slots - beside, columns, kv_dtype, pool)
    needed_bytes += slots_bytes(model, beside, columns, kv_dtype) if beside else 0
    needed_bytes *= sharing
    if free_bytes is not None and needed_bytes > free_bytes:
        fit = int((pool.count if pool else slots) * free_bytes / needed_bytes)
        raise InputError(
            plan(model, slots, columns, kv_dtype, pool),
            value=f"{human_bytes(free_bytes)} left for {sharing} device(s)",
            fix=f"about {fit} pages, or kv_dtype bfloat16 or int8"
            if pool
            else f"at most {fit} slots, fewer tokens, or kv_dtype bfloat16 or int8",
        )


def slots_that_fit(model: Model, rows: int, columns: int, kv_dtype: str = "") -> int:
    """Returns `rows`, or half, a quarter, ... of them: so many slots that their keys and
    values take at most an eighth of the devices' memory. It follows from the machine and not
    from what else runs there, so that a call meets its compiled program again; all hosts take
    the first one's."""
    local_devices = [d for d in model.mesh.devices.flat if d in d.client.local_devices()]
    capacity = device_capacity(local_devices[0]) if local_devices else None
    slots, shards = rows, row_shards(model.mesh)
    if capacity is not None:
        sharing = len(local_devices) if local_devices[0].platform == "cpu" else 1
        while (
            slots % (2 * shards) == 0
            and 8 * sharing * slots_bytes(model, slots, columns, kv_dtype) > capacity
        ):
            slots //= 2
    return hosts.share(slots)


def model_of_slots(model: Model, tokens: int) -> Model:
    """Returns `of_length` of a model. Raises InputError if its context is shorter than `tokens`."""
    if tokens > model.config.max_tokens:
        rule = f"at most the model's context, {model.config.max_tokens}"
        raise InputError(
            "sampler tokens",
            value=tokens,
            rule=rule,
            fix="lower sampler.max_response_tokens, or data.max_prompt_tokens",
        )
    return of_length(model, tokens)
