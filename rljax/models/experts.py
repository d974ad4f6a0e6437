"""Temporary."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from rljax.models.layers import Linear, weight


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    count: int
    per_token: int
    mlp: int
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    gated: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    shared_mlp: int = 0


class Experts(nnx.Module):
    def __init__(self, rngs, config):
        x = config.experts
        d, f, n = config.embed, x.mlp, x.count
        self.config = x
        self.router = weight(rngs, config, (d, n), ("embed", "norm"))
        if x.router_bias:
            self.router_bias = weight(rngs, config, (n,), ("norm",), init="zeros")
        if x.correction_bias:
            self.correction = weight(rngs, config, (n,), ("norm",), init="zeros")
        self.experts_gate = weight(rngs, config, (n, d, f), ("experts", "embed", "mlp"))
        self.experts_up = weight(rngs, config, (n, d, f), ("experts", "embed", "mlp"))
        self.experts_down = weight(rngs, config, (n, f, d), ("experts", "mlp", "embed"))
        if x.expert_bias:
            self.experts_gate_bias = weight(rngs, config, (n, f), ("experts", "mlp"), init="zeros")
            self.experts_up_bias = weight(rngs, config, (n, f), ("experts", "mlp"), init="zeros")
            self.experts_down_bias = weight(rngs, config, (n, d), ("experts", "norm"), init="zeros")
        if x.shared_mlp:
            self.shared_gate = Linear(rngs, config, (d,), (x.shared_mlp,), ("embed", "mlp"))
            self.shared_up = Linear(rngs, config, (d,), (x.shared_mlp,), ("embed", "mlp"))
            self.shared_down = Linear(rngs, config, (x.shared_mlp,), (d,), ("mlp", "embed"))

    def __call__(self, x, mesh, keep):
        c = self.config
        z = x.astype(jnp.float32) @ self.router[...]
        if c.router_bias:
            z = z + self.router_bias[...][None, None]
        p = jax.nn.softmax(z, -1) if c.scores == "softmax" else jax.nn.sigmoid(z)
        choice = p + (self.correction[...][None, None] if c.correction_bias else 0)
        if c.groups > 1:
            g = choice.reshape(*choice.shape[:-1], c.groups, -1)
            gs = jnp.sum(jax.lax.top_k(g, 2)[0], -1)
            _, gi = jax.lax.top_k(gs, c.groups_kept)
            gm = jnp.any(jnp.arange(c.groups)[:, None] == gi[..., None, :], -1)
            choice = jnp.where(gm[..., None], g, -jnp.inf).reshape(choice.shape)
        _, ids = jax.lax.top_k(choice, c.per_token)
        w = jnp.take_along_axis(p, ids, -1)
        if c.normalise:
            w = w / (jnp.sum(w, -1, keepdims=True) + (1e-20 if c.scores == "sigmoid" else 0))
        w = w * c.scale
        gate = jnp.einsum("bsd,xdf->bsxf", x, self.experts_gate[...])
        up = jnp.einsum("bsd,xdf->bsxf", x, self.experts_up[...])
        if c.expert_bias:
            gate, up = (
                gate + self.experts_gate_bias[...][None, None],
                up + self.experts_up_bias[...][None, None],
            )
        if c.gated == "clamped_swiglu":
            gate, up = jnp.minimum(gate, c.limit), jnp.clip(up, -c.limit, c.limit)
            h = (up + 1) * gate * jax.nn.sigmoid(gate * c.alpha)
        else:
            h = jax.nn.silu(gate) * up
        y = jnp.einsum("bsxf,xfd->bsxd", h, self.experts_down[...])
        if c.expert_bias:
            y = y + self.experts_down_bias[...][None, None]
        full = jnp.sum(jax.nn.one_hot(ids, c.count) * w[..., None], -2)
        out = jnp.einsum("bsxd,bsx->bsd", y, full)
        if c.shared_mlp:
            out = out + self.shared_down(jax.nn.silu(self.shared_gate(x)) * self.shared_up(x))
        return out.astype(x.dtype), {}
