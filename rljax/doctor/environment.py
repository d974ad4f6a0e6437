"""Faults of a machine and of its environment variables: a table of conditions, the values that they
match, the rules and the fixes."""

import os
import re
import shutil
import stat
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from rljax.config.schema import Config
from rljax.doctor.finding import (
    Finding,
    broken,
    fine,
    has_nvidia,
    has_tpu,
    is_installed,
    platforms,
    why_not_written,
)
from rljax.runs.units import human_bytes

Variables = Mapping[str, str]
Words = dict[str, str] | None  # what fills the texts of a finding; None where nothing is wrong
_KNOWN = ("cpu", "gpu", "cuda", "rocm", "tpu", "proxy")
_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin")
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def _unknown_platform(env: Variables) -> Words:
    unknown = [name for name in platforms(env) if name not in _KNOWN]
    plugins = {point.name for point in entry_points(group="jax_plugins")} if unknown else set()
    plugins = {name for name in plugins if not name.startswith(("xla_cuda", "xla_rocm"))}
    if not unknown or plugins or env.get("PJRT_NAMES_AND_LIBRARY_PATHS"):
        return None  # a plugin may register any name
    near = unknown[0].lower() if unknown[0].lower() in _KNOWN else "cpu (or cuda, tpu)"
    return {"value": repr(unknown[0]), "near": near}


def _lacking(env: Variables) -> Iterator[tuple[str, bool, dict[str, str]]]:
    """(the platform that is asked for, its devices are there, words) of those without a plugin."""
    kinds = (
        (("gpu", "cuda"), any(map(is_installed, _GPU_PLUGINS)), has_nvidia()),
        (("tpu",), is_installed("libtpu") or bool(env.get("TPU_LIBRARY_PATH")), has_tpu()),
    )
    gpu = {"devices": "NVIDIA GPUs", "lack": "JAX has no plugin for GPUs", "extra": "cuda12"}
    tpu = {"devices": "TPU chips", "lack": "libtpu is not installed", "extra": "tpu"}
    for (names, installed, there), words in zip(kinds, (gpu, tpu), strict=True):
        if not installed:
            asked = next((name for name in platforms(env) if name in names), "")
            yield asked, there, {"value": asked, **words}


def _platform_without_plugin(env: Variables) -> Words:
    return next((words for asked, _, words in _lacking(env) if asked), None)


def _device_without_plugin(env: Variables) -> Words:
    return next((w for _, there, w in _lacking(env) if there and not platforms(env)), None)


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


def _cache() -> Path:
    return Path(Config().compilation_cache).expanduser()


def _unwritable_cache(env: Variables) -> Words:
    reason = why_not_written(_cache())
    return {"value": str(_cache()), "reason": reason} if reason else None


def _open_cache(env: Variables) -> Words:
    is_open = _cache().is_dir() and _cache().stat().st_mode & stat.S_IWOTH
    return {"value": str(_cache())} if is_open else None


_JAX_ENDS = (  # (name, condition, which value breaks which rule, fix): JAX ends at these for sure
    (
        "platform_unknown",
        _unknown_platform,
        "JAX_PLATFORMS names {value}, which JAX does not know",
        "export JAX_PLATFORMS={near}, or unset it",
    ),
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
_OTHERS = (
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
    (
        "compilation_cache_open",
        _open_cache,
        "{value} can be written by anybody, and what lies there is run as programs",
        "chmod go-w {value}",
    ),
)
RULES = (*_JAX_ENDS, *_OTHERS)


def _broken(rules, env: Variables) -> Iterator[Finding]:
    for name, condition, what, fix in rules:
        if words := condition(env):
            yield broken(name, what.format(**words), fix.format(**words))


def jax_ends(env: Variables) -> Iterator[Finding]:
    """Yields findings of variables that make JAX end, whatever the machine has."""
    return _broken(_JAX_ENDS, env)


def environment(env: Variables, disk_gb: float, run: str) -> Iterator[Finding]:
    """Yields findings of variables, of the cache of compiled programs, and of the room on
    the disk."""
    yield from _broken(RULES, env)
    cache = _cache()
    if not why_not_written(cache):
        size = f"{sum(1 for _ in cache.iterdir())} files" if cache.is_dir() else "empty"
        yield fine("compilation_cache", f"{cache}: {size}")
    yield from _disk(env, disk_gb, run)


def _disk(env: Variables, disk_gb: float, run: str) -> Iterator[Finding]:
    places = {"the run folder": Path(run or "runs"), "the home folder": Path("~").expanduser()}
    if env.get("HF_HOME"):
        places["HF_HOME"] = Path(env["HF_HOME"]).expanduser()
    for what, path in places.items():
        there = next((p for p in (path.absolute(), *path.absolute().parents) if p.is_dir()), None)
        if there is None:
            continue
        free = shutil.disk_usage(there).free
        if free < disk_gb * 10**9:
            yield broken(
                "disk_full",
                f"{human_bytes(free)} are free for {what} ({there}), less than {disk_gb:g} GB",
                "free the disk, or use another one (run_dir, HF_HOME, compilation_cache)",
            )
        else:
            yield fine("disk", f"{human_bytes(free)} free for {what}")
