"""Scores of episodes: the total return of each seat, by the environment or a reward."""

import functools

import numpy as np

from rljax import hosts
from rljax.errors import InputError
from rljax.reasoning import response_of
from rljax.rewards.pool.pool import RewardPool, Score
from rljax.rollout.players.episodes.log import EpisodeRules, Trajectory
from rljax.rollout.scoring.report import RewardInput
from rljax.rollout.scoring.reward import Reward, of_all_hosts, sample_of


def is_unscored(episode: Trajectory) -> bool:
    """Returns whether a reward function scores the last turn of an episode that has ended."""
    return not episode.failure and episode.outcome is None


def pool_of(reward: Reward) -> RewardPool:
    """Returns the processes that score episodes. Raises InputError for a reward that
    reads whole batches."""
    if reward.row_pool is None:
        raise InputError(
            "a reward model or a judge on the mesh cannot score episodes",
            value=reward.pool and type(reward.pool).__name__,
            rule="it reads whole batches of single responses",
            fix="a reward function, a judge that asks a server, or an outcome of the "
            "environment's own",
        )
    return reward.row_pool


def episode_sample(episode: Trajectory, tokenizer, rubrics) -> RewardInput:
    """Returns what a reward function may read of an episode: its last turn, and the whole of it."""
    log = episode.speaker
    ids = [] if log is None or not log.turns else log.sample.ids[log.turns[-1].start :]
    asked = (episode.record.prompt_text, episode.record.messages)
    text = functools.partial(response_of, tokenizer, ids, *asked)
    sample = sample_of(episode.record, text, ids, episode.finish, episode.prompt, rubrics)
    turns = [turn for one in episode.logs for turn in one.turns]
    said = []
    for turn in turns:
        said += [*turn.observation, {"role": "assistant", "content": turn.text}]
    return sample.adding(conversation=said, turns=len(turns), calls=episode.calls)


def seat_scores(
    episode: Trajectory, rules: EpisodeRules, of_reward: dict[int, Score]
) -> list[Score]:
    """Returns the total return of each seat: the rewards of its turns, and the outcome, that of the
    reward function in `of_reward` if the episode has none."""
    if episode.failure:
        why = f"{episode.kind}: {episode.failure}"
        return [Score(np.nan, {}, "error", episode.seconds, why)] * len(rules.seats)
    given = of_reward[episode.number] if is_unscored(episode) else None
    if given is not None and given.status != "ok":
        return [given] * len(rules.seats)
    found = []
    for seat, name in enumerate(rules.seats):
        outcome = given.value if given is not None else float(episode.outcome.get(name, 0.0))
        logs = [log for log in episode.logs if log.seat == seat]
        paid = sum(turn.reward for log in logs for turn in log.turns)
        parts = episode.parts | ({} if given is None else given.parts)
        parts |= {"outcome": outcome, "turn_rewards": float(paid)}
        found.append(Score(outcome + paid, parts, "ok", episode.seconds))
    return found


class Outcomes:
    """The scores by reward functions of episodes that are played at once, asked for as they end, by
    the host that played them. `environment` is an Environment."""

    def __init__(self, player):
        self.player = player
        self._pending: dict[int, tuple] = {}  # by the number of the episode

    def ended(self, episode: Trajectory) -> None:
        """Submits an episode that a reward function scores."""
        if is_unscored(episode) and episode.is_here:
            pool = pool_of(self.player.open_reward())
            if not pool.grouped:
                self._pending[episode.number] = pool.submit([self.player.fields(episode)])

    def cancel(self) -> None:
        """Cancels what is not scored yet."""
        for pending in self._pending.values():
            pending.cancel()

    def scores(self, episodes: list[Trajectory]) -> dict[int, Score]:
        """Returns the score of every episode that a reward function scores, by its number."""
        asked = [episode for episode in episodes if is_unscored(episode)]
        if not asked:
            return {}
        pool = pool_of(self.player.open_reward())
        mine = [episode for episode in asked if episode.is_here]
        if pool.grouped:  # a group is scored where its first sample is
            mine = [e for e in asked if e.prompt % hosts.count() == hosts.index()]
        late = [episode for episode in mine if episode.number not in self._pending]
        scored = pool.score([self.player.fields(episode) for episode in late])
        own = {episode.number: score for episode, score in zip(late, scored, strict=True)}
        own |= {number: of.result()[0] for number, of in self._pending.items()}
        return own if hosts.count() == 1 else of_all_hosts(own)
