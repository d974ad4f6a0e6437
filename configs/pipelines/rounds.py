"""Rounds of RLHF: labels, a new reward model, rejection sampling, SFT, DPO, and again.

rljax pipeline --config=configs/pipelines/rounds.py --out=runs/rounds

Each round begins with the last one's policy. Its samples are labelled by the true reward, a reward
model is trained on the labels of all rounds, it chooses the best of 16 samples for SFT, and labels
the pairs for DPO.

Hardware, time and results: not measured to the end.
"""

from rljax.config import Config

TASK = "letter_quota(letters=6, kinds=4, quota=4, shown=3, prompts=256, test=64)"
GOLD = "letter_quota(quota=4)"
ROUNDS = 2


def get_config() -> Config:
    """What all stages share."""
    config = Config(dataflow="sft", trackers=(), steps=1)
    config.model = (
        "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)"
    )
    config.model_settings.remat = "none"
    config.data.train, config.data.max_prompt_tokens = TASK, 5
    config.sampler.max_response_tokens = 8
    config.offline.max_tokens = 14
    config.offline.examples_per_step = 32
    config.actor_optimizer.beta2 = config.critic_optimizer.beta2 = 0.99
    config.checkpoint.every_steps = 25
    return config


def pipeline():
    sampling = {"max_prompt_tokens": 5, "max_response_tokens": 8, "data": TASK}
    measured = {"evaluate.prompts_from": TASK, "evaluate.prompts": 64, "evaluate.reward": GOLD}
    yield {
        "stage": "sft", "command": "train", "steps": 120, "actor_optimizer.lr": 3e-3, **measured,
    }  # fmt: skip
    policy, labels = "{sft}/policy", ()
    for r in range(1, ROUNDS + 1):
        # "Human" labels of this round's policy: the true reward tells the better of its samples.
        yield {
            "stage": f"pairs_{r}", "command": "sample", "checkpoint": policy, "reward": GOLD,
            "samples": 4, "pairs": "pairs.jsonl", **sampling,
        }  # fmt: skip
        labels += (f"{{pairs_{r}}}/pairs.jsonl",)
        # The reward model is trained anew on the labels of all rounds.
        yield {
            "stage": f"scorer_{r}", "command": "train", "dataflow": "reward_model",
            "model": "{sft}/policy", "data.train": labels[0], "data.sources": labels[1:],
            "steps": 120, "critic_optimizer.lr": 2e-3,
        }  # fmt: skip
        scorer = f"{{scorer_{r}}}/reward_model"
        yield {
            "stage": f"best_{r}", "command": "sample", "checkpoint": policy,
            "reward_model": scorer, "samples": 16, **sampling,
        }  # fmt: skip
        yield {
            "stage": f"sft_{r}", "command": "train", "model": policy,
            "data.train": f"{{best_{r}}}/samples.jsonl", "steps": 40,
            "actor_optimizer.lr": 1e-3, **measured,
        }  # fmt: skip
        yield {
            "stage": f"labels_{r}", "command": "label preferences",
            "policy": f"{{sft_{r}}}/policy", "reward_model": scorer, "samples": 4, **sampling,
        }  # fmt: skip
        yield {
            "stage": f"dpo_{r}", "command": "train", "dataflow": "preference",
            "model": f"{{sft_{r}}}/policy", "data.train": f"{{labels_{r}}}/pairs.jsonl",
            "algorithm.preference_loss": "dpo(beta=0.1)", "steps": 30,
            "actor_optimizer.lr": 3e-4, **measured,
        }  # fmt: skip
        policy = f"{{dpo_{r}}}/policy"
        yield {
            "stage": f"evaluate_{r}", "command": "evaluate", "checkpoint": policy,
            "reward": GOLD, "samples": 4, "ks": (1,), "prompts": 64, **sampling,
        }  # fmt: skip
