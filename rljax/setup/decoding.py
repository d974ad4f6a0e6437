"""Decoding settings of a config: its slots, loop, types, and the layout of its weights."""

import dataclasses

from jax.sharding import Mesh

from rljax.config import Config
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.mesh import row_shards, slice_count
from rljax.models.model import Model
from rljax.sampler import Decoding
from rljax.sampler.layout import check_slices, parsed
from rljax.setup.placement import dividing

# Decode steps of several slices between two looks at which rows have ended: a look waits for the
# data center's network, and so many steps at most decode nothing at the end of a batch.
LOOK_EVERY = 16


def decoding_of(config: Config, tokenizer: Tokenizer, slices: int = 1) -> Decoding:
    """Returns how whole batches are decoded. Raises InputError for a sampler.layout that cannot
    be parsed."""
    sampler = config.sampler
    return Decoding(
        slots=sampler.slots,
        loop="host" if config.environment.function else sampler.loop,  # turns come one by one
        kv_dtype=sampler.kv_dtype,
        decode=tokenizer.decode,  # a suite may have stop strings that the config has not
        dtype=sampler.dtype,
        head_in_float32=sampler.head_in_float32,
        look_every=1 if slices == 1 else LOOK_EVERY,
        layout=parsed(sampler.layout),
        weight_dtype=sampler.weight_dtype,
        page_tokens=sampler.page_tokens,
        draft_tokens=sampler.draft_tokens,
        pages=sampler.pages,
        record_routes=sampler.router_replay,
    )


def decoding_on(
    model: Model, config: Config, tokenizer: Tokenizer, mesh: Mesh | None = None
) -> Decoding:
    """Returns how a run with this model decodes, on a `mesh` of its own if it has one. Raises
    InputError if its layout does not fit the devices or the model."""
    slices = slice_count(model.mesh, config.mesh.slices)
    decoding = decoding_of(config, tokenizer, slices)
    if mesh is not None:
        decoding = dataclasses.replace(decoding, mesh=mesh)
    check_slices(decoding.of(model).mesh, slices)
    return decoding


def check_slots(decoding: Decoding, model: Model, rows: int) -> None:
    """Raises InputError if the slots of `rows` samples do not divide over devices that only sample:
    each of them would decode all."""
    if decoding.mesh is None or not rows:
        return
    slots, shards = decoding.slots or rows, row_shards(decoding.of(model).mesh)
    if slots % shards:
        devices = decoding.mesh.size
        raise InputError(
            f"rollouts.sampler_devices={devices}: {slots} slots do not divide over {shards} parts",
            rule="data x fsdp of sampler.layout splits the slots; without it every device is one",
            fix=f"sampler.slots={max(slots // shards, 1) * shards}, so many devices: "
            f"{dividing(slots, slots)}, or a layout with tensor={devices}",
        )
