"""Optimizers from a config, and how their state is laid out. One instance per config, so that jit
caches hit.

A chain of clipping, the update rule (rljax.learn.update_rules) and the learning rate after warm-up
(rljax.learn.schedules).
"""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import jax
import jax.extend
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, OptimizerConfig
from rljax.contracts import is_zero
from rljax.errors import InputError


def rule_fields(config: OptimizerConfig) -> dict[str, float]:
    """Returns the fields of a config that an update rule may name as parameters."""
    return {
        "weight_decay": config.weight_decay,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
    }


def handed(component: Component, fields: dict) -> dict:
    """Returns those of `fields` that the function names as a parameter without a default."""
    return {name: value for name, value in fields.items() if name in component.positional}


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Returns step -> learning rate: linear warm-up over warmup_steps, then the schedule over the
    rest of `total_steps` optimizer steps."""
    warmup = config.warmup_steps
    schedule = resolve(config.schedule, NAMESPACES["schedule"])
    fields = {"lr": config.lr, "steps": max(total_steps - warmup, 1)}
    main = schedule(**handed(schedule, fields))
    if not warmup:
        return main
    warm_up = optax.linear_schedule(config.warmup_from * config.lr, config.lr, warmup)
    return optax.join_schedules([warm_up, main], [warmup])


def new_optimizer(fields: Mapping, total_steps: int) -> optax.GradientTransformation:
    """Returns an optimizer from the fields of an OptimizerConfig, of which numbers other than 0 may
    be traced. Raises InputError if a function of the user's returns no
    optax.GradientTransformation."""
    config = SimpleNamespace(**fields)
    rule = resolve(config.name, NAMESPACES["optimizer"])
    optimizer = rule(learning_rate(config, total_steps), **handed(rule, rule_fields(config)))
    if not isinstance(optimizer, optax.GradientTransformation):
        subject = f"an optimizer, {config.name}"
        raise InputError(
            subject,
            value=optimizer,
            rule="returns an optax.GradientTransformation",
            fix="return one from the function, such as optax.adam(lr)",
        )
    off = is_zero(config.clip_norm)
    clip = optax.identity() if off else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, optimizer)


@functools.cache
def _make(key: tuple, total_steps: int) -> optax.GradientTransformation:
    return new_optimizer(dict(key), total_steps)


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer that the config names, behind global-norm clipping (0 = off).
    Equal configs give the same object. Raises InputError if a function of the user's
    returns no optax.GradientTransformation."""
    counts = "steps" in resolve(config.schedule, NAMESPACES["schedule"]).positional
    return _make(tuple(sorted(vars(config).items())), total_steps if counts else 0)


@functools.cache
def _schedule(key: tuple, total_steps: int) -> Callable:
    """Returns the learning rate as one program instead of one per operation; a constant needs
    none."""
    schedule = learning_rate(OptimizerConfig(**dict(key)), total_steps)

    def lr(step):
        return schedule(step)

    traced = jax.make_jaxpr(lr)(np.int32(0)).jaxpr
    if not traced.eqns and isinstance(constant := traced.outvars[0], jax.extend.core.Literal):
        return lambda step: constant.val
    return jax.jit(lr)


def current_learning_rate(
    config: OptimizerConfig, total_steps: int, step: int
) -> jax.Array | float:
    """Returns the learning rate that optimizer step `step` uses, from 0: a scalar."""
    return _schedule(tuple(sorted(vars(config).items())), total_steps)(np.int32(step))


def _spec_of(shape: tuple, weight_shape: tuple, spec: tuple) -> tuple | None:
    """Returns the mesh axes of an array whose axes are, in their order, some of those of a weight
    with shape `weight_shape` and mesh axes `spec`, or neighbours of them joined; None for any other
    array."""
    if not shape:
        return ()
    for start in range(len(weight_shape)):
        size = 1
        for end in range(start, len(weight_shape)):
            size *= weight_shape[end]
            rest = None
            if size == shape[0]:
                rest = _spec_of(shape[1:], weight_shape[end + 1 :], spec[end + 1 :])
            if rest is not None:
                # Only the first of joined axes can be split without moving numbers.
                unsplit = all(axis is None for axis in spec[start + 1 : end + 1])
                return (spec[start] if unsplit else None, *rest)
    return None


def state_shardings(state, params, shardings, whole: NamedSharding):
    """Returns a sharding for every array of an optimizer state, which belongs to the weight whose
    path its own contains: that of the weight, or of those of its axes that it has (a factored
    moment, a matrix with its heads joined). Everything else, counters above all, is `whole`."""
    layouts = jax.tree.leaves(shardings)
    weights = {
        _names(path): (x.shape, sharding)
        for (path, x), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), layouts, strict=True
        )
    }

    def place(path, x):
        names = _names(path)
        ends = range(len(names), 0, -1)
        runs = (names[start:end] for end in ends for start in range(end))
        weight_shape, sharding = next((weights[run] for run in runs if run in weights), ((), whole))
        if x.shape == weight_shape:
            return sharding
        spec = tuple(sharding.spec) + (None,) * (len(weight_shape) - len(sharding.spec))
        axes = _spec_of(x.shape, weight_shape, spec)
        return whole if axes is None else NamedSharding(whole.mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(place, state)


def _names(path) -> tuple:
    """Returns the keys of dictionaries along a path: those of parameters, and few others."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
