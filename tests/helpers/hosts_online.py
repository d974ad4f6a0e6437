"""Steps of online learning, as a program of one host or of several: prints what each step sampled,
scored and learned, as one line of JSON.

python hosts_online.py FOLDER '[{"preset": "grpo", "steps": 2, "algorithm.collect": "once()"}, ...]'
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

from rljax import hosts
from rljax import setup as build
from rljax.arrays import fetch
from rljax.config.flags import load_config_file
from rljax.tracking import timing
from rljax.training.run import Run

REPO = Path(__file__).resolve().parents[2]
FIELDS = ("tokens", "segment_ids", "mask", "group", "scores", "rewards", "reward_parts")


def meet() -> None:
    """The hosts of the environment. GLOO_PORT: one process whose devices add as those of several
    do. Gloo's ring begins the sum of each piece of an array at another device; the devices of
    one process are added in their order."""
    if port := os.environ.get("GLOO_PORT"):
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, 1, 0, cluster_detection_method="deactivate")
    hosts.start(init_timeout_s=120)


def digest(tree) -> str:
    whole = hashlib.sha256()
    for leaf in jax.tree.leaves(fetch(tree)):
        whole.update(np.ascontiguousarray(leaf).tobytes())
    return whole.hexdigest()


class Recorded:
    """A source, and what was sampled and scored."""

    def __init__(self, source):
        self.source, self.steps = source, []

    def __getattr__(self, name):
        return getattr(self.source, name)

    def next(self, step, roles):
        batch, metrics = self.source.next(step, roles)
        rows = self.source.report.rows
        self.steps.append(
            {
                **{name: digest(getattr(batch, name)) for name in FIELDS},
                "prompts": [row.record.prompt_text for row in rows],
                "values": [repr(row.score.value) for row in rows],
                "parts": [row.score.parts for row in rows],
                "statuses": [row.score.status for row in rows],
                "messages": [row.score.message for row in rows],
                "decoded_here": sum(row.sample._fields["response"] is not None for row in rows),
                "shown": [row.example()["response"] for row in rows[:4]],
            }
        )
        return batch, metrics


def config_of(job: dict):
    config = load_config_file(f"{REPO}/configs/presets/{job['preset']}.py:tiny")
    config.compilation_cache, config.sft.steps = "", 2
    config.mesh.data, config.mesh.fsdp = 2, -1
    config.evaluate.prompts = 8
    for name, value in job.items():
        if name in ("preset", "steps"):
            continue
        *path, last = name.split(".")
        node = config
        for part in path:
            node = getattr(node, part)
        assert hasattr(node, last), name
        setattr(node, last, tuple(value) if isinstance(value, list) else value)
    return config


def learned(job: dict, folder: Path) -> dict:
    """What the steps of one run did."""
    config, shown = config_of(job), []
    with Run(build.build(config), folder) as run:
        run.begin(run.phase, build.initial_params(config, run.setup.model))
        for _ in range(config.sft.steps):
            run.step()
        main = run.setup.main
        if run.phase is not main:
            run.begin(main, run.roles["actor"].state.weights)
        recorded = run.sources[main.name] = Recorded(run.source)
        for _ in range(job["steps"]):
            with timing.collect() as timings:
                metrics = {k: repr(float(v)) for k, v in run.step().items()}
            ends = [end for name, _, end in timings.spans if name == "generate"]
            decoded_s = max(ends, default=0.0)
            early = sum(begun < decoded_s for begun, _ in timings.scoring)
            shown.append({**recorded.steps[-1], "metrics": metrics, "early_here": early})
        rubrics = run.reward.rubrics
        return {
            "steps": shown,
            "evaluation": {k: repr(float(v)) for k, v in run.evaluate().items()},
            "policy": digest(run.roles["actor"].state.params),
            "order": run.source.get_state(),
            "rubrics": rubrics.get_state() if rubrics is not None else None,
        }


if __name__ == "__main__":
    meet()
    where = Path(sys.argv[1]) / f"host-{hosts.index()}"
    where.mkdir(parents=True, exist_ok=True)
    print(json.dumps([learned(job, where) for job in json.loads(sys.argv[2])]))
