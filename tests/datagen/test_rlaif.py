"""Labels by a judge: both orders, ties, failures, files that training reads, and who labels."""

import collections
import functools
import json
import math
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import REPO
from tiny_tokenizer import write_tokenizer

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.prompts import PromptRecord
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen import preferences as rlaif
from rljax.datagen.trajectories import example_row
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.policies import SavedPolicy
from rljax.policies.sampling import Completion
from rljax.rewards.pool.pool import Score


def said(value: float) -> Score:
    return Score(value, {}, "ok", 0.0)


def comparison(first: str, second: str, prompt="write: ") -> dict:
    return {"prompt": prompt, "first": first, "second": second}


@pytest.mark.parametrize(
    ("forward", "backward", "outcome", "probability", "position"),
    [
        (0.9, 0.2, "first", 0.85, 0),
        (0.3, 0.6, "second", 0.35, 0),
        (0.5, 0.5, "tie", 0.5, 0),
        (0.8, 0.8, "disagreement", 0.5, 1),
        (0.1, 0.3, "disagreement", 0.4, -1),
        (0.9, 0.5, "disagreement", 0.7, 0),
        (1.0, 0.0, "first", 1.0, 0),
    ],
)
def test_both_orders_must_agree(forward, backward, outcome, probability, position):
    found = rlaif.verdict(said(forward), said(backward))
    assert (found.outcome, found.liked_position) == (outcome, position)
    assert found.probability == pytest.approx(probability)
    turned = rlaif.verdict(said(backward), said(forward))  # the two completions change places
    other = {"first": "second", "second": "first"}
    assert turned.outcome == other.get(outcome, outcome)
    assert turned.probability == pytest.approx(1 - probability)


def test_labels_by_a_judge_of_text():
    items = [
        comparison("a a", "b"),
        comparison("b", "a"),
        comparison("ab", "ba"),
        comparison("same", "same"),
    ]
    judge = rlaif.text_judge("judges.more_a", workers=1)
    rows, counts = rlaif.label(items, judge)
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("a a", "b"), ("a", "b")]
    assert [r["probability"] for r in rows] == pytest.approx([0.9, 0.9])
    assert counts == {
        "judge/asked": 3,
        "judge/labelled": 2,
        "judge/ties": 1,
        "judge/disagreements": 0,
        "judge/failed": 0,
        "judge/identical": 1,
        "judge/first_won": 0,
        "judge/second_won": 0,
    }
    kept, _ = rlaif.label(items, judge, ties="keep")
    assert [r["tie"] for r in kept] == [False, False, True]


def test_a_judge_that_answers_by_position_labels_nothing():
    items = [comparison("a", "b"), comparison("c", "a")]
    rows, counts = rlaif.label(items, rlaif.text_judge("judges.always_first", workers=1))
    assert rows == [] and counts["judge/disagreements"] == counts["judge/first_won"] == 2
    with pytest.raises(InputError, match="no pair has a label: got .*judge/first_won 2"):
        rlaif.write_pairs(rows, "unused.jsonl", counts)


@pytest.mark.slow
def test_a_failed_judgement_is_no_label():
    items = [
        comparison("a", "b"),
        comparison("hang", "a"),
        comparison("raise", "a"),
        comparison("two", "a"),
        comparison("nan", "aa"),
        comparison("b", "aa"),
    ]
    rows, counts = rlaif.label(items, rlaif.text_judge("judges.careless", workers=2, timeout_s=1.0))
    assert [r["chosen"] for r in rows] == ["a", "aa"]
    assert counts["judge/failed"] == 4 and counts["judge/labelled"] == 2
    with pytest.raises(InputError, match="no answer"):
        rlaif.label([comparison("raise", "b")], rlaif.text_judge("judges.careless", workers=1))


def test_some_failed_judgements_are_counted_with_their_reasons(caplog):
    def judge(comparisons):
        reasons = {"x": "too long", "y": "no answer"}
        values = [(c["first"], c["first"] + c["second"]) for c in comparisons]
        return [
            Score(math.nan, {}, "error", 0.0, reasons[failed[0]])
            if (failed := [c for c in both if c in reasons])
            else said(float(first == "a"))
            for first, both in values
        ]

    items = [comparison("a", "b"), comparison("b", "x", "second: "), comparison("a", "x")]
    with caplog.at_level("WARNING", "rljax"):
        rows, counts = rlaif.label([*items, comparison("y", "b")], judge)
        rlaif.label(items[:2], judge)
    assert len(rows) == 1 and counts["judge/failed"] == 3
    several, one = caplog.messages
    assert several.startswith("3 of 4 judgements failed, and their pairs are left out: ")
    assert "error: too long (2 of 3); error: no answer (1 of 3). " in several
    assert several.endswith("The first is of the prompt 'second: '")
    assert one.startswith("1 of 2 ") and "left out: error: too long. The first" in one


def test_a_judge_that_returns_nothing_is_said():
    with pytest.raises(InputError, match="the judge returned None: a probability is from 0 to 1"):
        rlaif.label([comparison("none", "b")], rlaif.text_judge("judges.careless", workers=1))


def test_what_is_no_judge_is_said_at_once():
    with pytest.raises(InputError, match="first, second"):
        rlaif.text_judge("judges.half")
    with pytest.raises(InputError, match="shorter"):
        rlaif.text_judge("shortest")


def test_comparisons_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "p", "completions": ["x", "y", "z"]},
        {"prompt": [{"role": "user", "content": "q"}], "first": "u", "second": "v"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = rlaif.load_comparisons(str(path))
    assert [(c["first"], c["second"]) for c in found] == [
        ("x", "y"),
        ("x", "z"),
        ("y", "z"),
        ("u", "v"),
    ]
    assert found[-1]["prompt"] == [{"role": "user", "content": "q"}]
    (ended,) = rlaif.load_comparisons([{"prompt": "p", "first": "x", "second": ""}])
    assert ended["second"] == ""  # a response that ended at once
    for bad in ({"prompt": "p", "first": "x"}, {"first": "x", "second": "y"}):
        with pytest.raises(InputError, match="row 0"):
            rlaif.load_comparisons([bad])


def test_the_labels_are_read_by_training_unchanged(tmp_path):
    items = [comparison("a cat", "a day"), comparison("me", "a b a"), comparison("ab", "ba")]
    judge = rlaif.text_judge("judges.more_a", workers=1)
    rows, _ = rlaif.label([*items, comparison("a", "b")], judge, ties="keep")
    path = tmp_path / "pairs.jsonl"
    rlaif.write_pairs(rows, path, {})
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz :")
    found, counts = encode_rows(
        load_rows(str(path), "train", "pairs"), tokenizer, "pairs", max_tokens=32
    )
    texts = [
        tokenizer.decode([int(i) for i in p.chosen_ids if i not in tokenizer.eos_ids])
        for p in found
    ]
    assert texts == ["a b a", "a"] and counts["dropped_tie"] == 2
    assert {p.margin for p in found} == {0.0}  # a probability is no margin of a reward


def write_reward_model(folder, head: float = 1.0):
    """A folder whose scores are some function of the text."""
    write_tokenizer(folder)
    words = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.3)"
    model = Model(
        resolve(text, NAMESPACES["model"])(words), make_mesh(devices=jax.devices()[:1]), "scalar"
    )
    params = model.init(jax.random.key(3))
    params["head"] = head * jax.random.normal(jax.random.key(4), params["head"].shape)
    save_params(folder, model, params, bos_id=None, eos_ids=(1,), pad_id=0)
    return folder


@pytest.mark.slow
def test_a_reward_model_as_the_judge(tmp_path):
    folder = write_reward_model(tmp_path / "rm")
    judge = rlaif.model_judge(folder, max_tokens=24, rows=2)
    rng = random.Random(0)
    words = ["how many", "clips", "apples in May", "friends", "sold"]
    items = [comparison(*rng.sample(words, 2), prompt="question ") for _ in range(5)]
    forward = judge(items)
    backward = judge([comparison(c["second"], c["first"], c["prompt"]) for c in items])
    for one, other in zip(forward, backward, strict=True):
        assert one.value + other.value == pytest.approx(1.0, abs=1e-5)
    assert np.std([s.value for s in forward]) > 0.01
    # Transitive on log-odds, as scores are: a over c is a over b and b over c.
    a, b, c = (judge([comparison(*p)])[0].value for p in (words[:2], words[1:3], words[0:3:2]))
    odds = [math.log(p / (1 - p)) for p in (a, b, c)]
    assert odds[0] + odds[1] == pytest.approx(odds[2], abs=1e-4)
    (empty,) = judge([comparison("", "sold", "question ")])
    assert empty.status == "ok" and 0 < empty.value < 1
    rows, counts = rlaif.label([*items, comparison("clips " * 40, "sold", "question ")], judge)
    assert counts["judge/failed"] == 1 and counts["judge/disagreements"] == 0
    assert len(rows) + counts["judge/ties"] + counts["judge/identical"] == 5


@functools.cache
def random_policy() -> SavedPolicy:
    """A policy of random weights over four letters."""
    tokenizer = CharTokenizer("abcd>")
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.3)"
    model = Model(
        resolve(text, NAMESPACES["model"])(tokenizer.vocab_size),
        make_mesh(devices=jax.devices()[:1]),
    )
    return SavedPolicy(Config(), model, model.init(jax.random.key(0)), tokenizer, None)


@pytest.mark.slow
def test_completions_of_a_policy_are_compared(tmp_path):
    policy = random_policy()
    tokenizer = policy.tokenizer
    found = rlaif.sample_comparisons(
        policy,
        "first_letter(letters=2, kinds=4, test=4)",
        samples=3,
        max_response_tokens=4,
        prompts_per_call=8,
        keep_truncated=True,
    )
    assert {c["prompt"] for c in found} <= {f"{x}{y}>" for x in "abcd" for y in "abcd"}
    of_prompt = collections.Counter(c["prompt"] for c in found)
    # All pairs of three of each, the empty answers among them; the padding is left out.
    assert len(of_prompt) == 12 and set(of_prompt.values()) == {3}
    empty = [c for c in found if "" in (c["first"], c["second"])]
    assert 0 < len(empty) < len(found)
    # And they get labels, which training reads: nothing at all has fewer letters a than an "a".
    rows, counts = rlaif.label(found, rlaif.text_judge("judges.more_a", workers=1))
    assert counts["judge/failed"] == 0
    rejected = [row for row in rows if not row["rejected"]]
    assert rejected and all("a" in row["chosen"] for row in rejected)
    path = tmp_path / "pairs.jsonl"
    rlaif.write_pairs(rows, path, {})
    pairs, _ = encode_rows(load_rows(str(path), "train", "pairs"), tokenizer, "pairs", max_tokens=9)
    ended = [p for p in pairs if p.rejected_ids.tolist() == [tokenizer.eos_ids[0]]]
    assert len(ended) == len(rejected)


def test_completions_without_an_end_are_left_out_and_prompts_need_no_answer(tmp_path, caplog):
    """Training would learn an end behind them. A judge reads no reference."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{x}{y}>"}) + "\n" for x in "abcd" for y in "ab")
    )
    draw = functools.partial(rlaif.sample_comparisons, random_policy(), str(path), samples=3)
    limit = dict(max_response_tokens=4, prompts_per_call=8)
    caplog.set_level("WARNING", "rljax")
    every, ended = draw(**limit, keep_truncated=True), draw(**limit)
    (line,) = (r.message for r in caplog.records if "have no end" in r.message)
    assert "of 24 completions have no end within 4 tokens and are left out" in line
    assert len(every) == 24 and 0 < len(ended) < 24
    assert all(len(c[name]) < 4 for c in ended for name in ("first", "second"))
    assert [c for c in every if c in ended] == ended
    with pytest.raises(InputError, match="of 24 completions .*--max_response_tokens=2 or more"):
        draw(max_response_tokens=1, prompts_per_call=8)


@pytest.mark.slow
def test_the_launcher(tmp_path):
    data, out = tmp_path / "rows.jsonl", tmp_path / "made" / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "p", "completions": ["aa", "b", "a"]}))
    command = [sys.executable, "launchers/label_preferences.py", f"--data={data}", f"--out={out}"]

    def run(*more):
        return subprocess.run(
            [*command, *more],
            capture_output=True,
            text=True,
            cwd=REPO,
            timeout=120,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": f"{REPO}:{REPO}/tests/helpers",
                "JAX_PLATFORMS": "cpu",
            },
        )

    done = run("--judge=judges.more_a()", "--workers=1", "--compilation_cache=")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("aa", "b"), ("aa", "a"), ("a", "b")]
    assert "judge/labelled 3" in done.stdout
    both = run("--judge=judges.more_a", "--reward_model=x")
    assert both.returncode == 2 and "exactly one" in both.stderr


def test_rows_without_completions_are_said_to_have_none():
    for row in ({"prompt": "p"}, {"prompt": "p", "first": "a"}):
        with pytest.raises(InputError, match="has no two completions"):
            rlaif.load_comparisons([row])


def test_completions_that_are_messages_are_told_to_be_texts():
    answer = [{"role": "assistant", "content": "a"}]
    for completion in (answer, answer[0]):
        with pytest.raises(InputError, match="a completion is not a text.*Fix: write its text"):
            rlaif.load_comparisons([{"prompt": "p", "completions": [completion, "b"]}])
    with pytest.raises(InputError, match="a completion is null.*Fix: remove it"):
        rlaif.load_comparisons([{"prompt": "p", "completions": [None, "b"]}])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "time",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
ASKED = [{"role": "user", "content": "q"}]
TOLD = [{"role": "system", "content": "Answer in French."}, *ASKED]


@pytest.mark.parametrize(
    "row, expected",
    [
        (dict(system="Answer in French.", prompt=ASKED), dict(prompt=TOLD)),
        (dict(system_prompt="Answer in French.", prompt="q"), dict(prompt=TOLD)),
        (dict(question="q"), dict(prompt="q")),
        (dict(prompt=json.dumps(ASKED)), dict(prompt=ASKED)),
        (dict(prompt=ASKED, tools=TOOLS), dict(prompt=ASKED, tools=TOOLS)),
        (dict(prompt=ASKED, tools=json.dumps(TOOLS)), dict(prompt=ASKED, tools=TOOLS)),
        (
            dict(prompt=ASKED, chat_template_kwargs={"enable_thinking": False}),
            dict(prompt=ASKED, chat_template_kwargs={"enable_thinking": False}),
        ),
        (dict(prompt=ASKED, enable_thinking=False), dict(prompt=ASKED, enable_thinking=False)),
    ],
)
def test_labels_keep_all_that_the_prompt_is_rendered_of(tmp_path, row, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, "first": "a", "second": "b"}) + "\n")
    items = rlaif.load_comparisons(str(path))
    assert items == [{**expected, "first": "a", "second": "b"}]
    rows, _ = rlaif.label(items, lambda comparisons: [said(0.9)] + [said(0.1)])
    assert {name: rows[0][name] for name in expected} == expected and rows[0]["chosen"] == "a"
    rlaif.write_pairs(rows, tmp_path / "pairs.jsonl", {})
    (pair,) = load_rows(str(tmp_path / "pairs.jsonl"), "train", "pairs")
    whole = load_rows([{**row, "chosen": "a", "rejected": "b"}], "train", "pairs")[0]
    assert {n: v for n, v in pair.items()} == whole  # as the row that was answered


def test_comparisons_of_what_is_not_read_are_refused():
    made = dict(prompt=ASKED, first="a", second="b")
    for more in (
        dict(system="x", prompt=TOLD),  # two system messages
        dict(history=[["before", "answer"]]),
        dict(tools="no json"),
        dict(chat_template_kwargs={"enable_thinking": True}, enable_thinking=False),
        dict(images=["data:image/png;base64,AAAA"]),
    ):
        with pytest.raises(InputError):
            rlaif.load_comparisons([{**made, **more}])


def test_rows_of_sampled_prompts_keep_what_they_are_rendered_of():
    """Of rljax sample and of labels alike."""
    more = dict(tools=TOOLS, chat_template_kwargs={"enable_thinking": False}, level=3)
    ids = np.ones(1, np.int32)
    record = PromptRecord("text", ids, "", "", more, 0, messages=tuple(ASKED))
    expected = dict(prompt=ASKED, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    assert record.columns == expected
    sample = Completion(0, "a", (1,), (0.0,), "stop", 1.0)
    row = example_row([record], sample)
    assert {name: row[name] for name in expected} == expected and "level" not in row
