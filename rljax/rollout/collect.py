"""Collect: prompts -> the scored trajectories of one step, by one round of sampling or by several.

A rule is called with (prompts, key, cfg, actor=, reward=), and draw= where it has the parameter:
draw(n) -> the next n prompts of the data. It returns (batch, prompts, metrics); metrics["report"]
is the RewardReport of everything that was sampled.

A group is live when the reward's own scores in it are not all equal; only live groups have an
advantage (ALGORITHMS H4).
"""

import dataclasses
import functools
from typing import Literal

import jax
import numpy as np

from rljax.arrays import fetch, place
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.rollout import RewardReport, sample_scored


def once(prompts, key, cfg, *, actor, reward):
    """One round: every group is used, dead ones too."""
    n = cfg.samples_per_prompt
    batch, report = sample_scored(actor, reward, prompts, key, cfg.sampling, n=n)
    return batch, prompts, {"report": report}


def dynamic(
    prompts,
    key,
    cfg,
    *,
    actor,
    reward,
    draw,
    oversample: float = 3.0,
    max_rounds: int = 10,
    if_short: Literal["error", "fill"] = "error",
):
    """DAPO: rounds of oversample x prompts_per_step prompts until enough groups are live; the first
    ones are used and the rest is discarded (arXiv 2503.14476).

    After `max_rounds`: an error that says what the groups were, or dead groups fill the batch.
    """
    wanted = len(prompts.records)
    size = max(wanted, round(oversample * wanted))
    return _rounds(
        prompts, key, cfg, actor, reward, draw, first=size, further=size, max_rounds=max_rounds,
        if_short=if_short,
    )  # fmt: skip


def active(
    prompts,
    key,
    cfg,
    *,
    actor,
    reward,
    draw,
    refill: float = 0.25,
    max_rounds: int = 40,
    if_short: Literal["error", "fill"] = "fill",
):
    """OlmoRL: one round of prompts_per_step, then small rounds of refill x prompts_per_step that
    replace the dead groups, so that the batch is always full (arXiv 2512.13961)."""
    wanted = len(prompts.records)
    further = max(1, round(refill * wanted))
    return _rounds(
        prompts, key, cfg, actor, reward, draw, first=wanted, further=further,
        max_rounds=max_rounds, if_short=if_short,
    )  # fmt: skip


@dataclasses.dataclass
class _Groups:
    """Groups in the order of arrival: the host rows of each, and its prompt."""

    rows: list
    prompts: list

    def add(self, host, p: int, n: int, prompts: Prompts) -> None:
        self.rows.append(jax.tree.map(lambda x: x[p * n : (p + 1) * n], host))
        self.prompts.append(prompts.select([p]))


def _rounds(prompts, key, cfg, actor, reward, draw, *, first, further, max_rounds, if_short):
    wanted, n = len(prompts.records), cfg.samples_per_prompt
    if n < 2:
        raise InputError(
            "dynamic sampling needs groups", value=n, rule="batch.samples_per_prompt >= 2",
            fix="raise it, or set algorithm.collect='once'",
        )  # fmt: skip
    live, dead, reports = _Groups([], []), _Groups([], []), []
    counts = dict(rounds=0, solved=0, zero=0, groups=0, discarded_tokens=0.0)
    asked = prompts if first == wanted else prompts.joined(draw(first - wanted))
    while True:
        here = jax.random.fold_in(key, counts["rounds"])
        batch, report = sample_scored(actor, reward, asked, here, cfg.sampling, n=n)
        host = fetch(batch)
        reports.append(report)
        counts["rounds"] += 1
        for p in range(len(asked.records)):
            scores = host.scores[p * n : (p + 1) * n]
            known = scores[host.mask[p * n : (p + 1) * n].any(axis=1)]  # failed ones say nothing
            alive = known.size > 1 and known.min() != known.max()
            (live if alive else dead).add(host, p, n, asked)
            counts["groups"] += 1
            if not alive and known.size:
                counts["solved" if known[0] > 0 else "zero"] += 1
        if len(live.rows) >= wanted or counts["rounds"] >= max_rounds:
            break
        asked = draw(further)
    missing = wanted - len(live.rows)
    if missing > 0 and if_short == "error":
        raise InputError(
            f"only {len(live.rows)} of {wanted} groups are live after {max_rounds} rounds: "
            f"{counts['solved']} all right, {counts['zero']} all wrong",
            rule="a group whose scores are all equal teaches nothing",
            fix="other prompts, more samples per prompt, or dynamic(if_short='fill')",
        )
    used = list(zip(live.rows, live.prompts, strict=True))[:wanted]
    used += list(zip(dead.rows, dead.prompts, strict=True))[: max(missing, 0)]
    batch, prompts = _merge(used, n, actor.model.mesh)
    made = sum(float(r.mask.sum()) for g in (live, dead) for r in g.rows)
    kept = sum(float(rows.mask.sum()) for rows, _ in used)
    return batch, prompts, {
        "report": RewardReport.joined(reports),
        "collect/rounds": counts["rounds"],
        "collect/generated_groups": counts["groups"],
        "collect/live_fraction": len(live.rows) / counts["groups"],
        "collect/solved_groups": counts["solved"],
        "collect/zero_groups": counts["zero"],
        "collect/filled_groups": max(missing, 0),
        "collect/generations_per_kept_sample": counts["groups"] / wanted,
        "collect/discarded_tokens": made - kept,
    }  # fmt: skip


def _merge(used, n: int, mesh):
    """The groups as one batch on the mesh; `group` is the index into the records, and a row whose
    reward failed keeps a group of its own."""
    batch = jax.tree.map(lambda *x: np.concatenate(x), *[rows for rows, _ in used])
    failed = ~batch.mask.any(axis=1)
    group = np.repeat(np.arange(len(used), dtype=np.int32), n)
    alone = len(used) + np.arange(len(group), dtype=np.int32)
    batch = batch.replace(group=np.where(failed, alone, group).astype(np.int32))
    return place(batch, mesh), functools.reduce(Prompts.joined, [prompt for _, prompt in used])
