"""Layout of training's arrays: that of weights, moments and counters on the mesh."""

import dataclasses
import functools
import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rljax.learn.optimizers import state_shardings
from rljax.learn.replicas import Replicas
from rljax.learn.rounding import check_trainable
from rljax.learn.state import AS_WEIGHTS, DataParallel, StepLayout, TrainState, new_train_state
from rljax.mesh import on_host, replica_mesh, replicated, runs_once
from rljax.models.model import Model


def role_shardings(model: Model, state: TrainState) -> TrainState:
    """Returns the layout of a training state: parameters on the layout of the weights, and so
    every optimizer moment of theirs, or with `state.spread.moments` split over data, too;
    counters whole."""
    (trained, frozen), unsplit = model.split(model.shardings()), replicated(model.mesh)
    moments = state_shardings(state.opt_state, state.params, trained, unsplit)
    if state.spread.moments:
        moments = jax.tree.map(split_over_data, state.opt_state, moments)
    # {}: frozen weights that are not part of the state at hand.
    frozen = frozen if state.frozen else {}
    precision = jax.tree.map(lambda x: unsplit, state.precision)
    return TrainState(trained, moments, unsplit, unsplit, unsplit, frozen, state.spread, precision)


def split_over_data(x, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of an array, split over data, too: along the axis that is split
    already, so that no other number moves, else along the longest that divides. An array without
    such an axis stays as it is."""
    data, sizes = sharding.mesh.shape["data"], sharding.mesh.shape
    spec = [*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec))]
    names = [axes if isinstance(axes, tuple) else (axes,) * (axes is not None) for axes in spec]
    part_counts = [math.prod(sizes[name] for name in axes) for axes in names]
    candidates = [
        i for i, size in enumerate(x.shape) if size % (part_counts[i] * data) == 0 and size
    ]
    if data == 1 or not candidates:
        return sharding
    axis = max(candidates, key=lambda i: (part_counts[i], x.shape[i]))
    spec[axis] = (*names[axis], "data")
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def step_layout(model: Model, state: TrainState) -> StepLayout | None:
    """Returns the layout in which an optimizer step computes, of a state whose moments are split
    further than its weights."""
    if not state.spread.moments:
        return None
    weights, _ = model.split(model.shardings())
    return StepLayout(jax.tree.map(split_over_data, state.params, weights), weights)


def replicas_of(model: Model, state: TrainState) -> Replicas:
    """Returns the number of replicas of the weights along data, where their gradients meet once
    per optimizer step.

    A mixture of experts is summed in every microbatch: JAX (0.10) cannot map the gradient of its
    shard_map over replicas.
    """
    count = model.mesh.shape["data"]
    if count == 1 or not state.spread.sum_once or model.config.experts is not None:
        return Replicas(1, model)
    return Replicas(count, dataclasses.replace(model, mesh=replica_mesh(model.mesh)))


def training_layout(
    model: Model, optimizer, *, optimizer_on_host: bool = False, spread: DataParallel = AS_WEIGHTS
) -> TrainState:
    """Returns shape, dtype and sharding of all that training holds of `model`: what a program is
    compiled for ahead of time, and what `start_training` makes."""
    trained, frozen = model.split(model.abstract())
    check_trainable(trained)
    state_shapes = jax.eval_shape(_create(model, optimizer, spread), trained)
    layout = role_shardings(model, state_shapes)
    if optimizer_on_host:  # counters stay: every device reads them
        moments = jax.tree.map(
            lambda sharding, x: on_host(sharding) if x.ndim else sharding,
            layout.opt_state,
            state_shapes.opt_state,
        )
        layout = dataclasses.replace(layout, opt_state=moments)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state_shapes, layout
    )
    return dataclasses.replace(shapes, frozen=frozen)


@functools.lru_cache(maxsize=16)  # equal models and optimizers share a program
def _create(model: Model, optimizer, spread: DataParallel):
    """Returns a function (trained weights, key of their rounding) -> the state before the first
    step."""
    scaled = model.config.dtype == "float16"

    def create(params, rounding=None):
        options = dict(spread=spread, scaled=scaled, rounding=rounding)
        return new_train_state(params, optimizer, **options)

    return create


def start_training(
    model: Model,
    params,
    optimizer,
    *,
    optimizer_on_host=False,
    spread: DataParallel = AS_WEIGHTS,
    rounding: jax.Array | None = None,
) -> TrainState:
    """Returns a fresh optimizer state around all weights `params`, placed as `program` will hand it
    back: one compile, not two. Of a model with adapters only they are trained. `rounding` is the
    random key of weights that are held in bfloat16 (default: of seed 0)."""
    trained, frozen = model.split(params)
    placement = dict(optimizer_on_host=optimizer_on_host, spread=spread)
    layout = training_layout(model, optimizer, **placement)
    shardings = jax.tree.map(lambda x: x.sharding, dataclasses.replace(layout, frozen={}))
    create, options = _create(model, optimizer, spread), runs_once(model.mesh)
    create = jax.jit(create, out_shardings=shardings, compiler_options=options)
    state = create(trained) if rounding is None else create(trained, rounding)
    return dataclasses.replace(state, params=trained, frozen=frozen)
