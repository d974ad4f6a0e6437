"""Kinds of data. A dataflow declares the kind that it learns from: @contract(data="pairs")."""

from typing import NamedTuple

_SAMPLER_FIELDS = tuple(
    "sampler_logprobs sampler_log_kept entropy policy_version group finish_reason".split()
)


class Kind(NamedTuple):
    """A kind of data: a dataflow that learns from it, and the fields that its batches have beside
    tokens, segment_ids, positions and mask."""

    dataflow: str
    fields: tuple[str, ...]
    sampled: bool = False  # by the policy; else rows of a file
    paired: bool = False  # two completions of a prompt


KINDS = {
    # The policy's own samples, scored (online; the default).
    "rollouts": Kind("grpo", (*_SAMPLER_FIELDS, "rewards", "scores"), sampled=True),
    # The policy's own samples, without a reward (on-policy distillation).
    "samples": Kind("on_policy_distil", _SAMPLER_FIELDS, sampled=True),
    # Demonstrations: text, prompt and completion, conversations (SFT).
    "examples": Kind("sft", ()),
    # A better and a worse completion, maybe a reference one (DPO, reward models).
    "pairs": Kind("preference", ("scores", "group"), paired=True),
    # A safer and a more harmful completion, each labelled safe or unsafe (cost models).
    "safety": Kind("cost_model", ("costs", "group"), paired=True),
    # A completion, labelled as good or bad (KTO).
    "unpaired": Kind("kto", ("scores",)),
    # Steps of a solution, each right or wrong (process reward models).
    "stepwise": Kind("process_reward_model", ("process_rewards",)),
    # A completion and its reward, maybe step by step (DQO, DRO).
    "trajectories": Kind("dqo", ("scores", "finish_reason", "rewards")),
}
SAMPLED = tuple(name for name, kind in KINDS.items() if kind.sampled)
OF_FILES = tuple(name for name, kind in KINDS.items() if not kind.sampled)
PAIRED = tuple(name for name, kind in KINDS.items() if kind.paired)
