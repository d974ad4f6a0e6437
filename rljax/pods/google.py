"""TPU pods of Google Cloud by its command gcloud: of the Cloud TPU API, and of Compute Engine.

Only gcloud handles credentials: nothing here reads them. The Cloud TPU API gets no new versions, so
TPU7x and later are on Compute Engine; v4 and v5e are not there.
"""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Sequence

from rljax.errors import InputError
from rljax.pods.pod import Pod

# State of a pod, whatever a service calls it.
ABSENT, WAITING, ACTIVE, GONE = "absent", "waiting", "active", "gone"


@dataclasses.dataclass(frozen=True)
class Machine:
    """A host: its slice, and the arguments by which gcloud finds it."""

    slice_index: int
    name: str  # NAME:WORKER or the name of a VM, for messages, too
    target: str
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Cloud:
    """A pod that exists or shall exist. A service has create, state, delete and machines. Every
    method that runs gcloud raises InputError if it is not installed."""

    pod: Pod
    name: str
    zone: str
    project: str
    spot: bool

    def gcloud(self, *words: str, check: bool = True) -> subprocess.CompletedProcess:
        """Runs gcloud. With `check` a failure raises InputError with its message."""
        result = subprocess.run(
            self.command(*words), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if check and result.returncode:
            raise _failed(words, result)
        return result

    def command(self, *words: str) -> list[str]:
        """Returns the command line of gcloud with these words. Raises InputError if it is
        not installed."""
        if shutil.which("gcloud") is None:
            fix = "https://cloud.google.com/sdk, then gcloud auth login"
            raise InputError("gcloud is not installed", fix=fix)
        project = [f"--project={self.project}"] if self.project else []
        return ["gcloud", *words, *project, "--quiet"]

    def described(self, *words: str) -> dict | list | None:
        """Returns the description or list of a resource; None if there is none. Raises InputError
        for any other failure of gcloud."""
        result = self.gcloud(*words, "--format=json", check=False)
        if result.returncode == 0:
            return json.loads(result.stdout or "null")
        if any(text in result.stderr for text in ("NOT_FOUND", "was not found", "not found")):
            return None
        raise _failed(words, result)

    def ssh(self, machine: Machine, command: str) -> list[str]:
        """Returns the gcloud command that runs a shell command on a host."""
        words = (*self._ssh, "ssh", machine.target, *machine.flags, f"--command={command}")
        return self.command(*words, f"--zone={self.zone}")

    def copy(self, machine: Machine, files: Sequence[str], folder: str) -> list[str]:
        """Returns the gcloud command that copies files into a folder of the home of a host."""
        target = f"{machine.target}:{folder}"
        return self.command(
            *self._ssh, "scp", *files, target, *machine.flags, f"--zone={self.zone}"
        )


def _failed(words: Sequence[str], result: subprocess.CompletedProcess) -> InputError:
    command = " ".join(words[:4])
    problem = f"gcloud {command} failed with exit code {result.returncode}"
    fix = f"make `gcloud {command} ...` work by itself: project, zone, quota and login"
    return InputError(problem, rule=result.stderr.strip()[-2000:], fix=fix)


def _not_deleted(
    name: str, words: Sequence[str], result: subprocess.CompletedProcess
) -> InputError:
    fix = f"delete it by hand, since it costs money: gcloud {' '.join(words)}"
    return InputError(f"{name} cannot be deleted", rule=result.stderr.strip()[-2000:], fix=fix)


class CloudTpu(Cloud):
    """The Cloud TPU API: a queued resource with a node per slice."""

    _ssh = ("compute", "tpus", "tpu-vm")
    _resource = ("compute", "tpus", "queued-resources")

    def create(self) -> None:
        """Asks for the pod. Raises InputError for a version that the API does not have, and if
        gcloud fails."""
        if not self.pod.figures.runtime:
            raise InputError(f"the Cloud TPU API has no {self.pod.version}", fix="--api=compute")
        nodes = (f"--node-id={self.name}",)
        if self.pod.slices > 1:
            nodes = (f"--node-count={self.pod.slices}", f"--node-prefix={self.name}")
        kind = (f"--accelerator-type={self.pod.type}", *(("--spot",) if self.spot else ()))
        runtime = f"--runtime-version={self.pod.figures.runtime}"
        location = (self.name, *nodes, f"--zone={self.zone}")
        self.gcloud(*self._resource, "create", *location, runtime, *kind)

    def state(self) -> tuple[str, str]:
        """Returns (one of the states, the service's own word)."""
        words = (*self._resource, "describe", self.name, f"--zone={self.zone}")
        description = self.described(*words)
        if description is None:
            return ABSENT, "absent"
        state = description["state"]["state"]
        if state in ("SUSPENDING", "SUSPENDED", "FAILED", "DELETING"):
            return GONE, state
        return (ACTIVE if state == "ACTIVE" else WAITING), state

    def delete(self) -> None:
        """Deletes the request and its nodes; a resource that does not exist counts as deleted.
        Raises InputError if it cannot be deleted."""
        words = (*self._resource, "delete", self.name, f"--zone={self.zone}", "--force")
        result = self.gcloud(*words, check=False)
        if result.returncode and self.state()[0] != ABSENT:
            raise _not_deleted(self.name, words, result)

    def machines(self) -> list[Machine]:
        """Returns the hosts of all slices, in their order."""
        multislice = self.pod.slices > 1
        nodes = [f"{self.name}-{k}" if multislice else self.name for k in range(self.pod.slices)]
        return [
            Machine(k, f"{node}:{worker}", node, (f"--worker={worker}",))
            for k, node in enumerate(nodes)
            for worker in range(self.pod.hosts_per_slice)
        ]


class ComputeEngine(Cloud):
    """Compute Engine: for each slice a managed instance group, whose workload policy joins its
    machines by ICI. Either all of its machines come, or none."""

    _ssh = ("compute",)

    @property
    def _region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def _groups(self) -> list[str]:
        return [f"{self.name}-{k}" for k in range(self.pod.slices)]

    def create(self) -> None:
        """Makes what is missing of the policy, the template and the groups. Raises InputError for a
        version that Compute Engine does not have, and if gcloud fails."""
        figures = self.pod.figures
        if not figures.image:
            raise InputError(f"Compute Engine has no {self.pod.version}", fix="--api=tpu")
        policy = ("compute", "resource-policies", "create", "workload-policy", self.name)
        self._unless_there(
            *policy,
            "--type=HIGH_THROUGHPUT",
            f"--accelerator-topology={self.pod.topology_text}",
            f"--region={self._region}",
        )
        spot = ("--provisioning-model=SPOT", "--instance-termination-action=DELETE")
        self._unless_there(
            *("compute", "instance-templates", "create", self.name),
            *(f"--machine-type={self.pod.machine_type}", "--maintenance-policy=TERMINATE"),
            *(f"--image-family={figures.image}", "--image-project=ubuntu-os-accelerator-images"),
            *("--boot-disk-size=200GB", "--scopes=cloud-platform", *(spot if self.spot else ())),
        )
        project = self.project or self.gcloud("config", "get-value", "project").stdout.strip()
        resource_policy = f"projects/{project}/regions/{self._region}/resourcePolicies/{self.name}"
        for group in self._groups:
            # A single host has no topology that joins it to others.
            joined = [f"--workload-policy={resource_policy}"] * (self.pod.hosts_per_slice > 1)
            self._unless_there(
                *("compute", "instance-groups", "managed", "create", group),
                *(f"--size={self.pod.hosts_per_slice}", f"--template={self.name}"),
                *(f"--zone={self.zone}", "--default-action-on-vm-failure=do-nothing", *joined),
            )

    def _unless_there(self, *words: str) -> None:
        result = self.gcloud(*words, check=False)
        if result.returncode and "already exists" not in result.stderr:
            raise _failed(words, result)

    def state(self) -> tuple[str, str]:
        """Returns (one of the states, the numbers of machines in each state of the service)."""
        counts = {ACTIVE: 0, WAITING: 0, GONE: 0}
        words = []
        for group in self._groups:
            instances = self._instances(group)
            if instances is None:
                continue
            states = [item.get("instanceStatus") or "PENDING" for item in instances]
            words += states or ["empty"]
            for state in states:
                running = state == "RUNNING"
                starting = state in ("PENDING", "PROVISIONING", "STAGING")
                counts[ACTIVE if running else WAITING if starting else GONE] += 1
        text = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
        if not words:
            return ABSENT, "absent"
        if counts[ACTIVE] == self.pod.hosts:
            return ACTIVE, text
        # A machine was taken away, so the slice of its group is no longer complete.
        return (GONE if counts[GONE] else WAITING), text

    def _instances(self, group: str) -> list | None:
        return self.described(
            "compute", "instance-groups", "managed", "list-instances", group, f"--zone={self.zone}"
        )

    def delete(self) -> None:
        """Deletes groups, template and policy; those that do not exist count as deleted. Raises
        InputError if one cannot be deleted."""
        parts = [
            ("compute", "instance-groups", "managed", "delete", group, f"--zone={self.zone}")
            for group in self._groups
        ]
        parts += [
            ("compute", "instance-templates", "delete", self.name),
            ("compute", "resource-policies", "delete", self.name, f"--region={self._region}"),
        ]
        for words in parts:
            result = self.gcloud(*words, check=False)
            if result.returncode and "not found" not in result.stderr:
                raise _not_deleted(words[-2], words, result)

    def machines(self) -> list[Machine]:
        """Returns the hosts of all slices, in the order of their names."""
        machines = []
        for k, group in enumerate(self._groups):
            names = sorted(item["instance"].rpartition("/")[2] for item in self._instances(group))
            machines += [Machine(k, name, name, ()) for name in names]
        return machines


def cloud(api: str, pod: Pod, name: str, zone: str, project: str, spot: bool) -> Cloud:
    """Returns the pod on the service `api`, "tpu" or another text for Compute Engine. Raises
    InputError for no zone."""
    if not zone:
        raise InputError("no --zone", fix="such as --zone=us-west4-a")
    kind = CloudTpu if api == "tpu" else ComputeEngine
    return kind(pod, name, zone, project, spot)
