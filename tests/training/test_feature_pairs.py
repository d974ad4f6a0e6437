"""Every two features that do not exclude each other run together: two steps of the tiny model."""

import jax
import pytest
from feature_settings import SETTINGS, UNREAD, allowed, run, run_every_pair, write_folders

from rljax import setup as build
from rljax.setup.dry_run import check_fields_read


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


@pytest.mark.slow
def test_what_a_dataflow_does_not_read(tmp_path):
    """UNREAD says it, of the fields of config.algorithm that turn a feature on."""
    write_folders(tmp_path)
    ways = [way for ways in SETTINGS.values() for way in ways]
    fields = {field.removeprefix("algorithm.") for way in ways for field in way}
    flows = {}
    for name in SETTINGS:
        config = allowed((name,), str(tmp_path))
        if config is not None:
            flows.setdefault(config.dataflow.partition("(")[0], config)
    for flow, config in flows.items():
        unread = check_fields_read(build.build(config, jax.devices()[:1]))
        unread = {field.removeprefix("algorithm.") for field in unread} & fields
        assert unread - {"preference_loss"} == UNREAD.get(flow, set()), flow
