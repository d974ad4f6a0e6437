"""Optimizers, named in a config: (learning_rate, ..., options) -> optax.GradientTransformation.

`learning_rate` is a function of the step. A parameter without a default that is called as a field
of OptimizerConfig (weight_decay, beta1, beta2, eps) is handed that field; parameters with a default
are options of the text. Weight decay touches matrices alone, and is multiplied by the learning
rate. Gradients come clipped (rljax.learn.optimizers).
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from rljax.contracts import contract
from rljax.errors import InputError
from rljax.learn.matrices import decay_matrices, is_hidden, per_matrix

Moments = Literal["", "float32", "bfloat16"]  # dtype of first moments; "" = the weights'


def _is_traced(value) -> bool:
    """Returns whether a number is an input of a program, which was checked where it was written."""
    return isinstance(value, jax.core.Tracer)


def _fractions(**options: float) -> None:
    for name, value in options.items():
        if not _is_traced(value) and not 0 <= value < 1:
            raise InputError(
                f"option {name!r}",
                value=value,
                rule=f"0 <= {name} < 1",
                fix=f"{name}=0.9, or another number of this range",
            )


def _positive(**options: float) -> None:
    for name, value in options.items():
        if not _is_traced(value) and not value > 0:
            raise InputError(f"option {name!r}", value=value, fix=f"set {name} to a number above 0")


def _descent(learning_rate: optax.Schedule, weight_decay: float, *scaling):
    """Returns an update of the scaled gradient, weight decay, and a step against their sum."""
    return optax.chain(
        *scaling, decay_matrices(weight_decay), optax.scale_by_learning_rate(learning_rate)
    )


@contract(safe=True, steps_of_one_size=True)
def adamw(
    learning_rate: optax.Schedule,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    nesterov: bool = False,
    mu_dtype: Moments = "",
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101).

    Raises InputError unless 0 <= beta1, beta2 < 1 and eps > 0.
    """
    _fractions(beta1=beta1, beta2=beta2)
    _positive(eps=eps)
    scale = optax.scale_by_adam(beta1, beta2, eps, mu_dtype=mu_dtype or None, nesterov=nesterov)
    return _descent(learning_rate, weight_decay, scale)


@contract(safe=True)
def adafactor(
    learning_rate: optax.Schedule,
    weight_decay: float,
    *,
    decay_rate: float = 0.8,
    min_dim_size_to_factor: int = 128,
    clipping_threshold: float = 1.0,
    multiply_by_parameter_scale: bool = True,
    momentum: float = 0.0,
) -> optax.GradientTransformation:
    """Adafactor (arXiv 1804.04235): second moments of a matrix as one number per row and column.

    Updates are clipped to a root mean square of clipping_threshold (0 = not), multiplied by that of
    the weights if multiply_by_parameter_scale, which makes lr a relative step; momentum 0 = none.

    Raises InputError unless decay_rate > 0 and 0 <= momentum < 1.
    """
    _positive(decay_rate=decay_rate)
    _fractions(momentum=momentum)
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor
        )
    ]
    if clipping_threshold:
        parts.append(optax.clip_by_block_rms(clipping_threshold))
    if multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    scaling = [per_matrix(optax.chain(*parts))]
    if momentum:
        scaling.append(optax.ema(momentum, debias=False))
    return _descent(learning_rate, weight_decay, *scaling)


@contract(safe=True, steps_of_one_size=True)
def lion(
    learning_rate: optax.Schedule,
    weight_decay: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    mu_dtype: Moments = "",
) -> optax.GradientTransformation:
    """Lion (arXiv 2302.06675): the sign of a momentum. Takes a lower lr than AdamW, 3 to 10 times,
    and as much more weight decay.

    Raises InputError unless 0 <= beta1, beta2 < 1.
    """
    _fractions(beta1=beta1, beta2=beta2)
    scale = optax.scale_by_lion(beta1, beta2, mu_dtype=mu_dtype or None)
    return _descent(learning_rate, weight_decay, scale)


@contract(safe=True)
def sgd(
    learning_rate: optax.Schedule,
    weight_decay: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Stochastic gradient descent; momentum 0 = none, and no state.

    Raises InputError unless 0 <= momentum < 1.
    """
    _fractions(momentum=momentum)
    scaling = [optax.trace(momentum, nesterov)] if momentum else []
    return _descent(learning_rate, weight_decay, *scaling)


@contract(safe=True, steps_of_one_size=True)
def muon(
    learning_rate: optax.Schedule,
    weight_decay: float,
    *,
    beta: float = 0.95,
    eps: float = 1e-8,
    ns_steps: int = 5,
    nesterov: bool = True,
    consistent_rms: float = 0.2,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    mu_dtype: Moments = "",
) -> optax.GradientTransformation:
    """Muon: the momentum of each hidden matrix of each layer and expert, orthogonalised by ns_steps
    Newton-Schulz iterations; Adam for embeddings, heads, norms and biases.

    consistent_rms 0.2 gives the updates the root mean square of AdamW's (arXiv 2502.16982), so that
    one lr fits both; 0 scales them by sqrt(max(1, outside / inside)) as its author does.

    Raises InputError unless every beta is in [0, 1), and eps and ns_steps are above 0.
    """
    _fractions(beta=beta, adam_beta1=adam_beta1, adam_beta2=adam_beta2)
    _positive(eps=eps, ns_steps=ns_steps)

    def resize(update):
        in_size, out_size = update.shape
        if consistent_rms:
            return update * consistent_rms * jnp.sqrt(max(in_size, out_size))
        return update * jnp.sqrt(max(1.0, out_size / in_size))

    dtype = mu_dtype or None
    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=ns_steps, beta=beta, eps=eps, mu_dtype=dtype, nesterov=nesterov
    )
    resized = optax.stateless(lambda updates, _: jax.tree.map(resize, updates))
    adam = optax.scale_by_adam(adam_beta1, adam_beta2, eps, mu_dtype=dtype, nesterov=nesterov)

    def labels(params):
        def label(path, _):
            return "hidden" if is_hidden(tuple(entry.key for entry in path)) else "rest"

        return jax.tree_util.tree_map_with_path(label, params)

    rules = {"hidden": per_matrix(optax.chain(orthogonal, resized)), "rest": adam}
    return _descent(learning_rate, weight_decay, optax.partition(rules, labels))
