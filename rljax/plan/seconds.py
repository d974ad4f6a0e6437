"""Seconds of the parts of a run, for rljax.plan.simulate: counted for a chip, or measured."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljax.chips import Chip
from rljax.errors import InputError
from rljax.plan.flops import work
from rljax.plan.programs import learning_call
from rljax.plan.simulate import Seconds
from rljax.report.run_folder import read_run
from rljax.sampler.layout_cost import layout_cost
from rljax.sampler.memory import slots_bytes
from rljax.setup import Setup, abstract_roles
from rljax.setup.decode_layout import workload

_FIRST = 3  # steps of a run that compile
_DISPATCHES, _STEPS = "slots/dispatches", "slots/decode_steps"


def learning_passes(setup: Setup) -> float:
    """Returns the FLOPs of a step's learning on all devices together, every row at full length,
    counted in the traced program (rljax.plan.flops)."""
    call = learning_call(setup, setup.main, abstract_roles(setup), "learn")
    traced = call.function.trace(*call.arguments, **call.static)
    return work(traced.jaxpr, trips=call.trips, platform="tpu").passes


def counted(setup: Setup, chip: Chip, passes: float, lengths: Sequence[float]) -> Seconds:
    """Returns the least seconds that the chips of `setup` can take, by their published figures: a
    decode step by what it reads, multiplies and sends (rljax.sampler.layout_cost), learning by its
    products. Where rows are packed, learning counts only the tokens of responses of `lengths`."""
    lengths = np.asarray(lengths, float)
    # Tokens of a response, while it decodes.
    mean_tokens = np.square(lengths).sum() / (2 * lengths.sum())
    load = dataclasses.replace(workload(setup), response_tokens=max(1, round(2 * mean_tokens)))
    roles, decoding = abstract_roles(setup), setup.decoding
    cost = layout_cost(setup.model, roles["actor"].state.weights, decoding, load, chip)
    slots, context = load.slots(decoding), load.prompt_tokens + load.response_tokens // 2
    slot_bytes = slots_bytes(decoding.of(setup.model), slots, context, decoding.kv_dtype)
    idle_hbm_s = cost.hbm_s - slot_bytes / chip.hbm_bytes_per_s
    rest_s = sum(cost.ici_s.values()) + cost.latency_s
    share = 1.0
    if setup.algorithm.steps.packing is not None:
        share = (load.prompt_tokens + lengths.mean()) / setup.row_tokens
    return Seconds(
        step_s=cost.step_s + cost.latency_s,
        idle_s=max(idle_hbm_s, cost.compute_s) + rest_s,
        learn_s=share * passes / setup.model.mesh.size / chip.flops_per_s,
        read_s=cost.compute_s / slots * load.prompt_tokens,
        publish_s=cost.reshard_s,
    )


def measured(folder: str) -> Seconds:
    """Returns the seconds of a run with samples in flight on one mesh. The seconds of a dispatch
    and of a decode step are a least-squares fit over its steps, whatever the number of live slots;
    everything else is the median over its steps, so that no checkpoint is in it. Raises InputError
    if fewer than two of its steps can be used."""
    rows = [row for row in read_run(Path(folder)).rows if row.get(_STEPS, 0) > 0][_FIRST:]
    usable = [row for row in rows if row.get("time/generate_s", 0) > 0]
    if len(usable) < 2:
        raise InputError(
            f"--measured={folder}",
            value=f"{len(usable)} steps of use",
            rule=f"metrics.jsonl has {_DISPATCHES}, {_STEPS} and time/generate_s of more than "
            f"the first {_FIRST} steps",
            fix="the folder of a run with rollouts.max_staleness above 0",
        )

    def column(name):
        return np.array([row.get(name, 0.0) for row in usable])

    other_s = column("time/learn_s") + column("time/reward_s") + column("time/rest_s")
    counts = column(_DISPATCHES), column(_STEPS), column("time/generate_s")
    return fitted(*counts, [np.median(other_s)])


def fitted(dispatches, decode_steps, decode_s, learn_s) -> Seconds:
    """Returns the seconds per dispatch and per decode step that fit best to what steps [N] with
    these counts took."""
    counts = np.stack([dispatches, decode_steps], axis=1).astype(float)
    dispatch_s, step_s = np.linalg.lstsq(counts, np.asarray(decode_s, float), rcond=None)[0]
    if min(dispatch_s, step_s) < 0:  # the counts grow together: all is counted as decode steps
        dispatch_s, step_s = 0.0, float(np.sum(decode_s) / np.sum(decode_steps))
    return Seconds(
        float(step_s), float(step_s), float(np.mean(learn_s)), dispatch_s=float(dispatch_s)
    )
