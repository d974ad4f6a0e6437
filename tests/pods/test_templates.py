"""What the schedulers read: by their own rules, and by processes that run what it says."""

import copy
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from conftest import REPO, lanes

from rljax.errors import InputError
from rljax.hosts.cluster import environment
from rljax.pods import VERSIONS, read_pod, remote, templates
from rljax.pods.pod import topologies

TRAIN = ("train", "my config.py", "--config.steps=3")
SCHEMA = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())


def rendered(*arguments):
    done = subprocess.run(
        [sys.executable, str(REPO / "launchers/pod.py"), *arguments, "--", *TRAIN],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- SLURM --

# Of `man sbatch`, as patterns of their values.
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "partition": r"[\w,-]+",
    "account": r"\w+",
    "requeue": None,
    "signal": r"([RB]{1,2}:)?[A-Z0-9]+@\d+",
    "open-mode": "append|truncate",
    "output": r"\S+",
}


def slurm(**changes):
    given = {"name": "mine", "nodes": 2, "gpus": 8, "time": "", "partition": "", "account": ""}
    return templates.slurm(TRAIN, **{**given, **changes})


def test_sbatch_knows_every_option():
    script = slurm(time="1-00:00:00", partition="long", account="lab")
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    assert options.keys() == SBATCH.keys()
    for name, value in options.items():
        assert re.fullmatch(SBATCH[name] or "", value), name
    assert options["ntasks-per-node"] == "1" and options["signal"] == "TERM@300"
    # Options come before the first command, else sbatch reads none of them.
    assert script.splitlines()[: len(lines) + 1] == ["#!/bin/bash", *lines]
    assert "time" not in slurm() and "gpus" not in slurm(gpus=0)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.fixture
def slurm_job(tmp_path):
    """Runs a script as sbatch would, on two "nodes" -> (exit code, output, calls of scontrol)."""
    (tmp_path / "srun").write_text(
        f'#!/bin/sh\nexec {sys.executable} {REPO}/tests/helpers/fake_srun.py "$@"\n'
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("srun", "scontrol", "python3"):
        (tmp_path / name).chmod(0o755)

    def run(script):
        env = {
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NUM_NODES": "2",
            "PYTHONPATH": str(REPO),
        }
        done = subprocess.run(
            ["bash"], input=script, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        calls = tmp_path / "calls"
        return done.returncode, done.stdout, calls.read_text() if calls.exists() else ""

    return run


FIND = """
import os, sys
sys.path.insert(0, {repo!r})
from rljax.hosts.cluster import environment
print(environment(os.environ))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.hosts
@pytest.mark.parametrize("code", [0, 2, 143])
def test_a_job_of_two_nodes(slurm_job, tmp_path, code):
    (tmp_path / "find me.py").write_text(FIND.format(repo=str(REPO)))
    command = (str(tmp_path / "python3"), str(tmp_path / "find me.py"), str(code))
    script = templates.slurm(
        command, name="mine", nodes=2, gpus=0, time="", partition="", account=""
    )
    # Without the supervisor, which would start 143 anew.
    script = script.replace("python3 -m rljax pod supervise -- ", "")
    got, out, calls = slurm_job(script)
    port = 61_440 + 77
    assert {f"{k}: host {k} of 2, coordinator localhost:{port}" for k in range(2)} <= set(
        out.splitlines()
    )
    assert got == code and calls == ("requeue 77\n" if code == 143 else "")


# -- JobSet --


@pytest.mark.parametrize(
    "version", lanes(["v5e", "v5p"], [name for name in VERSIONS if name not in ("v5e", "v5p")])
)
def test_a_jobset_of_every_shape_fits_the_schema(version):
    for shape, slices in itertools.product(topologies(version)[:12], (1, 4)):
        pod = read_pod(f"{version}:{'x'.join(map(str, shape))}", slices)
        given = {"name": "mine", "image": "python:3.12", "queue": "q", "spot": True}
        if slices > 1 and pod.hosts_per_slice == 1:
            with pytest.raises(InputError, match="multi-host slices only"):
                templates.jobset(pod, TRAIN, **given)
            continue
        manifest = templates.jobset(pod, TRAIN, **given)
        jsonschema.validate(manifest, SCHEMA)
        job = manifest["spec"]["replicatedJobs"][0]
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        chips = container["resources"]["limits"]["google.com/tpu"]
        topology = spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        sizes = [int(size) for size in topology.split("x")]
        total = 1
        for size in sizes:
            total *= size
        assert spec["parallelism"] == spec["completions"] and spec["backoffLimit"] == 0
        assert spec["completions"] * chips == total and job["replicas"] == slices


def test_the_schema_refuses_what_kubernetes_would():
    good = yaml.safe_load(rendered("jobset", "--type=v5litepod-64", "--slices=2"))
    jsonschema.validate(good, SCHEMA)
    job = good["spec"]["replicatedJobs"][0]["template"]["spec"]
    for change in (
        lambda m, j: m["spec"]["failurePolicy"].update(maxRestart=3),
        lambda m, j: m["spec"]["failurePolicy"]["rules"][0].update(action="Restart"),
        lambda m, j: j.update(parallelism="16"),
        lambda m, j: j["template"]["spec"].update(restartPolicies="Never"),
        lambda m, j: j["template"]["spec"]["containers"][0].pop("name"),
    ):
        bad = copy.deepcopy(good)
        change(bad, bad["spec"]["replicatedJobs"][0]["template"]["spec"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, SCHEMA)
    assert job["podFailurePolicy"] and job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_pods_of_a_jobset_find_each_other(monkeypatch):
    """Its variables, as Kubernetes fills them, are what rljax.hosts.cluster reads."""
    manifest = templates.jobset(
        read_pod("v5litepod-16", 2), TRAIN, name="mine", image="i", queue="", spot=False
    )
    assert "labels" not in manifest["metadata"]
    job = manifest["spec"]["replicatedJobs"][0]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    found = []
    for index, completion in itertools.product(range(2), range(4)):
        labels = {
            "jobset-name": manifest["metadata"]["name"],
            "replicatedjob-name": job["name"],
            "replicatedjob-replicas": str(job["replicas"]),
            "job-index": str(index),
        }
        env = {"JOB_COMPLETION_INDEX": str(completion)}
        for item in container["env"]:
            if "value" in item:
                env[item["name"]] = item["value"]
            else:
                path = item["valueFrom"]["fieldRef"]["fieldPath"]
                label = re.fullmatch(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.*)'\]", path)[1]
                env[item["name"]] = labels[label]
        found.append(environment(env))
    assert [cluster.host for cluster in found] == list(range(8))
    assert {(c.hosts, c.coordinator) for c in found} == {(8, "mine-slice-0-0.mine:8476")}
    script = container["command"][-1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert shlex.split(script.splitlines()[-1])[-3:] == list(TRAIN)
    assert "pip install" not in script and "the image has no rljax" in script
    monkeypatch.setenv("RLJAX_SOURCE", "git+https://example.org/me/rljax@v1")
    assert "pip install --quiet 'rljax-lm[tpu,gcs,s3] @ git+https://example.org/me/rljax@v1'" in (
        rendered("jobset", "--type=v5litepod-16")  # run_dir is a bucket: gcs, s3
    )


def test_what_a_host_installs_is_never_a_name_of_the_index(tmp_path, monkeypatch):
    """The name belongs to another project."""
    monkeypatch.delenv("RLJAX_SOURCE", raising=False)
    assert templates.package("tpu", REPO) == "'.[tpu]'"
    for project in (None, '[project]\nname = "rljax"\n', "name = ", "project = 3\n"):
        if project is not None:  # another project's, or no project at all
            (tmp_path / "pyproject.toml").write_text(project)
        with pytest.raises(InputError, match="RLJAX_SOURCE=URL"):
            templates.package("tpu", tmp_path)
    with pytest.raises(InputError, match="RLJAX_SOURCE=URL"):  # before the cloud is asked
        monkeypatch.chdir(tmp_path)
        remote.run(None, ["train", "quickstart"], "")
    monkeypatch.setenv("RLJAX_SOURCE", "my wheels/rljax_lm-0.1.0-py3-none-any.whl")
    (tmp_path / "requirements.txt").touch()
    words = shlex.split(remote.default_setup(tmp_path))
    assert words[3:] == [
        "my wheels/rljax_lm-0.1.0-py3-none-any.whl[tpu,gcs]",
        "-r",
        "requirements.txt",
    ]


# -- SkyPilot --

# Of its page "SkyPilot YAML".
SKY = {
    "": {
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "setup",
        "run",
        "config",
    },
    "resources": {
        "infra",
        "accelerators",
        "accelerator_args",
        "cpus",
        "memory",
        "instance_type",
        "use_spot",
        "disk_size",
        "disk_tier",
        "image_id",
        "ports",
        "labels",
        "autostop",
        "any_of",
        "ordered",
        "job_recovery",
    },
    "accelerator_args": {"runtime_version", "tpu_vm", "tpu_name"},
    "job_recovery": {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"},
}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--type=v6e-16", "--spot", "--bucket=gs://mine/runs"),
        ("--accelerators=H100:8", "--nodes=4"),
    ],
)
def test_a_task_of_skypilot(arguments):
    task = yaml.safe_load(rendered("sky", *arguments))
    resources = task["resources"]
    assert task.keys() <= SKY[""] and resources.keys() <= SKY["resources"]
    assert resources["job_recovery"].keys() <= SKY["job_recovery"]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if "--spot" in arguments:
        assert resources["accelerator_args"].keys() <= SKY["accelerator_args"]
        assert (resources["accelerators"], task["num_nodes"]) == ("tpu-v6e-16", 1)
        assert resources["use_spot"] and task["file_mounts"]["/runs"]["source"] == "gs://mine/runs"
    else:
        assert (resources["accelerators"], task["num_nodes"]) == ("H100:8", 4)
        assert "file_mounts" not in task
    assert shlex.split(task["run"].splitlines()[-1])[-3:] == list(TRAIN)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("jobset",), "no --type"),
        (("jobset", "--type=v4-16", "--name=My_Run"), "name"),
        (("sky",), "neither TPUs nor GPUs"),
        (("sky", "--type=v6e-16", "--slices=2"), "one slice"),
        (("sky", "--type=tpu7x-16"), "SkyPilot has no tpu7x"),
        (("slurm", "--type=v4-8"), "not read by pod slurm"),
        (("slrm",), "one of local, up"),
    ],
)
def test_what_cannot_be_rendered(arguments, text, rljax_command):
    code, out, err = rljax_command("pod", *arguments, "--", *TRAIN)
    assert code == 2 and out == "" and text in err
