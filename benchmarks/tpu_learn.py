"""A learning step and a log-prob pass under the TPU compiler, without a TPU. Prints JSON.

python benchmarks/tpu_learn.py [--topology=v5e:2x4] [--layers=4] [--to=24] [--rows=64]
    [--tokens=1024] [--programs=update,logprobs] [--top=0]
    [--set=model_settings.remat=dots --set=batch.tokens_per_microbatch=8192 ...]

Compiles `Actor.update` (forward, backward, AdamW) and the reference's log-probs of
configs/grpo_qwen2_5_0_5b.py with --layers of its layers. Of each it prints what a chip holds (GiB),
what it sends (GB), and milliseconds by the compiler's own cost model.

cycles: `estimated_cycles` of every instruction, loops multiplied, over the clock. kernels: Pallas
calls, the passes of their products at 1 / 1.2 of the peak, which is what XLA's cycles say of such
products; attention from its shapes. copies: what has no cycles, by its bytes of HBM. sync_ici:
collectives that nothing overlaps, by their bytes over two links. `layers` is what grows with the
layers, so that `at_layers` says what --to of them would take. There is no latency and no contention
in it: ratios say more than milliseconds. A compile takes minutes on two cores.
"""

import argparse
import ast
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from rljax.config import with_overrides
from rljax.config.flags import load_config_file
from rljax.mesh import row_sharding
from rljax.plan import hlo
from rljax.plan.chips import topology_devices
from rljax.plan.memory import fewest_microbatches
from rljax.plan.programs import planned
from rljax.setup import abstract_roles
from rljax.setup.abstract import abstract_setup
from rljax.setup.dry_run import abstract_batch

CLOCK_HZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
OVER_PEAK = 1.2  # XLA's cycles for a [1024, 896] x [896, 4608] product over those at the peak
GIB = 2**30


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/grpo_qwen2_5_0_5b.py")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--to", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--programs", default="update,logprobs")
    parser.add_argument("--set", action="append", default=[], help="FIELD=VALUE of the config")
    parser.add_argument("--top", type=int, default=0, help="also list the longest instructions")
    parser.add_argument("--text", default="", help="a folder for the compiled texts")
    return parser.parse_args()


def config_of(args):
    """The config with fewer layers, one optimizer step of --rows rows of --tokens tokens."""
    config = load_config_file(args.config)
    changes = {
        "model": with_layers(config.model, args.layers),
        "data.max_prompt_tokens": args.tokens // 2,
        "sampler.max_response_tokens": args.tokens - args.tokens // 2,
        "batch.prompts_per_step": args.rows // config.batch.samples_per_prompt,
        "batch.sequences_per_optimizer_step": args.rows,
    }
    return with_overrides(config, changes | dict(map(setting, args.set)), "--set")


def with_layers(model: str, layers: int) -> str:
    """A copy of the folder of a model, whose config has so many layers."""
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(model, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": layers}))
    return str(folder)


def setting(text: str) -> tuple[str, object]:
    """(field, value) of FIELD=VALUE."""
    name, value = text.split("=", 1)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def update_program(setup, roles):
    """`Actor.update` alone, of a batch that has all that the loss reads."""
    cfg, batch = planned(setup.algorithm), abstract_batch(setup, setup.main)
    layout = row_sharding(setup.model.mesh)
    number = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=layout)
    batch = batch.replace(old_logprobs=number, ref_logprobs=number, advantages=number)

    def update(actor, batch):
        updated, metrics = actor.update(batch, cfg.policy_loss, **cfg.update_options())
        return updated.pinned(), metrics

    return jax.jit(update, donate_argnums=0), (roles["actor"], batch)


def logprobs_program(setup, roles):
    """The reference's pass over the rows of the step."""
    steps = planned(setup.algorithm).steps
    run = jax.jit(lambda reference, batch: reference.logprobs(batch, steps))
    return run, (roles["reference"], abstract_batch(setup, setup.main))


class Timed(hlo._Walk):
    """Every instruction that runs, with its turns, and whether it grows with the layers."""

    def __init__(self, text, mesh, layers: int):
        super().__init__(text, mesh, 1, 1)
        self.layers = layers

    def instructions(self, name=None, times=1.0, of_layers=False):
        for node in self.parts[name or self.entry]:
            if node.op == "while":
                body, turns, _ = self._loop(node)
                inside = of_layers or turns == self.layers
                yield from self.instructions(body, times * turns, inside)
            elif node.op == "conditional":
                branches = [
                    list(self.instructions(c, times, of_layers)) for c in self._called(node)
                ]
                yield from min(branches, key=len, default=[])
            elif node.op in ("call", "call-start", "async-start") and self._called(node):
                for called in self._called(node):
                    yield from self.instructions(called, times, of_layers)
            else:
                stacked = f"[{self.layers}," in self.all_types(name or self.entry, node)
                yield name or self.entry, node, times, of_layers or stacked

    def all_types(self, name, node) -> str:
        """The types of an instruction's result and operands."""
        return " ".join(
            [node.types, *(self._type(self.types[name], operand) for operand in node.operands)]
        )

    def seconds(self, name, node, times, chip, clock) -> tuple[str, float]:
        """(kind, seconds) of one instruction in all its turns; kind "" if it takes none."""
        cycles = re.search(r'"estimated_cycles":"?(\d+)', node.rest)
        if cycles:
            return "cycles", int(cycles[1]) / clock * times
        if node.op == "custom-call" and '"tpu_custom_call"' in node.rest:
            return "kernels", self.kernel_flops(name, node) * OVER_PEAK / chip.flops_per_s * times
        if hlo._kind(node.op):
            sent = self._collective(name, node, times, False).bytes_sent
            kind = "async_ici" if node.op.endswith("-start") or "async" in name else "sync_ici"
            return kind, sent * times / (2 * chip.link_bytes_per_s)
        if node.op in hlo._FREE or node.op.endswith(("-start", "-done", "-update")):
            return "", 0.0
        return "copies", self._hbm_bytes(name, node) * times / chip.hbm_bytes_per_s

    def kernel_flops(self, name, node) -> float:
        """Returns the FLOPs of one call, every pass of a product counted: of log-probs as declared;
        of attention 3/4 of the scores (causal, blocks of 512), heads of fewer than 128 padded to
        it."""
        if "splash" not in node.name and "attention" not in node.name:
            stated = re.search(r"mxu_flops\D+(\d+)", node.rest) or re.search(
                r'"flops":"?(\d+)', node.rest
            )
            return float(stated[1]) if stated else 0.0
        shapes = [
            [int(n) for n in dims.split(",")]
            for dims in re.findall(r"bf16\[([\d,]+)\]", self.all_types(name, node))
        ]
        sizes = [(math.prod(x[:-2]), x[-2], x[-1]) for x in shapes if len(x) >= 3]
        heads, tokens, size = max(sizes, key=math.prod)
        products = 2 if "fwd" in node.name else 3 if "dq" in node.name else 4
        return products * 2 * heads * tokens * tokens * 0.75 * max(size, 128)


def measured(name, program, arguments, mesh, chip, args) -> dict:
    started = time.perf_counter()
    compiled = program.trace(*arguments).lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if args.text:
        (Path(args.text) / f"{name}.hlo").write_text(text)
    walk = Timed(text, mesh, args.layers)
    parts = {part: defaultdict(float) for part in ("layers", "rest")}
    rows = []
    for part_name, node, times, of_layers in walk.instructions():
        kind, seconds = walk.seconds(part_name, node, times, chip, CLOCK_HZ[chip.name])
        if kind:
            parts["layers" if of_layers else "rest"][kind] += seconds * 1e3
            rows.append((seconds * 1e3, kind, times, node.name, node.types[:60]))
    sent = defaultdict(float)
    for node in walk.traffic.collectives:
        sent[node.op] += node.bytes_sent * node.trips / 1e9
    scale = args.to / args.layers
    kinds = sorted(set(parts["layers"]) | set(parts["rest"]))
    at_layers = {k: round(parts["layers"][k] * scale + parts["rest"][k], 1) for k in kinds}
    counted = [k for k in kinds if k != "async_ici"]
    for size, kind, times, label, types in sorted(rows, reverse=True)[: args.top]:
        print(f"{size:9.2f} ms {kind:9} x{times:<7g} {label:44} {types}")
    return {
        "program": name,
        "compile_s": round(time.perf_counter() - started, 1),
        "arguments_gib": round(memory.argument_size_in_bytes / GIB, 3),
        "temporaries_gib": round(memory.temp_size_in_bytes / GIB, 3),
        "ici_gb": {k: round(v, 3) for k, v in sorted(sent.items())},
        "hbm_gb": round(walk.traffic.hbm_bytes / 1e9, 2),
        **{f"{part}_ms": {k: round(v, 2) for k, v in parts[part].items()} for part in parts},
        "at_layers": {"layers": args.to, **at_layers},
        "at_layers_ms": round(sum(at_layers[k] for k in counted), 1),
    }


def steps_text(setup) -> dict:
    """The shape of a packed microbatch."""
    packing = setup.algorithm.steps.packing
    names = ("rows", "blocks", "block_tokens", "full_rows")
    return {name: getattr(packing, name) for name in names}


def main():
    args = parse()
    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    devices, chip = topology_devices(args.topology)
    setup = fewest_microbatches(abstract_setup(config_of(args), devices), chip.hbm_bytes)
    roles, mesh = abstract_roles(setup), setup.model.mesh
    makers = {"update": update_program, "logprobs": logprobs_program}
    report = {
        "topology": args.topology,
        "mesh": {k: n for k, n in mesh.shape.items() if n > 1},
        "layers": args.layers,
        "rows": args.rows,
        "tokens": args.tokens,
        "set": args.set,
        "microbatch_rows": setup.algorithm.steps.microbatch_rows,
        "packing": setup.algorithm.steps.packing and steps_text(setup),
        "programs": [],
    }
    for name in args.programs.split(","):
        program, arguments = makers[name](setup, roles)
        report["programs"].append(measured(name, program, arguments, mesh, chip, args))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
