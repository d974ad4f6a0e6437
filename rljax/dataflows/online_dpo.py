"""Preference learning from the policy's own samples, ranked by a reward: online and iterated DPO
(arXiv 2305.18290, 2312.11456) and SPPO (arXiv 2405.00675).

`learn` is also the program of the games against another sampler (dataflows.games).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import masked_mean, row_scores
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import contract, spec
from rljax.dataflows.preference import with_spread
from rljax.dataflows.stages import shape_scores, steps_over
from rljax.learn.metrics import reference_kl, sample_metrics
from rljax.mesh import constrain_rows
from rljax.roles import program
from rljax.rollout import wrote_itself
from rljax.shaping.pairs import choose_pairs, win_probabilities


def online_dpo(
    prompts, key, cfg, *, actor, reference, reward,
    rejected: Literal["worst", "random"] = "worst",
    min_margin: float = 0.0,
    refresh_every: int = 0,
):  # fmt: skip
    """The best of each prompt's samples against the worst, or another at random; prompts whose best
    score leads by less than `min_margin`, or not at all, are left out. Every `refresh_every`
    optimizer steps the reference becomes the policy (iterated DPO); 0 = never."""
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    options = (("rejected", rejected), ("min_margin", min_margin))
    before = actor_step(actor, refresh_every)
    new, metrics = learn(
        (batch, jax.random.fold_in(key, 2**20)), (cfg, best_pairs, options),
        actor=actor, reference=reference,
    )  # fmt: skip
    return refreshed(new, reference, before, refresh_every), {**metrics, **counts}


def sppo(
    prompts, key, cfg, *, actor, reference, reward,
    preference: str = "bradley_terry()",
    refresh_every: int = 1,
):  # fmt: skip
    """The sample that wins most often against its prompt's others, and the one that wins least,
    each towards eta (P - 1/2); `preference` (rljax.shaping.pairs) makes P of two scores. The
    reference is the policy of `refresh_every` optimizer steps ago, at most."""
    batch, prompts, counts = cfg.collect(prompts, key, cfg, actor=actor, reward=reward)
    options = (("preference", resolve(preference, NAMESPACES["preference"])),)
    before = actor_step(actor, refresh_every)
    new, metrics = learn(
        (batch, jax.random.fold_in(key, 2**20)), (cfg, winning_pairs, options),
        actor=actor, reference=reference,
    )  # fmt: skip
    return refreshed(new, reference, before, refresh_every), {**metrics, **counts}


# What the loss of each reads: the rows of an example, which algorithm.preference_loss must have.
online_dpo.rows_per_example = sppo.rows_per_example = 2


def actor_step(actor, refresh_every: int) -> int:
    """Optimizer steps taken, read before a program donates the actor; 0 where nobody asks."""
    return int(actor.state.step) if refresh_every else 0


def refreshed(new: dict, reference, before: int, every: int) -> dict:
    """`new`, with a reference that is the new actor if its optimizer steps, `before` of which came
    earlier, have reached a multiple of `every`: nothing but the two roles need be saved."""
    if every and int(new["actor"].state.step) // every > before // every:
        return {**new, "reference": reference.follow(new["actor"])}
    return new


@program
def learn(batch_and_key, which, *, actor, reference):
    """which: (cfg, choose, options); choose(batch, key, cfg, **options) -> (rows to learn from, in
    examples of the loss, metrics)."""
    (batch, key), (cfg, choose, options) = batch_and_key, which
    batch = shape_scores(batch, cfg)
    logprobs = reference.logprobs(batch, cfg.steps.microbatch_rows)
    batch = batch.replace(scores=row_scores(batch), ref_logprobs=logprobs)
    own = batch.replace(mask=batch.mask * wrote_itself(batch)[:, None])
    seen = sample_metrics(own, actor.state.step) | reference_kl(own, own.sampler_logprobs)
    chosen, found = choose(batch, key, cfg, **dict(options))
    chosen = jax.tree.map(lambda x: constrain_rows(x, actor.model.mesh), chosen)
    together = spec(cfg.preference_loss).rows
    cfg = cfg.replace(steps=steps_over(cfg.steps, batch, chosen, together, actor.model.mesh))
    chosen = with_spread(chosen, cfg, actor=actor)
    actor, metrics = actor.update(chosen, _loss(cfg), **cfg.update_options)
    return {"actor": actor}, {**metrics, **seen, **found}


def _loss(cfg):
    """algorithm.preference_loss, told whose sample won if it asks (XPO)."""
    loss = cfg.preference_loss
    if "chosen_is_policy" not in loss.positional:
        return loss

    @contract(reads=("ref_logprobs",), rows=2)
    def told(policy, batch):
        return loss(policy, batch, wrote_itself(batch)[0::2])

    return told


def rows_at(batch, rows, keep):
    """The batch of these rows [R] in this order, masked where keep [R] is false."""
    taken = jax.tree.map(lambda x: x[rows], batch)
    return taken.replace(mask=taken.mask * keep[:, None])


def by_prompt(batch, samples: int):
    """Scores, and whether a row's reward is known: two [P, K]."""
    live = jnp.any(batch.mask > 0, axis=1)
    return batch.scores.reshape(-1, samples), live.reshape(-1, samples)


def _taken(batch, pairs, samples: int):
    first = jnp.arange(pairs.chosen.shape[0]) * samples
    rows = jnp.stack([first + pairs.chosen, first + pairs.rejected], axis=1).reshape(-1)
    return rows_at(batch, rows, jnp.repeat(pairs.keep, 2))


def _pair_metrics(pairs, live) -> dict:
    """Of the prompts with two known rewards or more: how many are tied, how many are learned from;
    and the margin of those."""
    known = jnp.sum(live, axis=1) > 1
    return {
        "pair/margin": masked_mean(pairs.margin, pairs.keep),
        "pair/kept_fraction": masked_mean(pairs.keep.astype(jnp.float32), known),
        "pair/tied_fraction": masked_mean((pairs.margin <= 0).astype(jnp.float32), known),
    }


def best_pairs(batch, key, cfg, *, rejected: str, min_margin: float):
    """Of each prompt the best sample and the worst, or another: rows 2i and 2i + 1."""
    scores, live = by_prompt(batch, cfg.samples_per_prompt)
    pairs = choose_pairs(scores, live, key, rejected=rejected, min_margin=min_margin)
    return _taken(batch, pairs, cfg.samples_per_prompt), _pair_metrics(pairs, live)


def winning_pairs(batch, key, cfg, *, preference):
    """Of each prompt the samples of the highest and the lowest probability of winning, which
    becomes their score."""
    scores, live = by_prompt(batch, cfg.samples_per_prompt)
    wins = win_probabilities(scores, live, preference)
    pairs = choose_pairs(wins, live, key)
    batch = dataclasses.replace(batch, scores=wins.reshape(-1))
    return _taken(batch, pairs, cfg.samples_per_prompt), _pair_metrics(pairs, live)
