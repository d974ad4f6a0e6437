"""The load of experts in every update: the load-balance loss, and DeepSeek-V3's bias update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.learn.objective import AuxiliaryObjective
from rljax.metric import Metric
from rljax.models.experts import load_metrics
from rljax.models.model import Model
from rljax.models.names import block_layers
from rljax.models.trees import flattened, nested

METRICS = {
    "router_aux_loss": Metric(
        "load-balance loss of the update, before its coefficient",
        "",
        "near the experts of a token, which is even",
    )
}


def router_aux_loss(stats: dict) -> jax.Array:
    """X sum_x f_x P_x over all layers and tokens together, with f_x the choices of expert x per
    token (their sum is k) and P_x its mean probability: [], transformers' load_balancing_loss_func.
    It is k where the load is even. Its gradient goes through P.

    `stats` are those of `Experts`, of L layers, summed over all tokens of an optimizer step: the
    load evens out over the step, not within every microbatch (arXiv 2501.11873).
    """

    def total(name):
        return jnp.sum(stats[name].reshape(-1, stats["tokens"].shape[-1]), axis=0)

    rows = jnp.maximum(jnp.sum(stats["kept"]), 1.0)
    share = jax.lax.stop_gradient(total("tokens")) / rows
    return stats["tokens"].shape[-1] * jnp.sum(share * total("probabilities") / rows)


def moved_correction(correction: jax.Array, tokens: jax.Array, speed: float) -> jax.Array:
    """Returns the biases [..., X] after a step whose choices fell `tokens` [..., X] times on each
    expert: b + speed sign(mean load - load) (DeepSeek-V3, arXiv 2412.19437; 2408.15664)."""
    deficit = jnp.mean(tokens, axis=-1, keepdims=True) - tokens
    return correction + speed * jnp.sign(deficit).astype(correction.dtype)


def balanced(model: Model, read: Callable) -> dict:
    """Returns the fields of an Objective that say what it reads of the model:
    outputs = read(params, microbatch, hidden), and, where the config balances the load of
    experts, that load and the terms made of it. If both numbers of the config are 0, the
    program does not compute the load."""
    config = model.config
    coef, speed = config.router_aux_loss_coef, config.router_bias_update_speed
    if not coef and not speed:
        return {"model": lambda params, microbatch: read(params, microbatch, None)}

    def counted(params, microbatch):
        hidden, load = model.hidden_and_load(params, microbatch)
        return read(params, microbatch, hidden), load

    def metrics(load):
        return {**load_metrics(load), "router_aux_loss": router_aux_loss(load)}

    auxiliary = AuxiliaryObjective(
        loss=(lambda load: coef * router_aux_loss(load)) if coef else None,
        metrics=metrics,
        after=(lambda old, new, load: with_moved_biases(model, old, new, load)) if speed else None,
    )
    return {"model": counted, "sums": True, "auxiliary": auxiliary}


def with_moved_biases(model: Model, old: dict, new: dict, load: dict) -> dict:
    """Returns the `new` parameters, with the `old` correction bias of every expert moved by the
    config's speed towards an even load. `load` is that of the layers with experts, in their order,
    [layers, X] each."""
    config, old_weights, weights = model.config, flattened(old), flattened(new)
    with_experts = [layer for layer, kind in enumerate(config.kinds) if kind.experts]
    for block, layers in block_layers(config).items():
        path = ("layers", block, "mlp", "correction")
        if path in weights:
            rows = jnp.asarray([with_experts.index(layer) for layer in layers])
            tokens = jnp.take(load["tokens"], rows, axis=0)
            weights[path] = moved_correction(
                old_weights[path], tokens, config.router_bias_update_speed
            )
    return nested(weights)
