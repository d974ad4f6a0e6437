"""Episodes in flight: groups of episodes of one prompt each, which began at different steps."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from rljax import hosts
from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.rewards.pool.pool import Pending, Score
from rljax.rollout.flight.responses import SlotUse, saved_record, score_of, told_score
from rljax.rollout.players.clock import Clock
from rljax.rollout.players.episodes.driver import IN_FLIGHT, Driver
from rljax.rollout.players.episodes.episodes import Episodes as Player
from rljax.rollout.players.episodes.log import Episode
from rljax.rollout.players.episodes.outcomes import is_unscored, pool_of, seat_scores
from rljax.rollout.rollout import RolloutConfig
from rljax.rollout.scoring.report import RewardReport
from rljax.sampler import Engine
from rljax.sampler.keys import Keys
from rljax.sampler.sample import Sample
from rljax.tracking.timing import timed


@dataclasses.dataclass(eq=False)
class _Group:
    """The episodes of one prompt, number `at` of the step that has these keys."""

    ticket: int
    at: int
    prompts: Prompts  # one
    keys: Keys
    # By the number of the episode, of those that a reward function scores.
    scores: dict[int, Score] = dataclasses.field(default_factory=dict)
    complete: bool = False


class Episodes:
    """What a source in flight plays where the run has an environment: `Responses` of several turns.

    An episode that its environment does not score is scored by a reward function in processes, as
    it ends.
    """

    scores_early = True  # a group's scores are known before it is taken

    def __init__(self, environment: Player, cfg: RolloutConfig, clock: Clock):
        self.environment, self.cfg, self.clock = environment, cfg, clock
        self.n = cfg.samples_per_prompt
        self.each = environment.samples_of_a_prompt(self.n)
        self.driver: Driver | None = None
        self._engine: Engine | None = None
        # What `prepare` goes on from: the prompt and the saved group of each ticket.
        self._stood: dict[int, tuple[Prompts, dict]] = {}
        self._groups: dict[int, _Group] = {}
        # What this host's processes were asked for: group, episodes, and when.
        self._asked: list[tuple[_Group, list[int], Pending, int]] = []
        self._owed = 0  # scores that the hosts were asked for
        self._complete: list[int] = []
        self._dropped: list[Episode] = []  # since the last step was taken

    def prepare(self, actor, rows: int) -> None:
        """Makes the sampler where there is none: slots for `rows` logs, or as many as the config
        says. What is in flight goes on there, and environments are played up to where they stood.
        Those that say something else each time begin anew."""
        if self.driver is not None:
            return
        of, rules = self.environment, self.environment.rules_of(self.cfg.sampling)
        self._engine = self._engine or of.engine(actor, rows)
        sampler = of.sampler(self._engine)
        self.driver = Driver(sampler, of.crew, rules, IN_FLIGHT, self.clock)
        self._use = SlotUse(sampler)
        stood, self._stood, unfinished = self._stood, {}, []
        for ticket, (prompts, saved) in stood.items():
            group = self._groups[ticket] = _group(ticket, prompts, saved)
            members = self._new_episodes(group)
            for episode, state in zip(members, saved["episodes"], strict=True):
                unfinished += self._brought_to(episode, state)
            self._settle(group, [e for e in members if e.finish is not None])
        sampler.restore(unfinished)

    # -- groups come

    def begin(self, ticket: int, at: int, prompts: Prompts, key) -> None:
        """Begins the group of a ticket: prompt number `at` of the step that has this key."""
        group = self._groups[ticket] = _Group(ticket, at, prompts, Keys(key))
        for episode in self._new_episodes(group):
            self.driver.admit(episode)

    def _new_episodes(self, group: _Group) -> list[Episode]:
        return self.environment.episodes(
            group.prompts, group.ticket, group.at, group.keys, self.n
        )  # fmt: skip

    def dispatch(self, weights, version: int, keep_cache: bool) -> bool:
        """Acts on what environments have said, waiting a little where nothing is left to decode,
        and decodes one dispatch; whether it did."""
        ended = self.driver.look()
        for ticket in dict.fromkeys(episode.prompt for episode in ended):
            if ticket in self._groups:
                self._settle(self._groups[ticket], [e for e in ended if e.prompt == ticket])
        return self.driver.dispatch(weights, version, keep_cache)

    def _settle(self, group: _Group, ended: list[Episode]) -> None:
        """Asks for the scores of those that have `ended`, or notes that the group is complete."""
        missing, whole = self._missing(group)
        if not missing:
            self._note_complete(group, whole)
            return
        pool = pool_of(self.environment.open_reward())
        if not pool.grouped:
            for episode in ended:
                if episode in missing:
                    self._ask(group, [episode], episode.is_here)
        elif whole:
            self._ask(group, missing, group.ticket % hosts.count() == hosts.index())

    def _missing(self, group: _Group) -> tuple[list[Episode], bool]:
        """The episodes that have ended and need a score; and whether all have ended."""
        members = self._members(group)
        ended = [episode for episode in members if episode.finish is not None]
        missing = [e for e in ended if is_unscored(e) and e.number not in group.scores]
        return missing, len(ended) == len(members)

    def _members(self, group: _Group) -> list[Episode]:
        first = group.ticket * self.each
        return [self.driver.episodes[number] for number in range(first, first + self.each)]

    def _note_complete(self, group: _Group, whole: bool) -> None:
        if whole and not group.complete:
            group.complete = True
            self._complete.append(group.ticket)

    def _ask(self, group: _Group, episodes: list[Episode], here: bool) -> None:
        self._owed += len(episodes)
        if here:
            pool = pool_of(self.environment.open_reward())
            pending = pool.submit([self.environment.fields(episode) for episode in episodes])
            numbers = [episode.number for episode in episodes]
            self._asked.append((group, numbers, pending, self.clock.now))

    # -- groups go

    def ended(self) -> list[int]:
        """The tickets whose episodes have all ended and been scored since the last call: the same
        on every host."""
        told, waiting = [], []
        for asked in self._asked:
            group, numbers, pending, since = asked
            if not self.clock.due(since, pending.done):
                waiting.append(asked)
                continue
            for number, score in zip(numbers, pending.result(), strict=True):
                told.append((group.ticket, number, told_score(score)))
        self._asked = waiting
        for ticket, number, score in self._of_all_hosts(told):
            group = self._groups[ticket]
            group.scores[number] = score_of(score)
            self._owed -= 1
            missing, whole = self._missing(group)
            self._note_complete(group, whole and not missing)
        complete, self._complete = sorted(self._complete), []
        return complete

    def _of_all_hosts(self, told: list) -> list:
        """What any host was told; nothing is exchanged where no score is owed."""
        return [one for host in hosts.gather(told) for one in host] if self._owed else []

    def is_live(self, ticket: int) -> bool:
        """Whether the scores of a complete group differ within a seat."""
        group, pairs = self._groups[ticket], set()
        for episode in self._members(group):
            scores = seat_scores(episode, self.environment.rules, group.scores)
            pairs |= {(seat, s.value) for seat, s in enumerate(scores) if s.status == "ok"}
        return len(pairs) > len({seat for seat, _ in pairs})

    def tokens(self, ticket: int) -> int:
        """How many tokens the turns of a group have."""
        logs = [log for episode in self._members(self._groups[ticket]) for log in episode.logs]
        return sum(int(np.count_nonzero(log.sample.chosen)) for log in logs)

    def drop(self, ticket: int) -> None:
        """Nobody learns from a complete group."""
        self._dropped += self._taken(ticket)
        del self._groups[ticket]

    def _taken(self, ticket: int) -> list[Episode]:
        members = self._members(self._groups[ticket])
        for episode in members:
            del self.driver.episodes[episode.number]
        return members

    def collect(self, tickets: list[int], mesh) -> tuple[Batch, RewardReport, Prompts]:
        """The batch of complete groups, in this order. Raises InputError where too many episodes
        have failed."""
        episodes = [episode for ticket in tickets for episode in self._taken(ticket)]
        groups = [self._groups.pop(ticket) for ticket in tickets]
        prompts = groups[0].prompts
        for group in groups[1:]:
            prompts = prompts.joined(group.prompts)
        self.environment.refuse_failures(self._dropped + episodes)
        self._dropped = []
        self.driver.rest()
        scores = {number: score for group in groups for number, score in group.scores.items()}
        with timed("reward"):
            of = np.repeat(np.arange(len(groups)), self.each).tolist()
            done = self.environment.reported(self.driver, episodes, scores, of)
        return (*done, prompts)

    def metrics(self) -> dict[str, float]:
        """How busy the slots were since the last call; the rest is in the report."""
        return self._use.taken()

    # -- a checkpoint

    @property
    def tickets(self) -> set[int]:
        """Of the groups that began and were not taken."""
        return set(self._groups) | set(self._stood)

    def get_state(self) -> dict:
        """Every group that began and was not taken, as JSON."""
        if self._stood:
            return {str(ticket): saved for ticket, (_, saved) in self._stood.items()}
        return {
            str(ticket): {
                "record": saved_record(group.prompts.records[0]),
                "at": group.at,
                "key": fetch(jax.random.key_data(group.keys.root)).tolist(),
                "episodes": [e.get_state(self.driver.seconds) for e in self._members(group)],
                "scores": {str(i): told_score(score) for i, score in group.scores.items()},
            }
            for ticket, group in self._groups.items()
        }

    def set_state(self, state: dict, find: Callable[[dict], Prompts]) -> None:
        """Goes on from `get_state`, with a sampler that will have read nothing. `find` brings the
        prompt of a saved record."""
        stood, rules = {}, self.environment.rules_of(self.cfg.sampling)
        for ticket, saved in sorted((int(ticket), saved) for ticket, saved in state.items()):
            stood[ticket] = prompts, _ = find(saved["record"]), saved
            if len(saved["episodes"]) != self.each:
                rule = (
                    f"the prompts in flight have {len(saved['episodes'])} episodes, not {self.each}"
                )
                raise InputError(
                    "batch.samples_per_prompt", value=self.n, rule=rule, fix="as it was"
                )
            members = self._new_episodes(_group(ticket, prompts, saved))
            for episode, one in zip(members, saved["episodes"], strict=True):
                episode.set_state(one, rules.sampling)
                if (tokens := max((log.tokens for log in episode.logs), default=0)) > (
                    most := rules.limits.max_tokens
                ):
                    rule = f"an episode in flight has a log of {tokens} tokens"
                    raise InputError(
                        "environment.max_tokens",
                        value=most,
                        rule=rule,
                        fix=f"--config.environment.max_tokens={tokens}, or more",
                    )
        self._forget(stood)

    def read_again(self) -> None:
        """What was decoded is read again, by a sampler that has read nothing."""
        state = self.get_state() if self.driver is not None else {}
        if state:
            self._forget({t: (self._groups[t].prompts, state[str(t)]) for t in self._groups})

    def _forget(self, stood: dict[int, tuple[Prompts, dict]]) -> None:
        for _, _, pending, _ in self._asked:
            pending.cancel()
        if self.driver is not None:
            self.driver.close()
        self.driver, self.clock.now, self._owed, self._stood = None, 0, 0, stood
        self._groups, self._asked, self._complete, self._dropped = {}, [], [], []

    def versions(self) -> set[int]:
        """Of all tokens in flight that the policy wrote, after `set_state`."""
        logs = [log["sample"] for _, saved in self._stood.values()
                for episode in saved["episodes"] for log in episode["logs"]]  # fmt: skip
        samples = [Sample.from_state(one, self.cfg.sampling) for one in logs]
        written = [sample.versions[sample.chosen] for sample in samples]
        return {int(version) for of_sample in written for version in np.unique(of_sample)}

    def _brought_to(self, episode: Episode, stood: dict) -> list:
        """Plays a new episode on from where one stood -> its samples that are in the sampler."""
        repeatable = spec(self.environment.crew.component).repeatable
        if stood["finish"] is not None or repeatable:
            episode.set_state(stood, self.driver.rules.sampling)
        self.driver.admit(episode)
        last = {log.seat: log.sample for log in episode.logs}  # the earlier ones have ended
        return [] if episode.finish is not None else list(last.values())


def _group(ticket: int, prompts: Prompts, saved: dict) -> _Group:
    """The group of a state, without its episodes."""
    key = jax.random.wrap_key_data(np.asarray(saved["key"], np.uint32))
    scores = {int(i): score_of(told) for i, told in saved["scores"].items()}
    return _Group(ticket, int(saved["at"]), prompts, Keys(key), scores)
