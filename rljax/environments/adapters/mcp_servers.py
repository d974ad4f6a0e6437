"""Tools of an MCP server, by the library mcp (the extra `agents`)."""

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
    nothing of a session, is made in a new one.
    """
    lib = _library()
    command, *arguments = shlex.split(server)
    own = lib.StdioServerParameters(command=command, args=arguments)
    where = server if "://" in server else own
    async with Session(lambda: lib.Client(where, read_timeout_seconds=timeout_s)) as session:
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
    found = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        found += page.tools
    return found


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
    texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
    return answered(call, "\n".join(texts), "failed" if result.is_error else "")
