"""Weights on several hosts: each host reads its share of the files, and hashes its share."""

import hashlib
import json

import pytest
from on_hosts import all_well, on_hosts
from safetensors.numpy import load_file
from tiny_folders import CONFIGS, one_device, tensors_of, write_folder

from rljax.models.model import Model

LOADS = {
    "qwen3": dict(fsdp=8),  # splits columns of most tensors
    "qwen3_moe": dict(data=2, fsdp=1, expert=4),  # replicas, and a tensor for each expert
    "gpt_oss": dict(fsdp=4, tensor=2),
}
SCRIPT = """
import dataclasses, json, sys
from tiny_folders import CONFIGS
import rljax.models.huggingface.load as load
from rljax import hosts
from rljax.mesh import make_mesh
from rljax.models.huggingface import blocks
from rljax.models.model import Model

hosts.start(60)
read, count, hashed = [], load.read_bytes, []
load.read_bytes = lambda file, path, begin, out: read.append(out.nbytes) or count(
    file, path, begin, out)
record = load.checkpoint_folder.record
load.checkpoint_folder.record = lambda path: hashed.append(path.name) or record(path)
for name, mesh in json.loads(sys.argv[2]).items():
    model = Model(CONFIGS[name], make_mesh(**mesh))
    read.clear(), hashed.clear()
    params, report = load.load_with_report(f"{sys.argv[1]}/{name}", model)
    total, files = sum(read), {k: dataclasses.asdict(v) for k, v in report.files.items()}
    print(json.dumps({"read": total, "hashed": hashed, "files": files}))
    blocks.BLOCK_BYTES = 2100  # every tensor in several blocks, the last of them overlapping
    again = load.load_params(f"{sys.argv[1]}/{name}", model)
    blocks.BLOCK_BYTES = 16 * 2**20
    load.save_params(f"{sys.argv[1]}/{name}_again", model, params)
    load.save_params(f"{sys.argv[1]}/{name}_blocks", model, again)
"""


@pytest.mark.hosts
def test_each_host_reads_its_share_and_all_weights_arrive(tmp_path):
    tensors = {}
    for name in LOADS:
        model = Model(CONFIGS[name], one_device())
        tensors[name] = tensors_of(model)
        write_folder(tmp_path / name, model, tensors[name], files=3)
    ends = all_well(on_hosts(4, 2, ["-c", SCRIPT, tmp_path, json.dumps(LOADS)]))
    said = [[json.loads(line) for line in end.out.splitlines() if line[:1] == "{"] for end in ends]
    for i, (name, expected) in enumerate(tensors.items()):
        each = [lines[i] for lines in said]
        whole = sum(x.nbytes for x in expected.values())
        # Every byte once, but for tensors with fewer rows than devices: gpt_oss's sinks.
        assert all(whole / 4 <= host["read"] < 1.001 * whole / 4 for host in each)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        records = {
            p.name: {
                "bytes": p.stat().st_size,
                "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
            }
            for p in files
        }
        assert all(host["files"] == records for host in each)
        assert [len(host["hashed"]) for host in each] == [1, 1, 1, 0] and len(files) == 3
        for folder in ("again", "blocks"):
            saved = load_file(tmp_path / f"{name}_{folder}" / "model.safetensors")
            assert saved.keys() == expected.keys()
            assert all(saved[k].tobytes() == x.tobytes() for k, x in expected.items())
