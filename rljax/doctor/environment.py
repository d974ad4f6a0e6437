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
_PLUGINS = (  # (names of a platform, modules that serve it, files that show devices, words)
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
    """The platforms that JAX_PLATFORMS names, or its older spelling JAX_PLATFORM_NAME."""
    text = env.get("JAX_PLATFORMS") or env.get("JAX_PLATFORM_NAME") or ""
    return [part for part in text.split(",") if part]


def _platforms_without_plugin(env: Variables) -> Iterator[tuple]:
    for names, modules, device_files, messages in _PLUGINS:
        own_library = "libtpu" in modules and env.get("TPU_LIBRARY_PATH")
        if not own_library and not any(map(find_spec, modules)):
            yield names, device_files, messages


def jax_ends(env: Variables) -> Iterator[Finding]:
    """Yields findings of variables that make JAX end, whatever the machine has."""
    for names, _, (_, missing, install) in _platforms_without_plugin(env):
        for name in [name for name in _platforms(env) if name in names][:1]:
            problem = f"JAX_PLATFORMS={name}, but {missing}"
            yield broken("platform_not_installed", problem, f"{install}, or unset JAX_PLATFORMS")
    flags = env.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("--") and not os.path.isfile(flags):
        yield broken(
            "xla_flags_not_flags",
            f"XLA_FLAGS={flags!r} does not begin with --, so XLA takes it for the name of a file, "
            "which is not there",
            "write XLA_FLAGS='--xla_NAME=VALUE ...', or unset it",
        )
    for flag in flags.split():
        name, _, count = flag.partition("=")
        # XLA itself accepts 0 and -1, at which JAX ends later.
        if name == _DEVICE_COUNT and not re.fullmatch("0*[1-9][0-9]{0,8}", count):
            yield broken(
                "xla_flag_value_wrong",
                f"XLA_FLAGS holds {flag}, and {name} takes no such value: JAX does not start",
                f"write {name}=1 or more, or take it out of XLA_FLAGS",
            )


def _proxy_for_loopback(env: Variables) -> Iterator[Finding]:
    names = [f"{kind}_proxy" for kind in ("http", "https", "all", "grpc")]
    proxies = [name for low in names for name in (low, low.upper()) if env.get(name)]
    excepted = {"no": env.get("no_proxy") or env.get("NO_PROXY") or ""}
    local = [
        host
        for host in ("localhost", "127.0.0.1")
        if not urllib.request.proxy_bypass_environment(host, excepted)
    ]
    if proxies and local:
        yield broken(
            "proxy_for_loopback",
            f"{proxies[0]} is used for {' and '.join(local)}, too: judges, tools and hosts on this "
            "machine are not reached",
            "export no_proxy=localhost,127.0.0.1,::1",
        )


def environment(env: Variables, disk_gb: float, run: str) -> Iterator[Finding]:
    """Yields findings of variables, of the cache of compiled programs, and of the room on
    the disk."""
    yield from jax_ends(env)
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
        yield broken(
            "compilation_cache_unwritable",
            f"{cache} cannot be written: {reason}",
            "--config.compilation_cache=A_FOLDER_OF_YOURS; else every start compiles anew",
        )
    folders = {"the run folder": run or "runs", "the home folder": "~"}
    if hub := env.get("HF_HOME"):
        folders["HF_HOME"] = hub
    for purpose, folder in folders.items():
        path = Path(folder).expanduser().absolute()
        parent = next(filter(Path.is_dir, (path, *path.parents)))
        free = shutil.disk_usage(parent).free
        if free < disk_gb * 10**9:
            yield broken(
                "disk_full",
                f"{human_bytes(free)} are free for {purpose} ({parent}), less than {disk_gb:g} GB",
                "free the disk, or use another one (run_dir, HF_HOME, compilation_cache)",
            )
        else:
            yield fine("disk", f"{human_bytes(free)} free for {purpose}")
