"""A client of any OpenAI-compatible chat endpoint, on the standard library alone.

What lives here: one request under one total deadline, retries, what an answer must look like. What
does not: the cache and the circuit breaker (rljax.rewards.endpoint_state), what is asked and how an
answer becomes a number (rljax.rewards.judges, rubrics).

Every failure is an EndpointError whose text begins with its kind; as a reward it is the status
"error", so the sample is masked, and reward/errors/KIND counts it. A reward runs in reward.workers
processes and asks one question at a time, so at most reward.workers requests are in flight.
Redirects are not followed and proxies are not read: the key goes to the host that was named.
"""

import contextlib
import email.utils
import http.client
import io
import json
import math
import os
import random
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence

from rljax.errors import InputError
from rljax.rewards.endpoint_state import (
    answer_place,
    enter_breaker,
    leave_breaker,
    read_answer,
    write_answer,
)

# What may be gone at the next attempt, and what says that the endpoint is down.
TRANSIENT = frozenset({"unreachable", "server_error", "rate_limited"})
DOWN = TRANSIENT | {"timeout"}
_RETRIED_STATUSES = (408, 409, 425)
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 8.0
_MAX_BODY_BYTES = 4 << 20
_SHOWN_BYTES = 2000


class EndpointError(RuntimeError):
    """kind: unreachable | timeout | rate_limited (429) | server_error (408, 409, 425, 5xx) |
    rejected (any other status but 2xx, certificates) | too_large | malformed (no JSON, or not a
    chat completion) | verdict (an answer that says no verdict) | circuit_open. wait_s: what the
    server asked for (Retry-After)."""

    def __init__(self, kind: str, text: str, wait_s: float | None = None):
        super().__init__(f"{kind}: {text}")
        self.kind, self.said, self.wait_s = kind, text, wait_s


# -- one request ----------------------------------------------------------------------------------


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class _Incoming(io.RawIOBase):
    """Reads of a socket that all end by one deadline, however slowly the bytes trickle."""

    def __init__(self, sock: socket.socket, deadline: float):
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)


class _Wire:
    """What http.client asks of a socket; `_post_once` closes the real one."""

    def __init__(self, sock: socket.socket, deadline: float):
        self._sock, self._deadline = sock, deadline

    def sendall(self, data) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self._sock, self._deadline))

    def close(self) -> None:
        """Not yet: the answer may still be read."""


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of the host that accepts one."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def _address(url: str) -> tuple[bool, str, int, str]:
    """(whether over TLS, host, port, path with query). Raises InputError."""
    fix = "such as 'http://127.0.0.1:8000/v1'"
    try:
        parts = urllib.parse.urlsplit(url)
        secure, port = parts.scheme == "https", parts.port
        bad = parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii()
    except ValueError:
        raise InputError("an endpoint's address cannot be read", fix=fix) from None
    if bad or parts.username or any(c <= " " for c in url):
        rule = "http or https, a host, no user or password, no blanks"
        raise InputError("an endpoint's address", rule=rule, fix=fix)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return secure, parts.hostname, port or (443 if secure else 80), path


def _post_once(
    url: str, payload: bytes, headers: Mapping[str, str], deadline: float, max_body_bytes: int
) -> bytes:
    """The body of the answer with a status of 2xx. Raises EndpointError."""
    secure, host, port, path = _address(url)
    try:
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(contextlib.closing(_connected(host, port, deadline)))
            connection = http.client.HTTPConnection(host, port)
            if secure:
                context = ssl.create_default_context()
                sock.settimeout(_left(deadline))
                sock = context.wrap_socket(sock, server_hostname=host)
                stack.enter_context(contextlib.closing(sock))
                connection = http.client.HTTPSConnection(host, port, context=context)
            connection.sock = _Wire(sock, deadline)
            connection.request("POST", path, payload, dict(headers))
            response = connection.getresponse()
            if not 200 <= response.status < 300:
                raise _status_error(response, headers)
            return _body(response, max_body_bytes)
    except TimeoutError:
        raise EndpointError("timeout", f"no whole answer of {host} within the deadline") from None
    except ssl.SSLCertVerificationError as error:
        raise EndpointError("rejected", f"the certificate of {host}: {error}") from None
    except (OSError, http.client.IncompleteRead) as error:
        what = f"{host}:{port}: {type(error).__name__}: {error}"
        raise EndpointError("unreachable", what) from None
    except (http.client.HTTPException, ValueError) as error:
        text = f"{host} does not speak HTTP: {type(error).__name__}"
        raise EndpointError("malformed", text) from None


def _body(response: http.client.HTTPResponse, limit: int) -> bytes:
    """The whole body: one that is longer than `limit` bytes is refused as soon as that is seen."""
    declared = response.length
    data = bytearray()
    while (declared is None or declared <= limit) and len(data) <= limit:
        part = response.read(min(1 << 16, limit + 1 - len(data)))
        if not part:
            break
        data += part
    if len(data) > limit or (declared or 0) > limit:
        raise EndpointError("too_large", f"the answer has more than {limit} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(data)


def _status_error(response: http.client.HTTPResponse, headers: Mapping[str, str]) -> EndpointError:
    status = response.status
    shown = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        shown = response.read(_SHOWN_BYTES).decode("utf-8", "replace")
    text = f"HTTP {status} {response.reason}: {_without_secrets(shown, headers)}"[:400]
    if status == 429:
        return EndpointError("rate_limited", text, _retry_after(response))
    if status in _RETRIED_STATUSES or status >= 500:
        return EndpointError("server_error", text, _retry_after(response))
    if 300 <= status < 400:
        text += "; redirects are not followed: name the address that it leads to"
    return EndpointError("rejected", text)


def _without_secrets(text: str, headers: Mapping[str, str]) -> str:
    """Some servers say which key was wrong."""
    for name, value in headers.items():
        secret = value.rpartition(" ")[2]
        if name.lower() in ("authorization", "api-key", "x-api-key") and secret:
            text = text.replace(secret, "***")
    return text


def _retry_after(response: http.client.HTTPResponse) -> float | None:
    """Seconds to wait, from a number of seconds or a date."""
    text = response.headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError, IndexError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def strict_json(text: str | bytes) -> object:
    """JSON as the standard has it: UTF-8, no NaN or Infinity, no name twice in an object. Raises
    ValueError."""

    def refuse(word: str):
        raise ValueError(f"{word} is no JSON")

    def once(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number[:20])

    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _posted_json(url, payload, headers, deadline, max_body_bytes) -> dict:
    data = _post_once(url, payload, headers, deadline, max_body_bytes)
    try:
        found = strict_json(data)
    except ValueError as error:
        text = _without_secrets(f"{type(error).__name__}: {error}", headers)[:200]
        raise EndpointError("malformed", f"the answer is no JSON: {text}") from None
    if not isinstance(found, dict):
        raise EndpointError("malformed", f"the answer is a {type(found).__name__}, not an object")
    return found


def _retried(once: Callable, deadline: float, attempts: int, again: frozenset[str]):
    """once() until it succeeds, fails for good, or there is no time or attempt left. Waits double,
    with jitter; a server's Retry-After goes before."""
    for attempt in range(attempts):
        try:
            return once()
        except EndpointError as error:
            if error.kind not in again:
                raise
            wait = min(_BACKOFF_S * 2**attempt, _LONGEST_BACKOFF_S) * random.uniform(0.5, 1.0)
            if error.wait_s is not None:
                wait = error.wait_s + random.uniform(0.0, _BACKOFF_S)
            late = time.monotonic() + wait >= deadline
            if late or attempt == attempts - 1:
                why = "no time is left" if late else "no attempt is left"
                text = f"{error.said} ({why} after {attempt + 1})"
                raise EndpointError(error.kind, text) from None
        time.sleep(wait)


def post_json(
    url: str, body: Mapping, *, timeout_s: float = 30.0, attempts: int = 4,
    max_body_bytes: int = _MAX_BODY_BYTES, headers: Mapping[str, str] | None = None,
) -> dict:  # fmt: skip
    """The JSON object with which `url` answers a POST of `body`.

    `timeout_s` bounds all attempts and waits together, from the connection to the last byte (but
    not the look-up of the host's name). Attempts follow a refused or broken connection and the
    statuses 408, 409, 425, 429 and 5xx; any other status but 2xx is final. Raises EndpointError.
    """
    _check_limits(timeout_s, attempts)
    deadline = time.monotonic() + timeout_s
    headers = {"Content-Type": "application/json", **_checked_headers(headers or {})}
    payload = json.dumps(body, allow_nan=False).encode("ascii")
    return _retried(
        lambda: _posted_json(url, payload, headers, deadline, max_body_bytes),
        deadline, attempts, TRANSIENT,
    )  # fmt: skip


def _check_limits(timeout_s: float, attempts: int) -> None:
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise InputError("timeout_s", value=timeout_s, rule="a positive number of seconds")
    if not isinstance(attempts, int) or attempts < 1:
        raise InputError("attempts", value=attempts, rule="a whole number, at least 1")


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """http.client would print a value that it cannot send, and the key is one."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise InputError(f"header {name!r} holds what no header may", rule="printable ASCII")
    return dict(headers)


# -- a chat completion ----------------------------------------------------------------------------


def authorization(api_key_env: str) -> dict[str, str]:
    """The header with the key of an environment variable; none if that is not set (a server of
    one's own asks for none)."""
    key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
    return _checked_headers({"Authorization": f"Bearer {key}"}) if key else {}


def chat(
    messages: Sequence[Mapping], *, base_url: str, model: str,
    api_key_env: str = "OPENAI_API_KEY", timeout_s: float = 8.0, attempts: int = 4,
    cache: str = "", body: str = "", schema: Mapping | None = None, parse: Callable = str,
    max_body_bytes: int = _MAX_BODY_BYTES, breaker_failures: int = 8, breaker_s: float = 30.0,
):  # fmt: skip
    """parse(text) of what `model` at `base_url` answers to `messages`, at temperature 0.

    An answer that is no chat completion, or of which parse raises ValueError, is asked for again,
    like what post_json repeats; `timeout_s` bounds all of it. `schema` asks for JSON of that
    schema (response_format), which parse must check all the same. `body` is a JSON object of
    further fields of the request; null removes one.

    `cache` is a folder of answers by the SHA-256 of the address and the whole request, of those of
    temperature 0 that parse took; processes and runs may share it. The circuit breaker is shared by
    all who name the same folder, and is the process's own without one: after `breaker_failures`
    calls in a row that found the endpoint down, calls fail at once for `breaker_s` seconds, and
    then one is let through to see. Raises EndpointError, InputError.
    """
    _check_limits(timeout_s, attempts)
    deadline = time.monotonic() + timeout_s
    url = f"{base_url.rstrip('/')}/chat/completions"
    _address(url)
    request = _request(messages, model, schema, body)
    headers = {"Content-Type": "application/json", **authorization(api_key_env)}
    payload = json.dumps(request, sort_keys=True, allow_nan=False).encode("ascii")
    place = answer_place(cache, url, payload) if request.get("temperature") == 0 else None
    known = read_answer(place, parse)
    if known is not None:
        return known[0]

    def once():
        answer = _posted_json(url, payload, headers, deadline, max_body_bytes)
        text = _answer_text(answer)
        try:
            found = parse(text)
        except ValueError as error:
            raise EndpointError("verdict", _without_secrets(str(error), headers)) from None
        write_answer(place, text)
        return found

    breaker = dict(failures=breaker_failures, open_s=breaker_s)
    closed = enter_breaker(url, cache, probe_s=timeout_s, **breaker)
    if closed:
        raise EndpointError("circuit_open", closed)
    up = True
    try:
        return _retried(once, deadline, attempts, TRANSIENT | {"malformed", "verdict"})
    except EndpointError as error:
        up = error.kind not in DOWN
        if error.kind == "rejected" and "Authorization" not in headers:
            hint = f"; no key was sent: environment variable {api_key_env!r} is not set"
            raise EndpointError("rejected", error.said + hint) from None
        raise
    finally:
        leave_breaker(url, cache, up, **breaker)


def _request(messages, model: str, schema: Mapping | None, body: str) -> dict:
    if not model:
        raise InputError("the endpoint's model is not named", fix="model='...'")
    request = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": 1024}
    if schema is not None:
        named = {"name": "answer", "strict": True, "schema": dict(schema)}
        request["response_format"] = {"type": "json_schema", "json_schema": named}
    try:
        more = strict_json(body) if body else {}
    except ValueError as error:
        raise InputError("body is no JSON", value=body, rule=str(error)) from None
    if not isinstance(more, dict):
        raise InputError("body", value=body, rule="a JSON object", fix="body='{\"seed\": 0}'")
    return {k: v for k, v in {**request, **more}.items() if v is not None}


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
