"""The completions of a run as HTML: the best and the worst, and a browser of all steps."""

import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.report.run_folder import Run, is_number
from rljax.tracking.charts import short

BEST = 4  # completions shown at each end
LAST_PART = 0.25  # of the sampled steps, that completions are shown from
MOST_STEPS, MOST_A_STEP, MOST_CHARACTERS = 50, 16, 4000  # of the browser: a page, not a database


def completions(run: Run) -> str:
    """The sections of completions; "" for a run that recorded none."""
    best, worst = best_and_worst(run.samples)
    out = []
    for title, rows in (("Best completions", best), ("Worst completions", worst)):
        if rows:
            body = "".join(sample(row) for row in rows)
            out.append(f'<h2>{title} <span class="dim">late in the run</span></h2>{body}')
    out += [_browser(run.samples), _statuses(run.samples)]
    return f"<section>{''.join(out)}</section>" if any(out) else ""


def _is_scored(row: Mapping) -> bool:
    reward = row.get("reward")
    return is_number(reward) and math.isfinite(reward) and row.get("status", "ok") in ("ok", None)


def best_and_worst(samples: Sequence[Mapping]) -> tuple[list[Mapping], list[Mapping]]:
    """The best and the worst distinct completions of the last part of the run; none is in both."""
    rl = [row for row in samples if row.get("phase") in ("rl", "RL")] or samples
    steps = sorted({row["step"] for row in rl if is_number(row.get("step"))})
    first = steps[int(len(steps) * (1 - LAST_PART))] if steps else 0
    late = [row for row in rl if is_number(row.get("step")) and row["step"] >= first]
    distinct = {(str(row.get("prompt")), str(row.get("response"))): row for row in late}
    ranked = sorted(filter(_is_scored, distinct.values()), key=lambda r: (-r["reward"], -r["step"]))
    best = ranked[: min(BEST, (len(ranked) + 1) // 2)]
    return best, sorted(ranked[len(best) :], key=lambda r: (r["reward"], -r["step"]))[:BEST]


def _text(row: Mapping, key: str) -> str:
    text = "" if row.get(key) is None else str(row[key])
    left = len(text) - MOST_CHARACTERS
    more = f" … {left} more characters are in samples.jsonl" if left > 0 else ""
    return html.escape(text[:MOST_CHARACTERS] + more)


def sample(row: Mapping) -> str:
    """A completion with its reward, its prompt and what was expected."""
    prompt, response, truth = (_text(row, key) for key in ("prompt", "response", "ground_truth"))
    expected = f" · expected <code>{truth}</code>" if truth else ""
    failed = "" if row.get("status") in ("ok", None) else f" · {_text(row, 'status')}"
    why = f" · {_text(row, 'message')}" if failed and row.get("message") else ""
    return (
        f'<div class="sample"><div class="meta"><b>reward {_reward(row)}</b>'
        f' <span class="dim">step {short(row["step"])}{expected}{failed}{why}</span></div>'
        f'<div class="text prompt">{prompt}</div><div class="text">{response}</div></div>'
    )


def _reward(row: Mapping) -> str:
    return short(row["reward"]) if is_number(row.get("reward")) else "none"


def _browser(samples: Sequence[Mapping]) -> str:
    """A fold for each recorded step, newest first, with its samples from the best to the worst."""
    steps: dict[float, list[Mapping]] = {}
    for row in samples:
        if is_number(row.get("step")) and math.isfinite(row["step"]):
            steps.setdefault(row["step"], []).append(row)
    if not steps:
        return ""
    every = sorted(steps, reverse=True)
    picks = np.unique(np.linspace(0, len(every) - 1, min(MOST_STEPS, len(every))).round())
    folds = "".join(_fold(every[int(i)], steps[every[int(i)]]) for i in picks)
    left = len(every) - len(picks)
    more = f'<p class="dim">{left} more steps are in samples.jsonl.</p>' if left else ""
    return f'<h2>Completions by step <span class="dim">newest first</span></h2>{folds}{more}'


def _fold(step: float, rows: Sequence[Mapping]) -> str:
    scored = [row["reward"] for row in rows if _is_scored(row)]
    spread = f", reward {short(min(scored))} to {short(max(scored))}" if scored else ""
    order = lambda row: -row["reward"] if _is_scored(row) else math.inf  # noqa: E731
    body = "".join(sample(row) for row in sorted(rows, key=order)[:MOST_A_STEP])
    title = f"step {short(step)}: {len(rows)} completion{'s' if len(rows) > 1 else ''}{spread}"
    return f'<details class="step"><summary>{title}</summary>{body}</details>'


def _statuses(samples: Sequence[Mapping]) -> str:
    counts: dict[str, int] = {}
    for row in samples:
        status = str(row.get("status") or "ok")
        counts[status] = counts.get(status, 0) + 1
    if not counts:
        return ""
    facts = "".join(
        f"<span>{html.escape(name)} <b>{n}</b> ({100 * n / len(samples):.1f} %)</span>"
        for name, n in sorted(counts.items(), key=lambda item: -item[1])
    )
    title = f"Reward status of the {len(samples)} saved samples"
    return f'<h2>{title}</h2><p class="facts">{facts}</p>'
