"""Attention for every family: one function to train with, two to decode with.

Chooses a path (rljax.models.attention_paths) and runs it over a mesh.

Under a mesh the rows stay split over data x fsdp x expert and the heads over tensor. Where the
tokens of a row are split over context, an all-to-all trades them for heads and back (Ulysses,
arXiv 2309.14509): every device then holds whole rows, segments included, so any mask is exact.
Where the heads do not divide, keys and values go from device to device
(rljax.models.attention_ring).

Axes: B rows, S tokens, T cached tokens, H heads, K kv heads, E head size of queries and keys,
F head size of values.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from rljax.errors import InputError
from rljax.kernels.row_tiles import with_gradient_of
from rljax.mesh import BATCH_AXES, row_shards
from rljax.models import attention_paths as paths
from rljax.models import invariant
from rljax.models.attention_ring import padded_tokens, ring
from rljax.models.attention_splash import splash
from rljax.models.attention_xla import xla
from rljax.models.cache import Cache
from rljax.models.padding import heads_over
from rljax.models.remat import ATTENTION

CONTEXT_ATTENTION = ("auto", "heads", "ring")
IMPLS = ("auto", "reference", "xla", "cudnn", "splash")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    mesh: Mesh,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: jax.Array | None = None,
    prefix: paths.PackedPrefix | None = None,
    impl: str = "auto",
    context_attention: str = "auto",
    apart: bool = False,
) -> jax.Array:
    """Causal attention within segments: q [B, S, H, E], k [B, S, K, E], v [B, S, K, F] -> [B, S,
    H, F].

    Row t sees columns s <= t of its own segment (segments [B, S] int, 0 = padding, whose rows come
    out finite and meaningless), and s > t - window where window > 0. scores = scale q.k, then
    soft_cap tanh(scores / soft_cap) where soft_cap > 0; sinks [H] is one more logit per head in the
    softmax denominator. Scores and softmax are float32 (float64 stays so on "reference" and "xla").

    `prefix`: rows are packed. A segment lies in one block of its row, and a token sees, besides its
    own segment, all of the segment that it continues (by positions: the last ones of a window).

    impl "auto" goes by the devices of `mesh`, so a program compiled ahead of time for a TPU takes
    splash wherever it is traced; "splash" off TPU is interpreted, for tests.

    `context_attention`: how the tokens of a row meet that are split over context. "heads" trades
    them for heads, padded where context x tensor does not divide them; "ring" passes keys and
    values on (rljax.models.attention_ring); "auto" is the former wherever the heads divide.

    `apart`: each query's numbers depend on nothing but its own keys (rljax.models.invariant).
    Raises InputError for an unknown `impl` or `context_attention`, a negative window, and a request
    that "cudnn" cannot run.
    """
    _check(q, k, v, segments, sinks, window)
    if context_attention not in CONTEXT_ATTENTION:
        rule = f"one of {', '.join(CONTEXT_ATTENTION)}"
        raise InputError(
            "model_settings.context_attention",
            value=context_attention,
            rule=rule,
            fix=f"--config.model_settings.context_attention={CONTEXT_ATTENTION[0]}, or another of "
            "these",
        )
    device = mesh.devices.flat[0]
    if impl == "auto":
        impl = _choose(device, q, v, soft_cap, sinks, prefix)
    if impl == "cudnn" and (why := _cudnn_lacks(device, q, v, soft_cap, sinks, prefix)):
        raise InputError(f"attention impl 'cudnn' cannot run this: {why}", fix="impl='auto'")
    options = dict(scale=scale, window=window, soft_cap=soft_cap)
    path = functools.partial(_path(impl, device), **options)
    if apart:
        path = with_gradient_of(functools.partial(invariant.whole_rows, **options), path)
    if mesh.size == 1:
        return path(q, k, v, segments, sinks, prefix)
    if in_a_ring(mesh, q.shape[2], context_attention):
        options |= dict(impl=impl, interpret=device.platform != "tpu")
        return _over_ring(options, mesh, q, k, v, segments, sinks, prefix)
    return _over_mesh(path, mesh, q, k, v, segments, sinks, prefix)


def attention_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    allowed: jax.Array,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: jax.Array | None = None,
    order: str = "heads",
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    apart: bool = False,
) -> jax.Array:
    """Returns what new queries read from a cache: q [B, S, H, E] against keys k [B, K, T, E] and
    values v [B, K, T, F] -> [B, S, H, F].

    `allowed` [B, S, T] bool says which cached columns a query sees; the caller puts the window
    there. A row that may see nothing comes out finite. With order "tokens" the caches
    are [B, T, K, .]. Scales [B, K, T] (or [B, T, K]) are those of int8 keys and values. Keys
    may be stored wider than E, filled up with zeros. `apart` is as in `attention`, for caches
    that are no rings.
    """
    if apart:
        options = dict(scale=scale, soft_cap=soft_cap, order=order)
        return invariant.cached(q, k, v, allowed, sinks, **options)
    q = paths.pad_axis(q, 3, k.shape[-1])
    columns = k.shape[2 if order == "heads" else 1]
    assert allowed.shape == (*q.shape[:2], columns), (allowed.shape, q.shape, k.shape)
    options = dict(
        scale=scale, soft_cap=soft_cap, order=order, k_scales=k_scales, v_scales=v_scales
    )
    return paths.plain(q, k, v, allowed, sinks, **options)


def attention_paired(
    q: jax.Array,
    cache: Cache,
    allowed: jax.Array,
    held: jax.Array | None,
    *,
    mesh: Mesh,
    scale: float,
    soft_cap: float = 0.0,
) -> jax.Array:
    """`attention_cached` where one array holds keys and values, pairs [B, T, 2 K, E]: head k's keys
    at 2k, its values at 2k + 1. q [B, S, H, E] -> [B, S, H, E].

    Several queries go by `allowed` [B, S, T], and so does a single one where held is None. Else
    that one sees the first held [B] tokens of its slot, and on TPU reads no others: there it is
    JAX's ragged paged attention, on pages of a pool [N, page, 2 K, E] and their table as they are,
    or on slots that are made of whole pages.
    """
    pairs, pool, table = cache.parts[0], cache.pool, cache.table
    q = paths.pad_axis(q, 3, pairs.shape[-1])
    if held is None or q.shape[1] > 1:
        k, v = paths.unpaired(pairs)
        return attention_cached(q, k, v, allowed, scale=scale, soft_cap=soft_cap, order="tokens")
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    page = paths.page_tokens(pairs.shape[1])
    fits = q.dtype == pairs.dtype and (page == pairs.shape[1] if pool else page)
    path = paths.paged if on_tpu and fits else paths.first_held
    path = functools.partial(path, scale=scale, soft_cap=soft_cap)
    # Rows and heads are split as the cache is (rljax.models.cache); where that is not by heads,
    # every device of a tensor axis reads all of it in any case. The mesh is there on one device,
    # too: the kernel asks it which TPU it is for.
    rows = BATCH_AXES if q.shape[0] % row_shards(mesh) == 0 else None
    heads = None if pairs.shape[2] // 2 % mesh.shape["tensor"] else "tensor"
    by_head, by_row = PartitionSpec(rows, heads), PartitionSpec(rows)
    of_pairs = PartitionSpec(pool.rows if pool else rows, None, heads)
    mapped = _mapped(path, mesh, (by_head, of_pairs, by_row, by_row), by_head)
    return mapped(q[:, 0], pairs, held, table)[:, None]


def _mapped(path, mesh: Mesh, in_specs: tuple, out_specs: PartitionSpec):
    # Pallas kernels do not declare what they vary over.
    return jax.shard_map(path, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _check(q, k, v, segments, sinks, window) -> None:
    b, s, h, e = q.shape
    kv_heads, f = v.shape[2:]
    assert k.shape == (b, s, kv_heads, e) and v.shape == (b, s, kv_heads, f), (k.shape, v.shape)
    assert segments.shape == (b, s) and h % kv_heads == 0, (segments.shape, h, kv_heads)
    assert sinks is None or sinks.shape == (h,), sinks.shape
    if window < 0:
        raise InputError(
            "attention window", value=window, fix="give window=0 (off) or a number of tokens"
        )


def _choose(device, q, v, soft_cap, sinks, prefix) -> str:
    if device.platform == "tpu":
        return "splash"
    return "xla" if _cudnn_lacks(device, q, v, soft_cap, sinks, prefix) else "cudnn"


def _path(impl: str, device):
    if impl not in IMPLS:
        raise InputError("attention impl", value=impl, fix=f"write one of {', '.join(IMPLS)}")
    if impl == "splash":
        return functools.partial(splash, interpret=device.platform != "tpu")
    if impl == "xla":
        return xla
    # The two above name what their backward passes read, the sums of the softmax too.
    compute = {"reference": paths.reference, "cudnn": paths.cudnn}[impl]
    return lambda *args, **options: checkpoint_name(compute(*args, **options), ATTENTION)


def _cudnn_lacks(device, q, v, soft_cap, sinks, prefix) -> str:
    """Returns the reason why cuDNN cannot run the request; "" if it can."""
    if device.platform != "gpu":
        return f"the mesh is made of {device.platform} devices"
    if "cuda" not in device.client.platform_version:
        return "these GPUs are not NVIDIA's"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, not {q.dtype}"
    if soft_cap or sinks is not None:
        return "it has neither a soft cap nor sinks"
    if prefix is not None:
        return "rows share prefixes"
    limit = 256 if float(device.compute_capability) >= 9 else 128
    if (size := max(q.shape[-1], v.shape[-1])) > limit:
        return f"head size {size} is above {limit}"
    return ""


def _over_mesh(path, mesh, q, k, v, segments, sinks, prefix) -> jax.Array:
    """Runs the path on every device's own rows and heads. A kernel is opaque to the partitioner, so
    the split is written out, and for every path alike."""
    b, tokens, heads, _ = q.shape
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    # Kv heads that do not divide are repeated just enough to be split, query heads padded.
    shared_heads = heads_over(heads, k.shape[2], context * tensor)
    q, k, v = (
        shared_heads.widen_queries(q, 2),
        shared_heads.widen_keys(k, 2),
        shared_heads.widen_keys(v, 2),
    )
    sinks = None if sinks is None else shared_heads.widen_queries(sinks, 0)
    width = -(-tokens // context) * context
    q, k, v = (paths.pad_axis(x, 1, width) for x in (q, k, v))

    def on_one_device(q, k, v, segments, sinks, prefix):
        if context > 1:
            q, k, v = (_tokens_for_heads(x)[:, :tokens] for x in (q, k, v))
        output = path(q, k, v, segments, sinks, prefix)
        return _heads_for_tokens(paths.pad_axis(output, 1, width)) if context > 1 else output

    rows = _row_axes(mesh, b)
    spec = PartitionSpec(rows, "context", "tensor")
    # The device at (t, c) ends up with block c of the heads of block t: so do the sinks.
    sink_split, row_spec = PartitionSpec(("tensor", "context")), PartitionSpec(rows)
    in_specs = (spec, spec, spec, row_spec, sink_split, row_spec)
    mapped = _mapped(on_one_device, mesh, in_specs, spec)
    return shared_heads.narrow_queries(mapped(q, k, v, segments, sinks, prefix)[:, :tokens], 2)


def in_a_ring(mesh: Mesh, heads: int, context_attention: str) -> bool:
    """Returns whether `attention` over a mesh passes keys and values on, instead of trading tokens
    for heads."""
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    if context == 1 or context_attention == "heads":
        return False
    return context_attention == "ring" or heads % (context * tensor) > 0


def _over_ring(options: dict, mesh, q, k, v, segments, sinks, prefix) -> jax.Array:
    """Runs the ring on every device's own rows, tokens and heads, with the segments of whole
    rows."""
    b, tokens, heads, _ = q.shape
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    shared_heads = heads_over(heads, k.shape[2], tensor)
    q, k, v = (
        shared_heads.widen_queries(q, 2),
        shared_heads.widen_keys(k, 2),
        shared_heads.widen_keys(v, 2),
    )
    sinks = None if sinks is None else shared_heads.widen_queries(sinks, 0)
    options["impl"] = "splash" if options["impl"] == "splash" else "xla"
    width = padded_tokens(tokens, context, options["impl"])
    q, k, v = (paths.pad_axis(x, 1, width) for x in (q, k, v))
    rows = _row_axes(mesh, b)
    spec = PartitionSpec(rows, "context", "tensor")
    in_specs = (spec, spec, spec, *[PartitionSpec(x) for x in (rows, "tensor", rows)])
    mapped = _mapped(functools.partial(ring, devices=context, **options), mesh, in_specs, spec)
    return shared_heads.narrow_queries(mapped(q, k, v, segments, sinks, prefix)[:, :tokens], 2)


def _tokens_for_heads(x: jax.Array) -> jax.Array:
    """Trades tokens for heads over the context axis: [b, S/c, h, E] -> [b, S, h/c, E]."""
    return jax.lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True)


def _heads_for_tokens(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, "context", split_axis=1, concat_axis=2, tiled=True)


def _row_axes(mesh: Mesh, rows: int) -> tuple[str, ...]:
    """Returns the batch axes that `rows` can be split over; over the others they are repeated."""
    axes, shards = [], 1
    for axis in BATCH_AXES:
        if rows % (shards * mesh.shape[axis]) == 0:
            axes.append(axis)
            shards *= mesh.shape[axis]
    return tuple(axes)
