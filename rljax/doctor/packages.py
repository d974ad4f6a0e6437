"""Installed packages, by their metadata alone: packages that are missing, too old, or hide another
one. None of them is imported."""

import contextlib
import itertools
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import rljax
from rljax import DISTRIBUTION
from rljax.doctor.finding import Finding, broken, fine
from rljax.files import parse_toml, read_text

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "libtpu")
# Libraries that a file of the same name on PYTHONPATH would hide without a message.
LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "rich", "safetensors"),
    *("tokenizers", "jinja2", "pyarrow", "rljax"),
)


def packages(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings of installed packages: versions, unmet requirements, plugins of another
    version of jaxlib, files that hide a library, and another project's rljax."""
    yield fine("python", f"{platform.python_version()}, {sys.executable}")
    yield fine("rljax", f"{rljax.__version__} of {Path(rljax.__file__).resolve().parent}")
    versions = [f"{name} {version}" for name in SHOWN if (version := version_of(name))]
    yield fine("versions", ", ".join(versions))
    yield from unmet_requirements()
    jaxlib = version_of("jaxlib")
    for kind, part in itertools.product(("cuda12", "cuda13", "rocm7"), ("plugin", "pjrt")):
        name = f"jax-{kind}-{part}"
        if jaxlib and (version := version_of(name)) and version != jaxlib:
            problem = f"{name} {version} and jaxlib {jaxlib}: JAX leaves the GPUs unused"
            yield broken("plugin_of_another_version", problem, f"pip install -U 'jax[{kind}]'")
    for file, name in hidden_libraries(env):
        yield broken("library_hidden", f"{file} hides the library {name!r}", "rename that file")
    with contextlib.suppress(PackageNotFoundError):
        dist = distribution("rljax")  # of another project, which writes into the same folder
        # Ours had this script before it was renamed.
        if "rljax.command:main" not in {script.value for script in dist.entry_points}:
            version = version_of(DISTRIBUTION)
            ours = f"{DISTRIBUTION} {version}" if version else "this one"
            problem = f"the distribution rljax {dist.version} in {dist.locate_file('')} is not "
            problem += f"{ours}: on the public index that name is another project's, and both "
            problem += "install a package that is imported as rljax"
            fix = f"pip uninstall -y rljax {DISTRIBUTION}, then install {DISTRIBUTION} again: "
            yield broken("rljax_of_another_project", problem, f"{fix}they share files")


def version_of(name: str) -> str:
    """Returns the version of an installed distribution, "" for one that is not there."""
    with contextlib.suppress(PackageNotFoundError):
        return distribution(name).version
    return ""


def unmet_requirements() -> Iterator[Finding]:
    """Yields findings of packages that rljax requires and that are missing or too old, each looked
    up by its own name, in milliseconds."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, _required_by_us()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another system
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        version = version_of(name)
        if not version:
            problem = f"{name} is not installed, and rljax needs it"
            yield broken("package_missing", problem, f"pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            problem = f"{name} {version} is installed, and rljax needs {requirement.specifier}"
            yield broken("package_too_old", problem, f"pip install -U '{requirement}'")


def _required_by_us() -> list[str]:
    """Returns the requirements of the checkout that is imported, else of the installed package."""
    project = Path(rljax.__file__).parent.parent / "pyproject.toml"
    if project.is_file():
        return parse_toml(read_text(project), str(project))["project"]["dependencies"]
    with contextlib.suppress(PackageNotFoundError):
        return distribution(DISTRIBUTION).requires or []
    return []


def hidden_libraries(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (file, name) of every file on PYTHONPATH that hides a library."""
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        for name in LIBRARIES:
            file = os.path.join(folder, f"{name}.py")
            if os.path.isfile(file):
                yield os.path.abspath(file), name
