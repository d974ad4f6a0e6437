"""A run that was written before the rooms moved goes on as if nothing had happened.

run_before_the_rooms_moved.tar.gz holds step 1 of a run of two steps, with components named by
modules that have moved since (`rljax.data.tasks.letters`, `rljax.rollout.collect`), and
expected.jsonl, the metrics of both steps as that version had them."""

import json
import tarfile
from pathlib import Path

import pytest
from tiny_run import RATES, metrics_rows

from rljax.config import from_dict
from rljax.training import train

EARLIER = Path(__file__).with_name("run_before_the_rooms_moved.tar.gz")


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    with tarfile.open(EARLIER) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "run"
    config = from_dict(json.loads((folder / "config.json").read_text()), "config.json")
    config.run_dir, config.compilation_cache = str(folder), ""
    assert config.algorithm.collect == "rljax.rollout.collect.once()"
    train(config)
    expected = [json.loads(line) for line in (tmp_path / "expected.jsonl").read_text().splitlines()]
    rows = metrics_rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    for got, want in zip(rows, expected, strict=True):
        shared = [name for name in got if name in want and name not in RATES]
        assert len(shared) > 30 and "reward/mean" in shared and "loss" in shared
        for name in shared:
            if isinstance(want[name], str):
                assert got[name] == want[name]
            elif not name.startswith(("time/", "memory/")):
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
