"""Reward: scores trajectories on the host and masks failures; RewardReport: what one call returned.

Reward functions and their workers are rljax.rewards; scores of lines are rljax.rollout.process.
Axes: P prompts, B rows, S tokens, K parts.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, FinishReason, last_token
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.learn import map_microbatches
from rljax.models.model import Model
from rljax.rewards.judges.rubric_buffer import RubricBuffer
from rljax.rewards.pool.pool import Pending, RewardPool, Score
from rljax.rewards.sandbox.tiers import ALL_TIERS
from rljax.rollout.judge import MeshJudge
from rljax.rollout.process import ProcessScorer
from rljax.tracking import timing
from rljax.tracking.timing import timed

_FINISH = ("stop", "length", "interrupt", "abort")  # by number: rljax.batch.FinishReason


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """One sample: the fields that the reward read, its score, and its prompt."""

    sample: Mapping  # prompt, response, ground_truth, ...: the fields that a reward may declare
    score: Score
    record: PromptRecord
    group: int  # the same number for all samples of a prompt within a report


@dataclasses.dataclass(frozen=True)
class RewardReport:
    """The scored rows of one call, or of several, in their order."""

    rows: tuple[ScoredRow, ...] = ()
    process: tuple[Mapping[str, float], ...] = ()  # metrics of the scored lines, one per call

    @classmethod
    def joined(cls, reports: Iterable["RewardReport"]) -> "RewardReport":
        """The reports as one. Prompts of different reports have different groups."""
        rows, process, first = [], [], 0
        for report in reports:
            rows += [dataclasses.replace(row, group=first + row.group) for row in report.rows]
            process += report.process
            first = 1 + max((row.group for row in rows), default=-1)
        return cls(tuple(rows), tuple(process))

    @property
    def examples(self) -> list[dict]:
        """Text, reward and status of every sample."""
        keep = ("prompt", "response", "ground_truth", "finish_reason")
        return [
            {
                **{name: row.sample[name] for name in keep},
                "reward": row.score.value,
                "status": row.score.status,
                "message": row.score.message,
            }
            for row in self.rows
        ]

    @property
    def outcomes(self) -> list[tuple[int, float]]:
        """(prompt_id, score) of every scored sample of a training prompt."""
        return [
            (row.record.prompt_id, row.score.value)
            for row in self.rows
            if row.score.status == "ok" and row.record.prompt_id is not None
        ]

    def metrics(self) -> dict[str, float]:
        """Counts of failures, of errors also by kind, and of samples over a limit that have a score
        for that; whether late samples are the long ones; for each source the share of failures,
        the mean score and the share of the samples; means of the parts; whether scores are equal;
        metrics of scored lines."""
        out = {f"reward/{name}": 0.0 for name in ("errors", "timeouts")}
        means: dict[str, list[float]] = {}
        shares: dict[str, float] = {}
        for row in self.rows:
            score, source = row.score, row.record.source or row.record.data_source
            shares[source] = shares.get(source, 0.0) + 1 / len(self.rows)
            failed = means.setdefault(f"reward/failed_fraction/{source}", [])
            failed.append(float(score.status != "ok"))
            if score.status != "ok":
                out[f"reward/{score.status}s"] += 1.0
                if score.status == "error":
                    name = f"reward/errors/{error_kind(score.message)}"
                    out[name] = out.get(name, 0.0) + 1.0
                continue
            if score.over_limit:
                out["reward/timeouts_scored"] = out.get("reward/timeouts_scored", 0.0) + 1.0
            means.setdefault(f"reward/source/{source}", []).append(score.value)
            for name, value in score.parts.items():
                means.setdefault(f"reward/part/{name}", []).append(value)
        out |= {name: float(np.mean(values)) for name, values in sorted(means.items())}
        failed = self.extraction_failed_fraction
        if failed is not None:
            out["reward/extraction_failed_fraction"] = failed
        out |= self._equal_scores() | self._late_and_long()
        if len(shares) > 1:
            out |= {f"data/share/{name}": share for name, share in sorted(shares.items())}
        for name in self.process[0] if self.process else ():
            out[name] = float(np.mean([metrics[name] for metrics in self.process]))
        return out

    @property
    def extraction_failed_fraction(self) -> float | None:
        """extraction_failed_fraction of the samples."""
        return extraction_failed_fraction(row.score.parts for row in self.rows)

    def _equal_scores(self) -> dict[str, float]:
        """reward/all_equal: 1 where all known scores are one number, else 0; reward/equal_groups:
        the share of the prompts with two known scores or more whose scores are one number."""
        groups: dict[int, list[float]] = {}
        for row in self.rows:
            if row.score.status == "ok":
                groups.setdefault(row.group, []).append(row.score.value)
        if sum(map(len, groups.values())) < 2:
            return {}
        scores = {score for values in groups.values() for score in values}
        out = {"reward/all_equal": float(len(scores) == 1)}
        several = [len({*values}) == 1 for values in groups.values() if len(values) > 1]
        return out | ({"reward/equal_groups": float(np.mean(several))} if several else {})

    def _late_and_long(self) -> dict[str, float]:
        """reward/timeout_longer_fraction: of all pairs of a response that was too late and one that
        was not, the share in which the late one is longer. 0.5: length says nothing."""
        is_late = [row.score.status == "timeout" or row.score.over_limit for row in self.rows]
        if len(set(is_late)) < 2:
            return {}
        lengths = np.array([row.sample["num_tokens"] for row in self.rows])
        late, others = lengths[is_late], lengths[np.logical_not(is_late)]
        gap = np.subtract.outer(late, others)
        return {"reward/timeout_longer_fraction": float(np.mean((gap > 0) + 0.5 * (gap == 0)))}


def extraction_failed_fraction(parts: Iterable[Mapping[str, float]]) -> float | None:
    """The share of samples in which no answer was found, from the parts of their scores: 1 - the
    mean of the parts called extracted, also of members of a mixture. None without such parts."""
    extracted = [
        value
        for one in parts
        for name, value in one.items()
        if name.rpartition("/")[2] == "extracted"
    ]
    return 1.0 - float(np.mean(extracted)) if extracted else None


def error_kind(message: str) -> str:
    """The exception's name in the message of a failed score; the kind of an EndpointError; else
    "other"."""
    found = re.match(r"(?:EndpointError: )?(\w+): ", message)
    return found[1] if found else "other"


class ModelScorer:
    """A frozen reward model: the score after the last token of each row. It reads the policy's
    tokens, so that both have one vocabulary."""

    def __init__(self, model: Model, params, rows: int):
        self.model, self.params, self.rows = model, params, rows

    def score(self, batch: Batch) -> list[Score]:
        """One Score per row. A score that is not finite is an error."""
        rows = self.rows if batch.rows % self.rows == 0 else batch.rows
        scores = fetch(_model_scores(self.params, batch, model=self.model, rows=rows))
        return [
            Score(float(x), {}, "ok", 0.0) if np.isfinite(x)
            else Score(np.nan, {}, "error", 0.0, f"the reward model says {x}")
            for x in scores.astype(np.float64)
        ]  # fmt: skip

    def close(self) -> None:
        """Does nothing: no process was started."""


@functools.partial(jax.jit, static_argnames=("model", "rows"))
def _model_scores(params, batch: Batch, *, model: Model, rows: int) -> jax.Array:
    """The first scalar head of each row, `rows` rows at once: [B]."""
    plain = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)
    return map_microbatches(lambda part: model.scores(params, part)[:, 0], plain, rows)


class Reward:
    """Trajectories -> rewards, by a function of text in a pool of killable processes, or by a
    reward model (host verb).

    A sample whose reward failed (raised, timed out, not finite) is not scored 0: its mask becomes
    0 and it leaves its group, so that it enters neither the loss nor a baseline. `process` adds the
    scores of lines to the rewards; `scores` are those of the outcome alone. `rubrics` holds the
    rubrics of each prompt. `model` computes the model_score that rewards of text may read. A call
    does not change the Reward: its results are in the report.
    """

    def __init__(
        self,
        pool: "RewardPool | ModelScorer | MeshJudge",
        tokenizer,
        mesh,
        process: ProcessScorer | None = None,
        rubrics: RubricBuffer | None = None,
        model: ModelScorer | None = None,
    ):
        self.pool, self.tokenizer, self.mesh, self.process = pool, tokenizer, mesh, process
        self.rubrics, self.model = rubrics, model

    def outcome_alone(self) -> "Reward":
        """The same pool without scores of lines and without evolving rubrics, for evaluation."""
        plain = self.process is None and self.rubrics is None
        return self if plain else Reward(self.pool, self.tokenizer, self.mesh, model=self.model)

    def start_early(self, prompts: Prompts, n: int) -> "EarlyScores | None":
        """Scores of rows as they end, n samples per prompt, while others still decode. None for a
        reward model, which scores whole batches on the mesh, and rewards that read its score."""
        by_rows = isinstance(self.pool, RewardPool) and self.model is None
        return EarlyScores(self, prompts, n) if by_rows else None

    def __call__(
        self, batch: Batch, prompts: Prompts, *, early: "EarlyScores | None" = None
    ) -> tuple[Batch, RewardReport]:
        """The batch with rewards, scores and reward_parts, failed rows masked; and the report.

        `prompts.records[group]` holds the ground truth of a row. With `process`, the batch also has
        step_ids and process_rewards. `early` holds scores of rows that ended before the others;
        they are used where the row has not changed.
        """
        assert early is None or early.prompts is prompts, "early scores of another rollout"
        with timed("reward"):
            tokens, mask, segments, group, finish = fetch(
                (batch.tokens, batch.mask, batch.segment_ids, batch.group, batch.finish_reason)
            )
            starts, ends = np.asarray(prompts.response_starts)[group], np.sum(segments > 0, axis=1)
            ids = [row[a:b].tolist() for row, a, b in zip(tokens, starts, ends, strict=True)]
            samples, scores = self._scores(
                batch, prompts, ids, group.tolist(), finish.tolist(), early
            )
            for score in scores:
                if np.isfinite(score.ended_s):
                    timing.scored(score.ended_s - score.seconds, score.ended_s)
            rows = tuple(
                ScoredRow(sample, score, prompts.records[g], int(g))
                for sample, score, g in zip(samples, scores, group, strict=True)
                if score.status != "aborted"
            )
            ok = np.array([s.status == "ok" for s in scores])
            values = np.array([s.value if s.status == "ok" else 0.0 for s in scores], np.float32)
            # A failed row gets a group of its own, so that it is not in its siblings' baseline.
            alone = len(prompts.records) + np.arange(len(samples), dtype=np.int32)
            host = (values, _parts(scores), mask * ok[:, None], np.where(ok, group, alone))
            batch = _place_rewards(batch, *place(host, self.mesh))
            if self.process is None:
                return batch, RewardReport(rows)
            batch, metrics = self.process(batch)
            return batch, RewardReport(rows, (metrics,))

    def _scores(
        self, batch: Batch, prompts: Prompts, ids, group, finish, early: "EarlyScores | None"
    ) -> tuple[list[dict], list[Score]]:
        """The sample and the score of every row. Rows that were scored early and have not changed
        since are not scored again."""
        rows = range(len(ids))
        known = {} if early is None else early.matching(ids, group, finish)
        samples = {
            row: known[row][0]
            if row in known
            else self.sample(prompts.records[group[row]], ids[row], finish[row], group[row])
            for row in rows
        }
        if isinstance(self.pool, ModelScorer):
            return list(samples.values()), self.pool.score(batch)
        if self.model is not None:
            for row, score in enumerate(self.model.score(batch)):
                samples[row]["model_score"] = score.value
        ended = range(0) if early is None or not early.stopped else rows
        cut = {group[row] for row in ended if finish[row] == FinishReason.ABORT}
        aborted = {
            row: Score(np.nan, {}, "aborted", 0.0, "the rollout had enough groups")
            for row in ended
            if finish[row] == FinishReason.ABORT or (self.pool.grouped and group[row] in cut)
        }
        rest = [row for row in rows if row not in known and row not in aborted]
        scores = dict(zip(rest, self.pool.score([samples[row] for row in rest]), strict=True))
        scores |= aborted
        scores |= {row: pending.result()[place] for row, (_, pending, place) in known.items()}
        return list(samples.values()), [scores[row] for row in rows]

    def sample(self, record: PromptRecord, ids: Sequence[int], finish: int, group: int) -> dict:
        """What the pool scores: the fields that a reward may declare, and `group`, the same number
        for all samples of a prompt."""
        return {
            "prompt": record.prompt_text,
            "messages": record.messages,  # for rewards of TRL's signature
            "response": self.tokenizer.decode([int(i) for i in ids]),
            "ground_truth": record.ground_truth,
            "data_source": record.data_source,
            "extra_info": (
                record.extra_info if self.rubrics is None else self.rubrics.extra_info(record)
            ),
            "num_tokens": len(ids),
            "finish_reason": _FINISH[int(finish)],
            "group": group,
        }

    def learn(self, report: RewardReport) -> dict[str, float]:
        """Updates the rubrics by the report of a step. Their metrics, and the `facts`."""
        learned = {} if self.rubrics is None else self.rubrics.learn(report.rows)
        return self.facts() | learned

    def facts(self) -> dict[str, float]:
        """reward/sandbox_tier, where programs are run: the place of their tier in ALL_TIERS of
        rljax.rewards.sandbox.tiers. 0 isolates best."""
        notes = self.pool.notes if isinstance(self.pool, RewardPool) else {}
        tier = notes.get("sandbox_tier")
        return {} if tier is None else {"reward/sandbox_tier": float(ALL_TIERS.index(tier))}

    def close(self) -> None:
        self.pool.close()
        if self.rubrics is not None:
            self.rubrics.close()


class EarlyScores:
    """Scores of rows of a rollout that is still decoding. Rewards of groups score a group once all
    of its rows have ended."""

    def __init__(self, reward: Reward, prompts: Prompts, n: int):
        self.reward, self.prompts, self.n = reward, prompts, n
        self._rows: dict[int, tuple[list[int], int, dict]] = {}  # ids, finish reason, sample
        self._pending: dict[int, tuple[Pending, int]] = {}  # and the row's place in it
        self.stopped = False  # whether the rows that had not ended were aborted

    def finished(self, row: int, ids: list[int], finish: int) -> None:
        """Submits row p n + s, sample s of prompt p, which has ended: `finished` of `generate`."""
        group, pool = row // self.n, self.reward.pool
        start, length = self.prompts.response_starts[group], self.prompts.lengths[group]
        ids = [*self.prompts.tokens[group, start:length].tolist(), *ids]
        sample = self.reward.sample(self.prompts.records[group], ids, finish, group)
        self._rows[row] = (ids, finish, sample)
        together = range(group * self.n, (group + 1) * self.n) if pool.grouped else (row,)
        if all(other in self._rows for other in together):
            pending = pool.submit([self._rows[other][2] for other in together])
            self._pending |= {other: (pending, i) for i, other in enumerate(together)}

    def complete_groups(self) -> list[list[float]]:
        """The scores of every group whose rows have all ended and been scored, without failed ones.
        Does not wait."""
        groups: dict[int, list[float]] = {}
        known: dict[int, int] = {}
        for row, (pending, at) in self._pending.items():
            if pending.done():
                score, group = pending.result()[at], row // self.n
                known[group] = known.get(group, 0) + 1
                groups.setdefault(group, []).extend([score.value] * (score.status == "ok"))
        return [scores for group, scores in groups.items() if known[group] == self.n]

    def matching(self, ids, group, finish) -> dict[int, tuple[dict, Pending, int]]:
        """The rows of a batch that are equal to those submitted. The others are cancelled."""
        same = {
            row
            for row in self._pending
            if row < len(ids)
            and (self._rows[row][0], self._rows[row][1]) == (ids[row], finish[row])
            and group[row] == row // self.n
        }
        wrong = {id(of): of for row, (of, _) in self._pending.items() if row not in same}
        for pending in wrong.values():
            pending.cancel()
        return {
            row: (self._rows[row][2], *self._pending[row])
            for row in same
            if id(self._pending[row][0]) not in wrong
        }

    def cancel(self) -> None:
        """Cancels the rows that are not scored yet."""
        for pending in {id(of): of for of, _ in self._pending.values()}.values():
            pending.cancel()


def sample_scored(
    actor, reward: Callable, prompts: Prompts, key: jax.Array, sampling, *, n: int = 1,
    enough: "Callable[[EarlyScores], bool] | None" = None,
) -> tuple[Batch, RewardReport]:  # fmt: skip
    """Returns reward(actor.generate(prompts, key, sampling, n=n), prompts). Rows are scored as they
    end, while others still decode. Once `enough`, a function of the early scores, is true, the rows
    that still decode are aborted and not scored.

    `reward` may be any function (batch, prompts) -> (batch, report); only a `Reward` scores early.
    """
    early = reward.start_early(prompts, n) if isinstance(reward, Reward) else None
    if early is None:
        return reward(actor.generate(prompts, key, sampling, n=n), prompts)

    def stop() -> bool:
        early.stopped = enough(early)
        return early.stopped

    options = {} if enough is None else {"stop": stop}
    try:
        batch = actor.generate(prompts, key, sampling, n=n, finished=early.finished, **options)
        return reward(batch, prompts, early=early)
    except BaseException:  # a Ctrl-C, say
        early.cancel()
        raise


def _parts(scores: list[Score]) -> np.ndarray | None:
    """The named parts of every score, in the order of their names: [B, K]; None if the score has
    none. Parts with a slash in their names are only logged: they may differ from step to step, and
    another K would recompile the learning step."""
    names = sorted(
        {name for score in scores for name in score.parts if "/" not in name} - {"score"}
    )
    if not names:
        return None
    # A part that a score lacks does not apply to it (rljax.advantages.gdpo); a failed row is
    # masked.
    lack = [0.0 if score.status != "ok" else np.nan for score in scores]
    rows = [[s.parts.get(name, x) for name in names] for s, x in zip(scores, lack, strict=True)]
    return np.array(rows, np.float32)


@jax.jit
def _place_rewards(batch: Batch, values, parts, mask, group) -> Batch:
    """An outcome reward sits on the last policy token."""
    batch = batch.replace(mask=mask.astype(jnp.float32), group=group.astype(jnp.int32))
    rewards = last_token(batch) * values[:, None]
    return batch.replace(rewards=rewards, scores=values, reward_parts=parts)
