"""rljax: RL post-training of language models in JAX.

A source makes a batch, a dataflow turns it into roles, and every part declares what it reads.

    config ──► setup ──► train: a source and a dataflow for each phase, evaluate, save
                           │
      source ──► Batch ──► dataflow ──► roles: Actor, Critic, Reference, ...
        ▲        batch     dataflows      │   roles, learn
        │                                 │
        └── rollout: sampler, rewards ◄───┘   the same parameter arrays

rljax/dataflows/grpo.py is the page to read first, docs/architecture.md explains the rest. Importing
this package imports nothing else: reward workers and --help start from here. The public names below
are imported when they are first used.
"""

import importlib

__version__ = "0.1.0"
# What pip calls this package. On the public index the name of the import is another project's.
DISTRIBUTION = "rljax-lm"

_PUBLIC = {
    "Config": "rljax.config",
    "validate": "rljax.validation",
    "train": "rljax.training",
    "evaluate": "rljax.training.evaluation",
    "contract": "rljax.contracts",
    "Metric": "rljax.metric",
    "Batch": "rljax.batch",
    "Actor": "rljax.roles",
    "Critic": "rljax.roles",
    "Reference": "rljax.roles",
    "Role": "rljax.roles",
    "program": "rljax.roles",
    "Reward": "rljax.rollout",
    "Rollout": "rljax.rollout",
    "Sampling": "rljax.sampler",
    "InputError": "rljax.errors",
    "RunStopped": "rljax.training",
}
_WITHOUT_JAX = ("Config", "InputError", "Metric", "contract")
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rljax' has no attribute {name!r}")
    if name not in _WITHOUT_JAX:
        importlib.import_module("rljax.doctor.before_jax").refuse_what_ends_jax()
    return vars(importlib.import_module(_PUBLIC[name]))[name]


def __dir__():
    return sorted([*globals(), *_PUBLIC])
