"""Warnings of a run, in words: what its counted faults mean, and how often one is repeated."""

import math
from collections.abc import Mapping

EQUAL_REWARDS, TRUNCATED, NO_GRADIENT = "equal_rewards", "truncated", "no_gradient"
REWARDS_FAILING, COMPILED_AGAIN = "reward/failing_steps", "compiled_again"
UNHEALTHY = "unhealthy/"  # before the name of the metric
IN_A_ROW = 3  # steps in a row from which something that may happen once is a warning
MOST_TRUNCATED = 0.5  # share of the responses of a step

# {fault: the things that its count is a number of}.
_MEANINGS = {
    EQUAL_REWARDS: "steps whose rewards were all equal: nothing was learned from them",
    TRUNCATED: f"steps in which more than {MOST_TRUNCATED:.0%} of the responses were cut off at "
    "sampler.max_response_tokens",
    NO_GRADIENT: "steps whose gradient was 0 although rewards differed: nothing was learned",
    REWARDS_FAILING: "steps in which more than 1 % of the rewards failed",
    COMPILED_AGAIN: "steps that compiled a program again",
    "skipped_steps": "optimizer steps whose loss or gradient was not finite, left out",
    "critic/skipped_steps": "optimizer steps of the critic that were not finite, left out",
    "reward/errors": "rewards that failed; their samples were left out",
    "reward/timeouts": "rewards over reward.timeout_s; their samples were left out",
    "reward/timeouts_scored": "rewards over reward.timeout_s, scored as the reward declares",
    "rollbacks": "returns to an earlier checkpoint",
}


def fault_lines(
    faults: Mapping[str, float], last_steps: Mapping[str, int], steps: int
) -> list[str]:
    """Returns a line for each counted fault of a run of so many steps: "12 steps whose rewards were
    all equal: ... (the last at step 25 of 71)", if the last step of the fault is known."""
    lines = []
    for name, count in list(faults.items()):  # a run may add to them
        meaning = fault_meaning(name)
        if meaning and count:
            last = last_steps.get(name)
            latest = f" (the last at step {last} of {steps})" if last is not None else ""
            lines.append(f"{count:g} {meaning}{latest}")
    return lines


def fault_meaning(name: str) -> str:
    """Returns what a fault counts: "steps whose rewards were all equal"; "" if it is not shown."""
    if name.startswith(UNHEALTHY):
        return f"steps with {name.removeprefix(UNHEALTHY)} outside of its healthy range"
    return _MEANINGS.get(name, "")


def is_said(before: float, after: float) -> bool:
    """Returns whether a warning that was counted from `before` to `after` is logged: the first
    time, and at 10, 100, 1000 ..."""
    if before < 1 or after < 1:
        return after > before
    return math.floor(math.log10(after)) > math.floor(math.log10(before))


def too_many_truncated(share: float) -> str:
    """Returns the warning about a share of responses that were cut off."""
    return (
        f"{share:.0%} of the responses were cut off at sampler.max_response_tokens: the "
        "cut part was not scored. Raise it, or ask for shorter answers"
    )
