"""First fit of pieces into the blocks of packed rows (rljax.learn.packing), inside a program.

Axes: B sequences, R packed rows, W blocks of one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Packing:
    """The static shape of a packed microbatch: `rows` packed rows of `blocks` blocks of
    `block_tokens` tokens, with up to `sequences` sequences in a row. `shared`: a prompt that rows
    have in common is computed once. A microbatch has room for `full_rows` sequences of full length.
    `full`: compute as many microbatches as such sequences need, whatever there is (for a plan)."""

    block_tokens: int
    blocks: int
    rows: int
    sequences: int
    shared: bool
    mesh: Mesh
    full_rows: int = 1
    full: bool = False

    @property
    def positions(self) -> int:
        """Tokens of a microbatch, padding included."""
        return self.rows * self.blocks * self.block_tokens

    def sequences_of(self, rows_per_example: int) -> int:
        """Returns `sequences`, rounded up to whole examples of `rows_per_example` rows."""
        return self.sequences - self.sequences % rows_per_example

    def holding(self, row_tokens: int, rows_per_example: int) -> "Packing":
        """Returns a packing whose packed rows hold an example of `rows_per_example` rows of
        `row_tokens` tokens. Raises InputError for rows that blocks cannot hold."""
        pieces = 2 if self.shared else 1
        if row_tokens > pieces * self.block_tokens:
            raise InputError(
                f"rows of {row_tokens} tokens in blocks of {self.block_tokens}",
                rule=f"a row is cut into at most {pieces} pieces, and a piece is in one block",
                fix=f"blocks of {-(-row_tokens // pieces)} tokens or more, or "
                "config.batch.packing=False",
            )
        blocks = max(self.blocks, pieces * rows_per_example)
        sequences = max(self.sequences, rows_per_example)
        return dataclasses.replace(self, blocks=blocks, sequences=sequences)

    def most_rows(self, examples: int, rows_per_example: int) -> int:
        """Returns how many packed rows hold any batch of `examples` examples: the worst
        case of `pack`."""
        blocks = rows_per_example * (2 if self.shared else 1)
        fit = min(self.blocks // blocks, self.sequences // rows_per_example)
        return -(-examples // fit // self.rows) * self.rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Lengths of every row: tokens, how many of them are the prefix, and the row whose prefix it
    shares."""

    length: jax.Array
    prefix: jax.Array
    leader: jax.Array
    live: jax.Array

    @property
    def rest(self):
        """Tokens of each row behind its shared prefix [B]."""
        return self.length - self.prefix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Bins:
    """Fill of all packed rows: free tokens of blocks [R, W]; which blocks hold prefixes; the block
    whose prefixes the rests of a block continue (-1 = not decided); the prefix block that is open
    [R] (-1 = none); number of sequences [R]; the offset at which the prefix of the current group is
    [R] (-1 = not in this row)."""

    free: jax.Array
    is_prefix: jax.Array
    continues: jax.Array
    open: jax.Array
    sequences: jax.Array
    at: jax.Array
    group: jax.Array


def _start(packing: Packing, rows: int) -> _Bins:
    shape = (rows, packing.blocks)
    unset = jnp.full(rows, -1, jnp.int32)
    free = jnp.full(shape, packing.block_tokens, jnp.int32)
    return _Bins(
        free,
        jnp.zeros(shape, bool),
        jnp.full(shape, -1, jnp.int32),
        unset,
        jnp.zeros(rows, jnp.int32),
        unset,
        jnp.int32(-1),
    )


def _options(state: _Bins, packing: Packing, size, prefix):
    """Returns, for a rest of `size` tokens, which blocks have room [R, W], whether a packed row can
    hold its prefix [R], the block for the prefix [R], and whether the prefix is in the packed row
    already [R]."""
    column = jnp.arange(packing.blocks)[None]
    fits = (state.free >= size) & ~state.is_prefix
    if not packing.shared:
        zeros = jnp.zeros_like(state.open)
        return fits, zeros >= 0, zeros, zeros < 0
    unused = state.free == packing.block_tokens
    present = state.at >= 0
    room = jnp.take_along_axis(state.free, jnp.maximum(state.open, 0)[:, None], axis=1)[:, 0]
    joins = (state.open >= 0) & (room >= prefix)
    fresh = jnp.argmax(unused, axis=1).astype(jnp.int32)
    block = jnp.where(
        present, state.at // packing.block_tokens, jnp.where(joins, state.open, fresh)
    )
    opens = (prefix > 0) & ~present & ~joins
    agrees = (state.continues < 0) | (state.continues == block[:, None])
    fits &= ((prefix == 0) | agrees) & ~(opens[:, None] & (column == block[:, None]))
    return fits, (prefix == 0) | present | joins | jnp.any(unused, axis=1), block, present


def _first(ok, present):
    """Returns the first packed row that is `ok`, if possible one that has the prefix already."""
    index = jnp.arange(ok.shape[0])
    return jnp.argmin(jnp.where(ok, index - present * ok.shape[0], ok.shape[0]))


def _assign(state: _Bins, packing: Packing, unit, size, prefix, live):
    """Puts a sequence into packed row `unit`. Returns the state, and the offsets at which its rest
    and its prefix begin."""
    t = packing.block_tokens
    fits, _, block, present = _options(state, packing, size, prefix)
    best_block = jnp.argmin(jnp.where(fits[unit], state.free[unit], t + 1)).astype(jnp.int32)
    rest_at = best_block * t + t - state.free[unit, best_block]
    size, count = jnp.where(live, size, 0), live.astype(jnp.int32)
    free = state.free.at[unit, best_block].add(-size)
    state = dataclasses.replace(state, sequences=state.sequences.at[unit].add(count))
    if not packing.shared:
        return dataclasses.replace(state, free=free), (rest_at, rest_at)
    has_prefix, prefix_block = live & (prefix > 0), block[unit]
    is_new = has_prefix & ~present[unit]
    prefix_at = jnp.where(
        present[unit], state.at[unit], prefix_block * t + t - state.free[unit, prefix_block]
    )
    continues = jnp.where(has_prefix, prefix_block, state.continues[unit, best_block])
    return dataclasses.replace(
        state,
        free=free.at[unit, prefix_block].add(-jnp.where(is_new, prefix, 0)),
        is_prefix=state.is_prefix.at[unit, prefix_block].max(is_new),
        continues=state.continues.at[unit, best_block].set(continues),
        open=state.open.at[unit].set(jnp.where(is_new, prefix_block, state.open[unit])),
        at=state.at.at[unit].set(jnp.where(has_prefix, prefix_at, state.at[unit])),
    ), (rest_at, prefix_at)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The assignment of every row: its packed row, where in it the rest and the prefix begin, its
    number there, all [B]; and which block each block of a packed row continues [R, W]."""

    home: jax.Array
    rest: jax.Array
    prefix: jax.Array
    number: jax.Array
    continues: jax.Array


def first_fit(pieces: Pieces, packing: Packing, rows: int, together: int) -> Assignment:
    """Assigns each row of a batch to a packed row: first fit, group by group, the longest first.

    Args:
      pieces: lengths, prefixes and groups of the B rows, [B] each.
      packing: sizes of the packed rows.
      rows: number of packed rows that there is room for.
      together: consecutive rows that are one example, and go into one packed row.

    Returns the packed row, the offsets in it, and the number of each of the B rows.
    """

    def of(x):
        return x.reshape(-1, together)

    size, prefix, leader, live = (
        of(x) for x in (pieces.rest, pieces.prefix, pieces.leader, pieces.live)
    )
    longest = jnp.max(size, axis=1)
    width = packing.block_tokens + 1
    order = jnp.argsort(leader[:, 0] * width + packing.block_tokens - longest)
    most_sequences = packing.sequences_of(together)

    def step(initial, example):
        size, prefix, leader, live = example
        state = initial
        offset = jnp.where(leader[0] == state.group, state.at, -1)
        state = dataclasses.replace(state, at=offset, group=leader[0])
        largest = size[0] if together == 1 else jnp.max(size)
        fits, holds_prefix, _, present = _options(state, packing, largest, prefix[0])
        # The number of pieces of the largest size for which the blocks have room.
        room = jnp.sum(jnp.where(fits, state.free // jnp.maximum(largest, 1), 0), axis=1)
        ok = holds_prefix & (room >= together) & jnp.any(fits, axis=1)
        if together > 1:
            same_prefix = (leader == leader[0]) & (prefix == prefix[0])
            alike = jnp.all(same_prefix | ((prefix == 0) & (prefix[0] == 0)))
            blocks = together * (2 if packing.shared else 1)
            unused = jnp.sum(state.free == packing.block_tokens, axis=1)
            ok = (ok & alike) | (unused >= blocks)
        unit = _first(ok & (state.sequences + together <= most_sequences), present)
        assignments = []
        for i in range(together):
            number, offset = state.sequences[unit], state.at
            if i and packing.shared:  # a prefix of another group is placed for this row alone
                same_prefix = (leader[i] == leader[0]) & (prefix[i] == prefix[0])
                state = dataclasses.replace(state, at=jnp.where(same_prefix, offset, -1))
            state, assigned = _assign(state, packing, unit, size[i], prefix[i], live[i])
            if i and packing.shared:
                state = dataclasses.replace(state, at=jnp.where(same_prefix, state.at, offset))
            assignments.append(jnp.stack([unit, *assigned, number]))
        # With 64-bit types on, indices would widen the carry.
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, initial)
        return state, jnp.stack(assignments).astype(jnp.int32)

    examples = tuple(x[order] for x in (size, prefix, leader, live))
    state, assignments = jax.lax.scan(step, _start(packing, rows), examples)
    assignments = jnp.zeros_like(assignments).at[order].set(assignments).reshape(-1, 4)
    return Assignment(*assignments.T, state.continues)
