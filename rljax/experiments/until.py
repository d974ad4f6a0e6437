"""Answers a question about two settings of a sweep by as many seeds as it takes.

"A better than B by 0.02" asks whether the accuracy of A behind training is above that of B by more
than 0.02. After each seed the differences on the same seeds have an interval that stays valid
however often one looks (rljax.report.arms.always_valid). The sweep ends once it lies above or below
that bound.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from rljax.errors import InputError
from rljax.experiments.sweep import Member
from rljax.report.arms import always_valid, always_valid_half
from rljax.runs.units import interval_text

FORM = r"(.+?) better than (.+?)(?: by (-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)))?"
MOST_SEEDS = 10_000  # that an answer says are needed


@dataclasses.dataclass(frozen=True)
class Answer:
    """Verdict so far in words, and whether it settles the question."""

    text: str
    known: bool


@dataclasses.dataclass(frozen=True)
class Question:
    """Question of --until: is the accuracy of `better` above that of `worse` by more than `by`?"""

    better: str
    worse: str
    by: float

    def __str__(self) -> str:
        return f"{self.better} better than {self.worse} by {self.by:g}"

    def answer(self, members: Iterable[Member]) -> Answer:
        """Returns what the members that have finished say."""
        accuracies: dict[str, dict[int, float]] = {self.better: {}, self.worse: {}}
        for member in members:
            accuracy = member.summary().get("accuracy_after") if member.finished() else None
            if accuracy and member.setting in accuracies:
                accuracies[member.setting][member.config.seed] = accuracy["value"]
        better, worse = accuracies[self.better], accuracies[self.worse]
        gains = [better[seed] - worse[seed] for seed in better if seed in worse]
        if not gains:
            return Answer(f"{self}: no seed has finished with both, and an accuracy", False)
        mean = always_valid(gains)
        mean_text = interval_text(mean) if math.isfinite(mean["low"]) else f"{mean['value']:.3f}"
        result = f"{mean_text} over {len(gains)} seeds"
        if mean["low"] > self.by:
            return Answer(f"{self}: holds, {result}", True)
        if mean["high"] < self.by:
            return Answer(f"{self}: does not hold, {result}", True)
        note = "" if math.isfinite(mean["low"]) else ", too few for an interval"
        seeds_text = self._needed(gains, mean["value"])
        return Answer(f"{self}: not known, {result}{note}{seeds_text}", False)

    def _needed(self, gains: Sequence[float], mean: float) -> str:
        """Describes how many more seeds would settle the question, if they are like these."""
        deviation = (sum((gain - mean) ** 2 for gain in gains) / len(gains)) ** 0.5
        for n in range(len(gains) + 1, MOST_SEEDS):
            if len(gains) > 1 and always_valid_half(n, deviation) < abs(mean - self.by):
                return f"; about {n - len(gains)} more would settle it if they are as these"
        return ""


def question_of(text: str, members: Sequence[Member]) -> Question:
    """Returns the question of --until. Raises InputError for another form, a setting that the sweep
    does not have, and members of a single seed."""
    settings = sorted({member.setting for member in members})
    if len(settings) < 2:
        rule = f"this sweep has one, {settings[0]}, whatever its seeds"
        fix = "a sweep() that yields two settings"
        raise InputError("--until compares two settings", value=text, rule=rule, fix=fix)
    match = re.fullmatch(FORM, text)
    if match is None or not {match[1], match[2]} <= {*settings} or match[1] == match[2]:
        rule = f"'A better than B by 0.02', of two settings: {', '.join(settings)}"
        fix = f"--until='{settings[0]} better than {settings[-1]} by 0.02'"
        raise InputError("--until", value=text, rule=rule, fix=fix)
    if len({member.config.seed for member in members}) < 2:
        raise InputError(
            "--until asks about several seeds", value="one seed", fix="--seeds=32, the most it runs"
        )
    return Question(match[1], match[2], float(match[3] or 0.0))


def run_until(
    question: Question,
    members: Sequence[Member],
    run: Callable[[Sequence[Member]], Iterator[tuple[Member, int | None]]],
    at_once: int,
    everyone: Sequence[Member] = (),
) -> Iterator[tuple[Member, int | None]]:
    """Runs the members of `at_once` seeds after another, as `run` does, until the question is
    answered by `everyone` (default: these members): those, too, that other machines run. Prints
    the answer each time."""
    seeds = sorted({member.config.seed for member in members})
    for first in range(0, len(seeds), at_once):
        current = seeds[first : first + at_once]
        yield from run([member for member in members if member.config.seed in current])
        answer = question.answer(everyone or members)
        print(answer.text)
        if answer.known:
            return
