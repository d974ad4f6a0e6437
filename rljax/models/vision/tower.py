"""The vision tower of Qwen2.5-VL and Qwen3-VL: patches of pixels -> tokens of the text decoder.

Patch embedding, positions, blocks and mergers, as one Flax NNX module. rljax.models.multimodal
places the features in the text.

A row of the batch carries its own images, one after the other, right-padded to N patches, so a
batch splits by rows over microbatches and devices. Patches are in Hugging Face's order: the
merge_size x merge_size patches of one decoder token are neighbours. `coords` says what a patch is:
(image number in the row from 1, frame, patch row, patch column); image number 0 is padding, whose
pixels may hold anything. Which patches see each other is decided by coords alone: patches of one
frame, or of one window of it, so nothing is reordered by window.

Axes: B rows, N patches, M = N / merge_size^2 tokens, C pixel values of a patch, D embed, H heads,
E head_dim.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rljax.mesh import constrain_rows
from rljax.models.layers import Linear, RMSNorm, activate, add_last, apply_rope, weight
from rljax.models.vision.config import VisionConfig

# Attention scores are built for so many patches at a time: an image of 5,000 patches would take
# 1.6 GB of them in a layer of 16 heads.
QUERY_BLOCK = 512


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias, in float32 (arXiv 1607.06450)."""

    def __init__(self, rngs, config, size, axis="norm"):
        self.eps = config.norm_eps
        self.scale = weight(rngs, config, (size,), (axis,), init="ones")
        self.bias = weight(rngs, config, (size,), (axis,), init="zeros")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return add_last(y * scale, self.bias[...]).astype(x.dtype)


def _norm(rngs, config: VisionConfig, size: int) -> nnx.Module:
    return (RMSNorm if config.family == "qwen2_5_vl" else LayerNorm)(rngs, config, size)


def attend_within(q, k, v, frames, windows) -> jax.Array:
    """Returns softmax(q k / sqrt(E)) v over the patches with the same frame and the same window.

    q, k, v [B, N, H, E], frames and windows [B, N] int32; QUERY_BLOCK queries at a time.
    """
    n, scale = q.shape[1], 1 / math.sqrt(q.shape[-1])

    def attend(q, frame, window):
        visible = frame[:, :, None] == frames[:, None, :]
        visible = visible & (window[:, :, None] == windows[:, None, :])
        scores = jnp.einsum("bnhe,bmhe->bhnm", q, k, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bhnm,bmhe->bnhe", weights.astype(v.dtype), v)

    if n <= QUERY_BLOCK:
        return attend(q, frames, windows)

    def split(x):  # [B, N, ...] -> [blocks, B, QUERY_BLOCK, ...]; the filler sees what it likes
        x = jnp.pad(x, [(0, 0), (0, -n % QUERY_BLOCK)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    # Recomputed backwards, or the scores of all blocks would be kept after all.
    block = jax.checkpoint(lambda block: attend(*block))
    output = jax.lax.map(block, (split(q), split(frames), split(windows)))
    output = jnp.moveaxis(output, 0, 1)
    return output.reshape(output.shape[0], -1, *output.shape[3:])[:, :n]


class VisionAttention(nnx.Module):
    def __init__(self, rngs, config: VisionConfig):
        d, h, e = config.embed, config.heads, config.head_dim
        # Queries, keys and values are one axis on disk, so the heads are not split over devices.
        axes = ("embed", "qkv", None, "head_dim")
        self.qkv = Linear(rngs, config, (d,), (3, h, e), axes, bias=True)
        self.out = Linear(rngs, config, (h, e), (d,), ("heads", "head_dim", "embed"), bias=True)

    def __call__(self, x, cos, sin, frames, windows):
        q, k, v = jnp.moveaxis(self.qkv(x), 2, 0)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return self.out(attend_within(q, k, v, frames, windows))


class VisionMLP(nnx.Module):
    """Qwen2.5: down(act(gate x) * up x); Qwen3: down(act(up x))."""

    def __init__(self, rngs, config: VisionConfig):
        d, f = config.embed, config.mlp
        self.activation, self.gated = config.activation, config.family == "qwen2_5_vl"
        self.up = Linear(rngs, config, (d,), (f,), ("embed", "mlp"), bias=True)
        self.down = Linear(rngs, config, (f,), (d,), ("mlp", "embed"), bias=True)
        if self.gated:
            self.gate = Linear(rngs, config, (d,), (f,), ("embed", "mlp"), bias=True)

    def __call__(self, x):
        if self.gated:
            return self.down(activate(self.gate(x), self.activation) * self.up(x))
        return self.down(activate(self.up(x), self.activation))


class VisionBlock(nnx.Module):
    def __init__(self, rngs, config: VisionConfig):
        self.attention_norm = _norm(rngs, config, config.embed)
        self.attention = VisionAttention(rngs, config)
        self.mlp_norm = _norm(rngs, config, config.embed)
        self.mlp = VisionMLP(rngs, config)

    def __call__(self, x, cos, sin, frames, windows):
        x = x + self.attention(self.attention_norm(x), cos, sin, frames, windows)
        return x + self.mlp(self.mlp_norm(x))


class Merger(nnx.Module):
    """merge_size^2 neighbouring patches -> one token: down(gelu(up(norm x))), [B, N, D] -> [B, M,
    D_text]. `norm_merged`: the norm runs over the joined patches and not over each."""

    def __init__(self, rngs, config: VisionConfig, *, norm_merged: bool):
        width = config.embed * config.merge_area
        self.norm_merged, self.joined = norm_merged, width
        self.norm = _norm(rngs, config, width if norm_merged else config.embed)
        self.up = Linear(rngs, config, (width,), (width,), ("embed", "mlp"), bias=True)
        out_shape = (config.out_embed,)
        self.down = Linear(rngs, config, (width,), out_shape, ("mlp", "embed"), bias=True)

    def __call__(self, x):
        x = x if self.norm_merged else self.norm(x)
        x = x.reshape(x.shape[0], -1, self.joined)
        x = self.norm(x) if self.norm_merged else x
        return self.down(activate(self.up(x), "gelu"))


def _as_it_is(module: nnx.Module, part: str, rngs: nnx.Rngs) -> nnx.Module:
    return module


class VisionTower(nnx.Module):
    """(pixels [B, N, C], coords [B, N, 4]) -> features [B, M, D_text], deepstack [levels, B, M,
    D_text]: what the decoder puts at image tokens, and adds there after its first layers.
    Features of padding are finite and mean nothing. Blocks are stacked on axis 0, and so are the
    deepstack mergers."""

    def __init__(self, rngs: nnx.Rngs, config: VisionConfig, adapt: Callable = _as_it_is):
        """`adapt`(module, name of the part, rngs) -> the module, perhaps with adapters."""
        self.config = config
        c, d = config.patch_values, config.embed
        # A convolution whose stride is its kernel is a linear map of each flattened patch.
        biased = config.family != "qwen2_5_vl"
        self.patch_embed = Linear(rngs, config, (c,), (d,), ("patch", "embed"), bias=biased)
        if config.position_grid:
            grid = (config.position_grid**2, d)
            self.positions = weight(rngs, config, grid, ("position", "embed"))

        def block(r):
            return adapt(VisionBlock(r, config), "blocks", r)

        self.blocks = nnx.vmap(block, in_axes=0, out_axes=0)(rngs.split(config.layers))
        self.merger = adapt(Merger(rngs, config, norm_merged=False), "merger", rngs)
        if config.deepstack_layers:

            def level(r):
                return adapt(Merger(r, config, norm_merged=True), "deepstack", r)

            make_mergers = nnx.vmap(level, in_axes=0, out_axes=0)
            self.deepstack = make_mergers(rngs.split(len(config.deepstack_layers)))

    def __call__(self, pixels: jax.Array, coords: jax.Array, mesh: Mesh | None = None):
        pixels = jnp.where(coords[..., :1] > 0, pixels, 0)  # padding may hold NaN
        x = self.patch_embed(pixels.astype(self.config.dtype))
        if self.config.position_grid:
            x = x + self._interpolated_positions(coords).astype(x.dtype)
        x, levels = self._run_blocks(x, coords, mesh)
        features = self.merger(x)
        if not levels:
            return features, jnp.zeros((0, *features.shape), features.dtype)
        graph, stacked = nnx.split(self.deepstack)
        merge = jax.vmap(lambda weights, x: nnx.merge(graph, weights)(x))
        return features, merge(stacked, jnp.stack(levels))

    def _run_blocks(self, x, coords, mesh):
        """Scans over the blocks; stops only where a deepstack level is taken: returns (x,
        levels)."""
        config = self.config
        cos, sin = patch_rope_angles(coords, config)
        frames, windows = attention_segments(coords, config)
        graph, stacked = nnx.split(self.blocks)
        # Windows or whole frames is data of the layer, so that all layers are one program.
        whole_frames = np.isin(np.arange(config.layers), config.full_attention_layers)

        def block(x, layer):
            weights, whole_frame = layer
            x = x if mesh is None else constrain_rows(x, mesh)
            window = jnp.where(whole_frame, 0, windows)
            return nnx.merge(graph, weights)(x, cos, sin, frames, window), None

        block = jax.checkpoint(block) if config.remat == "full" else block
        levels, start = [], 0
        for stop in sorted({*(i + 1 for i in config.deepstack_layers), config.layers}):
            layers = jax.tree.map(
                lambda w, a=start, b=stop: w[a:b], (stacked, jnp.asarray(whole_frames))
            )
            x, _ = jax.lax.scan(block, x, layers)
            levels += [x] if stop - 1 in config.deepstack_layers else []
            start = stop
        return x, levels

    def _interpolated_positions(self, coords: jax.Array) -> jax.Array:
        """Returns the learned grid of position embeddings, stretched over each image: [B, N, D]
        float32.

        Bilinear, with the corners of the grid on the corner patches of the image.
        """
        side, images = self.config.position_grid, coords.shape[1] // self.config.merge_area + 1

        def largest(values, ids):
            return jax.ops.segment_max(values, ids, num_segments=images)[ids]

        last_coord = jax.vmap(largest)(
            coords[..., 2:], coords[..., 0]
        )  # of the image's rows and columns
        position = coords[..., 2:] * (side - 1) / jnp.maximum(last_coord, 1)
        low = jnp.floor(position).astype(jnp.int32)
        share = position - low  # of the higher neighbour
        table, total = self.positions[...].astype(jnp.float32), 0.0
        for down in (0, 1):
            for right in (0, 1):
                step = np.array([down, right], np.int32)[None, None]
                row, column = jnp.moveaxis(jnp.minimum(low + step, side - 1), -1, 0)
                factors = jnp.where(step == 1, share, 1 - share)
                taps = jnp.take(table, row * side + column, axis=0)
                total = total + taps * jnp.prod(factors, axis=-1, keepdims=True)
        return total


def patch_rope_angles(coords: jax.Array, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of 2-D rotary positions, half of the frequencies for rows and half for
    columns: coords [B, N, 4] -> two [B, N, E/2] float32."""
    quarter = jnp.arange(0, config.head_dim // 2, 2, dtype=jnp.float32) / (config.head_dim // 2)
    frequency = 1.0 / config.rope_theta**quarter
    angles = jnp.einsum("bna,f->bnaf", coords[..., 2:].astype(jnp.float32), frequency)
    angles = angles.reshape(*coords.shape[:2], -1)
    return jnp.cos(angles), jnp.sin(angles)


def attention_segments(coords: jax.Array, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Returns (frames, windows), two [B, N] int32: patches see each other where both are equal.

    A frame is one number for (image, frame); a window one number for its position in the frame.
    Exact below 32,768 images a row, 65,536 frames an image and 32,768 windows a side.
    """
    frames = coords[..., 0] * 65_536 + coords[..., 1]
    if not config.window_size:
        return frames, jnp.zeros_like(frames)
    window = coords[..., 2:] // (config.merge_size * config.window)
    return frames, window[..., 0] * 32_768 + window[..., 1]
