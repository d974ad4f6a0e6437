"""Scores of episodes: the total return of each seat, by the environment or a reward."""

import functools

import numpy as np

from rljax import hosts
from rljax.errors import InputError
from rljax.reasoning import response_of
from rljax.rewards.pool.pool import RewardPool, Score
from rljax.rollout.players.episodes.log import EpisodeRules, Trajectory, summed_parts
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
    prompt = (episode.record.prompt_text, episode.record.messages)
    text = functools.partial(response_of, tokenizer, ids, *prompt)
    sample = sample_of(episode.record, text, ids, episode.finish, episode.prompt, rubrics)
    turns = [turn for seat_log in episode.logs for turn in seat_log.turns]
    conversation = []
    for turn in turns:
        conversation += [*turn.observation, {"role": "assistant", "content": turn.text}]
    return sample.adding(conversation=conversation, turns=len(turns), calls=episode.calls)


def seat_scores(
    episode: Trajectory, rules: EpisodeRules, of_reward: dict[int, Score]
) -> list[Score]:
    """Returns the total return of each seat: the rewards of its turns, and the outcome, that of the
    reward function in `of_reward` if the episode has none."""
    if episode.failure:
        message = f"{episode.kind}: {episode.failure}"
        return [Score(np.nan, {}, "error", episode.seconds, message)] * len(rules.seats)
    reward_score = of_reward[episode.number] if is_unscored(episode) else None
    if reward_score is not None and reward_score.status != "ok":
        return [reward_score] * len(rules.seats)
    scores = []
    for seat, name in enumerate(rules.seats):
        outcome = (
            reward_score.value
            if reward_score is not None
            else float(episode.outcome.get(name, 0.0))
        )
        logs = [log for log in episode.logs if log.seat == seat]
        paid = sum(turn.reward for log in logs for turn in log.turns)
        parts = summed_parts(episode.parts, {} if reward_score is None else reward_score.parts)
        parts |= {"outcome": outcome, "turn_rewards": float(paid)}
        scores.append(Score(outcome + paid, parts, "ok", episode.seconds))
    return scores


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
        unscored = [episode for episode in episodes if is_unscored(episode)]
        if not unscored:
            return {}
        pool = pool_of(self.player.open_reward())
        local = [episode for episode in unscored if episode.is_here]
        if pool.grouped:  # a group is scored where its first sample is
            local = [e for e in unscored if e.prompt % hosts.count() == hosts.index()]
        late = [episode for episode in local if episode.number not in self._pending]
        scored = pool.score([self.player.fields(episode) for episode in late])
        scores = {episode.number: score for episode, score in zip(late, scored, strict=True)}
        scores |= {number: pending.result()[0] for number, pending in self._pending.items()}
        return scores if hosts.count() == 1 else of_all_hosts(scores)
