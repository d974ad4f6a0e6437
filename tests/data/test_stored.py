"""data.stream: files that are larger than memory, read as they are drawn, in an order with which a
resumed run goes on."""

import collections
import concurrent.futures
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_refusal import refused

from rljax.config import Config
from rljax.data.online.encoded import load_data
from rljax.data.online.loader import Loader
from rljax.data.rows import stored
from rljax.data.rows.stored import StoredRows
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.training.sources import METRICS, FileSource, data_counts, drop_metrics, epoch_notes
from rljax.validation import validate

CHARS = CharTokenizer("0123456789abcdefghijklmnopqrstuvwxyz: +=?>")


def write(path, rows, group=0):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    else:  # with blank lines, and without an end of the last one
        path.write_text("\n" + "\n \n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("count", "block", "window"),
    [(1, 4, 8), (7, 4, 8), (64, 4, 8), (103, 5, 20), (103, 103, 1), (50, 1, 1), (103, 7, 1000)],
)
def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(
    tmp_path, monkeypatch, suffix, count, block, window
):
    monkeypatch.setattr(stored, "BLOCK_ROWS", block)
    monkeypatch.setattr(stored, "WINDOW_ROWS", window)
    path = write(tmp_path / f"rows{suffix}", [{"n": i} for i in range(count)], block)
    rows = StoredRows([path])
    epochs = [[rows[e * count + i]["n"] for i in range(count)] for e in range(3)]
    assert rows.rows == count and all(sorted(one) == list(range(count)) for one in epochs)
    if count > 20:
        assert len({tuple(one) for one in epochs}) == 3 and epochs[0] != sorted(epochs[0])
    # A function of the index alone: asked in another order, and by another reader.
    other = StoredRows([path])
    for i in np.random.default_rng(0).permutation(3 * count).tolist()[:60]:
        assert other[i]["n"] == epochs[i // count][i % count] == other.number(i)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_several_files_are_one_stream(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(stored, "BLOCK_ROWS", 4)
    monkeypatch.setattr(stored, "WINDOW_ROWS", 8)
    sizes, paths, told = (5, 1, 30, 14), [], []
    for number, size in enumerate(sizes):
        told += [f"{number}: row {i}" for i in range(size)]
        rows = [{"n": len(told) - size + i} for i in range(size)]
        paths.append(write(tmp_path / f"part{number}{suffix}", rows, 4))
    rows = StoredRows(paths, [str(i) for i in range(4)])
    numbers = [rows[i]["n"] for i in range(100)]
    assert rows.rows == 50 and sorted(numbers[:50]) == sorted(numbers[50:]) == list(range(50))
    assert [rows.location(i) for i in range(100)] == [told[n] for n in numbers]
    files = [told[n][0] for n in numbers[:50]]
    assert files != sorted(files), "the blocks of all files are mixed"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_threads_may_ask_for_rows_of_different_windows(tmp_path, monkeypatch, suffix):
    """As the one that reads ahead and the one that looks for a saved prompt."""
    monkeypatch.setattr(stored, "BLOCK_ROWS", 50)
    monkeypatch.setattr(stored, "WINDOW_ROWS", 100)
    monkeypatch.setattr(stored, "BLOCK_BYTES", 2**10)  # parts of row groups, read by one generator
    path = write(tmp_path / f"rows{suffix}", [{"n": i, "t": "x" * 99} for i in range(1000)], 200)
    rows, alone = StoredRows([path]), StoredRows([path])
    asked = np.random.default_rng(0).integers(3000, size=(4, 100)).tolist()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: [rows[i]["n"] for i in part], asked))
    assert found == [[alone.number(i) for i in part] for part in asked]


def test_a_run_goes_on_where_it_stood(tmp_path):
    rows = [{"prompt": f"q{i}:", "completion": "a" * (1 + i % 7)} for i in range(300)]
    config = Config(dataflow="sft")
    config.data.train, config.data.stream = str(write(tmp_path / "r.jsonl", rows)), True
    config.offline.max_tokens = 9  # some are too long
    whole, part = (load_data(config, CHARS, "examples") for _ in range(2))
    assert whole.digest == part.digest and whole.endless
    loader, begun = (Loader(x.sources[0], batch_size=16, seed=3) for x in (whole, part))

    def ids(items):
        return [tuple(x["item"][0].tolist()) for x in items]

    batches = [ids(next(loader)) for _ in range(30)]
    assert [ids(next(begun)) for _ in range(4)] == batches[:4]
    state = json.loads(json.dumps(begun.get_state()))
    resumed = Loader(load_data(config, CHARS, "examples").sources[0], batch_size=16, seed=3)
    resumed.set_state(state)
    assert [ids(next(resumed)) for _ in range(26)] == batches[4:]
    drawn = 30 * 16 + loader.dropped
    assert loader.dropped > 0 and loader.epoch == pytest.approx(drawn / 300)
    kept = [len(CHARS.encode(r["prompt"] + r["completion"])) < 9 for r in rows]
    seen = collections.Counter(sum(batches, []))
    assert len(seen) == sum(kept)
    assert any(f"{tmp_path}/r.jsonl: 300 rows, read as they are drawn" in n for n in whole.notes)


@pytest.mark.parametrize("kind", ["pairs", "unpaired", "stepwise", "trajectories", "rollouts"])
def test_every_kind_is_read_so(tmp_path, kind):
    rows = {
        "pairs": {"prompt": "q:", "chosen": "a", "rejected": "b"},
        "unpaired": {"prompt": "q:", "completion": "a", "label": True},
        "stepwise": {"prompt": "q:", "completions": ["a", "b"], "labels": [True, False]},
        "trajectories": {"prompt": "q:", "completion": "a", "reward": 1.0},
        "rollouts": {"prompt": "q:", "ground_truth": "a"},
    }
    config = Config(dataflow="grpo")
    config.data.train = str(write(tmp_path / "r.jsonl", [rows[kind]] * 5))
    config.offline.max_tokens, config.offline.step_separator = 16, " "
    config.reward.function = "exact_match()"
    plain = load_data(config, CHARS, kind).sources[0]
    config.data.stream = True
    items = Loader(load_data(config, CHARS, kind).sources[0], batch_size=5, seed=0).take(7)
    one, other = (
        str(x["item"] if kind != "rollouts" else x.token_ids) for x in (plain[0], items[6])
    )
    assert one == other and len(items) == 7


def test_demonstrations_beside_prompts_are_read_so(tmp_path):
    """Those of the supervised phase, of data.train where sft.data is "", and of pretraining.data:
    examples as of a file that is read whole, in an order that resumes."""
    rows = [{"prompt": "q" * (i % 9) + ":", "completion": "ab", "answer": "a"} for i in range(40)]
    config = Config(dataflow="grpo")
    config.data.train = str(write(tmp_path / "r.jsonl", rows))
    config.data.max_prompt_tokens, config.sampler.max_response_tokens, config.sft.steps = 4, 3, 2
    config.reward.function = "exact_match()"

    def ids(items):
        return [(x.ids.tolist(), x.mask.tolist()) for x in items]

    for field in ("data.train", "sft.data", "pretraining.data"):
        if field != "data.train":
            own = str(write(tmp_path / f"{field}.parquet", rows[::-1], 10))
            getattr(config, field.split(".")[0]).data = own
        config.pretraining.max_tokens = 7
        config.data.stream = False
        whole = load_data(config, CHARS)
        config.data.stream = True
        drawn, again = load_data(config, CHARS), load_data(config, CHARS)
        name = "pretraining" if field == "pretraining.data" else "examples"
        stream, every = getattr(drawn, name), getattr(whole, name)
        count = len(every)
        loader = Loader(stream, batch_size=8, seed=0)
        taken = ids(loader.take(count))
        assert sorted(taken) == sorted(ids(every)) and taken != ids(every)
        assert loader.dropped > 0 and loader.epoch <= 1.0 and loader.dropped <= len(rows) - count
        assert getattr(drawn, f"{name.removesuffix('s')}_tokens") == 7
        begun = Loader(getattr(again, name), batch_size=8, seed=0)
        first = Loader(stream, batch_size=8, seed=0)
        first.take(8)
        begun.set_state(json.loads(json.dumps(first.get_state())))
        assert ids(begun.take(count - 8)) == taken[8:]
    Path(config.sft.data).write_bytes(b"torn")
    refused(lambda: load_data(config, CHARS), "sft.data.parquet")


@pytest.mark.slow
def test_only_a_window_is_in_memory(tmp_path, monkeypatch):
    text, count = "x" * 1_000, 20_000
    monkeypatch.setattr(stored, "WINDOW_ROWS", 2_048)
    with open(tmp_path / "r.jsonl", "w") as file:
        for i in range(count):
            file.write(json.dumps({"n": i, "text": text}) + "\n")
    size = (tmp_path / "r.jsonl").stat().st_size
    tracemalloc.start()
    rows = StoredRows([tmp_path / "r.jsonl"])
    _, scanned = tracemalloc.get_traced_memory()
    seen = [rows[i]["n"] for i in range(0, count, 1_000)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert scanned < 1e6 and len(set(seen)) == len(seen)
    monkeypatch.setattr(stored, "WINDOW_BYTES", size // 20)
    assert StoredRows([tmp_path / "r.jsonl"])._window_rows == pytest.approx(count / 20, rel=0.02)
    assert peak < size * 1.5 * (stored.WINDOW_ROWS + stored.BLOCK_ROWS) / count


def test_bad_rows_are_named_when_they_are_drawn(tmp_path):
    good = {"prompt": "q:", "ground_truth": "a"}
    config = Config()
    config.reward.function, config.data.stream = "exact_match()", True
    for bad, says in (({"prompt": 3, "ground_truth": "a"}, "row 4"), ([1], "not an object")):
        config.data.train = str(write(tmp_path / "r.jsonl", [good] * 4 + [bad]))

        def draw():
            Loader(load_data(config, CHARS).sources[0], batch_size=5, seed=0).take(5)

        refused(draw, config.data.train, says)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    refused(lambda: StoredRows([tmp_path / "empty.jsonl"]), "has no rows")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    refused(lambda: StoredRows([tmp_path / "torn.parquet"]), "not a readable parquet file")
    refused(lambda: StoredRows([tmp_path / "rows.csv"]), "data.stream reads .jsonl and .parquet")
    refused(lambda: StoredRows([tmp_path / "none.jsonl"]), "none.jsonl")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.test_fraction", 0.1),
        ("offline.packing", True),
        ("offline.ties", "both_orders"),
        ("offline.reference_logprobs", "folder"),
        ("data.train", "sort_digits()"),
    ],
)
def test_what_needs_all_rows_is_refused(tmp_path, field, value):
    config = Config(dataflow="sft", model=str(tmp_path))
    config.data.train, config.data.stream = str(write(tmp_path / "r.jsonl", [{"text": "a"}])), True
    group, name = field.split(".")
    setattr(getattr(config, group), name, value)
    says = "no source is a file" if field == "data.train" else "not known before"
    with pytest.raises(InputError, match=says):
        validate(config)


def test_lines_are_blank_where_a_file_that_is_read_whole_has_no_row(tmp_path):
    row = json.dumps({"prompt": "q1:", "ground_truth": "1"})
    lines = ["\ufeff", row, "\u00a0", "\x1c", f"  {row}", ""]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    rows = StoredRows([path])
    assert rows.rows == 2 and [rows[i]["prompt"] for i in range(4)] == ["q1:"] * 4


@pytest.mark.slow
def test_a_row_group_larger_than_a_window_is_read_in_parts(tmp_path, monkeypatch):
    """As pyarrow writes a file by default: all rows in one group."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(stored, "BLOCK_BYTES", 2**18)
    monkeypatch.setattr(stored, "WINDOW_BYTES", 2**20)
    draws = np.random.default_rng(0)
    rows = [{"n": i, "text": draws.bytes(2000).hex()} for i in range(8000)]  # 32 MB
    path = write(tmp_path / "rows.parquet", rows, len(rows))
    found = StoredRows([path])
    assert len(found.counts) > 100 and max(found.counts) * 4000 < 2**19
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    epoch = [found[i] for i in range(200)]
    assert pool.bytes_allocated() - before < 2**24  # of 32 MB
    assert all(row == rows[row["n"]] for row in epoch)
    epoch += [found[i] for i in range(200, 8000)]
    assert sorted(row["n"] for row in epoch) == list(range(8000))
    assert [row["n"] for row in epoch] != list(range(8000))


_COUNTED = {
    "pairs": [
        {"prompt": "q:", "chosen": "a", "rejected": "b"},
        {"prompt": "q:", "chosen": "a", "rejected": "b", "tie": True},
        {"prompt": "q:", "chosen": "a", "rejected": "b", "score_chosen": 3, "score_rejected": 3},
        {"prompt": "q:", "chosen": "a", "rejected": "a"},
        {"prompt": "q:", "chosen": "a" * 9, "rejected": "b"},
    ],
    "unpaired": [{"prompt": "q:", "completion": "a" * n, "label": True} for n in (1, 2, 9, 10, 3)],
    "examples": [{"prompt": "q" * n, "completion": "a" * n} for n in (1, 2, 4, 9, 1)],
    "rollouts": [{"prompt": "q" * n, "ground_truth": "a"} for n in (1, 2, 12, 9, 1)],
}


@pytest.mark.parametrize("overlong", ["drop", "right"])
@pytest.mark.parametrize("kind", list(_COUNTED))
def test_what_is_dropped_or_cut_is_counted_as_of_a_file_that_is_read_whole(
    tmp_path, kind, overlong
):
    rows = _COUNTED[kind]
    config = Config(dataflow="grpo")
    config.data.train, config.data.overlong = str(write(tmp_path / "r.jsonl", rows)), overlong
    config.offline.max_tokens = config.data.max_prompt_tokens = 6
    config.reward.function = "exact_match()"
    whole = load_data(config, CHARS, kind).counts
    config.data.stream = True
    stream = load_data(config, CHARS, kind).sources[0]
    drawn = collections.Counter()
    for index in range(len(rows)):
        drawn.update(stream.drawn(index)[1])
    expected = {name: n for name, n in whole.items() if name not in ("total", "kept")}
    assert dict(drawn) == expected and sum(expected.values()) >= 2


def test_the_counts_of_a_stream_go_on_in_a_resumed_run_and_are_metrics(tmp_path, caplog):
    config = Config(dataflow="preference")
    config.data.train = str(write(tmp_path / "r.jsonl", _COUNTED["pairs"] * 8))
    config.offline.max_tokens, config.data.stream = 6, True

    def loader():
        return Loader(load_data(config, CHARS, "pairs").sources[0], batch_size=4, seed=0)

    whole, part = loader(), loader()
    for _ in range(5):
        next(whole)
    next(part)
    resumed = loader()
    resumed.set_state(json.loads(json.dumps(part.get_state())))
    assert resumed.counts == part.counts and resumed.dropped == part.dropped > 0
    for _ in range(4):
        next(resumed)
    assert resumed.counts == whole.counts and whole.counts["dropped_tie"] > 0
    dropped = sum(n for name, n in whole.counts.items() if name.startswith("dropped"))
    assert dropped == whole.dropped
    metrics = drop_metrics(whole)
    assert metrics["data/dropped_tie"] == whole.counts["dropped_tie"]
    assert all(name in METRICS for name in metrics)
    assert [r.message for r in caplog.records if "ties" in r.message and "dropped" in r.message]
    source = FileSource(whole, list, None, ())
    assert any("data/dropped_*" in note for note in epoch_notes(source, 3))
    setup = SimpleNamespace(data=SimpleNamespace(counts={"dropped_tie": 1}))
    counts = data_counts(setup, {"rl": source, "pretraining": source})
    assert counts["dropped_tie"] == 1 + whole.counts["dropped_tie"]
    assert counts["pretraining_dropped_tie"] == whole.counts["dropped_tie"]


def test_a_stream_of_ties_alone_says_so(tmp_path):
    config = Config(dataflow="preference")
    config.data.train = str(write(tmp_path / "r.jsonl", _COUNTED["pairs"][1:2]))
    config.offline.max_tokens, config.data.stream = 6, True
    stream = load_data(config, CHARS, "pairs").sources[0]
    with pytest.raises(InputError, match="1,000 ties.*rows with a better one"):
        Loader(stream, batch_size=1, seed=0).take(1)


def test_prompts_of_another_file_that_are_too_long_are_counted(tmp_path):
    config = Config(dataflow="preference")
    config.data.train = str(write(tmp_path / "r.jsonl", _COUNTED["pairs"][:1]))
    config.evaluate.prompts_from = str(write(tmp_path / "q.jsonl", _COUNTED["rollouts"]))
    config.offline.max_tokens = config.data.max_prompt_tokens = 6
    notes = load_data(config, CHARS, "pairs").notes
    assert any("q.jsonl: 3 of 5 test prompts kept (2 over 6 tokens)" in note for note in notes)
