"""A run in a discrete-event simulation: what a bound on staleness buys, before anything is run.

It decides as a run does: `Tickets` itself decides which groups begin and which a step learns from;
slots are filled, held and given up, and a dispatch ends, by the rules of rljax.sampler. Seconds
are inputs (`Seconds`). Left out: reading again what new weights or a parked sample made unread,
short pages, drafts, dropped groups, scores that are late, the processors of environments,
checkpoints and evaluations.

Axes: B slots, P groups per step, n samples per group.
"""

import collections
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Callable

import numpy as np

from rljax.rollout.flight import Tickets
from rljax.sampler.scheduler import FREE_SHARE

Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of the parts of a run. A decode step with a share f of its slots live takes idle_s +
    f (step_s - idle_s)."""

    step_s: float
    idle_s: float
    learn_s: float
    dispatch_s: float = 0.0  # of each dispatch, beside its steps
    read_s: float = 0.0  # reading a prompt
    publish_s: float = 0.0  # bringing new weights to where they decode


@dataclasses.dataclass(frozen=True)
class Load:
    """The work of a step. `lengths` are tokens of a response or, where there are `turns`, of each
    of its turns; `tools`: seconds between two turns. `score_dispatches`: when a score counts, as
    rollouts.clock="logical(N)" says."""

    groups: int  # P
    samples: int  # n
    slots: int  # B
    lengths: Draw
    turns: Draw | None = None
    tools: Draw | None = None
    dispatch_steps: int = 32  # rljax.sampler.engine.Engine.steps
    score_dispatches: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a simulated run, means over its steps. `ages`[a]: share of the tokens that were a
    steps old when they were learned from; `learn_share`: of the time, while weights are learned."""

    step_s: float
    live_share: float
    ages: tuple[float, ...]
    dispatches: float
    decode_steps: float
    learn_share: float
    counts: tuple[tuple[int, int], ...] = ()  # (dispatches, decode steps) of every step

    @property
    def mean_age(self) -> float:
        """Mean age of the tokens when they were learned from, in steps."""
        return float(np.dot(self.ages, np.arange(len(self.ages))))

    @property
    def max_age(self) -> int:
        """Greatest age of a token when it was learned from, in steps."""
        return len(self.ages) - 1


def simulate(
    load: Load,
    seconds: Seconds,
    max_staleness: int,
    ahead: int,
    *,
    overlap: bool = False,
    steps: int = 24,
    warm: int = 4,
    seed: int = 0,
) -> Outcome:
    """Simulates a run of warm + steps steps, of which the first `warm` are left out. `overlap`:
    some devices sample while others learn; else all of them do one after the other."""
    run = _Run(load, seconds, Tickets(load.groups, max_staleness, ahead), seed)
    for _ in range(warm):
        run.step(overlap)
    begin = run.now, run.dispatches, run.decode_steps, run.live_steps
    run.ages = collections.Counter()
    counts = []
    for _ in range(steps):
        previous = run.dispatches, run.decode_steps
        run.step(overlap)
        counts.append((run.dispatches - previous[0], run.decode_steps - previous[1]))
    end = run.now, run.dispatches, run.decode_steps, run.live_steps
    took, dispatches, decoded, live = map(operator.sub, end, begin)
    tokens = sum(run.ages.values())
    ages = tuple(run.ages[age] / tokens for age in range(max(run.ages) + 1))
    return Outcome(
        took / steps,
        live / (decoded * load.slots),
        ages,
        dispatches / steps,
        decoded / steps,
        steps * seconds.learn_s / took if took else 0.0,
        tuple(counts),
    )


class _Run:
    """A run as it stands. Sample i of ticket t has the number t n + i, as in a run."""

    def __init__(self, load: Load, seconds: Seconds, tickets: Tickets, seed: int):
        self.load, self.seconds, self.tickets = load, seconds, tickets
        self.rng = np.random.default_rng(seed)
        self.now, self.dispatches, self.decode_steps, self.live_steps = 0.0, 0, 0, 0
        self.owner = np.full(load.slots, -1)  # the sample in a slot; -1: free
        self.left = np.zeros(load.slots, int)  # tokens of its turn still to come; 0: free or held
        self.waiting: collections.deque[int] = collections.deque()  # whose prompt was not read
        self.returns: list[int] = []  # samples that go on in any slot
        self.held: dict[int, int] = {}  # {sample: slot} of those that wait for a tool
        self.replies: list[tuple[float, int]] = []  # (when, sample), a heap
        # Of a sample: [tokens of a turn, seconds of the tool behind it], those still to come.
        self.turns: dict[int, collections.deque[tuple[int, float]]] = {}
        self.unfinished: collections.Counter = collections.Counter()  # samples by ticket
        self.scores: list[tuple[int, int]] = []  # (dispatch from which it counts, ticket)
        self.clock = 0
        # Tokens of a ticket by the step whose weights drew them; ages of those learned from.
        self.drawn: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
        self.ages: collections.Counter = collections.Counter()

    # -- a step

    def step(self, overlap: bool) -> None:
        """Decodes until the groups of a step are complete, and learns from them. Until the new
        weights are there no further step is chosen, and groups are admitted as for the old ones."""
        while (tickets := self._ready()) is None:
            assert self._dispatch() or self._wait(), f"waits for ever: {self.tickets}"
        for ticket in tickets:
            for version, tokens in self.drawn.pop(ticket).items():
                self.ages[self.tickets.step - version] += tokens
        end = self.now + self.seconds.learn_s
        while overlap and self.now < end:
            self._admit()
            if not self._dispatch() and not self._wait(end):
                break
        self.now = max(self.now, end) + self.seconds.publish_s
        self.tickets.train(tickets)
        self.tickets.renew()

    def _ready(self) -> list[int] | None:
        self._admit()
        return self.tickets.ready()

    def _admit(self) -> None:
        load = self.load
        for _ in range(max(self.tickets.room, 0)):
            ticket = self.tickets.admit()
            for sample in range(ticket * load.samples, (ticket + 1) * load.samples):
                self.turns[sample] = self._episode()
                self.waiting.append(sample)
            self.unfinished[ticket] = load.samples

    def _episode(self) -> collections.deque:
        load, rng = self.load, self.rng
        turns = 1 if load.turns is None else int(np.ceil(load.turns(rng, 1)[0]))
        tokens = np.maximum(np.ceil(load.lengths(rng, turns)), 1).astype(int).tolist()
        tools = [0.0] * turns if load.tools is None else load.tools(rng, turns).tolist()
        return collections.deque(zip(tokens, tools, strict=True))

    # -- a dispatch, as rljax.sampler.stream does one

    def _dispatch(self) -> bool:
        """Runs one dispatch; returns False where nothing can decode."""
        load, seconds = self.load, self.seconds
        self._hear()
        self._make_room()
        prompts_read = self._fill()
        live = self.left > 0
        if not live.any():
            return False
        steps = self._steps(self.left[live])
        decoded = np.minimum(self.left, steps)
        share = float(decoded.sum()) / (steps * load.slots)
        step_s = seconds.idle_s + share * (seconds.step_s - seconds.idle_s)
        self.now += seconds.dispatch_s + prompts_read * seconds.read_s + steps * step_s
        self.dispatches, self.decode_steps = self.dispatches + 1, self.decode_steps + steps
        self.live_steps += int(decoded.sum())
        self.clock += 1
        version = self.tickets.step
        tickets, which = np.unique(self.owner[live] // load.samples, return_inverse=True)
        counts = np.bincount(which, decoded[live]).astype(int)
        for ticket, tokens in zip(tickets.tolist(), counts.tolist(), strict=True):
            self.drawn[ticket][version] += tokens
        self.left -= decoded
        for slot in np.flatnonzero(live & (self.left == 0)).tolist():
            self._turn_ended(slot)
        self._score()
        return True

    def _steps(self, remaining: np.ndarray) -> int:
        """Returns the number of decode steps of a dispatch, which ends when no slot is live or,
        while samples wait, when some slots are free."""
        steps = min(self.load.dispatch_steps, int(remaining.max()))
        threshold = max(1, self.load.slots // FREE_SHARE)
        if (self.waiting or self.returns) and threshold <= len(remaining):
            steps = min(steps, int(np.partition(remaining, threshold - 1)[threshold - 1]))
        return steps

    def _hear(self) -> None:
        """Samples whose tools have replied go on, in their slots if they still have them."""
        while self.replies and self.replies[0][0] <= self.now:
            _, sample = heapq.heappop(self.replies)
            if sample in self.held:
                self.left[self.held.pop(sample)] = self.turns[sample].popleft()[0]
            else:
                self.returns.append(sample)

    def _make_room(self) -> None:
        """Makes room as rljax.sampler.scheduler.Scheduler._make_room does."""
        free_slots, holders = int((self.owner < 0).sum()), sorted(self.held)
        self.returns.sort()
        waiting, given_up = itertools.chain(self.returns, self.waiting), []
        for sample in itertools.islice(waiting, free_slots, free_slots + len(holders)):
            if holders[-1] <= sample:
                break
            given_up.append(holders.pop())
        else:
            sample = None
        if len(self.held) == self.load.slots and not given_up and sample is not None:
            given_up = holders[-max(1, self.load.slots // FREE_SHARE) :]
        for holder in given_up:
            self.owner[self.held.pop(holder)] = -1

    def _fill(self) -> int:
        """Puts waiting samples into free slots; returns the number of prompts read for it."""
        prompts = set()
        for slot in np.flatnonzero(self.owner < 0).tolist():
            if self.returns:
                sample = self.returns.pop(0)
            elif self.waiting:
                sample = self.waiting.popleft()
                if sample % self.load.samples == 0:  # siblings wait behind the same prompt
                    prompts.add(sample)
            else:
                break
            self.owner[slot], self.left[slot] = sample, self.turns[sample].popleft()[0]
        return len(prompts)

    def _turn_ended(self, slot: int) -> None:
        sample = int(self.owner[slot])
        if self.turns[sample]:
            self.held[sample] = slot
            heapq.heappush(self.replies, (self.now + self.turns[sample][0][1], sample))
            return
        del self.turns[sample]
        self.owner[slot] = -1
        ticket = sample // self.load.samples
        self.unfinished[ticket] -= 1
        if not self.unfinished[ticket]:
            del self.unfinished[ticket]
            self.scores.append((self.clock + self.load.score_dispatches, ticket))

    def _score(self) -> None:
        for _, ticket in (entry for entry in self.scores if entry[0] <= self.clock):
            self.tickets.completed(ticket)
        self.scores = [entry for entry in self.scores if entry[0] > self.clock]

    def _wait(self, until: float = np.inf) -> bool:
        """While nothing decodes, moves on to the next reply, at most to `until`, or counts scores
        on; returns False where nothing will come."""
        if self.scores:
            self.clock += 1
            self._score()
            return True
        if not self.replies or self.replies[0][0] > until:
            return False
        self.now = max(self.now, self.replies[0][0])
        return True
