"""rljax plan --simulate: where its seconds come from, what it prints and what it refuses."""

import functools
import json

import numpy as np
import pytest
from test_plan import ONE_LAYER, tiny

from rljax.command.launch import ConfigSource
from rljax.command.plan import main
from rljax.config.declare import check_options
from rljax.config.run_options import PlanOptions
from rljax.errors import InputError
from rljax.plan import chips, draws
from rljax.plan.compiled import make_plan
from rljax.plan.expected import modes
from rljax.plan.seconds import counted, fitted, learning_passes, measured
from rljax.plan.simulate import Load, Seconds, simulate
from rljax.setup.abstract import abstract_setup

LENGTHS = "geometric(mean=8, cap=22)"


def options(**fields) -> PlanOptions:
    made = PlanOptions(**{"simulate": True, "lengths": LENGTHS, "etas": (0, 1), **fields})
    check_options(made)
    return made


def printed(capsys, tmp_path, **fields) -> tuple[str, dict]:
    out = tmp_path / "plan.json"
    config = tiny(sampler__slots=8, mesh__fsdp=1, mesh__tensor=1, mesh__data=8)
    assert main(options(json=str(out), **fields), ConfigSource(None, {}, config)) == 0
    return capsys.readouterr().out, json.loads(out.read_text())


def test_flags_say_the_seconds(capsys, tmp_path):
    text, told = printed(capsys, tmp_path, decode_step_s=0.02, decode_idle_s=0.01, learn_s=3.0)
    assert "16 prompts x 2 in 8 slots" in text and "as the flags say" in text
    assert "not validated" not in text and "eta 1, ahead 1" in text
    assert (
        told["seconds"]["0"] | {"step_s": 0.02, "idle_s": 0.01, "learn_s": 3.0}
        == (told["seconds"]["0"])
    )
    # Four of eight devices: each half takes twice as long.
    assert told["seconds"]["4"]["step_s"] == 0.04 and told["seconds"]["4"]["learn_s"] == 6.0
    first, second = (one for one in told["modes"] if not one["sampling"])
    assert (first["max_staleness"], second["max_staleness"]) == (0, 1)
    assert first["step_s"] > second["step_s"] > 3.0 and second["ages"][1] > 0


def test_a_chip_says_them_and_that_nothing_was_measured(capsys, tmp_path):
    text, told = printed(capsys, tmp_path, topology="v5e:2x4")
    assert "of v5e:2x4" in text and "not validated" in text
    assert 0 < told["seconds"]["0"]["idle_s"] <= told["seconds"]["0"]["step_s"]
    # So many of eight devices sample as divide the slots, and the others learn.
    assert set(told["seconds"]) == {"0", "1", "2", "4"}
    whole, half = told["seconds"]["0"], told["seconds"]["4"]
    assert half["learn_s"] == pytest.approx(2 * whole["learn_s"])
    assert whole["step_s"] <= half["step_s"] <= 2 * whole["step_s"]
    assert {row["sampling"] for row in told["modes"]} == {0, 1, 2, 4}
    assert "balance" in text and "4 sample + 4 learn" in text


@pytest.mark.slow
def test_learning_is_what_the_compiler_counts():
    """At full length, the compute of the compiled program; shorter responses take their share."""
    config = tiny(model=ONE_LAYER, mesh__fsdp=1, mesh__tensor=1, mesh__data=8)
    devices, chip = chips.local_devices()[0], chips.TPUS["v5e"]
    setup = abstract_setup(config, devices)
    passes = learning_passes(setup)
    [learn] = make_plan(config, devices, chip, "8 x cpu", only=("learn",)).reports
    assert passes / 8 / chip.flops_per_s == pytest.approx(learn.seconds["compute"], rel=1e-6)
    whole = counted(setup, chip, passes, [22] * 4)
    assert whole.learn_s == pytest.approx(learn.seconds["compute"])
    half = counted(setup, chip, passes, [11] * 4)
    share = 21 / 32 if setup.algorithm.steps.packing is not None else 1.0
    assert half.learn_s == pytest.approx(share * whole.learn_s)
    assert half.step_s < whole.step_s and half.idle_s == pytest.approx(whole.idle_s)


def test_a_run_says_them(tmp_path):
    """0.5 s a dispatch and 0.01 s a decode step, whatever steps of each; three that compile."""
    rng = np.random.default_rng(0)
    rows = []
    for step in range(12):
        dispatches, decoded = int(rng.integers(3, 9)), int(rng.integers(40, 200))
        rows.append(
            {
                "step": step,
                "phase": "rl",
                "slots/dispatches": dispatches,
                "slots/decode_steps": decoded,
                "time/learn_s": 2.0,
                "time/rest_s": 0.25,
                "time/generate_s": 0.5 * dispatches + 0.01 * decoded + 60.0 * (step < 3),
            }
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = measured(str(tmp_path))
    assert found.dispatch_s == pytest.approx(0.5) and found.step_s == pytest.approx(0.01)
    assert found.learn_s == pytest.approx(2.25) and found.idle_s == found.step_s
    # Where both grow together there is no telling them apart.
    both = fitted([1, 2, 4], [32, 64, 128], [3.2, 6.4, 12.8], [1.0])
    assert 4 * both.dispatch_s + 128 * both.step_s == pytest.approx(12.8)
    with pytest.raises(InputError, match="slots/decode_steps"):
        measured(str(tmp_path / "none"))


def test_every_bound_is_compared_once_on_one_mesh_and_split():
    assert [(m.max_staleness, m.ahead) for m in modes((0, 1, 4), (2, 1), ())] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (4, 2),
        (4, 4),
    ]
    split = [m for m in modes((1,), (0, 0), (3, 5)) if m.sampling]
    assert [(m.max_staleness, m.ahead, m.sampling) for m in split] == [(1, 1, 3), (1, 1, 5)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(lengths=""), "--lengths=: needed by --simulate"),
        (dict(simulate=False, tools=LENGTHS), "--simulate reads it"),
        (dict(simulate=False, etas=(3,)), "--simulate reads it"),
        (dict(tools=LENGTHS), "tools are called between turns"),
        (dict(decode_step_s=0.1), "--learn_s=None: --decode_step_s and --learn_s go together"),
        (dict(learn_s=1.0), "--decode_step_s=None"),
        (dict(decode_step_s=0.1, learn_s=1.0, decode_idle_s=0.2), "at most --decode_step_s"),
        (dict(decode_step_s=0.1, learn_s=1.0, measured="runs/a"), "either this"),
        (dict(etas=(100,)), "at most 64 steps"),
        (dict(search=True), "not with --simulate"),
        (dict(decode_step_s=-1.0, learn_s=1.0), "must be > 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(fields, words):
    with pytest.raises(InputError) as error:
        options(**fields)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(lengths="normal(mean=3)"), "--lengths"),
        (dict(lengths="geometric(mean=0)"), "mean of geometric"),
        (dict(lengths="geometric(8)"), "options are keywords"),
        (dict(turns="fixed(value=-2)"), "--turns"),
        (dict(turns="fixed(value=2)", tools="numpy.abs(x=1)"), "--tools"),
        (dict(), "the figures of this device are not known"),
        (dict(measured="nowhere"), "--measured=nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(capsys, tmp_path, fields, words):
    with pytest.raises(InputError) as error:
        printed(capsys, tmp_path, **fields)
    assert words in str(error.value)


def test_a_split_in_proportion_is_no_faster_than_what_it_is_split_of():
    """Of a run whose slots are always live: devices are divided, not multiplied."""
    lengths = functools.partial(draws.fixed, value=64)
    load = Load(8, 8, 16, lengths)
    one = simulate(load, Seconds(0.01, 0.01, 2.56), 2, 2)
    split = simulate(load, Seconds(0.02, 0.02, 5.12), 2, 2, overlap=True)
    assert one.live_share == 1.0 and split.step_s == pytest.approx(one.step_s, rel=0.05)
