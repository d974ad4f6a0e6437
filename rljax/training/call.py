"""rljax.train: trains from Python, by a Config or by the fields of one."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from rljax import hosts
from rljax.config import Config
from rljax.config.flags import load_config_file, shipped_config
from rljax.config.from_python import config_from, named
from rljax.config.python_words import in_python
from rljax.config.trust import require_trust
from rljax.errors import InputError
from rljax.setup.default_batch import FIELDS
from rljax.training import loop
from rljax.training.result import RunStopped, TrainedRun
from rljax.validation.unread import unread


def train(
    config: Config | str = "",
    *,
    model: str | Path | None = None,
    data: object = None,
    reward: str | Callable | Mapping | None = None,
    on_start: Callable[[Path | str], None] | None = None,
    devices: Sequence | None = None,
    trust_code: bool = False,
    **fields,
) -> TrainedRun:
    """Runs a config to its end (resuming if run_dir holds checkpoints), on `devices` (default: all
    there are); returns the run: its folder, summary, metrics, report and policy.

        run = rljax.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=dataset, reward=my_reward)
        rljax.train("quickstart", steps=20, samples_per_prompt=16, actor_optimizer={"lr": 1e-3})

    Args:
      config: a Config, or the name or file of one, as --config takes it; without it the rest is set
        on the defaults, and the sizes of a batch are chosen for the model and the devices.
      model: a folder, a name of the hub or "decoder(layers=2)".
      data: rows, as a datasets.Dataset, IterableDataset or DatasetDict (its splits train and test),
        a DataFrame of pandas or polars, a pyarrow Table, a dict of columns, a list of dicts, or an
        iterator of dicts; or a file, a name of the hub, a task, or a function that returns one.
        `test` takes the same, for held-out prompts.
      reward: a function, also of a notebook's cell, the name of one, or a list of them.
      on_start: is called with the run folder.
      devices: such as jax.devices()[:4].
      trust_code: says that a config in JSON or YAML, or of a run folder, may run what it names of
        others. A run that began on this machine does not need it.
      fields: fields of rljax.Config: by name, by the dict of a section, or by the last part of a
        name alone. print(rljax.Config()) shows all of them with their defaults.

    Raises InputError for anything the user can fix, before the first compile wherever that is
    possible. A run that SIGTERM, SIGHUP or Ctrl-C stops saves and raises RunStopped, which ends a
    script that does not catch it, so that nothing goes on from a half-trained policy.
    """
    try:
        with in_python("rljax.train"):
            if devices is not None:
                _check_devices(devices)
            if on_start is not None and not callable(on_start):
                rule, fix = "a function of the run folder", "on_start=print"
                raise InputError("on_start", value=on_start, rule=rule, fix=fix)
            base = config
            if isinstance(config, str | os.PathLike) and str(config):
                base = load_config_file(str(config))
                require_trust(str(config), base, trust_code)
            full_config = config_from(base, model, data, reward, fields, unread)
            set_fields = {name for names, _ in named(fields) for name in names}
            named_config = isinstance(config, str | os.PathLike)
            without = named_config and not str(config)
            unset = [name for name in FIELDS if without and f"batch.{name}" not in set_fields]
            shipped = shipped_config(str(config)) if named_config else None
            return loop.train(
                full_config, on_start=on_start, devices=devices, unset=unset, shipped=shipped
            )
    except RunStopped as stop:
        if hosts.first():  # of a SystemExit with a code Python says nothing
            print(stop, file=sys.stderr, flush=True)
        raise


def _check_devices(devices: object) -> None:
    is_list = isinstance(devices, Sequence | np.ndarray) and len(devices)
    if not is_list or not all(isinstance(device, jax.Device) for device in devices):
        rule, fix = "a list of JAX's devices, one or more", "devices=jax.devices()[:4]"
        raise InputError("devices", value=devices, rule=rule, fix=fix)
    twice = [device for device in devices if list(devices).count(device) > 1]
    if twice:
        rule, fix = "each device stands once", "devices=jax.devices()"
        raise InputError("devices", value=twice, rule=rule, fix=fix)
