"""Experts: a router sends each token to k of X small MLPs; their weighted sum replaces the MLP.

The routing rules of the families (Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss), routed and shared
experts, their split over the mesh, and statistics of the load.

No token is ever dropped, there is no capacity. The router runs in float32 for every family, on
every token's whole row of the router's weight, so a mesh changes no choice. (Hugging Face rounds
the logits of all but DeepSeek-V3 to the compute dtype before it chooses.)

Over the mesh: rows are split over data x fsdp x expert and tokens over context; each expert shard
holds X / expert of the experts and 1 / tensor of each one's hidden size. Rows are gathered over
`expert`, every shard runs its own experts on all of them, and the sums are scattered back. In a
decode step the rows are split over data x expert alone and D over fsdp, as the matrices are stored:
sums over fsdp are moved in place of matrices.

Axes: B rows, S tokens of a row, N tokens, D embed, X experts, k experts of one token, F hidden size
of an expert, M = N k choices, L layers.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rljax.errors import InputError
from rljax.kernels.grouped_matmul import grouped_matmul
from rljax.kernels.row_tiles import TILE, in_tiles
from rljax.mesh import BATCH_AXES
from rljax.metric import Metric
from rljax.models.expert_weights import ExpertWeights, not_split, spread
from rljax.models.invariant import of_module
from rljax.models.layers import Linear, activate, weight

METRICS = {
    "expert_load_max": Metric(
        "load of the busiest expert of any layer, over the mean load",
        "x mean",
        "below 3; more: experts starve",
    ),
    "expert_load_min": Metric(
        "load of the idlest expert of any layer, over the mean load",
        "x mean",
        "above 0: an expert at 0 is dead",
    ),
    "router_entropy": Metric("entropy of a token's choice among the experts", "nats", "steady"),
    "load_balance_loss": Metric("imbalance of the experts' load", "", "near 1, which is even"),
}

_LARGEST_SIZE = 2**24
GATED = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of one layer. Mixtral and gpt-oss (softmax over the kept logits) are softmax with
    `normalise`: the two are the same numbers."""

    count: int
    per_token: int
    mlp: int  # hidden size of one expert
    scores: str = "softmax"  # "softmax" over all experts | "sigmoid" (DeepSeek-V3)
    normalise: bool = True  # the kept scores are divided by their sum
    scale: float = 1.0  # what the kept scores are multiplied by
    groups: int = 1  # experts compete in groups, and only the best groups stay
    groups_kept: int = 1
    correction_bias: bool = False  # moves the choice, not the weight; no gradient reaches it
    router_bias: bool = False
    expert_bias: bool = False
    gated: str = "silu"  # silu | gelu_tanh | gelu | clamped_swiglu (gpt-oss)
    alpha: float = 1.702  # of clamped_swiglu
    limit: float = 7.0  # of clamped_swiglu
    scale_input: bool = False  # a token's weight multiplies what its expert reads (Llama 4)
    shared_mlp: int = 0  # hidden size of the shared experts together, which see every token
    shared_gate: bool = False  # what they give is multiplied by sigmoid(w x)

    def __post_init__(self):
        for name in ("count", "per_token", "mlp", "groups", "groups_kept"):
            if not 1 <= getattr(self, name) <= _LARGEST_SIZE:
                rule = f"1 to {_LARGEST_SIZE}"
                fix = f"set {name} of the experts to a number of this range"
                raise InputError(f"experts.{name}", value=getattr(self, name), rule=rule, fix=fix)
        for name, allowed in (("scores", ("softmax", "sigmoid")), ("gated", GATED)):
            if getattr(self, name) not in allowed:
                fix = f"write one of {', '.join(allowed)}"
                raise InputError(f"experts.{name}", value=getattr(self, name), fix=fix)
        if not 0 <= self.shared_mlp <= _LARGEST_SIZE:
            rule = f"0 to {_LARGEST_SIZE}"
            fix = "set shared_mlp to 0 (no shared expert) or to a number of this range"
            raise InputError("experts.shared_mlp", value=self.shared_mlp, rule=rule, fix=fix)
        if self.count % self.groups or (self.groups > 1 and self.count < 2 * self.groups):
            rule = "it divides experts.count, and a group has at least two experts"
            fix = "groups=1, or a divisor of count that leaves two experts to a group"
            raise InputError("experts.groups", value=(self.count, self.groups), rule=rule, fix=fix)
        if self.groups_kept > self.groups:
            rule = f"at most {self.groups} groups"
            fix = "lower groups_kept"
            raise InputError("experts.groups_kept", value=self.groups_kept, rule=rule, fix=fix)
        if self.per_token > self.count // self.groups * self.groups_kept:
            rule = "at most the experts that compete: count / groups * groups_kept"
            fix = "lower per_token, or raise groups_kept"
            raise InputError("experts.per_token", value=self.per_token, rule=rule, fix=fix)


# -- routing


def router_scores(logits: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Returns scores [N, X] float32, each in 0..1: softmax over all experts, or a
    sigmoid of each."""
    logits = logits.astype(jnp.float32)
    if config.scores == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=-1)


def _in_best_groups(choice: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Returns which experts are in the best groups, [N, X] bool; a group scores the sum of its two
    best."""
    n, size = choice.shape[0], config.count // config.groups
    group_scores = jax.lax.top_k(choice.reshape(n, config.groups, size), 2)[0].sum(axis=-1)
    kept_groups = jax.lax.top_k(group_scores, config.groups_kept)[1]
    is_kept = jnp.any(kept_groups[:, :, None] == jnp.arange(config.groups)[None, None, :], axis=1)
    return jnp.repeat(is_kept, size, axis=1)


def route(
    logits: jax.Array, correction: jax.Array | None, config: ExpertsConfig, routes=None
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of each token: ids, best first, and weights [N, k].

    The choice is the top k of score + correction, in DeepSeek-V3 (arXiv 2412.19437) within the best
    groups; equal scores go to the lower id. The weight is the score alone, over the sum of the kept
    ones if `normalise`, times `scale`. `routes` [N, k]: the ids that were chosen before, -1 = not
    known; the weights, and the router's gradient, are those of these experts.
    """
    scores = router_scores(logits, config)
    choice = jax.lax.stop_gradient(scores)
    if correction is not None:
        choice = choice + jax.lax.stop_gradient(correction.astype(jnp.float32))[None, :]
    if config.groups_kept < config.groups:
        choice = jnp.where(_in_best_groups(choice, config), choice, -jnp.inf)
    ids = jax.lax.top_k(choice, config.per_token)[1].astype(jnp.int32)
    if routes is not None:
        ids = jnp.where(routes >= 0, routes.astype(jnp.int32), ids)
    if not config.normalise:
        return ids, jnp.take_along_axis(scores, ids, axis=1) * config.scale
    chosen_logits = jnp.take_along_axis(logits.astype(jnp.float32), ids, axis=1)
    if config.scores == "sigmoid":
        chosen_logits = jax.nn.log_sigmoid(chosen_logits)
    # In logarithms, score / sum of the kept scores holds where all of them underflow.
    return ids, jax.nn.softmax(chosen_logits, axis=1) * config.scale


# -- the load


def _load(logits: jax.Array, ids: jax.Array, counted: jax.Array, config: ExpertsConfig) -> dict:
    """Returns the statistics of those of N tokens that `counted` [N] bool marks. They add up over
    shards."""
    if config.scores == "sigmoid":
        logits = jax.nn.log_sigmoid(logits)  # so that P is the score over the sum of all scores
    logs = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(logs)
    information = probabilities * logs
    chosen = jnp.sum(jax.nn.one_hot(ids, config.count, dtype=jnp.float32), axis=1)
    mask = counted[:, None]
    return {
        "tokens": jnp.sum(jnp.where(mask, chosen, 0.0), axis=0),
        "probabilities": jnp.sum(jnp.where(mask, probabilities, 0.0), axis=0),
        "entropy": -jnp.sum(jnp.where(mask, information, 0.0)),
        "kept": jnp.sum(counted.astype(jnp.float32)),
    }


def load_metrics(stats: dict) -> dict:
    """Returns scalars from the statistics of `Experts`, of one layer or of L stacked ones, summed
    over microbatches.

    With f_x the share of the choices that fell on expert x, P_x the mean probability of x:
    load_balance_loss = X sum_x f_x P_x (arXiv 2101.03961, eq. 4), 1 where the load is even, the
    mean over layers. Its gradient goes through P. (Hugging Face's is k times as large.)

    expert_load_max and _min are the most and the least loaded expert of any layer, over the mean
    load. router_entropy is the mean entropy of one token's router distribution, in nats.
    """
    tokens, token_count = stats["tokens"], jnp.maximum(stats["kept"], 1.0)
    share = tokens / jnp.maximum(jnp.sum(tokens, axis=-1, keepdims=True), 1.0)
    load = share * tokens.shape[-1]
    mean_probability = stats["probabilities"] / jnp.expand_dims(token_count, -1)
    return {
        "expert_load_max": jnp.max(load),
        "expert_load_min": jnp.min(load),
        "router_entropy": jnp.mean(stats["entropy"] / token_count),
        "load_balance_loss": jnp.mean(jnp.sum(load * mean_probability, axis=-1)),
    }


# -- the experts


def _gate(gate: jax.Array, up: jax.Array, config: ExpertsConfig) -> jax.Array:
    if config.gated != "clamped_swiglu":
        return activate(gate, config.gated) * up
    gate = jnp.minimum(gate, config.limit)
    up = jnp.clip(up, -config.limit, config.limit)
    return (up + 1) * gate * jax.nn.sigmoid(config.alpha * gate)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns x[order] for a permutation, with a gradient that gathers where XLA's would
    scatter-add."""
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse), lambda inverse, g: (g[inverse], None, None)
)


def _run_experts(
    x,
    ids,
    weights,
    matrices: dict,
    first_expert,
    config: ExpertsConfig,
    platform: str,
    total=lambda y: y,
    apart: bool = False,
):
    """Returns the sum over a token's experts of weight * expert(x), of the experts first_expert,
    first_expert + 1, ... that `matrices` holds: x [N, D], ids and weights [N, k] -> [N, D]. `total`
    makes sums over a part of D whole; `apart`: a token's result depends on nothing else
    (rljax.models.invariant)."""
    count, k = matrices["gate"].shape[0], ids.shape[1]
    local = ids.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < count), local, count)  # others are sorted last
    order = jnp.argsort(local, stable=True)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)
    block = TILE if apart else 0
    times = functools.partial(grouped_matmul, sizes=sizes, platform=platform, block=block)

    def product(rows, name):
        y = times(rows, matrices[name])
        if f"{name}_lora_a" not in matrices:
            return y
        return y + times(times(rows, matrices[f"{name}_lora_a"]), matrices[f"{name}_lora_b"])

    def bias(name, y):
        if name not in matrices:
            return y
        rows = jnp.pad(matrices[name], ((0, 1), (0, 0)))  # none for other shards' rows
        return y + rows[local[order]].astype(y.dtype)

    inputs = jnp.repeat(x, k, axis=0)
    if config.scale_input:
        inputs, weights = inputs * weights.reshape(-1, 1).astype(x.dtype), jnp.ones_like(weights)
    rows = _permute(inputs, order, inverse)
    gate = bias("gate_bias", total(product(rows, "gate")))
    up = bias("up_bias", total(product(rows, "up")))
    gated = in_tiles(apart, lambda _, *x: _gate(*x, config), (), gate, up, axes=1)
    outputs = bias("down_bias", product(gated, "down"))
    outputs = _permute(outputs, inverse, order).reshape(*ids.shape, -1)

    def mixed(_, outputs, w):
        return jnp.einsum("nkd,nk->nd", outputs, w)

    return in_tiles(apart, mixed, (), outputs.astype(jnp.float32), weights, axes=1).astype(x.dtype)


class Experts(ExpertWeights):
    """x [B, S, D] -> (routed + shared experts [B, S, D], statistics of the load, and "ids" [B, S,
    k], the experts that each token went to)."""

    def __init__(self, rngs: nnx.Rngs, config):
        e, d = config.experts, config.embed
        x, f = e.count, e.mlp
        self.config, self.apart = e, config.batch_invariant
        self.router = weight(rngs, config, (d, x), ("embed", "router"))
        super().__init__(rngs, config)
        if e.router_bias:
            self.router_bias = weight(rngs, config, (x,), ("router",), init="zeros")
        if e.correction_bias:
            # float32 whatever the weights are: rounded, it would move choices.
            self.correction = nnx.Param(jnp.zeros((x,), jnp.float32), axes=("router",))
        if e.expert_bias:
            self.gate_bias = weight(rngs, config, (x, f), ("experts", "mlp"), init="zeros")
            self.up_bias = weight(rngs, config, (x, f), ("experts", "mlp"), init="zeros")
            self.down_bias = weight(rngs, config, (x, d), ("experts", "norm"), init="zeros")
        if e.shared_mlp:
            in_axes, out_axes = ("embed", "mlp"), ("mlp", "embed")
            self.shared_gate = Linear(rngs, config, (d,), (e.shared_mlp,), in_axes)
            self.shared_up = Linear(rngs, config, (d,), (e.shared_mlp,), in_axes)
            self.shared_down = Linear(rngs, config, (e.shared_mlp,), (d,), out_axes)
            if e.shared_gate:
                self.shared_share = Linear(rngs, config, (d,), (1,), ("embed", "router"))

    def __call__(
        self, x: jax.Array, mesh: Mesh, keep: jax.Array | None = None, step=False, routes=None
    ):
        """`keep` [B, S] bool: the tokens that count in the statistics (None: all). `step`: x is
        that of a decode step (rljax.mesh.constrain_step). `routes` [B, S, k]: see `route`."""
        e = self.config
        keep = jnp.ones(x.shape[:2], bool) if keep is None else keep > 0
        router = {"weight": self.router[...]}
        if e.router_bias:
            router["bias"] = self.router_bias[...]
        if e.correction_bias:
            router["correction"] = self.correction[...]
        names = ["gate_bias", "up_bias", "down_bias"] if e.expert_bias else []
        biases = {name: getattr(self, name)[...].astype(x.dtype) for name in names}
        matrices = self.matrices(x.dtype) | biases
        if self.apart:  # on one device
            y, stats = _routed_here(x, keep, routes, router, matrices, e, "cpu", True)
        else:
            y, stats = _routed(x, keep, routes, router, matrices, e, mesh, step)
        if e.shared_mlp:
            y = y + of_module(self.apart, self, Experts._shared, x)
        return y, stats

    def _shared(self, x):
        y = self.shared_down(_gate(self.shared_gate(x), self.shared_up(x), self.config))
        return jax.nn.sigmoid(self.shared_share(x)) * y if self.config.shared_gate else y


def _choose(x: jax.Array, routes: jax.Array | None, router: dict, config: ExpertsConfig):
    """Chooses the experts of x [N, D], or takes routes [N, k]: returns logits [N, X], ids [N, k]
    and weights [N, k]."""
    logits = jnp.matmul(
        x.astype(jnp.float32),
        router["weight"].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if config.router_bias:
        logits = logits + router["bias"].astype(jnp.float32)[None, :]
    return logits, *route(logits, router.get("correction"), config, routes)


def _flat(x: jax.Array | None) -> jax.Array | None:
    """Returns [B, S, ...] as [N, ...]."""
    return None if x is None else x.reshape(-1, *x.shape[2:])


def _routed_here(x, counted, routes, router, matrices, config, platform: str, apart: bool = False):
    """Runs `_routed` on one device."""
    flat, known_routes = _flat(x), [] if routes is None else [_flat(routes)]

    def choose(router, x, routes=None):
        return _choose(x, routes, router, config)

    logits, ids, weights = in_tiles(apart, choose, router, flat, *known_routes, axes=1)
    y = _run_experts(flat, ids, weights, matrices, 0, config, platform, apart=apart)
    stats = _load(logits, ids, counted.reshape(-1), config)
    return y.reshape(x.shape), {**stats, "ids": ids.reshape(*x.shape[:2], -1)}


def _routed(
    x, counted, routes, router: dict, matrices: dict, config: ExpertsConfig, mesh: Mesh, step: bool
):
    """Runs the routed experts over the mesh: x [B, S, D], counted [B, S], routes [B, S, k] or None
    -> ([B, S, D], statistics)."""
    platform = mesh.devices.flat[0].platform
    if mesh.size == 1:
        return _routed_here(x, counted, routes, router, matrices, config, platform)
    _check_mesh(config, mesh)
    # One row, or one token of each row (decoding), may not divide: every shard then has them all.
    fsdp = mesh.shape["fsdp"]
    embed_axis = "fsdp" if step and fsdp > 1 and x.shape[-1] % fsdp == 0 else None
    axes = tuple(axis for axis in BATCH_AXES if axis != embed_axis)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    rows = axes if x.shape[0] % shards == 0 else ()
    columns = ("context",) if x.shape[1] % mesh.shape["context"] == 0 else ()
    tokens, parts = P(rows or None, columns or None), P(rows or None, columns or None, embed_axis)
    specs = spread(embed_axis)
    body = functools.partial(
        _routed_shard,
        config=config,
        platform=platform,
        rows=rows,
        columns=columns,
        embed_axis=embed_axis,
    )
    y, (stats, ids) = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(tokens, parts, tokens, tokens, P(), {name: specs[name] for name in matrices}),
        out_specs=(parts, (P(), tokens)),
    )(x, x, counted, routes, router, matrices)
    return y, {**stats, "ids": ids}


def _check_mesh(config: ExpertsConfig, mesh: Mesh) -> None:
    for name, axis in (("count", "expert"), ("mlp", "tensor")):
        size = getattr(config, name)
        if size % mesh.shape[axis]:
            raise InputError(
                f"experts.{name} of {size} does not divide by mesh.{axis}={mesh.shape[axis]}",
                fix=f"choose mesh.{axis} from the divisors of {size}",
            )


def _routed_shard(
    x, x_part, counted, routes, router, matrices, *, config, platform, rows, columns, embed_axis
):
    """Runs one device's part: x [B', S', D] of its own rows and tokens, its own experts. `x_part`
    is x, or its part of D over the axis `embed_axis`."""
    logits, ids, weights = _choose(_flat(x), _flat(routes), router, config)
    local_ids = ids.reshape(*x.shape[:2], -1)
    token_axes = (*rows, *columns)
    stats = _load(logits, ids, counted.reshape(-1), config)
    stats = jax.lax.psum(stats, token_axes) if token_axes else stats
    inputs = (x_part.reshape(-1, x_part.shape[-1]), ids, weights)
    if rows:
        inputs = jax.lax.all_gather(inputs, "expert", axis=0, tiled=True)
    # Everything that meets in the grouped product varies over the same axes (the transpose of
    # pcast is the sum of the gradients over them).
    partial_sums, of_part = {"expert", "tensor"}, {embed_axis} - {None}
    flat, *choice = _vary(inputs, partial_sums - set(token_axes))
    inputs = (flat, *_vary(choice, of_part))
    if "down_bias" in matrices:  # added once, though every tensor shard holds it
        is_first = jax.lax.axis_index("tensor") == 0
        bias = _vary(matrices["down_bias"], {"tensor"})
        matrices = matrices | {"down_bias": jnp.where(is_first, bias, 0)}
    lacking = not_split(embed_axis)
    matrices = {k: _vary(v, lacking.get(k, set())) for k, v in matrices.items()}
    matrices = _vary(matrices, set(token_axes) - partial_sums)
    start = jax.lax.axis_index("expert") * matrices["gate"].shape[0]

    def total(y):
        return _vary(jax.lax.psum(y, embed_axis), of_part) if embed_axis else y

    y = _run_experts(*inputs, matrices, start, config, platform, total)
    if rows:
        y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
        y = jax.lax.psum(y, "tensor")
    else:
        y = jax.lax.psum(y, ("expert", "tensor"))
    return y.reshape(x_part.shape), (stats, local_ids)


def _vary(tree, axes: set[str]):
    """Declares arrays that are equal along mesh `axes` to differ along them."""
    if not axes:
        return tree
    return jax.tree.map(lambda a: jax.lax.pcast(a, tuple(sorted(axes)), to="varying"), tree)
