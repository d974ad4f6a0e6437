"""Ends of a turn of the assistant: tokens, read off the chat template, and stop strings.

The token that the template writes behind an answer, or behind a call of a tool, joins the
tokenizer's stop set, so that what supervised training learns last is what decoding stops at. Where
nothing stands there (GLM), a turn ends with the token that begins the next message.
"""

import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from rljax.errors import InputError

_ANSWER, _NEXT = "RLJAX-ANSWER", "RLJAX-NEXT"  # no template writes these by itself
_SYSTEM = {"role": "system", "content": "RLJAX-SYSTEM"}
_ASKED = {"role": "user", "content": "RLJAX-ASKED"}
_ANSWERED = {"role": "assistant", "content": _ANSWER}
_CALL = {"name": "rljax_call", "arguments": {"text": _ANSWER}}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "rljaxcall", "type": "function", "function": _CALL}],
}
_TOOL_SAID = {"role": "tool", "name": "rljax_call", "tool_call_id": "rljaxcall", "content": _NEXT}
PROBED_TOOL = {  # which the call of a tool goes to
    "type": "function",
    "function": {
        "name": "rljax_call",
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_USER_SAID = {"role": "user", "content": _NEXT}


class EndOfTurn(NamedTuple):
    """A token that ends turns. If `next_role` is true, it is the token that begins the
    next message."""

    id: int
    next_role: bool = False


def turn_ends(
    render: Callable[[Sequence[dict], bool], str],
    added_in: Callable[[str], list[tuple[int, int, int]]],
    special_ids: Collection[int],
    stop_ids: Collection[int],
) -> tuple[EndOfTurn, ...]:
    """The tokens that end an answer and, if it is another one, a call; () if the template writes
    no tokens.

    `render(messages, add_generation_prompt)` is the template, `added_in(text)` the added tokens of
    a text: (id, first character, end). Of several tokens behind an answer a stop token goes first,
    then the last one that is also there when another message follows: Cohere's
    <|END_RESPONSE|><|END_OF_TURN_TOKEN|> ends with the second, and Phi-3's <|end|> has an eos
    behind it at the end of a conversation alone.
    """
    final = _after(render, [_ASKED, _ANSWERED], False)
    if final is None:
        return ()
    following = (_after(render, [_ASKED, _ANSWERED, _USER_SAID], True) or "").partition(_NEXT)[0]
    both = [i for i, _, _ in added_in(os.path.commonprefix([final, following]))]
    text, start = _behind_all(render)
    if text[start:]:  # a header follows, which the next one may begin like
        both = _before_header(render, added_in, both)
        final = final.removesuffix(text[start:])
    last = [i for i, _, _ in added_in(final)]
    if both:
        answer = EndOfTurn(next((i for i in both if i in stop_ids), both[-1]))
    elif last:
        answer = EndOfTurn(next((i for i in last if i in stop_ids), last[0]))
    else:
        answer = _next_mark(following, added_in)
    if answer is None:
        return ()
    opener = always_opened(render, added_in, (answer,), {answer.id, *stop_ids})
    call = _call_end(render, added_in, answer.next_role, special_ids, opener)
    known = {answer.id, *stop_ids}
    return (answer,) if call is None or call.id in known else (answer, call)


def _before_header(render, added_in, tokens: list[int]) -> list[int]:
    """The tokens behind an answer up to the one that begins a message: the first token of the
    conversation that is among them, the one that ends the answer aside."""
    begun = added_in(_parted(render, [_ASKED], False, _ASKED["content"], 0) or "")
    header = next((i for i, _, _ in begun if i in tokens[1:]), None)
    return tokens if header is None else tokens[: tokens.index(header, 1)]


def _next_mark(text: str, added_in) -> EndOfTurn | None:
    """The token with which the next message begins."""
    marks = added_in(text)
    if marks and not text[: marks[0][1]].strip():
        return EndOfTurn(marks[0][0], True)
    return None


def _call_end(render, added_in, next_role: bool, special_ids, opener: str) -> EndOfTurn | None:
    """The token behind a turn that calls a tool; None where the template writes no calls. The
    `opener` is that of the next answer."""
    final = _after(render, [_ASKED, _CALLED], False)
    if final is None:
        return None
    final = final.removesuffix(opener)
    if next_role:
        following = _after(render, [_ASKED, _CALLED, _TOOL_SAID], True) or ""
        return _next_mark(following[len(final) :], added_in) if final in following else None
    last = added_in(final)[-1:]
    if last and last[0][0] in special_ids and not final[last[0][2] :].strip():
        return EndOfTurn(last[0][0])
    return None


def _after(render, messages: Sequence[dict], prompt: bool) -> str | None:
    """Returns what the template writes behind the answer; None where it refuses the messages, also
    behind a system message, which some ask for."""
    return _parted(render, messages, prompt, _ANSWER, 2)


def _parted(render, messages, prompt: bool, text: str, side: int) -> str | None:
    """Returns what the template writes before the text (side 0) or behind it (2)."""
    for system in ([], [_SYSTEM]):
        try:
            parts = render([*system, *messages], prompt).partition(text)
        except InputError:
            continue
        if parts[1]:
            return parts[side]
    return None


def _behind_all(render: Callable) -> tuple[str, int]:
    """Returns (a conversation that ends with an answer, where the text begins in it that a template
    writes behind a question, too): for a template that begins an answer asked for or not. ("", 0)
    for others."""
    for system in ([], [_SYSTEM]):
        try:
            asked, text = (
                render([*system, *messages], False) for messages in ([_ASKED], [_ASKED, _ANSWERED])
            )
            if asked != render([*system, _ASKED], True):
                return "", 0
        except InputError:  # it refuses such a conversation
            continue
        return text, len(text) - len(os.path.commonprefix([asked[::-1], text[::-1]]))
    return "", 0


def always_opened(
    render: Callable, added_in: Callable, ends: Sequence[EndOfTurn], stop_ids: Collection[int]
) -> str:
    """Returns the beginning of an answer that a template writes behind every conversation, asked
    for one or not; "" where it writes none. `render` and `added_in` are those of `turn_ends`. What
    is behind the last of the stop tokens is no part of a turn; it is all of it where the next
    message ends a turn."""
    text, start = _behind_all(render)
    stop = max((end for i, _, end in added_in(text) if i in stop_ids), default=None)
    if any(end.next_role for end in ends):
        stop = start
    if stop is None or text[stop:start].strip():
        return ""
    opener = text[max(stop, start) :]
    return opener if opener.strip() else ""


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text up to the first stop string."""
    starts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(starts)] if starts else text
