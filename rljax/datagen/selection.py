"""Which samples of a prompt are kept: best-of-n, the top k, all above a threshold; and pairs.

What lives here: plain Python over the rewards and texts of one prompt's samples, and what is said
of a selection. What does not: sampling, files (rljax.datagen.rejection). ALGORITHMS A3, F2.
"""

import math
from collections.abc import Sequence
from typing import Literal

from rljax.errors import InputError

Method = Literal["best", "top_k", "threshold"]
METHODS = ("best", "top_k", "threshold")


def _candidates(rewards: Sequence[float], eligible: Sequence[bool] | None) -> list[int]:
    """Eligible samples whose reward is known, the best first; equal rewards in their order."""
    eligible = [True] * len(rewards) if eligible is None else eligible
    if len(eligible) != len(rewards):
        raise InputError("eligible", value=len(eligible), rule=f"one per reward: {len(rewards)}")
    live = [i for i, r in enumerate(rewards) if eligible[i] and not math.isnan(r)]
    return sorted(live, key=lambda i: (-rewards[i], i))


def select(
    rewards: Sequence[float],
    texts: Sequence[str],
    *,
    method: Method = "best",
    top_k: int = 1,
    min_reward: float | None = None,
    per_prompt: int = 0,
    dedup: bool = True,
    eligible: Sequence[bool] | None = None,
) -> list[int]:
    """Indices of the samples of one prompt that are kept, the best first (RAFT, arXiv 2304.06767).

    "best" keeps the first maximum, "top_k" the `top_k` best, "threshold" all. Whatever the method,
    a reward must exceed `min_reward` (strictly; None = any will do), a NaN is a reward that failed,
    `dedup` keeps one of equal texts, and at most `per_prompt` are kept (0 = no cap).
    """
    if method not in METHODS:
        raise InputError("select(method)", value=method, rule=f"one of {', '.join(METHODS)}")
    if method == "threshold" and min_reward is None:
        raise InputError("select(method='threshold')", value=None, rule="min_reward is the bound")
    for name, value, least in (("top_k", top_k, 1), ("per_prompt", per_prompt, 0)):
        if value < least:
            raise InputError(f"select({name})", value=value, rule=f"at least {least}")
    if len(texts) != len(rewards):
        raise InputError("select(texts)", value=len(texts), rule=f"one per reward: {len(rewards)}")
    kept, seen = [], set()
    for i in _candidates(rewards, eligible):
        if min_reward is not None and not rewards[i] > min_reward:
            continue
        if dedup and texts[i] in seen:
            continue
        seen.add(texts[i])
        kept.append(i)
    limit = {"best": 1, "top_k": top_k, "threshold": len(kept)}[method]
    return kept[: min(limit, per_prompt) if per_prompt else limit]


def best_and_worst(
    rewards: Sequence[float], eligible: Sequence[bool] | None = None
) -> tuple[int, int] | None:
    """(first maximum, first minimum) of one prompt's rewards; None where all tie: nothing to
    prefer."""
    order = _candidates(rewards, eligible)
    if not order or rewards[order[0]] == rewards[order[-1]]:
        return None
    lowest = rewards[order[-1]]
    return order[0], next(i for i in order if rewards[i] == lowest)


def best_of_n_kl(n: int) -> float:
    """log n - (n - 1) / n: an upper bound on KL(best-of-n || the policy sampled from), in nats."""
    if n < 1:
        raise InputError("best_of_n_kl(n)", value=n, rule="at least 1")
    return math.log(n) - (n - 1) / n


def selection_metrics(
    rewards: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    kept: Sequence[Sequence[int]],
    truncated: Sequence[Sequence[bool]],
    *,
    method: Method,
) -> dict[str, float]:
    """What a selection did; lists are [prompts][samples], `kept` the indices that `select` gave.

    Means run over samples whose reward is known. `kl_bound` is there for "best" alone, the only
    selection that it bounds.
    """
    known = [r for row in rewards for r in row if not math.isnan(r)]
    chosen = [row[i] for row, picks in zip(rewards, kept, strict=True) for i in picks]
    samples = sum(len(row) for row in rewards)
    prompts = len(rewards)
    if not samples:
        raise InputError("selection_metrics: there are no samples", fix="sample some prompts")
    out = {
        "mean_reward_all": sum(known) / len(known) if known else math.nan,
        "mean_reward_selected": sum(chosen) / len(chosen) if chosen else math.nan,
        "acceptance_rate": len(chosen) / samples,
        "prompts_without_any": sum(not picks for picks in kept) / prompts,
        "unique_fraction": sum(len(set(row)) for row in texts) / samples,
        "truncated_fraction": sum(sum(map(bool, row)) for row in truncated) / samples,
        "failed_rewards": float(samples - len(known)),
    }
    if method == "best":
        out["kl_bound"] = best_of_n_kl(max(len(row) for row in rewards))
    return out
