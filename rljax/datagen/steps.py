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
        """Returns the tests' score of each response (ids, finish reason); NaN where they failed to
        run."""
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
    """Returns (the programs of responses with their scores, counts) as `sample_programs` does."""
    tokenizer = searcher.policy.tokenizer
    texts_of = TokenTexts(tokenizer)
    counts = dict(sampled=len(responses), dropped_truncated=0, dropped_empty=0)
    programs = []
    for response, score, passes in zip(responses, scores, searcher.passes(scores), strict=True):
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
        line_starts, line_ends = [int(s[0]) for s in spans], [int(s[-1]) + 1 for s in spans]
        lines = tuple(
            "".join(texts[0][a:b]).removesuffix("\n")
            for a, b in zip(line_starts, line_ends, strict=True)
        )
        ended = line_ends[-1] == len(ids) and ids[-1] in tokenizer.eos_ids
        head = "".join(texts[0][: line_starts[0]])
        programs.append(
            Program(
                response.prompt, ids, head, lines, tuple(line_ends), ended, float(score), passes
            )
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

    def prefixes_of(prefixes: list[Prefix]) -> list[tuple[dict, tuple[int, ...]]]:
        chosen = [(programs[i], programs[i].ends[lines_kept - 1]) for i, lines_kept in prefixes]
        return [(records[program.prompt], program.ids[:end_token]) for program, end_token in chosen]

    def sample(prefixes: list[Prefix]) -> list[Completion]:
        prompts = [continued(record, ids) for record, ids in prefixes_of(prefixes)]
        return searcher.sample(policy, prompts, jax.random.fold_in(key, next(calls)), 1)

    def passes(prefixes: list[Prefix], completions: Sequence[Completion]) -> list[bool]:
        starts = prefixes_of(prefixes)
        responses = [
            ((*ids, *completion.ids), completion.finish_reason)
            for (_, ids), completion in zip(starts, completions, strict=True)
        ]
        scores = searcher.score([record for record, _ in starts], responses)
        # The policy has as many tokens for a completed program as for one of its own.
        fits = [len(ids) <= limit and reason == "stop" for ids, reason in responses]
        return [passed and fit for passed, fit in zip(searcher.passes(scores), fits, strict=True)]

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
    """Returns rows of a `stepwise` file from one policy, and metrics of them and of their cost.

    Programs that fail are searched by at most ceil(log2(N + 1)) probes of up to `completions`
    completions; prompts share the answers. `replay` asks every probe once more, for metrics alone.
    A row: prompt, completions (its lines), labels, ended, score, first_error, index. Metrics:
    `label_metrics`, replay/..., cost/{programs, probes, prefixes, completions, unit_test_runs,
    completions_per_s}.
    """
    sample_key, completion_key, replay_key = jax.random.split(key, 3)
    programs, counts = sample_programs(searcher, records, sample_key, programs_per_prompt)
    accepts = policy_completer(searcher, records, programs, completion_key, completions)
    passed, started = [p.passed for p in programs], time.perf_counter()
    lines, problems = [p.lines for p in programs], [(p.prompt, p.head) for p in programs]
    labels, cost = label_lines(lines, accepts, passes=passed, neutral=neutral, problems=problems)
    seconds = time.perf_counter() - started
    rows = []
    for program, labelled in zip(programs, labels, strict=True):
        row = stepwise_row(records[program.prompt], program, labelled.labels)
        counts["dropped_empty"] += row is None  # nothing but comments
        rows += [] if row is None else [{**row, "first_error": labelled.first_error}]
    completion_count = accepts.counts["completions"]
    metrics = {
        **label_metrics(labels, passed),
        **{f"programs/{name}": float(value) for name, value in counts.items()},
        "programs/kept": float(len(rows)),
        "cost/rounds": float(cost["rounds"]),
        "cost/probes": float(cost["probes"]),
        "cost/prefixes": float(cost["asked"]),
        "cost/completions": float(completion_count),
        "cost/unit_test_runs": float(counts["sampled"] + completion_count),
        "cost/completions_per_s": completion_count / max(seconds, 1e-9),
    }
    if replay:
        accepts = policy_completer(searcher, records, programs, replay_key, completions)
        metrics |= replay_consistency(labels, accepts)
    return rows, metrics


def stepwise_row(
    record: PromptRecord, program: Program, labels: Sequence[float | None]
) -> dict | None:
    """Returns a row of a `stepwise` file; None if no line has a label. A line without a label
    becomes the beginning of the next line that has one; behind the last it is left out."""
    steps, step_labels, unlabelled = [], [], program.head
    for line, label in zip(program.lines, labels, strict=True):
        if label is None:
            unlabelled += line + "\n"
            continue
        steps.append(unlabelled + line)
        step_labels.append(label)
        unlabelled = ""
    if not steps:
        return None
    return {
        **record.columns,
        "completions": steps,
        "labels": step_labels,
        "ended": program.ended and labels[-1] is not None,
        "score": program.score if np.isfinite(program.score) else None,
        "index": record.index,
    }
