"""Profiles of single steps by jax.profiler: `config.profile_steps`, `profile_hosts`, and live
captures at `profile_port`. The files are for xprof: `tensorboard --logdir=RUN_DIR/profile`."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from rljax import hosts
from rljax.config import Config
from rljax.errors import InputError

FOLDER = "profile"


class Profile:
    """Profiles the steps of config.profile_steps into the run folder, `with profile.step(7):`, and
    answers live captures while it is open, on the first config.profile_hosts hosts. Opening it
    raises InputError if profile_port cannot be used. `after_step` is called after each step and is
    not part of a profile."""

    def __init__(self, config: Config, folder: Path, after_step: Callable[[], None] = lambda: None):
        self.after_step = after_step
        profiled = config.profile_hosts < 0 or hosts.index() < config.profile_hosts
        self.first, self.last = (config.profile_steps if profiled else ()) or (0, -1)
        self.port = config.profile_port if profiled else 0
        # The profiler names its file after the machine, which several hosts may share.
        subfolder = (f"host-{hosts.index():03d}",) if hosts.count() > 1 else ()
        self.folder, self.running = folder.joinpath(FOLDER, *subfolder), False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profiles step `number`: a profile begins before the first step and ends after
        the last."""
        if not self.first <= number <= self.last:
            yield
            self.after_step()
            return
        if not self.running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python slows the step down severalfold
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self.running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if number == self.last:
            self.close()
        self.after_step()

    def close(self) -> None:
        """Writes what was recorded, even if the run ends before the last step."""
        if self.running:
            self.running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> "Profile":
        if self.port:
            _check_free(self.port)
            jax.profiler.start_server(self.port)
        return self

    def __exit__(self, *_) -> None:
        try:
            self.close()
        finally:
            if self.port:
                jax.profiler.stop_server()


def _check_free(port: int) -> None:
    """Raises InputError where nobody can listen at the port: the profiler would only log it."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise InputError(
                "profile_port cannot be used",
                value=port,
                rule=f"on {hosts.names()[hosts.index()]}: {error.strerror}",
                fix="choose another port",
            ) from None
