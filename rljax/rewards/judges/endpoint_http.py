"""One POST over HTTP, all of it under one deadline and one limit of bytes.

The modules of the standard library that it needs take as long to import as all of a reward worker,
so the first request imports it.
"""

import contextlib
import email.utils
import http.client
import io
import math
import socket
import ssl
import time
import urllib.parse
from collections.abc import Mapping

from rljax.errors import InputError
from rljax.rewards.endpoint_error import EndpointError

_RETRIED_STATUSES = (408, 409, 425)
_SHOWN_BYTES = 2000


def _left(deadline: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining_s


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
    """The part of a socket that http.client uses; `post_once` closes the real one."""

    def __init__(self, sock: socket.socket, deadline: float):
        self._sock, self._deadline = sock, deadline

    def sendall(self, data) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self._sock, self._deadline))

    def close(self) -> None:
        """Does nothing: the answer may still be read."""


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


def check_address(url: str) -> tuple[bool, str, int, str]:
    """Returns (True for https, host, port, path with query). Raises InputError unless the URL has
    http or https and a host, and no user."""
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


def post_once(
    url: str, payload: bytes, headers: Mapping[str, str], deadline: float, max_body_bytes: int
) -> bytes:
    """The body of the answer with a status of 2xx. `deadline` is a time of time.monotonic(). Raises
    EndpointError for another status, a broken connection, a body of more than `max_body_bytes`, and
    at the deadline."""
    secure, host, port, path = check_address(url)
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
        message = f"{host}:{port}: {type(error).__name__}: {error}"
        raise EndpointError("unreachable", message) from None
    except (http.client.HTTPException, ValueError) as error:
        text = f"{host} does not speak HTTP: {type(error).__name__}"
        raise EndpointError("malformed", text) from None


def _body(response: http.client.HTTPResponse, limit: int) -> bytes:
    """Returns the whole body. A body of more than `limit` bytes is refused as soon as
    its length is known."""
    declared = response.length
    data = bytearray()
    while (declared is None or declared <= limit) and len(data) <= limit:
        chunk = response.read(min(1 << 16, limit + 1 - len(data)))
        if not chunk:
            break
        data += chunk
    if len(data) > limit or (declared or 0) > limit:
        raise EndpointError("too_large", f"the answer has more than {limit} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(data)


def _status_error(response: http.client.HTTPResponse, headers: Mapping[str, str]) -> EndpointError:
    status = response.status
    body = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = response.read(_SHOWN_BYTES).decode("utf-8", "replace")
    text = f"HTTP {status} {response.reason}: {without_secrets(body, headers)}"[:400]
    if status == 429:
        return EndpointError("rate_limited", text, _retry_after(response))
    if status in _RETRIED_STATUSES or status >= 500:
        return EndpointError("server_error", text, _retry_after(response))
    if 300 <= status < 400:
        text += "; redirects are not followed: name the address that it leads to"
    return EndpointError("rejected", text)


def without_secrets(text: str, headers: Mapping[str, str]) -> str:
    """The text without the key: some servers repeat the key that was wrong."""
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
