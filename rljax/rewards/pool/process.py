"""The parent's view of one process of a `RewardPool`: its chunk, and the call that it is on."""

import collections
import time

from rljax.rewards.pool.jobs import RewardCall
from rljax.workers.process import WorkerProcess
from rljax.workers.wire import frame

BEGIN_TIMEOUT_S = 30.0  # from handing over a chunk to the worker's message that it began


class RewardWorker(WorkerProcess):
    """A worker that scores. `state`: "starting", then "ready" and "busy"; "dead" at the end."""

    def __init__(self, reward: str, folder: str, path: list[str], memory_bytes: int, pipe: bool):
        self.chunk: collections.deque[RewardCall] = (
            collections.deque()
        )  # handed over, not yet heard of
        self.served = 0
        super().__init__(
            "rljax.rewards.pool.worker", {"reward": reward}, folder, path, memory_bytes, pipe
        )

    def running(self) -> tuple[RewardCall | None, float, bool]:
        """Returns (the current call, or None if none has begun; its start time; whether the running
        reward has a score when it is over its limit)."""
        if self.state == "busy":
            number, clock, scored = self.progress.read()
            for call in self.chunk:
                if call.number == number:
                    return call, clock, scored
        return None, self.since, False

    def send(self, chunk: list[RewardCall]) -> None:
        """Sends calls to an idle worker. Raises OSError if it has died or does not read."""
        self.state, self.since = "busy", time.monotonic()
        self.progress.write(-1, self.since)
        self.chunk.extend(chunk)
        self.socket.settimeout(BEGIN_TIMEOUT_S)  # it waits, so it reads at once
        self.socket.sendall(frame([(call.number, call.blob) for call in chunk]))
        self.socket.setblocking(False)
