"""The rollout of ReMax: every row's value is the score of the greedy response to its prompt."""

import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import row_scores
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import contract
from rljax.rollout.reward import sample_scored
from rljax.rollout.rollout import run_rollout
from rljax.shaping.scores import apply_shaping


@contract(fills=("values",))
def greedy_baseline(prompts, key, cfg, *, actor, reward, draw, inner: str = "once()"):
    """The rollout `inner` with values: the score of the prompt's greedy response, shaped like those
    of the samples (arXiv 2310.10505)."""
    inner = resolve(inner, NAMESPACES["collect"])
    done = run_rollout(inner, prompts, key, cfg, actor=actor, reward=reward, draw=draw)
    greedy, _ = sample_scored(actor, reward, done.prompts, key, cfg.sampling.greedy())
    scores = np.asarray(fetch(row_scores(apply_shaping(greedy, cfg.reward_shaping))))
    host = fetch((greedy.mask, greedy.scores))
    known = host[0].any(axis=1)
    batch = with_greedy_baseline(done.batch, scores, known, actor.model.mesh)
    mean = float(host[1][known].mean()) if known.any() else 0.0
    return done.replace(batch=batch, metrics={**done.metrics, "remax/greedy_reward": mean})


def with_greedy_baseline(batch, scores: np.ndarray, known: np.ndarray, mesh):
    """The batch with values = the greedy score [P] of the row's prompt. Rows whose prompt has no
    known greedy score [P] are masked, as rows with a failed reward are."""
    group = fetch(batch.group)
    prompt = np.where(group < len(scores), group, 0)  # a row whose own reward failed has mask 0
    keep, values = place((known[prompt].astype(np.float32), scores[prompt]), mesh)
    return batch.replace(
        mask=batch.mask * keep[:, None], values=jnp.where(batch.mask > 0, values[:, None], 0.0)
    )
