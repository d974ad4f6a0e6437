"""Six steps of TRL's trainers, replayed by our programs: losses, gradient norms and final weights.

Those of tests/golden, and of $RLJAX_GOLDEN where that names others."""

import jax
import pytest
from trl_runs import STARTS, read_run, recorded_runs, replay

from rljax.mesh import make_mesh

RUNS = recorded_runs()


# Of samples. (Of pairs the loss is compared in tests/losses, and online_dpo learns by it.)
QUICK = ("golden/grpo",)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_six_steps_equal_trl(name):
    replay(read_run(RUNS[name]), make_mesh(1, 1, 1, devices=jax.devices()[:1]))


def test_every_trainer_has_a_run():
    assert {read_run(path).trainer for path in RUNS.values()} == STARTS.keys()
