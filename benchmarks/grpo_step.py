"""One GRPO step of a 27 M-parameter decoder, timed part by part: prints JSON.

python benchmarks/grpo_step.py [--repeats=5]

Model: embed 512, mlp 1536, 8 layers, 8 heads, 4 kv heads, head_dim 64, vocabulary 4096, float32.
Batch 32 (4 prompts x 8), prompt 32, 128 new tokens, temperature 1, EOS ignored. FLOPs are counted
as 2 per token and weight of the layers and the head for a forward pass, and 6 with the backward
pass, attention scores included. The floor is the rate that a plain float32 matmul of the model's
own sizes reaches in the same process.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import last_token
from rljax.components import resolve
from rljax.config import NAMESPACES, OptimizerConfig
from rljax.dataflows.algorithm import Algorithm
from rljax.dataflows.grpo import grpo
from rljax.learn import Steps
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.roles import Actor, start_training
from rljax.sampler import Sampling, generate
from rljax.tracking import compiles

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 32, 128
ROWS, COLUMNS = PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS


def matmul_rate(tokens: int, config, repeats: int) -> float:
    """FLOP/s of x @ w with the model's largest weight: [tokens, embed] x [embed, mlp], best of
    a few."""
    x, w = jnp.ones((tokens, config.embed)), jnp.ones((config.embed, config.mlp))
    product = jax.jit(lambda x, w: x @ w)
    jax.block_until_ready(product(x, w))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(x, w))
        seconds.append(time.perf_counter() - start)
    return 2 * tokens * config.embed * config.mlp / min(seconds)


def forward_flops(config, params) -> float:
    """FLOPs of one forward pass over the batch: every weight but the embedding, and attention."""
    weights = sum(x.size for x in jax.tree.leaves(params)) - config.vocab_size * config.embed
    attention = 2 * 2 * config.layers * config.heads * config.head_dim * COLUMNS
    return ROWS * COLUMNS * (2 * weights + attention)


def timed(seconds: dict, name: str, function, *args, **options):
    start = time.perf_counter()
    out = jax.block_until_ready(function(*args, **options))
    seconds.setdefault(name, []).append(time.perf_counter() - start)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    compiles.watch()
    config = decoder(
        4096, layers=8, embed=512, mlp=1536, heads=8, kv_heads=4, head_dim=64, max_tokens=COLUMNS
    )
    config = dataclasses.replace(config, remat="none")
    model = Model(config, make_mesh())
    params = model.init(jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(lr=1e-5), 0)
    actor = Actor(start_training(model, params, optimizer), model, optimizer, 1.0)
    sampling = Sampling(max_response_tokens=NEW_TOKENS)
    algorithm = Algorithm(
        samples_per_prompt=SAMPLES,
        advantage=resolve("group_relative", NAMESPACES["advantage"]),
        policy_loss=resolve("ppo_clip", NAMESPACES["policy_loss"]),
        value_loss=resolve("squared_error", NAMESPACES["value_loss"]),
        reduction=resolve("token_mean", NAMESPACES["reduction"]),
        kl_in_reward=0.0, kl_in_loss=0.0, kl_estimator="k3", entropy_coef=0.0,
        steps=Steps(rows=ROWS, microbatch_rows=ROWS),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    logprobs = jax.jit(lambda actor, batch: actor.logprobs(batch))
    seconds: dict[str, list[float]] = {}
    rates = []
    first = time.perf_counter()
    for i in range(repeats + 1):
        prompts = rng.integers(0, 4096, (PROMPTS, PROMPT_TOKENS))
        lengths = np.full(PROMPTS, PROMPT_TOKENS)
        key = jax.random.key(i)
        batch = timed(
            seconds,
            "generate",
            generate,
            model,
            actor.state.params,
            prompts,
            lengths,
            key,
            sampling,
            n=SAMPLES,
        )
        scores = jnp.asarray(rng.integers(0, 2, ROWS), jnp.float32)
        batch = batch.replace(rewards=last_token(batch) * scores[:, None])
        timed(seconds, "logprobs", logprobs, actor, batch)
        start = time.perf_counter()
        new, _ = grpo(batch, key, algorithm, actor=actor, reference=None)
        actor = jax.block_until_ready(new["actor"])
        seconds.setdefault("learn", []).append(time.perf_counter() - start)
        rates.append(matmul_rate(ROWS * COLUMNS, config, 3))
        if i == 0:  # the first round compiles
            compile_s = time.perf_counter() - first
            seconds, rates = {}, []
    median = {k: statistics.median(v) for k, v in seconds.items()}
    flops = forward_flops(config, actor.state.params)
    matmul = statistics.median(rates)
    # learn = old log-probs (one forward) + forward and backward (three) of the update.
    learn_rate = 4 * flops / median["learn"]
    print(
        json.dumps(
            {
                "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
                "jax": jax.__version__,
                "repeats": repeats,
                "generate_tokens_per_s": ROWS * NEW_TOKENS / median["generate"],
                "generate_s": median["generate"],
                "logprobs_s": median["logprobs"],
                "learn_s": median["learn"],
                "step_s": median["generate"] + median["learn"],
                "spread_s": {k: [min(v), max(v)] for k, v in seconds.items()},
                "learn_gflop_per_s": learn_rate / 1e9,
                "matmul_gflop_per_s": matmul / 1e9,
                "learn_share_of_matmul": learn_rate / matmul,
                "first_round_s": compile_s,
                "compiles": compiles.count(),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
