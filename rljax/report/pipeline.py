"""The page of a pipeline: pipeline.html beside its lineage.json, with a row for each stage, and the
answers of the stages that were evaluated on the same prompts, side by side."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rljax.files import read_json_object, strangers_bytes
from rljax.report.estimates import shown
from rljax.report.page import write_page
from rljax.report.run_folder import estimate, is_number
from rljax.report.style import link
from rljax.tracking.charts import Series, duration, escaped, line_chart, short

LINEAGE = "lineage.json"
PAGE = "pipeline.html"
SHOWN_PROMPTS = 12
# Metrics that a row of the table shows, where a stage has them.
NUMBERS = (
    "mean_reward_all",
    "mean_reward_selected",
    "rows of examples",
    "rows of pairs",
    "judge/labelled",
    "judge/disagreements",
)
LAST = ("reward/mean", "ref_kl/k1", "accuracy", "loss")  # of the last step of a run


def write_pipeline_page(folder: Path) -> Path:
    """Writes pipeline.html from the lineage.json in a folder, and returns its path."""
    lineage = read_json_object(folder / LINEAGE)
    title = f"Pipeline {folder.resolve().name}"
    with strangers_bytes(f"{folder / LINEAGE}", "run the pipeline again, which writes it"):
        records, suites = lineage["stages"], lineage["same_prompts"]
        body = (
            f'<h1>{escaped(title)}</h1><p class="facts"><span>config '
            f"<b>{escaped(lineage['pipeline'])}</b></span></p>{_accuracy(records)}"
            f"{_stages(folder, records)}{''.join(map(_suite, suites))}{_origin(records)}"
        )
    return write_page(folder / PAGE, title, body)


def _accuracy(records: list[dict]) -> str:
    """The chart of the held-out accuracy after each stage that measures one."""
    metrics = [record.get("metrics", {}) for record in records]
    measured = [m.get("greedy_accuracy") or m.get("accuracy_after") for m in metrics]
    points = [(i, e) for i, m in enumerate(measured, 1) if (e := estimate(m)) is not None]
    if len(points) < 2:
        return ""
    x = np.array([i for i, _ in points], float)
    value, low, high = (
        np.array([getattr(e, name) if getattr(e, name) is not None else e.value for _, e in points])
        for name in ("value", "low", "high")
    )
    line = Series("accuracy", x, value, low, high, dots=True)
    note = '<span class="what">Greedy accuracy on held-out prompts, with 95 % intervals.</span>'
    chart = line_chart(
        "Accuracy, stage by stage", "", [line], unit_x="stage", from_zero=True, note=note
    )
    return f'<section><div class="grid">{chart}</div></section>'


def _stages(folder: Path, records: list[dict]) -> str:
    names = ("", "stage", "command", "reads", "makes", "accuracy", "numbers", "time")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = [_stage(folder, number, record) for number, record in enumerate(records, 1)]
    return (
        '<section><h2>Stages</h2><p class="dim">Behind each file stands the beginning of its '
        f'SHA-256.</p><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        "</section>"
    )


def _stage(folder: Path, number: int, record: dict) -> str:
    name, metrics = record["stage"], record.get("metrics", {})
    label = escaped(name)
    if name == Path(name).name and (folder / name / "report.html").exists():
        label = link(f"{name}/report.html", label)
    reads = [_file(path, sha) for paths in record["inputs"].values() for path, sha in paths.items()]
    makes = [_file(path, sha) for path, sha in record.get("outputs", {}).items()]
    finished = record["status"] == "finished"
    took = duration(record["ended"] - record["started"]) if finished else "begun"
    cells = (
        str(number),
        label,
        escaped(record["command"]),
        "<br>".join(dict.fromkeys(reads)),
        "<br>".join(makes),
        _change(metrics),
        _numbers(metrics),
        took,
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _file(path: object, sha256: object) -> str:
    return f"{escaped(path)} <span class='dim'>{escaped(str(sha256)[:8])}</span>"


def _change(metrics: Mapping) -> str:
    """The accuracy before and after a run, or that of an evaluation."""
    names = ("accuracy_before", "accuracy_after", "greedy_accuracy")
    estimates = [e for name in names if (e := estimate(metrics.get(name))) is not None]
    return " → ".join(shown(e, True) for e in estimates)


def _numbers(metrics: Mapping) -> str:
    last = metrics.get("last_step") or {}
    numbers = {k: metrics.get(k) for k in NUMBERS} | {k: last.get(k) for k in LAST}
    return "<br>".join(
        f"{escaped(k)} <b>{short(v)}</b>" for k, v in numbers.items() if is_number(v)
    )


def _suite(suite: dict) -> str:
    """Several policies on the same prompts: their accuracy, and what each answers."""
    stages = suite["stages"]
    head = "".join(f"<th>{escaped(name)}</th>" for name in ("prompt", *stages))

    def cell(value: dict | None, signed: bool = False) -> str:
        measured = estimate(value)
        return "" if measured is None else shown(measured, True, signed=signed)

    accuracy = "".join(f"<td>{cell(suite['accuracy'][name])}</td>" for name in stages)
    change = "".join(f"<td>{cell(suite['difference'].get(name), True)}</td>" for name in stages)
    rows = [f"<tr><th>accuracy</th>{accuracy}</tr>", f"<tr><th>difference</th>{change}</tr>"]
    for item in suite["prompts"][:SHOWN_PROMPTS]:
        prompt = item["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        answers = "".join(
            f'<td><span class="{"good" if right == 1 else "bad"}"><b class="verdict">'
            f"{'right' if right == 1 else 'wrong' if right == 0 else 'no score'}</b></span> "
            f'<span class="text">{escaped(response)}</span></td>'
            for response, right in zip(item["responses"], item["right"], strict=True)
        )
        rows.append(f'<tr><th class="text">{escaped(text)}</th>{answers}</tr>')
    count = len(suite["prompts"])
    first = min(count, SHOWN_PROMPTS)
    note = (
        f'<p class="dim">Greedy responses of each stage to the first {first} of {count} held-out '
        f"prompts. Differences are to {escaped(stages[0])}, prompt by prompt, "
        "with 95 % intervals.</p>"
    )
    title = " and ".join(escaped(name) for name in stages)
    return (
        f'<section><h2>The same prompts: {title}</h2>{note}<div class="scroll"><table>'
        f"<tr>{head}</tr>{''.join(rows)}</table></div></section>"
    )


def _origin(records: list[dict]) -> str:
    rows = []
    for record in records:
        git = record.get("git") or {}
        versions = ", ".join(f"{k} {v}" for k, v in record.get("versions", {}).items() if v)
        entries = (
            ("by hand", record["by_hand"]),
            ("settings SHA-256", record["settings_sha256"]),
            ("commit", git.get("commit")),
            ("versions", versions),
        )
        text = "".join(f"<tr><th>{k}</th><td>{escaped(str(v))}</td></tr>" for k, v in entries if v)
        rows.append(f"<h3>{escaped(record['stage'])}</h3><table>{text}</table>")
    return f"<details><summary>Commands and code</summary>{''.join(rows)}</details>"
