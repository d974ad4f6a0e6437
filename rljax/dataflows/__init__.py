"""Dataflows: one program per file. (prompts, key, cfg, *, roles...) -> ({role: new role}, metrics).

Keyword-only arguments name the roles; rljax.train builds exactly those. A role with default None is
built
only when the config uses it (`reference`: some KL coefficient is above 0).
"""

from rljax.dataflows.grpo import grpo
from rljax.dataflows.ppo import ppo
from rljax.dataflows.sft import sft

__all__ = ["grpo", "ppo", "sft"]
