"""The first hour with a pod: a small run that is started, killed and resumed, and one that goes on
with half of the hosts, with a manifest of the results."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import rljax
from rljax.errors import InputError
from rljax.files import write_json
from rljax.pods import remote
from rljax.pods.google import Cloud

STEPS = 4
TRAIN = ("train", "quickstart:tiny", f"--config.steps={STEPS}", "--config.checkpoint.every_steps=1")
FIRST_STEP_S = 1800.0  # a first compile may take this long
END_S = 120.0  # from the kill of a host to the end of all


@dataclasses.dataclass
class Start:
    """One start of a run, and how it ended."""

    name: str
    hosts: int
    exit_code: int
    seconds: float
    policy: str = ""  # SHA-256 of the weights, "" where there are none


def accept_here(hosts: int, devices: int, out: Path) -> dict:
    """Runs the stages with processes of this machine; writes and returns the manifest. Raises
    InputError for less than two hosts, and if `out` holds an earlier one."""
    if hosts < 2:
        raise InputError(
            "--hosts", value=hosts, fix="--hosts=2 or more: half of them go on after the kill"
        )
    if (out / "whole").exists():
        raise InputError(f"{out} holds an earlier one", fix="another --out, or remove it")
    stages = []

    def run(name: str, folder: str, count: int, kill: bool = False) -> Start:
        per_host = devices * hosts // count  # the same devices in all
        command = [sys.executable, "-m", "rljax", "pod", "local", f"--hosts={count}"]
        words = (*TRAIN, f"--config.run_dir={out / folder}")
        command += [f"--devices={per_host}", "--", *words]
        print(f"accept: {name}, {count} hosts", flush=True)
        begin = time.monotonic()
        process = subprocess.Popen(command)
        if kill:
            _wait_for_checkpoint(out / folder, lambda: process.poll() is None)
            os.kill(_child(process.pid, str(count - 1)), signal.SIGKILL)
            begin = time.monotonic()
        try:
            code = process.wait(END_S if kill else None)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
        seconds = round(time.monotonic() - begin, 1)
        stages.append(Start(name, count, code, seconds, weights(out / folder)))
        return stages[-1]

    uninterrupted = run("whole", "whole", hosts)
    killed = run("killed", "killed", hosts, kill=True)
    resumed = run("resumed", "killed", hosts)
    run("killed", "halved", hosts, kill=True)
    halved = run("resumed by half of the hosts", "halved", hosts // 2)
    checks = {
        "the whole run finished": uninterrupted.exit_code == 0,
        "all hosts ended after the kill": killed.exit_code != 0 and killed.seconds < END_S,
        "the resumed run finished": resumed.exit_code == 0,
        "with the same weights": resumed.policy == uninterrupted.policy != "",
        "half of the hosts finished it": halved.exit_code == 0 and halved.policy != "",
    }
    return _written(stages, checks, out, f"{hosts} processes with {devices} devices")


def accept_on(cloud: Cloud, setup: str, poll_s: float, out: str) -> dict:
    """Runs the stages on a pod of a cloud, which is asked for if it is not there; `out` is a
    bucket. Writes the manifest here, into runs/accept, and returns it. Raises InputError for an
    `out` that is no URL, and if no checkpoint comes in time."""
    from rljax.runs.store import Store, is_url

    if not is_url(out):
        rule = "a bucket, which all hosts see: gs://..."
        raise InputError("--out", value=out, rule=rule, fix="--out=gs://BUCKET/accept")
    store, stages = Store(out), []

    def run(name: str, folder: str, kill: bool = False) -> Start:
        print(f"accept: {name}, {cloud.pod.hosts} hosts", flush=True)
        command, begin = (*TRAIN, f"--config.run_dir={out}/{folder}"), time.monotonic()
        remote.bring_up(cloud, poll_s)
        if kill:
            remote.start(cloud, command, setup)
            deadline = begin + FIRST_STEP_S
            while not store.folders(f"{folder}/checkpoints"):
                if time.monotonic() > deadline:
                    rule, fix = (
                        f"for {FIRST_STEP_S:g} s",
                        "read the log of the hosts: rljax pod logs",
                    )
                    raise InputError("no checkpoint", value=out, rule=rule, fix=fix)
                time.sleep(poll_s)
            remote.kill_one(cloud)
        code = remote.babysit(cloud, command, setup, poll_s)
        names = [n for n in store.sizes(f"{folder}/policy") if n.endswith(".safetensors")]
        digests = [hashlib.sha256(store.read(n)).hexdigest() for n in sorted(names)]
        seconds = round(time.monotonic() - begin, 1)
        stages.append(Start(name, cloud.pod.hosts, code, seconds, " ".join(digests)))
        return stages[-1]

    uninterrupted = run("whole", "whole")
    restarted = run("killed and started again", "killed", kill=True)
    checks = {
        "the whole run finished": uninterrupted.exit_code == 0,
        "the run that was killed finished": restarted.exit_code == 0,
        "with the same weights": restarted.policy == uninterrupted.policy != "",
    }
    return _written(stages, checks, Path("runs/accept"), f"{cloud.name}: {cloud.pod}")


def weights(run: Path) -> str:
    """Returns the SHA-256 of each file of the exported policy, joined by spaces; "" if there
    are none."""
    files = sorted((run / "policy").glob("*.safetensors"))
    return " ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def _wait_for_checkpoint(run: Path, alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FIRST_STEP_S
    while not any((run / "checkpoints").glob("[0-9]*")):
        if time.monotonic() > deadline or not alive():
            rule = f"within {FIRST_STEP_S:g} s, of a run that goes on"
            fix = f"read {run}/log.txt: it says how the run ended"
            raise InputError(f"{run} has no checkpoint", rule=rule, fix=fix)
        time.sleep(0.2)


def _child(parent: int, host: str) -> int:
    """The process of a host, below `rljax pod local`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            variables = (entry / "environ").read_bytes().split(b"\0")
            if int(stat[1]) == parent and f"RLJAX_HOST={host}".encode() in variables:
                return int(entry.name)
    fix = "run it on Linux, where /proc lists processes, and again if the host had ended already"
    raise InputError("no process of the host", value=host, fix=fix)


def _written(stages: list[Start], checks: dict[str, bool], out: Path, description: str) -> dict:
    versions = {"python": platform.python_version(), "rljax": rljax.__version__}
    for name in ("jax", "jaxlib", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    manifest = {
        "what": description,
        "versions": versions,
        "command": " ".join(TRAIN),
        "stages": [dataclasses.asdict(stage) for stage in stages],
        "checks": checks,
    }
    write_json(out / "accept.json", manifest)
    return manifest
