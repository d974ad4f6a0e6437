"""The search for the first wrong line: worked examples, planted errors, batching, chance."""

import math
import random

import pytest
from conftest import worked_example

from rljax.datagen.first_error import best_of, label_lines, label_metrics, replay_consistency
from rljax.errors import InputError


def lines(n):
    return [f"line {i}" for i in range(1, n + 1)]


def oracle(first_bad):
    """Accepts a prefix of program i iff it ends before line first_bad[i]."""
    return lambda prefixes: [kept < first_bad[i] for i, kept in prefixes]


def test_trace_example():
    x = worked_example("prm.bisect_trace")
    n, bad, want = x["inputs"]["num_lines"], x["inputs"]["first_bad"], x["outputs"]
    (found,), _ = label_lines([lines(n)], oracle([bad]))
    assert [list(p) for p in found.probes] == want["probes"]
    assert found.first_error == want["first_error_line"]
    assert list(found.labels) == want["labels"]


def test_table_example():
    x = worked_example("prm.bisect_table")
    for bad, first, calls, probes in x["outputs"]["table"]:
        accepts = best_of(lambda p: [""] * len(p), lambda p, _: oracle([bad])(p), 1)  # noqa: B023
        (found,), counts = label_lines([lines(x["inputs"]["num_lines"])], accepts)
        assert (found.first_error, [list(p) for p in found.probes]) == (first, probes)
        assert counts["asked"] == accepts.counts["completions"] == calls


def test_planted_errors_are_found_in_few_probes_and_few_rounds():
    planted = [(n, bad) for n in range(1, 41) for bad in range(1, n + 1)]
    programs, bad = [lines(n) for n, _ in planted], [b for _, b in planted]
    calls = []

    def accepts(prefixes):
        calls.append(len(prefixes))
        return oracle(bad)(prefixes)

    found, counts = label_lines(programs, accepts)
    for (n, first), one in zip(planted, found, strict=True):
        assert one.first_error == one.error_step == first and one.steps == n
        assert one.labels == (1.0,) * (first - 1) + (-1.0,) * (n - first + 1)
        assert len(one.probes) <= math.ceil(math.log2(n + 1))
        assert len(set(one.probes)) == len(one.probes)
        assert all(kept < n for kept, _ in one.probes)  # the whole program is known to fail
    # All programs share a round.
    assert len(calls) == counts["rounds"] <= math.ceil(math.log2(41))
    assert sum(calls) == counts["asked"] == counts["probes"] == sum(len(f.probes) for f in found)


def test_a_program_that_passes_is_not_searched():
    def never(prefixes):
        raise AssertionError("asked")

    found, counts = label_lines([lines(3), lines(1), []], never, passes=[True, False, False])
    assert found[0].labels == (1.0,) * 3 and found[0].first_error is None
    assert found[1].labels == (-1.0,) and found[1].first_error == 1  # one line: no probe
    assert found[2].labels == () and found[2].steps == 0
    assert counts == {"rounds": 0, "probes": 0, "asked": 0}


@pytest.mark.parametrize(
    "neutral,want",
    [
        ("zero", (0.0, 1.0, 0.0, 1.0, -1.0, 0.0, -1.0)),
        ("drop", (None, 1.0, None, 1.0, -1.0, None, -1.0)),
        ("inherit", (1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0)),
    ],
)
def test_neutral_lines_do_not_move_the_search(neutral, want):
    program = ["# add", "a = 1", "", "b = 2", "c = 0", "  // why", "d = 3"]
    asked = []

    def accepts(prefixes):
        asked.extend(kept for _, kept in prefixes)
        return oracle([5])(prefixes)

    (found,), _ = label_lines([program], accepts, neutral=neutral)
    assert found.labels == want and found.first_error == 5 and found.error_step == 3
    assert all(program[kept - 1][:1] not in ("#", "", " ") for kept in asked)
    (empty,), _ = label_lines([["# nothing", ""]], accepts, neutral=neutral)
    assert empty.labels == (None, None) and empty.first_error is None
    metrics = label_metrics([found, empty])
    assert metrics["labels/first_error_position"] == 3 / 4
    assert metrics["labels/without_lines"] == 0.5


def test_programs_of_one_task_share_answers_and_a_cache_outlives_the_call():
    programs = [["a", "b", "c", "x"], ["a", "b", "d", "y"], ["a", "b", "c", "x"]]
    asked = []

    def accepts(prefixes):
        asked.extend((i, tuple(programs[i][:kept])) for i, kept in prefixes)
        return [kept < 3 for _, kept in prefixes]

    alone, counts = label_lines(programs, accepts)
    assert counts["asked"] == counts["probes"] == 6
    asked.clear()
    cache = {}
    shared, counts = label_lines(programs, accepts, problems=["t"] * 3, cache=cache)
    assert shared == alone and counts["asked"] == len(asked) == 3 and counts["probes"] == 6
    apart, counts = label_lines(programs, accepts, problems=["t", "u", "t"])
    assert apart == alone and counts["asked"] == 4
    again, counts = label_lines(programs, accepts, problems=["t"] * 3, cache=cache)
    assert again == alone and counts == {"rounds": 0, "probes": 6, "asked": 0}


def test_best_of_stops_at_the_first_success():
    rng = random.Random(0)
    tries = {}

    def sample(prefixes):
        return [f"{p}" for p in prefixes]

    def passes(prefixes, completions):
        assert completions == [f"{p}" for p in prefixes]
        for p in prefixes:
            tries[p] = tries.get(p, 0) + 1
        # Prefix (i, m) succeeds at its m-th completion.
        return [tries[p] >= p[1] for p in prefixes]

    accepts = best_of(sample, passes, 3)
    prefixes = [(i, m) for i in range(4) for m in range(1, 6)]
    rng.shuffle(prefixes)
    assert accepts(prefixes) == [m <= 3 for _, m in prefixes]
    assert tries == {(i, m): min(m, 3) for i, m in prefixes}
    assert accepts.counts == {"prefixes": 20, "completions": 4 * 12, "accepted": 12}
    with pytest.raises(InputError, match="at least 1"):
        best_of(sample, passes, 0)


def test_a_weak_completer_is_seen_in_the_replay():
    """It misses a prefix that can be mended with chance 1/2 per completion; more tries, fewer
    misses."""
    bad = [1 + i % 17 for i in range(200)]
    programs = [lines(17)] * 200
    report = {}
    for k in (1, 12):
        rng = random.Random(1)

        def passes(prefixes, _):
            mended = oracle(bad)(prefixes)  # noqa: F821
            return [ok and rng.random() < 0.5 for ok in mended]  # noqa: B023

        accepts = best_of(lambda p: [""] * len(p), passes, k)
        found, _ = label_lines(programs, accepts)
        missed = sum(f.first_error < b for f, b in zip(found, bad, strict=True))
        assert all(f.first_error <= b for f, b in zip(found, bad, strict=True))  # never too late
        report[k] = (missed, replay_consistency(found, accepts))
    assert report[1][0] > 100 and report[12][0] < 5
    assert report[1][1]["replay/flips"] > 0.2 and report[12][1]["replay/flips"] < 0.02
    assert report[1][1]["replay/contradictions"] > 0 == report[12][1]["replay/contradictions"]
    exact, _ = label_lines(programs, oracle(bad))
    assert set(replay_consistency(exact, oracle(bad)).values()) == {0.0}


def test_metrics_and_bad_input():
    found, _ = label_lines([lines(4)] * 3, oracle([1, 4, 2]), passes=[False, False, True])
    metrics = label_metrics(found, [False, False, True])
    assert metrics["labels/first_error_position"] == (1 / 4 + 4 / 4) / 2
    assert metrics["labels/rejected_at_first_line"] == metrics["labels/never_rejected"] == 0.5
    assert metrics["labels/passed"] == pytest.approx(1 / 3)
    assert metrics["labels/probes_per_program"] == 2.0
    with pytest.raises(InputError, match="one per prefix"):
        label_lines([lines(4)], lambda prefixes: [])
    with pytest.raises(InputError, match="one per program"):
        label_lines([lines(4)], oracle([1]), passes=[True, True])
    with pytest.raises(InputError, match="zero, drop or inherit"):
        label_lines([lines(4)], oracle([1]), neutral="skip")
