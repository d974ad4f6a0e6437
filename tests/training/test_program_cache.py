"""Where compiled programs are kept, what is said of them, and why a restart finds none."""

import json
import logging

import fsspec
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from rljax.config import Config
from rljax.tracking import compiles
from rljax.training import program_cache
from rljax.training.program_cache import ProgramCache, changed, said
from rljax.training.run_folder import RunFolder

_OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A home of its own, every program kept, and afterwards the cache of the other tests."""
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(program_cache, "LEAST_S", 0.0)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def start(url, run_dir, factor) -> tuple[compiles.Compiled, list[str]]:
    """One start of a run that compiles a program -> what was compiled, what was said."""
    jax.clear_caches()
    begun, lines = compiles.count(), []
    with ProgramCache(Config(compilation_cache=url), RunFolder(run_dir), say=lines.append) as cache:
        step = jax.jit(lambda x: x * factor + 1)
        for _ in range(3):
            step(np.arange(4.0, dtype=np.float32)).block_until_ready()
            cache.after_step()
    return compiles.since(begun), lines


def test_a_url_is_copied_here_and_new_programs_are_put_back(tmp_path):
    url = f"memory://programs/{tmp_path.name}"
    first, lines = start(url, tmp_path / "run", 3)
    assert first.programs > 0 and first.hits == 0
    assert lines == [f"compiled {first.programs} programs in 0 s, 0 from the cache"]
    kept = fsspec.filesystem("memory").find(url.removeprefix("memory:/"))
    assert len(kept) == first.programs and all("jax-" in name for name in kept)
    (here,) = (tmp_path / "home" / ".cache" / "rljax" / "jax").iterdir()
    for path in here.iterdir():  # another machine
        path.unlink()
    reset_cache()
    again, lines = start(url, tmp_path / "run", 3)
    assert (again.programs, again.hits) == (first.programs, first.programs)
    assert lines[0].endswith(f"{again.hits} from the cache")
    assert {p.name for p in here.iterdir() if p.name[0] != "."} >= {
        name.rpartition("/")[2] for name in kept
    }


def test_a_folder_is_used_as_it_is(tmp_path):
    done, _ = start(str(tmp_path / "kept"), tmp_path / "run", 5)
    assert len(list((tmp_path / "kept").glob("*-cache"))) == done.programs
    assert start("", tmp_path / "run", 7)[1] == []  # nothing is kept, nothing said


def test_a_store_that_fails_costs_the_compiling_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rljax.runs.store.PAUSES_S", ())
    monkeypatch.setattr(logging.getLogger("rljax"), "propagate", True)
    url = f"memory://broken/{tmp_path.name}"
    fsspec.filesystem("memory").pipe_file(f"/broken/{tmp_path.name}", b"no folder")
    done, _ = start(url, tmp_path / "run", 9)
    assert done.programs > 0 and "could not be kept" in caplog.text


@pytest.mark.parametrize(
    "before, now, text",
    [
        ({"jaxlib": "1", "flags": "a"}, {"jaxlib": "2", "flags": "a"}, "changed: jaxlib: 1 -> 2"),
        ({"jaxlib": "1"}, {"jaxlib": "1"}, "are as they were, and moved from a to b"),
    ],
)
def test_a_restart_that_finds_nothing_says_what_has_changed(before, now, text, tmp_path, caplog):
    rows = [
        {"time": 1.0, "host": "a", "step": 0, "compiled_for": before},
        {"time": 2.0, "host": "b", "step": 4, "compiled_for": now},
    ]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logging.getLogger("rljax").propagate = True
    start(str(tmp_path / "kept"), tmp_path, 11)
    assert text in caplog.text and "none of" in caplog.text
    caplog.clear()
    reset_cache()
    start(str(tmp_path / "kept"), tmp_path, 11)
    assert caplog.text == ""  # found


def test_hosts_that_found_others_are_named():
    one, other = compiles.Compiled(9, 0, 412.3, 80.0), compiles.Compiled(9, 7, 30.0, 8.0)
    assert said([one], ["a"]) == "compiled 9 programs in 412 s, 0 from the cache"
    assert said([one, one], ["a", "b"]).endswith("0 from the cache, on each of 2 hosts")
    assert said([one, other, one], "abc").endswith("0 from the cache (b: 9 and 7)")


def test_changes_are_told_of_facts_that_come_and_go():
    assert changed({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == [
        "b: 2 -> nothing",
        "c: nothing -> 3",
    ]
    assert changed(None, {"a": "1"}) == []  # a start of an older version
