"""Faults of a machine and of its environment variables: a table of conditions, the values that they
match, the rules and the fixes."""

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
Words = dict[str, str] | None  # what fills the texts of a finding; None where nothing is wrong
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_PLUGINS = (  # (names of a platform, modules that serve it, files that show devices, words)
    (
        ("gpu", "cuda"),
        ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin"),
        ("/dev/nvidia[0-9]*",),
        {"devices": "NVIDIA GPUs", "lack": "JAX has no plugin for GPUs", "extra": "cuda12"},
    ),
    (
        ("tpu",),
        ("libtpu",),
        ("/dev/accel*", "/dev/vfio/[0-9]*"),
        {"devices": "TPU chips", "lack": "libtpu is not installed", "extra": "tpu"},
    ),
)


def _platforms(env: Variables) -> list[str]:
    """The platforms that JAX_PLATFORMS names, or its older spelling JAX_PLATFORM_NAME."""
    listed = env.get("JAX_PLATFORMS") or env.get("JAX_PLATFORM_NAME") or ""
    return [part for part in listed.split(",") if part]


def _without_plugin(env: Variables) -> Iterator[tuple]:
    for names, modules, devices, words in _PLUGINS:
        own_library = "libtpu" in modules and env.get("TPU_LIBRARY_PATH")
        if not own_library and not any(map(find_spec, modules)):
            yield names, devices, words


def _platform_without_plugin(env: Variables) -> Words:
    for names, _, words in _without_plugin(env):
        if asked := [name for name in _platforms(env) if name in names]:
            return {"value": asked[0], **words}
    return None


def _device_without_plugin(env: Variables) -> Words:
    for _, devices, words in () if _platforms(env) else _without_plugin(env):
        if any(map(glob.glob, devices)):
            return words
    return None


def _xla_file(env: Variables) -> Words:
    text = env.get("XLA_FLAGS", "").strip()
    wrong = text and not text.startswith("--") and not os.path.isfile(text)
    return {"value": repr(text)} if wrong else None


def _device_count(env: Variables) -> Words:
    """XLA itself accepts 0 and -1, at which JAX ends later."""
    for word in env.get("XLA_FLAGS", "").split():
        name, _, count = word.partition("=")
        if name == _DEVICE_COUNT and not re.fullmatch("0*[1-9][0-9]{0,8}", count):
            return {"value": word, "flag": name}
    return None


def _proxy_for_loopback(env: Variables) -> Words:
    names = [f"{kind}_proxy" for kind in ("http", "https", "all", "grpc")]
    proxies = [name for low in names for name in (low, low.upper()) if env.get(name)]
    excepted = {"no": env.get("no_proxy") or env.get("NO_PROXY") or ""}
    near = [
        host
        for host in ("localhost", "127.0.0.1")
        if not urllib.request.proxy_bypass_environment(host, excepted)
    ]
    return {"value": proxies[0], "near": " and ".join(near)} if proxies and near else None


def _unwritable_cache(env: Variables) -> Words:
    cache = Path(Config().compilation_cache).expanduser()
    reason = why_not_written(cache)
    return {"value": str(cache), "reason": reason} if reason else None


_JAX_ENDS = (  # (name, condition, which value breaks which rule, fix): JAX ends at these for sure
    (
        "platform_not_installed",
        _platform_without_plugin,
        "JAX_PLATFORMS={value}, but {lack}",
        "pip install 'jax[{extra}]>=0.10', or unset JAX_PLATFORMS",
    ),
    (
        "xla_flags_not_flags",
        _xla_file,
        "XLA_FLAGS={value} does not begin with --, so XLA takes it for the name of a file, which is"
        " not there",
        "write XLA_FLAGS='--xla_NAME=VALUE ...', or unset it",
    ),
    (
        "xla_flag_value_wrong",
        _device_count,
        "XLA_FLAGS holds {value}, and {flag} takes no such value: JAX does not start",
        "write {flag}=1 or more, or take it out of XLA_FLAGS",
    ),
)
RULES = (
    *_JAX_ENDS,
    (
        "device_not_used",
        _device_without_plugin,
        "this machine has {devices}, but {lack}",
        "pip install 'jax[{extra}]>=0.10'",
    ),
    (
        "proxy_for_loopback",
        _proxy_for_loopback,
        "{value} is used for {near}, too: judges, tools and hosts on this machine are not reached",
        "export no_proxy=localhost,127.0.0.1,::1",
    ),
    (
        "compilation_cache_unwritable",
        _unwritable_cache,
        "{value} cannot be written: {reason}",
        "--config.compilation_cache=A_FOLDER_OF_YOURS; else every start compiles anew",
    ),
)


def jax_ends(env: Variables, rules=_JAX_ENDS) -> Iterator[Finding]:
    """Yields findings of variables that make JAX end, whatever the machine has."""
    for name, condition, what, fix in rules:
        if words := condition(env):
            yield broken(name, what.format(**words), fix.format(**words))


def environment(env: Variables, disk_gb: float, run: str) -> Iterator[Finding]:
    """Yields findings of variables, of the cache of programs, and of the disk."""
    yield from jax_ends(env, RULES)
    folders = {"the run folder": run or "runs", "the home folder": "~"}
    if hub := env.get("HF_HOME"):
        folders["HF_HOME"] = hub
    for what, folder in folders.items():
        path = Path(folder).expanduser().absolute()
        there = next(filter(Path.is_dir, (path, *path.parents)))
        free = shutil.disk_usage(there).free
        if free < disk_gb * 10**9:
            yield broken(
                "disk_full",
                f"{human_bytes(free)} are free for {what} ({there}), less than {disk_gb:g} GB",
                "free the disk, or use another one (run_dir, HF_HOME, compilation_cache)",
            )
        else:
            yield fine("disk", f"{human_bytes(free)} free for {what}")
