"""Parses a request: from OpenAI's JSON to prompts and Sampling.

A field that is not known, or not supported, is refused by its name: a client must not believe that
it had an effect.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from rljax.data.images.encode import ImageReader
from rljax.data.text.chat import beginning
from rljax.data.text.contents import check_conversation, untold_tools
from rljax.data.text.messages import for_template
from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.calls import Format
from rljax.environments.request_fields import (
    CHAT,
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    SAMPLED,
    chat_limit,
    check_limit,
    read_fields,
    read_flag,
    read_number,
    read_object,
    read_text,
    read_whole,
    refuse,
)
from rljax.errors import InputError
from rljax.reasoning import beginning_of
from rljax.sampler import Sampling
from rljax.sampler.prompt_images import PromptImages
from rljax.sampler.requests import MOST_BIAS
from rljax.sampler.stop_strings import stop_tokens
from rljax.serving.images import decoded, opened, split_images
from rljax.serving.prompts import MOST_LIKELIEST

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
COMPLETION_LIKELIEST = 5  # OpenAI's limit of logprobs for completions
BIASED_TOKENS = 300  # OpenAI's bound
CHARACTERS_PER_TOKEN = 128  # of a prompt: longer tokens exist, but no text averages more
STOP_TOKENS = 64  # of a request
_NEUTRAL_IN_COMPLETIONS = {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "logprobs": (False,),
    "prompt_embeds": (),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A parsed request. `requests`: ids and Sampling of each prompt; n samples of each."""

    chat: bool
    requests: list[tuple[list[int], Sampling]]
    n: int
    stream: bool
    usage: str  # of a stream: "last" = in a chunk of its own, "each" = so far in every one, too
    logprobs: bool
    likeliest: int  # tokens at each position, with their log-probs
    echo: list[str]  # the prompts' texts where they are to be repeated, else ""
    stops: tuple[str, ...]  # stop strings of the client, the same for all prompts
    prompt_logprobs: bool = False  # log-probs of the prompts' tokens, too
    sampled: bool = True  # False: the prompts are only echoed
    calls: Format | None = None  # how tool calls are read; None: the text is given as it is
    tools: list[dict] | None = None  # of the client; None: it wants no calls
    images: PromptImages | None = None  # of a chat's prompt
    begun: str = ""  # how the prompt begins the response (rljax.reasoning.beginning_of)


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of a single request, checked before any text is tokenized or rendered."""

    tokens: int  # of a slot: prompt and response together
    samples: int  # prompts x n

    def check(self, name: str, prompts: list, n: int, response_tokens: int | None) -> None:
        """Raises InputError for prompts (texts, or lists of ids) that can never be served: n below
        1, too many samples, or more tokens than a slot has. A text counts as one token here."""
        if n < 1:
            refuse("n", n, fix="send at least 1")
        if len(prompts) * n > self.samples:
            fix = "send a lower n, or several requests"
            refuse("samples of one request", len(prompts) * n, f"at most {self.samples}", fix=fix)
        fix = "a shorter prompt, a lower max_tokens, or longer slots"
        for prompt in prompts:
            ids = not isinstance(prompt, str)
            tokens = (len(prompt) if ids else 1) + (response_tokens or 1)
            rule = f"prompt and response do not fit a slot, which has {self.tokens} tokens"
            if tokens > self.tokens:
                refuse("tokens", f"{tokens} or more", rule, fix=fix)
            if not ids and len(prompt) > CHARACTERS_PER_TOKEN * self.tokens:
                refuse(name, f"{len(prompt)} characters", rule, fix=fix)

    def check_images(self, tokens: int, response_tokens: int | None) -> None:
        """Raises InputError if the `tokens` of the images and the response do not fit a slot.
        Called before images become text."""
        if tokens + (response_tokens or 1) > self.tokens:
            rule = f"images and response do not fit a slot, which has {self.tokens} tokens"
            fix = "fewer or smaller images, a lower max_tokens, or longer slots"
            refuse("tokens of images", tokens, rule, fix=fix)


class UnknownModel(InputError):
    """An error for a request that names a model that is not served."""


# -- types


def _stop_token_ids(name, value) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > STOP_TOKENS:
        refuse(name, value, fix=f"send a list of at most {STOP_TOKENS} token ids")
    return tuple(read_whole(name, token) for token in value)


def _bias(name, value) -> tuple[tuple[int, float], ...]:
    if len(read_object(name, value)) > BIASED_TOKENS:
        refuse(name, f"{len(value)} tokens", fix=f"send at most {BIASED_TOKENS}")
    for token in value:
        if not (token.isdecimal() and len(token) < 12):
            refuse(name, token, fix="send an object of token ids and numbers")
    biases = tuple((int(token), read_number(name, bias)) for token, bias in value.items())
    for _, bias in biases:
        if abs(bias) > MOST_BIAS:
            rule = f"from {-MOST_BIAS:g} to {MOST_BIAS:g}"
            refuse(name, bias, rule, fix="send -100, which forbids a token in practice, or 100")
    return biases


def _completion_logprobs(name, value) -> int:
    if not 0 <= read_whole(name, value) <= COMPLETION_LIKELIEST:
        refuse(name, value, fix=f"send 0 (the sampled tokens' own) to {COMPLETION_LIKELIEST}")
    return value


def _top_logprobs(name, value) -> int:
    if not 0 <= read_whole(name, value) <= MOST_LIKELIEST:
        refuse(name, value, fix=f"send a number from 0 to {MOST_LIKELIEST}")
    return value


def _ids(value) -> list[int]:
    return [read_whole("prompt", token) for token in value]


def _prompts(name, value) -> list[str | list]:
    """Returns texts, or lists that should be of ids: `_ids` checks them, once it is known that they
    fit."""
    if isinstance(value, str):
        return [read_text(name, value)]
    if not isinstance(value, list) or not value:
        fix = "send a string, a list of strings, token ids, or lists of token ids"
        refuse(name, value, fix=fix)
    if all(isinstance(item, str) for item in value):
        return [read_text(name, item) for item in value]
    return value if all(isinstance(item, list) for item in value) else [value]


# name: (value where it is absent or null, reader)
_EXTRA_FIELDS: dict[str, tuple[object, Callable]] = {
    "stop_token_ids": ((), _stop_token_ids),
    "logit_bias": ((), _bias),
    "ignore_eos": (False, read_flag),
}
_COMPLETION_FIELDS = (
    SAMPLED
    | _EXTRA_FIELDS
    | {
        "prompt": (None, _prompts),
        "echo": (False, read_flag),
        "logprobs": (None, _completion_logprobs),
        "best_of": (None, read_whole),
        "add_special_tokens": (True, read_flag),
    }
)
_CHAT_FIELDS = (
    CHAT
    | _EXTRA_FIELDS
    | {
        "logprobs": (False, read_flag),
        "top_logprobs": (0, _top_logprobs),
        "chat_template_kwargs": (None, read_object),
        "add_generation_prompt": (None, read_flag),
        "continue_final_message": (None, read_flag),
    }
)


# -- requests


def read_completion(
    body: object,
    tokenizer: Tokenizer,
    name: str,
    limits: RequestLimits,
    stops: Sequence[str] = (),
    defaults: Mapping[str, float] | None = None,
) -> ParsedRequest:
    """Parses the body of POST /v1/completions for the model that is served as `name`. Raises
    InputError for a field that is not known, not of its type or out of range, and for prompts that
    can never be served; UnknownModel for another model.

    `stops`: the stop strings of the run that is served, beside those of the request. `defaults`:
    values of fields that the request leaves out.
    """
    fields = read_fields(body, _COMPLETION_FIELDS, NEUTRAL | _NEUTRAL_IN_COMPLETIONS, defaults)
    fields["stop"] = _with_stops(fields, stops)
    _check_model(fields, name)
    if fields["prompt"] is None:
        refuse("prompt", None, "the request has none", fix='send "prompt": "...", a text')
    if fields["best_of"] not in (None, fields["n"]):
        rule = "no other samples than n are drawn"
        refuse("best_of", fields["best_of"], rule, fix="leave it out, or send n")
    add_special_tokens = fields["add_special_tokens"]
    limit = COMPLETION_TOKENS if fields["max_tokens"] is None else fields["max_tokens"]
    limits.check("prompt", fields["prompt"], fields["n"], limit)
    prompts = [p if isinstance(p, str) else _ids(p) for p in fields["prompt"]]
    sampled = limit > 0 or not fields["echo"]
    check_limit("max_tokens", limit if sampled else 1)
    sampling = _sampling(fields, tokenizer, limit if sampled else 1)
    requests = [(_encode(tokenizer, prompt, add_special_tokens), sampling) for prompt in prompts]
    echo = [""] * len(requests)
    if fields["echo"]:
        echo = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    likeliest = fields["logprobs"] or 0
    fields["logprobs"] = fields["logprobs"] is not None
    extra = dict(prompt_logprobs=fields["echo"] and fields["logprobs"], sampled=sampled)
    return _parsed_request(False, requests, fields, likeliest, echo, **extra)


def read_chat(
    body: object,
    tokenizer: Tokenizer,
    name: str,
    limits: RequestLimits,
    calls: Format | None = None,
    reader: ImageReader | None = None,
    stops: Sequence[str] = (),
    defaults: Mapping[str, float] | None = None,
) -> ParsedRequest:
    """Parses the body of POST /v1/chat/completions, and raises as `read_completion`; InputError
    also for messages that the chat template does not accept, and for images or tools that the model
    does not read. Without a limit the response fills the slot.

    `calls`: how the model writes tool calls. `reader`: how it reads images.
    """
    fields = read_fields(body, _CHAT_FIELDS, NEUTRAL | NEUTRAL_IN_CHAT, defaults)
    fields["stop"] = _with_stops(fields, stops)
    _check_model(fields, name)
    if fields["messages"] is None:
        fix = 'send "messages": [{"role": "user", "content": "..."}]'
        refuse("messages", None, "the request has none", fix=fix)
    limit = asked_tokens = chat_limit(fields)
    limits.check("messages", [""], fields["n"], limit)
    tools = fields["tools"] if fields["tool_choice"] == "auto" else []
    if tools and not (calls and calls.name):
        rule = "this model's chat template writes no tool calls that are known here"
        fix = "rljax serve --calls=hermes, or another format, and a system message about the tools"
        refuse("tools", f"{len(tools)} of them", rule, fix=fix)
    options = {"tools": tools} if tools else {}
    messages, sources = split_images(for_template(fields["messages"]))
    images = opened(sources, reader)
    limits.check_images(sum(reader.tokens(image) for image in images), limit)
    options["variables"] = _variables(fields["chat_template_kwargs"], tokenizer)
    turn_options = _next_turn(fields) or beginning(messages)
    text = tokenizer.render_chat(messages, **turn_options, **options)
    if images:
        text, _ = reader.expanded(text, images)
    limits.check("messages", [text], fields["n"], limit)
    # A client may tell of its tools in a message where the template tells of none.
    check_conversation(tokenizer, messages, text, options, needs_tools=False, **turn_options)
    if untold := untold_tools(tokenizer, messages, options, **turn_options):
        rule = "this model's chat template writes nothing of them, and no message tells of them"
        fix = "name them in a system message that says what they do and how they are called"
        refuse("tools", untold, rule, fix=fix)
    ids = tokenizer.encode(text)
    if images:  # before their pixels are decoded
        limits.check("messages", [ids], fields["n"], limit)
    limit = max(1, limits.tokens - len(ids)) if asked_tokens is None else asked_tokens
    used_calls = calls if tools or (calls and calls.channels) else None
    sampling = _sampling(fields, tokenizer, limit, used_calls)
    likeliest = fields["top_logprobs"]
    if likeliest and not fields["logprobs"]:
        refuse("top_logprobs", likeliest, fix="send logprobs=true, too, or leave it out")
    if likeliest and images:
        rule = "0 beside images: scores are of text"
        refuse("top_logprobs", likeliest, rule, fix="leave it out")
    prompt_images = decoded(images, ids, reader)
    begun = beginning_of(text, messages) if used_calls else ""
    extra = dict(calls=used_calls, tools=tools or None, images=prompt_images, begun=begun)
    return _parsed_request(True, [(ids, sampling)], fields, likeliest, [""], **extra)


def _variables(variables: dict | None, tokenizer: Tokenizer) -> dict | None:
    """Returns the variables of the chat template, without those that are null and have no effect.
    Raises InputError for one that it does not read."""
    if not variables:
        return variables
    unread = [name for name in variables if not tokenizer.reads_variable(name)]
    if unread_values := [name for name in unread if variables[name] is not None]:
        rule = "the model's chat template reads no variable of this name"
        refuse("chat_template_kwargs", unread_values, rule, fix="correct the name, or leave it out")
    return {name: value for name, value in variables.items() if name not in unread}


def _next_turn(fields: dict) -> dict[str, bool]:
    """Returns the render arguments that vLLM's fields give a chat's prompt. {}: a last message
    of the assistant is continued, and behind any other one a turn is begun."""
    begin_turn, continue_turn = fields["add_generation_prompt"], fields["continue_final_message"]
    if begin_turn and continue_turn:
        rule = "false beside continue_final_message: a turn is continued, or a new one begun"
        refuse("add_generation_prompt", True, rule, fix="send one of the two")
    if begin_turn is None and continue_turn is None:
        return {}
    begin_turn = not continue_turn if begin_turn is None else begin_turn
    return dict(add_generation_prompt=begin_turn, continue_final_message=bool(continue_turn))


def _parsed_request(
    chat: bool, requests, fields: dict, likeliest: int, echo: list[str], **extra
) -> ParsedRequest:
    if likeliest and fields["stream"]:
        rule = "0 in a stream: others than the sampled tokens are scored when a response is whole"
        name = "top_logprobs" if chat else "logprobs"
        refuse(name, likeliest, rule, fix="send 0, or stream=false")
    return ParsedRequest(
        chat,
        requests,
        fields["n"],
        fields["stream"],
        fields["stream_options"],
        fields["logprobs"],
        likeliest,
        echo,
        fields["stop"],
        **extra,
    )


def _check_model(fields: dict, name: str) -> None:
    if fields["model"] not in (None, name):
        rule, fix = f"only {name!r} is served", f"send model={name!r}, or none"
        raise UnknownModel("model", value=fields["model"], rule=rule, fix=fix)


def _encode(tokenizer: Tokenizer, prompt: str | list[int], special: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    ids = tokenizer.encode(prompt, add_special_tokens=special)
    return ids or ([] if tokenizer.bos_id is None else [tokenizer.bos_id])


def _with_stops(fields: dict, stops: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings of a request and, unless it ignores ends, of the served run."""
    return tuple(dict.fromkeys((*fields["stop"], *(() if fields["ignore_eos"] else stops))))


def _sampling(
    fields: dict, tokenizer: Tokenizer, limit: int, calls: Format | None = None
) -> Sampling:
    call_stops = calls.stop_strings if calls else ()
    end_ids = calls.stop_ids(tokenizer) if calls else tuple(tokenizer.eos_ids)
    end_ids = () if fields["ignore_eos"] else end_ids
    request_ids = (*fields["stop_token_ids"], *stop_tokens(tokenizer, fields["stop"]))
    return Sampling(
        temperature=fields["temperature"],
        top_k=fields["top_k"],
        top_p=fields["top_p"],
        min_p=fields["min_p"],
        max_response_tokens=limit,
        stop_ids=tuple(dict.fromkeys((*end_ids, *request_ids))),
        stop_strings=(*fields["stop"], *call_stops),
        logit_bias=fields["logit_bias"],
        seed=fields["seed"],
    )
