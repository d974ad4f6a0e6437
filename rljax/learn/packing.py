"""Packed passes: a pass of a model costs what the tokens that are there cost, not rows x columns.

A Batch has one sequence to a row, and every formula sees it so. Inside a program the passes of the
models see other rows: sequences are cut into pieces (the prefix that rows of one prompt share, and
the rest of each), pieces stand side by side in blocks of `block_tokens`, and `blocks` of them are a
packed row. A rest and its prefix are in one packed row; a group that does not fit one repeats its
prefix. So many packed rows as the mesh needs are a microbatch of one shape, and only as many
microbatches are computed as hold tokens: one program serves all lengths.

Axes: B rows of the batch, S tokens, M microbatches at most, U packed rows of one, W blocks, N
sequences of a packed row at most, T tokens of a block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.learn.first_fit import Assignment, Packing, Pieces, first_fit
from rljax.learn.replicas import Replicas
from rljax.mesh import replicated, row_shards
from rljax.metric import Metric

METRICS = {
    "positions": Metric(
        "positions that a pass of an optimizer step computes",
        "tokens",
        "follows the lengths of the responses",
    ),
    "positions_filled": Metric(
        "share of those positions that are tokens, a prompt counted once for its samples",
        "fraction",
        "above 0.8",
    ),
}

# A packed row holds at most so many times the sequences that fill it at full length.
SHORTER = 8
# A microbatch is a part of the step small enough that rounding up to whole ones costs little, and
# large enough for its products: at full length the step has up to so many, of so many tokens.
PARTS, PART_TOKENS = 16, 2560
TPU_PART_TOKENS = 8192  # there weights are gathered for each microbatch
LANES = 128


def packing_for(
    rows: int,
    row_tokens: int,
    microbatch_rows: int,
    mesh: Mesh,
    *,
    prompt_tokens: int = 0,
    samples: int = 1,
    rows_per_example: int = 1,
) -> Packing | None:
    """Returns the packing of optimizer steps, or None for steps of so few tokens that packing costs
    more than it saves.

    Args:
      rows: sequences of an optimizer step.
      row_tokens: tokens of a sequence at most.
      microbatch_rows: a microbatch has at most microbatch_rows x row_tokens tokens.
      mesh: the devices.
      prompt_tokens: of these at most are a prompt that `samples` rows share; 0 = nothing is shared.
      samples: rows that share a prompt.
      rows_per_example: consecutive rows that are one example.
    """
    if rows * row_tokens <= PART_TOKENS:
        return None
    shards, on_tpu = row_shards(mesh), mesh.devices.flat[0].platform == "tpu"
    tokens = (TPU_PART_TOKENS if on_tpu else PART_TOKENS) * shards
    tokens = max(rows * row_tokens // PARTS, tokens)
    unit = shards * rows_per_example
    sizes = [r for r in range(unit, microbatch_rows + 1, unit) if rows % r == 0]
    large_enough = [r for r in sizes if r * row_tokens >= tokens]
    group_rows = max(samples, rows_per_example)
    shares = 0 < prompt_tokens < row_tokens and group_rows > 1
    if shares and 2 * prompt_tokens >= row_tokens:  # then whole groups, or prompts are repeated
        large_enough = [r for r in large_enough if r // shards % group_rows == 0] or large_enough
    full_sequences = (large_enough or sizes[-1:] or [microbatch_rows])[0] // shards
    block_tokens, blocks, shared = row_tokens, full_sequences, False
    if shares:
        response_tokens = row_tokens - prompt_tokens
        piece_tokens = max(prompt_tokens, response_tokens)
        if on_tpu:  # whole lanes: attention pads to them anyway
            piece_tokens += -piece_tokens % LANES
        # A block of rests continues one block of prompts, so room left in it is not filled.
        rows_per_block = group_rows * (piece_tokens // prompt_tokens)
        full_blocks, remaining = divmod(full_sequences, rows_per_block)

        def of_rests(rows):
            return -(-rows // (piece_tokens // response_tokens))

        block_count = (
            full_blocks * of_rests(rows_per_block)
            + of_rests(remaining)
            + -(-full_sequences // rows_per_block)
        )
        # A block for a short prompt beside one long response would be mostly padding.
        if shared := block_count * piece_tokens < full_sequences * row_tokens:
            block_tokens, blocks = piece_tokens, block_count
    blocks = max(blocks, rows_per_example * (2 if shared else 1))
    max_sequences = min(SHORTER * full_sequences, rows)
    max_sequences = max(max_sequences, rows_per_example)
    return Packing(
        block_tokens, blocks, shards, max_sequences, shared, mesh, full_rows=full_sequences * shards
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """The result of `pack`.

    rows: the packed rows, [M, U, W T], or [M, U W, T] where no prefix is shared. sequences
    [M, U, N]: the rows of the batch that each holds, B = none. columns [B, S]: the column of each
    token in the W T of its packed row. homes [B]: which of the M U it is, -1 = not computed. count:
    microbatches that hold tokens.
    """

    rows: Batch
    sequences: jax.Array
    columns: jax.Array
    homes: jax.Array
    count: jax.Array | int

    @property
    def parts(self) -> int:
        """M, the number of microbatches."""
        return self.sequences.shape[0]

    def each(self, replicas: Replicas, function: Callable) -> Callable:
        """Returns function(arrays, Packed, index), of every replica's own packed rows, as a
        function (arrays, index)."""
        if replicas.count == 1:
            return lambda arrays, index: function(arrays, self, index)

        columns = replicas.whole(self.columns)

        def of_one(arrays, rows, sequences, index):
            fields = dict(rows=rows, sequences=sequences, columns=columns)
            return function(arrays, dataclasses.replace(self, **fields), index)

        def call(arrays, index):
            replica_rows = replicas.split((self.microbatch(index), self.sequences[index]))
            one_microbatch = jax.tree.map(lambda x: x[:, None], replica_rows)
            return replicas.each(of_one, (0, 0, 0, None))(arrays, *one_microbatch, 0)

        return call

    def metrics(self) -> dict[str, jax.Array]:
        """Returns the positions that a pass computes, and the share of them that
        are tokens: scalars."""
        filled = jnp.sum((self.rows.segment_ids > 0).astype(jnp.float32))
        positions = self.rows.segment_ids[0].size * jnp.asarray(self.count, jnp.float32)
        return {"positions": positions, "positions_filled": filled / jnp.maximum(positions, 1)}

    def microbatch(self, index) -> Batch:
        """Returns the packed rows of microbatch `index`: a batch [U, W T]."""
        return jax.tree.map(lambda x: x[index], self.rows)

    def outputs(self, out: Any, index) -> Any:
        """Gathers the outputs of a pass over microbatch `index` by sequence: [U, W T, ...] -> [U N,
        S, ...], 0 where there is no sequence."""
        sequences = self.sequences[index]
        units, n = sequences.shape
        s = self.columns.shape[1]
        columns = jnp.take(self.columns, sequences, axis=0, mode="clip").reshape(units, n * s)
        present = (sequences < self.columns.shape[0]).reshape(units * n, 1)

        def one(x):
            x = x.reshape(units, -1, *x.shape[2:])
            trailing = (1,) * (x.ndim - 2)
            gathered = jnp.take_along_axis(x, columns.reshape(units, n * s, *trailing), axis=1)
            gathered = gathered.reshape(units * n, s, *x.shape[2:])
            return jnp.where(present.reshape(units * n, 1, *trailing), gathered, 0)

        return jax.tree.map(one, out)

    def taken(self, tree: Any, index) -> Any:
        """Returns the rows [U N, ...] of a tree of [B, ...] arrays that microbatch `index` holds,
        and which of them are there [U N] bool."""
        rows = self.sequences[index].reshape(-1)
        present = rows < self.columns.shape[0]
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), tree), present

    def gathered(self, out: Any) -> Any:
        """Gathers [M, U, W T, ...] (or [M, U W, T, ...]) of all passes by row -> [B, S, ...], 0
        where nothing was computed."""
        home = jnp.maximum(self.homes, 0)[:, None]
        units = self.sequences.shape[0] * self.sequences.shape[1]

        def one(x):
            gathered = x.reshape(units, -1, *x.shape[3:])[home, self.columns]
            computed = (self.homes >= 0).reshape(-1, *(1,) * (gathered.ndim - 1))
            return jnp.where(computed, gathered, 0)

        return jax.tree.map(one, out)


def _cut(batch: Batch, live: jax.Array, packing: Packing) -> Pieces:
    """Cuts rows into prefix and rest. The prefix of a row is what comes before its first policy
    token; one that no other row has is not cut off, unless the row exceeds a block."""
    b, s = batch.tokens.shape
    column = jnp.arange(s, dtype=jnp.int32)[None]
    row = jnp.arange(b, dtype=jnp.int32)
    length = jnp.where(live, jnp.max(jnp.where(batch.segment_ids > 0, column + 1, 0), axis=1), 0)
    if not packing.shared:
        return Pieces(length, jnp.zeros_like(length), row, live)
    first_chosen = jnp.min(jnp.where(batch.mask > 0, column, s), axis=1)
    excess = jnp.maximum(length - packing.block_tokens, 0)  # must be in a prefix: it fits no block
    prefix = jnp.clip(jnp.minimum(first_chosen, length), excess, packing.block_tokens)
    in_prefix = column < prefix[:, None]
    chosen = (batch.mask > 0).astype(jnp.int32)
    fields = [batch.tokens, batch.positions, batch.segment_ids, chosen]
    if batch.rope_positions is not None:
        fields += [batch.rope_positions[..., i] for i in range(batch.rope_positions.shape[-1])]
    hashes = _hashes(fields, in_prefix, jnp.where(live, prefix, -1 - row))
    # The first row of equal hashes leads; prefixes are then compared token by token.
    alike = jnp.all(hashes[:, :, None] == hashes[:, None, :], axis=0)
    leader = jnp.argmax(alike, axis=1).astype(jnp.int32)
    equal = prefix == prefix[leader]
    for field in fields:
        equal &= jnp.all((field == field[leader]) | ~in_prefix, axis=1)
    leader = jnp.where(equal, leader, row)
    sharing = jnp.zeros_like(row).at[leader].add(live.astype(row.dtype))[leader]
    is_cut = (sharing > 1) | (excess > 0)
    return Pieces(length, jnp.where(is_cut, prefix, 0), jnp.where(is_cut, leader, row), live)


def _hashes(fields, in_prefix, prefix) -> jax.Array:
    """Returns two hashes of each row [2, B], equal for rows of equal prefixes."""
    shape = (2, len(fields), in_prefix.shape[1])
    mixed = np.random.default_rng(0).integers(2**32, size=shape, dtype=np.uint32) | np.uint32(1)
    hashes = prefix.astype(jnp.uint32)[None] * mixed[:, :1, 0]
    for i, field in enumerate(fields):
        values = jnp.where(in_prefix, field, 0).astype(jnp.uint32)
        hashes = hashes + jnp.sum(values[None] * mixed[:, i, None], axis=2, dtype=jnp.uint32)
    return hashes


def pack(
    batch: Batch, packing: Packing, *, live: jax.Array | None = None, rows_per_example: int = 1
) -> Packed:
    """Packs rows of a batch [B, S] into microbatches.

    Args:
      batch: B rows of S tokens.
      packing: sizes of the packed rows.
      live: [B] bool, the rows to be packed; None: those with policy tokens.
      rows_per_example: consecutive rows that share a microbatch.

    Raises InputError for a batch with images.
    """
    if batch.pixels is not None:
        raise InputError("packed rows cannot hold images", fix="Steps without packing")
    b, s = batch.tokens.shape
    packing = packing.holding(s, rows_per_example)
    live = jnp.any(batch.mask > 0, axis=1) if live is None else live
    batch, live = _whole((batch, live), packing.mesh)
    pieces = _cut(batch, live, packing)
    units = packing.most_rows(b // rows_per_example, rows_per_example)
    assignment = first_fit(pieces, packing, units, rows_per_example)
    column = jnp.arange(s)[None]
    in_prefix = column < pieces.prefix[:, None]
    columns = jnp.where(
        in_prefix, assignment.prefix[:, None], (assignment.rest - pieces.prefix)[:, None]
    )
    in_row = column < pieces.length[:, None]
    width = packing.blocks * packing.block_tokens
    columns = jnp.clip(jnp.where(in_row, columns + column, 0), 0, width - 1)
    home = jnp.where(live, assignment.home, units)  # out of range: dropped
    rows = _packed_rows(
        batch, packing, pieces, assignment, columns, jnp.where(in_row, home[:, None], units)
    )
    sequences = jnp.full((units, packing.sequences_of(rows_per_example)), b, jnp.int32)
    sequences = sequences.at[home, assignment.number].set(
        jnp.arange(b, dtype=jnp.int32), mode="drop"
    )

    def split(x):
        return x.reshape(-1, packing.rows, *x.shape[1:])

    count = jnp.max(jnp.where(live, assignment.home // packing.rows + 1, 0))
    if packing.full:
        count = min(-(-b // packing.full_rows), units // packing.rows)
    return Packed(rows, split(sequences), columns, jnp.where(live, assignment.home, -1), count)


def _packed_rows(batch, packing, pieces, assignment: Assignment, columns, homes) -> Batch:
    """Returns the packed rows. `columns` and `homes` are the column and the packed row of every
    token; that of padding is out of range."""
    b, s = columns.shape
    units = assignment.continues.shape[0]
    # The token of the batch that stands at each column; of a shared prefix, any row's. b s = none.
    index = jnp.arange(b * s, dtype=jnp.int32).reshape(b, s)
    source = jnp.full((units, packing.blocks * packing.block_tokens), b * s, jnp.int32)
    source = source.at[homes, columns].set(index, mode="drop")

    def put(x):
        flat = x.reshape(b * s, *x.shape[2:])
        return jnp.take(flat, source, axis=0, mode="fill", fill_value=0)

    column = jnp.arange(s)[None]
    in_prefix = column < pieces.prefix[:, None]
    # The name of a segment is its offset in its block, as names are compared within a block alone.
    # A row that was packed before has several segments.
    begins = (column == 0) | (batch.segment_ids != jnp.roll(batch.segment_ids, 1, axis=1))
    begins = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
    in_piece = jnp.where(in_prefix, begins, jnp.maximum(begins - pieces.prefix[:, None], 0))

    def named(start, offset):
        return jnp.where(batch.segment_ids > 0, 1 + start % packing.block_tokens + offset, 0)

    start = jnp.where(in_prefix, assignment.prefix[:, None], assignment.rest[:, None])
    fields = {
        "tokens": put(batch.tokens),
        "segment_ids": put(named(start, in_piece)),
        "positions": put(batch.positions),
        "mask": put(batch.mask),
    }
    if batch.rope_positions is not None:
        fields["rope_positions"] = put(batch.rope_positions)
    if batch.target_ids is not None:  # read beside the tokens (Contract.reads_targets)
        fields["target_ids"] = put(batch.target_ids)
    if batch.routes is not None:
        fields["routes"] = put(batch.routes)
    if batch.teacher is not None:
        fields["teacher"] = put(batch.teacher)
    if not packing.shared:
        shape = (units // packing.rows, packing.rows * packing.blocks, packing.block_tokens)
        return Batch(**{name: x.reshape(*shape, *x.shape[2:]) for name, x in fields.items()})
    continued = ~in_prefix & (begins < pieces.prefix[:, None])
    fields["prefix_ids"] = put(jnp.where(continued, named(assignment.prefix[:, None], begins), 0))
    own_blocks = jnp.arange(packing.blocks)[None]
    fields["prefix_blocks"] = jnp.where(assignment.continues < 0, own_blocks, assignment.continues)
    previous_columns = jnp.roll(columns, 1, axis=1)
    follows = (batch.segment_ids == jnp.roll(batch.segment_ids, 1, axis=1)) & (column > 0)
    fields["previous"] = put(jnp.where(follows, previous_columns, columns))
    return Batch(**{name: x.reshape(-1, packing.rows, *x.shape[1:]) for name, x in fields.items()})


def _whole(tree, mesh: Mesh):
    """Replicates arrays, so that every device computes the same assignment."""
    if mesh.size == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, replicated(mesh)), tree)


def each_microbatch(packed: Packed, body: Callable, carry):
    """Computes carry = body(index, carry) for every microbatch that holds
    tokens; not differentiable."""
    return jax.lax.fori_loop(0, packed.count, body, carry)


def map_packed(function: Callable, packed: Packed):
    """Applies function(packed Batch) -> (a tree of numbers per token, a tree of sums) to
    all microbatches. Returns (the numbers [B, S, ...], 0 at rows that are not packed; the
    sums over all)."""
    shapes, sums = jax.eval_shape(lambda: function(packed.microbatch(0)))

    def body(index, carry):
        numbers, total = carry
        part_numbers, part_sums = function(packed.microbatch(index))
        numbers = jax.tree.map(
            lambda stored, values: stored.at[index].set(values), numbers, part_numbers
        )
        return numbers, jax.tree.map(jnp.add, total, part_sums)

    zeros = jax.tree.map(lambda x: jnp.zeros((packed.parts, *x.shape), x.dtype), shapes)
    start = zeros, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    numbers, total = each_microbatch(packed, body, start)
    return packed.gathered(numbers), total
