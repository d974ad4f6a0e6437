"""Rewards of a whole group: each response is compared with its siblings, the other samples of the
same prompt. A reward of a group declares `responses` and returns a score for each, in order."""

import functools
import itertools
import random
from typing import Literal

from rljax.components import resolve
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.rewards.judges.judging import judge_of
from rljax.rewards.pool.calling import HOME, RewardText, call_reward, wanted_fields


def _check_n(n: int) -> None:
    if not isinstance(n, int) or n < 1:
        raise InputError("diversity n", value=n, fix="set n to a whole number of 1 or more")


def _check_opponents(opponents: int) -> None:
    if not isinstance(opponents, int) or opponents < 0:
        raise InputError(
            "pairwise opponents",
            value=opponents,
            rule="a whole number; 0 = all",
            fix="set opponents to 0 or more",
        )


def _check_pairs(options: dict) -> None:
    _check_opponents(options["opponents"])
    judge_of(options["judge"])


@contract(
    safe=True, rubrics=False, prepare=lambda options: functools.partial(_check_n, options["n"])
)
def diversity(
    responses,
    prompt=None,
    ground_truth=None,
    data_source=None,
    extra_info=None,
    num_tokens=None,
    finish_reasons=None,
    *,
    n: int = 3,
    unit: Literal["words", "characters"] = "words",
    correct: RewardText = "",
) -> list[dict | Exception]:
    """1 - mean over siblings of |A & B| / |A | B|, A and B the sets of n-grams of two responses: 1
    is unlike all others, 0 a copy of them. A response alone scores 1.

    `correct`: a reward of one response, by whose score the result is multiplied (parts diversity
    and correct); where it raises, that response has no reward. A response shorter than n units is
    one gram. Raises InputError for n below 1.
    """
    _check_n(n)
    grams = [_grams(response, n, unit) for response in responses]
    values = []
    for i, current in enumerate(grams):
        alike = [_jaccard(current, other) for j, other in enumerate(grams) if j != i]
        values.append(1.0 - sum(alike) / len(alike) if alike else 1.0)
    if not correct:
        return [{"score": value, "diversity": value} for value in values]
    reward = resolve(correct, HOME)
    fields = wanted_fields(reward)
    shared = {
        "prompt": prompt,
        "ground_truth": ground_truth,
        "data_source": data_source,
        "extra_info": extra_info,
    }
    scores = []
    for i, (response, value) in enumerate(zip(responses, values, strict=True)):
        sample = {**shared, "response": response}
        sample |= {"num_tokens": num_tokens[i]} if num_tokens else {}
        sample |= {"finish_reason": finish_reasons[i]} if finish_reasons else {}
        try:
            right = call_reward(reward, sample, fields)[0]
        except Exception as error:  # its siblings are not to blame
            scores.append(error)
            continue
        scores.append({"score": right * value, "diversity": value, "correct": right})
    return scores


def _grams(text: str, n: int, unit: str) -> set:
    units = text.split() if unit == "words" else list(text)
    if len(units) < n:
        return {tuple(units)}
    return {tuple(units[i : i + n]) for i in range(len(units) - n + 1)}


def _jaccard(a: set, b: set) -> float:
    return len(a & b) / len(a | b)


@contract(prepare=lambda options: functools.partial(_check_pairs, options))
def pairwise(
    responses, prompt, *, judge: str, opponents: int = 0, both_orders: bool = True, seed: int = 0
) -> list[dict | None]:
    """Each response's mean chance to win against its siblings, by a judge of two:
    judge(prompt, first, second) -> P(first is better) (rljax.rewards.judges.judging). A
    response alone scores 0.5.

    `opponents`: how many siblings each is matched with, drawn by `seed` and the texts; 0 = all. A
    match counts for both. `both_orders` asks twice, which cancels a judge's taste for a position.
    """
    _check_opponents(opponents)
    ask = judge_of(judge)
    results: list[list[float]] = [[] for _ in responses]
    for i, j in _matches(responses, opponents, seed):
        chance = _chance(ask(prompt, responses[i], responses[j]))
        if both_orders:
            chance = (chance + 1.0 - _chance(ask(prompt, responses[j], responses[i]))) / 2
        results[i].append(chance)
        results[j].append(1.0 - chance)
    return [
        {"score": sum(chances) / len(chances) if chances else 0.5, "matches": len(chances)}
        for chances in results
    ]


def _matches(responses, opponents: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of indices, each once: all, or those in which one has drawn the other."""
    count = len(responses)
    if not opponents or opponents >= count - 1:
        return list(itertools.combinations(range(count), 2))
    draw = random.Random(f"{seed} {responses!r}")  # the same for the same group, in any process
    pairs = {
        tuple(sorted((i, j)))
        for i in range(count)
        for j in draw.sample([other for other in range(count) if other != i], opponents)
    }
    return sorted(pairs)


def _chance(results) -> float:
    value = results["score"] if isinstance(results, dict) else results
    if not 0 <= value <= 1:
        raise ValueError(f"the judge returned {value!r}: a probability is from 0 to 1")
    return float(value)
