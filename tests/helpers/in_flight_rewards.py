"""Rewards for runs in flight: slow by a hash of the response, and some of them fail."""

import hashlib
import time

from rljax.rewards import sequence_match


def chance(text: str) -> float:
    """A number from 0 to 1, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def slow(response, ground_truth, *, most_s: float = 0.03, fails: float = 0.0) -> float:
    """sequence_match after at most `most_s` seconds; a share of the responses raises."""
    time.sleep(most_s * chance(response))
    if chance(response + "fails") < fails:
        raise ValueError("this response has no score")
    return sequence_match(response, ground_truth, partial=0.5)
