"""The recipes of docs/guides/mismatch.md run: weights of tokens on DAPO (DAPO with TIS), of
sequences on GSPO."""

import re

import pytest
from conftest import REPO
from tiny_run import metrics_rows, train_on_one

from rljax.config.flags import load_config_file

pytestmark = pytest.mark.slow
COMMAND = re.compile(r"--config=(\S+:tiny) --config\.algorithm\.correction=\"([^\"]+)\"")


def recipes() -> list[tuple[str, str]]:
    text = (REPO / "docs" / "guides" / "mismatch.md").read_text()
    return COMMAND.findall(text)


def test_the_page_has_a_recipe_of_each_level():
    assert [name for name, _ in recipes()] == [
        "configs/presets/dapo.py:tiny",
        "configs/presets/gspo.py:tiny",
    ]
    assert ["token" in text or "sequence" in text for _, text in recipes()] == [True, True]


@pytest.mark.parametrize("name, correction", recipes(), ids=[name for name, _ in recipes()])
def test_a_recipe_trains(name, correction, tmp_path):
    """003-39, 003-48: weights are near 1, as sampler and trainer have one precision, and nothing is
    vetoed or cut; the metrics of the level are there."""
    config = load_config_file(str(REPO / name))
    config.algorithm.correction = correction
    config.steps, config.trackers, config.export = 3, (), False
    config.run_dir = str(tmp_path / "run")
    summary = train_on_one(config)
    assert summary["status"] == "finished" and not summary["faults"].get("skipped_steps")
    rows = [row for row in metrics_rows(tmp_path / "run") if row["phase"] == "rl"]
    assert len(rows) == 3
    for row in rows:
        assert row["mismatch/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["mismatch/rollout_is_eff_sample_size"] > 0.99
        assert row["mismatch/rollout_is_ratio_fraction_high"] == 0.0
