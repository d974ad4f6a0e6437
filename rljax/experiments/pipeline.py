"""Pipelines: runs the stages that a config file yields, each from the outputs of those before it.

OUT/STAGE/ is the folder of a stage, and stage.json in it has its settings, its inputs and outputs
with their SHA-256, and its final metrics. OUT/lineage.json has them all. The same command again
goes on: a finished stage is kept, an interrupted run resumes at its last checkpoint. Only the times
and the command in these files depend on where it was stopped.
"""

import contextlib
import hashlib
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import rljax
from rljax.config import Config
from rljax.datagen.preferences import label_preferences
from rljax.datagen.rejection import rejection_sample
from rljax.datagen.saved_labels import label_saved
from rljax.errors import InputError
from rljax.evaluation.policy import GAIN, SHARE, bootstrap
from rljax.evaluation.saved import evaluate_saved
from rljax.experiments.comparison import train_to_the_end
from rljax.experiments.lineage import digest, inputs_of
from rljax.experiments.stages import Stage
from rljax.experiments.sweep import Stopped, allowed_changes
from rljax.files import make_folder, parse_json, read_json_object, read_lines, write_json
from rljax.report.pipeline import LINEAGE, write_pipeline_page
from rljax.report.starts import git_state, versions
from rljax.runs.folder import locked
from rljax.runs.jsonl import read_jsonl
from rljax.training import RunStopped
from rljax.training.loop import train

RECORD = "stage.json"
# Metrics that differ between two runs of the same numbers.
_OF_THE_CLOCK = (
    *("time/", "placement/", "sync/", "tokens_per_s", "generate_tokens_per_s", "compiles"),
    "learning_programs",
)


def record_of(stage: Stage) -> dict:
    """Returns the stage.json of a stage; {} if there is none. Raises InputError for one that is no
    record of a stage."""
    path, fix = stage.folder / RECORD, f"restore it, or --redo={stage.name}"
    problem = f"{path} is no record of a stage"
    try:
        record = read_json_object(path) if path.exists() else {}
    except InputError as error:
        raise InputError(problem, rule=str(error).partition(". Fix:")[0], fix=fix) from None
    missing = {"command", "status"} - record.keys()
    if path.exists() and missing:
        raise InputError(problem, value=f"without {', '.join(sorted(missing))}", fix=fix)
    if not record and _has_checkpoints(stage):
        rule = "it says with which settings they were made"
        raise InputError(f"{stage.folder} has checkpoints, and no {RECORD}", rule=rule, fix=fix)
    return record


def _has_checkpoints(stage: Stage) -> bool:
    """Returns whether a run of the stage has saved."""
    return any((stage.folder / "checkpoints").glob("[0-9]*"))


def run_stages(
    stages: Sequence[Stage], where: str, redo: Sequence[str] = ()
) -> Iterator[tuple[Stage, dict, bool]]:
    """Runs every stage in order; yields (stage, its record, whether it was finished before).

    Raises InputError if the folder of a stage holds one with other settings or inputs, of the
    settings before anything runs, and Stopped if a signal has stopped a run, which has saved.
    """
    home, names = stages[0].home, [stage.name for stage in stages]
    if unknown := [name for name in redo if name not in names]:
        rule, fix = f"stages: {', '.join(names)}", "name a stage of these, or leave --redo out"
        raise InputError("--redo", value=unknown, rule=rule, fix=fix)
    for folder in (home, *(stage.folder for stage in stages)):
        if folder.exists() and not folder.is_dir():
            raise InputError(str(folder), rule="a folder is made there", fix="another --out")
    make_folder(home)
    with locked(home):
        stages_to_redo = _to_redo(stages, redo)
        _check_all([stage for stage in stages if stage not in stages_to_redo])
        for stage in stages_to_redo:
            files = (stage.folder / name for name in (RECORD, *stage.outputs()))
            if _has_checkpoints(stage) or any(file.exists() for file in files):
                shutil.rmtree(stage.folder)
        for stage in stages:
            record, was_finished = _run(stage)
            write_lineage(stages, where)
            yield stage, record, was_finished


def _to_redo(stages: Sequence[Stage], redo: Sequence[str]) -> list[Stage]:
    """The stages of these names and all that read what they make, directly or not."""
    names = set(redo)
    for stage in stages:  # in order: a stage reads earlier ones
        if names & set(stage.needs()):
            names.add(stage.name)
    return [stage for stage in stages if stage.name in names]


def _check_all(stages: Sequence[Stage]) -> None:
    """Raises InputError that lists all stages whose folder cannot be gone on with, as far as their
    settings say: their inputs may be made anew before it is their turn."""
    errors = {}
    for stage in stages:
        try:
            record = record_of(stage)
            if record.get("status") == "finished" or _has_checkpoints(stage):
                _refuse_changes(stage, _changed(record, stage, record.get("inputs", {})))
        except InputError as error:
            errors[stage.name] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        lines = (f"{error.parts[0]}" for error in errors.values())
        raise InputError(
            "the pipeline cannot go on:\n" + "\n".join(lines),
            fix=f"restore what they were made with; --redo={','.join(errors)}, which removes these "
            "folders and those of the stages that read them; or another --out",
        )


def _run(stage: Stage) -> tuple[dict, bool]:
    """Runs a stage unless it is finished; returns (its record, whether it was finished)."""
    local_stage = stage.in_folder(stage.home)
    inputs, previous = _inputs(local_stage), record_of(stage)
    finished = previous.get("status") == "finished"
    if finished or _has_checkpoints(stage):  # of a run that was stopped
        changed = _changed(previous, stage, inputs)
        _refuse_changes(stage, changed)
        # Whether a run exports is compared with nothing: it makes later what it is asked for.
        lacks_outputs = set(stage.outputs()) - previous.get("outputs", {}).keys()
        if finished and not changed and not lacks_outputs:
            _check_outputs(stage, previous)
            return previous, True
    stage.folder.mkdir(parents=True, exist_ok=True)
    compared = json.dumps(stage.compared(), sort_keys=True)
    entry = {
        "stage": stage.name,
        "command": stage.command,
        "status": "begun",
        "settings": stage.shown(),
        "settings_sha256": hashlib.sha256(compared.encode()).hexdigest(),
        "compared": stage.compared(),
        "inputs": inputs,
        "by_hand": shlex.join(stage.command_line()),
        "started": previous.get("started", time.time()),
    }
    write_json(stage.folder / RECORD, entry)
    metrics = _COMMANDS[stage.command](local_stage.settings)
    record = entry | {
        "status": "finished",
        "outputs": {name: digest(stage.folder / name) for name in stage.outputs()},
        "metrics": metrics,
        "process": shlex.join(sys.orig_argv),
        "git": git_state("."),
        "versions": {"rljax": rljax.__version__, **versions()},
        "ended": time.time(),
    }
    write_json(stage.folder / RECORD, record)
    return record, False


def _inputs(stage: Stage) -> dict[str, dict[str, str]]:
    """{field: {path: SHA-256}} of a stage in its folder. Paths of other stages are {NAME}/..., so
    that the folder of the pipeline may move."""

    def relative(path: str) -> str:
        if not Path(path).is_relative_to(stage.home):
            return path
        name, *rest = Path(path).relative_to(stage.home).parts
        return "/".join((f"{{{name}}}", *rest))

    inputs = inputs_of(stage.fields(), stage.specs())
    return {k: {relative(path): sha for path, sha in paths.items()} for k, paths in inputs.items()}


def _changed(record: dict, stage: Stage, inputs: dict) -> list[str]:
    """Returns the names of the fields that differ, or whose files differ."""
    if record.get("command") != stage.command:
        return ["command"]
    pairs = (stage.compared(), record.get("compared", {})), (inputs, record.get("inputs", {}))
    return sorted({k for a, b in pairs for k in {*a, *b} if a.get(k) != b.get(k)})


def _refuse_changes(stage: Stage, changed: Sequence[str]) -> None:
    allowed = allowed_changes(stage.config) if stage.config is not None else set()
    if refused := [name for name in changed if name not in allowed]:
        raise InputError(
            f"{stage.folder} holds this stage with other settings or other input files",
            value=refused,
            rule="a pipeline that goes on is the same one"
            + ("" if stage.config is None else "; checkpoint.allow_changed names exceptions"),
            fix=f"restore them; --redo={stage.name}, which removes the folder and those of the "
            "stages that read it; or another --out",
        )


def _check_outputs(stage: Stage, record: dict) -> None:
    """Raises InputError where what a finished stage has made is no longer there, or another one."""
    for name, sha in record.get("outputs", {}).items():
        path = stage.folder / name
        if not path.exists() or digest(path) != sha:
            problem = "has changed since it was made" if path.exists() else "is gone"
            rule = f"stage.json has its SHA-256, {sha[:16]}..."
            fix = f"put it back, or --redo={stage.name}"
            raise InputError(f"{path} {problem}", rule=rule, fix=fix)


# -- what each command does --


def _train(config: Config) -> dict:
    """Trains to the end, going on where an interrupted run stopped; returns the final metrics."""
    try:
        summary = train_to_the_end(config, train)
    except RunStopped as stop:
        raise Stopped(stop.signal) from None
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    last = {k: v for k, v in rows[-1].items() if not k.startswith(_OF_THE_CLOCK)} if rows else {}
    names = ("accuracy_before", "accuracy_after", "difference", "eval_before", "eval_after")
    names += ("steps", "sft_steps", "rl_steps", "prompts", "completions")
    return {**{name: summary.get(name) for name in names}, "last_step": last}


def _sample(options) -> dict:
    meta = rejection_sample(options)
    rows = {f"rows of {kind}": file["rows"] for kind, file in meta["files"].items()}
    return meta["metrics"] | rows


def _label_steps(options) -> dict:
    result = label_saved(options)
    return {"checkpoints": result["checkpoints"], "rows": result["rows"]}


def _evaluate(options) -> dict:
    result = evaluate_saved(options)
    write_json(options.out, result)
    return {**result["metrics"], "data": result["data"], "reward": result["reward"]}


_COMMANDS = {
    "train": _train,
    "sample": _sample,
    "label preferences": label_preferences,
    "label steps": _label_steps,
    "evaluate": _evaluate,
}


# -- lineage --


def write_lineage(stages: Sequence[Stage], where: str) -> Path:
    """Writes OUT/lineage.json and the page about it; returns the path of the page."""
    home = stages[0].home
    records = [record for stage in stages if (record := record_of(stage))]
    shown = [{k: v for k, v in record.items() if k != "compared"} for record in records]
    lineage = {"pipeline": where, "stages": shown, "same_prompts": _suites(stages, records)}
    write_json(home / LINEAGE, lineage)
    return write_pipeline_page(home)


def _suites(stages: Sequence[Stage], records: Sequence[dict]) -> list[dict]:
    """Evaluations of several stages on the same prompts: the accuracy of each, and its difference
    to the first one's, prompt by prompt."""
    answers: dict[tuple, list[tuple[str, list[dict]]]] = {}
    by_name = {stage.name: stage for stage in stages}
    for record in records:
        stage, finished = by_name[record["stage"]], record["status"] == "finished"
        is_evaluation = stage.command == record["command"] == "evaluate"
        if is_evaluation and finished and stage.settings.answers:
            path = stage.folder / Path(stage.settings.answers).name
            with contextlib.suppress(InputError):  # a file that is gone is said at its stage's turn
                rows = [parse_json(line, str(path)) for _, line in read_lines(path) if line.strip()]
                key = (record["metrics"]["reward"], json.dumps([row["prompt"] for row in rows]))
                answers.setdefault(key, []).append((record["stage"], rows))
    return [_suite(group) for group in answers.values() if len(group) > 1]


def _suite(group: list[tuple[str, list[dict]]]) -> dict:
    right = {
        name: [math.nan if r["right"] is None else r["right"] for r in rows] for name, rows in group
    }
    first = next(iter(right.values()))

    def interval(values: list[float], bounds: tuple[float, float]) -> dict | None:
        has_values = any(not math.isnan(x) for x in values)
        return bootstrap(values, within=bounds) if has_values else None

    return {
        "stages": list(right),
        "accuracy": {name: interval(values, SHARE) for name, values in right.items()},
        "difference": {
            name: interval([b - a for a, b in zip(first, values, strict=True)], GAIN)
            for name, values in list(right.items())[1:]
        },
        "prompts": [
            {
                "prompt": row["prompt"],
                "responses": [rows[i]["response"] for _, rows in group],
                "right": [rows[i]["right"] for _, rows in group],
            }
            for i, row in enumerate(group[0][1])
        ],
    }
