"""TPU VMs by `rljax pod`, against a gcloud whose machines are folders and processes here."""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import REPO
from fake_gcloud import FakeCloud
from on_hosts import free_port
from processes import wait_until

from rljax.errors import InputError
from rljax.pods import google, read_pod, remote

ZONE = ("--name=mine", "--zone=us-west4-a", "--poll_s=0.3")
# A host's environment is a new one; the libraries of this one are put into its path.
SETUP = (
    f"--setup=echo {os.pathsep.join(p for p in sys.path if 'site-packages' in p)} > "
    "$(ls -d $VENV/lib/python3*/site-packages)/here.pth"
)
# Stands for training: counts to 10 in a folder that both hosts see, on from where it was.
COUNT = """
import os, sys, time, pathlib
folder = pathlib.Path(sys.argv[1]) / os.environ.get("RLJAX_HOST", os.environ["FAKE_HOST"][-1])
step = int(folder.read_text()) if folder.exists() else 0
print("from step", step, flush=True)
while step < 10:
    time.sleep(0.3)
    step += 1
    folder.write_text(str(step))
    print("step", step, flush=True)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def cloud(tmp_path):
    cloud = FakeCloud(tmp_path / "cloud", free_port())
    yield cloud
    cloud.close()


@pytest.fixture
def project(tmp_path):
    """A folder of code, and the folder that plays the bucket."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "count.py").write_text(COUNT)
    (tmp_path / "shared").mkdir()
    return folder


def pod(cloud, folder, *arguments, timeout_s=120, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "rljax", "pod", *arguments],
        cwd=folder,
        env={**cloud.variables, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done


def counting(tmp_path, code=0):
    return "--", "python3", "count.py", str(tmp_path / "shared"), str(code)


TPU = (*ZONE, "--type=v4-16")  # two hosts


def steps(out: str, host: int) -> list[str]:
    return [line[4:] for line in out.splitlines() if line.startswith(f"[{host}]")]


WHOLE = ["from step 0", *(f"step {k}" for k in range(1, 11))]


@pytest.mark.hosts
def test_up_run_logs_and_down(cloud, project, tmp_path):
    said = pod(cloud, project, "up", *TPU, "--spot").stderr
    assert re.findall("mine is (.*)", said) == ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    (create,) = cloud.calls("queued-resources", "create")
    assert (
        create.items()
        >= {
            "accelerator-type": "v4-16",
            "runtime-version": "tpu-ubuntu2204-base",
            "node-id": "mine",
            "zone": "us-west4-a",
            "spot": "",
            "quiet": "",
        }.items()
    )
    out = pod(cloud, project, "run", *TPU, SETUP, *counting(tmp_path)).stdout
    assert steps(out, 0) == steps(out, 1) == WHOLE
    again = pod(cloud, project, "logs", *TPU).stdout  # of what has ended, too
    assert again.count("step 10") == 2
    # The environment is made once; a failure's code is that of the command.
    venvs = list((cloud.folder / "hosts/mine/0/rljax-pod/mine").glob("venv-*/ready"))
    made = [venv.stat().st_mtime_ns for venv in venvs]
    failed = pod(cloud, project, "run", *TPU, SETUP, *counting(tmp_path, 2), code=2)
    assert steps(failed.stdout, 1) == ["from step 10"]
    assert [venv.stat().st_mtime_ns for venv in venvs] == made and len(made) == 1
    pod(cloud, project, "down", *TPU)
    assert cloud.state()["things"] == {} and not (cloud.folder / "hosts/mine").exists()
    pod(cloud, project, "down", *TPU)  # what is not there is down
    failed = pod(cloud, project, "run", *TPU, *counting(tmp_path), code=2)
    assert "mine is absent" in failed.stderr and "pod up" in failed.stderr


@pytest.mark.hosts
def test_babysit_asks_again_for_a_pod_that_was_taken_away(cloud, project, tmp_path):
    command = [sys.executable, "-m", "rljax", "pod", "babysit", *TPU, "--spot", SETUP]
    babysit = subprocess.Popen(
        [*command, *counting(tmp_path)],
        cwd=project,
        text=True,
        env={**cloud.variables, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        steps_of = [tmp_path / "shared" / str(host) for host in range(2)]
        deadline = time.monotonic() + 120
        while not all(p.exists() and p.read_text() >= "3" for p in steps_of):
            assert time.monotonic() < deadline and babysit.poll() is None, babysit.communicate()
            time.sleep(0.1)
        cloud.suspend("mine")
        out, err = babysit.communicate(timeout=120)
    finally:
        babysit.kill()
    assert babysit.returncode == 0, err
    assert "mine is SUSPENDED: deleted, and asked for again" in err
    assert len(cloud.calls("queued-resources", "create")) == 2
    assert [p.read_text() for p in steps_of] == ["10", "10"]
    for host in range(2):  # the second start goes on from the first one's last step
        starts = [int(x.split()[-1]) for x in steps(out, host) if x.startswith("from")]
        assert starts[0] == 0 and 3 <= starts[1] <= 10 and len(starts) == 2


@pytest.fixture
def two_hosts(cloud, project, monkeypatch):
    """The pod of TPU, as remote's functions take it, called from the project's folder."""
    for name, value in {**cloud.variables, "PYTHONPATH": str(REPO)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(project)
    return google.cloud("tpu", read_pod("v4-16", 1), "mine", "us-west4-a", "", False)


def setup_of_hosts() -> str:
    return SETUP.removeprefix("--setup=")


@pytest.mark.hosts
def test_babysit_outlives_questions_that_are_not_answered(cloud, two_hosts, tmp_path, capfd):
    command = counting(tmp_path)[1:]
    with ThreadPoolExecutor() as pool:
        babysit = pool.submit(remote.babysit, two_hosts, command, setup_of_hosts(), 0.3)
        wait_until(lambda: (tmp_path / "shared/1").exists(), "the run", 120)
        cloud.fail_next(3)
        assert babysit.result(120) == 0
    said = capfd.readouterr().err
    assert "is not known, 3 times" in said and "503" in said
    assert len(cloud.calls("queued-resources", "create")) == 1
    assert [(tmp_path / "shared" / str(host)).read_text() for host in range(2)] == ["10", "10"]


def test_questions_that_are_never_answered_are_an_error(cloud, two_hosts, monkeypatch, capfd):
    monkeypatch.setattr(remote, "_MOST_FAULTS", 3)
    remote.bring_up(two_hosts, 0.0)
    cloud.fail_next(10)
    with pytest.raises(InputError, match="503"):
        remote.bring_up(two_hosts, 0.0)  # not logged in, for example: at once
    assert cloud.state()["faults"] == 9
    with pytest.raises(InputError, match="503"):
        remote.bring_up(two_hosts, 0.0, again=True)
    assert cloud.state()["faults"] == 6 and "2 times" in capfd.readouterr().err


@pytest.mark.hosts
def test_a_host_that_outlives_the_first_one_is_stopped(two_hosts, project, monkeypatch, capfd):
    monkeypatch.setattr(remote, "_LAST_HOST_S", 1.0)
    (project / "hang.py").write_text(
        "import os, time\nif os.environ['FAKE_HOST'].endswith('1'): time.sleep(600)\n"
    )
    command = ("python3", "hang.py")
    assert remote.babysit(two_hosts, command, setup_of_hosts(), 0.3) == 0
    assert "stopped on every host" in capfd.readouterr().err


@pytest.mark.hosts
def test_stop_lets_the_command_save_and_babysit_end(cloud, project, tmp_path):
    (project / "count.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n    pathlib.Path(sys.argv[1], 'saved').write_text('x'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    one = (*ZONE, "--type=v4-8")
    babysit = subprocess.Popen(
        [sys.executable, "-m", "rljax", "pod", "babysit", *one, SETUP, *counting(tmp_path)],
        cwd=project,
        text=True,
        env={**cloud.variables, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        while "ready" not in (line := babysit.stdout.readline()):
            assert line, babysit.wait()
        pod(cloud, project, "stop", *one)
        babysit.communicate(timeout=120)
    finally:
        babysit.kill()
    assert babysit.returncode == 0 and (tmp_path / "shared/saved").exists()
    assert not list((cloud.folder / "hosts/mine/0/rljax-pod/mine").glob("run.pid"))


COMPUTE = (*ZONE, "--type=v5p-16", "--api=compute", "--slices=2")


@pytest.mark.hosts
def test_groups_of_compute_engine(cloud, project, tmp_path):
    """Two slices of two machines; hosts are numbered as the machines' metadata does, and not by
    their names."""
    show = "import os; print(*(os.environ.get(k) for k in ('RLJAX_HOST', 'RLJAX_HOSTS', "
    show += "'RLJAX_COORDINATOR', 'RLJAX_SLICES', 'MEGASCALE_SLICE_ID', 'FAKE_HOST')))"
    (project / "show.py").write_text(show)
    pod(cloud, project, "up", *COMPUTE, "--spot")
    (policy,) = cloud.calls("workload-policy", "create")
    assert (policy["accelerator-topology"], policy["type"]) == ("2x2x2", "HIGH_THROUGHPUT")
    (template,) = cloud.calls("instance-templates", "create")
    assert template["machine-type"] == "ct5p-hightpu-4t"
    assert template["provisioning-model"] == "SPOT"
    groups = cloud.calls("instance-groups", "create")
    assert [g["size"] for g in groups] == ["2", "2"]
    assert {g["workload-policy"] for g in groups} == {
        "projects/my-project/regions/us-west4/resourcePolicies/mine"
    }
    out = pod(cloud, project, "run", *COMPUTE, SETUP, "--", "python3", "show.py").stdout
    words = sorted(line.split()[1:] for line in out.splitlines())
    assert [w[:5] for w in words] == [
        [str(k), "4", "127.0.0.1", "2", str(k // 2)] for k in range(4)
    ]
    # Of names q1x and z1x the second is worker 0.
    names = [w[5].split("/")[-2] for w in words]
    assert names == ["mine-0-z1x", "mine-0-q1x", "mine-1-z1x", "mine-1-q1x"]
    pod(cloud, project, "down", *COMPUTE)
    assert cloud.state()["things"] == {}


@pytest.mark.hosts
def test_code_that_did_not_arrive_whole_is_refused(cloud, project, tmp_path):
    scp = cloud.bin / "gcloud"
    one = (*ZONE, "--type=v4-8")
    pod(cloud, project, "up", *one)
    cut = "for f; do case $f in *code.tar.gz) [ -f $f ] && truncate -s 100 $f;; esac; done\n"
    scp.write_text(scp.read_text().replace("exec", cut + "exec"))
    failed = pod(cloud, project, "run", *one, "--setup=true", *counting(tmp_path), code=2)
    assert "did not arrive whole" in failed.stderr and "mine:0" in failed.stderr


def test_bad_input_is_named_before_anything_is_asked_for(
    cloud, project, rljax_command, monkeypatch
):
    monkeypatch.chdir(project)
    for name, value in cloud.variables.items():
        monkeypatch.setenv(name, value)
    for arguments, text in (
        (("up", "--zone=z"), "no --type"),
        (("up", "--type=v4-16"), "no --zone"),
        (("up", "--type=v5litepod-12", "--zone=z"), "v5e has no such type"),
        (("up", "--type=v4:2x3x4", "--zone=z"), "v4 has no such slice"),
        (("up", "--type=tpu7x-16", "--zone=z"), "--api=compute"),
        (("up", "--type=v5e-16", "--zone=z", "--api=compute"), "--api=tpu"),
        (("run", *TPU), "no command"),
        (("up", *TPU, "--hosts=3"), "not read by pod up"),
        (("up", *TPU, "--", "train"), "not read by pod up"),
    ):
        code, _, err = rljax_command("pod", *arguments)
        assert code == 2 and text in err, arguments
    assert cloud.calls("create") == []


GCLOUD = {
    "compute tpus queued-resources create": "node-id node-count node-prefix zone accelerator-type "
    "runtime-version spot",
    "compute tpus queued-resources describe": "zone",
    "compute tpus queued-resources delete": "zone force",
    "compute tpus tpu-vm ssh": "zone worker command",
    "compute tpus tpu-vm scp": "zone worker",
    "compute resource-policies create workload-policy": "type accelerator-topology region",
    "compute resource-policies delete": "region",
    "compute instance-templates create": "machine-type maintenance-policy image-family "
    "image-project boot-disk-size scopes provisioning-model instance-termination-action",
    "compute instance-groups managed create": "size template zone default-action-on-vm-failure "
    "workload-policy",
    "compute instance-groups managed list-instances": "zone",
    "compute instance-groups managed delete": "zone",
    "compute ssh": "zone command",
    "compute scp": "zone",
}


@pytest.mark.hosts
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.parametrize("words", GCLOUD)
def test_gcloud_knows_every_flag(words):
    shown = subprocess.run(
        ["gcloud", *words.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout
    shown = re.sub("\x1b\\[[0-9;]*m", "", shown)
    for flag in GCLOUD[words].split():
        assert re.search(rf"--{flag}\b", shown), flag
