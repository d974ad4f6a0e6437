"""Load a synthetic checkpoint of a given size in a process of its own: prints JSON.

python benchmarks/loading.py [--gigabytes=2] [--shard_megabytes=500] [--devices=1] [--tensor=1]
    [--weight_dtype=bfloat16] [--hash] [--format=bfloat16]

The checkpoint is a Qwen3-shaped decoder with random bfloat16 weights, whose embedding and head are
about a tenth of it; with --format=fp8 its linear maps are E4M3 codes with a scale for each block of
128 x 128, and with --format=mxfp4 it is shaped like gpt-oss, 16 experts, with their maps in MXFP4.
`host_bytes` is the peak of the process's own memory (anonymous pages, sampled
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


def write_checkpoint(folder: Path, size: int, shard: int, storage: str) -> dict:
    """Writes config.json and safetensors of about `size` bytes in files of at most `shard`."""
    from rljax.models.huggingface.checkpoint_folder import INDEX, WHOLE

    config, one_layer, other_tensors = (_gpt_oss if storage == "mxfp4" else _qwen3)(size)

    def stored(tensors):
        return dict(_stored(tensors, storage))

    def bytes_of(kind, shape):
        return {"BF16": 2, "F32": 4}.get(kind, 1) * math.prod(shape)

    layer_bytes = sum(bytes_of(*tensor) for tensor in stored(one_layer).values())
    other_bytes = sum(bytes_of(*tensor) for tensor in stored(other_tensors).values())
    if storage == "fp8":
        config["quantization_config"] = dict(quant_method="fp8", weight_block_size=[128, 128])
    config["num_hidden_layers"] = max((size - other_bytes) // layer_bytes, 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = stored(other_tensors)
    for i in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{n}": tensor for n, tensor in stored(one_layer).items()}
    shards, offset = [{}], 0
    for name, (kind, shape) in tensors.items():
        if shards[-1] and offset + bytes_of(kind, shape) > shard:
            shards.append({})
            offset = 0
        shards[-1][name] = (kind, shape)
        offset += bytes_of(kind, shape)
    rng, largest, names = np.random.default_rng(0), 0, {}
    for i, kinds in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WHOLE
        entries, offset = {}, 0
        for name, (kind, shape) in kinds.items():
            entries[name] = dict(
                dtype=kind,
                shape=shape,
                data_offsets=[offset, offset := offset + bytes_of(kind, shape)],
            )
        header = json.dumps(entries).encode()
        with open(folder / file, "wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for name, (kind, shape) in kinds.items():
                stream.write(_random(rng, name, kind, math.prod(shape)))
        largest = max(largest, (folder / file).stat().st_size)
        names |= dict.fromkeys(kinds, file)
    if len(shards) > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return {"largest_file": largest, "files": len(shards), "tensors": len(names)}


def _random(rng, name: str, kind: str, count: int) -> np.ndarray:
    if name.endswith("_scales"):
        return rng.integers(118, 122, count, np.uint8)  # exponents
    if kind in ("F8_E4M3", "U8"):
        return rng.integers(0, 120, count, np.uint8)  # no NaN
    values = rng.standard_normal(count, dtype=np.float32) / 32
    return values if kind == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)  # cut


def _stored(tensors: dict[str, tuple[int, ...]], form: str):
    """Yields (name, (type, shape)) of the tensors in a file."""
    for name, shape in tensors.items():
        if form == "fp8" and name.endswith("_proj.weight"):
            yield name, ("F8_E4M3", shape)
            yield f"{name}_scale_inv", ("F32", tuple(-(-n // 128) for n in shape))
        elif form == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, ins, outs = shape
            yield f"{name}_blocks", ("U8", (experts, outs, ins // 32, 16))
            yield f"{name}_scales", ("U8", (experts, outs, ins // 32))
        else:
            yield name, ("BF16", shape)


# config.json, the tensors of a layer and the others, written out here and not asked of the code
# that is measured.


def _qwen3(size: int) -> tuple[dict, dict, dict]:
    d, vocab = (1024, 32_768) if size >= 2**30 else (512, 8192)
    f, e, heads, kv_heads = 4 * d, 64, d // 64, 8
    config = dict(
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=f,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=e,
        tie_word_embeddings=False,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        max_position_embeddings=4096,
        eos_token_id=1,
    )
    layer = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (heads * e, d),
        "self_attn.k_proj": (kv_heads * e, d),
        "self_attn.v_proj": (kv_heads * e, d),
        "self_attn.o_proj": (d, heads * e),
        "self_attn.q_norm": (e,),
        "self_attn.k_norm": (e,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    return config, {f"{name}.weight": shape for name, shape in layer.items()}, _around(vocab, d)


def _gpt_oss(size: int) -> tuple[dict, dict, dict]:
    d, vocab, experts, heads, kv_heads, e = 1024, 8192, 16, 16, 4, 64
    config = dict(
        model_type="gpt_oss",
        architectures=["GptOssForCausalLM"],
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=d,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=e,
        num_local_experts=experts,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
        attention_bias=True,
        sliding_window=128,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope_theta=150_000.0,
        max_position_embeddings=4096,
        eos_token_id=1,
        swiglu_limit=7.0,
        quantization_config=dict(quant_method="mxfp4"),
    )
    layer = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.sinks": (heads,),
        "mlp.router.weight": (experts, d),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, d, 2 * d),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * d),
        "mlp.experts.down_proj": (experts, d, d),
        "mlp.experts.down_proj_bias": (experts, d),
    }
    for name, outs, ins in (
        ("q", heads * e, d),
        ("k", kv_heads * e, d),
        ("v", kv_heads * e, d),
        ("o", d, heads * e),
    ):
        layer[f"self_attn.{name}_proj.weight"] = (outs, ins)
        layer[f"self_attn.{name}_proj.bias"] = (outs,)
    return config, layer, _around(vocab, d)


def _around(vocab: int, d: int) -> dict[str, tuple[int, ...]]:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(names, (vocab, d)) | {"model.norm.weight": (d,)}


class PeakMemory:
    """Measures the most bytes of anonymous memory of this process while the block runs."""

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
    """Loads `folder` in this process; returns its seconds and bytes."""
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
    parameter_bytes = sum(
        s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards
    )
    checkpoint_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return {
        "devices": jax.device_count(),
        "seconds": seconds,
        "gb_per_s": checkpoint_bytes / 1e9 / seconds,
        "checkpoint_bytes": checkpoint_bytes,
        "parameter_bytes": parameter_bytes,
        "host_bytes": memory.peak - memory.start - parameter_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard_megabytes", type=float, default=500.0)
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices; 0 = as found")
    parser.add_argument("--tensor", type=int, default=1, help="mesh.tensor; fsdp takes the rest")
    parser.add_argument("--weight_dtype", default="bfloat16")
    parser.add_argument("--format", default="bfloat16", choices=("bfloat16", "fp8", "mxfp4"))
    parser.add_argument("--hash", action="store_true", help="with SHA-256 of every file")
    parser.add_argument("--folder", default="", help="measure this folder; write nothing")
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(measure(Path(args.folder), args.tensor, args.weight_dtype, args.hash)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        size, shard = int(args.gigabytes * 1e9), int(args.shard_megabytes * 1e6)
        sizes = write_checkpoint(folder, size, shard, args.format)
        print(json.dumps(sizes | in_a_process(folder, sizes, args)))


def in_a_process(folder: Path, sizes: dict, args) -> dict:
    """Runs `measure` in a fresh interpreter; adds the ratio."""
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
