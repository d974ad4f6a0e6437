"""Rewards: ordinary answers per second, in the pool's workers. Prints JSON.

python benchmarks/rewards.py [--repeats=5] [--samples=1000] [--workers=1]

`math_numbers`: answers that are integers, decimals and fractions, which need no algebra.
`math_answers`: as many others: roots, polynomials, sets, intervals, matrices, words. Half of the
answers are right; no two samples are alike.
`gsm8k`, `mixture`: strings alone, and four rules at once. In samples/s: median, least and greatest
of the repeats, which share the samples; `start_s`: from nothing to a pool that is ready.
"""

import argparse
import json
import os
import statistics
import time

from rljax.rewards.pool.pool import RewardPool

_THOUGHTS = "We add the numbers, then divide by what is left over. " * 40
# @ is another number in every sample.
_NUMBERS = ["@", "-@", "1/@", "0.@", "1,@", r"\frac{3}{@}", "@.5", "2@"]
_OTHERS = [
    r"2\sqrt{@}",
    r"\frac{\pi}{@}",
    "x^2+@x+1",
    "(1,@)",
    r"\{1,2,@\}",
    r"(-\infty,@]",
    "x=@+y",
    r"\begin{pmatrix}1&2\\3&@\end{pmatrix}",
    r"\text{Evelyn}",
    "3+@i",
]


def _samples(answers: list[str], count: int) -> list[dict]:
    """Every second answer is right, in another spelling; the others are of the next number."""
    samples = []
    for i in range(count):
        form = answers[i // 2 % len(answers)]
        truth = form.replace("@", str(101 + i))
        answer = truth.replace("+", "+0+") if i % 2 else form.replace("@", str(102 + i))
        answer = answer.replace("Evelyn", "Evelyn" if i % 2 else "Ada")
        response = f"<think>{_THOUGHTS}</think><answer>\\boxed{{{answer} }}\n#### {answer}</answer>"
        samples.append({"response": response, "ground_truth": truth, "num_tokens": 500})
    return samples


def throughput(reward: str, samples: list[dict], workers: int, repeats: int) -> dict:
    """Samples per second of one reward, in chunks that no worker has seen before."""
    started = time.monotonic()
    with RewardPool(reward, workers=workers, timeout_s=30.0) as pool:
        start_s = time.monotonic() - started
        speeds, scores = [], []
        size = len(samples) // repeats
        for turn in range(repeats):
            chunk = samples[turn * size : (turn + 1) * size]
            started = time.monotonic()
            scores += pool.score(chunk)
            speeds.append(size / (time.monotonic() - started))
    return {
        "samples_per_s": round(statistics.median(speeds), 1),
        "least": round(min(speeds), 1),
        "greatest": round(max(speeds), 1),
        "start_s": round(start_s, 2),
        "not_ok": sum(score.status != "ok" for score in scores),
        "above_0": sum(score.value > 0 for score in scores),
    }


def main() -> None:
    """Measures every reward in turn and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    rules = ("gsm8k()", "format_tags()", "repetition()", "length_under(max_tokens=1000)")
    numbers = _samples(_NUMBERS, args.samples)
    mixed = _samples([*_NUMBERS, *_OTHERS], args.samples)
    integers = _samples(["@"], args.samples)
    cases = {
        "math_numbers": ("math_verify()", numbers),
        "math_answers": ("math_verify()", mixed),
        "gsm8k": ("gsm8k()", integers),
        "mixture": (f"mixture(rewards={rules})", integers),
    }
    row = {
        name: throughput(reward, samples, args.workers, args.repeats)
        for name, (reward, samples) in cases.items()
    }
    print(json.dumps({"load": os.getloadavg()[0], "workers": args.workers, **row}, indent=1))


if __name__ == "__main__":
    main()
