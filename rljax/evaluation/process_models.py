"""Evaluation of a process reward model on disk: scores of labelled lines, error and sign accuracy.

What lives here: loading one alone, its scores of `steps` rows, the numbers and tables made of them.
What does not: eval/mse of a training run (rljax.train.offline), dense rewards
(rljax.rollout.process). Axes: B rows, S tokens; results are lists of rows, one number per line.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from rljax.arrays import place
from rljax.batch import Batch
from rljax.data.offline.batches import batch_arrays
from rljax.data.offline.encode import Stepwise, encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.text.tokenizer import Tokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.rollout.process import token_scores
from rljax.setup import load_scalar


@dataclasses.dataclass(frozen=True)
class SavedScorer:
    """A process reward model ready to be asked."""

    model: Model
    params: dict
    tokenizer: Tokenizer


def load_scorer(folder: str | Path) -> SavedScorer:
    """The model of a Hugging Face folder with a scalar head, such as a run's reward_model/."""
    if not Path(folder).is_dir():
        raise InputError("no such folder", value=str(folder), fix="give a run's reward_model/")
    mesh = make_mesh(data=1, fsdp=-1, expert=1, context=1, tensor=1)
    model, params = load_scalar("the reward model", str(folder), load_config(folder), mesh)
    return SavedScorer(model, params, load_tokenizer(folder))


def step_scores(
    scorer: SavedScorer, items: Sequence[Stepwise], *, rows_at_once: int = 64
) -> list[np.ndarray]:
    """The score at the end of every labelled step of each item, in their order: [steps] each."""
    length = max(len(item.ids) for item in items)
    ask = jax.jit(lambda params, batch: token_scores(scorer.model, params, batch, batch.rows))
    found = []
    for start in range(0, len(items), rows_at_once):
        part = list(items[start : start + rows_at_once])
        filled = part + [part[0]] * (rows_at_once - len(part))
        arrays = batch_arrays("stepwise", filled, length=length)
        scores = np.asarray(ask(scorer.params, place(Batch(**arrays), scorer.model.mesh)))
        marks = (item.mask > 0 for item in part)
        found += [row[: len(m)][m] for row, m in zip(scores, marks, strict=False)]
    return found


def score_lines(
    scorer: SavedScorer, prompt: str | list[dict], lines: Sequence[str], *, ended: bool = False
) -> list[float]:
    """The score of every line, read after the lines before it: those of a growing prefix are those
    of the final text."""
    labels = [0.0] * len(lines)
    record = dict(prompt=prompt, completions=list(lines), labels=labels, ended=ended, index=0)
    limit = scorer.model.config.max_tokens
    items, _ = encode_rows(
        [record], scorer.tokenizer, "stepwise", max_tokens=limit, overlong="error"
    )
    return step_scores(scorer, items, rows_at_once=1)[0].tolist()


def step_metrics(scores: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> dict[str, float]:
    """Over all lines: mse; of those whose label is not 0, the share whose score has its sign; mean
    |score| of those whose label is 0 (0.0 where there are none); scores are clipped to [-1, 1] as
    the dense reward clips them for `mse_clipped`."""
    s, y = (np.concatenate([np.asarray(x, np.float64) for x in v]) for v in (scores, labels))
    told, neutral = y != 0, y == 0
    return {
        "lines": float(len(y)),
        "mse": float(np.mean((s - y) ** 2)),
        "mse_clipped": float(np.mean((np.clip(s, -1, 1) - y) ** 2)),
        "sign_accuracy": float(np.mean(s[told] * y[told] > 0)) if told.any() else 0.0,
        "neutral_size": float(np.mean(np.abs(s[neutral]))) if neutral.any() else 0.0,
        "positive_fraction": float(np.mean(y[told] > 0)) if told.any() else 0.0,
    }


def evaluate_scorer(folder: str | Path, data: str, *, split: str = "test") -> dict:
    """{"metrics": step_metrics, "rows": [{prompt, lines, scores, labels}]} on a file of steps."""
    scorer = load_scorer(folder)
    rows = load_rows(data, split, "stepwise")
    limit = scorer.model.config.max_tokens
    items, counts = encode_rows(
        rows, scorer.tokenizer, "stepwise", max_tokens=limit, overlong="error"
    )
    scores = step_scores(scorer, items)
    labels = [item.labels[item.mask > 0] for item in items]
    shown = [
        {
            "prompt": row["prompt"],
            "lines": row["completions"],
            "scores": s.tolist(),
            "labels": y.tolist(),
        }
        for row, s, y in zip(rows, scores, labels, strict=True)
    ]
    return {"metrics": step_metrics(scores, labels), "counts": counts, "rows": shown}


def score_table(lines: Sequence[str], scores: Sequence[float], labels: Sequence[float] = ()):
    """A rich table: each line beside its score, and its label where there is one."""
    from rich.table import Table

    told = list(labels) or [None] * len(lines)
    table = Table()
    table.add_column("line")
    for name in ("score", "label")[: 2 if len(labels) else 1]:
        table.add_column(name, justify="right")
    for line, score, label in zip(lines, scores, told, strict=True):
        cells = [f"{score:+.2f}"] + ([] if label is None else [f"{label:+g}"])
        table.add_row(line.replace("[", "\\["), *cells)
    return table
