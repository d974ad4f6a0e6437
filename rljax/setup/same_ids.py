"""Checks that the ids of a tokenizer mean the same to a model of another folder.

Models that read the ids of a run (reward models, critics, teachers, ...) look them up in their own
embedding, and would not notice a difference.
"""

import os
import re

from rljax import hub
from rljax.data.text.tokenizer import CHAR_FILE, Tokenizer, load_tokenizer
from rljax.errors import InputError

_SHOWN = 3


_RESERVED = re.compile(r"reserved|unused|placeholder|dummy", re.IGNORECASE)


def tokenizer_of(folder: str) -> Tokenizer | str:
    """Returns the tokenizer of a model's folder or repository, or a text that says why it cannot
    be read."""
    try:
        if hub.model_name(folder) is None:
            path, files = hub.model_folder(folder), ("tokenizer.json", CHAR_FILE)
            if not any(os.path.lexists(path / file) for file in files):
                return "no tokenizer.json"
        return load_tokenizer(folder)
    except InputError as error:
        return error.parts[0]


def differing_ids(tokenizer: Tokenizer, other: Tokenizer, *, may_lack: bool = False) -> str:
    """Returns a text with the first ids of `tokenizer` that are another token to `other`, or none;
    "" if there are none. Special tokens, templates and ids that only `other` has may differ: none
    of them changes what an id means. `may_lack`: so may ids that only `tokenizer` has."""
    tokens = other.vocabulary()
    differences = [
        f"id {i} is {token!r}, there {'none' if tokens.get(i) is None else repr(tokens[i])}"
        for i, token in sorted(tokenizer.vocabulary().items())
        if token != tokens.get(i)
        and (i in tokens or not may_lack)
        # A name of a token that nobody has used yet says nothing: Llama 3.1 has renamed some.
        and not (i in tokens and (_RESERVED.search(token) or _RESERVED.search(tokens[i])))
    ]
    suffix = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + suffix


def line_ids_of(
    tokenizer: Tokenizer, vocab_size: int, separator: str = "\n", field: str = ""
) -> tuple[int, ...]:
    """Returns the ids of tokens whose text has the separator, which end a line:
    rljax.shaping.steps.line_ids. Raises InputError, with the `field` of the model that reads them,
    where no token has it."""
    ids = tuple(i for i in range(vocab_size) if separator and separator in tokenizer.decode([i]))
    if not ids and separator != "\n":
        raise InputError(
            f"{field}: its process reward model reads steps that end in {separator!r}",
            rule="a search reads it at single tokens, and no token of the policy holds that text",
            fix="train the model with offline.step_separator='\\n', or another text of one token",
        )
    return ids
