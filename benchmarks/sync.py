"""Costs and savings of decoding in another layout than training's: prints JSON.

python benchmarks/sync.py [--train="mesh(fsdp=8)"] [--decode="mesh(data=4, tensor=2)"]
    [--weight_dtype=] [--rows=64] [--new=32] [--repeats=5] [--layers=4] [--embed=256]

One rollout of a step, after an update that made new weights, in three ways, taken in turns:
colocated (decoding reads training's own arrays), resharded (one program brings them to the layout
of decoding on the devices), naive (they are fetched to the host and put to the devices in that
layout, as between a trainer and an engine that know nothing of each other). Seconds of the
synchronisation and of the rollout with it (median, least and most), bytes of the synchronisation:
those that are written on the devices, all of them together, and those that pass through the host.
Ratios compare medians with colocated and with naive. Without accelerators there are eight virtual
devices of the CPU, whose exchanges are copies in its memory: no wire is measured there.
"""

import argparse
import json
import os
import statistics
import sys
import time

if "jax" not in sys.modules:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Decoding, Sampling, generate, held_weights
from rljax.sampler.layout import copied_bytes, parsed
from rljax.tracking.timing import collect

PROMPT, GROUP = 32, 8


def colocated(model, params, decoding):
    """Returns (the model that decodes, its weights, bytes written on devices, bytes through the
    host)."""
    training_decoding = Decoding()
    return training_decoding.of(model), training_decoding.weights(model, params), 0, 0


def resharded(model, params, decoding):
    with collect() as timings, held_weights():
        weights = decoding.weights(model, params)
    return decoding.of(model), weights, timings.synced_bytes, 0


def naive(model, params, decoding):
    """Moves the weights in the type of training: an engine of its own narrows them where they
    arrive."""
    target = Decoding(layout=decoding.layout).of(model)
    host = jax.device_get(params)
    weights = jax.block_until_ready(jax.tree.map(jax.device_put, host, target.shardings()))
    written = copied_bytes(target.abstract())
    return target, weights, written, written + sum(x.nbytes for x in jax.tree.leaves(host))


WAYS = (colocated, resharded, naive)


def measured(model: Model, decoding: Decoding, *, rows: int, new: int, repeats: int) -> dict:
    """Returns {way: {sync_s, rollout_s, written_bytes, host_bytes}}, a list of `repeats` numbers
    each."""
    params, key = model.init(jax.random.key(0)), jax.random.key(1)
    update = jax.jit(lambda p: jax.tree.map(lambda x: x * 0.999, p), donate_argnums=0)
    tokens = np.random.default_rng(0).integers(2, 64, (rows // GROUP, PROMPT)).astype(np.int32)
    lengths, sampling = np.full(len(tokens), PROMPT, np.int32), Sampling(max_response_tokens=new)
    rounds: dict = {way.__name__: [] for way in WAYS}
    for turn in range(repeats + 1):
        for way in WAYS:
            params = jax.block_until_ready(update(params))
            started = time.perf_counter()
            target, weights, written, host_bytes = way(model, params, decoding)
            synced = time.perf_counter()
            jax.block_until_ready(
                generate(target, weights, tokens, lengths, key, sampling, n=GROUP)
            )
            ended = time.perf_counter()
            if turn:  # the first one compiles
                costs = dict(sync_s=synced - started, rollout_s=ended - started)
                costs |= dict(written_bytes=written, host_bytes=host_bytes)
                rounds[way.__name__].append(costs)
    return {
        name: {field: [costs[field] for costs in laps] for field in laps[0]}
        for name, laps in rounds.items()
    }


def summary(laps: dict) -> dict:
    """Returns medians with least and most, and the ratios of medians."""

    def spread(x):
        return [round(f(x), 5) for f in (statistics.median, min, max)]

    figures = {
        name: {
            field: spread(values) if field.endswith("_s") else values[-1]
            for field, values in fields.items()
        }
        for name, fields in laps.items()
    }

    def median(name, field):
        return statistics.median(laps[name][field])

    def share(a, b, field):
        return round(median(a, field) / median(b, field), 4)

    sent = {
        name: figures_of_way["written_bytes"] + figures_of_way["host_bytes"]
        for name, figures_of_way in figures.items()
    }
    figures["ratios"] = {
        "rollout: resharded / colocated": share("resharded", "colocated", "rollout_s"),
        "rollout: naive / colocated": share("naive", "colocated", "rollout_s"),
        "rollout: naive / resharded": share("naive", "resharded", "rollout_s"),
        "sync: naive / resharded": share("naive", "resharded", "sync_s"),
        "bytes: naive / resharded": round(sent["naive"] / max(sent["resharded"], 1), 3),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", default="mesh(fsdp=8)")
    parser.add_argument("--decode", default="mesh(data=4, tensor=2)")
    parser.add_argument("--weight_dtype", default="")
    sizes = dict(rows=64, new=32, repeats=5, layers=4, embed=256)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    devices = make_mesh()
    mesh = parsed(options.train).mesh(devices)
    config = decoder(
        4096,
        layers=options.layers,
        embed=options.embed,
        mlp=3 * options.embed,
        heads=8,
        kv_heads=4,
        head_dim=options.embed // 8,
    )
    decoding = Decoding(layout=parsed(options.decode), weight_dtype=options.weight_dtype)
    sizes_of_run = dict(rows=options.rows, new=options.new, repeats=options.repeats)
    figures = summary(measured(Model(config, mesh), decoding, **sizes_of_run))
    print(json.dumps({"settings": vars(options), "load": os.getloadavg()[0], **figures}, indent=1))


if __name__ == "__main__":
    main()
