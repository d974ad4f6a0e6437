"""The run of a config in simulation: its load, its seconds, the bounds and splits to compare."""

import dataclasses

import numpy as np

from rljax.chips import Chip
from rljax.components import resolve
from rljax.config import Config
from rljax.config.run_options import PlanOptions
from rljax.errors import InputError
from rljax.mesh import make_mesh, row_shards
from rljax.plan.expected import Expected, drawn_lengths, expect, modes
from rljax.plan.memory import estimate, fewest_microbatches
from rljax.plan.seconds import counted, learning_passes, measured
from rljax.plan.simulate import Draw, Load, Seconds
from rljax.rollout.flight import Clock
from rljax.sampler import Decoding
from rljax.setup import Setup, abstract_roles
from rljax.setup.abstract import abstract_setup
from rljax.setup.decode_layout import decode_costs, samples, workload

_EIGHTHS = range(1, 8)  # of the devices, that sample in a split


def draw_of(text: str, flag: str) -> Draw:
    """Returns the draw that a flag names. Raises InputError that names the flag."""
    try:
        component = resolve(text, "rljax.plan.draws")
        numbers = np.asarray(component(np.random.default_rng(0), 8), float)
    except (InputError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"--{flag}",
            value=text,
            rule=str(error),
            fix="such as 'lognormal(mean=2500, sigma=0.9, cap=8192)', 'geometric(mean=33, "
            "cap=128)', 'uniform(low=1, high=4)', 'fixed(value=100)'",
        ) from None
    if numbers.shape != (8,) or not np.isfinite(numbers).all() or numbers.min() <= 0:
        fix = f"--{flag}='lognormal(mean=2500, sigma=0.9, cap=8192)', or other positive numbers"
        raise InputError(f"--{flag}", value=text, rule="draws that are finite and above 0", fix=fix)
    return component


def simulated(
    config: Config, devices, chip: Chip | None, topology: str, options: PlanOptions
) -> Expected:
    """Simulates the run of `config` on `devices` at the bounds of --etas, on one mesh and split.
    Raises InputError for a dataflow that does not sample, and where no seconds are given or
    known of the chip."""
    setup = abstract_setup(config, devices)
    if not samples(setup):
        rule, fix = "a dataflow that samples", "--config.dataflow=grpo, or leave --simulate out"
        raise InputError("--simulate", value=config.dataflow, rule=rule, fix=fix)
    load, description = _load(setup, options)
    lengths = drawn_lengths(load.lengths) if load.turns is None else _whole(load)
    seconds, source = _given(options, len(devices))
    if not seconds and chip is None:
        problem = "--simulate needs the seconds of decoding and learning"
        rule = "the figures of this device are not known"
        fix = "--topology=v5p:4x4x4, --measured=RUN_DIR, or --decode_step_s and --learn_s"
        raise InputError(problem, value=topology, rule=rule, fix=fix)
    if not seconds:
        seconds, source = _of_chip(setup, chip, lengths), f"of {topology}, the least by the chip's "
        source += "published figures: not validated, nothing was measured on one"
    bounds = config.rollouts.max_staleness, config.rollouts.steps_ahead
    with_host = {
        split: dataclasses.replace(times, dispatch_s=times.dispatch_s + options.dispatch_s)
        for split, times in seconds.items()
    }
    compared = modes(options.etas, bounds, [split for split in with_host if split])
    rows = expect(load, with_host, compared)
    return Expected(load, with_host, source, len(devices), description, rows)


def _load(setup: Setup, options: PlanOptions) -> tuple[Load, str]:
    """Returns the load of the config with the lengths of the flags, and a description of them."""
    base, max_tokens = workload(setup), setup.rollouts.sampling.max_response_tokens
    draw = draw_of(options.lengths, "lengths")

    def lengths(rng, count: int) -> np.ndarray:
        return np.minimum(draw(rng, count), max_tokens)

    turns = draw_of(options.turns, "turns") if options.turns else None
    tools = draw_of(options.tools, "tools") if options.tools else None
    mean = drawn_lengths(lengths).mean()
    unit = "turns" if turns else "responses"
    description = f"{unit} {options.lengths}, at most {max_tokens} tokens: mean {mean:.4g}"
    if turns:
        description += f"; {options.turns} turns"
    if tools:
        description += f"; tools {options.tools} seconds"
    clock = Clock.parsed(setup.config.rollouts.clock)
    slots = base.slots(setup.decoding)
    extras = dict(turns=turns, tools=tools, score_dispatches=clock.dispatches)
    return Load(base.prompts, base.samples, slots, lengths, **extras), description


def _whole(load: Load) -> np.ndarray:
    """Tokens of whole episodes."""
    rng = np.random.default_rng(0)
    turns = np.ceil(load.turns(rng, 2000)).astype(int)
    return np.array([np.ceil(load.lengths(rng, count)).sum() for count in turns])


def _given(options: PlanOptions, devices: int) -> tuple[dict[int, Seconds], str]:
    """Returns the seconds that flags or a run give, and a text about where they come from; {} where
    neither gives any. A split is taken to be slower in proportion to its devices."""
    if options.measured:
        base, source = measured(options.measured), f"measured in {options.measured}"
    elif options.learn_s is not None:
        idle = options.decode_step_s if options.decode_idle_s is None else options.decode_idle_s
        base, source = Seconds(options.decode_step_s, idle, options.learn_s), "as the flags say"
    else:
        return {}, ""
    out = {0: base}
    for split in _splits(devices):
        slower = devices / split
        out[split] = dataclasses.replace(
            base,
            step_s=slower * base.step_s,
            idle_s=slower * base.idle_s,
            learn_s=devices / (devices - split) * base.learn_s,
        )
    return out, source + (", in proportion to the devices where they are split" * (len(out) > 1))


def _splits(devices: int) -> list[int]:
    return sorted({devices * n // 8 for n in _EIGHTHS} - {0, devices})


def _of_chip(setup: Setup, chip: Chip, lengths: np.ndarray) -> dict[int, Seconds]:
    """Returns the seconds counted for one mesh, and for every split of it whose devices hold what
    they have to. Learning is slower in proportion to the devices that are left to it, whether or
    not a mesh of so many divides its batch."""
    roles = abstract_roles(setup)
    setup = fewest_microbatches(setup, chip.hbm_bytes, roles)
    passes, devices = learning_passes(setup), list(setup.model.mesh.devices.flat)
    out = {0: counted(setup, chip, passes, lengths)}
    needs = estimate(setup, roles)
    training = needs.resident + sum(needs.learn.values())
    for split in _splits(len(devices)):
        slower = len(devices) / (len(devices) - split)
        sampling = _sampling(setup, devices[-split:], chip, roles)
        if sampling is not None and slower * training <= chip.hbm_bytes:
            times = counted(dataclasses.replace(setup, decoding=sampling), chip, passes, lengths)
            out[split] = dataclasses.replace(times, learn_s=slower * times.learn_s)
    return out


def _sampling(setup: Setup, devices: list, chip: Chip, roles: dict) -> Decoding | None:
    """Decoding on devices that do nothing else, in the fastest layout that splits their slots and
    fits; None where there is none."""
    mesh = make_mesh(len(devices), 1, slices=1, devices=devices)
    decoding = dataclasses.replace(setup.decoding, layout=None, mesh=mesh)
    slots = workload(setup).slots(decoding)
    for cost in decode_costs(dataclasses.replace(setup, decoding=decoding), chip, roles):
        candidate = dataclasses.replace(decoding, layout=cost.layout)
        splits = slots % row_shards(candidate.of(setup.model).mesh) == 0
        if splits and cost.most_bytes <= chip.hbm_bytes:
            return candidate
    return None
