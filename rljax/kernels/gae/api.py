"""The public functions gae, discounted_sum and next_chosen: checks, gradients, dispatch.

The implementation is chosen by the platform that a program is compiled for, and rows are split over
a mesh here. The recurrences are in reference.py, xla.py, pallas_tpu.py and pallas_gpu.py.

Axes: B rows, S tokens. t+ is the next token of the row that the policy chose (mask > 0), provided
that it is of the same segment as t; tool output, forced text and padding are skipped, and hold
anything, NaN included.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rljax.errors import InputError
from rljax.kernels.gae import reference, xla
from rljax.mesh import BATCH_AXES

Impl = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu"]
IMPLS = ("auto", "reference", "xla", "pallas_tpu", "pallas_gpu")


def gae(
    rewards, values, mask, *, gamma, lam, segment_ids=None, impl: Impl = "auto"
) -> tuple[jax.Array, jax.Array]:
    """A_t = r_t + gamma V_{t+} - V_t + gamma lam_t A_{t+}; (A, A + V) where mask > 0, else 0.

    rewards, values and mask [B, S] -> two [B, S] in float32, or float64 if given; no gradient. V
    and A are 0 behind the last token of a segment. gamma: a number or [B]; lam: a number, [B]
    or [B, S], read at t. segment_ids [B, S] int32, None = a row is one sequence. `impl` "auto"
    takes the kernel on TPU. Raises InputError for other shapes, and for another `impl`.
    arXiv 1506.02438; masked tokens skipped as verl does.
    """
    function = "gae"
    rewards, values = _floats(rewards, values)
    _check(function, rewards, impl, values=values, mask=mask, segment_ids=segment_ids)
    gamma = _coefficient(f"{function}(gamma)", gamma, rewards, per_token=False)
    lam = _coefficient(f"{function}(lam)", lam, rewards, per_token=True)
    arrays = (rewards, values, _readable(mask, rewards), _ids(segment_ids), gamma, lam)
    return _run("gae", impl, *jax.lax.stop_gradient(arrays))


def discounted_sum(x, decay, mask, segment_ids=None, *, impl: Impl = "auto") -> jax.Array:
    """y_t = x_t + decay_t y_{t+} where mask > 0, else 0: x [B, S] -> [B, S].

    decay: a number, [B] or [B, S], read at t. With a gradient to x and decay. segment_ids, impl and
    dtypes as in `gae`. Rewards and gamma give returns; delta and gamma lam give GAE.
    """
    function = "discounted_sum"
    (x,) = _floats(x)
    _check(function, x, impl, mask=mask, segment_ids=segment_ids)
    decay = _coefficient(f"{function}(decay)", decay, x, per_token=True)
    return _discounted_sum(impl, x, decay, _readable(mask, x), _ids(segment_ids))


def next_chosen(x, mask, segment_ids=None, *, impl: Impl = "auto") -> jax.Array:
    """x_{t+} at every t, and 0 where there is no t+: x [B, S], of any numbers, -> like x.

    With a gradient to x. segment_ids and impl as in `gae`.
    """
    x = jnp.asarray(x)
    _check("next_chosen", x, impl, mask=mask, segment_ids=segment_ids)
    return _next_chosen(impl, x, _readable(mask, x), _ids(segment_ids))


# -- what the implementations are handed


def _floats(*arrays):
    arrays = [jnp.asarray(a) for a in arrays]
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    return [a.astype(dtype) for a in arrays]


def _check(function, array, impl, **arrays):
    if impl not in IMPLS:
        raise InputError(
            f"{function}(impl)", value=impl, fix=f"impl={', impl='.join(map(repr, IMPLS))}"
        )
    if array.ndim != 2:
        raise InputError(
            f"{function} has the wrong number of axes",
            value=array.shape,
            rule="[B, S]",
            fix="give arrays of rows and tokens; x[None] makes a batch of one row",
        )
    for name, x in arrays.items():
        if x is not None and jnp.shape(x) != array.shape:
            raise InputError(
                f"{function}({name})",
                value=jnp.shape(x),
                rule=f"its shape is {array.shape}",
                fix=f"give {name} an entry for each row and token",
            )


def _coefficient(name, x, like, *, per_token):
    """Returns a number, [B] or [B, S] as [B, 1] or [B, S]."""
    x = jnp.asarray(x, like.dtype)
    allowed = [(), like.shape[:1], *([like.shape] if per_token else [])]
    if x.shape not in allowed:
        raise InputError(
            name,
            value=x.shape,
            rule=f"its shape is one of {allowed}",
            fix="give one number, or an array of one of these shapes",
        )
    if x.ndim == 2:
        return x
    return jnp.broadcast_to(x.reshape(-1, 1), (like.shape[0], 1))


def _ids(segment_ids):
    return None if segment_ids is None else jnp.asarray(segment_ids)


def _readable(mask, like):
    """Returns the mask as kernels read it: numbers of the dtype of `like`, no booleans."""
    mask = jnp.asarray(mask)
    return mask if mask.dtype == like.dtype else (mask > 0).astype(like.dtype)


# -- which implementation


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name, impl, *arrays):
    """Runs the function `name` of one implementation, or of the platform's."""
    if not arrays[0].size:  # nothing to walk
        return (arrays[0],) * 2 if name == "gae" else arrays[0]
    if impl in ("reference", "xla"):
        return getattr(reference if impl == "reference" else xla, name)(*arrays)
    if impl != "auto":
        return over_rows(_kernel(name, impl), *arrays)
    fallback = getattr(xla, name)
    if arrays[0].dtype != jnp.float32:  # the kernels take no other floats
        return fallback(*arrays)

    def kernel(*arrays):
        return over_rows(_kernel(name, "pallas_tpu"), *arrays)

    return jax.lax.platform_dependent(*arrays, tpu=kernel, default=fallback)


def _kernel(name, impl):
    """Returns a kernel on one device. Pallas takes a second to import, and a CPU needs none of
    it."""
    if impl == "pallas_tpu":
        from rljax.kernels.gae import pallas_tpu as kernels
    else:
        from rljax.kernels.gae import pallas_gpu as kernels
    return getattr(kernels, name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _discounted_sum(impl, *arrays):
    return _run("discounted_sum", impl, *arrays)


def _forward(impl, *arrays):
    y = _run("discounted_sum", impl, *arrays)
    return y, (*arrays, y)


def _backward(impl, saved, g):
    """g^x_t = g_t + decay_{t-} g^x_{t-}, the same recurrence from the left; g^decay_t = g^x_t
    y_{t+}."""
    x, decay, mask, ids, y = saved
    chosen = mask > 0

    def flip(a):
        return a if a is None or a.shape[1] == 1 else a[:, ::-1]

    carried = (jnp.where(chosen, decay * g, 0.0), decay, mask, ids)
    carried = _discounted_sum(impl, *(flip(a) for a in carried))
    to_x = jnp.where(chosen, g + flip(_next_chosen(impl, carried, flip(mask), flip(ids))), 0.0)
    to_decay = to_x * _next_chosen(impl, y, mask, ids)
    if decay.shape != x.shape:
        to_decay = jnp.sum(to_decay, axis=1, keepdims=True)
    return to_x, to_decay, None, None


_discounted_sum.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _next_chosen(impl, *arrays):
    return _run("next_chosen", impl, *arrays)


def _next_forward(impl, *arrays):
    return _next_chosen(impl, *arrays), arrays


def _next_backward(impl, saved, g):
    """Adds the gradient of every token to the next chosen token, whose x it has read."""
    x, mask, ids = saved
    return *jax.vjp(lambda x: xla.gathered_next(x, mask, ids), x)[1](g), None, None


_next_chosen.defvjp(_next_forward, _next_backward)


# -- several devices


def over_rows(run, *arrays):
    """Returns run(*arrays) on each device's rows, where the arrays' type names a mesh
    of several devices.

    XLA cannot split a kernel by itself. Rows [B, ...] go over data x fsdp x expert, as those of a
    batch do; over axes that do not divide B they are whole on every device.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    mesh = next((m for m in meshes if not m.empty), None)
    if mesh is None or mesh.size == 1 or mesh.are_all_axes_manual:
        return run(*arrays)
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    axes = tuple(a for a in BATCH_AXES if a in free)
    if arrays[0].shape[0] % math.prod(mesh.shape[a] for a in axes):
        axes = ()
    rows = PartitionSpec(axes)
    return jax.shard_map(
        run, mesh=mesh, axis_names=free, in_specs=rows, out_specs=rows, check_vma=False
    )(*arrays)
