"""The `program` that jits a learning phase, and the layout of what training holds.

What lives here: donation, shardings, the state before the first step. What does not: any verb.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from rljax.arrays import fetch
from rljax.learn.optimizers import state_shardings
from rljax.learn.state import TrainState, new_train_state
from rljax.mesh import on_host, replicated
from rljax.models.model import Model
from rljax.recording import Call, calls
from rljax.roles.models import Actor, Critic, RewardModel
from rljax.roles.state import Baseline, KLController
from rljax.tracking.timing import timed

WITH_OPTIMIZER = (Actor, Critic, RewardModel)
TRAINED = (*WITH_OPTIMIZER, KLController, Baseline)  # what a program may return anew


def _state_shardings(model: Model, state: TrainState) -> TrainState:
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
    layout = _state_shardings(model, like)
    if optimizer_on_host:  # counters stay: every device reads them
        waits = lambda sharding, x: on_host(sharding) if x.ndim else sharding  # noqa: E731
        moments = jax.tree.map(waits, layout.opt_state, like.opt_state)
        layout = dataclasses.replace(layout, opt_state=moments)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    return dataclasses.replace(jax.tree.map(place, like, layout), frozen=frozen)


def start_training(model: Model, params, optimizer, *, optimizer_on_host=False) -> TrainState:
    """A fresh optimizer state around all weights `params`, placed as `program` will hand it back:
    one compile, not two. Of a model with adapters only they are trained."""
    trained, frozen = model.split(params)
    layout = training_layout(model, optimizer, optimizer_on_host=optimizer_on_host)
    shardings = jax.tree.map(lambda x: x.sharding, dataclasses.replace(layout, frozen={}))
    create = functools.partial(new_train_state, optimizer=optimizer)
    made = jax.jit(create, out_shardings=shardings)(trained)
    return dataclasses.replace(made, params=trained, frozen=frozen)


def _pin(role):
    """Inside a program: keep a trained role on the layout it came with, so that no step re-lays it
    out."""
    if not isinstance(role, WITH_OPTIMIZER):
        return role
    shardings = _state_shardings(role.model, role.state)
    return dataclasses.replace(role, state=jax.lax.with_sharding_constraint(role.state, shardings))


def _with_frozen(role, frozen: dict | None):
    """The role with these frozen weights; a role without an optimizer has none."""
    if not isinstance(role, WITH_OPTIMIZER):
        return role
    return dataclasses.replace(role, state=dataclasses.replace(role.state, frozen=frozen))


def program(function: Callable) -> Callable:
    """jit of a learning phase: (batch, cfg, *, roles...) -> ({role: new role}, metrics).

    `cfg` is static. Trained roles are donated and keep their shardings; frozen ones are only read,
    and so are the frozen weights of a trained role, which roles may share.
    """

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
    def run(batch, cfg, trained, held, frozen):
        trained = {name: _with_frozen(role, held.get(name)) for name, role in trained.items()}
        new, metrics = function(batch, cfg, **trained, **frozen)
        # A trained role that the dataflow did not return is handed back as it was: it was donated
        # too.
        new = {name: _with_frozen(role, {}) for name, role in {**trained, **new}.items()}
        return {name: _pin(role) for name, role in new.items()}, metrics

    @functools.wraps(function)
    def call(batch, cfg, **roles):
        trained = {k: r for k, r in roles.items() if isinstance(r, TRAINED)}
        frozen = {k: r for k, r in roles.items() if k not in trained}
        held = {k: r.state.frozen for k, r in trained.items() if isinstance(r, WITH_OPTIMIZER)}
        bare = {k: _with_frozen(r, {}) for k, r in trained.items()}
        if (noted := calls()) is not None:
            noted.append(Call("learn", run, (batch, cfg, bare, held, frozen)))
            return trained, {}
        with timed("learn"):
            new, metrics = run(batch, cfg, bare, held, frozen)
            new = {k: _with_frozen(r, held.get(k)) for k, r in new.items()}
            return new, fetch(metrics)

    call.run = run
    return call
