"""Reward: trajectories -> rewards on the host, failures masked.

What lives here: what is asked of the pool of workers and what is put on the batch. What does not:
the pool itself and the functions of text (rljax.rewards), scores of lines (rljax.rollout.process).
"""

import collections
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, last_token
from rljax.learn import map_microbatches
from rljax.models.model import Model
from rljax.rewards.judges.rubric_buffer import RubricBuffer
from rljax.rewards.pool.pool import Pending, RewardPool, Score
from rljax.rollout.judge import MeshJudge
from rljax.rollout.process import ProcessScorer
from rljax.tracking import timing
from rljax.tracking.timing import timed


class ModelScorer:
    """A frozen reward model: the score after the last token of each row, which it reads as the
    policy wrote it (one vocabulary)."""

    def __init__(self, model: Model, params, rows: int):
        self.model, self.params, self.rows = model, params, rows
        self._scores = jax.jit(self._read)

    def _read(self, params, batch: Batch) -> jax.Array:
        plain = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)
        one = lambda part: self.model.scores(params, part)[:, 0]  # noqa: E731
        rows = self.rows if batch.rows % self.rows == 0 else batch.rows
        return map_microbatches(one, plain, rows)

    def score(self, batch: Batch) -> list[Score]:
        """One per row; a score that is not finite is an error, never a number."""
        found = np.asarray(self._scores(self.params, batch), np.float64)
        return [
            Score(float(x), {}, "ok", 0.0) if np.isfinite(x)
            else Score(np.nan, {}, "error", 0.0, f"the reward model says {x}")
            for x in found
        ]  # fmt: skip

    def close(self) -> None:
        """Nothing runs."""


class Reward:
    """Trajectories -> rewards, by a function of text in a pool of killable processes, or by a
    reward model (host verb).

    A sample whose reward failed (raised, hung, not finite) is never scored 0: its mask becomes 0
    and it leaves its group, so that neither the loss nor a baseline sees it. `rows`, `counts` and
    `outcomes` describe all calls since `forget`, but for those made with remember=False.
    `process` adds the scores of lines to the outcome; `scores` stay the outcome's alone. `rubrics`
    says which rubrics a prompt has now, and learns from what is remembered.
    """

    def __init__(
        self,
        pool: "RewardPool | ModelScorer | MeshJudge",
        tokenizer,
        mesh,
        process: ProcessScorer | None = None,
        rubrics: RubricBuffer | None = None,
    ):
        self.pool, self.tokenizer, self.mesh, self.process = pool, tokenizer, mesh, process
        self._ahead: _Ahead | None = None
        self.rubrics = rubrics
        self.forget()

    def outcome_alone(self) -> "Reward":
        """The same pool without scores of lines, and without rubrics that evolve: what evaluation
        asks for."""
        plain = self.process is None and self.rubrics is None
        return self if plain else Reward(self.pool, self.tokenizer, self.mesh)

    def forget(self) -> None:
        """Start anew: a step may call the reward several times."""
        self._seen: list[tuple[dict, Score, dict]] = []  # sample, score, prompt record
        self._process: list[dict] = []  # metrics of each call
        if self.rubrics is not None:
            self.rubrics.forget()

    def ahead(self, prompts, n: int) -> Callable[[int, list[int], int], None] | None:
        """What `generate(prompts, ..., n=n, finished=)` may call: the pool begins with rows that
        have ended, and the next call on these prompts only collects what is not known yet. None
        for a reward model, which scores whole batches on the mesh."""
        self.drop_ahead()
        if isinstance(self.pool, RewardPool):
            self._ahead = _Ahead(self, prompts, n)
        return self._ahead

    def drop_ahead(self) -> None:
        """Nobody will ask for what was begun."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._ahead = None

    def __call__(self, batch: Batch, prompts, *, remember: bool = True) -> Batch:
        """`prompts.records[group]` holds the ground truth of a row. Fills rewards, scores and the
        reward's parts; masks failed rows. With `process` also step_ids and process_rewards."""
        with timed("reward"):
            host = fetch(
                (batch.tokens, batch.mask, batch.segment_ids, batch.group, batch.finish_reason)
            )
            tokens, mask, segments, group, finish = (np.asarray(x) for x in host)
            starts, ends = np.asarray(prompts.lengths)[group], np.sum(segments > 0, axis=1)
            ids = [row[a:b].tolist() for row, a, b in zip(tokens, starts, ends, strict=True)]
            samples, scores = self._scores(batch, prompts, ids, group.tolist(), finish.tolist())
            for score in scores:
                if np.isfinite(score.ended_s):
                    timing.scored(score.ended_s - score.seconds, score.ended_s)
            if remember:
                records = [prompts.records[g] for g in group]
                self._seen += zip(samples, scores, records, strict=True)
                if self.rubrics is not None:
                    self.rubrics.learn(samples, records, scores)
            ok = np.array([s.status == "ok" for s in scores])
            values = np.array([s.value if s.status == "ok" else 0.0 for s in scores], np.float32)
            # A failed row gets a group of its own: its siblings' baseline is taken without it.
            alone = len(prompts.records) + np.arange(len(samples), dtype=np.int32)
            host = (values, _parts(scores), mask * ok[:, None], np.where(ok, group, alone))
            batch = _place_rewards(batch, *place(host, self.mesh))
            if self.process is not None:
                batch, found = self.process(batch)
                self._process += [found] * remember
            return batch

    def _scores(self, batch: Batch, prompts, ids, group, finish) -> tuple[list[dict], list[Score]]:
        """Of every row: its sample and its score. Rows whose scoring began ahead, and that are what
        they were then, are not asked for again."""
        ahead, self._ahead = self._ahead, None
        rows = range(len(ids))
        known: dict[int, tuple[dict, Pending, int]] = {}
        if ahead is not None and ahead.prompts is prompts:
            known = ahead.matching(ids, group, finish)
        elif ahead is not None:
            ahead.cancel()
        asked = {
            row: known[row][0]
            if row in known
            else self.sample(prompts.records[group[row]], ids[row], finish[row], group[row])
            for row in rows
        }
        if isinstance(self.pool, ModelScorer):
            return list(asked.values()), self.pool.score(batch)
        rest = [row for row in rows if row not in known]
        try:
            scores = dict(zip(rest, self.pool.score([asked[row] for row in rest]), strict=True))
            scores |= {row: pending.result()[place] for row, (_, pending, place) in known.items()}
        except BaseException:  # a Ctrl-C, say
            if ahead is not None:
                ahead.cancel()
            raise
        return list(asked.values()), [scores[row] for row in rows]

    def sample(self, record: dict, ids: Sequence[int], finish: int, group: int) -> dict:
        """What the pool is asked about: the fields that a reward may declare, and which samples are
        of one prompt."""
        return {
            "prompt": record["prompt_text"],
            "response": self.tokenizer.decode([int(i) for i in ids]),
            "ground_truth": record["ground_truth"],
            "data_source": record["data_source"],
            "extra_info": (
                record["extra_info"] if self.rubrics is None else self.rubrics.extra_info(record)
            ),
            "num_tokens": len(ids),
            "finish_reason": ("stop", "length", "interrupt", "abort")[int(finish)],
            "group": group,
        }

    @property
    def rows(self) -> list[dict]:
        """Text, reward and status of every sample."""
        keep = ("prompt", "response", "ground_truth", "finish_reason")
        return [
            {**{k: s[k] for k in keep}, "reward": x.value, "status": x.status, "message": x.message}
            for s, x, _ in self._seen
        ]

    @property
    def outcomes(self) -> list[tuple[int, float]]:
        """(prompt_id, score) of every scored sample of a training prompt."""
        return [
            (record["prompt_id"], score.value)
            for _, score, record in self._seen
            if score.status == "ok" and record.get("prompt_id") is not None
        ]

    @property
    def counts(self) -> dict[str, float]:
        """Failures, errors also by kind; of every source their share, the mean score and the share
        of the samples; means of the parts; how many scores are equal; what the calls said of scored
        lines; the state of the rubrics."""
        out = {f"reward/{k}": 0.0 for k in ("errors", "timeouts")}
        means: dict[str, list[float]] = {}
        shares: dict[str, float] = {}
        for sample, score, record in self._seen:
            source = record.get("source") or sample["data_source"]
            shares[source] = shares.get(source, 0.0) + 1 / len(self._seen)
            failed = means.setdefault(f"reward/failed_fraction/{source}", [])
            failed.append(float(score.status != "ok"))
            if score.status != "ok":
                out[f"reward/{score.status}s"] += 1.0
                if score.status == "error":
                    name = f"reward/errors/{error_kind(score.message)}"
                    out[name] = out.get(name, 0.0) + 1.0
                continue
            means.setdefault(f"reward/source/{source}", []).append(score.value)
            for name, value in score.parts.items():
                means.setdefault(f"reward/part/{name}", []).append(value)
        out |= {name: float(np.mean(values)) for name, values in sorted(means.items())}
        if "reward/part/extracted" in out:
            out["reward/extraction_failed_fraction"] = 1.0 - out["reward/part/extracted"]
        out |= self._equal_scores()
        if len(shares) > 1:
            out |= {f"data/share/{name}": share for name, share in sorted(shares.items())}
        for name in self._process[0] if self._process else ():
            out[name] = float(np.mean([found[name] for found in self._process]))
        return out | (self.rubrics.metrics() if self.rubrics is not None else {})

    def _equal_scores(self) -> dict[str, float]:
        """reward/all_equal: 1 where all known scores are one number, else 0; reward/equal_groups:
        the share of the prompts with two known scores or more whose scores are one number."""
        groups: dict[int, set[float]] = {}
        known = collections.Counter()
        for _, score, record in self._seen:
            if score.status == "ok":
                groups.setdefault(id(record), set()).add(score.value)
                known[id(record)] += 1
        if sum(known.values()) < 2:
            return {}
        out = {"reward/all_equal": float(len(set().union(*groups.values())) == 1)}
        several = [len(groups[record]) == 1 for record, count in known.items() if count > 1]
        return out | ({"reward/equal_groups": float(np.mean(several))} if several else {})

    def close(self) -> None:
        self.pool.close()
        if self.rubrics is not None:
            self.rubrics.close()


def error_kind(message: str) -> str:
    """Of a failed score: the exception's name, of an EndpointError its kind, else "other"."""
    found = re.match(r"(?:EndpointError: )?(\w+): ", message)
    return found[1] if found else "other"


class _Ahead:
    """Rows that a pool was handed before their batch was whole: of a reward of groups, groups of
    which every row had ended."""

    def __init__(self, reward: Reward, prompts, n: int):
        self.reward, self.prompts, self.n = reward, prompts, n
        self.rows: dict[int, tuple[list[int], int, dict]] = {}  # ids, finish reason, sample
        self.pending: dict[int, tuple[Pending, int]] = {}  # and the place of the row in it

    def __call__(self, row: int, ids: list[int], finish: int) -> None:
        """Row p n + s, sample s of prompt p, has ended."""
        group, pool = row // self.n, self.reward.pool
        sample = self.reward.sample(self.prompts.records[group], ids, finish, group)
        self.rows[row] = (ids, finish, sample)
        together = range(group * self.n, (group + 1) * self.n) if pool.grouped else (row,)
        if all(other in self.rows for other in together):
            pending = pool.submit([self.rows[other][2] for other in together])
            self.pending |= {other: (pending, i) for i, other in enumerate(together)}

    def matching(self, ids, group, finish) -> dict[int, tuple[dict, Pending, int]]:
        """The rows of a batch that are what was handed over; what else was is cancelled."""
        same = {
            row
            for row in self.pending
            if row < len(ids)
            and (self.rows[row][0], self.rows[row][1]) == (ids[row], finish[row])
            and group[row] == row // self.n
        }
        wrong = {id(of): of for row, (of, _) in self.pending.items() if row not in same}
        for pending in wrong.values():
            pending.cancel()
        return {
            row: (self.rows[row][2], *self.pending[row])
            for row in same
            if id(self.pending[row][0]) not in wrong
        }

    def cancel(self) -> None:
        for pending in {id(of): of for of, _ in self.pending.values()}.values():
            pending.cancel()


def generate_scored(
    actor, reward, prompts, key, sampling, *, n: int = 1, remember: bool = True
) -> Batch:
    """reward(actor.generate(prompts, key, sampling, n=n), prompts), where rows that have ended are
    scored while others still decode. `reward` may be any function of (batch, prompts); only a
    `Reward` can begin early."""
    kept = {} if remember else {"remember": False}
    if not isinstance(reward, Reward):
        return reward(actor.generate(prompts, key, sampling, n=n), prompts, **kept)
    finished = reward.ahead(prompts, n)
    try:
        early = {} if finished is None else {"finished": finished}
        batch = actor.generate(prompts, key, sampling, n=n, **early)
        return reward(batch, prompts, **kept)
    finally:
        reward.drop_ahead()  # nothing, unless something was raised


def _parts(scores: list[Score]) -> np.ndarray | None:
    """The named parts of every score, in the order of their names: [B, K]; None if there are none
    but the score itself. A part with a slash in its name is for the metrics alone: there may be
    other ones at each step, and another K would be another program."""
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
