"""A client of any OpenAI-compatible chat endpoint, on the standard library alone.

Makes attempts under one total deadline and checks what comes back. A single attempt is in
endpoint_http, the cache and the circuit breaker in endpoint_state.

Every failure is an EndpointError whose text begins with its kind; as a reward it is the status
"error", so the sample is masked, and reward/errors/KIND counts it. A reward runs in reward.workers
processes and asks one question at a time, so at most reward.workers requests are in flight.
Redirects are not followed and proxies are not read: the key goes to the host that was named.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence

from rljax.errors import InputError
from rljax.rewards.endpoint_error import DOWN, TRANSIENT, EndpointError
from rljax.rewards.judges.endpoint_state import (
    answer_path,
    enter_breaker,
    leave_breaker,
    read_answer,
    write_answer,
)

_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 8.0
_MAX_BODY_BYTES = 4 << 20


# -- one request ----------------------------------------------------------------------------------


def strict_json(text: str | bytes) -> object:
    """JSON as the standard has it: UTF-8, no NaN or Infinity, no name twice in an object.
    Raises ValueError."""

    def refuse(word: str):
        raise ValueError(f"{word} is no JSON")

    def once(pairs: list[tuple[str, object]]) -> dict:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return parsed

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number[:20])

    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _posted_json(url, payload, headers, deadline, max_body_bytes) -> dict:
    from rljax.rewards.judges.endpoint_http import post_once, without_secrets

    data = post_once(url, payload, headers, deadline, max_body_bytes)
    try:
        reply = strict_json(data)
    except ValueError as error:
        text = without_secrets(f"{type(error).__name__}: {error}", headers)[:200]
        raise EndpointError("malformed", f"the answer is no JSON: {text}") from None
    if not isinstance(reply, dict):
        raise EndpointError("malformed", f"the answer is a {type(reply).__name__}, not an object")
    return reply


def _retried(once: Callable, deadline: float, attempts: int, retryable: frozenset[str]):
    """Calls once() until it succeeds, fails for good, or no time or attempt is left. Waits double,
    with jitter; a server's Retry-After takes precedence."""
    for attempt in range(attempts):
        try:
            return once()
        except EndpointError as error:
            if error.kind not in retryable:
                raise
            wait = min(_BACKOFF_S * 2**attempt, _LONGEST_BACKOFF_S) * random.uniform(0.5, 1.0)
            if error.wait_s is not None:
                wait = error.wait_s + random.uniform(0.0, _BACKOFF_S)
            late = time.monotonic() + wait >= deadline
            if late or attempt == attempts - 1:
                reason = "no time is left" if late else "no attempt is left"
                text = f"{error.text} ({reason} after {attempt + 1})"
                raise EndpointError(error.kind, text) from None
        time.sleep(wait)


def post_json(
    url: str,
    body: Mapping,
    *,
    timeout_s: float = 30.0,
    attempts: int = 4,
    max_body_bytes: int = _MAX_BODY_BYTES,
    headers: Mapping[str, str] | None = None,
) -> dict:
    """The JSON object with which `url` answers a POST of `body`.

    `timeout_s` bounds all attempts and waits together, from the connection to the last byte (but
    not the look-up of the host's name). Attempts follow a refused or broken connection, a body that
    is no JSON object, and the statuses 408, 409, 425, 429 and 5xx; any other status but 2xx is
    final. Raises EndpointError if no attempt succeeds, and InputError for a limit, a header or an
    address that is not valid.
    """
    _check_limits(timeout_s, attempts)
    deadline = time.monotonic() + timeout_s
    headers = {"Content-Type": "application/json", **_checked_headers(headers or {})}
    payload = json.dumps(body, allow_nan=False).encode("ascii")
    return _retried(
        lambda: _posted_json(url, payload, headers, deadline, max_body_bytes),
        deadline,
        attempts,
        TRANSIENT | {"malformed"},
    )


def _check_limits(timeout_s: float, attempts: int) -> None:
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise InputError(
            "timeout_s", value=timeout_s, fix="timeout_s=30, or another number of seconds above 0"
        )
    if not isinstance(attempts, int) or attempts < 1:
        raise InputError(
            "attempts", value=attempts, fix="attempts=3, or another whole number of 1 or more"
        )


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers. Raises InputError for a value that cannot be sent: http.client would
    print it, and the key is one."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise InputError(
                f"header {name!r} holds what no header may",
                rule="printable ASCII",
                fix="remove line ends and other such characters from the value; keys often end in "
                "a line end",
            )
    return dict(headers)


# -- a chat completion ----------------------------------------------------------------------------


def authorization(api_key_env: str) -> dict[str, str]:
    """The header with the key of an environment variable; none if that is not set (a local
    server needs none)."""
    key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
    return _checked_headers({"Authorization": f"Bearer {key}"}) if key else {}


def chat(
    messages: Sequence[Mapping],
    *,
    base_url: str,
    model: str,
    api_key_env: str = "OPENAI_API_KEY",
    timeout_s: float = 8.0,
    attempts: int = 4,
    cache: str = "",
    body: str = "",
    schema: Mapping | None = None,
    parse: Callable = str,
    max_body_bytes: int = _MAX_BODY_BYTES,
    breaker_failures: int = 8,
    breaker_s: float = 30.0,
):
    """The answer of `model` at `base_url` to `messages`, at temperature 0, read by `parse(text)`.

    An answer that is no chat completion, or of which parse raises ValueError, is asked for again,
    like what post_json repeats; `timeout_s` bounds all of it. `schema` asks for JSON of that schema
    (response_format), which parse must check all the same. `body` is a JSON object of further
    fields of the request; null removes one.

    `cache` is a folder of answers by the SHA-256 of the address and the whole request, of those of
    temperature 0 that parse took; processes and runs may share it. The circuit breaker is shared by
    all who name the same folder, and is the process's own without one: after `breaker_failures`
    calls in a row that found the endpoint down, calls fail at once for `breaker_s` seconds, and
    then one is let through to see. Raises EndpointError if there is no answer that parse accepts,
    and InputError for an address, a limit or a body that is not valid.
    """
    from rljax.rewards.judges.endpoint_http import check_address, without_secrets

    _check_limits(timeout_s, attempts)
    deadline = time.monotonic() + timeout_s
    url = f"{base_url.rstrip('/')}/chat/completions"
    check_address(url)
    request = _request(messages, model, schema, body)
    headers = {"Content-Type": "application/json", **authorization(api_key_env)}
    payload = json.dumps(request, sort_keys=True, allow_nan=False).encode("ascii")
    path = answer_path(cache, url, payload) if request.get("temperature") == 0 else None
    cached = read_answer(path, parse)
    if cached is not None:
        return cached[0]

    def once():
        answer = _posted_json(url, payload, headers, deadline, max_body_bytes)
        text = _answer_text(answer)
        try:
            parsed = parse(text)
        except ValueError as error:
            raise EndpointError("verdict", without_secrets(str(error), headers)) from None
        write_answer(path, text)
        return parsed

    breaker = dict(failures=breaker_failures, open_s=breaker_s)
    refusal = enter_breaker(url, cache, probe_s=timeout_s, **breaker)
    if refusal:
        raise EndpointError("circuit_open", refusal)
    up = True
    try:
        return _retried(once, deadline, attempts, TRANSIENT | {"malformed", "verdict"})
    except EndpointError as error:
        up = error.kind not in DOWN
        hint = ""
        if error.text.startswith(("HTTP 401", "HTTP 403")) and "Authorization" not in headers:
            hint = f"; no key was sent: environment variable {api_key_env!r} is not set"
        if error.kind == "rejected" and schema is not None and "response_format" in error.text:
            hint = "; structured=False asks without a schema"
        raise EndpointError(error.kind, error.text + hint) from None
    finally:
        leave_breaker(url, cache, up, **breaker)


def _request(messages, model: str, schema: Mapping | None, body: str) -> dict:
    if not model:
        raise InputError("the endpoint's model is not named", fix="model='...'")
    request = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": 1024}
    if schema is not None:
        answer_schema = {"name": "answer", "strict": True, "schema": dict(schema)}
        request["response_format"] = {"type": "json_schema", "json_schema": answer_schema}
    try:
        extra = strict_json(body) if body else {}
    except ValueError as error:
        fix = "write a JSON object, such as '{\"top_p\": 0.9}'"
        raise InputError("body is no JSON", value=body, rule=str(error), fix=fix) from None
    if not isinstance(extra, dict):
        raise InputError("body", value=body, rule="a JSON object", fix="body='{\"seed\": 0}'")
    return {k: v for k, v in {**request, **extra}.items() if v is not None}


def _answer_text(answer: dict) -> str:
    """The text of a chat completion's first choice."""
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EndpointError("malformed", "the answer is no chat completion") from None
    if not isinstance(text, str):
        raise EndpointError("malformed", f"the answer's content is {type(text).__name__}, no text")
    if reason == "length":
        raise EndpointError("verdict", "the answer was cut at max_tokens")
    return text
