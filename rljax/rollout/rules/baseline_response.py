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
from rljax.batch import Batch, FinishReason, take_rows
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import PlainText, contract
from rljax.data.online.prompts import PromptRecord, Prompts, with_end_token
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import constrain_rows
from rljax.metric import Metric
from rljax.rollout.rollout import RolloutText, run_rollout
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
    texts = [record.extra_info.get(COLUMN) for record in rollout.prompts.records]
    bad = next((text for text in texts if not isinstance(text, str | None)), "")
    if bad:
        raise InputError(
            f"a {COLUMN} of the data",
            value=bad,
            rule="a text, or none",
            fix=f"write a text in {COLUMN!r}, or leave the column out: the baselines are sampled "
            "then",
        )
    if all(text is not None for text in texts):
        rows = take_rows(rollout.batch, slice(0, None, samples))
    else:
        key = stream(key, "baseline response")
        rows = reference.generate(rollout.prompts, key, sampling.greedy())
    if all(text is None for text in texts):
        return rows
    if rollout.prompts.images is not None:
        raise InputError(
            f"{COLUMN} beside images",
            rule="baselines of prompts with images are sampled",
            fix=f"leave {COLUMN!r} out of the rows",
        )
    limit, columns = sampling.max_response_tokens, rows.tokens.shape[1]
    text_rows = _written(rollout.prompts, texts, tokenizer, limit, columns)
    return _overwritten(rows, *place(text_rows, reference.model.mesh))


def _written(prompts: Prompts, texts, tokenizer, limit: int, columns: int):
    """Returns tokens, segment_ids, mask [P, S], finish_reason [P], and whether a prompt has a text
    [P]. A text that is longer than a response may be is cut, as a sample would be."""
    shape = (len(texts), columns)
    tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask, finish = np.zeros(shape, np.float32), np.zeros(len(texts), np.int32)
    for row, text in enumerate(texts):
        if text is None:
            continue
        start, ids = prompts.lengths[row], with_end_token(tokenizer.encode(text), tokenizer)
        finish[row] = FinishReason.LENGTH if len(ids) > limit else FinishReason.STOP
        ids = ids[:limit]
        tokens[row, :start] = prompts.tokens[row, :start]
        tokens[row, start : start + len(ids)] = ids
        valid[row, : start + len(ids)] = 1
        mask[row, start : start + len(ids)] = 1
    return tokens, valid, mask, finish, np.array([text is not None for text in texts])


@jax.jit
def _overwritten(rows: Batch, tokens, valid, mask, finish, has_text) -> Batch:
    """Returns the rows with the text of the data in place of the response, where a prompt has one.
    Such rows have no log-probs, and version -1."""
    column = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    text_fields = {
        "tokens": tokens,
        "segment_ids": valid,
        "positions": jnp.where(valid > 0, column, 0),
        "mask": mask,
        "finish_reason": finish,
        "group": jnp.arange(tokens.shape[0], dtype=jnp.int32),
        "policy_version": jnp.full(tokens.shape, -1, jnp.int32),
    }

    def chosen(name, old):
        text = text_fields.get(name, jnp.zeros_like(old))
        return jnp.where(has_text.reshape(-1, *(1,) * (old.ndim - 1)), text, old)

    fields = {name: chosen(name, x) for name, x in vars(rows).items() if x is not None}
    return rows.replace(**fields)


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
