"""rljax in a comparison on a real model (real.py): the steps of a run of the config below."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import real_rows
from real_worker import RealWorker

from rljax.arrays import fetch
from rljax.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelSettings,
    OptimizerConfig,
    RewardConfig,
    SamplerConfig,
)
from rljax.setup import build, initial_params
from rljax.training.run import Run


def make_config(options: dict, folder: str) -> Config:
    """The run: the defaults of Config but for what real.py gives to both systems."""
    rows = options["prompts"] * options["samples"]
    columns = options["max_prompt_tokens"] + options["max_response_tokens"]
    task = f"{real_rows.__file__}:task(path={options['rows']!r}, reward={options['reward']!r})"
    config = Config(
        model=options["model"],
        steps=10**6,
        seed=options["seed"],
        run_dir=folder,
        export=False,
        compilation_cache="",
        data=DataConfig(
            train=task, max_prompt_tokens=options["max_prompt_tokens"], overlong="error"
        ),
        batch=BatchConfig(
            prompts_per_step=options["prompts"],
            samples_per_prompt=options["samples"],
            sequences_per_optimizer_step=rows,
            tokens_per_microbatch=(options["microbatch"] or rows) * columns,
        ),
        sampler=SamplerConfig(max_response_tokens=options["max_response_tokens"]),
        reward=RewardConfig(function=options["reward"], workers=1),
        model_settings=ModelSettings(dtype=options["dtype"], remat=options["remat"]),
        actor_optimizer=OptimizerConfig(lr=options["lr"]),
    )
    config.algorithm.advantage = "group_relative(std='sample', eps=1e-4)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.2)"
    config.algorithm.reduction = "token_mean"
    return config


def prompts_of(batch) -> list[tuple[int, ...]]:
    """The token ids of each row's prompt."""
    tokens, mask, real = (fetch(x) for x in (batch.tokens, batch.mask, batch.segment_ids))
    return [
        tuple(int(t) for t in row[(r > 0) & (np.cumsum(m > 0) == 0)])
        for row, m, r in zip(tokens, mask, real, strict=True)
    ]


def main() -> None:
    worker = RealWorker()
    with tempfile.TemporaryDirectory() as folder:
        setup = build(make_config(worker.options, folder))
        with Run(setup, Path(folder)) as run:
            run.begin(run.phase, initial_params(setup.config, setup.model))
            source, generate = run.source, run.source.next

            def watched(step, roles):
                batch, metrics = jax.block_until_ready(generate(step, roles))
                worker.generated(int((fetch(batch.mask) > 0).sum()))
                worker.batch = batch
                return batch, metrics

            source.next = watched
            worker.say({"ready": {"rljax": "this checkout", "jax": jax.__version__}})
            while True:
                worker.wait()
                run.step()
                jax.block_until_ready(run.roles)
                worker.learned(prompts_of(worker.batch), fetch(worker.batch.scores).tolist())


if __name__ == "__main__":
    main()
