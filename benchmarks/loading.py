"""Load a synthetic checkpoint of a given size in a process of its own: prints JSON.

python benchmarks/loading.py [--gigabytes=2] [--shard_megabytes=500] [--devices=1] [--tensor=1]
    [--weight_dtype=bfloat16] [--hash]

The checkpoint is a Qwen3-shaped decoder with random bfloat16 weights, whose embedding and head are
about a tenth of it. `host_bytes` is the peak of the process's own memory (anonymous pages, sampled
every 2 ms) above what it held before loading, less the bytes of the parameters: on CPU the devices'
memory is the host's. `ratio` is host_bytes over the largest file. The file is in the page cache.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np


def write_checkpoint(folder: Path, size: int, shard: int) -> dict:
    """config.json and bfloat16 safetensors of about `size` bytes in files of at most `shard`."""
    from rljax.models.config import ModelConfig
    from rljax.models.families import to_hf_config
    from rljax.models.huggingface.checkpoint_folder import INDEX, WHOLE
    from rljax.models.huggingface.safetensors_file import FLOATS, new_header

    embed, vocab = (1024, 32_768) if size >= 2**30 else (512, 8192)
    sizes = dict(embed=embed, mlp=4 * embed, heads=embed // 64, kv_heads=8, head_dim=64)
    layer = 12 * embed**2 + 2 * embed**2 + 2 * embed * 8 * 64  # mlp, q and o, k and v
    layers = max((size // 2 - 2 * vocab * embed) // layer, 1)
    config = ModelConfig("qwen3", vocab_size=vocab, layers=layers, qk_norm=True, **sizes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf_config(config, eos_ids=(1,))))
    shards, at, names = [{}], 0, {}
    for name, shape in _tensors(config).items():
        more = 2 * math.prod(shape)
        if shards[-1] and at + more > shard:
            shards.append({})
            at = 0
        shards[-1][name] = (FLOATS["BF16"], shape)
        at += more
    rng, largest = np.random.default_rng(0), 0
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WHOLE
        header, entries = new_header(tensors)
        with open(folder / file, "wb") as out:
            out.write(header)
            for entry in entries.values():
                values = rng.standard_normal(math.prod(entry.shape), dtype=np.float32) / 32
                out.write((values.view(np.uint32) >> 16).astype(np.uint16))  # bfloat16, cut
        largest = max(largest, (folder / file).stat().st_size)
        names |= {name: file for name in tensors}
    if len(shards) > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return {"largest_file": largest, "files": len(shards), "tensors": len(names)}


def _tensors(config) -> dict[str, tuple[int, ...]]:
    """{name: shape}, written out here and not asked of the code that is measured."""
    d, f = config.embed, config.mlp
    q, k, e = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.head_dim
    out = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.layers):
        below = {
            "input_layernorm": (d,), "post_attention_layernorm": (d,),
            "self_attn.q_proj": (q, d), "self_attn.k_proj": (k, d), "self_attn.v_proj": (k, d),
            "self_attn.o_proj": (d, q), "self_attn.q_norm": (e,), "self_attn.k_norm": (e,),
            "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
        }  # fmt: skip
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in below.items()}
    return {**out, "model.norm.weight": (d,), "lm_head.weight": (config.vocab_size, d)}


class PeakMemory:
    """The most bytes of anonymous memory of this process while the block ran."""

    def __enter__(self):
        self.start = self.peak = self._now()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def _watch(self):
        while not self.stop.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem")))


def measure(folder: Path, tensor: int, dtype: str, hashed: bool) -> dict:
    """Load `folder` here; what it took."""
    import jax

    from rljax.mesh import make_mesh
    from rljax.models.huggingface import load_config, load_params, load_with_report
    from rljax.models.model import Model

    model = Model(load_config(folder, weight_dtype=dtype), make_mesh(tensor=tensor))
    model.shapes()  # traced once, before the clock starts
    load = load_with_report if hashed else load_params
    with PeakMemory() as memory:
        start = time.perf_counter()
        loaded = load(folder, model)
        seconds = time.perf_counter() - start
    params = loaded[0] if hashed else loaded
    held = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
    read = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return {
        "devices": jax.device_count(),
        "seconds": seconds,
        "gb_per_s": read / 1e9 / seconds,
        "checkpoint_bytes": read,
        "parameter_bytes": held,
        "host_bytes": memory.peak - memory.start - held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard_megabytes", type=float, default=500.0)
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices; 0 = as found")
    parser.add_argument("--tensor", type=int, default=1, help="mesh.tensor; fsdp takes the rest")
    parser.add_argument("--weight_dtype", default="bfloat16")
    parser.add_argument("--hash", action="store_true", help="with SHA-256 of every file")
    parser.add_argument("--folder", default="", help="measure this folder; write nothing")
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(measure(Path(args.folder), args.tensor, args.weight_dtype, args.hash)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        sizes = write_checkpoint(folder, int(args.gigabytes * 1e9), int(args.shard_megabytes * 1e6))
        print(json.dumps(sizes | in_a_process(folder, sizes, args)))


def in_a_process(folder: Path, sizes: dict, args) -> dict:
    """`measure` in a fresh interpreter, with the ratio."""
    env = dict(os.environ)
    if args.devices:
        count = f"--xla_force_host_platform_device_count={args.devices}"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
    command = [sys.executable, __file__, f"--folder={folder}", f"--tensor={args.tensor}"]
    command += [f"--weight_dtype={args.weight_dtype}"] + ["--hash"] * args.hash
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    row = json.loads(run.stdout)
    return row | {"ratio": row["host_bytes"] / sizes["largest_file"]}


if __name__ == "__main__":
    main()
