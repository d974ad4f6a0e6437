"""Scores of lines as rewards of tokens: which tokens are a line, labels on them, dense rewards.

Host functions from the texts of tokens to `step_ids` and `process_rewards`, and the reward that
adds a process reward model's scores to the outcome. Labels come from rljax.datagen.first_error; the
advantages of rljax.advantages.steps read the same `step_ids`.

A line ends at its newline token or at the final token of the response. Axes: B rows, S tokens.
"""

import bisect
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import batch as batches
from rljax.batch import Batch
from rljax.contracts import NotNegative, contract
from rljax.errors import InputError
from rljax.metric import Metric

METRICS = {
    "process/dense_sum": Metric(
        "rewards of lines, summed over a response", "score", "small beside 1"
    ),
    "process/share_of_return": Metric(
        "part of the return that the lines' rewards make", "share", "below 0.5"
    ),
    "process/correlation": Metric(
        "correlation of the lines' scores with the outcome",
        "-1 to 1",
        "above 0.2; at 0 the process model says nothing",
    ),
    "process/lines": Metric("scored lines of a response", "lines"),
    "process/score_passed": Metric(
        "mean line score of responses that pass", "score", "above process/score_failed"
    ),
    "process/score_failed": Metric("mean line score of responses that fail", "score"),
}

_FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def code_region(text: str) -> tuple[int, int]:
    """Returns (start, stop) in characters of the last fenced block of a response; all of
    it without one."""
    spans = [match.span(1) for match in _FENCE.finditer(text)]
    return spans[-1] if spans else (0, len(text))


@contract(safe=True)
def line_ids(
    token_texts: Sequence[Sequence[str]],
    mask: np.ndarray,
    truncated: Sequence[bool],
    *,
    code_only: bool = False,
    score_partial_line: bool = False,
    separator: str = "\n",
) -> np.ndarray:
    """step_ids: the line of each policy token, counted from 1, and 0 elsewhere: int32 [B, S].

    token_texts[b][t] is the text of token t ("" for EOS and other special tokens); together they
    are the response. A token in which a `separator` ends, by default a newline, ends a line,
    whatever follows in it; a run takes the separator from the folder of reward.process_model. Text
    after the last one is a line too, except where the row was cut off in the middle of it and
    not `score_partial_line`. `code_only` counts the lines of `code_region` alone. Raises InputError
    unless there is a text for every policy token, and for every row of `mask` [B, S].
    """
    mask = np.asarray(mask)
    ids = np.zeros(mask.shape, np.int32)
    if len(token_texts) != len(mask) or len(truncated) != len(mask):
        raise InputError(
            "line_ids: rows",
            value=(len(token_texts), len(truncated)),
            rule=f"{len(mask)}, as mask",
            fix="give the texts and the end of each row of the mask",
        )
    for b, texts in enumerate(token_texts):
        tokens = [t for t in range(mask.shape[1]) if mask[b, t] > 0]
        if tokens and tokens[-1] >= len(texts):
            raise InputError(
                f"line_ids: texts of row {b}",
                value=len(texts),
                rule=f"at least {tokens[-1] + 1}, up to its last policy token",
                fix="give a text for each token of the row",
            )
        drop_partial = bool(truncated[b]) and not score_partial_line
        _mark_lines(ids[b], tokens, texts, drop_partial, code_only, separator)
    return ids


def _mark_lines(
    ids, tokens: list[int], texts, drop_partial: bool, code_only: bool, separator: str
) -> None:
    """Writes the line of each of `tokens`, one row's policy tokens in order, into `ids` [S]."""
    text = "".join(texts[t] for t in tokens)
    start, stop = code_region(text) if code_only else (0, len(text))
    line, opened, has_text, offset = 1, [], False, 0
    ends = [match.end() for match in re.finditer(re.escape(separator), text)]
    for t in tokens:
        in_region = start <= offset < stop
        begin, offset = offset, offset + len(texts[t])
        if not in_region and texts[t]:
            continue
        opened.append(t)
        has_text = has_text or bool(texts[t].strip())
        if bisect.bisect_right(ends, offset) > bisect.bisect_right(ends, begin):
            ids[opened] = line
            line, opened, has_text = line + 1, [], False
    # Blank text behind the last newline, EOS among it, is no line. (A closed block ends with a
    # newline, so what is left of it is blank.)
    if has_text and not drop_partial:
        ids[opened] = line


def line_ends(step_ids: np.ndarray) -> np.ndarray:
    """Returns whether a token is the last of its line: bool [B, S]."""
    ids = np.asarray(step_ids)
    is_end = np.zeros(ids.shape, bool)
    for b, row in enumerate(ids):
        for line in np.unique(row[row > 0]):
            is_end[b, np.flatnonzero(row == line)[-1]] = True
    return is_end


def _scored_ends(batch: Batch, by: str):
    """Returns (whether a token is the last of its step [B, S], score in [-1, 1] there and 0
    elsewhere [B, S])."""
    batch.require("process_rewards", "step_ids", by=by)
    steps = jnp.where(batch.mask > 0, batch.step_ids, 0)
    is_last = (steps > 0) & (batches.next_policy_token(steps, batch) != steps)
    return is_last, jnp.where(is_last, jnp.clip(batch.process_rewards, -1.0, 1.0), 0.0)


@contract(safe=True, reads=("rewards", "scores", "process_rewards", "step_ids"))
def dense_step_rewards(
    batch: Batch,
    *,
    lambda_fail: NotNegative = 0.25,
    lambda_pass: NotNegative = 0.025,
    pass_above: float = 0.0,
) -> jax.Array:
    """rewards + lambda s_j / N at the last token of each of the row's N steps: [B, S].

    s_j = `process_rewards` there, clipped to [-1, 1] (a process reward model may fill all tokens);
    steps are `step_ids`. lambda is lambda_pass where `scores` exceeds pass_above, else lambda_fail:
    the sum never outweighs the outcome, and 1/N takes the gain out of more lines. No gradient.
    arXiv 2410.17621. Rows are unpacked. Raises InputError for a negative lambda, and where the
    batch lacks a field that this reads.
    """
    by = "dense_step_rewards"
    for name, value in (("lambda_fail", lambda_fail), ("lambda_pass", lambda_pass)):
        if value < 0:
            raise InputError(f"{by}({name})", value=value, fix=f"set {name} to 0 or more")
    batch.require("rewards", "scores", by=by)
    is_last, score = _scored_ends(batch, by)
    count = jnp.maximum(jnp.sum(is_last, axis=1), 1)
    weight = jnp.where(batch.scores > pass_above, lambda_pass, lambda_fail) / count
    rewards = jnp.where(batch.mask > 0, batch.rewards, 0.0) + weight[:, None] * score
    return jax.lax.stop_gradient(rewards.astype(batch.rewards.dtype))


@contract(reads=("rewards", "scores", "process_rewards", "step_ids"))
def process_reward_metrics(batch: Batch, rewards: jax.Array, *, pass_above: float = 0.0) -> dict:
    """Metrics of the scores in the `rewards` of dense_step_rewards: mean sum per row, share of the
    absolute return, correlation of a row's mean score with its outcome, lines per response, and the
    mean score of rows that pass and that fail: scalars, of rewards [B, S]."""
    is_last, score = _scored_ends(batch, "process_reward_metrics")
    batch.require("rewards", "scores", by="process_reward_metrics")
    outcome = jnp.where(batch.mask > 0, batch.rewards, 0.0)
    added = jnp.sum(jnp.where(batch.mask > 0, rewards, 0.0) - outcome, axis=1)
    lines = jnp.sum(is_last, axis=1)
    live = (lines > 0).astype(score.dtype)
    mean_score = jnp.sum(score, axis=1) / jnp.maximum(lines, 1)
    magnitudes = jnp.abs(added), jnp.abs(jnp.sum(outcome, axis=1))
    x, y = (v - batches.masked_mean(v, live) for v in (mean_score, batch.scores))
    spread = batches.masked_mean(x * x, live) * batches.masked_mean(y * y, live)
    covariance = batches.masked_mean(x * y, live)
    deviation = jnp.sqrt(jnp.where(spread > 0, spread, 1.0))
    share = jnp.sum(magnitudes[0]) / jnp.maximum(jnp.sum(magnitudes[0] + magnitudes[1]), 1e-12)
    passed = batch.scores > pass_above
    return {
        "process/dense_sum": jnp.mean(added),
        "process/share_of_return": share,
        "process/correlation": jnp.where(spread > 0, covariance / deviation, 0.0),
        "process/lines": jnp.mean(lines.astype(score.dtype)),
        "process/score_passed": batches.masked_mean(mean_score, live * passed),
        "process/score_failed": batches.masked_mean(mean_score, live * ~passed),
    }
