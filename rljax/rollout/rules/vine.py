"""The rollout of VinePPO: values of states by sampling from them (arXiv 2410.01679).

Axes: B rows, S columns, M states, K completions of a state.
"""

import time

import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import LIMITS, Batch, last_token, row_scores
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import row_shards
from rljax.metric import Metric
from rljax.rollout.rules.collect import once
from rljax.rollout.sample import require_sampler
from rljax.rollout.scoring.process import TokenTexts
from rljax.shaping.scores import apply_shaping
from rljax.shaping.steps import line_ids

METRICS = {
    "vine/states": Metric("states of a response whose value was estimated by sampling", "states"),
    "vine/completions": Metric(
        "completions that were drawn for values, beside the step's own", "samples"
    ),
    "vine/unfinished": Metric("completions that a limit ended", "share", "small"),
    "vine/value": Metric("value of the states, mean", "score", "rises"),
    "vine/bias": Metric(
        "value of the states less the score of the response, mean", "score", "about 0"
    ),
    "vine/calibration_error": Metric(
        "distance of values from scores, in tenths of the states by value",
        "score",
        "small; with few states by chance above 0",
    ),
    "time/vine_share": Metric("part of the rollout's time that values took", "share"),
}


@contract(
    safe=True,
    fills=("step_ids", "values"),
    continues=True,
    check=lambda config, options: check_vine(**options),
)
def vine(
    prompts,
    key,
    cfg,
    *,
    actor,
    sample,
    tokenizer,
    completions: int = 9,
    most_states: int = 20,
    step_tokens: int = 0,
    unfinished: float | None = 0.0,
):
    """`once`, and at the first token of each step of a response V(s), the mean score of
    `completions` fresh continuations from there, shaped like those of the samples; of each row's
    first `most_states` steps. NaN: not estimated (`vineppo` fills these backwards).

    A step is a line, or `step_tokens` tokens. A continuation that a limit ended counts as
    `unfinished`, whatever its score, before it is shaped; None: as its score.

    Raises InputError unless `completions` and `most_states` are at least 1.
    """
    check_vine(completions, most_states, step_tokens)
    branch = require_sampler(sample, by="vine()").outcome_alone().branch
    began = time.perf_counter()
    result = once(prompts, key, cfg, sample=sample)
    sampled = time.perf_counter()
    batch = result.batch
    tokens, mask, finish = fetch((batch.tokens, batch.mask, batch.finish_reason))
    steps = _steps(tokens, mask, finish, tokenizer, step_tokens)
    states = [
        (row, int(np.argmax(steps[row] == step)))
        for row in range(len(steps))
        for step in range(1, min(int(steps[row].max(initial=0)), most_states) + 1)
    ]
    values = np.full(steps.shape, np.nan, np.float32)
    key = stream(key, "vine")
    scores, cut = _estimates(
        branch, result.prompts, batch, states, key, cfg, actor.model.mesh, completions, unfinished
    )
    for (row, column), estimates in zip(states, scores, strict=True):
        valid = estimates[~np.isnan(estimates)]
        values[row, column] = valid.mean() if valid.size else np.nan
    mesh = actor.model.mesh
    outcomes = _shaped(batch, fetch(batch.scores), cfg.reward_shaping, mesh)
    metrics = {
        **result.metrics,
        "vine/states": len(states) / max(1, int((mask > 0).any(axis=1).sum())),
        "vine/completions": float(scores.size),
        "vine/unfinished": float(cut),
        **_calibration(values, states, outcomes),
    }
    steps, values = place((steps, values), mesh)
    ended = time.perf_counter()
    metrics["time/vine_share"] = (ended - sampled) / max(ended - began, 1e-9)
    return result.replace(batch=batch.replace(step_ids=steps, values=values), metrics=metrics)


def check_vine(completions: int = 9, most_states: int = 20, step_tokens: int = 0, **_) -> None:
    """Raises InputError unless the options of `vine` are whole numbers, each of at least
    its least value."""
    for name, value, least in (
        ("completions", completions, 1),
        ("most_states", most_states, 1),
        ("step_tokens", step_tokens, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                f"vine({name})",
                value=value,
                rule=f"a whole number >= {least}",
                fix=f"set {name} to {least} or more",
            )


def _steps(tokens, mask, finish, tokenizer, step_tokens: int) -> np.ndarray:
    """Returns step_ids [B, S] of lines, or of steps of `step_tokens` policy tokens."""
    if step_tokens:
        counted = np.cumsum(mask > 0, axis=1) - 1
        return np.where(mask > 0, counted // step_tokens + 1, 0).astype(np.int32)
    texts, truncated = TokenTexts(tokenizer)(tokens, mask), np.isin(finish, LIMITS)
    return line_ids(texts, mask, truncated, score_partial_line=True)


def _estimates(
    branch,
    prompts,
    batch: Batch,
    states,
    key,
    cfg,
    mesh,
    completions: int,
    unfinished: float | None,
) -> tuple[np.ndarray, float]:
    """Returns shaped scores of continuations of states [(row, column)], NaN where the reward
    failed: [M, K]; and the share of them that a limit ended."""
    # Calls of one shape, of about as many rows as the step has.
    shards = row_shards(mesh)
    size = -(-max(1, batch.rows // completions) // shards) * shards
    group, mask = fetch((batch.group, batch.mask))
    # Policy tokens of the row before each token.
    tokens_before = np.cumsum(mask > 0, axis=1) - (mask > 0)
    estimates, cut = [], []
    for first in range(0, len(states), size):
        part = states[first : first + size]
        rows = np.array([row for row, _ in part] + [part[-1][0]] * (size - len(part)), np.int32)
        columns = np.array([c for _, c in part] + [part[-1][1]] * (size - len(part)), np.int32)
        offsets = columns - np.asarray(prompts.response_starts)[group[rows]]
        continued, report = branch(prompts, batch, rows, offsets, key, n=completions)
        scores = [r.score.value if r.score.status == "ok" else np.nan for r in report.rows]
        limited = np.isin(fetch(continued.finish_reason), LIMITS)
        scores = np.array(scores, np.float64)
        if unfinished is not None:
            scores = np.where(limited & ~np.isnan(scores), unfinished, scores)
        kept_counts = np.repeat(tokens_before[rows, columns].astype(np.int32), completions)
        continued = continued.replace(kept_tokens=place(kept_counts, mesh))
        scores = _shaped(continued, scores, cfg.reward_shaping, mesh)
        estimates.append(scores.reshape(size, completions)[: len(part)])
        cut.append(limited.reshape(size, completions)[: len(part)])
    if not estimates:
        return np.zeros((0, completions)), 0.0
    return np.concatenate(estimates), float(np.concatenate(cut).mean())


def _shaped(batch: Batch, scores: np.ndarray, rules, mesh) -> np.ndarray:
    """Returns the scores [B], NaN where one failed, after all rules of algorithm.reward_shaping."""
    if not rules:
        return scores
    valid = ~np.isnan(scores)
    host = np.where(valid, scores, 0.0).astype(np.float32)
    values = place(host, mesh)
    rewards = last_token(batch) * values[:, None]
    batch = batch.replace(scores=values, rewards=rewards)
    return np.where(valid, fetch(row_scores(apply_shaping(batch, rules))), np.nan)


def _calibration(values, states, scores: np.ndarray, bins: int = 10) -> dict[str, float]:
    """Measures how far the values of states are from the scores of the responses that went through
    them: the mean of V - R, and |mean V - mean R| in each tenth of the states, by V, in the
    mean."""
    pairs = [(values[row, column], scores[row]) for row, column in states]
    pairs = sorted(pair for pair in pairs if not np.isnan(pair[0]))
    if not pairs:
        return {}
    value, score = np.array(pairs, np.float64).T
    # States of one value are of one bin.
    bin_of = np.searchsorted(value, value) * bins // len(value)
    gaps = [
        (bin_of == bin_index).mean() * abs((value - score)[bin_of == bin_index].mean())
        for bin_index in np.unique(bin_of)
    ]
    return {
        "vine/value": float(value.mean()),
        "vine/bias": float((value - score).mean()),
        "vine/calibration_error": float(np.sum(gaps)),
    }
