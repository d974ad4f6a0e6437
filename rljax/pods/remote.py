"""Runs a command on every host of a pod of Google Cloud: start, logs, stop, and babysit, which asks
for the pod again when it was taken away."""

import collections
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rljax.errors import InputError
from rljax.pods.archive import code_archive
from rljax.pods.google import ABSENT, ACTIVE, GONE, Cloud, ComputeEngine, Machine
from rljax.pods.local import print_lines
from rljax.pods.supervise import RESTARTS
from rljax.pods.templates import host_command, package

_SCRIPT = Path(__file__).with_name("host.sh")
_AT_ONCE = 32  # ssh connections that are opened together
_SSH_FAILED = 255
_NOTICE_S = 90.0  # from the SIGTERM of a preemption to the state that says so
_MOST_FAULTS = 20  # questions to gcloud that may fail in a row; its service has bad minutes
_LAST_HOST_S = 300.0  # from the end of the first host to that of the last; its files take a while


def say(text: str) -> None:
    """Prints a line about the pod to standard error."""
    print(f"pod: {text}", file=sys.stderr, flush=True)


# -- the pod --


def bring_up(cloud: Cloud, poll_s: float, *, again: bool = False) -> None:
    """Waits until the pod is there; one that was taken away is deleted and asked for again. Raises
    InputError if it does not come. A gcloud that does not work is an error at the first question,
    unless it worked before: `again`."""
    state, word = _state(cloud, poll_s) if again else cloud.state()
    if state == GONE:
        say(f"{cloud.name} is {word}: deleted, and asked for again")
        cloud.delete()
        state = ABSENT
    if state == ABSENT:
        say(f"asking for {cloud.name}: {cloud.pod}{', spot' if cloud.spot else ''}")
        cloud.create()
    last_word = ""
    while True:
        state, word = _state(cloud, poll_s)
        if word != last_word:
            say(f"{cloud.name} is {word}")
            last_word = word
        if state == ACTIVE:
            return
        if state in (GONE, ABSENT):
            rule = "the service's console says why: capacity, quota, or a wrong --type or --zone"
            fix = f"`rljax pod down --name={cloud.name} ...`, then another zone or --spot"
            raise InputError(f"{cloud.name} did not come: it is {word}", rule=rule, fix=fix)
        time.sleep(poll_s)


def _state(cloud: Cloud, poll_s: float) -> tuple[str, str]:
    """Returns cloud.state(), asking again while the service does not answer."""
    for count in range(1, _MOST_FAULTS):
        try:
            return cloud.state()
        except InputError as error:
            say(f"the state of {cloud.name} is not known, {count} times: {error}")
            time.sleep(poll_s)
    return cloud.state()


# -- its hosts --


def everywhere(cloud: Cloud, machines: Sequence[Machine], command: Callable) -> list[str]:
    """Runs the gcloud command that `command(machine)` returns, on all hosts at once; returns what
    each printed. A connection that fails is tried again: new machines take a while to listen.
    Raises InputError if a command fails."""

    def run(machine: Machine) -> str:
        for wait_s in (2.0, 10.0, 30.0, None):
            words = command(machine)
            result = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if result.returncode == 0:
                return result.stdout.strip()
            if result.returncode != _SSH_FAILED or wait_s is None or _is_gone(cloud):
                raise InputError(
                    f"{machine.name}: exit code {result.returncode}",
                    rule=result.stderr.strip()[-2000:] or "nothing was said",
                    fix=f"run the command there by hand: {shlex.join(words)[:300]}",
                )
            time.sleep(wait_s)
        raise AssertionError

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(run, machines))


def _is_gone(cloud: Cloud) -> bool:
    """Returns whether the service says that the pod is gone."""
    try:
        return cloud.state()[0] != ACTIVE
    except InputError:
        return False


def _on_host(cloud: Cloud, *words: str) -> Callable:
    text = shlex.join(["bash", "rljax-pod/host.sh", words[0], cloud.name, *words[1:]])
    return lambda machine: cloud.ssh(machine, text)


def start(cloud: Cloud, command: Sequence[str], setup: str) -> list[Machine]:
    """Sends the code of the working folder and starts the command on every host; returns the hosts.
    Raises InputError as `everywhere` and `code_archive`."""
    words = host_command(command, supervised=True)
    machines = cloud.machines()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "code.tar.gz"
        sha = code_archive(Path.cwd(), archive)
        size = archive.stat().st_size / 2**20
        say(f"code {sha[:12]}, {size:.1f} MiB, to {len(machines)} hosts")
        target = f"rljax-pod/{cloud.name}"
        everywhere(cloud, machines, lambda m: cloud.ssh(m, f"mkdir -p {shlex.quote(target)}"))
        everywhere(cloud, machines, lambda m: cloud.copy(m, [str(_SCRIPT)], "rljax-pod/host.sh"))
        code = f"{target}/code.tar.gz"
        everywhere(cloud, machines, lambda m: cloud.copy(m, [str(archive)], code))
    numbers = _numbers(cloud, machines) if isinstance(cloud, ComputeEngine) else {}
    setup = setup or default_setup(Path.cwd())

    def begin(machine: Machine) -> list[str]:
        variables = [f"{name}={value}" for name, value in numbers.get(machine, {}).items()]
        return _on_host(cloud, "start", sha, setup, *variables, "--", *words)(machine)

    everywhere(cloud, machines, begin)
    return machines


def default_setup(folder: Path) -> str:
    """Returns the command that fills the environment of a host: rljax (see `templates.package`),
    and the packages in the folder's requirements.txt."""
    requirements = " -r requirements.txt" if (folder / "requirements.txt").is_file() else ""
    return f"pip install --quiet {package('tpu,gcs', folder)}{requirements}"


def _numbers(cloud: Cloud, machines: list[Machine]) -> dict[Machine, dict[str, str]]:
    """Returns RLJAX_* of each host. Compute Engine joins the machines of a group in an order of its
    own, by which libtpu numbers them: it is in the metadata of each machine."""
    identities = everywhere(cloud, machines, _on_host(cloud, "identity"))
    reported = {m: text.split() for m, text in zip(machines, identities, strict=True)}
    per_slice, slices = cloud.pod.hosts_per_slice, cloud.pod.slices
    out: dict[Machine, dict[str, str]] = {}
    for k in range(slices):
        members = [m for m in machines if m.slice_index == k]
        workers = [reported[m][0] for m in members]
        numbered = sorted(workers) == sorted(map(str, range(per_slice)))
        for position, machine in enumerate(members):
            worker = int(reported[machine][0]) if numbered else position
            out[machine] = {"RLJAX_HOST": str(k * per_slice + worker)}
    first = next(reported[m][1] for m in machines if out[m]["RLJAX_HOST"] == "0")
    for machine, values in out.items():
        values |= {"RLJAX_HOSTS": str(cloud.pod.hosts), "RLJAX_COORDINATOR": first}
        if slices > 1:  # no service couples the groups
            values |= {
                "RLJAX_SLICES": str(slices),
                "MEGASCALE_NUM_SLICES": str(slices),
                "MEGASCALE_SLICE_ID": str(machine.slice_index),
                "MEGASCALE_COORDINATOR_ADDRESS": first,
            }
    return out


def logs(cloud: Cloud) -> int:
    """Prints the logs of all hosts, "[3] ...", until the command ends; returns its exit code."""
    return _worst(_Logs(cloud, cloud.machines()).wait())


def stop(cloud: Cloud) -> None:
    """Ends the command on every host; the run saves first."""
    everywhere(cloud, cloud.machines(), _on_host(cloud, "stop"))
    say("stopped on every host")


def kill_one(cloud: Cloud) -> None:
    """Kills the command on the last host, as a fault would."""
    everywhere(cloud, cloud.machines()[-1:], _on_host(cloud, "kill"))


class _Logs:
    """The output of the hosts, by a connection to each."""

    def __init__(self, cloud: Cloud, machines: Sequence[Machine]):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        words = _on_host(cloud, "logs")
        self.processes = [subprocess.Popen(words(machine), **pipes) for machine in machines]
        self.threads = [
            threading.Thread(target=print_lines, args=(process.stdout, k), daemon=True)
            for k, process in enumerate(self.processes)
        ]
        for thread in self.threads:
            thread.start()

    def wait(self) -> list[int]:
        for thread in self.threads:
            thread.join()
        return [process.wait() for process in self.processes]

    def end(self) -> None:
        """Gives connections to hosts that are gone a moment, then ends them."""
        for thread in self.threads:
            thread.join(2.0)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _worst(codes: Sequence[int]) -> int:
    """Returns 0, or the code that explains most: a cause of 171, "another host has failed"."""
    failed = [code for code in codes if code]
    return next((code for code in failed if code != 171), failed[0] if failed else 0)


def run(cloud: Cloud, command: Sequence[str], setup: str) -> int:
    """Starts the command on a pod that is up, and prints its logs; returns its exit code. Raises
    InputError for no command, a pod that is not up, and as `start`."""
    host_command(command, supervised=True)  # raises for no command, before the cloud is asked
    setup = setup or default_setup(Path.cwd())
    if cloud.state()[0] != ACTIVE:
        raise InputError(f"{cloud.name} is {cloud.state()[1]}", fix="`rljax pod up` first")
    machines = start(cloud, command, setup)
    return _worst(_Logs(cloud, machines).wait())


# -- babysit --


def babysit(
    cloud: Cloud, command: Sequence[str], setup: str, poll_s: float, most_starts: int = 5
) -> int:
    """Brings the pod up and runs the command, again and again, until it has ended by itself: a pod
    that was taken away is asked for again and the run goes on from its checkpoint. Returns the
    command's exit code. A pod that stays but whose command fails is started at most `most_starts`
    times in a row."""
    starts: collections.Counter = collections.Counter()
    host_command(command, supervised=True)
    setup = setup or default_setup(Path.cwd())
    worked_before = False
    while True:
        bring_up(cloud, poll_s, again=worked_before)
        worked_before = True
        try:
            machines = start(cloud, command, setup)
            code = _watched(cloud, machines, poll_s)
        except InputError:
            if _state(cloud, poll_s)[0] == ACTIVE:
                raise
            code = None  # it went away while it was being started
        if code is None:
            starts.clear()
            continue
        starts[code] += 1
        if code not in RESTARTS or starts[code] >= most_starts:
            return code
        say(f"exit code {code}: started again")


def _watched(cloud: Cloud, machines: list[Machine], poll_s: float) -> int | None:
    """The command's exit code; None if the pod was taken away."""
    printing, quiet = _Logs(cloud, machines), 0
    first_end = last_end = None
    try:
        while True:
            time.sleep(poll_s)
            if _state(cloud, poll_s)[0] != ACTIVE:
                return None
            try:
                states = everywhere(cloud, machines, _on_host(cloud, "state"))
            except InputError as error:
                if _state(cloud, poll_s)[0] != ACTIVE:
                    return None
                quiet += 1
                say(f"no answer, {quiet} times: {error}")
                continue
            quiet = 0
            if "stopped" in states:  # by `rljax pod stop`
                return 0
            ended = [state for state in states if state.startswith(("ended", "lost"))]
            if not ended:
                continue
            now = time.monotonic()
            codes = [int(s.split()[1]) if s.startswith("ended") else 137 for s in ended]
            code, first_end = _worst(codes), first_end or now
            if len(ended) == len(states):
                # The SIGTERM of a preemption comes before the service says that the pod is gone.
                last_end = last_end or now
                if code not in RESTARTS or now > last_end + _NOTICE_S:
                    return code
            elif now > first_end + _LAST_HOST_S:
                # The last host may have been ended by JAX after the run, and wait for the others.
                stop(cloud)
                return code
    finally:
        printing.end()
