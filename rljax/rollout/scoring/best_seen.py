"""The best score that each prompt has had in a run, against what the policy scores now."""

import numpy as np

from rljax.metric import Metric
from rljax.rollout.scoring.report import RewardReport

METRICS = {
    "reward/best_seen": Metric(
        "highest score that a prompt's samples have had so far in the run, mean over the step's "
        "prompts: a policy that replays its best experience",
        "score",
        "rises; flat and low: it does not explore",
    ),
    "reward/best_seen_gap": Metric(
        "reward/best_seen less the mean score of the same prompts' samples in this step",
        "score",
        "falls to 0; far above: better answers were sampled than it learned",
    ),
}


class BestSeen:
    """The score of a policy that replays the best sample it has ever drawn of each prompt (the
    experience-optimal policy), and its distance to the policy that learns from these samples.

    A low best says that the run does not explore; a large distance says that it does not exploit
    what it has found. (Berseth: Is Exploration or Optimization the Problem for Deep Reinforcement
    Learning?, arXiv 2508.01329.) The prompts of an endless stream come once: of them no score is
    kept, and the best is that of the step.
    """

    def __init__(self, endless: bool = False):
        self.endless = endless
        self._best: dict[int, float] = {}  # prompt_id -> score

    def record(self, report: RewardReport) -> dict[str, float]:
        """Takes the known scores in. Returns reward/best_seen and reward/best_seen_gap, means over
        the prompts of the report; {} if no score is known."""
        scores: dict[int, list[float]] = {}
        for prompt, score in report.outcomes:
            scores.setdefault(prompt, []).append(score)
        if not scores:
            return {}
        best = {
            prompt: max(self._best.get(prompt, -np.inf), *values)
            for prompt, values in scores.items()
        }
        if not self.endless:
            self._best |= best
        gaps = [best[prompt] - np.mean(values) for prompt, values in scores.items()]
        return {
            "reward/best_seen": float(np.mean([*best.values()])),
            "reward/best_seen_gap": float(np.mean(gaps)),
        }

    def get_state(self) -> dict[str, float]:
        """Returns JSON: {prompt_id: score}."""
        return {str(prompt): score for prompt, score in self._best.items()}

    def set_state(self, state: dict[str, float]) -> None:
        """Goes on from `get_state`."""
        self._best = {int(prompt): float(score) for prompt, score in state.items()}
