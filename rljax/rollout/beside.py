"""A reward, and beside it a reference on other devices."""

from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.roles.placed import PlacedReference
from rljax.rollout.reward import EarlyScores, Reward, RewardReport
from rljax.tracking.timing import timed


class BesideReference(Reward):
    """The same reward; while it scores a batch, the reference computes its log-probs, which the
    batch has afterwards."""

    def __init__(self, reward: Reward, reference: PlacedReference):
        vars(self).update(vars(reward), reference=reference)

    def __call__(
        self, batch: Batch, prompts: Prompts, *, early: EarlyScores | None = None
    ) -> tuple[Batch, RewardReport]:
        with timed("reward"):
            begun = self.reference.start(batch)
        batch, report = super().__call__(batch, prompts, early=early)
        with timed("reward"):
            return self.reference.finish(batch, begun), report
