"""Checkpoints of several hosts, on a disk that they share and in a store: saved by some, read by
others; failures and damage that one of them sees reach all."""

import json
import shutil
from pathlib import Path

import pytest
from on_hosts import all_well, on_hosts

SCRIPT = """
import hashlib, json, sys, warnings
from rljax import hosts
hosts.start()
import brittle, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rljax.arrays import fetch
from rljax.errors import InputError
from rljax.checkpoint import pieces
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.runs import store

pieces.PIECE_BYTES, pieces.SPLIT_BYTES, store.PAUSES_S = 5000, 100, (0.0, 0.0)
what, folder = sys.argv[1:3]
mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "fsdp"))

def arrays(seed):
    draw = np.random.default_rng(seed)
    def put(x, *axes):
        where = NamedSharding(mesh, P(*axes))
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])
    return {
        "split": put(draw.standard_normal((64, 24)).astype(np.float32), ("data", "fsdp")),
        "copied": put(draw.standard_normal((24, 16)).astype(np.float32), None, "fsdp"),
        "whole": put(draw.standard_normal(7).astype(np.float32)),
        "count": put(np.int32(seed)),
    }

def digest(tree):
    leaves = [x for _, x in sorted(pieces.named_leaves(fetch(tree)))]
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()

checkpoints = Checkpoints(folder, keep=2)
out = {"host": hosts.index()}
try:
    checkpoints.prepare()
    if what == "save":
        for step in (1, 2, 3):
            checkpoints.start_save(step, arrays(step), {"at": step})
        checkpoints.wait()
        out["parts"] = len(pieces.snapshot(arrays(1)))
        out["digests"] = {step: digest(arrays(step)) for step in (1, 2, 3)}
    elif what == "twice":  # two objects of one process
        for place, seed in (("a", 1), ("b", 2), ("a", 3)):
            own = Checkpoints(f"{folder}/{place}", keep=1)
            own.prepare()
            own.save(seed, arrays(seed), {"at": seed})
            same = digest(own.read_arrays(seed, arrays(0))) == digest(arrays(seed))
            out[place] = [own.latest(), same]
        out["left"] = list(hosts.client().list("rljax/checkpoint/"))
    elif what == "fail":  # of the last host alone
        checkpoints.save(4, arrays(4), {"at": 4})
        if hosts.index() == hosts.count() - 1:
            brittle.FAULTS["broken"] = 1
        checkpoints.start_save(5, arrays(5), {"at": 5})
        checkpoints.wait()
    else:
        warnings.simplefilter("ignore")
        while True:
            out["step"] = checkpoints.latest()
            try:
                tree = checkpoints.read_arrays(out["step"], arrays(0))
                break
            except pieces.Damaged as error:
                out["damage"] = str(error)
        out["digest"], out["at"] = digest(tree), checkpoints.read_state(out["step"])["at"]
except InputError as error:
    out["error"] = str(error)
print(json.dumps(out), flush=True)
hosts.wait("end")
"""


def run(hosts: int, devices: int, what: str, folder, bucket) -> list[dict]:
    ended = all_well(on_hosts(hosts, devices, ["-c", SCRIPT, what, folder], BRITTLE=str(bucket)))
    return [json.loads(host.out.splitlines()[-1]) for host in ended]


@pytest.fixture(scope="module", params=["disk", "store"])
def saved(request, tmp_path_factory):
    """(folder, folder of the store, what was saved) of four hosts with two devices each."""
    bucket = tmp_path_factory.mktemp(request.param)
    folder = str(bucket / "run") if request.param == "disk" else "brittle://run"
    told = run(4, 2, "save", folder, bucket)
    assert [host["host"] for host in told] == [0, 1, 2, 3] and "error" not in str(told)
    assert all(host["parts"] for host in told)  # each writes some of it
    return folder, bucket, told[0]["digests"]


pytestmark = pytest.mark.hosts


@pytest.mark.parametrize(("hosts", "devices"), [(1, 8), (2, 4), (8, 1), (2, 1)])
def test_other_hosts_read_the_same_bits(saved, hosts, devices):
    folder, bucket, digests = saved
    assert sorted(p.name for p in (bucket / "run").iterdir()) == ["00000002", "00000003"]
    for host in run(hosts, devices, "read", folder, bucket):
        assert (host["step"], host["at"], host["digest"]) == (3, 3, digests["3"])


def test_damage_that_one_host_reads_sends_all_to_the_step_before(saved, tmp_path):
    folder, bucket, digests = saved
    copy = shutil.copytree(bucket, tmp_path / "copy")
    here = folder.replace(str(bucket), str(copy))
    pattern = "arrays/0003-*.bin" if "://" in folder else "arrays/ocdbt.process_3/d/*"
    file = max((copy / "run/00000003").glob(pattern), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for host in run(2, 4, "read", here, copy):
        assert (host["step"], host["digest"]) == (2, digests["2"])
        assert Path(file).name in host.get("damage", file.name)


@pytest.mark.parametrize("kind", ["disk", "disk, a name that is globbed", "store"])
def test_saves_of_two_objects_in_one_process_are_whole(kind, tmp_path):
    name = "[run]" if "globbed" in kind else "run"
    folder = "brittle://run" if kind == "store" else str(tmp_path / name)
    for host in run(2, 2, "twice", folder, tmp_path):
        assert host["a"] == [3, True] and host["b"] == [2, True], host
        assert len(host["left"]) <= 4, host  # not one key for each save and host


def test_a_host_that_cannot_write_fails_the_save_on_all(tmp_path):
    told = run(2, 1, "fail", "brittle://run", tmp_path)
    for host in told:
        assert "the checkpoint of step 5 could not be written" in host["error"]
        assert "503 the service is not available" in host["error"]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["00000004"]
