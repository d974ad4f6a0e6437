"""Attention over rows whose tokens are split over the mesh axis context, every device with all
heads: ring attention (arXiv 2310.01889).

Each device keeps its queries. Keys and values go round the ring of devices, one step a hop, and at
every hop the softmax over what has arrived is merged, by its log-sum-exp, with what came before.
The backward pass goes round once more: scores are computed again, and the gradients of keys and
values travel with them until they are home. No device ever holds the keys of a whole row, and the
number of heads need not divide by anything.

Without a window causal rows would leave the device of the first tokens idle, so each row is cut
into twice as many chunks as there are devices, and device i gets chunks i and 2 n - 1 - i (zigzag):
all have the same work, half of the scores of a hop. With a window the chunks stay in order, and
there are only as many hops as the window reaches over.

Axes: B rows, L tokens of a device, m tokens of a chunk, H heads, K kv heads, E head size of queries
and keys, F of values.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.models import attention_splash, attention_xla
from rljax.models.attention_paths import MASKED, PackedPrefix, View, looked_for, pad_axis
from rljax.models.remat import named_attention

AXIS = "context"


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A ring of `devices`, each with `tokens` of every row; queries see the keys of `hops` devices,
    their own included. `rule` is that of the path on each device."""

    rule: attention_splash.Rule | attention_xla.Rule
    devices: int
    tokens: int
    hops: int
    zigzag: bool

    def chunks(self, x, axis: int = 2) -> list[jax.Array]:
        """Returns a device's tokens in one part or, in a zigzag, the early chunk and the late
        one."""
        return jnp.split(x, 2, axis=axis) if self.zigzag else [x]

    @property
    def paths(self):
        """Returns (attention over a part of the columns, its gradients) of the path on each
        device."""
        if isinstance(self.rule, attention_splash.Rule):
            functions = attention_splash.splash_part, attention_splash.splash_part_gradients
        else:
            functions = attention_xla.xla_part, attention_xla.xla_part_gradients
        return [functools.partial(function, self.rule) for function in functions]


def ring(
    q,
    k,
    v,
    segments,
    sinks,
    prefix: PackedPrefix | None,
    *,
    devices,
    impl,
    scale,
    window,
    soft_cap,
    interpret=False,
) -> jax.Array:
    """Computes causal attention within segments on one device of a ring, inside
    `jax.shard_map`: its part of the tokens of q [B, S / devices, H, E],
    k [B, S / devices, K, E] and v [B, S / devices, K, F] -> [B, S / devices, H, F]. Segments
    and prefix [B, S'] are of whole rows, S' <= S.

    impl "splash" runs JAX's kernel at every hop, "xla" the products of rljax.models.attention_xla.
    Rows that share prefixes take the latter: what a query sees there goes by positions.
    """
    local, row_tokens = q.shape[1], segments.shape[1]
    window = 0 if window >= row_tokens else window
    kernel = impl == "splash" and prefix is None
    if kernel:
        rule = attention_splash.Rule(window, soft_cap, interpret)
        q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    else:
        rule = attention_xla.Rule(scale, window, soft_cap)
    zigzag = not window and prefix is None
    hops = devices
    if window and prefix is None:
        hops = min(devices, -(-(window + local - 1) // local))
    circle = _Ring(rule, devices, local, hops, zigzag)
    if zigzag:
        q, k, v = (_to_zigzag(x, devices) for x in (q, k, v))
    ids = pad_axis(segments, 1, local * devices)
    continued = None if prefix is None else _continued(segments, prefix, ids.shape[1])
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    output = _attention(circle, q, k, v, sinks, ids, continued).swapaxes(1, 2)
    return _from_zigzag(output, devices) if zigzag else output


class _Continued(NamedTuple):
    """Prefixes of packed rows that share them, for every token, [B, S] and pairs [B, S, 2]. A
    segment's name is its own in its block alone, so it is read together with the block."""

    names: jax.Array
    wanted: jax.Array  # of the segment that a token continues
    positions: jax.Array


def _continued(segments, prefix: PackedPrefix, width: int) -> _Continued:
    blocks = prefix.blocks.shape[1]
    block = jnp.arange(segments.shape[1]) // (segments.shape[1] // blocks)
    names = jnp.stack([segments, jnp.broadcast_to(block[None, :], segments.shape)], axis=-1)
    wanted = jnp.stack([looked_for(prefix), prefix.blocks[:, block]], axis=-1)
    return _Continued(*(pad_axis(x, 1, width) for x in (names, wanted, prefix.positions)))


def padded_tokens(tokens: int, devices: int, impl: str) -> int:
    """Returns the number of tokens that a row is padded to for a ring, a multiple of `devices`."""
    chunk = -(-tokens // (2 * devices))
    if impl == "splash":
        chunk = attention_splash.part_tokens(chunk)
    elif chunk > attention_xla.QUERY_BLOCK:
        chunk = -(-chunk // attention_xla.QUERY_BLOCK) * attention_xla.QUERY_BLOCK
    return 2 * devices * chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, q, k, v, sinks, ids, prefix):
    return _forward(ring, q, k, v, sinks, ids, prefix)[0]


def _forward(ring: _Ring, q, k, v, sinks, ids, prefix):
    attend, _ = ring.paths
    device = jax.lax.axis_index(AXIS)
    chunks, queries = ring.chunks, ring.chunks(q)
    first = attend(q, k, v, _view(ring, device, 0, ids, prefix))

    def step(carry, hop):
        keys_values, merged = carry
        # Keys and values of this hop came with the last one; they are passed on while the scores
        # are computed.
        following = _shifted(ring, keys_values)
        keys, values = (chunks(x) for x in keys_values)
        for view, chunk_pair in _views(ring, device, hop, ids, prefix):
            result = attend(
                chunk_pair.of(queries),
                chunk_pair.of_columns(keys),
                chunk_pair.of_columns(values),
                view,
            )
            merged = chunk_pair.merged(merged, result)
        return (following, merged), None

    start = list(zip(*(chunks(x) for x in first), strict=True))
    _, merged = _hops(ring, prefix, step, (_shifted(ring, (k, v)), start))
    output, log_sum = (jnp.concatenate(xs, axis=2) for xs in zip(*merged, strict=True))
    if sinks is not None:
        log_sum_before = log_sum
        log_sum = jnp.logaddexp(log_sum, sinks.astype(log_sum.dtype)[None, :, None])
        output = output * jnp.exp(log_sum_before - log_sum)[..., None]
    output, log_sum = named_attention(output.astype(v.dtype), log_sum)
    return output, (q, k, v, sinks, ids, prefix, output, log_sum)


def _backward(ring: _Ring, residuals, gradient):
    """Computes each hop's part of the gradients from the output and the log-sum-exp of the whole
    softmax. They are summed in float32."""
    q, k, v, sinks, ids, prefix, output, log_sum = residuals
    _, gradients = ring.paths
    device, chunks = jax.lax.axis_index(AXIS), ring.chunks
    queries, *rest = (chunks(x) for x in (q, output, log_sum, gradient))
    first = gradients(q, k, v, _view(ring, device, 0, ids, prefix), output, log_sum, gradient)

    def step(carry, hop):
        keys_values, sums, dq = carry
        following, sums = _shifted(ring, keys_values), _shifted(ring, sums)
        keys, values = (chunks(x) for x in keys_values)
        for view, chunk_pair in _views(ring, device, hop, ids, prefix):
            columns = chunk_pair.of_columns(keys), chunk_pair.of_columns(values)
            part_gradients = gradients(
                chunk_pair.of(queries), *columns, view, *map(chunk_pair.of, rest)
            )
            dq = chunk_pair.added(dq, part_gradients[0])
            sums = [
                chunk_pair.added_columns(x, y)
                for x, y in zip(sums, part_gradients[1:], strict=True)
            ]
        return (following, sums, dq), None

    dq, *sums = (chunks(x) for x in first)
    _, sums, dq = _hops(ring, prefix, step, (_shifted(ring, (k, v)), sums, dq))
    sums = _shifted(ring, sums, ring.devices - (ring.hops - 1))
    dq, dk, dv = (
        jnp.concatenate(parts, axis=2).astype(x.dtype)
        for parts, x in zip((dq, *sums), (q, k, v), strict=True)
    )
    dsinks = None
    if sinks is not None:
        dtype = log_sum.dtype
        mean = jnp.sum(gradient.astype(dtype) * output.astype(dtype), axis=-1)
        share = jnp.exp(sinks.astype(dtype)[None, :, None] - log_sum) * mean
        dsinks = -jnp.sum(share, axis=(0, 2)).astype(sinks.dtype)
    return dq, dk, dv, dsinks, None, None


_attention.defvjp(_forward, _backward)


def _hops(ring: _Ring, prefix, step, carry):
    """Returns the carry after hops 1, 2, ...: they run in a loop where all are alike, and one by
    one where a window gives each a mask of its own."""
    if ring.zigzag or prefix is not None:
        return jax.lax.scan(step, carry, jnp.arange(1, ring.hops))[0]
    for hop in range(1, ring.hops):
        carry, _ = step(carry, hop)
    return carry


def _shifted(ring: _Ring, tree, count: int = 1):
    """Receives what the device `count` ranks before this one sends."""
    if count % ring.devices == 0:
        return tree
    pairs = [(i, (i + count) % ring.devices) for i in range(ring.devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _merged(left, right):
    """Merges the softmaxes over two sets of columns into one; each is (outputs [.., F], log-sum-exp
    of the scores [..])."""
    log_sum = jnp.logaddexp(left[1], right[1])
    shares = [jnp.exp(x[1] - log_sum)[..., None] for x in (left, right)]
    return shares[0] * left[0] + shares[1] * right[0], log_sum


# -- what queries see at a hop


class _Taken(NamedTuple):
    """A chunk of queries and the chunk of columns that it meets, by index; `late` (traced) says of
    an index that is None which it is: 1, or 0 where it is false."""

    queries: int | None
    columns: int | None
    late: jax.Array | None = None

    def of(self, chunks):
        return self._chosen(chunks, self.queries)

    def of_columns(self, chunks):
        return self._chosen(chunks, self.columns)

    def _chosen(self, chunks, index):
        return jnp.where(self.late, chunks[1], chunks[0]) if index is None else chunks[index]

    def added(self, chunks, increment):
        return self._added(chunks, self.queries, increment)

    def added_columns(self, chunks, increment):
        return self._added(chunks, self.columns, increment)

    def _added(self, chunks, index, increment):
        if index is not None:
            return [x + increment if i == index else x for i, x in enumerate(chunks)]
        zeros = jnp.zeros_like(increment)
        parts = jnp.where(self.late, zeros, increment), jnp.where(self.late, increment, zeros)
        return [x + part for x, part in zip(chunks, parts, strict=True)]

    def merged(self, chunks, part):
        """Returns `chunks`, each (outputs, log-sum-exp), after the softmax over these columns is
        merged into that of the queries."""
        if self.queries is not None:
            return [_merged(x, part) if i == self.queries else x for i, x in enumerate(chunks)]
        output, log_sum = part
        masked = jnp.full_like(log_sum, MASKED)
        sums = jnp.where(self.late, masked, log_sum), jnp.where(self.late, log_sum, masked)
        return [_merged(x, (output, y)) for x, y in zip(chunks, sums, strict=True)]


def _views(ring: _Ring, device, hop, ids, prefix: _Continued | None) -> list[tuple[View, _Taken]]:
    """Returns the views to compute at a hop: of all tokens of a device or, in a zigzag, of two
    pairs of chunks. In a zigzag the columns are all before the queries: of an earlier device both
    chunks of queries see the early chunk, and of a later one the late queries see both chunks."""
    if not ring.zigzag:
        return [(_view(ring, device, hop, ids, prefix), _Taken(0, 0))]
    late = device < hop
    queries = ring.chunks(_tokens(ring, ids, device), axis=1)
    columns = ring.chunks(_tokens(ring, ids, (device - hop) % ring.devices), axis=1)
    pairs = _Taken(1, 0), _Taken(None, None, late)
    return [(View((pair.of(queries),), pair.of_columns(columns), None), pair) for pair in pairs]


def _view(ring: _Ring, device, hop, ids, prefix: _Continued | None) -> View:
    """Returns the view of this device's queries of the tokens that arrive at a hop; at hop 0, of
    its own tokens."""
    source = (device - hop) % ring.devices
    tokens_of = functools.partial(_tokens, ring)
    if prefix is not None:
        wanted = tokens_of(prefix.names, device), tokens_of(prefix.wanted, device)
        positions = tokens_of(prefix.positions, device), tokens_of(prefix.positions, source)
        return View(wanted, tokens_of(prefix.names, source), positions=positions)
    # Behind the first device the last one's tokens arrive, which are later: no query has their id.
    of_columns = tokens_of(ids, source)
    of_columns = jnp.where(device < hop, -1, of_columns) if hop else of_columns
    return View((tokens_of(ids, device),), of_columns, hop * ring.tokens)


def _tokens(ring: _Ring, x, device):
    """Returns the tokens [B, L] that a device has of whole rows [B, S]."""
    if not ring.zigzag:
        return jax.lax.dynamic_slice_in_dim(x, device * ring.tokens, ring.tokens, axis=1)
    size = ring.tokens // 2
    chunks = device, 2 * ring.devices - 1 - device
    return jnp.concatenate(
        [jax.lax.dynamic_slice_in_dim(x, chunk * size, size, axis=1) for chunk in chunks], axis=1
    )


# -- zigzag: from the order of the row and back


def _to_zigzag(x, devices: int) -> jax.Array:
    """Moves tokens [B, L, ..] so that device i, which has chunks 2 i and 2 i + 1 of the row, has
    chunks i and 2 n - 1 - i."""
    moved = [
        jax.lax.ppermute(chunk, AXIS, pairs)
        for chunk, pairs in zip(jnp.split(x, 2, axis=1), _moves(devices), strict=True)
    ]
    return jnp.concatenate(_ordered(moved), axis=1)


def _from_zigzag(x, devices: int) -> jax.Array:
    """Moves the tokens back to the order before `_to_zigzag`."""
    chunks = _ordered(jnp.split(x, 2, axis=1))
    moved = [
        jax.lax.ppermute(chunk, AXIS, [(target, start) for start, target in pairs])
        for chunk, pairs in zip(chunks, _moves(devices), strict=True)
    ]
    return jnp.concatenate(moved, axis=1)


def _moves(devices: int) -> list[list[tuple[int, int]]]:
    """Returns (device, target device) for every first chunk, 2 i, and for every second one."""
    owner = [*range(devices), *reversed(range(devices))]
    return [[(i, owner[2 * i + half]) for i in range(devices)] for half in range(2)]


def _ordered(chunks):
    """Swaps the two chunks on devices of odd ranks, where an even chunk is the late one."""
    first_chunk, second_chunk = chunks
    even = jax.lax.axis_index(AXIS) % 2 == 0
    return jnp.where(even, first_chunk, second_chunk), jnp.where(even, second_chunk, first_chunk)
