"""Training a reward model: outcome scores from pairs (Bradley-Terry, arXiv 2203.02155), costs from
pairs that are labelled safe or unsafe (arXiv 2310.12773), or process scores from solutions whose
steps are labelled (arXiv 2410.17621)."""

import jax.numpy as jnp

from rljax.contracts import contract
from rljax.roles import program


@contract(safe=True, data="pairs", rows=2)
@program
def reward_model(batch, key, cfg, *, reward_model):
    """2 rows per pair; algorithm.reward_loss says how scores are compared."""
    return trained(batch, cfg, reward_model)


@contract(safe=True, data="safety", rows=2)
@program
def cost_model(batch, key, cfg, *, reward_model):
    """2 rows per pair, the safer one first, costs +1 (unsafe) or -1 (safe), for
    algorithm.reward_loss="cost_preference()". What it exports is read as reward.cost_model."""
    return trained(batch, cfg, reward_model)


@contract(safe=True, data="stepwise")
@program
def process_reward_model(batch, key, cfg, *, reward_model):
    """Mask 1 at the end of each step and process_rewards its label; algorithm.reward_loss is one of
    scores at tokens, "step_regression()"."""
    return trained(batch, cfg, reward_model)


def trained(batch, cfg, reward_model):
    """Returns ({"reward_model": the role after an update by algorithm.reward_loss}, metrics)."""
    reward_model, metrics = reward_model.update(
        batch, cfg.reward_loss, steps=cfg.steps, reduction=cfg.reduction
    )
    if "sign_correct" in metrics:
        correct, labelled = metrics.pop("sign_correct"), metrics.pop("non_neutral")
        metrics["sign_accuracy"] = correct / jnp.maximum(labelled, 1e-8)
    return {"reward_model": reward_model}, metrics
