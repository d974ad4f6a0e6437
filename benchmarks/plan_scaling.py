"""Bytes that a chip sends as chips are added, at the same work per chip: prints JSON.

python benchmarks/plan_scaling.py [--config=configs/ppo_llama3_8b.py] [--rows_per_chip=4]
    [--topologies=v5p:2x2x4,v5p:4x4x4,v5p:4x8x8,v5p:8x8x8] [--tensor=4] [--programs=learn]
    [--figure=docs/figures/plan_scaling.svg]

The learning phase is compiled ahead of time for each topology (`pip install "jax[tpu]"`, no TPU
needed), with rows_per_chip sequences per chip in one optimizer step of one microbatch; mesh.fsdp
takes what the tensor axis leaves. Bytes are those that one chip sends, by mesh axis.
"""

import argparse
import json
import sys

import jax

from rljax.config import row_tokens, with_overrides
from rljax.config.flags import load_config_file
from rljax.plan.chips import topology_devices
from rljax.plan.compiled import make_plan


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/ppo_llama3_8b.py")
    parser.add_argument("--topologies", default="v5p:2x2x4,v5p:4x4x4,v5p:4x8x8,v5p:8x8x8")
    parser.add_argument("--rows_per_chip", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--programs", default="learn")
    parser.add_argument("--figure", default="", help="an .svg or .png of it; needs matplotlib")
    return parser.parse_args()


def scaled(config, chips: int, args):
    """The config with as much work per chip as on any other number of chips."""
    rows = chips * args.rows_per_chip
    group = config.batch.samples_per_prompt
    changes = {
        "mesh.tensor": args.tensor,
        "batch.prompts_per_step": rows // group,
        "batch.sequences_per_optimizer_step": rows,
        "batch.tokens_per_microbatch": rows * row_tokens(config),
    }
    return with_overrides(config, changes, "benchmark")


def draw(runs: list[dict], file: str, title: str) -> None:
    """Bytes that a chip sends along each axis, over the number of chips."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    runs = [run for run in runs if not run["error"]]
    chips = [run["chips"] for run in runs]
    for name in ("fsdp", "tensor"):
        sizes = [run["sent_bytes"].get(name, 0.0) / 1e9 for run in runs]
        axes.plot(chips, sizes, marker="o", label=f"along {name}")
        axes.annotate(
            f"{sizes[-1]:.0f}", (chips[-1], sizes[-1]), xytext=(4, 4), textcoords="offset points"
        )
    axes.set(
        xscale="log",
        xticks=chips,
        xticklabels=chips,
        ylim=(0, None),
        title=title,
        xlabel="chips",
        ylabel="GB sent by a chip per step",
    )
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    args = parse()
    jax.config.update("jax_platforms", "cpu")
    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    runs = []
    for topology in args.topologies.split(","):
        devices, chip = topology_devices(topology)
        config = scaled(load_config_file(args.config), len(devices), args)
        names = tuple(args.programs.split(","))
        plan = make_plan(config, devices, chip, topology, only=names)
        for report in plan.reports:
            runs.append(
                {
                    "topology": topology,
                    "chips": len(devices),
                    "mesh": plan.mesh,
                    "program": report.name,
                    "compile_s": report.compile_s,
                    "error": report.error,
                    "sent_bytes": report.sent_bytes,
                    "seconds": report.seconds,
                    "flops": report.flops,
                    "total_bytes": report.total,
                }
            )
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)  # a compile may take minutes
    if args.figure:
        draw(runs, args.figure, f"{args.config}: {args.rows_per_chip} rows per chip")
    print(json.dumps({"jax": jax.__version__, "config": args.config, "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
