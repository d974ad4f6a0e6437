"""A rollout in which a text of the data, such as a stronger model's solution, stands in each
prompt's group (LUFFY, arXiv 2504.14945)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import place
from rljax.batch import Batch, take_rows
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import PlainText, contract
from rljax.data.text.chat import without_opened_mark
from rljax.errors import InputError
from rljax.mesh import constrain_rows
from rljax.metric import Metric
from rljax.rollout.rollout import RolloutText, check_inner, of_inner, run_rollout
from rljax.rollout.rules.given_rows import column_texts, write_texts
from rljax.rollout.sample import require_sampler

METRICS = {
    "demonstration/fraction": Metric(
        "prompts whose group has a demonstration of the data", "share", "above 0"
    ),
    "demonstration/reward": Metric("mean score of the demonstrations", "score", "near the best"),
    "demonstration/reward_of_samples": Metric(
        "mean score of the samples beside them; reward/mean is of both", "score", "rises"
    ),
    "demonstration/failed_fraction": Metric("demonstrations whose reward failed", "share", "0"),
    "demonstration/truncated_fraction": Metric(
        "demonstrations that were cut at sampler.max_response_tokens", "share", "0"
    ),
}


@contract(
    safe=True,
    fills=of_inner("fills"),
    needs_groups=of_inner("needs_groups"),
    drops_dead=of_inner("drops_dead"),
    rounds=of_inner("rounds"),
    single_rows=of_inner("single_rows"),
    check=lambda config, options: check_inner(options.get("inner", "once()")),
)
def with_demonstration(
    prompts,
    key,
    cfg,
    *,
    actor,
    reward,
    sample,
    draw,
    tokenizer,
    column: PlainText = "demonstration",
    inner: RolloutText = "once()",
):
    """The rollout `inner`, and in place of each prompt's last sample the text in a column of its
    data, where it has one; it is scored like a sample.

    LUFFY, arXiv 2504.14945, has one such trace beside seven samples, and the policy loss `luffy()`.
    The text has no log-probs of a sampler: algorithm.correction leaves it as it is. What opens the
    response in the prompt, such as <think>, is not written again.

    Raises InputError for one sample per prompt, for a column that holds no text, beside images, and
    for an environment.
    """
    n = cfg.samples_per_prompt
    if n < 2:
        raise InputError(
            "batch.samples_per_prompt",
            value=n,
            rule="at least 2: one of them may be a demonstration",
            fix="--config.batch.samples_per_prompt=2, or more",
        )
    score = require_sampler(sample, by="with_demonstration()").score
    roles = dict(actor=actor, reward=reward, sample=sample, draw=draw, tokenizer=tokenizer)
    result = run_rollout(resolve(inner, NAMESPACES["collect"]), prompts, key, cfg, **roles)
    if result.batch.episode is not None or result.batch.rows != n * len(result.prompts.records):
        raise InputError(
            "with_demonstration() of an environment, or of a rollout with other rows",
            rule="each prompt has samples_per_prompt single responses",
            fix="algorithm.collect='once()'",
        )
    pairs = zip(result.prompts.records, column_texts(result.prompts, column), strict=True)
    texts = [x if x is None else without_opened_mark(row.prompt_text, x) for row, x in pairs]
    shown = np.array([text is not None for text in texts])
    if not shown.any():
        return result.replace(metrics={**result.metrics, "demonstration/fraction": 0.0})
    mesh, limit = actor.model.mesh, cfg.sampling.max_response_tokens
    rows = take_rows(result.batch, slice(n - 1, None, n))
    rows = write_texts(rows, result.prompts, texts, tokenizer, limit, mesh)
    rows, report = score(rows, result.prompts)
    scored = [row.score for row, is_shown in zip(report.rows, shown, strict=True) if is_shown]
    known = [one.value for one in scored if one.status == "ok"]
    sizes = [len(tokenizer.encode(text)) for text in texts if text is not None]
    own = [row.score for row in result.report.rows if row.score.status == "ok"]
    # Those that demonstrations replace are among them.
    metrics = {
        "demonstration/fraction": float(shown.mean()),
        "demonstration/reward_of_samples": float(np.mean([s.value for s in own])) if own else 0.0,
        "demonstration/reward": float(np.mean(known)) if known else 0.0,
        "demonstration/failed_fraction": 1 - len(known) / len(scored),
        "demonstration/truncated_fraction": float(np.mean([size >= limit for size in sizes])),
    }
    batch = _in_last_place(result.batch, rows, *place((shown,), mesh), mesh=mesh)
    return result.replace(batch=batch, metrics={**result.metrics, **metrics})


@functools.partial(jax.jit, static_argnames="mesh")
def _in_last_place(samples: Batch, rows: Batch, shown: jax.Array, *, mesh) -> Batch:
    """Returns the samples, with `rows` in place of the last ones of prompts that are `shown`."""
    prompts = rows.rows
    # One whose reward failed has a group of its own, which must be no sample's.
    failed = rows.group >= prompts
    rows = rows.replace(group=jnp.where(failed, rows.group + samples.rows, rows.group))

    def replaced(name, x):
        x = x.reshape(prompts, -1, *x.shape[1:])
        new = jnp.where(shown.reshape(-1, *(1,) * (x.ndim - 2)), vars(rows)[name], x[:, -1])
        x = jnp.concatenate([x[:, :-1], new[:, None]], axis=1)
        return constrain_rows(x.reshape(-1, *x.shape[2:]), mesh)

    fields = {name: replaced(name, x) for name, x in vars(samples).items() if x is not None}
    return dataclasses.replace(samples, **fields)
