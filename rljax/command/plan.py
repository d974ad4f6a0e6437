"""Plan: rljax plan ppo_llama3_8b --topology=v5p:4x4x4

Compiles the config's own programs for a TPU that need not be there (`pip install "jax[tpu]"`), or
without --topology for the devices of this host, from shapes alone: no weights, data or tokenizer
are read. Prints bytes per device, FLOPs, traffic by mesh axis, the least time by each limit, and
what looks wrong; exit code 1 where it does not fit. --search tries other meshes, remat policies and
microbatches. --nocompile counts memory from shapes in a second, and needs no `jax[tpu]`. --simulate
plays the run by its dispatches, compiling nothing: seconds of a step by rollouts.max_staleness, on
one mesh and split, and how old the tokens are (docs/guides/asynchronous.md).
"""

from pathlib import Path

from rljax.command.launch import ConfigSource
from rljax.config.checks import refuse_early
from rljax.config.run_options import PlanOptions
from rljax.errors import InputError
from rljax.files import write_json


def main(options: PlanOptions, source: ConfigSource) -> int:
    """Prints the plan; returns the exit code. Raises InputError for a --json file in no folder, and
    for --search on a chip without known figures."""
    refuse_early(source.config)
    if options.json and not Path(options.json).absolute().parent.is_dir():  # before the compiles
        raise InputError("--json", value=options.json, rule="no such folder", fix="make it first")
    import jax  # only now: a mistyped path is answered without loading JAX

    if options.topology:  # nothing runs on a device of this host
        jax.config.update("jax_platforms", "cpu")
    from rljax.plan import alternatives, chips, compiled, expected, simulated, table
    from rljax.validation import validate_sizes

    config, topology = source.config, options.topology
    validate_sizes(config)
    if topology and not options.simulate and (options.compile or options.search):
        # Programs for chips that are not there cannot be read back from the cache on disk.
        jax.config.update("jax_enable_compilation_cache", False)
        devices, chip = chips.topology_devices(topology)
    else:
        devices, chip = chips.stand_ins(topology) if topology else chips.local_devices()
    topology = topology or f"{len(devices)} x {devices[0].device_kind}"
    if options.simulate:
        outcome = simulated.simulated(config, devices, chip, topology, options)
        print(expected.expected_text(outcome))
        result, fits = expected.expected_json(outcome), True
    elif options.search:
        if chip is None:
            raise InputError("--search needs a chip whose figures are known", fix="--topology=...")
        limits = dict(compiles=options.compiles, seconds=options.seconds, only=options.programs)
        candidates, tried, remaining = alternatives.fitting_candidates(
            config, devices, chip, topology, **limits
        )
        print(table.candidates_text(candidates, tried, remaining))
        result = [
            {"changes": candidate.changes, **table.plan_json(candidate.plan)}
            for candidate in candidates
        ]
        fits = bool(candidates)
    else:
        measure = not options.topology
        choices = dict(compile=options.compile, only=options.programs, measure=measure)
        plan = compiled.make_plan(config, devices, chip, topology, **choices)
        print(table.plan_text(plan))
        result, fits = table.plan_json(plan), plan.fits
    if options.json:
        write_json(options.json, result)
    return 0 if fits else 1
