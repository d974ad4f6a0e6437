"""Flight: groups of trajectories that began at different steps, their scores, and a checkpoint of
both."""

import dataclasses
import functools
from collections.abc import Callable

from rljax import hosts
from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.metric import Metric
from rljax.rewards.pool.pool import Pending, Score
from rljax.rollout.players.clock import Clock
from rljax.rollout.players.episodes.in_flight import EpisodesInFlight
from rljax.rollout.players.responses_in_flight import ResponsesInFlight
from rljax.rollout.scoring.report import RewardReport
from rljax.rollout.scoring.reward import score_of, told_score
from rljax.sampler import Sampler
from rljax.sampler.inputs import RequestKeys

METRICS = {
    "slots/live_share": Metric(
        "steps of slots that gave a token",
        "share",
        "above 0.9; below, more prompts ahead (rollouts.ahead) fill the slots",
    ),
    "slots/dispatches": Metric("dispatches of decoding since the last step", "dispatches"),
    "slots/decode_steps": Metric(
        "steps of decoding in them: each gives every live slot a token",
        "steps",
        "the fewer for the same batch/tokens, the better the slots are used",
    ),
    "slots/reread_tokens": Metric(
        "tokens in flight that were read again, after new weights or a checkpoint",
        "tokens",
        "0 with rollouts.in_flight_cache='keep', but for checkpoints",
    ),
}


_FINDING = ("prompt_id", "index", "source")  # fields by which a record is found in the data again


@dataclasses.dataclass(eq=False)
class Group:
    """The trajectories of one prompt, number `at` of the step that has these keys, and the scores
    of those that have one."""

    ticket: int
    prompts: Prompts  # one
    at: int = 0
    keys: RequestKeys | None = None
    members: list = dataclasses.field(default_factory=list)  # samples of single responses
    scores: dict[int, Score] = dataclasses.field(default_factory=dict)  # by member
    asked: set[int] = dataclasses.field(default_factory=set)  # members with a score, or one to come
    complete: bool = False
    stood: dict | None = None  # state of episodes that are not played at the moment


class Flight:
    """Trajectories that a source decodes in flight. `player` begins trajectories and says which
    have ended; they are scored by processes as they end, on one host each. What computes on the
    mesh scores all groups of a step at once."""

    def __init__(self, player: ResponsesInFlight | EpisodesInFlight, clock: Clock):
        self.player, self.clock = player, clock
        self._groups: dict[int, Group] = {}
        # Requests to this host's processes: group, members, pending scores, time.
        self._asked: list[tuple[Group, list[int], Pending, int]] = []
        self._owed = 0  # scores that the hosts were asked for
        self._complete: list[int] = []

    def prepare(self, actor, rows: int) -> None:
        """Makes the sampler if there is none: slots for `rows` rows, or as many as the config says.
        What is in flight goes on there."""
        if not self.player.is_open:
            self.player.make_sampler(actor, rows, self._groups.values())
            self._use = SlotUse(self.player.sampler)
            for group in self._groups.values():
                self._settle(group)

    # -- groups come

    def begin(self, ticket: int, at: int, prompts: Prompts, key) -> None:
        """Begins the group of a ticket: prompt number `at` of the step that has this key."""
        group = self._groups[ticket] = Group(ticket, prompts, at, RequestKeys(key))
        self.player.begin(group)

    def dispatch(self, weights, version: int, keep_cache: bool) -> bool:
        """Decodes one dispatch, or waits a little if nothing is left to decode. Returns
        whether it decoded."""
        return self.player.dispatch(weights, version, keep_cache, self._ended)

    def _ended(self, ticket: int) -> None:
        """Handles the end of a member of the group of this ticket."""
        if ticket in self._groups:
            self._settle(self._groups[ticket])

    def _settle(self, group: Group) -> None:
        """Asks for the scores of members that have ended, or notes that the group is complete."""
        player, members = self.player, self.player.members(group)
        ended = [i for i, member in enumerate(members) if player.has_ended(member)]
        all_ended = len(ended) == len(members)
        unscored = [i for i in ended if player.wants_score(members[i]) and i not in group.scores]
        if not unscored:
            if all_ended and not group.complete:
                group.complete = True
                self._complete.append(group.ticket)
            return
        unasked = [i for i in unscored if i not in group.asked]
        if not player.pool.grouped:
            for i in unasked:
                self._ask(group, [i], player.is_here(group, i))
        elif all_ended and unasked:
            self._ask(group, unasked, group.ticket % hosts.count() == hosts.index())

    def _ask(self, group: Group, members: list[int], is_here: bool) -> None:
        group.asked.update(members)
        self._owed += len(members)
        if is_here:
            rows = [self.player.fields(group, i, group.ticket) for i in members]
            self._asked.append((group, members, self.player.pool.submit(rows), self.clock.now))

    # -- groups go

    def ended(self) -> list[int]:
        """Returns the tickets whose members have all ended and been scored since the last call: the
        same on every host."""
        scored, waiting = [], []
        for request in self._asked:
            group, members, pending, since = request
            if not self.clock.due(since, pending.done):
                waiting.append(request)
                continue
            for i, score in zip(members, pending.result(), strict=True):
                scored.append((group.ticket, i, told_score(score)))
        self._asked = waiting
        for ticket, i, score in self._of_all_hosts(scored):
            self._groups[ticket].scores[i] = score_of(score)
            self._owed -= 1
            self._settle(self._groups[ticket])
        complete, self._complete = sorted(self._complete), []
        return complete

    def _of_all_hosts(self, scores: list) -> list:
        """Gathers the scores that each host has received; nothing is exchanged where no score is
        expected."""
        return [score for host in hosts.gather(scores) for score in host] if self._owed else []

    def is_live(self, ticket: int) -> bool:
        """Returns whether the scores of a complete group differ within a seat."""
        pairs = self.player.seat_values(self._groups[ticket])
        return len(pairs) > len({seat for seat, _ in pairs})

    def tokens(self, ticket: int) -> int:
        """Counts the tokens of a group that the policy drew."""
        return self.player.tokens(self._groups[ticket])

    def drop(self, ticket: int) -> None:
        """Drops a complete group, from which nobody learns."""
        self.player.drop(self._groups.pop(ticket))

    def collect(self, tickets: list[int], mesh) -> tuple[Batch, RewardReport, Prompts]:
        """Returns the batch of complete groups, in the order of `tickets`, on the mesh: B = groups
        x samples of a group rows."""
        groups = [self._groups.pop(ticket) for ticket in tickets]
        prompts = functools.reduce(Prompts.joined, (group.prompts for group in groups))
        return (*self.player.collect(groups, prompts, mesh), prompts)

    def metrics(self) -> dict[str, float]:
        """Returns how busy the slots were since the last call, and how full pages and drafts
        were."""
        return self._use.taken()

    # -- a checkpoint

    @property
    def tickets(self) -> set[int]:
        """Returns the tickets of the groups that began and were not taken."""
        return set(self._groups)

    def get_state(self) -> dict:
        """Returns every group that began and was not taken, as JSON."""
        saved = {}
        for ticket, group in self._groups.items():
            record, first = group.prompts.records[0], self.player.first(group)
            saved[str(ticket)] = {
                "record": {name: getattr(record, name) for name in _FINDING},
                **self.player.get_state(group),
                "scores": {str(first + i): told_score(s) for i, s in group.scores.items()},
            }
        return saved

    def set_state(self, state: dict, find: Callable[[dict], Prompts]) -> None:
        """Goes on from `get_state` with a sampler that will have read nothing. `find` brings the
        prompt of a saved record."""
        groups = {}
        for ticket, saved in sorted((int(ticket), saved) for ticket, saved in state.items()):
            group = groups[ticket] = Group(ticket, find(saved["record"]))
            first = self.player.first(group)
            group.scores = {int(i) - first: score_of(score) for i, score in saved["scores"].items()}
            group.asked = set(group.scores)
            self.player.set_state(group, saved)
        for _, _, pending, _ in self._asked:
            pending.cancel()
        self._groups, self._asked, self._owed = groups, [], 0
        self.read_again()

    def read_again(self) -> None:
        """Reads again what was decoded, by a sampler that has read nothing."""
        self.player.pause(self._groups.values())
        self.clock.now, self._complete = 0, []
        for group in self._groups.values():
            group.complete = False
        # Scores that are asked for count as if they were asked for now.
        self._asked = [(group, members, pending, 0) for group, members, pending, _ in self._asked]

    def versions(self) -> set[int]:
        """Returns the versions of all tokens in flight, after `set_state`."""
        return {v for group in self._groups.values() for v in self.player.versions(group)}


class SlotUse:
    """Measures how busy the slots of a sampler are between two looks."""

    def __init__(self, sampler: Sampler):
        self.sampler, self._seen = sampler, (0, 0, 0, 0)

    def taken(self) -> dict[str, float]:
        """Returns how busy the slots were since the last call; how full pages and drafts
        were so far."""
        sampler = self.sampler
        counts = (sampler.dispatches, sampler.slot_steps, sampler.live_slot_steps)
        counts = (*counts, sampler.reread_tokens)
        changes = (a - b for a, b in zip(counts, self._seen, strict=True))
        (dispatches, steps, live, reread), self._seen = changes, counts
        return {
            "slots/live_share": live / max(steps, 1),
            "slots/dispatches": float(dispatches),
            "slots/decode_steps": float(steps // sampler.engine.slots),
            "slots/reread_tokens": float(reread),
            **sampler.page_metrics(),
            **sampler.draft_metrics(),
        }
