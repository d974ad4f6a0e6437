"""Tiny runs that learn from a file: rows of every kind about one rule, and configs of seconds.

The rule: of two words in the prompt the one that comes first in the alphabet is right.
"""

import json
import random
from pathlib import Path

from tiny_tokenizer import write_tokenizer

from rljax.config import Config

WORDS = ("apples", "clips", "digits", "friends", "question", "answer")


def rows(kind: str, count: int, seed: int) -> list[dict]:
    """Rows of one kind."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        first, second = rng.sample(WORDS, 2)
        prompt, (good, bad) = f"how many {first} and {second}? ", sorted((first, second))
        right = rng.random() < 0.5
        completion = good if right else bad
        out.append(
            {
                "examples": dict(prompt=prompt, completion=good),
                "pairs": dict(prompt=prompt, chosen=good, rejected=bad),
                "unpaired": dict(prompt=prompt, completion=completion, label=right),
                "trajectories": dict(prompt=prompt, completion=completion, reward=float(right)),
                "stepwise": dict(
                    prompt=prompt, completions=[good, completion], labels=[True, right]
                ),
                "prompts": dict(prompt=prompt, ground_truth=good),
            }[kind]
        )
    return out


def write_rows(folder: Path, kind: str, train: int = 64, test: int = 24) -> str:
    """Files of both splits; the spec that names them."""
    for seed, (split, count) in enumerate((("train", train), ("test", test))):
        lines = [json.dumps(row) for row in rows(kind, count, seed)]
        (folder / f"{kind}_{split}.jsonl").write_text("\n".join(lines))
    return str(folder / f"{kind}_{{split}}.jsonl")


def offline_config(folder: Path, kind: str, dataflow: str, run: str, **fields) -> Config:
    """A run of 6 steps on 16 examples each; `batch__epochs=2` sets batch.epochs."""
    if not (folder / "tokenizer").exists():
        write_tokenizer(folder / "tokenizer")
    config = Config(dataflow=dataflow, steps=6, seed=3, run_dir=str(folder / run))
    config.model = "decoder(layers=1, embed=48, mlp=96, heads=2, kv_heads=2, head_dim=24)"
    config.tokenizer, config.model_settings.remat = str(folder / "tokenizer"), "none"
    config.data.train = config.data.test = write_rows(folder, kind)
    config.offline.examples_per_step, config.offline.max_tokens = 16, 48
    config.actor_optimizer.lr = config.critic_optimizer.lr = 3e-3
    config.evaluate.every_steps, config.evaluate.prompts = 3, 24
    config.checkpoint.every_steps = 0  # at the end: a save costs as much as a step
    config.trackers, config.compilation_cache, config.export = (), "", False
    for name, value in fields.items():
        node, *path = config, *name.split("__")
        for part in path[:-1]:
            node = getattr(node, part)
        assert hasattr(node, path[-1]), name
        setattr(node, path[-1], value)
    return config


def metrics_of(run_dir) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
