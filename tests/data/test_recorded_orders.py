"""Every order of the data is the one that was recorded, from every index at which a run may be
resumed: a run of an earlier version goes on with the items that it would have seen.

`python tests/data/test_recorded_orders.py` records recorded_orders.json anew, where an order is
meant to change; the commit says why.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import lanes

from rljax.data.online.curriculum import Curriculum
from rljax.data.online.loader import Loader
from rljax.data.online.stream import Stream
from rljax.data.rows import stored
from rljax.data.rows.stored import StoredRows

RECORDED = Path(__file__).with_name("recorded_orders.json")
COUNT, KEPT = 60, 6  # items of each order; every so many-th has the state behind it


def items(count):
    return [{"prompt_id": i, "n": i} for i in range(count)]


def listed(count, seed=3, **how):
    return lambda folder: Loader(items(count), batch_size=1, seed=seed, **how)


def endless(seed=0, every=0, rows=0):
    """A stream of numbers without the multiples of `every`, which are dropped."""

    def make(index):
        return None if every and index % every == 0 else {"n": index}

    return lambda folder: Loader(Stream(make, rows=rows), batch_size=1, seed=seed)


def files(suffix, seed=0, window=8, block=4):
    """Four files of 5, 1, 30 and 14 rows in windows of a few blocks; the multiples of 7 are
    dropped."""

    def make(folder):
        paths, rows = [], items(50)
        for number, size in enumerate((5, 1, 30, 14)):
            part, rows = rows[:size], rows[size:]
            paths.append(folder / f"part{number}{suffix}")
            write(paths[-1], part, block)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stored, "BLOCK_ROWS", block)
            patch.setattr(stored, "WINDOW_ROWS", window)
            read = StoredRows(paths)

        def usable(index):
            row = read[index]
            assert row["n"] == read.number(index)
            return row if row["n"] % 7 else None

        return Loader(Stream(usable, rows=read.rows), batch_size=1, seed=seed)

    return make


def write(path, rows, block):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=block)


def mixture(retire_at=0.0, stream=False, **weights):
    """Two lists, one of 7 and one of 5, and maybe a stream without the multiples of 3."""

    def make(folder):
        every = items(12)
        sources = [every[:7], every[7:]]
        if stream:
            sources.append(Stream(lambda i: {"n": 1000 + i} if i % 3 else None))
        return Curriculum(sources, batch_size=1, seed=5, retire_at=retire_at, **weights)

    return make


ORDERS = {
    **{f"list of {n}": listed(n) for n in (1, 2, 10, 59, 1000)},
    "list of 10, seed 0": listed(10, seed=0),
    "list of 10, seed 2**32 - 1": listed(10, seed=2**32 - 1),
    "list of 10 as it stands": listed(10, shuffle=False),
    "list of 10, once": listed(10, repeat=False),
    "list of 10 as it stands, once": listed(10, shuffle=False, repeat=False),
    "stream": endless(),
    "stream, seed 7": endless(seed=7),
    "stream, seed 2**32 - 1": endless(seed=2**32 - 1),
    "stream with drops": endless(every=3, rows=22),
    "stream with drops, seed 7": endless(seed=7, every=4),
    **{f"files{suffix}": files(suffix) for suffix in (".jsonl", ".parquet")},
    "files.jsonl, seed 2": files(".jsonl", seed=2),
    "files.jsonl in small windows": files(".jsonl", window=1),
    "files.parquet in one window": files(".parquet", window=1000, block=3),
    "mixture": mixture(),
    "mixture by weights": mixture(weights=(0.9, 0.1)),
    "mixture by moving weights": mixture(
        weights=(1.0, 0.0), final_weights=(0.0, 1.0), horizon_prompts=40
    ),
    "mixture with prompts retired as they are scored": mixture(retire_at=0.5),
    "mixture with a stream, scored": mixture(retire_at=0.7, stream=True, weights=(2.0, 1.0, 1.0)),
}
# What else a loader says of itself, besides the items and the state.
SAID = ("position", "dropped", "epoch", "skipped")


def drawn(loader, count):
    """[n of an item, what the loader says, its state] behind each of the next items. Prompts of a
    mixture are scored: those that 3 divides are solved."""
    rows = []
    for _ in range(count):
        try:
            (item,) = loader.take(1)
        except StopIteration:
            return rows
        if isinstance(loader, Curriculum) and "prompt_id" in item:
            loader.record([(item["n"], float(item["n"] % 3 == 0))], correct_at=1.0)
        said = [getattr(loader, name) for name in SAID if hasattr(loader, name)]
        rows.append([item["n"], said, json.loads(json.dumps(loader.get_state()))])
    return rows


def record():
    with tempfile.TemporaryDirectory() as folder:
        found = {name: drawn(make(Path(folder)), COUNT) for name, make in ORDERS.items()}
    for rows in found.values():
        for index, row in enumerate(rows):
            row[2] = row[2] if index % KEPT == KEPT - 1 else None
    lines = (f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text())


def require_equal(found, want):
    assert [row[:2] for row in found] == [row[:2] for row in want]
    for (*_, state), (*_, recorded_state) in zip(found, want, strict=True):
        assert recorded_state is None or state == recorded_state


@pytest.mark.parametrize("name", ORDERS)
def test_items_states_and_epochs_are_the_recorded_ones(recorded, tmp_path, name):
    require_equal(drawn(ORDERS[name](tmp_path), COUNT), recorded[name])


LONG = ("files.parquet in one window", "files.jsonl", "files.jsonl, seed 2")


@pytest.mark.parametrize("name", lanes([name for name in ORDERS if name not in LONG], LONG))
def test_a_run_goes_on_from_every_index(recorded, tmp_path, name):
    """Also in the middle of an epoch or a window, where a loader goes back, and from the states of
    an earlier version."""
    want, again = recorded[name], ORDERS[name](tmp_path)
    states = [row[2] for row in drawn(ORDERS[name](tmp_path), COUNT)]
    for index in [*range(len(want)), 0]:
        state = want[index][2] or states[index]
        again.set_state(json.loads(json.dumps(state)))
        assert again.get_state() == state
        ahead = min(12, len(want) - index - 1)
        require_equal(drawn(again, ahead), want[index + 1 :][:ahead])
    fresh = ORDERS[name](tmp_path)
    fresh.set_state(states[20 % len(want)])
    rest = want[20 % len(want) + 1 :]
    require_equal(drawn(fresh, len(rest)), rest)


@pytest.mark.parametrize("name", [name for name in ORDERS if "scored" not in name])
@pytest.mark.parametrize("counts", [(4, 1, 7, 3, 16), (13,) * 3, (59,)])
def test_batches_of_any_size_hold_the_recorded_items(recorded, tmp_path, name, counts):
    """Every host draws all batches; one that is started anew after each draws the same ones."""
    rows, begin = recorded[name], 0
    host, other = ORDERS[name](tmp_path), ORDERS[name](tmp_path)
    for count in counts:
        want = [row[0] for row in rows[begin : begin + count]]
        for one in (host, other):
            if want:
                assert [item["n"] for item in one.take(count)] == want
            else:
                pytest.raises(StopIteration, one.take, count)
        begin += len(want)
        other = ORDERS[name](tmp_path)
        other.set_state(json.loads(json.dumps(host.get_state())))


def test_a_mixture_has_the_shares_of_its_weights(tmp_path):
    """90 % of the draws are of the first source; and from the first one alone to the second."""

    def of_first(name, count):
        return [row[0] < 7 for row in drawn(ORDERS[name](tmp_path), count)]

    assert sum(of_first("mixture by weights", 500)) == pytest.approx(450, abs=25)
    moving = of_first("mixture by moving weights", 60)
    assert sum(moving[:10]) >= 7 and sum(moving[40:]) == 0


if __name__ == "__main__":
    sys.exit(record())
