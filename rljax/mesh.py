"""The device mesh, and the rules that map a weight's logical axes to mesh axes.

Mesh axes: data (replicas), fsdp (rows of the batch and shards of every weight), expert (rows of
the batch, and the experts of a mixture), context (tokens of a row), tensor (heads, mlp,
vocabulary). The rows of a batch are split over data x fsdp x expert.

Chips of one slice are wired to each other (ICI). Slices meet over the data center's network (DCN):
of all axes data alone reaches from one slice to another.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax.errors import InputError

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
REPLICA = "replica"
HOST_MEMORY = "pinned_host"
RUNS = "runs"  # of jax.vmap, where one program takes the steps of several runs

# logical axis of a weight -> mesh axis. Every logical axis is listed; an unlisted one is an error.
RULES: dict[str | None, str | None] = {
    None: None,
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "key_heads": "tensor",  # of a gated delta net
    "value_heads": "tensor",
    "channels": "tensor",  # of a short convolution
    "taps": None,  # of a convolution over tokens
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "router": None,
    "latent": None,
    "rank": None,
    "patch": None,  # pixel values of a patch of an image
    "position": None,  # learned position embeddings
    "qkv": None,  # the three outputs of a projection to queries, keys and values
    "norm": None,
    "scalar": None,
}


def make_mesh(
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    *,
    context: int = 1,
    expert: int = 1,
    slices: int = -1,
    devices=None,
) -> Mesh:
    """Returns a Mesh over `devices` (default: all). One size may be -1: it takes what is left.
    Raises InputError unless the product of the sizes is the number of devices, and for slices that
    do not divide data.

    `slices` of devices are the outermost part of data; -1: as many as the devices say. Within a
    slice neighbours on the mesh are neighbours on the wires.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)
    sizes_text = ", ".join(f"mesh.{k}={v}" for k, v in sizes.items())
    if any(v == 0 or v < -1 for v in sizes.values()) or list(sizes.values()).count(-1) > 1:
        rule = "each is >= 1, and at most one is -1"
        fix = "--config.mesh.fsdp=-1 and 1 for the other axes: all devices split the weights"
        raise InputError(f"bad mesh sizes {sizes_text}", rule=rule, fix=fix)
    known_product = math.prod(v for v in sizes.values() if v > 0)
    if -1 in sizes.values():
        if len(devices) % known_product:
            problem = f"mesh {sizes_text} does not divide the devices"
            fix = f"choose sizes whose product divides {len(devices)}"
            raise InputError(problem, value=len(devices), fix=fix)
        sizes = {k: len(devices) // known_product if v == -1 else v for k, v in sizes.items()}
    elif known_product != len(devices):
        problem = f"mesh {sizes_text} needs {known_product} devices"
        fix = "set one size to -1 so that it takes what is left"
        raise InputError(problem, value=len(devices), fix=fix)
    parts = _slices(devices, slices)
    if sizes["data"] % len(parts):
        problem = f"mesh.data={sizes['data']} does not divide by {len(parts)} slices"
        fix = f"--config.mesh.data={len(parts)} or a multiple of it, and mesh.fsdp=-1"
        raise InputError(problem, rule="data alone reaches from one slice to another", fix=fix)
    shape = (sizes["data"] // len(parts), *list(sizes.values())[1:])
    grid = np.concatenate([_wired(part, shape) for part in parts])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def slice_of(device) -> int:
    """Returns the slice of a device, as it says itself; 0 where devices have none."""
    return getattr(device, "slice_index", 0)  # JAX gives it to TPUs of several slices alone


def _slices(devices: list, slices: int) -> list[list]:
    """Returns the devices slice by slice. Devices that name no slice are cut in their order into
    `slices` parts of whole hosts, which then play slices."""
    named = {slice_of(device) for device in devices}
    if len(named) > 1:
        parts = [[d for d in devices if slice_of(d) == index] for index in sorted(named)]
        if slices not in (-1, len(parts)):
            rule = f"the devices are of {len(parts)} slices"
            raise InputError("mesh.slices", value=slices, rule=rule, fix="leave it at -1")
        if len({len(part) for part in parts}) > 1:
            problem = "slices of several sizes"
            rule = "all alike"
            fix = "leave the devices of incomplete slices out, or start the run on whole slices"
            raise InputError(problem, value=[len(part) for part in parts], rule=rule, fix=fix)
        return parts
    slices = max(slices, 1)
    size = len(devices) // slices
    parts = [devices[size * i : size * (i + 1)] for i in range(slices)]
    hosts = [{device.process_index for device in part} for part in parts]
    splits_hosts = (
        any(a & b for a, b in itertools.combinations(hosts, 2)) and len(set.union(*hosts)) > 1
    )
    if size * slices != len(devices) or splits_hosts:
        raise InputError(
            "mesh.slices",
            value=slices,
            rule=f"cuts {len(devices)} devices of {len(set.union(*hosts))} hosts into equal parts "
            "of whole hosts",
            fix="--config.mesh.slices=-1, which takes the slices of the devices",
        )
    return parts


def _wired(devices: list, shape: tuple[int, ...]) -> np.ndarray:
    """Arranges the devices of one slice in a grid, in which the innermost axes run along the
    shortest ways of a TPU's torus."""
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except AssertionError:  # no block of whole chips: every order is as good
        return np.array(devices).reshape(shape)


def slice_count(mesh: Mesh, slices: int = -1) -> int:
    """Returns the number of slices of a mesh that was made with `slices`."""
    return slices if slices > 0 else len({slice_of(device) for device in mesh.devices.flat})


def replica_mesh(mesh: Mesh) -> Mesh:
    """Returns the same devices in the same order, with data apart as the outermost axis REPLICA:
    what is mapped over it (`jax.vmap(..., spmd_axis_name=REPLICA)`) sees a mesh whose data is 1."""
    grid = mesh.devices.reshape(mesh.shape["data"], 1, *mesh.devices.shape[1:])
    return Mesh(grid, (REPLICA, *MESH_AXES), axis_types=(AxisType.Auto,) * (len(MESH_AXES) + 1))


def runs_once(mesh: Mesh) -> dict:
    """Returns the compiler options of a program that runs once, before the first step: on CPU it
    takes seconds to optimise and milliseconds to run."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else {}


def weight_sharding(
    mesh: Mesh, name: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> NamedSharding:
    """Returns the sharding of one weight, from its logical axes.

    A mesh axis that does not divide the axis that it should split takes the embed axis in its
    place, or another one that it divides, and none where there is none: the weight is whole along
    it. Programs compute with sizes that divide (rljax.models.padding). Raises InputError for
    experts that do not divide: none is added to them.
    """
    mesh_axes: list[tuple[str, ...]] = []
    for size, axis in zip(shape, axes, strict=True):
        if axis not in RULES:
            rule = f"known: {', '.join(filter(None, RULES))}"
            fix = f"name one of these, or None, for each axis of {name!r}"
            raise InputError(f"weight {name!r} names logical axis {axis!r}", rule=rule, fix=fix)
        target = RULES[axis]
        fits = target is not None and size % mesh.shape[target] == 0
        if axis == "experts" and not fits:
            raise InputError(
                f"weight {name!r}: axis {axis} of {size} does not divide "
                f"by mesh.{target}={mesh.shape[target]}",
                fix=f"choose mesh.{target} from the divisors of {size}",
            )
        mesh_axes.append((target,) if fits else ())
    targets = [RULES[axis] for axis in axes if RULES[axis]]
    # The embed axis comes first, then the others that the rules split.
    order = sorted(range(len(axes)), key=lambda i: axes[i] != "embed")
    order = [i for i in order if RULES[axes[i]] and axes[i] != "experts"]
    for target in dict.fromkeys(x for x in targets if not any(x in names for names in mesh_axes)):
        for i in order:
            parts = math.prod(mesh.shape[x] for x in (*mesh_axes[i], target))
            if shape[i] % parts == 0:
                mesh_axes[i] = (*mesh_axes[i], target)
                break
    spec = [names[0] if len(names) == 1 else names or None for names in mesh_axes]
    return NamedSharding(mesh, PartitionSpec(*spec))


def highest_of_runs(x: jax.Array) -> jax.Array:
    """Returns x, a scalar, or where one program takes the steps of several runs the highest of
    theirs. A loop or branch that asks for it stays one for all of them; by a number of each run
    alone, vmap would take every branch, and copy the state of a loop in each round."""
    try:
        jax.lax.axis_size(RUNS)
    except NameError:  # the program is of one run
        return x
    return jax.lax.pmax(x, RUNS)


def undivided(mesh: Mesh, weights: dict[tuple, tuple]) -> list[str]:
    """Returns the axes of weights, {path: (shape, logical axes)}, that their mesh
    axes do not divide."""
    wrong = {
        f"{axis} of {size}": None
        for shape, axes in weights.values()
        for size, axis in zip(shape, axes, strict=True)
        if RULES[axis] and size % mesh.shape[RULES[axis]]
    }
    return list(wrong)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the layout of rows over data x fsdp x expert, with everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the layout that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_shards(mesh: Mesh) -> int:
    """Returns the number of parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[a] for a in BATCH_AXES)


def on_host(shardings):
    """Returns the same layouts in the memory of the hosts, from where devices can
    copy by themselves."""
    return jax.tree.map(lambda s: s.with_memory_kind(HOST_MEMORY), shardings)


def check_host_memory(mesh: Mesh, wanted_by: str) -> None:
    """Raises InputError where the devices of the mesh cannot copy from and to their host."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise InputError(
            f"{wanted_by} needs {HOST_MEMORY} memory",
            value=f"{device.platform} devices with {', '.join(kinds)}",
            fix="turn it off",
        )


def is_on_host(x) -> bool:
    """Returns whether an array lies in the memory of the hosts (inside or outside a program)."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def in_device_memory(tree):
    """Copies what waits on the host to the devices (inside or outside a program)."""

    def fetch(x):
        return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x

    return jax.tree.map(fetch, tree)


def in_memory_of(like, tree):
    """Returns `tree` with every array in the memory, device or host, where that of `like` lies."""

    def send(x, reference):
        return jax.device_put(x, jax.memory.Space.Host) if is_on_host(reference) else x

    return jax.tree.map(send, tree, like)


def _split_by(x: jax.Array, mesh: Mesh, *axes) -> jax.Array:
    """Keeps each of the leading axes of x split by these mesh axes, inside a program."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


def constrain_rows(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Keeps the leading axis of x [B, ...] split over data x fsdp x expert, inside a program."""
    if mesh.size == 1 or x.shape[0] % row_shards(mesh):
        return x
    return _split_by(x, mesh, BATCH_AXES)


def constrain_tokens(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Keeps x [B, S, ...] split by rows and, over context, by tokens, inside a program."""
    if mesh.shape["context"] == 1 or x.shape[1] % mesh.shape["context"]:
        return constrain_rows(x, mesh)
    return _split_by(x, mesh, None if x.shape[0] % row_shards(mesh) else BATCH_AXES, "context")


def constrain_step(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Keeps x [B, 1, D] of a decode step split over fsdp by D, as the weights are, and by rows over
    data x expert alone.

    With rows over fsdp every product would gather its whole weight for a few rows; so each device
    multiplies its own part of the weight, and what is summed and moved are activations.
    """
    if mesh.shape["fsdp"] == 1 or x.shape[-1] % mesh.shape["fsdp"]:
        return constrain_rows(x, mesh)
    return _split_by(x, mesh, _apart_from_fsdp(mesh, x.shape[0]), None, "fsdp")


def gathered_over_fsdp(x: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """Gathers a weight with these logical axes over fsdp, inside a program; it stays split over the
    other mesh axes, and keeps its shape. Its gradient is scattered."""
    names = [None if RULES[axis] == "fsdp" else RULES[axis] for axis in axes]
    fits = [name and x.shape[i] % mesh.shape[name] == 0 for i, name in enumerate(names)]
    spec = [name if fit else None for name, fit in zip(names, fits, strict=True)]
    return _split_by(x, mesh, *spec)


def embedded(embed: Callable, tokens: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns embed(tokens) [B, S, D], split as `constrain_tokens` does (inside a program).

    The table is split over fsdp by D, the rows over data x fsdp x expert. XLA gets from one to the
    other by one exchange only from rows that are split over data x expert alone; where it is left
    to itself it replicates all activations ("involuntary full rematerialization").
    """
    shards = mesh.shape["data"] * mesh.shape["expert"]
    x = jax.eval_shape(embed, tokens)
    does_not_divide = tokens.shape[0] % row_shards(mesh) or x.shape[-1] % mesh.shape["fsdp"]
    if mesh.shape["fsdp"] == 1 or shards == 1 or does_not_divide:
        return constrain_tokens(embed(tokens), mesh)
    columns = None if tokens.shape[1] % mesh.shape["context"] else "context"
    tokens = _split_by(tokens, mesh, ("data", "expert"), columns)
    x = _split_by(embed(tokens), mesh, ("data", "expert"), columns, "fsdp")
    return constrain_tokens(x, mesh)


def _vocab_split(mesh: Mesh, vocab: int) -> tuple[str, ...] | None:
    """Returns the mesh axes of a head that is split by vocabulary alone, padded to them; None where
    it stays as it is stored: fsdp splits nothing, and tensor the vocabulary."""
    stays = mesh.shape["fsdp"] == 1 and vocab % mesh.shape["tensor"] == 0
    return None if stays else ("tensor", "fsdp")


def head_by_vocab(head: jax.Array, mesh: Mesh, axis: int, dtype) -> jax.Array:
    """Returns the head, before a decode loop, with its vocabulary, `axis`, over tensor x
    fsdp, zeros up to a size that divides, and its embed axis whole; sent as `dtype`
    where that is smaller.

    As it is stored each device has a part of every logit's sum: they would be all-reduced over fsdp
    at every token, [B, V]. Of a head that is moved once, each device has whole logits of its part
    of the vocabulary, and an exchange brings them to their rows: 1 / (2 fsdp) of the bytes.
    """
    if (vocab_axes := _vocab_split(mesh, head.shape[axis])) is None:
        return head
    head = head.astype(dtype) if jnp.dtype(dtype).itemsize < head.dtype.itemsize else head
    padding = -head.shape[axis] % math.prod(mesh.shape[name] for name in vocab_axes)
    head = jnp.pad(head, [(0, padding if i == axis else 0) for i in range(2)]) if padding else head
    return _split_by(head, mesh, *[vocab_axes if i == axis else None for i in range(2)])


def before_head(hidden: jax.Array, mesh: Mesh, vocab: int) -> jax.Array:
    """Keeps hidden [B, 1, D] of a decode step whole over fsdp, as a head that `head_by_vocab` has
    split reads it."""
    if _vocab_split(mesh, vocab) is None:
        return hidden
    return _split_by(hidden, mesh, _apart_from_fsdp(mesh, hidden.shape[0]))


def _apart_from_fsdp(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """Returns the mesh axes of the rows of a decode step, where fsdp splits something else."""
    return None if rows % (mesh.shape["data"] * mesh.shape["expert"]) else ("data", "expert")


def logits_by_rows(x: jax.Array, mesh: Mesh, vocab: int, ids: int) -> jax.Array:
    """Returns the logits [B, `ids`] of a head of `vocab` entries that `head_by_vocab` has split, by
    rows and without its padding (inside a decode step). A draw looks at all of a row: slices of a
    vocabulary over tensor would each be moved."""
    if mesh.size == 1:
        return x if x.shape[1] == ids else x[:, :ids]
    rows = None if x.shape[0] % row_shards(mesh) else BATCH_AXES
    if vocab_axes := _vocab_split(mesh, vocab):
        # The logits keep the split of the product first: without this XLA gathers the head. Then
        # one exchange per axis follows.
        x = _split_by(x, mesh, _apart_from_fsdp(mesh, x.shape[0]), vocab_axes)
    return _split_by(_split_by(x, mesh, rows, "tensor"), mesh, rows)[:, :ids]


def check_products(dtype: str, mesh: Mesh) -> None:
    """Raises InputError where the devices of a mesh have no products of a dtype."""
    if dtype == "float16" and mesh.devices.flat[0].platform == "tpu":
        rule = "its matrix units take bfloat16, to which XLA rounds float16"
        fix = "bfloat16 or float32: model_settings.dtype, sampler.dtype, --dtype"
        raise InputError("products in float16, on a TPU", value=dtype, rule=rule, fix=fix)
