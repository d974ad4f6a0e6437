"""Evaluation of a policy on held-out prompts: greedy accuracy, pass@k, best-of-k and majority@k,
with bootstrap intervals.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from rljax.contracts import contract
from rljax.data.online.prompts import PromptRecord
from rljax.errors import InputError
from rljax.keys import root_key
from rljax.policies import Completion, Policy, sample_all, warn_of_failed_rewards
from rljax.rewards.answers.find import in_tag, last_boxed
from rljax.rewards.answers.letters import labelled_letter
from rljax.rollout import Player, Reward, extraction_failed_fraction, player_of


def _check_k(name: str, k: int, n: int) -> None:
    if not 1 <= k <= n:
        rule = f"1 <= k <= {n}, the samples of each prompt"
        fix = f"k={n} or lower, or draw more samples of each prompt"
        raise InputError(name, value=k, rule=rule, fix=fix)


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, c of them right, include a right
    one (Chen et al. 2021). Raises InputError unless 1 <= k <= n."""
    _check_k("pass@k", k, n)
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_of_k(scores: Sequence[float], k: int) -> float:
    """E max over k of the n scores drawn without replacement:
    sum_i s_(i) C(i - 1, k - 1) / C(n, k).

    Raises InputError unless 1 <= k <= n, and for a NaN.
    """
    ordered = sorted(scores)
    n = len(ordered)
    if any(math.isnan(s) for s in ordered):
        raise InputError("best-of-k of NaN", fix="leave out the samples whose reward failed")
    _check_k("best-of-k", k, n)
    ways = math.comb(n, k)
    return sum(s * (math.comb(i, k - 1) / ways) for i, s in enumerate(ordered) if i >= k - 1)


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; the one seen first wins ties. None is no answer and has no vote;
    the result is None if nobody votes."""
    votes = collections.Counter(a for a in answers if a is not None)  # keeps the order of arrival
    return max(votes, key=votes.__getitem__) if votes else None


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Share of the n // k disjoint runs of k samples whose voted answer is right.

    `right[i]` says whether answer i is; the first sample that gave the voted answer decides. Raises
    InputError unless 1 <= k <= n.
    """
    n = len(answers)
    _check_k("maj@k", k, n)
    wins = []
    for start in range(0, n - k + 1, k):
        part = list(answers[start : start + k])
        vote = majority(part)
        wins.append(vote is not None and bool(right[start + part.index(vote)]))
    return sum(wins) / len(wins)


@contract(reads="answer")
def final_answer(response: str) -> str | None:
    r"""The answer that maj@k votes on: the last `\boxed{...}`, else the text after the last `####`,
    else the whole text; in the last <answer>, if there is one."""
    content = in_tag(response)
    response = response if content is None else content
    boxed = last_boxed(response)
    text = boxed if boxed is not None else response.rpartition("####")[2]
    if letter := labelled_letter(text):  # `B: Paris` and `(B)` are one vote
        return letter
    return text.strip().replace(",", "").removesuffix(".") or None


SHARE, GAIN = (0.0, 1.0), (-1.0, 1.0)  # bounds of shares, and of differences of two shares
_Z2 = 1.959964**2  # of a 95 % interval


def bootstrap(
    values: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    resamples: int = 2000,
    seed: int = 0,
    within: tuple[float, float] | None = None,
) -> dict:
    """Mean of per-prompt values [P] with a 95 % percentile-bootstrap interval over prompts:
    {"value", "low", "high", "n"}. NaN is left out. `weights` [P]: the mean is sum w x / sum w;
    None: all the same.

    `within`: the bounds of such values. Where all n are equal and at a bound, or all 0, drawing
    from them again says nothing, and the interval is Wilson's: z^2 / (n + z^2) wide (Wilson 1927).
    Raises InputError if no value is known.
    """
    values = np.asarray(values, np.float64)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    valid = ~np.isnan(values)  # a failed reward says nothing about its prompt
    values, weights = values[valid], weights[valid]
    if values.size == 0:
        raise InputError(
            "bootstrap of no values", fix="evaluate on prompts whose rewards do not all fail"
        )
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, len(values), (resamples, len(values)))
    means = (values * weights)[indices].sum(axis=1) / weights[indices].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float((values * weights).sum() / weights.sum())
    if within is not None and np.ptp(values) == 0 and values[0] in (*within, 0.0):
        n = weights.sum() ** 2 / (weights**2).sum()
        spread = _Z2 / (n + _Z2)
        low, high = max(mean - spread, within[0]), min(mean + spread, within[1])
    return {"value": mean, "low": float(low), "high": float(high), "n": len(values)}


def greedy_accuracy(
    policy: Policy,
    scorer: Reward | Player,
    prompts: Sequence[PromptRecord],
    *,
    correct_at: float = 1.0,
) -> tuple[np.ndarray, list[Completion]]:
    """(1 or 0 for each prompt [P], whether its greedy response scores at least `correct_at`; the
    responses). NaN where a reward failed."""
    samples = sample_all(policy.greedy(), prompts, 1, scorer, key=root_key(0))
    return correct(score_table(samples, 1)[:, 0], correct_at), samples


def no_answer(samples: Sequence[Completion], prefix: str = "") -> dict[str, float]:
    """{prefix + "extraction_failed_fraction": share of the samples without an answer}; {} unless
    the reward has a part called extracted."""
    failed = extraction_failed_fraction(sample.parts for sample in samples)
    return {} if failed is None else {f"{prefix}extraction_failed_fraction": failed}


def score_table(samples: Sequence[Completion], n: int) -> np.ndarray:
    """The rewards [prompts, n] of samples from `sample_all`, n per prompt; NaN where one failed."""
    return np.array([sample.reward for sample in samples], np.float64).reshape(-1, n)


def correct(scores: np.ndarray, correct_at: float) -> np.ndarray:
    """1 where a score is at least `correct_at`, else 0; NaN stays NaN. Of any shape."""
    return np.where(np.isnan(scores), np.nan, scores >= correct_at)


@dataclasses.dataclass(frozen=True)
class Answers:
    """The responses to P prompts: one greedy response to each, and n drawn ones, prompt
    after prompt."""

    greedy: list[Completion]
    drawn: list[Completion]
    n: int

    def pass_rates(self, correct_at: float) -> np.ndarray:
        """pass@1 of each prompt [P]: the share of its drawn responses that score at least
        `correct_at`; without drawn ones 1 or 0 for the greedy one. NaN: no known reward."""
        samples, n = (self.drawn, self.n) if self.n else (self.greedy, 1)
        right = correct(score_table(samples, n), correct_at)
        scored = ~np.isnan(right)
        share = np.nansum(right, axis=1) / np.maximum(scored.sum(axis=1), 1)
        return np.where(scored.any(axis=1), share, np.nan)

    def tokens(self) -> np.ndarray:
        """Mean length in tokens [P] of the responses that `pass_rates` reads."""
        samples, n = (self.drawn, self.n) if self.n else (self.greedy, 1)
        return np.array([len(s.ids) for s in samples], np.float64).reshape(-1, n).mean(axis=1)


def answer_prompts(
    policy: Policy,
    scorer: Reward | Player,
    prompts: Sequence[PromptRecord],
    *,
    samples: int,
    seed: int = 0,
) -> Answers:
    """Samples and scores the greedy response to every prompt and `samples` drawn ones."""
    greedy = sample_all(policy.greedy(), prompts, 1, scorer, key=root_key(0))
    drawn = []
    if samples:
        drawn = sample_all(policy, prompts, samples, scorer, key=root_key(seed))
    warn_of_failed_rewards([*greedy, *drawn], prompts)
    return Answers(greedy, drawn, samples)


def answer_metrics(
    answers: Answers,
    *,
    ks: Sequence[int],
    correct_at: float = 1.0,
    episodes: bool = False,
    answer: Callable[[str], str | None] = final_answer,
) -> dict:
    """Greedy accuracy and reward, and of the drawn responses mean@n, pass@k, best_of@k, maj@k, all
    with intervals over prompts. `episodes` adds the numbers of their turns and calls. Raises
    InputError if no prompt has a value of one of them."""
    greedy = score_table(answers.greedy, 1)[:, 0]
    right = correct(greedy, correct_at)
    out = {
        "greedy_accuracy": bootstrap(right, within=SHARE),
        "greedy_reward": bootstrap(greedy),
        "truncated_fraction": float(np.mean([r.cut_off for r in answers.greedy])),
        "failed_rewards": int(np.sum(np.isnan(right))),
        **no_answer(answers.greedy),
    }
    if episodes:
        out |= {
            name: bootstrap([getattr(r, name) for r in answers.greedy])
            for name in ("turns", "calls")
        }
    if answers.n:
        scores = score_table(answers.drawn, answers.n)
        out["failed_rewards"] += int(np.sum(np.isnan(scores)))
        texts = np.array([answer(s.text) for s in answers.drawn], object).reshape(scores.shape)
        out |= sampled_metrics(scores, texts.tolist(), ks=ks, correct_at=correct_at)
    return out


def evaluate(
    policy: Policy,
    scorer: Reward | Player,
    prompts: Sequence[PromptRecord],
    *,
    samples: int,
    ks: Sequence[int],
    correct_at: float = 1.0,
    seed: int = 0,
    answer: Callable[[str], str | None] = final_answer,
) -> dict:
    """The metrics of the policy's answers to the prompts: `answer_prompts`, `answer_metrics`."""
    player = player_of(scorer)
    answers = answer_prompts(policy, player, prompts, samples=samples, seed=seed)
    episodes = player.has_turns
    return answer_metrics(answers, ks=ks, correct_at=correct_at, episodes=episodes, answer=answer)


def sampled_metrics(
    scores: np.ndarray,
    answers: Sequence[Sequence[str | None]],
    *,
    ks: Sequence[int],
    correct_at: float = 1.0,
) -> dict:
    """mean@n, pass@k, best_of@k and maj@k of scores and answers [prompts, samples], each with an
    interval over prompts.

    A sample whose reward failed (NaN) is left out; a prompt with fewer than k others has no value
    at k. Raises InputError if no prompt has a value.
    """
    scored = []
    for row, texts in zip(np.asarray(scores, np.float64), answers, strict=True):
        live = [i for i, score in enumerate(row) if not np.isnan(score)]
        scored.append(([float(row[i]) for i in live], [texts[i] for i in live]))

    def mean_of(value: Callable, k: int, within: tuple | None = SHARE) -> dict:
        values = [value(s, a) if len(s) >= k else math.nan for s, a in scored]
        return bootstrap(values, within=within)

    def right(s):
        return [x >= correct_at for x in s]

    out = {f"mean@{len(answers[0])}": mean_of(lambda s, a: sum(right(s)) / len(s), 1)}
    for k in ks:
        out[f"pass@{k}"] = mean_of(lambda s, a, k=k: pass_at_k(len(s), sum(right(s)), k), k)
        out[f"best_of@{k}"] = mean_of(lambda s, a, k=k: best_of_k(s, k), k, None)
        out[f"maj@{k}"] = mean_of(lambda s, a, k=k: majority_at_k(a, right(s), k), k)
    return out
