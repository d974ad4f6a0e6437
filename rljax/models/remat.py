"""Rematerialisation: which values of a layer the backward pass keeps, and which it computes again.

Names a layer's input and the output of attention, and defines policies over these names.
benchmarks/memory.py measures what a policy saves.

From the most memory to the least: "none" keeps everything that is no cheap function of what it
keeps; "dots" the products of activations with weights and the output of attention; "attention" that
output and the layer's input; "full" the input; "offload" the input, in host memory.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from rljax.mesh import HOST_MEMORY

POLICIES = ("none", "dots", "attention", "full", "offload")
LAYER_INPUT, ATTENTION = "layer_input", "attention"
# Norms, rotations, gates, masks: one pass over numbers that are kept. To write their results down
# and read them back costs as much as to compute them again, and on CPU more: fresh pages of memory.
# A weight gathered over devices is one, too (rljax.models.layers): to keep it would be to hold all.
CHEAP = frozenset(
    """abs add and broadcast_in_dim concatenate convert_element_type copy div eq erf exp expm1 ge gt
    integer_pow iota le log log1p logistic lt max min mul ne neg not or pad pow reshape rsqrt
    select_n sharding_constraint sign slice split sqrt square squeeze stop_gradient sub tanh
    transpose""".split()
)


def layer_input(x: jax.Array) -> jax.Array:
    """Returns x [B, S, D], under the name by which a policy selects it."""
    return checkpoint_name(x, LAYER_INPUT)


def named_attention(out: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what the backward pass of attention reads, the output [..., F] and the log-sum-exp
    of its scores [...], under the name by which a policy selects them."""
    return checkpoint_name(out, ATTENTION), checkpoint_name(log_sum, ATTENTION)


def recomputed(layer: Callable, policy: str) -> Callable:
    """Returns the same function, whose backward pass keeps what `policy` selects and
    recomputes the rest."""
    policies = jax.checkpoint_policies
    if policy == "none":
        return jax.checkpoint(layer, policy=lambda prim, *_, **__: prim.name not in CHEAP)
    if policy == "full":
        return jax.checkpoint(layer)
    attention = policies.save_only_these_names(ATTENTION)
    if policy == "attention":
        return jax.checkpoint(layer, policy=attention)
    if policy == "dots":
        # A product with weights has no batch axes (rljax.models.layers.project); scores have.
        dots = policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(layer, policy=policies.save_from_both_policies(dots, attention))
    assert policy == "offload", policy
    to_host = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
    return jax.checkpoint(layer, policy=to_host)
