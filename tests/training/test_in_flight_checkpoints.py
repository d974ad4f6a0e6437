"""What is in flight in a checkpoint: whole, refused by name where a run cannot go on with it."""

import base64
import json

import jax
import numpy as np
import pytest
from test_checkpoint import with_hash
from tiny_run import tiny_config, train_on_one

from rljax.errors import InputError
from rljax.keys import root_key
from rljax.rollout.flight import Tickets
from rljax.setup import build
from rljax.training import sources
from rljax.training.run import Run

HOW = dict(
    model="decoder(layers=1, embed=48, mlp=96, heads=3, kv_heads=3, head_dim=16)",
    sft__steps=0,
    evaluate__every_steps=0,
    sampler__loop="host",
    sampler__slots=10,
    steps=4,
    rollouts__max_staleness=3,
    rollouts__ahead=2,
    rollouts__clock="logical(2)",
    checkpoint__every_steps=2,
    reward__function="in_flight_rewards.slow(fails=0.2)",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that has ended with groups in flight, and some rewards that failed."""
    folder = tmp_path_factory.mktemp("stopped")
    train_on_one(tiny_config(folder, **HOW))
    return folder


def state_of(folder, step: int = 4) -> dict:
    return json.loads((folder / "checkpoints" / f"{step:08d}" / "state.json").read_text())


def in_flight(folder, step: int = 4) -> dict:
    return state_of(folder, step)["sources"]["rl"]["in_flight"]


def source_of(tmp_path, **fields):
    """The source of a run with other settings."""
    config = tiny_config(tmp_path / "other", **{**HOW, **fields})
    setup = build(config, devices=jax.devices()[:1])
    return sources.make_source(setup, setup.main, None, root_key(config.seed))


@pytest.mark.slow
def test_each_group_that_began_is_trained_or_in_the_checkpoint(stopped):
    """The line that other frameworks broke: no group is lost or trained twice by a save."""
    samples = []
    for step in (2, 4):
        saved = in_flight(stopped, step)
        tickets, open_ = saved["tickets"], {t for t, _ in saved["tickets"]["open"]}
        known = sum(tickets[name] for name in ("trained", "dropped", "failed")) + len(open_)
        assert tickets["admitted"] == known == state_of(stopped, step)["sources"]["rl"]["position"]
        assert open_ == {int(ticket) for ticket in saved["groups"]}
        assert len(open_) == 2 * 4 and tickets["trained"] + tickets["failed"] == 4 * step
        samples += [one for group in saved["groups"].values() for one in group["samples"]]
    assert {one["finish_reason"] is None for one in samples} == {True, False}


def test_scores_that_failed_come_back_from_a_checkpoint(stopped, tmp_path):
    """NaN too; what is saved anew is what was read."""
    saved = in_flight(stopped)
    scores = [told for group in saved["groups"].values() for told in group["scores"].values()]
    assert {told[2] for told in scores} == {"ok", "error"}
    source = source_of(tmp_path)
    source.set_state(state_of(stopped)["sources"]["rl"])
    again = source.get_state()["in_flight"]
    assert json.dumps(again) == json.dumps(saved)  # NaN is not equal to NaN


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(rollouts__max_staleness=0), "rollouts.max_staleness.* 8 prompts in flight"),
        (
            dict(rollouts__max_staleness=1, rollouts__ahead=1),
            "max_staleness.*8 prompts.*since step",
        ),
        (dict(batch__samples_per_prompt=2), "samples_per_prompt.*4 samples each"),
        (dict(batch__prompts_per_step=2), "batch.prompts_per_step.*as it was: 4"),
        (dict(sampler__max_response_tokens=5), "max_response_tokens.*room for 7"),
        (
            dict(data__train="sort_digits(digits=5, prompts=1000, test=64, seed=3)"),
            "not the prompt|not in the data",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings_with_which_a_run_cannot_go_on_are_refused(stopped, tmp_path, fields, words):
    """Although allow_changed lets them through."""
    source = source_of(tmp_path, **fields)
    with pytest.raises(InputError, match=words):
        source.set_state(state_of(stopped)["sources"]["rl"])


def test_a_run_goes_on_with_another_bound_where_what_is_in_flight_fits(stopped, tmp_path):
    """A larger one always; a smaller one where fewer groups began: none is too old then."""
    saved = in_flight(stopped)["tickets"]
    for eta, ahead in ((5, 5), (3, 1), (4, 0)):
        tickets = Tickets(4, eta, ahead)
        tickets.set_state(saved)
        while tickets.step < 12:
            tickets.renew()
            while tickets.room > 0:
                tickets.completed(tickets.admit())
            for ticket in set(tickets.open) - tickets.complete:
                tickets.completed(ticket)
            tickets.train(tickets.ready())  # raises where one is too old
        tickets.check()
    few = {**saved, "open": saved["open"][-4:], "trained": saved["trained"] + 4}
    Tickets(4, 1, 1).set_state(few)


def cut(saved: dict) -> None:
    sample = saved["groups"][min(saved["groups"])]["samples"][0]
    sample["tokens"] = base64.b64encode(base64.b64decode(sample["tokens"])[:-3]).decode()


def put(path: str, value):
    """A function that puts a value at "groups/first/samples/0/key", say."""

    def change(saved: dict) -> None:
        *names, last = path.split("/")
        for name in names:
            name = min(saved) if name == "first" else name
            saved = saved[int(name)] if isinstance(saved, list) else saved[name]
        last = int(last) if isinstance(saved, list) else last
        if value is KeyError:
            del saved[min(saved) if last == "first" else last]
        else:
            saved[last] = value

    return change


BROKEN = [
    cut,
    *(
        put(path, KeyError)
        for path in (
            "groups",
            "groups/first",
            "tickets",
            "tickets/step",
            "tickets/open/0",
            "steps",
            "groups/first/record",
            "groups/first/samples/0",
            "groups/first/samples/0/key",
        )
    ),
    put("groups/first", None),
    put("groups/first/samples/0/tokens", "%"),
    put("groups/first/samples/0/finish_reason", 99),
    put("groups/first/samples/0/id", 1 << 40),
    put("groups/first/samples/0/key", "AAAA"),
    put("groups/first/samples/0/drawn", 8),
    put("groups/first/record/index", -1),
    put("groups/first/record/index", "x"),
    put("groups/first/scores", {"9": [1.0, {}, "ok", 0.1, "", False]}),
    put("groups/first/scores", {"0": [1.0]}),
    put("tickets/admitted", -5),
    put("tickets/trained", 1e400),
    put("tickets/step", 40),
    put("tickets/open", [[0, 0], [0, 0]]),
    put("steps", [[77, 3]]),
    put("steps", 5),
]


@pytest.mark.slow
def test_a_state_that_no_run_saves_is_an_error_that_names_the_file(stopped):
    """Although every hash is right; the folder stays as it is, and the right state is read."""
    config = tiny_config(stopped, **HOW)
    folder = stopped / "checkpoints" / "00000004"
    right = (folder / "state.json").read_bytes()
    with Run(build(config, devices=jax.devices()[:1]), stopped) as run:
        for change in BROKEN:
            state = json.loads(right)["sources"]["rl"]
            change(state["in_flight"])
            with pytest.raises(InputError), run._reading_state(4):
                run.source.set_state(state)
        state = json.loads(right)
        cut(state["sources"]["rl"]["in_flight"])
        with_hash(folder, state=json.dumps(state).encode())
        with pytest.raises(InputError, match="00000004/state.json does not hold what a run saves"):
            run.load(4)
        with_hash(folder, state=right)
        run.load(4)
        batch, metrics = run.source.next(4, run.roles)
    assert np.sum(batch.mask) > 0 and metrics["staleness/steps_max"] <= 3
