"""The learning program that is compiled while the first batch is sampled is the one that is run."""

import jax
import pytest
from conftest import lanes
from feature_settings import SETTINGS, allowed, write_folders
from tiny_run import tiny_config

from rljax import setup as build
from rljax.tracking import compiles
from rljax.training.loop import one_step
from rljax.training.run import Run

QUICK = ("adapters",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Models and rows, where a case that was asked for reads some."""
    folder = tmp_path_factory.mktemp("models")
    cases = (getattr(item, "callspec", None) for item in request.session.items)
    names = {case.params.get("name") for case in cases if case is not None}
    if any("FOLDER" in str(SETTINGS.get(name)) for name in names - {None}):
        write_folders(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(QUICK, [name for name in SETTINGS if name not in QUICK]))
def test_a_phase_compiles_its_learning_program_once(folder, tmp_path, name):
    config = allowed((name,), str(folder))
    if config is None:
        pytest.skip("runs beside another feature alone")
    apart = config.placement or config.rollouts.sampler_devices
    assert_compiles_once(config, tmp_path, 2 if apart else 1)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["gdpo(weights=(1.0,))", "group_relative()"])
def test_parts_of_a_reward_are_an_input_where_something_reads_them(tmp_path, advantage):
    reward = "with_cost(reward='exact_match()', cost=\"regex_match(pattern='..')\")"
    fields = dict(reward__function=reward, algorithm__advantage=advantage)
    config = tiny_config(tmp_path, sft__steps=0, evaluate__prompts=0, **fields)
    assert_compiles_once(config, tmp_path, 1)


def assert_compiles_once(config, folder, devices: int):
    """Of the learning program: ahead, and not in the step."""
    compiles.watch()
    with Run(build.build(config, jax.devices()[:devices]), folder) as run:
        run.begin(run.phase, build.initial_params(config, run.setup.model))
        before = compiles.count()
        counted = one_step(run)["learning_programs"]
        flow = f"jit({run.phase.dataflow.function.__name__})"
        assert compiles.names(before, ahead=False).count(flow) == 0
        assert compiles.names(before).count(flow) == counted <= 1
