"""Plan: python launchers/plan.py --config=configs/ppo_llama3_8b.py --topology=v5p:4x4x4

Compiles the config's own programs for a TPU that need not be there (`pip install "jax[tpu]"`), or
without --topology for the devices of this host, from shapes alone: no weights, data or tokenizer
are read. Prints bytes per device, FLOPs, traffic by mesh axis, the least time by each limit, and
what looks wrong; exit code 1 where it does not fit. --search tries other meshes, remat policies and
microbatches. --nocompile counts memory from shapes in a second.
"""

import json
from pathlib import Path

from absl import flags

from rljax.config import flags as launch

_TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Such as v5e:2x4, v5p:4x4x4, v6e:2x4; default: the devices of this host"
)
_JSON = flags.DEFINE_string("json", "", "Where everything is written as JSON")
_PROGRAMS = flags.DEFINE_list("programs", [], "Compile these alone: sft, generate, learn, ...")
_COMPILE = flags.DEFINE_bool("compile", True, "Compile; else the estimate from shapes alone")
_SEARCH = flags.DEFINE_bool("search", False, "Try other meshes, remat and tokens_per_microbatch")
_COMPILES = flags.DEFINE_integer("compiles", 8, "Of --search: how many configs are compiled")
_SECONDS = flags.DEFINE_float("seconds", 3600.0, "Of --search: no compile begins after so many")


def main(_: list[str]) -> int:
    import jax  # after the flags: --help answers without loading JAX

    if _TOPOLOGY.value:  # nothing runs on a device of this host
        jax.config.update("jax_platforms", "cpu")
        # What is compiled for chips that are not there cannot be read back from the cache on disk.
        jax.config.update("jax_enable_compilation_cache", False)
    from rljax.errors import InputError
    from rljax.plan import chips, compiled, search, table
    from rljax.validation import validate_sizes

    config = launch.parsed_config()
    validate_sizes(config)
    if _JSON.value and not Path(_JSON.value).absolute().parent.is_dir():  # said before the compiles
        raise InputError("--json", value=_JSON.value, rule="no such folder", fix="make it first")
    topology = _TOPOLOGY.value
    devices, chip = chips.topology_devices(topology) if topology else chips.local_devices()
    topology = topology or f"{len(devices)} x {devices[0].device_kind}"
    only = tuple(_PROGRAMS.value)
    if _SEARCH.value:
        if chip is None:
            raise InputError("--search needs a chip whose figures are known", fix="--topology=...")
        limits = dict(compiles=_COMPILES.value, seconds=_SECONDS.value, only=only)
        found, tried, left = search.search(config, devices, chip, topology, **limits)
        print(table.search_text(found, tried, left))
        out = [{"changes": one.changes, **table.plan_json(one.plan)} for one in found]
        fits = bool(found)
    else:
        options = dict(compile=_COMPILE.value, only=only)
        plan = compiled.make_plan(config, devices, chip, topology, **options)
        print(table.plan_text(plan))
        out, fits = table.plan_json(plan), plan.fits
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(out, indent=2) + "\n")
    return 0 if fits else 1


if __name__ == "__main__":
    launch.run(main)
