"""Checkpoints alone: what is kept, what damage is noticed, that arrays come back bitwise."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_run import flat_bytes

from rljax.config import Config, fingerprints
from rljax.config.flags import with_texts
from rljax.errors import InputError
from rljax.setup.checkpoint import Checkpoints, check_fingerprints


def arrays(value: float) -> dict:
    return {"w": jnp.full((3,), value), "n": jnp.asarray(int(value), jnp.int32)}


def save(checkpoints, step, **metrics):
    return checkpoints.save(step, arrays(step), {"at": step, "metrics": metrics})


def value_at(checkpoints, step):
    return float(checkpoints.read_arrays(step, arrays(0))["w"][0])


# -- what is kept --


def test_the_newest_are_kept_and_each_holds_its_own_arrays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 2, 9, 10):
        save(checkpoints, step)
    assert checkpoints.steps() == [9, 10]
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest() == 10 and again.read_state(9)["at"] == 9
    assert [value_at(again, step) for step in (9, 10)] == [9.0, 10.0]


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
    assert (tmp_path / ".00000005").exists()
    assert checkpoints.latest() == 4 and value_at(checkpoints, 4) == 4.0
    save(checkpoints, 5)
    assert checkpoints.steps() == [5] and not (tmp_path / ".00000005").exists()


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


def test_every_file_truncated_or_altered_or_deleted_is_noticed(saved, tmp_path):
    names = [p.relative_to(saved / "00000002") for p in files_of(saved / "00000002")]
    assert {"state.json", "manifest.json"} < {str(n) for n in names} and len(names) > 6

    def truncate(path):
        path.write_bytes(path.read_bytes()[:-1])

    def flip(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    tried = 0
    for name in names:
        for harm in (
            truncate,
            flip,
            lambda path: path.unlink(),
            lambda path: path.write_bytes(b""),
        ):
            folder = tmp_path / str(tried)
            shutil.copytree(saved, folder)
            path = folder / "00000002" / name
            if path.stat().st_size == 0 and harm in (truncate, flip):
                continue
            before = path.read_bytes()
            harm(path)
            if not path.exists() or path.read_bytes() != before:
                if name.name == "manifest.json" and harm is flip:
                    with pytest.warns(UserWarning, match="step 2 is damaged"):
                        assert Checkpoints(folder).latest() == 1  # the flipped entry is blamed
                else:
                    assert_falls_back(folder, path)
                tried += 1
            shutil.rmtree(folder, ignore_errors=True)
    assert tried > 3 * len(names) - 3


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
    with pytest.raises(InputError, match="data"):
        check_fingerprints({"data": "1", "steps": "2"}, {"steps": "2"}, ())
    with pytest.raises(InputError, match="new_field"):
        check_fingerprints({"steps": "2"}, {"steps": "2", "new_field": "1"}, ())


def test_where_a_run_writes_and_how_often_it_saves_is_not_part_of_it():
    config = Config(run_dir="elsewhere", trackers=("wandb",), export=False, compilation_cache="x")
    config.checkpoint.every_steps, config.checkpoint.keep = 3, 9
    config.checkpoint.allow_changed = ("data",)
    assert fingerprints(config) == fingerprints(Config())
    assert fingerprints(Config(seed=1)) != fingerprints(Config())


# -- arrays --


def test_arrays_of_every_kind_come_back_bitwise_with_their_shardings(tmp_path):
    devices = np.array(jax.devices())
    assert devices.size == 8
    mesh = jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b"))
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
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
        {"w": jnp.zeros((2,)), "n": jnp.asarray(0)},
        {"w": jnp.zeros((3,)), "n": jnp.asarray(0), "more": jnp.zeros(())},
        {"w": jnp.zeros((3,))},
    ],
    ids=["longer", "shorter", "more", "fewer"],
)
def test_arrays_that_do_not_fit_are_refused(saved, other):
    with pytest.raises(InputError, match="00000002/arrays does not fit the model and optimizer"):
        Checkpoints(saved).read_arrays(2, other)


def test_the_manifest_lists_every_file(saved):
    listed = json.loads((saved / "00000002" / "manifest.json").read_text())["files"]
    there = {str(p.relative_to(saved / "00000002")) for p in files_of(saved / "00000002")}
    assert there - {"manifest.json"} == set(listed)
