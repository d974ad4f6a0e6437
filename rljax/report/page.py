"""A run folder -> one self-contained `report.html`; `python -m rljax.report.page RUN_DIR`.

The page needs no network and no script. A killed run and a run that never started get a report,
too. Which changes a run may claim is decided in `run_folder`.
"""

import dataclasses
import fnmatch
import html
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rljax.errors import InputError
from rljax.report import timeline
from rljax.report.run_folder import Estimate, Run, is_number, pairs, read_run, verdict
from rljax.tracking.charts import CSS, Series, Span, duration, line_chart, share_bar, short

BEST = 4  # completions shown at each end
LAST_PART = 0.25  # of the sampled steps, that completions are shown from
FACTS = ("model", "data", "dataset", "dataflow", "policy_loss", "advantage", "learning_rate")
# These contain the other times, or lie within them.
WHOLE_STEP = ("time/step_s", "time/total_s", "time/reward_hidden_s", "time/reward_sample_*_s")
TIME_ORDER = ("time/generate_s", "time/reward_s", "time/learn_s", "time/rest_s")


@dataclasses.dataclass(frozen=True)
class Chart:
    """The metrics that match a pattern, in the order of the patterns, as the lines of one chart."""

    title: str  # "" = each metric gets a chart of its own
    unit: str
    patterns: tuple[str, ...]
    from_zero: bool = False
    by_phase: bool = False  # SFT and RL differ in scale: a chart for each


GROUPS = (
    (
        "Does it learn?",
        (
            Chart("Reward", "mean over the step's completions", ("reward/mean",)),
            Chart(
                "Evaluation accuracy",
                "share of held-out problems, 95 % band",
                ("eval/accuracy", "eval/source/*"),
                True,
            ),
            Chart("Held-out loss", "", ("eval/loss", "eval/mse")),
            Chart("Reward parts", "mean", ("reward/*/mean", "reward/part/*", "score/mean")),
        ),
    ),
    (
        "The policy",
        (
            Chart("Entropy", "nats per token", ("entropy", "entropy/mean")),
            Chart("KL to the reference", "nats per token", ("ref_kl/*", "ref_kl")),
            Chart("KL of the update", "nats per token", ("ppo_kl", "ppo_kl/*", "policy_kl*")),
            Chart("Clipped", "share of tokens", ("clip_fraction*", "clip*frac*"), True),
            Chart(
                "Response length",
                "tokens",
                ("response_tokens/mean", "response_tokens/m[ia][nx]"),
                True,
            ),
            Chart("Truncated", "share of responses", ("*truncated*",), True),
            Chart(
                "Groups without a signal", "share of groups", ("zero_advantage*", "groups/*"), True
            ),
        ),
    ),
    (
        "The optimizer",
        (
            Chart("Loss", "", ("loss", "policy_loss", "value_loss"), by_phase=True),
            Chart("Gradient norm", "before clipping", ("grad_norm", "grad_norm/*"), True, True),
            Chart("Learning rate", "", ("learning_rate", "lr"), True, True),
        ),
    ),
    ("Sampler against trainer", (Chart("", "", ("mismatch/*", "correction/*")),)),
    (
        "Speed",
        (
            Chart("Throughput", "tokens per second", ("tokens_per_s", "*tokens_per_s"), True, True),
            Chart("Scoring", "seconds", ("time/reward_hidden_s", "time/reward_sample_*_s"), True),
            Chart("Time of a step", "seconds", (*WHOLE_STEP, *TIME_ORDER, "time/*_s"), True, True),
        ),
    ),
)
NOT_CHARTED = ("step", "x", "phase_rl", "eval/*_low", "eval/*_high")
MAX_OTHER = 60
FAULTS = (
    "*skipped*",
    "reward*error*",
    "*timeout*",
    "*rollback*",
    "*nonfinite*",
    "*non_finite*",
    "fault*",
    "*dropped_overlong*",
)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


# --- the headline ---


def _shares(*estimates: Estimate) -> bool:
    return all(0 <= v <= 1 for e in estimates for v in (e.value, e.low, e.high) if v is not None)


def _shown(e: Estimate, as_share: bool, *, signed: bool = False) -> str:
    """The value and its interval in percent (points for a difference), or as plain numbers."""

    def one(v: float) -> str:
        text = f"{100 * v:.1f}" if as_share else short(v)
        return f"+{text}" if signed and v > 0 else text

    unit = "" if not as_share else " points" if signed else " %"
    if e.low is None:
        return f"{one(e.value)}{unit}"
    return f'{one(e.value)}{unit} <span class="interval">[{one(e.low)}, {one(e.high)}]</span>'


def _headline(run: Run) -> str:
    measured = [p for p in pairs(run.summary) if p[0] == "accuracy"]
    trained = html.escape(run.trained())
    if not measured:
        if not run.rows:
            return (
                '<section class="headline"><h2>This run has not logged a step yet.</h2>'
                "<p>Write the report again once <code>metrics.jsonl</code> has rows.</p>"
                "</section>"
            )
        return (
            f'<section class="headline"><h2>No evaluation before and after {trained}</h2><p>'
            "So no change of the accuracy is claimed. The rewards and losses below are those of "
            "the training data.</p></section>"
        )
    _, before, after, change = measured[0]
    as_share, word = _shares(before, after), verdict(change)
    kind = {"improved": "good", "fell": "bad"}.get(word, "same")
    claim = "No significant change" if kind == "same" else f"Accuracy {word}"
    counts = f" on {after.n} problems" if after.n else ""
    reason = (
        "no interval was recorded, so no change is claimed"
        if change.low is None
        else f"difference {_shown(change, as_share, signed=True)}, 95 % intervals in brackets"
    )
    return (
        f'<section class="headline {kind}"><h2>Accuracy {_shown(before, as_share)} → '
        f'{_shown(after, as_share)}</h2><p><b class="verdict">{claim}</b> after {trained}{counts}: '
        f"{reason}.</p></section>"
    )


def _evaluation_table(run: Run) -> str:
    rows = []
    for name, before, after, change in pairs(run.summary):
        s = _shares(before, after)
        cells = (
            _shown(before, s),
            _shown(after, s),
            _shown(change, s, signed=True),
            verdict(change),
        )
        count = str(after.n) if after.n else "-"
        rows.append(
            f"<tr><th>{html.escape(name.replace('_', ' '))}</th>"
            + "".join(f"<td>{cell}</td>" for cell in (*cells, count))
            + "</tr>"
        )
    if not rows:
        return ""
    head = "".join(f"<th>{h}</th>" for h in ("", "before", "after", "difference", "", "n"))
    return (
        f'<section><h2>Before and after</h2><div class="scroll"><table><tr>{head}</tr>'
        f"{''.join(rows)}</table></div></section>"
    )


# --- the curves ---


def _spans(run: Run) -> list[Span]:
    """Shades every phase but RL; nothing to tell apart in a run of one phase."""
    starts = []
    for row in run.rows:
        if row["phase"] and (not starts or starts[-1][0] != row["phase"]):
            starts.append((row["phase"], row["x"]))
    ends = [x for _, x in starts[1:]] + [run.rows[-1]["x"] if run.rows else 0]
    if len(starts) < 2:
        return []
    return [
        Span(name.upper(), start, end)
        for (name, start), end in zip(starts, ends, strict=True)
        if name != "rl"
    ]


def _series(run: Run, key: str, phase: str | None = None) -> Series:
    x, y = run.columns(key, phase)
    low, high = (
        dict(zip(*run.columns(key + end, phase), strict=True)) for end in ("_low", "_high")
    )
    dots = key.startswith("eval/")
    if not (low and high):
        return Series(key, x, y, dots=dots)
    band = [np.array([bound.get(at, math.nan) for at in x]) for bound in (low, high)]
    return Series(key, x, y, *band, dots=dots)


def _draw(run: Run, chart: Chart, keys: Sequence[str]) -> Iterator[str]:
    """The figures of one `Chart`: usually one, or one a phase, or one a metric."""
    if not chart.title:
        for key in keys:
            yield line_chart(key, "", [_series(run, key)], spans=_spans(run))
        return
    phases = [p for p in run.phases() if any(len(run.columns(k, p)[0]) for k in keys)]
    split = chart.by_phase and len(phases) > 1
    for phase in phases if split else [None]:
        series = [_series(run, key, phase) for key in keys]
        title = f"{chart.title} ({phase.upper()})" if phase else chart.title
        spans = () if phase else _spans(run)
        yield line_chart(title, chart.unit, series, spans=spans, from_zero=chart.from_zero)


def _curves(run: Run) -> str:
    out, used = [], set()
    free = [key for key in run.keys() if not _matches(key, NOT_CHARTED)]
    for name, charts in GROUPS:
        figures = []
        for chart in charts:
            keys = [k for p in chart.patterns for k in free if fnmatch.fnmatchcase(k, p)]
            keys = [k for k in dict.fromkeys(keys) if k not in used]
            keys = keys if not chart.title else keys[:5]  # as many colours as there are
            used |= set(keys)
            figures += _draw(run, chart, keys) if keys else []
        bars = _time_split(run) + _timelines(run) if name == "Speed" else ""
        if figures or bars:
            grid = f'<div class="grid">{"".join(figures)}</div>'
            out.append(f"<section><h2>{html.escape(name)}</h2>{bars}{grid}</section>")
    others = [key for key in free if key not in used]
    if others:
        figures = [
            line_chart(k, "", [_series(run, k)], spans=_spans(run)) for k in others[:MAX_OTHER]
        ]
        left = len(others) - len(figures)
        more = f"<p>{left} more are in metrics.jsonl.</p>" if left else ""
        out.append(
            f"<details><summary>All other metrics ({len(others)})</summary>"
            f'<div class="grid">{"".join(figures)}</div>{more}</details>'
        )
    return "".join(out)


def _time_split(run: Run) -> str:
    logged = [k for k in run.keys() if fnmatch.fnmatchcase(k, "time/*_s")]
    logged = [k for k in logged if not _matches(k, WHOLE_STEP)]
    keys = sorted(logged, key=lambda k: TIME_ORDER.index(k) if k in TIME_ORDER else len(TIME_ORDER))
    bars = []
    for phase in run.phases() or [None]:
        parts = []
        for key in keys:
            seconds = run.columns(key, phase)[1]
            total = float(seconds[np.isfinite(seconds) & (seconds > 0)].sum())
            parts.append((key.removeprefix("time/").removesuffix("_s"), total))
        title = f"Where the time went ({phase.upper()})" if phase else "Where the time went"
        bars.append(share_bar(title, parts))
    return "".join(bars)


def _timelines(run: Run) -> str:
    return "".join(timeline.figure(record) for record in timeline.read(run.folder))


# --- completions and faults ---


def _is_scored(row: Mapping) -> bool:
    reward = row.get("reward")
    return is_number(reward) and math.isfinite(reward) and row.get("status", "ok") in ("ok", None)


def _ends(samples: Sequence[Mapping]) -> tuple[list[Mapping], list[Mapping]]:
    """The best and the worst distinct completions of the last part of the run; none is in both."""
    rl = [row for row in samples if row.get("phase") in ("rl", "RL")] or samples
    steps = sorted({row["step"] for row in rl if is_number(row.get("step"))})
    first = steps[int(len(steps) * (1 - LAST_PART))] if steps else 0
    late = [row for row in rl if is_number(row.get("step")) and row["step"] >= first]
    distinct = {(str(row.get("prompt")), str(row.get("response"))): row for row in late}
    ranked = sorted(filter(_is_scored, distinct.values()), key=lambda r: (-r["reward"], -r["step"]))
    best = ranked[: min(BEST, (len(ranked) + 1) // 2)]
    return best, sorted(ranked[len(best) :], key=lambda r: (r["reward"], -r["step"]))[:BEST]


def _sample(row: Mapping) -> str:
    prompt, response, truth = (
        html.escape("" if row.get(key) is None else str(row[key]))
        for key in ("prompt", "response", "ground_truth")
    )
    expected = f" · expected <code>{truth}</code>" if truth else ""
    return (
        f'<div class="sample"><div class="meta"><b>reward {short(row["reward"])}</b>'
        f' <span class="dim">step {short(row["step"])}{expected}</span></div>'
        f'<div class="text prompt">{prompt}</div><div class="text">{response}</div></div>'
    )


def _completions(run: Run) -> str:
    best, worst = _ends(run.samples)
    out = []
    for title, rows in (("Best completions", best), ("Worst completions", worst)):
        if rows:
            body = "".join(_sample(row) for row in rows)
            out.append(f'<h2>{title} <span class="dim">late in the run</span></h2>{body}')
    counts: dict[str, int] = {}
    for row in run.samples:
        status = str(row.get("status") or "ok")
        counts[status] = counts.get(status, 0) + 1
    if counts:
        total = len(run.samples)
        facts = "".join(
            f"<span>{html.escape(name)} <b>{n}</b> ({100 * n / total:.1f} %)</span>"
            for name, n in sorted(counts.items(), key=lambda item: -item[1])
        )
        out.append(
            f'<h2>Reward status of the {total} saved samples</h2><p class="facts">{facts}</p>'
        )
    return f"<section>{''.join(out)}</section>" if out else ""


def _faults(run: Run) -> str:
    """Steps at which a fault metric was above zero, or any metric was not finite."""
    lines = []
    for key in run.keys():
        x, y = run.columns(key)
        if _matches(key, FAULTS) and (y > 0).any():
            lines.append((key, x[y > 0], f"largest value {short(float(np.nanmax(y)))}"))
        if not np.isfinite(y).all() and not _matches(key, NOT_CHARTED):
            lines.append((key, x[~np.isfinite(y)], "not a finite number"))
    rows = []
    for key, x, what in lines:
        where = f"step {x[0]:.0f}" if len(x) == 1 else f"{len(x)} steps, {x[0]:.0f} to {x[-1]:.0f}"
        rows.append(f"<tr><th>{html.escape(key)}</th><td>{where}</td><td>{what}</td></tr>")
    for key, value in run.summary.items():
        if _matches(key, FAULTS) and value:
            shown = html.escape(str(value))
            rows.append(f"<tr><th>{html.escape(key)}</th><td>whole run</td><td>{shown}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th>metric</th><th>where</th><th>what</th></tr>"
    return (
        f'<section><h2>Faults</h2><div class="scroll"><table>{head}{"".join(rows)}'
        "</table></div></section>"
    )


# --- the page ---


def _facts(run: Run) -> str:
    """One line: what was trained, how long, on what; nested config sections by their name."""
    facts = []
    for key in FACTS:
        value = run.config.get(key)
        if isinstance(value, Mapping):
            value = value.get("name", value.get("path"))
        if value is not None and not isinstance(value, list | dict):
            facts.append((key, str(value)))
    for key in ("steps", "seed", "device"):
        value = run.summary.get(key, run.config.get(key))
        if value is not None:
            facts.append((key, str(value)))
    wall = run.summary.get("wall_s")
    if is_number(wall):
        facts.append(("time", duration(wall)))
    versions = run.summary.get("versions")
    if isinstance(versions, Mapping):
        facts += [(str(name), str(version)) for name, version in versions.items()]
    spans = (f"<span>{html.escape(k)} <b>{html.escape(v)}</b></span>" for k, v in facts)
    return f'<p class="facts">{"".join(spans)}</p>'


def _page(run: Run) -> str:
    title = html.escape(str(run.config.get("name") or run.folder.resolve().name))
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in run.notes)
    config = ""
    if run.config:
        text = html.escape(json.dumps(run.config, indent=2, ensure_ascii=False))
        config = f"<details><summary>Resolved config</summary><pre>{text}</pre></details>"
    legend = (
        '<p class="dim">Faint lines are the values of single steps, bold lines their moving '
        "average; numbers are the last value.</p>"
        if run.rows
        else ""
    )
    body = (
        f"<h1>{title}</h1>{_facts(run)}{_headline(run)}{notes}{_evaluation_table(run)}{_faults(run)}"
        f"{_curves(run)}{legend}{_completions(run)}{config}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body>{body}</body></html>\n"
    )


def write_report(run_dir: str | os.PathLike) -> Path:
    """Write `report.html` into the run folder and return its path."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise InputError("no such run folder", value=str(folder), fix="name a folder of a run")
    path, draft = folder / "report.html", folder / "report.html.tmp"
    # "replace": a completion may hold lone surrogates, which UTF-8 has no bytes for
    draft.write_bytes(_page(read_run(folder)).encode("utf-8", errors="replace"))
    os.replace(draft, path)
    return path


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m rljax.report.page RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(arguments[0]))
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
