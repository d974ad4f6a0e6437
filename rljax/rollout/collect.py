"""Rollouts that differ in the groups that they use: one round of sampling, several rounds, or the
first live groups.

A group is the samples of one prompt. It is live if the scores of the reward in it are not all
equal: the others have no advantage (ALGORITHMS H4).
"""

import dataclasses
from typing import Literal

import jax
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import FinishReason
from rljax.contracts import contract
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.keys import stream
from rljax.rollout.reward import RewardReport, sample_scored
from rljax.rollout.rollout import Rollout


def once(prompts, key, cfg, *, actor, reward):
    """One round of sampling. Every group is used, whether it is live or not."""
    n = cfg.samples_per_prompt
    batch, report = sample_scored(actor, reward, prompts, key, cfg.sampling, n=n)
    return Rollout(batch, prompts, report)


@contract(needs_groups=True)
def dynamic(
    prompts, key, cfg, *, actor, reward, draw,
    oversample: float = 3.0,
    max_rounds: int = 10,
    if_short: Literal["error", "fill"] = "error",
):  # fmt: skip
    """Dynamic sampling of DAPO: rounds of oversample x prompts_per_step prompts until enough groups
    are live. The first prompts_per_step of them are used, the others discarded (arXiv 2503.14476).

    Too few live groups after `max_rounds` are an error, or dead groups fill the batch (`if_short`).
    """
    wanted = len(prompts.records)
    size = _oversampled("dynamic", oversample, wanted)
    return _rounds(
        prompts, key, cfg, actor, reward, draw, first=size, further=size, max_rounds=max_rounds,
        if_short=if_short,
    )  # fmt: skip


@contract(needs_groups=True)
def active(
    prompts, key, cfg, *, actor, reward, draw,
    refill: float = 0.25,
    max_rounds: int = 40,
    if_short: Literal["error", "fill"] = "fill",
):  # fmt: skip
    """Active sampling of OlmoRL: one round of prompts_per_step prompts, then smaller ones of
    refill x prompts_per_step that replace the dead groups (arXiv 2512.13961)."""
    wanted = len(prompts.records)
    further = max(1, round(refill * wanted))
    return _rounds(
        prompts, key, cfg, actor, reward, draw, first=wanted, further=further,
        max_rounds=max_rounds, if_short=if_short,
    )  # fmt: skip


@contract(needs_groups=True)
def first_live(
    prompts, key, cfg, *, actor, reward, draw,
    oversample: float = 2.0,
    if_short: Literal["error", "fill"] = "fill",
):  # fmt: skip
    """Dynamic sampling of slime: oversample x prompts_per_step prompts start together. Once
    prompts_per_step groups are complete, scored and live, the samples that are still decoding are
    aborted and their groups dropped. With a reward model, which scores whole batches, all samples
    are decoded to their ends.

    Which groups are complete first depends on the speed of the reward, so that a resumed run may
    use others.
    """
    wanted, n = len(prompts.records), cfg.samples_per_prompt
    size = _oversampled("first_live", oversample, wanted)
    sampled = prompts if size == wanted else prompts.joined(draw(size - wanted))
    batch, report = sample_scored(
        actor, reward, sampled, key, cfg.sampling, n=n, enough=lambda early: _enough(early, wanted)
    )
    groups, host = _Groups(), fetch(batch)
    aborted = (host.finish_reason == FinishReason.ABORT) & ~host.mask.any(axis=1)
    groups.add(host, sampled, n, aborted)
    return groups.rollout(report, wanted, n, actor.model.mesh, if_short, rounds=1)


def _enough(early, wanted: int) -> bool:
    """Whether as many groups as are wanted are complete and have unequal scores."""
    return sum(len(set(scores)) > 1 for scores in early.complete_groups()) >= wanted


def _oversampled(name: str, oversample: float, wanted: int) -> int:
    if not oversample >= 1:
        raise InputError(
            f"{name}(oversample)", value=oversample,
            rule=">= 1: a step needs prompts_per_step groups, and fewer would be sampled",
            fix="oversample=1.0 samples exactly that many",
        )  # fmt: skip
    return round(oversample * wanted)


@dataclasses.dataclass
class _Groups:
    """Live, dead and aborted groups in the order of their prompts: (host rows, index into
    `prompts`)."""

    live: list = dataclasses.field(default_factory=list)
    dead: list = dataclasses.field(default_factory=list)
    aborted: list = dataclasses.field(default_factory=list)
    prompts: Prompts | None = None
    solved: int = 0
    zero: int = 0

    def add(self, host, prompts: Prompts, n: int, aborted: np.ndarray | None = None) -> None:
        """Adds the groups of a batch. A group with a row in `aborted` [B] is an aborted one."""
        first = len(self.prompts.records) if self.prompts else 0
        self.prompts = self.prompts.joined(prompts) if self.prompts else prompts
        for p in range(len(prompts.records)):
            at = slice(p * n, (p + 1) * n)
            rows = jax.tree.map(lambda x, at=at: x[at], host)
            if aborted is not None and aborted[at].any():
                self.aborted.append((rows, first + p))
                continue
            known = rows.scores[rows.mask.any(axis=1)]  # without failed rewards
            alive = known.size > 1 and known.min() != known.max()
            (self.live if alive else self.dead).append((rows, first + p))
            if not alive and known.size:
                self.solved += int(known[0] > 0)
                self.zero += int(known[0] <= 0)

    def rollout(self, report, wanted: int, n: int, mesh, if_short: str, *, rounds: int) -> Rollout:
        """The first `wanted` live groups as one batch. If there are fewer, dead groups fill it, or
        InputError says so."""
        missing = max(wanted - len(self.live), 0)
        if missing and if_short == "error":
            raise InputError(
                f"only {len(self.live)} of {wanted} groups are live after {rounds} rounds: "
                f"{self.solved} all right, {self.zero} all wrong",
                rule="a group whose scores are all equal has no advantage",
                fix="other prompts, more samples per prompt, or if_short='fill'",
            )
        every = self.live + self.dead + self.aborted
        used, dropped, groups = every[:wanted], every[wanted:], len(every)
        ends = [(rows.segment_ids > 0).sum(axis=1) for rows, _ in dropped]
        starts = [self.prompts.lengths[index] for _, index in dropped]
        tokens = sum(float(np.sum(end - at)) for end, at in zip(ends, starts, strict=True))
        metrics = {
            "collect/rounds": rounds,
            "collect/generated_groups": groups,
            "collect/live_fraction": len(self.live) / max(groups - len(self.aborted), 1),
            "collect/solved_groups": self.solved,
            "collect/zero_groups": self.zero,
            "collect/filled_groups": missing,
            "collect/generations_per_kept_sample": groups / wanted,
            "collect/discarded_tokens": tokens,
        }
        prompts = self.prompts.select([index for _, index in used])
        return Rollout(_merged([rows for rows, _ in used], n, mesh), prompts, report, metrics)


def _merged(groups: list, n: int, mesh):
    """The groups as one batch on the mesh. A row whose reward failed has a group of its own."""
    batch = jax.tree.map(lambda *x: np.concatenate(x), *groups)
    failed = ~batch.mask.any(axis=1)
    group = np.repeat(np.arange(len(groups), dtype=np.int32), n)
    alone = len(groups) + np.arange(len(group), dtype=np.int32)
    batch = batch.replace(group=np.where(failed, alone, group).astype(np.int32))
    return place(batch, mesh)


def _rounds(
    prompts, key, cfg, actor, reward, draw, *, first: int, further: int, max_rounds: int,
    if_short: str,
) -> Rollout:  # fmt: skip
    wanted, n = len(prompts.records), cfg.samples_per_prompt
    if n < 2:
        raise InputError(
            "dynamic sampling needs groups", value=n, rule="batch.samples_per_prompt >= 2",
            fix="raise it, or set algorithm.collect='once'",
        )  # fmt: skip
    groups, reports = _Groups(), []
    sampled = prompts if first == wanted else prompts.joined(draw(first - wanted))
    while True:
        round_key = stream(key, "round", len(reports))
        batch, report = sample_scored(actor, reward, sampled, round_key, cfg.sampling, n=n)
        groups.add(fetch(batch), sampled, n)
        reports.append(report)
        if len(groups.live) >= wanted or len(reports) >= max_rounds:
            break
        sampled = draw(further)
    report = RewardReport.joined(reports)
    mesh = actor.model.mesh
    return groups.rollout(report, wanted, n, mesh, if_short, rounds=len(reports))
