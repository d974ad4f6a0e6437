"""The forward pass of whole rows through the layers: a scan over each stack, recomputed backwards.

Decoding unrolls the layers instead (rljax.models.model).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from rljax.models.decoder import Decoder, Pass
from rljax.models.layers import gather_weights
from rljax.models.multimodal import add_level
from rljax.models.remat import layer_input, recomputed


def scan_layers(decoder: Decoder, x: jax.Array, call: Pass, *, keep: str = ""):
    """x [B, S, D] through all layers. `keep`: what to return of each layer, in order: "" | "cache"
    (its keys and values) | "hidden" (x after it) | "stats" (of its experts)."""
    config, kept = decoder.config, {}
    for stack, members in zip(config.stacks(), decoder.members(), strict=True):
        graphs = [graph for graph, _ in members]

        def unit(x, layers, graphs=graphs, first=stack.first):
            weights, repeat = layers
            out = []
            for member, (graph, one) in enumerate(zip(graphs, weights, strict=True)):
                x, returned = _layer(graph, one, x, call, keep, config.remat)
                x = add_level(x, call, first + repeat * len(graphs) + member)
                out.append(returned)
            return x, out

        layers = [weights for _, weights in members], jnp.arange(stack.repeats)
        x, returned = jax.lax.scan(unit, x, layers)
        for member, of_member in enumerate(returned):
            for repeat, layer in enumerate(stack.layers_of(member)):
                if keep:
                    kept[layer] = jax.tree.map(lambda a, r=repeat: a[r], of_member)
    return x, [kept[layer] for layer in sorted(kept)]


def _layer(graph, weights, x, call: Pass, keep: str, remat: str):
    def run(x, weights):
        block = gather_weights(nnx.merge(graph, weights), call.mesh)
        x, cache, stats = block(layer_input(x), call)
        return x, {"": (), "cache": cache, "hidden": x, "stats": stats}[keep]

    if keep in ("", "stats"):  # else nothing is differentiated
        run = recomputed(run, remat)
    return run(x, weights)
