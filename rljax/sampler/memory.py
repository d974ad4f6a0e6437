"""Checks that the slots fit on the devices, before anything is allocated."""

from pathlib import Path

import jax

from rljax.errors import InputError
from rljax.mesh import row_shards
from rljax.models import cache
from rljax.models.model import Model
from rljax.tracking.charts import human_bytes


def device_bytes(device: jax.Device) -> int | None:
    """Bytes that the backend may still hand out on a device; on CPU what the host has free. None
    where it does not report them."""
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def slots_bytes(model: Model, slots: int, columns: int, kv_dtype: str = "") -> int:
    """Bytes per device of `slots` slots of `columns` tokens."""
    whole = slots * cache.slot_bytes(model.config, columns, kv_dtype, model.mesh)
    shards, tensor = row_shards(model.mesh), model.mesh.shape["tensor"]
    heads = 1 if model.config.latent else model.config.kv_heads
    split = shards if slots % shards == 0 else 1
    return whole // (split * (tensor if heads % tensor == 0 else 1))


def plan(model: Model, slots: int, columns: int, kv_dtype: str = "") -> str:
    """The sizes in one sentence."""
    each = cache.slot_bytes(model.config, columns, kv_dtype, model.mesh)
    need = slots_bytes(model, slots, columns, kv_dtype)
    return (
        f"{slots} slots of {columns} tokens need {human_bytes(need)} per device "
        f"({human_bytes(each)} a slot, {kv_dtype or model.config.dtype})"
    )


def check_memory(model: Model, slots: int, columns: int, kv_dtype: str = "") -> None:
    """Raises InputError where the slots alone are larger than what the devices have left. A host
    of several that raises it ends the run on all, with its words."""
    cache.check_dtype(kv_dtype)
    # A device of another host, or one that is only compiled for, does not report its memory.
    here = [d for d in model.mesh.devices.flat if d in d.client.local_devices()]
    if not here:
        return
    # The devices that a CPU pretends to have share its memory.
    local = len(here) if here[0].platform == "cpu" else 1
    need = slots_bytes(model, slots, columns, kv_dtype) * local
    have = device_bytes(here[0])
    if have is not None and need > have:
        fit = int(slots * have / need)
        raise InputError(
            plan(model, slots, columns, kv_dtype),
            value=f"{human_bytes(have)} left for {local} device(s)",
            fix=f"at most {fit} slots, fewer tokens, or kv_dtype bfloat16 or int8",
        )
