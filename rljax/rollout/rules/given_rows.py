"""Rows whose responses are texts of the data in place of samples."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import place
from rljax.batch import NOT_SAMPLED, Batch, FinishReason
from rljax.data.online.prompts import Prompts, with_end_token
from rljax.errors import InputError


def column_texts(prompts: Prompts, column: str) -> list[str | None]:
    """Returns the text that each prompt has in a column of its data, None where it has none. A list
    of one message of the assistant is its text. Raises InputError for anything else, and for
    prompts with images."""
    texts = [_text_of(record.extra_info.get(column)) for record in prompts.records]
    bad = next((text for text in texts if not isinstance(text, str | None)), "")
    if bad:
        raise InputError(
            f"a {column} of the data",
            value=bad,
            rule="a text, or one message of the assistant with a text, or none",
            fix=f"write a text in {column!r}, or leave the column out",
        )
    if prompts.images is not None and any(text is not None for text in texts):
        raise InputError(
            f"{column} beside images",
            rule="a text of the data stands behind a prompt without images",
            fix=f"leave {column!r} out of the rows",
        )
    return texts


def _text_of(value: object) -> object:
    """Returns the text of a list of one message of the assistant, and any other value as it is."""
    message = value[0] if isinstance(value, list) and len(value) == 1 else None
    is_turn = isinstance(message, dict) and message.get("role") == "assistant"
    return message.get("content") if is_turn else value


def write_texts(rows: Batch, prompts: Prompts, texts, tokenizer, limit: int, mesh) -> Batch:
    """Returns `rows` [P], one of each prompt, with its text as the response where it has one. A
    text that is longer than `limit` tokens is cut, as a sample would be. Such rows have no
    log-probs, and the version NOT_SAMPLED."""
    arrays = _written(prompts, texts, tokenizer, limit, rows.tokens.shape[1])
    return _overwritten(rows, *place(arrays, mesh))


def _written(prompts: Prompts, texts, tokenizer, limit: int, columns: int):
    """Returns tokens, segment_ids, mask [P, S], finish_reason [P], and whether a prompt has a text
    [P]."""
    shape = (len(texts), columns)
    tokens, valid = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask, finish = np.zeros(shape, np.float32), np.zeros(len(texts), np.int32)
    for row, text in enumerate(texts):
        if text is None:
            continue
        is_turn = prompts.records[row].messages is not None
        start = prompts.lengths[row]
        ids = with_end_token(tokenizer.encode(text), tokenizer, turn=is_turn)
        finish[row] = FinishReason.LENGTH if len(ids) > limit else FinishReason.STOP
        ids = ids[:limit]
        tokens[row, :start] = prompts.tokens[row, :start]
        tokens[row, start : start + len(ids)] = ids
        valid[row, : start + len(ids)] = 1
        mask[row, start : start + len(ids)] = 1
    return tokens, valid, mask, finish, np.array([text is not None for text in texts])


@jax.jit
def _overwritten(rows: Batch, tokens, valid, mask, finish, has_text) -> Batch:
    column = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    text_fields = {
        "tokens": tokens,
        "segment_ids": valid,
        "positions": jnp.where(valid > 0, column, 0),
        "mask": mask,
        "finish_reason": finish,
        "group": jnp.arange(tokens.shape[0], dtype=jnp.int32),
        "policy_version": jnp.full(tokens.shape, NOT_SAMPLED, jnp.int32),
    }

    def chosen(name, old):
        text = text_fields.get(name, jnp.zeros_like(old))
        return jnp.where(has_text.reshape(-1, *(1,) * (old.ndim - 1)), text, old)

    fields = {name: chosen(name, x) for name, x in vars(rows).items() if x is not None}
    return rows.replace(**fields)
