"""Over-optimisation of a reward model: the proxy that is trained on rises, the true reward falls.

rljax pipeline --config=configs/pipelines/proxy_gold.py --out=runs/proxy_gold

The task: "bcad>" -> 8 letters, of which 4 should be "b"; the true reward is 1 at 4 and falls on
both sides. Demonstrations have 0 to 3. The proxy is a reward model of pairs of the SFT policy's
samples, labelled by the true reward with a fifth of the labels turned. GRPO is trained on the
proxy; the true reward is a part of weight 0, so that it is only logged. report.html of the stage rl
shows both against the root of the KL to the reference (Gao et al., arXiv 2210.10760).

Hardware: 2 CPU cores shared with other work. Measured 2026-11-24, seed 0, means over the samples of
a step: the proxy goes from 0.4 to 2.9; the true reward from 0.36 at step 1 to 0.75 at step 70 (root
of the KL 3.3) and back to 0.43 at step 150 (4.8). About 2 CPU minutes in all. Other seeds: not
measured.
"""

import hashlib

from rljax.config import Config

QUOTA = 4
TASK = f"letter_quota(letters=8, kinds=4, quota={QUOTA}, shown=3, prompts=256, test=64)"
GOLD = f"letter_quota(quota={QUOTA})"


def labeller(prompt, first: str, second: str, *, noise: float = 0.2) -> float:
    """1 or 0: which of two responses has the better true reward, turned for a share `noise` of the
    pairs; 0.5 where both are worth the same. The same pair has the same label in both orders."""
    from rljax.rewards import letter_quota

    values = [letter_quota(text, prompt[0], quota=QUOTA) for text in (first, second)]
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
    config.actor_optimizer.beta2 = config.critic_optimizer.beta2 = 0.99
    config.checkpoint.every_steps = 50
    return config


def pipeline():
    yield {
        "stage": "sft", "command": "train", "steps": 300, "actor_optimizer.lr": 3e-3,
        "evaluate.prompts_from": TASK, "evaluate.prompts": 64,
    }  # fmt: skip
    yield {
        "stage": "pairs", "command": "label preferences", "policy": "{sft}/policy", "data": TASK,
        "judge": f"{__file__}:labeller(noise=0.2)", "samples": 4, "temperature": 1.0,
        "max_prompt_tokens": 5, "max_response_tokens": 12,
    }  # fmt: skip
    yield {
        "stage": "scorer", "command": "train", "dataflow": "reward_model",
        "model": "{sft}/policy", "data.train": "{pairs}/pairs.jsonl",
        "steps": 500, "critic_optimizer.lr": 3e-3,
    }  # fmt: skip
    yield {
        "stage": "rl", "command": "train", "dataflow": "grpo", "model": "{sft}/policy",
        "reward.model": "{scorer}/reward_model",
        "reward.function": f"mixture(rewards=('reward_model()', '{GOLD}'), weights=(1.0, 0.0))",
        "evaluate.reward": GOLD, "evaluate.prompts": 64, "evaluate.every_steps": 10,
        "steps": 150, "algorithm.kl_in_loss": 0.001,
        "batch.prompts_per_step": 16, "batch.samples_per_prompt": 8,
        "batch.sequences_per_optimizer_step": 128, "actor_optimizer.lr": 5e-4,
    }  # fmt: skip
