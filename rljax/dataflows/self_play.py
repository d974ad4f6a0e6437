"""Self-play: every seat of the environment is the policy, and a return is compared with the running
mean of its own seat (SPIRAL, arXiv 2506.24119)."""

import jax
import jax.numpy as jnp

from rljax.batch import first_of_sequence
from rljax.contracts import Share, contract
from rljax.dataflows.grpo import grpo
from rljax.errors import InputError
from rljax.metric import Metric
from rljax.roles import program

METRICS = {
    "seat_baseline/*": Metric(
        "running mean of the returns of seat {}, which is subtracted",
        "score",
        "of all seats of a zero-sum game together: near 0",
    )
}


@contract(safe=True, reads=("rewards", "scores", "group"), fills=("values",))
@program
def self_play(
    batch,
    key,
    cfg,
    *,
    actor,
    seat_baseline,
    reference=None,
    kl_controller=None,
    entropy_controller=None,
    decay: Share = 0.95,
):
    """`decay` is that of the running means, per step; 0 = the means of the previous step. An
    advantage that reads `values` takes them off: reinforce().

    Raises InputError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise InputError(
            "self_play(decay)",
            value=decay,
            rule="0 <= decay < 1",
            fix="set decay to a number of this range, such as 0.9",
        )
    seats = len(seat_baseline.state)
    seat = jnp.zeros((batch.rows,), jnp.int32) if batch.seat is None else batch.seat
    # The means of earlier steps only: a baseline that has seen the episode is biased.
    values = jnp.where(batch.mask > 0, seat_baseline.values[seat][:, None], 0.0)
    roles, metrics = grpo.page(
        batch.replace(values=values.astype(jnp.float32)),
        key,
        cfg,
        actor=actor,
        reference=reference,
        kl_controller=kl_controller,
        entropy_controller=entropy_controller,
    )
    counted = first_of_sequence(batch) & jnp.any(batch.mask > 0, axis=1)
    count = jax.ops.segment_sum(counted.astype(jnp.float32), seat, num_segments=seats)
    total = jax.ops.segment_sum(jnp.where(counted, batch.scores, 0.0), seat, num_segments=seats)
    means = total / jnp.maximum(count, 1)
    roles["seat_baseline"] = seat_baseline.update(means, count > 0, decay)
    metrics |= {f"seat_baseline/{i}": seat_baseline.values[i] for i in range(seats)}
    return roles, metrics
