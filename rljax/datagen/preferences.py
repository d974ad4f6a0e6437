"""Preference labels by a judge (RLAIF, arXiv 2309.00267): pairs of completions -> rows of `pairs`,
judged in both orders. A comparison is a dict of prompt (text or messages), first and second, and
tools and variables of the chat template where its prompt has some."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax

from rljax.arrays import place
from rljax.batch import Batch
from rljax.config.declare import check_options
from rljax.config.policy_options import PreferenceOptions
from rljax.data.images.columns import require_text_alone
from rljax.data.offline.batches import batch_arrays
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows, prompt_row
from rljax.data.rows.columns import prompt_columns, rows_of, text_of
from rljax.data.rows.read import read_rows
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.errors import InputError
from rljax.evaluation.process_models import load_scorer
from rljax.files import write_rows
from rljax.policies import SavedPolicy, filled_chunks, load_named_policy, sample_all
from rljax.rewards.judges.judging import judge_of
from rljax.rewards.pool.jobs import counted_failures
from rljax.rewards.pool.pool import RewardPool, Score
from rljax.rollout import ModelScorer

LOG = logging.getLogger("rljax")
# A judge: comparisons -> P(first is better), NaN and a message where it failed.
Judge = Callable[[Sequence[dict]], list[Score]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of a pair from both orders. outcome: "first" | "second" | "tie" (the judge
    cannot tell) | "disagreement" (its answer turns with the order, or is a tie in one order only) |
    "failed". probability: that the first is better, the mean of both orders."""

    outcome: str
    probability: float
    liked_position: int = 0  # +1: whichever stood first won both times; -1: whichever stood second
    message: str = ""


def verdict(forward: Score, backward: Score) -> Verdict:
    """Returns the verdict of two scores. forward: P(first is better) with the first one first;
    backward: P(second is better) with the second one first. A score that failed makes it
    "failed"."""
    for score in (forward, backward):
        if score.status != "ok":
            return Verdict("failed", math.nan, message=score.failure)
    first_wins, second_wins = forward.value, backward.value
    probability = (first_wins + 1 - second_wins) / 2
    if first_wins == second_wins == 0.5:
        return Verdict("tie", 0.5)
    if (first_wins - 0.5) * (second_wins - 0.5) < 0:
        return Verdict("first" if first_wins > 0.5 else "second", probability)
    sides = (first_wins > 0.5) + (second_wins > 0.5) - (first_wins < 0.5) - (second_wins < 0.5)
    return Verdict("disagreement", probability, liked_position=int(sides / 2))


def text_judge(text: str, *, workers: int = 2, timeout_s: float = 60.0) -> Judge:
    """Returns a judge that runs in killable processes, each call at most `timeout_s` seconds: one
    that hangs, raises or returns no probability fails on that comparison alone. Raises InputError
    for a `text` that names no judge."""
    judge_of(text)

    def ask(comparisons: Sequence[dict]) -> list[Score]:
        samples = [
            {"prompt": c["prompt"], "response": c["first"], "extra_info": {"second": c["second"]}}
            for c in comparisons
        ]
        reward = f"rljax.rewards.judges.judging.judged(judge={text!r})"
        with RewardPool(reward, workers=workers, timeout_s=timeout_s) as pool:
            return pool.score(samples)

    return ask


def model_judge(folder: str | Path, *, max_tokens: int = 4096, rows: int = 8) -> Judge:
    """Returns a judge by the outcome reward model of a folder: P = sigmoid(score of the first -
    score of the second). A text of more than `max_tokens`, prompt included, has no score; `rows`
    per device are read at once. Raises InputError for a folder without such a model."""
    saved = load_scorer(folder)
    mesh = saved.model.mesh
    rows = rows * mesh.size
    scorer = ModelScorer(saved.model, saved.params, rows)

    def encoded(comparison, name):
        row = dict(prompt_columns(comparison), completion=comparison[name], label=True)
        try:
            rows = load_rows([row], "train", "unpaired")
            (item,), _ = encode_rows(rows, saved.tokenizer, "unpaired", max_tokens=max_tokens)
        except InputError as error:
            return Score(math.nan, {}, "error", 0.0, str(error))
        return item

    def ask(comparisons: Sequence[dict]) -> list[Score]:
        scores = [encoded(c, name) for c in comparisons for name in ("first", "second")]
        scorable = [i for i, item in enumerate(scores) if not isinstance(item, Score)]
        items = [scores[i] for i in scorable]
        longest = max((len(x.prompt_ids) + len(x.completion_ids) for x in items), default=1)
        for start, chunk in filled_chunks(items, rows):
            batch = Batch(**batch_arrays("unpaired", chunk, length=longest))
            model_scores = scorer.score(place(batch, mesh))
            for i, score in zip(scorable[start : start + rows], model_scores, strict=False):
                scores[i] = score
        return [_preferred(*scores[i : i + 2]) for i in range(0, len(scores), 2)]

    return ask


def _preferred(first: Score, second: Score) -> Score:
    for score in (first, second):
        if score.status != "ok":
            return score
    gap = first.value - second.value
    return Score(0.5 * (1 + math.tanh(gap / 2)), {}, "ok", 0.0)  # the sigmoid, without overflow


def label(
    comparisons: Sequence[dict], judge: Judge, *, ties: Literal["drop", "keep"] = "drop"
) -> tuple[list[dict], dict[str, float]]:
    """Returns rows of `pairs` (prompt, chosen, rejected, probability), and counts of the verdicts.

    Every comparison is judged in both orders. A pair on which the orders do not agree is a tie, not
    a label: dropped, or kept with tie = true. A failed one is dropped. Counts: judge/asked,
    labelled, ties, disagreements, failed, identical; judge/first_won and judge/second_won, the
    disagreements in which the position decided. Raises InputError for other `ties`, and if all
    judgements failed.
    """
    if ties not in ("drop", "keep"):
        raise InputError("ties", value=ties, fix="write drop or keep")
    judged = [c for c in comparisons if c["first"] != c["second"]]
    swapped = [{**c, "first": c["second"], "second": c["first"]} for c in judged]
    scores = judge([*judged, *swapped])
    halves = zip(scores[: len(judged)], scores[len(judged) :], strict=True)
    verdicts = [verdict(*pair) for pair in halves]
    rows = []
    for comparison, judgement in zip(judged, verdicts, strict=True):
        row = _row(comparison, judgement)
        if judgement.outcome != "failed" and (ties == "keep" or not row["tie"]):
            rows.append(row)
    outcomes = [judgement.outcome for judgement in verdicts]
    counts = {
        "asked": len(judged),
        "labelled": outcomes.count("first") + outcomes.count("second"),
        "ties": outcomes.count("tie"),
        "disagreements": outcomes.count("disagreement"),
        "failed": outcomes.count("failed"),
        "identical": len(comparisons) - len(judged),
        "first_won": sum(judgement.liked_position > 0 for judgement in verdicts),
        "second_won": sum(judgement.liked_position < 0 for judgement in verdicts),
    }
    failed = [i for i, judgement in enumerate(verdicts) if judgement.outcome == "failed"]
    failures = [verdicts[i].message for i in failed]
    if failures and len(failures) == len(judged):
        raise InputError(
            f"all {len(judged)} judgements failed", rule=failures[0], fix="try the judge by hand"
        )
    if failures:
        LOG.warning(
            "%s of %s judgements failed, and their pairs are left out: %s. The first is of the "
            "prompt %.80r",
            f"{len(failures):,}",
            f"{len(judged):,}",
            counted_failures(failures),
            judged[failed[0]]["prompt"],
        )
    return rows, {f"judge/{name}": float(n) for name, n in counts.items()}


def _row(comparison: dict, judged: Verdict) -> dict:
    """Returns a row of `pairs`; `probability` is that of the chosen completion."""
    names = ("second", "first") if judged.outcome == "second" else ("first", "second")
    probability = 1 - judged.probability if judged.outcome == "second" else judged.probability
    return {
        **prompt_columns(comparison),
        "chosen": comparison[names[0]],
        "rejected": comparison[names[1]],
        "probability": probability,
        "tie": judged.outcome not in ("first", "second"),
    }


# -- where comparisons come from, and where labels go --


def load_comparisons(spec: str | Sequence[dict], split: str = "train") -> list[dict]:
    """Returns comparisons from rows of a prompt, as pairs have it, and either first + second or
    completions (two or more texts, of which all pairs are compared). Raises InputError that names
    the row, also for one with images."""
    rows = read_rows(spec, split)
    comparisons = []
    for index in range(len(rows.rows)):
        location = rows.location(index)
        row = prompt_row(rows, index)
        require_text_alone([row], "this command")
        texts = row.get("completions")
        if texts is None:
            texts = [x for x in (row.get("first"), row.get("second")) if x is not None]
        if not isinstance(texts, Sequence) or isinstance(texts, str) or len(texts) < 2:
            fix = "give each row 'first' and 'second', or a list 'completions'"
            raise InputError(f"{location} has no two completions", fix=fix)
        for text in texts:
            fix = "write its text" if isinstance(text, (list, Mapping)) else "remove it"
            text_of(text, f"{location}, a completion", fix, empty=True)
        pairs = itertools.combinations(texts, 2)
        comparisons += [{**prompt_columns(row), "first": a, "second": b} for a, b in pairs]
    rows.unread.warn([{"index": index} for index in range(len(rows.rows))])
    return comparisons


def sample_comparisons(
    saved: SavedPolicy,
    data: str,
    *,
    samples: int = 2,
    max_prompt_tokens: int | None = None,
    seed: int = 0,
    prompts_per_call: int | None = None,
    keep_truncated: bool = False,
    **sampling,
) -> list[dict]:
    """Returns comparisons of a saved policy's completions to the prompts of `data`, two by two,
    also of empty ones: a policy that is trained on the labels may write them.

    Completions without an end are left out with a warning, unless `keep_truncated`: training would
    learn an end behind them. `sampling` replaces the policy's own temperature and
    max_response_tokens. Raises InputError for fewer than 2 samples, for prompts with images, and
    where no prompt has two completions that ended."""
    if samples < 2:
        fix = "--samples=2 or more: the samples of a prompt are compared with one another"
        raise InputError("samples", value=samples, fix=fix)
    with rows_of("--data", "--data=FILE of prompts with answers"):
        fraction = held_out_fraction(saved.config, data)
        records = load_prompts(data, "train", need_ground_truth=False, test_fraction=fraction)
    require_text_alone(records, "this command")
    prompts, _ = saved.encode(records, max_tokens=max_prompt_tokens)
    policy, key = saved.ready(prompts, **sampling), jax.random.key(seed)
    completions = sample_all(policy, prompts, samples, key=key, prompts_per_call=prompts_per_call)
    comparisons, left_out = [], 0
    for i, prompt in enumerate(prompts):
        group = completions[i * samples : (i + 1) * samples]
        texts = [sample.text for sample in group if keep_truncated or not sample.truncated]
        left_out += samples - len(texts)
        pairs = itertools.combinations(texts, 2)
        comparisons += [{**prompt.columns, "first": a, "second": b} for a, b in pairs]
    limit = policy.sampling.max_response_tokens
    count = f"{left_out:,} of {len(completions):,} completions have no end within {limit:,} tokens"
    longer = f"--max_response_tokens={2 * limit} or more, or --keep_truncated"
    if not comparisons:
        rule = f"two of a prompt's completions are compared, and {count}"
        raise InputError("nothing to compare", rule=rule, fix=longer)
    if left_out:
        LOG.warning("%s and are left out. Fix: %s", count, longer)
    return comparisons


def write_pairs(rows: Sequence[dict], path: str | Path, counts: Mapping[str, float]) -> None:
    """Writes one JSON object per line, as data.train reads it. Raises InputError that has the
    `counts` of `label` if there is no row."""
    if not rows:
        raise InputError(
            f"{path}: no pair has a label",
            value=", ".join(f"{name} {count:g}" for name, count in counts.items()),
            rule="a label is what the judge prefers in both orders: first_won counts the pairs in "
            "which it preferred whichever stood first",
            fix="another judge, other completions, or --ties=keep for pairs without a preference",
        )
    write_rows(path, rows)


def label_preferences(options: PreferenceOptions) -> dict[str, float]:
    """Labels the comparisons of a file, or of a policy's completions, and writes the pairs; returns
    the counts of `label`."""
    check_options(options)
    if options.judge:
        judge = text_judge(options.judge, workers=options.workers, timeout_s=options.timeout_s)
    else:
        judge = model_judge(options.reward_model, max_tokens=options.max_tokens)
    if options.policy:
        policy = load_named_policy(options.policy, trust_code=options.trust_code)
        names = ("samples", "max_prompt_tokens", "seed", "temperature", "max_response_tokens")
        names += ("keep_truncated",)
        sampling = {name: getattr(options, name) for name in names}
        comparisons = sample_comparisons(policy, options.data, **sampling)
    else:
        comparisons = load_comparisons(options.data)
    rows, counts = label(comparisons, judge, ties=options.ties)
    write_pairs(rows, options.out, counts)
    return counts
