"""Tile sizes of the TPU kernels of the fused log-prob: from shapes and dtype, within VMEM.

Axes: N rows, D embed, V vocabulary entries; a tile is `rows` x `vocab` logits.
"""

from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 16  # rows of one bfloat16 register tile; float32 has 8
ROWS, VOCAB = 1024, 512  # the largest tile: larger ones gain nothing, see `choose_blocks`
# Every generation from v5 on has this much per core or more. A program that is lowered for a TPU on
# a host without one cannot ask which generation it is for, so it gets what all of them hold.
USUAL_VMEM = 64 * 2**20


class Blocks(NamedTuple):
    rows: int
    vocab: int


def vmem_bytes() -> int:
    """Returns the bytes of VMEM that a kernel may use: of the local TPU, at most the usual."""
    try:
        size = pltpu.get_tpu_info().vmem_capacity_bytes
    except (ValueError, RuntimeError):  # the local device is no TPU
        size = USUAL_VMEM
    return min(size, USUAL_VMEM)


class Sizes(NamedTuple):
    """Bytes of an element of the inputs."""

    hidden: int
    head: int


def forward_bytes(b: Blocks, depth: int, size: Sizes) -> int:
    """Returns the bytes held by one step of the forward kernel."""
    inputs = b.rows * depth * size.hidden + 2 * depth * b.vocab * size.head
    return inputs + 4 * b.rows * b.vocab + 4 * LANES * b.rows * 9


def hidden_bytes(b: Blocks, depth: int, size: Sizes) -> int:
    """Returns the bytes held by the kernel of hidden's gradient: its rows stay, the head's
    vocabulary streams by."""
    stay = b.rows * depth * (4 + 2 * size.hidden)
    stream = 2 * b.vocab * depth * size.head
    return stay + stream + b.rows * b.vocab * (4 + 2) + 4 * LANES * b.rows * 4


def head_bytes(b: Blocks, depth: int, size: Sizes) -> int:
    """Returns the bytes held by the kernel of the head's gradient: its vocabulary stays, the
    rows stream by."""
    stay = b.vocab * depth * (4 + size.head + 4)
    stream = 2 * b.rows * depth * size.hidden
    return stay + stream + b.rows * b.vocab * (4 + 2 * 2) + 4 * LANES * b.rows * 4


def both_bytes(rows: int, b: Blocks, depth: int, size: Sizes) -> int:
    """Bytes held by the kernel of both gradients: besides those of the head's, the gradient of all
    rows, and the block in which it leaves."""
    padded_rows = -(-rows // b.rows) * b.rows
    return head_bytes(b, depth, size) + padded_rows * depth * 4 + b.rows * depth * size.hidden


def _row_sizes(n: int) -> list[int]:
    """Rows per tile, largest first. With more than one tile's worth there are at least two of them:
    the two cores of a v4 or v5p, which are one device, share the rows."""
    if n <= LANES:
        return [r for r in (-(-n // SUBLANES) * SUBLANES, 64, 32, 16) if r <= n + 15]
    half = -(-n // (2 * LANES)) * LANES
    return [r for r in (min(half, ROWS), 512, 256, 128, 64, 32, 16) if r <= half]


def choose_blocks(held, stays: str, shape, size: Sizes, budget: int) -> Blocks:
    """Returns the largest tile whose `held` bytes fit the budget, for shape (N, D, V). Of equal
    ones, the one with more of what `stays` ("rows" or "vocab").

    R rows that stay do R (forward) or 2 R (gradients) FLOP for each byte of a bfloat16 head that
    streams by, and vocabulary entries that stay as many for each byte of the rows; a v6e, which
    needs most, multiplies 561 times while it reads one.
    """
    n, depth, vocab = shape
    vocab_sizes = [w for w in (VOCAB, 256, 128) if w <= max(vocab, LANES)]
    tiles = [Blocks(r, w) for r in _row_sizes(n) for w in vocab_sizes]
    fits = [b for b in tiles if held(b, depth, size) <= budget]
    return max(fits or [tiles[-1]], key=lambda b: (b.rows * b.vocab, getattr(b, stays)))
