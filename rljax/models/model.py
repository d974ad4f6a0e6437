"""Model: the static half of a decoder, with pure functions of its parameter pytree.

What lives here: init, the training forward passes (log-probs, values), and the two calls that
decode
(prefill, decode_step). What does not: sampling (rljax.sampler), optimizers (rljax.roles).

Parameters are a nested dict of arrays; layers are stacked on axis 0. Axes: B rows, S tokens, T
cached
tokens, L layers, K kv heads, E head_dim, V words. Caches are one (k, v) pair per layer, head-major
[B, K, T, E]: measured twice as fast on CPU as token-major, and decoding unrolls the layers over
them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from rljax.batch import Batch
from rljax.kernels.logprob import token_logprobs
from rljax.mesh import constrain_rows, weight_sharding
from rljax.models.config import ModelConfig
from rljax.models.decoder import Decoder, rope_angles


@functools.cache
def _definition(config: ModelConfig, head: str):
    """(static NNX graph, {path: (shape, logical axes)}) without allocating a weight."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), config, head)))
    weights = {}
    for path, leaf in nnx.to_flat_state(state):
        axes = leaf.get_metadata()["axes"]
        weights[path] = (leaf.shape, ("layers", *axes) if path[0] == "layers" else axes)
    return graph, weights


def _nested(flat: dict) -> dict:
    out: dict = {}
    for path, value in flat.items():
        node = out
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return out


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder without its weights: hashable, so roles carry it as a static field."""

    config: ModelConfig
    mesh: Mesh
    head: str = "lm"  # "lm" | "scalar"

    def shapes(self) -> dict:
        """{path: (shape, logical axes)} of every weight."""
        return _definition(self.config, self.head)[1]

    def shardings(self) -> dict:
        """The sharding of every weight, as a pytree like the parameters."""
        return _nested(
            {
                path: weight_sharding(self.mesh, ".".join(path), shape, axes)
                for path, (shape, axes) in self.shapes().items()
            }
        )

    def init(self, key: jax.Array) -> dict:
        """Random parameters, created in place on the mesh."""

        def create(key):
            return nnx.to_pure_dict(nnx.state(Decoder(nnx.Rngs(key), self.config, self.head)))

        # Random bits for every weight take seconds to optimise on CPU and microseconds to run.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else {}
        return jax.jit(create, out_shardings=self.shardings(), compiler_options=options)(key)

    def _bind(self, params: dict) -> Decoder:
        return nnx.merge(_definition(self.config, self.head)[0], params)

    # -- training: scan over layers
    # --------------------------------------------------------------------

    def _layers(self, decoder: Decoder, x, cos, sin, allowed, *, keep_kv=False):
        graph, stacked = decoder.layer_definition()

        def layer(x, weights):
            x, kv = nnx.merge(graph, weights)(constrain_rows(x, self.mesh), cos, sin, allowed)
            return x, kv if keep_kv else None

        if self.config.remat == "full" and not keep_kv:
            layer = jax.checkpoint(layer)
        return jax.lax.scan(layer, x, stacked)

    def _hidden(self, decoder: Decoder, batch: Batch) -> jax.Array:
        """Final normalised hidden states [B, S, D]; a token sees its own segment, causally."""
        cos, sin = rope_angles(batch.positions, self.config)
        column = jnp.arange(batch.tokens.shape[1])
        same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
        allowed = same & (column[None, :, None] >= column[None, None, :])
        x = constrain_rows(decoder.embed(batch.tokens), self.mesh)
        x, _ = self._layers(decoder, x, cos, sin, allowed)
        return decoder.norm(x)

    def logprobs(self, params: dict, batch: Batch, temperature=1.0) -> tuple[jax.Array, jax.Array]:
        """log pi(tokens[b, t] | tokens[b, :t]) and the entropy of that choice: two [B, S] float32.

        Column 0 is 0, and so carries nothing; so does the first token of a packed segment.
        """
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch)
        targets = jnp.roll(batch.tokens, -1, axis=1)
        logp, entropy, _ = token_logprobs(
            hidden,
            decoder.head_weight("lm"),
            targets,
            temperature=temperature,
            float32_head=self.config.head_in_float32,
        )
        return _describe_next(logp), _describe_next(entropy)

    def sum_pi_squared(self, params: dict, batch: Batch, temperature=1.0) -> jax.Array:
        """sum over words of pi(word | tokens[b, :t])^2 = exp(logsumexp(2 z) - 2 logsumexp(z)): [B,
        S]."""
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch)
        targets = jnp.roll(batch.tokens, -1, axis=1)
        once, twice = (
            token_logprobs(
                hidden,
                decoder.head_weight("lm"),
                targets,
                temperature=temperature / k,
                float32_head=self.config.head_in_float32,
            )[2]
            for k in (1, 2)
        )
        return _describe_next(jnp.exp(twice - 2 * once))

    def values(self, params: dict, batch: Batch) -> jax.Array:
        """V(state before tokens[b, t]): [B, S] float32, from the scalar head. Column 0 is 0."""
        decoder = self._bind(params)
        hidden = self._hidden(decoder, batch).astype(jnp.float32)
        return _describe_next((hidden @ decoder.head_weight("scalar").astype(jnp.float32))[..., 0])

    def logits(self, params: dict, batch: Batch) -> jax.Array:
        """[B, S, V] float32: for parity tests and probes only; training never builds it."""
        decoder = self._bind(params)
        return self._head_logits(decoder.head_weight("lm"), self._hidden(decoder, batch))

    def _head_logits(self, head, hidden):
        """The sampler's head: the same precision rule as the trainer's (kernels.logprob)."""
        dtype = jnp.float32 if self.config.head_in_float32 else hidden.dtype
        precision = jax.lax.Precision.HIGHEST if self.config.head_in_float32 else None
        return jnp.einsum(
            "bsd,dv->bsv",
            hidden.astype(dtype),
            head.astype(dtype),
            preferred_element_type=jnp.float32,
            precision=precision,
        )

    # -- decoding: layers unrolled over per-layer caches
    # ---------------------------------------------------

    def prefill(self, params: dict, tokens: jax.Array, cache_tokens: int):
        """Keys and values of right-padded prompts [B, P] -> a cache of `cache_tokens` columns per
        layer.

        Columns at and after a prompt's length hold garbage; decoding overwrites a column before
        reading it.
        """
        decoder = self._bind(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        cos, sin = rope_angles(positions, self.config)
        allowed = positions[:, :, None] >= positions[:, None, :]
        x = constrain_rows(decoder.embed(tokens), self.mesh)
        _, (k, v) = self._layers(decoder, x, cos, sin, allowed, keep_kv=True)
        room = [(0, 0), (0, 0), (0, cache_tokens - tokens.shape[1]), (0, 0)]
        return [(jnp.pad(k[i], room), jnp.pad(v[i], room)) for i in range(self.config.layers)]

    def unstack(self, params: dict):
        """Everything decode_step reads, with each layer's weights as own arrays.

        Slicing stacked weights inside the decode loop doubles a step on CPU; do this before the
        loop.
        """
        decoder = self._bind(params)
        graph, stacked = decoder.layer_definition()
        layers = [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(self.config.layers)]
        return graph, decoder, layers

    def decode_step(self, unstacked, tokens: jax.Array, columns: jax.Array, caches):
        """One token per row: tokens [B] written at columns [B] -> logits [B, V] float32, new
        caches."""
        graph, decoder, layers = unstacked
        cos, sin = rope_angles(columns[:, None], self.config)
        cache_tokens = caches[0][0].shape[2]
        allowed = (jnp.arange(cache_tokens)[None, :] <= columns[:, None])[:, None, :]
        rows = jnp.arange(tokens.shape[0])
        x = constrain_rows(decoder.embed(tokens[:, None]), self.mesh)
        new_caches = []
        for weights, (k_cache, v_cache) in zip(layers, caches, strict=True):

            def write(k, v, k_cache=k_cache, v_cache=v_cache):
                at = dict(mode="drop", unique_indices=True, indices_are_sorted=True)
                k_new = k_cache.at[rows, :, columns].set(k[:, :, 0], **at)
                return k_new, v_cache.at[rows, :, columns].set(v[:, :, 0], **at)

            x, kv = nnx.merge(graph, weights)(x, cos, sin, allowed, write)
            new_caches.append(kv)
        logits = self._head_logits(decoder.head_weight("lm"), decoder.norm(x))
        return logits[:, 0], new_caches


def _describe_next(x: jax.Array) -> jax.Array:
    """What hidden state t says about token t + 1, moved to column t + 1 (the Batch convention)."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
