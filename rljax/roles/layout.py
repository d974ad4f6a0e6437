"""Where training keeps its arrays: the layout of weights, moments and counters on the mesh."""

import dataclasses
import functools

import jax

from rljax.learn.optimizers import state_shardings
from rljax.learn.state import TrainState, new_train_state
from rljax.mesh import on_host, replicated, runs_once
from rljax.models.model import Model


def role_shardings(model: Model, state: TrainState) -> TrainState:
    """Parameters on the layout of the weights, and so every optimizer moment of theirs; counters
    whole."""
    (trained, frozen), whole = model.split(model.shardings()), replicated(model.mesh)
    moments = state_shardings(state.opt_state, state.params, trained, whole)
    # {}: frozen weights that are not part of the state at hand.
    return TrainState(trained, moments, whole, whole, whole, frozen if state.frozen else {})


def training_layout(model: Model, optimizer, *, optimizer_on_host: bool = False) -> TrainState:
    """Shape, dtype and sharding of all that training holds of `model`: what a program is compiled
    for ahead of time, and what `start_training` makes."""
    trained, frozen = model.split(model.abstract())
    like = jax.eval_shape(functools.partial(new_train_state, optimizer=optimizer), trained)
    layout = role_shardings(model, like)
    if optimizer_on_host:  # counters stay: every device reads them
        moments = jax.tree.map(
            lambda sharding, x: on_host(sharding) if x.ndim else sharding,
            layout.opt_state, like.opt_state,
        )  # fmt: skip
        layout = dataclasses.replace(layout, opt_state=moments)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, layout
    )
    return dataclasses.replace(shapes, frozen=frozen)


def start_training(model: Model, params, optimizer, *, optimizer_on_host=False) -> TrainState:
    """A fresh optimizer state around all weights `params`, placed as `program` will hand it back:
    one compile, not two. Of a model with adapters only they are trained."""
    trained, frozen = model.split(params)
    layout = training_layout(model, optimizer, optimizer_on_host=optimizer_on_host)
    shardings = jax.tree.map(lambda x: x.sharding, dataclasses.replace(layout, frozen={}))
    create = functools.partial(new_train_state, optimizer=optimizer)
    options = runs_once(model.mesh)
    made = jax.jit(create, out_shardings=shardings, compiler_options=options)(trained)
    return dataclasses.replace(made, params=trained, frozen=frozen)
