"""A rollout whose samples a teacher reads behind another prompt: the policy's own one and a hint,
such as a demonstration, the answer, or another sample that is right (self-distillation).

Axes: B rows, S columns of a row, T columns of a row as the teacher reads it.
"""

import functools
import math
import re
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, batch_from_rows
from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.contracts import Count, PlainText, component_in, contract, spec
from rljax.data.online.prompts import PromptRecord, encode_prompt
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError, location_of
from rljax.mesh import constrain_rows
from rljax.metric import Metric
from rljax.reasoning import response_of
from rljax.rollout.rollout import Rollout, RolloutText, check_inner, of_inner, run_rollout
from rljax.rollout.rules.hints import HintSample

METRICS = {
    "hint/fraction": Metric(
        "samples that the teacher reads with a hint; it teaches no others", "share", "above 0"
    ),
    "hint/overlong_fraction": Metric(
        "samples whose prompt with the hint was too long for the teacher", "share", "0"
    ),
    "hint/prompt_tokens": Metric("mean length of the prompts with a hint", "tokens"),
}
HintText = component_in(NAMESPACES["hint"])
_PLACES = re.compile(r"\{(prompt|hint)\}")
_TEMPLATE = "{prompt}\n\n{hint}"


def _check_options(
    config, *, hint: str = "column()", template: str = _TEMPLATE, inner: str = "once()", **_
) -> None:
    """Raises InputError for a template without {hint}, for a hint that reads scores where no reward
    is computed, and for an inner rollout that asks for other roles."""
    check_inner(inner)
    if template.count("{hint}") != 1 or template.count("{prompt}") > 1:
        raise InputError(
            "with_hint(template)",
            value=template,
            rule="{hint} stands in it once, and {prompt} at most once",
            fix="template='{prompt}\\n\\n{hint}'",
        )
    reads_scores = "scores" in spec(resolve(hint, NAMESPACES["hint"])).reads
    if reads_scores and spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data == "samples":
        raise InputError(
            "with_hint(hint)",
            value=hint,
            rule=f"it reads the scores of samples, and dataflow={config.dataflow!r} has none",
            fix="on_policy_distil(match='sampled', scored=True)",
        )


@contract(
    safe=True,
    fills=of_inner("fills", "teacher", "teacher_logprobs"),
    needs_groups=of_inner("needs_groups"),
    drops_dead=of_inner("drops_dead"),
    continues=of_inner("continues"),
    searches=of_inner("searches"),
    rounds=of_inner("rounds"),
    single_rows=of_inner("single_rows"),
    targets=of_inner("targets"),
    check=lambda config, options: _check_options(config, **options),
)
def with_hint(
    prompts,
    key,
    cfg,
    *,
    actor,
    teacher,
    reward,
    sample,
    draw,
    tokenizer,
    hint: HintText = "column()",
    template: PlainText = _TEMPLATE,
    message: Literal["user", "system"] = "user",
    max_prompt_tokens: Count = 0,
    inner: RolloutText = "once()",
):
    """The rollout `inner`, and the log-probs that the teacher gives to its samples behind a prompt
    with a hint. It does not teach samples without one.

    `template` makes the last message of the user from its text, {prompt}, and the {hint};
    message="system": the system message, which is the hint alone where there was none. A prompt of
    bare text is filled in as a message of the user is. A prompt that is longer than
    `max_prompt_tokens` with its hint has no teacher; 0: as long as the model allows, and a longer
    one than ever before is another program.

    Raises InputError for a hint that is no text, and for a prompt without the message.
    """
    roles = dict(actor=actor, reward=reward, sample=sample, draw=draw, tokenizer=tokenizer)
    result = run_rollout(resolve(inner, NAMESPACES["collect"]), prompts, key, cfg, **roles)
    most_tokens = teacher.model.config.max_tokens - cfg.sampling.max_response_tokens
    most_tokens = min(most_tokens, max_prompt_tokens or most_tokens)
    fill = functools.partial(_filled, template=template, message=message)
    encode = functools.partial(_encoded, fill=fill, tokenizer=tokenizer, most_tokens=most_tokens)
    rows = _responses(result)
    texts = _hints(resolve(hint, NAMESPACES["hint"]), result, rows, tokenizer)
    encoded = [
        None if text is None else encode(result.prompts.records[row.prompt], text)
        for row, text in zip(rows, texts, strict=True)
    ]
    lengths = [len(ids) for ids in encoded if ids is not None]
    columns = most_tokens if max_prompt_tokens else _power_of_two(max(lengths, default=1))
    columns += max([cfg.sampling.max_response_tokens, *(len(row.ids) for row in rows)])
    arrays = _teachers_rows(rows, encoded, columns)
    batch = _hinted_teacher(
        teacher, result.batch, *place(arrays, actor.model.mesh), rows=cfg.microbatch_rows
    )
    hinted, scored = sum(text is not None for text in texts), sum(row.ids != [] for row in rows)
    metrics = {
        "hint/fraction": len(lengths) / max(scored, 1),
        "hint/overlong_fraction": (hinted - len(lengths)) / max(scored, 1),
        "hint/prompt_tokens": float(np.mean(lengths)) if lengths else 0.0,
    }
    return result.replace(batch=batch, metrics={**result.metrics, **metrics})


class _Row(NamedTuple):
    """A row of the batch: the index of its prompt, the column where its response begins, the ids of
    the response, which are none where the reward failed, and the score."""

    prompt: int
    start: int
    ids: list[int]
    score: float | None


def _responses(result: Rollout) -> list[_Row]:
    batch, starts = result.batch, result.prompts.response_starts
    fields = (batch.tokens, batch.segment_ids, batch.mask, batch.group, batch.scores)
    tokens, segments, mask, group, scores = fetch(fields)
    rows = []
    for i, end in enumerate(np.sum(segments > 0, axis=1)):
        if not np.any(mask[i] > 0):  # its reward failed: it has a group of its own
            rows.append(_Row(0, 0, [], None))
            continue
        start = int(starts[group[i]])
        score = None if scores is None else float(scores[i])
        rows.append(_Row(int(group[i]), start, tokens[i, start:end].tolist(), score))
    return rows


def _hints(
    hint: Component, result: Rollout, rows: list[_Row], tokenizer: Tokenizer
) -> list[str | None]:
    """Returns the hint of each row, None where there is nothing to show."""
    of_prompt: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.ids:
            of_prompt.setdefault(row.prompt, []).append(i)
    texts: list[str | None] = [None] * len(rows)
    for prompt, indices in of_prompt.items():
        record = result.prompts.records[prompt]
        prompt_fields = record.prompt_text, record.messages
        samples = [
            HintSample(
                rows[i].score,
                functools.partial(response_of, tokenizer, rows[i].ids, *prompt_fields),
            )
            for i in indices
        ]
        for number, i in enumerate(indices):
            texts[i] = _text(hint, hint(record, samples, number), record)
    return texts


def _text(hint: Component, value: object, record: PromptRecord) -> str | None:
    """Returns a hint as text, None for an empty one. A list of one message is its text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if not isinstance(value, str | None):
        raise InputError(
            f"with_hint(hint={hint.text!r}) returns no text for the prompt of row {record.index}",
            value=value,
            rule=f"a hint is a text, or None where there is nothing to show"
            f"{location_of(hint.function)}",
            fix="return a text, or write one in the column",
        )
    return None if value is None or not value.strip() else str(value)


def _filled(record: PromptRecord, hint: str, *, template: str, message: str):
    """Returns the prompt, a text or messages, with the hint in it."""

    def filled(text: str) -> str:
        return _PLACES.sub(lambda place: {"prompt": text, "hint": hint}[place[1]], template)

    messages = record.messages
    if messages is None and message == "user":
        return filled(record.prompt_text)
    at = [i for i, one in enumerate(messages or ()) if one["role"] == message]
    if messages is not None and message == "system" and not at:
        return [{"role": "system", "content": hint}, *messages]
    if not at:
        raise InputError(
            f"with_hint(message={message!r}): row {record.index} has no message of it",
            value=record.prompt_text[-80:],
            rule="the hint is written into the last one",
            fix="message='user' for prompts of bare text, message='system' for conversations",
        )
    changed = {**messages[at[-1]], "content": filled(messages[at[-1]]["content"])}
    return [*messages[: at[-1]], changed, *messages[at[-1] + 1 :]]


def _encoded(record: PromptRecord, hint: str, *, fill, tokenizer, most_tokens: int):
    """Returns the ids of a prompt with its hint, None if they are more than `most_tokens`."""
    row = dict(ground_truth=record.ground_truth, data_source=record.data_source)
    row |= dict(extra_info=record.extra_info, index=record.index, prompt=fill(record, hint))
    limits = dict(max_prompt_tokens=max(most_tokens, 1), overlong="drop")
    hinted, _ = encode_prompt(row, tokenizer, **limits)
    return None if hinted is None else hinted.token_ids


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _teachers_rows(rows: list[_Row], encoded: list, columns: int):
    """Returns tokens [B, T] of the prompt with the hint and the response, their lengths [B], where
    the response begins there [B] and in the policy's row [B], and whether the row is taught [B]."""
    tokens = np.zeros((len(rows), columns), np.int32)
    lengths, begins = np.ones(len(rows), np.int32), np.zeros(len(rows), np.int32)
    for i, (row, ids) in enumerate(zip(rows, encoded, strict=True)):
        if ids is not None:
            begins[i], lengths[i] = len(ids), len(ids) + len(row.ids)
            tokens[i, : lengths[i]] = [*ids, *row.ids]
    starts = np.array([row.start for row in rows], np.int32)
    return tokens, lengths, begins, starts, np.array([ids is not None for ids in encoded])


@functools.partial(jax.jit, static_argnames="rows")
def _hinted_teacher(
    teacher, batch: Batch, tokens, lengths, begins, starts, taught, *, rows: int
) -> Batch:
    """Returns the batch with `teacher` and `teacher_logprobs` [B, S]; arrays: `_teachers_rows`.
    `rows` rows are read at once where these divide B (0: all)."""
    column = jnp.arange(tokens.shape[1])[None, :]
    response = (column >= begins[:, None]) & (column < lengths[:, None]) & taught[:, None]
    read = batch_from_rows(tokens, lengths, response.astype(jnp.float32))
    logprobs = teacher.logprobs(read, math.gcd(batch.rows, rows) or None)
    column = jnp.arange(batch.tokens.shape[1])[None, :] - starts[:, None] + begins[:, None]
    there = jnp.take_along_axis(logprobs, jnp.clip(column, 0, tokens.shape[1] - 1), axis=1)
    of_teacher = taught[:, None] & (batch.mask > 0)
    mesh = teacher.model.mesh
    return batch.replace(
        teacher=constrain_rows(of_teacher.astype(jnp.int32), mesh),
        teacher_logprobs=constrain_rows(jnp.where(of_teacher, there, 0.0), mesh),
    )
