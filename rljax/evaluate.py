"""Evaluation of a policy on held-out prompts: greedy accuracy, pass@k, best-of-k, with intervals.

What lives here: the estimators (ALGORITHMS L) and the loop that samples and scores. rljax.train
calls it too.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from rljax.data.prompts import Prompts
from rljax.errors import InputError
from rljax.roles import Actor, Reward
from rljax.sampler import Sampling


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, c of them right, hold a right
    one."""
    if not 1 <= k <= n:
        raise InputError("pass@k", value=k, rule=f"1 <= k <= {n}, the samples of each prompt")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_of_k(scores: Sequence[float], k: int) -> float:
    """E max over k of the n scores drawn without replacement: sum_i s_(i) C(i - 1, k - 1) / C(n,
    k)."""
    ordered = sorted(scores)
    n = len(ordered)
    if not 1 <= k <= n:
        raise InputError("best-of-k", value=k, rule=f"1 <= k <= {n}, the samples of each prompt")
    ways = math.comb(n, k)
    return sum(s * (math.comb(i, k - 1) / ways) for i, s in enumerate(ordered) if i >= k - 1)


def bootstrap(values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> dict:
    """Mean of per-prompt values with a 95 % percentile-bootstrap interval over prompts."""
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]  # a failed reward says nothing about its prompt
    if values.size == 0:
        raise InputError(
            "bootstrap of no values", fix="evaluate on prompts whose rewards do not all fail"
        )
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"value": float(values.mean()), "low": float(low), "high": float(high), "n": len(values)}


def score_prompts(
    actor: Actor,
    reward: Reward,
    prompts: Sequence[dict],
    *,
    sampling: Sampling,
    prompt_tokens: int,
    key=None,
    samples: int = 1,
    prompts_per_call: int = 256,
) -> tuple[np.ndarray, list[dict]]:
    """Scores [prompts, samples] (NaN where the reward failed) and the rows behind them."""
    key = jax.random.key(0) if key is None else key
    scores, rows = [], []
    size = min(prompts_per_call, len(prompts))
    for start in range(0, len(prompts), size):
        part = list(prompts[start : start + size])
        real = len(part)
        part += [part[-1]] * (
            size - real
        )  # the last call has the shape of the others: no new compile
        batch = Prompts.from_records(part, length=prompt_tokens)
        trajectories = actor.generate(batch, jax.random.fold_in(key, start), sampling, n=samples)
        reward(trajectories, batch)
        found = reward.rows[: real * samples]
        rows += found
        scores += [
            [r["reward"] for r in found[i : i + samples]] for i in range(0, len(found), samples)
        ]
    return np.asarray(scores, np.float64), rows


def greedy_accuracy(
    actor: Actor,
    reward: Reward,
    prompts: Sequence[dict],
    *,
    sampling: Sampling,
    prompt_tokens: int,
    correct_at: float = 1.0,
) -> tuple[np.ndarray, list[dict]]:
    """1 or 0 for each prompt: does the greedy response score at least `correct_at`? NaN: its reward
    failed."""
    greedy = Sampling(
        temperature=0.0,
        max_response_tokens=sampling.max_response_tokens,
        stop_ids=sampling.stop_ids,
    )
    scores, rows = score_prompts(
        actor, reward, prompts, sampling=greedy, prompt_tokens=prompt_tokens
    )
    return np.where(np.isnan(scores[:, 0]), np.nan, scores[:, 0] >= correct_at), rows


def evaluate(
    actor: Actor,
    reward: Reward,
    prompts: Sequence[dict],
    *,
    sampling: Sampling,
    prompt_tokens: int,
    samples: int,
    ks: Sequence[int],
    correct_at: float = 1.0,
    seed: int = 0,
) -> dict:
    """Greedy accuracy, and from `samples` draws per prompt: mean@n, pass@k, best-of-k. All with
    intervals."""
    options = dict(sampling=sampling, prompt_tokens=prompt_tokens)
    right, rows = greedy_accuracy(actor, reward, prompts, correct_at=correct_at, **options)
    out = {"greedy_accuracy": bootstrap(right)}
    out["truncated_fraction"] = float(np.mean([r["finish_reason"] == "length" for r in rows]))
    if samples:
        scores, _ = score_prompts(
            actor, reward, prompts, key=jax.random.key(seed), samples=samples, **options
        )
        out["failed_rewards"] = int(np.sum(np.isnan(scores)))
        correct = np.sum(scores >= correct_at, axis=1)
        out[f"mean@{samples}"] = bootstrap(correct / samples)
        for k in ks:
            out[f"pass@{k}"] = bootstrap([pass_at_k(samples, int(c), k) for c in correct])
            kept = np.where(np.isnan(scores), -np.inf, scores)
            lowest = np.nanmin(scores) if np.any(np.isfinite(scores)) else 0.0
            kept = np.where(np.isfinite(kept), kept, lowest)  # a failed reward is never the best
            out[f"best_of@{k}"] = bootstrap([best_of_k(s, k) for s in kept])
    return out
