"""Texts that others have written (tools, environments), in which nothing is read as a mark of the
chat template: as one of its tokens, or as a tag in plain text by which it closes a block.

A mark there would end a turn, begin one, or close the block that a tool's answer stands in. Its
text gets a space: `<|im_end|>` is read as `< |im_end|>`, in ordinary tokens. The tokenizer itself
says what it would read as a token, so flags of a token (normalized, lstrip, single_word) need no
rules here. `marks` are ids of tokens, and texts.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

_MOST_PASSES = 8  # a space may make another token of what is beside it
Marks = Collection[int | str]
# </tool_response>, <</SYS>>, [/TOOL_RESULTS]
_CLOSING_TAG = re.compile(r"<</[^\s<>{}'\"/]+>>|</[^\s<>{}'\"/]+>|\[/[^\s\[\]{}'\"/]+\]")


def closing_tags(templates: Iterable[str]) -> set[str]:
    """Returns the tags that close a block in the texts of chat templates."""
    return {tag for text in templates for tag in _CLOSING_TAG.findall(text)}


def parted(tokenizer, text: str, marks: Marks) -> str:
    """Returns the text without any of the marks in it."""
    return parted_pieces(tokenizer, [text], marks)[0]


def parted_pieces(tokenizer, pieces: Sequence[str], marks: Marks) -> list[str]:
    """Returns texts that follow each other, without any of the marks in one of them or
    across their borders, white space there aside: a template may trim them and write nothing in
    between."""
    pieces = list(pieces)
    if tokenizer.context_free or not marks:
        return pieces
    for _ in range(_MOST_PASSES):
        spaced = [_with_spaces(tokenizer, piece, frozenset(marks)) for piece in pieces]
        spaced_across = (
            _with_spaces_across(tokenizer, spaced, frozenset(marks)) if len(pieces) > 1 else spaced
        )
        if spaced_across == pieces:
            return pieces
        pieces = spaced_across
    return [_without_marks(tokenizer, piece, frozenset(marks)) for piece in pieces]


def parted_messages(
    tokenizer, messages: Sequence[Mapping], marks: Marks, roles: Collection[str] = ("tool",)
) -> list[dict]:
    """Returns the messages with none of the marks in the texts of those `roles`. Contents
    that follow each other are looked at together."""
    messages = [dict(message) for message in messages]
    fields: list[tuple[dict, str]] = []  # the objects that hold a text, and its key there
    for message in [*messages, {"role": None}]:
        if message.get("role") not in roles:
            _part_fields(tokenizer, fields, marks)
            fields = []
            continue
        for name in message.keys() - {"role", "content"}:
            message[name] = parted_texts(tokenizer, message[name], marks)
        content = message.get("content")
        if isinstance(content, str):
            fields.append((message, "content"))
        elif isinstance(content, (list, tuple)):
            parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
            message["content"] = parts
            objects = [part for part in parts if isinstance(part, dict)]
            fields += [(part, "text") for part in objects if isinstance(part.get("text"), str)]
    return messages


def parted_texts(tokenizer, value: object, marks: Marks) -> object:
    """Returns a value of lists and objects with none of the marks in its texts."""
    if isinstance(value, str):
        return parted(tokenizer, value, marks)
    if isinstance(value, Mapping):
        items = {n: parted_texts(tokenizer, item, marks) for n, item in value.items()}
        return {
            parted(tokenizer, n, marks) if isinstance(n, str) else n: v for n, v in items.items()
        }
    if isinstance(value, (list, tuple)):
        return [parted_texts(tokenizer, item, marks) for item in value]
    return value


def _part_fields(tokenizer, fields: Sequence[tuple[dict, str]], marks: Marks) -> None:
    texts = parted_pieces(tokenizer, [holder[name] for holder, name in fields], marks)
    for (holder, name), text in zip(fields, texts, strict=True):
        holder[name] = text


def _ids_and_texts(marks: frozenset[int | str]) -> tuple[set[int], set[str]]:
    texts = {mark for mark in marks if isinstance(mark, str)}
    return set(marks - texts), texts


@functools.lru_cache(maxsize=16)
def _pattern(tokenizer, marks: frozenset[int | str]) -> re.Pattern | None:
    """Returns the pattern that every text with one of the marks matches; None where only the
    tokenizer can tell."""
    ids, texts = _ids_and_texts(marks)
    if not tokenizer.reads_as_written(ids):
        return None
    texts |= {tokenizer.decode([i], skip_special_tokens=False).strip() for i in ids}
    longest = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


def _spans(tokenizer, text: str, marks: frozenset[int | str]) -> list[tuple[int, int]]:
    """Returns the characters [a, b) of each of the marks in a text, in order, white space aside. A
    token of a single character cannot be parted and is left alone."""
    pattern = _pattern(tokenizer, marks)
    if len(text) < 2 or (pattern is not None and not pattern.search(text)):
        return []
    ids, tags = _ids_and_texts(marks)
    spans = []
    for i, (a, b) in zip(*tokenizer.encode_with_offsets(text), strict=True):
        if i in ids:
            inside = text[a:b]
            a, b = a + len(inside) - len(inside.lstrip()), b - len(inside) + len(inside.rstrip())
            if b - a > 1:
                spans.append((a, b))
    tag_spans = [m.span() for tag in tags for m in re.finditer(re.escape(tag), text)]
    outside = [(a, b) for a, b in tag_spans if all(b <= c or d <= a for c, d in spans)]
    return sorted(spans + outside)


def _with_spaces(tokenizer, text: str, marks: frozenset[int | str]) -> str:
    """Returns the text with a space behind the first character of each mark."""
    for a, _ in reversed(_spans(tokenizer, text, marks)):
        text = f"{text[: a + 1]} {text[a + 1 :]}"
    return text


def _with_spaces_across(tokenizer, pieces: list[str], marks: frozenset[int | str]) -> list[str]:
    """Returns the pieces with a space in each mark that stands in their concatenation. The space
    is within a piece, for a template may trim its ends."""
    characters, positions = [], []  # of the concatenation, and (piece, index in it) of each
    for number, piece in enumerate(pieces):
        start, end = len(piece) - len(piece.lstrip()), len(piece.rstrip())
        characters.append(piece[start:end])
        positions += [(number, position) for position in range(start, end)]
    pieces, cuts = list(pieces), set()
    for a, b in _spans(tokenizer, "".join(characters), marks):
        inside = [k for k in range(a + 1, b) if positions[k - 1][0] == positions[k][0]]
        cuts.add(positions[inside[0] if inside else a + 1])
    for number, position in sorted(cuts, reverse=True):
        pieces[number] = f"{pieces[number][:position]} {pieces[number][position:]}"
    return pieces


def _without_marks(tokenizer, text: str, marks: frozenset[int | str]) -> str:
    """Returns the text without the characters that still are a mark after many spaces."""
    while spans := _spans(tokenizer, text, marks):
        for a, b in reversed(spans):
            text = text[:a] + text[b:]
    return text
