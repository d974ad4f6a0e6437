"""Ready: what stands where a reward does while a rollout is called for a step whose samples were
decoded in flight."""

from collections.abc import Callable

from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.rollout.report import RewardReport


class Ready:
    """The scored batch of `prompts`; of anything else the `reward` itself. Every rollout that
    samples by `sample_scored` finds the batch by its prompts, and knows nothing of it."""

    def __init__(self, reward: Callable, prompts: Prompts, batch: Batch, report: RewardReport):
        self.reward, self.prompts = reward, prompts
        self._done: tuple[Batch, RewardReport] | None = (batch, report)

    @property
    def taken(self) -> bool:
        return self._done is None

    def take(self) -> tuple[Batch, RewardReport]:
        """The batch and the report, once."""
        done, self._done = self._done, None
        return done

    def __call__(self, batch: Batch, prompts: Prompts, **options) -> tuple[Batch, RewardReport]:
        return self.reward(batch, prompts, **options)
