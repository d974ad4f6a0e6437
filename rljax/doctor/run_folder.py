"""Checks whether a run could go on in its folder, and what is wrong with its checkpoints."""

from collections.abc import Iterator
from pathlib import Path

from rljax.config.flags import load_config_file
from rljax.doctor.finding import Finding, broken, fine, warning, why_not_written
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.gguf import is_gguf
from rljax.runs.folder import is_locked, is_of_a_model, make_folder
from rljax.runs.store import is_url


def run_folder(folder: str | Path) -> Iterator[Finding]:
    """Yields findings of a local run folder."""
    if is_url(str(folder)):
        problem = f"{folder} was not looked at: the doctor reads folders of a disk"
        fix = "copy the run here, or name a folder"
        return (yield warning("run_folder_of_a_url", problem, fix))
    folder = Path(folder)
    if folder.is_file() or is_of_a_model(folder / "config.json"):
        kind = "a model" if folder.is_dir() or is_gguf(folder) else "a file"
        fix = "name the folder of a run; `rljax chat` and `rljax evaluate` try a model"
        return (yield broken("no_run_folder", f"{folder} is {kind}, and no run folder", fix))
    reason = why_not_written(folder.absolute())
    if not reason and folder.exists():
        try:
            make_folder(folder)
        except InputError as error:
            reason = str(error).partition(". Fix:")[0]
    if reason:
        fix = "another run_dir, or free its disk and its permissions"
        problem = f"the run folder cannot be written: {reason}"
        return (yield broken("run_folder_unwritable", problem, fix))
    if not folder.exists() or not any(folder.iterdir()):
        return (yield fine("run_folder", f"{folder} holds no run; one can begin there"))
    if is_locked(folder):
        fix = "wait until it ends, end it, or choose another run_dir"
        yield broken("run_folder_in_use", f"another process writes into {folder}", fix)
    config = None
    if (folder / "config.json").exists():
        try:
            config = load_config_file(str(folder / "config.json"))
        except InputError as error:
            fix = "use the version of rljax that made the run, or mend config.json"
            yield broken("run_of_another_version", str(error).replace("\n", " "), fix)
    else:
        problem = f"{folder} has no config.json: no run was looked at"
        fix = "name the folder of a run, as `rljax train` prints it"
        yield warning("run_folder_without_run", problem, fix)
    if config is not None:
        from rljax.policies.saved import require_model

        try:
            require_model(config, folder / "config.json")
        except InputError as error:
            yield broken("model_of_the_run_gone", *error.parts)
    if (folder / "checkpoints").is_dir():
        yield from _checkpoints(folder / "checkpoints", config)
    yield from _without_checkpoint(folder)


def _without_checkpoint(folder: Path) -> Iterator[Finding]:
    """Yields a finding about a finished run of which no checkpoint is left."""
    from rljax.checkpoint.checkpoint import Checkpoints

    checkpoints = folder / "checkpoints"
    try:
        status = read_json_object(folder / "summary.json").get("status")
    except InputError:
        return
    if status == "finished" and not Checkpoints(checkpoints).steps():
        names = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else []
        others = f"; checkpoints/ has {', '.join(names[:3])}, and a step has 8 digits" * bool(names)
        problem = (
            f"{folder} is a finished run without a checkpoint: nothing goes on from it{others}"
        )
        fix = f"put the checkpoint back under its name, or use {folder / 'policy'} by itself"
        yield warning("run_without_checkpoint", problem, fix)


def _checkpoints(folder: Path, config) -> Iterator[Finding]:
    from rljax.checkpoint.checkpoint import Checkpoints, check_fingerprints
    from rljax.checkpoint.disk import DiskFolder
    from rljax.config import fingerprints

    for path in DiskFolder(folder).in_the_way():
        problem = f"{path} is no folder, and has the name of one of a checkpoint"
        yield broken("checkpoint_in_the_way", problem, "move it away")

    unfinished = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
    if unfinished and not is_locked(folder.parent):
        problem = f"a save of {folder / unfinished[0]} was killed half-way"
        fix = "nothing: the run removes it as it goes on"
        yield warning("checkpoint_half_written", problem, fix)
    checkpoints = Checkpoints(folder)
    undamaged = []
    for step in sorted(checkpoints.steps()):
        if damage := checkpoints.damage(step):
            outcome = f"goes on from step {undamaged[-1]}" if undamaged else "begins anew"
            fix = f"restore a copy, or rm -r {checkpoints.path(step)}: without it the run {outcome}"
            yield broken(
                "checkpoint_torn", f"the checkpoint of step {step} is damaged: {damage}", fix
            )
        else:
            undamaged.append(step)
    if not undamaged:
        return
    yield fine("checkpoints", f"whole: {', '.join(map(str, undamaged))}")
    recorded = checkpoints.read_state(undamaged[-1]).get("fingerprints")
    if config is not None and isinstance(recorded, dict):
        try:
            check_fingerprints(recorded, {**recorded, **fingerprints(config)}, ())
        except InputError as error:
            yield broken("checkpoint_of_other_settings", *error.parts)
