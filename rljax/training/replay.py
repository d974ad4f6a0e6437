"""Replays the learning of a kept batch on this host, to find what made it not finite."""

import dataclasses
from pathlib import Path

import jax

from rljax import setup as build
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.config import MeshConfig, from_dict
from rljax.config.trust import refuse_own_code, untrained, vouched
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.keys import root_key, stream
from rljax.plan.chips import local_devices
from rljax.plan.memory import fewest_microbatches
from rljax.report.head import check_is_run
from rljax.report.starts import run_date
from rljax.runs.mirror import local_copy
from rljax.runs.store import require_run_folder
from rljax.training import bad_batch
from rljax.training.nonfinite import INF, NAN, Origin, trace
from rljax.training.progress import Progress
from rljax.training.run import restored_roles


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of a replay: for each trained role the operation that made the first number that
    is not finite; {} if the step was finite this time."""

    step: int
    phase: str
    weights: str  # of which step, in words
    origins: dict[str, Origin]

    def lines(self) -> list[str]:
        """Returns a description for people."""
        out = [f"step {self.step}, phase {self.phase}, on the weights of {self.weights}"]
        for role, origin in self.origins.items():
            out += [f"{role}: " + origin.lines()[0], *origin.lines()[1:]]
        if not self.origins:
            out.append(
                "the step is finite here: what made it not finite was not in this batch and these "
                "weights alone"
            )
        return out


def replay(
    run_dir: str | Path, step: int | None = None, *, trust_code: bool = False, devices=None
) -> Replay:
    """Computes the learning of step `step` (None: the first that is kept) of a run again, operation
    by operation on `devices` (default: those of this host).

    Raises InputError for a step whose batch was not kept. A run folder is data: if its config names
    functions outside of rljax it is refused, unless trust_code says that they may run.
    """
    require_run_folder(run_dir)
    with local_copy(run_dir, inside=(bad_batch.FOLDER,)) as folder:
        check_is_run(folder, run_dir)
        return _replay(folder, str(run_dir), step, trust_code, devices)


def _replay(folder: Path, run_dir: str, step: int | None, trust_code: bool, devices) -> Replay:
    """Replays a step of a local folder; its checkpoints are in `run_dir`."""
    path = folder / "config.json"
    config = from_dict(read_json_object(path), str(path))
    trusted = trust_code or vouched(config, f"{run_dir}/config.json", folder)
    config = untrained(config)
    if not trusted:
        refuse_own_code(config, str(path))
    steps = bad_batch.kept_steps(folder)
    if step is None and not steps:
        raise InputError(
            f"{run_dir} has kept no batch",
            rule="the first batch whose loss or gradient is not finite is kept",
            fix="a run that skipped no step needs no replay",
        )
    step = steps[0] if step is None else step
    config = dataclasses.replace(config, mesh=MeshConfig(), placement=())
    chip = local_devices()[1]
    devices = jax.local_devices() if devices is None else devices
    setup = build.build(config, devices, run_date(folder))
    setup = fewest_microbatches(setup, chip and chip.hbm_bytes)
    batch = bad_batch.read(folder, step, setup.model.mesh)
    checkpoints, saved = _newest(run_dir, step)
    progress = Progress.from_dict(checkpoints.read_state(saved)["progress"])
    phase = setup.phase(progress.phase)
    roles = restored_roles(setup, phase, checkpoints, saved, folder / "model.json")
    roles = {name: role for name, role in roles.items() if name in phase.dataflow.parameters}
    # A checkpoint of the step itself has counted it already.
    steps_taken = progress.taken.get(phase.name, 0) - (saved == step)
    key = stream(root_key(config.seed), f"learn {phase.name}", steps_taken)

    def learn(batch, key, roles):
        return phase.dataflow(batch, key, phase.algorithm, **roles)

    (_, _), (marks, _) = trace(learn, batch, key, roles, names=("batch", "key", "roles"))
    weights = f"step {saved}" + (", as it left them" if saved == step else "")
    return Replay(step, phase.label, weights, _origins(marks))


def _newest(run_dir: str, step: int) -> tuple[Checkpoints, int]:
    """The checkpoint whose weights are nearest to those of the step: its own, else the newest
    before it, else the first there is."""
    batch_checkpoints = Checkpoints(f"{run_dir}/{bad_batch.FOLDER}")
    if step in batch_checkpoints.steps() and not batch_checkpoints.damage(step):
        return batch_checkpoints, step
    checkpoints = Checkpoints(f"{run_dir}/checkpoints")
    undamaged = [saved for saved in checkpoints.steps() if not checkpoints.damage(saved)]
    if not undamaged:
        raise InputError(
            f"{run_dir} has no whole checkpoint", fix="replay it where its checkpoints are"
        )
    return checkpoints, max((s for s in undamaged if s <= step), default=undamaged[0])


def _origins(roles: dict) -> dict[str, Origin]:
    """Returns, by role, the origins of the marks in the new roles' counters of skipped steps."""
    origins = {}
    for name, role in roles.items():
        marks = role.state.skipped if hasattr(role, "state") else {}
        candidates = [marks[kind] for kind in (NAN, INF) if kind in marks]
        if candidates:
            origins[name] = min(candidates, key=lambda origin: origin.order)
    return origins
