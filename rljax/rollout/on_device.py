"""Rollouts inside a program: `sample` where prompts, responses and scores are traced arrays.

A rollout that declares `on_device` is called while the program is traced, with a DeviceSampler as
`sample` and DevicePrompts as `prompts`. What the host wants to know of the samples is an output of
the program, from which `report_of` makes the report of the reward afterwards.

Axes: P prompts, L prompt columns, R = P n rows, S columns, K parts of a reward.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.rewards.on_device import DeviceScorer
from rljax.rewards.on_device.scorer import UNDECIDED
from rljax.rewards.pool.pool import Score
from rljax.roles import Actor
from rljax.rollout.scoring.report import RewardReport, ScoredRow
from rljax.rollout.scoring.reward import Reward, with_rewards
from rljax.sampler import Decoding, Sampling
from rljax.sampler.generate import generate_in_program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DevicePrompts:
    """The prompts of a step in a program: tokens [P, L], lengths [P], what the reward has prepared
    of each, [P, ...], and the index [P] of each among the prompts that the step draws."""

    tokens: jax.Array
    lengths: jax.Array
    fields: dict[str, jax.Array]
    index: jax.Array

    starts = images = None

    @property
    def count(self) -> int:
        """Returns the number of prompts."""
        return self.tokens.shape[0]

    def joined(self, other: "DevicePrompts") -> "DevicePrompts":
        """Returns these prompts, then the others."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), self, other)

    def select(self, rows) -> "DevicePrompts":
        """Returns the prompts at these indices [p], in this order."""
        return jax.tree.map(lambda x: x[jnp.asarray(rows)], self)

    @property
    def records(self):
        """Raises InputError: texts and ground truths are not in the program."""
        raise InputError(
            "a rollout reads prompts.records in a program of several steps",
            rule="records are on the host; prompts.tokens and prompts.lengths are arrays",
            fix="program_steps=1, or a rollout that reads the arrays alone",
        )

    @property
    def response_starts(self) -> jax.Array:
        """Returns the column at which each response begins: [P]."""
        return self.lengths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """The rows of one call of `sample` and their scores, of which the host makes a report."""

    tokens: jax.Array  # [R, S] int32
    prompts: jax.Array  # [R] int32, the index of the row's prompt among those that the step draws
    starts: jax.Array  # [R] int32, where the response begins
    ends: jax.Array  # [R] int32, where it ends
    finish_reason: jax.Array  # [R] int32
    scores: dict[str, jax.Array]  # [R] float32 by name: "score" and the parts


class DeviceSampler:
    """`sample` of a rollout that is traced. `asked` collects the samples of its calls.
    `temperature`: a traced one, in place of that of `sampling`."""

    def __init__(
        self,
        actor: Actor,
        sampling: Sampling,
        decoding: Decoding,
        scorer: DeviceScorer | None,
        temperature: jax.Array | None = None,
    ):
        self.actor, self.sampling, self.decoding = actor, sampling, decoding
        self.scorer, self.temperature = scorer, temperature
        self.asked: list[Samples] = []

    def __call__(
        self,
        prompts: DevicePrompts,
        key: jax.Array,
        *,
        n: int,
        sampling: Sampling | None = None,
        actor=None,
        enough=None,
        tree=None,
    ) -> tuple[Batch, int]:
        """Samples n scored responses to each of P prompts. Returns the batch of P n rows, and the
        number of the call, which stands for its report. Raises InputError for `enough`, which the
        host would have to ask, and for a role other than the actor."""
        if enough is not None or not isinstance(actor or self.actor, Actor):
            raise InputError(
                "a rollout in a program of several steps samples in a way that needs the host",
                rule="sample(prompts, key, n=..., sampling=...) of the actor, without `enough`",
                fix="program_steps=1",
            )
        actor, sampling = actor or self.actor, sampling or self.sampling
        is_own = sampling.temperature == self.sampling.temperature
        batch = generate_in_program(
            actor.model,
            actor.state.weights,
            prompts.tokens,
            prompts.lengths,
            key,
            sampling,
            n=n,
            version=actor.state.step,
            decoding=self.decoding,
            temperature=self.temperature if is_own else None,
        )
        batch = jax.lax.optimization_barrier(batch)
        starts, index = jnp.repeat(prompts.lengths, n), jnp.repeat(prompts.index, n)
        ends = jnp.sum(batch.segment_ids > 0, axis=1)
        scores = {}
        if self.scorer is not None:
            fields = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), prompts.fields)
            scores = self.scorer.score(batch.tokens, starts, ends, batch.finish_reason, fields)
            batch = _rewarded(batch, prompts.count, scores)
        self.asked.append(Samples(batch.tokens, index, starts, ends, batch.finish_reason, scores))
        return jax.lax.optimization_barrier(batch), len(self.asked) - 1


def _rewarded(batch: Batch, prompts: int, scores: dict[str, jax.Array]) -> Batch:
    """The batch [R, S] with rewards, as Reward fills it on the host; rows without a score are
    masked and have groups of their own behind those of the prompts."""
    ok = jnp.isfinite(scores["score"])
    values = jnp.where(ok, scores["score"], 0.0)
    names = sorted(name for name in scores if "/" not in name and name != "score")
    parts = None
    if names:
        parts = jnp.stack([jnp.where(ok, scores[name], 0.0) for name in names], axis=1)
    own_groups = prompts + jnp.arange(batch.rows, dtype=jnp.int32)
    return with_rewards(batch, values, parts, ok, jnp.where(ok, batch.group, own_groups))


def report_of(samples: Samples, prompts: Prompts, reward: Reward) -> RewardReport:
    """Returns the report of samples [R, S], whose arrays are on the host, of the prompts that the
    step has drawn."""
    scores = {name: _shortest(x) for name, x in samples.scores.items()}
    spans = zip(samples.starts.tolist(), samples.ends.tolist(), strict=True)
    origins = zip(samples.prompts.tolist(), samples.finish_reason.tolist(), strict=True)
    rows = []
    for row, ((start, end), (group, finish)) in enumerate(zip(spans, origins, strict=True)):
        record, ids = prompts.records[group], samples.tokens[row, start:end].tolist()
        parts = {name: values[row] for name, values in scores.items()}
        score = Score(parts["score"], parts, "ok", 0.0)
        if not math.isfinite(parts["score"]):
            score = Score(math.nan, {}, "error", 0.0, UNDECIDED)
        rows.append(ScoredRow(reward.fields(record, ids, finish, group), score, record, group))
    return RewardReport(tuple(rows))


def _shortest(scores: np.ndarray) -> list[float]:
    """Returns float32 scores [R] as the shortest decimal numbers: 0.3, and not
    0.30000001192092896."""
    values, inverse = np.unique(scores, return_inverse=True)
    return np.array([float(str(value)) for value in values])[inverse].tolist()
