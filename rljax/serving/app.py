"""The routes: POST /v1/completions and /v1/chat/completions, GET /v1/models, /health, /metrics (for
Prometheus) and /metrics.json.

HTTP, server-sent events, and clients that hang up. Needs the extra `serve`: starlette and uvicorn.
"""

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rljax.batch import FinishReason
from rljax.data.images.encode import ImageReader
from rljax.data.text.tokenizer import Tokenizer
from rljax.environments.calls import Format, parser
from rljax.errors import InputError
from rljax.files import parse_json
from rljax.serving.answers import Answer, error_body
from rljax.serving.connections import LIMITS, ConnectionLimits, http_server, listen
from rljax.serving.fields import RequestLimits, UnknownModel, read_chat, read_completion
from rljax.serving.guard import Guard
from rljax.serving.metrics import CONTENT_TYPE, prometheus_text
from rljax.serving.worker import Failed, Overloaded, Ticket, TokenChunk, Worker

BODY_BYTES = 4 * 2**20  # of a request
READ_BYTES = 4 * BODY_BYTES  # a client that sends no more than this can read why it is refused
HELD_BYTES = 8 * BODY_BYTES  # of all requests that are not parsed yet
PARSERS = 4  # threads
RETRY_S = 1  # an overloaded server tells clients to wait so long


def make_app(
    worker: Worker,
    tokenizer: Tokenizer,
    name: str,
    *,
    calls: str = "auto",
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    images: ImageReader | None = None,
    stops: Sequence[str] = (),
    defaults: Mapping[str, float] | None = None,
) -> Starlette:
    """Returns the ASGI application that serves `worker` as the model `name`. Raises InputError for
    `calls` that are no format.

    `calls`: a format of rljax.environments.calls. `hosts` and `origins`: as in Guard. `images`: how
    the model reads images; None for a model of text. `stops`: stop strings of every response, those
    of the run. `defaults`: values of fields that a request leaves out, such as temperature.
    """
    origins = [origin.lower().rstrip("/") for origin in origins]
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "rljax"}
    requests = _Requests(worker, tokenizer, name, parser(calls, tokenizer), images, stops, defaults)

    async def completions(request: Request) -> Response:
        return await requests.respond(request, chat=False)

    async def chat(request: Request) -> Response:
        return await requests.respond(request, chat=True)

    async def models(request: Request) -> Response:
        asked_model = request.path_params.get("model")
        if asked_model not in (None, name):
            rule, fix = f"only {name!r} is served", f"ask for /v1/models/{name}"
            raise UnknownModel("model", value=asked_model, rule=rule, fix=fix)
        return JSONResponse(card if asked_model else {"object": "list", "data": [card]})

    async def health(request: Request) -> Response:
        if worker.failure is not None:
            return _error(503, f"the decoder failed: {worker.failure}", "server_error")
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(prometheus_text(worker.statistics()), media_type=CONTENT_TYPE)

    async def metrics_json(request: Request) -> Response:
        return JSONResponse(worker.statistics())

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", models),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/metrics.json", metrics_json),
    ]
    middleware = [Middleware(Guard, hosts=hosts, origins=origins)]
    if origins:  # without these headers a browser keeps the answer from the page
        cors = dict(allow_methods=["GET", "POST"], allow_headers=["*"])
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, **cors))
    handlers = dict.fromkeys(
        (*_ERROR_ANSWERS, ClientDisconnect, HTTPException, Exception), _on_error
    )
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class Loading:
    """The ASGI application of a server whose model is still loading: every answer is a 503, until
    `app` is set."""

    app: Starlette | None = None

    async def __call__(self, scope, receive, send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        body = error_body("the model is loading; try again", "overloaded_error", code="loading")
        headers = {"retry-after": str(RETRY_S)}
        await JSONResponse({"status": "loading"} | body, 503, headers)(scope, receive, send)


# -- errors


def _error(status: int, message: str, kind: str, code: str | None = None) -> JSONResponse:
    headers = {"retry-after": str(RETRY_S)} if status == 503 else None
    return JSONResponse(error_body(message, kind, code=code), status, headers=headers)


class _SampleFailed(Exception):
    """A sample ended without an answer: the model gave no finite logits, or decoding stopped."""


_ERROR_ANSWERS = {  # status, type and code of an error; the first kind that fits it counts
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    InputError: (400, "invalid_request_error"),
    Overloaded: (503, "overloaded_error", "overloaded"),
    Failed: (503, "server_error"),
    _SampleFailed: (500, "server_error"),
}


async def _on_error(request: Request, error: Exception) -> Response:
    for kind, (status, *answer) in _ERROR_ANSWERS.items():
        if isinstance(error, kind):
            return _error(status, str(error), *answer)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        answer = _error(error.status_code, error.detail, "invalid_request_error")
        answer.headers.update(error.headers or {})
        return answer
    return _error(500, f"{type(error).__name__}: {error}", "server_error")


# -- requests


class _Requests:
    """Parses requests, has them decoded and answers them."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        name: str,
        calls: Format,
        images: ImageReader | None,
        stops: Sequence[str],
        defaults: Mapping[str, float] | None,
    ):
        self._stops, self._defaults = tuple(stops), dict(defaults or {})
        self._worker, self._tokenizer, self._name, self._calls = worker, tokenizer, name, calls
        self._images = images
        self._limits = RequestLimits(worker.sampler.engine.request_tokens, worker.room)
        self._parsers = ThreadPoolExecutor(PARSERS, "rljax-parse")
        self._held_bytes = 0  # bytes of bodies
        self._json_lock = threading.Lock()

    async def respond(self, request: Request, *, chat: bool) -> Response:
        """Returns the answer to a request, whole or as a stream."""
        async with self._body(request) as raw:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._parsers, self._parse_body, raw, chat)
        worker, parsed = self._worker, answer.request
        pieces, ticket = _queue_and_ticket()
        try:
            if parsed.sampled:
                image_argument = {} if parsed.images is None else {"images": parsed.images}
                submitted = worker.submit(ticket, parsed.requests, parsed.n, **image_argument)
                await asyncio.wrap_future(submitted)
            in_parser = functools.partial(loop.run_in_executor, self._parsers)  # beside decoding
            if parsed.prompt_logprobs and not parsed.likeliest:
                answer.prompt_logprobs = await in_parser(worker.prompt_logprobs, parsed.requests)
            if parsed.stream:
                return _EventStream(_events(answer, pieces), lambda: worker.abort(ticket))
            text = await _until_disconnect(
                request.receive, _collect(answer, pieces, worker, in_parser)
            )
        except BaseException:
            worker.abort(ticket)
            raise
        if text is None:
            worker.abort(ticket)
            raise ClientDisconnect
        return Response(text, media_type="application/json")

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            # A page of another site may send other types without a question, but not this one.
            rule = "must be application/json. Fix: curl -H 'content-type: application/json'"
            raise HTTPException(415, f"content-type: got {kind[:200]!r}; {rule}")
        too_long = HTTPException(413, f"the body is longer than {BODY_BYTES} bytes")
        if int(request.headers.get("content-length", 0)) > READ_BYTES:
            raise too_long
        raw, size = bytearray(), 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > READ_BYTES:
                    raise too_long
                if size <= BODY_BYTES:
                    raw += part
                    self._held_bytes += len(part)
                if self._held_bytes > HELD_BYTES:
                    raise Overloaded(f"{HELD_BYTES} bytes of requests wait already; try again")
            if size > BODY_BYTES:
                raise too_long
            yield raw
        finally:
            self._held_bytes -= len(raw)

    def _parse_body(self, raw: bytearray, chat: bool) -> Answer:
        """Returns the answer to a body, still empty. Called on a thread: a large body takes a
        while."""
        try:
            with self._json_lock:  # other threads wait for the end of each call, so one at a time
                body = parse_json(raw, "the body")
            model_arguments = self._tokenizer, self._name, self._limits
            options = dict(stops=self._stops, defaults=self._defaults)
            if chat:
                parsed = read_chat(body, *model_arguments, self._calls, self._images, **options)
            else:
                parsed = read_completion(body, *model_arguments, **options)
        except RecursionError:
            rule = "its values are nested too deeply"
            raise InputError("request body", rule=rule, fix="send values of few levels") from None
        return Answer(parsed, self._tokenizer, self._name)


def _queue_and_ticket() -> tuple[asyncio.Queue, Ticket]:
    """Returns a queue of pieces on this loop, and the ticket that fills it from decoding."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(piece: TokenChunk) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    return pieces, Ticket(deliver)


async def _next_piece(pieces: asyncio.Queue) -> TokenChunk:
    piece = await pieces.get()
    if piece.finish_reason == FinishReason.ABORT:
        raise _SampleFailed(piece.error)
    return piece


async def _collect(
    answer: Answer, pieces: asyncio.Queue, worker: Worker, in_parser: Callable
) -> str:
    if not answer.request.sampled:
        answer.unsampled()
    while answer.left:
        answer.take(await _next_piece(pieces))
    if count := answer.request.likeliest:
        answer.likeliest = await in_parser(worker.likeliest, answer.sequences(), count)
    return await asyncio.to_thread(answer.encoded)


async def _events(answer: Answer, pieces: asyncio.Queue) -> AsyncIterator[str]:
    """Yields the data of each server-sent event."""
    begun_choices = set()
    for delta in [] if answer.request.sampled else answer.unsampled():
        yield json.dumps(answer.chunk(delta, first=True))
    try:
        while answer.left:
            delta = answer.take(await _next_piece(pieces))
            is_first = delta.choice not in begun_choices
            # A piece whose text is held back sends nothing yet, unless its tokens were asked for.
            if is_first or delta.text or delta.reason or answer.request.logprobs:
                begun_choices.add(delta.choice)
                yield json.dumps(answer.chunk(delta, first=is_first))
    except _SampleFailed as error:
        yield json.dumps(error_body(str(error), "server_error"))
        return
    if answer.request.usage:
        yield json.dumps(answer.usage_chunk())
    yield "[DONE]"


async def _wait_for_disconnect(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_disconnect(receive: Callable, work: Coroutine):
    """Returns the result of `work`; None if the client hung up first, which cancels `work`."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
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
            await _until_disconnect(receive, write())
        finally:
            self._close()


# -- servers


@contextlib.contextmanager
def in_background(app, host: str = "127.0.0.1", port: int = 0, limits: ConnectionLimits = LIMITS):
    """Serves `app` on a thread of its own and yields the address: for notebooks, and for a trainer
    that serves its policy. Raises InputError if the address cannot be bound, and RuntimeError if
    the server does not start."""
    server, sock = http_server(app, limits), listen(host, port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the HTTP server did not start")
        time.sleep(0.01)
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
