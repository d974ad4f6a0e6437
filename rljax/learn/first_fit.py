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
    """Fill of all packed rows: free [R, W] tokens of blocks; which hold prefixes; the block whose
    prefixes the rests of a block continue (-1 = not decided); prefix block that is open [R] (-1 =
    none); sequences [R]; where the prefix of the group at hand lies [R] (-1 = not here)."""

    free: jax.Array
    is_prefix: jax.Array
    continues: jax.Array
    open: jax.Array
    sequences: jax.Array
    at: jax.Array
    group: jax.Array


def _start(packing: Packing, rows: int) -> _Bins:
    shape = (rows, packing.blocks)
    none = jnp.full(rows, -1, jnp.int32)
    free = jnp.full(shape, packing.block_tokens, jnp.int32)
    return _Bins(
        free,
        jnp.zeros(shape, bool),
        jnp.full(shape, -1, jnp.int32),
        none,
        jnp.zeros(rows, jnp.int32),
        none,
        jnp.int32(-1),
    )


def _options(state: _Bins, packing: Packing, size, prefix):
    """For a rest of `size` tokens: which blocks have room [R, W], whether a packed row can hold its
    prefix [R], in which block that is [R], and whether it lies there already [R]."""
    column = jnp.arange(packing.blocks)[None]
    fits = (state.free >= size) & ~state.is_prefix
    if not packing.shared:
        nothing = jnp.zeros_like(state.open)
        return fits, nothing >= 0, nothing, nothing < 0
    unused = state.free == packing.block_tokens
    there = state.at >= 0
    room = jnp.take_along_axis(state.free, jnp.maximum(state.open, 0)[:, None], axis=1)[:, 0]
    joins = (state.open >= 0) & (room >= prefix)
    fresh = jnp.argmax(unused, axis=1).astype(jnp.int32)
    block = jnp.where(there, state.at // packing.block_tokens, jnp.where(joins, state.open, fresh))
    opens = (prefix > 0) & ~there & ~joins
    agrees = (state.continues < 0) | (state.continues == block[:, None])
    fits &= ((prefix == 0) | agrees) & ~(opens[:, None] & (column == block[:, None]))
    return fits, (prefix == 0) | there | joins | jnp.any(unused, axis=1), block, there


def _first(ok, there):
    """The first packed row that is `ok`, one where the prefix is already if there is any."""
    index = jnp.arange(ok.shape[0])
    return jnp.argmin(jnp.where(ok, index - there * ok.shape[0], ok.shape[0]))


def _assign(state: _Bins, packing: Packing, unit, size, prefix, live):
    """The state with a sequence in packed row `unit`, and (where its rest begins, its prefix)."""
    t = packing.block_tokens
    fits, _, block, there = _options(state, packing, size, prefix)
    best = jnp.argmin(jnp.where(fits[unit], state.free[unit], t + 1)).astype(jnp.int32)
    rest_at = best * t + t - state.free[unit, best]
    size, count = jnp.where(live, size, 0), live.astype(jnp.int32)
    free = state.free.at[unit, best].add(-size)
    state = dataclasses.replace(state, sequences=state.sequences.at[unit].add(count))
    if not packing.shared:
        return dataclasses.replace(state, free=free), (rest_at, rest_at)
    has, home = live & (prefix > 0), block[unit]
    new = has & ~there[unit]
    prefix_at = jnp.where(there[unit], state.at[unit], home * t + t - state.free[unit, home])
    continues = jnp.where(has, home, state.continues[unit, best])
    return dataclasses.replace(
        state,
        free=free.at[unit, home].add(-jnp.where(new, prefix, 0)),
        is_prefix=state.is_prefix.at[unit, home].max(new),
        continues=state.continues.at[unit, best].set(continues),
        open=state.open.at[unit].set(jnp.where(new, home, state.open[unit])),
        at=state.at.at[unit].set(jnp.where(has, prefix_at, state.at[unit])),
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

    def step(before, example):
        size, prefix, leader, live = example
        state = before
        at = jnp.where(leader[0] == state.group, state.at, -1)
        state = dataclasses.replace(state, at=at, group=leader[0])
        most = size[0] if together == 1 else jnp.max(size)
        fits, ready, _, there = _options(state, packing, most, prefix[0])
        # So many pieces of the largest size as the blocks at hand have room for.
        room = jnp.sum(jnp.where(fits, state.free // jnp.maximum(most, 1), 0), axis=1)
        ok = ready & (room >= together) & jnp.any(fits, axis=1)
        if together > 1:
            same = (leader == leader[0]) & (prefix == prefix[0])
            alike = jnp.all(same | ((prefix == 0) & (prefix[0] == 0)))
            blocks = together * (2 if packing.shared else 1)
            unused = jnp.sum(state.free == packing.block_tokens, axis=1)
            ok = (ok & alike) | (unused >= blocks)
        unit = _first(ok & (state.sequences + together <= most_sequences), there)
        out = []
        for i in range(together):
            number, at = state.sequences[unit], state.at
            if i and packing.shared:  # a prefix of another group is placed for this row alone
                same = (leader[i] == leader[0]) & (prefix[i] == prefix[0])
                state = dataclasses.replace(state, at=jnp.where(same, at, -1))
            state, assigned = _assign(state, packing, unit, size[i], prefix[i], live[i])
            if i and packing.shared:
                state = dataclasses.replace(state, at=jnp.where(same, state.at, at))
            out.append(jnp.stack([unit, *assigned, number]))
        # With 64-bit types on, indices would widen the carry.
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, before)
        return state, jnp.stack(out).astype(jnp.int32)

    examples = tuple(x[order] for x in (size, prefix, leader, live))
    state, found = jax.lax.scan(step, _start(packing, rows), examples)
    found = jnp.zeros_like(found).at[order].set(found).reshape(-1, 4)
    return Assignment(*found.T, state.continues)
