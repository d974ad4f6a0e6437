"""Value losses: (values [B, S], batch, **options) -> (loss [B, S], metrics). They raise InputError
where the batch lacks the returns or, to clip, the values."""

import jax
import jax.numpy as jnp

from rljax.batch import Batch
from rljax.contracts import NotNegative, contract
from rljax.metric import Metric

METRICS = {
    "vf_clipfrac": Metric("values whose update is clipped", "share", "below 0.2"),
    "vpred": Metric(
        "value that the critic predicts, mean over tokens", "score", "near the returns"
    ),
}


@contract(safe=True, reads=lambda o: ("returns",) if o["clip"] is None else ("returns", "values"))
def squared_error(values: jax.Array, batch: Batch, *, clip: NotNegative | None = 0.5):
    """1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2); clip None = plain: [B, S].

    V_old = batch.values, R = batch.returns: PPO's value loss, arXiv 1707.06347.
    Metrics: vpred, and with a clip vf_clipfrac, the share of tokens where it was the larger one.
    """
    batch.require("returns", by="squared_error")
    returns = jax.lax.stop_gradient(batch.returns)
    error = jnp.where(batch.mask > 0, values - returns, 0.0) ** 2
    metrics = {"vpred": values}
    if clip is not None:
        batch.require("values", by="squared_error(clip)")
        old_values = jax.lax.stop_gradient(batch.values)
        # The sum old + clip(V - old) would not do: what rounding adds to a value inside would count
        # as clipped.
        bounded = jnp.clip(values, old_values - clip, old_values + clip)
        clipped_error = jnp.where(batch.mask > 0, bounded - returns, 0.0) ** 2
        metrics["vf_clipfrac"] = (clipped_error > error).astype(jnp.float32)
        error = jnp.maximum(error, clipped_error)
    return 0.5 * error, metrics
