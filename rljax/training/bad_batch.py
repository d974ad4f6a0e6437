"""The first batch whose loss or gradient was not finite. It is kept in the run folder for `rljax
replay`, with the roles as its step left them (a skipped optimizer step changes no weight).

RUN_DIR/bad/STEP.npz has the fields of the Batch, RUN_DIR/bad/STEP/ is a checkpoint.
"""

import dataclasses
import logging
from pathlib import Path

import jax
import numpy as np

from rljax import hosts
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.errors import InputError
from rljax.files import is_whole_number, read_arrays
from rljax.runs.folder import disk_fault
from rljax.training.progress import Progress
from rljax.training.run_folder import RunFolder

LOG = logging.getLogger("rljax")
FOLDER = "bad"
_SKIPPED = "skipped_steps"  # the end of its metric's name, for every trained role


def is_bad(metrics: dict) -> bool:
    """Returns whether the metrics of a step count an optimizer step that was not finite."""
    return any(value > 0 for name, value in metrics.items() if name.endswith(_SKIPPED))


def of_taken_steps(metrics: dict) -> dict:
    """Returns the metrics of a step with the loss and the gradient norm as means over the optimizer
    steps that were taken; NaN if all of them were skipped. A skipped one counts as 0 in the
    program, so that the sums over steps stay finite."""
    out = dict(metrics)
    for name in [name for name in metrics if name.endswith(_SKIPPED)]:
        prefix, skipped = name.removesuffix(_SKIPPED), float(metrics[name])
        total = float(metrics.get(f"{prefix}optimizer_steps", skipped))
        scale = total / (total - skipped) if total > skipped else np.nan
        for part in ("loss", "vf_loss", "grad_norm", "perplexity") if skipped else ():
            if (metric := f"{prefix}{part}") in out:
                out[metric] = out[metric] * scale
    return out


def keep(run: RunFolder, batch: Batch, progress: Progress, arrays: dict) -> None:
    """Writes the batch of the step before `progress`, and what a checkpoint keeps of the roles
    after it. A full disk does not end a run that goes on: it is a warning."""
    step, folder, fault = progress.step, run.path / FOLDER, ""
    fields = {k: v for k, v in vars(fetch(batch)).items() if v is not None}
    checkpoints = Checkpoints(run.at(FOLDER), keep=1)
    try:
        if hosts.first():
            folder.mkdir(exist_ok=True)
            checkpoints.storage.prepare()
            np.savez_compressed(path_of(folder, step), **fields)
            checkpoints.storage.check_room(
                sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
            )
    except (InputError, OSError) as error:
        fault = disk_fault(error) or str(error)
    if not (fault := hosts.share(fault)):  # with a fault no host begins to save
        try:
            checkpoints.save(step, arrays, {"progress": dataclasses.asdict(progress)})
        except InputError as error:
            fault = str(error)
    if hosts.first():
        problem = f"its batch is not kept whole: {fault}" if fault else ""
        advice = problem or f"`rljax replay {run} --step={step}` names the operation that began it"
        cause = "its loss or gradient was not finite, and changed no weight"
        LOG.warning("step %d: %s; %s", step, cause, advice)


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of a kept batch."""
    return folder / f"{step:08d}.npz"


def kept_steps(run_dir: Path) -> list[int]:
    """Returns the steps whose batch a run folder has kept, in ascending order."""
    files = (run_dir / FOLDER).glob("[0-9]*.npz")
    return sorted(int(file.stem) for file in files if is_whole_number(file.stem))


def read(run_dir: Path, step: int, mesh) -> Batch:
    """Reads the batch of a step onto the mesh. Raises InputError if it was not kept, or its file is
    not whole."""
    path = path_of(run_dir / FOLDER, step)
    names = {field.name for field in dataclasses.fields(Batch)}
    if not path.exists():
        steps = kept_steps(run_dir)
        raise InputError(
            f"{run_dir} has kept no batch of step {step}",
            rule="the first batch whose loss or gradient is not finite is kept",
            fix=f"--step={steps[0]}" if steps else "a run that skipped no step needs no replay",
        )
    try:
        fields = read_arrays(path)
        if strange := sorted(fields.keys() - names):
            raise ValueError(f"a Batch has no {', '.join(strange)}")
        return place(Batch(**fields), mesh)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read as a batch",
            rule=f"{type(error).__name__}: {error}",
            fix="copy bad/ of the run folder again, or replay another step",
        ) from None
