"""Binary search for the first line of a failing program that no completion can mend (process
supervision of code, arXiv 2410.17621).

The search runs over many programs at once; sampling and tests are functions of the caller. Programs
are lists of lines, a prefix is named by (program index, number of its lines kept).
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from rljax.errors import InputError

Prefix = tuple[int, int]  # program index, lines kept
Accepts = Callable[[list[Prefix]], Sequence[bool]]
Neutral = Literal["zero", "drop", "inherit"]


@dataclasses.dataclass(frozen=True)
class LineLabels:
    """The result of the search for one program.

    labels: one per line, +1 before the first error, -1 from it on, 0 neutral, None = not labelled.
    first_error: its line, counted from 1; None if there is no error. probes: (lines kept, accepted)
    in the order of the search. steps: number of lines that are not neutral. error_step: number of
    the first error among these.
    """

    labels: tuple[float | None, ...]
    first_error: int | None
    probes: tuple[tuple[int, bool], ...]
    steps: int
    error_step: int | None


@dataclasses.dataclass
class _Bisection:
    """One program: the first rejected prefix lies between low and high + 1, in steps from 1."""

    ends: list[int]  # lines kept by the prefix that ends with each step
    low: int
    high: int
    probes: list[tuple[int, bool]] = dataclasses.field(default_factory=list)

    @property
    def open(self) -> bool:
        return self.low <= self.high

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    @property
    def asks(self) -> bool:
        """Returns whether the middle needs the completer: the whole program is known to fail."""
        return self.open and self.middle < len(self.ends)

    def settle(self, accepted: bool) -> None:
        if self.asks:
            self.probes.append((self.ends[self.middle - 1], accepted))
        if accepted:
            self.low = self.middle + 1
        else:
            self.high = self.middle - 1


def is_neutral_line(line: str) -> bool:
    """Returns whether the line is blank, a comment alone (`#`, `//`), or a code fence."""
    text = line.strip()
    return not text or text.startswith(("#", "//", "```"))


def label_lines(
    programs: Sequence[Sequence[str]],
    accepts: Accepts,
    *,
    passes: Sequence[bool] | None = None,
    neutral: Neutral = "zero",
    is_neutral: Callable[[str], bool] = is_neutral_line,
    problems: Sequence[Hashable] | None = None,
    cache: dict | None = None,
) -> tuple[list[LineLabels], dict[str, int]]:
    """Labels every line of every program, by binary search for the first rejected prefix.

    accepts([(program, lines kept), ...]) returns which prefixes some completion makes pass; it is
    called once per round, for all programs still open. At most ceil(log2(N + 1)) probes of N lines
    each. `passes` marks whole programs that pass: all +1, no search; None = none does. Neutral
    lines do not move the search; they get 0 ("zero"), None ("drop"), or the label of their line
    ("inherit"). Programs of equal `problems` share the answers about a prefix that both start with;
    `cache` (a dict, filled here) keeps them for the next call.

    Returns (labels, {"rounds", "probes", "asked"}); `asked` counts the probes that the completer
    answered. Raises InputError for another `neutral`, and unless `passes` and `problems` have one
    value for each program.
    """
    if neutral not in ("zero", "drop", "inherit"):
        raise InputError("label_lines(neutral)", value=neutral, fix="write zero, drop or inherit")
    for name, values in (("passes", passes), ("problems", problems)):
        if values is not None and len(values) != len(programs):
            rule = f"one per program, of which there are {len(programs)}"
            fix = f"give {name} in the order of the programs, one each, or leave it out"
            raise InputError(f"label_lines({name})", value=len(values), rule=rule, fix=fix)
    cache = {} if cache is None else cache
    searches = []
    for index, lines in enumerate(programs):
        step_ends = [j for j, line in enumerate(lines, start=1) if not is_neutral(line)]
        passed = passes is not None and passes[index]
        searches.append(_Bisection(step_ends, 1, 0 if passed else len(step_ends)))

    def key(index: int) -> Hashable:
        lines_kept = searches[index].ends[searches[index].middle - 1]
        problem = index if problems is None else ("problem", problems[index])
        return problem, tuple(programs[index][:lines_kept])

    counts = {"rounds": 0, "probes": 0, "asked": 0}
    while any(s.open for s in searches):
        requests = {}
        for index, search in enumerate(searches):
            if search.asks and key(index) not in cache:
                requests.setdefault(key(index), (index, search.ends[search.middle - 1]))
        if requests:
            cache.update(zip(requests, _answers(accepts, list(requests.values())), strict=True))
            counts["rounds"] += 1
            counts["asked"] += len(requests)
        for index, search in enumerate(searches):
            if search.open:
                search.settle(search.asks and cache[key(index)])
    counts["probes"] = sum(len(s.probes) for s in searches)
    passed = passes or [False] * len(programs)
    results = zip(programs, searches, passed, strict=True)
    return [_labels(*program_result, neutral, is_neutral) for program_result in results], counts


def _answers(accepts: Accepts, requests: list[Prefix]) -> list[bool]:
    answers = [bool(a) for a in accepts(requests)]
    if len(answers) != len(requests):
        problem = "accepts returned the wrong number of answers"
        rule = f"one per prefix, of which there were {len(requests)}"
        fix = "return one bool for each prefix, in their order"
        raise InputError(problem, value=len(answers), rule=rule, fix=fix)
    return answers


def _labels(lines, search: _Bisection, passed: bool, neutral: Neutral, is_neutral) -> LineLabels:
    steps = len(search.ends)
    step = None if passed or not steps else search.low
    first_error = None if step is None else search.ends[step - 1]
    labels: list[float | None] = []
    for number, line in enumerate(lines, start=1):
        if not steps:
            labels.append(None)  # nothing was tried: an empty program teaches nothing
        elif is_neutral(line) and neutral != "inherit":
            labels.append(0.0 if neutral == "zero" else None)
        else:
            labels.append(1.0 if first_error is None or number < first_error else -1.0)
    return LineLabels(tuple(labels), first_error, tuple(search.probes), steps, step)


def best_of(
    sample: Callable[[list[Prefix]], Sequence[str]],
    passes: Callable[[list[Prefix], Sequence[str]], Sequence[bool]],
    k: int,
) -> Accepts:
    """Returns accepts(prefixes) for `label_lines`: whether any of up to k completions of each
    prefix passes, asked in rounds.

    A round samples one completion of every prefix that has not succeeded yet, and tests them
    together. The function's `counts` adds up "prefixes", "completions" and "accepted". Raises
    InputError for k below 1.
    """
    if k < 1:
        raise InputError("best_of(k)", value=k, fix="set k to at least 1")
    counts = {"prefixes": 0, "completions": 0, "accepted": 0}

    def accepts(prefixes: list[Prefix]) -> list[bool]:
        passed = [False] * len(prefixes)
        for _ in range(k):
            pending = [i for i, accepted in enumerate(passed) if not accepted]
            if not pending:
                break
            batch = [prefixes[i] for i in pending]
            for i, accepted in zip(pending, passes(batch, sample(batch)), strict=True):
                passed[i] = bool(accepted)
            counts["completions"] += len(pending)
        counts["prefixes"] += len(prefixes)
        counts["accepted"] += sum(passed)
        return passed

    accepts.counts = counts
    return accepts


def label_metrics(results: Sequence[LineLabels], passes: Sequence[bool] | None = None) -> dict:
    """Returns means over the programs searched: first error / number of lines, probes, shares
    rejected at the first line and never; and the shares of all programs that passed, and that had
    no line to label."""
    passed = passes or [False] * len(results)
    labels_and_passed = zip(results, passed, strict=True)
    searched = [
        result for result, ok in labels_and_passed if result.error_step is not None and not ok
    ]

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values) if values else 0.0

    return {
        "labels/first_error_position": mean(
            result.error_step / result.steps for result in searched
        ),
        "labels/probes_per_program": mean(len(result.probes) for result in searched),
        "labels/rejected_at_first_line": mean(result.error_step == 1 for result in searched),
        "labels/never_rejected": mean(result.error_step == result.steps for result in searched),
        "labels/passed": mean(passed),
        "labels/without_lines": mean(result.steps == 0 for result in results),
    }


def replay_consistency(results: Sequence[LineLabels], accepts: Accepts) -> dict[str, float]:
    """Asks every probe once more, and returns metrics of how far the answers of a random completer
    can be trusted.

    replay/flips: share of probes answered otherwise. replay/contradictions: share of the programs
    with probes of which a prefix is accepted now that is longer than one rejected before, though
    no added line mends a prefix. Nothing is cached: the completer answers anew.
    """
    probes = [
        (program, lines_kept, before)
        for program, result in enumerate(results)
        for lines_kept, before in result.probes
    ]
    if not probes:
        return {"replay/flips": 0.0, "replay/contradictions": 0.0}
    answers = _answers(accepts, [(program, lines_kept) for program, lines_kept, _ in probes])
    rejected: dict[int, int] = {}  # program -> shortest prefix that was rejected
    for program, lines_kept, before in probes:
        if not before:
            rejected[program] = min(lines_kept, rejected.get(program, lines_kept))
    contrary = {
        program
        for (program, lines_kept, _), again in zip(probes, answers, strict=True)
        if again and program in rejected and lines_kept > rejected[program]
    }
    flips = sum(again != before for (_, _, before), again in zip(probes, answers, strict=True))
    return {
        "replay/flips": flips / len(probes),
        "replay/contradictions": len(contrary) / len({program for program, _, _ in probes}),
    }
