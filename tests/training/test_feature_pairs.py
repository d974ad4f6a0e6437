"""Every two features that do not exclude each other run together: two steps of the tiny model."""

import pytest
from feature_settings import run, run_every_pair, write_folders


@pytest.mark.slow
def test_every_pair_that_is_not_excluded_runs(tmp_path):
    """Pairs come in sets of many features, so that some dozens of runs meet all of them."""
    folder = tmp_path / "models"
    folder.mkdir()
    write_folders(folder)
    runs = []

    def two_steps(config):
        runs.append(run(config, tmp_path / f"run{len(runs)}"))

    assert run_every_pair(folder, two_steps) == {}
    assert len(runs) > 20 and all(len(steps) == 2 for steps in runs)
