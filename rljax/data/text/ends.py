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
    last = [i for i, _, _ in added_in(final)]
    if both:
        answer = EndOfTurn(next((i for i in both if i in stop_ids), both[-1]))
    elif last:
        answer = EndOfTurn(next((i for i in last if i in stop_ids), last[0]))
    else:
        answer = _next_mark(following, added_in)
    if answer is None:
        return ()
    call = _call_end(render, added_in, answer.next_role, special_ids)
    known = {answer.id, *stop_ids}
    return (answer,) if call is None or call.id in known else (answer, call)


def _next_mark(text: str, added_in) -> EndOfTurn | None:
    """The token with which the next message begins."""
    marks = added_in(text)
    if marks and not text[: marks[0][1]].strip():
        return EndOfTurn(marks[0][0], True)
    return None


def _call_end(render, added_in, next_role: bool, special_ids) -> EndOfTurn | None:
    """The token behind a turn that calls a tool; None where the template writes no calls."""
    final = _after(render, [_ASKED, _CALLED], False)
    if final is None:
        return None
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
    for system in ([], [_SYSTEM]):
        try:
            _, answer, after = render([*system, *messages], prompt).partition(_ANSWER)
        except InputError:
            continue
        if answer:
            return after
    return None


def always_opened(render: Callable, stops: Sequence[str]) -> str:
    """Returns the beginning of an answer that a template writes behind every conversation, asked
    for one or not; "" where it writes none. `render(messages, prompt)` is its text, `stops` are the
    texts of the stop tokens: what is behind the last one is no part of a turn."""
    try:
        texts = [render([_ASKED], False), render([_ASKED, _ANSWERED], False)]
        if texts[0] != render([_ASKED], True):
            return ""
    except InputError:  # it refuses such a conversation
        return ""
    behind = os.path.commonprefix([text[::-1] for text in texts])[::-1]
    ends = [behind.rfind(stop) + len(stop) for stop in stops if stop in behind]
    opener = behind[max(ends) :] if ends else ""
    return opener if opener.strip() else ""


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text up to the first stop string."""
    starts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(starts)] if starts else text
