"""Streams: the same prompts after a resume at any step, over-long ones passed over and counted,
and mixtures of streams and files."""

import json
import logging
import threading

import numpy as np
import pytest

from rljax.config import Config
from rljax.data.online.curriculum import Curriculum
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.data.online.loader import Loader
from rljax.data.online.prompts import PromptRecord
from rljax.data.online.stream import Stream
from rljax.errors import InputError
from rljax.setup.setup import prompt_order


def numbers(every=0):
    """0, 1, 2, ... without the multiples of `every`."""
    return Stream(lambda i: None if every and i % every == 0 else {"n": i})


def taken(loader, *counts):
    return [[item["n"] for item in loader.take(count)] for count in counts]


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("steps_before", range(5))
def test_resume_at_every_step(every, steps_before):
    whole = Loader(numbers(every), batch_size=4, seed=0)
    batches = [[item["n"] for item in next(whole)] for _ in range(6)]
    part = Loader(numbers(every), batch_size=4, seed=0)
    for _ in range(steps_before):
        next(part)
    state = json.loads(json.dumps(part.get_state()))
    resumed = Loader(numbers(every), batch_size=4, seed=0)
    resumed.set_state(state)
    assert [[x["n"] for x in next(resumed)] for _ in range(6 - steps_before)] == (
        batches[steps_before:]
    )
    flat = sum(batches, [])
    assert flat == [n for n in range(40) if not every or n % every][: len(flat)]
    assert whole.position == 24 and whole.dropped == (12 if every else 0)


def test_the_prompts_per_step_may_change_at_resume():
    first = Loader(numbers(5), batch_size=3, seed=0)
    before = taken(first, 3, 3)
    second = Loader(numbers(5), batch_size=7, seed=0)
    second.set_state(first.get_state())
    assert sum(before + taken(second, 7, 1), []) == [n for n in range(20) if n % 5][:14]


def test_another_seed_begins_elsewhere_and_another_order_is_refused():
    one, two = (Loader(numbers(), batch_size=1, seed=seed) for seed in (1, 2))
    assert taken(one, 3)[0] != taken(two, 3)[0]
    with pytest.raises(InputError, match="cannot be resumed: 'seed' was 1"):
        two.set_state(one.get_state())
    with pytest.raises(InputError, match="not the state of an endless stream"):
        two.set_state(Loader([1, 2], batch_size=1, seed=2).get_state())
    with pytest.raises(InputError, match="position must be a whole number"):
        two.set_state({**two.get_state(), "position": -1})


def test_a_failure_in_the_middle_of_a_batch_loses_no_prompt():
    broken = {"now": True}

    def make(index):
        if index == 2 and broken["now"]:
            raise RuntimeError("the generator failed")
        return {"n": index}

    loader = Loader(Stream(make), batch_size=4, seed=0)
    with pytest.raises(RuntimeError):
        next(loader)
    broken["now"] = False
    assert taken(loader, 4) == [[0, 1, 2, 3]]


def test_rows_of_a_file_are_read_before_they_are_asked_for():
    read = threading.Event()

    def make(index):
        if index == 100:
            read.set()
        return {"n": index}

    loader = Loader(Stream(make, rows=1000), batch_size=4, seed=0)
    assert taken(loader, 4) == [[0, 1, 2, 3]]
    assert read.wait(60), "a thread reads the next rows"
    threads = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("grain-prefetch") for name in threads) >= 1
    made = []
    Loader(Stream(lambda i: made.append(i) or {"n": i}), batch_size=4, seed=0).take(4)
    assert made == [0, 1, 2, 3], "a task makes no row that nobody asked for"


@pytest.mark.parametrize("rows", [0, 1000])
def test_a_bad_row_is_an_error_where_it_is_drawn_and_not_before(rows):
    broken = {70}

    def make(index):
        if index in broken:
            raise InputError(f"row {index} is not an object", fix="correct it")
        return {"n": index} if index % 10 else None

    loader = Loader(Stream(make, rows=rows), batch_size=9, seed=0)
    assert sum(taken(loader, *[9] * 7), []) == [n for n in range(70) if n % 10]
    for _ in range(2):
        with pytest.raises(InputError, match="row 70 is not an object"):
            next(loader)
        assert (loader.position, loader.dropped) == (63, 7)
    broken.clear()
    assert taken(loader, 9) == [[*range(71, 80)]]


def test_a_stream_that_holds_nothing_usable_ends_with_the_reason():
    with pytest.raises(InputError, match="raise data.max_prompt_tokens"):
        Loader(Stream(lambda i: None), batch_size=1, seed=0).take(1)


def test_many_dropped_prompts_are_a_warning_once(caplog):
    caplog.set_level(logging.WARNING, "rljax")
    loader = Loader(numbers(3), batch_size=50, seed=0)
    taken(loader, 50, 50, 50)
    assert [r.message for r in caplog.records] == [
        "50 of the first 150 rows of the stream are dropped: longer than data.max_prompt_tokens "
        "(offline: offline.max_tokens)"
    ]


def config_of(train, *sources, **data):
    config = Config()
    config.data.train, config.data.sources, config.steps = train, sources, 10
    config.batch.prompts_per_step, config.evaluate.prompts = 4, 6
    for name, value in data.items():
        setattr(config.data, name, value)
    return config


STREAM = "sorting(style='short', items=3, max_number=999, test=4, worked_examples=4)"


def test_over_long_prompts_of_a_stream_are_passed_over_and_counted():
    config = config_of(STREAM.replace("test=4", "test=40"), max_prompt_tokens=11)
    data = load_data(config, load_run_tokenizer(config))
    loader = prompt_order(config, data)
    prompts = loader.take(200)
    assert all(len(p.token_ids) <= 11 for p in prompts) and data.prompt_tokens == 11
    assert loader.dropped > 20  # three numbers of three digits need 12
    config.data.overlong = "error"
    with pytest.raises(InputError, match="too long"):
        prompt_order(config, load_data(config, load_run_tokenizer(config))).take(200)


@pytest.mark.parametrize("steps_before", [1, 5])
def test_a_mixture_of_a_stream_and_a_fixed_task_resumes(steps_before):
    config = config_of(STREAM, "first_letter()", max_prompt_tokens=12, weights=(1.0, 2.0))

    def fresh():
        return prompt_order(config, load_data(config, load_run_tokenizer(config)))

    whole, part = fresh(), fresh()
    assert isinstance(whole, Curriculum)
    texts = [[(p.source, p.prompt_text) for p in next(whole)] for _ in range(40)]
    for _ in range(steps_before):
        next(part)
    resumed = fresh()
    resumed.set_state(json.loads(json.dumps(part.get_state())))
    rest = [[(p.source, p.prompt_text) for p in next(resumed)] for _ in range(40)]
    assert rest[: 40 - steps_before] == texts[steps_before:]
    sources = [source for step in texts for source, _ in step]
    assert 30 < sources.count(STREAM) < 80
    # The same prompts in the test split, half of each source.
    found = load_data(config, load_run_tokenizer(config)).test_prompts
    assert [p.data_source for p in found] == ["sorting"] * 3 + ["first_letter"] * 3


def test_a_changed_stream_changes_the_digest_of_the_data():
    def digest(spec):
        config = config_of(spec)
        return load_data(config, load_run_tokenizer(config)).digest

    assert digest(STREAM) == digest(STREAM) != digest(STREAM.replace("items=3", "items=4"))


def test_many_over_long_prompts_of_a_file_are_a_warning(caplog, tmp_path):
    caplog.set_level(logging.WARNING, "rljax")
    config = config_of("first_letter(letters=3)", "letter_count(letters=8)", max_prompt_tokens=4)
    with pytest.raises(InputError, match="no prompt is left"):
        load_data(config, load_run_tokenizer(config))
    config = config_of("addition(digits=2, prompts=900, test=100)", max_prompt_tokens=5)
    data = load_data(config, load_run_tokenizer(config))
    assert data.counts["dropped_overlong"] > 300 and data.counts["test_dropped_overlong"] > 0
    assert "prompts are dropped: longer than data.max_prompt_tokens" in caplog.text


def test_accuracy_by_source():
    from rljax.evaluation.in_training import accuracy_by_kind

    ids = np.ones(1, np.int32)
    prompts = [PromptRecord("", ids, "", name, {}, 0) for name in "aabb"]
    prompts.append(PromptRecord("", ids, "", "b", {}, 0, source="c()"))
    right = np.array([1.0, 0.0, np.nan, 1.0, np.nan])
    found = accuracy_by_kind(prompts, right)
    assert (found["eval/source/a"], found["eval/source/b"]) == (0.5, 1.0)
    assert found["eval/source/a_low"] == 0.0 and found["eval/source/a_high"] == 1.0
    assert len(found) == 6 and accuracy_by_kind(prompts[:2], right[:2]) == {}
    levels = [{"difficulty": "easy"}, {"level": 5}, {"level": 5}, {"level": ""}]
    prompts = [PromptRecord("", ids, "", "a", level, 0) for level in levels]
    found = accuracy_by_kind(prompts, np.array([1.0, 1.0, 0.0, 0.0]))
    assert (found["eval/difficulty/easy"], found["eval/difficulty/5"]) == (1.0, 0.5)
    assert len(found) == 6
