"""The offline comparison on a real model: what SmolLM2-135M-Instruct learns from its own samples.

rljax compare --config=real/compare_offline --config.model=MODEL_FOLDER --out=runs/real_offline \\
    --prompts=128 --samples=8 --steps=4 --test_prompts=100 --test_samples=2

The task: "What is 25 + 60? Reply with the number only.", right if the last number of the response
is the sum. The base policy is the model as it is (steps=0). At temperature 0.7 and with 32 tokens
70 % of 243 of its samples ended, 9 % were right, and 7 of 32 prompts had a pair; with 12 tokens
32 % would have ended, and a sample that was cut is neither imitated nor compared.

Every method of methods() learns from the same samples of the base policy, full weights, with the
same number of steps and of examples a step; a pair is one example. --seeds draw other samples and
another order.

Learning rates: that of GRPO on this task (2e-5) for what imitates, half of it for what compares
with a reference; the critics' heads start from zeros. They were not searched.

Measured 2026-11-28, seeds 0 to 2, 100 held-out prompts, 2 samples each; accuracy in % with its 95 %
interval, and the difference to the base policy, prompt by prompt:

    method           greedy               sample               greedy - base       sample - base
    base             22.0 [14.0, 30.0]     8.2 [ 5.2, 11.5]
    SFT              64.3 [55.0, 74.0]    48.0 [40.7, 55.5]    42.3 [31.3, 52.7]   39.8 [32.5, 47.7]
    Reject Sampling  61.7 [52.3, 70.0]    44.7 [37.0, 52.8]    39.7 [29.0, 49.3]   36.5 [29.0, 44.5]
    DPO              53.3 [42.7, 63.3]    37.5 [28.3, 46.5]    31.3 [20.0, 42.3]   29.3 [20.2, 38.0]
    KTO              25.7 [ 9.7, 46.0]    13.3 [ 7.2, 20.0]     3.7 [-14.0, 24.0]   5.2 [-1.2, 12.3]
    DRO              40.3 [26.3, 57.0]    19.8 [13.3, 28.0]    18.3 [ 5.7, 34.3]   11.7 [ 5.5, 19.8]
    DQO              47.0 [30.0, 63.0]    25.0 [16.8, 34.5]    25.0 [10.0, 41.0]   16.8 [ 8.5, 26.3]

What imitates right samples gains most within four steps; DQO is above DRO and KTO, and below SFT,
rejection sampling and DPO.

Hardware: two CPU cores shared with other work, 29 CPU minutes a seed, 6 GB.
"""

import random

from rljax.config import Config


def sums(*, test: int = 200):
    """Sums of two numbers of two digits, as chat messages."""
    from rljax.tasks.task import Problem, procedural

    def draw(rng: random.Random) -> Problem:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        prompt = f"What is {a} + {b}? Reply with the number only."
        return Problem(prompt, str(a + b), f"{a + b}")

    reward = "integer_answer(low=0, high=999999)"
    return procedural("sums", draw, reward=reward, chat=True, prompts=2000, test=test)


def get_config() -> Config:
    """The base policy, and what all methods share: model, data, sampler, optimizer."""
    config = Config(dataflow="sft", steps=0, trackers=())
    config.data.train = f"{__file__}:sums()"
    config.data.max_prompt_tokens = 64
    config.sampler.max_response_tokens, config.sampler.temperature = 32, 0.7
    config.offline.examples_per_step = 16
    config.offline.max_tokens = 100
    config.evaluate.prompts_from = config.data.train
    config.reward.workers = 1
    config.checkpoint.every_steps = 0
    return config


def methods():
    """Rows of the table: a name, which rows of the file it reads, and fields of the config."""
    imitates, compares, critic = 2e-5, 1e-5, 2e-5
    yield {"name": "SFT", "rows": "correct", "dataflow": "sft", "actor_optimizer.lr": imitates}
    yield {
        "name": "Reject Sampling",
        "rows": "selected",
        "dataflow": "sft",
        "actor_optimizer.lr": imitates,
    }
    yield {
        "name": "DPO",
        "rows": "pairs",
        "dataflow": "preference",
        "algorithm.preference_loss": "dpo(beta=0.1)",
        "actor_optimizer.lr": compares,
    }
    # One of ten samples is right: nine times their weight makes both kinds count alike.
    yield {
        "name": "KTO",
        "rows": "labelled",
        "dataflow": "kto",
        "actor_optimizer.lr": compares,
        "algorithm.preference_loss": "kto(beta=0.1, desirable_weight=9.0)",
    }
    yield {
        "name": "DRO",
        "rows": "outcome",
        "dataflow": "dro(tau=0.1)",
        "actor_optimizer.lr": compares,
        "critic_optimizer.lr": critic,
    }
    yield {
        "name": "DQO",
        "rows": "outcome",
        "dataflow": "dqo(beta=0.1)",
        "actor_optimizer.lr": compares,
        "critic_optimizer.lr": critic,
    }
