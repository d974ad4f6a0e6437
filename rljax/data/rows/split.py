"""Rows of one file that are held out from training (`data.test_fraction`).

Which side a row is on is a function of its prompt alone: it stays there when rows are added or
reordered, and two rows with one prompt are never on both.
"""

import hashlib
import json
import os

from rljax.config import Config, is_path
from rljax.errors import InputError
from rljax.hub import is_hub

_ANSWER = "\n\nAssistant:"  # where an answer begins in Anthropic's HH, a dialogue as one text


def held_out_fraction(config: Config, spec: str) -> float:
    """Returns the share of the rows of `spec` that a run of `config` holds out, in [0, 1):
    data.test_fraction for files that it trains on, else 0."""
    trained_files = {
        _file(path) for path in (config.data.train, *config.data.sources) if is_path(path)
    }
    return config.data.test_fraction if is_path(spec) and _file(spec) in trained_files else 0.0


def _file(spec: str) -> str:
    """Returns one name for all ways to write the path of a file."""
    return spec if is_hub(spec) else os.path.realpath(spec)


def one_side(records: list[dict], split: str, fraction: float, source: str) -> list[dict]:
    """Returns the records of `split`, train or test, of a file of which `fraction` is held out.
    Raises InputError if none of the records is on this side."""
    side = [
        record
        for record in records
        if is_held_out(prompt_text(record), fraction) == (split == "test")
    ]
    if records and not side:
        raise InputError(
            f"{source}: no row is left for {'testing' if split == 'test' else 'training'}",
            value=f"{len(records)} rows, data.test_fraction={fraction}",
            rule="rows are held out by a hash of their prompts",
            fix="another data.test_fraction, or more rows; data.test names a file of its own",
        )
    return side


def is_held_out(prompt: str, fraction: float) -> bool:
    """Returns whether sha256 of the prompt, read as a number in [0, 1), is below `fraction`; blanks
    and the case of letters do not matter."""
    text = " ".join(prompt.lower().split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64 < fraction


def prompt_text(record: dict) -> str:
    """Returns the text that identifies the prompt of a record of any kind: of a conversation, roles
    and contents up to the first turn of the assistant; of a text alone, all of it; and its
    images."""
    text = _text_of(record)
    return f"{text}\n{record['images']!r}" if record.get("images") else text


def _text_of(record: dict) -> str:
    if "text" in record:
        return record["text"]
    prompt = record.get("prompt")
    prompt = record["messages"] if prompt is None else prompt
    if isinstance(prompt, str):  # of HH's pairs it is all that both answers begin with
        return prompt.rpartition(_ANSWER)[0] or prompt
    # A run reads one conversation up to its last answer as a prompt, and all of it as a
    # demonstration: both begin with the same turns.
    roles = [message["role"] for message in prompt]
    first = roles.index("user") if "user" in roles else 0
    end = next((i for i in range(first, len(roles)) if roles[i] == "assistant"), None)
    return messages_text(prompt[:end])


def messages_text(messages: list[dict]) -> str:
    """Returns the roles and contents of messages, a line each."""
    contents = [message.get("content") for message in messages]
    texts = [
        content if isinstance(content, str) else json.dumps(content, sort_keys=True)
        for content in contents
    ]
    return "\n".join(
        f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True)
    )
