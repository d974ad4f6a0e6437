"""Responses: trajectories of one turn, scored while others still decode."""

from collections.abc import Callable

import jax
import numpy as np

from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.roles.placed import PlacedReference
from rljax.rollout.players.episodes.tree import TurnTree
from rljax.rollout.scoring.report import RewardReport, ScoredRow
from rljax.rollout.scoring.reward import EarlyScores, Reward
from rljax.sampler import Sampling
from rljax.tracking.timing import timed


class Responses:
    """The player of single responses, which `reward` scores. `reference`: a reference on other
    devices, which fills ref_logprobs while the reward scores."""

    has_turns = False
    rows = 1  # rows of the batch that a sample takes

    def __init__(self, reward: Reward, reference: PlacedReference | None = None):
        self.reward, self.reference = reward, reference

    def play(
        self,
        actor,
        prompts: Prompts,
        key: jax.Array,
        sampling: Sampling,
        *,
        n: int,
        enough: Callable[[EarlyScores], bool] | None = None,
        tree: TurnTree | None = None,
    ) -> tuple[Batch, RewardReport]:
        """Samples n scored responses to each prompt. Rows are scored as they end,
        while others decode.

        Args:
          actor: the policy.
          prompts: P prompts.
          key: decides the draws.
          sampling: the options of a response.
          n: samples per prompt.
          enough: stops decoding once enough(early scores) is true; rows that still decode are
            aborted.
          tree: ignored: no turn ends before the last one, so there is nowhere to branch.

        Returns the batch [P n, S] with rewards, row p n + s sample s of prompt p, and the report.
        """
        early = self.reward.start_early(prompts, n)
        if early is None:
            return self._scored(actor.generate(prompts, key, sampling, n=n), prompts)

        def stop() -> bool:
            early.stopped = enough(early)
            return early.stopped

        options = {} if enough is None else {"stop": stop}
        try:
            batch = actor.generate(prompts, key, sampling, n=n, finished=early.finished, **options)
            return self._scored(batch, prompts, early=early)
        except BaseException:  # a Ctrl-C, say
            early.cancel()
            raise

    def _scored(self, batch: Batch, prompts: Prompts, **early) -> tuple[Batch, RewardReport]:
        if self.reference is None:
            return self.reward(batch, prompts, **early)
        with timed("reward"):
            pending = self.reference.start(batch)
        batch, report = self.reward(batch, prompts, **early)
        with timed("reward"):
            return self.reference.finish(batch, pending), report

    def score(self, batch: Batch, prompts: Prompts) -> tuple[Batch, RewardReport]:
        """Returns the batch with rewards, and the report."""
        return self.reward(batch, prompts)

    def outcome_alone(self) -> "Responses":
        """Returns responses that are scored for evaluation."""
        return Responses(self.reward.outcome_alone())

    def beside(self, reference: PlacedReference) -> "Responses":
        """Returns responses whose ref_logprobs `reference` computes while the reward scores."""
        return Responses(self.reward, reference)

    def completions(
        self, batch: Batch, report: RewardReport, prompts: Prompts, n: int
    ) -> tuple[Batch, np.ndarray, tuple[ScoredRow, ...]]:
        """Returns the row of each sample, the column where its tokens begin [rows], and its score,
        if it has one."""
        return batch, np.repeat(prompts.lengths, n), report.rows

    def learn(self, report: RewardReport) -> dict[str, float]:
        """Updates the rubrics of the reward by a step's report. Returns metrics."""
        return self.reward.learn(report)

    def close(self) -> None:
        """Ends the processes of the reward."""
        self.reward.close()
