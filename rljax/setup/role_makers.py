"""Makers of roles for config.roles: "implicit=trained_policy(lr=1e-6)".

A maker of your own is a function (inputs, **options) -> Role of rljax.setup.role_table.RoleInputs.
"""

import dataclasses

import jax

from rljax.config import OptimizerConfig
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.roles import Actor, Critic, Reference, Role
from rljax.roles.role import static_field
from rljax.setup.role_table import RoleInputs, frozen_folder, make_reference, scalar_start
from rljax.setup.weights import check_same_vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Number(Role):
    """A float32 array that a dataflow renews: a Lagrange multiplier, a moving mean."""

    state: jax.Array
    name: str = static_field("")

    def replace(self, state) -> "Number":
        return dataclasses.replace(self, state=state)


def number(inputs: RoleInputs, *, initial: float = 0.0, size: int = 0) -> Number:
    """A role that holds one float32 number, or `size` of them."""
    return Number(inputs.number([initial] * size if size else initial), inputs.name)


def trained_policy(
    inputs: RoleInputs, *, folder: str = "", lr: float = 1e-6, schedule: str = "constant",
    warmup_steps: int = 0, weight_decay: float = 0.0, clip_norm: float = 1.0,
    optimizer: str = "adamw",
) -> Actor:  # fmt: skip
    """A second policy that the dataflow trains, with metrics named NAME/...: it starts from the
    weights of `folder`, or from the policy's. The optimizer's options are those of
    OptimizerConfig."""
    model, params = inputs.setup.model, inputs.params
    if folder:
        wanted = load_config(folder, **dataclasses.asdict(inputs.config.model_settings))
        check_same_vocabulary(f"role {inputs.name}", folder, wanted, model)
        model = Model(wanted, model.mesh)
        params = inputs.loaded(folder, model)
    else:
        own, base = model.split(params)
        params = merged(inputs.copied(own), base)
    settings = OptimizerConfig(
        name=optimizer, lr=lr, schedule=schedule, warmup_steps=warmup_steps,
        weight_decay=weight_decay, clip_norm=clip_norm,
    )  # fmt: skip
    made = inputs.optimizer(settings)
    temperature = inputs.config.sampler.temperature
    state = inputs.training(model, params, made)
    return Actor(state, model, made, temperature, inputs.setup.decoding, f"{inputs.name}/")


def trained_values(
    inputs: RoleInputs, *, lr: float = 1e-5, schedule: str = "constant", warmup_steps: int = 0,
    weight_decay: float = 0.0, clip_norm: float = 1.0, optimizer: str = "adamw",
) -> Critic:  # fmt: skip
    """A second critic (of costs, say), with metrics named NAME/...; starts as `critic` does. The
    optimizer's options are those of OptimizerConfig."""
    settings = OptimizerConfig(
        name=optimizer, lr=lr, schedule=schedule, warmup_steps=warmup_steps,
        weight_decay=weight_decay, clip_norm=clip_norm,
    )  # fmt: skip
    made = inputs.optimizer(settings)
    model, body = scalar_start(inputs)
    return Critic(inputs.training(model, body, made), model, made, f"{inputs.name}/")


def frozen_policy(inputs: RoleInputs, *, folder: str = "") -> Reference:
    """A frozen policy: the one of `folder`, or the policy as the phase begins."""
    if not folder:
        return make_reference(inputs)
    return frozen_folder(inputs, f"role {inputs.name}", folder)
