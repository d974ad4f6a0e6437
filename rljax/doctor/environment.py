"""Faults of a machine and of its environment variables."""

import glob
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from rljax.config.schema import Config
from rljax.doctor.finding import Finding, broken, fine, why_not_written
from rljax.runs.units import human_bytes

Variables = Mapping[str, str]
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_PLUGINS = (  # (names in JAX_PLATFORMS, modules, files of devices, (devices, problem, fix))
    (
        ("gpu", "cuda"),
        ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin"),
        ("/dev/nvidia[0-9]*",),
        ("NVIDIA GPUs", "JAX has no plugin for GPUs", "pip install 'jax[cuda12]>=0.10'"),
    ),
    (
        ("tpu",),
        ("libtpu",),
        ("/dev/accel*", "/dev/vfio/[0-9]*"),
        ("TPU chips", "libtpu is not installed", "pip install 'jax[tpu]>=0.10'"),
    ),
)


def _platforms(env: Variables) -> list[str]:
    """Returns the platforms that JAX_PLATFORMS names, or its older spelling JAX_PLATFORM_NAME."""
    text = env.get("JAX_PLATFORMS") or env.get("JAX_PLATFORM_NAME") or ""
    return [name for name in text.split(",") if name]


def _platforms_without_plugin(env: Variables) -> Iterator[tuple]:
    """Yields (names, files of devices, (devices, problem, fix)) of the plugins that no module
    provides."""
    for names, modules, device_files, messages in _PLUGINS:
        own_library = "libtpu" in modules and env.get("TPU_LIBRARY_PATH")
        if not own_library and not any(map(find_spec, modules)):
            yield names, device_files, messages


def fatal_variables(env: Variables) -> Iterator[Finding]:
    """Yields findings of variables that make JAX end, whatever the machine has."""
    for names, _, (_, missing, install) in _platforms_without_plugin(env):
        for name in [name for name in _platforms(env) if name in names][:1]:
            problem = f"JAX_PLATFORMS={name}, but {missing}"
            yield broken("platform_not_installed", problem, f"{install}, or unset JAX_PLATFORMS")
    flags = env.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("--") and not os.path.isfile(flags):
        problem = f"XLA_FLAGS={flags!r} does not begin with --, so XLA takes it for the name of a "
        fix = "write XLA_FLAGS='--xla_NAME=VALUE ...', or unset it"
        yield broken("xla_flags_not_flags", f"{problem}file, which is not there", fix)
    for flag in flags.split():
        name, _, count = flag.partition("=")
        # XLA itself accepts 0 and -1, at which JAX ends later.
        if name == _DEVICE_COUNT and not re.fullmatch("0*[1-9][0-9]{0,8}", count):
            problem = f"XLA_FLAGS holds {flag}, and {name} takes no such value: JAX does not start"
            fix = f"write {name}=1 or more, or take it out of XLA_FLAGS"
            yield broken("xla_flag_value_wrong", problem, fix)


def _proxy_for_loopback(env: Variables) -> Iterator[Finding]:
    names = [f"{kind}_proxy" for kind in ("http", "https", "all", "grpc")]
    proxies = [name for low in names for name in (low, low.upper()) if env.get(name)]
    exceptions = {"no": env.get("no_proxy") or env.get("NO_PROXY") or ""}
    bypasses = urllib.request.proxy_bypass_environment
    hosts = [host for host in ("localhost", "127.0.0.1") if not bypasses(host, exceptions)]
    if proxies and hosts:
        problem = f"{proxies[0]} is used for {' and '.join(hosts)}, too: judges, tools and hosts "
        fix = "export no_proxy=localhost,127.0.0.1,::1"
        yield broken("proxy_for_loopback", f"{problem}on this machine are not reached", fix)


def environment(env: Variables, disk_gb: float, run: str) -> Iterator[Finding]:
    """Yields findings of variables, of the cache of compiled programs, and of the room on
    the disk."""
    yield from fatal_variables(env)
    for _, device_files, (device_name, missing, install) in (
        () if _platforms(env) else _platforms_without_plugin(env)
    ):
        if any(map(glob.glob, device_files)):
            yield broken(
                "device_not_used", f"this machine has {device_name}, but {missing}", install
            )
    yield from _proxy_for_loopback(env)
    cache = Path(Config().compilation_cache).expanduser()
    if reason := why_not_written(cache):
        fix = "--config.compilation_cache=A_FOLDER_OF_YOURS; else every start compiles anew"
        yield broken("compilation_cache_unwritable", f"{cache} cannot be written: {reason}", fix)
    folders = {"the run folder": run or "runs", "the home folder": "~"}
    if hub := env.get("HF_HOME"):
        folders["HF_HOME"] = hub
    for purpose, folder in folders.items():
        path = Path(folder).expanduser().absolute()
        parent = next(filter(Path.is_dir, (path, *path.parents)))
        free = shutil.disk_usage(parent).free
        text = human_bytes(free)
        if free < disk_gb * 10**9:
            problem = f"{text} are free for {purpose} ({parent}), less than {disk_gb:g} GB"
            fix = "free the disk, or use another one (run_dir, HF_HOME, compilation_cache)"
            yield broken("disk_full", problem, fix)
        else:
            yield fine("disk", f"{text} free for {purpose}")
