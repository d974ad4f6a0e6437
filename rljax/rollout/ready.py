"""Ready: what stands where a reward does while a rollout is called for a step whose samples were
decoded in flight."""

from collections.abc import Callable

from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.rollout.report import RewardReport
from rljax.sampler import Sampling


class Ready:
    """The scored batch of `prompts`, `n` samples of `actor` by `sampling`; of anything else the
    `reward` itself. Every rollout that asks `sample_scored` for these finds the batch, and knows
    nothing of it."""

    def __init__(
        self, reward: Callable, prompts: Prompts, batch: Batch, report: RewardReport, *,
        actor, sampling: Sampling, n: int,
    ):  # fmt: skip
        self.reward, self.prompts = reward, prompts
        self.actor, self.sampling, self.n = actor, sampling, n
        self._done: tuple[Batch, RewardReport] | None = (batch, report)

    def has(self, actor, prompts: Prompts, sampling: Sampling, n: int) -> bool:
        """Whether the batch is what somebody asks for. (The greedy responses of the same prompts,
        and those of an opponent, are not.)"""
        same = actor is self.actor and prompts is self.prompts
        return same and (sampling, n) == (self.sampling, self.n) and not self.taken

    @property
    def taken(self) -> bool:
        return self._done is None

    def take(self) -> tuple[Batch, RewardReport]:
        """The batch and the report, once."""
        done, self._done = self._done, None
        return done

    def __call__(self, batch: Batch, prompts: Prompts, **options) -> tuple[Batch, RewardReport]:
        return self.reward(batch, prompts, **options)
