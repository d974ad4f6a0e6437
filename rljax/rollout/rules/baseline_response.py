"""A rollout with a baseline response of each prompt: the one of its data, or the reference's greedy
response, scored as the samples are (CGPO, arXiv 2409.20370).

Axes: P prompts, B = P n rows. Of the n rows of a prompt the last one is the baseline response.
"""

import dataclasses
import functools
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import place
from rljax.batch import Batch, take_rows
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import PlainText, contract
from rljax.data.online.prompts import PromptRecord
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import constrain_rows
from rljax.metric import Metric
from rljax.rollout.rollout import RolloutText, run_rollout
from rljax.rollout.rules.given_rows import column_texts, write_texts
from rljax.rollout.sample import require_sampler

METRICS = {
    "baseline/reward": Metric(
        "mean score of the prompts' baseline responses",
        "score",
        "steady: they are of the data or the reference",
    ),
    "baseline/failed_fraction": Metric(
        "baseline responses whose reward failed: their prompts are skipped", "share", "0"
    ),
}

COLUMN = "baseline_response"  # column of the data


@contract(safe=True, fills=("task",))
def with_baseline_response(
    prompts,
    key,
    cfg,
    *,
    actor,
    reference,
    reward,
    sample,
    draw,
    tokenizer,
    tasks: tuple[PlainText, ...] = (),
    inner: RolloutText = "once()",
):
    """The rollout `inner` of one sample less for each prompt, and as its last row the prompt's
    baseline response: the text in the column baseline_response of its data, or, where it has none,
    the reference's greedy response. It is scored like a sample, and in no report.

    `task`, CGPO's, is the first of `tasks`, patterns of data_source, that fits the prompt's.

    Raises InputError for one sample per prompt, for a prompt that fits no task, and for a baseline
    response that is no text.
    """
    samples = cfg.samples_per_prompt - 1
    if samples < 1:
        raise InputError(
            "batch.samples_per_prompt",
            value=cfg.samples_per_prompt,
            rule="at least 2: one of them is the baseline response",
            fix="--config.batch.samples_per_prompt=2, or more",
        )
    score = require_sampler(sample, by="with_baseline_response()").score
    for record in prompts.records:  # before anything is sampled
        task_of(record, tasks)
    roles = dict(actor=actor, reference=reference, reward=reward)
    roles |= dict(sample=sample, draw=draw, tokenizer=tokenizer)
    inner = resolve(inner, NAMESPACES["collect"])
    result = run_rollout(inner, prompts, key, cfg.replace(samples_per_prompt=samples), **roles)
    task = [task_of(record, tasks) for record in result.prompts.records]
    baseline = _baseline_rows(result, key, cfg.sampling, reference, tokenizer, samples)
    baseline, report = score(baseline, result.prompts)
    mesh = actor.model.mesh
    batch = _joined(result.batch, baseline, *place((np.array(task, np.int32),), mesh), mesh=mesh)
    baseline_scores = [row.score.value for row in report.rows if row.score.status == "ok"]
    metrics = {
        "baseline/reward": float(np.mean(baseline_scores)) if baseline_scores else 0.0,
        "baseline/failed_fraction": 1 - len(baseline_scores) / len(task),
    }
    return result.replace(batch=batch, metrics={**result.metrics, **metrics})


def task_of(record: PromptRecord, tasks: tuple[str, ...]) -> int:
    """Returns the index of the first of `tasks` that fits the data source; 0 without tasks. Raises
    InputError if none fits."""
    fits = (i for i, pattern in enumerate(tasks) if fnmatchcase(record.data_source, pattern))
    index = next(fits, None) if tasks else 0
    if index is None:
        raise InputError(
            f"no task for data source {record.data_source!r}",
            rule=f"the tasks are {', '.join(tasks)}; * is any text",
            fix=f"cgpo(tasks=(({record.data_source!r}, 'crpg()'), ...))",
        )
    return index


def _baseline_rows(rollout, key, sampling, reference, tokenizer, samples: int) -> Batch:
    """A row for each prompt, not scored yet."""
    texts = column_texts(rollout.prompts, COLUMN)
    if all(text is not None for text in texts):
        rows = take_rows(rollout.batch, slice(0, None, samples))
    else:
        key = stream(key, "baseline response")
        rows = reference.generate(rollout.prompts, key, sampling.greedy())
    if all(text is None for text in texts):
        return rows
    limit, mesh = sampling.max_response_tokens, reference.model.mesh
    return write_texts(rows, rollout.prompts, texts, tokenizer, limit, mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def _joined(samples: Batch, baseline: Batch, task: jax.Array, *, mesh) -> Batch:
    """The samples of each prompt, then its baseline response."""
    prompts, rows = baseline.rows, samples.rows
    # A failed one has a group of its own, which must be no sample's.
    failed = baseline.group >= prompts
    baseline = baseline.replace(group=jnp.where(failed, baseline.group + rows, baseline.group))

    def both(name, x):
        y = vars(baseline)[name]
        y = jnp.zeros((prompts, *x.shape[1:]), x.dtype) if y is None else y
        x = x.reshape(prompts, -1, *x.shape[1:])
        x = jnp.concatenate([x, y[:, None]], axis=1)
        return constrain_rows(x.reshape(-1, *x.shape[2:]), mesh)

    fields = {name: both(name, x) for name, x in vars(samples).items() if x is not None}
    row_tasks = jnp.repeat(task, rows // prompts + 1)
    return dataclasses.replace(samples, **fields).replace(task=constrain_rows(row_tasks, mesh))
