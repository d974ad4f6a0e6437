"""The forward pass of whole rows through the layers: a scan over each stack, recomputed backwards.

Decoding unrolls the layers instead (rljax.models.model).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from rljax.models.config import ModelConfig
from rljax.models.decoder import Decoder, Pass
from rljax.models.layers import gather_weights
from rljax.models.multimodal import add_level
from rljax.models.remat import layer_input, recomputed


def scan_layers(decoder: Decoder, x: jax.Array, call: Pass, *, keep: str = "", routes=None):
    """Runs x [B, S, D] through all layers. `keep`: what to return of each layer, in order: ""
    | "cache" (its keys and values, and statistics of its experts) | "hidden" (x after it) |
    "stats" (of its experts). `routes` [B, S, E, k]: where the tokens go in each of the E
    layers with experts."""
    config, by_layer = decoder.config, {}
    of_layer = routes_by_layer(config, routes)
    for stack, members in zip(config.stacks(), decoder.members(), strict=True):
        graphs = [graph for graph, _ in members]

        def unit(x, layers, graphs=graphs, first=stack.first):
            weights, repeat, routes = layers
            outputs = []
            for member, (graph, layer_weights) in enumerate(zip(graphs, weights, strict=True)):
                x, returned = _layer(
                    graph, layer_weights, x, call, keep, config.remat, routes[member]
                )
                x = add_level(x, call, first + repeat * len(graphs) + member)
                outputs.append(returned)
            return x, outputs

        member_routes = [[of_layer.get(i) for i in stack.layers_of(m)] for m in range(len(members))]
        stacked = [
            jnp.stack(layer_routes) if layer_routes[0] is not None else None
            for layer_routes in member_routes
        ]
        layers = [weights for _, weights in members], jnp.arange(stack.repeats), stacked
        x, returned = jax.lax.scan(unit, x, layers)
        for member, of_member in enumerate(returned):
            for repeat, layer in enumerate(stack.layers_of(member)):
                if keep:
                    by_layer[layer] = jax.tree.map(lambda a, r=repeat: a[r], of_member)
    return x, [by_layer[layer] for layer in sorted(by_layer)]


def routes_by_layer(config: ModelConfig, routes: jax.Array | None) -> dict[int, jax.Array]:
    """Returns {layer: its [B, S, k]} of routes [B, S, E, k] of the E layers with experts, in their
    order; {} without any."""
    if routes is None:
        return {}
    layers = [layer for layer, kind in enumerate(config.kinds) if kind.experts]
    return {layer: routes[:, :, i] for i, layer in enumerate(layers)}


def routes_shape(config: ModelConfig) -> tuple[int, int, jnp.dtype]:
    """Returns (layers with experts, experts of a token, the dtype of as few bytes as
    hold their ids)."""
    layers, count = sum(kind.experts for kind in config.kinds), config.experts.count
    dtype = jnp.int8 if count <= 2**7 else jnp.int16 if count <= 2**15 else jnp.int32
    return layers, config.experts.per_token, jnp.dtype(dtype)


def routes_of(config: ModelConfig, stats: list[dict]) -> jax.Array | None:
    """Returns the routes [B, S, E, k] in the statistics of all layers, in order; None
    without experts."""
    ids = [layer_stats["ids"] for layer_stats in stats if layer_stats]
    if not ids:
        return None
    return jnp.stack(ids, axis=2).astype(routes_shape(config)[2])


def _layer(graph, weights, x, call: Pass, keep: str, remat: str, routes):
    def run(x, weights):
        block = gather_weights(nnx.merge(graph, weights), call.mesh)
        x, cache, stats = block(layer_input(x), call, routes=routes)
        return x, {"": (), "cache": (cache, stats), "hidden": x, "stats": stats}[keep]

    if keep in ("", "stats"):  # else nothing is differentiated
        run = recomputed(run, remat)
    return run(x, weights)
