"""rljax.train: a run from Python, by a Config or by the fields of one."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from rljax import hosts
from rljax.config import Config
from rljax.config.from_python import config_from
from rljax.config.trust import require_trust
from rljax.errors import InputError
from rljax.training import loop
from rljax.training.result import RunStopped, TrainedRun
from rljax.validation.unread import unread


def train(
    config: Config | str = "",
    *,
    model: str | Path | None = None,
    data: str | Path | Callable | Sequence[Mapping] | Mapping | None = None,
    reward: str | Callable | Mapping | None = None,
    on_start: Callable[[Path | str], None] | None = None,
    devices: Sequence | None = None,
    trust_code: bool = False,
    **fields,
) -> TrainedRun:
    """Runs a config to its end (resuming if run_dir holds checkpoints), on `devices` (default: all
    there are); returns the run: its folder, summary, metrics, report and policy.

    `config` is a Config or the name of one, as --config takes it; without it the rest is set on the
    defaults. `model` is a folder, a name of the hub or "decoder(layers=2)". `data` is a file, a
    name of the hub, a task, a function that returns one, or a list of rows. `reward` is the name of
    a function or a function, of a notebook's cell, too. `fields` are fields of the config:

        rljax.train("quickstart", steps=20, samples_per_prompt=16, actor_optimizer={"lr": 1e-3})

    A config in JSON or YAML, or of a run folder, may be a stranger's: what it names of others runs
    only with `trust_code`, or where the run began on this machine.

    Raises InputError for anything the user can fix, before the first compile wherever that is
    possible. A run that SIGTERM, SIGHUP or Ctrl-C stops saves and raises RunStopped, which ends a
    script that does not catch it, so that nothing goes on from a half-trained policy.
    """
    if devices is not None:
        _check_devices(devices)
    if not isinstance(config, Config) and str(config):
        require_trust(str(config), trust_code)
    made = config_from(config, model, data, reward, fields, unread)
    try:
        return loop.train(made, on_start=on_start, devices=devices)
    except RunStopped as stop:
        if hosts.first():  # of a SystemExit with a code Python says nothing
            print(stop, file=sys.stderr, flush=True)
        raise


def _check_devices(devices: object) -> None:
    listed = isinstance(devices, Sequence | np.ndarray) and len(devices)
    if not listed or not all(isinstance(device, jax.Device) for device in devices):
        rule, fix = "a list of JAX's devices, one or more", "devices=jax.devices()[:4]"
        raise InputError("devices", value=devices, rule=rule, fix=fix)
