"""Learning from files on several hosts: the numbers of one process, whatever the hosts."""

import json
from pathlib import Path

import numpy as np
import pytest
from on_hosts import all_well, on_hosts
from safetensors.numpy import load_file
from tiny_offline import offline_config
from tiny_run import metrics_rows

from rljax.config import to_dict

HELPER = "tests/helpers/train_configs.py"
SHARED = dict(steps=2, evaluate__every_steps=1, evaluate__prompts=8, export=True)
CASES = {
    "sft": ("examples", "sft", dict(batch__packing=True)),
    "dpo": ("pairs", "preference", dict(offline__reference_logprobs="reference")),
    "reward_model": ("pairs", "reward_model", {}),
    "lora": ("pairs", "preference", dict(lora__rank=4, lora__targets=("q_proj", "down_proj"))),
}
FEW = ("sft", "dpo")  # of four devices
# Hosts and devices of each. A sum over two devices has one order. Over four the collectives of one
# process add in the order of the devices, and gloo, between processes, in a ring or by pairs.
TWO, FOUR = ((1, 2), (2, 1)), ((1, 4), (2, 2), (4, 1))


def config_files(folder, names=tuple(CASES)) -> list[str]:
    """A config.json for each of the cases; their runs write into `folder`."""
    folder.mkdir()
    files = []
    for name in names:
        kind, dataflow, fields = CASES[name]
        fields = SHARED | fields
        if "offline__reference_logprobs" in fields:
            fields["offline__reference_logprobs"] = str(folder / "reference")
        config = offline_config(folder, kind, dataflow, name, **fields)
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(to_dict(config)))
    return [str(file) for file in files]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(hosts, devices of each) -> the folder with a run of each case, and what the hosts said."""
    top, out = tmp_path_factory.mktemp("runs"), {}
    for count, devices in (*TWO, *FOUR):
        folder = top / f"{count}x{devices}"
        files = config_files(folder, tuple(CASES) if (count, devices) in TWO else FEW)
        # As many threads for a product in every process: its order is theirs, too.
        ends = on_hosts(count, devices, [HELPER, *files], timeout_s=600, NPROC="4")
        out[count, devices] = folder, all_well(ends)
    return out


def weights(run) -> dict:
    folder = run / ("policy" if (run / "policy").is_dir() else "reward_model")
    return load_file(folder / "model.safetensors")


def numbers(rows: list[dict]) -> np.ndarray:
    """All numbers of all rows."""
    return np.array([[x for x in row.values() if isinstance(x, float)] for row in rows])


def same(one, other) -> None:
    """Two runs have bitwise the same metrics and weights."""
    assert metrics_rows(one) == metrics_rows(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert [key for key, x in first.items() if second[key].tobytes() != x.tobytes()] == []


@pytest.mark.hosts
@pytest.mark.parametrize("name", CASES)
def test_two_hosts_are_one_process_bitwise(runs, name):
    same(*(runs[layout][0] / name for layout in TWO))
    assert len(metrics_rows(runs[1, 2][0] / name)) == 2


@pytest.mark.hosts
@pytest.mark.parametrize("name", FEW)
def test_four_devices_whatever_their_hosts(runs, name):
    alone, two, four = (runs[layout][0] / name for layout in FOUR)
    same(two, four)
    one, more = metrics_rows(alone), metrics_rows(two)
    assert [row.keys() for row in one] == [row.keys() for row in more]
    np.testing.assert_allclose(numbers(more), numbers(one), rtol=2e-5, atol=1e-6)
    others = weights(two)
    for key, x in weights(alone).items():
        np.testing.assert_allclose(others[key], x, atol=1e-6, err_msg=key)


@pytest.mark.hosts
def test_the_first_host_writes_and_all_return_the_same(runs):
    for (count, _), (folder, ends) in runs.items():
        said = [
            [json.loads(line) for line in end.out.splitlines() if line[:1] == "{"] for end in ends
        ]
        assert len(said) == count and all(lines == said[0] for lines in said)
        assert all(line["summary"]["status"] == "finished" for line in said[0])
        for line in said[0]:
            run = Path(line["folder"])
            written = {path.name for path in run.iterdir()}
            assert {"config.json", "summary.json", "report.html", "metrics.jsonl"} <= written
            assert not list(run.glob(".*")) and not list((run / "hosts").glob("token"))
            assert len((run / "starts.jsonl").read_text().splitlines()) == 1
        assert len(list((folder / "reference").iterdir())) == 1
    assert (runs[2, 1][0] / "lora" / "adapter" / "adapter_model.safetensors").is_file()


FULL_DISK = """
import errno, json, runpy, sys
from rljax import hosts
from rljax.models.huggingface import load
hosts.start(60)
write, written = load.write_bytes, []
def full(file, begin, data):
    written.append(begin)
    if len(written) > 4:
        raise OSError(errno.ENOSPC, "No space left on device")
    write(file, begin, data)
load.write_bytes = full  # of the first host alone is it called
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps({"writes": len(written)}))
"""


@pytest.mark.hosts
def test_a_disk_that_is_full_at_the_export_leaves_no_host_alone(tmp_path):
    files = config_files(tmp_path / "runs", ("sft",))
    ends = all_well(on_hosts(2, 1, ["-c", FULL_DISK, HELPER, *files]))
    said = [[json.loads(line) for line in end.out.splitlines() if line[:1] == "{"] for end in ends]
    assert [lines[1]["writes"] for lines in said] == [5, 0]
    for lines in said:
        status = lines[0]["summary"]["status"]
        assert status.startswith("finished; the exported model could not be written")
        assert "No space left" in status
    run = tmp_path / "runs" / "sft"
    assert not (run / "policy").exists() and (run / "report.html").is_file()
