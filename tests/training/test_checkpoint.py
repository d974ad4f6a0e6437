"""Checkpoints alone: what is kept, what damage is noticed, that arrays come back bitwise."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tiny_run import flat_bytes

from rljax.checkpoint.checkpoint import Checkpoints, check_fingerprints
from rljax.config import Config, fingerprints
from rljax.config.texts import with_texts
from rljax.errors import InputError
from rljax.training.progress import Progress


def arrays(value: float) -> dict:
    return {"w": jnp.full((3,), value), "n": jnp.asarray(int(value), jnp.int32)}


def save(checkpoints, step, **metrics):
    return checkpoints.save(step, arrays(step), {"at": step, "metrics": metrics})


def value_at(checkpoints, step):
    return float(checkpoints.read_arrays(step, arrays(0))["w"][0])


# -- what is kept --


@pytest.mark.smoke
def test_the_newest_are_kept_and_each_holds_its_own_arrays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 9, 10):
        save(checkpoints, step)
    assert checkpoints.steps() == [9, 10]
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest() == 10 and again.read_state(9)["at"] == 9
    assert [value_at(again, step) for step in (9, 10)] == [9.0, 10.0]


@pytest.mark.parametrize("name", ["[lr=1e-4]", "a\\b", "a\\", "a*", "a?b", "[!a]", "gs:"])
def test_a_folder_may_have_any_name(tmp_path, name):
    """Libraries glob the path, or read another folder or a URL in it."""
    for sibling in ("ab", "aXb"):  # that a glob would take for the folder, in the midst of a save
        arrays_of_others = tmp_path / sibling / ".00000001/arrays/ocdbt.process_9"
        arrays_of_others.mkdir(parents=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    checkpoints = Checkpoints(tmp_path / name, keep=1)
    checkpoints.prepare()
    save(checkpoints, 1)
    assert checkpoints.latest() == 1 and value_at(checkpoints, 1) == 1.0
    some = checkpoints.storage.read_some(1, {"n": arrays(0)["n"]}, AssertionError)
    assert int(some["n"]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, name])


@pytest.mark.parametrize("years", [1, -1, 30])
def test_a_clock_that_jumps_fails_no_save(tmp_path, monkeypatch, years):
    """At every other look at the wall clock it is another year."""
    real, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + next(looks) % 2 * years * 365 * 86_400)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.latest() == 3 and value_at(checkpoints, 3) == 3.0
    assert next(looks) > 10


def test_the_best_is_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, best_metric="eval/accuracy")
    for step, accuracy in ((1, 0.2), (2, 0.7), (3, 0.7), (4, 0.1)):
        save(checkpoints, step, **{"eval/accuracy": accuracy})
    save(checkpoints, 5)  # not measured at that step
    assert checkpoints.best() == 2 and checkpoints.steps() == [2, 5]
    assert value_at(checkpoints, 2) == 2.0
    save(checkpoints, 6, **{"eval/accuracy": 0.9})
    assert checkpoints.best() == 6 and checkpoints.steps() == [6]


@pytest.mark.parametrize("content", ["", "[]", "null", '{"metrics": 1}', '{"metrics": {"m": "x"}}'])
def test_a_damaged_state_is_not_the_best(tmp_path, content):
    checkpoints = Checkpoints(tmp_path, keep=2, best_metric="m")
    save(checkpoints, 1, m=1.0)
    save(checkpoints, 2, m=9.0)
    (checkpoints.path(2) / "state.json").write_text(content)
    assert checkpoints.best() == 1
    save(checkpoints, 3)  # pruning looks for the best


def test_a_damaged_newer_one_does_not_push_out_what_is_saved_after_the_fallback(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, best_metric="m")
    save(checkpoints, 2, m=1.0)
    save(checkpoints, 8, m=0.5)
    (checkpoints.path(8) / "state.json").write_text("")
    with pytest.warns(UserWarning, match="step 8 is damaged"):
        assert checkpoints.latest() == 2
    save(checkpoints, 3)  # a SIGTERM right after the resume from 2
    assert checkpoints.steps() == [2, 3] and checkpoints.latest() == 3


def test_a_half_written_folder_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 4)
    shutil.copytree(checkpoints.path(4), tmp_path / ".00000006")  # killed just before the rename
    (tmp_path / ".00000007").mkdir()
    assert checkpoints.steps() == [4] and checkpoints.latest() == 4
    again = Checkpoints(tmp_path, keep=3)
    assert again.latest() == 4 and (tmp_path / ".00000006").exists()  # a reader removes nothing
    again.prepare()
    assert [p.name for p in tmp_path.iterdir()] == ["00000004"]


def test_a_save_that_dies_leaves_the_one_before_as_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 4)
    with pytest.raises(TypeError):  # dies after the arrays are on disk
        checkpoints.save(5, arrays(5), {"not JSON": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["00000004"]
    assert checkpoints.latest() == 4 and value_at(checkpoints, 4) == 4.0
    save(checkpoints, 5)
    assert checkpoints.steps() == [5]


# -- damage --


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2; copied by each test."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder, keep=2)
    save(checkpoints, 1)
    save(checkpoints, 2)
    return folder


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def assert_falls_back(folder, damaged_file):
    """To step 1, with a warning that names the file."""
    checkpoints = Checkpoints(folder, keep=2)
    expected = "step 2 is damaged.*" + re.escape(str(damaged_file))
    with pytest.warns(UserWarning, match=expected):
        assert checkpoints.latest() == 1
    assert value_at(checkpoints, 1) == 1.0


def flip(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


HARMS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: None,
    "renamed": lambda path: path.rename(f"{path}.old"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "that of the step before": lambda path: shutil.copy(
        str(path).replace("00000002", "00000001"), path
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", HARMS)
def test_whatever_becomes_of_any_file_is_noticed(saved, tmp_path, kind):
    names = [p.relative_to(saved / "00000002") for p in files_of(saved / "00000002")]
    assert {"state.json", "manifest.json"} < {str(n) for n in names} and len(names) > 6
    tried = 0
    for number, name in enumerate(names):
        folder = shutil.copytree(saved, tmp_path / str(number))
        path = folder / "00000002" / name
        before = path.read_bytes()
        if kind == "that of the step before":
            other = folder / "00000001" / name
            if not other.exists() or other.read_bytes() == before:
                continue
        elif not before and kind in ("truncated", "flipped", "empty"):
            continue
        elif kind not in ("truncated", "flipped", "longer", "empty", "renamed"):
            path.unlink()
        HARMS[kind](path)
        # Of a flipped manifest the entry that is wrong now is blamed.
        assert_falls_back(folder, path if (kind, path.name) != ("flipped", "manifest.json") else "")
        tried += 1
    assert tried >= 3


def with_hash(folder, *, without: str = "", **contents: bytes):
    """Writes files of a checkpoint, and its manifest anew, so that every hash is right; `without`
    is left out of the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, data in contents.items():
        (folder / f"{name}.json").write_bytes(data)
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["files"][f"{name}.json"] = facts
    manifest["files"].pop(without, None)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b'{"at": 2}',
        b'{"step": 1, "at": 1}',
        b'{"step": "2"}',
        b'{"progress": {"taken": {"sft": 1}}}',
        b'{"progress": {"taken": [2]}}',
        b"\xff\xfe",
        b'{"progress": {"taken": {"sft": "2"}}}',
        b"[" * 100_000,
        b'{"step": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_state_of_another_step_or_shape_is_damage_whatever_its_hash(saved, tmp_path, state):
    folder = shutil.copytree(saved, tmp_path / "run")
    with_hash(folder / "00000002", state=state)
    assert_falls_back(folder, folder / "00000002" / "state.json")


def test_a_state_that_has_its_step_in_its_progress_alone_is_taken(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run")
    with_hash(folder / "00000002", state=b'{"progress": {"taken": {"sft": 1, "rl": 1}}}')
    assert Checkpoints(folder).latest() == 2


@pytest.mark.parametrize("harm", [flip, lambda path: path.unlink(), lambda path: None])
def test_a_file_that_the_manifest_does_not_list_is_damage(saved, tmp_path, harm):
    names = [p.relative_to(saved / "00000002") for p in files_of(saved / "00000002")]
    for number, name in enumerate(n for n in names if n.name != "manifest.json"):
        folder = shutil.copytree(saved, tmp_path / str(number))
        path = folder / "00000002" / name
        if path.stat().st_size or harm is not flip:
            harm(path)
        with_hash(folder / "00000002", without=str(name))
        if path.exists() or name.name == "state.json":
            at = path if name.name != "state.json" else folder / "00000002" / "manifest.json"
            assert_falls_back(folder, at)
        else:  # neither there nor listed: what can be read is right
            with contextlib.suppress(InputError):
                assert value_at(Checkpoints(folder), 2) == 2.0


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_change_of_any_bytes_falls_back_or_changes_nothing(saved, data):
    files = files_of(saved / "00000002")
    name = data.draw(st.sampled_from([p.relative_to(saved) for p in files if p.stat().st_size]))
    before = (saved / name).read_bytes()
    start = data.draw(st.integers(0, len(before)))
    end = data.draw(st.integers(start, min(len(before), start + 20)))
    new = data.draw(
        st.one_of(st.binary(max_size=30), st.text('{}[]",:0123', max_size=30).map(str.encode))
    )
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(saved, Path(place) / "run")
        (folder / name).write_bytes(before[:start] + new + before[end:])
        checkpoints = Checkpoints(folder)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step = checkpoints.latest()
        assert checkpoints.read_state(step)["at"] == step and value_at(checkpoints, step) == step
        assert (step, len(said)) in ((2, 0), (1, 1))


@pytest.mark.parametrize("name", ["²", "٣", "3", "0003", "1e3", "-0000003", "0000000x", "9" * 40])
def test_folders_that_are_no_checkpoints_are_left_alone(saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "run")
    (folder / name).mkdir()
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.prepare()
    assert checkpoints.steps() == [1, 2] and checkpoints.latest() == 2
    save(checkpoints, 3)
    assert checkpoints.steps() == [3] and (folder / name).is_dir()


@pytest.mark.parametrize("kind", ["a pipe", "a link to nothing", "a link to itself", "a device"])
def test_what_a_save_cannot_replace_is_found_before_the_run(saved, tmp_path, kind):
    folder = shutil.copytree(saved, tmp_path / "run")
    HARMS[kind](folder / "00000003")
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() == 2
    with pytest.raises(InputError, match="00000003 is no folder"):
        checkpoints.prepare()
    (folder / "00000003").unlink()
    HARMS[kind](folder / ".00000003")  # of a save, whatever it was
    checkpoints.prepare()
    save(checkpoints, 3)
    assert checkpoints.latest() == 3


def test_what_is_no_folder_holds_no_checkpoints(tmp_path):
    for number, kind in enumerate(("a pipe", "a link to nothing", "a device")):
        HARMS[kind](tmp_path / str(number))
        assert Checkpoints(tmp_path / str(number)).steps() == []
        assert Checkpoints(tmp_path / str(number)).latest() is None


def test_progress_of_other_types_is_one_error():
    right = dataclasses.asdict(Progress("rl", {"sft": 1, "rl": 2}, faults={"x": 1.0}))
    assert Progress.from_dict(dict(right)).step == 3
    values = [None, True, 3, -0.5, float("nan"), "x", [], [1], {}, {"sft": 1}, {"sft": "1"}]
    values += [{"sft": None}, {"sft": {}}, [{}], {"value": 0.5, "low": 0.1}]
    taken = 0
    for name in right:
        for value in values:
            try:
                progress = Progress.from_dict({**right, name: value})
            except InputError:
                continue
            taken += 1
            assert isinstance(progress.step + progress.sft_steps + progress.prompts, int)
            assert isinstance(progress.elapsed_s + sum(progress.faults.values()), float)
    assert 3 * len(right) < taken < 6 * len(right)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "null",
        "\x00" * 50,
        "not JSON",
        '{"step": 2}',
        '{"step": 2, "files": {}}',
        "[" * 100_000,
        '{"step": ' * 100_000,
        '{"step": 2, "files": {"state.json": {"bytes": 1, "sha256": ""}}}',
        '{"step": 2, "files": null}',
        '{"step": 2, "files": ["arrays/x", "state.json"]}',
        '{"step": 2, "files": {"arrays/x": 3, "state.json": 3}}',
        '{"step": 1, "files": {}}',
    ],
)
def test_a_manifest_that_says_nothing_is_damage(saved, tmp_path, content):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    path = folder / "00000002" / "manifest.json"
    path.write_text(content)
    missing = folder / "00000002" / "arrays/x"
    assert_falls_back(folder, missing if '"arrays/x": 3' in content else path)


def test_missing_folders_are_damage(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "00000002" / "arrays")
    assert_falls_back(folder, folder / "00000002" / "arrays")
    shutil.rmtree(folder / "00000002")
    (folder / "00000002").mkdir()
    assert_falls_back(folder, folder / "00000002" / "manifest.json")


def test_a_folder_renamed_to_another_step_is_damage(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    shutil.copytree(folder / "00000001", folder / "00000003")
    with pytest.warns(UserWarning, match="00000003/manifest.json is that of step 1"):
        assert Checkpoints(folder).latest() == 2


def test_all_damaged_is_an_error_that_names_a_file(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    for step in ("00000001", "00000002"):
        (folder / step / "state.json").write_text("x")
    with pytest.warns(UserWarning) as caught:
        with pytest.raises(
            InputError, match="all 2 checkpoints are damaged.*state.json has 1 byte"
        ):
            Checkpoints(folder).latest()
    assert ["step 2" in str(caught[0].message), "step 1" in str(caught[1].message)] == [True, True]


# -- fingerprints --


def test_a_changed_field_is_refused_by_name_and_let_through_by_name():
    before, config = fingerprints(Config()), Config()
    config.actor_optimizer.lr = 3e-4
    config.batch.epochs = 2
    now = fingerprints(config)
    with pytest.raises(InputError, match=r"\['actor_optimizer.lr', 'batch.epochs'\]") as error:
        check_fingerprints(before, now, ())
    # What the message tells the user to pass works.
    offered = str(error.value).split("allow_changed=")[1]
    texts = {"checkpoint.allow_changed": offered}
    offered = with_texts(Config(), texts, "", "").checkpoint.allow_changed
    assert offered == ("actor_optimizer.lr", "batch.epochs")
    with pytest.raises(InputError, match=r"got \['batch.epochs'\]"):
        check_fingerprints(before, now, ("actor_optimizer.lr",))
    check_fingerprints(before, now, offered)
    check_fingerprints(before, before, ())


def test_a_field_of_only_one_side_is_a_change():
    own = fingerprints(Config())
    with pytest.raises(InputError, match=r"got \['data'\]"):
        check_fingerprints({**own, "data": "1"}, own, ())
    with pytest.raises(InputError, match=r"got \['new_field'\]"):
        check_fingerprints(own, {**own, "new_field": "1"}, ())


def test_where_a_run_writes_and_how_often_it_saves_is_not_part_of_it():
    config = Config(run_dir="elsewhere", trackers=("wandb",), export=False, compilation_cache="x")
    config.checkpoint.every_steps, config.checkpoint.keep = 3, 9
    config.checkpoint.allow_changed = ("data",)
    assert fingerprints(config) == fingerprints(Config())
    assert fingerprints(Config(seed=1)) != fingerprints(Config())


# -- arrays --


@pytest.mark.slow
def test_arrays_of_every_kind_come_back_bitwise_with_their_shardings(tmp_path):
    devices = np.array(jax.devices())
    assert devices.size == 8
    mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b"))

    def place(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    key = jax.random.key(0)
    params = {
        "sharded": place(jax.random.normal(key, (8, 12)), "a", "b"),
        "half": place(jax.random.normal(key, (16,), jnp.bfloat16), "b"),
        "odd values": place(jnp.array([jnp.nan, -jnp.inf, -0.0, 1e-45, 3.4e38]), None),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tree = {
        "params": params,
        "opt_state": jax.tree.map(
            lambda x: place(x + 1) if x.ndim == 0 else x, optimizer.init(params)
        ),
        "step": place(jnp.asarray(7, jnp.int32)),
        "bytes": place(jnp.arange(8, dtype=jnp.uint8), "a"),
        "flags": place(jnp.array([True, False]), "a"),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, tree, {})
    like = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), tree)
    found = checkpoints.read_arrays(3, like)
    assert jax.tree.structure(found) == jax.tree.structure(tree)  # NamedTuples of optax too
    assert flat_bytes(found) == flat_bytes(tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    # Onto another layout: the same numbers.
    whole = jax.tree.map(lambda x: place(jnp.zeros(x.shape, x.dtype)), tree)
    moved = checkpoints.read_arrays(3, whole)
    assert flat_bytes(moved) == flat_bytes(tree)
    assert moved["params"]["sharded"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    "other",
    [
        {"w": jnp.zeros((4,)), "n": jnp.asarray(0)},
        {"w": jnp.zeros((3,))},
        pytest.param({"w": jnp.zeros((2,)), "n": jnp.asarray(0)}, marks=pytest.mark.slow),
        pytest.param(
            {"w": jnp.zeros((3,)), "n": jnp.asarray(0), "more": jnp.zeros(())},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["longer", "fewer", "shorter", "more"],
)
def test_arrays_that_do_not_fit_are_refused(saved, other):
    with pytest.raises(InputError, match="00000002/arrays does not fit the model and optimizer"):
        Checkpoints(saved).read_arrays(2, other)


def test_the_manifest_lists_every_file(saved):
    listed = json.loads((saved / "00000002" / "manifest.json").read_text())["files"]
    there = {str(p.relative_to(saved / "00000002")) for p in files_of(saved / "00000002")}
    assert there - {"manifest.json"} == set(listed)
