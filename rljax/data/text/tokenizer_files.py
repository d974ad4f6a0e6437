"""The files of a Hugging Face tokenizer: the library's own, special tokens, chat templates.

What they mean together is in `tokenizer`. Where files disagree, the one that `transformers` follows
wins. Nothing is downloaded; a token's id is its row in the model's embedding.
"""

import datetime
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from rljax.data.text import guarded
from rljax.data.text.guarded_process import OK
from rljax.data.text.template import ChatTemplate
from rljax.errors import InputError
from rljax.files import json_object, read_json_object, read_text

COPY_AGAIN = "copy the file from the model's repository again"
TEMPLATE_FOLDER = "additional_chat_templates"
_LARGEST_ID = 2**24  # of a row of an embedding
_MOST_VALUES = 3_000_000  # of tokenizer.json; two for each of its merges
_MOST_TEMPLATES = 16
_MOST_STEPS = 100  # of a normalizer or decoder
_MOST_GROWTH = 1_000  # characters that such steps may make of one
_LONGEST_TOKEN = 10_000  # characters
_CONFIG = "tokenizer_config.json"
_MAP = "special_tokens_map.json"


def read_optional(folder: Path, name: str) -> dict:
    """Returns the JSON object of a file; {} if the file does not exist."""
    path = folder / name
    return read_json_object(path) if os.path.lexists(path) else {}


def read_special_tokens(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Returns ({bos_token, eos_token, ...: text}, the special tokens without such a name). Raises
    InputError for one that is no text."""
    files = {name: read_optional(folder, name) for name in (_MAP, _CONFIG)}
    if "added_tokens_decoder" not in files[_CONFIG]:  # an old config: the map was written later
        files = dict(reversed(files.items()))
    named, extra = {}, []
    for name, content in files.items():
        for field, value in content.items():
            location = f"{folder / name}: '{field}'"
            if field in ("additional_special_tokens", "extra_special_tokens"):
                if isinstance(value, dict):  # names for the template, of the model's own
                    named |= {n: _token_text(v, location) for n, v in value.items()}
                elif isinstance(value, list):
                    extra += [_token_text(v, location) for v in value]
            elif field.endswith("_token") and not field.startswith("add_") and value is not None:
                named[field] = _token_text(value, location)
    return named, list(dict.fromkeys(extra))


def _token_text(value: object, location: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InputError(
            f"{location} is not a token",
            value=value,
            rule='a token is a text or {"content": text}',
            fix=COPY_AGAIN,
        )
    return text


def complete_added_tokens(
    folder: Path, library: tokenizers.Tokenizer, named: Sequence[str], extra: Sequence[str]
) -> list[str]:
    """Adds the tokens that the config lists and tokenizer.json does not; returns the repr of each
    token that is new or has changed.

    A token may stand in the vocabulary only, where text such as "</s>" would be split, or in the
    config's `added_tokens_decoder` only; one with a name (eos_token) is special too. No token gets
    a new id: the model has no row for it. Raises InputError if config and tokenizer.json give a
    token different ids.
    """
    before = library.get_added_tokens_decoder()
    listed = read_optional(folder, _CONFIG).get("added_tokens_decoder", {})
    location = f"{folder / _CONFIG}: 'added_tokens_decoder'"
    tokens = _listed_tokens(listed, location)
    # All at once: the library makes its search anew at every call.
    library.add_tokens([tokens[number] for number in sorted(tokens)])
    for number, entry in tokens.items():
        if library.token_to_id(entry.content) != number:
            raise InputError(
                f"{location} and tokenizer.json disagree about {entry.content!r}",
                value=number,
                rule=f"tokenizer.json has it as {library.token_to_id(entry.content)}",
                fix="take both files from the same model",
            )
    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    special = []
    for text in (*named, *(text for text in extra if text not in added)):
        if library.token_to_id(text) is None or (text in added and added[text].special):
            continue
        token = added.get(text) or tokenizers.AddedToken(text, normalized=False)
        token.special = True
        special.append(token)
    library.add_special_tokens(special)
    after = library.get_added_tokens_decoder()
    return [repr(token) for i, token in after.items() if repr(before.get(i)) != repr(token)]


def _listed_tokens(listed: object, location: str) -> dict[int, tokenizers.AddedToken]:
    tokens = {}
    try:
        for number, entry in listed.items():
            tokens[int(number)] = tokenizers.AddedToken(**entry)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{location} is malformed",
            value=listed,
            rule=f'it is {{"id": {{"content": text, "special": true, ...}}}} ({error})',
            fix=COPY_AGAIN,
        ) from None
    return tokens


def read_templates(folder: Path, now: datetime.datetime | None) -> dict[str, ChatTemplate]:
    """Returns the chat templates by their names; files of their own go before the entry of
    tokenizer_config.json. Raises InputError for a malformed entry or template, and for too many of
    them."""
    paths = {p.stem: p for p in sorted(folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"))}
    default = folder / "chat_template.jinja"
    if os.path.lexists(default):
        paths = {"default": default, **paths}
    _check_count(len(paths), folder / TEMPLATE_FOLDER)
    if paths:
        return {n: ChatTemplate(read_text(p), str(p), now=now) for n, p in paths.items()}
    path = folder / _CONFIG
    listed = read_optional(folder, _CONFIG).get("chat_template")
    if listed is None:
        return {}
    if isinstance(listed, str):
        listed = [{"name": "default", "template": listed}]
    listed = listed if isinstance(listed, list) else [listed]
    _check_count(len(listed), path)
    templates = {}
    for entry in listed:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise InputError(
                f"{path}: 'chat_template' is malformed",
                value=entry,
                rule='it is a text or a list of {"name": text, "template": text}',
                fix=COPY_AGAIN,
            )
        templates[name] = ChatTemplate(text, f"{path}: chat_template {name!r}", now=now)
    return templates


def _check_count(templates: int, location: Path) -> None:
    if templates > _MOST_TEMPLATES:
        raise InputError(
            f"{location}: chat templates",
            value=templates,
            rule=f"at most {_MOST_TEMPLATES}",
            fix="keep the templates that you use, such as the one called 'default'",
        )


def load_library(path: Path) -> tuple[str, tokenizers.Tokenizer]:
    """Returns the text of tokenizer.json and the library's tokenizer, without truncation, padding
    or trimmed offsets. Raises InputError for a file that is missing, that the library cannot read
    within its limits, or whose steps lengthen texts without bound."""
    if not os.path.lexists(path):
        raise InputError(
            f"{path} does not exist",
            rule="only tokenizers with a tokenizer.json are read",
            fix="save the model's tokenizer with its fast version: it writes tokenizer.json",
        )
    text = read_text(path)
    content = json_object(text, path, _MOST_VALUES)
    if not isinstance(content.get("model"), dict):
        raise InputError(
            f"{path} has no 'model' object", value=content, fix=f"it is no tokenizer: {COPY_AGAIN}"
        )
    # Trimmed offsets leave spaces out of a token: a space that ends a turn would seem to cover
    # nothing, and would not be learned.
    for part in ("normalizer", "decoder"):
        _check_growth(content.get(part), f"{path}: {part}")
    had_trimmed_offsets = _untrim(content.get("post_processor"))
    untrimmed_text = json.dumps(content) if had_trimmed_offsets else text
    # What a tokenizer does to texts is the file's choice, and nothing in this process could stop
    # it: a process with limits tries it first.
    kind, reason = guarded.call("tokenizer", untrimmed_text.encode("utf-8", "surrogatepass"))
    if kind != OK:
        raise InputError(
            f"{path} is not a tokenizer of the 'tokenizers' library",
            rule=reason,
            fix=f"{COPY_AGAIN}, or update the tokenizers package",
        )
    library = tokenizers.Tokenizer.from_str(untrimmed_text)
    # A file may ask for truncation or padding to a fixed length, silently.
    library.no_truncation()
    library.no_padding()
    _check_vocabulary(library, path)
    return text, library


def _check_growth(part: object, location: str) -> None:
    """Raises InputError for steps that make a text longer and longer: a trial meets a few texts,
    and this holds for all of them."""
    steps, growth, pending = 0, 1.0, [part]
    while pending:
        step = pending.pop()
        if isinstance(step, list):
            pending += step
        if not isinstance(step, dict):
            continue
        steps += 1
        pending += [value for value in step.values() if isinstance(value, list | dict)]
        if isinstance(step.get("content"), str):
            pattern = step.get("pattern")
            literal = pattern.get("String") if isinstance(pattern, dict) else None
            # A regular expression may match a single character.
            pattern_length = len(literal) if isinstance(literal, str) else 1
            growth *= max(1.0, len(step["content"]) / max(pattern_length, 1))
        if step.get("type") == "Precompiled":  # any character may become any text, but once
            growth *= _MOST_GROWTH**0.5
    # "pattern" is an object of its own.
    if steps > 2 * _MOST_STEPS or growth > _MOST_GROWTH:
        raise InputError(
            f"{location} may make a text longer without bound",
            value=(steps, growth),
            rule=f"at most {_MOST_STEPS} steps, and {_MOST_GROWTH} characters of one",
            fix=COPY_AGAIN,
        )


def _check_vocabulary(library: tokenizers.Tokenizer, path: Path) -> None:
    base_vocabulary = library.get_vocab(with_added_tokens=False)
    if not base_vocabulary:
        raise InputError(f"{path}: the vocabulary is empty", fix=COPY_AGAIN)
    vocabulary = library.get_vocab(with_added_tokens=True)
    ids = sorted(vocabulary.values())
    repeated_id = next((i for i, j in itertools.pairwise(ids) if i == j), None)
    if repeated_id is not None:
        names = sorted(name for name, i in vocabulary.items() if i == repeated_id)
        raise InputError(
            f"{path}: several tokens have the id {repeated_id}",
            value=names[:4],
            rule="an id is one row of the model's embedding",
            fix=COPY_AGAIN,
        )
    longest = max(vocabulary, key=len)
    if ids[-1] >= _LARGEST_ID or len(longest) > _LONGEST_TOKEN:
        raise InputError(
            f"{path}: the vocabulary is out of bounds",
            value=(ids[-1], longest[:20]),
            rule=f"ids below {_LARGEST_ID}, tokens of at most {_LONGEST_TOKEN} characters",
            fix=COPY_AGAIN,
        )


def _untrim(post_processor: object) -> bool:
    """Sets every 'trim_offsets' in the post processor to false; returns whether there was one."""
    if isinstance(post_processor, list):
        return any([_untrim(item) for item in post_processor])
    if not isinstance(post_processor, dict):
        return False
    trims = bool(post_processor.get("trim_offsets"))
    if trims:
        post_processor["trim_offsets"] = False
    return any([trims, *[_untrim(value) for value in post_processor.values()]])
