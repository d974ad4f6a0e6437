"""Evaluation of a process reward model on disk: scores of labelled lines, error and sign accuracy.
Axes: B rows, S tokens; results are lists of rows, one number per line."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from rljax import hub
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.data.offline.batches import batch_arrays
from rljax.data.offline.encode import Stepwise, encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.rows.columns import rows_of
from rljax.data.text.tokenizer import Tokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.policies import filled_chunks
from rljax.rollout.scoring.process import token_scores
from rljax.setup import load_scalar, step_separator_of


@dataclasses.dataclass(frozen=True)
class SavedScorer:
    """A reward model opened from a folder."""

    model: Model
    params: dict
    tokenizer: Tokenizer
    step_separator: str = "\n"  # between the steps that it was trained on


def load_scorer(folder: str | Path) -> SavedScorer:
    """The model of a Hugging Face folder with a scalar head, such as a run's reward_model/, or
    of a repository of the hub. Raises InputError for a folder that does not exist or has no
    such model."""
    folder = hub.model_folder(folder)
    if not folder.is_dir():
        raise InputError("no such folder", value=str(folder), fix="give a run's reward_model/")
    model, params = load_scalar("the reward model", str(folder), load_config(folder), make_mesh())
    return SavedScorer(model, params, load_tokenizer(folder), step_separator_of(folder))


_token_scores = functools.partial(jax.jit, static_argnames=("model", "rows"))(token_scores)


def step_scores(
    scorer: SavedScorer, items: Sequence[Stepwise], *, rows_at_once: int = 64
) -> list[np.ndarray]:
    """The score at the end of every labelled step of each item, in their order: one array
    [steps] each."""
    length = max(len(item.ids) for item in items)
    out = []
    for start, chunk in filled_chunks(items, rows_at_once):
        batch = place(Batch(**batch_arrays("stepwise", chunk, length=length)), scorer.model.mesh)
        scores = fetch(_token_scores(scorer.model, scorer.params, batch, batch.rows))
        for row, item in zip(scores, items[start : start + rows_at_once], strict=False):
            out.append(row[: len(item.mask)][item.mask > 0])
    return out


def score_lines(
    scorer: SavedScorer, prompt: str | list[dict], lines: Sequence[str], *, ended: bool = False
) -> list[float]:
    """The score of every line, given the lines before it: the scores of a growing prefix are those
    of the final text. Raises InputError for more tokens than the model reads."""
    labels = [0.0] * len(lines)
    record = dict(prompt=prompt, completions=list(lines), labels=labels, ended=ended, index=0)
    return step_scores(scorer, _encode(scorer, [record])[0], rows_at_once=1)[0].tolist()


def _encode(scorer: SavedScorer, rows: list[dict]) -> tuple[list[Stepwise], dict]:
    limit = scorer.model.config.max_tokens
    options = dict(separator=scorer.step_separator, max_tokens=limit, overlong="error")
    return encode_rows(rows, scorer.tokenizer, "stepwise", **options)


def step_metrics(scores: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> dict[str, float]:
    """Metrics over all lines, from scores and labels [lines] of each program: mse; among lines
    whose label is not 0, the share whose score has the label's sign; mean |score| of lines whose
    label is 0 (0.0 where there are none). `mse_clipped` clips scores to [-1, 1] as the dense
    reward does."""
    s, y = (np.concatenate([np.asarray(x, np.float64) for x in v]) for v in (scores, labels))
    signed, neutral = y != 0, y == 0
    return {
        "lines": float(len(y)),
        "mse": float(np.mean((s - y) ** 2)),
        "mse_clipped": float(np.mean((np.clip(s, -1, 1) - y) ** 2)),
        "sign_accuracy": float(np.mean(s[signed] * y[signed] > 0)) if signed.any() else 0.0,
        "neutral_size": float(np.mean(np.abs(s[neutral]))) if neutral.any() else 0.0,
        "positive_fraction": float(np.mean(y[signed] > 0)) if signed.any() else 0.0,
    }


def evaluate_scorer(folder: str | Path, data: str, *, split: str = "test") -> dict:
    """{"metrics": step_metrics, "counts": of rows kept and dropped, "rows": [{prompt,
    lines, scores, labels}]} of a file of steps. Raises InputError for a row that is not
    valid or too long."""
    scorer = load_scorer(folder)
    with rows_of("--data", "--data=FILE of steps with labels"):
        rows = load_rows(data, split, "stepwise")
    items, counts = _encode(scorer, rows)
    scores = step_scores(scorer, items)
    labels = [item.labels[item.mask > 0] for item in items]
    results = [
        dict(prompt=r["prompt"], lines=r["completions"], scores=s.tolist(), labels=y.tolist())
        for r, s, y in zip(rows, scores, labels, strict=True)
    ]
    return {"metrics": step_metrics(scores, labels), "counts": counts, "rows": results}


def score_table(lines: Sequence[str], scores: Sequence[float], labels: Sequence[float] = ()):
    """A rich table: each line beside its score, and its label if it has one."""
    from rich.table import Table

    label_cells = list(labels) or [None] * len(lines)
    table = Table()
    table.add_column("line")
    for name in ("score", "label")[: 2 if len(labels) else 1]:
        table.add_column(name, justify="right")
    for line, score, label in zip(lines, scores, label_cells, strict=True):
        cells = [f"{score:+.2f}"] + ([] if label is None else [f"{label:+g}"])
        table.add_row(line.replace("[", "\\["), *cells)
    return table
