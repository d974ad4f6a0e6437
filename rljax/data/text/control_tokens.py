"""Texts that others have written (tools, environments), in which nothing is read as a token of the
chat template.

A token there would end a turn, begin one, or close the block that a tool's answer stands in. Its
text gets a space: `<|im_end|>` is read as `< |im_end|>`, in ordinary tokens. The tokenizer itself
says what it would read as a token, so flags of a token (normalized, lstrip, single_word) need no
rules here.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence

_MOST_PASSES = 8  # a space may make another token of what is beside it


def parted(tokenizer, text: str, ids: Collection[int]) -> str:
    """Returns the text without any of the tokens `ids` in it."""
    return parted_pieces(tokenizer, [text], ids)[0]


def parted_pieces(tokenizer, pieces: Sequence[str], ids: Collection[int]) -> list[str]:
    """Returns texts that follow each other, without any of the tokens `ids` in one of them or
    across their borders, white space there aside: a template may trim them and write nothing in
    between."""
    pieces = list(pieces)
    if tokenizer.context_free or not ids:
        return pieces
    for _ in range(_MOST_PASSES):
        spaced = [_with_spaces(tokenizer, piece, frozenset(ids)) for piece in pieces]
        spaced_across = (
            _with_spaces_across(tokenizer, spaced, frozenset(ids)) if len(pieces) > 1 else spaced
        )
        if spaced_across == pieces:
            return pieces
        pieces = spaced_across
    return [_without_tokens(tokenizer, piece, frozenset(ids)) for piece in pieces]


def parted_messages(
    tokenizer, messages: Sequence[Mapping], ids: Collection[int], roles: Collection[str] = ("tool",)
) -> list[dict]:
    """Returns the messages with none of the tokens `ids` in the texts of those `roles`. Contents
    that follow each other are looked at together."""
    messages = [dict(message) for message in messages]
    fields: list[tuple[dict, str]] = []  # the objects that hold a text, and its key there
    for message in [*messages, {"role": None}]:
        if message.get("role") not in roles:
            _part_fields(tokenizer, fields, ids)
            fields = []
            continue
        for name in message.keys() - {"role", "content"}:
            message[name] = parted_texts(tokenizer, message[name], ids)
        content = message.get("content")
        if isinstance(content, str):
            fields.append((message, "content"))
        elif isinstance(content, (list, tuple)):
            parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
            message["content"] = parts
            objects = [part for part in parts if isinstance(part, dict)]
            fields += [(part, "text") for part in objects if isinstance(part.get("text"), str)]
    return messages


def parted_texts(tokenizer, value: object, ids: Collection[int]) -> object:
    """Returns a value of lists and objects with none of the tokens `ids` in its texts."""
    if isinstance(value, str):
        return parted(tokenizer, value, ids)
    if isinstance(value, Mapping):
        items = {n: parted_texts(tokenizer, item, ids) for n, item in value.items()}
        return {parted(tokenizer, n, ids) if isinstance(n, str) else n: v for n, v in items.items()}
    if isinstance(value, (list, tuple)):
        return [parted_texts(tokenizer, item, ids) for item in value]
    return value


def _part_fields(tokenizer, fields: Sequence[tuple[dict, str]], ids: Collection[int]) -> None:
    texts = parted_pieces(tokenizer, [holder[name] for holder, name in fields], ids)
    for (holder, name), text in zip(fields, texts, strict=True):
        holder[name] = text


@functools.lru_cache(maxsize=16)
def _pattern(tokenizer, ids: frozenset[int]) -> re.Pattern | None:
    """Returns the pattern that every text with one of the tokens matches; None where only the
    tokenizer can tell."""
    if not tokenizer.reads_as_written(ids):
        return None
    texts = {tokenizer.decode([i], skip_special_tokens=False).strip() for i in ids}
    longest = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


def _token_spans(tokenizer, text: str, ids: frozenset[int]) -> list[tuple[int, int]]:
    """Returns the characters [a, b) of each of the tokens in a text, white space aside. A token of
    a single character cannot be parted and is left alone."""
    pattern = _pattern(tokenizer, ids)
    if len(text) < 2 or (pattern is not None and not pattern.search(text)):
        return []
    spans = []
    for i, (a, b) in zip(*tokenizer.encode_with_offsets(text), strict=True):
        if i in ids:
            inside = text[a:b]
            a, b = a + len(inside) - len(inside.lstrip()), b - len(inside) + len(inside.rstrip())
            if b - a > 1:
                spans.append((a, b))
    return spans


def _with_spaces(tokenizer, text: str, ids: frozenset[int]) -> str:
    """Returns the text with a space behind the first character of each token."""
    for a, _ in reversed(_token_spans(tokenizer, text, ids)):
        text = f"{text[: a + 1]} {text[a + 1 :]}"
    return text


def _with_spaces_across(tokenizer, pieces: list[str], ids: frozenset[int]) -> list[str]:
    """Returns the pieces with a space in each token that stands in their concatenation. The space
    is within a piece, for a template may trim its ends."""
    characters, positions = [], []  # of the concatenation, and (piece, index in it) of each
    for number, piece in enumerate(pieces):
        start, end = len(piece) - len(piece.lstrip()), len(piece.rstrip())
        characters.append(piece[start:end])
        positions += [(number, position) for position in range(start, end)]
    pieces, cuts = list(pieces), set()
    for a, b in _token_spans(tokenizer, "".join(characters), ids):
        inside = [k for k in range(a + 1, b) if positions[k - 1][0] == positions[k][0]]
        cuts.add(positions[inside[0] if inside else a + 1])
    for number, position in sorted(cuts, reverse=True):
        pieces[number] = f"{pieces[number][:position]} {pieces[number][position:]}"
    return pieces


def _without_tokens(tokenizer, text: str, ids: frozenset[int]) -> str:
    """Returns the text without the characters that still are a token after many spaces."""
    while spans := _token_spans(tokenizer, text, ids):
        for a, b in reversed(spans):
            text = text[:a] + text[b:]
    return text
