"""Tools of an MCP server, by the library mcp (the extra `agents`)."""

import json
import shlex

from rljax.contracts import contract
from rljax.environments.adapters.shared import Session, library
from rljax.environments.contract import Call, Done, Opening
from rljax.environments.toolbox import answered, described


@contract(repeatable=False, on_limit=None, prepare=lambda options: _library)
async def mcp(*, server: str, timeout_s: float = 8.0, reconnect: bool = False):
    """The prompt of the row, and a server's answers to the policy's calls until a reply has none;
    then `reward.function` scores that reply.

    `server`: a URL, "http://localhost:8000/mcp", or a command that is started for each episode,
    "python my_server.py". Each episode has a session of its own, and no call is made twice: one
    whose connection is lost, or that takes more than `timeout_s`, is answered by an error. A call
    after a lost connection fails the episode, or with `reconnect`, for a server that remembers
    nothing of a session, is made in a new one. Of a result the policy reads the texts, those of
    embedded resources, too, the addresses of links, and where there is no text the structured
    content as JSON; what is no text, such as an image, is named, or an error if it is all.
    """
    lib = _library()
    command, *arguments = shlex.split(server)
    parameters = lib.StdioServerParameters(command=command, args=arguments)
    target = server if "://" in server else parameters
    async with Session(lambda: lib.Client(target, read_timeout_seconds=timeout_s)) as session:
        tools = await session.ask(_tools)
        reply = yield Opening(tools=[_schema(tool) for tool in tools])
        while reply.calls:
            answers = []
            for call in reply.calls:
                if session.ended and not reconnect:
                    raise ConnectionError(f"the session with {server} was lost")
                elif session.ended:
                    await session.connect()
                answers.append(await _answer(session, call, [tool.name for tool in tools]))
            reply = yield answers
    yield Done(None)


def _library():
    """Returns the library, imported before the first clock starts: it takes seconds."""
    return library("mcp", "mcp", "'mcp>=2'")


async def _tools(client) -> list:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _schema(tool) -> dict:
    about = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**about, "parameters": tool.input_schema}}


async def _answer(session: Session, call: Call, names: list[str]) -> dict:
    if call.name not in names:
        return answered(call, f"there is no such tool, only {', '.join(names)}", "unknown")
    try:
        result = await session.ask(lambda client: client.call_tool(call.name, call.arguments))
    except Exception as error:
        return answered(call, described(error), "failed")
    return answered(call, *_read(result))


def _read(result) -> tuple[str, str]:
    """Returns (a result as text, "" or how it failed). Structured content is read if there
    is no text. Content that is no text, such as an image, is named, and is a failure if
    there is nothing else."""
    parts = [_text(part) for part in result.content]
    texts = [text for text in parts if text is not None]
    if result.structured_content is not None and not any(map(str.strip, texts)):
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    left_out = [
        f"[{part.type}: {_kind(part)}, which cannot be shown as text]"
        for part, text in zip(result.content, parts, strict=True)
        if text is None
    ]
    unreadable = bool(left_out) and not any(map(str.strip, texts))
    return "\n".join([*texts, *left_out]), "failed" if result.is_error or unreadable else ""


def _text(part) -> str | None:
    """Returns the text of a part of a result; of a link its name and address. None if
    the part is no text."""
    if part.type == "resource_link":
        return f"{part.name}: {part.uri}"
    content = part.resource if part.type == "resource" else part
    return getattr(content, "text", None)


def _kind(part) -> str:
    """Returns the media type of a part that is no text, preceded by the address of a resource."""
    content = part.resource if part.type == "resource" else part
    address = f"{content.uri}, " if part.type == "resource" else ""
    return f"{address}{getattr(content, 'mime_type', None) or 'of no known type'}"
