"""OpenAI's chat completions on a port of this machine, answered by the code that holds the
endpoint: so the policy can be the model of an agent that speaks that API."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

from rljax.data.text.ends import text_before_stop
from rljax.data.text.messages import template_view
from rljax.environments.contract import Call, Reply
from rljax.environments.request_fields import (
    CHAT,
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    chat_limit,
    read_fields,
    refuse,
)
from rljax.files import parse_json

LARGEST_BODY = 64_000_000  # bytes
_HEAD = 1 << 16  # bytes of a request's headers, at most
_NEUTRAL = (
    NEUTRAL
    | NEUTRAL_IN_CHAT
    | {  # fields that the server obeys, and an episode cannot
        "add_generation_prompt": (True,),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "ignore_eos": (False,),
        "logit_bias": ({},),
        "logprobs": (False,),
        "stop_token_ids": ([],),
        "top_logprobs": (0,),
    }
)


@dataclasses.dataclass
class Request:
    """A request for a completion, which waits for its reply. `stop` and `max_tokens` are those of
    a Turn; with `calls` False the calls in a reply are text."""

    messages: list[dict]
    tools: list[dict]
    stop: tuple[str, ...]
    max_tokens: int
    calls: bool
    answered: asyncio.Future

    def answer(self, reply: Reply) -> dict:
        """Sends the reply; returns it as the message that the agent receives."""
        calls = reply.calls if self.calls else ()
        text = str(reply) if self.calls or not reply.calls else reply.whole
        message = {"role": "assistant", "content": text_before_stop(text, self.stop)}
        if calls:
            message["tool_calls"] = [_as_call(n, call) for n, call in enumerate(calls)]
        finish = {"length": "length"}.get(reply.finish, "tool_calls" if calls else "stop")
        if not self.answered.done():
            self.answered.set_result((message, finish, _usage(reply)))
        return message


class Endpoint:
    """`url`, and the requests that come to it. The run's config decides how the policy samples: a
    request's model, temperature, top_p, top_k, min_p and seed have no effect. Its stop strings and
    limits of tokens do, and what no episode can do is refused by its name."""

    async def __aenter__(self) -> "Endpoint":
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD)
        self._connections: set[asyncio.Task] = set()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        connections = [*self._connections]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                request_line, *lines = head.strip().split("\r\n")
                headers = {
                    k.strip().lower(): v.strip()
                    for k, _, v in (line.partition(":") for line in lines)
                }
                length = int(headers.get("content-length", 0))
                if not 0 <= length <= LARGEST_BODY or "transfer-encoding" in headers:
                    return
                body = await reader.readexactly(length)
                kind, content = await self._respond(*request_line.split()[:2], body)
                status = "200 OK" if kind != "error" else "400 Bad Request"
                mime = "text/event-stream" if kind == "stream" else "application/json"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {mime}\r\n"
                    f"Content-Length: {len(content)}\r\n\r\n".encode()
                    + content
                )
                await writer.drain()
        except (ConnectionError, EOFError, asyncio.LimitOverrunError, ValueError):
            pass  # the agent has gone, or does not speak HTTP
        except asyncio.CancelledError:
            pass  # the episode has ended
        finally:
            self._connections.discard(task)
            writer.close()

    async def _respond(self, method: str, path: str, body: bytes) -> tuple[str, bytes]:
        """Returns ("json" | "stream" | "error", the body of the response)."""
        route = path.partition("?")[0]
        if method == "GET" and route.endswith("/models"):
            models = [{"id": "policy", "object": "model", "created": 0, "owned_by": "rljax"}]
            return "json", _encoded({"object": "list", "data": models})
        if method != "POST" or not route.endswith("/chat/completions"):
            return _refused(f"{method} {path}: only POST /v1/chat/completions is served")
        try:
            fields = read_fields(parse_json(body, "the body"), CHAT, _NEUTRAL)
            request = _request(fields)
        except (ValueError, RecursionError) as error:
            return _refused(str(error))
        self.requests.put_nowait(request)
        message, finish, usage = await request.answered
        if fields["stream"]:
            usage_options = usage, fields["stream_options"]
            return "stream", _streamed(message, finish, fields["model"], *usage_options)
        return "json", _encoded(_completion(message, finish, fields["model"], usage))


def _request(fields: Mapping) -> Request:
    if fields["n"] != 1:
        fix = "leave n out, and ask again for each further answer"
        refuse("n", fields["n"], "the policy answers once", fix=fix)
    return Request(
        template_view(fields["messages"]),
        fields["tools"],
        fields["stop"],
        chat_limit(fields) or 0,
        fields["tool_choice"] != "none",
        asyncio.get_running_loop().create_future(),
    )


def _as_call(number: int, call: Call) -> dict:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}


def _usage(reply: Reply) -> dict | None:
    """Returns the numbers of tokens of the policy's row before a reply and in it; None if
    they are not known."""
    prompt_tokens, reply_tokens = reply.prompt_tokens, reply.num_tokens
    if not reply_tokens:
        return None
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": reply_tokens,
        "total_tokens": prompt_tokens + reply_tokens,
    }


def _completion(message: Mapping, finish: str, model: str | None, usage: dict | None) -> dict:
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return _about(model, "chat.completion") | {"choices": [choice], "usage": usage}


def _streamed(
    message: Mapping, finish: str, model: str | None, usage: dict | None, usage_mode: str
) -> bytes:
    """Returns the whole message as one event, then its end. `usage_mode` says where the usage is
    written: "last" for an event of its own, "each" for every event as well."""
    calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    events: Sequence[Mapping] = (
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": finish},
    )
    about = _about(model, "chat.completion.chunk")
    usage_field = {"usage": usage} if usage_mode == "each" else {}
    lines = [_encoded({**about, "choices": [event], **usage_field}) for event in events]
    if usage_mode:
        lines.append(_encoded({**about, "choices": [], "usage": usage}))
    return b"".join(b"data: " + line + b"\n\n" for line in (*lines, b"[DONE]"))


def _about(model: str | None, kind: str) -> dict:
    now = time.time()
    return {"id": f"chatcmpl-{now:.6f}", "object": kind, "created": int(now), "model": model or ""}


def _refused(message: str) -> tuple[str, bytes]:
    return "error", _encoded({"error": {"message": message, "type": "invalid_request_error"}})


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
