"""Fields of a request in OpenAI's API that the server and the endpoint of agents read alike.

A field that is not known, or cannot be honoured, is refused by its name: a client must not believe
that it was obeyed.
"""

import hashlib
from collections.abc import Callable, Mapping

from rljax.data.text.messages import check_unicode
from rljax.environments.schemas import told_of
from rljax.errors import InputError

STOPS, STOP_CHARACTERS = 16, 1000
MESSAGES = 4096
TOOLS = 128
NAME_CHARACTERS = 64  # characters of a field's name that an error repeats
# Fields that clients of OpenAI, vLLM and SGLang send, with the values that have no effect.
# A field that is null counts as absent.
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
NEUTRAL_IN_CHAT = {
    "add_special_tokens": (False,),  # templates write them
    "best_of": (1,),
    "echo": (False,),
}


def refuse(name: str, value, rule: str = "", *, fix: str):
    """Raises InputError for the field `name`."""
    raise InputError(name, value=value, rule=rule, fix=fix)


def read_number(name, value) -> float:
    """Returns a finite number."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not abs(value) <= 1e30:  # false for NaN, too; an int may be too large to convert
        refuse(name, "null" if value is None else value, fix="send a finite number")
    return float(value)


def read_whole(name, value) -> int:
    """Returns a whole number from 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        refuse(name, value, fix="send a whole number from 0 to 2147483647")
    return value


def _top_k(name, value) -> int:
    # vLLM's word for all tokens is -1.
    return 0 if isinstance(value, int) and value == -1 else read_whole(name, value)


def _seed(name, value) -> int:
    """Returns a seed of 64 bits, as OpenAI and vLLM take it, as one of the 32 bits of a
    key. Seeds of more bits are hashed: if they were cut, seeds that are near to one another
    would draw the same."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        refuse(name, value, fix=f"send a whole number from {-(2**63)} to {2**63 - 1}")
    if 0 <= value < 2**32:
        return value
    return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:4], "big")


def read_flag(name, value) -> bool:
    """Returns true or false."""
    if not isinstance(value, bool):
        refuse(name, value, fix="send true or false")
    return value


def read_text(name, value) -> str:
    """Returns a text."""
    if not isinstance(value, str):
        refuse(name, value, fix="send a string")
    check_unicode(value, name)
    return value


def _stops(name, value) -> tuple[str, ...]:
    if not isinstance(value, (str, list)):
        refuse(name, value, fix="send a string or a list of strings")
    texts = [value] if isinstance(value, str) else value
    if len(texts) > STOPS:
        refuse(name, f"{len(texts)} strings", fix=f"send at most {STOPS}")
    for text in texts:
        if not read_text(name, text):
            rule = "no empty string: a response would end at once"
            refuse(name, text, rule, fix="leave it out, or send a text")
        if len(text) > STOP_CHARACTERS:
            refuse(name, f"{len(text)} characters", fix=f"send at most {STOP_CHARACTERS} in each")
    return tuple(texts)


def read_object(name, value) -> dict:
    """Returns an object."""
    if not isinstance(value, dict):
        refuse(name, value, fix="send an object")
    return value


def _stream_options(name, value) -> str:
    names = ("include_usage", "continuous_usage_stats")
    obscured = read_object(name, value).get("include_obfuscation")
    hidden = {"include_obfuscation"} if obscured else set()
    unknown = sorted(set(value) - {*names, "include_obfuscation"} | hidden)
    if unknown:
        field = unknown[0][:NAME_CHARACTERS]
        rule = f"known are {', '.join(names)}"
        refuse(f"{name}.{field}", value[unknown[0]], rule, fix="leave it out")
    at_end, in_each = (read_flag(f"{name}.{field}", value.get(field, False)) for field in names)
    return ("each" if in_each else "last") if at_end else ""


def _messages(name, value) -> object:
    """Checks the number of messages; the tokenizer checks all else."""
    if isinstance(value, list) and len(value) > MESSAGES:
        refuse(name, f"{len(value)} messages", fix=f"send at most {MESSAGES}")
    return value


def _tools(name, value) -> list[dict]:
    """Schemas of functions, as a chat template reads them."""
    if not isinstance(value, list) or len(value) > TOOLS:
        refuse(name, value, fix=f"send a list of at most {TOOLS} tools")
    for number, tool in enumerate(value):
        field, fix = f"{name}[{number}]", 'send {"type": "function", "function": {"name": ...}}'
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            refuse(field, tool, fix=fix)
        if not read_text(f"{field}.name", function.get("name")):
            refuse(f"{field}.name", "", "not empty", fix="send the name of the function")
        if not isinstance(function.get("parameters") or {}, dict):
            fix = "send a JSON schema, an object"
            refuse(f"{field}.parameters", function["parameters"], fix=fix)
        if function.get("strict") or tool.get("strict"):
            rule = "what the model writes is not constrained"
            refuse(f"{field}.strict", True, rule, fix="send false, or leave it out")
    return told_of(value)


def _tool_choice(name, value) -> str:
    if value not in ("auto", "none"):
        refuse(name, value, "no call can be forced", fix="send 'auto' or 'none'")
    return value


# name: (value where it is absent or null, reader)
SAMPLED: dict[str, tuple[object, Callable]] = {
    "model": (None, read_text),
    "n": (1, read_whole),
    "max_tokens": (None, read_whole),
    "temperature": (1.0, read_number),
    "top_p": (1.0, read_number),
    "top_k": (0, _top_k),
    "min_p": (0.0, read_number),
    "seed": (None, _seed),
    "stop": ((), _stops),
    "stream": (False, read_flag),
    "stream_options": ("", _stream_options),
}
CHAT = SAMPLED | {
    "messages": (None, _messages),
    "max_completion_tokens": (None, read_whole),
    "tools": ([], _tools),
    "tool_choice": ("auto", _tool_choice),
}


def read_fields(
    body: object, known: dict, neutral: dict, defaults: Mapping[str, float] | None = None
) -> dict:
    """Returns {name: value} of the `known` fields of a request, {name: (value where it is absent,
    reader)}. Raises InputError for any other one, unless its value is one of those in `neutral`."""
    values = {name: default for name, (default, _) in known.items()} | dict(defaults or {})
    if not isinstance(body, Mapping):
        refuse("request body", body, fix="send a JSON object")
    present = {name: value for name, value in body.items() if value is not None}
    for name in [name for name, value in present.items() if _without_effect(name, value, neutral)]:
        del present[name]
    for name, value in present.items():
        if name not in known:
            rule = f"not supported; known are {', '.join(sorted(known))}"
            refuse(f"field {name[:NAME_CHARACTERS]!r}", value, rule, fix="leave it out")
    return {
        name: reader(name, present[name]) if name in present else values[name]
        for name, (_, reader) in known.items()
    }


def check_limit(name: str, limit: int) -> None:
    """Raises InputError for a limit of a response's tokens that is below 1."""
    if limit < 1:
        refuse(name, limit, "a response has at least one token", fix="send 1 or more")


def chat_limit(fields: Mapping) -> int | None:
    """Returns the most tokens of a chat's response; None if the request sets no limit. Raises
    InputError for one below 1."""
    names = [n for n in ("max_completion_tokens", "max_tokens") if fields[n] is not None]
    if not names:
        return None
    check_limit(names[0], fields[names[0]])
    return fields[names[0]]


def _without_effect(name: str, value: object, neutral: dict) -> bool:
    """Returns whether a field's value changes nothing. 1 is not true, and 0 not false."""
    values = neutral.get(name, ())

    def same(neutral_value):
        return neutral_value == value and isinstance(neutral_value, bool) == isinstance(value, bool)

    return values is _ANY or any(map(same, values))
