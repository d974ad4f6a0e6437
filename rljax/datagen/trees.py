"""Labels of lines by tree search: the results of the simulations that went through the end of a
line (rljax.search.mcts; OmegaPRM, arXiv 2406.06592)."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.batch import FinishReason
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.data.online.prompts import PromptRecord
from rljax.datagen.first_error import LineLabels, Neutral, is_neutral_line, label_metrics
from rljax.datagen.steps import PolicyWithTests, Program, stepwise_row, whole_programs
from rljax.errors import InputError
from rljax.policies import Completion
from rljax.rollout import SearchActor
from rljax.search import Search

Ids = tuple[int, ...]


def label_trees(
    searcher: PolicyWithTests,
    records: Sequence[PromptRecord],
    key,
    *,
    method: str,
    programs_per_prompt: int,
    neutral: Neutral = "zero",
) -> tuple[list[dict], dict[str, float]]:
    """Returns rows of a `stepwise` file from the complete programs that a search of each prompt
    found, and metrics.

    The search is worth 1 where a response ends and passes its tests, and 0 where not. The label of
    a line is 2 W / N - 1: N of the scored responses to its prompt begin with the tokens up to its
    end, and W of them are worth 1. `neutral`: see `label_lines`. Rows are those of
    `label_programs`, with `visits`, the N of each label; of each prompt at most
    `programs_per_prompt`, half of which pass if there are enough, spread over the search. Metrics:
    `label_metrics`, labels/between, the share of the lines with a label between -1 and 1,
    labels/visits, the mean of N, and cost/{simulations, unit_test_runs}.
    """
    simulated = _search_scores(searcher, records, key, method)
    rows, results, passed, visits = [], [], [], []
    counts = collections.Counter(dropped_truncated=0, dropped_empty=0)
    for number, record in enumerate(records):
        scores_of_ends = simulated[record.index]
        samples = [Completion(number, "", ids, (), reason) for ids, reason in scores_of_ends]
        complete, dropped = whole_programs(
            searcher, samples, list(map(_score, scores_of_ends.values()))
        )
        counts.update(dropped, simulations=sum(map(len, scores_of_ends.values())))
        programs = _spread_over_search(complete, programs_per_prompt)
        through = _responses_through(searcher, scores_of_ends, programs)
        for program in programs:
            labels, count = _labels(program, through, neutral)
            row = stepwise_row(record, program, labels.labels)
            counts["dropped_empty"] += row is None
            results.append(labels)
            passed.append(program.passed)
            if row is not None:
                label_visits = [
                    n for n, label in zip(count, labels.labels, strict=True) if label is not None
                ]
                visits += label_visits
                rows.append({**row, "visits": label_visits, "first_error": labels.first_error})
    values = [x for row in rows for x in row["labels"]]
    metrics = {
        **label_metrics(results, passed),
        "labels/between": float(np.mean([-1 < x < 1 for x in values])) if values else 0.0,
        "labels/visits": float(np.mean(visits)) if visits else 0.0,
        **{f"programs/{name}": float(n) for name, n in counts.items() if name != "simulations"},
        "programs/kept": float(len(rows)),
        "cost/simulations": float(counts["simulations"]),
        "cost/unit_test_runs": float(counts["simulations"]),
    }
    return rows, metrics


def _search_scores(
    searcher: PolicyWithTests, records: Sequence[PromptRecord], key, method: str
) -> dict[int, dict[tuple[Ids, str], list[float]]]:
    """Runs the search of each prompt -> its scores by index: {(ids, finish reason): scores}."""
    scores_by_index = {record.index: {} for record in records}

    def search_of(prompts, n: int) -> Search:
        # A prompt that fills up a shape stands there again; that row is not scored.
        first_rows: dict[int, int] = {}
        for row, record in enumerate(prompts.records):
            first_rows.setdefault(record.index, row)

        def scored(rows: Sequence[int], responses) -> np.ndarray:
            worths = np.full(len(rows), np.nan)
            row_records = [prompts.records[row // n] for row in rows]
            scored_indices = [
                i for i, row in enumerate(rows) if first_rows[row_records[i].index] == row // n
            ]
            ended_responses = [
                (tuple(responses[i][0]), _reason(responses[i][1])) for i in scored_indices
            ]
            if not scored_indices:
                return worths
            scores = searcher.score([row_records[i] for i in scored_indices], ended_responses)
            for i, response, score in zip(scored_indices, ended_responses, scores, strict=True):
                scores_by_index[row_records[i].index].setdefault(response, []).append(score)
                worths[i] = np.nan if np.isnan(score) else _worth(searcher, response, score)
            return worths

        return Search(resolve(method, NAMESPACES["search"]), None, scored)

    policy = searcher.policy
    policy = dataclasses.replace(policy, actor=SearchActor(policy.actor, search_of))
    searcher.sample(policy, records, key, 1)
    if not any(scores_by_index.values()):
        rule = "it scored no complete response, and its labels are of such"
        raise InputError("--search", value=method, rule=rule, fix="mcts(simulations=32)")
    return scores_by_index


def _reason(number: int) -> str:
    return FinishReason(number).name.lower()


def _worth(searcher: PolicyWithTests, response: tuple[Ids, str], score: float) -> bool:
    """Returns whether a response passes: one cut by its limit is no program, whatever it scores."""
    return response[1] == "stop" and searcher.passes([score])[0]


def _score(scores: list[float]) -> float:
    """Returns the first known score of one program, whose tests may have failed to run at times;
    NaN if they always failed."""
    return next((score for score in scores if not np.isnan(score)), np.nan)


def _spread_over_search(programs: Sequence[Program], count: int) -> list[Program]:
    """Returns at most `count` programs that were tested, in the order in which the search met them,
    from its first to its last; as many that pass as fail, as far as there are."""
    passing = [program for program in programs if program.passed]
    failing = [program for program in programs if not (program.passed or np.isnan(program.score))]
    passing_count = min(len(passing), max(count // 2, count - len(failing)))
    parts = [(passing, passing_count), (failing, min(len(failing), count - passing_count))]
    return [
        part[position]
        for part, n in parts
        for position in np.linspace(0, len(part) - 1, n).astype(int).tolist()
    ]


def _responses_through(
    searcher: PolicyWithTests, scores_of_ends: dict, programs: Sequence[Program]
) -> dict[Ids, list[int]]:
    """Returns {beginning of a program: [scored responses that begin so, those that pass]}."""
    through = {program.ids[:end]: [0, 0] for program in programs for end in program.ends}
    lengths = sorted({len(ids) for ids in through})
    for response, scores in scores_of_ends.items():
        ids, known_scores = response[0], [score for score in scores if not np.isnan(score)]
        for length in lengths:
            if length <= len(ids) and (counts := through.get(ids[:length])) is not None:
                counts[0] += len(known_scores)
                counts[1] += sum(_worth(searcher, response, score) for score in known_scores)
    return through


def _labels(program: Program, through: dict, neutral: Neutral) -> tuple[LineLabels, list[int]]:
    """Returns the labels of the lines of a program, and the number of responses behind each."""
    labels, visits, errors, steps = [], [], [], 0
    neutral_lines = [is_neutral_line(line) for line in program.lines]
    for line, end_token in enumerate(program.ends):
        count, passed = through[program.ids[:end_token]]
        visits.append(count)
        if neutral_lines[line] and neutral != "inherit":
            labels.append(0.0 if neutral == "zero" else None)
        else:
            labels.append(2 * passed / count - 1)
        steps += not neutral_lines[line]
        if not (neutral_lines[line] or passed):
            errors.append((line + 1, steps))
    if all(neutral_lines):
        return LineLabels((None,) * len(neutral_lines), None, (), 0, None), visits
    first_error, error_step = errors[0] if errors else (None, None)
    return LineLabels(tuple(labels), first_error, (), steps, error_step), visits
