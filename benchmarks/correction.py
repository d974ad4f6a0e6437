"""The cost of rollout correction inside a jitted learning step: prints JSON.

python benchmarks/correction.py [--repeats=10]

A step = old log-probs, then forward and backward of ppo_clip, then Adam, on 16 rows of 256 tokens
with a 7 M-parameter decoder (embed 256, 6 layers, vocabulary 4096, float32). The same step is
compiled without the correction, with its metrics alone, and with everything on; the three run in
turns. Time: median of the ratios of neighbouring runs. Memory: what the compiler reports.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import batch_from_rows
from rljax.config import OptimizerConfig
from rljax.correction import mismatch_metrics, rollout_correction
from rljax.learn import token_mean, weighted_loss
from rljax.learn.optimizers import make_optimizer
from rljax.losses.policy import PolicyOutputs, ppo_clip
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model

ROWS, COLUMNS, VOCABULARY = 16, 256, 4096
EVERYTHING = dict(
    level="sequence",
    mode="mask",
    upper=5.0,
    veto=1e-4,
    batch_normalise=True,
    reject=(("seq_mean_k1", -0.5, 0.5), ("token_k3", None, 1.0)),
)
VARIANTS = {
    "without": lambda batch: (batch, {}),
    "metrics": lambda batch: (batch, mismatch_metrics(batch)),
    "token_truncate": rollout_correction,
    "everything": lambda batch: rollout_correction(batch, **EVERYTHING),
}


def make_step(model, optimizer, correct):
    def step(params, opt_state, batch):
        old_logprobs, _ = model.logprobs(params, batch)
        batch, metrics = correct(batch.replace(old_logprobs=old_logprobs))

        def total(params):
            logprobs, entropy = model.logprobs(params, batch)
            loss, _ = ppo_clip(PolicyOutputs(logprobs, entropy), batch)
            return weighted_loss(loss, {}, batch, token_mean(batch))[0]

        loss, gradient = jax.value_and_grad(total)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return jax.tree.map(jnp.add, params, updates), opt_state, loss, metrics

    return jax.jit(step)


def make_batch():
    rng = np.random.default_rng(0)
    lengths = jnp.asarray(rng.integers(COLUMNS // 2, COLUMNS + 1, ROWS), jnp.int32)
    column = jnp.arange(COLUMNS)[None, :]
    mask = ((column >= 32) & (column < lengths[:, None])).astype(jnp.float32)

    def draw():
        return jnp.asarray(rng.standard_normal((ROWS, COLUMNS)), jnp.float32)

    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, COLUMNS)), jnp.int32)
    logprobs = -jnp.log(VOCABULARY) + 0.05 * draw()  # those of an untrained model, and some noise
    return batch_from_rows(tokens, lengths, mask, sampler_logprobs=logprobs, advantages=draw())


def memory_bytes(compiled) -> int:
    """Arguments, results and temporaries of the compiled step."""
    memory = compiled.memory_analysis()
    kinds = ("argument", "output", "temp")
    return sum(getattr(memory, f"{kind}_size_in_bytes") for kind in kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    config = decoder(
        VOCABULARY,
        layers=6,
        embed=256,
        mlp=768,
        heads=8,
        kv_heads=4,
        head_dim=32,
        max_tokens=COLUMNS,
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params = model.init(jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(lr=1e-5), 0)
    arguments = (params, optimizer.init(params), make_batch())
    steps = {
        name: make_step(model, optimizer, correct).lower(*arguments).compile()
        for name, correct in VARIANTS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for i in range(repeats + 1):
        names = list(VARIANTS)[:: 1 if i % 2 else -1]  # either order, so that a drift cancels
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(steps[name](*arguments))
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    report = {"device": jax.devices()[0].device_kind, "rows": ROWS, "columns": COLUMNS}
    base = memory_bytes(steps["without"])
    for name in VARIANTS:
        ratios = [a / b for a, b in zip(seconds[name], seconds["without"], strict=True)]
        report[name] = {
            "seconds": statistics.median(seconds[name]),
            "fastest_s": min(seconds[name]),
            "time_ratio": statistics.median(ratios),
            "memory_mb": memory_bytes(steps[name]) / 2**20,
            "memory_ratio": memory_bytes(steps[name]) / base,
        }
    # The correction by itself, against the step: steadier than the difference of two long runs.
    alone = jax.jit(VARIANTS["everything"])
    batch = arguments[2]
    batch = batch.replace(old_logprobs=batch.sampler_logprobs + 0.01)
    jax.block_until_ready(alone(batch))
    runs = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(alone(batch))
        runs.append(time.perf_counter() - start)
    report["alone_s"] = statistics.median(runs)
    report["alone_share_of_step"] = report["alone_s"] / report["without"]["seconds"]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
