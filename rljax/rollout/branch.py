"""branch_scored: continuations of rows of a batch, scored as whole responses."""

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.rollout.environment import Environment
from rljax.rollout.ready import Ready
from rljax.rollout.report import RewardReport


def branch_scored(
    actor, reward, prompts: Prompts, batch: Batch, rows, at, key: jax.Array, sampling, *, n: int = 1
) -> tuple[Batch, RewardReport]:
    """n continuations of rows [M] of `batch` behind the first at [M] tokens of their responses
    (`Actor.branch`), M n rows, and their rewards. `batch.group` is the index into `prompts`.

    Row r draws with the key fold_in(key, r). Another M is another program."""
    reward = reward.reward if isinstance(reward, Ready) else reward
    if isinstance(reward, Environment):
        fix = "algorithm.collect='turn_tree()' branches episodes"
        raise InputError("branches of responses with an environment", fix=fix)
    group = fetch(batch.group)
    known = group < len(prompts.records)
    if not known[np.asarray(rows)].all():
        row = np.asarray(rows)[~known[np.asarray(rows)]].tolist()[:8]
        raise InputError(
            "branches of rows whose prompt is not known",
            value=row,
            fix="continue rows of this step's own prompts alone",
        )
    starts = np.asarray(prompts.response_starts)[np.where(known, group, 0)]
    out = actor.branch(batch, rows, at, starts, key, sampling, n=n)
    return reward(out, prompts)
