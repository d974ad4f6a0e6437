"""The pool under rewards that hang, crash, exit, raise and print, and a parent that dies."""

import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
from conftest import lanes
from processes import alive, children, wait_until

from rljax import rewards
from rljax.components import resolve
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rewards.pool.calling import HOME, late_score
from rljax.rewards.pool.pool import RewardPool
from rljax.workers import prints
from rljax.workers.progress import PROGRESS_BYTES, WorkerProgress

ROOT = Path(__file__).resolve().parents[2]

USER_REWARDS = '''
import ctypes, os, signal, subprocess, sys, time

def act(response, extra_info=None):
    """Does what the response says; anything else is the score 1, from which process."""
    if response.startswith("noted "):  # extra_info is a file that shows that it has begun
        open(extra_info, "w").close()
        return act(response.removeprefix("noted "))
    if response == "hang":
        while True:
            pass
    if response == "hang in C":
        5 ** (5 ** (5 ** 5))
    if response == "hang, with children":
        child = subprocess.Popen(["sleep", "600"])
        open(extra_info, "w").write(str(child.pid))
        time.sleep(600)
    if response == "os._exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "fork":
        if os.fork() == 0:
            sys.exit(0)
    if response == "raise":
        raise ValueError("no luck")
    if response == "raise what cannot be shown":
        class Hostile(Exception):
            def __str__(self):
                raise RuntimeError
        raise Hostile
    if response == "sys.exit":
        sys.exit("bye")
    if response == "interrupt":
        raise KeyboardInterrupt
    if response == "recurse":
        return act("recurse")
    if response == "print and hang":
        print("before the end, to stderr", file=sys.stderr)
        time.sleep(600)
    while response == "print for ever":
        print("x" * 10_000)
    if response == "print":
        print("\\x00" * 100_000)
        os.write(1, b"raw bytes")
    if response.startswith("return "):
        return eval(response.removeprefix("return "))
    if response == "one of seven":
        open(os.path.join(extra_info, str(os.getpid()) + str(time.monotonic_ns())), "w").close()
    while response == "behind seven" and len(os.listdir(extra_info)) < 7:
        time.sleep(0.01)
    if response.startswith("sleep "):
        time.sleep(float(response.removeprefix("sleep ")))
    return {"score": 1.0, "pid": os.getpid()}

from rljax.contracts import contract

@contract(on_timeout=lambda options: {"score": options["worst"], "part": 0.5})
def late(response, extra_info=None, worst=-2.0):
    if response == "allocate":
        raise MemoryError
    return act(response, extra_info)

def judge(response):
    return act(response.partition("; ")[2])

@contract(on_timeout=-3.0)
def rule(response):
    return act(response.partition("; ")[0])

@contract(on_timeout="mask")
def no_score(response):
    return 0

def environment(response):
    return {"score": os.environ["OMP_NUM_THREADS"] == "1" and os.environ["JAX_PLATFORMS"] == "cpu"}
'''


@pytest.fixture
def act(tmp_path, monkeypatch):
    """The component text of a reward in a module outside the package."""
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)
    return "user_rewards.act"


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """pools(NAME, SECONDS) -> a pool with one worker for a reward of that module, the same at each
    call."""
    folder, made = tmp_path_factory.mktemp("rewards"), {}
    (folder / "shared_rewards.py").write_text(USER_REWARDS)
    sys.path.insert(0, str(folder))

    def pool_of(text: str, timeout_s: float = 600.0) -> RewardPool:
        if (text, timeout_s) not in made:
            reward = f"shared_rewards.{text}"
            made[text, timeout_s] = RewardPool(reward, workers=1, timeout_s=timeout_s)
        return made[text, timeout_s]

    yield pool_of
    for pool in made.values():
        pool.close()
    sys.path.remove(str(folder))


def samples(*responses):
    return [{"response": response} for response in responses]


def statuses(scores):
    return [score.status for score in scores]


def pids(scores):
    return {int(score.parts["pid"]) for score in scores if score.status == "ok"}


def test_scores_come_back_in_order():
    data = [{"response": f"#### {i % 3}", "ground_truth": "1"} for i in range(500)]
    with RewardPool("gsm8k(format_score=0.25)") as pool:
        for count in (500, 1, 0, 3):
            scores = pool.score(data[:count])
            assert [s.value for s in scores] == [[0.25, 1.0, 0.25][i % 3] for i in range(count)]
            assert set(statuses(scores)) <= {"ok"}
            parts = {"format/extracted": 1.0}
            assert all(s.parts == {"score": s.value, **parts} for s in scores)
            assert all(0 <= s.seconds for s in scores)


@pytest.mark.parametrize(
    "response, status, message",
    [
        *(
            pytest.param(one, "timeout", "over the limit of 1.0 s", marks=pytest.mark.slow)
            for one in ("hang", "hang in C")
        ),  # the test of late samples has one in C, too
        ("sleep 600", "timeout", "over the limit of 1.0 s"),
        ("os._exit", "error", "exit code 3"),
        ("segfault", "error", "signal 11"),
        pytest.param("killed", "error", "signal 9", marks=pytest.mark.slow),
        ("raise", "error", "ValueError: no luck"),
        ("raise what cannot be shown", "error", "Hostile"),
        ("sys.exit", "error", "SystemExit: bye"),
        ("interrupt", "error", "KeyboardInterrupt"),
        ("recurse", "error", "RecursionError"),
        ("return None", "abstained", "None"),
        ("return '1'", "error", "str"),
        ("return float('nan')", "error", "nan"),
        ("return {'score': float('inf')}", "error", "inf"),
        ("return 10**400", "error", "OverflowError"),
    ],
)
def test_a_failure_is_named_and_is_no_score_and_harms_no_neighbour(
    pools, response, status, message
):
    pool = pools("act", 1.0) if status == "timeout" else pools("act")
    bad = pool.score(samples("a", "b", response, *"cdefghijk"))  # six of them in one chunk
    assert statuses(bad) == ["ok", "ok", status, *["ok"] * 9]
    assert math.isnan(bad[2].value) and bad[2].parts == {} and message in bad[2].message
    assert statuses(pool.score(samples("e", "f"))) == ["ok", "ok"]


@pytest.mark.parametrize(
    "response", lanes(["hang in C", "recurse", "allocate", "segfault"], ["killed"])
)
def test_a_sample_over_a_limit_has_the_score_that_its_reward_declares(pools, response):
    """What passes a limit of time, memory or stack chose its response: it must not pay."""
    limit_s = 1.0 if response == "hang in C" else 600.0
    first, bad, last = pools("late(worst=-5)", limit_s).score(samples("a", response, "b"))
    assert (first.status, last.status) == ("ok", "ok")
    assert not first.over_limit and not last.over_limit
    assert (bad.status, bad.value, bad.over_limit) == ("ok", -5.0, True)
    assert bad.parts == {"score": -5.0, "part": 0.5} and bad.message


def test_a_fault_of_a_rewards_own_is_no_limit(pools):
    """Though it declares what a sample over a limit is worth."""
    found = pools("late(worst=-5)").score(samples("raise", "os._exit"))
    assert statuses(found) == ["error"] * 2


@pytest.mark.slow
def test_a_limit_that_is_passed_while_the_pool_looks_away_counts_the_same(act):
    """The worker ends its call late, before it is killed: the clock decides, not the look at it."""
    for name, value, status in (("late", -2.0, "ok"), ("act", None, "timeout")):
        with RewardPool(act.replace("act", name), workers=1, timeout_s=0.5) as pool:
            pool._supervisor.deadline = lambda worker: math.inf
            (score,) = pool.score(samples("sleep 0.6"))
            assert score.status == status and (value is None or score.value == value)


@pytest.mark.slow
def test_in_a_mixture_the_member_that_is_late_decides(act):
    """Each has the whole limit: what the response makes one of them take does not make the next,
    which asks a server, late."""
    names = tuple(act.replace("act", name) for name in ("rule", "judge"))
    text = f"mixture(rewards={names!r}, weights=(1.0, 0.5), inner_parts=False)"
    with RewardPool(text, workers=1, timeout_s=3.0) as pool:
        slow, rule, judge = pool.score(
            samples("sleep 1.6; sleep 1.6", "hang; return 1", "return 1; hang")
        )
        assert (slow.status, slow.value, slow.over_limit) == ("ok", 1.5, False)
        assert (rule.status, rule.value, rule.over_limit) == ("ok", -3.0, True)
        assert rule.parts == {"score": -3.0, "rule": -3.0}
        assert judge.status == "timeout" and math.isnan(judge.value)
    sources = f"by_source(sources=(('r', {names[0]!r}), ('j', {names[1]!r})))"
    with RewardPool(sources, workers=2, timeout_s=0.5) as pool:
        asked = [{"response": "hang; hang", "data_source": source} for source in "rj"]
        assert [s.status for s in pool.score(asked)] == ["ok", "timeout"]


def test_every_reward_that_asks_nobody_declares_what_a_late_sample_is_worth():
    """Only what a server or a model keeps waiting is masked; the worth is none that pays."""
    asks = {"judge", "rubric", "pairwise", "sandbox_fusion", "reward_model", "diversity"}
    options = {
        "length_under": "max_tokens=9",
        "soft_overlong": "max_tokens=9, cache_tokens=3",
        "mixture": "rewards=('gsm8k', 'dapo')",
        "by_source": "sources=(('x', 'dapo'),)",
        "json_schema": "",
        "regex_match": "",
        "letter_quota": "quota=2",
        "with_cost": "reward='dapo()', cost='dapo()'",
        "with_judges": "reward='dapo()', judges=('gsm8k()',)",
    }
    sample = {"data_source": "x", "num_tokens": 5, "extra_info": {"target_tokens": 9}}
    for name in set(rewards.__all__) - asks:
        found = late_score(resolve(f"{name}({options.get(name, '')})", HOME), sample)
        assert found is not None and found[0] <= 0, name
    for name in asks:
        assert spec(getattr(rewards, name)).on_timeout is None


def test_a_declaration_that_is_no_score_is_refused_before_anything_starts(act):
    with pytest.raises(InputError, match="declares on_timeout.*'mask'"):
        RewardPool(act.replace("act", "no_score"))


def test_mixed_faults_keep_their_places(act):
    # (A hang that waits costs no processor: one that does not, too, is killed by the clock.)
    kinds = {"sleep 600": "timeout", "os._exit": "error", "raise": "error", "return {}": "error"}
    responses = [f"return {i}" for i in range(200)]
    expected = ["ok"] * 200
    for i, kind in enumerate(kinds):
        for place in (7 + 13 * i, 8 + 13 * i, 120 + 20 * i)[: 2 + i % 2]:  # neighbours, late ones
            responses[place], expected[place] = kind, kinds[kind]
    with RewardPool(act, workers=2, timeout_s=1.0) as pool:
        for count in (200, 10):  # the pool survives, and forgets
            scores = pool.score(samples(*responses[:count]))
            assert statuses(scores) == expected[:count]
            assert all(s.value == i for i, s in enumerate(scores) if s.status == "ok")


@pytest.mark.slow
def test_every_sample_may_fail(act):
    with RewardPool(act, workers=2) as pool:
        assert statuses(pool.score(samples(*["os._exit"] * 9))) == ["error"] * 9


def test_the_clock_of_a_sample_starts_when_it_does(act):
    with RewardPool(act, workers=1, timeout_s=3.0) as pool:
        scores = pool.score(samples(*["sleep 0.4"] * 8))  # 3.2 s in all
        assert statuses(scores) == ["ok"] * 8
        assert all(0.4 <= s.seconds for s in scores)


def test_the_deadline_holds_for_a_sample_that_begins_after_the_parent_looked(act):
    with RewardPool(act, workers=1, timeout_s=0.5) as pool:
        # While the worker still reads the last of it, the parent already waits.
        (score,) = pool.score([{"response": "hang in C", "extra_info": "x" * 50_000_000}])
        assert score.status == "timeout"


def test_prints_do_not_reach_the_protocol_or_the_parents_stdout(act, capfd):
    with RewardPool(act, workers=1) as pool:
        assert statuses(pool.score(samples("print", "print", "a"))) == ["ok"] * 3
    out, err = capfd.readouterr()
    assert out == "" and "raw bytes" in err


@pytest.mark.slow
def test_what_a_reward_prints_goes_to_a_file_of_bounded_size_also_from_one_that_is_killed(
    act, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(prints, "MAX_BYTES", 300_000)
    log = tmp_path / "rewards.log"
    quiet, loud = tmp_path / "quiet.log", samples("print", "print and hang", "raise")
    with RewardPool(act, workers=1, log=quiet) as pool:
        pool.score(samples("a", "b"))
    assert not quiet.exists()
    for _ in range(2):  # two pools, one after the other, of one run
        with RewardPool(act, workers=1, timeout_s=2.0, log=log) as pool:
            assert statuses(pool.score(loud)) == ["ok", "timeout", "error"]
    text = log.read_bytes()
    assert text.startswith(b"\0" * 100_000 + b"\n") and b"raw bytes" in text
    assert b"before the end, to stderr" in text
    with RewardPool(act, workers=2, log=log) as pool:
        assert statuses(pool.score(samples(*["print"] * 20))) == ["ok"] * 20
    assert 300_000 < log.stat().st_size < 301_000 and b"was dropped]" in log.read_bytes()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_reward_that_prints_for_ever_is_ended_by_its_clock(act, tmp_path):
    with RewardPool(act, workers=1, timeout_s=0.7, log=tmp_path / "log") as pool:
        assert statuses(pool.score(samples("print for ever", "a"))) == ["timeout", "ok"]


def test_the_memory_of_a_worker_is_bounded(act):
    """Asked for at once, and in many pieces; the worker and its neighbours go on."""
    with RewardPool(act, workers=1, memory_gb=0.5) as pool:
        scores = pool.score(
            samples(
                "a",
                "return len(bytearray(1 << 40))",
                "return len([[0] * 1000 for _ in range(10**6)])",
                "b",
            )
        )
        assert statuses(scores) == ["ok", "error", "error", "ok"]
        assert all("MemoryError" in score.message for score in scores[1:3])
        late = act.replace("act", "late")
    with RewardPool(late, workers=1, memory_gb=0.5) as pool:  # its text chose what to allocate
        (score,) = pool.score(samples("return len(bytearray(1 << 40))"))
        assert (score.status, score.value, score.over_limit) == ("ok", -2.0, True)
    for bad in (-1, float("nan"), "1"):
        with pytest.raises(InputError, match="memory_gb"):
            RewardPool(act, memory_gb=bad)


def test_a_reward_that_forks_does_not_answer_twice(pools):
    pool = pools("act")
    assert statuses(pool.score(samples("a", "fork", "b", "fork", "c"))) == ["ok"] * 5
    assert len(pids(pool.score(samples("a", "b")))) == 1


@pytest.mark.slow
def test_workers_are_replaced_after_their_number_of_tasks(act):
    with RewardPool(act, workers=1, max_calls_per_worker=5) as pool:
        scores = pool.score(samples(*["a"] * 12))
        seen = [int(s.parts["pid"]) for s in scores]
        assert sorted(map(seen.count, set(seen))) == [2, 5, 5]
    with RewardPool(act, workers=1) as pool:
        assert pids(pool.score(samples("a"))) == pids(pool.score(samples("b")))


@pytest.mark.slow
def test_a_dead_idle_worker_is_replaced_and_nobody_is_blamed(act):
    with RewardPool(act, workers=1) as pool:
        for _ in range(4):
            (pid,) = pids(pool.score(samples("a")))
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not alive(pid), "the worker's death")
        assert statuses(pool.score(samples("a", "b"))) == ["ok", "ok"]


def test_workers_leave_ctrl_c_and_sigterm_to_the_parent(pools):
    pool = pools("act")
    (pid,) = pids(pool.score(samples("a")))
    assert os.getpgid(pid) != os.getpgid(0)  # the terminal's Ctrl-C does not reach it
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert pids(pool.score(samples("a"))) == {pid}


def test_a_ctrl_c_in_mid_score_leaves_a_usable_pool(act, tmp_path):
    with RewardPool(act, workers=2, timeout_s=600) as pool:
        raised, begun = threading.Event(), tmp_path / "begun"

        def press():  # again, should the first one meet a callback that cannot raise
            wait_until(begun.exists, "the first sample")
            while not raised.is_set():
                os.kill(os.getpid(), signal.SIGINT)
                raised.wait(2)

        presser = threading.Thread(target=press)
        # A shell starts what runs in the background with SIGINT ignored.
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                pool.score([{"response": "noted sleep 3600", "extra_info": str(begun)}] * 3)
        finally:
            raised.set()
            presser.join()
            signal.signal(signal.SIGINT, old)
        assert [s.value for s in pool.score(samples("return 7", "return 8"))] == [7.0, 8.0]


def test_a_pool_outlives_the_thread_that_made_it_and_serves_several(act):
    made, results = [], {}
    maker = threading.Thread(target=lambda: made.append(RewardPool(act)))
    maker.start()
    maker.join()

    def use(n):
        results[n] = [s.value for s in made[0].score(samples(*[f"return {n}"] * 50))]

    with made[0]:
        threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: [float(n)] * 50 for n in range(4)}


def test_what_was_submitted_is_scored_while_the_caller_does_other_things(pools):
    pool, begun = pools("act"), time.monotonic()
    pending = [pool.submit(samples(f"return {i}", "sleep 0.05")) for i in range(20)]
    assert pool.score(samples("return 77"))[0].value == 77.0
    found = [each.result() for each in reversed(pending)][::-1]
    assert [first.value for first, _ in found] == [float(i) for i in range(20)]
    assert found[3] == pending[3].result()  # asked again
    ends = [score.ended_s for each in found for score in each]
    assert all(begun <= end <= time.monotonic() for end in ends)
    assert pool.submit([]).result() == []


def test_what_is_cancelled_does_not_keep_others_waiting(act, tmp_path):
    begun = tmp_path / "begun"
    hang = {"response": "noted hang in C", "extra_info": str(begun)}
    with RewardPool(act, workers=1, timeout_s=600) as pool:
        pending = [pool.submit([hang, {"response": "return 1"}]) for _ in range(3)]
        other = pool.submit(samples("return 5", "return 6"))
        wait_until(begun.exists, "the first sample")
        for each in pending:
            each.cancel()
        assert [score.value for score in other.result()] == [5.0, 6.0]


def test_those_who_wait_are_told_when_the_pool_is_closed(act, tmp_path):
    pool, begun = RewardPool(act, workers=1, timeout_s=600), tmp_path / "begun"
    pending = pool.submit([{"response": "noted hang", "extra_info": str(begun)}])

    def close():
        wait_until(begun.exists, "the sample")
        pool.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        pending.result()
    closer.join()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(samples("a"))


def test_nobody_waits_behind_a_slow_sample(act, tmp_path):
    """The slow one ends when the others have: none of them may be behind it."""
    folder = tmp_path / "ended"
    folder.mkdir()
    responses = ("behind seven", *["one of seven"] * 7)
    rows = [{"response": r, "extra_info": str(folder)} for r in responses]
    with RewardPool(act, workers=2, timeout_s=60) as pool:
        slow, *fast = [int(score.parts["pid"]) for score in pool.score(rows)]
        assert slow not in fast


@pytest.mark.slow
def test_the_clock_of_a_worker_is_never_read_half_written():
    write = (
        "import itertools, sys; from rljax.workers.progress import WorkerProgress; "
        "ours = WorkerProgress(int(sys.argv[1])); "
        "[ours.write(number, number * 1e-6, number % 2) for number in itertools.count(1)]"
    )
    with tempfile.TemporaryFile() as shared:
        shared.write(bytes(PROGRESS_BYTES))
        shared.flush()
        theirs, seen = WorkerProgress(shared.fileno()), set()
        theirs.write(1, 1e-6, True)
        writer = subprocess.Popen(
            [sys.executable, "-c", write, str(shared.fileno())],
            pass_fds=[shared.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            deadline = time.monotonic() + 60
            while len(seen) < 500 and time.monotonic() < deadline:
                number, clock, scored = theirs.read()
                assert number == -2 or (number * 1e-6, number % 2 == 1) == (clock, scored)
                seen.add(number)
        finally:
            writer.kill()
            writer.wait()
        assert len(seen) > 10


def test_nothing_is_left_after_close(act):
    before = children(os.getpid())
    pool = RewardPool(act, workers=2, timeout_s=1.0)
    started = children(os.getpid()) - before
    assert len(started) == 2
    pool.score(samples("sleep 600", "os._exit", "a"))
    pool.close()
    pool.close()
    assert children(os.getpid()) == before  # no zombie either
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(samples("a"))


def test_nothing_is_left_of_a_pool_that_is_dropped(act):
    before = children(os.getpid())
    pool = RewardPool(act)
    assert len(children(os.getpid()) - before) == 2
    del pool
    gc.collect()
    assert children(os.getpid()) == before


def test_a_timeout_also_ends_what_the_reward_started(act, tmp_path):
    note = tmp_path / "child"
    with RewardPool(act, workers=1, timeout_s=2.0) as pool:
        sample = {"response": "hang, with children", "extra_info": str(note)}
        [score] = pool.score([sample])
        assert score.status == "timeout", score
        wait_until(lambda: not alive(int(note.read_text())), "the end of the reward's child")


PARENT = """
import sys
open("imports", "a").write("x")  # a main that is heavy, or not safe to run twice
sys.path.insert(0, {root!r})
from rljax.rewards.pool.pool import RewardPool
with RewardPool("user_rewards.act", workers=3, timeout_s=100) as pool:
    print(pool.score([{{"response": "print"}}])[0].status, flush=True)
    if sys.argv[1:] == ["hang"]:
        hangs = ("noted hang in C", "first"), ("noted hang", "second")
        pool.score([{{"response": text, "extra_info": name}} for text, name in hangs])
"""


@pytest.fixture
def parent(act, tmp_path):
    """A launcher in a folder of its own, next to the user's rewards."""
    (tmp_path / "launcher.py").write_text(textwrap.dedent(PARENT.format(root=str(ROOT))))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {"args": [sys.executable, "launcher.py"], "cwd": tmp_path, "env": environment}


def test_the_parents_main_runs_once_and_its_stdout_is_its_own(parent, tmp_path):
    run = subprocess.run(**parent, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr
    assert (tmp_path / "imports").read_text() == "x"


def test_no_worker_outlives_a_parent_that_is_killed(parent, tmp_path):
    parent["args"].append("hang")
    process = subprocess.Popen(**parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        try:
            assert process.stdout.readline() == b"ok\n"
            workers = children(process.pid)
            assert len(workers) == 3
            for name in ("first", "second"):  # busy for ever, one of them inside C; one is idle
                wait_until((tmp_path / name).exists, "a sample")
        finally:
            process.kill()
    wait_until(lambda: not any(map(alive, workers)), "the end of the workers")


def test_a_module_in_the_working_folder_is_found_by_replacements_too(act, tmp_path, monkeypatch):
    monkeypatch.undo()  # not on sys.path
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)
    monkeypatch.chdir(tmp_path)
    with RewardPool(act, workers=1) as pool:
        monkeypatch.chdir("/")
        assert statuses(pool.score(samples("os._exit", "a"))) == ["error", "ok"]


def test_workers_start_no_thread_pools_and_touch_no_accelerator(act):
    with RewardPool("user_rewards.environment", workers=1) as pool:
        assert pool.score(samples("a"))[0].value == 1.0


def test_a_reward_that_cannot_be_loaded_is_refused_at_construction(act, tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    only_here = types.ModuleType("only_here")
    only_here.reward = lambda response: 1.0
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    before = children(os.getpid())
    for reward, message in [
        ("gsm9k", "did you mean gsm8k"),
        ("no_such_module.reward", "no_such_module.*Fix: put 'no_such_module' on PYTHONPATH"),
        ("user_rewards.at", "did you mean 'act'"),
        ("broken_rewards.reward", "ZeroDivisionError"),
        ("__main__.reward", "Fix: hand the function itself to rljax.train, or move it to a file"),
        (
            "only_here.reward",
            "could not load.*No module named 'only_here'. Fix: put 'only_here' on",
        ),
        ("exact_match(x=1)", "no option 'x'"),
    ]:
        with pytest.raises(InputError, match=message) as error:
            RewardPool(reward)
        assert str(error.value).count("Fix: ") == 1
    assert children(os.getpid()) == before


def test_options_are_checked():
    for options in ({"workers": 0}, {"timeout_s": 0}, {"timeout_s": math.nan}, {"workers": 1.5}):
        with pytest.raises(InputError, match=next(iter(options))):
            RewardPool("exact_match", **options)


def test_a_sample_that_cannot_be_sent_is_named(pools):
    pool = pools("act")
    good = {"response": "return 1", "prompt": lambda: None}  # not declared: not sent
    assert [s.value for s in pool.score([good])] == [1.0]
    bad = {"response": "a", "extra_info": lambda: None}
    with pytest.raises(InputError, match="field 'extra_info' of sample 1 cannot be sent"):
        pool.score([good, bad])
    with pytest.raises(InputError, match="needs 'response', which this sample lacks"):
        pool.score([good, {"prompt": "a"}])
    with pytest.raises(InputError, match="sample 0 is not a mapping"):
        pool.score(["a"])
    assert [s.value for s in pool.score([good])] == [1.0]
