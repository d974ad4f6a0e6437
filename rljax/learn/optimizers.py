"""Optimizers from a config, built with optax. One instance per config, so that jit caches hit."""

import functools

import jax
import jax.numpy as jnp
import optax

from rljax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """step -> learning rate: linear warm-up over warmup_steps, then constant, linear or cosine to
    0."""
    warmup = config.warmup_steps
    rest = max(total_steps - warmup, 1)
    after = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(config.lr, rest),
    }[config.schedule]
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, warmup), after], [warmup])


def _decayed(params):
    """Weight decay touches matrices only: norm scales and biases are left alone."""

    def is_matrix(path, _):
        name = path[-1].key
        return name not in ("scale", "bias", "sinks", "correction") and not name.endswith("_bias")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


@functools.cache
def _make(key: tuple, total_steps: int) -> optax.GradientTransformation:
    config = OptimizerConfig(**dict(key))
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(config.weight_decay, _decayed)
        if config.weight_decay
        else optax.identity(),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW with global-norm clipping (0 = off). Equal configs give the same object."""
    key = tuple(sorted(vars(config).items()))
    return _make(key, total_steps if config.schedule != "constant" else 0)


def current_learning_rate(config: OptimizerConfig, total_steps: int, step) -> jnp.ndarray:
    """The learning rate that optimizer step `step` uses."""
    return jnp.asarray(learning_rate(config, total_steps)(step))
