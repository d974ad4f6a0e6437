"""Labels of lines by tree search: what the simulations that went through the end of a line came to
(rljax.search.mcts; OmegaPRM, arXiv 2406.06592)."""

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
    """Rows of a `stepwise` file from the complete programs that a search of each prompt found.

    The search is worth 1 where a response ends and passes its tests, and 0 where not. The label of
    a line is 2 W / N - 1: N of the scored responses to its prompt begin with the tokens up to its
    end, and W of them are worth 1. `neutral`: see `label_lines`. Rows are those of
    `label_programs`, with `visits`, the N of each label; of each prompt at most
    `programs_per_prompt`, half of which pass if there are enough, spread over the search. Metrics:
    `label_metrics`, labels/between, the share of the lines with a label between -1 and 1,
    labels/visits, the mean of N, and cost/{simulations, unit_test_runs}.
    """
    simulated = _simulated(searcher, records, key, method)
    rows, results, passed, visits = [], [], [], []
    counts = collections.Counter(dropped_truncated=0, dropped_empty=0)
    for number, record in enumerate(records):
        ends = simulated[record.index]
        samples = [Completion(number, "", ids, (), reason) for ids, reason in ends]
        found, dropped = whole_programs(searcher, samples, list(map(_score, ends.values())))
        counts.update(dropped, simulations=sum(map(len, ends.values())))
        programs = _spread(found, programs_per_prompt)
        through = _through(searcher, ends, programs)
        for program in programs:
            labels, count = _labels(program, through, neutral)
            row = stepwise_row(record, program, labels.labels)
            counts["dropped_empty"] += row is None
            results.append(labels)
            passed.append(program.passed)
            if row is not None:
                kept = [n for n, one in zip(count, labels.labels, strict=True) if one is not None]
                visits += kept
                rows.append({**row, "visits": kept, "first_error": labels.first_error})
    given = [x for row in rows for x in row["labels"]]
    metrics = {
        **label_metrics(results, passed),
        "labels/between": float(np.mean([-1 < x < 1 for x in given])) if given else 0.0,
        "labels/visits": float(np.mean(visits)) if visits else 0.0,
        **{f"programs/{name}": float(n) for name, n in counts.items() if name != "simulations"},
        "programs/kept": float(len(rows)),
        "cost/simulations": float(counts["simulations"]),
        "cost/unit_test_runs": float(counts["simulations"]),
    }
    return rows, metrics


def _simulated(
    searcher: PolicyWithTests, records: Sequence[PromptRecord], key, method: str
) -> dict[int, dict[tuple[Ids, str], list[float]]]:
    """Runs the search of each prompt -> its scores by index: {(ids, finish reason): scores}."""
    found = {record.index: {} for record in records}

    def search_of(prompts, n: int) -> Search:
        own: dict[int, int] = {}  # a prompt that fills up a shape stands there again: not scored
        for row, record in enumerate(prompts.records):
            own.setdefault(record.index, row)

        def scored(rows: Sequence[int], responses) -> np.ndarray:
            told = np.full(len(rows), np.nan)
            asked = [prompts.records[row // n] for row in rows]
            live = [i for i, row in enumerate(rows) if own[asked[i].index] == row // n]
            ended = [(tuple(responses[i][0]), _reason(responses[i][1])) for i in live]
            if not live:
                return told
            scores = searcher.score([asked[i] for i in live], ended)
            for i, end, score in zip(live, ended, scores, strict=True):
                found[asked[i].index].setdefault(end, []).append(score)
                told[i] = np.nan if np.isnan(score) else _worth(searcher, end, score)
            return told

        return Search(resolve(method, NAMESPACES["search"]), None, scored)

    policy = searcher.policy
    policy = dataclasses.replace(policy, actor=SearchActor(policy.actor, search_of))
    searcher.sample(policy, records, key, 1)
    if not any(found.values()):
        rule = "it scored no complete response, and its labels are of such"
        raise InputError("--search", value=method, rule=rule, fix="mcts(simulations=32)")
    return found


def _reason(why: int) -> str:
    return FinishReason(why).name.lower()


def _worth(searcher: PolicyWithTests, end: tuple[Ids, str], score: float) -> bool:
    """A response that its limit cut is no program, whatever it scores."""
    return end[1] == "stop" and searcher.passes([score])[0]


def _score(scores: list[float]) -> float:
    """Averages the scores of one program, whose tests may have failed to run at times."""
    return next((score for score in scores if not np.isnan(score)), np.nan)


def _spread(programs: Sequence[Program], count: int) -> list[Program]:
    """At most `count` programs that were tested, in the order in which the search met them, from
    its first to its last; as many that pass as fail, as far as there are."""
    right = [one for one in programs if one.passed]
    wrong = [one for one in programs if not (one.passed or np.isnan(one.score))]
    of_right = min(len(right), max(count // 2, count - len(wrong)))
    parts = [(right, of_right), (wrong, min(len(wrong), count - of_right))]
    return [
        part[at]
        for part, n in parts
        for at in np.linspace(0, len(part) - 1, n).astype(int).tolist()
    ]


def _through(
    searcher: PolicyWithTests, ends: dict, programs: Sequence[Program]
) -> dict[Ids, list[int]]:
    """{beginning of a program: [scored responses that begin so, those of them that pass]}."""
    through = {program.ids[:end]: [0, 0] for program in programs for end in program.ends}
    lengths = sorted({len(ids) for ids in through})
    for end, scores in ends.items():
        ids, known = end[0], [score for score in scores if not np.isnan(score)]
        for length in lengths:
            if length <= len(ids) and (counts := through.get(ids[:length])) is not None:
                counts[0] += len(known)
                counts[1] += sum(_worth(searcher, end, score) for score in known)
    return through


def _labels(program: Program, through: dict, neutral: Neutral) -> tuple[LineLabels, list[int]]:
    """Labels of the lines of a program, and the number of responses behind each."""
    labels, visits, errors, steps = [], [], [], 0
    blank = [is_neutral_line(line) for line in program.lines]
    for line, end in enumerate(program.ends):
        count, passed = through[program.ids[:end]]
        visits.append(count)
        if blank[line] and neutral != "inherit":
            labels.append(0.0 if neutral == "zero" else None)
        else:
            labels.append(2 * passed / count - 1)
        steps += not blank[line]
        if not (blank[line] or passed):
            errors.append((line + 1, steps))
    if all(blank):
        return LineLabels((None,) * len(blank), None, (), 0, None), visits
    first, step = errors[0] if errors else (None, None)
    return LineLabels(tuple(labels), first, (), steps, step), visits
