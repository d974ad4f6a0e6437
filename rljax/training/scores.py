"""Checks for samples without a score: a reward is tried before anything is compiled, a run that
scores nothing stops, and a warning says if a time limit hits the long responses."""

import logging
import re
import time
from collections.abc import Sequence

import numpy as np

from rljax.components import Component
from rljax.contracts import spec
from rljax.data.online.prompts import PromptRecord
from rljax.data.online.stream import Stream
from rljax.errors import InputError
from rljax.rewards.pool.calling import FIELDS, asks_nobody, members, wanted_fields
from rljax.rollout import Reward, ScoredRow
from rljax.rollout.scoring.reward import with_cost_or_error
from rljax.tracking.episodes import shown_episodes
from rljax.training.run import Run

LOG = logging.getLogger("rljax")
_UNSCORED = ("errors", "timeouts", "abstained")  # metrics that count samples without a score
_UNSCORED_STEPS = 3  # steps in a row without a score, after which the run stops
_LATE_SAMPLES = 8  # samples over a time limit, before a warning blames their length
_LONGER = 0.75  # and the least share of pairs in which the late response is the longer one
_SHOWN_CHARACTERS = 200
SHOWN_PROMPTS = 2  # of a step, of which best, mean and worst are shown
_TRIAL_S = 30.0  # for a row; a slow reward is no mistake
# Errors of a server that a reward asks: it may answer later.
_OF_A_SERVER = re.compile(r"\w*(Connect|Timeout|TimedOut|URL|HTTP|Endpoint|RateLimit|Remote|API)")


def shown_sample(row: ScoredRow) -> str:
    """Returns one line: why a sample has no score, and its prompt, response and ground truth."""
    fields = ("prompt", "response", "ground_truth")
    texts = [f"{name} {_shortened(row.sample[name])}" for name in fields if name in row.sample]
    return "; ".join([f"{row.score.status}: {row.score.message}", *texts])


def _shortened(value: object) -> str:
    text = repr(value)
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def try_rewards(run: Run) -> list[str]:
    """Scores ordinary responses to a row of each source of the data, before anything is compiled,
    and right answers to it in the usual formats; returns warnings.

    Raises InputError if the reward has a score for none of them, whatever the score: it raises,
    returns no number, or takes longer than it may. Rewards that ask a server or a model are not
    tried. An environment plays one exchange on the first row.
    """
    data, trains = run.setup.data, run.setup.needs_reward
    if run.player is not None and run.player.has_turns:
        for record in _some_rows(data.sources[0])[:1]:
            run.player.first_exchange(record)
        return []
    warnings = []
    for source in data.sources if trains else ():
        warnings += _try_reward(run.reward, _some_rows(source))
    eval_reward = None if run.eval_player is None else run.eval_player.reward
    if eval_reward is not None and not (trains and eval_reward.pool is run.reward.pool):
        warnings += _try_reward(eval_reward, _some_rows(data.test_prompts))
    return list(dict.fromkeys(warnings))


def _some_rows(source: Sequence[PromptRecord] | Stream) -> list[PromptRecord]:
    """The first row, one from the middle and the last one; the first of a stream."""
    if isinstance(source, Stream):
        return [record for record in [source[0]] if record is not None]
    return [source[i] for i in sorted({0, len(source) // 2, len(source) - 1}) if source]


def _try_reward(reward: Reward, records: Sequence[PromptRecord]) -> list[str]:
    pool = reward.row_pool
    if pool is None or reward.rubrics is not None or not asks_nobody(pool.component):
        return []
    rows: list[ScoredRow] = []
    for record in records:
        results = scored_responses(reward, record)
        if any(row.score.status == "ok" for row in results):
            return _try_formats(reward, record, results)
        if not results:
            return []
        rows += results
    if not rows:
        return []
    if all(row.score.status == "timeout" for row in rows):
        limit = reward.pool.timeout_s
        raise InputError(
            f"reward {pool.component.text!r} took longer than reward.timeout_s={limit:g} for each "
            f"of {len(rows)} responses to {len(records)} rows of the data",
            rule="such samples have no score, and nothing is learned from them",
            fix=f"make it faster, or reward.timeout_s={10 * limit:g}",
        )
    if _OF_A_SERVER.match(rows[0].score.message):
        return [f"the reward was tried on a row of the data: {shown_sample(rows[0])}"]
    raise InputError(
        f"reward {pool.component.text!r} was tried on {len(records)} rows of the data and has no "
        "score for an ordinary response",
        rule=shown_sample(rows[0]),
        fix=_mending(rows[0], reward.needs_costs),
    )


# Formats of a right answer, and the part of each that is in a prompt that asks for it.
_PLAIN = ("{}", "The answer is {}.")
_FORMATS = (
    ("#### {}", "####"),
    ("\\boxed{{{}}}", "boxed"),
    ("<answer>{}</answer>", "<answer>"),
    ("<think>...</think>\n<answer>{}</answer>", "<answer>"),
    ("```\n{}\n```", "```"),
    ("Answer: {}", "Answer:"),
)


def _try_formats(reward: Reward, record: PromptRecord, plain: Sequence[ScoredRow]) -> list[str]:
    """A warning where the ground truth of a row, as the response, is worth nothing in any usual
    format, or only in formats that the prompt does not ask for. `plain`: the rows of _PLAIN."""
    truth, names = str(record.ground_truth), wanted_fields(reward.pool.component)[0]
    compares = names is None or "ground_truth" in names
    if not compares or not truth.strip() or _is_specification(reward.pool.component, truth):
        return []
    if any(row.score.status != "ok" or row.score.value > 0 for row in plain):
        return []
    forms = [form for form, _ in _FORMATS]
    rows = scored_responses(reward, record, [form.format(truth) for form in forms])
    if not rows or any(row.score.status != "ok" for row in rows):
        return []
    pairs = zip((*_PLAIN, *forms), (*plain, *rows), strict=True)
    worth = {form: row.score.value for form, row in pairs}
    scored = [(form, sign) for form, sign in _FORMATS if worth[form] > 0]
    if any(sign in record.prompt_text for _, sign in scored):
        return []
    text = reward.pool.component.text
    if not scored:
        return [
            f"the reward {text!r} gives a right answer {max(worth.values()):g} at most: the ground "
            f"truth {_shortened(truth)} of row {record.index} was tried as the response, by itself "
            "and in the usual formats. Fix: a reward that fits the column"
        ]
    form_texts = ", ".join(repr(form.format(truth)) for form, _ in scored[:2])
    return [
        f"the reward {text!r} gives the right answer {_shortened(truth)} of row {record.index} "
        f"{worth['{}']:g}, and {worth[scored[0][0]]:g} where it is written {form_texts}, which the "
        "prompt does not ask for. Fix: a prompt that says the format, or another reward"
    ]


def _is_specification(component: Component, truth: str) -> bool:
    """Returns whether a ground truth says how a response is checked, and is no response itself."""
    if truth.lstrip()[:1] in ("{", "["):
        return True
    components = members(component) or [component]
    return any(spec(member).truth != "answer" for member in components)


def _mending(row: ScoredRow, costs: bool = False) -> str:
    """Returns the fix for a reward that had no score for a sample, by what it raised
    or returned."""
    message, sample = row.score.message, row.sample
    extra = sample.get("extra_info") or {}
    if match := re.match(r"KeyError: (['\"])(.*?)\1", message):
        fix = f"add {match[2]!r} to the rows, or read one of the fields of this one: "
        fields = [name for name in FIELDS if name in sample and name != "extra_info"]
        extra_names = f", and in extra_info {', '.join(map(str, extra))}" if extra else ""
        return f"{fix}{', '.join(fields)}{extra_names}"
    if "no number" in message:
        return "return float(...) of one number, or a dict of numbers with 'score'"
    if row.score.status == "timeout":
        return "raise reward.timeout_s, or make the reward faster"
    if message.startswith("MemoryError"):
        return "raise reward.memory_gb, or make the reward hold less"
    if match := re.match(r"NameError: name '(\w+)'", message):
        return f"import or define {match[1]!r} in the file of the reward"
    if match := re.match(r"ModuleNotFoundError: No module named '(\w+)", message):
        return f"pip install {match[1]}"
    cost = " and 'cost'" * costs
    return f"correct it: it returns a number, or a dict of numbers with 'score'{cost}, for any text"


def scored_responses(
    reward: Reward, record: PromptRecord, texts: Sequence[str] = ()
) -> list[ScoredRow]:
    """Scores these responses, or ones that a policy may give; returns [] if that takes longer than
    a trial may."""
    texts = texts or [form.format(record.ground_truth) for form in _PLAIN]
    samples = [
        {**reward.fields(record, [0] * (len(text.split()) + 1), 0, 0), "response": text}
        for text in texts
    ]
    pending, deadline = reward.pool.submit(samples), time.monotonic() + _TRIAL_S
    while not pending.done():
        if time.monotonic() > deadline:
            pending.cancel()
            return []
        time.sleep(0.01)
    scores = pending.result()
    if reward.needs_costs and reward.cost_model is None:
        scores = [with_cost_or_error(score) for score in scores]
    return [
        ScoredRow(sample, score, record, 0) for sample, score in zip(samples, scores, strict=True)
    ]


def check_scores(run: Run, metrics: dict) -> None:
    """Called after a step: raises InputError if several steps in a row had no score, because none
    of them taught anything; warns if samples over a time limit are the long ones."""
    if "reward/errors" not in metrics:
        return
    failed = sum(metrics.get(f"reward/{kind}", 0.0) for kind in _UNSCORED)
    unscored = 0 < metrics.get("batch/completions", 0.0) <= failed
    run.unscored_steps = run.unscored_steps + 1 if unscored else 0
    if run.unscored_steps >= _UNSCORED_STEPS:
        raise _no_scores(
            run,
            f"stopped at step {run.progress.step}: no reward of {run.unscored_steps} steps in "
            f"a row was a score, and nothing was learned from them",
        )
    _warn_of_long_ones(run, metrics)


def require_scores(run: Run) -> None:
    """Raises InputError for a run that ends without one score: it has learned nothing."""
    failed = sum(run.progress.faults.get(f"reward/{kind}", 0.0) for kind in _UNSCORED)
    if run.setup.needs_reward and 0 < run.progress.completions <= failed:
        raise _no_scores(
            run,
            f"no reward of this run was a score: all {failed:.0f} failed, and nothing was learned",
        )


def _no_scores(run: Run, problem: str) -> InputError:
    report = run.source.report  # None right after a resume
    row = next((row for row in (report.rows if report else ()) if row.score.status != "ok"), None)
    return InputError(
        problem,
        rule=f"the first one of the last step: {shown_sample(row)}" if row else "",
        fix=_mending(row, run.setup.needs_costs)
        if row
        else "look at the samples of the last step in the report",
    )


def _warn_of_long_ones(run: Run, metrics: dict) -> None:
    longer = metrics.get("reward/timeout_longer_fraction")
    if longer is None:
        return
    masked, scored = (metrics.get(f"reward/{k}", 0.0) for k in ("timeouts", "timeouts_scored"))
    previous, late = run.late_samples, masked + scored
    run.late_samples += late
    run.late_and_longer += late * longer
    share = run.late_and_longer / run.late_samples
    if previous < _LATE_SAMPLES <= run.late_samples and share >= _LONGER:
        consequence = "they have the score that the reward declares for that"
        if masked:
            consequence = (
                "they are masked, so a policy can avoid a bad score by writing more. If the "
            )
            consequence += "reward asks no server, declare what it is worth then: "
            consequence += "@rljax.contracts.contract(on_timeout=0.0)"
        LOG.warning(
            "step %d: %d responses were over the limits of the reward, and %.0f %% of the time the "
            "late response is the longer one: %s",
            run.progress.step,
            run.late_samples,
            100 * share,
            consequence,
        )


def _of_prompts(rows: Sequence[ScoredRow]) -> list[tuple[float, list[int]]]:
    """Returns (mean, indices) for the prompts whose scores differ most: the mean score of all
    samples of a prompt, and the indices in `rows` of its best sample, the one nearest to the mean
    and the worst. The rows of a prompt are sorted from the best one on.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.score.status == "ok":
            groups.setdefault(row.group, []).append(i)
    candidates = []
    for rows_of_group in groups.values():
        scores = np.array([rows[i].score.value for i in rows_of_group])
        if len(rows_of_group) > 1 and scores[0] > scores[-1]:
            middle = rows_of_group[int(np.abs(scores - scores.mean()).argmin())]
            indices = list(dict.fromkeys((rows_of_group[0], middle, rows_of_group[-1])))
            candidates.append((scores[0] - scores[-1], float(scores.mean()), indices))
    candidates.sort(key=lambda entry: -entry[0])
    return [(mean, indices) for _, mean, indices in candidates[:SHOWN_PROMPTS]]


def examples(run: Run) -> dict[str, list[dict]]:
    """Picks the samples of a step that are shown: "samples", the best, the worst, and some in
    between, and of the prompts whose samples differ most the best one, one near the mean and the
    worst; with an environment also "episodes" (rljax.tracking.episodes)."""
    report = run.source.report
    worth = [-row.score.value if row.score.status == "ok" else np.inf for row in report.rows]
    rows = [report.rows[i] for i in np.argsort(worth, kind="stable")]
    picks = np.unique(np.linspace(0, len(rows) - 1, min(8, len(rows))).astype(int)).tolist()
    means = {}
    for mean, indices in _of_prompts(rows):
        means |= dict.fromkeys(indices, mean)
        picks += [i for i in indices if i not in picks]
    of_prompt = {i: {"prompt_mean": mean} for i, mean in means.items()}
    return {
        "samples": [
            {**rows[i].example(), **of_prompt.get(i, {}), "phase": "rl"} for i in sorted(picks)
        ],
        "episodes": [episode.record() for episode in shown_episodes(report.episodes)],
    }
