"""The recurrences as one Mosaic kernel for TPU, in float32: every array is read once and
written once.

Takes the arguments of rljax.kernels.gae.reference; rljax.kernels.gae.api splits the rows over
devices.

A program of the grid holds a block of rows [R, T]; blocks of a row are visited from the right, and
three columns of scratch carry the value, the id and the sum at the nearest chosen token over to
the block on the left. Inside, tiles [R, 128] are scanned along the lanes in 7 doublings: one pass
finds for every token the next one that was chosen, one composes the affine maps y -> b + c y.
Ragged edges are masked in the kernel: nothing is padded or transposed outside, except for rows
under 128 tokens.

Axes: B rows, S tokens, R rows of a block, T tokens of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
BLOCK_ROWS, BLOCK_TOKENS = 32, 1024
NO_ID = -(2**31)  # the id where no token was chosen
FLOPS = 80  # per token, of both passes


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
    rows, tokens = arrays["mask"].shape
    arrays = {key: a for key, a in arrays.items() if a is not None}
    per_row = {key for key in ("gamma", "decay") if key in arrays and arrays[key].shape[1] == 1}
    if tokens < LANES:
        room = ((0, 0), (0, LANES - tokens))
        arrays = {key: a if key in per_row else jnp.pad(a, room) for key, a in arrays.items()}
    width = max(tokens, LANES)
    block_rows = rows if rows < 8 else min(BLOCK_ROWS, rows // 8 * 8)
    block = min(BLOCK_TOKENS, width // LANES * LANES)
    steps = pl.cdiv(width, block)
    token_spec = pl.BlockSpec((block_rows, block), lambda i, j: (i, steps - 1 - j))
    row_spec = pl.BlockSpec((block_rows, 1), lambda i, j: (i, 0))
    outputs = 2 if name == "gae" else 1
    size = sum(a.size for a in arrays.values()) + outputs * rows * width
    # In a caller's own shard_map the outputs vary over the mesh axes that the mask varies over.
    varies = jax.typeof(arrays["mask"]).manual_axis_type
    out_shape = jax.ShapeDtypeStruct((rows, width), jnp.float32, manual_axis_type=varies)
    results = pl.pallas_call(
        functools.partial(_kernel, name=name, keys=tuple(arrays), tokens=tokens),
        grid=(pl.cdiv(rows, block_rows), steps),
        in_specs=[row_spec if key in per_row else token_spec for key in arrays],
        out_specs=[token_spec] * outputs,
        out_shape=[out_shape] * outputs,
        scratch_shapes=[
            pltpu.VMEM((block_rows, 1), jnp.float32),
            pltpu.VMEM((block_rows, 1), jnp.int32),
            pltpu.VMEM((block_rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=FLOPS * rows * width, transcendentals=0, bytes_accessed=4 * size
        ),
        interpret=interpret,
        name=name,
    )(*arrays.values())
    return [o[:, :tokens] for o in results]


def _kernel(*refs, name, keys, tokens):
    """One block; `keys` names the inputs, in order."""
    ins, refs = dict(zip(keys, refs, strict=False)), refs[len(keys) :]
    *outs, value_carry, id_carry, sum_carry = refs
    block_rows, block = ins["mask"].shape
    steps, step = pl.num_programs(1), pl.program_id(1)

    @pl.when(step == 0)
    def _():
        value_carry[...] = jnp.zeros_like(value_carry)
        id_carry[...] = jnp.full_like(id_carry, NO_ID)
        sum_carry[...] = jnp.zeros_like(sum_carry)

    lane = jax.lax.broadcasted_iota(jnp.int32, (block_rows, LANES), 1)
    # Lanes past the end of the row hold whatever lies there.
    in_row = tokens - (steps - 1 - step) * block
    count = block // LANES

    def tile(i, carry):
        start = pl.multiple_of((count - 1 - i) * LANES, LANES)

        def read(ref):
            return ref[:, pl.ds(start, LANES)] if ref.shape[1] > 1 else ref[...]

        arrays = {key: read(ref) for key, ref in ins.items()}
        arrays["keep"] = (lane < in_row - start) & (arrays["mask"] > 0)
        tiles, carry = _tile(name, arrays, lane, carry)
        for out_ref, y in zip(outs, tiles, strict=True):
            out_ref[:, pl.ds(start, LANES)] = y
        return carry

    carry = (value_carry[...], id_carry[...], sum_carry[...])
    value_carry[...], id_carry[...], sum_carry[...] = jax.lax.fori_loop(0, count, tile, carry)


def _tile(name, arrays, lane, carry):
    """128 tokens of every row: returns the outputs [R, 128], and the carry for the tile on
    the left."""
    value_later, id_later, sum_later = carry
    chosen, ids = arrays["keep"], arrays.get("ids", jnp.zeros_like(lane))
    x, decay, values = (arrays.get(key) for key in ("x", "decay", "values"))
    if values is not None or "ids" in arrays:
        values = x if values is None else values  # carried along, but not read
        value_next, id_next, value_later, id_later = _next(chosen, values, ids, lane, carry)
        same_segment = id_next == ids
        value_next = jnp.where(same_segment, value_next, 0.0)
        if name == "next_chosen":
            return [value_next], (value_later, id_later, sum_later)
        decay = jnp.where(same_segment, decay, 0.0)
    if name == "gae":
        x = x + arrays["gamma"] * value_next - values
        decay = arrays["gamma"] * decay
    y = _compose(jnp.where(chosen, x, 0.0), jnp.where(chosen, decay, 1.0), lane, sum_later)
    results = [jnp.where(chosen, y, 0.0)]
    if name == "gae":
        results.append(jnp.where(chosen, y + values, 0.0))
    return results, (value_later, id_later, y[:, :1])


def _next(chosen, values, ids, lane, carry):
    """Value and id at the next chosen token of the row, and those to carry to the left."""
    value_later, id_later, _ = carry
    nearest_id, nearest = jnp.where(chosen, ids, NO_ID), values
    for distance in _doublings():
        fills = (nearest_id == NO_ID) & (lane < LANES - distance)
        nearest = jnp.where(fills, _from_right(nearest, distance), nearest)
        nearest_id = jnp.where(fills, _from_right(nearest_id, distance), nearest_id)
    is_missing = nearest_id == NO_ID
    nearest = jnp.where(is_missing, value_later, nearest)
    nearest_id = jnp.where(is_missing, id_later, nearest_id)
    is_last = lane == LANES - 1
    value_next = jnp.where(is_last, value_later, _from_right(nearest, 1))
    id_next = jnp.where(is_last, id_later, _from_right(nearest_id, 1))
    return value_next, id_next, nearest[:, :1], nearest_id[:, :1]


def _doublings():
    return [1 << k for k in range(LANES.bit_length() - 1)]


def _from_right(x, distance):
    """x at the lane `distance` further right; the last lanes get what wraps around."""
    return pltpu.roll(x, LANES - distance, 1)


def _compose(b, c, lane, y_behind):
    """y_t = b_t + c_t y_{t+1} along the lanes, with y = `y_behind` [R, 1] behind the last."""
    for distance in _doublings():
        in_tile = lane < LANES - distance
        b_right = jnp.where(in_tile, _from_right(b, distance), 0.0)
        c_right = jnp.where(in_tile, _from_right(c, distance), 1.0)
        b, c = b + c * b_right, c * c_right
    return b + c * y_behind
