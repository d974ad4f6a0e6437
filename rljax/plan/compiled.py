"""Reports of one compiled program: bytes, FLOPs, traffic, the time that none can beat, and
warnings.

Reports of programs (rljax.plan.programs) and of the step they make. Numbers are of one device.
"""

import collections
import dataclasses
import math
import re
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.config import Config, as_config, to_dict
from rljax.errors import InputError
from rljax.mesh import slice_count
from rljax.models import padding
from rljax.plan.chips import Chip
from rljax.plan.flops import Product, Work, work
from rljax.plan.hlo import DCN, Collective, traffic
from rljax.plan.host import WallAndCpuSeconds, expected_seconds, process_bytes
from rljax.plan.memory import (
    COPY,
    MemoryEstimate,
    Training,
    available_bytes,
    estimate,
    fewest_microbatches,
    in_flight_parts,
    nearest_fit,
    training_bytes,
    zero_stages,
)
from rljax.plan.programs import RESHARD, ProgramCall, programs_of
from rljax.sampler.layout_cost import LayoutCost
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup
from rljax.setup.decode_layout import decode_costs, free_bytes, samples
from rljax.setup.held import KEPT_COPY, held_bytes, held_parts, of_mesh
from rljax.setup.placement import SAMPLER, sampler_mesh

LARGE = 2**26  # bytes from which an array that every device holds whole is worth a warning
# The TPU compiler's messages about a program that needs too much memory.
_OVER = (
    re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm"),
    re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \([\d.]+[KMGT]\)"),
)
_UNIT = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass
class Report:
    """Figures of one program. `beside`: bytes that the run holds and the program does not read;
    `total` includes them. `seconds`: the least time by each limit, "compute", "HBM", "ICI ..."
    and "DCN". `error`: the compiler's reason for refusing it. `instead`: True for a program
    that no step of the run calls. `expected`: measured seconds of its products and of
    everything else (rljax.plan.host)."""

    name: str
    compile_s: float
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    code: int = 0
    host: int = 0
    beside: int = 0
    parts: dict[str, int] = dataclasses.field(default_factory=dict)  # of the arguments, by role
    trips: int = 1
    flops: float = 0.0
    products: dict[Product, float] = dataclasses.field(default_factory=dict)  # of all devices
    kernel_flops: float = 0.0
    hbm_bytes: float = 0.0
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    expected: dict[str, WallAndCpuSeconds] = dataclasses.field(default_factory=dict)
    error: str = ""
    needs: int = 0  # of a refused one, where the compiler reports it
    instead: bool = False

    @property
    def total(self) -> int:
        """Bytes of a device at the peak of this program."""
        peak = self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        return self.beside + (self.needs or peak)

    @property
    def binding(self) -> str:
        """Name of the limit that takes the most seconds, "" where none is known."""
        return max(self.seconds, key=self.seconds.get) if self.seconds else ""

    @property
    def least_s(self) -> float:
        """Seconds with everything overlapped: as long as the slowest part alone."""
        return max(self.seconds.values(), default=0.0)

    @property
    def expected_s(self) -> float:
        """Seconds by the clock on this host's processors; 0 where they were not measured."""
        return sum(duration.wall for duration in self.expected.values())

    @property
    def expected_cpu_s(self) -> float:
        """Seconds of this host's processors; 0 where they were not measured."""
        return sum(duration.cpu for duration in self.expected.values())


@dataclasses.dataclass
class Plan:
    """The plan of a config on some devices. `left`: free bytes of a device of this host, where the
    chip is unknown; `nearest`: {config field: value} with which an estimate that is too large fits.
    `stages` and `training` compare the mesh of the config to ZeRO over all devices. The
    `host_devices` devices of a host share its network to other slices."""

    topology: str
    mesh: dict[str, int]
    chip: Chip | None
    estimate: MemoryEstimate
    reports: list[Report]
    config: dict
    left: int | None = None
    nearest: dict[str, object] = dataclasses.field(default_factory=dict)
    weights: int = 0  # of the trained model
    stages: dict[int, Training] = dataclasses.field(default_factory=dict)  # by ZeRO stage
    microbatch_tokens: int = 0  # that batch.tokens_per_microbatch=0 came to; 0 = it says so itself
    # Mesh sizes of the groups of config.placement.
    groups: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    training: Training | None = None  # what training that model takes in this config
    slices: int = 1
    host_devices: int = 1
    # Of decoding, by the counts of rljax.sampler.layout_cost, the fastest first; and what a device
    # has left for it.
    layouts: list[LayoutCost] = dataclasses.field(default_factory=list)
    decode_mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    free: float = 0.0
    process_bytes: int = 0  # of this process beside arrays, where programs run in the host's memory
    padding: str = ""  # what the mesh does not divide, and what it computes in its place

    @property
    def run(self) -> list[Report]:
        """Reports of the programs of a step."""
        return [r for r in self.reports if not r.instead]

    @property
    def limit(self) -> float | None:
        """Bytes that a device has; None where it does not report them."""
        return self.chip.hbm_bytes if self.chip else self.left

    @property
    def total(self) -> int:
        """Bytes of a device at the peak of a step: by the compiler, or else by the estimate."""
        return max(r.total for r in self.run) if self.run else self.estimate.total

    @property
    def fits(self) -> bool:
        """Returns whether every device holds the run, and no program was refused."""
        peaks = [self.total, *(sum(parts.values()) for parts in self.estimate.groups.values())]
        fits_limit = self.limit is None or max(peaks) <= self.limit
        return fits_limit and not any(r.error for r in self.run)

    @property
    def expected_s(self) -> float:
        """Seconds of a step on this host's processors; 0 where they were not measured."""
        return sum(r.expected_s for r in self.run if r.name != "sft")

    @property
    def expected_cpu_s(self) -> float:
        """Seconds of this host's processors for a step; 0 where they were not measured."""
        return sum(r.expected_cpu_s for r in self.run if r.name != "sft")

    @property
    def least_s(self) -> float:
        """Least seconds of a step: its programs one after the other, or with devices that only
        sample learning beside the others."""
        seconds = {r.name: r.least_s for r in self.run if r.name != "sft"}
        if SAMPLER in self.groups:
            learning = seconds.pop("learn", 0.0)
            return max(learning, sum(seconds.values()))
        return sum(seconds.values())


def make_plan(
    config: Config,
    devices,
    chip: Chip | None,
    topology: str,
    *,
    compile: bool = True,
    only=(),
    measure: bool = False,
) -> Plan:
    """Returns the plan of `config` on `devices`.

    Args:
        compile: False: the estimate alone.
        only: names of the programs to compile; () = all.
        measure: whether to measure seconds on this host's own processors (rljax.plan.host).

    Raises InputError for a name in `only` that is no program."""
    config = as_config(config, "make_plan")
    setup = abstract_setup(config, devices)
    mesh, reports, roles = setup.model.mesh, [], abstract_roles(setup)
    slices = slice_count(mesh, config.mesh.slices)
    setup = fewest_microbatches(setup, chip and chip.hbm_bytes, roles)
    if compile:
        calls, resident = programs_of(setup, roles), of_mesh(mesh, held_parts(setup, roles))
        names, in_flight = [call.name for call in calls], in_flight_parts(setup, roles)
        if unknown := set(only) - set(names):
            rule, fix = ", ".join(names), "name programs of these, or leave the option out"
            raise InputError("no such program", value=sorted(unknown), rule=rule, fix=fix)
        separate = sampler_mesh(setup.groups) is not None
        for call in calls:
            if not only or call.name in only:
                flown = in_flight if call.name == "learn" else {}
                parts = {} if call.mesh is not None and separate else resident | flown
                reports.append(report(call, parts, call.mesh or mesh, chip, slices))
    sizes = {name: n for name, n in mesh.shape.items() if n > 1}
    on_cpu = mesh.devices.flat[0].platform == "cpu" and chip is None
    host_bytes = process_bytes() if on_cpu and reports else 0
    if measure and on_cpu:
        for result in reports:
            result.expected = expected_seconds(result.products, result.hbm_bytes * mesh.size)
    available = available_bytes(setup) if chip is None else None
    plan = Plan(topology, sizes, chip, estimate(setup, roles), reports, to_dict(config), available)
    plan.process_bytes = host_bytes
    for group in setup.groups:
        plan.groups[group.name] = {name: n for name, n in group.mesh.shape.items() if n > 1}
    plan.padding = padding.described(setup.model.config, mesh.shape["tensor"])
    plan.slices, hosts = slices, {device.process_index for device in mesh.devices.flat}
    plan.host_devices = mesh.size // len(hosts)
    if chip is not None and samples(setup):
        plan.layouts = decode_costs(setup, chip, roles)
        plan.free = free_bytes(setup, chip, roles)
        plan.decode_mesh = dict(setup.decoding.of(setup.model).mesh.shape)
    if not config.batch.tokens_per_microbatch:
        plan.microbatch_tokens = setup.algorithm.steps.microbatch_rows * setup.row_tokens
    if trained := roles.get(setup.main.trains):  # a dataflow may train roles of the user's alone
        plan.weights = sum(math.prod(shape) for shape, _ in trained.model.shapes().values())
        plan.stages = zero_stages(plan.weights, mesh.size)
        plan.training = training_bytes(trained)
    if plan.limit is not None and plan.estimate.total > plan.limit:
        changes, total = nearest_fit(setup, plan.limit)
        plan.nearest = changes if total <= plan.limit else {}
    return plan


def report(call: ProgramCall, held: dict, mesh: Mesh, chip: Chip | None, slices: int = 1) -> Report:
    """Returns the report of one program, compiled for the devices of `mesh` and not run. `held`:
    the parts that the run holds from start to end (rljax.plan.memory.held_parts)."""
    if call.copy is not None or call.name.startswith(RESHARD):  # it makes or reads all of the copy
        held = {name: tree for name, tree in held.items() if name != KEPT_COPY}
    platform, start = mesh.devices.flat[0].platform, time.perf_counter()
    unread_bytes, parts = _held(call, held)
    out = Report(
        call.name, 0.0, beside=unread_bytes, parts=parts, trips=call.trips, instead=call.instead
    )
    traced = call.function.trace(*call.arguments, **call.static)
    lowered = traced.lower()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Ran out of memory" not in str(error):
            raise
        out.error, out.needs = _refusal(str(error))
        return out
    finally:
        out.compile_s = time.perf_counter() - start
    memory = program.memory_analysis()
    out.arguments, out.outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    out.aliased, out.temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    out.code = memory.generated_code_size_in_bytes
    out.host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    transfers = traffic(program.as_text(), mesh, call.trips, slices)
    operations = work(traced.jaxpr, trips=call.trips, platform=platform)
    out.flops, out.kernel_flops = operations.flops / mesh.size, operations.kernel_flops / mesh.size
    out.hbm_bytes = transfers.hbm_bytes + operations.kernel_bytes / mesh.size
    out.sent_bytes, out.products = transfers.by_axis(), operations.products
    if chip is not None:
        out.seconds = roofline(operations, out.hbm_bytes, out.sent_bytes, mesh, chip)
    out.warnings += lost_donations(lowered, program) + crossings(transfers.collectives)
    if call.copy is not None:  # a layout may hold it whole on every device: that is its choice
        out.warnings += needless_gathers(transfers.collectives, {"actor weights": call.copy})
    elif not call.name.startswith(RESHARD):
        out.warnings += replicated_arrays(call) + needless_gathers(transfers.collectives, held)
    return out


def _refusal(text: str) -> tuple[str, int]:
    """(the line of the compiler's message that says why, the bytes it asks for or 0)."""
    match = next(filter(None, (pattern.search(text) for pattern in _OVER)), None)
    needs = int(float(match[1]) * _UNIT[match[2]]) if match else 0
    message = next((line for line in text.splitlines() if match and match[0] in line), text)
    return message.splitlines()[0], needs


def _held(call: ProgramCall, resident: dict) -> tuple[int, dict[str, int]]:
    """(bytes that the run holds and this program does not read, bytes that it reads by part)."""
    argument_ids = {id(x) for x in jax.tree.leaves(call.arguments)}
    unread_bytes, parts = 0, {}
    for name, tree in resident.items():
        leaves = jax.tree.leaves(tree)
        read_leaves = [x for x in leaves if id(x) in argument_ids]
        unread_bytes += held_bytes([x for x in leaves if id(x) not in argument_ids])
        if read_leaves:
            parts[name] = held_bytes(read_leaves)
    if call.copy is not None:
        parts[COPY] = held_bytes(call.copy)
    return unread_bytes, parts


def roofline(done: Work, hbm: float, sent: dict, mesh: Mesh, chip: Chip) -> dict[str, float]:
    """Returns seconds by each limit: products at the rate of bfloat16 (float32 ones take more
    passes), bytes of HBM, what is sent along each mesh axis over the two links of one ring, and
    what is sent to other slices over a device's share of its host's network."""
    out = {"compute": done.passes / mesh.size / chip.flops_per_s}
    out["HBM"] = hbm / chip.hbm_bytes_per_s
    for axes, size in sent.items():
        if axes != DCN:
            out[f"ICI {axes}"] = size / (2 * chip.link_bytes_per_s)
        elif chip.dcn_bytes_per_s:
            out[DCN] = size / chip.dcn_bytes_per_s
    return out


# -- what looks wrong


def replicated_arrays(call: ProgramCall) -> list[str]:
    """Returns warnings of arguments of LARGE bytes that every device of several holds whole."""
    warnings = []
    for path, x in jax.tree_util.tree_leaves_with_path(call.arguments):
        layout = getattr(x, "sharding", None)
        if layout is None or layout.num_devices == 1 or not layout.is_fully_replicated:
            continue
        if (size := held_bytes([x])) >= LARGE:
            name = jax.tree_util.keystr(path)
            warnings.append(f"{name} {x.shape}, {size / 2**20:.0f} MiB, is whole on every device")
    return warnings


def lost_donations(lowered, program) -> list[str]:
    """Returns warnings of donated arguments whose memory no output took: each is held twice."""
    memory = program.memory_analysis()
    aliased = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes

    def size(info, layout) -> int:
        if not info.donated or layout is None:  # None: the program does not read it
            return 0
        return math.prod(layout.shard_shape(info.shape)) * jnp.dtype(info.dtype).itemsize

    sizes = jax.tree.map(size, lowered.args_info, program.input_shardings)
    donated = sum(jax.tree.leaves(sizes))
    if aliased >= 0.9 * donated:
        return []
    return [
        f"of {donated / 2**20:.0f} MiB of donated arguments {aliased / 2**20:.0f} MiB are written "
        "in place: the rest is held twice"
    ]


def needless_gathers(collectives: list[Collective], held: dict) -> list[str]:
    """Returns warnings of gathers that another layout would spare: of a weight at every step of
    decoding, and of all layers of a stack at once."""
    weights = held.get("actor base") or held.get("actor weights")  # of adapters the base is large
    if weights is None or "layers" not in weights:
        return []
    leaves = jax.tree_util.tree_leaves_with_path(weights["layers"])
    matrices = [x for path, x in leaves if not jax.tree_util.keystr(path).endswith("['bias']")]
    stacked = [x for x in matrices if len(x.shape) > 2]
    if not stacked:
        return []
    least_bytes = min(x.size // x.shape[0] for x in stacked) * 2  # of one layer, in bfloat16
    tensor = next(iter(stacked)).sharding.mesh.shape["tensor"]
    stacks = [2 * x.size // tensor for x in stacked if x.shape[0] > 1]
    times: collections.Counter[tuple] = collections.Counter()
    for gather in collectives:
        if gather.op not in ("all-gather", "all-to-all"):
            continue
        if gather.in_open_loop and gather.result_bytes >= least_bytes // tensor:
            kind = "every step of decoding gathers"
        elif gather.trips == 1 and any(gather.result_bytes >= stack for stack in stacks):
            kind = "all layers are gathered at once:"
        else:
            continue
        times[kind, gather.axes, gather.result_bytes, gather.of] += 1
    largest = sorted(times.items(), key=lambda x: -x[0][2] * x[1])[:8]
    return [
        f"{kind} {count} x {size / 2**20:.1f} MiB along {' x '.join(axes)} ({source})"
        for (kind, axes, size, source), count in largest
    ]


def crossings(collectives: list[Collective]) -> list[str]:
    """Returns warnings of traffic to other slices that another layout would spare. A step should
    send them only the sum of its gradients over data, and scalars; in a loop every iteration would
    wait for the network."""
    loops: dict[str, list[Collective]] = {}
    warnings = []
    for collective in collectives:
        # The condition of a loop runs once more than its body.
        if collective.dcn_bytes and collective.trips > 2:
            label = f"each of {collective.trips:.0f} iterations"
            label = "every step of decoding" if collective.in_open_loop else label
            loops.setdefault(label, []).append(collective)
        elif collective.dcn_bytes >= LARGE / 64 and (
            collective.op != "all-reduce" or set(collective.axes) - {"data"}
        ):
            axis_text = f" along {' x '.join(collective.axes)}" if collective.axes else ""
            size = f"{collective.dcn_bytes / 2**20:.1f} MiB"
            warnings.append(f"{collective.op}{axis_text} crosses {DCN}: {size} ({collective.of})")
    for label, members in loops.items():
        size = sum(collective.dcn_bytes for collective in members) / 2**20
        largest = max(members, key=lambda collective: collective.dcn_bytes).of
        times = f"{len(members)} times" if len(members) > 1 else "once"
        warnings.append(f"{label} crosses {DCN} {times}, {size:.3g} MiB (most: {largest})")
    return warnings
