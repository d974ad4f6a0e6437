"""Files for schedulers: a batch script of SLURM, a JobSet of Kubernetes, a task of SkyPilot.

Each starts one process per host, which finds the others by rljax.hosts.cluster.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from rljax import DISTRIBUTION
from rljax.errors import InputError
from rljax.pods.pod import Pod

GRACE_S = 300  # from the scheduler's SIGTERM to its SIGKILL: the run saves in this time


def shell_command(words: Sequence[str], *, supervised: bool) -> str:
    """Returns the command of every host as text for a shell. `train ...` is rljax's; words that
    name a program stay as they are. Raises InputError for no command."""
    return shlex.join(host_command(words, supervised=supervised))


def host_command(words: Sequence[str], *, supervised: bool) -> list[str]:
    """Returns the command of every host as arguments. `supervised`: restarted on its host after a
    fault that a restart can mend. Raises InputError for no command."""
    if not words:
        fix = "such as: -- train quickstart"
        raise InputError("no command", rule="what every host runs stands behind --", fix=fix)
    is_rljax = not re.search(r"python|[./]", words[0])
    command = ["python3", "-m", "rljax", *words] if is_rljax else list(words)
    if not supervised:
        return command
    return ["python3", "-m", "rljax", "pod", "supervise", "--", *command]


def package(extras: str, folder: Path) -> str:
    """Returns the requirement of rljax for pip on a host, as a word of a shell: rljax with `extras`
    from $RLJAX_SOURCE (a clone, a wheel or a URL that pip reads on the host), else from the
    checkout in `folder`. Raises InputError if there is neither."""
    source, project = os.environ.get("RLJAX_SOURCE", ""), folder / "pyproject.toml"
    if source:
        return shlex.quote(
            f"{DISTRIBUTION}[{extras}] @ {source}" if "://" in source else f"{source}[{extras}]"
        )
    if project.is_file() and _name(project) == DISTRIBUTION:
        return shlex.quote(f".[{extras}]")
    problem = "what a host installs rljax from is not said"
    rule = "the folder that is sent is no clone of rljax"
    fix = "export RLJAX_SOURCE=URL of a wheel or of git+https://, which pip reads on the hosts"
    raise InputError(problem, value=str(folder), rule=rule, fix=fix)


def _name(project: Path) -> str:
    """The name of the distribution that a pyproject.toml makes; "" where it says none."""
    try:
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    except ValueError:  # of the user's own folder, which may hold anything
        return ""
    return str(table.get("name", "")) if isinstance(table, dict) else ""


def slurm(
    command: Sequence[str],
    *,
    name: str,
    nodes: int,
    gpus: int,
    time: str,
    partition: str,
    account: str,
) -> str:
    """Returns a script for sbatch: one task per node, which takes all its GPUs."""
    options = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus,
        "time": time,
        "partition": partition,
        "account": account,
        "requeue": None,
        "signal": f"TERM@{GRACE_S}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [
        f"#SBATCH --{option}" + ("" if value is None else f"={value}")
        for option, value in options.items()
        if value not in ("", 0)
    ]
    # A job that its time limit has stopped goes on from its checkpoint: 143 is "stopped, saved".
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            "set -uo pipefail",
            'cd "${SLURM_SUBMIT_DIR:-.}"',
            f"srun --kill-on-bad-exit=1 --label {shell_command(command, supervised=True)}",
            "code=$?",
            'echo "exit code $code"',
            'if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$code"',
            "",
        ]
    )


def jobset(
    pod: Pod, command: Sequence[str], *, name: str, image: str, queue: str, spot: bool
) -> dict:
    """Returns a JobSet of GKE: one job per slice, one pod per host. Kueue admits it if `queue`
    is named. Raises InputError for a name that DNS does not allow, and for several slices of
    one host."""
    _check_dns(name)
    if pod.slices > 1 and pod.hosts_per_slice == 1:
        rule, fix = "GKE joins multi-host slices only", "a larger --type"
        raise InputError("several slices of one host", value=str(pod), rule=rule, fix=fix)
    labels = {"labels": {"kueue.x-k8s.io/queue-name": queue}} if queue else {}
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    rules = [
        # A preemption does not count as a restart; faults that the user has to mend are final.
        {
            "name": "evicted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [".*DisruptionTarget.*"],
        },
        {"name": "bad_input", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
    ]
    pod_rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "rljax", "operator": "In", "values": [2]},
        },
    ]
    job = {
        "parallelism": pod.hosts_per_slice,
        "completions": pod.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": pod_rules},
        "template": {"spec": _pod_spec(pod, command, image, spot)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "annotations": exclusive, **labels},
        "spec": {
            "failurePolicy": {
                "maxRestarts": 10,
                "restartStrategy": "BlockingRecreate",
                "rules": rules,
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "slice", "replicas": pod.slices, "template": {"spec": job}}
            ],
        },
    }


def _pod_spec(pod: Pod, command: Sequence[str], image: str, spot: bool) -> dict:
    label = "metadata.labels['jobset.sigs.k8s.io/{}']"
    labels = {
        "JOBSET_NAME": label.format("jobset-name"),
        "REPLICATED_JOB_NAME": label.format("replicatedjob-name"),
        "REPLICATED_JOB_REPLICAS": label.format("replicatedjob-replicas"),
        "JOB_INDEX": label.format("job-index"),
    }  # JOB_COMPLETION_INDEX comes from Kubernetes
    fields = [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for key, path in labels.items()
    ]
    node_selector = {
        "cloud.google.com/gke-tpu-accelerator": pod.figures.gke,
        "cloud.google.com/gke-tpu-topology": pod.topology_text,
        **({"cloud.google.com/gke-spot": "true"} if spot else {}),
    }
    # An image of the user's has rljax in it; a plain one of Python gets it as the pod starts.
    run = shell_command(command, supervised=True)
    install = "{ echo 'the image has no rljax: add it, or set RLJAX_SOURCE' >&2; exit 1; }"
    if os.environ.get("RLJAX_SOURCE"):
        install = f"pip install --quiet {package('tpu,gcs,s3', Path())}"
    script = f"python3 -c 'import rljax' 2>/dev/null || {install}\nexec {run}\n"
    container = {
        "name": "rljax",
        "image": image,
        "command": ["bash", "-c", script],
        "env": [{"name": "RLJAX_HOSTS", "value": str(pod.hosts)}, *fields],
        "ports": [{"containerPort": 8471}, {"containerPort": 8476}, {"containerPort": 8474}],
        "resources": {"limits": {"google.com/tpu": pod.chips_per_host}},
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 180,
        "nodeSelector": node_selector,
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
    }


def sky(
    command: Sequence[str],
    *,
    name: str,
    pod: Pod | None,
    accelerators: str,
    nodes: int,
    bucket: str,
    spot: bool,
) -> dict:
    """Returns a task of SkyPilot, for `sky jobs launch`: a TPU slice, or `nodes` machines with GPUs
    such as H100:8. `bucket` is mounted at /runs. Raises InputError for several slices, for neither
    a pod nor accelerators, and for a TPU version that SkyPilot does not have."""
    if pod is not None and pod.slices > 1:
        raise InputError("SkyPilot starts one slice", value=str(pod), fix="--slices=1, or JobSet")
    if pod is None and not accelerators:
        raise InputError("neither TPUs nor GPUs", fix="--type=v6e-16, or --accelerators=H100:8")
    recovery = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [143, 170, 171]}
    resources: dict = {"use_spot": spot, "job_recovery": recovery}
    if pod is not None:
        if not pod.figures.runtime:
            raise InputError(f"SkyPilot has no {pod.version}", fix="JobSet, or --api=compute")
        # tpu_vm: as a machine of its own; SkyPilot then starts all hosts of the slice.
        resources |= {
            "infra": "gcp",
            "accelerators": f"tpu-{pod.type}",
            "accelerator_args": {"runtime_version": pod.figures.runtime, "tpu_vm": True},
        }
    else:
        resources |= {"accelerators": accelerators}
    extra = "tpu" if pod is not None else "cuda"
    setup = (
        "pip install uv\nuv venv --python 3.12 --allow-existing ~/rljax-venv\n"
        "uv pip install --python ~/rljax-venv/bin/python "
        f"{package(f'{extra},gcs,s3', Path.cwd())}\n"
    )
    run = f"source ~/rljax-venv/bin/activate\nexec {shell_command(command, supervised=True)}\n"
    task = {
        "name": name,
        "workdir": ".",
        "num_nodes": 1 if pod is not None else nodes,
        "resources": resources,
        "setup": setup,
        "run": run,
    }
    if bucket:
        task["file_mounts"] = {"/runs": {"source": bucket, "mode": "MOUNT"}}
    return task


def _check_dns(name: str) -> None:
    """Raises InputError for a name that DNS does not allow: pods are NAME-slice-0-0-xxxxx."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,36}[a-z0-9])?", name):
        rule = "at most 38 of a-z, 0-9 and -, from a letter on"
        fix = "--name=my-run, or another name of these characters"
        raise InputError("name", value=name, rule=rule, fix=fix)
