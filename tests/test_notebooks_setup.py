"""The first cell of the notebooks, which installs rljax, and never another jax than a good one."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import REPO

NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
COLAB = "https://colab.research.google.com"


def cells(path, kind: str) -> list[str]:
    found = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def setup_of(path) -> str:
    """The cell that installs; what stands before it may set the environment alone."""
    code = cells(path, "code")
    (index,) = [i for i, text in enumerate(code) if "%pip" in text]
    assert index == 0 or index == 1 and set(re.findall(r"^import (\w+)", code[0], re.M)) == {"os"}
    return code[index]


def test_all_notebooks_begin_with_the_same_cell():
    assert len(NOTEBOOKS) >= 8
    assert len({setup_of(path) for path in NOTEBOOKS}) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_a_badge_and_ends_with_what_it_measured(path):
    first = cells(path, "markdown")[0]
    (target,) = re.findall(rf"\[!\[Open in Colab\]\({COLAB}[^)]*\)\]\((.*?)\)", first)
    urls = tomllib.loads((REPO / "pyproject.toml").read_text())["project"].get("urls", {})
    repository = urls.get("Repository", "").removeprefix("https://github.com/")
    # Without a public repository the badge opens Colab where a notebook is uploaded.
    place = f"github/{repository}/blob/main/notebooks/{path.name}"
    assert target == f"{COLAB}/{place if repository else '#upload=true'}"
    assert re.search(r"^measured(\[.*\])? = ", cells(path, "code")[-1], re.M)


# A pip that writes down what it is asked for.
PIP = """
import json, pathlib, sys
kept = pathlib.Path(sys.argv[sys.argv.index("-c") + 1]).read_text() if "-c" in sys.argv else None
pathlib.Path("asked.json").write_text(json.dumps([sys.argv[1:], kept]))
package = pathlib.Path(__file__).parent.parent / "rljax"
package.mkdir(exist_ok=True)
(package / "__init__.py").write_text("__version__ = '0.1.0'")
"""
JAX = """
__version__ = "{version}"
device_count = lambda: 1
class Chip:
    device_kind = "a chip"
    memory_stats = lambda self: {{"bytes_limit": 16 * 10**9}}
devices = lambda: [Chip()]
"""
RUN = """
import sys
from IPython.core.interactiveshell import InteractiveShell
result = InteractiveShell.instance().run_cell(sys.stdin.read())
sys.exit(0 if result.success else 1)
"""


def first_cell(
    folder,
    jax: str,
    rljax: str | None,
    others: dict[str, str],
    source: str = "",
    here: str = ".",
    code: int = 0,
    without: str = "",
) -> tuple[str, list]:
    """What the first cell prints and what it asks of pip in an environment that has such versions;
    [] where it asks for nothing."""
    home = folder / "site"
    for name, text in {"pip/__init__.py": "", "pip/__main__.py": PIP}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "jax.py").write_text(JAX.format(version=jax))
    if rljax:
        (home / "rljax").mkdir()
        (home / "rljax/__init__.py").write_text(f"__version__ = '{rljax}'")
    for name, version in {"jax": jax, **others}.items():
        info = home / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    # The versions of this environment must not be seen, but IPython must.
    hide = (
        "import importlib.metadata as m\n"
        f"m.distributions = lambda: m.Distribution.discover(path=[{str(home)!r}])\n"
        f"import importlib.util as u; spec = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {without!r} else spec(name, *rest)\n"
        # An editable install would find the repository's own rljax.
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        f"sys.path = [{str(home)!r}] + [p for p in sys.path if p != {str(REPO)!r}]\n"
    )
    env = {**os.environ, "PYTHONPATH": str(home), "IPYTHONDIR": str(folder / "ipython")}
    # The two files of rljax may have one size and one second: the bytecode of the old one would do.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["RLJAX_SOURCE"] = source
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("result =", f"{hide}result =")],
        input=setup_of(NOTEBOOKS[0]),
        cwd=folder / here,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    asked = folder / here / "asked.json"
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads(asked.read_text()) if asked.exists() else []


def test_a_good_rljax_is_left_alone_and_the_machine_is_named(tmp_path):
    out, asked = first_cell(tmp_path, "0.12.3", "0.1.0", {})
    assert asked == [] and "1 x a chip, 16.0 GB" in out and "rljax 0.1.0, jax 0.12.3" in out


def test_a_good_jax_is_kept_as_it_is(tmp_path):
    """As on Colab: a jax of the runtime with its plugins, and no rljax."""
    others = {"jaxlib": "0.12.3", "jax-cuda12-plugin": "0.12.2", "libtpu": "0.0.30", "numpy": "2.1"}
    _, (arguments, kept) = first_cell(tmp_path, "0.12.3", None, others, source="/a clone")
    assert arguments[0] == "install" and arguments[-1] == "/a clone" and "-q" in arguments
    assert "--upgrade" not in arguments and "-U" not in arguments
    assert sorted(kept.split()) == [
        "jax-cuda12-plugin==0.12.2",
        "jax==0.12.3",
        "jaxlib==0.12.3",
        "libtpu==0.0.30",
    ]


def test_an_old_rljax_is_renewed_and_an_old_jax_may_be(tmp_path):
    (tmp_path / "rljax_lm-0.1.0-py3-none-any.whl").touch()
    out, (arguments, kept) = first_cell(tmp_path, "0.9.2", "0.0.9", {"jaxlib": "0.9.2"})
    assert arguments[0] == "install" and kept == ""
    assert "rljax 0.1.0" in out  # not the old one, which was imported already


WHEEL = "rljax_lm-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    "source, files, installed",
    [
        ("", ["clone/rljax/", "clone/pyproject.toml"], "clone"),
        (
            "",
            ["clone/rljax/", "clone/pyproject.toml", f"clone/notebooks/{WHEEL}"],
            f"clone/notebooks/{WHEEL}",
        ),
        (
            "git+https://example.org/me/rljax",
            ["clone/rljax/", "clone/pyproject.toml"],
            "git+https://example.org/me/rljax",
        ),
        ("", ["clone/rljax/"], None),
    ],
)
def test_no_index_is_asked_for_the_name_rljax(tmp_path, source, files, installed):
    """The name belongs to another project there: from what the user names, the wheel beside the
    notebook or its clone; without one of these the cell ends."""
    (tmp_path / "clone/notebooks").mkdir(parents=True)
    for name in files:
        path = tmp_path / name
        path.mkdir() if name.endswith("/") else path.touch()
    out, asked = first_cell(
        tmp_path, "0.12.3", None, {}, source, "clone/notebooks", code=installed is None
    )
    if installed is None:
        assert asked == [] and "set RLJAX_SOURCE" in out
    else:
        wanted = installed if "://" in installed else str(tmp_path / installed)
        assert asked[0][-1] == wanted and "rljax" not in asked[0]


def test_what_the_cells_import_is_installed_too(tmp_path):
    """A core installation has no matplotlib; beside a good rljax that alone is asked for.
    google.colab is part of Colab, and imported there alone."""
    needed = set()
    for path in NOTEBOOKS:
        for code in cells(path, "code"):
            needed |= set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.M))
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    core = {re.match(r"[\w]+", one)[0] for one in project["dependencies"]}
    assert needed - core - set(sys.stdlib_module_names) == {"rljax", "matplotlib", "google"}
    _, (arguments, kept) = first_cell(tmp_path, "0.12.3", "0.1.0", {}, without="matplotlib")
    assert arguments[-1] == "matplotlib>=3.9" and kept == "jax==0.12.3\n"


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
def test_pip_itself_changes_no_version_that_is_kept(tmp_path, old):
    """`pip install --dry-run` of this repository with the constraints of the environment; with an
    old jax among them pip refuses rather than changes it."""
    pytest.importorskip("pip")
    from importlib.metadata import version

    jax = "0.9.0" if old else version("jax")
    (tmp_path / "keep.txt").write_text(f"jax=={jax}\njaxlib=={version('jaxlib')}\n")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-c", "keep.txt"]
    report = ["--no-build-isolation", "--report", "report.json", str(REPO)]
    done = subprocess.run([*command, *report], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == (not old), done.stderr
    if not old:
        planned = json.loads((tmp_path / "report.json").read_text())["install"]
        assert [one["metadata"]["name"] for one in planned] == ["rljax-lm"]
