"""Refuses requests of other sites' web pages.

A browser sends what a page asks it to send, to this machine as well. A page of another site names
itself in Origin. One whose own name was pointed at this machine (DNS rebinding) has that name in
Host. Programs send no Origin and the name that their user gave.
"""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from rljax.serving.answers import error_body


class Guard:
    """The ASGI application `app`, for requests to `hosts` from programs and from pages of `origins`
    (in lower case, without a slash at the end). All others get a 403.

    IP addresses, localhost and this machine's own name need no mention; "*" stands for all.
    """

    def __init__(self, app, hosts: Sequence[str] = (), origins: Sequence[str] = ()):
        self._app = app
        self._hosts = {name.lower() for name in (*hosts, "localhost", socket.gethostname())}
        self._origins = set(origins)

    async def __call__(self, scope, receive, send) -> None:
        headers = Headers(scope=scope)
        refusal = self._refusal(headers.get("host"), headers.get("origin"))
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            body = error_body(refusal, "invalid_request_error")
            await JSONResponse(body, 403)(scope, receive, send)

    def _refusal(self, host: str | None, origin: str | None) -> str | None:
        if host is not None and not self._knows(host):
            fix = "ask by address, or start the server with --allowed_hosts"
            return f"Host: got {host[:200]!r}; not a name of this server. Fix: {fix}"
        if origin is None or "*" in self._origins:
            return None
        is_own_page = origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        if is_own_page or origin.lower() in self._origins:
            return None
        fix = "start the server with --allowed_origins"
        return f"Origin: got {origin[:200]!r}; pages of other sites are refused. Fix: {fix}"

    def _knows(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "*" in self._hosts or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.endswith(".localhost")
        return True
