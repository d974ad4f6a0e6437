"""The loss on held-out rows of a file, and the reference's log-probs that are stored on disk."""

import dataclasses
import functools
import hashlib
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax import heartbeat, hosts
from rljax.arrays import fetch, place
from rljax.data.offline.batches import batch_arrays, item_images
from rljax.errors import InputError
from rljax.evaluation.reward_models import evaluate_pairs
from rljax.files import read_arrays
from rljax.models.trees import flattened
from rljax.roles import Reference
from rljax.roles.placed import run_dataflow
from rljax.runs.folder import try_to_write
from rljax.setup import Setup
from rljax.training.sources import offline_rows


def held_out_step(setup: Setup, roles: dict, key: jax.Array) -> tuple[dict, dict]:
    """Runs the dataflow on all held-out items at once, with a scalar random key and without
    learning; returns (its roles, {eval/...: value})."""
    records, steps, rows_per_example = (
        setup.data.held_out,
        setup.algorithm.steps,
        setup.rows_per_example,
    )
    part = steps.microbatch_rows
    # Rows of an example that the loss is taken of.
    loss_rows = 1 if setup.main.data == "unpaired" else rows_per_example
    rows = math.ceil(len(records) * loss_rows / part) * part
    steps = dataclasses.replace(steps, rows=rows, learn=False)
    batch = place(
        offline_rows(setup, records, rows * rows_per_example // loss_rows), setup.model.mesh
    )
    pairs = {}
    if setup.main.data == "pairs" and "reward_model" in roles:  # before they are donated
        pairs = evaluate_pairs(roles["reward_model"], batch, part)
    cfg = setup.algorithm.replace(steps=steps)
    new_roles, metrics = run_dataflow(setup.dataflow, batch, key, cfg, roles)
    metrics = fetch({**metrics, **pairs})
    return new_roles, {f"eval/{name}": float(value) for name, value in metrics.items()}


def store_reference_logprobs(setup: Setup, params: dict, folder: Path) -> str:
    """Computes the log-probs, in nats, of every row, held-out ones too, under the weights `params`
    that the run starts from, and writes them to `folder`; returns the name of the file.

    The name is the digest of rows and weights, so that any run uses again a file that is there.
    """
    reference = Reference(params, setup.model, setup.config.sampler.temperature)
    # All that changes the log-probs: how rows are laid out, and the model.
    identity = (setup.row_tokens, setup.rows_per_example, reference.temperature, setup.model.config)
    digest = hashlib.sha256(repr(identity).encode())
    records = _row_digests(setup)
    digest.update(records.tobytes())
    for path, leaf in sorted(flattened(params).items()):
        sums = tuple(f"{float(part):.6e}" for part in fetch(_sums(leaf)))
        digest.update(repr((path, leaf.shape, sums)).encode())
        heartbeat.beat()
    path = folder / f"{digest.hexdigest()[:32]}.npz"
    # Asked by the first host alone: a network disk may keep "no such file" for a minute.
    if not hosts.share(hosts.first() and path.exists()):
        if hosts.first():
            _make_folder(folder)  # before minutes of computing
        rows = _reference_logprobs(setup, reference, _records(setup))
        if hosts.first():
            unfinished = folder / f".{path.stem}-{os.getpid()}.npz"
            lengths = [len(row) for row in rows]
            arrays = dict(values=np.concatenate(rows), lengths=lengths, records=records)
            np.savez(unfinished, **arrays)
            os.replace(unfinished, path)
        hosts.wait("the reference's log-probs are stored")
    return path.name


def _row_digests(setup: Setup) -> np.ndarray:
    """Returns 8 bytes for each record of the data, which tell what its rows hold: [records]."""
    digests = []
    for record in _records(setup):
        arrays = batch_arrays(
            setup.main.data,
            [record["item"]],
            length=setup.row_tokens,
            rows_per_example=setup.rows_per_example,
        )
        digest = hashlib.sha256()
        for name in ("tokens", "segment_ids", "mask"):
            digest.update(arrays[name].tobytes())
        if images := item_images(record["item"]):
            digest.update(repr([(image.source, image.grid) for image in images]).encode())
        digests.append(np.frombuffer(digest.digest()[:8], np.uint64)[0])
        heartbeat.beat()
    return np.array(digests, np.uint64)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_to_write(folder)
    except OSError as error:
        raise InputError(
            "offline.reference_logprobs",
            value=str(folder),
            rule=f"a folder that can be written: {error.strerror or error}",
            fix="name another folder, or '' to compute them in the run",
        ) from None


def read_reference_logprobs(setup: Setup, path: Path) -> bool:
    """Gives every record of the data the stored log-probs of its rows, `ref_logprobs`, and returns
    True; False if those of the file are of other rows. Raises InputError for a file that cannot be
    read."""
    try:
        stored = read_arrays(path)
        rows = np.split(stored["values"], np.cumsum(stored["lengths"])[:-1])
        digests = stored.get("records")  # a run of an older version wrote none
    except (ValueError, KeyError, TypeError) as error:
        shared = "; offline.reference_logprobs is a folder that all hosts see"
        raise InputError(
            f"{path} cannot be read",
            rule=f"it holds the reference's log-probs of this run: {error}",
            fix="restore the file; or delete it and start a new run, which writes it again"
            + shared * (hosts.count() > 1),
        ) from None
    records, rows_per_example = _records(setup), setup.rows_per_example
    if len(rows) != len(records) * rows_per_example:
        return False
    if digests is not None and not np.array_equal(digests, _row_digests(setup)):
        return False
    for i, record in enumerate(records):
        record["ref_logprobs"] = rows[i * rows_per_example : (i + 1) * rows_per_example]
    return True


def _records(setup: Setup) -> list[dict]:
    """Returns the records of the training data, then the held-out ones."""
    return [record for source in setup.data.sources for record in source] + setup.data.held_out


@functools.partial(jax.jit, static_argnames="rows")
def _logprobs(role, batch, rows: int):
    return role.logprobs(batch, rows)


@jax.jit
def _sums(x: jax.Array):
    """Sums that tell one array of weights from another, on any mesh: plain, of squares, and
    weighted by the index along each axis."""
    x = x.astype(jnp.float32)
    indices = [jax.lax.broadcasted_iota(jnp.float32, x.shape, axis) for axis in range(x.ndim)]
    return jnp.sum(x), jnp.sum(x * x), *(jnp.sum(x * index) for index in indices)


def _reference_logprobs(setup: Setup, reference, records: list[dict]) -> list[np.ndarray]:
    """log pi_ref of every row of every record, in order, each as long as the row's tokens."""
    size, rows_per_example = setup.config.offline.examples_per_step, setup.rows_per_example
    part_rows = setup.algorithm.steps.microbatch_rows
    out = []
    for start in range(0, len(records), size):
        part = [{"item": record["item"]} for record in records[start : start + size]]
        batch = offline_rows(setup, part, size * rows_per_example)
        lengths = np.sum(batch.segment_ids > 0, axis=1)
        rows = fetch(_logprobs(reference, place(batch, setup.model.mesh), part_rows))
        out += [rows[k, : lengths[k]].copy() for k in range(len(part) * rows_per_example)]
        heartbeat.beat()
    return out
