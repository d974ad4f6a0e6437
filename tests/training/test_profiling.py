"""Profiles of single steps: which are recorded, by which host, and the port of live captures."""

import socket

import jax
import jax.numpy as jnp
import pytest

from rljax.config import Config
from rljax.errors import InputError
from rljax.training.profiling import FOLDER, Profile
from rljax.validation import validate


def recorded(folder) -> list[int]:
    """The steps that the profiles of a run folder hold."""
    steps = []
    for path in sorted((folder / FOLDER).rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                steps += [
                    dict(event.stats)["step_num"] for event in line.events if event.name == "train"
                ]
    return sorted(steps)


def run_steps(config, folder, steps) -> None:
    with Profile(config, folder) as profile:
        for number in steps:
            with profile.step(number):
                jax.block_until_ready(jnp.ones(4) + number)


@pytest.mark.parametrize(
    "asked, taken, wanted",
    [
        ((2, 3), range(1, 5), [2, 3]),
        ((2, 9), range(1, 5), [2, 3, 4]),  # the run ends before the profile does
        ((2, 6), range(5, 8), [5, 6]),  # a run that is resumed in between
        ((), range(1, 3), []),
    ],
)
def test_the_steps_that_are_asked_for_are_recorded(asked, taken, wanted, tmp_path):
    run_steps(Config(profile_steps=asked), tmp_path, taken)
    assert recorded(tmp_path) == wanted
    assert (tmp_path / FOLDER).exists() == bool(wanted)


@pytest.mark.slow
def test_a_step_that_raises_leaves_its_profile_and_no_profiler_running(tmp_path):
    with pytest.raises(ZeroDivisionError), Profile(Config(profile_steps=(1, 5)), tmp_path) as one:
        with one.step(1):
            raise ZeroDivisionError
    assert list((tmp_path / FOLDER).rglob("*.xplane.pb"))
    run_steps(Config(profile_steps=(1, 1)), tmp_path / "next", [1])  # else: only one may run
    assert recorded(tmp_path / "next") == [1]


def test_live_captures_are_answered_while_the_run_is_open(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"profile_port.*{port}"):
            with Profile(Config(profile_port=port), tmp_path):
                pass
    for _ in range(2):  # a second run of the same process, too
        with Profile(Config(profile_port=port), tmp_path):
            socket.create_connection(("127.0.0.1", port), timeout=30).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("profile_steps", (3,)),
        ("profile_steps", (5, 4)),
        ("profile_steps", (0, 1)),
        ("profile_port", 70000),
        ("profile_hosts", 0),
        ("profile_hosts", -2),
    ],
)
def test_what_cannot_be_profiled_is_refused(field, value):
    config = Config(model="decoder(layers=1)", **{field: value})
    config.data.train = "sort_digits()"
    with pytest.raises(InputError, match=rf"{field}=\(?{str(value).strip('(),')[:1]}"):
        validate(config)
