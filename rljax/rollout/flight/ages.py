"""Ages of a batch's tokens, in steps. Axes: B rows, S tokens in a row."""

from collections.abc import Mapping

import numpy as np

from rljax.metric import Metric

METRICS = {
    "staleness/steps_mean": Metric(
        "steps by which the weights that drew a token are older than those that learn from it, "
        "mean over tokens",
        "steps",
        "about half of rollouts.max_staleness; a correction weighs it",
    ),
    "staleness/steps_max": Metric(
        "the same, of the oldest token", "steps", "never above rollouts.max_staleness"
    ),
    "staleness/span_max": Metric(
        "steps between the oldest and the newest token of one response, at most",
        "steps",
        "0 where no response outlives a step",
    ),
    "staleness/partial_fraction": Metric(
        "responses that weights of several steps wrote",
        "share",
        "the longer the responses, the more; see rollouts.partial_mask",
    ),
}


def ages(
    mask: np.ndarray, versions: np.ndarray, step_of: Mapping[int, int], step: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Returns (the policy tokens older than the newest of their row [B, S] bool, metrics in steps).

    Args:
      mask: [B, S], 1 at policy tokens.
      versions: [B, S] int32, in optimizer steps.
      step_of: the step that has each version.
      step: the step that learns. A token of a version v is step - step_of[v] steps old.
    """
    known_versions, chosen = np.array(sorted(step_of)), mask > 0
    steps = np.array([step_of[int(version)] for version in known_versions])
    index = np.searchsorted(known_versions, versions).clip(0, len(known_versions) - 1)
    age = np.where(chosen, step - steps[index], 0)
    newest = np.where(chosen, age, step + 1).min(axis=1, keepdims=True)
    older = chosen & (age > newest)
    return older, {
        "staleness/steps_mean": float(age.sum()) / max(int(chosen.sum()), 1),
        "staleness/steps_max": float(age.max(initial=0)),
        "staleness/span_max": float(np.where(older, age - newest, 0).max(initial=0)),
        "staleness/partial_fraction": float(np.mean(older.any(axis=1))),
    }
