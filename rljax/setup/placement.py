"""Placement: roles on groups of devices of their own, beside the mesh of all others.

config.placement names the roles of each group. Roles of one group share its devices and run one
after the other; different groups run at the same time. rollouts.sampler_devices is a group, too: it
samples while the others train.
"""

import dataclasses
import math

from jax.sharding import Mesh

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config
from rljax.contracts import contract, spec
from rljax.errors import InputError
from rljax.mesh import MESH_AXES, make_mesh
from rljax.suggest import near_names

# Role -> the config field that brings it; "": the dataflow asks for it.
PLACED = {
    "reference": "",
    "reward_model": "reward.model",
    "cost_model": "reward.cost_model",
    "judge": "reward.judge_model",
    "process_model": "reward.process_model",
}
SAMPLER = "sampler"  # the group of rollouts.sampler_devices
_TRAINED = "the program of the dataflow updates it, together with the actor"
_INSIDE = "the program of the dataflow reads it inside the update"
FIXED = {
    "actor": "its mesh is config.mesh, and the others are placed beside it",
    "critic": _TRAINED,
    "teacher": _INSIDE,
    "kl_controller": _TRAINED,
    "entropy_controller": _TRAINED,
    "baseline": _TRAINED,
}
_FORM = 'ROLE+ROLE=group(devices=..., tensor=...), such as "reference=group(devices=4)"'


@dataclasses.dataclass(frozen=True)
class RoleGroup:
    """Roles that share a mesh of their own."""

    roles: tuple[str, ...]
    mesh: Mesh

    @property
    def name(self) -> str:
        """Names of the roles, joined by "+"."""
        return "+".join(self.roles)


@contract(safe=True, places=True)
def group(
    free: list,
    *,
    devices: int,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
) -> Mesh:
    """Makes a mesh of the first `devices` of the `free` devices; the axes are those of config.mesh.
    Raises InputError if the sizes do not fit `devices`."""
    return make_mesh(data, fsdp, tensor, context=context, expert=expert, devices=free[:devices])


def parsed(text: str, own_roles=()) -> tuple[tuple[str, ...], Component]:
    """Returns the roles and the group of one text of config.placement. `own_roles`: the names of
    config.roles. Raises InputError for a text that is not ROLE=group(...), a role that cannot be
    placed, and sizes that do not divide the group, whatever devices there are."""
    names, equals, call = text.partition("=")
    roles = tuple(name.strip() for name in names.split("+"))
    if not equals or not all(roles) or not call.strip():
        fix = 'write such as "reference=group(devices=2)"'
        raise InputError("a group of config.placement", value=text, rule=_FORM, fix=fix)
    for role in roles:
        _check_role(role, text, own_roles)
    component = resolve(call.strip(), NAMESPACES["placement"])
    if not spec(component).places:
        fix = 'write such as "reference=group(devices=2)"'
        raise InputError(f"placement={text!r}", value=component.name, rule=_FORM, fix=fix)
    if "devices" not in component.options:
        raise InputError(
            f"placement={text!r}", rule="a group says how many devices it has", fix=_FORM
        )
    sizes = {"fsdp": -1, **{k: v for k, v in component.options.items() if k in MESH_AXES}}
    devices = component.options["devices"]
    if devices < 1:
        problem = f"placement={text!r}: a group with no devices"
        fix = f"devices=1 or more, or leave {names.strip()} out of it: on the mesh of the others"
        raise InputError(problem, value=devices, rule="devices >= 1", fix=fix)
    if any(size == 0 or size < -1 for size in sizes.values()):
        rule = "each size is >= 1, or -1 = what is left"
        fix = "write sizes of 1 or more, or -1 for one of them"
        raise InputError(f"placement={text!r}", rule=rule, fix=fix)
    if list(sizes.values()).count(-1) > 1:
        fix = "fsdp=1 beside the other"
        raise InputError(f"placement={text!r}", rule="at most one size is -1, as fsdp is", fix=fix)
    product = math.prod(size for size in sizes.values() if size > 0)
    fits = devices % product == 0 if -1 in sizes.values() else devices == product
    if not fits:
        requirement = "devices must be a multiple of" if -1 in sizes.values() else "devices must be"
        problem = f"placement={text!r}: the sizes do not divide the group"
        rule = f"{requirement} {product}, the product of the sizes"
        fix = f"devices={-(-devices // product) * product if -1 in sizes.values() else product}"
        raise InputError(problem, value=devices, rule=rule, fix=fix)
    return roles, component


def _check_role(role: str, text: str, own_roles) -> None:
    if role in PLACED:
        return
    rule = f"one of {', '.join(PLACED)}"
    if role in FIXED or role in own_roles:
        reason = FIXED.get(role, _INSIDE)
        problem = f"placement={text!r}: {role} cannot be placed"
        fix = f"leave {role} out of placement"
        raise InputError(problem, rule=f"{reason}; {rule} can", fix=fix)
    close = near_names(role, PLACED, 1)
    fix = f"did you mean {close[0]!r}?" if close else "name one of these"
    raise InputError(f"placement={text!r}: no such role", value=role, rule=rule, fix=fix)


def devices_apart(config: Config) -> int:
    """Returns the number of devices of all groups together."""
    placed = sum(parsed(text)[1].options["devices"] for text in config.placement)
    return placed + config.rollouts.sampler_devices


def divided(config: Config, devices: list) -> tuple[list, tuple[RoleGroup, ...]]:
    """Returns (the devices of config.mesh, the groups behind them). Raises InputError if the groups
    leave none, and for rollouts.sampler_devices on several processes."""
    group_devices, remaining = devices_apart(config), list(devices)
    check_room(config, len(remaining))
    main = remaining[: len(remaining) - group_devices]
    remaining = remaining[len(remaining) - group_devices :]
    groups = []
    for text in config.placement:
        roles, component = parsed(text)
        groups.append(RoleGroup(roles, component(remaining)))
        remaining = remaining[component.options["devices"] :]
    if remaining:
        processes = {device.process_index for device in devices}
        if len(processes) > 1:
            raise InputError(
                "rollouts.sampler_devices",
                value=config.rollouts.sampler_devices,
                rule=f"the devices are of {len(processes)} processes, and weights go from those "
                "that train to those that sample within one alone",
                fix="0: one mesh of all devices, which decodes on under the next weights",
            )
        groups.append(RoleGroup((SAMPLER,), make_mesh(len(remaining), 1, devices=remaining)))
    return main, tuple(groups)


def sampler_mesh(groups: tuple[RoleGroup, ...]) -> Mesh | None:
    """Returns the mesh that only samples, or None."""
    return next((group.mesh for group in groups if SAMPLER in group.roles), None)


def check_room(config: Config, devices: int) -> None:
    """Raises InputError unless the groups leave a device for the actor."""
    group_devices, sampling = devices_apart(config), config.rollouts.sampler_devices
    available = f"{devices} device{'s are' if devices > 1 else ' is'} there"
    if sampling >= devices:
        fix = f"{f'1 to {devices - 1}, or ' if devices > 1 else ''}0: one mesh"
        rule = f"{available}, and training needs one of them"
        raise InputError("rollouts.sampler_devices", value=sampling, rule=rule, fix=fix)
    if group_devices >= devices and config.placement:
        fix = f"groups of {devices - 1} devices together at most" if devices > 1 else "placement=()"
        rule = f"its groups take {group_devices} devices, {available}, and the actor needs one"
        raise InputError("placement", value=config.placement, rule=rule, fix=fix)


def dividing(rows: int, most: int) -> str:
    """Returns the counts of devices up to `most` that divide `rows`, for a message."""
    return ", ".join(str(n) for n in range(1, most + 1) if rows % n == 0)
