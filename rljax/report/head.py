"""The head of a page: what was trained, by which command and code, on what, and where its
files are."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rljax.errors import InputError
from rljax.hub.names import is_hub, parse
from rljax.report.run_folder import RecordedRun, is_number, moment
from rljax.runs.folder import is_locked, is_of_a_model
from rljax.runs.units import human_bytes
from rljax.tracking.charts import duration, escaped, short

# What a run may have written, in the order in which it is looked at.
FILES = """
    config.json data.json metrics.jsonl samples.jsonl episodes.jsonl rewards.log log.txt
    summary.json starts.jsonl timeline.json model.json hub.json policy adapter reward_model
    checkpoints tensorboard profile bad
""".split()


def check_is_run(folder: str | os.PathLike, shown: str | os.PathLike) -> None:
    """Raises InputError if no run has begun in the folder, which the user knows as `shown`."""
    folder = Path(folder)
    files = [name for name in FILES if (folder / name).exists()]
    if files == ["config.json"] and is_of_a_model(folder / "config.json"):
        rule = "its config.json is that of a Hugging Face model"
    elif files or is_locked(folder):
        return
    else:
        rule = "it has nothing that a run writes: no config.json, no metrics.jsonl"
    fix = "name the folder that `rljax train` printed as its run folder"
    raise InputError("no run has begun in this folder", value=str(shown), rule=rule, fix=fix)


# Fields of the config that are shown above the charts, and their names there.
FACTS = {
    "model": "model",
    "data.train": "data",
    "data": "data",
    "dataset": "dataset",
    "dataflow": "dataflow",
    "algorithm.policy_loss": "policy loss",
    "policy_loss": "policy loss",
    "algorithm.advantage": "advantage",
    "reward.function": "reward",
    "actor_optimizer.lr": "learning rate",
    "batch.prompts_per_step": "prompts per step",
    "batch.samples_per_prompt": "samples per prompt",
}


def field(config: Mapping, dotted: str) -> object:
    """Returns the value of a dotted field of a config, or the name of a section; None if absent."""
    value: object = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        value = value.get("name", value.get("path"))
    return None if isinstance(value, list | Mapping) else value


def short_name(value: object) -> str:
    """Returns "decoder" of "decoder(layers=2, ...)", the last part of a path, NAME
    of hf://OWNER/NAME."""
    if is_hub(value):
        with contextlib.suppress(InputError):
            return parse(str(value)).repository.rpartition("/")[2]
    text = str(value or "").split("(")[0].rstrip("/")
    return text.replace("{split}", "").rpartition("/")[2] or text


def title_of(run: RecordedRun) -> str:
    """Returns the run's name if its config has one, else what was trained: "SFT and GRPO of decoder
    on letter_count", else the folder's name."""
    name, dataflow = run.config.get("name"), field(run.config, "dataflow")
    if isinstance(name, str) and name:
        return name
    if not isinstance(dataflow, str) or not dataflow:
        return run.folder.resolve().name
    method = short_name(dataflow)
    if method == "preference":  # one dataflow of many losses
        method = short_name(field(run.config, "algorithm.preference_loss") or method)
    method = method.upper() if len(method) <= 5 else method.replace("_", " ")
    prefix = "SFT and " if field(run.config, "sft.steps") else ""
    model, data = (short_name(field(run.config, f)) for f in ("model", "data.train"))
    model_text, data_text = f" of {model}" if model else "", f" on {data}" if data else ""
    return f"{prefix}{method}{model_text}{data_text}"


def title(run: RecordedRun) -> str:
    """Returns the title of the page, and the name of the run folder, as HTML."""
    name = escaped(run.folder.resolve().name)
    return f'<h1>{escaped(title_of(run))}</h1><p class="dim">run folder <b>{name}</b></p>'


def facts(run: RecordedRun) -> str:
    """Returns the HTML of facts of the config, the files, and folded: command, code, machine."""
    return f"{_facts(run)}{_files(run.folder)}{_origin(run)}"


def _facts(run: RecordedRun) -> str:
    entries = [(label, field(run.config, name)) for name, label in FACTS.items()]
    last, total = run.steps()
    entries += [
        ("steps", f"{last} of {total}" if total else run.summary.get("steps", last or None)),
        ("seed", run.summary.get("seed", run.config.get("seed"))),
        ("device", run.summary.get("device") or run.latest_start.get("device")),
    ]
    wall = run.summary.get("wall_s")
    if is_number(wall):
        entries.append(("time", duration(wall)))
        if run.devices():
            entries.append(("device hours", short(wall * run.devices() / 3600)))
    memory = run.summary.get("memory")
    for name, value in memory.items() if isinstance(memory, Mapping) else ():
        if is_number(value):
            entries.append((f"most memory, {name.removesuffix('_bytes')}", human_bytes(value)))
    spans = (
        f"<span>{escaped(k)} <b>{escaped(str(v))}</b></span>"
        for k, v in entries
        if v not in (None, "")
    )
    return f'<p class="facts">{"".join(spans)}</p>'


def _files(folder: Path) -> str:
    """Links to what is in the folder, relative: the page goes where the folder goes."""
    links = []
    for name in FILES:
        path = folder / name
        try:
            kind, count = os.path.isdir(path), path.stat().st_size
        except OSError:
            continue
        target, size = (f"{name}/", "") if kind else (name, f" ({human_bytes(count)})")
        links.append(f'<span><a href="{target}">{target}</a>{size}</span>')
    return f'<p class="facts">{"".join(links)}</p>' if links else ""


def _commit(git: object) -> str:
    if not isinstance(git, Mapping) or not isinstance(git.get("commit"), str):
        return "in no git repository"
    changed = ", with changes that are not committed (dirty)" if git.get("dirty") else ""
    return f"git commit {git['commit']}{changed}"


def _origin(run: RecordedRun) -> str:
    """The command, the code and the machine of every start, the last one first."""
    rows = []
    for number, start in reversed(list(enumerate(run.starts))):
        event = "Started" if number == 0 else f"Resumed at step {start.get('step')}"
        of_rljax = f"rljax {start.get('rljax') or '(not installed)'}, python {start.get('python')}"
        rows += [
            (event, moment(start["time"])),
            ("Command", start.get("command")),
            ("Working folder", f"{start.get('working_folder')}: {_commit(start.get('git'))}"),
            ("Code", of_rljax),
            ("Machine", f"{start.get('host')}, {start.get('device')}"),
            ("Memory", start.get("memory")),
        ]
    if isinstance(versions := run.summary.get("versions"), Mapping):
        rows.append(("Versions", ", ".join(f"{name} {n}" for name, n in versions.items())))
    if not any(value for _, value in rows):
        return ""
    body = "".join(
        f"<tr><th>{escaped(k)}</th><td>{escaped(str(v))}</td></tr>" for k, v in rows if v
    )
    return (
        "<details><summary>Command, code and machine</summary>"
        f'<table class="origin">{body}</table></details>'
    )


def listing(config: Mapping, prefix: str = "") -> dict[str, object]:
    """Returns the fields of a config by their dotted names."""
    out: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= listing(value, f"{prefix}{name}.")
        else:
            out[re.sub(r"\s", " ", f"{prefix}{name}")] = value
    return out
