"""The learning program that is compiled while the first batch is sampled is the one that is run."""

import jax
import pytest
from conftest import lanes
from feature_settings import SETTINGS, allowed, write_folders

from rljax import setup as build
from rljax.tracking import compiles
from rljax.training.loop import one_step
from rljax.training.run import Run

QUICK = ("filters", "adapters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_folders(folder)
    return folder


@pytest.mark.parametrize("name", lanes(QUICK, [name for name in SETTINGS if name not in QUICK]))
def test_a_phase_compiles_its_learning_program_once(folder, tmp_path, name):
    config = allowed((name,), str(folder))
    if config is None:
        pytest.skip("runs beside another feature alone")
    compiles.watch()
    apart = config.placement or config.rollouts.sampler_devices
    with Run(build.build(config, jax.devices()[: 2 if apart else 1]), tmp_path) as run:
        run.begin(run.phase, build.initial_params(config, run.setup.model))
        before = compiles.count()
        counted = one_step(run)["learning_programs"]
        flow = f"jit({run.phase.dataflow.function.__name__})"
        assert compiles.names(before, ahead=False).count(flow) == 0
        assert compiles.names(before).count(flow) == counted <= 1
