"""Training a reward model: outcome scores from pairs (Bradley-Terry, arXiv 2203.02155), or process
scores from solutions whose steps are labelled (arXiv 2410.17621)."""

import jax.numpy as jnp

from rljax.roles import program


def reward_model(pairs, key, cfg, *, reward_model):
    """`pairs` is a Batch of 2 rows per pair; algorithm.reward_loss says how scores are compared."""
    return learn(pairs, cfg, reward_model=reward_model)


def process_reward_model(steps, key, cfg, *, reward_model):
    """`steps` is a Batch with mask 1 at the end of each step and process_rewards its label;
    algorithm.reward_loss is one of scores at tokens, "step_regression()"."""
    return learn(steps, cfg, reward_model=reward_model)


@program
def learn(batch, cfg, *, reward_model):
    reward_model, metrics = reward_model.update(
        batch, cfg.reward_loss, steps=cfg.steps, reduction=cfg.reduction
    )
    if "sign_correct" in metrics:  # shares of the labelled tokens, whose quotient is meant
        metrics["sign_accuracy"] = metrics["sign_correct"] / jnp.maximum(
            metrics["non_neutral"], 1e-9
        )
    return {"reward_model": reward_model}, metrics
