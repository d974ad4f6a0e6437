"""ReMax: REINFORCE whose baseline is the score of the greedy response to the same prompt (arXiv
2310.10505)."""

import jax.numpy as jnp
import numpy as np

from rljax.arrays import place
from rljax.batch import row_scores
from rljax.dataflows.grpo import learn
from rljax.dataflows.stages import shape_scores
from rljax.rollout import sample_scored


def remax(prompts, key, cfg, *, actor, reward, reference=None, kl_controller=None):
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    # The one line that ReMax adds, and its reward.
    likeliest = cfg.sampling.greedy()
    greedy, _ = sample_scored(actor, reward, prompts, key, likeliest)
    batch = with_greedy_baseline(batch, shape_scores(greedy, cfg))
    roles = dict(actor=actor, reference=reference, kl_controller=kl_controller)
    new, metrics = learn(batch, cfg, **roles)
    failed = ~np.asarray(greedy.mask).any(axis=1)
    scores = np.asarray(greedy.scores)[~failed]
    found = {"remax/greedy_reward": float(scores.mean()) if scores.size else 0.0}
    return new, {**metrics, **counts, **found}


def with_greedy_baseline(batch, greedy):
    """values = the greedy score, shaped like the row's own, of the row's prompt; rows of a prompt
    whose greedy reward failed
    are masked out, like any failed reward."""
    group = np.asarray(batch.group)
    prompt = np.where(group < greedy.rows, group, 0)  # a row whose own reward failed has mask 0
    known = np.asarray(greedy.mask).any(axis=1)[prompt].astype(np.float32)
    scores = np.asarray(row_scores(greedy))[prompt]
    known, scores = place((known, scores), _mesh_of(batch))
    return batch.replace(
        mask=batch.mask * known[:, None],
        values=jnp.where(batch.mask > 0, scores[:, None], 0.0),
    )


def _mesh_of(batch):
    return batch.tokens.sharding.mesh
