"""The run folder: one process at a time writes it, a dead one loses it, odd ones are refused."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import types

import pytest
from conftest import REPO
from processes import wait_until

from rljax.errors import InputError
from rljax.runs import folder as folders
from rljax.runs.folder import LOCK, is_locked, locked, make_folder

HOLD = """
import sys
from rljax.errors import InputError
from rljax.runs.folder import locked, make_folder
try:
    with locked(make_folder(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
except InputError as error:
    print(error)
    sys.exit(2)
"""


@contextlib.contextmanager
def holder(folder):
    """A process that holds the run folder until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_look_at_the_lock_leaves_no_file_open(tmp_path):
    def opened() -> int:
        targets = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself
                targets.append(os.readlink(f"/proc/self/fd/{name}"))
        return targets.count(str(tmp_path / LOCK))

    with locked(make_folder(tmp_path)):
        assert is_locked(tmp_path) and opened() == 1  # its holder's own
    (tmp_path / LOCK).touch()
    os.utime(tmp_path / LOCK, (0, 0))  # no heart has beaten there for long
    assert not is_locked(tmp_path) and opened() == 0


def test_a_second_process_is_refused_by_the_name_of_the_first_until_that_ends(tmp_path):
    with holder(tmp_path) as first:
        assert first.stdout.readline() == "held\n"
        with holder(tmp_path) as second:
            said = second.stdout.read()
            assert second.wait() == 2
        assert f"process {first.pid} on host {socket.gethostname()}, since " in said
        with pytest.raises(InputError, match=f"process {first.pid} on host"):
            with locked(tmp_path):
                pass
        assert (tmp_path / LOCK).exists()
        first.communicate()
        assert first.returncode == 0 and list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_killed_process_loses_it_at_once_even_to_many_at_a_time(tmp_path):
    for _ in range(3):
        with holder(tmp_path) as first:
            assert first.stdout.readline() == "held\n"
            first.kill()
            first.wait()
        assert (tmp_path / LOCK).exists()
        outcomes, together = [], threading.Barrier(8)

        def take(together=together, outcomes=outcomes):
            together.wait()
            try:
                with locked(tmp_path):
                    outcomes.append("held")
                    wait_until(lambda: len(outcomes) == 8, "the others")
            except InputError:
                outcomes.append("refused")

        threads = [threading.Thread(target=take) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert sorted(outcomes) == ["held"] + ["refused"] * 7
        assert not (tmp_path / LOCK).exists()


@pytest.mark.smoke
def test_one_process_has_it_once(tmp_path):
    with locked(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()} on host"):
            with locked(tmp_path):
                pass
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_process_keeps_it(tmp_path):
    with holder(tmp_path) as first:
        first.stdout.readline()
        first.send_signal(signal.SIGSTOP)
        with pytest.raises(InputError, match=f"process {first.pid} on host"):
            with locked(tmp_path):
                pass


def record(**changes) -> str:
    return json.dumps({**folders.describe_process(), **changes})


def test_a_holder_without_a_lock_keeps_it_while_it_lives(tmp_path):
    """As on a file system that has no locks."""
    with holder(tmp_path / "other") as other:
        other.stdout.readline()
        started = folders._start_time(other.pid)
        (tmp_path / LOCK).write_text(record(pid=other.pid, started=started))
        with pytest.raises(InputError, match=f"process {other.pid} on host"):
            with locked(tmp_path):
                pass
        # The same id, but another process.
        (tmp_path / LOCK).write_text(record(pid=other.pid, started=str(int(started) - 1)))
        with locked(tmp_path):
            pass
        (tmp_path / LOCK).write_text(record(pid=other.pid, started=started))
    with locked(tmp_path):
        pass


def write_lock_of_another_host(folder, age):
    (folder / LOCK).write_text(record(host="far", boot="another kernel", pid=os.getpid()))
    os.utime(folder / LOCK, (time.time() - age, time.time() - age))


@pytest.mark.parametrize("age", [0, 61, 10**6])
def test_a_process_of_another_host_loses_it_when_its_heartbeat_has_stopped(
    tmp_path, monkeypatch, caplog, age
):
    """One whose last sign is new is waited for: a preemption kills without one."""
    write_lock_of_another_host(tmp_path, age)
    # Between two looks the sign becomes too old.
    between_looks(monkeypatch, lambda: monkeypatch.setattr(folders, "STALE_S", 0.0))
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["host"] == socket.gethostname()
    waits = [r for r in caplog.records if "waiting whether it still is" in r.getMessage()]
    assert len(waits) == (not age)


def between_looks(monkeypatch, change) -> None:
    """Calls `change` where the library would sleep for LOOK_S."""

    def sleep(seconds):
        assert seconds == folders.LOOK_S
        change()

    clock = types.SimpleNamespace(**{**vars(time), "sleep": sleep})
    monkeypatch.setattr(folders, "time", clock)


def test_a_process_of_another_host_whose_heart_beats_keeps_it(tmp_path, monkeypatch):
    write_lock_of_another_host(tmp_path, 5)
    between_looks(monkeypatch, lambda: os.utime(tmp_path / LOCK))
    says = r"process \d+ on host far, since .*60 s after its last sign of life"
    with pytest.raises(InputError, match=says), locked(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "far"


def test_the_heartbeat_goes_on_also_when_the_folder_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HEARTBEAT_S", 0.02)
    beats, touch = [], os.utime

    def utime(*args):
        beats.append(args)
        touch(*args)

    monkeypatch.setattr(folders.os, "utime", utime)
    place = tmp_path / "run"
    place.mkdir()
    with locked(place):
        os.utime(place / LOCK, (0, 0))
        wait_until(lambda: (place / LOCK).stat().st_mtime > 1e9, "a heartbeat")
        (place / LOCK).unlink()
        place.rmdir()
        gone = len(beats)
        wait_until(lambda: len(beats) > gone + 2, "more heartbeats")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 99,
        "[" * 4000,
        "{}",
        "null",
        '{"pid": "1"}',
        '{"pid": 1e400}',
        "\xff",
        '{"pid": -1}',
        '{"pid": true, "boot": []}',
        '{"pid": ' + "9" * 3000 + "}",
    ],
)
def test_a_lock_file_that_says_nothing_holds_nothing(tmp_path, text):
    (tmp_path / LOCK).write_bytes(text.encode("latin-1"))
    os.utime(tmp_path / LOCK, (0, 0))
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def odd(kind: str, path) -> None:
    """Makes something at `path` that is no regular file."""
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(path.with_name("nothing"))
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "device":
            path.symlink_to("/dev/null")
        case "file":
            path.write_text("")


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "dangling", "socket", "device"])
def test_what_is_no_file_in_place_of_the_lock_is_an_error(tmp_path, kind):
    odd(kind, tmp_path / LOCK)
    with pytest.raises(InputError, match="lock of the run folder cannot be written"):
        with locked(tmp_path):
            pass


# -- which folders a run can have


@pytest.mark.parametrize("kind", ["fifo", "loop", "dangling", "socket", "device", "file"])
@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_what_is_no_folder_is_refused(tmp_path, kind, below):
    odd(kind, tmp_path / "run")
    with pytest.raises(InputError, match="^the run folder cannot be written: got '.*run.*'; .*Fix"):
        make_folder(tmp_path / "run" / below)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "name", ["x" * 300, "a\0b", "no \udcff UTF-8", "/proc/no/run", "x/" * 3000]
)
def test_names_that_no_folder_can_have_are_refused(tmp_path, name):
    with pytest.raises(InputError, match="^the run folder cannot be written: got .*Fix: another"):
        make_folder(f"{tmp_path}/{name}" if name[0] != "/" else name)
    assert list(tmp_path.iterdir()) == [] or name.startswith("x/")


@pytest.mark.parametrize("name", ["a b", "ü 字", "a\nb", "'\"", "-x", "x/../y/./z", "[1]*", " "])
def test_names_that_are_merely_odd_are_taken(tmp_path, name):
    (tmp_path / "x").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for start in (tmp_path, tmp_path / "link"):
        place = make_folder(f"{start}/{name}")
        assert place.is_dir() and list(place.iterdir()) == []
        assert make_folder(place) == place


@pytest.mark.parametrize("name", [*folders.FILES, *folders.FOLDERS])
def test_names_that_a_run_writes_are_looked_at_before_it_begins(tmp_path, name):
    kinds = {"folder", "fifo", "loop", "dangling", "socket", "device", "file"}
    wanted = "file" if name in folders.FILES else "folder"
    for number, kind in enumerate(sorted(kinds)):
        place = tmp_path / str(number)
        place.mkdir()
        odd(kind, place / name)
        if kind == wanted:
            assert make_folder(place) == place
            continue
        before = (place / name).lstat().st_mtime_ns
        with pytest.raises(InputError, match=f"writes the {wanted} {name} into its folder"):
            make_folder(place)
        assert (place / name).lstat().st_mtime_ns == before


def as_nobody(folder) -> subprocess.CompletedProcess:
    """make_folder in a process that has no rights of the superuser."""
    code = (
        "import os, sys; from rljax.runs.folder import make_folder\n"
        "from rljax.errors import InputError\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: make_folder(sys.argv[1])\n"
        "except InputError as error: print(error)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


def test_a_folder_without_permissions_is_one_line(tmp_path_factory):
    place = tmp_path_factory.mktemp("rights")
    for up in (place, *place.parents):  # pytest's are its user's alone
        if up.stat().st_uid == os.getuid() and not up.stat().st_mode & stat.S_IXOTH:
            up.chmod(up.stat().st_mode | stat.S_IXOTH)
    cases = {"run": 0o555, "under/run": 0o555, "run/checkpoints": 0o555, "run/config.json": 0o444}
    for number, (name, mode) in enumerate(cases.items()):
        run = place / str(number) / "run"
        run.parent.mkdir()
        run.parent.chmod(0o777)
        path = run.parent / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.parent.chmod(0o777)
        path.write_text("{}") if "." in path.name else path.mkdir()
        path.chmod(mode)
        done = as_nobody(path / "new" if name == "under/run" else run)
        assert done.stderr == "" and done.stdout.count("\n") == 1, done
        assert "cannot be written" in done.stdout and "Fix: " in done.stdout
