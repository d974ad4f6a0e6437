"""Reward: scores trajectories on the host and masks failures.

Each host scores whole groups, those of its own prompts, in its own workers; the scores of all are
gathered, so that every host fills the same batch and the same report. Reward functions and their
workers are rljax.rewards; scores of lines are rljax.rollout.scoring.process.
Axes: P prompts, B rows, S tokens, K parts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax import heartbeat, hosts
from rljax.arrays import fetch, moved_rows, place, weights_of
from rljax.batch import Batch, FinishReason, last_token
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.learn import map_microbatches
from rljax.metric import Metric
from rljax.models.model import Model
from rljax.reasoning import response_of
from rljax.rewards.judges.rubric_buffer import RubricBuffer
from rljax.rewards.pool.pool import Pending, RewardPool, Score
from rljax.rewards.sandbox.tiers import ALL_TIERS
from rljax.rollout.scoring.judge import MeshJudge
from rljax.rollout.scoring.process import ProcessScorer
from rljax.rollout.scoring.report import RewardInput, RewardReport, ScoredRow
from rljax.tracking import timing
from rljax.tracking.timing import timed

METRICS = {
    "reward/sandbox_tier": Metric(
        "how programs are shut in: 0 namespaces, 1 bubblewrap, 2 seccomp, 3 closed, 4 unsafe",
        "tier",
        "0; a weaker one is warned of as the run begins",
    )
}

COST = "cost"  # the part of a reward that is a cost
_OF_SCORE = ("value", "parts", "status", "seconds", "message")


class ModelScorer:
    """A frozen reward model: the score after the last token of each row. It reads the policy's
    tokens, so that both have one vocabulary. `role` is what placement calls it."""

    def __init__(self, model: Model, params, rows: int, role: str = "reward_model"):
        self.model, self.params, self.rows, self.role = model, params, rows, role

    def score(self, batch: Batch) -> list[Score]:
        """Returns one Score per row of a batch [B, S]. A score that is not finite is an error."""
        rows = self.rows if batch.rows % self.rows == 0 else batch.rows
        inputs = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)
        inputs = moved_rows(inputs, self.model.mesh, self.role)
        weights = weights_of(self.params, self.role)
        scores = fetch(_model_scores(weights, inputs, model=self.model, rows=rows))
        return [
            Score(float(x), {}, "ok", 0.0)
            if np.isfinite(x)
            else Score(np.nan, {}, "error", 0.0, f"the {self.role.replace('_', ' ')} says {x}")
            for x in scores.astype(np.float64)
        ]

    def close(self) -> None:
        """Does nothing: no process was started."""


@functools.partial(jax.jit, static_argnames=("model", "rows"))
def _model_scores(params, batch: Batch, *, model: Model, rows: int) -> jax.Array:
    """The first scalar head of each row, `rows` rows at once: [B]."""
    return map_microbatches(lambda part: model.scores(params, part)[:, 0], batch, rows)


class Reward:
    """Trajectories -> rewards, by a function of text in a pool of killable processes, or by a
    reward model (host verb).

    A sample whose reward failed (raised, timed out, not finite) is not scored 0: its mask becomes
    0 and it leaves its group, so that it enters neither the loss nor a baseline. `process` adds the
    scores of lines to the rewards; `scores` are those of the outcome alone. `rubrics` holds the
    rubrics of each prompt. `model` computes the model_score that rewards of text may read. With
    `needs_costs` the batch gets the costs of a constraint, too: the part `cost` of each score, or
    what `cost_model` says; a sample without a cost has failed. A call does not change the Reward:
    its results are in the report.
    """

    def __init__(
        self,
        pool: "RewardPool | ModelScorer | MeshJudge",
        tokenizer,
        mesh,
        process: ProcessScorer | None = None,
        rubrics: RubricBuffer | None = None,
        model: ModelScorer | None = None,
        needs_costs: bool = False,
        cost_model: ModelScorer | None = None,
    ):
        self.pool, self.tokenizer, self.mesh, self.process = pool, tokenizer, mesh, process
        self.rubrics, self.model = rubrics, model
        self.needs_costs, self.cost_model = needs_costs, cost_model

    def outcome_alone(self) -> "Reward":
        """Returns the same pool without scores of lines, evolving rubrics and
        costs, for evaluation."""
        is_plain = self.process is None and self.rubrics is None and not self.needs_costs
        return self if is_plain else Reward(self.pool, self.tokenizer, self.mesh, model=self.model)

    @property
    def row_pool(self) -> RewardPool | None:
        """The processes that score rows one by one. None for a reward model, which scores whole
        batches on the mesh, and rewards that read its score."""
        by_rows = isinstance(self.pool, RewardPool) and self.model is None
        return self.pool if by_rows else None

    def start_early(self, prompts: Prompts, n: int) -> "EarlyScores | None":
        """Returns the scores of rows as they end, n samples per prompt, while others still decode.
        None if rows are not scored one by one."""
        return None if self.row_pool is None else EarlyScores(self, prompts, n)

    def __call__(
        self, batch: Batch, prompts: Prompts, *, early: "EarlyScores | None" = None
    ) -> tuple[Batch, RewardReport]:
        """The batch with rewards, scores and reward_parts, maybe costs, failed rows masked; and the
        report.

        `prompts.records[group]` holds the ground truth of a row. With `process`, the batch also has
        step_ids and process_rewards. `early` holds scores of rows that ended before the others;
        they are used where the row has not changed.
        """
        assert early is None or early.prompts is prompts, "early scores of another rollout"
        with timed("reward"):
            fields = (batch.tokens, batch.segment_ids, batch.group, batch.finish_reason)
            tokens, segments, group, finish = fetch(fields)
            starts, ends = np.asarray(prompts.response_starts)[group], np.sum(segments > 0, axis=1)
            ids = [row[a:b].tolist() for row, a, b in zip(tokens, starts, ends, strict=True)]
            rows = (ids, group.tolist(), finish.tolist())
            samples, scores = self._scores(batch, prompts, *rows, early)
            return self.rewarded(batch, prompts, samples, scores)

    def rewarded(
        self, batch: Batch, prompts: Prompts, samples: list[RewardInput], scores: list[Score]
    ) -> tuple[Batch, RewardReport]:
        """Returns the batch [B, S] with rewards and the report, once the scores of its B
        rows are known."""
        group = fetch(batch.group)
        if self.cost_model is not None:
            model_costs = self.cost_model.score(batch)
            scores = [_with_cost(*pair) for pair in zip(scores, model_costs, strict=True)]
        if self.needs_costs:
            scores = [with_cost_or_error(score) for score in scores]
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
        own_groups = len(prompts.records) + np.arange(len(samples), dtype=np.int32)
        arrays = (values, parts_of(scores), ok, np.where(ok, group, own_groups))
        batch = with_rewards(batch, *place(arrays, self.mesh))
        if self.needs_costs:
            costs = np.array([score.parts.get(COST, 0.0) for score in scores], np.float32)
            batch = _with_costs(batch, place(costs, self.mesh))
        if self.process is None:
            return batch, RewardReport(rows)
        batch, metrics = self.process(batch)
        return batch, RewardReport(rows, (metrics,))

    def _scores(
        self, batch: Batch, prompts: Prompts, ids, group, finish, early: "EarlyScores | None"
    ) -> tuple[list[RewardInput], list[Score]]:
        """Returns the sample and the score of every row. Rows that were scored early and have not
        changed since are not scored again."""
        rows = range(len(ids))
        early_scores = {} if early is None else early.matching(ids, group, finish)
        samples = [
            early_scores[row][0]
            if row in early_scores
            else self.fields(prompts.records[group[row]], ids[row], finish[row], group[row])
            for row in rows
        ]
        if isinstance(self.pool, ModelScorer):
            return samples, self.pool.score(batch)
        if self.model is not None:
            model_scores = self.model.score(batch)
            pairs = zip(samples, model_scores, strict=True)
            samples = [sample.adding(model_score=score.value) for sample, score in pairs]
        if isinstance(self.pool, MeshJudge):  # a program: every host asks it about every row
            return samples, self.pool.score(samples)
        ended = range(0) if early is None or not early.stopped else rows
        cut_groups = {group[row] for row in ended if finish[row] == FinishReason.ABORT}
        aborted = {
            row: Score(np.nan, {}, "aborted", 0.0, "the rollout had enough groups")
            for row in ended
            if finish[row] == FinishReason.ABORT or (self.pool.grouped and group[row] in cut_groups)
        }
        local_groups = set(hosts.mine(len(prompts.records)))
        settled = early_scores.keys() | aborted.keys()
        remaining = [row for row in rows if group[row] in local_groups and row not in settled]
        if hosts.count() == 1:
            scores = dict(
                zip(remaining, self.pool.score([samples[row] for row in remaining]), strict=True)
            )
            scores |= {
                row: pending.result()[index] for row, (_, pending, index) in early_scores.items()
            }
            scores |= aborted
            return samples, [scores[row] for row in rows]
        late = self.pool.submit([samples[row] for row in remaining])
        if _all_known([late, *(pending for _, pending, _ in early_scores.values())]):
            scores = dict(zip(remaining, late.result(), strict=True))
            scores |= {
                row: pending.result()[index] for row, (_, pending, index) in early_scores.items()
            }
        else:  # this exchange ends the step
            scores = {}
        scores = of_all_hosts(scores) | aborted
        return samples, [scores[row] for row in rows]

    def fields(
        self, record: PromptRecord, ids: Sequence[int], finish: int, group: int
    ) -> RewardInput:
        """Returns the fields that the pool scores: those that a reward may declare, and `group`,
        the same number for all samples of a prompt."""
        prompt = (record.prompt_text, record.messages)
        text = functools.partial(response_of, self.tokenizer, ids, *prompt)
        shown = functools.partial(_shown, self.tokenizer, ids)
        return sample_of(record, text, ids, finish, group, self.rubrics, shown)

    def learn(self, report: RewardReport) -> dict[str, float]:
        """Updates the rubrics by the report of a step. Returns their metrics, and the `facts`."""
        learned = {} if self.rubrics is None else self.rubrics.learn(report.rows)
        return self.facts() | learned

    def facts(self) -> dict[str, float]:
        """Returns reward/sandbox_tier, where programs are run: the index of their tier in ALL_TIERS
        of rljax.rewards.sandbox.tiers. 0 isolates best."""
        notes = self.pool.notes if isinstance(self.pool, RewardPool) else {}
        tier = notes.get("sandbox_tier")
        return {} if tier is None else {"reward/sandbox_tier": float(ALL_TIERS.index(tier))}

    def close(self) -> None:
        """Ends the processes that score."""
        self.pool.close()
        if self.rubrics is not None:
            self.rubrics.close()


class FunctionReward(Reward):
    """A reward that is a function (batch, prompts) -> (batch, report), of whole batches."""

    def __init__(self, function: Callable[[Batch, Prompts], tuple[Batch, RewardReport]]):
        super().__init__(None, None, None)
        self.function = function

    def __call__(
        self, batch: Batch, prompts: Prompts, *, early: "EarlyScores | None" = None
    ) -> tuple[Batch, RewardReport]:
        return self.function(batch, prompts)

    def close(self) -> None:
        """Does nothing: no process was started."""


def sample_of(
    record: PromptRecord,
    text: Callable[[], str],
    ids: Sequence[int],
    finish: int,
    group: int,
    rubrics: RubricBuffer | None,
    shown: Callable[[], str] | None = None,
) -> RewardInput:
    """Returns the fields of a response that a reward may declare; `text` decodes it, and `shown`
    for people (RewardInput.shown)."""
    fields = {
        "prompt": record.prompt_text,
        "messages": record.messages,  # for rewards of TRL's signature
        "response": None,
        "ground_truth": record.ground_truth,
        "data_source": record.data_source,
        "extra_info": record.extra_info if rubrics is None else rubrics.extra_info(record),
        "num_tokens": len(ids),
        "token_ids": ids,  # for rewards of TRL's signature, like the messages
        "finish_reason": FinishReason(int(finish)).name.lower(),
        "group": group,
    }
    return RewardInput(fields, text, shown)


def _shown(tokenizer, ids: Sequence[int]) -> str:
    ids = [int(i) for i in ids]
    if ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False)


class EarlyScores:
    """Scores of rows of a rollout that is still decoding, those of this host's prompts. Rewards of
    groups score a group once all of its rows have ended."""

    def __init__(self, reward: Reward, prompts: Prompts, n: int):
        self.reward, self.prompts, self.n = reward, prompts, n
        self._mine = set(hosts.mine(len(prompts.records)))
        self._rows: dict[int, tuple[list[int], int, dict]] = {}  # ids, finish reason, sample
        self._pending: dict[int, tuple[Pending, int]] = {}  # and the row's index in it
        self.stopped = False  # True once the rows that had not ended were aborted

    def finished(self, row: int, ids: list[int], finish: int) -> None:
        """Submits row p n + s, sample s of prompt p, which has ended: `finished` of `generate`.
        Every host is told of every row and submits those of its own prompts."""
        group, pool = row // self.n, self.reward.pool
        if group not in self._mine:
            return
        start, length = self.prompts.response_starts[group], self.prompts.lengths[group]
        ids = [*self.prompts.tokens[group, start:length].tolist(), *ids]
        sample = self.reward.fields(self.prompts.records[group], ids, finish, group)
        self._rows[row] = (ids, finish, sample)
        members = range(group * self.n, (group + 1) * self.n) if pool.grouped else (row,)
        if all(member in self._rows for member in members):
            pending = pool.submit([self._rows[member][2] for member in members])
            self._pending |= {member: (pending, i) for i, member in enumerate(members)}

    def complete_groups(self) -> list[list[float]]:
        """Returns the scores of every group whose rows have all ended and been scored, without
        failed ones. Does not wait for scores. All hosts ask together, and get the groups of all."""
        groups: dict[int, list[float]] = {}
        counts: dict[int, int] = {}
        for row, (pending, index) in self._pending.items():
            if pending.done():
                score, group = pending.result()[index], row // self.n
                counts[group] = counts.get(group, 0) + 1
                groups.setdefault(group, []).extend([score.value] * (score.status == "ok"))
        complete = [scores for group, scores in groups.items() if counts[group] == self.n]
        return [scores for host_groups in hosts.gather(complete) for scores in host_groups]

    def matching(self, ids, group, finish) -> dict[int, tuple[dict, Pending, int]]:
        """Returns the rows of a batch that are equal to those submitted. The
        others are cancelled."""
        unchanged = {
            row
            for row in self._pending
            if row < len(ids)
            and (self._rows[row][0], self._rows[row][1]) == (ids[row], finish[row])
            and group[row] == row // self.n
        }
        wrong = {
            id(pending): pending
            for row, (pending, _) in self._pending.items()
            if row not in unchanged
        }
        for pending in wrong.values():
            pending.cancel()
        return {
            row: (self._rows[row][2], *self._pending[row])
            for row in unchanged
            if id(self._pending[row][0]) not in wrong
        }

    def cancel(self) -> None:
        """Cancels the rows that are not scored yet."""
        for pending in {id(pending): pending for pending, _ in self._pending.values()}.values():
            pending.cancel()


def _all_known(pending: list[Pending]) -> bool:
    """Waits for scores. False once a host was told to stop: then nobody needs them any more."""
    for call in pending:
        remaining = call.wait(0.0)
        while remaining and not hosts.asked_to_stop():
            previous, remaining = remaining, call.wait(0.5)
            if remaining < previous:
                heartbeat.beat()
        if remaining:
            for other in pending:
                other.cancel()
            return False
    return True


def of_all_hosts(own: dict[int, Score]) -> dict[int, Score]:
    """Returns the scores by row of all hosts, each of which has scored its `own`. The time at which
    another host knew a score is NaN, as its clock is another one."""
    host_scores = hosts.gather([(row, told_score(score)) for row, score in own.items()])
    return {row: score_of(score) for pairs in host_scores for row, score in pairs} | own


def told_score(score: Score) -> list:
    """Returns a score as JSON, for other hosts and for checkpoints. It leaves out when the score
    was known, which is a time of this host's clock."""
    return [*(getattr(score, name) for name in _OF_SCORE), score.over_limit]


def score_of(told: list) -> Score:
    """Returns the score that `told_score` wrote."""
    value, parts, status, seconds, message, over_limit = told
    score = Score(float(value), dict(parts), str(status), float(seconds), str(message))
    return dataclasses.replace(score, over_limit=over_limit)


def _with_cost(score: Score, cost: Score) -> Score:
    """Returns a score with the cost model's score as its part `cost`; an error if that is one."""
    if score.status != "ok" or cost.status != "ok":
        return score if score.status != "ok" else cost
    return dataclasses.replace(score, parts={**score.parts, COST: cost.value})


def with_cost_or_error(score: Score) -> Score:
    """Returns the score; an error if it lacks the part `cost`."""
    if score.status != "ok" or COST in score.parts:
        return score
    rule = f"the dataflow reads a cost, and the reward returned no part {COST!r}"
    fix = '{"score": ..., "cost": ...}, with_cost(reward=..., cost=...), or reward.cost_model'
    return Score(np.nan, {}, "error", score.seconds, f"{rule}: {fix}", score.ended_s)


def parts_of(scores: list[Score]) -> np.ndarray | None:
    """Returns the named parts of B scores, in the order of their names: [B, K] float32; None if the
    score has none. Parts with a slash in their names are only logged: they may differ from step to
    step, and another K would recompile the learning step."""
    # One that abstains has its column, too: weights go by the order of the names.
    all_names = {name.removeprefix("abstained/") for score in scores for name in score.parts}
    names = sorted({name for name in all_names if "/" not in name} - {"score"})
    if not names:
        return None
    # A part that a score lacks does not apply to it (rljax.advantages.gdpo); a failed row is
    # masked.
    missing = [0.0 if score.status != "ok" else np.nan for score in scores]
    rows = [[s.parts.get(name, x) for name in names] for s, x in zip(scores, missing, strict=True)]
    return np.array(rows, np.float32)


@jax.jit
def _with_costs(batch: Batch, values) -> Batch:
    """Returns the batch with the cost of each row at its last policy token."""
    return batch.replace(costs=last_token(batch) * values[:, None])


@jax.jit
def with_rewards(batch: Batch, values, parts, ok, group) -> Batch:
    """Returns the batch [B, S] with the scores `values` [B] at the last policy tokens, `parts`
    [B, K] or None, and groups [B]. A row that is not `ok` [B] has mask 0."""
    mask = jnp.where(ok[:, None], batch.mask, 0.0)
    batch = batch.replace(mask=mask.astype(jnp.float32), group=group.astype(jnp.int32))
    rewards = last_token(batch) * values[:, None]
    return batch.replace(rewards=rewards, scores=values, reward_parts=parts)
