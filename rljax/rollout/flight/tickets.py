"""Tickets: which groups of samples may begin, and which a step learns from, so that no token is
older than a bound.

A group is the samples of one prompt. Tickets number the groups in the order of the data; P of them
make a step. `max_staleness` = eta and `ahead` = c <= eta are in steps. At step v a group is
admitted where fewer than (v + c + 1) P groups come before it, those that were trained included,
those that were dropped not. A group that was admitted at step u is trained at step u + eta at the
latest, by when its oldest token is eta steps old; so nothing is ever discarded for its age:

- c = eta: step v trains the P lowest tickets that are open. If a < (u + eta + 1) P groups came
  before a group then, it is trained at step floor(a / P) <= u + eta: drops only lower a.
- c < eta: step v may train any P complete groups that leave, for every u <= v, at most
  (u + eta - v) P open ones of those that were admitted by step u: they fit into the steps up to
  u + eta. Those admitted first are taken first, which keeps this for every u if anything does.

Where decoding goes on while step v learns, what is admitted meanwhile has the weights of step v,
and counts as admitted at step v (`drawing`).
"""

import dataclasses

from rljax.errors import InputError

_SAVED = ("groups_per_step", "step", "admitted", "trained", "dropped", "failed")


class Broken(AssertionError):
    """A group was lost, trained twice, or trained too late: a fault of ours."""


@dataclasses.dataclass
class Tickets:
    """The groups of a run that began and were not trained yet, and how many there were."""

    groups_per_step: int
    max_staleness: int = 0
    ahead: int = 0
    step: int = 0  # the one that is trained next
    admitted: int = 0  # so many tickets were given out
    trained: int = 0
    dropped: int = 0
    failed: int = 0  # groups that took a place in a step, and in which no sample could be scored
    renewed: bool = True  # False while the step before still learns, whose weights draw then
    # Ticket -> the step at which it was admitted, of all that are open, lowest first.
    open: dict[int, int] = dataclasses.field(default_factory=dict)
    complete: set[int] = dataclasses.field(default_factory=set)  # open tickets of complete groups

    def __post_init__(self):
        if self.groups_per_step < 1:
            raise InputError(
                "groups per step",
                value=self.groups_per_step,
                fix="--config.batch.prompts_per_step=1, or more",
            )
        if self.max_staleness < 0:
            rule = ">= 0 steps; 0: every step samples with the newest weights"
            raise InputError(
                "rollouts.max_staleness",
                value=self.max_staleness,
                rule=rule,
                fix="--config.rollouts.max_staleness=0, or more",
            )
        if not 0 <= self.ahead <= self.max_staleness:
            rule = f"from 0 to rollouts.max_staleness, {self.max_staleness}"
            raise InputError(
                "rollouts.ahead",
                value=self.ahead,
                rule=rule,
                fix="lower rollouts.ahead, or raise rollouts.max_staleness",
            )

    def begin_at(self, step: int) -> None:
        """Begins in the middle of a run, whose steps so far had no groups in flight."""
        self.step, self.admitted = step, step * self.groups_per_step
        self.trained = self.admitted

    @property
    def drawing(self) -> int:
        """The step whose weights draw now."""
        return self.step if self.renewed else self.step - 1

    @property
    def room(self) -> int:
        """Returns how many groups may be admitted now; below 0 where a run goes on with a smaller
        bound."""
        most = (self.drawing + self.ahead + 1) * self.groups_per_step
        return most - self.trained - self.failed - len(self.open)

    def renew(self) -> None:
        """Begins to draw with the weights of the step that is trained next."""
        self.renewed = True

    def admit(self) -> int:
        """Returns the next ticket. Raises Broken if there is no room for it."""
        if self.room < 1:
            raise Broken(f"ticket {self.admitted} is admitted too early")
        ticket = self.admitted
        self.admitted += 1
        self.open[ticket] = self.drawing
        return ticket

    def completed(self, ticket: int) -> None:
        """Notes that all samples of the group have ended and been scored. Raises Broken for a
        ticket that is not open, or was complete."""
        if ticket not in self.open or ticket in self.complete:
            raise Broken(f"ticket {ticket} is not open, or was complete")
        self.complete.add(ticket)

    def drop(self, ticket: int) -> None:
        """Drops a group that no step is to learn from; another one takes its place."""
        del self.open[ticket]
        self.complete.discard(ticket)
        self.dropped += 1

    def ready(self) -> list[int] | None:
        """Returns the groups that this step trains; None: more have to be complete first."""
        if self.ahead == self.max_staleness:
            lowest = list(self.open)[: self.groups_per_step]
            complete = len(lowest) == self.groups_per_step and self.complete.issuperset(lowest)
            return lowest if complete else None
        chosen = [ticket for ticket in self.open if ticket in self.complete]
        chosen = sorted(chosen, key=lambda ticket: (self.open[ticket], ticket))
        chosen = chosen[: self.groups_per_step]
        fits = len(chosen) == self.groups_per_step and self._leaves_room(chosen)
        return sorted(chosen) if fits else None

    def _leaves_room(self, chosen: list[int]) -> bool:
        """Returns whether the groups that stay open can all be trained in time."""
        taken = set(chosen)
        return self._fit([step for ticket, step in self.open.items() if ticket not in taken], 0)

    def _fit(self, begun: list[int], steps: int) -> bool:
        """Returns whether groups admitted at the steps `begun` can all be trained in time: in the
        steps after this one, and in `steps` more."""
        return all(
            sum(step <= u for step in begun)
            <= (u + self.max_staleness - self.step + steps) * self.groups_per_step
            for u in set(begun)
        )

    def train(self, tickets: list[int], failed: int = 0) -> None:
        """Notes that a step has taken these groups; in `failed` of them no sample was scored.
        Raises Broken for a ticket that is not complete, or too old."""
        for ticket in tickets:
            if self.step - self.open[ticket] > self.max_staleness or ticket not in self.complete:
                raise Broken(f"ticket {ticket} is trained at step {self.step}: {self}")
            del self.open[ticket]
            self.complete.discard(ticket)
        self.trained += len(tickets) - failed
        self.failed += failed
        self.step, self.renewed = self.step + 1, False
        self.check()

    def check(self) -> None:
        """Raises Broken unless admitted = trained + dropped + failed + open."""
        counted = self.trained + self.dropped + self.failed + len(self.open)
        if self.admitted != counted or not self.complete <= self.open.keys():
            raise Broken(f"{self.admitted} groups were admitted, {counted} are known of: {self}")

    def get_state(self) -> dict:
        """Returns JSON. What is complete shows in the groups themselves."""
        self.check()
        return {name: getattr(self, name) for name in _SAVED} | {"open": list(self.open.items())}

    def set_state(self, state: dict) -> None:
        """Goes on from `get_state`, with no group complete yet. Raises InputError if the groups
        that are open cannot be trained as this run is set, and ValueError for what is no state."""
        if state["groups_per_step"] != self.groups_per_step:
            raise InputError(
                "batch.prompts_per_step",
                value=self.groups_per_step,
                rule=f"{len(state['open'])} prompts are in flight, of steps of other sizes",
                fix=f"as it was: {state['groups_per_step']}",
            )
        for name in _SAVED:
            setattr(self, name, int(state[name]))
        self.open = dict(sorted((int(ticket), int(step)) for ticket, step in state["open"]))
        self.complete = set()
        self.renew()
        valid = all(
            0 <= t < self.admitted and 0 <= step <= self.step for t, step in self.open.items()
        )
        try:
            self.check()
        except Broken as error:
            raise ValueError(error) from None
        if not valid or min(getattr(self, name) for name in _SAVED) < 0:
            raise ValueError(f"{self} are no tickets")
        if not self._fit(list(self.open.values()), steps=1):
            oldest = min(self.open.values())
            raise InputError(
                "rollouts.max_staleness",
                value=self.max_staleness,
                rule=f"{len(self.open)} prompts are in flight since step {oldest}, more than can "
                f"be trained in time from step {self.step} on",
                fix="as it was, or larger",
            )
