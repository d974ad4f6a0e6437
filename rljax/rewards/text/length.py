"""Rewards for a requested length (L1, arXiv 2503.04697): correctness and tokens used.

The target stands in extra_info["target_tokens"]; `data.target_tokens` puts it there and into the
prompt. Lengths are in tokens of the response, EOS included.
"""

import functools
from typing import Literal

from rljax.components import resolve
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.rewards.pool.calling import HOME, RewardText, call_reward


def _correct(correct: RewardText, correct_at: float, sample: dict) -> float:
    return float(call_reward(resolve(correct, HOME), sample)[0] >= correct_at)


def _target(extra_info: dict) -> int:
    if not isinstance(extra_info, dict) or "target_tokens" not in extra_info:
        raise ValueError("extra_info has no target_tokens: set data.target_tokens=(low, high)")
    return int(extra_info["target_tokens"])


def _parts(score: float, right: float, n: int, target: int) -> dict:
    return {
        "score": score,
        "correct": right,
        "length_error": float(abs(n - target)),
        "over_budget": float(n > target),
    }


def _late_l1(alpha: float, sample: dict) -> float:
    """Returns l1_exact of a wrong answer."""
    return -alpha * abs(_target(sample["extra_info"]) - sample["num_tokens"])


@contract(
    safe=True,
    probed=True,
    rubrics=False,
    on_timeout=lambda options: functools.partial(_late_l1, options["alpha"]),
)
def l1_exact(
    num_tokens,
    extra_info,
    *,
    correct: RewardText = "exact_match()",
    alpha: float = 3e-4,
    correct_at: float = 1.0,
    **sample,
) -> dict:
    """1[correct] - alpha |target - n|; `correct` names the reward that decides what is right.

    `num_tokens` is n. Raises ValueError for a sample without extra_info["target_tokens"].
    """
    target = _target(extra_info)
    sample |= {"num_tokens": num_tokens, "extra_info": extra_info}
    right = _correct(correct, correct_at, sample)
    return _parts(right - alpha * abs(target - num_tokens), right, num_tokens, target)


@contract(safe=True, probed=True, rubrics=False, on_timeout=0.0)
def l1_max(
    num_tokens,
    extra_info,
    *,
    correct: RewardText = "exact_match()",
    alpha: float = 3e-4,
    delta: float = 0.5,
    correct_at: float = 1.0,
    form: Literal["paper", "released"] = "paper",
    **sample,
) -> dict:
    """1[correct] clip(alpha (target - n) + delta, 0, 1): at most the target (the paper's form).

    form="released", as in the authors' code, without delta: 1[correct] (clip(alpha (target - n),
    -1, 1) + 1) / 2. Raises ValueError for a sample without extra_info["target_tokens"].
    """
    target = _target(extra_info)
    sample |= {"num_tokens": num_tokens, "extra_info": extra_info}
    right = _correct(correct, correct_at, sample)
    margin = alpha * (target - num_tokens)
    share = min(max(margin + delta, 0.0), 1.0)
    if form == "released":
        share = (min(max(margin, -1.0), 1.0) + 1.0) / 2.0
    return _parts(right * share, right, num_tokens, target)


@contract(safe=True, probed=True, on_timeout=lambda options: -options["penalty"])
def soft_overlong(
    num_tokens: int, *, max_tokens: int, cache_tokens: int, penalty: float = 1.0
) -> float:
    """penalty * clip((max_tokens - cache_tokens - n) / cache_tokens, -1, 0), n response tokens
    (DAPO, arXiv 2503.14476), as a member of a mixture; `rljax.shaping.scores.soft_overlong` adds it
    to any reward. cache_tokens=0 is a hard limit: -penalty beyond max_tokens.

    Raises InputError unless 0 <= cache_tokens <= max_tokens.
    """
    if not 0 <= cache_tokens <= max_tokens:
        raise InputError(
            "soft_overlong(cache_tokens)",
            value=cache_tokens,
            rule=f"0 <= cache_tokens <= max_tokens, which is {max_tokens}",
            fix="lower cache_tokens, or raise max_tokens",
        )
    margin = max_tokens - cache_tokens - num_tokens
    return penalty * min(max(margin / (cache_tokens or 1), -1.0), 0.0)
