"""The insides of the TPU kernels of the fused log-prob: what one grid step does with one tile.

Products in slices of D, running statistics, and the gradient at the logits. Grids and blocks
are in pallas_tpu.py.

A kernel gets references to blocks in VMEM. Where a block reaches past the end of its array it
holds anything, NaN too.

Axes: D embed, V vocabulary entries; a tile is R rows x W vocabulary entries; 128 lanes.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rljax.kernels.logprob.options import LogprobOptions
from rljax.kernels.logprob.tpu_blocks import LANES

SLICE = 512  # of D in one pass of a product: all of it would unroll into too much code
CHUNK = 64  # rows whose logits pass through the registers at once
LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)  # stands for -inf: its differences are no NaN
LEAST_Q = -1e4  # log p below which p is 0 in float32 anyway
F32 = jnp.float32


def passes(hidden_dtype, head_dtype) -> int:
    """Counts how often the MXU multiplies for one product that makes logits. It takes bfloat16: a
    float32 input is three parts, of two of them three of the nine products are left out."""
    float32_inputs = sum(dtype == F32 for dtype in (hidden_dtype, head_dtype))
    return (1, 3, 6)[float32_inputs]


def _over_depth(hidden_ref, head_ref, body) -> None:
    """Calls body(slice of D) for every slice; the last may be short."""
    size = max(SLICE // passes(hidden_ref.dtype, head_ref.dtype) // 128 * 128, 128)
    full_slices, remainder = divmod(hidden_ref.shape[1], size)
    if full_slices == 1:
        body(pl.ds(0, size))
    elif full_slices:

        def step(k, _):
            body(pl.ds(pl.multiple_of(k * size, size), size))
            return 0

        jax.lax.fori_loop(0, full_slices, step, 0)
    if remainder:
        body(pl.ds(full_slices * size, remainder))


def _over_rows(rows: int, body) -> None:
    chunk = next(size for size in (CHUNK, 32, 16) if rows % size == 0)

    def step(r, _):
        body(pl.ds(pl.multiple_of(r * chunk, chunk), chunk), chunk)
        return 0

    jax.lax.fori_loop(0, rows // chunk, step, 0)


def _product(x, y, contract, precision=None):
    return jax.lax.dot_general(
        x,
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=F32,
        precision=precision if x.dtype == F32 else None,
    )


def _coarse_product(x, y, contract):
    """Returns a product in one pass of the MXU, for gradients: their rounding errors average out
    over rows and vocabulary."""
    return _product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), contract)


def _parts(x) -> list:
    """bfloat16 arrays whose sum is x, all 24 bits of a float32; the smallest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3):
        parts.insert(0, x.astype(jnp.bfloat16))
        x = x - parts[0].astype(F32)
    return parts


def _exact_products(x, y, contract, precision) -> list:
    """Returns products whose sum is x y, as exact as float32 holds it."""
    if x.dtype == y.dtype:
        return [_product(x, y, contract, precision)]
    return [_product(p, q, contract) for p in _parts(x) for q in _parts(y)]


def _head_slice(head_ref, depth, options: LogprobOptions):
    return head_ref[:, depth] if options.vocab_first else head_ref[depth, :]


def _multiply(hidden_ref, head_ref, z_ref, options: LogprobOptions) -> None:
    """z [R, W] += hidden [R, D] head, before cap and scale. Whatever reads z leaves zeros for the
    next tile: beside its arithmetic these stores cost nothing, a pass of their own would."""

    def add(depth):
        w = _head_slice(head_ref, depth, options)
        contract = (1, 1 if options.vocab_first else 0)
        for product in _exact_products(hidden_ref[:, depth], w, contract, options.precision):
            z_ref[...] += product

    _over_depth(hidden_ref, head_ref, add)


def forward_kernel(
    scale_ref, target_ref, hidden_ref, head_ref, out_ref, z_ref, *running, options, vocab
):
    """Updates running statistics per lane: largest logit, sum of exp, sum of exp times logit,
    target, best token."""
    j, tile_vocab = pl.program_id(1), z_ref.shape[1]
    rows = z_ref.shape[0]

    @pl.when(j == 0)
    def _():
        top_ref, *sums, best_ref = running
        top_ref[...] = jnp.full_like(top_ref, LOWEST)
        for ref in (z_ref, *sums):
            ref[...] = jnp.zeros_like(ref)
        best_ref[...] = jax.lax.broadcasted_iota(jnp.int32, best_ref.shape, 1)

    _multiply(hidden_ref, head_ref, z_ref, options)

    def update(row_slice, chunk):
        _update_statistics(
            z_ref,
            target_ref,
            running,
            row_slice,
            chunk,
            j * tile_vocab,
            scale_ref[0, 0],
            options,
            vocab,
        )

    _over_rows(rows, update)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        _over_rows(
            rows,
            lambda row_slice, _: _finish(target_ref, out_ref, running, row_slice, vocab, options),
        )


def _update_statistics(z_ref, target_ref, running, rows, chunk, start, scale, options, vocab):
    """Adds one chunk of rows of a tile, whose first token is `start`, to the running statistics."""
    top_ref, sum_ref, weighted_ref, at_target_ref, best_ref = running
    lane = jax.lax.broadcasted_iota(jnp.int32, (chunk, LANES), 1)
    target = target_ref[rows, :] - start
    old_top = top = top_ref[rows, :]
    at_target, best, logits = at_target_ref[rows, :], best_ref[rows, :], []
    for k in range(0, z_ref.shape[1], LANES):
        z = z_ref[rows, k : k + LANES]
        z_ref[rows, k : k + LANES] = jnp.zeros_like(z)
        z = (options.soft_cap * jnp.tanh(z / options.soft_cap) if options.soft_cap else z) * scale
        at_target += jnp.where(lane + k == target, z, 0.0)
        if vocab % z_ref.shape[1]:
            z = jnp.where(lane + k < vocab - start, z, LOWEST)
        z = jnp.maximum(z, LOWEST)
        if options.greedy:  # later tokens must be larger, so that the first of equals stays
            best = jnp.where(z > top, lane + (start + k), best)
        top = jnp.maximum(top, z)
        logits.append(z)
    shrink = jnp.exp(old_top - top)
    total = sum_ref[rows, :]
    weighted = (weighted_ref[rows, :] + total * (old_top - top)) * shrink
    total = total * shrink
    for z in logits:
        e = jnp.exp(z - top)
        total += e
        if options.entropy:
            weighted += e * (z - top)
    live = top != LOWEST  # a lane without any finite logit has counted its LOWEST
    top_ref[rows, :], at_target_ref[rows, :] = top, at_target
    sum_ref[rows, :] = jnp.where(live, total, 0.0)
    if options.entropy:
        weighted_ref[rows, :] = jnp.where(live, weighted, 0.0)
    if options.greedy:
        best_ref[rows, :] = best


def _finish(target_ref, out_ref, running, rows, vocab, options):
    """Reduces the lanes' statistics to one row's: lanes 0 to 4 of the output, as bits."""
    top, total, weighted, at_target, best = (ref[rows, :] for ref in running)
    largest = jnp.max(top, axis=1, keepdims=True)
    share = jnp.exp(top - largest)
    mass = jnp.sum(total * share, axis=1, keepdims=True)
    finite = jnp.where(largest == LOWEST, 0.0, largest)
    target_id = target_ref[rows, :]
    target = jnp.sum(at_target, axis=1, keepdims=True) - finite
    columns = [
        finite,
        jnp.log(mass),
        jnp.where((target_id >= 0) & (target_id < vocab), target, 0.0),
    ]
    if options.entropy:
        weighted = jnp.sum((weighted + total * (top - largest)) * share, axis=1, keepdims=True)
        columns.append(weighted / jnp.where(mass == 0, 1.0, mass))
    lane = jax.lax.broadcasted_iota(jnp.int32, top.shape, 1)
    output = jnp.zeros_like(lane)
    for i, column in enumerate(columns):
        bits = jax.lax.bitcast_convert_type(jnp.broadcast_to(column, top.shape), jnp.int32)
        output = jnp.where(lane == i, bits, output)
    if options.greedy:
        best_token = jnp.min(jnp.where(top == largest, best, vocab), axis=1, keepdims=True)
        output = jnp.where(lane == 4, best_token, output)
    out_ref[rows, :] = output


def _logit_gradient(refs, start, scale, options, remaining=None) -> None:
    """Computes dz of a tile from its products; with `remaining`, only that many vocabulary entries
    of it exist. The rows' a, b and c are multiplied by scale already."""
    target_ref, statistics_ref, z_ref, dz_ref = refs

    def chunk_of_rows(rows, chunk):
        row = statistics_ref[rows, :]
        top, log_sum, a, b, c = (row[:, i : i + 1] for i in range(5))
        lane = jax.lax.broadcasted_iota(jnp.int32, (chunk, LANES), 1)
        target = target_ref[rows, :] - start
        for k in range(0, z_ref.shape[1], LANES):
            z = z_ref[rows, k : k + LANES]
            z_ref[rows, k : k + LANES] = jnp.zeros_like(z)
            if options.soft_cap:
                tanh = jnp.tanh(z / options.soft_cap)
                z = options.soft_cap * tanh
            # A floor instead of -inf: c times it is finite, and p is 0 all the same.
            q = jnp.maximum((z * scale - top) - log_sum, LEAST_Q)
            p = jnp.exp(q)
            dz = p * (b + c * q) if options.entropy else p * b
            dz += jnp.where(lane + k == target, a, 0.0)
            if options.soft_cap:
                dz *= 1.0 - tanh * tanh
            if remaining is not None:
                dz = jnp.where(lane + k < remaining, dz, 0.0)
            dz_ref[rows, k : k + LANES] = dz.astype(dz_ref.dtype)

    _over_rows(z_ref.shape[0], chunk_of_rows)


def _clear(*refs) -> None:
    for ref in refs:
        ref[...] = jnp.zeros_like(ref)


def _drop_missing_vocab(
    hidden_ref, head_ref, remaining, tile_vocab, options: LogprobOptions
) -> None:
    """Zeroes the head past the vocabulary, where the last tile holds anything, NaN too."""

    @pl.when(remaining < tile_vocab)
    def _():
        def zero(depth):
            return _zero_missing(head_ref, depth, remaining, options)

        _over_depth(hidden_ref, head_ref, zero)


def _zero_missing(head_ref, depth, remaining, options: LogprobOptions) -> None:
    w = _head_slice(head_ref, depth, options)
    token_id = jax.lax.broadcasted_iota(jnp.int32, w.shape, 0 if options.vocab_first else 1)
    masked = jnp.where(token_id < remaining, w, jnp.zeros_like(w))
    if options.vocab_first:
        head_ref[:, depth] = masked
    else:
        head_ref[depth, :] = masked


def _drop_missing_rows(hidden_ref, remaining, tile_rows) -> None:
    """Zeroes the hidden states of rows that do not exist, whose a, b and c are 0."""

    @pl.when(remaining < tile_rows)
    def _():
        def zero(rows, chunk):
            x = hidden_ref[rows, :]
            row = rows.start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            hidden_ref[rows, :] = jnp.where(row < remaining, x, jnp.zeros_like(x))

        _over_rows(tile_rows, zero)


def _add_to_hidden(sum_ref, rows, dz_ref, hidden_ref, head_ref, options: LogprobOptions) -> None:
    """sum [rows, D] += dz [R, W] times the head."""

    def add(depth):
        w = _head_slice(head_ref, depth, options)
        contract = (1, 0 if options.vocab_first else 1)
        sum_ref[rows, depth] += _coarse_product(dz_ref[...], w, contract)

    _over_depth(hidden_ref, head_ref, add)


def _add_to_head(sum_ref, dz_ref, hidden_ref, head_ref) -> None:
    """sum [W, D] += dz [R, W], transposed, times hidden."""
    transposed = dz_ref[...].T  # once a tile: the products want the vocabulary first

    def add(depth):
        sum_ref[:, depth] += _coarse_product(transposed, hidden_ref[:, depth], (1, 0))

    _over_depth(hidden_ref, head_ref, add)


def _store_head(out_ref, sum_ref, hidden_ref, head_ref, options: LogprobOptions) -> None:
    if options.vocab_first:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
        return

    def store(depth):
        out_ref[depth, :] = sum_ref[:, depth].T.astype(out_ref.dtype)

    _over_depth(hidden_ref, head_ref, store)


def hidden_kernel(
    scale_ref,
    target_ref,
    hidden_ref,
    head_ref,
    statistics_ref,
    out_ref,
    z_ref,
    dz_ref,
    sum_ref,
    *,
    options,
    vocab,
):
    """Takes a step of hidden's gradient: adds the product of a tile and the head to its rows."""
    j, tile_vocab = pl.program_id(1), z_ref.shape[1]
    pl.when(j == 0)(lambda: _clear(sum_ref, z_ref))
    remaining = None
    if vocab % tile_vocab:
        remaining = vocab - j * tile_vocab
        _drop_missing_vocab(hidden_ref, head_ref, remaining, tile_vocab, options)
    _multiply(hidden_ref, head_ref, z_ref, options)
    refs = target_ref, statistics_ref, z_ref, dz_ref
    _logit_gradient(refs, j * tile_vocab, scale_ref[0, 0], options, remaining)
    _add_to_hidden(sum_ref, slice(None), dz_ref, hidden_ref, head_ref, options)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def head_kernel(
    scale_ref,
    target_ref,
    hidden_ref,
    head_ref,
    statistics_ref,
    out_ref,
    z_ref,
    dz_ref,
    sum_ref,
    *,
    options,
    rows,
):
    """Takes a step of the head's gradient: adds the product of a tile and its rows to the head."""
    j, i = pl.program_id(0), pl.program_id(1)
    tile_rows, tile_vocab = z_ref.shape
    pl.when(i == 0)(lambda: _clear(sum_ref, z_ref))
    if rows % tile_rows:
        _drop_missing_rows(hidden_ref, rows - i * tile_rows, tile_rows)
    _multiply(hidden_ref, head_ref, z_ref, options)
    refs = target_ref, statistics_ref, z_ref, dz_ref
    _logit_gradient(refs, j * tile_vocab, scale_ref[0, 0], options)
    _add_to_head(sum_ref, dz_ref, hidden_ref, head_ref)

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        _store_head(out_ref, sum_ref, hidden_ref, head_ref, options)


def both_kernel(
    scale_ref,
    target_ref,
    hidden_ref,
    head_ref,
    statistics_ref,
    hidden_out_ref,
    head_out_ref,
    z_ref,
    dz_ref,
    hidden_sum_ref,
    head_sum_ref,
    *,
    options,
    rows,
    vocab,
):
    """Takes a step of both gradients from one tile: that of the head is summed over the rows, which
    are the inner axis of the grid, that of hidden over all of it."""
    j, i = pl.program_id(0), pl.program_id(1)
    tile_rows, tile_vocab = z_ref.shape
    row_slice = pl.ds(pl.multiple_of(i * tile_rows, tile_rows), tile_rows)
    pl.when(i == 0)(lambda: _clear(head_sum_ref, z_ref))

    @pl.when(j == 0)
    def _():
        hidden_sum_ref[row_slice, :] = jnp.zeros((tile_rows, hidden_ref.shape[1]), F32)

    remaining = None
    if vocab % tile_vocab:
        remaining = vocab - j * tile_vocab
        _drop_missing_vocab(hidden_ref, head_ref, remaining, tile_vocab, options)
    if rows % tile_rows:
        _drop_missing_rows(hidden_ref, rows - i * tile_rows, tile_rows)
    _multiply(hidden_ref, head_ref, z_ref, options)
    refs = target_ref, statistics_ref, z_ref, dz_ref
    _logit_gradient(refs, j * tile_vocab, scale_ref[0, 0], options, remaining)
    _add_to_hidden(hidden_sum_ref, row_slice, dz_ref, hidden_ref, head_ref, options)
    _add_to_head(head_sum_ref, dz_ref, hidden_ref, head_ref)

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        _store_head(head_out_ref, head_sum_ref, hidden_ref, head_ref, options)

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        hidden_out_ref[...] = hidden_sum_ref[row_slice, :].astype(hidden_out_ref.dtype)
