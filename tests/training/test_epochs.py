"""How many steps pass over the data once."""

import math

import pytest

from rljax.data.online.curriculum import Curriculum
from rljax.data.online.loader import Loader
from rljax.data.online.stream import Stream
from rljax.training.sources import FileSource, epoch_metrics, epoch_notes, steps_per_epoch


@pytest.mark.parametrize(
    "items, count, steps", [(7500, 1024, 7), (7168, 1024, 7), (7167, 1024, 6), (10, 16, 0)]
)
def test_steps_per_epoch_is_rounded_down(items, count, steps):
    """MATH has 7,500 training problems: 7 steps of 1,024."""
    loader = Loader(range(items), batch_size=count, seed=0)
    assert epoch_metrics(loader, count) == {"data/epoch": 0.0, "data/steps_per_epoch": steps}
    loader.take(count)
    assert epoch_metrics(loader, count)["data/epoch"] == count / items


def test_data_without_end_have_no_epoch():
    endless = Loader(Stream(lambda index: {"i": index}), batch_size=4, seed=0)
    assert steps_per_epoch(endless.items_per_epoch, 4) is None
    assert epoch_metrics(endless, 4) == {"data/epoch": 0.0}
    rows = Loader(Stream(lambda index: {"i": index}, rows=22), batch_size=4, seed=0)
    assert epoch_metrics(rows, 4)["data/steps_per_epoch"] == 5


def test_a_mixture_counts_draws_until_one_source_is_passed_over():
    """8 of 10 draws are of the first: 100 draws pass over its 80 rows; the other has 50."""
    sources = [[{"prompt_id": i} for i in range(80)], [{"prompt_id": i} for i in range(80, 130)]]
    mixed = Curriculum(sources, batch_size=7, seed=0, weights=(0.8, 0.2))
    assert mixed.items_per_epoch == pytest.approx(100.0)
    alone = Curriculum(sources, batch_size=7, seed=0, weights=(0.0, 1.0))
    assert alone.items_per_epoch == 50.0
    stream = Stream(lambda index: {"prompt_id": None})
    assert math.isinf(Curriculum([stream], batch_size=7, seed=0).items_per_epoch)


def test_what_is_printed_as_a_run_starts():
    def note(items, steps):
        loader = Loader(items, batch_size=1024, seed=0)
        return epoch_notes(FileSource(loader, list, None, ()), steps)

    said = "7 steps per epoch: 7,500 items, 1,024 a step; 105 steps are 14.3 epochs"
    assert note(range(7500), 105) == [said]
    assert note(range(1100), 1)[0].startswith("1 step per epoch")
    assert note(Stream(lambda index: {}), 105) == []
