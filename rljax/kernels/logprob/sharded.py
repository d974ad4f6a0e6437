"""The fused log-prob over the mesh: how rows and vocabulary are split, and what is sent.

Rows are split over data x fsdp x expert and the tokens of a row over context, as activations are;
the vocabulary of the head over tensor and its embed axis over fsdp, as weights are
(rljax.mesh.RULES). A device describes its own rows by its own part of the vocabulary, and three
numbers a row are summed over tensor: no logits and no head move there. What fsdp split is gathered
in tiles of TILE_BYTES, in the backward pass again, where the gradient of a tile is scattered back.
Sums over devices are float32.

Where a size does not divide by its mesh axis, that axis is left out: rows, tokens or embed are then
whole on it, and its devices repeat each other's work. A vocabulary is padded to tensor instead: the
head gets zeros at its end, and what they would say is masked, as is what the head has behind
`options.entries`.

Axes: B rows, S tokens, D embed, V vocabulary entries; N rows times tokens of one device, T tiles.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.kernels.logprob import dispatch
from rljax.kernels.logprob.options import (
    LogprobOptions,
    Statistics,
    gradient_dtype,
    head_gradient,
    hidden_gradient,
    logit_gradient,
    logits,
    merged,
    merged_tiles,
    raw_logits,
    tile_statistics,
    vocab_size_of,
)
from rljax.mesh import BATCH_AXES, weight_sharding

TILE_BYTES = 16 << 20  # of the head's vocabulary that is whole on a device at once


def forward(
    mesh: Mesh | None, impl: str | None, hidden, head, targets, scale, options: LogprobOptions
) -> Statistics:
    """Returns Statistics [..., S] of hidden [..., S, D] at targets [..., S]; see
    options.Statistics."""
    impl = _impl(mesh, impl)
    if mesh is None or mesh.size == 1:
        w = _known(head, options).astype(options.head_dtype)
        stats = dispatch.forward(impl, _flat(hidden), w, targets.reshape(-1), scale, options)
        return jax.tree.map(lambda x: x.reshape(targets.shape), stats)
    split = _split(mesh, hidden, head, options)
    head = _padded(split, head, options)

    def on_one_device(hidden, head, targets, scale):
        stats = _describe(split, impl, _flat(hidden), head, targets.reshape(-1), scale, options)
        return jax.tree.map(lambda x: x.reshape(targets.shape), stats)

    tokens, of_head = split.tokens(targets.ndim), split.head(options)
    return jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(tokens, of_head, tokens, PartitionSpec()),
        out_specs=tokens,
        check_vma=False,  # kernels do not declare what they vary over
    )(hidden, head, targets, scale)


def backward(
    mesh, impl, hidden, head, targets, scale, top, log_sum, a, b, c, options: LogprobOptions
) -> tuple[jax.Array, jax.Array]:
    """Returns (d hidden [..., S, D], d head, in its own shape) of cotangents a, b, c [..., S]; see
    options.logit_gradient."""
    impl = _impl(mesh, impl)
    rows = targets, top, log_sum, a, b, c
    if mesh is None or mesh.size == 1:
        y, *row = (x.reshape(-1) for x in rows)
        w = _known(head, options).astype(options.head_dtype)
        of_hidden, of_head = dispatch.backward(impl, _flat(hidden), w, y, scale, *row, options)
        if w.shape != head.shape:
            padding = [(0, n - m) for n, m in zip(head.shape, of_head.shape, strict=True)]
            of_head = jnp.pad(of_head, padding)
        return of_hidden.reshape(hidden.shape).astype(hidden.dtype), of_head.astype(head.dtype)
    split = _split(mesh, hidden, head, options)
    head = _padded(split, head, options)

    def on_one_device(hidden, head, scale, *rows):
        rows = [x.reshape(-1) for x in rows]
        of_hidden, of_head = _gradients(split, impl, _flat(hidden), head, scale, rows, options)
        return of_hidden.reshape(hidden.shape), of_head

    tokens, of_head = split.tokens(targets.ndim), split.head(options)
    of_hidden, of_head = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(tokens, of_head, PartitionSpec(), *[tokens] * len(rows)),
        out_specs=(tokens, of_head),
        check_vma=False,
    )(hidden, head, scale, *rows)
    if split.padding:
        stored = jax.lax.with_sharding_constraint(of_head, split.stored)
        size, axis = vocab_size_of(of_head, options), 0 if options.vocab_first else 1
        of_head = lax.slice_in_dim(stored, 0, size - split.padding, axis=axis)
    return of_hidden, of_head


def _impl(mesh: Mesh | None, impl: str | None) -> str | None:
    """Returns the implementation to lower for. On a mesh of CPUs it is "xla": tracing the kernels
    of other platforms takes longer than small programs run."""
    on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    return "xla" if impl is None and on_cpu else impl


def cores(mesh: Mesh | None) -> int:
    """Returns the number of cores behind one device: those of a v4 or v5p share the
    rows of a kernel."""
    kind = "" if mesh is None else mesh.devices.flat[0].device_kind
    return 2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1


def _known(head: jax.Array, options: LogprobOptions) -> jax.Array:
    """Returns the head without the padding behind its vocabulary."""
    if not options.entries:
        return head
    return lax.slice_in_dim(head, 0, options.entries, axis=0 if options.vocab_first else 1)


def _flat(hidden: jax.Array) -> jax.Array:
    return hidden.reshape(-1, hidden.shape[-1])


# -- the split


@dataclasses.dataclass(frozen=True)
class _Split:
    """The mesh axes that divide each size; those of size 1 are left out."""

    rows: tuple[str, ...]
    context: str | None
    embed: str | None
    vocab: str | None
    entries: int  # of the vocabulary
    padding: int  # added to the head, so that it divides
    unused: int  # of the padded head, behind the vocabulary
    stored: NamedSharding | None  # of a head whose vocabulary does not divide

    def tokens(self, ndim: int) -> PartitionSpec:
        """Returns the spec of arrays [B, ..., S], and of those with further axes."""
        middle = [None] * (ndim - 2)
        return PartitionSpec(self.rows, *middle, *[self.context][: ndim - 1])

    def head(self, options: LogprobOptions) -> PartitionSpec:
        names = (self.vocab, self.embed) if options.vocab_first else (self.embed, self.vocab)
        return PartitionSpec(*names)

    def repeated_by(self, axis: str) -> bool:
        """Returns whether the devices along a mesh axis have the same rows and tokens."""
        return axis not in (*self.rows, self.context)


def _split(mesh: Mesh, hidden, head, options: LogprobOptions) -> _Split:
    def fitting(axis: str, size: int) -> str | None:
        return axis if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None

    rows, remaining = [], hidden.shape[0]
    for axis in BATCH_AXES:
        if fitting(axis, remaining):
            rows.append(axis)
            remaining //= mesh.shape[axis]
    context = fitting("context", hidden.shape[-2]) if hidden.ndim > 2 else None
    embed, vocab = fitting("fsdp", hidden.shape[-1]), vocab_size_of(head, options)
    tensor, names = mesh.shape["tensor"], ("vocab", "embed")
    names = names if options.vocab_first else names[::-1]
    stored = weight_sharding(mesh, "head", head.shape, names) if vocab % tensor else None
    vocab_axis = "tensor" if tensor > 1 else None
    entries, padding = options.entries or vocab, -vocab % tensor
    unused = vocab + padding - entries
    return _Split(tuple(rows), context, embed, vocab_axis, entries, padding, unused, stored)


def _padded(split: _Split, head: jax.Array, options: LogprobOptions) -> jax.Array:
    """Returns the head with zeros behind its vocabulary. Along the axes that split it where it is
    stored it goes to tensor by an exchange of parts."""
    if not split.padding:
        return head
    padding = [(0, split.padding), (0, 0)] if options.vocab_first else [(0, 0), (0, split.padding)]
    return jnp.pad(jax.lax.with_sharding_constraint(head, split.stored), padding)


# -- what one device does, inside shard_map


def _describe(split: _Split, impl, hidden, head, targets, scale, options) -> Statistics:
    """Statistics of the device's own rows over the whole vocabulary: hidden [N, D], its own part of
    the head, targets [N]."""
    vocab = vocab_size_of(head, options)
    offset = lax.axis_index(split.vocab) * vocab if split.vocab else 0
    y = targets - offset

    def of_tile(carry, start, count, masked=False):
        w = _gathered(split, head, start, count, options)
        if masked:
            z = logits(hidden, w, scale, options)
            exists = offset + start + jnp.arange(count)[None] < split.entries
            stats = tile_statistics(jnp.where(exists, z, -jnp.inf), y - start, options)
        else:
            stats = dispatch.forward(impl, hidden, w, y - start, scale, options)
        if options.greedy:
            stats = stats._replace(best=stats.best + start + offset)
        return carry, (stats, (y >= start) & (y < start + count))

    itemsize = jnp.dtype(options.head_dtype).itemsize
    used = _used(split, vocab)
    tile = _vocab_per_tile(hidden, itemsize, used) if split.embed else used
    _, (parts, in_tile) = _over_tiles(of_tile, (), vocab, tile, vocab - used)
    stats = (
        merged_tiles(parts, in_tile) if len(in_tile) > 1 else jax.tree.map(lambda x: x[0], parts)
    )
    if not split.vocab:
        return stats

    def across(reduce):
        return lambda x: reduce(x, split.vocab)

    return merged(stats, (y >= 0) & (y < vocab), across(lax.pmax), across(lax.psum))


def _used(split: _Split, vocab: int) -> int:
    """Counts the entries, of a device's `vocab`, that are in the vocabulary on every device.

    The others are at the end of the head, so only the last devices have some; the kernels run on
    what all devices have, and the few entries behind it are masked.
    """
    return max(vocab - split.unused, 0)


def _gradients(split: _Split, impl, hidden, head, scale, rows, options):
    """Returns (d hidden of the device's rows, d of its part of the head)."""
    vocab, axis = vocab_size_of(head, options), 0 if options.vocab_first else 1
    offset = lax.axis_index(split.vocab) * vocab if split.vocab else 0
    targets, *row = rows
    y, used = targets - offset, _used(split, vocab)
    # A sum over devices is float32: of a whole bfloat16 head it would be twice the head.
    moved = split.embed or split.rows or split.context
    tile = _vocab_per_tile(hidden, 4, used) if moved else used
    if tile == vocab:
        w = _gathered(split, head, 0, vocab, options)
        of_hidden, of_head = dispatch.backward(impl, hidden, w, y, scale, *row, options)
        of_head = _scattered(split, of_head, options).astype(head.dtype)
    else:

        def of_tile(sums, start, count, masked=False):
            w = _gathered(split, head, start, count, options)
            if masked:
                exists = offset + start + jnp.arange(count)[None] < split.entries
                tile_hidden, of_vocab = _masked_gradients(
                    hidden, w, y - start, scale, row, exists, options
                )
            else:
                tile_hidden, of_vocab = dispatch.backward(
                    impl, hidden, w, y - start, scale, *row, options
                )
            of_vocab = _scattered(split, of_vocab, options).astype(head.dtype)
            of_head = lax.dynamic_update_slice_in_dim(sums[1], of_vocab, start, axis)
            return (sums[0] + tile_hidden, of_head), ()

        zeros = jnp.zeros(hidden.shape, row[0].dtype), jnp.zeros_like(head)
        (of_hidden, of_head), _ = _over_tiles(of_tile, zeros, vocab, tile, vocab - used)
    if split.vocab:
        # After the tiles: a sum that does not wait for them could meet theirs out of order.
        of_hidden, of_head = lax.optimization_barrier((of_hidden, of_head))
        of_hidden = lax.psum(of_hidden.astype(row[0].dtype), split.vocab)
    return of_hidden.astype(hidden.dtype), of_head


def _masked_gradients(hidden, w, y, scale, row, exists, options: LogprobOptions):
    """Computes `dispatch.backward` of a few entries, of which only those that `exists` [1, V] says
    are in the vocabulary."""
    raw = raw_logits(hidden, w, options)
    dz = jnp.where(exists, logit_gradient(raw, y, scale, *row, options), 0.0)
    dz = dz.astype(gradient_dtype(hidden, w))
    return hidden_gradient(dz, w, options).astype(hidden.dtype), head_gradient(dz, hidden, options)


def _vocab_per_tile(hidden, itemsize: int, vocab: int) -> int:
    """Returns the number of vocabulary entries that are gathered, or whose gradients are summed, at
    once."""
    max_entries = TILE_BYTES // (hidden.shape[1] * itemsize)
    return min(vocab, max(max_entries // 128 * 128, 128))  # whole lanes of a TPU


def _over_tiles(of_tile, carry, vocab: int, size: int, masked: int = 0):
    """Runs of_tile(carry, first entry, count) -> (carry, result) over the whole vocabulary, and
    of_tile(..., masked=True) over the last `masked` entries; returns the carry and the results,
    stacked."""
    used = vocab - masked
    full_tiles, rest = divmod(used, size) if used else (0, 0)
    stacks = []
    if full_tiles > 1:

        def each(carry, i):
            return of_tile(carry, i * size, size)

        carry, results = lax.scan(each, carry, jnp.arange(full_tiles, dtype=jnp.int32))
        stacks.append(results)
    spans = [(0, size, False)] * (full_tiles == 1) + [(used - rest, rest, False)] * bool(rest)
    for start, count, is_masked in [*spans, *[(used, masked, True)] * bool(masked)]:
        if stacks:  # its collectives wait for those of the scan, or they could meet out of order
            start, carry, stacks = lax.optimization_barrier((jnp.int32(start), carry, stacks))
        carry, results = of_tile(carry, start, count, *[True] * is_masked)
        stacks.append(jax.tree.map(lambda x: x[None], results))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)


def _gathered(split: _Split, head, start, count: int, options: LogprobOptions) -> jax.Array:
    """`count` vocabulary entries of the device's own part of the head, with all of D."""
    axis = 0 if options.vocab_first else 1
    w = head if count == head.shape[axis] else lax.dynamic_slice_in_dim(head, start, count, axis)
    is_narrower = jnp.dtype(options.head_dtype).itemsize < w.dtype.itemsize
    w = w.astype(options.head_dtype) if is_narrower else w  # so that fewer bytes are sent
    w = lax.all_gather(w, split.embed, axis=1 - axis, tiled=True) if split.embed else w
    return w.astype(options.head_dtype)


def _scattered(split: _Split, of_vocab, options: LogprobOptions) -> jax.Array:
    """Returns the gradient of gathered vocabulary entries, in float32 or wider, summed over all
    rows, for the device's own part of D."""
    axis, total = 1 if options.vocab_first else 0, of_vocab
    if split.embed and split.repeated_by("fsdp"):
        size = total.shape[axis] // lax.axis_size("fsdp")
        total = lax.dynamic_slice_in_dim(total, lax.axis_index("fsdp") * size, size, axis)
    elif split.embed and axis == 1 and total.shape[0] % lax.axis_size("fsdp") == 0:
        # The sum is scattered by vocabulary entries, then exchanged: where it is scattered along
        # the last axis, a TPU's compiler may sum all of it everywhere, which sends twice the bytes.
        total = lax.psum_scatter(total, "fsdp", scatter_dimension=0, tiled=True)
        total = lax.all_to_all(total, "fsdp", 1, 0, tiled=True)
    elif split.embed:
        total = lax.psum_scatter(total, "fsdp", scatter_dimension=axis, tiled=True)
    scattered = split.embed and not split.repeated_by("fsdp")
    axes = [x for x in (*split.rows, split.context) if x and not (scattered and x == "fsdp")]
    return lax.psum(total, tuple(axes)) if axes else total
