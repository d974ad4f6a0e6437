"""The rollout that regenerates responses from their weakest token: each round cuts every response
just before the token with the smallest advantage and samples it anew from there.

Axes: B rows of a round, S columns.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.components import Component
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import constrain_rows
from rljax.metric import Metric
from rljax.rollout.rollout import Rollout
from rljax.rollout.sample import require_sampler
from rljax.rollout.scoring.report import RewardReport
from rljax.shaping.scores import apply_shaping

METRICS = {
    "special_token/rounds": Metric("rounds of the step", "rounds"),
    "special_token/regenerated": Metric("regenerations per first sample", "samples"),
    "special_token/smallest_advantage": Metric("smallest advantage of a response, mean", "score"),
    "special_token/kept_fraction": Metric(
        "part of a response that is kept before its weakest token", "share"
    ),
    "special_token/gain": Metric(
        "score of a regenerated response less that of the one it was cut from",
        "score",
        "above 0: the weakest token was a fault",
    ),
}


@contract(
    safe=True,
    fills=("kept_tokens",),
    continues=True,
    rounds=True,
    check=lambda config, options: check_rounds(config.batch.samples_per_prompt, **options),
)
def special_token(
    prompts,
    key,
    cfg,
    *,
    actor,
    critic,
    sample,
    max_rounds: int = 2,
    tau: float = 0.0,
    train_prefix: bool = False,
):
    """`max_rounds` rounds that share a step's rows: samples_per_prompt / max_rounds responses of a
    prompt, then each of them anew behind all that comes before its token with the smallest
    advantage, as long as that is below `tau`. The batch has the rows of all rounds.

    The advantages are those of `algorithm.advantage` with the critic's values and the shaped
    rewards (without a KL penalty), over all tokens of the response, kept ones too. A row learns
    from the tokens of its own round; `train_prefix`: from those it kept as well, which count twice
    then. A row that was not regenerated has mask 0.

    Raises InputError unless `max_rounds` divides the samples per prompt.
    """
    n, count = cfg.samples_per_prompt, len(prompts.records)
    check_rounds(n, max_rounds)
    branch = require_sampler(sample, by="special_token()").branch
    prompt_index = np.repeat(np.arange(count, dtype=np.int32), n // max_rounds)
    batch, report = sample(prompts, key, n=n // max_rounds)
    full_mask, learned = batch.mask, [batch.mask]
    kept_counts = [jnp.zeros((batch.rows,), jnp.int32)]
    batches, reports, weakest, gains, cut = [batch], [report], [], [], []
    for number in range(1, max_rounds):
        valued = critic.valued(batch.replace(mask=full_mask), cfg.microbatch_rows)
        shaped = apply_shaping(valued, cfg.reward_shaping)
        columns, smallest = fetch(_weakest(shaped, cfg.advantage))
        regenerated = smallest < tau  # (A row whose reward failed has no token, and inf.)
        weakest += smallest[np.isfinite(smallest)].tolist()
        if not regenerated.any():
            break
        starts = np.asarray(prompts.response_starts)[prompt_index]
        lengths, old_scores = fetch((jnp.sum(batch.segment_ids > 0, axis=1), batch.scores))
        # The others sample their last token anew, which nothing learns from: calls have one shape.
        columns = np.where(regenerated, columns, lengths - 1)
        source = batch.replace(mask=full_mask, group=jnp.asarray(prompt_index), values=None)
        rows, branch_key = np.arange(len(prompt_index)), stream(key, "special_token", number)
        batch, report = branch(prompts, source, rows, columns - starts, branch_key)
        has_score = [row.score.status == "ok" for row in report.rows]
        gains += (fetch(batch.scores) - old_scores)[regenerated & has_score].tolist()
        cut += ((columns - starts) / (lengths - starts))[regenerated].tolist()
        full_mask, new_mask = _masks(batch.mask, full_mask, columns, regenerated)
        batches.append(batch)
        learned.append(full_mask if train_prefix else new_mask)
        kept_counts.append(jnp.sum(full_mask - learned[-1], axis=1).astype(jnp.int32))
        scored = tuple(
            row
            for row, is_regenerated in zip(report.rows, regenerated, strict=True)
            if is_regenerated
        )
        reports.append(RewardReport(scored, report.process))

    def mean(x):
        return float(np.mean(x)) if len(x) else 0.0

    metrics = {
        "special_token/rounds": float(len(reports)),
        "special_token/regenerated": len(cut) / len(prompt_index),
        "special_token/smallest_advantage": mean(weakest),
        "special_token/kept_fraction": mean(cut),
        "special_token/gain": mean(gains),
    }
    sizes = dict(rounds=max_rounds, count=count, mesh=actor.model.mesh)
    joined = _of_all_rounds(batches, learned, kept_counts, prompt_index, **sizes)
    rows = tuple(row for round_report in reports for row in round_report.rows)
    report = RewardReport(
        rows,
        tuple(line_metrics for round_report in reports for line_metrics in round_report.process),
    )
    return Rollout(joined, prompts, report, metrics)


def check_rounds(samples_per_prompt: int, max_rounds: int = 2, **_) -> None:
    """Raises InputError unless `max_rounds`, 1 or more, divides the samples per prompt."""
    valid = isinstance(max_rounds, int) and not isinstance(max_rounds, bool) and max_rounds > 0
    if not valid or samples_per_prompt % max_rounds:
        rule = "at least 1, and divides batch.samples_per_prompt, the rows of a prompt, which the "
        rule += f"rounds share: {samples_per_prompt}"
        raise InputError(
            "special_token(max_rounds)",
            value=max_rounds,
            rule=rule,
            fix="max_rounds=1, or a divisor of that",
        )


def smallest_advantage(advantages: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the column [B] of each row's policy token with the smallest advantage, of several the
    first, and that advantage [B]; inf if the row has no policy token. advantages, mask: [B, S]."""
    masked = jnp.where(mask > 0, advantages, jnp.inf)
    return jnp.argmin(masked, axis=1).astype(jnp.int32), jnp.min(masked, axis=1)


@functools.partial(jax.jit, static_argnames="advantage")
def _weakest(batch: Batch, advantage: Component):
    result = advantage(batch)
    advantages = result[0] if isinstance(result, tuple) else result
    return smallest_advantage(advantages, batch.mask)


@jax.jit
def _masks(mask, old_mask, columns, regenerated):
    """Returns the mask of all tokens that a policy chose, and that of the tokens of this round: [B,
    S] each. Both are 0 in rows that are not `regenerated` [B], or whose reward failed."""
    scored = (jnp.any(mask > 0, axis=1) & regenerated)[:, None]
    inside = jnp.arange(mask.shape[1])[None, :] < columns[:, None]
    full_mask = jnp.where(inside, old_mask, mask)
    return jnp.where(scored, full_mask, 0.0), jnp.where(scored, mask, 0.0)


def _of_all_rounds(
    batches, masks, kept_counts, prompt_index, *, rounds: int, count: int, mesh
) -> Batch:
    """Returns the rows of all rounds; those of rounds that were not needed have mask 0."""
    missing = rounds - len(batches)
    batches = batches + batches[-1:] * missing
    masks = masks + [jnp.zeros_like(masks[-1])] * missing
    kept_counts = kept_counts + [jnp.zeros_like(kept_counts[-1])] * missing
    rows = [
        batch.replace(mask=mask, kept_tokens=tokens, values=None)
        for batch, mask, tokens in zip(batches, masks, kept_counts, strict=True)
    ]
    return _together(rows, jnp.asarray(prompt_index), count=count, mesh=mesh)


@functools.partial(jax.jit, static_argnames=("count", "mesh"))
def _together(batches: list[Batch], prompt_index, *, count: int, mesh) -> Batch:
    """Returns the rows of all rounds, with those of a prompt side by side. Rows without tokens have
    groups of their own."""

    def together(*rounds):
        parts = [x.reshape(count, -1, *x.shape[1:]) for x in rounds]
        joined = jnp.concatenate(parts, axis=1)
        return constrain_rows(joined.reshape(-1, *joined.shape[2:]), mesh)

    batch = jax.tree.map(together, *batches)
    group = together(*[prompt_index] * len(batches))
    own_groups = count + jnp.arange(batch.rows, dtype=group.dtype)
    return batch.replace(group=jnp.where(jnp.any(batch.mask > 0, axis=1), group, own_groups))
