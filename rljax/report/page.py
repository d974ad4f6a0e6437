"""Writes one self-contained `report.html` of a run folder: `python -m rljax.report RUN`.

The page needs no network and no script. A killed run and a run that never started get a report,
too. `run_folder` decides which changes a run may claim.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rljax.report.curves import NOT_CHARTED, curves, matches
from rljax.report.data_rows import data_rows
from rljax.report.estimates import shares, shown, table
from rljax.report.head import check_is_run, facts, title, title_of
from rljax.report.kinds import of_a_run
from rljax.report.run_folder import RecordedRun, change_in_words, estimate, pairs, read_run
from rljax.report.samples import completions
from rljax.report.style import document
from rljax.report.targets import expected
from rljax.report.transcripts import transcripts
from rljax.runs.mirror import local_copy
from rljax.runs.store import Store, is_url, require_run_folder
from rljax.tracking.charts import escaped, short

FAULTS = ("*skipped*", "reward*error*", "*timeout*", "*dropped_overlong*")  # counts


# --- the headline ---


def headline(run: RecordedRun) -> str:
    """Returns a sentence on the evaluations before and after, with the interval of the change."""
    measured = [p for p in pairs(run.summary) if p[0] == "accuracy"]
    trained = escaped(run.trained())
    if not measured:
        title = f"No evaluation before and after {trained}"
        text = "The rewards and losses below are those of the training data."
        if estimate(run.summary.get("accuracy_before")) is not None:
            title = f"No evaluation after the last step of {trained}"
            text = "Where the run goes on to its end, it is evaluated there."
        text = f"So no change of the accuracy is claimed. {text}"
        if not run.rows:
            title = "This run has not logged a step yet."
            text = "Write the report again once <code>metrics.jsonl</code> has rows."
        return f'<section class="headline"><h2>{title}</h2><p>{text}</p></section>'
    _, before, after, change = measured[0]
    as_share, word = shares(before, after), change_in_words(change)
    kind = {"improved": "good", "fell": "bad"}.get(word, "same")
    claim = "No significant change" if kind == "same" else f"Accuracy {word}"
    counts = f" on {after.n} problems" if after.n else ""
    reason = (
        "no interval was recorded, so no change is claimed"
        if change.low is None
        else f"difference {shown(change, as_share, signed=True)}, 95 % intervals in brackets"
    )
    return (
        f'<section class="headline {kind}"><h2>Accuracy {shown(before, as_share)} → '
        f'{shown(after, as_share)}</h2><p><b class="verdict">{claim}</b> after {trained}{counts}: '
        f"{reason}.</p></section>"
    )


def _evaluation_table(run: RecordedRun) -> str:
    rows, measured = [], pairs(run.summary)
    if [name for name, *_ in measured] == ["accuracy"]:
        return ""  # the headline says it
    for name, before, after, change in measured:
        s = shares(before, after)
        cells = (shown(before, s), shown(after, s), shown(change, s, signed=True))
        count = str(after.n) if after.n else "-"
        rows.append((escaped(name.replace("_", " ")), *cells, change_in_words(change), count))
    return table("Before and after", ("", "before", "after", "difference", "", "n"), rows)


def _outside(run: RecordedRun) -> str:
    """The metrics of the last phase that ended outside of their healthy range."""
    phase, items = (run.phases() or [None])[-1], []
    for key in run.keys():
        values, meaning = run.columns(key, phase)[1], run.meanings.get(key)
        if matches(key, NOT_CHARTED) or meaning is None or not len(values):
            continue
        if meaning.outside(float(values[-1])):
            description = escaped(meaning.line())
            value, healthy = escaped(short(float(values[-1]))), escaped(meaning.healthy)
            items.append(
                f'<li title="{description}"><code>{escaped(key)}</code> <b>{value}</b> '
                f'<span class="dim">healthy: {healthy}</span></li>'
            )
    if not items:
        return ""
    return (
        '<section class="outside"><p><b>Outside their healthy range</b> at the last step:</p>'
        f"<ul>{''.join(items)}</ul></section>"
    )


# --- faults ---


def _faults(run: RecordedRun) -> str:
    """Steps at which a fault metric was above zero, or any metric was not finite."""
    lines = []
    for key in run.keys():
        x, y = run.columns(key)
        if matches(key, FAULTS) and (y > 0).any():
            lines.append((key, x[y > 0], f"largest value {short(float(np.nanmax(y)))}"))
        if not np.isfinite(y).all() and not matches(key, NOT_CHARTED):
            lines.append((key, x[~np.isfinite(y)], "not a finite number"))
    rows = []
    for key, x, problem in lines:
        steps = f"step {x[0]:.0f}" if len(x) == 1 else f"{len(x)} steps, {x[0]:.0f} to {x[-1]:.0f}"
        rows.append((escaped(key), steps, problem))
    faults = run.summary.get("faults")
    faults = dict(faults) if isinstance(faults, Mapping) else {}
    for key, value in {**run.summary, **faults}.items():
        if (key in faults or matches(key, FAULTS)) and value:
            text = escaped(short(value) if isinstance(value, float) else str(value))
            rows.append((escaped(key), "whole run", text))
    return table("Faults", ("metric", "where", "what"), rows)


# --- the page ---


def _glossary(run: RecordedRun) -> str:
    """Every metric of the run with its meaning, for those who cannot point at a chart."""
    terms = [
        f"<dt>{escaped(key)}</dt><dd>{escaped(run.meanings[key].line())}</dd>"
        for key in sorted(run.keys())
        if key in run.meanings
    ]
    if not terms:
        return ""
    title = f"What the metrics mean ({len(terms)})"
    return f"<details><summary>{title}</summary><dl>{''.join(terms)}</dl></details>"


def _body(run: RecordedRun) -> str:
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in run.notes)
    config = ""
    if run.config:
        text = escaped(json.dumps(run.config, indent=2, ensure_ascii=False))
        config = f"<details><summary>Resolved config</summary><pre>{text}</pre></details>"
    legend = (
        '<p class="dim">Faint lines are the values of single steps, bold lines their moving '
        "average, where the values are noisy; numbers are the last value. Point at a chart for the "
        "values at a step, at a name for its meaning. What is called healthy is a rule "
        "of thumb.</p>"
        if run.rows
        else ""
    )
    return (
        f"{title(run)}{headline(run)}{_outside(run)}{notes}{facts(run)}{_evaluation_table(run)}"
        f"{of_a_run(run)}{expected({'': [run]})}{_faults(run)}{transcripts(run)}{completions(run)}"
        f"{legend}{curves(run)}{_glossary(run)}{data_rows(run)}{config}"
    )


def write_page(path: Path, title: str, body: str) -> Path:
    """Writes a page at once: a reader of `path` sees the old one whole until then."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two may write the page at once
    # "replace": a completion may hold lone surrogates, which UTF-8 has no bytes for
    try:
        draft.write_bytes(document(title, body).encode("utf-8", errors="replace"))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def page_of(run: RecordedRun) -> str:
    """Returns the report as one text."""
    return document(title_of(run), _body(run)).encode("utf-8", errors="replace").decode()


def write_report(run_dir: str | os.PathLike) -> Path | str:
    """Writes `report.html` into the run folder, which may be a URL, and returns its path. Raises
    InputError for a folder that does not exist, or without a run."""
    require_run_folder(run_dir)
    with local_copy(run_dir) as folder:
        check_is_run(folder, run_dir)
        run = read_run(folder)
        return put_back(write_page(folder / "report.html", title_of(run), _body(run)), run_dir)


def put_back(page: Path, folder: str | os.PathLike) -> Path | str:
    """Returns the path of a page that was written into a `local_copy` of a folder, after putting it
    into that folder."""
    if not is_url(folder):
        return page
    store = Store(str(folder))
    store.put_file(page, page.name)
    return store.at(page.name)
