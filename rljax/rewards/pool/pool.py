"""The pool that scores responses in killable processes.

The processes are in `supervisor`, the call of a reward in `worker` and `calling`.

A response is untrusted and so is the time that its reward takes: `5**(5**(5**5))` in a verifier
holds the interpreter lock for ever, so no timeout inside the process can end it. Here the parent
watches a clock per call and sends SIGKILL. A failure is never a score: it is a `Score` whose
status is not "ok" and whose value is NaN, for the caller to count and to mask; so is None, by which
a reward abstains.
"""

import contextlib
import logging
import math
import os
import pickle
import queue
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rewards.pool.calling import (
    HOME,
    PRIVATE,
    call_reward,
    check_own_limit,
    group_fields,
    is_group_reward,
    late_score,
    missing_field,
    wanted_fields,
)
from rljax.rewards.pool.jobs import Job, RewardCall, Score
from rljax.rewards.pool.supervisor import RewardSupervisor
from rljax.rewards.sandbox.tiers import LEFT_OPEN
from rljax.workers.function import resolve_for_workers
from rljax.workers.prints import Prints

LOG = logging.getLogger("rljax")
__all__ = ["Pending", "RewardPool", "Score", "call_reward"]


class Pending:
    """Samples that were submitted; their scores become known later."""

    def __init__(self, pool: "RewardPool", job: Job):
        self._pool, self._job = pool, job  # a pool lives until nobody waits for it

    def result(self) -> list[Score]:
        """One `Score` per sample, in order; waits for the last. May be called again. Raises
        RuntimeError if the pool was closed, and what made the pool fail."""
        return self._pool._supervisor.wait(self._job)

    def done(self) -> bool:
        """Returns whether every score is known."""
        return self._job.ended

    def wait(self, seconds: float) -> int:
        """Waits for at most `seconds`. Returns how many scores are not known yet."""
        with contextlib.suppress(queue.Empty):
            if not self._job.ended:
                self._job.done.get(timeout=seconds)
        return 0 if self._job.ended else self._job.left

    def cancel(self) -> None:
        """Drops the samples: running calls are killed, waiting ones are forgotten."""
        if not self._job.ended:
            self._pool._supervisor.order("cancel", self._job)


class RewardPool:
    """Processes that score samples, each call under a deadline that ends in SIGKILL.

    `reward` is a component text. A sample is a mapping of plain picklable values; the reward gets
    those that it declares. A reward that declares `responses`, or names one that does, is asked
    once of all samples whose `group` is equal, and of each sample without one alone. The clock of a
    call starts when its worker begins it, and anew for each reward that a mixture asks; after
    `timeout_s`, whether it is about a sample or a group, the worker is killed and replaced, and the
    rest of its chunk is scored elsewhere. What was over a limit of time or memory is scored as the
    reward that ran then declares (`on_timeout` of rljax.contracts); where it declares nothing it
    has no score, nor has a group whose samples are scored one by one and one of which was late.

    Not affected by what a reward does: hang, raise, exit, crash, print. What it prints goes to the
    file `log`, of at most 10 MB; without one, to stderr. A worker that asks for more than
    `memory_gb` of memory of its own (RLIMIT_DATA; 0: no limit) gets a MemoryError. Workers end when
    the parent ends, even by kill -9. `max_calls_per_worker` bounds what a leaking reward can pile
    up. Several threads may ask at once.
    """

    def __init__(
        self,
        reward: str,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_gb: float = 8.0,
        max_calls_per_worker: int = 100_000,
        log: Path | None = None,
    ):
        _check_options(workers, timeout_s, memory_gb, max_calls_per_worker)
        self.component = resolve_for_workers("reward", reward, HOME)
        check_own_limit(self.component, timeout_s)
        if not callable(declared := spec(self.component).on_timeout) and declared is not None:
            late_score(self.component, {})  # refuses one that is no score
        self.timeout_s = timeout_s
        self._names, self._required = wanted_fields(self.component)
        self.grouped = is_group_reward(self.component)
        self._owner = os.getpid()
        self._supervisor = RewardSupervisor(
            self.component,
            workers,
            timeout_s,
            max_calls_per_worker,
            int(memory_gb * (1 << 30)),
            log and Prints(log),
        )
        self._finalizer = weakref.finalize(
            self, self._supervisor.stop
        )  # also when dropped, or at exit
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise
        if (tier := self.notes.get("sandbox_tier", "")) in LEFT_OPEN:
            LOG.warning(
                "programs run in the sandbox tier %r, the best that this machine offers: %s. "
                "bubblewrap or user namespaces close it (rljax.rewards.sandbox.tiers)",
                tier,
                LEFT_OPEN[tier],
            )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def notes(self) -> dict[str, str]:
        """Returns what `contract(prepare=...)` of the reward has returned: facts such as the tier
        of its sandbox."""
        return dict(self._supervisor.notes)

    def close(self):
        """Kills the workers and waits for their end. May be called again."""
        self._finalizer()

    def score(self, samples: Sequence[Mapping]) -> list[Score]:
        """One `Score` per sample, in order. Raises InputError for a sample that lacks a field of
        the reward or cannot be pickled."""
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Mapping]) -> Pending:
        """Submits samples without waiting. Raises InputError as `score` does, and RuntimeError if
        the pool is closed or belongs to another process."""
        if os.getpid() != self._owner:  # a fork shares the streams and would mix up the answers
            raise RuntimeError("a RewardPool belongs to the process that made it")
        if self._supervisor.stopped:
            raise RuntimeError("this RewardPool is closed")
        job = Job(len(samples))
        calls = [RewardCall(job, rows, self._pack(rows, samples)) for rows in self._split(samples)]
        if calls:
            self._supervisor.order("work", job, calls)
        else:
            job.end()
        return Pending(self, job)

    def _split(self, samples: Sequence[Mapping]) -> list[tuple[int, ...]]:
        """Returns the rows of the samples that each call is about, in the order
        of their first row."""
        for index, sample in enumerate(samples):
            if not isinstance(sample, Mapping):
                raise InputError(
                    f"sample {index} is not a mapping of fields",
                    value=sample,
                    fix='give dicts, such as {"prompt": ..., "response": ..., "ground_truth": ...}',
                )
        if not self.grouped:
            return [(index,) for index in range(len(samples))]
        groups: dict[object, list[int]] = {}
        for index, sample in enumerate(samples):
            own_key = ("alone", index)
            groups.setdefault(
                ("group", sample["group"]) if "group" in sample else own_key, []
            ).append(index)
        return [tuple(rows) for rows in groups.values()]

    def _pack(self, rows: tuple[int, ...], samples: Sequence[Mapping]) -> bytes:
        """Returns the fields that the reward declares, pickled."""
        members = [samples[row] for row in rows]
        sample = group_fields(members) if self.grouped else members[0]
        for name in self._required:
            if name not in sample:
                raise missing_field(self.component, name, sample)
        names = set(sample) - {*PRIVATE} if self._names is None else self._names
        chosen = {name: sample[name] for name in sample if name in names}
        try:
            return pickle.dumps(chosen, protocol=5)
        except Exception as error:
            raise InputError(
                f"field {_unpicklable(chosen)!r} of sample {rows[0]} cannot be sent to a worker",
                rule=f"{type(error).__name__}: {error}",
                fix="use plain values: text, numbers, lists, dicts",
            ) from error


def _check_options(workers: int, timeout_s: float, memory_gb: float, max_calls_per_worker: int):
    for name, value in (("workers", workers), ("max_calls_per_worker", max_calls_per_worker)):
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"RewardPool: {name}",
                value=value,
                rule="it is a whole number, at least 1",
                fix=f"{name}=1, or a greater whole number",
            )
    if not isinstance(memory_gb, int | float) or not 0 <= memory_gb < math.inf:
        raise InputError(
            "RewardPool: memory_gb",
            value=memory_gb,
            rule="at least 0; 0 = no limit",
            fix="memory_gb=0, or the GB that a worker may hold",
        )
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InputError(
            "RewardPool: timeout_s",
            value=timeout_s,
            rule="it is a positive number of seconds",
            fix="timeout_s=10, or as long as a reward takes at most",
        )


def _unpicklable(fields: dict) -> str | None:
    for name, value in fields.items():
        try:
            pickle.dumps(value, protocol=5)
        except Exception:
            return name
    return None
