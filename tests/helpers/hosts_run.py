"""A tiny run on several hosts, on one of which something happens at a known moment: an event such
as {"host": 1, "phase": "reward", "step": 3, "do": "SIGKILL"}.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from on_hosts import host_environment

from rljax import heartbeat

REPO = Path(__file__).resolve().parents[2]


def event(host: int, phase: str, step: int, do: str) -> dict:
    return dict(host=host, phase=phase, step=step, do=do)


def config_file(folder: Path, name: str = "run", **fields) -> Path:
    """The config of tests/helpers/tiny_run.py with a smaller model, as a file."""
    from tiny_run import tiny_config

    from rljax.config import to_dict

    small = dict(
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)",
        data__train="sort_digits(digits=5, test=8)",
        evaluate__prompts=8,
        sft__steps=2,
        steps=4,
        checkpoint__every_steps=1,
        hosts__heartbeat_s=6.0,
    )
    config = tiny_config(folder / name, **{**small, **fields})
    path = folder / f"{name}.json"
    path.write_text(json.dumps(to_dict(config)))
    return path


TODO: list[dict] = []  # the events that are to come on this host


def happens(do: str) -> None:
    print(f"now: {do} at {time.time():.3f}", flush=True)
    if do == "raise":
        raise RuntimeError("the user's code is wrong")
    if do == "input":
        from rljax.errors import InputError

        raise InputError("the user's data are wrong", fix="correct them")
    if do == "sleep":
        time.sleep(3600)
    number = getattr(signal, do)
    if number == signal.SIGTERM:
        os.kill(os.getpid(), number)
    else:  # in the middle of the phase, wherever the main thread stands then
        threading.Timer(0.02, os.kill, (os.getpid(), number)).start()


def watch_for_events() -> None:
    """From now on phases in which an event is to happen make it happen."""
    entered = heartbeat.phase

    @contextlib.contextmanager
    def phase(name):
        with entered(name):
            step = heartbeat.current().step
            due = [e for e in TODO if (e["phase"], e["step"]) == (name, step)]
            for one in due:
                TODO.remove(one)
                happens(one["do"])
            yield

    heartbeat.phase = phase


# -- rounds of processes that are forked from one which has imported everything --


def rounds(folder: Path, rounds: list[dict], *, timeout_s: float, **env: str) -> list[dict]:
    """Runs rounds one after the other, each {"hosts": n, "config": path, "event": event or None}
    -> of each {"codes": [...], "err": [...], "out": [...], "seconds": of each host}."""
    given = json.dumps([str(folder), rounds, timeout_s])
    environment = host_environment(0, 1, 1, 0, **env)
    done = subprocess.run(
        [sys.executable, __file__, given],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s * len(rounds) + 60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _round(folder: Path, number: int, given: dict, timeout_s: float) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids, count = {}, given["hosts"]
    for k in range(count):
        if (pid := os.fork()) == 0:
            _host(folder / f"{number}-{k}", k, count, port, given)
        pids[pid] = k
    begun, codes, ends = time.time(), [None] * count, [None] * count
    while pids and time.time() < begun + timeout_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            k = pids.pop(pid)
            codes[k], ends[k] = os.waitstatus_to_exitcode(status), time.time()
        elif not pid:
            time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    time.sleep(1.0)  # the last words of those that could not speak them
    texts = {
        name: [(folder / f"{number}-{k}.{name}").read_text() for k in range(count)]
        for name in ("out", "err")
    }
    return {"codes": codes, "ends": ends, **texts}


def _host(path: Path, k: int, count: int, port: int, given: dict) -> None:
    os.setsid()
    for name, fd in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.environ.update(
        RLJAX_COORDINATOR=f"127.0.0.1:{port}", RLJAX_HOSTS=str(count), RLJAX_HOST=str(k)
    )
    one = given.get("event")
    TODO[:] = [one] if one and one["host"] == k else []
    watch_for_events()
    from rljax.command import main

    main(["train", given["config"]])


if __name__ == "__main__":
    import rljax.command.train  # noqa: F401
    import rljax.training  # noqa: F401

    folder, asked, timeout_s = json.loads(sys.argv[1])
    results = [_round(Path(folder), n, one, timeout_s) for n, one in enumerate(asked)]
    print(json.dumps(results))
