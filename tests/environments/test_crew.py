"""Episodes in workers that hang, crash, fork and flood; the others go on, word for word."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import lanes
from played import CHARS, LIMITS, Played, play, script, write_environments
from processes import alive, children, wait_until

from rljax.environments.crew import EpisodeCrew
from rljax.environments.messages import Step
from rljax.environments.play_worker import mark_of
from rljax.errors import InputError
from rljax.rollout.players.episodes.episodes import MENDING

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def users(tmp_path, monkeypatch):
    write_environments(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_played", raising=False)
    return tmp_path


def crew_of(text, *, workers=2, retries=0, limits=LIMITS, **options):
    text = f"users_played.{text}"
    return EpisodeCrew(text, CHARS, limits, workers=workers, retries=retries, **options)


def echoes(count, turns=4, **more):
    return {i: dict(salt=f"s{i}", turns=turns) | more for i in range(count)}


def logs(played: dict[int, Played]) -> dict[int, list[int]]:
    return {number: one.log for number, one in played.items()}


WRONG = {
    "raise": ("raised", "ValueError: no luck"),
    "sys.exit": ("raised", "SystemExit: bye"),
    "recurse": ("raised", "RecursionError"),
    "allocate": ("raised", "MemoryError"),
    "hang": ("timeout", "over environment.turn_timeout_s=2.0"),
    "hang in C": ("timeout", "over environment.turn_timeout_s=2.0"),
    "exit": ("killed", "exit code 3"),
    "segfault": ("killed", "signal 11"),
    "kill": ("killed", "signal 9"),
    "close": ("killed", "ended its worker process"),
}
WELL = ("hello", "fork", "fork and exit", "print", "flood")


SHORT = ("raise", "sys.exit", "recurse", "allocate", "hang in C", "segfault")  # two kills


@pytest.mark.parametrize("wrong", lanes([SHORT], [tuple(WRONG)]), ids=len)
def test_each_misbehaviour_is_the_failure_of_its_episode_alone(tmp_path, wrong):
    told = [*wrong, *WELL]
    rows = {i: dict(plan=["hello", what, "bye"]) for i, what in enumerate(told)}
    with crew_of("act()", workers=1 + (len(wrong) > len(SHORT)), log=tmp_path / "log") as crew:
        played = play(crew, rows)
        counts = crew.take_counts()
    ends = [WRONG[what][0] for what in wrong]
    for number, what in enumerate(told):
        end, kind = played[number].end, WRONG.get(what, ("", ""))
        assert (end.kind, end.outcome) == (kind[0], None if what in WRONG else {"": 1.0}), end
        assert kind[1] in end.failure
    failed = [counts[f"failed/{kind}"] for kind in ("raised", "timeout", "killed")]
    assert failed == [ends.count(kind) for kind in ("raised", "timeout", "killed")]
    assert counts["failed"] == len(wrong) and counts["killed"] == sum(failed[1:])
    assert counts["killed"] <= counts["replayed"]
    flood = played[told.index("flood")].steps[2]
    assert len(flood.ids) <= LIMITS.max_reply_tokens
    text = (tmp_path / "log").read_text()
    assert all(line in text for line in ("printed\n", "raw\n", "to stderr\n"))
    assert crew.take_counts()["failed"] == 0
    assert {kind for kind, _ in WRONG.values()} <= MENDING.keys()


SENT = ("garbage", "no pickle", "a huge length", "other values", "a failed start", "half a message")


@pytest.mark.parametrize("told", lanes([("half a message", "other values")], [SENT]), ids=len)
def test_what_a_worker_sends_may_be_anything(monkeypatch, told):
    """The episode whose code wrote to its parent's stream has failed; the others go on."""
    monkeypatch.setattr("rljax.workers.supervisor.FRAME_TIMEOUT_S", 4.0)
    rows = {i: dict(plan=["hello", f"send {what}", "bye"]) for i, what in enumerate(told)}
    rows[len(told)] = dict(plan=["hello"] * 5)
    with crew_of("act()", workers=1 + (len(told) > 2)) as crew:
        played = play(crew, rows)
    assert played[len(told)].end.outcome == {"": 1.0}
    for number, what in enumerate(told):
        end = played[number].end
        assert end.kind == "killed", (what, end)
        assert "is no message" in end.failure or "did not end it" in end.failure, (what, end)


@pytest.mark.slow
def test_who_plays_while_garbage_of_another_is_read_is_not_blamed():
    """The steps behind the garbage are slow: the parent reads it while another's code runs."""
    rows = {0: dict(plan=["hello", "send garbage", "bye"])}
    rows |= {i: dict(plan=["slow"] * 3) for i in (1, 2, 3)}
    with crew_of("act()", workers=1) as crew:
        played = play(crew, rows)
    assert played[0].end.kind == "killed" and "is no message" in played[0].end.failure
    assert [played[i].end.outcome for i in (1, 2, 3)] == [{"": 1.0}] * 3


@pytest.mark.slow
def test_when_a_worker_is_killed_the_others_go_on_word_for_word():
    """200 episodes in one worker, one of which hangs: 199 end as in an undisturbed run."""
    rows = echoes(200)
    with crew_of("echo()", workers=1) as crew:
        calm = play(crew, rows)
        rows[77] |= dict(guilty_at=2)
        disturbed = play(crew, rows)
        counts = crew.take_counts()
    assert disturbed[77].end.kind == "timeout"
    assert {k: v for k, v in logs(disturbed).items() if k != 77} == {
        k: v for k, v in logs(calm).items() if k != 77
    }
    assert all(one.end.outcome == {"": 1.0} for k, one in disturbed.items() if k != 77)
    assert counts["killed"] == 1 and counts["replayed"] > 0 and counts["failed"] == 1
    assert all(
        [s.state for s in disturbed[k].steps] == [s.state for s in calm[k].steps]
        for k in rows
        if k != 77
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [1.0, 3600.0])
def test_a_hang_ends_at_its_limit_and_nobody_else_waits_for_it(limit_s):
    limits = dataclasses.replace(LIMITS, turn_timeout_s=limit_s)
    with crew_of("act()", workers=1, limits=limits) as crew:
        crew.admit(3, dict(plan=["hang"]), seed=0, sample_seed=0)
        assert [step.episode for step in crew.news(60.0)] == [3] and crew.pending == 0
        crew.reply(3, script(3, 0), "stop", 1, 1)
        if limit_s > 1.0:
            assert crew.pending == 1 and crew.news() == []
            crew.drop(3)
            assert crew.pending == 0
        else:
            (step,) = crew.news(3600.0)
            assert step.kind == "timeout" and step.seconds >= limit_s


@pytest.mark.parametrize("kinds", lanes([("exit",)], [("hang", "raise", "exit")]), ids=len)
def test_a_failed_episode_is_played_anew_with_its_seeds(tmp_path, kinds):
    workers = min(2, len(kinds))
    for what in kinds:
        once = str(tmp_path / f"once {what}")
        rows = echoes(6)
        rows[2] |= dict(guilty_at=1, what=what, once=once)
        with crew_of("echo()", workers=workers, retries=1) as crew:
            calm = play(crew, echoes(6))
            played = play(crew, rows)
            counts = crew.take_counts()
            assert played[2].restarts == 1 and counts["retried"] == 1 and counts["failed"] == 0
            assert logs(played) == logs(calm)
            rows[2] |= dict(what="raise", once="")
            played = play(crew, rows)
            counts = crew.take_counts()
        assert played[2].end.kind == "raised" and (counts["retried"], counts["failed"]) == (1, 1)
    if workers > 1:
        rows[2] |= dict(what="exit", once="")
        with crew_of("echo()", retries=2) as crew:
            played = play(crew, rows)
            counts = crew.take_counts()
        assert played[2].end.kind == "killed" and (counts["retried"], counts["failed"]) == (2, 1)


@pytest.mark.slow
def test_what_cannot_be_repeated_fails_with_its_worker():
    rows = echoes(5)
    rows[0] |= dict(guilty_at=2)
    with crew_of("live()", workers=1) as crew:
        played = play(crew, rows)
        counts = crew.take_counts()
    kinds = [one.end.kind for one in played.values()]
    assert kinds == ["timeout"] + ["killed"] * 4 and counts["replayed"] == 0
    assert "repeatable=False" in played[1].end.failure
    assert counts["failed/killed"] == 4


@pytest.mark.slow
def test_a_reply_to_what_has_failed_meanwhile_is_not_taken_for_another():
    """The driver answers before it has read that the episode is played anew."""
    rows = {0: dict(salt="s", turns=3), 1: dict(salt="t", turns=3)}
    with crew_of("live()", workers=1, retries=1) as crew:
        calm = play(crew, rows)
        crew.admit(0, rows[0], seed=1, sample_seed=0)
        crew.admit(1, rows[1] | dict(guilty_at=0, what="exit"), seed=1, sample_seed=1)
        seen = Played()
        for step in steps_of(crew, 2):
            seen.add(step) if step.episode == 0 else None
        crew.reply(1, script(1, 0), "stop", 1, 1)
        wait_until(lambda: crew._supervisor.counts["retried"] == 2, "the retries")
        crew.reply(0, script(9, 9), "stop", 1, 1)
        while not seen.steps[-1].ended:
            for step in steps_of(crew, 1):
                if step.episode == 0:
                    seen.add(step)
                    if not step.ended:
                        ids = script(0, seen.turns)
                        seen.turns, seen.log = seen.turns + 1, seen.log + ids
                        crew.reply(0, ids, "stop", 1, 1)
    assert seen.restarts == 1 and seen.log == calm[0].log


@pytest.mark.slow
def test_an_environment_that_says_something_else_when_it_is_repeated():
    with crew_of("unsteady()", workers=1) as crew:
        for number, what in enumerate(("exit", "hello", "hello")):
            crew.admit(number, dict(what=what), seed=0, sample_seed=0)
        for _ in range(2):  # what they are told to do comes after that
            steps = steps_of(crew, 3)
            assert not any(step.ended for step in steps)
            for step in steps[: 1 if _ else 3]:
                crew.reply(step.episode, script(step.episode, 0), "stop", 1, 1)
        kinds = {step.episode: step.kind for step in steps_of(crew, 3)}
    assert kinds == {0: "killed", 1: "not repeatable", 2: "not repeatable"}


def steps_of(crew, count: int) -> list:
    """So many steps, by episode."""
    steps, deadline = [], time.monotonic() + 120.0
    while len(steps) < count:
        assert time.monotonic() < deadline, steps
        steps += crew.news(1.0)
    return sorted(steps, key=lambda step: step.episode)


AHEAD, BEHIND = range(2**30), range(2**30, 2**31)


@pytest.mark.slow
def test_what_one_driver_is_not_told_waits_for_the_other():
    """Episodes that are played at once, beside others that wait."""
    with crew_of("echo()", workers=1) as crew:
        for number in (3, 5, BEHIND[0]):
            crew.admit(number, dict(salt="s", turns=2), seed=1, sample_seed=0)
        wait_until(lambda: crew._supervisor.news.qsize() == 3, "three steps")
        assert [step.episode for step in crew.news(120.0, BEHIND)] == [BEHIND[0]]
        assert crew.news(0.0, BEHIND) == [] and crew.pending == 2
        crew.drop(5)
        (step,) = crew.news(0.0, AHEAD)
        assert step.episode == 3 and crew.news(0.0) == [] and crew.pending == 0


def played_to(crew, number: int, turns: int, fields: dict) -> tuple[list, list]:
    """The steps of an episode's first turns, and the replies to the earlier ones."""
    crew.admit(number, fields, seed=1, sample_seed=0)
    steps, replies = steps_of(crew, 1), []
    for turn in range(turns):
        replies.append((script(number, turn), "stop", 9 - turn, 99))
        crew.reply(number, *replies[-1])
        steps += steps_of(crew, 1)
    return steps, replies


@pytest.mark.slow
def test_an_episode_goes_on_in_another_crew_where_it_stood():
    fields = dict(salt="s", turns=4)
    with crew_of("echo()", workers=1) as crew:
        steps, replies = played_to(crew, 0, 3, fields)
    marks = [step.mark for step in steps]
    how = dict(seed=1, sample_seed=0, attempt=1)
    with crew_of("echo()", workers=1) as crew:
        # It owes a step: the one that the other has said.
        crew.admit(0, fields, **how, replies=replies, marks=marks[:3])
        assert crew.pending == 1
        (step,) = steps_of(crew, 1)
        assert (step.ids, step.mark, step.restart) == (steps[3].ids, marks[3], False)
        crew.drop(0)
        # It owes none: the policy writes.
        crew.admit(0, fields, **how, replies=replies[:2], marks=marks[:3])
        assert crew.pending == 0
        crew.reply(0, *replies[2])
        (step,) = steps_of(crew, 1)
        assert (step.ids, step.mark) == (steps[3].ids, marks[3])


@pytest.mark.slow
def test_what_goes_on_must_say_what_it_said():
    fields = dict(salt="s", turns=4)
    with crew_of("echo()", workers=1) as crew:
        steps, replies = played_to(crew, 0, 2, fields)
        crew.drop(0)
        marks = [*(step.mark for step in steps[:2]), b"something else"]
        crew.admit(0, fields, seed=1, sample_seed=0, replies=replies, marks=marks)
        (step,) = steps_of(crew, 1)
        assert (step.kind, crew.pending) == ("not repeatable", 0)


ASYNC_WRONG = {
    "raise": "raised",
    "wait": "timeout",
    "stubborn": "timeout",
    "hang": "timeout",
    "exit": "killed",
    "task": "timeout",
}


@pytest.mark.slow
def test_asynchronous_environments_wait_together():
    """At each turn all 200 wait until the last of them has come."""
    rows = {i: dict(plan=["meet 200", "meet 200"]) for i in range(200)}
    limits = dataclasses.replace(LIMITS, turn_timeout_s=120.0)
    with crew_of("act_async()", workers=1, limits=limits) as crew:
        played = play(crew, rows, seconds=300.0)
        assert all(one.end.outcome == {"": 1.0} for one in played.values())
    with crew_of("act_async()", workers=1) as crew:
        rows = {i: dict(plan=["nap 0.1", what]) for i, what in enumerate([*ASYNC_WRONG, "fork"])}
        played = play(crew, rows)
    assert [one.end.kind for one in played.values()] == [*ASYNC_WRONG.values(), ""]


@pytest.mark.slow
def test_what_is_dropped_is_closed_and_its_number_is_free(tmp_path):
    told = tmp_path / "told"
    with crew_of("closes()", workers=1) as crew:
        for _ in range(2):
            crew.admit(5, dict(path=str(told)), seed=0, sample_seed=0)
            crew.news(120.0)
            crew.reply(5, script(5, 0), "stop", 1, 1)
            crew.drop(5)
            crew.drop(5)
            assert crew.pending == 0
        wait_until(lambda: told.exists() and told.read_text() == "closed\n" * 2, "two ends")
        assert crew.news(0.1) == []


@pytest.mark.slow
def test_a_hang_at_the_end_of_one_is_no_harm_to_others():
    with crew_of("hangs_at_its_end()", workers=1) as crew:
        for number in (0, 1):
            crew.admit(number, dict(path=""), seed=0, sample_seed=0)
            assert crew.news(120.0)[0].ids
        crew.drop(0)
        crew.reply(1, script(1, 0), "stop", 1, 1)
        (step,) = crew.news(120.0)
        assert step.episode == 1 and not step.ended and not step.restart
        assert crew.take_counts()["killed"] == 1


@pytest.mark.slow
def test_an_outcome_counts_whatever_comes_behind_it():
    with crew_of("hangs_behind_its_outcome()", workers=1) as crew:
        played = play(crew, {i: {} for i in range(3)})
        wait_until(lambda: crew._supervisor.counts["killed"], "the kill")
    assert [one.end.outcome for one in played.values()] == [{"": 1.0}] * 3


@pytest.mark.slow
def test_memory_is_limited():
    rows = {0: dict(prompt="a", size=1 << 31), 1: dict(prompt="b", size=1 << 10)}
    with crew_of("remembers()", workers=1, memory_gb=1.0) as crew:
        played = play(crew, rows)
    assert "MemoryError" in played[0].end.failure and played[1].end.outcome == {"": 1.0}


@pytest.mark.slow
def test_bad_input():
    with pytest.raises(InputError, match="running script"):
        EpisodeCrew("__main__.act", CHARS, LIMITS)
    with pytest.raises(InputError, match="no function"):
        crew_of("nobody()")
    with pytest.raises(InputError, match="at least 1"):
        crew_of("act()", workers=0)
    with pytest.raises(InputError, match="positive"):
        crew_of("act()", limits=dataclasses.replace(LIMITS, turn_timeout_s=0.0))
    with crew_of("act()", workers=1) as crew:
        with pytest.raises(InputError, match="needs 'plan', which this row lacks"):
            crew.admit(0, dict(prompt="x"), seed=0, sample_seed=0)
        with pytest.raises(InputError, match="cannot be sent"):
            crew.admit(0, dict(plan=lambda: 0), seed=0, sample_seed=0)
        assert crew.pending == 0 and play(crew, {0: dict(plan=[])})[0].end.outcome == {"": 1.0}
    with pytest.raises(RuntimeError, match="closed"):
        crew.news(1.0)


@pytest.mark.slow
def test_a_module_that_only_the_parent_can_import(users, monkeypatch):
    (users / "shy.py").write_text(
        "import os\nif os.environ.get('SHY'): raise OSError('not here')\n"
        "def act():\n    yield 'x'\n"
    )
    crew = EpisodeCrew("shy.act", CHARS, LIMITS, workers=1)
    monkeypatch.setenv("SHY", "1")
    with pytest.raises(InputError, match="could not load environment 'shy.act'.*not here"):
        crew.start()


@pytest.mark.slow
def test_no_process_stays():
    before = children(os.getpid())
    with crew_of("act()") as crew:
        crew.admit(0, dict(plan=["sleep"]), seed=0, sample_seed=0)
        crew.news(120.0)
        crew.reply(0, script(0, 0), "stop", 1, 1)
        own = children(os.getpid()) - before
        assert len(own) == 2
    assert not any(map(alive, own))


@pytest.mark.slow
def test_workers_end_with_their_parent(users, tmp_path):
    pids = tmp_path / "pids"
    code = f"""
        import sys, time
        sys.path[:0] = [{str(ROOT / "tests/helpers")!r}, {str(users)!r}]
        from played import CHARS, LIMITS, script
        from processes import children
        from rljax.environments.crew import EpisodeCrew
        import dataclasses, os
        if __name__ == "__main__":
            limits = dataclasses.replace(LIMITS, turn_timeout_s=3600.0)
            crew = EpisodeCrew("users_played.act", CHARS, limits, workers=2)
            crew.start()
            for number in range(2):
                crew.admit(number, dict(plan=["hang in C"]), seed=0, sample_seed=0)
                crew.news(120.0)
            for number in range(2):
                crew.reply(number, script(0, 0), "stop", 1, 1)
            crew.news(0.3)  # they hang by now, or soon
            open({str(pids)!r}, "w").write(" ".join(map(str, children(os.getpid()))))
            time.sleep(600)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment)
    wait_until(lambda: pids.exists() and pids.read_text(), "the workers")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    own = [int(pid) for pid in pids.read_text().split()]
    assert len(own) == 2
    wait_until(lambda: not any(map(alive, own)), "the workers' end")


# -- everything at once


def storm(crew, count: int, seconds: float, calm: bool = False) -> None:
    """5 % of the episodes raise, 1 % hang, 1 % kill their worker: each of these fails, once, with
    its kind, and no other; all end."""
    plans = {}
    for i in range(count):
        of_hundred = 50 if calm else i % 100
        what = "raise" if of_hundred < 5 else {5: "hang", 6: "kill"}.get(of_hundred, "hello")
        plans[i] = what, i // 100 % 5
    rows = {i: dict(plan=plan, turns=5) for i, plan in plans.items()}
    played = play(crew, rows, seconds=seconds)
    kinds = {"raise": "raised", "hang": "timeout", "kill": "killed", "hello": ""}
    expected = {i: kinds[what] for i, (what, _) in plans.items()}
    assert {i: one.end.kind for i, one in played.items()} == expected
    counts = crew.take_counts()
    assert counts["failed"] == sum(map(bool, expected.values())) and counts["retried"] == 0
    late = [one.end for one in played.values() if one.end.kind == "timeout"]
    assert len(late) == counts.get("failed/timeout", 0)
    assert all(end.seconds >= crew.limits.turn_timeout_s for end in late)
    for i, (what, _) in plans.items():  # `play` has seen that no step came after the last
        assert len(played[i].steps) == 6 or what != "hello"


@pytest.mark.slow
def test_a_storm(monkeypatch):
    monkeypatch.setenv("STORM_SCALE", "0.05")
    with crew_of("storm()") as crew:
        storm(crew, 100, 300.0)


@pytest.mark.slow
def test_a_great_storm():
    """1,000 episodes at once in two workers, delays of 0-2 s, replies of 0-3,000 tokens."""
    with crew_of("storm()", limits=dataclasses.replace(LIMITS, turn_timeout_s=4.0)) as crew:
        storm(crew, 1000, 1500.0)


def memory_mb(pid) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
def test_memory_does_not_grow(monkeypatch):
    monkeypatch.setenv("STORM_SCALE", "0.01")
    before = children(os.getpid())
    with crew_of("storm()") as crew:
        own = [os.getpid(), *(children(os.getpid()) - before)]
        sizes = []
        for _ in range(12):
            storm(crew, 400, 500.0, calm=True)
            sizes.append([memory_mb(pid) for pid in own])
    assert len(own) == 3
    assert all(late < early + 8.0 for early, late in zip(sizes[3], sizes[-1], strict=True)), sizes


def test_a_step_without_limits_of_its_own_has_the_mark_of_older_checkpoints():
    plain = Step(3, ids=(1, 2), state=b"x", outcome={"a": 1.0})
    assert mark_of(plain).hex() == "1adb856f366dd2980aeeec07327b3165"
    others = [dataclasses.replace(plain, stop=("a",)), dataclasses.replace(plain, max_tokens=3)]
    assert len({mark_of(step) for step in (plain, *others)}) == 3
