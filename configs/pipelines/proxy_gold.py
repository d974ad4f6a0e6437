"""Over-optimisation of a reward model: the proxy that is trained on rises, the true reward falls.

rljax pipeline pipelines/proxy_gold --out=runs/proxy_gold

The true reward counts one letter in responses of 10 letters: 1 where it stands 5 times, less with
every one too few or too many. Demonstrations, in which it is one of 8, seldom have more than 3. The
proxy is a reward model of pairs of the SFT policy's samples, labelled by the true reward with a
fifth of the labels turned: it sees that more is better. GRPO is trained on the proxy; the true
reward is a part of weight 0, so that it is only logged. report.html of the stage rl shows both
against the root of the KL to the reference (Gao et al., arXiv 2210.10760).

Hardware: 2 CPU cores shared with other work. Measured 2026-11-24 with
XLA_FLAGS=--xla_backend_optimization_level=0, means of the true reward over the samples of steps 1
to 3, of the best five steps in a row, of the last five, and of the proxy over the same five best
and the last ten: seed 0 0.25, 0.76 (steps 9 to 13), 0.00, and 1.17, 2.05; seed 1 0.31, 0.66 (6 to
10), 0.01, and 0.70, 1.56; seed 2 0.29, 0.72 (8 to 12), 0.01, and 1.63, 2.09. The root of the KL is
2.2 to 2.7 at the best steps and 6.0 to 7.1 at the end. About 2 CPU minutes in all. How much the
settings matter: with responses of 8 letters and a quota of 4 the reward model of seed 0 found the
quota, and the true reward still rose at step 71 (0.76); with a letter that each prompt names, the
reward model ignored the prompt, and the true reward fell without having risen.
"""

import hashlib

from rljax.config import Config

LETTER, QUOTA = "a", 5
TASK = "letter_quota(letters=10, kinds=8, quota=5, shown=3, prompts=256, test=64)"
GOLD = f"{__file__}:gold()"


def gold(response) -> float:
    """The true reward: 1 where the letter stands QUOTA times, less with every one too few or too
    many."""
    from rljax.rewards import letter_quota

    return letter_quota(response, LETTER, quota=QUOTA)


def labeller(prompt, first: str, second: str, *, noise: float = 0.2) -> float:
    """1 or 0: which of two responses has the better true reward, turned for a share `noise` of the
    pairs; 0.5 where both are worth the same. The same pair has the same label in both orders."""
    values = [gold(text) for text in (first, second)]
    if values[0] == values[1]:
        return 0.5
    pair = "\n".join([prompt, *sorted((first, second))])
    drawn = int.from_bytes(hashlib.sha256(pair.encode()).digest()[:8], "big") / 2**64
    return float((values[0] > values[1]) != (drawn < noise))


def get_config() -> Config:
    """What all stages share."""
    config = Config(dataflow="sft", trackers=(), steps=1)
    config.model = (
        "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)"
    )
    config.model_settings.remat = "none"
    config.data.train, config.data.max_prompt_tokens = TASK, 5
    config.sampler.max_response_tokens = 12
    config.offline.max_tokens = 18
    config.actor_optimizer.beta2 = 0.99
    config.checkpoint.every_steps = 50
    return config


def pipeline():
    yield {
        "stage": "sft",
        "command": "train",
        "steps": 120,
        "actor_optimizer.lr": 3e-3,
        "evaluate.prompts_from": TASK,
        "evaluate.prompts": 64,
    }
    yield {
        "stage": "pairs",
        "command": "label preferences",
        "policy": "{sft}/policy",
        "data": TASK,
        "judge": f"{__file__}:labeller(noise=0.2)",
        "keep_truncated": True,  # else no label says what one without an end is worth
        "samples": 8,
        "temperature": 1.0,
        "max_prompt_tokens": 5,
        "max_response_tokens": 12,
    }
    yield {
        "stage": "scorer",
        "command": "train",
        "dataflow": "reward_model",
        "model": "{sft}/policy",
        "data.train": "{pairs}/pairs.jsonl",
        "steps": 200,
        "critic_optimizer.lr": 2e-3,
        "critic_optimizer.beta2": 0.99,
    }
    yield {
        "stage": "rl",
        "command": "train",
        "dataflow": "grpo",
        "model": "{sft}/policy",
        "reward.model": "{scorer}/reward_model",
        "reward.function": f"mixture(rewards=('reward_model()', '{GOLD}'), weights=(1.0, 0.0))",
        "evaluate.reward": GOLD,
        "evaluate.prompts": 64,
        "evaluate.every_steps": 10,
        "steps": 80,
        "algorithm.kl_in_loss": 0.001,
        "batch.prompts_per_step": 16,
        "batch.samples_per_prompt": 8,
        "batch.sequences_per_optimizer_step": 128,
        "actor_optimizer.lr": 5e-4,
    }
