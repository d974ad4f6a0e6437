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

Hardware, time and accuracy: docs/measurements.md.
"""

import random

from rljax.config import Config


def sums(*, test: int = 200):
    """Sums of two numbers of two digits, as chat messages."""
    from rljax.data.tasks.task import Problem, procedural

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
        "name": "Reject Sampling", "rows": "selected", "dataflow": "sft",
        "actor_optimizer.lr": imitates,
    }  # fmt: skip
    yield {
        "name": "DPO", "rows": "pairs", "dataflow": "preference",
        "algorithm.preference_loss": "dpo(beta=0.1)", "actor_optimizer.lr": compares,
    }  # fmt: skip
    # One of ten samples is right: nine times their weight makes both kinds count alike.
    yield {
        "name": "KTO", "rows": "labelled", "dataflow": "kto", "actor_optimizer.lr": compares,
        "algorithm.preference_loss": "kto(beta=0.1, desirable_weight=9.0)",
    }  # fmt: skip
    yield {
        "name": "DRO", "rows": "outcome", "dataflow": "dro(tau=0.1)",
        "actor_optimizer.lr": compares, "critic_optimizer.lr": critic,
    }  # fmt: skip
    yield {
        "name": "DQO", "rows": "outcome", "dataflow": "dqo(beta=0.1)",
        "actor_optimizer.lr": compares, "critic_optimizer.lr": critic,
    }  # fmt: skip
