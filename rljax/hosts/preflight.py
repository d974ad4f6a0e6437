"""Refuses hosts that differ before anything is compiled: programs that are not the same end in a
hang, or in numbers that nobody can explain."""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from rljax import hosts
from rljax.errors import InputError

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")
# Variables that change a program, beside the config.
_VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEBUG_NANS",
    "JAX_DEFAULT_MATMUL_PRECISION",
)
_OWN = ("--xla_dump",)  # flags that may name a folder of the host's own
_LONGEST = 60  # characters of a value in the table
_MOST_NAMES = 4  # of hosts with the same value


def require_same(facts: Mapping[str, str]) -> None:
    """Raises InputError, on every host, if hosts differ in a fact; its table names them."""
    differences = table(hosts.gather(dict(facts)), hosts.names())
    if differences:
        rule = "every host runs the same command on the same code and data"
        fix = "bring them to one state, and start all of them again"
        raise InputError(f"the hosts are not the same:\n{differences}\n", rule=rule, fix=fix)


def table(every: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Returns a line for each fact that is not equal on all hosts, with the hosts that have each of
    its values, the rarest first; "" if all are equal."""
    lines = []
    for fact in dict.fromkeys(name for facts in every for name in facts):
        having: dict[str, list[str]] = {}
        for facts, name in zip(every, names, strict=True):
            having.setdefault(facts.get(fact, "(not set)"), []).append(name)
        if len(having) > 1:
            lines.append(f"  {fact}")
            for value, host_names in sorted(having.items(), key=lambda item: len(item[1])):
                value = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
                remainder = (
                    f" and {len(host_names) - _MOST_NAMES} more"
                    if len(host_names) > _MOST_NAMES
                    else ""
                )
                lines.append(f"    {value}: {', '.join(host_names[:_MOST_NAMES])}{remainder}")
    return "\n".join(lines)


def of_this_host() -> dict[str, str]:
    """Returns versions, the code of rljax, and the variables that compilers read. JAX does not look
    at a device for it."""
    facts = {"python": platform.python_version()}
    facts |= {f"version of {name}": _version(name) for name in _PACKAGES}
    facts["code of rljax"] = digest(sorted(Path(__file__).parents[1].rglob("*.py")))
    for name in _VARIABLES:
        words = os.environ.get(name, "").split()
        facts[name] = " ".join(word for word in words if not word.startswith(_OWN))
    return facts


def devices_of_this_host() -> dict[str, str]:
    """Returns the number of devices of each kind."""
    devices = jax.local_devices()
    return {"devices": f"{len(devices)} x {devices[0].device_kind}"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def digest(files: Sequence[Path]) -> str:
    """Returns the beginning of the SHA-256 of files, by their names and contents."""
    hashed = hashlib.sha256()
    for path in files:
        try:
            content = path.read_bytes() if path.is_file() else b"no file"  # a pipe never ends
        except OSError as error:
            content = str(error.strerror).encode()
        hashed.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()[:16]
