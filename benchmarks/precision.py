"""Differences of the sampler's log-probs to the trainer's, by the types of numbers: prints JSON.

python benchmarks/precision.py MODEL_FOLDER... [--prompts=8] [--samples=4] [--prompt_tokens=16] [--new_tokens=32] [--types=kv int8,weights int8] [--rows=FILE.jsonl]

Every model samples responses to random prompts, or to the "question" of each row of --rows through
its chat template (needs transformers), in each setting of TYPES, at temperature 1; its
trainer scores them with the same weights. Printed are the metrics that a run shows (`mismatch/`):
mean, 99th percentile and largest |log-prob(sampler) - log-prob(trainer)| in nats, KL, and the
effective sample size of the weights. With --cost: CPU seconds of a GRPO step's two halves, sampling
and a gradient, with batch-invariant sums over without, both interleaved.
"""  # noqa: E501

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from real_decoding import prompt_ids

from rljax.correction import rollout_correction
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.sampler import Decoding, Sampling, generate

# (of the model that trains, of decoding)
TYPES = {
    "float32": ({}, {}),
    "kv bfloat16": ({}, {"kv_dtype": "bfloat16"}),
    "kv int8": ({}, {"kv_dtype": "int8"}),
    "kv float16": ({}, {"kv_dtype": "float16"}),
    "weights bfloat16": ({}, {"weight_dtype": "bfloat16"}),
    "weights float16": ({}, {"weight_dtype": "float16"}),
    "weights int8": ({}, {"weight_dtype": "int8"}),
    "decoding bfloat16": ({}, {"dtype": "bfloat16"}),
    "decoding float16": ({}, {"dtype": "float16"}),
    "all bfloat16": ({"dtype": "bfloat16"}, {}),
    "all float16": ({"dtype": "float16"}, {}),
    "all bfloat16 and its head": ({"dtype": "bfloat16", "head_in_float32": False}, {}),
    "all float16 and its head": ({"dtype": "float16", "head_in_float32": False}, {}),
}
SHOWN = {
    "mean": "abs_logprob_diff_mean",
    "p99": "abs_logprob_diff_p99",
    "max": "abs_logprob_diff_max",
    "kl": "mismatch_kl",
    "k3_kl": "mismatch_k3_kl",
    "ess": "rollout_is_eff_sample_size",
    "veto": "rollout_is_veto_fraction",
    "weight": "rollout_is_mean",
    "correlation": "probability_correlation",
}


def prompts_of(args, vocab: int):
    """Prompts [P, L], right-padded, and their lengths: of a file, or random ones of every length
    up to L."""
    if args.ids:
        lengths = np.array([len(ids) for ids in args.ids])
        tokens = np.zeros((len(lengths), lengths.max()), np.int32)
        for row, ids in zip(tokens, args.ids, strict=True):
            row[: len(ids)] = ids
        return tokens, lengths.astype(np.int32)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, args.prompt_tokens + 1, args.prompts)
    tokens = rng.integers(3, min(vocab, 30_000), (args.prompts, args.prompt_tokens))
    real = np.arange(args.prompt_tokens)[None, :] < lengths[:, None]
    return np.where(real, tokens, 0).astype(np.int32), lengths.astype(np.int32)


def measured(model: Model, params, args, **decoding) -> dict:
    """Returns the mismatch metrics of one batch of samples, and the number of its tokens."""
    batch = sampled(model, params, args, jax.random.key(1), **decoding)
    logprobs = jax.jit(lambda params, batch: model.logprobs(params, batch)[0])(params, batch)
    metrics = rollout_correction(batch.replace(old_logprobs=logprobs))[1]
    figures = {name: float(metrics[f"mismatch/{key}"]) for name, key in SHOWN.items()}
    return {"tokens": int(jnp.sum(batch.mask)), **figures}


def sampled(model: Model, params, args, key, **decoding):
    tokens, lengths = prompts_of(args, model.config.vocab_size)
    sampling = Sampling(max_response_tokens=args.new_tokens)
    decoding_options = Decoding(**decoding)
    return generate(
        model, params, tokens, lengths, key, sampling, n=args.samples, decoding=decoding_options
    )


def cost(folder: Path, mesh, args) -> dict:
    """CPU seconds with batch-invariant sums over without: medians of ratios of neighbours."""
    usual = Model(load_config(folder), mesh)
    exact = Model(load_config(folder, batch_invariant=True), mesh)
    params = load_params(folder, usual)
    key = jax.random.key(1)
    batch = sampled(usual, params, args, key)

    def loss(model, params):
        return jnp.sum(model.logprobs(params, batch)[0] * batch.mask)

    gradients = {
        model: jax.jit(jax.grad(lambda p, m=model: loss(m, p))) for model in (usual, exact)
    }
    halves = {
        "sampling": lambda model: sampled(model, params, args, key),
        "gradient": lambda model: gradients[model](params),
    }
    ratios = {}
    for name, half in halves.items():
        seconds = {usual: [], exact: []}
        for turn in range(args.repeats + 1):
            for model, times in seconds.items():
                started = time.process_time()
                jax.block_until_ready(half(model))
                times += [time.process_time() - started] * (turn > 0)  # the first compiles
        step_ratios = [b / a for a, b in zip(seconds[usual], seconds[exact], strict=True)]
        low, high = min(step_ratios), max(step_ratios)
        ratios[name] = {"ratio": statistics.median(step_ratios), "lowest": low, "highest": high}
        ratios[name]["plain_cpu_s"] = statistics.median(seconds[usual])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--types", default=",".join(TYPES), help="of TYPES")
    parser.add_argument("--cost", action="store_true", help="of batch-invariant sums, nothing else")
    parser.add_argument("--repeats", type=int, default=5, help="of --cost")
    for name, default in (
        ("prompts", 8),
        ("samples", 4),
        ("prompt_tokens", 16),
        ("new_tokens", 32),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="", help="a .jsonl file with a question in each row")
    args = parser.parse_args()
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    for folder in args.folders:
        args.ids = prompt_ids(str(folder), args.prompts, args.rows) if args.rows else ()
        if args.cost:
            print(json.dumps({"model": folder.name, **cost(folder, mesh, args)}), flush=True)
            continue
        usual = Model(load_config(folder), mesh)
        params = load_params(folder, usual)
        for name in args.types.split(","):
            of_model, of_decoding = TYPES[name]
            model = dataclasses.replace(usual, config=dataclasses.replace(usual.config, **of_model))
            row = measured(model, params, args, **of_decoding)
            print(json.dumps({"model": folder.name, "types": name, **row}), flush=True)


if __name__ == "__main__":
    main()
