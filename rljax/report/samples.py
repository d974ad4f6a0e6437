"""The completions of a run as HTML: the best and the worst, those of one prompt beside each other,
and a browser of all steps."""

import collections
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.report.run_folder import RecordedRun, is_number, rows_by_step
from rljax.report.style import shortened
from rljax.tracking.charts import escaped, short

BEST = 4  # completions shown at each end
SHOWN_PROMPTS = 4  # prompts whose completions stand side by side
LAST_PART = 0.25  # of the sampled steps, that completions are shown from
MOST_STEPS, MOST_A_STEP, MOST_CHARACTERS = 50, 16, 4000  # of the browser: a page, not a database


def completions(run: RecordedRun) -> str:
    """Returns the sections about completions; "" for a run that recorded none."""
    best, worst = best_and_worst(run.samples)
    out = []
    for title, rows in (("Best completions", best), ("Worst completions", worst)):
        if rows:
            body = "".join(sample(row) for row in rows)
            out.append(f'<h2>{title} <span class="dim">late in the run</span></h2>{body}')
    prompts = of_prompts(late(run.samples), SHOWN_PROMPTS)
    title = '<h2>Best, mean and worst of a prompt <span class="dim">late in the run</span></h2>'
    out += [title + prompts if prompts else "", _browser(run.samples), _statuses(run.samples)]
    return f"<section>{''.join(out)}</section>" if any(out) else ""


def _is_scored(row: Mapping) -> bool:
    reward = row.get("reward")
    return is_number(reward) and math.isfinite(reward) and row.get("status", "ok") in ("ok", None)


def best_and_worst(samples: Sequence[Mapping]) -> tuple[list[Mapping], list[Mapping]]:
    """Returns best and worst distinct completions of the last part of the run; none is in both."""
    distinct = {(str(row.get("prompt")), str(row.get("response"))): row for row in late(samples)}
    ranked = sorted(filter(_is_scored, distinct.values()), key=lambda r: (-r["reward"], -r["step"]))
    best = ranked[: min(BEST, (len(ranked) + 1) // 2)]
    return best, sorted(ranked[len(best) :], key=lambda r: (r["reward"], -r["step"]))[:BEST]


def late(samples: Sequence[Mapping]) -> list[Mapping]:
    """Returns the samples of the last part of the run."""
    rl = [row for row in samples if row.get("phase") in ("rl", "RL")] or samples
    steps = sorted({row["step"] for row in rl if is_number(row.get("step"))})
    first = steps[int(len(steps) * (1 - LAST_PART))] if steps else 0
    return [row for row in rl if is_number(row.get("step")) and row["step"] >= first]


def of_prompts(samples: Sequence[Mapping], most: int) -> str:
    """Returns the best completion, the one nearest to the mean and the worst of each prompt, side
    by side, for the prompts whose rewards differ most; "" if no prompt has two rewards.

    `prompt_mean` of a row is the mean reward of all samples of its prompt; without it the mean is
    over the rows that there are.
    """
    groups: dict[tuple, list[Mapping]] = {}
    for row in filter(_is_scored, samples):
        groups.setdefault((row.get("step"), str(row.get("prompt"))), []).append(row)
    spreads = []
    for rows in groups.values():
        ranked = sorted(rows, key=lambda row: -row["reward"])
        if ranked[0]["reward"] > ranked[-1]["reward"]:
            spreads.append((ranked[-1]["reward"] - ranked[0]["reward"], ranked))
    spreads.sort(key=lambda entry: entry[0])
    return "".join(_of_prompt(rows) for _, rows in spreads[:most])


def _of_prompt(ranked: Sequence[Mapping]) -> str:
    means = [row["prompt_mean"] for row in ranked if is_number(row.get("prompt_mean"))]
    mean = means[0] if means else sum(row["reward"] for row in ranked) / len(ranked)
    middle = min(ranked, key=lambda row: abs(row["reward"] - mean))
    nearest = f"nearest to the mean, {short(mean)}"
    examples = {"best": ranked[0], nearest: middle, "worst": ranked[-1]}
    cells = "".join(
        f'<div class="sample"><div class="meta">{escaped(name)}: <b>reward {_reward(row)}</b>'
        f'</div><div class="text">{_text(row, "response")}</div></div>'
        for name, row in examples.items()
    )
    first, step_html = ranked[0], ""
    if is_number(first.get("step")):
        step_html = f'<span class="dim">step {short(first["step"])}</span>'
    truth = _text(first, "ground_truth")
    expected = f' <span class="dim">expected <code>{truth}</code></span>' if truth else ""
    return (
        f'<div class="of-prompt">{step_html}{expected}<div class="text prompt">'
        f'{_text(first, "prompt")}</div><div class="siblings">{cells}</div></div>'
    )


def _text(row: Mapping, key: str) -> str:
    return escaped(shortened(row.get(key), MOST_CHARACTERS, "samples.jsonl"))


def sample(row: Mapping) -> str:
    """Returns a completion with its reward, its prompt and the expected answer, as HTML."""
    prompt, response, truth = (_text(row, key) for key in ("prompt", "response", "ground_truth"))
    expected = f" · expected <code>{truth}</code>" if truth else ""
    failed = "" if row.get("status") in ("ok", None) else f" · {_text(row, 'status')}"
    message = f" · {_text(row, 'message')}" if failed and row.get("message") else ""
    return (
        f'<div class="sample"><div class="meta"><b>reward {_reward(row)}</b>'
        f' <span class="dim">step {short(row["step"])}{expected}{failed}{message}</span></div>'
        f'<div class="text prompt">{prompt}</div><div class="text">{response}</div></div>'
    )


def _reward(row: Mapping) -> str:
    return short(row["reward"]) if is_number(row.get("reward")) else "none"


def _browser(samples: Sequence[Mapping]) -> str:
    """A fold for each recorded step, newest first, with its samples from the best to the worst."""
    steps = rows_by_step(samples)
    if not steps:
        return ""
    ordered = sorted(steps, reverse=True)
    picks = np.unique(np.linspace(0, len(ordered) - 1, min(MOST_STEPS, len(ordered))).round())
    folds = "".join(_fold(ordered[int(i)], steps[ordered[int(i)]]) for i in picks)
    omitted = len(ordered) - len(picks)
    footer = f'<p class="dim">{omitted} more steps are in samples.jsonl.</p>' if omitted else ""
    return f'<h2>Completions by step <span class="dim">newest first</span></h2>{folds}{footer}'


def _fold(step: float, rows: Sequence[Mapping]) -> str:
    scored = [row["reward"] for row in rows if _is_scored(row)]
    spread = f", reward {short(min(scored))} to {short(max(scored))}" if scored else ""

    def order(row):
        return -row["reward"] if _is_scored(row) else math.inf

    body = "".join(sample(row) for row in sorted(rows, key=order)[:MOST_A_STEP])
    title = f"step {short(step)}: {len(rows)} completion{'s' if len(rows) > 1 else ''}{spread}"
    return f'<details class="step"><summary>{title}</summary>{body}</details>'


def _statuses(samples: Sequence[Mapping]) -> str:
    if not samples:
        return ""
    counts = collections.Counter(str(row.get("status") or "ok") for row in samples)
    spans = "".join(
        f"<span>{escaped(name)} <b>{n}</b> ({100 * n / len(samples):.1f} %)</span>"
        for name, n in counts.most_common()
    )
    title = f"Reward status of the {len(samples)} saved samples"
    return f'<h2>{title}</h2><p class="facts">{spans}</p>'
