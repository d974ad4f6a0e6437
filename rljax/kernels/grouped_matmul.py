"""Grouped matrix product: the rows of a group times that group's own matrix.

What lives here: one public function, and the loop that CPU needs because jax.lax.ragged_dot has no
CPU kernel: there it copies the rows once per group and multiplies all of them, X times the FLOPs.
What does not: routing and activations (rljax.models.experts).

Axes: M rows sorted by group, D inside, F outside, X groups, T rows in one block of the loop.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, platform: str) -> jax.Array:
    """y[m] = x[m] w[group of m]: x [M, D], w [X, D, F], sizes [X] int32 -> [M, F] like x.

    The first sizes[0] rows are group 0, and so on. Rows after the last group give 0, and what they
    hold reaches nothing. `platform` is the mesh's: a program that is compiled for a TPU on a CPU
    host gets the TPU's product. Inside shard_map, x and w vary over the same mesh axes.
    """
    if platform == "cpu":
        return _looped(x, w, sizes)
    # What ragged_dot gives after the last group, and takes back in its gradient, is not promised.
    grouped = _grouped_rows(x, sizes)
    y = jax.lax.ragged_dot(jnp.where(grouped, x, 0), w, sizes)
    return jnp.where(grouped, y, 0)


def _grouped_rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """[M, 1] bool: which rows are in any group."""
    return (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]


# -- CPU: a loop over blocks of T rows, each of one group


def _block_rows(rows: int, groups: int) -> int:
    """T: at most half a mean group, as the last block of a group is filled up; 8 to 128."""
    return next((t for t in (128, 64, 32, 16) if 2 * t * groups <= rows), 8)


def _blocks(sizes: jax.Array, block: int, rows: int):
    """Of every block its group, its first row, and how many rows the group still has there, in
    order; and how many blocks there are. Groups without rows have none: in a decode step most."""
    each = (sizes + block - 1) // block
    ends, at_most = jnp.cumsum(each), rows // block + sizes.shape[0]
    i = jnp.arange(at_most, dtype=ends.dtype)
    group = jnp.sum((ends[None, :] <= i[:, None]).astype(jnp.int32), axis=1)
    group = jnp.minimum(group, sizes.shape[0] - 1)  # past the last block: never run
    before = (i - (ends - each)[group]) * block
    return group, (jnp.cumsum(sizes) - sizes)[group] + before, sizes[group] - before, ends[-1]


def _zeros(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes of `like`, as the carry of a loop in shard_map has to."""
    first = jax.lax.slice(like, (0,) * like.ndim, (1,) * like.ndim).reshape(())
    return jnp.broadcast_to(jnp.where(False, first, 0).astype(dtype), shape)


def _rows_at(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (start, jnp.zeros_like(start)), (count, x.shape[1]))


def _multiply(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [M, D] -> [M, F] with w [X, D, F], or with w [X, F, D] transposed."""
    block = _block_rows(x.shape[0], w.shape[0])
    group, start, _, count = _blocks(sizes, block, x.shape[0])
    inside, outside = (1, 0) if transposed else (0, 1)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def one(i, y):
        # The rows past the group's end are written too, and again by the group they belong to.
        rows = jax.lax.dot_general(
            _rows_at(padded, start[i], block),
            w[group[i]],
            (((1,), (inside,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        at = (start[i], jnp.zeros_like(start[i]))
        return jax.lax.dynamic_update_slice(y, rows.astype(y.dtype), at)

    y = _zeros((x.shape[0] + block, w.shape[1 + outside]), x.dtype, x)
    y = jax.lax.fori_loop(0, count, one, y)[: x.shape[0]]
    return jnp.where(_grouped_rows(x, sizes), y, 0)


def _outer(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype) -> jax.Array:
    """sum over the rows of each group of x[m]^T g[m]: [X, D, F], summed in float32."""
    block = _block_rows(x.shape[0], sizes.shape[0])
    group, start, left, count = _blocks(sizes, block, x.shape[0])
    padded = [jnp.pad(a, ((0, block), (0, 0))) for a in (x, g)]

    def one(i, total):
        inside = (jnp.arange(block) < left[i])[:, None]
        x_rows, g_rows = (jnp.where(inside, _rows_at(a, start[i], block), 0) for a in padded)
        product = jax.lax.dot_general(
            x_rows, g_rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total.at[group[i]].add(product)

    total = _zeros((sizes.shape[0], x.shape[1], g.shape[1]), jnp.float32, x)
    return jax.lax.fori_loop(0, count, one, total).astype(dtype)


@jax.custom_vjp
def _looped(x, w, sizes):
    return _multiply(x, w, sizes, transposed=False)


def _looped_forward(x, w, sizes):
    return _looped(x, w, sizes), (x, w, sizes)


def _looped_backward(saved, g):
    x, w, sizes = saved
    return _multiply(g, w, sizes, transposed=True), _outer(x, g, sizes, w.dtype), None


_looped.defvjp(_looped_forward, _looped_backward)
