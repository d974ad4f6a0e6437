"""HTTP/1.1 connections: how many a server takes, how long a client may take for its part, and how a
server starts.

uvicorn bounds neither: a client that sends half a request, or reads no answer, would keep its
connection for ever. Every refusal is JSON in OpenAI's form.
"""

import asyncio
import contextlib
import dataclasses
import functools
import http
import json
import resource
import socket

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rljax.errors import InputError
from rljax.serving.answers import error_body

SLICE_BYTES = 16 * 1024  # of received data, parsed at a time; also the bound of unfinished headers
# Line ends of one chunked body. Each chunk costs as much as a whole read; clients send some kB in
# each.
CHUNK_LINES = 8192


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of clients, in connections and seconds. A client over `connections` gets a 503."""

    connections: int = 512
    headers_s: float = 10.0  # from the first moment to the last header
    body_s: float = 60.0  # from the last header to the end of the body
    write_s: float = 60.0  # to read what was sent
    shutdown_s: float = 10.0  # for what runs when the server ends


LIMITS = ConnectionLimits()


def connections_for(samples: int) -> int:
    """Returns the number of connections that a server of so many samples needs: one for each
    sample, as many again for clients that are told to come back, and some for /health. It is lower
    if this process may not open so many files."""
    needed, files = 2 * samples + 64, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Up to twice as many are open before they are closed without a word.
    return needed if files == resource.RLIM_INFINITY else min(needed, files // 3)


class _Connection(H11Protocol):
    """One client's connection."""

    def __init__(self, *, limits: ConnectionLimits, **of_uvicorn):
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._waits_for: type | None = None  # h11's state of a client whose request is unfinished
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._chunk_lines = 0

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > 2 * self._limits.connections:
            transport.abort()  # not even a refusal: files may be short
            return
        if len(self.connections) > self._limits.connections:
            self.app = _refuse_all
        self._watch()

    def connection_lost(self, exc) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # In slices: a parser that meets thousands of small chunks would keep the loop from others.
        for start in range(0, len(data), SLICE_BYTES):
            if self.transport.is_closing():
                return
            piece = data[start : start + SLICE_BYTES]
            if self._in_chunks():
                self._chunk_lines += piece.count(b"\n")
            if self._chunk_lines > CHUNK_LINES:
                self._refuse(400, f"the body has more than {CHUNK_LINES // 2} chunks")
                return
            super().data_received(piece)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _in_chunks(self) -> bool:
        body = self.conn.their_state is h11.SEND_BODY
        return body and any(name == b"transfer-encoding" for name, _ in self.headers)

    def _watch(self) -> None:
        """Starts and ends the clock of the part of a request that is awaited."""
        state = self.conn.their_state
        waits_for = state if state in (h11.IDLE, h11.SEND_BODY) else None
        if waits_for is self._waits_for or self.transport.is_closing():
            return
        self._waits_for, self._chunk_lines = waits_for, 0
        if self._reading is not None:
            self._reading.cancel()
        if waits_for is not None:
            headers = waits_for is h11.IDLE
            seconds = self._limits.headers_s if headers else self._limits.body_s
            message = f"the {'headers' if headers else 'body'} took more than {seconds:g} s"
            self._reading = self.loop.call_later(seconds, self._refuse, 408, message)

    def _refuse(self, status: int, message: str) -> None:
        """Answers, where no answer has begun, and closes."""
        body = json.dumps(error_body(message, "invalid_request_error")).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = http.HTTPStatus(status).phrase
        answer = h11.Response(status_code=status, headers=headers, reason=reason)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with contextlib.suppress(h11.LocalProtocolError):  # the answer to HEAD has no body
                for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event))
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application may be about to answer, too
        self.transport.close()


async def _refuse_all(scope, receive, send) -> None:
    body = error_body("too many connections; try again", "overloaded_error", code="overloaded")
    headers = [
        (b"content-type", b"application/json"),
        (b"connection", b"close"),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket bound to host and port; port 0 takes a free one. Raises InputError if the
    address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        address, fix = f"{host}:{port}", "another port, or 0 for a free one"
        raise InputError("cannot listen", value=address, rule=str(error), fix=fix) from None
    return sock


def http_server(app, limits: ConnectionLimits = LIMITS) -> uvicorn.Server:
    """Returns the server of an ASGI application. Its run(sockets=[...]) returns after SIGINT
    or SIGTERM."""

    async def until_cancelled(scope, receive, send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the server ends: no traceback of it
            await app(scope, receive, send)

    config = uvicorn.Config(
        until_cancelled,
        http=functools.partial(_Connection, limits=limits),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_level="error",  # what clients do wrong is told to them
        h11_max_incomplete_event_size=SLICE_BYTES,
        timeout_graceful_shutdown=limits.shutdown_s,
    )
    return uvicorn.Server(config)
