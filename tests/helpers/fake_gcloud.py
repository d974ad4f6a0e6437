"""A `gcloud` whose cloud is a folder: requests and groups are a JSON file, a machine is a folder
that is its home, and ssh runs the command here, with the variables that a machine of Google has.

As a program it is `gcloud`; FakeCloud is what a test holds.
"""

import contextlib
import fcntl
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

NUMBER_PER_HOST = {"v4": 8, "v5p": 8}  # of a type, which counts cores there; else chips: 4
STEPS = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")  # one more with each look


@contextlib.contextmanager
def cloud_state(folder: Path):
    """The JSON of the cloud, under a lock; written back at the end."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "cloud.json"
        state = json.loads(path.read_text()) if path.exists() else {"things": {}, "calls": []}
        yield state
        path.write_text(json.dumps(state))


def main(words: list[str]) -> int:
    folder = Path(os.environ["FAKE_CLOUD"])
    flags = dict(w[2:].partition("=")[::2] for w in words if w.startswith("--"))
    words = [w for w in words if not w.startswith("--")]
    with cloud_state(folder) as state:
        state["calls"].append([*words, flags])
    kind, *rest = words[1:] if words[0] == "compute" else words
    if kind == "config":
        print("my-project")
        return 0
    if kind == "tpus" and rest[0] == "queued-resources":
        return request(folder, rest[1], rest[2], flags)
    if kind == "tpus":
        return reach(folder, rest[1], rest[2:], flags)
    if kind in ("ssh", "scp"):
        return reach(folder, kind, rest, flags)
    verb = next(w for w in rest if w in ("create", "delete", "list-instances"))
    return group(folder, kind, verb, rest[-1], flags)


def fail(text: str) -> int:
    print(f"ERROR: (gcloud) {text}", file=sys.stderr)
    return 1


def request(folder: Path, verb: str, name: str, flags: dict) -> int:
    """compute tpus queued-resources VERB NAME"""
    with cloud_state(folder) as state:
        found = state["things"].get(name)
        if verb == "create":
            if found:
                return fail(f"ALREADY_EXISTS: {name}")
            version, _, number = flags["accelerator-type"].rpartition("-")
            hosts = int(number) // NUMBER_PER_HOST.get(version, 4)
            nodes = int(flags.get("node-count", 1))
            names = [name if nodes == 1 else f"{name}-{k}" for k in range(nodes)]
            state["things"][name] = {"step": 0, "nodes": {n: hosts for n in names}}
            for node in names:
                for k in range(hosts):
                    (folder / "hosts" / node / str(k)).mkdir(parents=True)
            return 0
        if not found:
            return fail(f"NOT_FOUND: Resource {name} was not found")
        if verb == "delete":
            if "force" not in flags:
                return fail("FAILED_PRECONDITION: nodes are left")
            take_away(folder, list(found["nodes"]))
            del state["things"][name]
            return 0
        if state.get("faults"):
            state["faults"] -= 1
            return fail("HttpError 503: The service is currently unavailable.")
        word = found.get("state") or STEPS[min(found["step"], len(STEPS) - 1)]
        found["step"] += 1
        print(json.dumps({"name": name, "state": {"state": word}}))
        return 0


def group(folder: Path, kind: str, verb: str, name: str, flags: dict) -> int:
    """compute resource-policies, instance-templates and instance-groups managed"""
    key = f"{kind}/{name}"
    with cloud_state(folder) as state:
        found = state["things"].get(key)
        if verb == "create":
            if found:
                return fail(f"The resource '{name}' already exists")
            machines = {}
            if kind == "instance-groups":
                for k, letters in zip(range(int(flags["size"])), "zq", strict=True):
                    machines[f"{name}-{letters}1x"] = k  # the order of names is not that of workers
                    (folder / "hosts" / f"{name}-{letters}1x" / "0").mkdir(parents=True)
            state["things"][key] = {"step": 0, "nodes": machines, "flags": flags}
            return 0
        if not found:
            return fail(f"The resource '{name}' was not found")
        if verb == "delete":
            take_away(folder, list(found["nodes"]))
            del state["things"][key]
            return 0
        word = found.get("state") or ("STAGING" if found["step"] == 0 else "RUNNING")
        found["step"] += 1
        zone = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances"
        print(
            json.dumps(
                [{"instance": f"{zone}/{n}", "instanceStatus": word} for n in found["nodes"]]
            )
        )
        return 0


def reach(folder: Path, verb: str, words: list[str], flags: dict) -> int:
    """ssh and scp to a machine: its home is a folder."""
    node = (words[-1] if verb == "scp" else words[0]).partition(":")[0]
    home = folder / "hosts" / node / flags.get("worker", "0")
    if not home.is_dir():
        print(f"ssh: connect to host {node} port 22: Connection refused", file=sys.stderr)
        return 255
    if verb == "scp":
        target = home / words[-1].partition(":")[2]
        for file in words[:-1]:
            shutil.copy(file, target)
        return 0
    server = (folder / "server").read_text()
    given = {
        "HOME": str(home),
        "GCE_METADATA_IP": f"{server}/{node}/{flags.get('worker', '0')}",
        "JAX_COORDINATOR_PORT": (folder / "port").read_text(),
        "FAKE_HOST": str(home),
    }
    command = ["bash", "-c", flags["command"]]
    return subprocess.run(command, cwd=home, env={**os.environ, **given}).returncode


def take_away(folder: Path, nodes: list[str]) -> None:
    """Kills every process of these machines and removes their disks."""
    homes = [str(folder / "hosts" / node) + os.sep for node in nodes]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            place = next((v for v in variables if v.startswith(b"FAKE_HOST=")), b"").decode()[10:]
            if any((place + os.sep).startswith(home) for home in homes):
                os.kill(int(entry.name), signal.SIGKILL)
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)


class FakeCloud:
    """The cloud of a test: `bin` comes first on PATH; `variables` are the environment's."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "gcloud").write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
        (self.bin / "gcloud").chmod(0o755)
        (folder / "port").write_text(str(port))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        (folder / "server").write_text(f"127.0.0.1:{self.server.server_port}")
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.variables = {
            **os.environ,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "FAKE_CLOUD": str(folder),
        }

    def _handler(cloud):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                node, worker, *_, name = self.path.strip("/").split("/")
                answer = cloud.attributes(node, int(worker)).get(name)
                self.send_response(404 if answer is None else 200)
                self.end_headers()
                self.wfile.write((answer or "").encode())

            def log_message(self, *_):
                pass

        return Handler

    def attributes(self, node: str, worker: int) -> dict[str, str]:
        """What the metadata server says to a machine."""
        things = self.state()["things"]
        for key, thing in things.items():
            if node in thing["nodes"] and key.startswith("instance-groups"):
                return {"tpu-env": f"WORKER_ID: '{thing['nodes'][node]}'\n", "ip": "127.0.0.1"}
            if node in thing["nodes"]:
                hosts = thing["nodes"][node]
                slices = list(thing["nodes"])
                lines = [f"WORKER_ID: '{worker}'"]
                if len(slices) > 1:
                    lines += [
                        f"MEGASCALE_NUM_SLICES: '{len(slices)}'",
                        f"MEGASCALE_SLICE_ID: '{slices.index(node)}'",
                        "MEGASCALE_COORDINATOR_ADDRESS: '127.0.0.1:8080'",
                    ]
                return {
                    "agent-worker-number": str(worker),
                    "tpu-env": "\n".join(lines),
                    "worker-network-endpoints": ",".join(["127.0.0.1"] * hosts),
                }
        return {}

    def state(self) -> dict:
        with cloud_state(self.folder) as state:
            return state

    def suspend(self, name: str) -> None:
        """A preemption: the machines are gone, and the request says so."""
        with cloud_state(self.folder) as state:
            take_away(self.folder, list(state["things"][name]["nodes"]))
            state["things"][name]["state"] = "SUSPENDED" if "/" not in name else "STOPPING"

    def fail_next(self, count: int) -> None:
        """The next questions for the state of a request end with an error of the service."""
        with cloud_state(self.folder) as state:
            state["faults"] = count

    def calls(self, *words: str) -> list[dict]:
        """The flags of every call that has these words."""
        calls = self.state()["calls"]
        return [call[-1] for call in calls if set(words) <= set(call[:-1])]

    def close(self) -> None:
        take_away(self.folder, [p.name for p in (self.folder / "hosts").glob("*")])
        self.server.shutdown()
        self.server.server_close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
