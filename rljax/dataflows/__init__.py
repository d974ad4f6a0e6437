"""Dataflows: one program per page. (batch, key, cfg, *, roles..., options) -> (roles, metrics).

What a page learns from is declared: @contract(data=...), one of rljax.data.kinds; without it,
scored rollouts. Keyword-only arguments name roles (rljax.setup.role_table, config.roles); the run
builds exactly those. A role with default None is built where the config needs it (`reference`: a KL
coefficient is above 0, or the loss reads its log-probs; `kl_controller`, `entropy_controller`: such
a target is set). Other keyword-only arguments are the page's options:
dataflow="vapo(positive_nll=0.1)".
"""

from rljax.dataflows.cgpo import cgpo
from rljax.dataflows.distil import distil, on_policy_distil
from rljax.dataflows.dqo import dqo, dro
from rljax.dataflows.expert_iteration import expert_iteration
from rljax.dataflows.grpo import grpo
from rljax.dataflows.kto import bco, kto
from rljax.dataflows.online_dpo import nash_md, online_dpo, sppo, xpo
from rljax.dataflows.pf_ppo import pf_ppo
from rljax.dataflows.ppo import ppo
from rljax.dataflows.preference import preference
from rljax.dataflows.prime import prime
from rljax.dataflows.raft import raft
from rljax.dataflows.reinforce import reinforce
from rljax.dataflows.remax import remax
from rljax.dataflows.reward_model import cost_model, process_reward_model, reward_model
from rljax.dataflows.safe_rlhf import safe_rlhf
from rljax.dataflows.self_play import self_play
from rljax.dataflows.sft import sft
from rljax.dataflows.vapo import vapo

__all__ = [
    "bco",
    "cgpo",
    "cost_model",
    "distil",
    "dqo",
    "dro",
    "expert_iteration",
    "grpo",
    "kto",
    "nash_md",
    "on_policy_distil",
    "online_dpo",
    "pf_ppo",
    "ppo",
    "preference",
    "prime",
    "process_reward_model",
    "raft",
    "reinforce",
    "remax",
    "reward_model",
    "safe_rlhf",
    "self_play",
    "sft",
    "sppo",
    "vapo",
    "xpo",
]
