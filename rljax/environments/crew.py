"""EpisodeCrew: episodes in processes that can be killed, as the driver sees them.

The processes are in `supervisor`, the playing in `play_worker` and `episode`. A worker is handed
the ids of a turn and answers with the ids of what the environment says, so that texts, templates
and tools never hold up the thread that decodes.
"""

import collections
import math
import os
import pickle
import queue
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.environments.episode import chosen_fields
from rljax.environments.messages import EpisodeLimits, Step
from rljax.environments.play_worker import HOME, Reply
from rljax.environments.supervisor import EpisodeSupervisor, OpenEpisode
from rljax.errors import InputError
from rljax.workers.function import resolve_for_workers
from rljax.workers.prints import Prints


class EpisodeCrew:
    """`workers` processes that play episodes of an environment, hundreds in each.

    `text` names the environment; `tokenizer` is the run's, sent to the workers. A step over
    `limits.turn_timeout_s` ends in SIGKILL for its worker; the other episodes of that worker are
    played again from their recorded replies, and must say what they said, or fail. A failed episode
    is played anew `retries` times, with the same seeds: its first Step has `restart`. Not affected
    by what an environment does: hang, raise, exit, crash, fork, print. What it prints goes to the
    file `log`, without one to stderr. A worker has `memory_gb` of memory (RLIMIT_DATA; 0: no
    limit). Workers end with this process, even by kill -9. One thread calls all of this. Raises
    InputError for an option outside of its range.
    """

    def __init__(
        self,
        text: str,
        tokenizer,
        limits: EpisodeLimits,
        *,
        workers: int = 2,
        retries: int = 1,
        memory_gb: float = 8.0,
        log: Path | None = None,
    ):
        _check_options(workers, retries, memory_gb, limits.turn_timeout_s)
        self.text, self.limits, self.retries = text, limits, retries
        self.component = resolve_for_workers("environment", text, HOME)
        self._owner = os.getpid()
        settings = limits, workers, retries, int(memory_gb * (1 << 30)), log and Prints(log)
        self._supervisor = EpisodeSupervisor(self.component, pickle.dumps(tokenizer), *settings)
        self._played: dict[int, OpenEpisode] = {}
        self._attempts: dict[int, int] = {}  # the one whose Step was last handed out
        self._owing: set[int] = set()
        self._kept: list[tuple[OpenEpisode, int, Step]] = []  # came while others were asked for
        self._finalizer = weakref.finalize(self, self._supervisor.stop)

    def start(self) -> None:
        """Starts the workers and waits for them. Raises InputError if one cannot load
        the environment."""
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self) -> None:
        """Kills the workers and waits for their end. May be called again."""
        self._finalizer()

    def admit(
        self,
        number: int,
        fields: Mapping,
        *,
        seed: int,
        sample_seed: int,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping] | None = None,
        attempt: int = 0,
        replies: Sequence[Reply] = (),
        marks: Sequence[bytes] = (),
    ) -> None:
        """Begins an episode; the numbers of open episodes differ. Never waits. Raises InputError
        for a field that the row lacks, or that cannot be pickled.

        An episode of another crew, as one of a checkpoint, is first played up to where it stood by
        the `replies` that it had in this `attempt`; its steps must have the same `marks` as before.
        """
        assert number not in self._played, f"episode {number} is open"
        self._require_own_process()
        chosen = chosen_fields(self.component, fields, seed=seed, sample_seed=sample_seed)
        row_fields = {
            name: value for name, value in chosen.items() if name not in ("seed", "sample_seed")
        }
        ids = None if prompt_ids is None else [int(i) for i in prompt_ids]
        start = dict(fields=row_fields, seed=seed, sample_seed=sample_seed)
        start |= dict(messages=messages, prompt_ids=ids)
        try:
            blob = pickle.dumps(start, protocol=5)
        except Exception as error:
            raise InputError(
                "the fields of a row cannot be sent to a worker",
                value=sorted(row_fields),
                rule=f"{type(error).__name__}: {error}",
                fix="use plain values: text, numbers, lists, dicts",
            ) from error
        replies = [([int(i) for i in ids], *status) for ids, *status in replies]
        played = self._played[number] = OpenEpisode(number, blob, attempt, replies, list(marks))
        self._attempts[number] = attempt
        if played.owes:
            self._owing.add(number)
        self._supervisor.order("open", played)

    def reply(
        self, number: int, ids: Sequence[int], finish: str, turns_left: int, tokens_left: int
    ) -> None:
        """Hands an open episode the turn `ids` [n] of the policy, the reason of its end, and the
        turns and tokens that are left. Never waits."""
        self._require_own_process()
        reply = ([int(i) for i in ids], finish, turns_left, tokens_left)
        self._owing.add(number)
        # If the episode has failed meanwhile and is played anew, this reply is dropped as too late.
        order = self._played[number], self._attempts[number], reply
        self._supervisor.order("reply", *order)

    def news(self, wait_s: float = 0.0, numbers: range | None = None) -> list[Step]:
        """The steps that have come since the last call, of episodes with these `numbers`, by
        default of all; waits at most `wait_s` seconds for the first. Steps of other episodes stay
        for a later call. Raises the error by which the workers have failed."""
        steps: list[Step] = []
        until = time.monotonic() + wait_s
        queued, self._kept = collections.deque(self._kept), []
        while True:
            remaining_s = 0.0 if steps or queued else until - time.monotonic()
            try:
                wait = dict(block=remaining_s > 0, timeout=max(remaining_s, 0.0) or None)
                item = queued.popleft() if queued else self._supervisor.news.get(**wait)
            except queue.Empty:
                return steps
            if isinstance(item, BaseException):
                raise item
            played, attempt, step = item
            if self._played.get(step.episode) is not played:
                continue  # it was dropped
            if numbers is not None and step.episode not in numbers:
                self._kept.append(item)
                continue
            self._owing.discard(step.episode)
            self._attempts[step.episode] = attempt
            if step.ended:
                self._close(step.episode)
            steps.append(step)

    def drop(self, number: int) -> None:
        """Ends an episode whose result is not needed; a number that is not open is ignored."""
        played = self._played.get(number)
        if played is not None:
            self._close(number)
            self._supervisor.order("drop", played)

    @property
    def pending(self) -> int:
        """Counts the open episodes that owe a Step."""
        return len(self._owing)

    @property
    def notes(self) -> dict[str, str]:
        """Returns what `contract(prepare=...)` of the environment has returned: facts such as the
        tier of its sandbox."""
        return dict(self._supervisor.notes)

    def take_counts(self) -> dict[str, float]:
        """Counts since the last call: `seconds` of environments, episodes that `failed` for
        good (also by kind, "failed/timeout"), were `retried` or `replayed`, and workers that
        were `killed`."""
        supervisor = self._supervisor
        with supervisor.lock:
            counts, supervisor.counts = dict(supervisor.counts), type(supervisor.counts)()
        names = ("seconds", "failed", "retried", "replayed", "killed")
        return dict.fromkeys(names, 0.0) | counts

    def _close(self, number: int) -> None:
        del self._played[number], self._attempts[number]
        self._owing.discard(number)

    def _require_own_process(self) -> None:
        if os.getpid() != self._owner:  # a fork shares the streams and would mix up the answers
            raise RuntimeError("an EpisodeCrew belongs to the process that made it")


def _check_options(workers: int, retries: int, memory_gb: float, turn_timeout_s: float) -> None:
    for name, value, least in (("workers", workers, 1), ("retries", retries, 0)):
        if not isinstance(value, int) or value < least:
            fix = f"--config.environment.{name}={least}, or a whole number of at least {least}"
            raise InputError(f"environment.{name}", value=value, fix=fix)
    if not isinstance(memory_gb, int | float) or not 0 <= memory_gb < math.inf:
        rule = "at least 0; 0 = no limit"
        fix = "--config.environment.memory_gb=0, or the GB that a worker may hold"
        raise InputError("environment.memory_gb", value=memory_gb, rule=rule, fix=fix)
    if not isinstance(turn_timeout_s, int | float) or not 0 < turn_timeout_s < math.inf:
        rule = "a positive number of seconds"
        fix = "--config.environment.turn_timeout_s=10, or as long as a turn takes at most"
        raise InputError("environment.turn_timeout_s", value=turn_timeout_s, rule=rule, fix=fix)
