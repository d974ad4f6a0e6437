"""A step of decoding under the TPU compiler, without a TPU, in layouts of the weights. Prints JSON.

python benchmarks/tpu_decode.py [--config=configs/grpo_qwen2_5_0_5b.py] [--topology=v5e:2x4]
    [--layers=2,4] [--to=24] [--set=sampler.slots=64 ...]
    [--layouts="training;mesh(data=4, tensor=2)"] [--weights=bfloat16]

Compiles the decoding of a whole batch, as the plan does, with two numbers of layers: their
difference is a layer, what is left is the head, the sampler and the loop, and both together say
what --to layers take. Of each layout it prints the step and the rollout, in milliseconds by the
compiler's own model of time (benchmarks/tpu_learn.py says what cycles, kernels, copies and sync_ici
are), the bytes of a step (HBM, and ICI by axis), its collectives, and the program that brings the
weights there. Paged attention is counted by the tokens that slots hold at the middle of a rollout,
as bytes of HBM. There is no latency in it: --latency_us of each collective is added apart.
"""

import argparse
import dataclasses
import json
import re
import time
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
from tpu_learn import CLOCK_HZ, GIB, Timed, setting, with_layers

from rljax.config import with_overrides
from rljax.config.flags import load_config_file
from rljax.plan.chips import topology_devices
from rljax.plan.hlo import _kind
from rljax.sampler.generate import planned_rollout
from rljax.sampler.layout import parsed
from rljax.sampler.memory import slots_bytes
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/grpo_qwen2_5_0_5b.py")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layers", default="2,4")
    parser.add_argument("--to", type=int, default=24)
    parser.add_argument("--layouts", default="training;mesh(data=4, tensor=2)")
    parser.add_argument(
        "--weights", default="bfloat16", help="their type in layouts but training's"
    )
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of the config")
    parser.add_argument("--latency_us", type=float, default=5.0)
    parser.add_argument("--top", type=int, default=0, help="also list the longest instructions")
    parser.add_argument("--text", default="", help="a folder for the compiled texts")
    return parser.parse_args()


def config_of(args, layers: int):
    """The config with fewer layers."""
    config = load_config_file(args.config)
    changes = {"model": with_layers(config.model, layers)} | dict(map(setting, args.set))
    return with_overrides(config, changes, "--set")


class Step(Timed):
    """The instructions of one step of the loop that ends by its data."""

    def steps(self):
        for name, node, times, _ in self.instructions():
            if times >= 0.9 * self.trips:
                yield name, node, times / self.trips


def step_of(text: str, mesh, trips: int, chip, args) -> dict[str, float]:
    """Returns of one step: milliseconds by kind, megabytes by limit, the number of collectives."""
    walk = Step(text, mesh, 0)
    walk.trips = trips
    figures, rows = defaultdict(float), []
    for name, node, times in walk.steps():
        if node.op == "custom-call" and "ragged_paged_attention" in node.name:
            continue  # by its bytes
        kind, seconds = walk.seconds(name, node, times, chip, CLOCK_HZ[chip.name])
        if not kind:
            continue
        figures[f"{kind}_ms"] += seconds * 1e3
        rows.append((seconds * 1e6, kind, times, node.name, node.types[:70]))
        if _kind(node.op):
            figures["collectives"] += times
            sent = walk._collective(name, node, times, True)
            figures[f"ici_mb {' x '.join(sent.axes)}"] += sent.bytes_sent * times / 1e6
        else:
            figures["hbm_mb"] += walk._hbm_bytes(name, node) * times / 1e6
    for row in sorted(rows, reverse=True)[: args.top]:
        print("{:9.1f} us {:9} x{:<7g} {:44} {}".format(*row))
    return figures


def compiled(args, layers: int, layout: str, devices, chip):
    """({figure of a step}, figures of the programs) of the config with so many layers."""
    setup = abstract_setup(config_of(args, layers), devices)
    actor, decoding = abstract_roles(setup)["actor"], setup.decoding
    changes = dict(layout=None, weight_dtype="")
    if layout != "training":
        changes = dict(layout=parsed(layout), weight_dtype=args.weights)
    decoding = dataclasses.replace(decoding, **changes)
    batch, sampling = setup.config.batch, setup.rollouts.sampling
    prompts = np.zeros((batch.prompts_per_step, setup.data.prompt_tokens), np.int32)
    weights = actor.state.weights
    programs, _ = planned_rollout(
        actor.model, weights, prompts, sampling, n=batch.samples_per_prompt, decoding=decoding
    )
    model, program_figures, step = decoding.of(actor.model), {}, {}
    for name, (function, arguments, trips) in programs.items():
        started = time.perf_counter()
        program = function.trace(*arguments).lower().compile()
        text, memory = program.as_text(), program.memory_analysis()
        if args.text:
            path = Path(args.text) / f"{name}.{layers}.{re.sub('[^a-z0-9]+', '_', layout)}.hlo"
            path.write_text(text)
        mesh = model.mesh if name == "generate" else actor.model.mesh
        program_figures[name] = {
            "compile_s": round(time.perf_counter() - started, 1),
            "arguments_gib": round(memory.argument_size_in_bytes / GIB, 3),
            "temporaries_gib": round(memory.temp_size_in_bytes / GIB, 3),
        }
        if name == "generate":
            step = step_of(text, mesh, trips, chip, args)
            rows = prompts.shape[0] * batch.samples_per_prompt
            slots = min(decoding.slots or rows, rows)
            held_tokens = prompts.shape[1] + sampling.max_response_tokens // 2
            kv = slots_bytes(model, slots, held_tokens, decoding.kv_dtype)
            step["kv_ms"] = kv / chip.hbm_bytes_per_s * 1e3
            step["hbm_mb"] += kv / 1e6
            program_figures["steps"] = trips
        else:
            sent = Timed(text, mesh, 0).traffic.by_axis()
            program_figures[name]["ici_mb"] = {k: round(v / 1e6, 1) for k, v in sent.items()}
    return step, program_figures


def main():
    args = parse()
    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    devices, chip = topology_devices(args.topology)
    low_layers, high_layers = map(int, args.layers.split(","))
    for layout in args.layouts.split(";"):
        (low, _), (high, program_figures) = (
            compiled(args, n, layout, devices, chip) for n in (low_layers, high_layers)
        )
        layer = {k: (high[k] - low.get(k, 0.0)) / (high_layers - low_layers) for k in high}
        other_parts = {k: high[k] - high_layers * layer[k] for k in high}
        at_layers = {k: other_parts[k] + args.to * layer[k] for k in high}
        step = sum(v for k, v in at_layers.items() if k.endswith("_ms") and k != "async_ici_ms")
        steps = program_figures.pop("steps")
        latency_ms = at_layers.get("collectives", 0.0) * args.latency_us / 1e3

        def rounded(figures):
            return {k: round(v, 3) for k, v in sorted(figures.items())}

        print(
            json.dumps(
                {
                    "layout": layout,
                    "config": args.config,
                    "topology": args.topology,
                    "set": args.set,
                    "a_layer": rounded(layer),
                    "the_rest": rounded(other_parts),
                    f"at_{args.to}_layers": rounded(at_layers),
                    "step_ms": round(step, 3),
                    "rollout_s": round(step * steps / 1e3, 2),
                    "steps": steps,
                    "latency_s": round(latency_ms * steps / 1e3, 2),
                    f"programs_of_{high_layers}_layers": program_figures,
                },
                indent=1,
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
