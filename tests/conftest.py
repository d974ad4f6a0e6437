"""Strict JAX for every test: eight CPU devices, no silent rank promotion, NaN checks where
asked."""

import atexit
import ctypes
import functools
import gc
import json
import os
import shutil
import tempfile
from importlib.metadata import version

# Before JAX is imported: the device count is fixed when the backend starts. The rest is for compile
# time, of which most of this suite consists: level 0 halves it, one piece per program is faster
# where programs are small, and jaxlib 0.10's older code generation for fused operations halves it
# again. Later ones are as fast by themselves and end the process at a flag that they do not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10."),
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/rljax/tests"))
if "XDG_CACHE_HOME" not in os.environ:  # runs of tests are noted here, not in the user's own cache
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="rljax-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# A program that is lowered keeps ten stack frames of each operation, of pytest's among them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Processes that tests start find the library compiled, also where Python is told to keep nothing:
# compiling its three hundred modules takes as long as importing JAX.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import sys
from pathlib import Path

import jax
import pytest

REPO = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
# Tests read helpers, and now and then each other, by name: also one file that runs alone.
sys.path[:0] = [str(HERE), *sorted(str(p) for p in HERE.iterdir() if p.is_dir())]

from golden_io import read_cases  # noqa: E402

GOLDEN = HERE / "golden"  # numbers of other projects that every clone has
# All of them, where they are at hand.
FURTHER = Path(os.environ.get("RLJAX_GOLDEN", REPO.parent / "shared" / "golden" / "public"))
assert "RLJAX_GOLDEN" not in os.environ or FURTHER.is_dir(), f"RLJAX_GOLDEN={FURTHER}: no folder"

sys.dont_write_bytecode = False
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def golden(*parts: str) -> Path:
    """A file or folder of the golden vectors: of tests/golden, else of the further ones; those that
    RLJAX_GOLDEN names come first.

    One that is missing fails the test, but for model folders: tests/golden holds few of them
    (they are large), and the rest are further cases, for those who have them.
    """
    folders = (FURTHER, GOLDEN) if "RLJAX_GOLDEN" in os.environ else (GOLDEN, FURTHER)
    places = [folder.joinpath(*parts) for folder in folders]
    path = next((p for p in places if p.exists()), None)
    if path is None and parts[0] == "hf":
        pytest.skip(f"a further model folder: no {FURTHER.joinpath(*parts)}")
    assert path is not None, f"no tests/golden/{'/'.join(parts)}: golden numbers are missing"
    return path


def golden_cases(*parts: str):
    """(meta, cases) of one golden file."""
    return read_cases(golden(*parts))


def worked_example(name: str) -> dict:
    """One worked example of the formulas: inputs and results, from tests/golden."""
    examples = json.loads((GOLDEN / "worked_examples.json").read_text())["examples"]
    return next(e for e in examples if e["id"] == name)


# What takes longest comes first, so that two workers that take file after file end together.
LONGEST = (
    "test_golden",
    "test_advantages",
    "test_program_steps",
    "test_train_from_python",
    "test_sampling_rules",
    "test_checkpoint",
    "test_preference_losses",
    "test_plan",
    "test_offline",
    "test_learning",
    "test_house",
    "test_trust",
    "test_q_function",
    "test_layouts",
    "test_foreign_rewards",
    "test_logprob",
    "test_correction",
    "test_sandbox",
    "test_policy_losses",
    "test_together",
    "test_strangers_files",
    "test_reward_pool",
    "test_sampler",
    "test_user_code",
    "test_attention",
    "test_in_flight_checkpoints",
    "test_bad_input",
    "test_policy_examples",
    "test_sources",
    "test_update",
    "test_lora",
    "test_best_of_k",
    "test_gae",
    "test_family_variants",
    "test_packed_learning",
    "test_speculation",
    "test_resume",
    "test_experts",
    "test_hostile_hub",
    "test_hostile_templates",
    "test_doctor",
    "test_optimizers",
    "test_site",
)


def pytest_configure(config):
    if config.option.markexpr == "smoke":
        config.option.markexpr = "smoke and not slow"  # of some tests a few cases are slow


def pytest_ignore_collect(collection_path, config):
    """Leaves out files without a test of the smoke lane: importing all takes longer than it."""
    if config.option.markexpr.startswith("smoke") and collection_path.suffix == ".py":
        return "mark.smoke" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
    """Tracing allocates so much that the collector, with JAX's own part at each pass, takes an
    eighth of the time: what is there by now stays, and the rest is looked at seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


MOST_MAPS = 40_000  # a process has 65,530; past that LLVM crashes
MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3  # of one worker


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops compiled programs when the process holds many memory maps, or much memory: each program
    holds some. What took long to compile comes back from the cache on disk."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists():
        jax.clear_caches()
        return
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MOST_BYTES or len(maps.read_text().splitlines()) > MOST_MAPS:
        jax.clear_caches()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the memory stays with the process


def one_device_environment() -> dict[str, str]:
    """The environment of a launcher in a process of its own, on one device."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    return {**os.environ, "PYTHONPATH": str(REPO), "XLA_FLAGS": flags}


def lanes(fast, slow) -> list:
    """Parameters of a test; those of the second list run in the slow lane."""
    return [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def compiled(function):
    """function(*arrays, **options) as one program: op by op, every operation compiles by itself for
    every shape."""

    @functools.wraps(function)
    def call(*arrays, **options):
        return jax.jit(function, static_argnames=tuple(options))(*arrays, **options)

    return call


class Compiled:
    """The functions of a module, each as one program."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return compiled(getattr(self.module, name))


# -- chips that this host does not have: what the lane `tpu_aot` compiles for


@pytest.fixture(scope="module")
def devices_of():
    """topology such as v5e:2x4 -> its devices."""
    pytest.importorskip("libtpu", reason='libtpu is absent: pip install "jax[tpu]"')
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask about chips
    # Nothing runs on a chip, so there is nothing to lock against a second process.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    # What is compiled for chips that are not there cannot be read back from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    yield lambda topology: topologies.get_topology_desc(topology, platform="tpu").devices
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(scope="module")
def chips(devices_of):
    """A v5e of eight."""
    return devices_of("v5e:2x4")


@pytest.fixture
def rljax_command(capsys, monkeypatch):
    """rljax ARGUMENTS -> (exit code, stdout, stderr)."""

    from rljax.command import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "path", list(sys.path))  # the working folder is added to it
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return call
