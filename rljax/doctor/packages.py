"""Installed packages, by their metadata alone: what is missing, too old, there twice, or hides
another one. Nothing of them is imported."""

import contextlib
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlparse

import rljax
from rljax import DISTRIBUTION
from rljax.doctor.finding import Finding, broken, fine, warning
from rljax.errors import InputError
from rljax.files import json_object, open_file, parse_toml, read_text

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "libtpu")
# What a file of the same name on PYTHONPATH would break without a word.
LIBRARIES = (
    "jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "rich", "safetensors",
    "tokenizers", "jinja2", "pyarrow", "rljax",
)  # fmt: skip
_PLUGINS = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")
_NEAR = 60  # characters of a requirement that are shown


def packages(env: Mapping[str, str]) -> Iterator[Finding]:
    yield fine("python", f"{platform.python_version()}, {sys.executable}")
    found = _by_name(distributions())
    versions = {name: dists[0].version for name, dists in found.items()}
    listed = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
    yield fine("versions", ", ".join(listed))
    yield from _several(found)
    yield from _requirements(found, versions)
    yield from _plugins(versions)
    yield from _hidden(env)
    yield from _rljax(found)
    yield from _command_on_path(env)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _by_name(every: Iterable[Distribution]) -> dict[str, list[Distribution]]:
    """{name: its distributions, that which is imported first}."""
    out: dict[str, list[Distribution]] = {}
    for one in every:
        name = one.metadata["Name"] if one.metadata else None
        if name:
            out.setdefault(_normal(name), []).append(one)
    return out


def _several(found: Mapping[str, list[Distribution]]) -> Iterator[Finding]:
    for name, several in found.items():
        # Of one folder: two folders of sys.path may hold a package each, as venvs do.
        folders = [str(_home(one)) for one in several]
        versions = {one.version for one, home in zip(several, folders, strict=True)
                    if home == folders[0]}  # fmt: skip
        if len(versions) > 1:
            yield broken(
                "package_twice", f"{name} has the metadata of {' and '.join(sorted(versions))} in "
                f"{folders[0]}", f"pip uninstall -y {name} until it is gone, then pip install it",
            )  # fmt: skip
    for folder in filter(os.path.isdir, sys.path):
        left = [name for name in sorted(os.listdir(folder)) if name.startswith("~")]
        if left and os.path.basename(folder) in ("site-packages", "dist-packages"):
            yield broken(
                "install_interrupted", f"pip was stopped half-way: {left[0]} lies in {folder}",
                f"rm -r {os.path.join(folder, '~*')}, then install that package anew",
            )  # fmt: skip


def _home(one: Distribution) -> Path:
    """The folder of sys.path in which a distribution lies."""
    return Path(str(one.locate_file(""))).absolute()


def _requirements(
    found: Mapping[str, list[Distribution]], versions: Mapping[str, str]
) -> Iterator[Finding]:
    """Lists the requirements of rljax, and those of its packages on each other."""
    ours = [_parsed(text) for text in _required_by_us(found)]
    yield from _unmet(ours, versions)
    looked, open_ = set(), [_normal(one.name) for one in ours if one]
    while open_:
        name = open_.pop()
        if name in looked or name not in found:
            continue
        looked.add(name)
        for text in found[name][0].requires or ():
            one = _parsed(text)
            have = one and versions.get(_normal(one.name))
            if have is None:
                continue  # not of this system, an extra, or missing: pip said so
            open_.append(_normal(one.name))
            if not one.specifier.contains(have, prereleases=True):
                yield broken(
                    "packages_disagree", f"{name} {versions[name]} needs {str(one)[:_NEAR]}, and "
                    f"{one.name} {have} is installed", f"pip install -U {name} {one.name}",
                )  # fmt: skip


def unmet_requirements() -> Iterator[Finding]:
    """The packages that rljax requires and that are missing or too old, each looked up by its own
    name, in milliseconds."""
    ours = [_parsed(text) for text in _required_by_us(_installed(["rljax"]))]
    found = _installed([one.name for one in ours if one])
    yield from _unmet(ours, {name: several[0].version for name, several in found.items()})


def _installed(names: Iterable[str]) -> dict[str, list[Distribution]]:
    out = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            out[_normal(name)] = [distribution(name)]
    return out


def _unmet(ours: Iterable, versions: Mapping[str, str]) -> Iterator[Finding]:
    for one in filter(None, ours):
        name, have = _normal(one.name), versions.get(_normal(one.name))
        if have is None:
            yield broken(
                "package_missing", f"{name} is not installed, and rljax needs it",
                f"pip install '{one}'",
            )  # fmt: skip
        elif not one.specifier.contains(have, prereleases=True):
            yield broken(
                "package_too_old", f"{name} {have} is installed, and rljax needs {one.specifier}",
                f"pip install -U '{one}'",
            )  # fmt: skip


def _parsed(text: str):
    """A requirement that holds here without extras, else None."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        one = Requirement(text)
    except InvalidRequirement:
        return None
    return one if one.marker is None or one.marker.evaluate({"extra": ""}) else None


def _required_by_us(found: Mapping[str, list[Distribution]]) -> list[str]:
    """The requirements of rljax: of the checkout that is imported, else of what is installed."""
    project = _checkout()
    if project is not None:
        tables = parse_toml(read_text(project), str(project))
        return tables["project"]["dependencies"]
    return found[DISTRIBUTION][0].requires or [] if DISTRIBUTION in found else []


def _checkout() -> Path | None:
    """pyproject.toml of the checkout that rljax is imported from; None for an installed one."""
    project = Path(rljax.__file__).parent.parent / "pyproject.toml"
    return project if project.is_file() else None


def _plugins(versions: Mapping[str, str]) -> Iterator[Finding]:
    for name in filter(_PLUGINS.fullmatch, versions):
        if "jaxlib" in versions and versions[name] != versions["jaxlib"]:
            extra = f"jax[{_PLUGINS.fullmatch(name)[1]}]"
            yield broken(
                "plugin_of_another_version", f"{name} {versions[name]} and jaxlib "
                f"{versions['jaxlib']}: JAX leaves the GPUs unused", f"pip install -U '{extra}'",
            )  # fmt: skip


def hidden_libraries(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(file, name) of every file on PYTHONPATH that hides a library."""
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        for name in LIBRARIES:
            file = os.path.join(folder, f"{name}.py")
            if os.path.isfile(file):
                yield os.path.abspath(file), name


def _hidden(env: Mapping[str, str]) -> Iterator[Finding]:
    for file, name in hidden_libraries(env):
        yield broken("library_hidden", f"{file} hides the library {name!r}", "rename that file")
    for folder in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        if not os.path.isdir(folder):
            yield warning(
                "pythonpath_missing", f"PYTHONPATH names {folder}, which is not there",
                "take it out of PYTHONPATH",
            )  # fmt: skip


def _rljax(found: Mapping[str, list[Distribution]]) -> Iterator[Finding]:
    here = Path(rljax.__file__).resolve().parent
    yield fine("rljax", f"{rljax.__version__} of {here}")
    installed = found.get(DISTRIBUTION, [])
    places = dict.fromkeys(
        path.resolve() for folder in sys.path if (path := Path(folder or ".", "rljax")).is_dir()
        and (path / "__init__.py").is_file()
    )  # fmt: skip
    places |= dict.fromkeys(filter(None, (_editable(one) for one in installed)))
    others = [path for path in places if path != here]
    if others and _checkout() is not None:
        yield broken(
            "checkout_hides_installed", f"the checkout {here.parent} hides the rljax that is "
            f"installed in {others[0].parent}", f"pip uninstall {DISTRIBUTION}, or leave the "
            "checkout out of PYTHONPATH",
        )  # fmt: skip
    elif others:
        yield broken(
            "rljax_twice", f"{here} hides another rljax in {others[0]}",
            f"pip uninstall {DISTRIBUTION} until it is gone, or remove {others[0]}, then install "
            "it once",
        )  # fmt: skip
    ours = "rljax.command:main"  # the command of an installation from before it was renamed
    foreign = [one for one in found.get("rljax", ())
               if ours not in {script.value for script in one.entry_points}]  # fmt: skip
    if foreign:
        yield from _another_project(foreign[0], installed)
    if stale := [one.version for one in installed if one.version != rljax.__version__]:
        yield broken(
            "rljax_metadata_stale", f"rljax {rljax.__version__} is imported, and the installed "
            f"metadata is of {stale[0]}: its dependencies may be, too",
            "pip install -e . in the checkout, or install its newer wheel",
        )  # fmt: skip
    if extras := _missing_extras(found):
        said = (f"{name} (pip install {' '.join(needs)})" for name, needs in extras.items())
        yield fine("extras", f"not installed: {', '.join(said)}")


def _another_project(other: Distribution, installed: list[Distribution]) -> Iterator[Finding]:
    """A distribution `rljax`, which writes into the same folder `rljax` as ours does."""
    ours = f"{DISTRIBUTION} {installed[0].version}" if installed else "this one"
    yield broken(
        "rljax_of_another_project", f"the distribution rljax {other.version} in {_home(other)} is "
        f"not {ours}: on the public index that name is another project's, and both install a "
        "package that is imported as rljax",
        f"pip uninstall -y rljax {DISTRIBUTION}, then install {DISTRIBUTION} again: they share "
        "files",
    )  # fmt: skip


def _editable(one: Distribution) -> Path | None:
    """The package in the checkout that an editable install stands for; None of another install."""
    try:
        origin = json_object(one.read_text("direct_url.json") or "{}", "direct_url.json")
        if not origin.get("dir_info", {}).get("editable"):
            return None
        return Path(unquote(urlparse(origin["url"]).path), "rljax").resolve()
    except (AttributeError, KeyError, TypeError, ValueError):  # of another tool
        return None


def _missing_extras(found: Mapping[str, list[Distribution]]) -> dict[str, list[str]]:
    """The extras of which a package is missing, and what pip installs for each."""
    from packaging.requirements import Requirement

    if DISTRIBUTION not in found:
        return {}
    about = found[DISTRIBUTION][0]
    needs = [Requirement(text) for text in about.requires or ()]
    missing = {}
    for extra in about.metadata.get_all("Provides-Extra") or ():
        own = [one for one in needs if one.marker and one.marker.evaluate({"extra": extra})
               and not one.marker.evaluate({"extra": ""})]  # fmt: skip
        if any(_normal(one.name) not in found for one in own) and extra != "test":
            for one in own:
                one.marker = None
            missing[extra] = [shlex.quote(str(one)) for one in own]
    return missing


def _command_on_path(env: Mapping[str, str]) -> Iterator[Finding]:
    """The script `rljax` that a shell finds starts this Python."""
    script = shutil.which("rljax", path=env.get("PATH"))
    if script is None:
        return
    try:
        with os.fdopen(open_file(script), "rb") as file:
            first = file.readline(4096).decode("utf-8", "replace").strip()
    except (OSError, InputError):
        return
    python = first.removeprefix("#!").strip().strip('"')
    own = {sys.executable, os.path.realpath(sys.executable)}
    if first.startswith("#!/") and "python" in os.path.basename(python.split()[0]):
        same = os.path.dirname(python) == os.path.dirname(sys.executable)
        if python not in own and not same:
            yield warning(
                "command_of_another_python", f"{script} starts {python}, and this is "
                f"{sys.executable}", f"{sys.executable} -m rljax ..., or activate its environment",
            )  # fmt: skip
