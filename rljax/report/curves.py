"""The curves of a run as HTML: which metrics share a chart, what each means, and which are
folded away."""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.metric import Metric
from rljax.report import timeline
from rljax.report.run_folder import RecordedRun
from rljax.tracking.charts import Series, Span, escaped, line_chart, share_bar, short

WITHIN = ("time/reward_hidden_s", "time/reward_sample_*_s")  # lie within the other times
TIME_ORDER = ("time/generate_s", "time/reward_s", "time/learn_s", "time/program_s", "time/rest_s")


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: the metrics that match a pattern are its lines, in the order of the patterns."""

    title: str  # "" = each metric gets a chart of its own
    unit: str
    patterns: tuple[str, ...]
    from_zero: bool = False
    by_phase: bool = False  # SFT and RL differ in scale: a chart for each
    most: int = 5  # metrics: as many as there are colours
    folded: bool = False  # shown when it is asked for
    what: str = ""  # what it shows; "" = the meaning of the first metric


_from_zero = functools.partial(Chart, from_zero=True)
MISMATCH = {  # the first three of them that there are say it all
    "mismatch/mismatch_k3_kl": "Mismatch",
    "mismatch/probability_correlation": "Agreement of the probabilities",
    "mismatch/rollout_is_eff_sample_size": "Effective sample size",
    "mismatch/abs_logprob_diff_max": "Largest difference of log-probs",
}
GROUPS = {
    "Does it learn?": (
        Chart("Reward", "mean over the step's completions", ("reward/mean",)),
        Chart(
            "Best of k",
            "highest score of a prompt's samples, mean over prompts",
            ("reward/best_of_k",),
        ),
        Chart(
            "Best seen and the policy",
            "score, mean over prompts; what the policy is short of",
            ("reward/best_seen", "reward/best_seen_gap"),
            folded=True,
            what="The best sample that the run has drawn of each prompt, and how far the "
            "samples of the step are behind it",
        ),
        _from_zero(
            "Evaluation accuracy",
            "share of held-out problems, 95 % band",
            ("eval/accuracy", "eval/source/*"),
        ),
        _from_zero(
            "Accuracy by difficulty",
            "share of held-out problems, 95 % band",
            ("eval/difficulty/*",),
            what="Greedy accuracy on the held-out prompts of each difficulty",
        ),
        _from_zero(
            "pass@k",
            "share of held-out problems, 95 % band",
            ("eval/pass@*",),
            what="A right one is among k drawn responses",
        ),
        Chart("Held-out loss", "", ("eval/loss", "eval/mse")),
        Chart(
            "Reward parts",
            "mean",
            ("reward/part/*",),
            what="Means of the parts that the reward returns",
        ),
        Chart(
            "Reward by source",
            "mean",
            ("reward/source/*",),
            what="Mean score on the prompts of each source",
        ),
        Chart(
            "Implicit rewards",
            "nats x beta",
            ("rewards/chosen", "rewards/rejected", "rewards/margins"),
        ),
        Chart(
            "Right choices",
            "share",
            ("rewards/accuracies", "accuracy", "sign_accuracy", "token_accuracy"),
            by_phase=True,
        ),
    ),
    "Episodes": (
        Chart("Return", "mean over the step's episodes", ("episode/return",)),
        _from_zero("Success", "share of episodes", ("episode/success",)),
        _from_zero("Turns", "of an episode", ("episode/turns", "calls/per_episode")),
        _from_zero("Ended by", "share of episodes", ("episode/ended/*",)),
        _from_zero("Calls that failed", "share", ("calls/bad", "calls/unknown", "calls/failed")),
        Chart("Running baseline", "by seat", ("seat_baseline/*",)),
    ),
    "The policy": (
        Chart("Entropy", "nats per token", ("entropy",)),
        Chart("KL to the reference", "nats per token", ("ref_kl/*", "ref_kl")),
        Chart("KL of the update", "nats per token", ("ppo_kl", "ppo_k3")),
        _from_zero("Clipped", "share of tokens", ("pg_clipfrac*",)),
        _from_zero(
            "Response length", "tokens", ("response_tokens/mean", "response_tokens/m[ia][nx]")
        ),
        _from_zero(
            "Truncated", "share of responses", ("response/truncated_fraction", "*truncated*")
        ),
        _from_zero(
            "Groups without a signal",
            "share of groups",
            ("group/zero_advantage_fraction", "group/all_*_fraction"),
        ),
        Chart("Log-probabilities", "nats", ("logps/*",)),
    ),
    "The optimizer": (
        Chart("Loss", "", ("loss",), by_phase=True),
        Chart("Loss of the critic", "", ("*/vf_loss",)),
        Chart("Explained variance", "share", ("explained_variance", "*/explained_variance")),
        _from_zero("Gradient norm", "before clipping", ("grad_norm", "*/grad_norm"), by_phase=True),
        _from_zero("Learning rate", "", ("lr",), by_phase=True),
    ),
    "In flight": (
        _from_zero(
            "Age of the tokens",
            "steps",
            ("staleness/steps_mean", "staleness/steps_max", "staleness/span_max"),
        ),
        _from_zero(
            "Written by weights of several steps",
            "share of responses, masked tokens",
            ("staleness/partial_fraction", "staleness/masked_fraction"),
        ),
        _from_zero("Groups in flight", "groups", ("queue/open", "queue/complete", "queue/dropped")),
        _from_zero("Busy slots", "share", ("slots/live_share",)),
    ),
    "Sampler against trainer": (
        Chart("", "", tuple(MISMATCH), most=3),
        Chart("", "", ("mismatch/*", "variance_proxy/*"), most=99, folded=True),
    ),
    "Speed": (
        _from_zero(
            "Throughput", "tokens per second", ("tokens_per_s", "*tokens_per_s"), by_phase=True
        ),
        _from_zero(
            "Scoring",
            "seconds",
            ("time/reward_hidden_s", "time/reward_sample_*_s"),
            what="Scoring beside decoding (hidden), and of one sample",
        ),
        _from_zero(
            "Time of a step",
            "seconds",
            (*TIME_ORDER, "time/*_s"),
            by_phase=True,
            what="What the seconds of a step are spent on",
        ),
    ),
}
NOT_CHARTED = ("step", "x", "phase_rl", "eval/*_low", "eval/*_high")
MAX_OTHER = 60
FEWEST = 5  # points of a curve that is drawn against a metric
# Lines that move less than this, or than that share of their values, are flat; a flat reward or
# accuracy is what a reader looks for.
NOISE, ROUNDING = 1e-10, 1e-6
_NEVER_FLAT = ("reward/mean", "eval/accuracy", "eval/loss")


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Returns whether the name of a metric matches any of the patterns."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def curves(run: RecordedRun) -> str:
    """Returns the HTML of all sections of charts; metrics of none are folded into the last."""
    candidates = [
        key for key in run.keys() if not matches(key, NOT_CHARTED) and not repeats(run, key)
    ]
    out, used = [], set()
    for name, charts in GROUPS.items():
        visible, folded, flat = [], [], []
        for chart in charts:
            keys = [k for p in chart.patterns for k in candidates if fnmatch.fnmatchcase(k, p)]
            keys = [k for k in dict.fromkeys(keys) if k not in used][: chart.most]
            used |= set(keys)
            for title, lines, figure in _draw(run, chart, keys) if keys else []:
                constant = None if chart.patterns[0] in _NEVER_FLAT else flat_value(lines)
                if constant is not None and not chart.folded:
                    flat.append((f"{title} {short(constant)}", figure))
                else:
                    (folded if chart.folded else visible).append(figure)
        lead = ""
        if name == "Speed":
            timelines = map(timeline.figure, timeline.read(run.folder))
            lead, visible = time_split(run) + "".join(timelines), visible + cost(run)
        visible += rewards_by_distance(run) if name == "The policy" else []
        if visible or folded or lead or flat:
            extra = _folded(f"{len(folded)} more of them", folded)
            names = ", ".join(name for name, _ in flat)
            extra = _folded(f"Flat: {names}", [figure for _, figure in flat]) + extra
            grid = f'<div class="grid">{"".join(visible)}</div>'
            out.append(f"<section><h2>{escaped(name)}</h2>{lead}{grid}{extra}</section>")
    remaining = [key for key in candidates if key not in used]
    figures = [_alone(run, key)[-1] for key in remaining[:MAX_OTHER]]
    unshown = len(remaining) - len(figures)
    extra = f"<p>{unshown} more are in metrics.jsonl.</p>" if unshown else ""
    return "".join(out) + _folded(f"All other metrics ({len(remaining)})", figures, extra)


def _folded(title: str, figures: Sequence[str], extra: str = "") -> str:
    if not figures:
        return ""
    grid = f'<div class="grid">{"".join(figures)}</div>'
    return f"<details><summary>{escaped(title)}</summary>{grid}{extra}</details>"


def repeats(run: RecordedRun, key: str) -> bool:
    """Returns whether a part or a source of the reward is the reward itself, in every row."""
    if not matches(key, ("reward/part/*", "reward/source/*")):
        return False
    part, reward = (run.columns(k) for k in (key, "reward/mean"))
    return len(part[1]) == len(reward[1]) and np.allclose(part[1], reward[1], equal_nan=True)


def spans(run: RecordedRun) -> list[Span]:
    """Returns a shaded span for every phase but RL; none for a run of one phase."""
    starts = []
    for row in run.rows:
        if row["phase"] and (not starts or starts[-1][0] != row["phase"]):
            starts.append((row["phase"], row["x"]))
    ends = [x for _, x in starts[1:]] + [run.rows[-1]["x"] if run.rows else 0]
    phases = zip(starts, ends, strict=True) if len(starts) > 1 else ()
    return [Span(name.upper(), start, end) for (name, start), end in phases if name != "rl"]


def series_of(run: RecordedRun, key: str, phase: str | None = None) -> Series:
    """Returns a metric over the steps, with its interval, if it has one, and its meaning."""
    x, y = run.columns(key, phase)
    meaning = run.meanings.get(key)
    title = meaning.line() if meaning else ""
    low, high = (
        dict(zip(*run.columns(key + end, phase), strict=True)) for end in ("_low", "_high")
    )
    dots = key.startswith("eval/")
    if not (low and high):
        return Series(key, x, y, dots=dots, title=title)
    band = [np.array([bound.get(step, math.nan) for step in x]) for bound in (low, high)]
    return Series(key, x, y, *band, dots=dots, title=title)


def what_it_means(known: Metric | None, values: Sequence[float] = ()) -> str:
    """Returns the line under a chart's title: meaning, healthy range, and whether the last of the
    values is outside of it; "" for a metric that is not known."""
    if known is None:
        return ""
    text = escaped(known.meaning[:1].upper() + known.meaning[1:])
    if known.healthy:
        text += f". Healthy: {escaped(known.healthy)}"
    if len(values) and known.outside(float(values[-1])):
        advice = f": {escaped(known.advice)}" if known.advice else ""
        text += f'. <b class="unhealthy">Outside{advice}</b>'
    return f'<span class="what">{text}.</span>'


def _since(run: RecordedRun, lines: Sequence[Series]) -> str:
    """Returns where the lines begin, if that is later than the run itself did."""
    begins = [float(s.x[0]) for s in lines if s.x.size]
    if not spans(run) or not begins or min(begins) <= spans(run)[0].start:
        return ""
    passed = [span for span in spans(run) if span.end <= min(begins)]
    after = f", after {passed[-1].name}" if passed else ""
    return f"from step {min(begins):g}{after}"


def _figure(
    run: RecordedRun, chart: Chart, lines: Sequence[Series], phase: str | None = None
) -> str:
    unit = ", ".join(filter(None, (chart.unit, _since(run, lines))))
    title = f"{chart.title} ({phase.upper()})" if phase else chart.title
    shaded = () if phase else spans(run)
    first = next((s.name for s in lines if s.x.size), lines[0].name)
    description = f'<span class="what">{escaped(chart.what)}.</span>' if chart.what else ""
    note = description or what_it_means(run.meanings.get(first), run.columns(first)[1])
    return line_chart(title, unit, lines, spans=shaded, note=note, from_zero=chart.from_zero)


def flat_value(lines: Sequence[Series]) -> float | None:
    """Returns the value of lines of three points or more that all stay at it, except for rounding;
    None if any moves, or they are at different values."""
    finite = [line.y[np.isfinite(line.y)] for line in lines if line.x.size]
    if not finite or min(map(len, finite)) < 3:
        return None
    values = np.concatenate(finite)
    if np.ptp(values) > max(NOISE, ROUNDING * float(np.abs(values).max())):
        return None
    middle = float(np.median(values))
    return 0.0 if abs(middle) <= NOISE else middle


def _alone(run: RecordedRun, key: str) -> tuple[str, list[Series], str]:
    meaning = run.meanings.get(key)
    title, unit = MISMATCH.get(key, key), meaning.unit if meaning else ""
    lines = [series_of(run, key)]
    return title, lines, _figure(run, Chart(title, unit, (key,)), lines)


def _draw(
    run: RecordedRun, chart: Chart, keys: Sequence[str]
) -> Iterator[tuple[str, Sequence[Series], str]]:
    """(title, lines, figure) of one `Chart`: usually one, or one a phase, or one a metric."""
    if not chart.title:
        for key in keys:
            yield _alone(run, key)
        return
    phases = [p for p in run.phases() if any(len(run.columns(k, p)[0]) for k in keys)]
    split = chart.by_phase and len(phases) > 1
    for phase in phases if split else [None]:
        lines = [series_of(run, key, phase) for key in keys]
        title = f"{chart.title} ({phase.upper()})" if phase else chart.title
        yield title, lines, _figure(run, chart, lines, phase)


def _times(run: RecordedRun) -> list[str]:
    """The names of the seconds that make up a step."""
    logged = [k for k in run.keys() if fnmatch.fnmatchcase(k, "time/*_s")]
    return [k for k in logged if not matches(k, WITHIN)]


def time_split(run: RecordedRun) -> str:
    """Returns a bar for each phase of how its seconds were spent, as HTML."""
    keys = sorted(
        _times(run), key=lambda k: TIME_ORDER.index(k) if k in TIME_ORDER else len(TIME_ORDER)
    )
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


def cost(run: RecordedRun) -> list[str]:
    """Returns the chart of device-seconds of each step: seconds times the devices of the run."""
    totals: dict[float, float] = {}
    for key in _times(run):
        for x, seconds in zip(*run.columns(key), strict=True):
            if 0 <= seconds < 1e9:
                totals[x] = totals.get(x, 0.0) + float(seconds)
    devices = run.devices()
    if not totals or not devices:
        return []
    x = np.array(sorted(totals))
    line = Series("device-seconds", x, devices * np.array([totals[step] for step in x]))
    note = '<span class="what">What a step costs: its seconds times the devices of the run.</span>'
    unit = f"device-seconds on {devices} device" + ("s" if devices > 1 else "")
    return [line_chart("Cost of a step", unit, [line], spans=spans(run), from_zero=True, note=note)]


# -- rewards against the distance from the reference --


def distance(run: RecordedRun) -> dict[float, float]:
    """Returns {step: sqrt KL(policy || reference)}, KL in nats per response: the mean over the
    sampled tokens of log policy - log reference, times their number per response."""
    names = ("ref_kl/k1", "response_tokens/mean")
    kl, length = (dict(zip(*run.columns(key), strict=True)) for key in names)
    divergences = {x: kl[x] * length[x] for x in kl if x in length}
    return {x: float(np.sqrt(max(y, 0.0))) for x, y in divergences.items() if np.isfinite(y)}


def rewards_by_distance(run: RecordedRun) -> list[str]:
    """Returns a chart of the reward that is trained on, and one of other measures of the same
    policy: the parts of the reward, such as one with weight 0, and the held-out accuracy. If
    the first still rises while the others fall, the reward is over-optimised (Gao et al.,
    arXiv 2210.10760)."""
    distances = distance(run)
    parts = [k for k in run.keys() if matches(k, ("reward/part/*",)) and not repeats(run, k)]
    trained, other_series = (
        [line for key in keys if (line := _series(run, key, distances)) is not None]
        for keys in (("reward/mean",), (*parts[:4], "eval/accuracy"))
    )
    if not trained or not other_series:
        return []
    note = (
        '<span class="what">x: root of the KL to the reference, in nats per response. A reward '
        "that rises to the right while the others fall is over-optimised.</span>"
    )
    unit = "against the distance from the reference"
    return [
        line_chart(title, unit, lines, unit_x="√KL", note=note)
        for title, lines in (("Trained reward", trained), ("Other rewards", other_series))
    ]


def _series(run: RecordedRun, key: str, distances: dict[float, float]) -> Series | None:
    steps, values = run.columns(key)
    points = sorted((distances[x], y) for x, y in zip(steps, values, strict=True) if x in distances)
    if len(points) < FEWEST:
        return None
    x, y = np.array(points).T
    # The number beside the name is that of the last step, as in all charts.
    return Series(key, x, y, dots=key.startswith("eval/"), last=float(values[-1]))
