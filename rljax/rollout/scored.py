"""sample_scored: prompts -> scored trajectories, whatever scores them."""

from collections.abc import Callable

import jax

from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.rollout.environment import Environment
from rljax.rollout.episode_tree import Tree
from rljax.rollout.ready import Ready
from rljax.rollout.report import RewardReport
from rljax.rollout.reward import EarlyScores, Reward


def sample_scored(
    actor, reward: Callable, prompts: Prompts, key: jax.Array, sampling, *, n: int = 1,
    enough: Callable[[EarlyScores], bool] | None = None, tree: Tree | None = None,
) -> tuple[Batch, RewardReport]:  # fmt: skip
    """Returns reward(actor.generate(prompts, key, sampling, n=n), prompts). Rows are scored as they
    end, while others still decode. Once `enough`, a function of the early scores, is true, the rows
    that still decode are aborted and not scored: on several hosts it reads nothing but these, so
    that all of them stop at the same turn.

    `reward` may be any function (batch, prompts) -> (batch, report); only a `Reward` scores early.
    With an `Environment` every sample is an episode, and all are played to their ends; a `tree`
    says where they branch (n: of its leaves), and the rows are those of its nodes. `Ready`
    brings samples of these prompts that were decoded in flight.
    """
    if isinstance(reward, Ready):
        if reward.has(actor, prompts, sampling, n):
            return reward.take()
        reward = reward.reward
    if isinstance(reward, Environment):
        return reward.play(actor, prompts, key, sampling, n=n, tree=tree)
    early = reward.start_early(prompts, n) if isinstance(reward, Reward) else None
    if early is None:
        return reward(actor.generate(prompts, key, sampling, n=n), prompts)

    def stop() -> bool:
        early.stopped = enough(early)
        return early.stopped

    options = {} if enough is None else {"stop": stop}
    try:
        batch = actor.generate(prompts, key, sampling, n=n, finished=early.finished, **options)
        return reward(batch, prompts, early=early)
    except BaseException:  # a Ctrl-C, say
        early.cancel()
        raise
