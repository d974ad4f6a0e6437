"""Why RL: three toy experiments in which RL reaches what SFT on demonstrations does not.

rljax pipeline pipelines/why_rl --out=runs/why_rl
rljax pipeline pipelines/why_rl:teacher --out=runs/why_rl_teacher

Each is SFT to its plateau, and from there as much SFT again, or 200 steps of GRPO
(docs/cookbook/why_rl.md).

Hardware: 2 CPU cores shared with other work. Measured 2026-11-24, mean reward of 8 samples to each
of 64 held-out prompts after SFT, more SFT, RL. `:teacher` (no demonstration is worth more than
0.5): seed 0 0.42, 0.39, 0.93; seed 1 0.43, 0.39, 0.93; seed 2 0.37, 0.34, 0.96; 20 to 40 CPU
seconds with programs compiled before. `:objective`: seed 0 0.47, 0.51, 0.99; seed 1 0.47, 0.47,
1.00; seed 2 0.45, 0.45, 1.00. `:on_distribution`, with 95 % intervals: seed 0 0.46 (0.36 to 0.57),
0.46 (0.36 to 0.58), 0.61 (0.51 to 0.71); seed 1 0.21 (0.13 to 0.29), 0.25 (0.16 to 0.35), 0.22
(0.13 to 0.33). The SFT policy of seed 1 is at chance, one of five sums, and RL gains nothing: so
that RL goes on from a plateau of SFT by more than 0.1 is shown by `:teacher`, not by this one.
"""

from rljax.config import Config
from rljax.errors import InputError

# Each: the task, its reward, and the response tokens.
EXPERIMENTS = {
    # The demonstrations lack the best answer: 4 letters of the kind that counts, they show 0 to 2.
    "teacher": (
        "letter_quota(letters=8, kinds=4, quota=4, shown=2, prompts=256, test=64)",
        "letter_quota(quota=4)",
        10,
    ),
    # They have it, among all others: likelihood is another objective than the reward, which is a
    # count over the whole response and has no gradient.
    "objective": (
        "letter_quota(letters=8, kinds=4, quota=4, shown=8, prompts=256, test=64)",
        "letter_quota(quota=4)",
        10,
    ),
    # They are right, and few: SFT never sees what follows from the policy's own slips.
    "on_distribution": (
        "running_sum(terms=4, modulus=5, worked_examples=48, test=64)",
        "last_line()",
        8,
    ),
}


def get_config(variant: str = "") -> Config:
    """What all stages share. A variant is the name of one of the experiments: that one alone."""
    if variant and variant not in EXPERIMENTS:
        raise InputError("variant", value=variant, fix=f"write one of {', '.join(EXPERIMENTS)}")
    config = Config(dataflow="sft", trackers=(), steps=1)
    config.model = (
        "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)"
    )
    config.model_settings.remat = "none"
    config.data.train = EXPERIMENTS[variant][0] if variant else "letter_quota()"
    config.data.max_prompt_tokens = 5
    config.offline.max_tokens, config.offline.examples_per_step = 18, 32
    config.evaluate.prompts, config.evaluate.every_steps = 64, 20
    config.actor_optimizer.beta2 = 0.99
    config.checkpoint.every_steps = 50
    return config


def pipeline(variant: str = ""):
    for name, (task, reward, tokens) in EXPERIMENTS.items():
        if variant in ("", name):
            yield from experiment(name, task, reward, tokens)


def experiment(name: str, task: str, reward: str, tokens: int):
    """SFT to its plateau, and from there as much SFT again, or 200 steps of RL."""
    shared = {
        "command": "train",
        "data.train": task,
        "reward.function": reward,
        "sampler.max_response_tokens": tokens,
    }
    sft = {**shared, "steps": 200, "evaluate.prompts_from": task, "actor_optimizer.lr": 3e-3}
    yield {"stage": f"{name}_sft", **sft}
    yield {"stage": f"{name}_more_sft", "model": f"{{{name}_sft}}/policy", **sft}
    yield {
        "stage": f"{name}_rl",
        "model": f"{{{name}_sft}}/policy",
        **shared,
        "dataflow": "grpo",
        "steps": 200,
        "actor_optimizer.lr": 1e-3,
        "algorithm.policy_loss": "ppo_clip(clip_high=0.28)",
        "algorithm.entropy_coef": 0.003,
        "batch.prompts_per_step": 16,
        "batch.samples_per_prompt": 8,
        "batch.sequences_per_optimizer_step": 128,
    }
    for stage in ("sft", "more_sft", "rl"):
        yield {
            "stage": f"evaluate_{name}_{stage}",
            "command": "evaluate",
            "data": task,
            "checkpoint": f"{{{name}_{stage}}}/policy",
            "reward": reward,
            "samples": 8,
            "ks": (1,),
            "prompts": 64,
            "max_prompt_tokens": 5,
            "max_response_tokens": tokens,
        }
