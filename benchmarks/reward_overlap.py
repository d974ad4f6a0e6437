"""Seconds of sampling and scoring, one after the other and overlapped.

    python benchmarks/reward_overlap.py [--reward-s 0 0.05 2] [--workers 8] [--repeats 3]

Prints one JSON object per reward time, in seconds, medians of `repeats` that take turns:
`decoding` of generate alone; `after` of generate and then score, `overlapped` of `sample`;
`own` of scoring the whole batch alone. `waited`: of either, the part after the last token, which
scoring adds to a step whatever else the machine does; `hidden`: scoring during decoding.
The reward sleeps, so that it takes no processor from decoding.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.report.timeline import scored_while_decoding
from rljax.rewards.pool.pool import RewardPool
from rljax.roles import Reference
from rljax.rollout import Reward, make_sample
from rljax.sampler import Decoding, Sampling
from rljax.tracking import timing

VOCAB, EOS = 128, 1
REWARDS = """
import time

def sleep(response, seconds):
    time.sleep(seconds)
    return float(len(response))
"""


class Words:
    special_ids = ()

    @staticmethod
    def decode(ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reward-s", type=float, nargs="+", default=[0.0, 0.05, 2.0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--embed", type=int, default=64)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--loop", default="device")
    return parser.parse_args()


def policy(args) -> Reference:
    heads = args.embed // 64
    config = decoder(
        VOCAB,
        layers=2,
        embed=args.embed,
        mlp=3 * args.embed,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
    )
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params = model.init(jax.random.key(0))
    return Reference(params, model, 1.0, Decoding(slots=args.slots, loop=args.loop))


def prompts(count: int) -> Prompts:
    rng = np.random.default_rng(0)
    records = [
        PromptRecord(
            token_ids=rng.integers(2, VOCAB, 16),
            prompt_text="",
            ground_truth="",
            index=i,
            data_source="random",
            extra_info={},
        )
        for i in range(count)
    ]
    return Prompts.from_records(records, length=16)


def seconds(function) -> dict[str, float]:
    """Seconds of the whole call, of scoring after the last token, and of scoring before it."""
    with timing.collect() as timings:
        jax.block_until_ready(function())
    return {
        "all": time.monotonic() - timings.begun_s,
        "waited": timings.seconds.get("reward", 0.0),
        "hidden": scored_while_decoding(timings),
    }


def measured(actor, args, reward_s: float) -> dict:
    data, key = prompts(args.prompts), jax.random.key(1)
    sampling = Sampling(max_response_tokens=args.max_tokens, stop_ids=(EOS,))
    text = f"overlap_rewards.sleep(seconds={reward_s})"
    with RewardPool(text, workers=args.workers, timeout_s=60) as pool:
        reward = Reward(pool, Words, actor.model.mesh)

        def generate():
            return actor.generate(data, key, sampling, n=args.samples)

        ways = {
            "decoding": generate,
            "after": lambda: reward(generate(), data)[0].scores,
            "overlapped": lambda: (
                make_sample(actor, reward, sampling)(data, key, n=args.samples)[0].scores
            ),
        }
        batch = ways["decoding"]()
        assert np.array_equal(ways["after"](), ways["overlapped"]())  # and all is compiled
        ways["own"] = lambda: reward(batch, data)[0].scores
        times = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, way in ways.items():
                times[name].append(seconds(way))

    def middle(name: str, part: str = "all") -> float:
        return round(statistics.median(lap[part] for lap in times[name]), 3)

    def spread(name: str, part: str = "all") -> list[float]:
        laps = [lap[part] for lap in times[name]]
        return [round(min(laps), 3), round(max(laps), 3)]

    tokens = np.asarray(batch.mask).sum(axis=1)
    return {
        "reward_s": reward_s,
        "rows": len(tokens),
        "workers": args.workers,
        "tokens_mean": round(float(tokens.mean()), 1),
        "tokens_max": int(tokens.max()),
        **{name: middle(name) for name in ways},
        "waited": {name: middle(name, "waited") for name in ("after", "overlapped")},
        "hidden": middle("overlapped", "hidden"),
        "spread": {name: spread(name) for name in ways},
        "spread_waited": {name: spread(name, "waited") for name in ("after", "overlapped")},
    }


def main() -> None:
    args = parsed()
    actor = policy(args)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "overlap_rewards.py").write_text(REWARDS)
        sys.path.insert(0, folder)
        for reward_s in args.reward_s:
            print(json.dumps(measured(actor, args, reward_s)), flush=True)


if __name__ == "__main__":
    main()
