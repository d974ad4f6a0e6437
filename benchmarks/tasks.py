"""The speed of tasks and their rewards in one process.

python benchmarks/tasks.py [--seconds=1] [--gym=basic_arithmetic,countdown,...]

Prints JSON: for each task the milliseconds until it is there (its test split is drawn then), the
median and the 90th percentile of the milliseconds per streamed row, and per scored answer.
"""

import argparse
import json
import statistics
import time

from rljax.components import resolve
from rljax.rewards.pool.calling import HOME, call_reward

TASKS = (
    "countdown(numbers=4)",
    "arithmetic(terms=4)",
    "sorting(items=10)",
    "json_extraction()",
    "code_tests()",
)


def timed(function) -> tuple[float, object]:
    started = time.perf_counter()
    value = function()
    return 1e3 * (time.perf_counter() - started), value


def measured(call, seconds: float) -> dict[str, float]:
    """call(0), call(1), ... for this long: milliseconds of one."""
    milliseconds, deadline = [], time.perf_counter() + seconds
    while len(milliseconds) < 10 or (time.perf_counter() < deadline and len(milliseconds) < 10_000):
        milliseconds.append(timed(lambda: call(len(milliseconds)))[0])
    return {
        "median_ms": round(statistics.median(milliseconds), 4),
        "p90_ms": round(statistics.quantiles(milliseconds, n=10)[-1], 4),
        "count": len(milliseconds),
    }


def of_task(spec: str, seconds: float) -> dict:
    build_ms, task = timed(resolve(spec, "rljax.tasks"))
    row = {"built_ms": round(build_ms, 1), "row": measured(lambda i: task.train[i], seconds)}
    rows, worked = task.test, task.worked_test
    if "code_tests" not in task.reward and len(worked) == len(rows):
        reward = resolve(task.reward, HOME)

        def score(i: int) -> float:
            index = i % len(rows)
            sample = {**rows[index], "response": worked[index]["completion"], "prompt": ""}
            return call_reward(reward, sample)[0]

        row["score"] = measured(score, seconds)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--gym", default="")
    options = parser.parse_args()
    names = [name for name in options.gym.split(",") if name]
    specs = [*TASKS, *(f"reasoning_gym(name={name!r}, test=8)" for name in names)]
    print(json.dumps({spec: of_task(spec, options.seconds) for spec in specs}, indent=2))


if __name__ == "__main__":
    main()
