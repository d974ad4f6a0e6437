"""A run that was written before the rooms moved goes on as if nothing had happened.

run_before_the_rooms_moved.tar.gz holds step 1 of a run of two steps, with components named by
modules that have moved since (`rljax.data.tasks.letters`, `rljax.rollout.collect`), and, as that
version had them, the metrics of both steps in expected.jsonl and their samples in samples.jsonl.

Bit by bit equal on every machine: the arrays and the state that are loaded, and every sample of
the step after, with its prompt, text and score, so the order of the data and the random keys.
Metrics of compiled programs are equal bit by bit where they were recorded, by one process without
XLA_FLAGS, with jaxlib 0.10.2 on the CPU of RECORDED_ON: XLA compiles for the instructions of a CPU
and divides sums among its cores, and the flags of these tests change the order of a sum, too.
Elsewhere they are equal to 1e-4.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import pytest
from tiny_run import RATES, checkpoint_bytes, flat_bytes, metrics_rows

from rljax import setup as build
from rljax.config import from_dict
from rljax.errors import InputError
from rljax.training import train
from rljax.training.progress import Progress
from rljax.training.run import Run

EARLIER = Path(__file__).with_name("run_before_the_rooms_moved.tar.gz")
RECORDED_ON = ("0.10.2", "ae691069b43d55c6")
GOES_ON = """
import json, sys
from pathlib import Path
from rljax.config import from_dict
from rljax.training import train

folder = Path(sys.argv[1])
config = from_dict(json.loads((folder / "config.json").read_text()), "config.json")
config.run_dir, config.compilation_cache = str(folder), ""
train(config)
"""


def this_machine() -> tuple[str, str]:
    """The version of jaxlib, and a digest of the CPU's model, instructions and number of cores."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return jax.lib.__version__, ""
    first = info.read_text().split("\n\n")[0].splitlines()
    names = ("vendor_id", "cpu family", "model", "stepping", "flags")
    lines = [line for line in first if line.split("\t")[0].strip(" :") in names]
    cores = len(os.sched_getaffinity(0))
    digest = hashlib.sha256("\n".join([*lines, str(cores)]).encode()).hexdigest()[:16]
    return jax.lib.__version__, digest


@pytest.fixture
def earlier(tmp_path):
    """(the run folder, its config, the folder unpacked once more, as it was)."""
    for folder in ("now", "then"):
        with tarfile.open(EARLIER) as packed:
            packed.extractall(tmp_path / folder, filter="data")
    folder = tmp_path / "now" / "run"
    config = from_dict(json.loads((folder / "config.json").read_text()), "config.json")
    config.run_dir, config.compilation_cache = str(folder), ""
    assert config.algorithm.collect == "rljax.rollout.collect.once()"
    return folder, config, tmp_path / "then"


def expected_rows(then: Path) -> list[dict]:
    return [json.loads(line) for line in (then / "expected.jsonl").read_text().splitlines()]


def shared_names(got: dict, want: dict) -> list[str]:
    """The metrics of a step that both versions log, without those of the clock and the memory."""
    names = [name for name in got if name in want and name not in RATES]
    names = [name for name in names if not name.startswith(("time/", "memory/"))]
    assert len(names) > 30 and "reward/mean" in names and "loss" in names
    return names


@pytest.mark.slow
def test_what_is_loaded_is_what_was_saved(earlier):
    """Arrays bit by bit, the position in the data, and the next prompts."""
    folder, config, then = earlier
    with Run(build.build(config, jax.devices()[:1]), folder) as run:
        run.load(1)
        arrays = flat_bytes(build.role_arrays(run.roles))
        state = json.loads((folder / "checkpoints" / "00000001" / "state.json").read_text())
        assert run.source.get_state() == state["sources"]["rl"]
        progress = dataclasses.asdict(run.progress)
        prompts = [record.prompt_text for record in run.source.draw(4).records]
    saved = checkpoint_bytes(then / "run", 1)
    assert sorted(arrays.values()) == sorted(saved.values()) and len(saved) > 30
    assert {name: progress[name] for name in state["progress"]} == state["progress"]
    samples = [
        json.loads(line) for line in (then / "run" / "samples.jsonl").read_text().splitlines()
    ]
    of_step = [row["prompt"] for row in samples if row["step"] == 2]
    assert of_step and {*of_step} <= {*prompts}


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on(earlier):
    """Samples are equal byte by byte; metrics of programs that were compiled by other flags to
    1e-4."""
    folder, config, then = earlier
    train(config)
    assert (folder / "samples.jsonl").read_bytes() == (then / "run" / "samples.jsonl").read_bytes()
    rows, expected = metrics_rows(folder), expected_rows(then)
    assert [row["step"] for row in rows] == [1, 2]
    for got, want in zip(rows, expected, strict=True):
        for name in shared_names(got, want):
            if isinstance(want[name], str):
                assert got[name] == want[name]
            else:
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.skipif(
    this_machine() != RECORDED_ON,
    reason=f"recorded with another jaxlib or CPU than {this_machine()}, whose sums may differ in "
    "the last bits",
)
def test_where_it_was_recorded_it_goes_on_bit_by_bit(earlier, tmp_path):
    folder, _, then = earlier
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # of these tests
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", GOES_ON, str(folder)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "samples.jsonl").read_bytes() == (then / "run" / "samples.jsonl").read_bytes()
    rows, expected = metrics_rows(folder), expected_rows(then)
    for got, want in zip(rows, expected, strict=True):
        names = shared_names(got, want)
        assert {name: got[name] for name in names} == {name: want[name] for name in names}


def test_progress_lacks_no_field_but_those_that_were_added_since():
    saved = dataclasses.asdict(Progress("rl", {"rl": 2}))
    earlier = {name: value for name, value in saved.items() if not name.startswith("pass_at_k")}
    assert len(earlier) == len(saved) - 2
    assert Progress.from_dict(earlier) == Progress.from_dict(saved)
    for other in ({**earlier, "more": 1}, {n: x for n, x in earlier.items() if n != "taken"}):
        with pytest.raises(InputError, match="another version of rljax: got (.'more'.|.'taken'.);"):
            Progress.from_dict(other)
