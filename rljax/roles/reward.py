"""Reward: trajectories -> rewards on the host, failures masked.

What lives here: what is asked of the pool of workers and what is put on the batch. What does not:
the pool itself and the functions of text (rljax.rewards), scores of lines (rljax.roles.process).
"""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch, last_token
from rljax.mesh import shard_rows
from rljax.models.model import Model
from rljax.rewards.pool import RewardPool, Score
from rljax.rewards.rubric_buffer import RubricBuffer
from rljax.roles.judge import MeshJudge
from rljax.roles.process import ProcessScorer
from rljax.timing import timed
from rljax.update import map_microbatches


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
    and it
    leaves its group, so that neither the loss nor a baseline sees it. `rows`, `counts` and
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

    def __call__(self, batch: Batch, prompts, *, remember: bool = True) -> Batch:
        """`prompts.records[group]` holds the ground truth of a row. Fills rewards, scores and the
        reward's parts; masks failed rows. With `process` also step_ids and process_rewards."""
        with timed("reward"):
            host = jax.device_get(
                (batch.tokens, batch.mask, batch.segment_ids, batch.group, batch.finish_reason)
            )
            tokens, mask, segments, group, finish = (np.asarray(x) for x in host)
            starts = np.asarray(prompts.lengths)[group]
            samples = [
                self._sample(prompts.records[g], row[start : int(np.sum(seg > 0))], reason)
                for g, row, seg, start, reason in zip(
                    group, tokens, segments, starts, finish, strict=True
                )
            ]
            judged = isinstance(self.pool, ModelScorer)
            scores = self.pool.score(batch) if judged else self.pool.score(samples)
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
            batch = _place_rewards(batch, *shard_rows(host, self.mesh))
            if self.process is not None:
                batch, found = self.process(batch)
                self._process += [found] * remember
            return batch

    def _sample(self, record: dict, ids: Sequence[int], finish: int) -> dict:
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
        """Failures, errors also by kind; mean score and share of the samples of every source; means
        of the parts, and of what the calls said of scored lines; the state of the rubrics."""
        out = {f"reward/{k}": 0.0 for k in ("errors", "timeouts")}
        means: dict[str, list[float]] = {}
        shares: dict[str, float] = {}
        for sample, score, record in self._seen:
            source = record.get("source") or sample["data_source"]
            shares[source] = shares.get(source, 0.0) + 1 / len(self._seen)
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
        if len(shares) > 1:
            out |= {f"data/share/{name}": share for name, share in sorted(shares.items())}
        for name in self._process[0] if self._process else ():
            out[name] = float(np.mean([found[name] for found in self._process]))
        return out | (self.rubrics.metrics() if self.rubrics is not None else {})

    def close(self) -> None:
        self.pool.close()
        if self.rubrics is not None:
            self.rubrics.close()


def error_kind(message: str) -> str:
    """Of a failed score: the exception's name, of an EndpointError its kind, else "other"."""
    found = re.match(r"(?:EndpointError: )?(\w+): ", message)
    return found[1] if found else "other"


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
