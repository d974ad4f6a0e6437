"""Dataflows: one program per file. (data, key, cfg, *, roles...) -> ({role: new role}, metrics).

The first parameter's name says what it reads (rljax.data.kinds): `prompts` to sample from, or rows
of a file: `examples`, `pairs`, `labelled`, `steps`, `trajectories`.
Keyword-only arguments name the roles; rljax.train builds exactly those. A role with default None is
built only when the config uses it (`reference`: some KL coefficient is above 0, or the preference
loss reads it; `kl_controller`: a KL target is set).
Keyword-only arguments that are no role are the dataflow's own options:
dataflow="vapo(positive_nll=0.1)". One that samples and learns by algorithm.preference_loss says so
by an attribute, `rows_per_example`: those of that loss; `has_opponent` if half of the samples are
another's.
"""

from rljax.dataflows.distil import distil, on_policy_distil
from rljax.dataflows.dqo import dqo, dro
from rljax.dataflows.games import nash_md, xpo
from rljax.dataflows.grpo import grpo
from rljax.dataflows.kto import bco, kto
from rljax.dataflows.online_dpo import online_dpo, sppo
from rljax.dataflows.pf_ppo import pf_ppo
from rljax.dataflows.ppo import ppo
from rljax.dataflows.preference import preference
from rljax.dataflows.reinforce import reinforce
from rljax.dataflows.remax import remax
from rljax.dataflows.reward_model import process_reward_model, reward_model
from rljax.dataflows.sft import sft
from rljax.dataflows.vapo import vapo

__all__ = [
    "bco",
    "distil",
    "dqo",
    "dro",
    "grpo",
    "kto",
    "nash_md",
    "on_policy_distil",
    "online_dpo",
    "pf_ppo",
    "ppo",
    "preference",
    "process_reward_model",
    "reinforce",
    "remax",
    "reward_model",
    "sft",
    "sppo",
    "vapo",
    "xpo",
]
