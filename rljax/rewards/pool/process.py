"""One process of a `RewardPool` as its parent sees it: its chunk, and the task that it is on."""

import collections
import time

from rljax.rewards.pool.jobs import Task
from rljax.workers.process import WorkerProcess
from rljax.workers.wire import frame

BEGIN_TIMEOUT_S = 30.0  # from handing over a chunk to the worker's message that it began


class RewardWorker(WorkerProcess):
    """A worker that scores. `state`: "starting", then "idle" and "busy"; "dead" at the end."""

    def __init__(self, reward: str, folder: str, path: list[str], memory_bytes: int, pipe: bool):
        self.chunk: collections.deque[Task] = collections.deque()  # handed over, not yet heard of
        self.served = 0
        super().__init__(
            "rljax.rewards.pool.worker", {"reward": reward}, folder, path, memory_bytes, pipe
        )

    def running(self) -> tuple[Task | None, float, bool]:
        """(the task it is on, or None if it has not begun one; since when; whether what runs has a
        score when it is over its limit)."""
        if self.state == "busy":
            number, clock, scored = self.progress.read()
            for task in self.chunk:
                if task.number == number:
                    return task, clock, scored
        return None, self.since, False

    def send(self, chunk: list[Task]) -> None:
        self.state, self.since = "busy", time.monotonic()
        self.progress.write(-1, self.since)
        self.chunk.extend(chunk)
        self.socket.settimeout(BEGIN_TIMEOUT_S)  # it is idle, so it reads at once
        self.socket.sendall(frame([(task.number, task.blob) for task in chunk]))
        self.socket.setblocking(False)
