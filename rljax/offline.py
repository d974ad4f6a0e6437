"""Steps of dataflows that learn from a file: items to a batch, and the loss on held-out items.

What lives here: what rljax.run does otherwise for them than for online ones. What does not: the
formats (rljax.data), the losses, the order of things (rljax.train).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch
from rljax.build import Setup
from rljax.data.row_batches import batch_arrays, mismatched_arrays
from rljax.mesh import shard_rows
from rljax.reward_evaluation import evaluate_pairs


def offline_batch(setup: Setup, records: list[dict], rows: int = 0):
    """The batch that the dataflow is called with: of its kind of data, on the mesh, with the stored
    log-probs of the reference where the records have them. Filled up with empty rows to `rows`.

    labelled: (batch, the same prompts with each other's completions).
    """
    kind, length = setup.data.kind, setup.row_tokens
    items, together = [record["item"] for record in records], setup.rows_per_example
    arrays = batch_arrays(kind, items, length=length, rows_per_example=together)
    if records and "ref_logprobs" in records[0]:
        stored = [row for record in records for row in record["ref_logprobs"]]
        arrays["ref_logprobs"] = _padded(stored, length)

    def place(arrays):
        return shard_rows(Batch(**_filled(arrays, rows)), setup.model.mesh)

    if kind == "labelled":
        return place(arrays), place(mismatched_arrays(items, length=length))
    return place(arrays)


def _padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    out = np.zeros((len(rows), length), np.float32)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def _filled(arrays: dict, rows: int) -> dict:
    """Empty rows (segment 0, mask 0) behind the others."""
    out = {}
    for name, x in arrays.items():
        more = max(rows - len(x), 0)
        out[name] = np.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1))
    return out


def held_out_step(setup: Setup, roles: dict, key: jax.Array) -> tuple[dict, dict]:
    """The dataflow on all held-out items at once, learning nothing -> (its roles, {eval/...})."""
    records = [{"item": item} for item in setup.data.held_out]
    steps, together = setup.recipe.steps, setup.rows_per_example
    part = steps.microbatch_rows
    rows = math.ceil(len(records) * together / part) * part
    recipe = setup.recipe.replace(steps=dataclasses.replace(steps, rows=rows, learn=False))
    batch = offline_batch(setup, records, rows)
    found = {}
    if setup.data.kind == "pairs" and "reward_model" in roles:  # before they are donated
        found = evaluate_pairs(roles["reward_model"], batch, part)
    new, metrics = setup.dataflow(batch, key, recipe, **roles)
    return new, {f"eval/{name}": float(value) for name, value in {**metrics, **found}.items()}


def reference_logprobs(setup: Setup, reference, records: list[dict]) -> list[list[np.ndarray]]:
    """log pi_ref of every row of every record, each as long as the row's tokens."""
    size, together = setup.config.offline.examples_per_step, setup.rows_per_example
    compute = jax.jit(lambda role, batch: role.logprobs(batch, setup.recipe.steps.microbatch_rows))
    out = []
    for start in range(0, len(records), size):
        part = [{"item": record["item"]} for record in records[start : start + size]]
        batch = offline_batch(setup, part, size * together)
        lengths = np.asarray(jnp.sum(batch.segment_ids > 0, axis=1))
        rows = np.asarray(compute(reference, batch))
        for i in range(len(part)):
            of_one = range(i * together, (i + 1) * together)
            out.append([rows[k, : lengths[k]].copy() for k in of_one])
    return out
