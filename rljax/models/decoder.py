"""The decoder: one Flax NNX definition for every family; sizes and switches come from ModelConfig.

Declares every weight. Layers of one kind are stacked on a leading axis (ModelConfig.stacks).

Axes: B rows, S query tokens, D embed, H heads, K kv heads, E head_dim, R kv_rank.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rljax.kernels.row_tiles import in_tiles
from rljax.mesh import constrain_step, constrain_tokens
from rljax.models import invariant
from rljax.models.adapters import lora
from rljax.models.attention import attention, attention_cached, attention_paired
from rljax.models.attention_paths import PackedPrefix
from rljax.models.cache import remember, shared_lanes
from rljax.models.cache_tree import Nodes
from rljax.models.config import LayerKind, ModelConfig, Rope
from rljax.models.experts import Experts
from rljax.models.gated_delta import GatedDeltaNet, runs_of
from rljax.models.layers import (
    Linear,
    RMSNorm,
    activate,
    apply_rope,
    root_mean_squared,
    transpose_weights,
    weight,
)
from rljax.models.multimodal import mrope_angles
from rljax.models.short_convolution import ShortConvolution
from rljax.models.vision.tower import VisionTower


@dataclasses.dataclass(frozen=True)
class Pass:
    """Arguments that every layer gets in one call of the decoder."""

    mesh: Mesh
    angles: tuple[tuple[jax.Array, jax.Array], ...]  # cos, sin [B, S, E/2] of every rope
    segments: jax.Array  # [B, S]; 0 = padding
    stretch: tuple[jax.Array, ...] = ()  # [B, S]: the temperature of queries, where there is one
    # Decoding: the index in its slot of this call's first token, [B], and the number of real ones.
    columns: jax.Array | None = None
    counts: jax.Array | None = None  # None = all
    nodes: Nodes | None = None  # or which nodes of trees the tokens are
    prefix: PackedPrefix | None = None  # of packed rows
    # Segments and prefix of layers with chunks.
    chunks: tuple[jax.Array, PackedPrefix | None] | None = None
    # Images: where their tokens stand [B, S], and what each of the first layers adds there
    # [levels, B, M, D] (deepstack).
    where: jax.Array | None = None
    levels: jax.Array | None = None
    is_step: bool = False  # whether every row reads one token, or a few, to draw the next
    # Recurrent layers: the run of each token, and whether their states take it in, [B, S]
    # (rljax.models.gated_delta).
    runs: jax.Array | None = None
    taken: jax.Array | None = None

    def split(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream [B, S, D] as the mesh holds it between layers."""
        return constrain_step(x, self.mesh) if self.is_step else constrain_tokens(x, self.mesh)


def rope_frequencies(rope: Rope, dims: int, tokens: int = 0) -> np.ndarray:
    """Returns radians per position of each rotary pair, in sequences of at most `tokens`: float32
    of shape [dims / 2]."""
    theta, longer = rope.theta, tokens > rope.original_max_tokens
    if rope.kind == "dynamic" and longer:
        grown = rope.factor * tokens / rope.original_max_tokens - (rope.factor - 1)
        theta = theta * grown ** (dims / (dims - 2))
    base = np.float32(theta) ** (np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims))
    if rope.kind == "longrope":
        base = base * np.asarray(rope.long_factor if longer else rope.short_factor, np.float32)
    frequency = np.float32(1.0) / base
    if rope.kind == "proportional":
        rotated = np.arange(len(frequency)) < int(rope.fraction * dims // 2)
        frequency = np.where(rotated, frequency, 0) / np.float32(rope.factor)
    if rope.kind == "linear":
        frequency = frequency / np.float32(rope.factor)
    if rope.kind == "llama3":
        rotations = rope.original_max_tokens * frequency / np.float32(2 * math.pi)
        blended = rope.high_freq_factor - rope.low_freq_factor
        if blended:
            share = np.clip((rotations - rope.low_freq_factor) / blended, 0.0, 1.0)
        else:  # Llama 4: a step
            share = (rotations >= rope.low_freq_factor).astype(np.float32)
        frequency = frequency * (share + (1 - share) / rope.factor)
    if rope.kind == "yarn":

        def pair(rotations: float) -> float:  # the pair that rotates so often in the old context
            ratio = rope.original_max_tokens / (rotations * 2 * math.pi)
            return dims * math.log(ratio) / (2 * math.log(rope.theta))

        low, high = pair(rope.beta_fast), pair(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        if low == high:
            high += 0.001
        share = 1 - np.clip((np.arange(dims // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        frequency = frequency * share + frequency / rope.factor * (1 - share)
    return frequency.astype(np.float32)


def rope_angles(
    positions: jax.Array, rope: Rope, head_dim: int, tokens: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of position * frequency: positions [B, S] int, or [B, S, 3] of images, ->
    two [B, S, pairs] float32. `tokens` is the length that sequences may get."""
    frequency = rope_frequencies(rope, rope.dims(head_dim), tokens)
    if positions.ndim == 3:
        sections = (rope.sections, rope.interleaved_sections)
        cos, sin = mrope_angles(positions, frequency, *sections)
        return cos * rope.amplitude, sin * rope.amplitude
    angles = jnp.einsum("...s,f->...sf", positions.astype(jnp.float32), frequency)
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def position_inputs(config: ModelConfig, positions: jax.Array, width: int) -> dict:
    """Returns positions [B, S], or [B, S, 3] of images, in the form that layers read, as fields of
    Pass, where a batch or a cache has `width` tokens of a sequence."""
    tokens = config.rope_tokens or width

    def angles(i, rope):
        return lambda _, tile: rope_angles(tile, rope, config.rope_dims_of(i), tokens)

    tiles = functools.partial(in_tiles, config.batch_invariant)
    of_ropes = (tiles(angles(i, rope), (), positions) for i, rope in enumerate(config.ropes))
    inputs = {"angles": tuple(of_ropes)}
    if floor := config.temperature_floor:
        first = 0 if config.temperature_on_all else 1
        grown = jnp.log1p(jnp.floor((positions.astype(jnp.float32) + first) / floor))
        inputs["stretch"] = (1 + config.temperature_slope * grown,)
    return inputs


def chunked(config: ModelConfig, positions, segments, prefix: PackedPrefix | None):
    """Returns segments and prefix of layers whose attention is cut into chunks: each chunk of a
    segment is one of its own, and so is that of the prefix that a token continues. Returns None if
    no layer is cut, or no row is longer than a chunk.

    Names of segments, [B, S] of any size, are counted within their row, so that none is too large.
    """
    chunk, tokens = max(kind.chunk for kind in config.kinds), segments.shape[1]
    if not chunk or tokens <= chunk:
        return None
    chunk_index, chunk_count = positions // chunk, tokens // chunk + 1
    names = jnp.sort(segments, axis=1)

    def named(ids):
        segment_index = jax.vmap(jnp.searchsorted)(names, ids)
        return jnp.where(ids > 0, segment_index * chunk_count + chunk_index + 1, 0).astype(
            jnp.int32
        )

    return named(segments), prefix and prefix._replace(ids=named(prefix.ids))


def recurrence_inputs(config: ModelConfig, segments: jax.Array, continued: jax.Array) -> dict:
    """Returns what recurrent layers read of segments [B, S], as fields of Pass; {} without such
    layers. continued [B] bool: rows that go on behind what was read of them."""
    if not config.recurrent:
        return {}
    return dict(runs=runs_of(segments, continued), taken=segments > 0)


class Attention(nnx.Module):
    """Grouped-query attention; what a layer remembers is (keys, values)."""

    def __init__(self, rngs, config: ModelConfig, kind: LayerKind):
        d, h, k, e = config.embed, config.heads, config.kv_heads, config.head_dim
        heads, kv = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.gated = config.attention_gate  # of each head e numbers are its query, e its gate
        of_q = (h, 2 * e if self.gated else e)
        self.q = Linear(rngs, config, (d,), of_q, heads, bias=config.qkv_bias)
        self.k = Linear(rngs, config, (d,), (k, e), kv, bias=config.qkv_bias)
        if not kind.values_of_keys:
            self.v = Linear(rngs, config, (d,), (k, e), kv, bias=config.qkv_bias)
        self.value_norm = config.value_norm
        output_axes = ("heads", "head_dim", "embed")
        self.o = Linear(rngs, config, (h, e), (d,), output_axes, bias=config.output_bias)
        self.kind, self.scale, self.soft_cap = kind, config.scale, config.attention_soft_cap
        self.sunk, self.apart = config.sinks, config.batch_invariant
        self.context_attention = config.context_attention
        weightless = config.qk_norm_kind == "l2"
        self.normed = config.qk_norm and not weightless
        self.evened = config.qk_norm and weightless and kind.rope is not None
        self.eps = config.norm_eps
        self.interleaved = config.rope_interleaved
        self.stretches = kind.rope is None or config.temperature_on_all
        if self.normed and config.qk_norm_kind == "head":
            self.q_norm = RMSNorm(rngs, config, e, "head_dim")
            self.k_norm = RMSNorm(rngs, config, e, "head_dim")
        elif self.normed:
            of_q, of_k = (n * e for n in config.normed_heads or (h, k))
            self.q_norm = RMSNorm(rngs, config, (h, e), heads[1:], real=of_q)
            self.k_norm = RMSNorm(rngs, config, (k, e), kv[1:], real=of_k)
        if self.sunk:
            self.sinks = weight(rngs, config, (h,), ("heads",), init="zeros")

    def project(self, x, *angles):
        """Returns queries [B, S, H, E], keys and values [B, S, K, E] of x [B, S, D], and the gates
        [B, S, H, E] of models that have them. `angles`: cos and sin where the layer rotates, and
        Pass.stretch where it reads that."""
        q, k = self.q(x), self.k(x)
        q, *gate = jnp.split(q, 2, axis=-1) if self.gated else (q,)
        v = k if self.kind.values_of_keys else self.v(x)
        if self.value_norm:
            v = root_mean_squared(v, self.eps).astype(v.dtype)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.kind.rope is not None:
            cos, sin, *angles = angles
            q, k = (apply_rope(x, cos, sin, self.interleaved) for x in (q, k))
        for stretch in angles:
            q = (q * stretch[:, :, None, None]).astype(q.dtype)
        if self.evened:
            q, k = (root_mean_squared(x, self.eps).astype(x.dtype) for x in (q, k))
        return q, k, v, *gate

    def attend(self, projected, call: Pass, cache=None):
        """Returns the outputs of the heads [B, S, H, E], and the layer's new cache."""
        output, cache = self._attend(*projected[:3], call, cache)
        for gate in projected[3:]:
            output = output * jax.nn.sigmoid(gate)
        return output, cache

    def _attend(self, q, k, v, call: Pass, cache):
        options = dict(scale=self.scale, soft_cap=self.soft_cap, apart=self.apart)
        options["sinks"] = self.sinks[...].astype(jnp.float32) if self.sunk else None
        if cache is None:
            segments, prefix = call.segments, call.prefix
            if self.kind.chunk and call.chunks:
                segments, prefix = call.chunks
            options |= dict(mesh=call.mesh, window=self.kind.window, prefix=prefix)
            options["context_attention"] = self.context_attention
            return attention(q, k, v, segments, **options), (k, v)
        cache, pairs, allowed = remember(cache, (k, v), call.columns, call.counts, call.nodes)
        if self.kind.chunk:  # its columns are positions: no window, and no trees
            columns = call.columns[:, None] + jnp.arange(q.shape[1])[None, :]
            chunk_start = columns // self.kind.chunk * self.kind.chunk
            allowed &= jnp.arange(allowed.shape[2])[None, None, :] >= chunk_start[:, :, None]
        q, to_heads = shared_lanes(q, k.shape[2], pairs)
        if pairs.order == "pairs":  # a layer without sinks
            lengths = None if call.nodes else jnp.minimum(call.columns + 1, pairs.columns)
            options = dict(scale=self.scale, soft_cap=self.soft_cap)
            output = attention_paired(q, pairs, allowed, lengths, mesh=call.mesh, **options)
        else:
            scales = zip(("k_scales", "v_scales"), pairs.scales, strict=False)
            options |= dict(scales, order=pairs.order)
            output = attention_cached(q, *pairs.parts, allowed, **options)
        # The cache may store more elements than a head has (rljax.models.cache).
        return to_heads(output)[..., : v.shape[-1]], cache


class LatentAttention(nnx.Module):
    """Multi-head latent attention (arXiv 2405.04434): keys and values from a latent of kv_rank.

    What it remembers is one array, the normalised latent and the rotated shared key, as of one kv
    head of size R + rope. Decoding moves the key's up-projection onto the query, so that nothing is
    expanded over the cache.
    """

    def __init__(self, rngs, config: ModelConfig, kind: LayerKind):
        d, h, lat = config.embed, config.heads, config.latent
        qk, up_axes = lat.nope_dim + lat.rope_dim, ("latent", "heads", "head_dim")
        # These norms keep transformers' default eps, whatever rms_norm_eps is.
        fixed = dataclasses.replace(config, norm_eps=1e-6)
        down_axes = ("embed", "latent")
        if lat.q_rank:
            self.q_down = Linear(rngs, config, (d,), (lat.q_rank,), down_axes, bias=config.qkv_bias)
            self.q_latent_norm = RMSNorm(rngs, fixed, lat.q_rank)
            self.q_up = Linear(rngs, config, (lat.q_rank,), (h, qk), up_axes)
        else:
            self.q = Linear(rngs, config, (d,), (h, qk), ("embed", "heads", "head_dim"))
        joint = lat.kv_rank + lat.rope_dim
        self.kv_down = Linear(rngs, config, (d,), (joint,), down_axes, bias=config.qkv_bias)
        self.kv_norm = RMSNorm(rngs, fixed, lat.kv_rank)
        self.kv_up = Linear(
            rngs, config, (lat.kv_rank,), (h, lat.nope_dim + lat.value_dim), up_axes
        )
        output_axes = ("heads", "head_dim", "embed")
        self.o = Linear(
            rngs, config, (h, lat.value_dim), (d,), output_axes, bias=config.output_bias
        )
        self.latent, self.kind, self.scale, self.stretches = lat, kind, config.scale, False
        self.apart, self.context_attention = config.batch_invariant, config.context_attention

    def project(self, x, cos, sin):
        """Returns queries [B, S, H, nope + rope] of x [B, S, D], and what is
        stored [B, S, 1, R + rope]: one head."""
        lat = self.latent
        q = self.q_up(self.q_latent_norm(self.q_down(x))) if lat.q_rank else self.q(x)
        q_nope, q_rope = jnp.split(q, [lat.nope_dim], axis=-1)
        c, k_rope = jnp.split(self.kv_down(x), [lat.kv_rank], axis=-1)
        q_rope = apply_rope(q_rope, cos, sin, lat.interleaved)
        k_rope = apply_rope(k_rope[:, :, None], cos, sin, lat.interleaved)
        stored = jnp.concatenate([self.kv_norm(c)[:, :, None], k_rope], axis=-1)
        return jnp.concatenate([q_nope, q_rope], axis=-1), stored

    def expand(self, stored):
        """Returns keys and values of every head from what is stored [B, S, 1, R + rope]."""
        lat = self.latent
        c, k_rope = jnp.split(stored, [lat.kv_rank], axis=-1)
        k_nope, v = jnp.split(self.kv_up(c[:, :, 0]), [lat.nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], lat.rope_dim))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v

    def attend(self, projected, call: Pass, cache=None):
        """Returns the outputs of the heads [B, S, H, F], and the layer's new cache."""
        (q, stored), lat, expand = projected, self.latent, LatentAttention.expand
        if cache is None:
            k, v = invariant.of_module(self.apart, self, expand, stored)
            options = dict(window=self.kind.window, scale=self.scale, prefix=call.prefix)
            options |= dict(mesh=call.mesh, apart=self.apart)
            options["context_attention"] = self.context_attention
            return attention(q, k, v, call.segments, **options), (stored,)
        arguments = call.columns, call.counts, call.nodes
        cache, pairs, allowed = remember(cache, (stored,), *arguments)
        joint, scales = pairs.parts[0], pairs.scales[0] if pairs.scales else None
        options = dict(scale=self.scale, order=pairs.order)
        if self.apart:  # the trainer's products in the trainer's order
            joint = joint.swapaxes(1, 2) if pairs.order == "heads" else joint
            k, v = invariant.of_module(True, self, expand, joint)
            return attention_cached(
                q, k, v, allowed, **options | dict(order="tokens", apart=True)
            ), cache
        q_nope, q_rope = jnp.split(q, [lat.nope_dim], axis=-1)
        up_weight = self.kv_up.matrix(q.dtype)
        q_latent = jnp.einsum("bshn,rhn->bshr", q_nope, up_weight[..., : lat.nope_dim])
        output = attention_cached(
            jnp.concatenate([q_latent, q_rope], axis=-1),
            joint,
            joint,
            allowed,
            k_scales=scales,
            v_scales=scales,
            **options,
        )[..., : lat.kv_rank]
        return jnp.einsum("bshr,rhv->bshv", output, up_weight[..., lat.nope_dim :]), cache


class MLP(nnx.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, rngs, config: ModelConfig):
        d, f, bias = config.embed, config.mlp, config.mlp_bias
        self.gate = Linear(rngs, config, (d,), (f,), ("embed", "mlp"), bias=bias)
        self.up = Linear(rngs, config, (d,), (f,), ("embed", "mlp"), bias=bias)
        self.down = Linear(rngs, config, (f,), (d,), ("mlp", "embed"), bias=bias)
        self.activation = config.activation

    def __call__(self, x):
        return self.down(activate(self.gate(x), self.activation) * self.up(x))


class Block(nnx.Module):
    """x + r attention(norm x), then x + r mlp(norm x), with r the residual scale. Gemma norms what
    is added, too; OLMo 2 that alone."""

    def __init__(self, rngs, config: ModelConfig, kind: LayerKind):
        config = config.of(kind)
        self.pre_norms, self.residual_scale = config.pre_norms, config.residual_scale
        if self.pre_norms:
            self.attention_norm = RMSNorm(rngs, config, config.embed)
            self.mlp_norm = RMSNorm(rngs, config, config.embed)
        if kind.recurrent:
            self.recurrence = (GatedDeltaNet if config.delta else ShortConvolution)(rngs, config)
        else:
            self.attention = (LatentAttention if config.latent else Attention)(rngs, config, kind)
        self.mlp = Experts(rngs, config) if kind.experts else MLP(rngs, config)
        self.kind, self.post_norms, self.apart = kind, config.post_norms, config.batch_invariant
        if self.post_norms:
            self.attention_post_norm = RMSNorm(rngs, config, config.embed)
            self.mlp_post_norm = RMSNorm(rngs, config, config.embed)
        self.scales = config.layer_scales
        if self.scales:
            self.output_scale = weight(rngs, config, (1,), ("norm",), init="ones")

    @property
    def mixer(self) -> nnx.Module:
        """The part that lets tokens see others."""
        return self.recurrence if self.kind.recurrent else self.attention

    def __call__(self, x, call: Pass, cache=None, routes=None):
        """x [B, S, D] -> x, this layer's keys and values or its state, statistics of its experts.
        `routes` [B, S, k]: the experts that the tokens go to, -1 = as the router says."""
        rows = functools.partial(invariant.of_module, self.apart, self)
        angles = () if self.kind.rope is None else call.angles[self.kind.rope]
        angles += call.stretch if self.mixer.stretches else ()
        projected = rows(Block._before_attention, x, *angles)
        output, cache = self.mixer.attend(projected, call, cache)
        x = call.split(rows(Block._after_attention, x, output))
        if not self.kind.experts:
            return call.split(rows(Block._after_mlp, x)), cache, {}
        normed = rows(Block._before_mlp, x)
        output, stats = self.mlp(normed, call.mesh, call.segments > 0, call.is_step, routes)
        return call.split(rows(Block._added, x, output)), cache, stats

    def _before_attention(self, x, *angles):
        return self.mixer.project(self.attention_norm(x) if self.pre_norms else x, *angles)

    def _after_attention(self, x, output):
        output = self.mixer.o(output)
        return self._plus(x, self.attention_post_norm(output) if self.post_norms else output)

    def _before_mlp(self, x):
        return self.mlp_norm(x) if self.pre_norms else x

    def _after_mlp(self, x):
        return self._added(x, self.mlp(self._before_mlp(x)))

    def _added(self, x, output):
        x = self._plus(x, self.mlp_post_norm(output) if self.post_norms else output)
        if not self.scales:
            return x
        return x * jax.lax.stop_gradient(self.output_scale[...][0]).astype(x.dtype)

    def _plus(self, x, output):
        return x + (output if self.residual_scale == 1 else self.residual_scale * output)


def _stacked(rngs, config: ModelConfig, kind: LayerKind, repeats: int, names: set[str]) -> Block:
    """Returns a block whose weights have a leading axis of `repeats` layers, and adds the names of
    its linear maps to `names`."""

    def make(rngs):
        block = Block(rngs, config, kind)
        if config.lora:
            names.update(lora.adapt(block, rngs, config))
        return block

    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(repeats))


class Decoder(nnx.Module):
    """Maps token ids to final hidden states; `head` is "lm" (logits) or "scalar" (values, scores).

    `layers` holds one entry per member of a stack's unit, its weights stacked over the repeats.
    """

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, head: str):
        self.config = config
        d, v = config.embed, config.vocab_size
        self.embedding = weight(rngs, config, (v, d), ("vocab", "embed"))
        layers, names = {}, set()
        for stack in config.stacks():
            for kind in stack.unit:
                layers[str(len(layers))] = _stacked(rngs, config, kind, stack.repeats, names)
        self.layers = nnx.Dict(layers)
        if config.vision:
            adapt = [lora.tower_adapter(config, names)] if config.lora else []
            self.vision = VisionTower(rngs, config.vision, *adapt)
        if config.lora:
            lora.check_targets(config, names)
        self.norm = RMSNorm(rngs, config, d)
        if head == "scalar":
            exact = dataclasses.replace(config, weight_dtype="float32") if config.lora else config
            self.head = weight(rngs, exact, (d, config.labels), ("embed", "scalar"), init="zeros")
            if config.head_bias:
                self.head_bias = weight(rngs, exact, (config.labels,), ("scalar",), init="zeros")
        elif not config.tie_embeddings:
            self.head = weight(rngs, config, (d, v), ("embed", "vocab"))

    def embed(self, tokens):
        """Returns the scaled embeddings [B, S, D] of tokens [B, S], in the compute dtype."""

        def rows(table, tokens):
            x = jnp.take(table, tokens, axis=0).astype(self.config.dtype)
            return x * jnp.asarray(self.config.embed_scale, x.dtype)

        return in_tiles(self.config.batch_invariant, rows, self.embedding[...], tokens)

    def members(self) -> list[list]:
        """Returns (static definition, stacked weights) of every member of each stack's unit,
        stack by stack."""
        definitions = iter([nnx.split(self.layers[name]) for name in sorted(self.layers, key=int)])
        return [[next(definitions) for _ in stack.unit] for stack in self.config.stacks()]

    def unstacked(self, *, late: bool, transposed: bool) -> list[tuple]:
        """Returns (static definition, weights, index) of every layer: its own weights,
        `transposed` where so many products read them, or those of its stack and its index there,
        to be sliced `late`."""
        layers = {}
        for stack, members in zip(self.config.stacks(), self.members(), strict=True):
            for member, (graph, weights) in enumerate(members):
                for repeat, layer in enumerate(stack.layers_of(member)):
                    layer_weights = (
                        weights if late else jax.tree.map(lambda w, r=repeat: w[r], weights)
                    )
                    if transposed:
                        graph, layer_weights = nnx.split(
                            transpose_weights(nnx.merge(graph, layer_weights))
                        )
                    layers[layer] = (graph, layer_weights, repeat if late else None)
        return [layers[layer] for layer in sorted(layers)]

    def head_weight(self, head: str) -> jax.Array:
        """Returns the weight of the head: [D, V] for "lm" (the embedding itself, [V, D], when
        tied), [D, labels] for "scalar"."""
        if head == "lm" and self.config.tie_embeddings:
            return self.embedding[...]
        return self.head[...]
