"""Parses a request: from OpenAI's JSON to prompts and Sampling.

A field that is not known, or cannot be honoured, is refused by its name: a client must not believe
that it was obeyed.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

from rljax.data.images.encode import ImageReader
from rljax.data.text.chat import check_prompt, render_prompt
from rljax.data.text.contents import check_conversation
from rljax.data.text.messages import check_unicode, for_template
from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.calls import Format
from rljax.environments.schemas import told_of
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
STOPS, STOP_CHARACTERS = 16, 1000
MESSAGES = 4096
TOOLS = 128
BIASED_TOKENS = 300  # OpenAI's bound
NAME_CHARACTERS = 64  # of a field's name, as far as an error repeats it
CHARACTERS_PER_TOKEN = 128  # of a prompt: longer tokens exist, but no text averages more
STOP_TOKENS = 64  # of a request
# What clients of OpenAI, vLLM and SGLang send, with the values that have no effect; null is absent.
_ANY = object()  # names and hints for a service: no value has an effect on the answer
NEUTRAL = {
    # OpenAI
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "metadata": _ANY,
    "modalities": (["text"], []),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": _ANY,
    "prompt_cache_options": _ANY,
    "prompt_cache_retention": _ANY,
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": _ANY,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "user": _ANY,
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": _ANY,
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "request_id": _ANY,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": ({},),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "vllm_xargs": ({},),
    # SGLang
    "ebnf": (),
    "json_schema": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "rid": _ANY,
    "separate_reasoning": (False,),
    "stop_regex": ([],),
}
_NEUTRAL_IN_CHAT = {
    "add_special_tokens": (False,),  # templates write them
    "best_of": (1,),
    "echo": (False,),
}
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
            _refuse("n", n, fix="send at least 1")
        if len(prompts) * n > self.samples:
            fix = "send a lower n, or several requests"
            _refuse("samples of one request", len(prompts) * n, f"at most {self.samples}", fix=fix)
        fix = "a shorter prompt, a lower max_tokens, or longer slots"
        for prompt in prompts:
            ids = not isinstance(prompt, str)
            tokens = (len(prompt) if ids else 1) + (response_tokens or 1)
            rule = f"prompt and response do not fit a slot, which has {self.tokens} tokens"
            if tokens > self.tokens:
                _refuse("tokens", f"{tokens} or more", rule, fix=fix)
            if not ids and len(prompt) > CHARACTERS_PER_TOKEN * self.tokens:
                _refuse(name, f"{len(prompt)} characters", rule, fix=fix)

    def check_images(self, tokens: int, response_tokens: int | None) -> None:
        """Raises InputError if the `tokens` of the images and the response do not fit a slot.
        Called before images become text."""
        if tokens + (response_tokens or 1) > self.tokens:
            rule = f"images and response do not fit a slot, which has {self.tokens} tokens"
            fix = "fewer or smaller images, a lower max_tokens, or longer slots"
            _refuse("tokens of images", tokens, rule, fix=fix)


class UnknownModel(InputError):
    """An error for a request that names a model that is not served."""


# -- types


def _refuse(name: str, value, rule: str = "", *, fix: str):
    raise InputError(name, value=value, rule=rule, fix=fix)


def _number(name, value) -> float:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not abs(value) <= 1e30:  # false for NaN, too; an int may be too large to convert
        _refuse(name, "null" if value is None else value, fix="send a finite number")
    return float(value)


def _whole(name, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        _refuse(name, value, fix="send a whole number from 0 to 2147483647")
    return value


def _top_k(name, value) -> int:
    # vLLM's word for all tokens is -1.
    return 0 if isinstance(value, int) and value == -1 else _whole(name, value)


def _stop_token_ids(name, value) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > STOP_TOKENS:
        _refuse(name, value, fix=f"send a list of at most {STOP_TOKENS} token ids")
    return tuple(_whole(name, token) for token in value)


def _seed(name, value) -> int:
    """A seed of 64 bits, as OpenAI and vLLM take it, in the 32 bits of a key. Those that have more
    are hashed: to cut them would make equal draws of seeds that are near to one another."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        _refuse(name, value, fix=f"send a whole number from {-(2**63)} to {2**63 - 1}")
    if 0 <= value < 2**32:
        return value
    return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:4], "big")


def _flag(name, value) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, fix="send true or false")
    return value


def _text(name, value) -> str:
    if not isinstance(value, str):
        _refuse(name, value, fix="send a string")
    check_unicode(value, name)
    return value


def _stops(name, value) -> tuple[str, ...]:
    if not isinstance(value, (str, list)):
        _refuse(name, value, fix="send a string or a list of strings")
    texts = [value] if isinstance(value, str) else value
    if len(texts) > STOPS:
        _refuse(name, f"{len(texts)} strings", fix=f"send at most {STOPS}")
    for text in texts:
        if len(_text(name, text)) > STOP_CHARACTERS:
            _refuse(name, f"{len(text)} characters", fix=f"send at most {STOP_CHARACTERS} in each")
    return tuple(texts)


def _object(name, value) -> dict:
    if not isinstance(value, dict):
        _refuse(name, value, fix="send an object")
    return value


def _stream_options(name, value) -> str:
    known = ("include_usage", "continuous_usage_stats")
    hidden = {"include_obfuscation"} if _object(name, value).get("include_obfuscation") else set()
    unknown = sorted(set(value) - {*known, "include_obfuscation"} | hidden)
    if unknown:
        field = unknown[0][:NAME_CHARACTERS]
        rule = f"known are {', '.join(known)}"
        _refuse(f"{name}.{field}", value[unknown[0]], rule, fix="leave it out")
    last, each = (_flag(f"{name}.{field}", value.get(field, False)) for field in known)
    return ("each" if each else "last") if last else ""


def _bias(name, value) -> tuple[tuple[int, float], ...]:
    if len(_object(name, value)) > BIASED_TOKENS:
        _refuse(name, f"{len(value)} tokens", fix=f"send at most {BIASED_TOKENS}")
    for token in value:
        if not (token.isdecimal() and len(token) < 12):
            _refuse(name, token, fix="send an object of token ids and numbers")
    biases = tuple((int(token), _number(name, bias)) for token, bias in value.items())
    for _, bias in biases:
        if abs(bias) > MOST_BIAS:
            rule = f"from {-MOST_BIAS:g} to {MOST_BIAS:g}"
            _refuse(name, bias, rule, fix="send -100, which forbids a token in practice, or 100")
    return biases


def _completion_logprobs(name, value) -> int:
    if not 0 <= _whole(name, value) <= COMPLETION_LIKELIEST:
        _refuse(name, value, fix=f"send 0 (the sampled tokens' own) to {COMPLETION_LIKELIEST}")
    return value


def _top_logprobs(name, value) -> int:
    if not 0 <= _whole(name, value) <= MOST_LIKELIEST:
        _refuse(name, value, fix=f"send a number from 0 to {MOST_LIKELIEST}")
    return value


def _ids(value) -> list[int]:
    return [_whole("prompt", token) for token in value]


def _prompts(name, value) -> list[str | list]:
    """Texts, or lists that should be of ids: `_ids` looks, once it is known that they fit."""
    if isinstance(value, str):
        return [_text(name, value)]
    if not isinstance(value, list) or not value:
        fix = "send a string, a list of strings, token ids, or lists of token ids"
        _refuse(name, value, fix=fix)
    if all(isinstance(one, str) for one in value):
        return [_text(name, one) for one in value]
    return value if all(isinstance(one, list) for one in value) else [value]


def _messages(name, value) -> object:
    """Checked in full by the tokenizer, but for their number."""
    if isinstance(value, list) and len(value) > MESSAGES:
        _refuse(name, f"{len(value)} messages", fix=f"send at most {MESSAGES}")
    return value


def _tools(name, value) -> list[dict]:
    """Schemas of functions, as a chat template reads them."""
    if not isinstance(value, list) or len(value) > TOOLS:
        _refuse(name, value, fix=f"send a list of at most {TOOLS} tools")
    for number, tool in enumerate(value):
        field, fix = f"{name}[{number}]", 'send {"type": "function", "function": {"name": ...}}'
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            _refuse(field, tool, fix=fix)
        if not _text(f"{field}.name", function.get("name")):
            _refuse(f"{field}.name", "", "not empty", fix="send the name of the function")
        if not isinstance(function.get("parameters") or {}, dict):
            fix = "send a JSON schema, an object"
            _refuse(f"{field}.parameters", function["parameters"], fix=fix)
        if function.get("strict") or tool.get("strict"):
            rule = "what the model writes is not constrained"
            _refuse(f"{field}.strict", True, rule, fix="send false, or leave it out")
    return told_of(value)


def _tool_choice(name, value) -> str:
    if value not in ("auto", "none"):
        _refuse(name, value, "no call can be forced", fix="send 'auto' or 'none'")
    return value


# name: (value where it is absent or null, reader)
_BOTH: dict[str, tuple[object, Callable]] = {
    "model": (None, _text),
    "n": (1, _whole),
    "max_tokens": (None, _whole),
    "temperature": (1.0, _number),
    "top_p": (1.0, _number),
    "top_k": (0, _top_k),
    "min_p": (0.0, _number),
    "seed": (None, _seed),
    "stop": ((), _stops),
    "stop_token_ids": ((), _stop_token_ids),
    "logit_bias": ((), _bias),
    "stream": (False, _flag),
    "stream_options": ("", _stream_options),
    "ignore_eos": (False, _flag),
}
_COMPLETIONS = _BOTH | {
    "prompt": (None, _prompts),
    "echo": (False, _flag),
    "logprobs": (None, _completion_logprobs),
    "best_of": (None, _whole),
    "add_special_tokens": (True, _flag),
}
_CHAT = _BOTH | {
    "messages": (None, _messages),
    "max_completion_tokens": (None, _whole),
    "logprobs": (False, _flag),
    "top_logprobs": (0, _top_logprobs),
    "chat_template_kwargs": (None, _object),
    "tools": ([], _tools),
    "tool_choice": ("auto", _tool_choice),
    "add_generation_prompt": (None, _flag),
    "continue_final_message": (None, _flag),
}


def _read(body: object, known: dict, neutral: dict, defaults: Mapping[str, float] | None) -> dict:
    usual = {name: default for name, (default, _) in known.items()} | dict(defaults or {})
    if not isinstance(body, Mapping):
        _refuse("request body", body, fix="send a JSON object")
    present = {name: value for name, value in body.items() if value is not None}
    for name in [name for name, value in present.items() if _without_effect(name, value, neutral)]:
        del present[name]
    for name, value in present.items():
        if name not in known:
            rule = f"not supported; known are {', '.join(sorted(known))}"
            _refuse(f"field {name[:NAME_CHARACTERS]!r}", value, rule, fix="leave it out")
    return {
        name: read(name, present[name]) if name in present else usual[name]
        for name, (_, read) in known.items()
    }


def _without_effect(name: str, value: object, neutral: dict) -> bool:
    """Returns whether a field's value changes nothing. 1 is not true, and 0 not false."""
    values = neutral.get(name, ())

    def same(one):
        return one == value and isinstance(one, bool) == isinstance(value, bool)

    return values is _ANY or any(map(same, values))


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
    fields = _read(body, _COMPLETIONS, NEUTRAL | _NEUTRAL_IN_COMPLETIONS, defaults)
    fields["stop"] = _with_stops(fields, stops)
    _check_model(fields, name)
    if fields["prompt"] is None:
        _refuse("prompt", None, "the request has none", fix='send "prompt": "...", a text')
    if fields["best_of"] not in (None, fields["n"]):
        rule = "no other samples than n are drawn"
        _refuse("best_of", fields["best_of"], rule, fix="leave it out, or send n")
    special = fields["add_special_tokens"]
    limit = COMPLETION_TOKENS if fields["max_tokens"] is None else fields["max_tokens"]
    limits.check("prompt", fields["prompt"], fields["n"], limit)
    prompts = [p if isinstance(p, str) else _ids(p) for p in fields["prompt"]]
    sampled = limit > 0 or not fields["echo"]
    sampling = _sampling(fields, tokenizer, limit if sampled else 1)
    requests = [(_encode(tokenizer, prompt, special), sampling) for prompt in prompts]
    echo = [""] * len(requests)
    if fields["echo"]:
        echo = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    likeliest = fields["logprobs"] or 0
    fields["logprobs"] = fields["logprobs"] is not None
    more = dict(prompt_logprobs=fields["echo"] and fields["logprobs"], sampled=sampled)
    return _parsed(False, requests, fields, likeliest, echo, **more)


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
    fields = _read(body, _CHAT, NEUTRAL | _NEUTRAL_IN_CHAT, defaults)
    fields["stop"] = _with_stops(fields, stops)
    _check_model(fields, name)
    if fields["messages"] is None:
        fix = 'send "messages": [{"role": "user", "content": "..."}]'
        _refuse("messages", None, "the request has none", fix=fix)
    given = [fields[n] for n in ("max_completion_tokens", "max_tokens") if fields[n] is not None]
    limit = given[0] if given else None
    limits.check("messages", [""], fields["n"], limit)
    tools = fields["tools"] if fields["tool_choice"] == "auto" else []
    if tools and not (calls and calls.name):
        rule = "this model's chat template writes no tool calls that are known here"
        fix = "rljax serve --calls=hermes, or another format, and a system message about the tools"
        _refuse("tools", f"{len(tools)} of them", rule, fix=fix)
    options = {"tools": tools} if tools else {}
    messages, sources = split_images(for_template(fields["messages"]))
    images = opened(sources, reader)
    limits.check_images(sum(reader.tokens(image) for image in images), limit)
    options["variables"] = fields["chat_template_kwargs"]
    turn = _next_turn(fields)
    if turn:
        text = tokenizer.render_chat(messages, **turn, **options)
    else:
        text = render_prompt(tokenizer, messages, **options)
    if images:
        text, _ = reader.expanded(text, images)
    limits.check("messages", [text], fields["n"], limit)
    # A client may tell of its tools in a message where the template tells of none.
    if turn:
        check_conversation(tokenizer, messages, text, options, needs_tools=False, **turn)
    else:
        check_prompt(tokenizer, messages, text, needs_tools=False, **options)
    ids = tokenizer.encode(text)
    if images:  # before their pixels are decoded
        limits.check("messages", [ids], fields["n"], limit)
    limit = given[0] if given else max(1, limits.tokens - len(ids))
    form = calls if tools or (calls and calls.channels) else None
    sampling = _sampling(fields, tokenizer, limit, form)
    likeliest = fields["top_logprobs"]
    if likeliest and not fields["logprobs"]:
        _refuse("top_logprobs", likeliest, fix="send logprobs=true, too, or leave it out")
    if likeliest and images:
        rule = "0 beside images: scores are of text"
        _refuse("top_logprobs", likeliest, rule, fix="leave it out")
    read = decoded(images, ids, reader)
    begun = beginning_of(text, messages) if form else ""
    more = dict(calls=form, tools=tools or None, images=read, begun=begun)
    return _parsed(True, [(ids, sampling)], fields, likeliest, [""], **more)


def _next_turn(fields: dict) -> dict[str, bool]:
    """Returns the render arguments that vLLM's fields give a chat's prompt. {}: a last message
    of the assistant is continued, and behind any other one a turn is begun."""
    begin, go_on = fields["add_generation_prompt"], fields["continue_final_message"]
    if begin and go_on:
        rule = "false beside continue_final_message: a turn is continued, or a new one begun"
        _refuse("add_generation_prompt", True, rule, fix="send one of the two")
    if begin is None and go_on is None:
        return {}
    begin = not go_on if begin is None else begin
    return dict(add_generation_prompt=begin, continue_final_message=bool(go_on))


def _parsed(
    chat: bool, requests, fields: dict, likeliest: int, echo: list[str], **more
) -> ParsedRequest:
    if likeliest and fields["stream"]:
        rule = "0 in a stream: others than the sampled tokens are scored when a response is whole"
        name = "top_logprobs" if chat else "logprobs"
        _refuse(name, likeliest, rule, fix="send 0, or stream=false")
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
        **more,
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
    """The stop strings of a request and, unless it ignores ends, of the run that is served."""
    return tuple(dict.fromkeys((*fields["stop"], *(() if fields["ignore_eos"] else stops))))


def _sampling(
    fields: dict, tokenizer: Tokenizer, limit: int, calls: Format | None = None
) -> Sampling:
    if limit < 1:
        longer = fields.get("max_completion_tokens") is not None
        name = "max_completion_tokens" if longer else "max_tokens"
        _refuse(name, limit, "a response has at least one token", fix="send 1 or more")
    if "" in fields["stop"]:
        rule = "no empty string: a response would end at once"
        _refuse("stop", "", rule, fix="leave it out, or send a text")
    more = calls.stop_strings if calls else ()
    ends = calls.stop_ids(tokenizer) if calls else tuple(tokenizer.eos_ids)
    ends = () if fields["ignore_eos"] else ends
    given = (*fields["stop_token_ids"], *stop_tokens(tokenizer, fields["stop"]))
    return Sampling(
        temperature=fields["temperature"],
        top_k=fields["top_k"],
        top_p=fields["top_p"],
        min_p=fields["min_p"],
        max_response_tokens=limit,
        stop_ids=tuple(dict.fromkeys((*ends, *given))),
        stop_strings=(*fields["stop"], *more),
        logit_bias=fields["logit_bias"],
        seed=fields["seed"],
    )
