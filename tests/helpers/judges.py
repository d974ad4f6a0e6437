"""Judges for tests: good, biased, broken and slow ones."""

import time

from rljax.rewards import judge


def more_a(prompt, first: str, second: str) -> float:
    """The completion with more letters a; equal numbers are a tie."""
    one, other = first.count("a"), second.count("a")
    return 0.5 if one == other else 0.9 if one > other else 0.1


def always_first(prompt, first: str, second: str) -> float:
    """Position bias and nothing else."""
    return 0.8


def careless(prompt, first: str, second: str) -> dict:
    """more_a, but for what a judge may do: hang, raise, say no probability, crash."""
    if "hang" in first + second:
        time.sleep(60)
    if "raise" in first + second:
        raise RuntimeError("no answer")
    if "two" in first + second:
        return {"score": 2.0}
    if "none" in first + second:
        return None
    if "nan" in first:  # in one of the two orders only
        return {"score": float("nan")}
    return {"score": more_a(prompt, first, second), "letters": float(len(first))}


def half(prompt, first: str) -> float:
    """Not a judge."""
    return 0.5


def elsewhere(response, prompt, extra_info, timeout_s: float = 2.0, attempts: int = 3) -> dict:
    """rljax.rewards.judge of the endpoint that the sample names."""
    return judge(
        response, prompt, base_url=extra_info, model="m", timeout_s=timeout_s, attempts=attempts
    )
