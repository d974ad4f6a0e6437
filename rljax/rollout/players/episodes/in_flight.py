"""Episodes in flight: those of a group are played by one driver that lives over steps."""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout.players.clock import Clock
from rljax.rollout.players.episodes.driver import IN_FLIGHT, Driver
from rljax.rollout.players.episodes.episodes import Episodes
from rljax.rollout.players.episodes.log import Trajectory
from rljax.rollout.players.episodes.outcomes import is_unscored, pool_of, seat_scores
from rljax.rollout.rollout import RolloutConfig
from rljax.rollout.scoring.report import RewardReport
from rljax.sampler import Engine, Sampler
from rljax.sampler.inputs import RequestKeys
from rljax.sampler.sample import Sample
from rljax.tracking.timing import timed


class EpisodesInFlight:
    """The player of episodes that outlive their step. One that its environment does not score is
    scored by a reward function in processes, as it ends."""

    scores_early = True  # a group's scores are known before it is taken

    def __init__(self, player: Episodes, cfg: RolloutConfig, clock: Clock):
        self.player, self.cfg, self.clock = player, cfg, clock
        self.n = cfg.samples_per_prompt
        self.each = player.episodes_of_a_prompt(self.n)
        self.driver: Driver | None = None
        self._engine: Engine | None = None
        self._dropped: list[Trajectory] = []  # since the last step was taken

    @property
    def pool(self) -> RewardPool:
        """Processes that score the episodes."""
        return pool_of(self.player.open_reward())

    @property
    def is_open(self) -> bool:
        """Returns whether there is a driver, and so a sampler."""
        return self.driver is not None

    @property
    def sampler(self) -> Sampler:
        """The driver's sampler."""
        return self.driver.sampler

    def make_sampler(self, actor, rows: int, groups: Iterable) -> None:
        """Makes the driver, in which the episodes of these groups go on: environments are played up
        to where they stood. Those that say something else each time begin anew."""
        player, rules = self.player, self.player.rules_of(self.cfg.sampling)
        self._engine = self._engine or player.engine(actor, rows)
        sampler = player.sampler(self._engine)
        self.driver = Driver(sampler, player.crew, rules, IN_FLIGHT, self.clock)
        unfinished = []
        for group in groups:
            states, group.stood = group.stood["episodes"], None
            for episode, state in zip(self._new_episodes(group), states, strict=True):
                unfinished += self._brought_to(episode, state)
        sampler.restore(unfinished)

    def pause(self, groups: Iterable) -> None:
        """Lets the next driver go on from where episodes stand."""
        if self.driver is not None:
            for group in groups:
                group.stood = self.get_state(group)
            self.driver.close()
        self.driver, self._dropped = None, []

    def begin(self, group) -> None:
        """Begins the episodes of a group."""
        for episode in self._new_episodes(group):
            self.driver.admit(episode)

    def _new_episodes(self, group) -> list[Trajectory]:
        return self.player.episodes(group.prompts, group.ticket, group.at, group.keys, self.n)

    def dispatch(self, weights, version: int, keep_cache: bool, ended: Callable) -> bool:
        """Acts on what environments have said, waiting a little if nothing is left to decode,
        and decodes one dispatch. Returns whether it did. Calls ended(ticket) for each episode
        that has ended."""
        for ticket in dict.fromkeys(episode.prompt for episode in self.driver.look()):
            ended(ticket)
        return self.driver.dispatch(weights, version, keep_cache)

    # -- what a flight asks of a group

    def members(self, group) -> list[Trajectory]:
        """Returns the episodes of a group."""
        first = self.first(group)
        return [self.driver.episodes[number] for number in range(first, first + self.each)]

    def first(self, group) -> int:
        """Returns the number of a group's first episode."""
        return group.ticket * self.each

    def has_ended(self, episode: Trajectory) -> bool:
        """Returns whether an episode has ended."""
        return episode.finish is not None

    def wants_score(self, episode: Trajectory) -> bool:
        """Returns whether processes score it."""
        return is_unscored(episode)

    def is_here(self, group, i: int) -> bool:
        """Returns whether this host has its member scored."""
        return self.members(group)[i].is_here

    def fields(self, group, i: int, number: int):
        """Returns what the reward reads of episode i."""
        return self.player.fields(self.members(group)[i])

    def _scores(self, groups: Iterable) -> dict:
        """The scores of the members that have one, by the numbers of the episodes."""
        pairs = [(self.first(g) + i, score) for g in groups for i, score in g.scores.items()]
        return dict(pairs)

    def seat_values(self, group) -> set[tuple[int, float]]:
        """Returns the known scores, each with its seat."""
        scores, rules = self._scores([group]), self.player.rules
        episode_scores = [seat_scores(episode, rules, scores) for episode in self.members(group)]
        return {
            (seat, s.value)
            for seats in episode_scores
            for seat, s in enumerate(seats)
            if s.status == "ok"
        }

    def tokens(self, group) -> int:
        """Counts the tokens of a group that the policy drew."""
        logs = [log for episode in self.members(group) for log in episode.logs]
        return sum(int(np.count_nonzero(log.sample.chosen)) for log in logs)

    def drop(self, group) -> None:
        """Drops the episodes of a group."""
        self._dropped += self._taken(group)

    def _taken(self, group) -> list[Trajectory]:
        members = self.members(group)
        for episode in members:
            del self.driver.episodes[episode.number]
        return members

    def collect(self, groups: list, prompts: Prompts, mesh) -> tuple[Batch, RewardReport]:
        """Returns the batch of complete groups, in this order. Raises InputError if too many
        episodes have failed."""
        episodes = [episode for group in groups for episode in self._taken(group)]
        self.player.refuse_failures(self._dropped + episodes)
        self._dropped = []
        self.driver.rest()
        group_index = np.repeat(np.arange(len(groups)), self.each).tolist()
        with timed("reward"):
            return self.player.reported(self.driver, episodes, self._scores(groups), group_index)

    # -- a checkpoint

    def get_state(self, group) -> dict:
        """Returns the episodes of a group as JSON."""
        if group.stood is not None:
            return group.stood
        return {
            "at": group.at,
            "key": fetch(jax.random.key_data(group.keys.root)).tolist(),
            "episodes": [e.get_state(self.driver.seconds) for e in self.members(group)],
        }

    def set_state(self, group, saved: dict) -> None:
        """Goes on from `get_state`. Raises InputError if the episodes of a checkpoint are not
        of this run."""
        if len(saved["episodes"]) != self.each:
            rule = f"the prompts in flight have {len(saved['episodes'])} episodes, not {self.each}"
            raise InputError("batch.samples_per_prompt", value=self.n, rule=rule, fix="as it was")
        group.at = int(saved["at"])
        group.keys = RequestKeys(jax.random.wrap_key_data(np.asarray(saved["key"], np.uint32)))
        group.stood = {name: saved[name] for name in ("at", "key", "episodes")}
        rules = self.player.rules_of(self.cfg.sampling)
        for episode, state in zip(self._new_episodes(group), saved["episodes"], strict=True):
            episode.set_state(state, rules.sampling)
            tokens = max((log.tokens for log in episode.logs), default=0)
            if tokens > (most := rules.limits.max_tokens):
                rule = f"an episode in flight has a log of {tokens} tokens"
                fix = f"--config.environment.max_tokens={tokens}, or more"
                raise InputError("environment.max_tokens", value=most, rule=rule, fix=fix)

    def versions(self, group) -> set[int]:
        """Returns the versions of the tokens that the policy wrote, after `set_state`."""
        logs = [log["sample"] for episode in group.stood["episodes"] for log in episode["logs"]]
        samples = [Sample.from_state(state, self.cfg.sampling) for state in logs]
        sampled_versions = [sample.versions[sample.chosen] for sample in samples]
        return {int(version) for versions in sampled_versions for version in np.unique(versions)}

    def _brought_to(self, episode: Trajectory, state: dict) -> list[Sample]:
        """Plays a new episode on from where one stood -> its samples that are in the sampler."""
        repeatable = spec(self.player.crew.component).repeatable
        if state["finish"] is not None or repeatable:
            episode.set_state(state, self.driver.rules.sampling)
        self.driver.admit(episode)
        last = {log.seat: log.sample for log in episode.logs}  # the earlier ones have ended
        return [] if episode.finish is not None else list(last.values())
