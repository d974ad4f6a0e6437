"""Who stands where, what a host says when it can no longer speak, and notices of the cloud."""

import http.server
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from on_hosts import on_hosts
from processes import wait_until

from rljax import heartbeat
from rljax.heartbeat import CurrentPhase
from rljax.hosts import console, stopping
from rljax.hosts.watchdog import Seen, behind, described, stall

NAMES = tuple(f"host {k} (10.0.0.{k})" for k in range(64))


def seen(phase, entered, silent_s, *, waiting=False, limit_s=100.0) -> Seen:
    return Seen(
        CurrentPhase(phase, 120, entered, waiting, silent_s, limit_s), "", "", read_s=1000.0
    )


def test_who_is_behind_is_named_with_its_phase():
    hosts = {k: seen("learn", 9, 310.0) for k in range(64)} | {3: seen("reward", 8, 312.0)}
    text = described(hosts, NAMES, 1000.0)
    assert text == (
        "host 3 (10.0.0.3) stands in reward, step 120, for 312 s (100 s are allowed); "
        "63 hosts wait in learn"
    )
    assert behind(hosts) == [3] and stall(hosts, 1000.0) == 3.12
    # At the same place of the program whoever only waits is not the one that is waited for.
    hosts = {0: seen("reward", 8, 300.0, waiting=True), 1: seen("reward", 8, 50.0)}
    assert behind(hosts) == [1] and stall(hosts, 1000.0) == 0.5
    # A host that says nothing any more gives no sign of life, either.
    assert stall(hosts, 1100.0) == 1.5


def test_a_host_that_compiles_holds_up_no_alarm():
    """The others stand in a program that it has not begun, longer than theirs may take."""
    compiles = seen("learn", 9, 400.0, limit_s=3600.0)
    assert stall({0: compiles, 1: seen("learn", 9, 400.0)}, 1000.0) < 1
    assert stall({0: seen("learn", 9, 400.0), 1: seen("learn", 9, 400.0)}, 1000.0) == 4


def test_limits_are_learned(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(heartbeat, "_beats", heartbeat._Beats())
    with heartbeat.phase("reward"):
        assert heartbeat.current().limit_s == heartbeat.FIRST_S  # none was ever seen
        clock[0] += 30.0
        heartbeat.beat()
        clock[0] += 10.0
        assert heartbeat.current().limit_s == 5 * 30 + 120 and heartbeat.current().silent_s == 10
        assert heartbeat.current(stall_s=7.0).limit_s == 7
        heartbeat.compiling(True)
        assert heartbeat.current(stall_s=7.0).limit_s == heartbeat.FIRST_S
        clock[0] += 900.0
        heartbeat.beat()  # of what runs beside it
        heartbeat.compiling(False)
        heartbeat.beat()  # the time of compiling teaches nothing
        assert heartbeat.current().limit_s == 5 * 30 + 120
    with pytest.raises(ValueError), heartbeat.phase("learn"), heartbeat.phase("data"):
        raise ValueError
    assert heartbeat.died_in() == "data" and heartbeat.current().phase == "start"


def test_what_runs_between_phases_may_stall_too(monkeypatch):
    monkeypatch.setattr(heartbeat, "_beats", heartbeat._Beats())
    assert (
        heartbeat.current(stall_s=7.0).limit_s == heartbeat.FIRST_S
    )  # a start takes as long as it takes
    heartbeat.at_step(1)
    assert (
        heartbeat.current(stall_s=7.0).phase == "rest"
        and heartbeat.current(stall_s=7.0).limit_s == 7
    )
    with pytest.raises(ValueError), heartbeat.phase("reward"):
        raise ValueError
    try:
        raise ValueError
    except ValueError:
        with heartbeat.phase("save"):  # behind an error, which came out of another phase
            pass
    assert heartbeat.died_in() == "reward"
    before = heartbeat.current().entered
    heartbeat.at_end()
    assert heartbeat.current(stall_s=7.0).limit_s == 7 and heartbeat.current().entered == before + 1
    assert (heartbeat.current().phase, heartbeat.died_in()) == ("finish", "")
    heartbeat.at_start()  # of another run in this process
    assert (
        heartbeat.current(stall_s=7.0).limit_s == heartbeat.FIRST_S
        and heartbeat.current().step == 0
    )


SPEAKS = """
import os, sys
sys.path.insert(0, {folder!r})
from console import ConsoleCopy
kept = ConsoleCopy({log!r}, 1, ("host 0 (a)", "host 1 (b)"))
kept.know({{0: "generate, step 12", 1: "reward, step 12"}})
print("what was printed", flush=True)
os.write(2, {said!r})
os.kill(os.getpid(), {signal})
"""


@pytest.mark.parametrize(
    ("said", "number", "words"),
    [
        (b"", signal.SIGKILL, "host 1 (b), last heard of in reward, step 12, was killed"),
        (
            b"(stopped sending heartbeats):\n0\nThe tasks",
            signal.SIGABRT,
            "host 0 (a), last heard of in generate, step 12, was lost; so host 1 (b) has ended",
        ),
        (
            b"UNAVAILABLE: Failed to send RPC to coordination service.",
            signal.SIGABRT,
            "host 0 (a), last heard of in generate, step 12, was lost; so host 1 (b) has ended",
        ),
    ],
)
def test_last_words_of_a_host_that_was_ended(tmp_path, said, number, words):
    log = tmp_path / "host-001.log"
    folder = os.path.dirname(console.__file__)
    script = SPEAKS.format(folder=folder, log=str(log), said=said, signal=int(number))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.returncode == -number
    assert f"hosts: {words}\n" in done.stderr.decode()
    kept = log.read_text()
    assert f"hosts: {words}\n" in kept and "what was printed" in kept


SIGNALLED = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
from console import ConsoleCopy
kept = ConsoleCopy({log!r}, 1, ("host 0 (a)", "host 1 (b)"))
print("before", flush=True)
while not os.path.exists({log!r}) or not os.path.getsize({log!r}):  # it is there
    time.sleep(0.01)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(kept._process.pid, number)
time.sleep(0.3)
print("behind it", flush=True)
kept.close()
"""


def test_signals_of_a_scheduler_do_not_end_what_keeps_the_log(tmp_path):
    log = tmp_path / "host-001.log"
    script = SIGNALLED.format(folder=os.path.dirname(console.__file__), log=str(log))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == log.read_bytes() == b"before\nbehind it\n"


def test_a_notice_of_the_cloud_is_a_reason_to_stop(monkeypatch):
    answers = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[self.path.rpartition("/")[2]].encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(stopping, "NOTICE_S", 0.05)
    received = []
    notices = stopping.Notices(lambda: received[-1] if received else None)
    try:
        assert not wait_is_over(notices)
        answers["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"  # the machine goes on
        assert not wait_is_over(notices)
        answers["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        wait_until(notices, "the notice")
        assert notices().startswith("the cloud's notice maintenance-event=TERMINATE")
        received.append("SIGTERM")
        assert notices() == "SIGTERM"
    finally:
        notices.over.set()
        server.shutdown()


def wait_is_over(notices) -> bool:
    threading.Event().wait(0.3)
    return bool(notices())


def test_elsewhere_nothing_is_asked(monkeypatch):
    monkeypatch.delenv("GCE_METADATA_IP", raising=False)
    monkeypatch.setattr(stopping.Path, "read_text", lambda self: "Some Other Machine\n")
    assert stopping.metadata_server() == ""
    assert all(t.name != "notices" for t in threading.enumerate())


STOPS = """
import os, signal, sys, time
from pathlib import Path
from rljax import hosts
hosts.start(init_timeout_s=60)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
with hosts.watched(Path(sys.argv[1]), 0.0, lambda: told[-1] if told else None, lambda: None):
    for step in range(9):
        if step == 5 and hosts.index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        hosts.gather(step)  # nobody may stop here, but all know of it
        try:
            with hosts.may_stop():
                hosts.gather(step)
        except hosts.StopAgreed as stop:
            print("stopped in", step, stop)
            break
sys.exit(hosts.STOPPED)
"""


def test_two_hosts_stop_at_one_place(tmp_path):
    for host in on_hosts(2, 1, ["-c", STOPS, tmp_path / "hosts"]):
        assert host.code == 143, host.err
        assert re.search(r"stopped in 5 SIGTERM on host 1 \(", host.out), host.out


CLEARS_UP = """
import sys, time
from pathlib import Path
from rljax import hosts
from rljax.errors import InputError
hosts.start(init_timeout_s=60)
wrong = InputError("the user's data are wrong", fix="correct them")
errors = {"input": wrong, "raise": RuntimeError("bad code")}
with hosts.watched(Path(sys.argv[1]), 0.0, lambda: None, lambda: None):
    hosts.gather("here")
    try:
        with hosts.telling():
            do = sys.argv[2 + hosts.index()]
            if do == "go on":
                hosts.gather("nobody comes")
            raise errors[do]
    finally:
        if do != "go on":
            print("clears up", flush=True)
            time.sleep(float(sys.argv[4]))
            print("cleared up", flush=True)
"""


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("does", "clears_up_s", "codes"),
    [
        (("go on", "input"), 6, [171, 2]),
        (("go on", "input"), 300, [171, 2]),  # until it is ended
        (("raise", "go on"), 300, [171, 171]),
        (("input", "input"), 300, [2, 2]),
    ],
)
def test_a_host_that_clears_up_ends_with_its_own_reason(tmp_path, does, clears_up_s, codes):
    arguments = [tmp_path / "hosts", *does, clears_up_s]
    ended = on_hosts(2, 1, ["-c", CLEARS_UP, *arguments], timeout_s=90.0)
    assert [host.code for host in ended] == codes, [host.err for host in ended]
    said = {"input": "error: the user's data are wrong\n", "raise": "RuntimeError: bad code\n"}
    for do, host in zip(does, ended, strict=True):
        if do == "go on":
            assert re.search(r"hosts: host \d \([^)]*\): (Input|Runtime)Error: ", host.err), (
                host.err
            )
        else:
            assert said[do] in host.err and "clears up" in host.out, host.err
            assert ("cleared up" in host.out) == (clears_up_s == 6), host.out
