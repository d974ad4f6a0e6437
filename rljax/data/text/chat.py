"""Conversations as token ids: which tokens the assistant wrote, and how a log of ids grows.

A template renders the text (`template`), a tokenizer is an argument. Token indices count from the
first id of the conversation; a mask is 1 where the assistant chose the token. Tokens are the
record: what was sampled is never tokenized again.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rljax.data.text.messages import LEARN, check_unicode, validate_messages
from rljax.data.text.template import ChatTemplate
from rljax.errors import InputError

__all__ = [
    "Appended",
    "ChatTemplate",
    "Rerendering",
    "Turns",
    "append_messages",
    "appended_after",
    "check_unicode",
    "compare_log",
    "encode_conversation",
    "encode_last_turn",
    "encode_turns",
    "validate_messages",
]
_PROBE = "RLJAX-CONTENT-OF-THE-LAST-TURN"
_END_CHARACTERS = 200  # of a rendering, in which its last token is found, white space aside
_NO_REASONING = re.compile(r"<think>\s*</think>\s*")  # what templates write for a turn without any


def encode_conversation(
    tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids of a finished conversation, and a mask: 1 on what the assistant says.

    That is every assistant turn's content with its end-of-turn token; in a template with
    `{% generation %}` blocks it is those blocks, to the letter. Otherwise a turn is what its
    rendering adds to the prompt it answers, so a template that rewrites earlier turns is refused:
    `encode_last_turn` makes one example of each turn then. The ids are those of the whole text;
    where a token spans the border into a turn it counts as the assistant's, for else the turn's
    first characters would never be learned.
    """
    options = dict(tools=tools, documents=documents, variables=variables)
    text, spans = tokenizer.render_marked(messages, **options)
    ids, offsets = tokenizer.encode_with_offsets(text)
    if spans is not None:
        spans = _learned_spans(tokenizer, messages, spans, text, options)
        return ids, _mask(len(ids), (t for span in spans for t in _tokens_in(span, offsets)))
    learned = []
    for k, message in enumerate(messages):
        if message["role"] != "assistant" or message.get(LEARN) is False:
            continue
        before, through = _turn(tokenizer, messages, k, options)
        _require_prefix(through, text, f"messages 0..{k}", len(messages) - 1)
        turn = _tokens_in((len(before), len(through)), offsets)
        learned += _without_tail(turn, ids, offsets, text, tokenizer.special_ids)
    return ids, _mask(len(ids), learned)


class Turns(NamedTuple):
    """A prompt's ids, and what follows it: its ids, the mask of what the assistant chose, its text,
    and the characters [a, b) of that text that each id covers."""

    prompt: list[int]
    ids: list[int]
    mask: list[int]
    text: str
    offsets: list[tuple[int, int]]


def encode_turns(
    tokenizer,
    messages: Sequence[Mapping],
    first: int,
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> Turns:
    """The prompt `messages[:first]`, and the turns after it: mask 1 on those of the assistant.

    The prompt is encoded alone, as it is for the sampler: no token spans the border. Where several
    turns follow they are told apart as in `encode_conversation`.
    """
    options = dict(tools=tools, documents=documents, variables=variables)
    text, spans = tokenizer.render_marked(messages, **options)
    _require_assistant_last(messages)
    before, _ = _turn(tokenizer, messages, first, options)
    _require_prefix(before, text, f"messages 0..{first - 1}", len(messages) - 1)
    prompt, rest = tokenizer.encode(before), text[len(before) :]
    if not prompt:
        raise InputError("the turn answers an empty prompt", fix="use a template that writes one")
    ids, offsets = tokenizer.encode_with_offsets(text)
    if ids[: len(prompt)] == prompt:
        ids = ids[len(prompt) :]
        offsets = [(max(a - len(before), 0), b - len(before)) for a, b in offsets[len(prompt) :]]
    else:
        ids, offsets = encode_after(tokenizer, prompt[-1], rest)
    if first == len(messages) - 1:
        learned = _without_tail(range(len(ids)), ids, offsets, rest, tokenizer.special_ids)
    elif spans is not None:
        spans = _learned_spans(tokenizer, messages, spans, text, options)
        inside = [(a - len(before), b - len(before)) for a, b in spans if b > len(before)]
        learned = [t for span in inside for t in _tokens_in(span, offsets)]
    else:
        learned = []
        for k in range(first, len(messages)):
            if messages[k]["role"] != "assistant" or messages[k].get(LEARN) is False:
                continue
            start, through = _turn(tokenizer, messages, k, options)
            _require_prefix(through, text, f"messages 0..{k}", len(messages) - 1)
            turn = _tokens_in((len(start) - len(before), len(through) - len(before)), offsets)
            learned += _without_tail(turn, ids, offsets, rest, tokenizer.special_ids)
    return Turns(prompt, ids, _mask(len(ids), learned), rest, offsets)


def encode_last_turn(
    tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation that ends with an assistant's turn; mask 1 on that turn only.

    `encode_last_turn(tokenizer, messages[: k + 1])` for every assistant turn k is what the policy
    reads and writes at each, whatever the template later makes of its history.
    """
    options = dict(tools=tools, documents=documents, variables=variables)
    turn = encode_turns(tokenizer, messages, len(messages) - 1, **options)
    return turn.prompt + turn.ids, [0] * len(turn.prompt) + turn.mask


def _turn(tokenizer, messages, k: int, options: Mapping) -> tuple[str, str]:
    """The prompt that assistant turn `k` answers, and that prompt with the turn."""
    if k == 0:
        raise InputError(
            "a conversation begins with the assistant",
            value=messages[0].get("content"),
            rule="an assistant's turn answers something",
            fix="put a user or system message first",
        )
    before = tokenizer.render_chat(messages[:k], add_generation_prompt=True, **options)
    through = tokenizer.render_chat(messages[: k + 1], add_generation_prompt=False, **options)
    _require_prefix(before, through, f"messages 0..{k - 1} with the generation prompt", k)
    return before, through


def _learned_spans(tokenizer, messages, spans, text: str, options: Mapping) -> list:
    """The spans that a template marks, without those of turns that are context only."""
    context = []
    for k, message in enumerate(messages):
        if message["role"] == "assistant" and message.get(LEARN) is False:
            # A greeting, which answers nothing, may be context.
            before = _turn(tokenizer, messages, k, options)[0] if k else ""
            through = tokenizer.render_chat(
                messages[: k + 1], add_generation_prompt=False, **options
            )
            _require_prefix(through, text, f"messages 0..{k}", len(messages) - 1)
            context.append((len(before), len(through)))
    return [(a, b) for a, b in spans if not any(a < stop and b > start for start, stop in context)]


def _mask(length: int, learned) -> list[int]:
    mask = [0] * length
    for t in learned:
        mask[t] = 1
    return mask


def _tokens_in(span: tuple[int, int], offsets) -> list[int]:
    """The tokens that cover a character of the span."""
    return [t for t, (a, b) in enumerate(offsets) if a < span[1] and b > span[0]]


def _without_tail(turn, ids, offsets, text, special_ids) -> list[int]:
    """A turn's tokens without the white space that the template writes after its end token.

    The sampler stops at the end token, so the policy never writes what follows. A turn that ends
    without a special token keeps its white space: there it is the end of turn.
    """
    end = len(turn)
    while end and ids[turn[end - 1]] not in special_ids:
        start, stop = offsets[turn[end - 1]]
        if text[start:stop].strip():
            return turn
        end -= 1
    return turn[:end] if end else turn


def _require_prefix(shorter: str, longer: str, what: str, last: int) -> None:
    """Raises InputError unless the longer rendering only appends to the shorter one."""
    if longer.startswith(shorter):
        return
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), None)
    at = min(len(shorter), len(longer)) if same is None else same
    raise InputError(
        f"the chat template is not append-only: {what} are not the beginning of messages 0..{last}",
        value=(shorter[max(0, at - 20) : at + 20], longer[max(0, at - 20) : at + 20]),
        rule="a template that rewrites earlier turns makes the assistant's tokens ambiguous",
        fix="use a template that keeps earlier turns or has {% generation %} blocks, or split the "
        "conversation so that each example ends at its only assistant turn",
    )


def _require_assistant_last(messages: Sequence[Mapping]) -> None:
    if messages[-1]["role"] != "assistant":
        raise InputError(
            "the last message is not the assistant's",
            value=messages[-1]["role"],
            rule="what follows is appended to a turn that the policy wrote",
            fix="pass the messages up to and including the assistant's turn",
        )


# -- a log of ids that only grows --


class Rerendering(enum.Enum):
    """The grown log against the whole conversation rendered and tokenized anew."""

    SAME = "same"  # id for id
    RETOKENIZED = "retokenized"  # the same text in other tokens
    REWRITTEN = "rewritten"  # another text: the template, or the parser of the turn, changed it


@dataclasses.dataclass(frozen=True)
class Appended:
    """The ids to append to a log, all of mask 0: the policy chose none of them.

    The first `closing` of them end the last turn, where it was cut before its end token.
    `first_difference` is the first index at which the grown log differs from the rerendering.
    """

    ids: list[int]
    closing: int
    rerendering: Rerendering
    first_difference: int | None


def append_messages(
    tokenizer,
    ids: Sequence[int],
    messages: Sequence[Mapping],
    new: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping] | None = None,
    documents: Sequence[Mapping] | None = None,
    variables: Mapping[str, object] | None = None,
) -> Appended:
    """The ids by which a log grows when `new` messages (a tool's answer, a user) follow a turn.

    `ids` are the log so far: a prompt and what was sampled on it. `messages` are the same as
    messages, ending with the assistant's sampled turn. The next prompt is `ids + appended.ids`, so
    it begins with the log whatever the template or the tokenizer would make of the whole.
    """
    validate_messages(messages)
    _require_assistant_last(messages)
    if not ids:
        raise InputError("the log of ids is empty", fix="begin it with encode_chat(messages)")
    options = dict(tools=tools, documents=documents, variables=variables)
    prompt = dict(add_generation_prompt=add_generation_prompt)
    whole = tokenizer.render_chat([*messages, *new], **prompt, **options)
    closing, suffix = _added_text(
        tokenizer, messages, new, whole, ids[-1] in tokenizer.eos_ids, **prompt, **options
    )
    appended, offsets = encode_after(tokenizer, ids[-1], closing + suffix)
    ended = ids[-1] in tokenizer.eos_ids
    cut = 0 if ended else sum(stop <= len(closing) for _, stop in offsets)
    return Appended(appended, cut, *compare_log(tokenizer, [*ids, *appended], whole))


def compare_log(
    tokenizer, log: Sequence[int], whole: str, *, complete: bool = True
) -> tuple[Rerendering, int | None]:
    """What tokenizing the rendered conversation anew would make of a log, and the first index at
    which they differ. A log that is not `complete` is compared with the beginning."""
    grown, again = list(log), tokenizer.encode(whole)
    if grown == (again if complete else again[: len(grown)]):
        return Rerendering.SAME, None
    texts = [tokenizer.decode(i, skip_special_tokens=False) for i in (grown, again)]
    equal = texts[0] == texts[1] if complete else texts[1].startswith(texts[0])
    how = Rerendering.RETOKENIZED if equal else Rerendering.REWRITTEN
    return how, _common(grown, again)


def appended_after(
    tokenizer,
    last: int,
    before: str,
    messages: Sequence[Mapping],
    new: Sequence[Mapping],
    *,
    written: str = "",
    tools: Sequence[Mapping] | None = None,
) -> tuple[list[int], str, bool]:
    """The ids of `append_messages`, encoding the new text alone; the rendering of all messages; and
    whether that still begins with what was read and written.

    `last` is the log's last id, `before` the rendering that the last turn answered, and `written`
    the turn as it was sampled, with its calls. Where the template writes the turn so, a log of T
    turns is rendered once at each; append_messages also tokenizes all of it.
    """
    _require_assistant_last(messages)
    whole = tokenizer.render_chat([*messages, *new], add_generation_prompt=True, tools=tools)
    said = (messages[-1].get("content") or "").strip()
    kept = whole.startswith(before) and whole[len(before) :].lstrip().startswith(said)
    ended = last in tokenizer.eos_ids
    text = _text_after(tokenizer, before, written or said, whole, ended)
    if text is None:
        text = "".join(_added_text(tokenizer, messages, new, whole, ended, tools=tools))
    return encode_after(tokenizer, last, text)[0], whole, kept


def _text_after(tokenizer, before: str, said: str, whole: str, ended: bool) -> str | None:
    """The text that follows the last turn, from its stop token on, where that is found at once:
    behind what the turn answered and the turn itself. None: it has to be looked for."""
    if not whole.startswith(before):
        return None
    rest, stops = whole[len(before) :], _stop_texts(tokenizer)
    found = [(rest.find(stop), -len(stop)) for stop in stops if stop in rest]
    if not found or any(stop in said for stop in stops):
        return None
    at, size = min(found)
    turn, answer = rest[:at].strip(), said.rpartition("</think>")[2].strip()
    if turn not in (said.strip(), answer) and _NO_REASONING.sub("", turn, count=1) != answer:
        return None  # another turn's stop token, or calls that the template writes in its own way
    return rest[at - size :] if ended else rest[at:]


def _added_text(
    tokenizer, messages, new, whole: str, ended: bool, *, add_generation_prompt=True, **options
) -> tuple[str, str]:
    """The text that ends the last turn, and the text that the new messages add after it."""

    def render(history, following=(), prompt=False):
        return tokenizer.render_chat(
            [*history, *following], add_generation_prompt=prompt, **options
        )

    base, suffix = _new_text(tokenizer, render, messages, new, add_generation_prompt, whole)
    closing, suffix = _closing(tokenizer, render, messages, base, suffix)
    if ended:  # the policy wrote an end token itself: it is not written again
        closing = _without_stop(tokenizer, closing)
    return closing, suffix


def _common(first: Sequence, second: Sequence) -> int:
    """The length of the longest common beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _new_text(tokenizer, render, messages, new, prompt: bool, whole: str) -> tuple[str, str]:
    """A rendering that ends with the last turn, and the text that the new messages add to it.

    Where the template rewrites the turn once something follows it, a turn with a content that no
    template rewrites stands in for it, and only the text after that content is compared. What a
    template writes behind the turn's stop token at the end of a conversation alone (Phi-4-mini's
    eos) is no part of the turn.
    """
    base = render(messages)
    if whole.startswith(base):
        return base, whole[len(base) :]
    last = {**messages[-1], "content": _PROBE}
    for stand_in in (last, {"role": last["role"], "content": _PROBE}):
        history = [*messages[:-1], stand_in]
        base, longer = render(history), render(history, new, prompt)
        _, probe, after = base.partition(_PROBE)
        _, found_too, longer_after = longer.partition(_PROBE)
        if not (probe and found_too):
            continue
        if longer_after.startswith(after):
            return base, longer_after[len(after) :]
        same = after[: _common(after, longer_after)]
        ends = [same.index(stop) + len(stop) for stop in _stop_texts(tokenizer) if stop in same]
        if ends:
            return base[: len(base) - len(after) + min(ends)], longer_after[min(ends) :]
    raise InputError(
        "the chat template changes how a turn ends when messages follow it",
        value=(base[-40:], whole[-40:]),
        rule="then no text can be appended to what was sampled",
        fix="use a template that keeps the end of each turn",
    )


def _closing(tokenizer, render, messages, base: str, suffix: str) -> tuple[str, str]:
    """The text that ends the last turn, from its end token on, and the suffix after that."""
    last = base if not base[-_END_CHARACTERS:].strip() else base[-_END_CHARACTERS:]
    ids, offsets = tokenizer.encode_with_offsets(last)
    for i, (start, stop) in zip(reversed(ids), reversed(offsets), strict=True):
        if i in tokenizer.eos_ids:
            return last[start:], suffix
        if last[start:stop].strip():
            break
    # No stop token is there: the turn ends with what the template writes after a content, and with
    # a stop token if that is written once something follows.
    probe = {"role": "assistant", "content": _PROBE}
    _, _, after = render([*messages[:-1], probe]).partition(_PROBE)
    closing = after if base.endswith(after) else ""
    for stop in _stop_texts(tokenizer):
        if suffix.startswith(stop):
            return closing + stop, suffix[len(stop) :]
    return closing, suffix


def _without_stop(tokenizer, closing: str) -> str:
    """The closing text without its stop token."""
    for stop in _stop_texts(tokenizer):
        if stop in closing:
            return closing.replace(stop, "", 1)
    return closing


def _stop_texts(tokenizer) -> list[str]:
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_ids}
    return sorted(texts - {""}, key=len, reverse=True)


def encode_after(tokenizer, last: int, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and offsets of a text that stands behind a token, not at the beginning of a text.

    Tokenizers of the sentencepiece kind put a space in front of a text; encoded behind a special
    token or a newline, the text gets what it has in the middle of a conversation.
    """
    if tokenizer.context_free:
        return tokenizer.encode_with_offsets(text)
    front = "\n"
    if last in tokenizer.special_ids:
        front = tokenizer.decode([last], skip_special_tokens=False)
    before = tokenizer.encode(front)
    ids, offsets = tokenizer.encode_with_offsets(front + text)
    n = len(before)
    if ids[:n] != before:  # the newline is one token with what follows
        return tokenizer.encode_with_offsets(text)
    return ids[n:], [(max(a - len(front), 0), b - len(front)) for a, b in offsets[n:]]
