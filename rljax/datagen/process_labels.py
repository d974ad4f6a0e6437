"""Labelled lines from policies: programs of several checkpoints, searched for their first error.

What lives here: sampling programs, the best-of-N completer that is the policy itself, the rows and
the metrics of a `steps` file. What does not: the search (rljax.datagen.search), loading policies
(rljax.evaluation.saved), training on the rows (dataflow="process_reward_model").

A program is the response's lines as `line_ids` cuts the policy's own tokens: a prefix is the ids
up to the end of its last line, never text encoded anew. ALGORITHMS A5, arXiv 2410.17621.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import FinishReason
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.datagen.search import (
    Neutral,
    Prefix,
    best_of,
    label_metrics,
    replay_consistency,
    search_labels,
)
from rljax.rewards.pool.pool import RewardPool
from rljax.roles import Actor
from rljax.rollout.process import TokenTexts
from rljax.sampler import Sampling
from rljax.shaping.steps import line_ids


@dataclasses.dataclass(frozen=True)
class Program:
    """One sampled response: `ids` [n] its tokens, `lines` their texts, `ends` how many tokens each
    prefix of whole lines has, `head` the text before the first line, `ended` whether the last line
    ends with the end token; `prompt` an index into the prompts."""

    prompt: int
    ids: tuple[int, ...]
    head: str
    lines: tuple[str, ...]
    ends: tuple[int, ...]
    ended: bool
    score: float
    passed: bool


@dataclasses.dataclass(frozen=True)
class Searcher:
    """What sampling and labelling need: a policy and its tests.

    `sampling` is that of programs and of completions, whose limit is the whole response's;
    `correct_at`: the score from which on all tests pass.
    """

    actor: Actor
    tokenizer: object
    pool: RewardPool
    sampling: Sampling
    prompt_tokens: int
    correct_at: float = 1.0
    code_only: bool = False
    rows_at_once: int = 256

    def generate(self, records: Sequence[PromptRecord], key, n: int, length: int) -> list[tuple]:
        """n responses to each record's token_ids, padded to `length`: (ids, finish reason), a
        record's together. Calls share a few shapes: rows are filled up to a power of two, at most
        rows_at_once."""
        found, most = [], max(self.rows_at_once // n, 1)
        for start in range(0, len(records), most):
            part = list(records[start : start + most])
            size = min(most, 1 << (len(part) - 1).bit_length())
            filled = part + [part[0]] * (size - len(part))
            prompts = Prompts.from_records(filled, length=length)
            batch = self.actor.generate(prompts, jax.random.fold_in(key, start), self.sampling, n=n)
            tokens, mask, finish = (
                np.asarray(x) for x in fetch((batch.tokens, batch.mask, batch.finish_reason))
            )
            for row in range(len(part) * n):
                found.append((tuple(tokens[row][mask[row] > 0].tolist()), int(finish[row])))
        return found

    def score(self, records: Sequence[PromptRecord], responses: Sequence[tuple]) -> list[float]:
        """The tests' score of each response (ids, finish reason); NaN where they failed to run."""
        samples = [
            {
                "prompt": record.prompt_text,
                "response": self.tokenizer.decode(list(ids)),
                "ground_truth": record.ground_truth,
                "data_source": record.data_source,
                "extra_info": record.extra_info,
                "num_tokens": len(ids),
                "finish_reason": FinishReason(finish).name.lower(),
            }
            for record, (ids, finish) in zip(records, responses, strict=True)
        ]
        return [x.value if x.status == "ok" else np.nan for x in self.pool.score(samples)]

    def passes(self, scores: Sequence[float]) -> list[bool]:
        """A test that did not end in time is a test that failed: NaN passes nothing."""
        return [bool(score >= self.correct_at) for score in scores]


def sample_programs(
    searcher: Searcher, records: Sequence[PromptRecord], key, n: int
) -> tuple[list[Program], dict[str, int]]:
    """n programs of each prompt that came to their end and have a line, each told whether it
    passes; and counts of what was sampled and dropped."""
    responses = searcher.generate(records, key, n, searcher.prompt_tokens)
    of = [i for i in range(len(records)) for _ in range(n)]
    scores = searcher.score([records[i] for i in of], responses)
    passed = searcher.passes(scores)
    texts_of = TokenTexts(searcher.tokenizer)
    counts = dict(sampled=len(responses), dropped_truncated=0, dropped_empty=0)
    programs = []
    for i, (ids, finish), score, ok in zip(of, responses, scores, passed, strict=True):
        if finish != FinishReason.STOP:
            counts["dropped_truncated"] += 1
            continue
        ones = np.ones((1, len(ids)))
        texts = texts_of(np.array([ids], np.int32), ones)
        steps = line_ids(texts, ones, [False], code_only=searcher.code_only)[0]
        if not steps.any():
            counts["dropped_empty"] += 1
            continue
        lines = range(1, int(steps.max()) + 1)
        ends = [int(np.flatnonzero(steps == line)[-1]) + 1 for line in lines]
        starts = [int(np.flatnonzero(steps == line)[0]) for line in lines]
        spans = zip(starts, ends, strict=True)
        written = tuple("".join(texts[0][a:b]).removesuffix("\n") for a, b in spans)
        ended = ends[-1] == len(ids) and ids[-1] in searcher.tokenizer.eos_ids
        head = "".join(texts[0][: starts[0]])
        programs.append(Program(i, ids, head, written, tuple(ends), ended, float(score), ok))
    return programs, counts


def policy_completer(
    searcher: Searcher, records: Sequence[PromptRecord], programs: Sequence[Program], key, k: int
) -> Callable:
    """accepts(prefixes) of `search_labels`: whether any of up to k completions by the policy itself
    passes. One batched call samples a completion of every prefix that is still open."""
    limit = searcher.sampling.max_response_tokens
    length = searcher.prompt_tokens + limit
    calls = iter(range(2**31))

    def starts(prefixes: list[Prefix]) -> list[tuple[PromptRecord, tuple[int, ...]]]:
        of = [(programs[i], programs[i].ends[kept - 1]) for i, kept in prefixes]
        return [(records[program.prompt], program.ids[:stop]) for program, stop in of]

    def sample(prefixes: list[Prefix]) -> list:
        asked = [
            dataclasses.replace(record, token_ids=np.array([*record.token_ids, *ids], np.int32))
            for record, ids in starts(prefixes)
        ]
        return searcher.generate(asked, jax.random.fold_in(key, next(calls)), 1, length)

    def passes(prefixes: list[Prefix], completions: Sequence) -> list[bool]:
        begun = starts(prefixes)
        whole = [
            ((*ids, *more), finish)
            for (_, ids), (more, finish) in zip(begun, completions, strict=True)
        ]
        scores = searcher.score([record for record, _ in begun], whole)
        # The policy has as many tokens for a completed program as for one of its own.
        fits = [len(ids) <= limit and finish == FinishReason.STOP for ids, finish in whole]
        return [ok and fit for ok, fit in zip(searcher.passes(scores), fits, strict=True)]

    return best_of(sample, passes, k)


def label_programs(
    searcher: Searcher,
    records: Sequence[PromptRecord],
    key,
    *,
    programs_per_prompt: int,
    completions: int,
    neutral: Neutral = "zero",
    replay: bool = False,
) -> tuple[list[dict], dict[str, float]]:
    """Rows of a `steps` file from one policy, and what they cost.

    Programs that fail are searched by at most ceil(log2(N + 1)) probes of up to `completions`
    completions; prompts share the answers. `replay` asks every probe once more, for metrics alone.
    A row: prompt, completions (its lines), labels, ended, score, first_error, index. Metrics:
    `label_metrics`, replay/..., cost/{programs, probes, prefixes, completions, unit_test_runs,
    completions_per_s}.
    """
    draw, complete, again = jax.random.split(key, 3)
    programs, counts = sample_programs(searcher, records, draw, programs_per_prompt)
    accepts = policy_completer(searcher, records, programs, complete, completions)
    passed, begun = [p.passed for p in programs], time.perf_counter()
    found, cost = search_labels(
        [p.lines for p in programs], accepts, passes=passed, neutral=neutral,
        tasks=[(p.prompt, p.head) for p in programs],
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    rows = []
    for program, one in zip(programs, found, strict=True):
        row = _row(records[program.prompt], program, one.labels)
        counts["dropped_empty"] += row is None  # nothing but comments
        rows += [] if row is None else [{**row, "first_error": one.first_error}]
    made = accepts.counts["completions"]
    metrics = {
        **label_metrics(found, passed),
        **{f"programs/{name}": float(value) for name, value in counts.items()},
        "programs/kept": float(len(rows)),
        "cost/rounds": float(cost["rounds"]),
        "cost/probes": float(cost["probes"]),
        "cost/prefixes": float(cost["asked"]),
        "cost/completions": float(made),
        "cost/unit_test_runs": float(counts["sampled"] + made),
        "cost/completions_per_s": made / max(seconds, 1e-9),
    }
    if replay:
        accepts = policy_completer(searcher, records, programs, again, completions)
        metrics |= replay_consistency(found, accepts)
    return rows, metrics


def _row(record: PromptRecord, program: Program, labels: Sequence[float | None]) -> dict | None:
    """A row of a `steps` file: a line without a label is the beginning of the next one that has
    one, or is left out behind the last."""
    steps, kept, before = [], [], program.head
    for line, label in zip(program.lines, labels, strict=True):
        if label is None:
            before += line + "\n"
            continue
        steps.append(before + line)
        kept.append(label)
        before = ""
    if not steps:
        return None
    return {
        "prompt": record.prompt,
        "completions": steps,
        "labels": kept,
        "ended": program.ended and labels[-1] is not None,
        "score": program.score if np.isfinite(program.score) else None,
        "index": record.index,
    }
