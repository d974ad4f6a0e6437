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


# -- CPU: a loop over the groups that have rows, and over blocks of T rows in each


def _block_rows(rows: int, groups: int) -> int:
    """T: at most half a mean group, as the last block of a group is filled up; 8 to 128."""
    return next((t for t in (128, 64, 32, 16) if 2 * t * groups <= rows), 8)


def _zeros(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes of `like`, as the carry of a loop in shard_map has to."""
    first = jax.lax.slice(like, (0,) * like.ndim, (1,) * like.ndim).reshape(())
    return jnp.broadcast_to(jnp.where(False, first, 0).astype(dtype), shape)


def _rows_at(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (start, jnp.zeros_like(start)), (count, x.shape[1]))


def _for_each_group(sizes: jax.Array, body, carry):
    """carry = body(group, its first row, its number of rows, carry) over the groups with rows."""
    starts = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(sizes == 0, stable=True)  # a decode step leaves most experts empty

    def step(i, carry):
        e = order[i]
        return body(e, starts[e], sizes[e], carry)

    return jax.lax.fori_loop(0, jnp.sum(sizes > 0), step, carry)


def _multiply(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [M, D] -> [M, F] with w [X, D, F], or with w [X, F, D] transposed."""
    block = _block_rows(x.shape[0], w.shape[0])
    inside, outside = (2, 1) if transposed else (1, 2)
    contract = (((1,), (inside - 1,)), ((), ()))
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def group(e, start, size, y):
        matrix = w[e]

        def one(j, y):
            # The rows past the group's end are written too, and again by the group they belong to.
            at = start + j * block
            rows = jax.lax.dot_general(
                _rows_at(padded, at, block), matrix, contract, preferred_element_type=jnp.float32
            )
            return jax.lax.dynamic_update_slice(y, rows.astype(y.dtype), (at, jnp.zeros_like(at)))

        return jax.lax.fori_loop(0, (size + block - 1) // block, one, y)

    y = _zeros((x.shape[0] + block, w.shape[outside]), x.dtype, x)
    y = _for_each_group(sizes, group, y)[: x.shape[0]]
    return jnp.where(_grouped_rows(x, sizes), y, 0)


def _outer(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype) -> jax.Array:
    """sum over the rows of each group of x[m]^T g[m]: [X, D, F], in float32 until it is stored."""
    shape = (sizes.shape[0], x.shape[1], g.shape[1])
    block = _block_rows(x.shape[0], shape[0])
    x_padded, g_padded = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, g))

    def group(e, start, size, total):
        def one(j, product):
            inside = (j * block + jnp.arange(block) < size)[:, None]
            x_rows, g_rows = (
                jnp.where(inside, _rows_at(a, start + j * block, block), 0)
                for a in (x_padded, g_padded)
            )
            return product + jax.lax.dot_general(
                x_rows, g_rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

        product = _zeros(shape[1:], jnp.float32, x)
        product = jax.lax.fori_loop(0, (size + block - 1) // block, one, product)
        return total.at[e].set(product.astype(dtype))

    return _for_each_group(sizes, group, _zeros(shape, dtype, x))


@jax.custom_vjp
def _looped(x, w, sizes):
    return _multiply(x, w, sizes, transposed=False)


def _looped_forward(x, w, sizes):
    return _looped(x, w, sizes), (x, w, sizes)


def _looped_backward(saved, g):
    x, w, sizes = saved
    return _multiply(g, w, sizes, transposed=True), _outer(x, g, sizes, w.dtype), None


_looped.defvjp(_looped_forward, _looped_backward)
