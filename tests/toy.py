"""A task, losses and a dataflow from outside the package, for tests of learning."""

import itertools

from rljax.data.tasks import Task
from rljax.losses.policy import Policy, ppo_clip
from rljax.update import Objective


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


def objective(model, loss, *reductions, corrected=True, whole_step=False) -> Objective:
    """loss(policy, batch) -> (loss or losses, metrics), each loss with a reduction of its own."""

    def terms(policy, batch):
        losses, metrics = loss(policy, batch)
        return (losses if isinstance(losses, tuple) else (losses,)), metrics

    return Objective(
        lambda p, b: Policy(*model.logprobs(p, b)),
        terms,
        reductions,
        (corrected,) * len(reductions),
        whole_step,
    )
