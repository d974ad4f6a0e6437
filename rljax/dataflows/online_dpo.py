"""Preference learning from samples that a reward ranks: online and iterated DPO (arXiv 2305.18290,
2312.11456), SPPO (arXiv 2405.00675), and the games against another sampler, XPO (arXiv 2405.21046)
and Nash-MD (arXiv 2312.00886), whose rollout gives half of the samples to the opponent.

Each page chooses examples among the samples and learns from them by algorithm.preference_loss.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from rljax.batch import masked_mean, row_scores, take_rows
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import NotNegative, Share, component_in, contract, spec
from rljax.dataflows.preference import with_spread
from rljax.dataflows.steps import rescaled_steps
from rljax.learn.metrics import reference_kl, sample_metrics
from rljax.metric import Metric
from rljax.roles import program
from rljax.rollout.rules.against import sampled_by_actor
from rljax.shaping.pairs import choose_pairs, win_probabilities
from rljax.shaping.scores import apply_shaping

METRICS = {
    "pair/margin": Metric("score of the chosen sample minus the rejected", "score", "above 0"),
    "pair/kept_fraction": Metric("prompts that give a pair", "share", "above 0.3"),
    "pair/tied_fraction": Metric("prompts whose best and worst sample tie", "share", "below 0.7"),
    "pair/policy_won_fraction": Metric(
        "pairs that the policy won against the opponent", "share", "rises above 0.5"
    ),
    "opponent/reward": Metric("mean score of the opponent", "score"),
    "opponent/beaten_fraction": Metric(
        "prompts at which the policy beats the opponent", "share", "rises above 0.5"
    ),
}

PreferenceText = component_in(NAMESPACES["preference"])


@contract(safe=True, reads=("rewards", "scores", "group"), fills=(), rows=2, compares_samples=True)
@program(donates=("reference",))
def online_dpo(
    batch,
    key,
    cfg,
    *,
    actor,
    reference,
    rejected: Literal["worst", "random"] = "worst",
    min_margin: NotNegative = 0.0,
    refresh_every: int = 0,
):
    """The best of each prompt's samples against the worst, or another at random; prompts whose best
    score leads by less than `min_margin`, or not at all, are left out. Every `refresh_every`
    optimizer steps the reference becomes the policy (iterated DPO); 0 = never."""
    batch = with_reference(batch, cfg, reference)
    pairs, chosen = best_pairs(batch, key, cfg, rejected=rejected, min_margin=min_margin)
    return learned_from(pairs, batch, cfg, actor, reference, chosen, refresh_every)


@contract(safe=True, reads=("rewards", "scores", "group"), fills=(), rows=2, compares_samples=True)
@program(donates=("reference",))
def sppo(
    batch,
    key,
    cfg,
    *,
    actor,
    reference,
    preference: PreferenceText = "bradley_terry()",
    refresh_every: int = 1,
):
    """The sample that wins most often against its prompt's others, and the one that wins least,
    each towards eta (P - 1/2); `preference` (rljax.shaping.pairs) makes P of two scores. The
    reference is the policy of `refresh_every` optimizer steps ago, at most."""
    batch = with_reference(batch, cfg, reference)
    wins = resolve(preference, NAMESPACES["preference"])
    pairs, chosen = winning_pairs(batch, key, cfg, preference=wins)
    return learned_from(pairs, batch, cfg, actor, reference, chosen, refresh_every)


@contract(
    safe=True,
    reads=("rewards", "scores", "group", "policy_version"),
    fills=(),
    rows=2,
    rollout="against()",
)
@program
def xpo(batch, key, cfg, *, actor, reference):
    """A sample of the policy and one of the reference: the better one is chosen, and
    algorithm.preference_loss, xpo, adds its bonus for what the reference would not write."""
    batch = with_reference(batch, cfg, reference)
    pairs, chosen = better_first(batch)
    return learned_from(pairs, batch, cfg, actor, reference, chosen)


@contract(
    safe=True,
    reads=("rewards", "scores", "group", "policy_version"),
    fills=(),
    rollout=lambda options: f"against(opponent='mixture', mixture={options['mixture']!r})",
)
@program
def nash_md(
    batch,
    key,
    cfg,
    *,
    actor,
    reference,
    mixture: Share = 0.5,
    preference: PreferenceText = "bradley_terry()",
):
    """Samples of the policy, each scored by how likely it beats one of the geometric mixture
    pi^(1 - mixture) ref^mixture; algorithm.preference_loss is nash_md. `preference`
    (rljax.shaping.pairs) makes that probability of two scores."""
    batch = with_reference(batch, cfg, reference)
    wins = resolve(preference, NAMESPACES["preference"])
    rows, chosen = own_rows(batch, preference=wins)
    return learned_from(rows, batch, cfg, actor, reference, chosen)


def with_reference(batch, cfg, reference):
    """Returns the batch with shaped scores [B] and the reference's log-probs [B, S]."""
    batch = apply_shaping(batch, cfg.reward_shaping)
    logprobs = reference.logprobs(batch, cfg.steps)
    return batch.replace(scores=row_scores(batch), ref_logprobs=logprobs)


def learned_from(examples, batch, cfg, actor, reference, chosen: dict, refresh_every: int = 0):
    """Returns (the roles after an update on `examples`; metrics, with `chosen`, those of the choice
    of the examples from `batch`). The reference becomes the policy when its optimizer steps pass a
    multiple of `refresh_every`; 0 = never."""
    loss = cfg.preference_loss
    samples = batch.replace(mask=batch.mask * sampled_by_actor(batch)[:, None])
    metrics = sample_metrics(samples, actor.state.step, correct_at=cfg.correct_at)
    metrics |= reference_kl(samples, samples.sampler_logprobs)
    examples = actor.balanced(examples)
    row_counts, rows_per_example = (batch.rows, examples.rows), spec(loss).rows
    cfg = cfg.replace(
        steps=rescaled_steps(cfg.steps, *row_counts, rows_per_example, actor.row_unit)
    )
    examples = with_spread(examples, cfg, actor)
    new_actor, learned = actor.update(examples, _with_winner(loss), **cfg.update_options())
    roles = {"actor": new_actor}
    if refresh_every:
        passed = new_actor.state.step // refresh_every > actor.state.step // refresh_every
        roles["reference"] = reference.follow(new_actor, when=passed)
    return roles, {**learned, **metrics, **chosen}


def _with_winner(loss):
    """Returns the loss, which is also told whose sample won if it asks for that (XPO)."""
    if "chosen_is_policy" not in loss.positional:
        return loss

    @contract(**dataclasses.asdict(spec(loss)))
    @functools.wraps(loss.function)
    def with_winner(policy, batch):
        return loss(policy, batch, sampled_by_actor(batch)[0::2])

    return with_winner


def rows_at(batch, rows, keep):
    """Returns the batch of the rows `rows` [R] in this order, masked where `keep` [R] is false."""
    selected = take_rows(batch, rows)
    return selected.replace(mask=selected.mask * keep[:, None])


def by_prompt(batch, samples: int):
    """Returns (scores [P, K], a mask [P, K] of the rows whose reward is known), with K = `samples`
    rows for each of P prompts."""
    live = jnp.any(batch.mask > 0, axis=1)
    return batch.scores.reshape(-1, samples), live.reshape(-1, samples)


def _rows_of(batch, pairs, samples: int):
    offsets = jnp.arange(pairs.chosen.shape[0]) * samples
    rows = jnp.stack([offsets + pairs.chosen, offsets + pairs.rejected], axis=1).reshape(-1)
    return rows_at(batch, rows, jnp.repeat(pairs.keep, 2))


def _pair_metrics(pairs, live) -> dict:
    """Counts how many of the prompts with two known rewards or more are tied and how many are
    learned from, and the margin of those."""
    comparable = jnp.sum(live, axis=1) > 1
    return {
        "pair/margin": masked_mean(pairs.margin, pairs.keep),
        "pair/kept_fraction": masked_mean(pairs.keep.astype(jnp.float32), comparable),
        "pair/tied_fraction": masked_mean((pairs.margin <= 0).astype(jnp.float32), comparable),
    }


def best_pairs(batch, key, cfg, *, rejected: str, min_margin: float):
    """Returns (each prompt's best sample and its worst, or another one, in rows 2i and 2i + 1;
    metrics)."""
    scores, live = by_prompt(batch, cfg.samples_per_prompt)
    pairs = choose_pairs(scores, live, key, rejected=rejected, min_margin=min_margin)
    return _rows_of(batch, pairs, cfg.samples_per_prompt), _pair_metrics(pairs, live)


def winning_pairs(batch, key, cfg, *, preference):
    """Returns (each prompt's samples of the highest and the lowest probability of winning, in rows
    2i and 2i + 1, with that probability as their score; metrics)."""
    scores, live = by_prompt(batch, cfg.samples_per_prompt)
    wins = win_probabilities(scores, live, preference)
    pairs = choose_pairs(wins, live, key)
    batch = batch.replace(scores=wins.reshape(-1))
    return _rows_of(batch, pairs, cfg.samples_per_prompt), _pair_metrics(pairs, live)


def better_first(batch):
    """Returns (the pairs of rows 2i, the policy's, and 2i + 1, the opponent's, reordered so that
    the better one comes first, with ties masked; metrics)."""
    scores, live = by_prompt(batch, 2)
    won = scores[:, 0] > scores[:, 1]
    comparable = jnp.all(live, axis=1)
    untied = comparable & (scores[:, 0] != scores[:, 1])
    offsets = 2 * jnp.arange(won.shape[0])
    rows = jnp.stack([offsets + ~won, offsets + won], axis=1).reshape(-1)
    margin = jnp.abs(scores[:, 0] - scores[:, 1])
    return rows_at(batch, rows, jnp.repeat(untied, 2)), {
        "pair/margin": masked_mean(margin, untied),
        "pair/tied_fraction": masked_mean((margin == 0).astype(jnp.float32), comparable),
        "pair/policy_won_fraction": masked_mean(won.astype(jnp.float32), untied),
    }


def own_rows(batch, *, preference):
    """Returns (the P rows of the policy, with the probability [P] that each beats the opponent's
    row as its score; metrics)."""
    scores, live = by_prompt(batch, 2)
    scored = jnp.all(live, axis=1)
    wins = jnp.where(scored, preference(scores[:, 0], scores[:, 1]), 0.5)
    rows = rows_at(batch, 2 * jnp.arange(wins.shape[0]), scored).replace(scores=wins)
    opponent_reward = jax.lax.stop_gradient(masked_mean(scores[:, 1], live[:, 1]))
    return rows, {
        "opponent/reward": opponent_reward,
        "opponent/beaten_fraction": masked_mean(wins, scored),
    }
