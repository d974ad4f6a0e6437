"""Preference labels by a judge (RLAIF, arXiv 2309.00267): pairs of completions -> rows of `pairs`.

What lives here: both orders of each pair, ties and failures and how many there were, files. What
does not: judges (rljax.rewards.judges.judging), their processes (rljax.rewards.pool.pool), training
on the labels (dataflows preference and reward_model). A comparison is a dict of prompt (text or
messages), first and second (texts).
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.config import Config
from rljax.data.offline.batches import batch_arrays
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.encoded import load_run_tokenizer
from rljax.data.online.prompts import Prompts, encode_prompts
from rljax.data.rows.columns import prompt_of, require_text
from rljax.data.rows.read import read_rows
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.evaluation.saved import SavedPolicy
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.rewards.judges.judging import judge_of
from rljax.rewards.pool.pool import RewardPool, Score
from rljax.rollout import ModelScorer
from rljax.sampler import Sampling
from rljax.setup.weights import scalar_model

# What a judge is here: comparisons -> P(first is better), NaN and a message where it failed.
Judge = Callable[[Sequence[dict]], list[Score]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What both orders say together. outcome: "first" | "second" | "tie" (the judge cannot tell) |
    "disagreement" (its answer turns with the order, or is a tie in one order only) | "failed".
    probability: that the first is better, the mean of both orders."""

    outcome: str
    probability: float
    liked_position: int = 0  # +1: whichever stood first won both times; -1: whichever stood second
    message: str = ""


def verdict(forward: Score, backward: Score) -> Verdict:
    """forward: P(first is better) with the first one first; backward: P(second is better), asked
    with the second one first."""
    for score in (forward, backward):
        if score.status != "ok":
            return Verdict("failed", math.nan, message=f"{score.status}: {score.message}")
    here, there = forward.value, backward.value
    probability = (here + 1 - there) / 2
    if here == there == 0.5:
        return Verdict("tie", 0.5)
    if (here - 0.5) * (there - 0.5) < 0:
        return Verdict("first" if here > 0.5 else "second", probability)
    sides = (here > 0.5) + (there > 0.5) - (here < 0.5) - (there < 0.5)
    return Verdict("disagreement", probability, liked_position=int(sides / 2))


def text_judge(text: str, *, workers: int = 2, timeout_s: float = 60.0) -> Judge:
    """A judge of text in killable processes: one that hangs, raises or says no probability has
    failed on that comparison alone."""
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


def model_judge(folder: str, *, max_tokens: int = 4096, rows: int = 8) -> Judge:
    """An outcome reward model of a folder: P = sigmoid(score of the first - score of the second).
    A text of more than `max_tokens`, prompt included, has no score; `rows` are read at once."""
    config = Config(model=f"{folder.rstrip('/')}/")  # with a slash it is a path
    tokenizer = load_run_tokenizer(config)
    mesh = make_mesh()
    known = load_config(folder, **dataclasses.asdict(config.model_settings))
    model, params = scalar_model(config, Model(known, mesh), "judge", folder, adapted=False)
    rows = rows * mesh.size
    scorer = ModelScorer(model, params, rows)

    def encoded(prompt, completion):
        row = dict(prompt=prompt, completion=completion, label=True)
        try:
            found, _ = encode_rows(
                load_rows([row], "train", "unpaired"), tokenizer, "unpaired", max_tokens=max_tokens
            )
        except InputError as error:
            return Score(math.nan, {}, "error", 0.0, str(error))
        return found[0]

    def ask(comparisons: Sequence[dict]) -> list[Score]:
        items = [encoded(c["prompt"], c[name]) for c in comparisons for name in ("first", "second")]
        scores = _scores(items, scorer, mesh, rows)
        return [_preferred(*scores[i : i + 2]) for i in range(0, len(scores), 2)]

    return ask


def _scores(items: list, scorer: ModelScorer, mesh, rows: int) -> list[Score]:
    """Of each item; what is a Score already stays."""
    todo = [i for i, item in enumerate(items) if not isinstance(item, Score)]
    out = list(items)
    longest = max(
        (len(items[i].prompt_ids) + len(items[i].completion_ids) for i in todo), default=1
    )
    for start in range(0, len(todo), rows):
        part = todo[start : start + rows]
        of = [items[i] for i in part + part[:1] * (rows - len(part))]  # one shape, one compile
        batch = Batch(**batch_arrays("unpaired", of, length=longest))
        for i, score in zip(part, scorer.score(place(batch, mesh)), strict=False):
            out[i] = score
    return out


def _preferred(first: Score, second: Score) -> Score:
    for score in (first, second):
        if score.status != "ok":
            return score
    gap = first.value - second.value
    return Score(0.5 * (1 + math.tanh(gap / 2)), {}, "ok", 0.0)  # the sigmoid, without overflow


def label(
    comparisons: Sequence[dict], judge: Judge, *, ties: Literal["drop", "keep"] = "drop"
) -> tuple[list[dict], dict[str, float]]:
    """Rows of `pairs` (prompt, chosen, rejected, probability), and counts of what happened.

    Every comparison is asked in both orders. A pair on which the orders do not agree is a tie, not
    a label: dropped, or kept with tie = true. A failed one is dropped. Counts: judge/asked,
    labelled, ties, disagreements, failed, identical; judge/first_won and judge/second_won, the
    disagreements in which the position decided.
    """
    if ties not in ("drop", "keep"):
        raise InputError("ties", value=ties, rule="drop or keep")
    asked = [c for c in comparisons if c["first"] != c["second"]]
    swapped = [{**c, "first": c["second"], "second": c["first"]} for c in asked]
    said = judge([*asked, *swapped])
    found = [verdict(*pair) for pair in zip(said[: len(asked)], said[len(asked) :], strict=True)]
    rows = []
    for comparison, what in zip(asked, found, strict=True):
        row = _row(comparison, what)
        if what.outcome != "failed" and (ties == "keep" or not row["tie"]):
            rows.append(row)
    outcomes = [what.outcome for what in found]
    counts = {
        "asked": len(asked),
        "labelled": outcomes.count("first") + outcomes.count("second"),
        "ties": outcomes.count("tie"),
        "disagreements": outcomes.count("disagreement"),
        "failed": outcomes.count("failed"),
        "identical": len(comparisons) - len(asked),
        "first_won": sum(what.liked_position > 0 for what in found),
        "second_won": sum(what.liked_position < 0 for what in found),
    }
    failures = [what.message for what in found if what.outcome == "failed"]
    if failures and len(failures) == len(asked):
        raise InputError(
            f"all {len(asked)} judgements failed", rule=failures[0], fix="try the judge by hand"
        )
    return rows, {f"judge/{name}": float(n) for name, n in counts.items()}


def _row(comparison: dict, what: Verdict) -> dict:
    """`probability` is that of the chosen completion."""
    names = ("second", "first") if what.outcome == "second" else ("first", "second")
    probability = 1 - what.probability if what.outcome == "second" else what.probability
    return {
        "prompt": comparison["prompt"],
        "chosen": comparison[names[0]],
        "rejected": comparison[names[1]],
        "probability": probability,
        "tie": what.outcome not in ("first", "second"),
    }


# -- where comparisons come from, and where labels go --


def load_comparisons(spec: str | Sequence[dict], split: str = "train") -> list[dict]:
    """From rows of prompt and either first + second or completions (texts, two or more, of which
    all pairs are compared). Raises InputError that names the row."""
    rows = read_rows(spec, split)
    out = []
    for index, row in enumerate(rows.rows):
        place = rows.place(index)
        texts = row.get("completions")
        if texts is None:
            texts = [row.get("first"), row.get("second")]
        if not isinstance(texts, Sequence) or isinstance(texts, str) or len(texts) < 2:
            raise InputError(
                f"{place} has no two completions",
                fix="give each row 'first' and 'second', or a list 'completions'",
            )
        for text in texts:
            require_text(text, f"{place}, a completion", "remove it")
        if row.get("prompt") is None:
            raise InputError(f"{place} has no 'prompt'", fix="give each row one")
        prompt = prompt_of(row["prompt"], f"{place}, column 'prompt'")
        pairs = itertools.combinations(texts, 2)
        out += [{"prompt": prompt, "first": a, "second": b} for a, b in pairs]
    return out


def sample_comparisons(
    policy: SavedPolicy,
    data: str,
    *,
    samples: int = 2,
    temperature: float = 1.0,
    max_prompt_tokens: int = 512,
    max_response_tokens: int = 512,
    prompts_at_once: int = 64,
    seed: int = 0,
) -> list[dict]:
    """Completions of a saved policy to the prompts of `data`, compared two by two; empty ones are
    left out."""
    if samples < 2:
        raise InputError("samples", value=samples, rule=">= 2: they are compared")
    records = load_prompts(data, "train")
    asked, _ = encode_prompts(records, policy.tokenizer, max_prompt_tokens=max_prompt_tokens)
    length = max(len(record.token_ids) for record in asked)
    sampling = Sampling(
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        stop_ids=tuple(policy.tokenizer.eos_ids),
    )
    actor, out = policy.actor(), []
    for start in range(0, len(asked), prompts_at_once):
        part = asked[start : start + prompts_at_once]
        filled = part + part[:1] * (prompts_at_once - len(part))  # one shape, one compile
        prompts = Prompts.from_records(filled, length=length)
        key = jax.random.fold_in(jax.random.key(seed), start)
        batch = fetch(actor.generate(prompts, key, sampling, n=samples))
        said = [
            policy.tokenizer.decode([int(i) for i in row[mask > 0]])
            for row, mask in zip(np.asarray(batch.tokens), np.asarray(batch.mask), strict=True)
        ]
        for i, record in enumerate(part):
            pairs = itertools.combinations(said[i * samples : (i + 1) * samples], 2)
            out += [{"prompt": record.prompt, "first": a, "second": b} for a, b in pairs if a and b]
    return out


def write_pairs(rows: Sequence[dict], path: str | Path) -> None:
    """One JSON object per line, as data.train reads it."""
    if not rows:
        raise InputError(f"{path}: no pair has a label", fix="another judge, or other completions")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise InputError(f"{path} cannot be written", rule=str(error)) from None
