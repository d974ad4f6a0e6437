"""The loader: exact resume at any batch, every item once per epoch, a new order each epoch."""

import json

import pytest
from spent import at_most

from rljax.data.online.loader import Loader, fingerprint
from rljax.errors import InputError


def take(loader, n):
    return [next(loader) for _ in range(n)]


@pytest.mark.smoke
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("items", "batch_size"), [(10, 4), (7, 7), (5, 12), (1, 3)])
def test_resume_at_every_batch(items, batch_size, shuffle):
    def make():
        return Loader(range(items), batch_size=batch_size, seed=3, shuffle=shuffle)

    straight = take(make(), 12)
    assert all(len(batch) == batch_size for batch in straight)
    for done in range(12):
        first = make()
        take(first, done)
        state = json.loads(json.dumps(first.get_state()))
        second = make()
        second.set_state(state)
        assert take(second, 12 - done) == straight[done:]
        assert second.get_state()["position"] == 12 * batch_size
        second.set_state(state)  # back again, over the border of epochs
        assert take(second, 12 - done) == straight[done:]


def test_every_epoch_is_a_new_shuffle_of_all_items():
    flat = sum(take(Loader(range(10), batch_size=4, seed=0), 10), [])
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = sum(take(Loader(range(10), batch_size=4, seed=1), 10), [])
    assert other[:10] not in epochs  # the next seed is not this one an epoch later
    again = sum(take(Loader(range(10), batch_size=4, seed=0), 10), [])
    assert again == flat


def test_without_repeat_every_item_comes_once():
    loader = Loader(range(10), batch_size=4, seed=0, repeat=False)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(sum(batches, [])) == list(range(10))
    assert loader.epoch == 1.0
    again = Loader(range(10), batch_size=4, seed=0, repeat=False)
    again.set_state(loader.get_state())
    assert list(again) == []


def test_the_batch_size_may_change_at_resume():
    first = Loader(range(10), batch_size=4, seed=0)
    flat = sum(take(first, 6), [])
    second = Loader(range(10), batch_size=3, seed=0)
    second.set_state(dict(first.get_state(), position=4))
    assert sum(take(second, 6), []) == flat[4:22]


@pytest.mark.parametrize(
    "change",
    [dict(items=9), dict(seed=1), dict(shuffle=False), dict(position=-1), dict(position="0")],
)
def test_a_state_of_another_order_is_refused(change):
    loader = Loader(range(10), batch_size=4, seed=0)
    with pytest.raises(InputError):
        loader.set_state({**loader.get_state(), **change})
    for state in (None, {}, {"position": 3}):
        with pytest.raises(InputError):
            loader.set_state(state)


@pytest.mark.parametrize(
    "change",
    [dict(items=[]), dict(batch_size=0), dict(batch_size=2.0), dict(seed=-1), dict(seed=2**32)],
)
def test_loader_arguments(change):
    with pytest.raises(InputError):
        Loader(**{"items": [1], "batch_size": 1, "seed": 0, **change})


@pytest.mark.parametrize("n", [10, 1000])
def test_a_loader_holds_no_copy_and_is_fast_enough(n):
    items = [{"index": i} for i in range(n)]
    loader = Loader(items, batch_size=64, seed=0)
    next(loader)
    with at_most(1):  # 0.03 to 0.05 were measured
        batches = take(loader, 50)
    assert all(item is items[item["index"]] for batch in batches for item in batch)


def test_fingerprint():
    records = [{"prompt": "1", "index": 0}, {"prompt": "2", "index": 1}]
    assert fingerprint(records) == fingerprint([dict(reversed(r.items())) for r in records])
    assert fingerprint(records) != fingerprint(records[::-1])
    assert fingerprint(records) != fingerprint([records[0], {"prompt": "3", "index": 1}])
    assert fingerprint([{"a": "1"}]) != fingerprint([{"a": 1}])
