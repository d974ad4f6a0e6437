"""Dataflows: one program per file. (prompts, key, cfg, *, roles...) -> ({role: new role}, metrics).

Keyword-only arguments name the roles; rljax.train builds exactly those. A role with default None is
built
only when the config uses it (`reference`: some KL coefficient is above 0; `kl_controller`: a KL
target is set).
Keyword-only arguments that are no role are the dataflow's own options:
dataflow="vapo(positive_nll=0.1)".
"""

from rljax.dataflows.grpo import grpo
from rljax.dataflows.pf_ppo import pf_ppo
from rljax.dataflows.ppo import ppo
from rljax.dataflows.reinforce import reinforce
from rljax.dataflows.remax import remax
from rljax.dataflows.sft import sft
from rljax.dataflows.vapo import vapo

__all__ = ["grpo", "pf_ppo", "ppo", "reinforce", "remax", "sft", "vapo"]
