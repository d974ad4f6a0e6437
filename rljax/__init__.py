"""rljax: RL post-training of language models in JAX.

    config.py ─► build.py ─► run.py ◄─ train.py: {step, evaluate, log, save}
                               │
       data ─► prompts         │  one step = one dataflow (dataflows/grpo.py is the page to read
       first)
                  │            ▼
              Actor.generate ─► sampler/ ─► Batch ─► Reward ─► rewards/pool
                  ▲                                     │
                  │           correction, advantages, losses ─► update.py ─► new Actor, Critic
                  └──────────────── the same parameter arrays ◄──────────────────┘

Importing this package imports nothing else: reward workers and --help start from here. The public
names
below are imported when they are first used.
"""

import importlib

_PUBLIC = {
    "Config": "rljax.config",
    "validate": "rljax.validation",
    "train": "rljax.train",
    "evaluate": "rljax.evaluation.policy",
    "Batch": "rljax.batch",
    "Actor": "rljax.roles",
    "Critic": "rljax.roles",
    "Reference": "rljax.roles",
    "Reward": "rljax.roles",
    "program": "rljax.roles",
    "Sampling": "rljax.sampler",
    "InputError": "rljax.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rljax' has no attribute {name!r}")
    # train and evaluate are modules: rljax.train.train(config).
    module = importlib.import_module(_PUBLIC[name])
    return module if name in ("train", "evaluate") else vars(module)[name]


def __dir__():
    return sorted([*globals(), *_PUBLIC])
