"""Stopping inside a step, at a place on which all hosts agree.

A host that is told to stop says so with the next value that the hosts exchange anyway, so that all
know it at the same place of the program.
"""

import contextlib
import http.client
import os
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

NOTICE_S = 30.0  # between two questions to the metadata server
_ASKED = ("instance/preempted", "instance/maintenance-event")
_ENDS = ("TRUE", "TERMINATE_ON_HOST_MAINTENANCE")  # of the machine; a migration is no end


class StopAgreed(BaseException):
    """Raised on all hosts to stop them. Not an Exception, so that no reward and no retry takes it
    for a fault."""


class Notices:
    """The reason for which this host is to stop: the signal that `received` returns, or a notice of
    the cloud that the machine will be taken away."""

    def __init__(self, received: Callable[[], str | None]):
        self.received, self.notice = received, ""
        self.over = threading.Event()
        if url := metadata_server():
            threading.Thread(target=self._ask, args=(url,), daemon=True).start()

    def __call__(self) -> str:
        return self.received() or self.notice

    def _ask(self, url: str) -> None:
        while not self.over.wait(NOTICE_S):
            for name in _ASKED:
                if (value := _metadata(url, name)) in _ENDS:
                    self.notice = f"the cloud's notice {name.rpartition('/')[2]}={value}"
                    text = f"hosts: {self.notice}: saving and stopping"
                    print(text, file=sys.stderr, flush=True)
                    return


def metadata_server() -> str:
    """Returns the address of the machine's metadata server; "" for a machine that is not of
    Google Cloud."""
    host = os.environ.get("GCE_METADATA_IP", "")
    with contextlib.suppress(OSError):
        if not host and "Google" in Path("/sys/class/dmi/id/product_name").read_text():
            host = "metadata.google.internal"
    return f"http://{host}/computeMetadata/v1/" if host else ""


def _metadata(url: str, name: str) -> str:
    request = urllib.request.Request(url + name, headers={"Metadata-Flavor": "Google"})
    past_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError, http.client.HTTPException):
        with past_proxies.open(request, timeout=5.0) as answer:
            return answer.read(1024).decode(errors="replace").strip()
    return ""


class Stops:
    """Decides whether an exchange of the hosts may end what runs now."""

    def __init__(self) -> None:
        self.allowed = 0

    @contextlib.contextmanager
    def may_stop(self) -> Iterator[None]:
        """Lets exchanges in the block raise StopAgreed, on all hosts alike, once they know of a
        reason to stop."""
        self.allowed += 1
        try:
            yield
        finally:
            self.allowed -= 1
