"""Rollouts that differ in the groups that they use: one round of sampling, several rounds, or the
first live groups.

A group is the samples of one prompt. It is live if the scores of the reward in it are not all
equal: the others have no advantage. Rows stay on the mesh: hosts look at scores and
lengths, and choose.

In flight, dead groups have been replaced as they ended (`drops_dead`), so that every rollout of
these takes the groups that it is handed.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch, FinishReason
from rljax.contracts import AboveZero, AtLeastOne, contract
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import replicated, row_sharding, row_shards
from rljax.metric import Metric
from rljax.rollout.on_device import DevicePrompts
from rljax.rollout.rollout import Rollout
from rljax.rollout.scoring.report import RewardReport

METRICS = {
    "collect/rounds": Metric("rounds of sampling of this step", "rounds", "1 to 3"),
    "collect/generated_groups": Metric("prompts sampled for this step", "prompts"),
    "collect/live_fraction": Metric("sampled prompts whose scores differ", "share", "above 0.3"),
    "collect/solved_groups": Metric("prompts that all samples solve", "prompts"),
    "collect/zero_groups": Metric("prompts that no sample solves", "prompts"),
    "collect/filled_groups": Metric("prompts without a signal that fill the batch", "prompts", "0"),
    "collect/generations_per_kept_sample": Metric(
        "samples drawn for each one used", "x", "below 3"
    ),
    "collect/discarded_tokens": Metric("tokens sampled and not used", "tokens"),
}


@contract(safe=True, every_row=True, on_device=True)
def once(prompts, key, cfg, *, sample):
    """One round of sampling. Every group is used, whether it is live or not."""
    batch, report = sample(prompts, key, n=cfg.samples_per_prompt)
    return Rollout(batch, prompts, report)


@contract(
    safe=True,
    needs_groups=True,
    drops_dead=lambda o: (o["oversample"] * o["max_rounds"], o["if_short"]),
    on_device=lambda o: o["max_rounds"] == 1 and o["if_short"] == "fill",
)
def dynamic(
    prompts,
    key,
    cfg,
    *,
    actor,
    sample,
    draw,
    oversample: AtLeastOne = 3.0,
    max_rounds: int = 10,
    if_short: Literal["error", "fill"] = "error",
):
    """Dynamic sampling of DAPO: rounds of oversample x prompts_per_step prompts until enough groups
    are live. The first prompts_per_step of them are used, the others discarded (arXiv 2503.14476).

    Too few live groups after `max_rounds` are an error, or dead groups fill the batch (`if_short`).
    One round that may be filled is a program of arrays (Config.program_steps).

    Raises InputError if too few groups are live with if_short="error", for oversample below 1, and
    for one sample per prompt.
    """
    if cfg.in_flight:
        return once(prompts, key, cfg, sample=sample)
    if isinstance(prompts, DevicePrompts):
        size = _oversampled("dynamic", oversample, prompts.count)
        return _one_round(prompts, key, cfg, sample, draw, size)
    size = _oversampled("dynamic", oversample, len(prompts.records))
    options = dict(first=size, later_size=size, max_rounds=max_rounds, if_short=if_short)
    return _rounds(prompts, key, cfg, actor, sample, draw, **options)


@contract(
    safe=True,
    needs_groups=True,
    drops_dead=lambda o: (1 + o["refill"] * o["max_rounds"], o["if_short"]),
)
def active(
    prompts,
    key,
    cfg,
    *,
    actor,
    sample,
    draw,
    refill: AboveZero = 0.25,
    max_rounds: int = 40,
    if_short: Literal["error", "fill"] = "fill",
):
    """Active sampling of OlmoRL: one round of prompts_per_step prompts, then smaller ones of refill
    x prompts_per_step that replace the dead groups (arXiv 2512.13961).

    Raises InputError if too few groups are live with if_short="error", and for one
    sample per prompt.
    """
    if cfg.in_flight:
        return once(prompts, key, cfg, sample=sample)
    wanted = len(prompts.records)
    later_size = max(1, round(refill * wanted))
    options = dict(first=wanted, later_size=later_size, max_rounds=max_rounds, if_short=if_short)
    return _rounds(prompts, key, cfg, actor, sample, draw, **options)


@contract(
    safe=True,
    needs_groups=True,
    drops_dead=lambda o: (o["oversample"], o["if_short"]),
    single_rows=True,
)
def first_live(
    prompts,
    key,
    cfg,
    *,
    actor,
    sample,
    draw,
    oversample: AtLeastOne = 2.0,
    if_short: Literal["error", "fill"] = "fill",
):
    """Dynamic sampling of slime: oversample x prompts_per_step prompts start together. Once
    prompts_per_step groups are complete, scored and live, the samples that are still decoding are
    aborted and their groups dropped. With a reward model, which scores whole batches, all samples
    are decoded to their ends.

    Which groups are complete first depends on the speed of the reward, so that a resumed run
    may use others.

    Raises InputError if too few groups are live with if_short="error", for oversample below 1, and
    for one sample per prompt.
    """
    if cfg.in_flight:
        return once(prompts, key, cfg, sample=sample)
    wanted, n = len(prompts.records), cfg.samples_per_prompt
    size = _oversampled("first_live", oversample, wanted)
    sampled = prompts if size == wanted else prompts.joined(draw(size - wanted))

    def enough(early) -> bool:
        live = (len(set(scores)) > 1 for scores in early.complete_groups())
        return sum(live) >= wanted

    batch, report = sample(sampled, key, n=n, enough=enough)
    groups = _Groups(wanted, n, actor.model.mesh)
    groups.add(batch, sampled, cut=True)
    return groups.rollout(report, if_short, rounds=1)


def _oversampled(name: str, oversample: float, wanted: int) -> int:
    if not oversample >= 1:
        raise InputError(
            f"{name}(oversample)",
            value=oversample,
            rule=">= 1: a step needs prompts_per_step groups, and fewer would be sampled",
            fix="oversample=1.0 samples exactly that many",
        )
    return round(oversample * wanted)


@dataclasses.dataclass(frozen=True)
class _Group:
    """The part of a group that all hosts know."""

    row: int  # its first one in the batch of its round
    prompt: int  # index into the prompts of all rounds
    failed: np.ndarray  # [n] whether a row has no policy token: its reward failed, say
    tokens: int  # number of tokens of its responses


class _Groups:
    """Live groups and others in the order of their prompts, aborted ones last; and on the mesh the
    rows of `wanted` groups of `n` rows.

    Live groups fill these rows from the first on, others from the last on backwards, where no live
    group has come.
    """

    def __init__(self, wanted: int, n: int, mesh):
        self.wanted, self.n, self.mesh = wanted, n, mesh
        self.live: list[_Group] = []
        self.others: list[_Group] = []
        self.prompts: Prompts | None = None
        self.rows: Batch | None = None
        self.aborted = self.solved = self.zero = 0

    def add(self, batch: Batch, prompts: Prompts, *, cut: bool = False) -> None:
        """Adds the groups of a batch. `cut`: rows may have been aborted, and a group with an
        aborted row, which has no policy token, is an aborted one."""
        n, first = self.n, len(self.prompts.records) if self.prompts else 0
        self.prompts = self.prompts.joined(prompts) if self.prompts else prompts
        arrays = (*_facts(batch), batch.scores, batch.finish_reason)
        has_tokens, ends, seats, scores, reasons = fetch(arrays)
        live, dead, aborted = [], [], []
        for p, start in enumerate(prompts.lengths):
            rows = slice(p * n, (p + 1) * n)
            group = _Group(p * n, first + p, ~has_tokens[rows], int(np.sum(ends[rows] - start)))
            if cut and ((reasons[rows] == FinishReason.ABORT) & ~has_tokens[rows]).any():
                aborted.append(group)
                continue
            scored = scores[rows][has_tokens[rows]]  # without failed rewards
            # A player is compared with those of the same seat.
            pairs = set(zip(seats[rows][has_tokens[rows]].tolist(), scored.tolist(), strict=True))
            is_live = len(pairs) > len({seat for seat, _ in pairs})
            (live if is_live else dead).append(group)
            if not is_live and scored.size:
                self.solved += int(scored[0] > 0)
                self.zero += int(scored[0] <= 0)
        self._keep(batch, live, dead + aborted)
        self.aborted += len(aborted)

    def _keep(self, batch: Batch, live: list[_Group], others: list[_Group]) -> None:
        """Copies the rows of new groups to their target rows."""
        targets = {len(self.live) + i: group for i, group in enumerate(live)}
        self.live += live
        last = self.wanted - 1 - len(self.others)
        targets |= {last - i: group for i, group in enumerate(others) if last - i >= len(self.live)}
        self.others += others
        source = np.full((self.wanted, self.n), -1, np.int32)
        for target, group in targets.items():
            if target < self.wanted:
                source[target] = group.row + np.arange(self.n)
        target_rows = (
            _empty(batch, self.wanted * self.n, self.mesh) if self.rows is None else self.rows
        )
        self.rows = _copied(target_rows, batch, source.reshape(-1), self.mesh)

    def rollout(self, report, if_short: str, *, rounds: int) -> Rollout:
        """Returns the first `wanted` live groups as one batch. If there are fewer, dead groups fill
        it, or InputError is raised (`if_short`)."""
        wanted, groups = self.wanted, len(self.live) + len(self.others)
        missing = max(wanted - len(self.live), 0)
        if missing and if_short == "error":
            raise InputError(
                f"only {len(self.live)} of {wanted} groups are live after {rounds} rounds: "
                f"{self.solved} all right, {self.zero} all wrong",
                rule="a group whose scores are all equal has no advantage",
                fix="other prompts, more samples per prompt, or if_short='fill'",
            )
        ordered = self.live + self.others
        used, dropped = ordered[:wanted], ordered[wanted:]
        metrics = {
            "collect/rounds": rounds,
            "collect/generated_groups": groups,
            "collect/live_fraction": len(self.live) / max(groups - self.aborted, 1),
            "collect/solved_groups": self.solved,
            "collect/zero_groups": self.zero,
            "collect/filled_groups": missing,
            "collect/generations_per_kept_sample": groups / wanted,
            "collect/discarded_tokens": float(sum(group.tokens for group in dropped)),
        }
        prompts = self.prompts.select([group.prompt for group in used])
        return Rollout(self._batch(used), prompts, report, metrics)

    def _batch(self, used: list[_Group]) -> Batch:
        """The rows of these groups. A row whose reward failed has a group of its own."""
        live, rows = min(len(self.live), self.wanted), self.wanted * self.n
        group_order = [*range(live), *range(self.wanted - 1, live - 1, -1)]
        order = [index * self.n + i for index in group_order for i in range(self.n)]
        failed = np.concatenate([group.failed for group in used])
        group = np.repeat(np.arange(self.wanted, dtype=np.int32), self.n)
        own_groups = self.wanted + np.arange(rows, dtype=np.int32)
        group = np.where(failed, own_groups, group)
        return _ordered(self.rows, np.array(order, np.int32), group, self.n, self.mesh)


@jax.jit
def _facts(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns whether each row has a policy token, where it ends, and its seat: three [B]."""
    has_tokens, ends = jnp.any(batch.mask > 0, axis=1), jnp.sum(batch.segment_ids > 0, axis=1)
    return has_tokens, ends, jnp.zeros_like(ends) if batch.seat is None else batch.seat


def _laid_out(batch: Batch, mesh) -> Batch:
    """Returns the batch, inside a program, with the layout that `place` gives it."""
    fits = batch.rows % row_shards(mesh) == 0
    return jax.lax.with_sharding_constraint(batch, row_sharding(mesh) if fits else replicated(mesh))


@functools.partial(jax.jit, static_argnames=("rows", "mesh"))
def _empty(batch: Batch, rows: int, mesh) -> Batch:
    """`rows` rows of zeros with the fields of the batch."""
    blank = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), batch)
    return _laid_out(blank, mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="kept")
def _copied(kept: Batch, batch: Batch, source: jax.Array, mesh) -> Batch:
    """Returns `kept` with row source[i] of the batch as row i wherever source[i] >= 0."""

    def copy(old, new):
        keep = (source < 0).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(keep, old, new[jnp.maximum(source, 0)])

    return _laid_out(jax.tree.map(copy, kept, batch), mesh)


@functools.partial(jax.jit, static_argnames=("n", "mesh"))
def _ordered(rows: Batch, order: jax.Array, group: jax.Array, n: int, mesh) -> Batch:
    """Returns the rows in this order, with these groups, one for each seat if there are several.
    Numbers of episodes, which each round counts from 0, become those of the batch."""
    rows = jax.tree.map(lambda x: x[order], rows)
    if rows.seat is not None:
        group = group * (jnp.max(rows.seat) + 1) + rows.seat
    if rows.episode is not None:
        prompt_episodes = rows.episode.reshape(-1, n)
        first = jnp.argmax(prompt_episodes[:, :, None] == prompt_episodes[:, None, :], axis=2)
        first = first + n * jnp.arange(len(prompt_episodes), dtype=first.dtype)[:, None]
        rows = rows.replace(episode=first.reshape(-1).astype(jnp.int32))
    return _laid_out(rows.replace(group=group), mesh)


def _require_groups(n: int) -> None:
    if n < 2:
        raise InputError(
            "dynamic sampling needs groups",
            value=n,
            rule="batch.samples_per_prompt >= 2",
            fix="raise it, or set algorithm.collect='once'",
        )


def _one_round(prompts: DevicePrompts, key, cfg, sample, draw, size: int) -> Rollout:
    """Samples one round in a program, as `_rounds` does: the first live groups of `size`, and dead
    ones behind them if there are too few."""
    wanted, n = prompts.count, cfg.samples_per_prompt
    _require_groups(n)
    sampled = prompts if size == wanted else prompts.joined(draw(size - wanted))
    batch, report = sample(sampled, stream(key, "round", 0), n=n)
    has_tokens = jnp.any(batch.mask > 0, axis=1).reshape(size, n)
    scores = batch.scores.reshape(size, n)
    low = jnp.min(jnp.where(has_tokens, scores, jnp.inf), axis=1)
    high = jnp.max(jnp.where(has_tokens, scores, -jnp.inf), axis=1)
    live = low < high
    dead = jnp.any(has_tokens, axis=1) & ~live
    order = jnp.argsort(~live, stable=True)
    used, dropped = order[:wanted], order[wanted:]
    rows = (used[:, None] * n + jnp.arange(n)[None, :]).reshape(-1)
    group = jnp.repeat(jnp.arange(wanted, dtype=jnp.int32), n)
    own_groups = wanted + jnp.arange(wanted * n, dtype=jnp.int32)
    chosen = jax.tree.map(lambda x: x[rows], batch)
    chosen = chosen.replace(group=jnp.where(has_tokens[used].reshape(-1), group, own_groups))
    ends = jnp.sum(batch.segment_ids > 0, axis=1).reshape(size, n)
    tokens = jnp.sum(ends - sampled.lengths[:, None], axis=1)
    metrics = {
        "collect/rounds": 1,
        "collect/generated_groups": size,
        "collect/live_fraction": jnp.mean(live),
        "collect/solved_groups": jnp.sum(dead & (low > 0)),
        "collect/zero_groups": jnp.sum(dead & (low <= 0)),
        "collect/filled_groups": jnp.maximum(wanted - jnp.sum(live), 0),
        "collect/generations_per_kept_sample": size / wanted,
        "collect/discarded_tokens": jnp.sum(tokens[dropped]),
    }
    mesh = sample.actor.model.mesh
    return Rollout(_laid_out(chosen, mesh), sampled.select(used), report, metrics)


def _rounds(
    prompts,
    key,
    cfg,
    actor,
    sample,
    draw,
    *,
    first: int,
    later_size: int,
    max_rounds: int,
    if_short: str,
) -> Rollout:
    wanted, n = len(prompts.records), cfg.samples_per_prompt
    _require_groups(n)
    groups, reports = _Groups(wanted, n, actor.model.mesh), []
    sampled = prompts if first == wanted else prompts.joined(draw(first - wanted))
    while True:
        round_key = stream(key, "round", len(reports))
        batch, report = sample(sampled, round_key, n=n)
        groups.add(batch, sampled)
        reports.append(report)
        if len(groups.live) >= wanted or len(reports) >= max_rounds:
            break
        sampled = draw(later_size)
    return groups.rollout(RewardReport.joined(reports), if_short, rounds=len(reports))
