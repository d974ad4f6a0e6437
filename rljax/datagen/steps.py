"""Labels of lines by a policy: programs that it samples, searched for the first line from which no
completion by the same policy passes the tests (arXiv 2410.17621).

A program is the response's lines as `line_ids` cuts the policy's own tokens: a prefix is the ids
up to the end of its last line, never text encoded anew.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rljax.data.online.prompts import PromptRecord
from rljax.datagen.first_error import (
    Neutral,
    Prefix,
    best_of,
    label_lines,
    label_metrics,
    replay_consistency,
)
from rljax.datagen.trajectories import continued
from rljax.policies import Completion, Policy, sample_all
from rljax.reasoning import response_of
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout.scoring.process import TokenTexts
from rljax.shaping.steps import line_ids


@dataclasses.dataclass(frozen=True)
class Program:
    """One sampled response.

    prompt: index into the prompts. ids [n]: its tokens. head: the text before the first line.
    lines: their texts. ends: the number of tokens of each prefix of whole lines. ended: whether the
    last line ends with the end token.
    """

    prompt: int
    ids: tuple[int, ...]
    head: str
    lines: tuple[str, ...]
    ends: tuple[int, ...]
    ended: bool
    score: float
    passed: bool


@dataclasses.dataclass(frozen=True)
class PolicyWithTests:
    """A policy and its tests. The token limit of `policy.sampling` is that of a whole response. All
    tests pass if the score is at least `correct_at`. `completer`, which reads the same token ids,
    completes prefixes in place of the policy itself."""

    policy: Policy
    pool: RewardPool
    correct_at: float = 1.0
    code_only: bool = False
    rows_at_once: int = 256
    completer: Policy | None = None

    def sample(
        self, policy: Policy, records: Sequence[PromptRecord], key, n: int
    ) -> list[Completion]:
        """Samples n responses to each record. Calls share a few shapes: the prompts are filled up
        to a power of two, at most rows_at_once rows."""
        size = min(max(self.rows_at_once // n, 1), 1 << (len(records) - 1).bit_length())
        return sample_all(policy, records, n, key=key, prompts_per_call=size)

    def score(self, records: Sequence[PromptRecord], responses: Sequence[tuple]) -> list[float]:
        """The tests' score of each response (ids, finish reason); NaN where they failed to run."""
        names, samples = ("ground_truth", "data_source", "extra_info"), []
        for record, (ids, finish_reason) in zip(records, responses, strict=True):
            text, tokenizer = record.prompt_text, self.policy.tokenizer
            sample = dict(prompt=text, num_tokens=len(ids), finish_reason=finish_reason)
            sample["response"] = response_of(tokenizer, ids, text, record.messages)
            samples.append({**sample, **{name: getattr(record, name) for name in names}})
        return [x.value if x.status == "ok" else np.nan for x in self.pool.score(samples)]

    def passes(self, scores: Sequence[float]) -> list[bool]:
        """Returns, for each score, whether all tests pass. NaN does not: a test that did not end in
        time has failed."""
        return [bool(score >= self.correct_at) for score in scores]


def sample_programs(
    searcher: PolicyWithTests, records: Sequence[PromptRecord], key, n: int
) -> tuple[list[Program], dict[str, int]]:
    """Samples n programs of each prompt. Returns (those that end and have a line, each with whether
    it passes; counts of those sampled and dropped)."""
    responses = searcher.sample(searcher.policy, records, key, n)
    scores = searcher.score(
        [records[r.prompt] for r in responses], [(r.ids, r.finish_reason) for r in responses]
    )
    return whole_programs(searcher, responses, scores)


def whole_programs(
    searcher: PolicyWithTests, responses: Sequence[Completion], scores: Sequence[float]
) -> tuple[list[Program], dict[str, int]]:
    """(the programs of responses with their scores, counts) as in `sample_programs`."""
    tokenizer = searcher.policy.tokenizer
    texts_of = TokenTexts(tokenizer)
    counts = dict(sampled=len(responses), dropped_truncated=0, dropped_empty=0)
    programs = []
    for response, score, ok in zip(responses, scores, searcher.passes(scores), strict=True):
        if response.truncated:
            counts["dropped_truncated"] += 1
            continue
        ids, ones = response.ids, np.ones((1, len(response.ids)))
        texts = texts_of(np.array([ids], np.int32), ones)
        steps = line_ids(texts, ones, [False], code_only=searcher.code_only)[0]
        if not steps.any():
            counts["dropped_empty"] += 1
            continue
        spans = [np.flatnonzero(steps == line) for line in range(1, int(steps.max()) + 1)]
        starts, ends = [int(s[0]) for s in spans], [int(s[-1]) + 1 for s in spans]
        lines = tuple(
            "".join(texts[0][a:b]).removesuffix("\n") for a, b in zip(starts, ends, strict=True)
        )
        ended = ends[-1] == len(ids) and ids[-1] in tokenizer.eos_ids
        head = "".join(texts[0][: starts[0]])
        programs.append(
            Program(response.prompt, ids, head, lines, tuple(ends), ended, float(score), ok)
        )
    return programs, counts


def policy_completer(
    searcher: PolicyWithTests,
    records: Sequence[PromptRecord],
    programs: Sequence[Program],
    key,
    k: int,
) -> Callable:
    """Returns accepts(prefixes) for `label_lines`: whether any of up to k completions passes, by
    the completer or the policy itself. One batched call samples a completion of every prefix that
    is still open."""
    limit = searcher.policy.sampling.max_response_tokens
    writer = searcher.completer or searcher.policy
    policy = writer.continuing(searcher.policy.prompt_tokens + limit)
    calls = iter(range(2**31))

    def begun(prefixes: list[Prefix]) -> list[tuple[dict, tuple[int, ...]]]:
        chosen = [(programs[i], programs[i].ends[kept - 1]) for i, kept in prefixes]
        return [(records[program.prompt], program.ids[:end]) for program, end in chosen]

    def sample(prefixes: list[Prefix]) -> list[Completion]:
        prompts = [continued(record, ids) for record, ids in begun(prefixes)]
        return searcher.sample(policy, prompts, jax.random.fold_in(key, next(calls)), 1)

    def passes(prefixes: list[Prefix], completions: Sequence[Completion]) -> list[bool]:
        starts = begun(prefixes)
        whole = [
            ((*ids, *more.ids), more.finish_reason)
            for (_, ids), more in zip(starts, completions, strict=True)
        ]
        scores = searcher.score([record for record, _ in starts], whole)
        # The policy has as many tokens for a completed program as for one of its own.
        fits = [len(ids) <= limit and reason == "stop" for ids, reason in whole]
        return [ok and fit for ok, fit in zip(searcher.passes(scores), fits, strict=True)]

    return best_of(sample, passes, k)


def label_programs(
    searcher: PolicyWithTests,
    records: Sequence[PromptRecord],
    key,
    *,
    programs_per_prompt: int,
    completions: int,
    neutral: Neutral = "zero",
    replay: bool = False,
) -> tuple[list[dict], dict[str, float]]:
    """Rows of a `stepwise` file from one policy, and what they cost.

    Programs that fail are searched by at most ceil(log2(N + 1)) probes of up to `completions`
    completions; prompts share the answers. `replay` asks every probe once more, for metrics alone.
    A row: prompt, completions (its lines), labels, ended, score, first_error, index. Metrics:
    `label_metrics`, replay/..., cost/{programs, probes, prefixes, completions, unit_test_runs,
    completions_per_s}.
    """
    draw, complete, again = jax.random.split(key, 3)
    programs, counts = sample_programs(searcher, records, draw, programs_per_prompt)
    accepts = policy_completer(searcher, records, programs, complete, completions)
    passed, started = [p.passed for p in programs], time.perf_counter()
    lines, problems = [p.lines for p in programs], [(p.prompt, p.head) for p in programs]
    how = dict(passes=passed, neutral=neutral, problems=problems)
    labels, cost = label_lines(lines, accepts, **how)
    seconds = time.perf_counter() - started
    rows = []
    for program, one in zip(programs, labels, strict=True):
        row = stepwise_row(records[program.prompt], program, one.labels)
        counts["dropped_empty"] += row is None  # nothing but comments
        rows += [] if row is None else [{**row, "first_error": one.first_error}]
    made = accepts.counts["completions"]
    metrics = {
        **label_metrics(labels, passed),
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
        metrics |= replay_consistency(labels, accepts)
    return rows, metrics


def stepwise_row(
    record: PromptRecord, program: Program, labels: Sequence[float | None]
) -> dict | None:
    """A row of a `stepwise` file; None if no line has a label. A line without a label becomes the
    beginning of the next line that has one; behind the last it is left out."""
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
        **record.columns,
        "completions": steps,
        "labels": kept,
        "ended": program.ended and labels[-1] is not None,
        "score": program.score if np.isfinite(program.score) else None,
        "index": record.index,
    }
