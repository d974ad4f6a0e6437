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
    """The outputs of the function `name`, [B, S] each."""
    arrays = {key: a for key, a in arrays.items() if a is not None}
    mask = arrays["mask"]
    outputs = 2 if name == "gae" else 1
    size = sum(a.size for a in arrays.values()) + outputs * mask.size
    varies = jax.typeof(mask).manual_axis_type
    like = jax.ShapeDtypeStruct(mask.shape, jnp.float32, manual_axis_type=varies)
    return pl.pallas_call(
        functools.partial(_kernel, name=name, keys=tuple(arrays)),
        grid=(mask.shape[0],),
        out_shape=[like] * outputs,
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
        """Token L - 1 - step of every chunk, [C] each; also its column `at`, whether it is `inside`
        the row, and whether to `keep` it."""
        at = chunk * length + length - 1 - step
        inside, here = at < tokens, {}
        for key, ref in ins.items():
            column = at if ref.shape[1] == tokens else chunk * 0
            here[key] = triton.load(ref.at[row, column], mask=inside, other=0)
        return here | {"keep": inside & (here["mask"] > 0), "at": at, "inside": inside}

    zero, nothing = jnp.zeros((CHUNKS,), jnp.float32), jnp.zeros((CHUNKS,), jnp.int32)
    later = (zero, nothing, nothing)
    if "values" in keys or "ids" in keys:

        def find(step, later):
            return _nearest(read(step), later)

        later = _behind(*jax.lax.fori_loop(0, length, find, later))

    def write(step, carry):
        later, total = carry
        here = read(step)
        out, b, c = _token(name, here, later)
        total = jnp.where(here["keep"], b + c * total, total)
        if name != "next_chosen":
            out = jnp.where(here["keep"], total, 0.0)
        triton.store(outs[0].at[row, here["at"]], out, mask=here["inside"])
        if name == "gae":
            returns = jnp.where(here["keep"], total + here["values"], 0.0)
            triton.store(outs[1].at[row, here["at"]], returns, mask=here["inside"])
        return _nearest(here, later), total

    def compose(step, carry):
        later, (total, product) = carry
        here = read(step)
        _, b, c = _token(name, here, later)
        total = jnp.where(here["keep"], b + c * total, total)
        product = jnp.where(here["keep"], c * product, product)
        return _nearest(here, later), (total, product)

    total = zero
    if name != "next_chosen":
        total, product = jax.lax.fori_loop(0, length, compose, (later, (zero, zero + 1)))[1]
        total = _sums_behind(total, product)
    jax.lax.fori_loop(0, length, write, (later, total))


def _nearest(here, later):
    """Value, id and presence (0 or 1) of the nearest chosen token from here on."""
    value, segment, present = later
    keep = here["keep"]
    value = jnp.where(keep, here["values"], value) if "values" in here else value
    segment = jnp.where(keep, here["ids"], segment) if "ids" in here else segment
    return value, segment, jnp.where(keep, 1, present)


def _token(name, here, later):
    """V_{t+}, and b and c of y_t = b + c y_{t+}."""
    value, segment, present = later
    same = present > 0
    if "ids" in here:
        same &= segment == here["ids"]
    value = jnp.where(same, value, 0.0)
    if name == "next_chosen":
        return value, value, value
    x, decay = here["x"], here["decay"]
    if name == "gae":
        x = x + here["gamma"] * value - here["values"]
        decay = here["gamma"] * decay
    if "values" in here or "ids" in here:
        decay = jnp.where(same, decay, 0.0)
    return value, x, decay


def _tables():
    """Indices [C, 1] and [1, C]."""
    index = jnp.arange(CHUNKS)
    return index[:, None], index[None, :]


def _behind(value, segment, present):
    """For each chunk, the state (value, id, presence) of the nearest chunk to the right that has
    a chosen token."""
    mine, other = _tables()
    nearest = jnp.min(jnp.where((other > mine) & (present[None, :] > 0), other, CHUNKS), axis=1)
    at = other == nearest[:, None]

    def pick(x):
        return jnp.sum(jnp.where(at, x[None, :], jnp.zeros_like(x)[None, :]), axis=1)

    return pick(value), pick(segment), jnp.where(nearest < CHUNKS, 1, 0)


def _sums_behind(total, product):
    """y at the first token to the right of every chunk: composes the chunks' maps."""
    mine, other = _tables()

    def further(x, distance, beyond):
        at = other == mine + distance
        shifted = jnp.sum(jnp.where(at, x[None, :], 0.0), axis=1)
        return jnp.where(jnp.arange(CHUNKS) < CHUNKS - distance, shifted, beyond)

    for k in range(CHUNKS.bit_length() - 1):
        right = further(total, 1 << k, 0.0), further(product, 1 << k, 1.0)
        total, product = total + product * right[0], product * right[1]
    return further(total, 1, 0.0)
