"""Exchanges between hosts: JSON of every host on all, decisions that all make alike, barriers.

Every host calls the same exchanges in the same order. Each carries the line of the program from
which it is called, so that two hosts at different places raise an error that names both, and do
not hang.
"""

import dataclasses
import json
from collections.abc import Callable

from rljax import heartbeat
from rljax.errors import InputError
from rljax.hosts.client import Client

FAILED = "rljax/failed/"
FIRST_FAILED = f"{FAILED}first"  # JSON of a Failure
POLL_S = 1.0  # between two looks at whether another host has failed


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason for which a run ends: that of the first host that failed, which caused what
    others see."""

    host: int
    reason: str
    code: int  # with which that host ends

    @classmethod
    def read(cls, text: str) -> "Failure":
        """Reads what `text` wrote."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """Returns the failure as JSON."""
        return json.dumps(dataclasses.asdict(self))


class HostFailed(Exception):
    """An error for a run that another host has ended; the message says which and why."""


@dataclasses.dataclass
class Exchange:
    """The exchanges of one host. `names` are the hosts, for messages."""

    client: Client
    index: int
    count: int
    names: tuple[str, ...]
    calls: int = 0
    asked: Callable[[], str] = lambda: ""  # what has told this host to stop: "SIGTERM"
    agreed: str = ""  # the same of any host, once all know of it

    def gather(self, value, where: str) -> list:
        """Returns the JSON value of every host, in their order. Raises RuntimeError if the hosts
        are at different places of the program, and HostFailed if one has ended.

        The first host collects and distributes the values: 2 x hosts messages. The keys of an
        exchange are removed at the next one, when everybody has read them.
        """
        number, self.calls = self.calls, self.calls + 1
        prefix = f"rljax/exchange/{number}/"
        message = json.dumps([where, value, self.asked()])
        if self.index:
            self.client.set(f"{prefix}{self.index}", message)
            combined = self._get(f"{prefix}all")
        else:
            texts = [message, *(self._get(f"{prefix}{k}") for k in range(1, self.count))]
            combined = f"[{','.join(texts)}]"
            self.client.set(f"{prefix}all", combined)
            for k in range(1, self.count):
                self.client.delete(f"{prefix}{k}")
            if number:  # whoever is here has read what came before
                self.client.delete(f"rljax/exchange/{number - 1}/all")
        callers, values, stops = zip(*json.loads(combined), strict=True)
        if len(set(callers)) > 1:
            raise RuntimeError(
                "the hosts are at different places of the program: "
                + "; ".join(f"{n} at {p}" for n, p in zip(self.names, callers, strict=True))
            )
        reasons = [f"{s} on {n}" for n, s in zip(self.names, stops, strict=True) if s]
        self.agreed = self.agreed or next(iter(reasons), "")
        return list(values)

    def wait(self, name: str, timeout_s: float) -> None:
        """Waits for all hosts. Raises InputError that names those that have not come."""
        number, self.calls = self.calls, self.calls + 1
        with heartbeat.waiting():
            missing = self.client.barrier(f"rljax/wait/{number}/{name}", timeout_s)
        if missing:
            self.raise_if_failed()
            raise InputError(
                f"waited {timeout_s:g} s for all hosts at {name!r}",
                value=f"missing: {', '.join(self.names[k] for k in missing)}",
                fix="look at the output of these hosts",
            )

    def _get(self, key: str) -> str:
        """A value that another host is about to write."""
        with heartbeat.waiting():
            while (text := self.client.get(key, POLL_S)) is None:
                self.raise_if_failed()
        return text

    def raise_if_failed(self) -> None:
        """Raises HostFailed if another host has said that it ended."""
        for text in self.client.list(FAILED).values():
            failure = Failure.read(text)
            if failure.host != self.index:
                raise HostFailed(f"{self.names[failure.host]}: {failure.reason}")
