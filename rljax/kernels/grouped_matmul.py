"""Grouped matrix product: the rows of a group times that group's own matrix.

Behind the one public function are jax.lax.ragged_dot, JAX's megablox kernels for its gradient on
TPU, and a loop for CPU, where ragged_dot has no kernel: it copies the rows once per group and
multiplies all of them, X times the FLOPs. Routing is in rljax.models.experts.

Axes: M rows sorted by group, D inside, F outside, X groups, T rows in one block of the loop.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def grouped_matmul(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, platform: str, block: int = 0
) -> jax.Array:
    """Returns y[m] = x[m] w[group of m]: x [M, D], w [X, D, F], sizes [X] int32 -> [M, F]
    in the dtype of x.

    The first sizes[0] rows are group 0, and so on. Rows after the last group give 0, and what they
    hold reaches nothing. `platform` is the mesh's: a program that is compiled for a TPU on a CPU
    host gets the TPU's product. Inside shard_map, x and w vary over the same mesh axes. `block` is
    how many rows a CPU multiplies at a time (0: what suits their number).
    """
    if platform == "cpu":
        return _looped(x, w, sizes, block)
    if platform == "tpu":
        return _on_tpu(x, w, sizes, False)
    return _ragged(x, w, sizes)


def _ragged(x, w, sizes) -> jax.Array:
    # ragged_dot does not define the result for rows after the last group, nor their gradient.
    grouped = _grouped_rows(x, sizes)
    y = jax.lax.ragged_dot(jnp.where(grouped, x, 0), w, sizes)
    return jnp.where(grouped, y, 0)


def _grouped_rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns which rows are in any group, [M, 1] bool."""
    return (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]


def _zeros(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes of `like`, as the carry of a loop in shard_map has to."""
    element = jax.lax.slice(like, (0,) * like.ndim, (1,) * like.ndim).reshape(())
    return jnp.broadcast_to(jnp.where(False, element, 0).astype(dtype), shape)


# -- TPU: for ragged_dot XLA has a kernel of its own; for the gradients of it, the same kernel on a
# copy of every matrix, transposed, and of x without the rows of no group. Megablox reads them as
# they lie.


def _tiles(rows: int, groups: int, in_size: int, out_size: int, itemsize: int):
    """Returns (rows, inside, outside) of a block. A block of rows runs once for each group that is
    in it, so it is no larger than a mean group, but 128 rows cost the matrix unit no more than one.
    The other sizes keep what is in flight within the 16 MiB that a program has of a v5e's VMEM."""
    t = next((t for t in (512, 256) if t * groups <= rows), 128)
    largest = 2048 // itemsize

    def tile(size: int) -> int:
        if size <= largest:
            return size
        return next((t for t in range(largest, 255, -128) if size % t == 0), 512)

    return min(t, -(-rows // 16) * 16), tile(in_size), tile(out_size)


def _on_device(kernel, *arrays: jax.Array) -> jax.Array:
    """Runs the kernel on what one device holds. The kernel does not declare over which mesh axes
    its result varies, so inside shard_map that check is off."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return kernel(*arrays)
    unsplit = PartitionSpec()
    specs = dict(in_specs=(unsplit,) * len(arrays), out_specs=unsplit)
    return jax.shard_map(kernel, **specs, check_vma=False)(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _on_tpu(x, w, sizes, interpret: bool):
    return _ragged(x, w, sizes)


def _on_tpu_forward(x, w, sizes, interpret):
    return _ragged(x, w, sizes), (x, w, sizes)


def _on_tpu_backward(interpret, saved, g):
    """dx[m] = g[m] w[group of m]^T, and dw[group] = the sum over its rows of x[m]^T g[m], summed
    in float32."""
    # Imported here: Pallas takes a second to import, and only this path needs it.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    x, w, sizes = saved
    (rows, in_size), (groups, _, out_size) = x.shape, w.shape
    block, in_block, out_block = _tiles(rows, groups, in_size, out_size, x.dtype.itemsize)
    x_padded, g_padded = (jnp.pad(a, ((0, -rows % block), (0, 0))) for a in (x, g))
    to_x = functools.partial(
        gmm,
        preferred_element_type=x.dtype,
        tiling=(block, out_block, in_block),
        transpose_rhs=True,
        interpret=interpret,
    )
    to_w = functools.partial(
        tgmm,
        preferred_element_type=w.dtype,
        tiling=(block, in_block, out_block),
        interpret=interpret,
    )
    dx = _on_device(to_x, g_padded, w, sizes)[:rows]
    dw = _on_device(to_w, x_padded.swapaxes(0, 1), g_padded, sizes)
    # Arrays that vary over the mesh are declared so again; where no group has rows, dx is garbage.
    dx = jnp.where(_grouped_rows(x, sizes), dx, _zeros(x.shape, x.dtype, x))
    return dx, dw + _zeros(w.shape, w.dtype, x), None


_on_tpu.defvjp(_on_tpu_forward, _on_tpu_backward)


# -- CPU: a loop over blocks of T rows, each of one group


def _block_rows(rows: int, groups: int) -> int:
    """T: at most half a mean group, as the last block of a group is filled up; 8 to 128."""
    return next((t for t in (128, 64, 32, 16) if 2 * t * groups <= rows), 8)


def _blocks(sizes: jax.Array, block: int, rows: int):
    """Returns, for each block, its group, its first row and the number of rows of the group from
    there on; and the number of blocks. Groups without rows, in a decode step most, have no
    block."""
    counts = (sizes + block - 1) // block
    ends, at_most = jnp.cumsum(counts), rows // block + sizes.shape[0]
    i = jnp.arange(at_most, dtype=ends.dtype)
    group = jnp.sum((ends[None, :] <= i[:, None]).astype(jnp.int32), axis=1)
    group = jnp.minimum(group, sizes.shape[0] - 1)  # past the last block: never run
    offset = (i - (ends - counts)[group]) * block
    return group, (jnp.cumsum(sizes) - sizes)[group] + offset, sizes[group] - offset, ends[-1]


def _rows_at(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (start, jnp.zeros_like(start)), (count, x.shape[1]))


def _multiply(
    x: jax.Array, w: jax.Array, sizes: jax.Array, block: int, transposed: bool
) -> jax.Array:
    """x [M, D] -> [M, F] with w [X, D, F], or with w [X, F, D] transposed."""
    block = block or _block_rows(x.shape[0], w.shape[0])
    group, start, _, count = _blocks(sizes, block, x.shape[0])
    in_axis, out_axis = (1, 0) if transposed else (0, 1)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def one(i, y):
        # The rows past the group's end are written too, and again by the group they belong to.
        rows = jax.lax.dot_general(
            _rows_at(padded, start[i], block),
            w[group[i]],
            (((1,), (in_axis,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        index = (start[i], jnp.zeros_like(start[i]))
        return jax.lax.dynamic_update_slice(y, rows.astype(y.dtype), index)

    y = _zeros((x.shape[0] + block, w.shape[1 + out_axis]), x.dtype, x)
    y = jax.lax.fori_loop(0, count, one, y)[: x.shape[0]]
    return jnp.where(_grouped_rows(x, sizes), y, 0)


def _outer(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype) -> jax.Array:
    """sum over the rows of each group of x[m]^T g[m]: [X, D, F], summed in float32."""
    block = _block_rows(x.shape[0], sizes.shape[0])
    group, start, remaining, count = _blocks(sizes, block, x.shape[0])
    padded = [jnp.pad(a, ((0, block), (0, 0))) for a in (x, g)]

    def one(i, total):
        in_group = (jnp.arange(block) < remaining[i])[:, None]
        x_rows, g_rows = (jnp.where(in_group, _rows_at(a, start[i], block), 0) for a in padded)
        product = jax.lax.dot_general(
            x_rows, g_rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total.at[group[i]].add(product)

    total = _zeros((sizes.shape[0], x.shape[1], g.shape[1]), jnp.float32, x)
    return jax.lax.fori_loop(0, count, one, total).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _looped(x, w, sizes, block: int):
    return _multiply(x, w, sizes, block, transposed=False)


def _looped_forward(x, w, sizes, block):
    return _looped(x, w, sizes, block), (x, w, sizes)


def _looped_backward(block, saved, g):
    x, w, sizes = saved
    return _multiply(g, w, sizes, block, transposed=True), _outer(x, g, sizes, w.dtype), None


_looped.defvjp(_looped_forward, _looped_backward)
