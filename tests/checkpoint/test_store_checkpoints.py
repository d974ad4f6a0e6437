"""Checkpoints under a URL: what a store that fails, truncates, is slow or alters bytes makes of
them."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import brittle
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brittle import FAULTS, Brittle
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from on_hosts import host_environment
from spent import at_most
from tiny_run import flat_bytes

from rljax.checkpoint import pieces
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.errors import InputError
from rljax.runs import store as stores

URL = "brittle://bucket/run/checkpoints"


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    """The folder of the store; nothing goes wrong in it yet."""
    monkeypatch.setenv("BRITTLE", str(tmp_path))
    monkeypatch.setattr(stores, "PAUSES_S", (0.0, 0.0, 0.0))
    yield tmp_path / "bucket"
    FAULTS.update(dict.fromkeys(FAULTS, 0))
    Brittle.hold.set()


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)])


def arrays(value: float, over: Mesh | None = None) -> dict:
    over = over or mesh(4, 2)

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(over, PartitionSpec(*axes)))

    rows = jnp.arange(16 * 8, dtype=jnp.float32).reshape(16, 8)
    y = "y" if len(over.axis_names) > 1 else None
    return {
        "w": put(rows * value, "x", y),
        "b": put(jnp.full((16,), value, jnp.bfloat16), "x"),
        "codes": put(jnp.arange(32, dtype=jnp.int8) % 7, None),
        "state": {
            "count": put(jnp.asarray(int(value), jnp.int32)),
            "empty": put(jnp.zeros((0, 3))),
        },
    }


def save(checkpoints, step, **metrics):
    checkpoints.save(step, arrays(step), {"at": step, "metrics": metrics})


def assert_holds(checkpoints, step, over=None):
    read = checkpoints.read_arrays(step, arrays(0, over))
    assert flat_bytes(read) == flat_bytes(arrays(step, over))
    return read


def test_the_newest_and_the_best_are_kept_and_come_back_bitwise_on_other_meshes():
    checkpoints = Checkpoints(URL, keep=2, best_metric="accuracy")
    checkpoints.prepare()
    assert checkpoints.latest() is None
    for step, accuracy in ((1, 0.1), (2, 0.9), (9, 0.2), (10, 0.3)):
        save(checkpoints, step, accuracy=accuracy)
    assert checkpoints.steps() == [2, 9, 10] and checkpoints.best() == 2
    again = Checkpoints(URL)
    assert again.latest() == 10 and again.read_state(9)["at"] == 9
    for other in (None, mesh(2, 4), mesh(8), mesh(1), mesh(2, 1)):
        read = assert_holds(again, 9, other)
        assert read["w"].sharding == arrays(0, other)["w"].sharding


@pytest.mark.smoke
def test_arrays_of_several_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    checkpoints = Checkpoints(URL)
    save(checkpoints, 3)
    count = len(checkpoints.storage.sizes(3))
    assert count > 5 and checkpoints.latest() == 3
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)  # whoever reads goes by the index
    assert_holds(checkpoints, 3, mesh(2, 2))


def test_of_a_part_the_rows_that_are_wanted_are_read_once(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(pieces, "KEPT", 1)
    checkpoints, alone = Checkpoints(URL), arrays(3, mesh(1))
    checkpoints.save(3, alone, {"at": 3})
    reader, reads = checkpoints.storage._reader(3), Brittle.reads
    whole = np.asarray(reader.array("w", arrays(0)["w"]))  # 512 bytes, for eight devices
    assert whole.tobytes() == np.asarray(alone["w"]).tobytes() and Brittle.reads - reads <= 9
    for low in range(16):
        reads = Brittle.reads
        part = reader._part(reader.locations["w"][0].rows(low, low + 1, 4), np.dtype(np.float32))
        assert part.tobytes() == whole[low].tobytes() and Brittle.reads - reads <= 2


def test_other_arrays_are_refused_by_name():
    checkpoints = Checkpoints(URL)
    save(checkpoints, 3)
    like = arrays(0)
    for wrong, said in (
        ({**like, "w": jnp.zeros((4, 6))}, r"w is float32\[16, 8\], not float32\[4, 6\]"),
        ({**like, "b": like["b"].astype(jnp.float32)}, r"b is bfloat16\[16\], not float32\[16\]"),
        ({**like, "v": like["b"]}, r"v is missing"),
    ):
        with pytest.raises(InputError, match=said):
            checkpoints.read_arrays(3, wrong)
    some = checkpoints.read_arrays(3, {"state": {"count": like["state"]["count"]}}, some=True)
    assert int(some["state"]["count"]) == 3


@pytest.mark.parametrize("faults", ["fail=3", "truncate=3", "fail=3,truncate=4,fail_read=3"])
def test_a_store_that_fails_now_and_then_costs_nothing(faults, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)
    brittle.configure(faults)
    checkpoints = Checkpoints(URL, keep=2)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.latest() == 3 and checkpoints.steps() == [2, 3]
    assert_holds(checkpoints, 2)
    assert_holds(checkpoints, 3)


@pytest.mark.parametrize("faults", ["broken=1", "truncate=1", "forbidden=1"])
def test_a_store_that_stays_broken_fails_the_save_and_keeps_the_one_before(faults, caplog):
    checkpoints = Checkpoints(URL, keep=1)
    save(checkpoints, 1)
    brittle.configure(faults)
    checkpoints.start_save(2, arrays(2), {"at": 2})
    with pytest.raises(InputError, match="the checkpoint of step 2 could not be written.*step 1"):
        checkpoints.wait()
    assert "step 2 is not saved" in caplog.text  # at once, whoever waits
    FAULTS.update(dict.fromkeys(FAULTS, 0))
    again = Checkpoints(URL, keep=1)
    again.prepare()
    assert again.steps() == [1] == again.storage._folders() and again.latest() == 1
    save(again, 2)
    assert again.steps() == [2]


def test_what_is_saved_is_what_was_there_when_the_save_began():
    """Steps go on, and overwrite the arrays, while a slow store is written."""
    checkpoints = Checkpoints(URL)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    now, like = arrays(5), arrays(0)
    Brittle.hold.clear()
    checkpoints.start_save(5, now, {"at": 5})
    for _ in range(3):
        now = step(now)
        checkpoints.check()  # raises nothing, and does not wait
    assert checkpoints.steps() == []
    Brittle.hold.set()
    checkpoints.wait()
    assert flat_bytes(checkpoints.read_arrays(5, like)) == flat_bytes(arrays(5))


def test_a_failure_is_raised_at_the_next_look_without_a_wait():
    checkpoints = Checkpoints(URL)
    brittle.configure("broken=1")
    checkpoints.start_save(5, arrays(5), {"at": 5})
    checkpoints._saving.join()
    with pytest.raises(InputError, match="step 5 could not be written"):
        checkpoints.check()
    checkpoints.check()  # once


# -- damage --


def objects(bucket) -> list[Path]:
    return sorted(p for p in (bucket / "run/checkpoints/00000002").rglob("*") if p.is_file())


def harm(path: Path, kind: str, rng: random.Random, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "longer":
        data += bytes(rng.randrange(1, 9))
    elif kind == "zeros":
        at = rng.randrange(len(data))
        data[at : at + 9] = bytes(len(data[at : at + 9]))
    elif kind == "older":  # the object of the step before
        data = bytearray(Path(str(path).replace("00000002", "00000001")).read_bytes())
    elif kind == "exchanged":
        data = bytearray(rng.choice(others).read_bytes())
    path.write_bytes(data)
    if kind == "deleted":
        path.unlink()


@pytest.mark.hosts
def test_of_200_corruptions_none_is_loaded_silently(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 150)
    checkpoints = Checkpoints(URL)
    save(checkpoints, 1)
    save(checkpoints, 2)
    whole = tmp_path / "whole"
    shutil.copytree(bucket, whole)
    rng, outcomes = random.Random(0), {"fell back": 0, "nothing changed": 0}
    kinds = ("flip", "cut", "longer", "zeros", "older", "exchanged", "deleted")
    names = ["manifest.json", "state.json", "arrays/0000.json"]
    for number in range(200):
        shutil.rmtree(bucket)
        shutil.copytree(whole, bucket)
        files = objects(bucket)
        named = [p for p in files if str(p).endswith(names[number % 3])]
        path = named[0] if number % 2 else rng.choice(files)
        before = path.read_bytes()
        harm(path, kinds[number % len(kinds)], rng, files)
        changed = not path.exists() or path.read_bytes() != before
        step, read = newest(Checkpoints(URL))
        assert flat_bytes(read) == flat_bytes(arrays(step)), (number, path)
        # A manifest that is gone, or says the same in other bytes, is no damage.
        if step == 2:
            assert not changed or path.name == "manifest.json", (number, path)
        outcomes["fell back" if step == 1 else "nothing changed"] += 1
    assert outcomes["fell back"] > 150, outcomes


def newest(checkpoints, like=None):
    """What a run that starts does: the newest step whose arrays can be read."""
    like = like or arrays(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            step = checkpoints.latest()
            try:
                return step, checkpoints.read_arrays(step, like)
            except pieces.Damaged:
                continue


def test_damage_of_arrays_is_named_when_they_are_read(bucket):
    checkpoints = Checkpoints(URL)
    save(checkpoints, 1)
    save(checkpoints, 2)
    piece = next(p for p in objects(bucket) if p.suffix == ".bin")
    piece.write_bytes(bytes(piece.stat().st_size))
    assert checkpoints.latest() == 2  # sizes alone
    with pytest.raises(pieces.Damaged, match="00000002/arrays/0000-00000.bin has another SHA-256"):
        checkpoints.read_arrays(2, arrays(0))
    with pytest.warns(UserWarning, match="step 2 is damaged.*SHA-256"):
        assert checkpoints.latest() == 1


# -- indices that somebody has written on purpose: their digests are right --

INDEX, MANIFEST = "arrays/0000.json", "manifest.json"
OTHER = [
    0,
    -1,
    7,
    2**62,
    10**300,
    1.5,
    None,
    True,
    "",
    "8",
    [],
    [1],
    {"a": 1},
    [None],
    ["1"],
    [0, 0],
    [2**40, 2**40],
    [-1, 8],
    [0] * 40,
    [1.0, 0.0],
]
TEXTS = [
    b"",
    b"null",
    b"[]",
    b"5",
    b'"x"',
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 5000,
    b"\xff",
    b"1e400",
    b'{"parts": 5}',
    b'{"parts": {}}',
    b'{"parts": [5]}',
    b'{"parts": [[]], "piece_bytes": 1}',
    b'{"parts": [["w", "float32", [0, 0], [16, 8], 0]]}',
    b'{"piece_bytes": 64}',
    b'{"files": 5}',
    b'{"files": []}',
    b'{"files": {"a": 5}}',
    b'{"files": {"a": {"bytes": 1}}}',
    b'{"files": {"a": {"bytes": "1", "sha256": 5}}}',
    b'{"step": 2, "files": {"state.json": 1}}',
]


def forged(bucket: Path, name: str, change) -> None:
    """Changes a file of step 2 by `change`, and the manifest so that it fits."""
    folder = next(p.parent for p in objects(bucket) if str(p).endswith("00000002/manifest.json"))
    data = change((folder / name).read_bytes())
    (folder / name).write_bytes(data)
    if name != MANIFEST:
        manifest = json.loads((folder / MANIFEST).read_text())
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["files"][name] = facts
        (folder / MANIFEST).write_text(json.dumps(manifest))


def forgeries():
    """(name, file, its new bytes) of indices and manifests that no run writes."""
    for text in TEXTS:
        for name in (INDEX, MANIFEST):
            yield f"{name} {text[:40]!r}", name, lambda data, text=text: text
    for field in range(5):
        for value in OTHER:

            def part(index, field=field, value=value):
                index["parts"][0][field] = value

            yield f"part[{field}] = {value!r:.40}", INDEX, changed(part)
    for value in OTHER:
        yield (
            f"piece_bytes = {value!r:.40}",
            INDEX,
            changed(lambda i, v=value: i.update(piece_bytes=v)),
        )
        yield f"parts = {value!r:.40}", INDEX, changed(lambda i, v=value: i.update(parts=v))
        for field in ("bytes", "sha256"):

            def fact(manifest, field=field, value=value):
                piece = next(n for n in manifest["files"] if n.endswith(".bin"))
                manifest["files"][piece][field] = value

            yield f"{field} = {value!r:.40}", MANIFEST, changed(fact)
    for what, change in {
        "a part twice": lambda i: i["parts"].append(i["parts"][0]),
        "parts that overlap": overlapping,
        "a part of more dimensions": lambda i: i["parts"].append(
            ["w", "float32", [0] * 3, [1] * 3, 0]
        ),
        "a part of none": lambda i: i["parts"].append(["w", "float32", [], [], 0]),
        "parts without end": lambda i: i["parts"].extend(
            ["w", "float32", [k % 16, 0], [1, 8], 0] for k in range(10_000)
        ),
        "another dtype": lambda i: i["parts"].append(["w", "int32", [0, 0], [1, 1], 0]),
        "fields that are missing": lambda i: i["parts"][0].pop(),
        "too many fields": lambda i: i["parts"][0].append(1),
    }.items():
        yield what, INDEX, changed(change)


def changed(change):
    def apply(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return apply


def overlapping(index) -> None:
    """As many values as the array has, half of them twice, the others nowhere."""
    parts = [p for p in index["parts"] if p[0] == "w"]
    for one, other in zip(parts[::2], parts[1::2], strict=True):
        other[2:] = one[2:]


def test_forged_indices_are_damage_and_no_crash(bucket):
    """A run passes over them, with bounded work, to the step before."""
    checkpoints = Checkpoints(URL)
    save(checkpoints, 1)
    save(checkpoints, 2)
    like, passed_over = arrays(0, mesh(2, 1)), 0
    whole = {p: p.read_bytes() for p in objects(bucket) if p.suffix == ".json"}
    for what, name, change in forgeries():
        for path, data in whole.items():
            path.write_bytes(data)
        forged(bucket, name, change)
        with at_most(10):
            try:
                step, _ = newest(Checkpoints(URL), like)
                passed_over += step == 1
                # An offset may be right.
                assert step == 1 or "part" not in what or "[4]" in what, what
            except InputError as error:
                # Of an index alone nothing says that it is not of another model.
                assert "does not fit" in str(error) and name == INDEX, what
        Checkpoints(URL, best_metric="at").best()
    assert passed_over > 150, passed_over


def test_parts_of_a_large_mesh_do_not_overlap():
    """8,192 parts in rows, and a grid; of either one moved by one."""
    for rows, columns in ((8192, 1), (96, 64)):
        boxes = [
            [(4 * r, 4 * r + 4), (2 * c, 2 * c + 2)] for r in range(rows) for c in range(columns)
        ]
        assert not pieces._overlap(boxes)
        boxes[200][0] = (boxes[200][0][0] - 1, boxes[200][0][1])
        assert pieces._overlap(boxes)


# -- what cannot be read now --


def look_fails(every: int = 1) -> None:
    FAULTS["fail_look"] = every


def unlisted() -> None:
    FAULTS["unlisted"] = 1


def reads_fail() -> None:
    FAULTS["fail_read"] = 1


@pytest.mark.parametrize("fault", [look_fails, unlisted, reads_fail])
def test_a_store_that_cannot_be_read_now_loses_no_checkpoint(fault):
    checkpoints = Checkpoints(URL, keep=1, best_metric="accuracy")
    save(checkpoints, 1, accuracy=0.9)
    save(checkpoints, 2, accuracy=0.1)
    fault()
    again = Checkpoints(URL, keep=1, best_metric="accuracy")
    if fault is not reads_fail:
        with pytest.raises(InputError, match="cannot be read now.*Fix: try again"):
            again.prepare()
    with pytest.raises(InputError, match="cannot be read now.*Fix: try again"):
        again.latest()
    with pytest.raises((InputError, OSError)):  # not None, as if none were the best
        again.best()
    with pytest.warns(UserWarning, match="old checkpoints stay"):
        again._prune(2)
    FAULTS.update(dict.fromkeys(FAULTS, 0))
    again.prepare()
    assert again.steps() == [1, 2] and not again.damaged and again.latest() == 2
    assert_holds(again, 1)


def test_arrays_that_cannot_be_read_now_are_no_damage():
    checkpoints = Checkpoints(URL)
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert checkpoints.latest() == 2
    reads_fail()
    for read in (lambda: checkpoints.read_arrays(2, arrays(0)), lambda: checkpoints.read_state(2)):
        with pytest.raises(InputError, match="step 2 cannot be read now.*503|reset") as raised:
            read()
        assert not isinstance(raised.value, pieces.Damaged)
    FAULTS["fail_read"] = 0
    assert checkpoints.latest() == 2


def test_looks_that_fail_now_and_then_cost_nothing():
    look_fails(3)
    checkpoints = Checkpoints(URL, keep=2)
    checkpoints.prepare()
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.latest() == 3 and checkpoints.steps() == [2, 3]
    assert_holds(checkpoints, 2)


# -- kills --

SAVES = """
import brittle, jax, os, sys
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.checkpoint import pieces
import test_store_checkpoints as this

pieces.PIECE_BYTES = 300
for fault in ("kill", "killed_after"):
    for number in range(1, 100):
        child = os.fork()  # before JAX has a backend
        if not child:
            brittle.FAULTS[fault] = number
            os.environ["BRITTLE"] += f"/{fault}-{number}"
            os.makedirs(os.environ["BRITTLE"])
            checkpoints = Checkpoints(this.URL, keep=2)
            for step in (1, 2, 3):
                this.save(checkpoints, step)
                print(fault, number, step, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WIFSIGNALED(status), status
"""


@pytest.mark.hosts
def test_kills_at_each_put_leave_the_last_whole_step(tmp_path, monkeypatch):
    env = {**host_environment(0, 1, 8, 0), "BRITTLE": str(tmp_path)}
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SAVES], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    saved: dict = {}  # the steps whose save had returned
    for line in done.stdout.split("\n")[:-1]:
        fault, number, step = line.split()
        saved[f"{fault}-{number}"] = int(step)
    killed = sorted(p for p in tmp_path.iterdir() if p.is_dir())
    assert len(killed) > 20
    for folder in killed:
        monkeypatch.setenv("BRITTLE", str(folder))
        checkpoints = Checkpoints(URL, keep=2)
        checkpoints.prepare()
        step, known = checkpoints.latest(), saved.get(folder.name)
        # Only the put of a manifest may come between a whole step and the word of it.
        assert step == known or step == (known or 0) + 1 and "after" in folder.name, folder
        if step is not None:
            assert_holds(checkpoints, step)
        assert set(checkpoints.storage._folders()) == set(checkpoints.steps())
        save(checkpoints, (step or 0) + 1)
        assert checkpoints.latest() == (step or 0) + 1


class Gs(Brittle):
    """The same files under the addresses of another service."""

    protocol = "gs"


def test_gs_goes_the_way_of_all_stores(bucket):
    """Orbax would leave its marker file there, and no SHA-256."""
    fsspec.register_implementation("gs", Gs, clobber=True)
    checkpoints = Checkpoints("gs://bucket/run/checkpoints")
    save(checkpoints, 3)
    assert_holds(Checkpoints("gs://bucket/run/checkpoints"), checkpoints.latest())
    names = [path.name for path in bucket.rglob("*") if path.is_file()]
    assert {"manifest.json", "state.json"} < {*names} and "commit_success.txt" not in names
    assert any(name.endswith("-00000.bin") for name in names)
