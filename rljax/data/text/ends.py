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
_QUESTION = {"role": "user", "content": "RLJAX-ASKED"}
_ANSWER_TURN = {"role": "assistant", "content": _ANSWER}
_CALL = {"name": "rljax_call", "arguments": {"text": _ANSWER}}
_CALL_TURN = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "rljaxcall", "type": "function", "function": _CALL}],
}
_TOOL_ANSWER = {"role": "tool", "name": "rljax_call", "tool_call_id": "rljaxcall", "content": _NEXT}
PROBED_TOOL = {  # the tool that _CALL calls
    "type": "function",
    "function": {
        "name": "rljax_call",
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_NEXT_QUESTION = {"role": "user", "content": _NEXT}


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
    """Returns the tokens that end an answer and, if it is another one, a call; () if the template
    writes no tokens.

    `render(messages, add_generation_prompt)` is the template, `added_in(text)` the added tokens of
    a text: (id, first character, end). Of several tokens behind an answer a stop token goes first,
    then the last one that is also there when another message follows: Cohere's
    <|END_RESPONSE|><|END_OF_TURN_TOKEN|> ends with the second, and Phi-3's <|end|> has an eos
    behind it at the end of a conversation alone.
    """
    ending = _after(render, [_QUESTION, _ANSWER_TURN], False)
    if ending is None:
        return ()
    following = _after(render, [_QUESTION, _ANSWER_TURN, _NEXT_QUESTION], True) or ""
    following = following.partition(_NEXT)[0]
    shared_ids = [i for i, _, _ in added_in(os.path.commonprefix([ending, following]))]
    text, opening = _answer_and_opening(render)
    if text[opening:]:  # a header follows; the next message's may begin alike
        shared_ids = _before_header(render, added_in, shared_ids)
        ending = ending.removesuffix(text[opening:])
    ending_ids = [i for i, _, _ in added_in(ending)]
    if shared_ids:
        answer = EndOfTurn(next((i for i in shared_ids if i in stop_ids), shared_ids[-1]))
    elif ending_ids:
        answer = EndOfTurn(next((i for i in ending_ids if i in stop_ids), ending_ids[0]))
    else:
        answer = _next_mark(following, added_in)
    if answer is None:
        return ()
    opener = always_opened(render, added_in, (answer,), {answer.id, *stop_ids})
    call = _call_end(render, added_in, answer.next_role, special_ids, opener)
    stops = {answer.id, *stop_ids}
    return (answer,) if call is None or call.id in stops else (answer, call)


def _before_header(render, added_in, tokens: list[int]) -> list[int]:
    """Returns the tokens behind an answer up to the one that begins a message: the first token of
    the conversation that is among them, the one that ends the answer aside."""
    beginning = added_in(_rendered_side(render, [_QUESTION], False, _QUESTION["content"], 0) or "")
    header = next((i for i, _, _ in beginning if i in tokens[1:]), None)
    return tokens if header is None else tokens[: tokens.index(header, 1)]


def _next_mark(text: str, added_in) -> EndOfTurn | None:
    """Returns the token with which the next message begins; None where it begins with text."""
    marks = added_in(text)
    if marks and not text[: marks[0][1]].strip():
        return EndOfTurn(marks[0][0], True)
    return None


def _call_end(render, added_in, next_role: bool, special_ids, opener: str) -> EndOfTurn | None:
    """Returns the token behind a turn that calls a tool; None where the template writes no calls.
    The `opener` is that of the next answer."""
    ending = _after(render, [_QUESTION, _CALL_TURN], False)
    if ending is None:
        return None
    ending = ending.removesuffix(opener)
    if next_role:
        following = _after(render, [_QUESTION, _CALL_TURN, _TOOL_ANSWER], True) or ""
        return _next_mark(following[len(ending) :], added_in) if ending in following else None
    last_token = added_in(ending)[-1:]
    if last_token and last_token[0][0] in special_ids and not ending[last_token[0][2] :].strip():
        return EndOfTurn(last_token[0][0])
    return None


def _after(render, messages: Sequence[dict], prompt: bool) -> str | None:
    """Returns the text that the template writes behind the answer; None where it refuses the
    messages, also behind a system message, which some templates ask for."""
    return _rendered_side(render, messages, prompt, _ANSWER, 2)


def _rendered_side(render, messages, prompt: bool, text: str, side: int) -> str | None:
    """Returns the text that the template writes before `text` (side 0) or behind it (side 2); None
    where it refuses the messages, also behind a system message."""
    for system in ([], [_SYSTEM]):
        try:
            parts = render([*system, *messages], prompt).partition(text)
        except InputError:
            continue
        if parts[1]:
            return parts[side]
    return None


def _answer_and_opening(render: Callable) -> tuple[str, int]:
    """Returns (the text of a conversation that ends with an answer, the character at which the
    beginning of the next answer stands in it), for a template that writes that beginning behind
    every conversation, asked for or not. Returns ("", 0) for others."""
    for system in ([], [_SYSTEM]):
        try:
            question_text, text = (
                render([*system, *messages], False)
                for messages in ([_QUESTION], [_QUESTION, _ANSWER_TURN])
            )
            if question_text != render([*system, _QUESTION], True):
                return "", 0
        except InputError:  # it refuses such a conversation
            continue
        return text, len(text) - len(os.path.commonprefix([question_text[::-1], text[::-1]]))
    return "", 0


def always_opened(
    render: Callable, added_in: Callable, ends: Sequence[EndOfTurn], stop_ids: Collection[int]
) -> str:
    """Returns the beginning of an answer that a template writes behind every conversation, asked
    for one or not; "" where it writes none. `render` and `added_in` are those of `turn_ends`. The
    beginning starts behind the last of the stop tokens, for these end the turn before it; where
    the token of the next message ends a turn, it is the whole of the text."""
    text, opening = _answer_and_opening(render)
    turn_end = max((end for i, _, end in added_in(text) if i in stop_ids), default=None)
    if any(end.next_role for end in ends):
        turn_end = opening
    if turn_end is None or text[turn_end:opening].strip():
        return ""
    opener = text[max(turn_end, opening) :]
    return opener if opener.strip() else ""


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text up to the first stop string."""
    starts = [position for position in (text.find(stop) for stop in stops) if position >= 0]
    return text[: min(starts)] if starts else text
