"""One episode: what a generator may yield and return, the log of ids, and every misbehaviour."""

import asyncio
import dataclasses
import enum
import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conversations import TOOLS
from family_tokenizers import FAMILIES, write_family
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import write_tokenizer
from tool_families import SCHEMAS, write_tool_family

from rljax.components import resolve
from rljax.data.text import chat
from rljax.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer
from rljax.environments.conversation import shortened
from rljax.environments.episode import Episode, chosen_fields
from rljax.environments.messages import EpisodeLimits
from rljax.environments.yields import BadYield, outcome_of, state_hash
from rljax.errors import InputError
from rljax.rewards.pool.foreign import GroundTruth

CHARS = CharTokenizer("".join(map(chr, range(32, 127))) + "\n")
PLAIN = EpisodeLimits(calls="")

USERS = '''
import asyncio, sys
from rljax.contracts import contract
from rljax.environments import Done, Opening, Turn

def guess_number(secret, high=64, turns=7):
    told = f"Guess my number, 1 to {high}."
    for turn in range(turns):
        reply = yield told
        guess = int(reply) if reply.strip().isdecimal() else 0
        if guess == secret:
            return 1.0 - 0.05 * turn
        told = "higher" if guess < secret else "lower"
    return 0.0

async def waits(secret):
    try:
        reply = yield "name?"
        await asyncio.sleep(0.001)
        yield Turn("and?", reward=0.5, parts={"tries": 1}, state=("a", 1))
        yield Done({"score": 1.0, "style": 0.25})
    finally:
        await asyncio.sleep(0)
        CLOSED.append("waits")

CLOSED = []

def row_prompt():
    reply = yield
    return {"score": len(reply), "turns_left": reply.turns_left, "cut": reply.finish == "length"}

@contract(seats=("a", "b"))
def two():
    first = yield Turn("you are a", seat="a")
    second = yield Turn("you are b; a says " + first, seat="b")
    third = yield Turn("b says " + second, reward=1.0, seat="a")
    return {"a": 1.0, "b": {"score": -1.0, "moves": 1}}

def seeds(seed, sample_seed, **more):
    yield f"{seed} {sample_seed} {sorted(more)}"

def act(what="", first=False):
    try:
        if not first:
            yield "?"
        if what == "raise":
            raise ValueError("no luck")
        if what == "exit":
            sys.exit("bye")
        if what == "recurse":
            def again(n):
                return again(n + 1)
            again(0)
        if what == "memory":
            raise MemoryError
        if what.startswith("yield "):
            yield eval(what.removeprefix("yield "))
        if what.startswith("return "):
            return eval(what.removeprefix("return "))
        return 0.0
    finally:
        CLOSED.append(what)

def no_generator(prompt):
    return 3

def endless():
    while True:
        yield "again"

def anew():
    yield "one"
    yield Opening("two")
    yield "three"
    return 1.0

def answers(schemas):
    """Answers calls; the outcome is how many."""
    reply, count = (yield Opening("go", tools=schemas)), 0
    while reply.calls:
        count += len(reply.calls)
        reply = yield [
            {"role": "tool", "content": "21", "failure": "failed" * (call.name == "weather")}
            for call in reply.calls
        ]
    return float(count)

def talks_on(schemas):
    yield Opening("go", tools=schemas)
    while True:
        yield "on"

def speaks(lines):
    yield Opening(lines[0])
def asks_on(row):
    """The prompt of the row, and one more question."""
    yield None
    yield "and now?"
    return 1.0

def talks(lines, tools=()):
    """Says each line, whatever is answered."""
    yield Opening([{"role": "user", "content": lines[0]}], tools=tools)
    for line in lines[1:]:
        yield line if isinstance(line, list) else [{"role": "user", "content": line}]
    return 1.0
'''


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "users_envs.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_envs", raising=False)
    return lambda text: resolve(f"users_envs.{text}", "rljax.environments")


def episode(component, tokenizer=CHARS, limits=PLAIN, *, seed=1, sample_seed=2, **row):
    own = {name: row.pop(name) for name in ("prompt_ids", "messages") if name in row}
    return Episode(7, component, row, tokenizer, limits, seed=seed, sample_seed=sample_seed, **own)


def written(text, tokenizer=CHARS):
    return [*tokenizer.encode(text), tokenizer.eos_ids[0]]


def text_of(step, tokenizer=CHARS):
    return tokenizer.decode(step.ids)


@pytest.mark.smoke
def test_the_nine_lines(users):
    game = episode(users("guess_number(high=16)"), secret=5, unrelated="x")
    step = game.begin()
    assert (step.episode, step.seat, step.new_row) == (7, "", True)
    assert text_of(step) == "Guess my number, 1 to 16."
    for guess, told in (("8", "lower"), ("4", "higher"), ("x", "higher")):
        step = game.reply(written(guess), "stop", 3, 100)
        assert text_of(step) == told and not step.new_row and step.text == guess
        assert step.messages == ({"role": "user", "content": told},)
    end = game.reply(written("5"), "stop", 3, 100)
    assert end.ended and end.outcome == {"": 0.85} and end.ids == () and end.failure == ""


def test_a_waiting_generator_with_turns_parts_and_an_outcome(users):
    component = users("waits")
    game = episode(component, secret=1)
    game.begin()
    step = game.reply(written("x"))
    assert (step.reward, step.parts, step.state) == (0.5, {"tries": 1.0}, state_hash(("a", 1)))
    end = game.reply(written("y"))
    assert end.outcome == {"": 1.0} and end.outcome_parts == {"style": 0.25}
    game.close()
    game.close()
    assert component.function.__globals__["CLOSED"] == ["waits"]


def test_episodes_that_wait_share_a_loop(users):
    component = users("waits")

    async def play(game):
        assert game.start() is None and game.waits
        await game.begin_async()
        await game.reply_async(written("x"), "stop", 1, 1)
        return await game.reply_async(written("y"), "stop", 1, 1)

    async def play_all():
        return await asyncio.gather(*[play(episode(component, secret=1)) for _ in range(50)])

    assert [step.outcome for step in asyncio.run(play_all())] == [{"": 1.0}] * 50


def test_the_prompt_of_the_row(users):
    game = episode(users("row_prompt"), prompt_ids=CHARS.encode("2+2="))
    assert text_of(game.begin()) == "2+2="
    end = game.reply(CHARS.encode("44"), "length", 3, 5)
    assert end.outcome == {"": 2.0} and end.outcome_parts == {"turns_left": 3.0, "cut": 1.0}
    assert episode(users("row_prompt")).begin().kind == "bad yield"


def test_seats_have_conversations_of_their_own(users):
    game = episode(users("two"))
    steps = [game.begin(), game.reply(written("x")), game.reply(written("y"))]
    assert [(s.seat, s.new_row) for s in steps] == [("a", True), ("b", True), ("a", False)]
    assert [text_of(s) for s in steps] == ["you are a", "you are b; a says x", "b says y"]
    assert [s.reward for s in steps] == [0.0, 0.0, 1.0]
    end = game.reply(written("z"))
    assert end.outcome == {"a": 1.0, "b": -1.0} and end.outcome_parts == {"b/moves": 1.0}


def test_an_opening_begins_another_row(users):
    game = episode(users("anew"))
    steps = [game.begin(), game.reply(written("x")), game.reply(written("y"))]
    assert [(text_of(s), s.new_row) for s in steps] == [
        ("one", True),
        ("two", True),
        ("three", False),
    ]
    assert game.reply(written("z")).outcome == {"": 1.0}


def test_fields_and_seeds(users):
    step = episode(users("seeds"), seed=3, sample_seed=4, extra_info={"k": 1}, x=2).begin()
    assert text_of(step) == "3 4 ['extra_info', 'k', 'x']"
    assert episode(users("guess_number"), extra_info={"secret": 3}).begin().failure == ""
    with pytest.raises(InputError, match="needs 'secret', which this row lacks"):
        episode(users("guess_number"), prompt="x")


def test_the_column_of_the_ground_truth_is_handed_over_by_its_own_name(users):
    truth = GroundTruth("4", {"secret": 4}, 4)
    row = dict(ground_truth=truth, extra_info={"secret": 5, "turns": 1})
    game = episode(users("guess_number"), **row)
    game.begin()
    assert game.reply(written("4")).outcome == {"": 1.0}
    assert chosen_fields(users("guess_number"), row) == {"secret": 4, "turns": 1}
    other = dict(ground_truth=GroundTruth("4", {"ground_truth": 4}, 4), extra_info={"secret": 5})
    assert chosen_fields(users("guess_number"), other) == {"secret": 5}
    assert chosen_fields(users("seeds"), other, seed=1, sample_seed=2)["ground_truth"] == "4"


@pytest.mark.smoke
@pytest.mark.parametrize(
    "what, kind, said",
    [
        ("raise", "raised", "ValueError: no luck"),
        ("exit", "raised", "SystemExit: bye"),
        ("recurse", "raised", "RecursionError"),
        ("memory", "raised", "MemoryError"),
        ("yield b'bytes'", "bad yield", "bytes"),
        ("yield 3", "bad yield", "int"),
        ("yield None", "bad yield", "nothing"),
        ("yield []", "bad yield", "empty"),
        ("yield (x for x in iter(int, 1))", "bad yield", "generator"),
        ("yield [{'role': 'user'}]", "bad yield", "content"),
        ("yield Turn('x', seat='nobody')", "bad yield", "nobody"),
        ("yield Turn('x', reward=float('nan'))", "bad yield", "finite"),
        ("yield Turn('x', state=object())", "bad yield", "stable hash"),
        ("yield Turn('x', parts=3)", "bad yield", "named numbers"),
        ("yield Opening(None)", "bad yield", "first"),
        ("yield 'caf\\u00e9'", "bad yield", "not in the alphabet"),
        ("return float('inf')", "bad outcome", "finite"),
        ("return 'won'", "bad outcome", "not a number"),
        ("return {'style': 1.0}", "bad outcome", "score"),
        ("return 1e16", "bad outcome", "at most 1e+15"),
        ("return 10 ** 400", "bad outcome", "finite"),
        ("return 10 ** 5000", "bad outcome", "finite"),
    ],
)
def test_whatever_an_environment_does_wrong_is_a_failed_step(users, what, kind, said):
    component = users(f"act(what={what!r})")
    game = episode(component)
    assert game.begin().failure == ""
    step = game.reply(written("x"))
    assert (step.ended, step.kind, step.outcome, step.ids) == (True, kind, None, ())
    assert said in step.failure, step.failure
    game.close()
    assert component.function.__globals__["CLOSED"] == [what]


@pytest.mark.parametrize(
    ("given", "said"), [("5.0", "the reward 5: "), ("parts={'p': 3.0}", "the parts {'p': 3.0}: ")]
)
def test_a_first_turn_earns_nothing_as_no_reply_stands_before_it(users, given, said):
    what = f"yield Turn('x', {given})"
    step = episode(users(f"act(what={what!r}, first=True)")).begin()
    assert step.kind == "bad yield" and f"its first yield has {said}" in step.failure
    zeros = "act(what=\"yield Turn('x', 0.0, parts={'p': 0})\", first=True)"
    assert episode(users(zeros)).begin().failure == ""


def test_an_environment_that_asks_nothing_or_is_none(users):
    assert episode(users("act(first=True)")).begin().kind == "bad yield"
    assert episode(users("no_generator"), prompt="x").begin().kind == "not a generator"
    assert "act" in episode(users("act(what='raise', first=True)")).begin().failure
    endless = episode(users("endless"))
    endless.begin()
    assert [text_of(endless.reply(written("x"))) for _ in range(5)] == ["again"] * 5


def test_a_failure_says_where(users):
    game = episode(users("act(what='raise')"))
    game.begin()
    failure = game.reply(written("x")).failure
    first, _, trace = failure.partition("\n")
    assert "users_envs.py" in first and "in act" in first and "Traceback" in trace


def test_a_prompt_that_does_not_fit_is_a_failure(users):
    limits = dataclasses.replace(PLAIN, max_tokens=20)
    assert episode(users("guess_number"), limits=limits, secret=1).begin().kind == "bad yield"
    long = episode(users("talks"), limits=limits, lines=["x" * 10**7])
    assert "characters" in long.begin().failure


# -- observations


def test_a_long_observation_keeps_its_head_and_its_tail(users):
    limits = dataclasses.replace(PLAIN, max_reply_tokens=60)
    text = "".join(f"<{i}>" for i in range(300))
    game = episode(users("talks"), limits=limits, lines=["go", text])
    game.begin()
    told = text_of(game.reply(written("x")))
    assert len(told) <= 60 and told.startswith("<0><1>") and told.endswith("<298><299>")
    cut = int(told.partition("[")[2].partition(" tokens cut]")[0])
    assert len(told.replace(f"[{cut} tokens cut]", "")) + cut == len(text)


def test_a_flood_is_cut_before_it_is_tokenized(users):
    limits = dataclasses.replace(PLAIN, max_reply_tokens=60)
    game = episode(users("talks"), limits=limits, lines=["go", "x" * 50_000_000])
    game.begin()
    told = text_of(game.reply(written("x")))
    assert len(told) <= 60 and "characters cut]" in told


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab [1]\n", max_size=80), min_size=1, max_size=4),
    limit=st.integers(1, 120),
)
def test_observations_are_never_longer_than_their_limit(texts, limit):
    messages = [{"role": "tool", "content": text} for text in texts]
    made = [message["content"] for message in shortened(CHARS, messages, limit)]
    assert sum(len(CHARS.encode(text)) for text in made) <= limit
    if sum(map(len, texts)) <= limit:
        assert made == texts


# -- states and outcomes


class Suit(enum.Enum):
    HEARTS = 1


@dataclasses.dataclass
class Board:
    cells: tuple
    moves: int


def test_equal_states_have_equal_hashes():
    equal = [
        (1, 1.0),
        (1, True),
        ((1, "a"), (1.0, "a")),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        ({3, 1, 2}, frozenset({1, 2, 3})),
        (Board((1, 2), 3), Board((1, 2), 3)),
        (np.float32(0.5), 0.5),
        (np.arange(3), np.arange(3)),
        (Suit.HEARTS, Suit(1)),
    ]
    assert all(state_hash(a) == state_hash(b) for a, b in equal)
    unlike = [
        "a",
        b"a",
        ("a",),
        ["a"],
        {"a"},
        {"a": 1},
        ("a", ""),
        (("a",), ""),
        "1",
        1,
        2,
        0.5,
        math.inf,
        Board((1, 2), 3),
        Board((1, 2), 4),
        (),
        "",
        np.arange(3),
        np.arange(3.0),
    ]
    assert len({state_hash(state) for state in unlike}) == len(unlike)
    assert state_hash(None) == b"" != state_hash((None,))


@pytest.mark.slow
def test_a_state_has_one_hash_in_all_processes():
    state = "{'b': {'x', 'y', 'z'}, 'a': (1, 'two')}"
    code = f"from rljax.environments.yields import state_hash; print(state_hash({state}).hex())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {state_hash(eval(state)).hex()}


def test_outcomes():
    assert outcome_of(2, ("",)) == ({"": 2.0}, {})
    assert outcome_of(np.float32(0.5), ("a", "b")) == ({"a": 0.5, "b": 0.5}, {})
    assert outcome_of({"a": 1, "b": 0}, ("a", "b")) == ({"a": 1.0, "b": 0.0}, {})
    assert outcome_of(None, ("",)) == (None, {})
    for wrong in ({"a": 1}, {"a": 1, "b": 0, "c": 2}, [1, 0]):
        with pytest.raises(BadYield):
            outcome_of(wrong, ("a", "b"))


# -- chat templates


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {
        family: HuggingFaceTokenizer(write_family(root / family, family, marked=False))
        for family in FAMILIES
    }


def sampled(tokenizer, draw, ended):
    words = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    return [words[i % len(words)] for i in draw] + [tokenizer.eos_ids[0]] * ended


@pytest.mark.parametrize("family", FAMILIES)
def test_the_log_is_that_of_append_messages(families, users, family):
    """What is appended with the new text alone, and what append_messages makes of the whole."""
    tokenizer = families[family]
    lines = ["What is 2 + 3?", "sure?", "line\n\nwith 5.5", "", "end"]
    game = episode(users("talks"), tokenizer, lines=lines)
    log = list(game.begin().ids)
    messages = [{"role": "user", "content": lines[0]}]
    assert log == tokenizer.encode_chat(messages)
    for said, line in zip(("5", "two words", " ", "ab  "), lines[1:], strict=True):
        ids = written(said, tokenizer)
        log += ids
        messages.append({"role": "assistant", "content": tokenizer.decode(ids)})
        new = [{"role": "user", "content": line}]
        expected = chat.append_messages(tokenizer, log, messages, new)
        step = game.reply(ids)
        assert list(step.ids) == expected.ids and not step.new_row
        log, messages = log + list(step.ids), messages + new
    assert game.reply(written("x", tokenizer)).drift in ("same", "retokenized", "rewritten")


def test_variables_of_the_row_hold_for_the_episode(families, users):
    tokenizer, lines = families["qwen3"], ["What is 2 + 3?", "sure?"]
    for variables, tail in (({"enable_thinking": False}, "<think>\n\n</think>\n\n"), ({}, "")):
        extra = {"chat_template_kwargs": variables}
        game = episode(users("talks"), tokenizer, lines=lines, extra_info=extra)
        for step in (game.begin(), game.reply(written("5", tokenizer))):
            text = tokenizer.decode(step.ids, skip_special_tokens=False)
            assert text.endswith("<|im_start|>assistant\n" + tail)


def test_a_message_that_the_template_leaves_out_fails_the_episode(families, users):
    """Qwen's template writes nothing of a developer's message: no policy may play without it."""
    lines = [[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]]
    step = episode(users("speaks"), families["qwen3"], lines=lines).begin()
    assert step.kind == "bad yield" and "leaves out the content of message 0" in step.failure


def test_a_tools_answer_that_the_template_leaves_out_fails_the_episode(tmp_path, users):
    """ChatML of users and assistants alone: the policy would go on without what it asked for."""
    template = (
        "{%- for m in messages %}{%- if m.role in ('user', 'assistant') %}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    lines = ["What is 2 + 3?", [{"role": "tool", "content": "it is 22 degrees"}]]
    game = episode(users("talks"), tokenizer, lines=lines)
    game.begin()
    step = game.reply(written("5", tokenizer))
    assert step.ended and "leaves out the content of message 0, of role 'tool'" in step.failure


CONVERSATIONS = given(
    family=st.sampled_from(sorted(FAMILIES)),
    answers=st.lists(st.text(max_size=12), min_size=1, max_size=3),
    draw=st.lists(st.integers(0, 10_000), max_size=12),
    ended=st.booleans(),
)


def check_log(families, family, answers, draw, ended):
    """What the policy wrote stays, id by id, and what is appended is what append_messages says."""
    tokenizer = families[family]
    component = resolve("users_lines.talks", "rljax.environments")
    game = episode(component, tokenizer, lines=["go", *answers])
    log, messages = list(game.begin().ids), [{"role": "user", "content": "go"}]
    for answer in answers:
        ids = sampled(tokenizer, draw, ended)
        log += ids
        messages.append({"role": "assistant", "content": tokenizer.decode(ids)})
        new = [{"role": "user", "content": answer}]
        expected = chat.append_messages(tokenizer, log, messages, new)
        step = game.reply(ids)
        assert list(step.ids) == expected.ids and not step.new_row
        log, messages = log + list(step.ids), messages + new
        assert game._conversations[""].ids == log


@settings(max_examples=60, deadline=None)
@CONVERSATIONS
def test_whatever_the_policy_writes(families, family, answers, draw, ended):
    check_log(families, family, answers, draw, ended)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@CONVERSATIONS
def test_ten_thousand_conversations(families, family, answers, draw, ended):
    check_log(families, family, answers, draw, ended)


@pytest.fixture(scope="module", autouse=True)
def lines_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "users_lines.py").write_text(textwrap.dedent(USERS))
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


# deepseek's template drops the reasoning of a last turn, too; qwen3's writes an empty one there.
@pytest.mark.parametrize(
    "family, last", [("qwen3", "<think>\nfirst\n</think>\n\nyes"), ("deepseek", "no")]
)
def test_a_template_that_drops_reasoning(families, users, family, last):
    tokenizer = families[family]
    lines, thought = ["a", "b", "c"], "<think>\nfirst\n</think>\n\nyes"
    rows = {}
    for history in ("append", "rewrite"):
        game = episode(
            users("talks"), tokenizer, EpisodeLimits(calls="", history=history), lines=lines
        )
        log = list(game.begin().ids)
        for _ in lines[1:]:
            step = game.reply(written(thought, tokenizer))
            assert step.new_row == (history == "rewrite")
            before = [*log, *written(thought, tokenizer)]
            log = list(step.ids) if step.new_row else [*before, *step.ids]
        rows[history] = tokenizer.decode(log, skip_special_tokens=False)
        drift = game.reply(written(last, tokenizer)).drift
        assert drift == {"append": "rewritten", "rewrite": "same"}[history]
    assert rows["append"].count("first") == 2 and rows["rewrite"].count("first") == 0
    kept = episode(
        users("talks"), tokenizer, EpisodeLimits(calls="", history="rewrite"), lines=lines
    )
    kept.begin()
    assert not kept.reply(written("no thought", tokenizer)).new_row


def test_a_turn_costs_one_rendering_and_no_tokenizing_of_the_past(families, users, monkeypatch):
    tokenizer = families["qwen2_5"]
    game = episode(users("talks"), tokenizer, lines=["go"] + ["word " * 50] * 40, sample_seed=3)
    game.begin()
    rendered, encoded = [], []
    render, encode = tokenizer.render_chat, tokenizer._encode
    monkeypatch.setattr(
        tokenizer, "render_chat", lambda *a, **k: rendered.append(1) or render(*a, **k)
    )
    monkeypatch.setattr(
        tokenizer,
        "_encode",
        lambda text, *a, **k: encoded.append(len(text)) or encode(text, *a, **k),
    )
    looked = 0
    for _ in range(39):
        rendered.clear(), encoded.clear()
        step = game.reply(written("five", tokenizer))
        assert len(rendered) == 1
        looked += step.drift != ""
        assert step.drift or max(encoded) < 600
    assert looked <= 3


CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm", "n": 2}}\n</tool_call>'
BAD = "<tool_call>\n{no\n</tool_call>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = write_tool_family(tmp_path_factory.mktemp("tools") / "qwen2_5", "qwen2_5")
    return HuggingFaceTokenizer(folder)


def replies_to(users, qwen, texts, environment="answers", **limits):
    """The Steps of an episode in which the policy writes these texts."""
    game = episode(
        users(environment), qwen, dataclasses.replace(EpisodeLimits(), **limits), schemas=SCHEMAS
    )
    game.begin()
    return [game.reply(written(text, qwen), "stop", 5, 1000) for text in texts]


def test_a_bad_call_is_answered_three_times_in_a_row_at_most(users, qwen):
    steps = replies_to(users, qwen, [BAD, BAD, BAD, CALL, BAD, BAD, BAD, BAD])
    assert [step.bad_turn for step in steps] == [True] * 3 + [False] + [True] * 4
    assert not any(step.ended for step in steps[:-1])
    assert "cannot be read" in steps[0].messages[0]["content"] and not steps[0].failure
    assert [step.calls for step in steps] == [0, 0, 0, 1, 0, 0, 0, 0]
    end = steps[-1]
    assert end.ended and not end.failure and (end.limit, end.outcome) == ("bad calls", {"": 1.0})
    (end,) = replies_to(users, qwen, [BAD], on_bad_call="end")
    assert end.ended and end.bad_turn and end.outcome == {"": 0.0}
    (end,) = replies_to(users, qwen, [BAD], "talks_on", on_bad_call="end")
    assert end.ended and (end.limit, end.outcome, end.ids) == ("bad calls", None, ())


def test_calls_are_limited_and_those_beyond_are_not_answered(users, qwen):
    steps = replies_to(users, qwen, [CALL, CALL + CALL], max_calls=2)
    assert not steps[0].ended and (steps[0].calls, steps[1].calls) == (1, 2)
    assert steps[1].ended and steps[1].outcome == {"": 1.0}  # 1 call was answered
    (*_, last) = replies_to(users, qwen, [CALL, CALL], "talks_on", max_calls=1)
    assert (last.ended, last.limit, last.outcome) == (True, "calls", None)


def test_calls_are_counted(users, qwen):
    unknown = CALL.replace("weather", "nothing")
    steps = replies_to(users, qwen, [CALL + unknown, "fine"])
    assert (steps[0].calls, steps[0].unknown_calls, steps[0].failed_calls) == (2, 1, 1)
    assert steps[1].ended and steps[1].outcome == {"": 2.0} and steps[1].text == "fine"


def test_a_bad_call_that_cannot_be_answered_ends_and_is_scored(users):
    """An alphabet without the letters of the reason is no way to hide from a score."""
    digits = CharTokenizer("0123456789<>/abcdefghijklmnopqrstuvwxyz_{}\n")
    game = episode(users("answers"), digits, EpisodeLimits(calls="hermes"), schemas=())
    game.begin()
    end = game.reply(written(BAD, digits))
    assert end.ended and end.bad_turn and not end.failure and end.outcome == {"": 0.0}


@pytest.mark.parametrize("gap, most", [(" ", 1), ("", 4)])
def test_calls_cost_no_tokenizing_of_the_past_either(tmp_path, users, monkeypatch, gap, most):
    """As the template writes them, and closer together, where the turn's end is looked for."""
    tokenizer = HuggingFaceTokenizer(write_tool_family(tmp_path / "qwen2_5", "qwen2_5"))
    arguments = f'{{"town":{gap}"Ulm",{gap}"n":{gap}2}}'
    call = f'<tool_call>\n{{"name":{gap}"weather",{gap}"arguments":{gap}{arguments}}}\n</tool_call>'
    answer = [{"role": "tool", "content": "word " * 50}]
    game = episode(
        users("talks"),
        tokenizer,
        EpisodeLimits(),
        lines=["go"] + [answer] * 20,
        tools=SCHEMAS,
        sample_seed=3,
    )
    log, messages = list(game.begin().ids), [{"role": "user", "content": "go"}]
    rendered, encoded = [], []
    render, encode = tokenizer.render_chat, tokenizer._encode
    for _ in range(19):
        with monkeypatch.context() as patch:
            patch.setattr(
                tokenizer, "render_chat", lambda *a, **k: rendered.append(1) or render(*a, **k)
            )
            patch.setattr(
                tokenizer,
                "_encode",
                lambda t, *a, **k: encoded.append(len(t)) or encode(t, *a, **k),
            )
            rendered.clear(), encoded.clear()
            step = game.reply(written(call, tokenizer))
        assert step.calls == 1 and not step.bad_turn and not step.new_row
        assert 1 <= len(rendered) <= most and (step.drift or max(encoded) < 600)
        log += written(call, tokenizer)
        messages.append(game._conversations[""].messages[len(messages)])
        assert messages[-1]["tool_calls"][0]["function"]["arguments"] == {"town": "Ulm", "n": 2}
        new = chat.append_messages(tokenizer, log, messages, answer, tools=SCHEMAS)
        assert list(step.ids) == new.ids
        log, messages = log + new.ids, messages + answer
        assert game._conversations[""].ids == log


def test_tools_are_shown_and_calls_without_a_format_are_text(families, users):
    tokenizer = families["qwen2_5"]
    game = episode(users("talks"), tokenizer, lines=["go", "x"], extra_info={"tools": TOOLS})
    assert "weather" in tokenizer.decode(game.begin().ids)


DRAFT = f"<think>\nI could {CALL}\n</think>\n\n"


def test_a_drafted_call_is_not_made(users, qwen):
    steps = replies_to(users, qwen, [DRAFT + CALL, f"{DRAFT}It is 21."])
    assert [(step.calls, step.bad_turn) for step in steps] == [(1, False), (0, False)]
    assert steps[0].text.strip() == DRAFT.strip()  # the reasoning is what was said
    assert steps[1].ended and steps[1].outcome == {"": 1.0}


def test_a_bad_call_is_told_beside_the_answers_to_good_ones(users, qwen):
    steps = replies_to(users, qwen, [f"{CALL}\n{BAD}", "fine"])
    assert (steps[0].calls, steps[0].bad_turn, steps[0].failed_calls) == (1, True, 1)
    (told,) = steps[0].messages
    assert told["role"] == "tool" and told["content"].startswith("21\nThe call cannot be read: ")
    assert steps[1].ended and steps[1].outcome == {"": 1.0} and not steps[1].bad_turn
    # It counts as a bad turn: four in a row end the episode, and so does one where that is asked.
    steps = replies_to(users, qwen, [f"{CALL}\n{BAD}"] * 4)
    assert steps[-1].limit == "bad calls" and [step.ended for step in steps] == [False] * 3 + [True]
    (end,) = replies_to(users, qwen, [f"{CALL}\n{BAD}"], on_bad_call="end")
    assert end.ended and end.outcome == {"": 0.0}


OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n' + (c.function | tojson) + "
    "'\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


def test_the_prompt_may_begin_the_reasoning(tmp_path, users):
    folder = write_tool_family(tmp_path / "qwen", "qwen2_5")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = folder / name
        if path.exists() and name.endswith("json"):
            config = json.loads(path.read_text()) | {"chat_template": OPENS}
            path.write_text(json.dumps(config))
        elif path.exists():
            path.write_text(OPENS)
    tokenizer = HuggingFaceTokenizer(folder)
    steps = replies_to(users, tokenizer, [f"maybe {CALL}\n</think>\n\n{CALL}", f"maybe\n{CALL}"])
    assert [step.calls for step in steps] == [1, 0] and steps[1].ended
    game = episode(
        resolve("guess_number(high=16)", "rljax.environments"), tokenizer, EpisodeLimits(), secret=5
    )
    game.begin()
    assert game.reply(written("8? or 4?\n</think>\n\n5", tokenizer)).outcome == {"": 1.0}


def test_a_begun_turn_is_gone_on_with(users, qwen):
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "The answer is"},
    ]
    game = episode(users("asks_on"), qwen, EpisodeLimits(), row=1, messages=messages)
    begun = qwen.decode(game.begin().ids, skip_special_tokens=False)
    assert begun.endswith("<|im_start|>assistant\nThe answer is")
    step = game.reply(written(" 5.", qwen))
    said = qwen.decode(step.ids, skip_special_tokens=False)
    assert game.messages[1] == {"role": "assistant", "content": "The answer is 5."}
    assert [m["role"] for m in game.messages] == ["user", "assistant", "user"]
    assert "and now?" in said and said.endswith("<|im_start|>assistant\n")
    whole = qwen.render_chat(game.messages)
    assert begun + " 5.<|im_end|>" + said == whole
