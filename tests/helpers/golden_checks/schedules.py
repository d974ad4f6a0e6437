"""Golden checks of learning-rate schedules."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.config import OptimizerConfig
from rljax.learn.optimizers import learning_rate


def lr_schedule(case, dtype):
    """verl's schedules as fractions of the learning rate, step by step."""
    p = case.params
    warmup, total = p["num_warmup_steps"], p.get("num_training_steps", p["num_steps"])
    final, cycles = p.get("min_lr_ratio", 0.0), p.get("num_cycles", 0.5)
    start = p.get("init_lr_ratio") or 0.0
    if not p.get("zero_indexed_step", True):
        # verl then begins at its step 1: one step less of warm-up and of all, from its value there.
        start += (1 - start) / warmup
        warmup, total = warmup - 1, total - 1
    schedule = {
        "constant": "constant",
        "cosine": f"cosine(final={final}, cycles={cycles})",
        # verl gives the stable share, and falls by a cosine.
        "wsd": f"wsd(decay={1 - p.get('stable_ratio', 0.0)}, final={final}, shape='cosine')",
    }[p["kind"]]
    config = OptimizerConfig(
        lr=1.0, schedule=schedule, warmup_steps=warmup, warmup_from=float(start)
    )
    steps = np.arange(p["num_steps"])
    rates = jax.vmap(learning_rate(config, total))(jnp.asarray(steps, dtype))
    # Past its end a run takes no step: verl's cosine rises again there, ours stays.
    return {"output/lr": (rates, (steps <= total) | (p["kind"] != "cosine"))}


CHECKS = {"verl/lr_schedule": lr_schedule}
