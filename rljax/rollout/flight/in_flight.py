"""InFlight: groups of samples that outlive the step in which they began.

A step takes the groups that are due, and what has not ended goes on under the next weights: no
unfinished response is thrown away. One thread, no queue beside the sampler's, no copy of weights on
one mesh: parameters are arrays, an argument of every dispatch. Devices that only sample
(rollouts.sampler_devices) have a copy, and decode on while the others learn. How old a token may be
is decided as its group is admitted (`tickets`).
"""

import contextlib
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.components import Component
from rljax.contracts import spec
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.keys import stream
from rljax.metric import Metric
from rljax.rollout.flight.ages import ages
from rljax.rollout.flight.flight import Flight
from rljax.rollout.flight.tickets import Broken, Tickets
from rljax.rollout.sample import Landed
from rljax.sampler import held_weights
from rljax.tracking import timing

METRICS = {
    "staleness/masked_fraction": Metric(
        "tokens left out as older than the newest part of their response (rollouts.partial_mask)",
        "share",
        "below 0.3; above, long responses hardly teach",
    ),
    "queue/open": Metric(
        "groups that began and that no step has learned from yet",
        "groups",
        "at most rollouts.ahead steps of groups",
    ),
    "queue/complete": Metric(
        "of these, groups that have ended and been scored",
        "groups",
        "above 0: the next step waits less",
    ),
    "queue/oldest_steps": Metric(
        "steps since the oldest open group began", "steps", "at most rollouts.max_staleness"
    ),
    "queue/dropped": Metric(
        "dead groups that other prompts replaced since the last step",
        "groups",
        "as many as have equal scores; far more than a step has: other prompts",
    ),
    "queue/dropped_tokens": Metric("tokens of these groups", "tokens", "small beside batch/tokens"),
}


class InFlight:
    """The groups of a run that began and were not learned from yet.

    `draw` gives the next prompts of the data, `key` is the run's; `rollout` is the function that
    will be called with what `take` returns. `reread`: new weights read again what is in flight.
    `partial_mask` "stale": of a response that several versions wrote, only the newest part is
    learned from.
    """

    def __init__(
        self,
        tickets: Tickets,
        flight: Flight,
        draw: Callable[[int], Prompts],
        rollout: Component,
        key,
        *,
        reread: bool = False,
        partial_mask: str = "none",
    ):
        self.tickets, self.flight, self.draw, self.key = tickets, flight, draw, key
        self.reread, self.partial_mask = reread, partial_mask
        self.drops = spec(rollout).drops_dead
        if self.drops is not None and not flight.player.scores_early:
            raise InputError(
                f"algorithm.collect={rollout.text!r} in flight",
                rule="it needs a group's scores as soon as its samples have ended",
                fix="a reward function or a judge that asks a server, or rollouts.max_staleness=0",
            )
        self._step_of: dict[int, int] = {}  # version of weights -> the last step that had them
        self._dropped = self._dropped_tokens = 0  # since the last step was taken
        self._weights, self._version = None, 0  # weights that draw now, and their version
        self._mesh: Mesh | None = None  # devices that only sample

    def take(self, actor, step: int) -> tuple[Landed, dict[str, float]]:
        """Decodes until the groups of this step are complete. Returns (their trajectories,
        metrics). Raises InputError if dead groups are all that comes, and Broken, a defect of ours,
        for a step out of order or a token that is too old."""
        tickets, flight = self.tickets, self.flight
        if not tickets.admitted:
            tickets.begin_at(step)
        if tickets.step != step:
            raise Broken(f"step {step} of a source that is at step {tickets.step}")
        with timing.timed("generate"):
            self._renew(actor)
            with self._device():
                self._look()  # at what was scored meanwhile
                self._admit()
                while (chosen := tickets.ready()) is None:
                    self._dispatch()
        if actor.decoding.mesh is None:
            self._weights = None  # learning donates these weights
        oldest = min(tickets.open.values(), default=step)
        batch, report, prompts = flight.collect(chosen, actor.model.mesh)
        batch, metrics = self._aged(batch, step, actor.model.mesh)
        scored = np.any(np.asarray(fetch(batch.mask)) > 0, axis=1)
        failed = int(np.sum(~scored.reshape(len(chosen), -1).any(axis=1)))
        tickets.train(chosen, failed)
        metrics |= {
            "queue/open": float(len(tickets.open)),
            "queue/complete": float(len(tickets.complete)),
            "queue/oldest_steps": float(step - oldest),
            "queue/dropped": float(self._dropped),
            "queue/dropped_tokens": float(self._dropped_tokens),
            **flight.metrics(),
        }
        self._dropped = self._dropped_tokens = 0
        player = flight.player
        landed = Landed(prompts, actor, player.cfg.sampling, player.n, (batch, report))
        return landed, metrics

    def _rows(self, actor) -> int:
        """Returns how many samples may decode at once: those of a step, or as many as the config
        has slots for, up to all that are in flight."""
        rows = self.tickets.groups_per_step * self.flight.player.n
        return max(rows, min(actor.decoding.slots, (1 + self.tickets.ahead) * rows))

    def meanwhile(self, learned: Callable[[], bool]) -> None:
        """Decodes with a copy of the weights until the next ones are learned. By a logical clock
        until the samples of the next step are complete, whatever the time that takes: at
        max_staleness = ahead = 1 every token is then exactly one step old."""
        if self._weights is None:
            return
        by_dispatches, tickets = self.flight.clock.dispatches > 0, self.tickets
        with self._device():
            self._admit()
            while (tickets.ready() is None) if by_dispatches else not learned():
                start_s = time.monotonic()
                if self._dispatch() and not learned():  # all of it beside
                    timing.beside(time.monotonic() - start_s)
        self._weights = None  # the next ones take their memory

    def _renew(self, actor) -> None:
        """Decodes with the weights of the actor from now on."""
        self._weights = None  # before the new ones take their memory
        self.tickets.renew()
        self._version = int(fetch(actor.state.step))
        # The last step that has them: one whose update was skipped leaves the weights as they are.
        self._step_of[self._version] = self.tickets.step
        self._prepare(actor)
        with held_weights():
            self._weights = actor.decoding.weights(actor.model, actor.state.weights)

    def _prepare(self, actor) -> None:
        self._mesh = actor.decoding.mesh
        with self._device():
            self.flight.prepare(actor, self._rows(actor))

    def _device(self):
        """Selects the device for small arrays of the host: not one that trains while a step runs on
        it."""
        if self._mesh is None:
            return contextlib.nullcontext()
        return jax.default_device(self._mesh.devices.flat[0])

    def _dispatch(self) -> bool:
        """Decodes one dispatch and handles what has ended. Returns whether it decoded."""
        decoded = self.flight.dispatch(self._weights, self._version, not self.reread)
        self._look()
        self._admit()
        return decoded

    def _admit(self) -> None:
        """Begins as many groups as may be admitted now."""
        tickets = self.tickets
        if (room := tickets.room) > 0:
            prompts = self.draw(room)
            for i in range(room):
                ticket = tickets.admit()
                step, number = divmod(ticket, tickets.groups_per_step)
                key = stream(self.key, "rollout", step)
                self.flight.begin(ticket, number, prompts.select([i]), key)

    def _look(self) -> None:
        """Notes which groups are complete, and drops the dead ones."""
        for ticket in self.flight.ended():
            dead = self.drops is not None and not self.flight.is_live(ticket)
            if dead and self._may_drop():
                self._dropped += 1
                self._dropped_tokens += self.flight.tokens(ticket)
                self.tickets.drop(ticket)
                self.flight.drop(ticket)
            else:
                self.tickets.completed(ticket)

    def _may_drop(self) -> bool:
        """Returns whether one more dead group may be dropped for this step. Raises InputError where
        the rollout says that too many are an error."""
        steps, if_short = self.drops
        if self._dropped < steps * self.tickets.groups_per_step:
            return True
        if if_short == "error":
            raise InputError(
                f"{self._dropped} dead groups were dropped before one step was full",
                rule="a group whose scores are all equal has no advantage",
                fix="other prompts, more samples per prompt, or if_short='fill'",
            )
        return False

    def _aged(self, batch: Batch, step: int, mesh) -> tuple[Batch, dict[str, float]]:
        """Computes how many steps old the tokens are; stale parts masked, if the config says so."""
        mask, versions = (np.asarray(x) for x in fetch((batch.mask, batch.policy_version)))
        older, metrics = ages(mask, versions, self._step_of, step)
        if (oldest := metrics["staleness/steps_max"]) > self.tickets.max_staleness:
            raise Broken(f"a token is {oldest} steps old: {self.tickets}")
        if self.partial_mask == "stale":
            metrics["staleness/masked_fraction"] = float(older.sum() / max((mask > 0).sum(), 1))
            batch = batch.replace(mask=place(np.where(older, 0, mask).astype(np.float32), mesh))
        first = step - self.tickets.max_staleness
        self._step_of = {v: s for v, s in self._step_of.items() if s >= first}
        return batch, metrics

    def get_state(self) -> dict:
        """Returns every group that began and was not learned from, and where the
        tickets are: JSON."""
        return {
            "tickets": self.tickets.get_state(),
            "steps": list(self._step_of.items()),
            "groups": self.flight.get_state(),
        }

    def set_state(self, state: dict, find: Callable[[dict], Prompts]) -> None:
        """Goes on from `get_state`. `find` brings the prompt that a state speaks of.
        Raises InputError if this run cannot, and KeyError, TypeError or ValueError for
        what is no state."""
        self.tickets.set_state(state["tickets"])
        self._step_of = {int(version): int(step) for version, step in state["steps"]}
        self.flight.set_state(state["groups"], find)
        if self.flight.tickets != self.tickets.open.keys():
            raise ValueError(f"groups {sorted(self.flight.tickets)} were saved with {self.tickets}")
        if unknown := self.flight.versions() - self._step_of.keys():
            raise ValueError(f"no step had the versions {sorted(unknown)}")

    def read_again(self) -> None:
        """Reads all that was decoded so far again, as a run does that is resumed here: both then
        do the same."""
        self.tickets.complete.clear()
        with self._device():
            self.flight.read_again()
