"""Environment variables that JAX, XLA, libtpu, CUDA, the hub and Python's network code read."""

import fcntl
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from rljax.doctor.finding import (
    Finding,
    asks_for_gpu,
    broken,
    fine,
    has_nvidia,
    has_tpu,
    is_installed,
    platforms,
    warning,
)
from rljax.files import is_whole_number

Variables = Mapping[str, str]
_KNOWN = ("cpu", "gpu", "cuda", "rocm", "tpu", "proxy")
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
_BOOLEAN = (
    "JAX_DISABLE_JIT",
    "JAX_ENABLE_X64",
    "JAX_DEBUG_NANS",
    "JAX_DEBUG_INFS",
    "JAX_LOG_COMPILES",
    "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_CHECK_TRACER_LEAKS",
    "JAX_ENABLE_CHECKS",
    "JAX_THREEFRY_PARTITIONABLE",
)
_PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
_DOT_PRESET = re.compile(r"(ANY_F8|F16|BF16|TF32|F32|F64)_\w+")
_TPU = (
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_ID",
    "CLOUD_TPU_TASK_ID",
    "TPU_ACCELERATOR_TYPE",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_SLICE_ID",
)
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_PLUGINS = "PJRT_NAMES_AND_LIBRARY_PATHS"
_TPU_LOCK = "/tmp/libtpu_lockfile"
_CUDA_LIBRARIES = re.compile(r"lib(cudnn|cublas|nccl|cusolver|cusparse|cufft|nvjitlink)\b.*\.so")


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _is_true(value: str) -> bool:
    return value.strip().lower() in _TRUE


# Variables of which the value alone is wrong: (name of the finding, status, variables, what is true
# of a wrong value, what it does, what mends it).
_VALUES = (
    (
        "jax_variable_not_boolean",
        broken,
        _BOOLEAN,
        lambda x: x.lower() not in (*_TRUE, *_FALSE),
        "{name}={value!r}: JAX ends at a value that is neither true nor false",
        "unset {name}, or set it to 0 or 1",
    ),
    (
        "jit_disabled",
        broken,
        ("JAX_DISABLE_JIT",),
        _is_true,
        "{name} is set: every operation runs by itself, a thousand times slower",
        "unset {name}",
    ),
    (
        "nan_checks",
        warning,
        ("JAX_DEBUG_NANS", "JAX_DEBUG_INFS"),
        _is_true,
        "{name} is set: a step that is not finite ends the run, where rljax would skip and "
        "count it",
        "unset {name}; `rljax replay RUN` finds the operation",
    ),
    (
        "matmul_precision_unknown",
        broken,
        ("JAX_DEFAULT_MATMUL_PRECISION",),
        lambda x: x not in _PRECISIONS and not _DOT_PRESET.fullmatch(x),
        "{name}={value!r}: JAX ends at it",
        f"one of {', '.join(_PRECISIONS)}, or unset it",
    ),
    (
        "plugin_missing",
        broken,
        (_PLUGINS,),
        lambda x: not all(os.path.isfile(part.partition(":")[2]) for part in _parts(x)),
        "{name} names {value!r}, and there is no such library",
        "unset it, or give NAME:PATH of a library that is there",
    ),
    (
        "libtpu_missing",
        broken,
        ("TPU_LIBRARY_PATH",),
        lambda x: not os.path.isfile(x),
        "{name}={value}: there is no such file",
        "unset {name}: the installed libtpu is used then",
    ),
    (
        "certificates_missing",
        broken,
        ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        lambda x: not os.path.exists(x),
        "{name}={value}: there is no such file, so no https address is reached",
        "unset {name}, or give a file of certificates",
    ),
    (
        "hub_token_malformed",
        broken,
        ("HF_TOKEN",),
        lambda x: re.search(r"\s|['\"]", x.rstrip("\n")) or x.startswith("$"),
        "{name} holds blanks, quotes or a name of a variable, which no token does",
        "export HF_TOKEN=hf_... without quotes inside, or unset it and `hf auth login`",
    ),
    (
        "hub_offline",
        warning,
        ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        _is_true,
        "{name} is set: models and data come from the cache alone",
        "unset {name} to download",
    ),
)


def _values(env: Variables) -> Iterator[Finding]:
    for finding, status, names, is_wrong, what, fix in _VALUES:
        for name in names:
            if (value := env.get(name, "")) and is_wrong(value):
                words = {"name": name, "value": value}
                yield status(finding, what.format(**words), fix.format(**words))


def variables(env: Variables) -> Iterator[Finding]:
    yield from _platforms(env)
    yield from _xla(env)
    yield from _values(env)
    yield from _tpu(env)
    yield from _gpu(env)
    yield from _schedulers(env)
    yield from _network(env)
    yield from _hub(env)


def _platforms(env: Variables) -> Iterator[Finding]:
    asked = platforms(env)
    unknown = [name for name in asked if name not in _KNOWN]
    plugins = {point.name for point in entry_points(group="jax_plugins")} if unknown else set()
    plugins = {name for name in plugins if not name.startswith(("xla_cuda", "xla_rocm"))}
    if unknown and not plugins and not env.get(_PLUGINS):  # a plugin may register any name
        near = unknown[0].lower() if unknown[0].lower() in _KNOWN else "cpu (or cuda, tpu)"
        yield broken(
            "platform_unknown",
            f"JAX_PLATFORMS names {unknown[0]!r}, which JAX does not know",
            f"export JAX_PLATFORMS={near}, or unset it",
        )
    gpu = any(map(is_installed, ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin")))
    tpu = is_installed("libtpu") or bool(env.get("TPU_LIBRARY_PATH"))
    for names, installed, there, devices, lack, extra in (
        (("gpu", "cuda"), gpu, has_nvidia(), "NVIDIA GPUs", "JAX has no plugin for GPUs", "cuda12"),
        (("tpu",), tpu, has_tpu(), "TPU chips", "libtpu is not installed", "tpu"),
    ):
        fix = f"pip install 'jax[{extra}]>=0.10'"
        name = next((name for name in asked if name in names), "")
        if name and not installed:
            yield broken(
                "platform_not_installed",
                f"JAX_PLATFORMS={name}, but {lack}",
                f"{fix}, or unset JAX_PLATFORMS",
            )
        if name and not there:
            yield broken(
                "platform_without_device",
                f"JAX_PLATFORMS={name}, but this machine shows no such device",
                "unset JAX_PLATFORMS, or run on a machine that has one (in a container: "
                "hand the devices in)",
            )
        if not asked and there and not installed:
            yield broken("device_not_used", f"this machine has {devices}, but {lack}", fix)


def xla_flag_value_wrong(flag: str, fix: str = "") -> Finding:
    """The finding of a flag that is known, and its value is not."""
    name = flag.partition("=")[0]
    return broken(
        "xla_flag_value_wrong",
        f"XLA_FLAGS holds {flag}, and {name} takes no such value: JAX does not start",
        fix or f"correct the value, or take {name} out of XLA_FLAGS",
    )


def _xla(env: Variables) -> Iterator[Finding]:
    text = env.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("--"):
        if not os.path.isfile(text):
            yield broken(
                "xla_flags_not_flags",
                f"XLA_FLAGS={text!r} does not begin with --, so XLA takes "
                "it for the name of a file, which is not there",
                "write XLA_FLAGS='--xla_NAME=VALUE ...', or unset it",
            )
        return
    flags = dict(word.partition("=")[::2] for word in text.split())
    if of_tpu := [name for name in flags if name.startswith(("--xla_tpu_", "--xla_jf_"))]:
        yield broken(
            "xla_flags_of_tpu",
            f"XLA_FLAGS holds {of_tpu[0]}, which libtpu alone knows: elsewhere "
            "the process ends at it",
            "put flags of TPUs into LIBTPU_INIT_ARGS",
        )
    counts = [word for word in text.split() if word.partition("=")[0] == _DEVICE_COUNT]
    for word in counts:
        count = word.partition("=")[2]
        if not is_whole_number(count) or not 1 <= int(count) < 2**31:
            fix = f"write {_DEVICE_COUNT}=1 or more, or take it out of XLA_FLAGS"
            yield xla_flag_value_wrong(word, fix)
            return
    count = flags.get(_DEVICE_COUNT, "1")
    if count != "1":
        yield warning(
            "virtual_devices",
            f"XLA_FLAGS makes {count} devices of this CPU, as tests do",
            "unset XLA_FLAGS for a run on the CPU: its cores are shared anyway",
        )


def _tpu(env: Variables) -> Iterator[Finding]:
    left = [name for name in _TPU if env.get(name)]
    if left and not has_tpu():
        yield broken(
            "tpu_variables_left",
            f"{', '.join(left)} set, on a machine without TPU chips: a run "
            "would look for the hosts of another one",
            f"unset {' '.join(left)}",
        )
    if (has_tpu() or "tpu" in platforms(env)) and (reason := _locked(_TPU_LOCK)):
        yield broken(
            "tpu_lock",
            f"{_TPU_LOCK}: {reason}: another process or account has the TPU",
            f"end that process (lsof -w /dev/accel0 /dev/vfio/*), then rm -f {_TPU_LOCK}",
        )


def _locked(file: str) -> str:
    """Why libtpu could not take its lock; "" where it could, or there is none."""
    try:
        handle = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return "it is locked"
    finally:
        os.close(handle)
    return ""


def _gpu(env: Variables) -> Iterator[Finding]:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpu = asks_for_gpu(env) or has_nvidia()
    if gpu and visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        yield broken(
            "gpus_hidden",
            f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    for folder in env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if gpu else ():
        names = sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else []
        found = [name for name in names if _CUDA_LIBRARIES.match(name)]
        if found:
            yield broken(
                "cuda_libraries_hidden",
                f"LD_LIBRARY_PATH: {found[0]} of {folder} hides the one that JAX was built for",
                "unset LD_LIBRARY_PATH: pip has installed CUDA's libraries",
            )
            return


def _schedulers(env: Variables) -> Iterator[Finding]:
    tasks = env.get("SLURM_NTASKS", "")
    if env.get("SLURM_JOB_ID") and is_whole_number(tasks) and int(tasks) > 1:
        if not env.get("SLURM_PROCID") or not env.get("SLURM_STEP_NODELIST"):
            yield warning(
                "slurm_without_srun",
                f"a SLURM job of {tasks} tasks, and this process is none of "
                "them: a run from here has one host",
                "start it by srun: `rljax pod slurm` prints the script",
            )


def _network(env: Variables) -> Iterator[Finding]:
    proxies = {
        name: env[name]
        for low in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        for name in (low, low.upper())
        if env.get(name)
    }
    excepted = {"no": env.get("no_proxy") or env.get("NO_PROXY") or ""}
    near = [
        h
        for h in ("localhost", "127.0.0.1")
        if not urllib.request.proxy_bypass_environment(h, excepted)
    ]
    if proxies and near:
        yield broken(
            "proxy_for_loopback",
            f"{next(iter(proxies))} is used for {' and '.join(near)}, too: "
            "judges, tools and hosts on this machine are not reached",
            "export no_proxy=localhost,127.0.0.1,::1",
        )


def _hub(env: Variables) -> Iterator[Finding]:
    token = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
    home = env.get("HF_HOME") or os.path.join(
        env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    stored = os.path.isfile(env.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
    where = "HF_TOKEN" if token else "`hf auth login`" if stored else ""
    fact = f"a token of {where}; not asked whether it is valid" if where else "not logged in"
    yield fine("hub", fact if is_installed("huggingface_hub") else "the extra hub is not installed")
