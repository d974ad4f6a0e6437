"""A task, losses and a dataflow from outside the package, for tests of learning."""

import itertools

from rljax.data.tasks import Task
from rljax.losses.policy import ppo_clip


def first_letter() -> Task:
    """ "bca>" -> "b": one letter, so that a policy gradient has nothing to hide behind."""
    records = [
        {
            "prompt": "".join(p) + ">", "ground_truth": p[0], "data_source": "toy",
            "extra_info": {}, "index": i,
        }
        for i, p in enumerate(itertools.product("abcd", repeat=3))
    ]  # fmt: skip
    test, train = records[::4], [r for i, r in enumerate(records) if i % 4]
    worked = [{"prompt": r["prompt"], "completion": r["ground_truth"]} for r in train]
    return Task("abcd>", train, test, worked)


def upside_down(policy, batch):
    """PPO with its sign flipped: it must unlearn."""
    loss, metrics = ppo_clip(policy, batch)
    return -loss, metrics
