"""Shared parts of the processes of real.py: laps that count the processes below, and report the
prompts and their rewards."""

import hashlib
import json
import os
from pathlib import Path

from peer_worker import Worker

TICKS = os.sysconf("SC_CLK_TCK")


def descendants(pid: int | str = "self") -> list[int]:
    """The processes below one, without those that end meanwhile."""
    processes = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:
            continue
        for child in children:
            processes += [child, *descendants(child)]
    return processes


def workers_spent() -> tuple[float, float]:
    """(CPU seconds, MB) of the processes below this one: user and system time so far, and the sum
    of their largest resident sets, in which shared pages count for each."""
    seconds, megabytes = 0.0, 0.0
    for pid in descendants():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        seconds += (int(fields[11]) + int(fields[12])) / TICKS
        megabytes += sum(int(x.split()[1]) for x in status.split("\n") if "VmHWM" in x) / 1024
    return seconds, megabytes


class RealWorker(Worker):
    """Laps that also say what the processes below this one spent, which prompts were read, and the
    mean reward of each."""

    def wait(self) -> None:
        super().wait()
        self._workers_cpu = workers_spent()[0]

    def learned(self, prompts: list[tuple[int, ...]], rewards: list[float]) -> None:
        """Ends the lap. prompts: the token ids of each row's prompt; rewards: of each row."""
        seconds, megabytes = workers_spent()
        rewards_of_prompts: dict[tuple[int, ...], list[float]] = {}
        for ids, reward in zip(prompts, rewards, strict=True):
            rewards_of_prompts.setdefault(tuple(ids), []).append(float(reward))
        means = [sum(x) / len(x) for _, x in sorted(rewards_of_prompts.items())]
        digest = hashlib.sha256(json.dumps(sorted(rewards_of_prompts)).encode()).hexdigest()
        self.done(
            workers={"cpu_s": seconds - self._workers_cpu, "peak_mb": megabytes},
            prompts_sha256=digest,
            prompt_tokens=sum(map(len, prompts)),
            rewards=means,  # of each prompt, in the order of their ids
        )
