"""The recurrences as one Triton kernel for GPU, in float32. It has never run on one: see below.

Takes the arguments of rljax.kernels.gae.reference. Tested in interpret mode, and lowered for CUDA
on a host without a GPU; "auto" does not take it.

A program of the grid holds one row, cut into C chunks of L consecutive tokens that walk from right
to left side by side. First every chunk looks for its first chosen token, so that each knows what
lies behind it; then it composes its affine map y -> b + c y, and the maps of the chunks are
composed in log2(C) doublings; then it walks again and writes. The second and third walk read what
the first left in the cache.

Axes: B rows, S tokens, C chunks of a row, L tokens of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

CHUNKS = 128  # a power of two; tables of C x C live in registers
FLOPS = 30  # per token, of all walks


def next_chosen(x, mask, ids, *, interpret=False) -> jax.Array:
    """x at t+, and 0 where there is none, at every t: [B, S]."""
    return _run("next_chosen", interpret, values=x, mask=mask, ids=ids)[0]


def discounted_sum(x, decay, mask, ids, *, interpret=False) -> jax.Array:
    """y_t = x_t + decay_t y_{t+} where mask > 0, else 0: [B, S]."""
    return _run("discounted_sum", interpret, x=x, decay=decay, mask=mask, ids=ids)[0]


def gae(rewards, values, mask, ids, gamma, lam, *, interpret=False):
    """A_t = r_t + gamma (V_{t+} + lam_t A_{t+}) - V_t and A + V where mask > 0, else 0: [B, S]."""
    arrays = dict(x=rewards, values=values, mask=mask, ids=ids, gamma=gamma, decay=lam)
    return tuple(_run("gae", interpret, **arrays))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name, interpret, **arrays):
    """Returns the outputs of the function `name`, [B, S] each."""
    arrays = {key: a for key, a in arrays.items() if a is not None}
    mask = arrays["mask"]
    outputs = 2 if name == "gae" else 1
    size = sum(a.size for a in arrays.values()) + outputs * mask.size
    varies = jax.typeof(mask).manual_axis_type
    out_shape = jax.ShapeDtypeStruct(mask.shape, jnp.float32, manual_axis_type=varies)
    return pl.pallas_call(
        functools.partial(_kernel, name=name, keys=tuple(arrays)),
        grid=(mask.shape[0],),
        out_shape=[out_shape] * outputs,
        compiler_params=triton.CompilerParams(num_warps=4),
        cost_estimate=pl.CostEstimate(
            flops=FLOPS * mask.size, transcendentals=0, bytes_accessed=4 * size
        ),
        interpret=interpret,
        name=name,
    )(*arrays.values())


def _kernel(*refs, name, keys):
    """One row; `keys` names the inputs, in order."""
    ins, outs = dict(zip(keys, refs, strict=False)), refs[len(keys) :]
    tokens = ins["mask"].shape[1]
    length = pl.cdiv(tokens, CHUNKS)
    row, chunk = pl.program_id(0), jnp.arange(CHUNKS)

    def read(step):
        """Returns the values of token L - 1 - step of every chunk, [C] each; also its column "at",
        whether it is "inside" the row, and whether it is chosen ("keep")."""
        token_column = chunk * length + length - 1 - step
        in_row, token = token_column < tokens, {}
        for key, ref in ins.items():
            column = token_column if ref.shape[1] == tokens else chunk * 0
            token[key] = triton.load(ref.at[row, column], mask=in_row, other=0)
        return token | {"keep": in_row & (token["mask"] > 0), "at": token_column, "inside": in_row}

    zero, int_zero = jnp.zeros((CHUNKS,), jnp.float32), jnp.zeros((CHUNKS,), jnp.int32)
    later = (zero, int_zero, int_zero)
    if "values" in keys or "ids" in keys:

        def find(step, later):
            return _nearest(read(step), later)

        later = _behind(*jax.lax.fori_loop(0, length, find, later))

    def write(step, carry):
        later, total = carry
        token = read(step)
        output, b, c = _token(name, token, later)
        total = jnp.where(token["keep"], b + c * total, total)
        if name != "next_chosen":
            output = jnp.where(token["keep"], total, 0.0)
        triton.store(outs[0].at[row, token["at"]], output, mask=token["inside"])
        if name == "gae":
            returns = jnp.where(token["keep"], total + token["values"], 0.0)
            triton.store(outs[1].at[row, token["at"]], returns, mask=token["inside"])
        return _nearest(token, later), total

    def compose(step, carry):
        later, (total, product) = carry
        token = read(step)
        _, b, c = _token(name, token, later)
        total = jnp.where(token["keep"], b + c * total, total)
        product = jnp.where(token["keep"], c * product, product)
        return _nearest(token, later), (total, product)

    total = zero
    if name != "next_chosen":
        total, product = jax.lax.fori_loop(0, length, compose, (later, (zero, zero + 1)))[1]
        total = _sums_behind(total, product)
    jax.lax.fori_loop(0, length, write, (later, total))


def _nearest(token, later):
    """Value, id and presence (0 or 1) of the nearest chosen token from this one on."""
    value, segment, present = later
    chosen = token["keep"]
    value = jnp.where(chosen, token["values"], value) if "values" in token else value
    segment = jnp.where(chosen, token["ids"], segment) if "ids" in token else segment
    return value, segment, jnp.where(chosen, 1, present)


def _token(name, token, later):
    """V_{t+}, and b and c of y_t = b + c y_{t+}."""
    value, segment, present = later
    exists = present > 0
    if "ids" in token:
        exists &= segment == token["ids"]
    value = jnp.where(exists, value, 0.0)
    if name == "next_chosen":
        return value, value, value
    x, decay = token["x"], token["decay"]
    if name == "gae":
        x = x + token["gamma"] * value - token["values"]
        decay = token["gamma"] * decay
    if "values" in token or "ids" in token:
        decay = jnp.where(exists, decay, 0.0)
    return value, x, decay


def _tables():
    """Indices [C, 1] and [1, C]."""
    index = jnp.arange(CHUNKS)
    return index[:, None], index[None, :]


def _behind(value, segment, present):
    """For each chunk, the state (value, id, presence) of the nearest chunk to the right that has
    a chosen token."""
    chunk, other_chunk = _tables()
    nearest = jnp.min(
        jnp.where((other_chunk > chunk) & (present[None, :] > 0), other_chunk, CHUNKS), axis=1
    )
    is_nearest = other_chunk == nearest[:, None]

    def pick(x):
        return jnp.sum(jnp.where(is_nearest, x[None, :], jnp.zeros_like(x)[None, :]), axis=1)

    return pick(value), pick(segment), jnp.where(nearest < CHUNKS, 1, 0)


def _sums_behind(total, product):
    """y at the first token to the right of every chunk: composes the chunks' maps."""
    chunk, other_chunk = _tables()

    def further(x, distance, beyond):
        is_source = other_chunk == chunk + distance
        shifted = jnp.sum(jnp.where(is_source, x[None, :], 0.0), axis=1)
        return jnp.where(jnp.arange(CHUNKS) < CHUNKS - distance, shifted, beyond)

    for k in range(CHUNKS.bit_length() - 1):
        right = further(total, 1 << k, 0.0), further(product, 1 << k, 1.0)
        total, product = total + product * right[0], product * right[1]
    return further(total, 1, 0.0)
