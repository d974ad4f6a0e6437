"""Steps of dataflows that learn from a file: items to a batch, and the loss on held-out items.

What lives here: what rljax.train.run does otherwise for them than for online ones. What does not:
the formats (rljax.data), the losses, the order of things (rljax.train).
"""

import dataclasses
import hashlib
import math
import os
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import place
from rljax.batch import Batch
from rljax.data.offline.batches import batch_arrays, mismatched_arrays
from rljax.errors import InputError
from rljax.evaluation.reward_models import evaluate_pairs
from rljax.models.trees import flattened
from rljax.roles import Reference
from rljax.setup import Setup


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

    def on_mesh(arrays):
        return place(Batch(**_filled(arrays, rows)), setup.model.mesh)

    if kind == "labelled":
        return on_mesh(arrays), on_mesh(mismatched_arrays(items, length=length))
    return on_mesh(arrays)


def tokens_of(batch) -> int:
    """Real tokens of what the dataflow is called with, padding left out."""
    batches = batch if isinstance(batch, tuple) else (batch,)
    return sum(int(np.sum(np.asarray(x.segment_ids) > 0)) for x in batches)


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
    records = setup.data.held_out
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


def store_reference_logprobs(setup: Setup, params: dict, folder: Path) -> str:
    """Computes the log-probs of every row, held out ones too, under the weights `params` that the
    run starts from, and writes them to `folder`; the file's name.

    The name is the digest of rows and weights: what is there already is used again, by any run.
    """
    reference = Reference(params, setup.model, setup.config.sampler.temperature)
    # The rows as they are read, and all that changes what the model says of them.
    known = (setup.row_tokens, setup.rows_per_example, reference.temperature, setup.model.config)
    digest = hashlib.sha256(repr(known).encode())
    for record in _records(setup):
        arrays = batch_arrays(
            setup.data.kind, [record["item"]], length=setup.row_tokens,
            rows_per_example=setup.rows_per_example,
        )  # fmt: skip
        for name in ("tokens", "segment_ids", "mask"):
            digest.update(arrays[name].tobytes())
    for path, leaf in sorted(flattened(params).items()):
        digest.update(repr((path, leaf.shape, _checksums(leaf))).encode())
    path = folder / f"{digest.hexdigest()[:32]}.npz"
    if not path.exists():
        rows = _reference_logprobs(setup, reference, _records(setup))
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{path.stem}-{os.getpid()}.npz"
        np.savez(unfinished, values=np.concatenate(rows), lengths=[len(row) for row in rows])
        os.replace(unfinished, path)
    return path.name


def read_reference_logprobs(setup: Setup, path: Path) -> None:
    """Gives every record of the data the stored log-probs of its rows, `ref_logprobs`."""
    try:
        with np.load(path) as stored:
            rows = np.split(stored["values"], np.cumsum(stored["lengths"])[:-1])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} cannot be read",
            rule=f"it holds the reference's log-probs of this run: {error}",
            fix="restore the file; or delete it and start a new run, which writes it again",
        ) from None
    records, together = _records(setup), setup.rows_per_example
    if len(rows) != len(records) * together:
        raise InputError(
            f"{path} has {len(rows)} rows", rule=f"the data have {len(records) * together}",
            fix="start a new run",
        )  # fmt: skip
    for i, record in enumerate(records):
        record["ref_logprobs"] = rows[i * together : (i + 1) * together]


def _records(setup: Setup) -> list[dict]:
    """All of the data, then what is held out."""
    return [record for source in setup.data.sources for record in source] + setup.data.held_out


@jax.jit
def _sums(x: jax.Array):
    """Sums that tell one array of weights from another, on any mesh: plain, of squares, and
    weighted by the place along each axis."""
    x = x.astype(jnp.float32)
    places = [jax.lax.broadcasted_iota(jnp.float32, x.shape, axis) for axis in range(x.ndim)]
    return jnp.sum(x), jnp.sum(x * x), *(jnp.sum(x * place) for place in places)


def _checksums(x: jax.Array) -> tuple[str, ...]:
    return tuple(f"{float(part):.6e}" for part in _sums(x))


def _reference_logprobs(setup: Setup, reference, records: list[dict]) -> list[np.ndarray]:
    """log pi_ref of every row of every record, in order, each as long as the row's tokens."""
    size, together = setup.config.offline.examples_per_step, setup.rows_per_example
    compute = jax.jit(lambda role, batch: role.logprobs(batch, setup.recipe.steps.microbatch_rows))
    out = []
    for start in range(0, len(records), size):
        part = [{"item": record["item"]} for record in records[start : start + size]]
        batch = offline_batch(setup, part, size * together)
        lengths = np.asarray(jnp.sum(batch.segment_ids > 0, axis=1))
        rows = np.asarray(compute(reference, batch))
        out += [rows[k, : lengths[k]].copy() for k in range(len(part) * together)]
    return out
