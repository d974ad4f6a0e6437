"""Makers of roles for config.roles: "implicit=trained_policy(lr=1e-6)".

A maker of your own is a function (inputs, **options) -> Role of rljax.setup.role_table.RoleInputs.
"""

import dataclasses
import math
from typing import Any

import jax

from rljax.config import NAMESPACES, OptimizerConfig, model_fields
from rljax.contracts import component_in, contract
from rljax.errors import InputError
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.roles import Actor, Critic, Multiplier, Reference, Role
from rljax.roles.role import static_field
from rljax.search import Value
from rljax.search.evaluators import Reads
from rljax.setup.role_table import RoleInputs, frozen_folder, make_reference, scalar_start
from rljax.setup.same_ids import line_ids_of
from rljax.setup.weights import reading_same_ids, scalar_model, step_separator_of

OptimizerText = component_in(NAMESPACES["optimizer"])
ScheduleText = component_in(NAMESPACES["schedule"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Number(Role):
    """A float32 array, scalar or [size], that a dataflow updates: a Lagrange multiplier, a
    moving mean."""

    state: jax.Array
    name: str = static_field("")

    def replace(self, state) -> "Number":
        """Returns a copy with another array."""
        return dataclasses.replace(self, state=state)


@contract(safe=True)
def number(inputs: RoleInputs, *, initial: float = 0.0, size: int = 0) -> Number:
    """Makes a role that holds one float32 number, or `size` of them."""
    return Number(inputs.number([initial] * size if size else initial), inputs.name)


@contract(safe=True)
def trained_policy(
    inputs: RoleInputs,
    *,
    folder: str = "",
    lr: float = 1e-6,
    schedule: ScheduleText = "constant",
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
    optimizer: OptimizerText = "adamw",
) -> Actor:
    """Makes a second policy that the dataflow trains, with metrics named NAME/...: it
    starts from the weights of `folder`, or from the policy's. The optimizer's options are
    those of OptimizerConfig."""
    model, params = inputs.setup.model, inputs.params
    if folder:
        model_config = load_config(folder, **model_fields(inputs.config))
        field, tokenizer = f"role {inputs.name}", inputs.setup.tokenizer
        model_config = reading_same_ids(field, folder, model_config, model, tokenizer)
        model = Model(model_config, model.mesh)
        params = inputs.loaded(folder, model)
    else:
        trained, base = model.split(params)
        params = merged(inputs.copied(trained), base)
    settings = OptimizerConfig(
        name=optimizer,
        lr=lr,
        schedule=schedule,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    transform = inputs.optimizer(settings)
    temperature = inputs.config.sampler.temperature
    state = inputs.training(model, params, transform)
    return Actor(state, model, transform, temperature, inputs.setup.decoding, f"{inputs.name}/")


@contract(safe=True)
def trained_values(
    inputs: RoleInputs,
    *,
    lr: float = 1e-5,
    schedule: ScheduleText = "constant",
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
    optimizer: OptimizerText = "adamw",
    folder: str = "",
) -> Critic:
    """Makes a second critic (of costs, say), with metrics named NAME/...: it starts from the
    reward model or cost model of `folder`, else as `critic` does. The optimizer's options are
    those of OptimizerConfig."""
    settings = OptimizerConfig(
        name=optimizer,
        lr=lr,
        schedule=schedule,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
    )
    transform = inputs.optimizer(settings)
    model, body = scalar_start(inputs, folder=folder, field=f"role {inputs.name}")
    return Critic(inputs.training(model, body, transform), model, transform, f"{inputs.name}/")


@contract(safe=True)
def lagrange_multiplier(
    inputs: RoleInputs,
    *,
    initial: float = 1.0,
    lr: float = 0.1,
    threshold: float = 0.0,
    maximum: float = 5.0,
    window: int = 128,
) -> Multiplier:
    """Makes the multiplier of a constraint E[cost] <= threshold (rljax.roles.Multiplier), with
    metrics named NAME/...: it starts at `initial` and learns by SGD of its logarithm with rate
    `lr`, from the mean cost of the last `window` episodes. lr=0 keeps it as it is. Raises
    InputError unless 0 <= initial <= maximum, maximum > 0, lr >= 0, window >= 1, and threshold and
    maximum are finite."""
    for name, value, fits, rule in (
        ("initial", initial, 0 <= initial <= maximum, f"from 0 to maximum={maximum}"),
        ("lr", lr, lr >= 0, "0 (fixed) or more"),
        ("maximum", maximum, 0 < maximum < math.inf, "above 0"),
        ("window", window, isinstance(window, int) and window >= 1, "1 episode or more"),
        ("threshold", threshold, math.isfinite(threshold), "a finite cost"),
    ):
        if not fits:
            fix = f"set {name} to such a value, or leave it out"
            raise InputError(f"lagrange_multiplier({name})", value=value, rule=rule, fix=fix)
    state = {
        "log": inputs.number(math.log(initial) if initial else -math.inf),
        "costs": inputs.number([0.0] * window),
        "seen": inputs.number(0.0),
    }
    return Multiplier(state, lr, threshold, maximum, f"{inputs.name}/")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guide(Role):
    """A frozen model with a scalar head that guides a search by how good a text is. It is loaded
    from its folder, so a checkpoint leaves it out."""

    trained = False
    checkpointed = False

    state: Any
    model: Model = static_field()
    reads: Reads = static_field("outcome")
    line_ids: tuple[int, ...] = static_field(())

    @property
    def value(self) -> Value:
        """The value function that the search calls."""
        return Value(self.model, self.state, self.reads, self.line_ids)


@contract(safe=True)
def value_model(inputs: RoleInputs, *, folder: str, reads: Reads = "outcome") -> Guide:
    """Makes the value model of the rollout guided_search: the reward model of a folder, read after
    the last token ("outcome"), or a process reward model, read at the ends of lines ("process")."""
    setup, field = inputs.setup, f"role {inputs.name}"
    settings = model_fields(inputs.config)
    model_config = dataclasses.replace(load_config(folder, **settings), labels=1)
    model_config = reading_same_ids(field, folder, model_config, setup.model, setup.tokenizer)
    model = Model(model_config, setup.model.mesh, "scalar")
    params = model.abstract()
    if not inputs.abstract:
        source = (inputs.config, setup.model, setup.tokenizer, field, folder)
        params = scalar_model(*source, trained=False)[1]
    lines = ()
    if reads == "process":
        separator = step_separator_of(folder)
        lines = line_ids_of(setup.tokenizer, model_config.vocab_size, separator, field)
    return Guide(params, model, reads, lines)


@contract(safe=True)
def frozen_policy(inputs: RoleInputs, *, folder: str = "") -> Reference:
    """Makes a frozen policy: the one of `folder`, or the policy as the phase begins."""
    if not folder:
        return make_reference(inputs)
    return frozen_folder(inputs, f"role {inputs.name}", folder)
