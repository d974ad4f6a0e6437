"""Kinds of data. A dataflow declares the kind that it learns from: @contract(data="pairs").

rollouts      the policy's own samples, scored (online; the default)
samples       the policy's own samples, without a reward (on-policy distillation)
examples      demonstrations: text, prompt and completion, conversations (SFT)
pairs         a better and a worse completion, maybe a reference one (DPO, reward models)
safety        a safer and a more harmful completion, each labelled safe or unsafe (cost models)
unpaired      a completion and whether it is good (KTO)
stepwise      steps of a solution, each right or wrong (process reward models)
trajectories  a completion and its reward, maybe step by step (DQO, DRO)
"""

SAMPLED = ("rollouts", "samples")
OF_FILES = ("examples", "pairs", "safety", "unpaired", "stepwise", "trajectories")
PAIRED = ("pairs", "safety")
DATAFLOWS = {  # a dataflow that learns from each kind
    "rollouts": "grpo",
    "examples": "sft",
    "pairs": "preference",
    "safety": "cost_model",
    "unpaired": "kto",
    "stepwise": "process_reward_model",
    "trajectories": "dqo",
}
