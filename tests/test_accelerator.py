"""benchmarks/accelerator.py: its parts at their tiny sizes, and what it keeps of parts that fail,
hang or cannot run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljax.kernels.gae import pallas_gpu as gae_kernel
from rljax.kernels.logprob import pallas_gpu as logprob_kernel

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import accelerator
import accelerator_parts

SAYS = """
import json, os, subprocess, sys, time
part = sys.argv[1]
print("what a library prints")
print(json.dumps({f"{part} first": {"ms": 1.5, "tiny": "--tiny" in sys.argv}}), flush=True)
if part == "fails":
    raise ValueError("no such kernel")
if part == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(json.dumps({"child": {"pid": child.pid}}), flush=True)
    time.sleep(600)
print(json.dumps({f"{part} second": {"failed": "RuntimeError: one row"}}), flush=True)
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Parts of a script of its own: {name: Part}, to which a test adds."""
    (tmp_path / "script.py").write_text(SAYS)
    monkeypatch.setattr(accelerator, "SCRIPT", tmp_path / "script.py")
    given = {"works": accelerator.Part(60)}
    monkeypatch.setattr(accelerator, "PARTS", given)
    return given


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead and read by nobody yet. Waits for a killed one."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(12_000):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_a_part_that_fails_or_hangs_keeps_its_rows_and_the_next_one_runs(parts, capsys):
    parts |= {
        "fails": accelerator.Part(60),
        "hangs": accelerator.Part(6),
        "needs": accelerator.Part(60, ("jax", "no_such_package")),
        "works": accelerator.Part(60),
    }
    written = []
    names = ["fails", "hangs", "needs", "works"]
    found = accelerator.measure(names, 5, True, lambda now: written.append(json.dumps(now)))
    of = found["parts"]
    first = {"ms": 1.5, "tiny": True}
    assert of["fails"]["rows"] == {"fails first": first}
    assert "exit code 1" in of["fails"]["failed"]
    assert accelerator.reason(of["fails"]) == "ValueError: no such kernel"
    assert of["hangs"]["failed"] == "not done after 6 s"
    assert of["hangs"]["rows"]["hangs first"] == first
    assert ended(of["hangs"]["rows"]["child"]["pid"])  # what it had started
    assert of["needs"] == {"skipped": "missing: pip install no_such_package"}
    assert of["works"]["failed"] is None and len(of["works"]["rows"]) == 2
    kept = [list(json.loads(text)["parts"]) for text in written]
    assert kept == [names[: n + 1] for n in range(4)]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "fails: ValueError: no such kernel" and said[-1] == "works: done"
    lines = accelerator.table(json.loads(written[-1])).splitlines()
    assert "| fails | fails first | ms 1.5, tiny True |" in lines
    assert "| fails | not measured | ValueError: no such kernel |" in lines
    assert "| works | works second | failed RuntimeError: one row |" in lines


def test_a_part_that_says_nothing_has_failed(parts, tmp_path):
    (tmp_path / "script.py").write_text("print('done')")
    [found] = accelerator.measure(["works"], 5, False, id)["parts"].values()
    assert found["failed"].startswith("it said nothing")


def test_no_part_begins_behind_the_end(parts):
    found = accelerator.measure(["works"], 0.05, False, id)["parts"]
    assert found["works"] == {"skipped": "the 0.05 minutes were over"}


@pytest.mark.parametrize(
    "version, said",
    [
        (None, "JAX is missing"),
        ("0.9.2", "0.10 to 0.12"),
        ("0.13.0", "0.10 to 0.12"),
        ("0.10.0", ""),
        ("0.12.3", ""),
    ],
)
def test_other_versions_of_jax_are_refused(version, said):
    found = accelerator.version_problem({"jax": version})
    assert said in found if said else found == ""


def test_packages_are_those_that_the_project_depends_on():
    versions = accelerator.packages()
    assert {"ml-collections", "flax", "trl", "jaxlib"} <= set(versions)
    lacking = versions | {"ml-collections": None}
    assert accelerator.missing(accelerator.PARTS["step"], lacking) == ["ml-collections"]
    assert accelerator.missing(accelerator.PARTS["logprob"], lacking) == []
    assert all(callable(vars(accelerator_parts)[name]) for name in accelerator.PARTS)


def rows(name: str, capsys) -> dict:
    """What a part says at its tiny sizes."""
    vars(accelerator_parts)[name](True)
    return accelerator.rows_of(capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_the_fused_logprob_is_compared_with_products_in_float32(capsys, monkeypatch):
    for name in ("forward", "backward"):  # the part puts interpreted ones in their place
        monkeypatch.setattr(logprob_kernel, name, vars(logprob_kernel)[name])
    found = rows("logprob", capsys)
    assert [row.split()[0] for row in found] == ["pallas_gpu", "xla", "plain"]
    for figures in found.values():
        assert "failed" not in figures, figures
        assert figures["logprob_error_nats"] < 1e-5 > figures["entropy_error_nats"]
        assert 0 < figures["head_gradient_error"] < 0.01 > figures["hidden_gradient_error"]
        assert 0 < figures["forward_ms"]


def test_a_form_that_is_wrong_or_fails_shows(capsys, monkeypatch):
    forms = accelerator_parts._logprob_forms  # before it is replaced
    for name in ("forward", "backward"):
        monkeypatch.setattr(logprob_kernel, name, vars(logprob_kernel)[name])

    def wrong():
        right = forms()["plain"]

        def shifted(*arrays):
            return tuple(x + 0.25 for x in right(*arrays))

        def fails(*arrays):
            raise ValueError("no memory")

        return {"shifted": shifted, "fails": fails, "plain": right}

    monkeypatch.setattr(accelerator_parts, "_logprob_forms", wrong)
    shifted, fails, plain = rows("logprob", capsys).values()
    assert shifted["logprob_error_nats"] == pytest.approx(0.25, abs=1e-3)
    assert fails == {"failed": "ValueError: no memory"} and plain["forward_ms"] > 0


def test_gae_is_compared_with_its_definition(capsys, monkeypatch):
    monkeypatch.setattr(gae_kernel, "gae", gae_kernel.gae)
    found = rows("gae", capsys)
    assert len(found) == 2
    for figures in found.values():
        assert "failed" not in figures, figures
        assert figures["advantage_error"] < 1e-5 > figures["return_error"]


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, accelerator.HERE / "accelerator.py", "--tiny", "--minutes=20"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([*command, f"--json={path}"], check=True, env=environment)
    found = json.loads(path.read_text())["parts"]
    assert list(found) == list(accelerator.PARTS)
    for name, part in found.items():
        if name == "trl" and "skipped" in part:
            continue
        assert part["failed"] is None, part
        assert not [row for row in part["rows"].values() if "failed" in row], part
    assert found["step"]["rows"]["peak memory of the process"]["planned_over_measured"] > 0.5
