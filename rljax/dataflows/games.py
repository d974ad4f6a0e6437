"""The policy against another sampler, prompt by prompt: XPO (arXiv 2405.21046) and Nash-MD (arXiv
2312.00886). Half of batch.samples_per_prompt are the opponent's."""

import jax
import jax.numpy as jnp

from rljax.batch import masked_mean
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.dataflows.online_dpo import by_prompt, learn, rows_at
from rljax.errors import InputError
from rljax.rollout import Mixture, Versus


def xpo(prompts, key, cfg, *, actor, reference, reward):
    """A sample of the policy and one of the reference: the better one is chosen, and
    algorithm.preference_loss, xpo, adds its bonus for what the reference would not write."""
    both = Versus(actor, reference)
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=both, reward=reward)
    new, metrics = learn((batch, key), (cfg, better_first, ()), actor=actor, reference=reference)
    return new, {**metrics, **counts}


def nash_md(
    prompts, key, cfg, *, actor, reference, reward,
    mixture: float = 0.5,
    preference: str = "bradley_terry()",
):  # fmt: skip
    """Samples of the policy, each scored by how likely it beats one of the geometric mixture
    pi^(1 - mixture) ref^mixture; algorithm.preference_loss is nash_md.
    `preference` (rljax.shaping.pairs) makes that probability of two scores."""
    if not 0 <= mixture <= 1:
        raise InputError("nash_md(mixture)", value=mixture, rule="0 (the policy) to 1")
    both = Versus(actor, Mixture(actor, reference, mixture))
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=both, reward=reward)
    options = (("preference", resolve(preference, NAMESPACES["preference"])),)
    new, metrics = learn((batch, key), (cfg, own_rows, options), actor=actor, reference=reference)
    return new, {**metrics, **counts}


xpo.rows_per_example, nash_md.rows_per_example = 2, 1
xpo.has_opponent = nash_md.has_opponent = True


def better_first(batch, key, cfg):
    """Rows 2i (the policy's) and 2i + 1 (the opponent's) of equal prompts, the better one first;
    ties are left out."""
    scores, live = by_prompt(batch, 2)
    won = scores[:, 0] > scores[:, 1]
    known = jnp.all(live, axis=1)
    keep = known & (scores[:, 0] != scores[:, 1])
    first = 2 * jnp.arange(won.shape[0])
    rows = jnp.stack([first + ~won, first + won], axis=1).reshape(-1)
    margin = jnp.abs(scores[:, 0] - scores[:, 1])
    return rows_at(batch, rows, jnp.repeat(keep, 2)), {
        "pair/margin": masked_mean(margin, keep),
        "pair/tied_fraction": masked_mean((margin == 0).astype(jnp.float32), known),
        "pair/policy_won_fraction": masked_mean(won.astype(jnp.float32), keep),
    }


def own_rows(batch, key, cfg, *, preference):
    """The policy's rows; the score of each is the probability that it beats the opponent's row."""
    scores, live = by_prompt(batch, 2)
    known = jnp.all(live, axis=1)
    wins = jnp.where(known, preference(scores[:, 0], scores[:, 1]), 0.5)
    rows = rows_at(batch, 2 * jnp.arange(wins.shape[0]), known).replace(scores=wins)
    other = jax.lax.stop_gradient(masked_mean(scores[:, 1], live[:, 1]))
    return rows, {"opponent/reward": other, "opponent/beaten_fraction": masked_mean(wins, known)}
