"""Samples scored per second by the pool of reward workers, and the tail that slow rewards leave.

    python benchmarks/reward_pool.py [--workers 2] [--samples 20000] [--repeats 5]

Prints one JSON object. `fast`: samples per second of a reward of microseconds. `slow_s`: seconds
for `2 x workers` samples whose reward sleeps 0.25 s each; 0.5 is the least.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rljax.rewards.pool.pool import RewardPool

REWARDS = """
import time

def sleep(response):
    time.sleep(float(response))
    return 1.0
"""


def seconds(pool: RewardPool, samples: list[dict], repeats: int) -> list[float]:
    """Seconds of scoring all samples, `repeats` times after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        assert all(score.status == "ok" for score in pool.score(samples))
        times.append(time.perf_counter() - started)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    fast = [{"response": f"#### {i}", "ground_truth": "1"} for i in range(args.samples)]
    with RewardPool("gsm8k", workers=args.workers) as pool:
        rates = [args.samples / s for s in seconds(pool, fast, args.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slow_rewards.py").write_text(REWARDS)
        sys.path.insert(0, folder)
        slow = [{"response": "0.25"}] * (2 * args.workers)
        with RewardPool("slow_rewards.sleep", workers=args.workers) as pool:
            times = seconds(pool, slow, args.repeats)
            longer_times = seconds(pool, [{"response": "0.25"}] * (8 * args.workers), 1)
    print(
        json.dumps(
            {
                "workers": args.workers,
                "fast": round(statistics.median(rates)),
                "fast_all": [round(rate) for rate in rates],
                "slow_s": round(statistics.median(times), 3),
                "slow_all_s": [round(s, 3) for s in times],
                "slow_8_each_s": round(longer_times[0], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
