"""The routes: POST /v1/completions and /v1/chat/completions, GET /v1/models, /health, /metrics.

HTTP, server-sent events, and clients that hang up. Needs the extra `rljax[serve]`.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rljax.batch import FinishReason
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.serving.answers import Answer, error_body
from rljax.serving.fields import UnknownModel, read_chat, read_completion
from rljax.serving.worker import Failed, Overloaded, Ticket, TokenChunk, Worker

BODY_BYTES = 32 * 2**20  # of a request
RETRY_S = 1  # what an overloaded server tells clients to wait


def make_app(worker: Worker, tokenizer: Tokenizer, name: str) -> Starlette:
    """The ASGI application that serves `worker` as the model `name`."""
    started = int(time.time())
    card = {"id": name, "object": "model", "created": started, "owned_by": "rljax"}

    async def completions(request: Request) -> Response:
        return await _respond(request, worker, tokenizer, name, chat=False)

    async def chat(request: Request) -> Response:
        return await _respond(request, worker, tokenizer, name, chat=True)

    async def models(request: Request) -> Response:
        wanted = request.path_params.get("model")
        if wanted not in (None, name):
            raise UnknownModel("model", value=wanted, rule=f"only {name!r} is served")
        return JSONResponse(card if wanted else {"object": "list", "data": [card]})

    async def health(request: Request) -> Response:
        if worker.failure is not None:
            return _error(503, f"the decoder failed: {worker.failure}", "server_error")
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return JSONResponse(worker.statistics())

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", models),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    kinds = (InputError, Overloaded, Failed, _Ended, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers={kind: _on_error for kind in kinds})


# -- errors


def _error(status: int, message: str, kind: str, code: str | None = None) -> JSONResponse:
    headers = {"retry-after": str(RETRY_S)} if status == 503 else None
    return JSONResponse(error_body(message, kind, code=code), status, headers=headers)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, UnknownModel):
        return _error(404, str(error), "invalid_request_error", "model_not_found")
    if isinstance(error, InputError):
        return _error(400, str(error), "invalid_request_error")
    if isinstance(error, Overloaded):
        return _error(503, str(error), "overloaded_error", "overloaded")
    if isinstance(error, Failed):
        return _error(503, str(error), "server_error")
    if isinstance(error, _Ended):
        return _error(500, str(error), "server_error")
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail, "invalid_request_error")
    return _error(500, f"{type(error).__name__}: {error}", "server_error")


# -- requests


async def _body(request: Request) -> object:
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > BODY_BYTES:
            raise HTTPException(413, f"the body is longer than {BODY_BYTES} bytes")
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise InputError("the body is not JSON", rule=str(error)) from None


async def _respond(request: Request, worker: Worker, tokenizer, name: str, *, chat: bool):
    body = await _body(request)
    if chat:
        tokens = worker.sampler.engine.tokens
        parsed = await asyncio.to_thread(read_chat, body, tokenizer, name, tokens)
    else:
        parsed = await asyncio.to_thread(read_completion, body, tokenizer, name)
    answer = Answer(parsed, tokenizer, name)
    pieces, ticket = _ticket()
    try:
        await asyncio.wrap_future(worker.submit(ticket, parsed.requests, parsed.n))
        if parsed.stream:
            return _EventStream(_events(answer, pieces), lambda: worker.abort(ticket))
        whole = await _until_gone(request.receive, _collect(answer, pieces))
    except BaseException:
        worker.abort(ticket)
        raise
    if whole is None:
        worker.abort(ticket)
        return Response(status_code=499)  # nobody reads it
    return JSONResponse(whole)


def _ticket() -> tuple[asyncio.Queue, Ticket]:
    """A queue of pieces on this loop, and the ticket that fills it from the decode thread."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(piece: TokenChunk) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    return pieces, Ticket(deliver)


async def _next(pieces: asyncio.Queue) -> TokenChunk:
    piece = await pieces.get()
    if piece.finish_reason == FinishReason.ABORT:
        raise _Ended(piece.error)
    return piece


class _Ended(Exception):
    """A sample ended without an answer: the model gave no finite logits, or decoding stopped."""


async def _collect(answer: Answer, pieces: asyncio.Queue) -> dict:
    while answer.left:
        answer.take(await _next(pieces))
    return answer.whole()


async def _events(answer: Answer, pieces: asyncio.Queue) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    begun = set()
    try:
        while answer.left:
            delta = answer.take(await _next(pieces))
            first = delta.choice not in begun
            # A piece whose text is held back sends nothing yet, unless its tokens were asked for.
            if first or delta.text or delta.reason or answer.request.logprobs:
                begun.add(delta.choice)
                yield json.dumps(answer.chunk(delta, first=first))
    except _Ended as error:
        yield json.dumps(error_body(str(error), "server_error"))
        return
    if answer.request.include_usage:
        yield json.dumps(answer.usage_chunk())
    yield "[DONE]"


async def _gone(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_gone(receive: Callable, work: Coroutine):
    """The result of `work`, or None where the client hung up first; `work` is cancelled then."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _EventStream(Response):
    """Server-sent events; `close` is called however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope, receive, send) -> None:
        async def write() -> None:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for data in self._events:
                line = f"data: {data}\n\n".encode()
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _until_gone(receive, write())
        finally:
            self._close()


# -- servers


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        place, fix = f"{host}:{port}", "another port, or 0 for a free one"
        raise InputError("cannot listen", value=place, rule=str(error), fix=fix) from None
    return sock


def http_server(app: Starlette) -> uvicorn.Server:
    """The server of `app`; its run(sockets=[...]) returns after SIGINT or SIGTERM."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=10)
    return uvicorn.Server(config)


@contextlib.contextmanager
def in_background(app: Starlette, host: str = "127.0.0.1", port: int = 0):
    """Serves `app` on a thread of its own and yields the address: for notebooks, and for a trainer
    that serves its policy."""
    server, sock = http_server(app), listen(host, port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the HTTP server did not start")
        time.sleep(0.01)
    try:
        yield f"http://{host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
