"""A plan as text for people and as JSON for programs."""

import dataclasses
import functools
import operator

from rljax.plan.alternatives import Candidate
from rljax.plan.compiled import Plan, Report
from rljax.plan.hlo import DCN
from rljax.plan.memory import COPY, KV, as_flags
from rljax.plan.programs import RESHARD
from rljax.runs.units import human_bytes, human_count
from rljax.sampler.layout_cost import LATENCY_S
from rljax.setup.placement import SAMPLER

GIB = 2**30
LAYOUTS = 6  # of decoding that are shown, beside training's own and the chosen one


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def seconds_text(value: float) -> str:
    """Returns seconds as text, in ms below one."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def rows_text(rows: list[list[str]]) -> list[str]:
    """Returns cells in columns, the first aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _mesh(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {n}" for name, n in sizes.items()) or "one device"


def plan_text(plan: Plan) -> str:
    """Returns every program of a plan, and their sum, as text."""
    limit = f", {_gib(plan.limit)} GiB {'each' if plan.chip else 'left'}" if plan.limit else ""
    lines = [
        f"{plan.topology}{limit}; mesh {_mesh(plan.mesh)}",
        f"estimate: {plan.estimate.line()}",
    ]
    if plan.padding:
        lines.append(f"padding: {plan.padding}")
    if plan.groups:
        lines += ["", *_groups(plan)]
    if plan.training:
        lines += ["", *_training(plan)]
    if plan.layouts:
        lines += ["", *_layouts(plan)]
    if plan.reports:
        lines += ["", "GiB per device", *_memory(plan)]
        lines += ["", "per device and run of the program", *_costs(plan), *_between_slices(plan)]
        lines += _resharding(plan)
    lines += [f"error: {r.name}: {r.error}" for r in plan.reports if r.error]
    lines += [f"warning: {r.name}: {text}" for r in plan.reports for text in r.warnings]
    return "\n".join([*lines, *_on_host(plan), "", _summary(plan)])


def _on_host(plan: Plan) -> list[str]:
    """Memory of the process and seconds of a step on this host's own processors."""
    if not plan.process_bytes:
        return []
    lines = [
        f"the process at its peak {human_bytes(plan.process_bytes + plan.total)}, of which "
        f"{human_bytes(plan.process_bytes)} are the interpreter, libraries and compiled code"
    ]
    for r in plan.reports:
        if r.expected:
            parts = ", ".join(f"{name} {seconds_text(s.wall)}" for name, s in r.expected.items())
            lines.append(f"{r.name}: about {seconds_text(r.expected_s)} ({parts})")
    if plan.expected_s:
        lines.append(
            f"a step of responses at full length: about {seconds_text(plan.expected_s)}, "
            f"{seconds_text(plan.expected_cpu_s)} of processors"
        )
    return ["", "on this host, of its products and its memory as measured now", *lines]


def _summary(plan: Plan) -> str:
    if plan.limit is None:
        return f"at the peak {human_bytes(plan.total)} per device"
    share = plan.total / max(plan.limit, 1)
    verdict = "fits" if plan.fits else "does not fit"
    step = f"; a step of responses at full length takes at least {seconds_text(plan.least_s)}"
    line = f"{verdict}: {human_bytes(plan.total)} of {human_bytes(plan.limit)}, {share:.0%}"
    extra = ""
    if plan.microbatch_tokens:
        extra = f"\nbatch.tokens_per_microbatch=0 comes to {plan.microbatch_tokens}"
    if plan.estimate.total > plan.limit:
        fix = f"by the estimate it fits with {as_flags(plan.nearest)}"
        extra += "\n" + (fix if plan.nearest else "more devices, or a smaller model")
    return line + (step if plan.least_s else "") + extra


def _groups(plan: Plan) -> list[str]:
    """The memory of roles on devices of their own, at its peak."""
    rows = [["GiB per device of config.placement", "mesh", "at the peak", "total"]]
    for name, parts in plan.estimate.groups.items():
        sizes = ", ".join(f"{part} {_gib(size)}" for part, size in parts.items())
        rows.append([name, _mesh(plan.groups[name]), sizes, _gib(sum(parts.values()))])
    return rows_text(rows)


def _training(plan: Plan) -> list[str]:
    """The memory of training by ZeRO stage, and by this config's mesh, marked with a star."""
    rows = [["ZeRO, 2 + 2 + 12 bytes per weight", "weights", "gradients", "optimizer", "total"]]
    axes = {name: n for name, n in plan.mesh.items() if name in ("fsdp", "expert", "tensor")}
    stages = [f"stage 3 on {_mesh(axes)}"] if axes else []
    if plan.config["mesh"]["shard_optimizer"] and "data" in plan.mesh:
        stages.append(f"stage 1 on data {plan.mesh['data']}")
    label = "* this config, " + (" x ".join(stages) or "stage 0")
    trainings = {**{f"stage {n}": x for n, x in plan.stages.items()}, label: plan.training}
    for name, x in trainings.items():
        sizes = (x.weights, x.gradients, x.optimizer, x.total)
        rows.append([name, *(f"{size / 1e9:.4g}" for size in sizes)])
    return [
        f"GB per device to train {human_count(plan.weights)} weights on all devices",
        *rows_text(rows),
    ]


def _resharding(plan: Plan) -> list[str]:
    """Describes the cost of bringing weights to the layout of decoding."""
    reshards = [r for r in plan.reports if r.name.startswith(RESHARD) and not r.error]
    if not reshards and SAMPLER in plan.groups:
        size = plan.estimate.groups[SAMPLER].get(COPY, 0)
        return [f"no program: {_gib(size)} GiB of weights go to each device that samples"]
    if not reshards and COPY in plan.estimate.generate:
        return ["reshard: weights are brought to the layout of decoding; not compiled here"]
    if not reshards:
        return ["reshard: none, decoding reads the arrays of training where they lie"]
    return [
        f"{r.name}: sends "
        + (", ".join(f"{n / 1e9:.3g} GB along {a}" for a, n in r.sent_bytes.items()) or "nothing")
        + f"; {_gib(r.temporaries)} GiB of temporaries; once per rollout"
        + (f", at least {seconds_text(r.least_s)}" if r.seconds else "")
        for r in reshards
    ]


def _layouts(plan: Plan) -> list[str]:
    """The layouts of decoding, counted and not compiled, the chosen one marked with a star."""

    def is_chosen(cost):
        return all(plan.decode_mesh[a] == cost.mesh.get(a, 1) for a in plan.decode_mesh)

    kinds = ("copy GiB", "HBM ms", "ICI ms", "latency ms", "reshard ms", "rollout", "bound by")
    rows = [["mesh of decoding", *kinds, ""]]
    for i, cost in enumerate(plan.layouts):
        if i >= LAYOUTS and cost.layout is not None and not is_chosen(cost):
            continue
        name = _mesh(cost.mesh) + ("" if cost.layout else ", training's own")
        times = (cost.hbm_s, sum(cost.ici_s.values()), cost.latency_s, cost.reshard_s)
        cells = [_gib(cost.copy_bytes), *(f"{seconds * 1e3:.3g}" for seconds in times)]
        cells += [seconds_text(cost.rollout_s), cost.binding]
        fits = "" if cost.most_bytes <= plan.free else "may not fit"
        rows.append([f"{'* ' if is_chosen(cost) else ''}{name}", *cells, fits])
    title = f"decoding in {len(plan.layouts)} layouts, a step of it and the rollout, counted"
    return [f"{title} ({LATENCY_S * 1e6:g} us per collective assumed)", *rows_text(rows)]


def _memory(plan: Plan) -> list[str]:
    kinds = ("weights", "optimizer", "other arguments", "new outputs", "temporaries")
    rows = [["program", "compile", *kinds, "held beside", "total", "on host"]]
    kv = plan.estimate.generate.get(KV, 0)
    for r in plan.reports:
        optimizer = sum(size for name, size in r.parts.items() if name.endswith("optimizer"))
        weights = sum(r.parts.values()) - optimizer
        others, outputs = max(r.arguments - weights - optimizer, 0), r.outputs - r.aliased
        sizes = (weights, optimizer, others, outputs, r.temporaries + r.code)
        sizes += (r.beside, r.total, r.host)
        cells = ["refused" if r.error and i in (2, 3, 4) else _gib(n) for i, n in enumerate(sizes)]
        rows.append([r.name, f"{r.compile_s:.0f} s", *cells])
    notes = [f"of generate's temporaries {_gib(kv)} are keys and values"] if kv else []
    return rows_text(rows) + notes


def _costs(plan: Plan) -> list[str]:
    axes = sorted({name for r in plan.reports for name in r.sent_bytes})
    kinds = ("iterations", "TFLOP", "of kernels", "HBM GB", *(f"{a} GB" for a in axes))
    rows = [["program", *kinds, "at least", "bound by"]]
    for r in (report for report in plan.reports if not report.error):
        cells = [str(r.trips), f"{r.flops / 1e12:.4g}", f"{r.kernel_flops / 1e12:.3g}"]
        cells += [f"{r.hbm_bytes / 1e9:.4g}"]
        cells += [f"{r.sent_bytes.get(a, 0) / 1e9:.3g}" for a in axes]
        cells += [seconds_text(r.least_s) if r.seconds else "", r.binding]
        rows.append([r.name, *cells])
    seconds = [
        f"{r.name}: " + ", ".join(f"{name} {seconds_text(s)}" for name, s in r.seconds.items())
        for r in plan.reports
        if r.seconds
    ]
    return rows_text(rows) + seconds


def _between_slices(plan: Plan) -> list[str]:
    """Describes what each host sends to other slices over the data center's network, and for how
    long."""
    if plan.slices == 1:
        return []
    rows = [["program", f"{DCN} GB", f"{DCN} seconds"]]
    for r in plan.reports:
        size = r.sent_bytes.get(DCN, 0.0) * plan.host_devices
        rows.append([r.name, f"{size / 1e9:.4g}", f"{r.seconds.get(DCN, 0.0):.4g}"])
    title = f"per host of {plan.host_devices} devices, to the other of {plan.slices} slices"
    return ["", title, *rows_text(rows)]


def plan_json(plan: Plan) -> dict:
    """Returns everything in a plan as JSON data; bytes, FLOPs and seconds."""

    def report_json(r: Report) -> dict:
        fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name != "products"}
        return fields | {
            "total": r.total,
            "binding": r.binding,
            "expected_s": r.expected_s,
            "expected_cpu_s": r.expected_cpu_s,
        }

    estimate = plan.estimate
    return {
        "topology": plan.topology,
        "mesh": plan.mesh,
        "fits": plan.fits,
        "total": plan.total,
        "chip": dataclasses.asdict(plan.chip) if plan.chip else None,
        "least_s": plan.least_s,
        "left": plan.left,
        "nearest": plan.nearest,
        "weights": plan.weights,
        "stages": {n: dataclasses.asdict(x) for n, x in plan.stages.items()},
        "training": dataclasses.asdict(plan.training) if plan.training else None,
        "estimate": dataclasses.asdict(estimate)
        | {"total": estimate.total, "least": estimate.least},
        "groups": plan.groups,
        "programs": [report_json(r) for r in plan.reports],
        "config": plan.config,
        "slices": plan.slices,
        "host_devices": plan.host_devices,
        "layouts": [
            {**dataclasses.asdict(cost), "step_s": cost.step_s, "rollout_s": cost.rollout_s}
            for cost in plan.layouts
        ],
        "decode_mesh": plan.decode_mesh,
        "padding": plan.padding,
        "expected_s": plan.expected_s,
        "expected_cpu_s": plan.expected_cpu_s,
        "process_bytes": plan.process_bytes,
        "process_peak_bytes": plan.process_bytes and plan.process_bytes + plan.total,
    }


def candidates_text(candidates: list[Candidate], tried: int, left: int) -> str:
    """Returns the candidates that fit, best first, as text."""
    names = sorted({name for candidate in candidates for name in candidate.changes})
    rows = [[*names, "GiB", "step at least", "bound by"]]
    for candidate in candidates:
        slowest = max(candidate.plan.run, key=lambda r: r.least_s)
        config = candidate.plan.config
        rows.append(
            [
                *[str(functools.reduce(operator.getitem, n.split("."), config)) for n in names],
                _gib(candidate.plan.total),
                seconds_text(candidate.plan.least_s),
                f"{slowest.name}: {slowest.binding}",
            ]
        )
    summary = f"{tried} compiled, {len(candidates)} fit, {left} not tried"
    return "\n".join([*rows_text(rows), summary]) if candidates else f"nothing fits: {summary}"
