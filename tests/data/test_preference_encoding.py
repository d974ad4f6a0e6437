"""Offline training's rows as tokens: which are learned, what is cut, which row they fill."""

import json
import re

import numpy as np
import pytest
from conversations import CALLS, TOOLS, assistant, system, tool, user
from family_tokenizers import FAMILIES, write_family
from tiny_tokenizer import write_tokenizer

from rljax.batch import Batch, FinishReason
from rljax.data.offline.batches import batch_arrays, longest_row, mismatched_arrays
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.prompts import encode_demonstrations
from rljax.data.text.chat import RewrittenTurn, encode_conversation, encode_last_turn, encode_turns
from rljax.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer
from rljax.errors import InputError

CHARS = CharTokenizer("0123456789 >\n")
EOS = CHARS.eos_ids[0]
ASK = [system("Add."), user("2 + 3?"), assistant("5"), user("And 2 + 3.5?")]
GOOD_END, BAD_END = [assistant("5.5")], [assistant("six")]
WITH_TOOL = [*CALLS, tool("5.5"), assistant("It is 5.5.")]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {f: HuggingFaceTokenizer(write_family(root / f, f)) for f in FAMILIES}


@pytest.fixture(scope="module")
def unmarked_families(tmp_path_factory):
    """The same templates without their marks of what the assistant says."""
    root = tmp_path_factory.mktemp("unmarked")

    def write(f):
        return write_family(root / f, f, marked=False)

    return {f: HuggingFaceTokenizer(write(f)) for f in FAMILIES}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def items_of(rows, tokenizer, kind, max_tokens=999, **options):
    return encode_rows(
        load_rows(rows, "train", kind), tokenizer, kind, max_tokens=max_tokens, **options
    )


def said(tokenizer, ids, mask):
    return tokenizer.decode(
        [i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False
    )


def chars(text, end=False):
    return CHARS.encode(text) + [EOS] * end


# -- conversations, token by token --


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_is_the_last_turn_that_follows_the_rendered_prompt(families, family):
    tokenizer = families[family]
    prompt = ASK if family != "gemma" else ASK[1:]  # its template takes no system message
    row = dict(prompt=prompt, chosen=GOOD_END, rejected=BAD_END)
    ((pair,), _) = items_of([row], tokenizer, "pairs")
    assert pair.prompt_ids.tolist() == tokenizer.encode_chat(prompt)
    for end, ids, mask in (
        (GOOD_END, pair.chosen_ids, pair.chosen_mask),
        (BAD_END, pair.rejected_ids, pair.rejected_mask),
    ):
        whole, learned = encode_last_turn(tokenizer, [*prompt, *end])
        n = len(pair.prompt_ids)
        assert mask.tolist() == [1] * sum(learned) and learned[:n] == [0] * n
        assert ids.tolist() == whole[n : n + len(ids)]
        assert ids[-1] in tokenizer.eos_ids
        assert end[0]["content"] in tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "deepseek"])
def test_a_tools_answer_within_a_completion_is_not_learned(families, unmarked_families, family):
    tokenizer = families[family]
    row = dict(prompt=ASK[:2], completion=WITH_TOOL, label=True, tools=TOOLS)
    ((item,), _) = items_of([row], tokenizer, "unpaired", 4096)
    ((unmarked,), _) = items_of([row], unmarked_families[family], "unpaired", 4096)
    assert item.completion_mask.tolist() == unmarked.completion_mask.tolist()
    prompt = tokenizer.encode_chat(ASK[:2], tools=TOOLS)
    assert item.prompt_ids.tolist() == prompt
    ids, mask = encode_conversation(tokenizer, [*ASK[:2], *WITH_TOOL], tools=TOOLS)
    n = len(item.completion_ids)
    assert item.completion_ids.tolist() == ids[len(prompt) :][:n]
    assert item.completion_mask.tolist() == mask[len(prompt) :][:n]
    assert not any(mask[len(prompt) + n :])
    whole = dict(messages=[*ASK[:2], *WITH_TOOL], tools=TOOLS)
    ((example,), _) = items_of([whole], tokenizer, "examples", 4096)
    assert example.ids.tolist() == ids and example.mask.tolist() == mask
    learned = said(tokenizer, item.completion_ids, item.completion_mask)
    assert "It is 5.5." in learned and '"b": 3.5' in learned
    assert 0 < item.completion_mask.sum() < n
    unlearned = said(tokenizer, item.completion_ids, 1 - item.completion_mask)
    assert "5.5" in unlearned and "It is" not in unlearned


def test_turns_of_the_prompt_are_not_learned(families):
    for family in ("llama3", "qwen2_5", "deepseek"):
        tokenizer = families[family]
        ((whole,), _) = items_of([dict(messages=[*ASK, *GOOD_END])], tokenizer, "examples")
        ((end,), _) = items_of([dict(prompt=ASK, completion=GOOD_END)], tokenizer, "examples")
        assert end.ids.tolist() == whole.ids.tolist()[: len(end.ids)]
        answers = "5{0}5.5{0}".format(tokenizer.decode(tokenizer.eos_ids[:1], False))
        assert said(tokenizer, whole.ids, whole.mask) == answers
        assert said(tokenizer, end.ids, end.mask) == answers[len(answers) // 2 - 1 :]


def test_examples_are_the_demonstrations(tokenizer):
    rows = [
        dict(prompt="the a", completion="nswer"),
        dict(text="42 is"),
        dict(messages=[user("1"), assistant("42"), user("2"), assistant("43")]),
    ]
    records = load_rows(rows, "train", "examples")
    want, _ = encode_demonstrations(records, tokenizer, max_tokens=999)
    found, counts = encode_rows(records, tokenizer, "examples", max_tokens=999)
    assert counts == dict(total=3, kept=3, dropped_overlong=0, dropped_empty=0, truncated=0)
    for item, (ids, mask) in zip(found, want, strict=True):
        assert item.ids.tolist() == ids.tolist() and item.mask.tolist() == mask.tolist()
        assert item.ids.dtype == np.int32 and item.mask.dtype == np.float32


def test_several_turns_need_a_template_that_keeps_them(families, unmarked_families):
    messages = [*ASK[:2], assistant("a"), user("b"), assistant("c")]
    for found in (families, unmarked_families):
        turns = encode_turns(found["llama3"], messages, 2)
        assert said(found["llama3"], turns.ids, turns.mask) == "a<|eot_id|>c<|eot_id|>"
        assert turns.prompt == found["llama3"].encode_chat(messages[:2])
    for found in (families, unmarked_families):  # marks do not make it what a policy is asked for
        with pytest.raises(RewrittenTurn, match="append-only"):
            encode_turns(found["qwen3"], messages, 2)


# -- texts --


@pytest.mark.parametrize("family", ["llama3", "qwen3"])  # Qwen 3 rewrites earlier turns
def test_turns_last_learns_the_last_turn_of_a_completion(families, family):
    tokenizer = families[family]
    several = [assistant("5"), user("And 2 + 3.5?"), assistant("5.5")]
    prompt = [system("Add."), user("2 + 3?")]
    rows = {
        "pairs": dict(prompt=prompt, chosen=several, rejected=[assistant("six")]),
        "unpaired": dict(prompt=prompt, completion=several, label=True),
        "trajectories": dict(prompt=prompt, completion=several, reward=1),
    }
    for kind, row in rows.items():
        name = "chosen" if kind == "pairs" else "completion"
        learned = {}
        for turns in ("auto", "last"):
            ((item,), _) = items_of([row], tokenizer, kind, turns=turns)
            ids, mask = (getattr(item, f"{name}_{what}") for what in ("ids", "mask"))
            learned[turns] = said(tokenizer, ids, mask)
            assert "And 2 + 3.5?" in tokenizer.decode(ids)
        end = tokenizer.decode(tokenizer.eos_ids[:1], False)
        assert learned["auto"].count(end) == 2
        assert learned["last"].endswith(f"5.5{end}") and learned["last"].count(end) == 1
        with pytest.raises(InputError, match="unknown 'turns'"):
            items_of([row], tokenizer, kind, turns="each")


def test_pairs_of_texts():
    rows = [dict(chosen="1>2", rejected="1>3 4", margin=0.5)]
    ((pair,), counts) = items_of(rows, CHARS, "pairs")
    assert pair.prompt_ids.tolist() == chars("1>")
    assert pair.chosen_ids.tolist() == chars("2", end=True)
    assert pair.rejected_ids.tolist() == chars("3 4", end=True)
    assert pair.rejected_mask.tolist() == [1, 1, 1, 1]
    assert pair.margin == 0.5 and pair.reference_ids is None
    assert counts == dict(
        total=1,
        kept=1,
        dropped_overlong=0,
        dropped_empty=0,
        truncated=0,
        dropped_identical=0,
        dropped_tie=0,
    )


def test_an_empty_response_is_its_end_token(families):
    rows = [dict(prompt="1", chosen="2", rejected=""), dict(prompt="1", chosen="", rejected="2")]
    (first, second), counts = items_of(rows, CHARS, "pairs")
    assert first.rejected_ids.tolist() == second.chosen_ids.tolist() == [EOS]
    assert first.rejected_mask.tolist() == [1] and counts["dropped_empty"] == 0
    ((item,), _) = items_of([dict(prompt="1", completion="", label=False)], CHARS, "unpaired")
    assert item.completion_ids.tolist() == [EOS] and item.completion_mask.tolist() == [1]
    _, counts = items_of([*rows, dict(prompt="1", chosen="", rejected="")], CHARS, "pairs")
    assert counts["dropped_identical"] == 1
    for family in ("llama3", "qwen2_5", "gemma"):
        tokenizer = families[family]
        row = dict(prompt=ASK[1:], chosen=GOOD_END, rejected="")
        ((pair,), _) = items_of([row], tokenizer, "pairs")
        assert pair.rejected_ids.tolist() == pair.chosen_ids.tolist()[-1:]
        assert pair.rejected_ids[0] in tokenizer.eos_ids and pair.rejected_mask.tolist() == [1]


def test_an_empty_message_is_its_end_token(families):
    for family, tokenizer in families.items():
        row = dict(prompt=[user("2 + 3?")], chosen=[assistant("5")], rejected=[assistant("")])
        ((item,), counts) = items_of([row], tokenizer, "pairs")
        assert counts["dropped_empty"] == 0, family
        learned = item.rejected_ids[item.rejected_mask > 0].tolist()
        whole = item.chosen_ids[item.chosen_mask > 0].tolist()
        assert learned[-1:] == whole[-1:] and len(learned) < len(whole), family


def test_no_token_spans_the_border(tokenizer):
    row = dict(prompt="the a", chosen="nswer", rejected=" is")
    ((pair,), _) = items_of([row], tokenizer, "pairs")
    assert pair.prompt_ids.tolist() == tokenizer.encode("the a")
    assert pair.chosen_ids.tolist() == [*tokenizer.encode("nswer"), tokenizer.eos_ids[0]]
    whole = tokenizer.encode("the a is")
    assert [*pair.prompt_ids, *pair.rejected_ids] == [*whole, tokenizer.eos_ids[0]]


def test_identical_pairs_and_ties_are_counted():
    rows = [
        dict(prompt="1", chosen="2", rejected="2"),
        dict(chosen="12", rejected="12"),
        dict(prompt="1", chosen="2", rejected="3", tie=True, margin=0.5),
        dict(prompt="1", chosen="4", rejected="5", margin=1.0),
    ]
    items, counts = items_of(rows, CHARS, "pairs")
    assert len(items) == 1 and items[0].margin == 1
    assert (counts["dropped_identical"], counts["dropped_tie"], counts["kept"]) == (2, 1, 1)
    items, counts = items_of(rows, CHARS, "pairs", ties="both_orders")
    assert (counts["dropped_identical"], counts["dropped_tie"], counts["kept"]) == (2, 0, 3)
    assert items[0].chosen_ids.tolist() == items[1].rejected_ids.tolist() == chars("2", end=True)
    assert items[1].chosen_ids.tolist() == items[0].rejected_ids.tolist() == chars("3", end=True)
    assert [item.margin for item in items] == [0.5, -0.5, 1.0]
    # Equal only because both are cut behind their common beginning:
    rows = [dict(prompt="1", chosen="234", rejected="235"), rows[-1]]
    _, counts = items_of(rows, CHARS, "pairs", max_tokens=3, overlong="right")
    assert (counts["dropped_identical"], counts["kept"], counts["truncated"]) == (1, 1, 0)


PAIR = dict(prompt="12345", chosen="67", rejected="8")  # 5 + 3 tokens, 5 + 2 tokens


@pytest.mark.parametrize(
    ("overlong", "limit", "expected"),
    [
        ("drop", 8, ("12345", "67", "8")),
        ("drop", 7, "dropped_overlong"),
        ("left", 7, ("2345", "67", "8")),
        ("left", 4, ("5", "67", "8")),
        ("left", 3, "dropped_overlong"),
        ("right", 7, ("12345", "67", "8")),
        ("right", 6, ("12345", "6", "8")),
        ("right", 5, "dropped_empty"),
        ("right", 2, "dropped_empty"),
    ],
)
def test_overlong_pairs(overlong, limit, expected):
    other = dict(prompt="0", chosen="1", rejected="2")
    try:
        items, counts = items_of([PAIR, other], CHARS, "pairs", limit, overlong=overlong)
    except InputError as error:
        assert limit == 2 and "none of 2 rows is left" in str(error)
        return
    if isinstance(expected, str):
        assert counts[expected] == 1 and len(items) == 1
        return
    texts = [CHARS.decode(i) for i in (items[0].prompt_ids, items[0].chosen_ids)]
    assert (*texts, CHARS.decode(items[0].rejected_ids)) == expected
    assert counts["truncated"] == (limit < 8)
    for item in items:
        size = len(item.prompt_ids) + max(len(item.chosen_ids), len(item.rejected_ids))
        assert size <= limit
    ended = items[0].chosen_ids[-1] == EOS
    assert ended == (overlong != "right")  # a cut on the left keeps the completion whole


def test_overlong_errors_and_bad_options(tmp_path):
    with pytest.raises(InputError, match="row 0 is too long: 8 tokens"):
        items_of([PAIR], CHARS, "pairs", 7, overlong="error")
    longer = [PAIR | {"prompt": PAIR["prompt"] + "1" * n} for n in (0, 5, 1, 2, 9)]
    says = re.escape(
        "4 of 5 rows are too long: row 1 has 13 tokens, row 2 has 9 tokens, row 3 has 10 tokens, "
        "...; the longest is row 4 with 17; max_tokens is 8. Fix: a limit of 17, "
    )
    with pytest.raises(InputError, match=says):
        items_of(longer, CHARS, "pairs", 8, overlong="error")
    assert len(items_of(longer, CHARS, "pairs", 17, overlong="error")[0]) == 5
    for options, says in ((dict(overlong="cut"), "'overlong'"), (dict(ties="smooth"), "'ties'")):
        with pytest.raises(InputError, match=says):
            items_of([PAIR], CHARS, "pairs", **options)
    with pytest.raises(InputError, match="max_tokens"):
        items_of([PAIR], CHARS, "pairs", 0)
    with pytest.raises(InputError, match="row 0 has no tokens"):
        items_of([dict(prompt="", chosen="1", rejected="2")], CHARS, "pairs")
    with_bos = HuggingFaceTokenizer(write_tokenizer(tmp_path, bos="<s>"))
    row = dict(prompt="12345", chosen="6", rejected="7")
    ((pair,), _) = items_of([row], with_bos, "pairs", 5, overlong="left")
    assert with_bos.decode(pair.prompt_ids, skip_special_tokens=False) == "<s>45"


@pytest.mark.parametrize(
    ("overlong", "limit", "ids", "mask"),
    [
        ("left", 4, "234", [0, 0, 1, 1]),
        ("right", 3, "123", [0, 0, 0]),
        ("right", 4, "1234", [0, 0, 0, 1]),
    ],
)
def test_overlong_examples(overlong, limit, ids, mask):
    rows = [dict(prompt="123", completion="4"), dict(prompt="1", completion="2")]
    items, counts = items_of(rows, CHARS, "examples", limit, overlong=overlong)
    if not any(mask):
        assert counts["dropped_empty"] == 1 and len(items) == 1
        return
    end = overlong == "left"
    assert items[0].ids.tolist() == chars(ids, end) and items[0].mask.tolist() == mask


# -- steps and trajectories --


def test_steps_are_labelled_at_their_last_token(tokenizer):
    row = dict(prompt="0>", completions=["12", "3"], labels=[True, -0.5])
    ((item,), _) = items_of([row], CHARS, "stepwise")
    assert item.ids.tolist() == chars("0>12\n3\n")
    assert item.mask.tolist() == [0, 0, 0, 0, 1, 0, 1]
    assert item.labels.tolist() == [0, 0, 0, 0, 1, 0, -0.5]
    ((item,), _) = items_of([row], CHARS, "stepwise", separator="")
    assert item.ids.tolist() == chars("0>123")
    assert item.mask.tolist() == [0, 0, 0, 1, 1]
    # A label that is cut away goes with its step; without any the row is dropped.
    ((item,), counts) = items_of([row], CHARS, "stepwise", 6, overlong="right")
    assert item.labels.tolist() == [0, 0, 0, 0, 1, 0] and counts["truncated"] == 1
    with pytest.raises(InputError, match="'dropped_empty': 1"):
        items_of([row], CHARS, "stepwise", 4, overlong="right")
    ((item,), _) = items_of([row], CHARS, "stepwise", 6, overlong="left")
    assert item.ids.tolist() == chars(">12\n3\n") and item.mask.tolist() == [0, 0, 0, 1, 0, 1]
    chat = dict(prompt=[user("1")], completions=["the answer", "is 42"], labels=[True, True])
    ((item,), _) = items_of([chat], tokenizer, "stepwise")
    prompt = tokenizer.encode_chat([user("1")])
    assert item.ids[: len(prompt)].tolist() == prompt
    assert tokenizer.decode(item.ids[len(prompt) :]) == "the answer\nis 42\n"
    ends = [tokenizer.decode(item.ids[: t + 1]) for t in np.flatnonzero(item.mask)]
    assert [
        text.rpartition("\n")[0].endswith(step)
        for text, step in zip(ends, ("the answer", "is 42"), strict=True)
    ] == [True, True]


def test_trajectories_of_texts():
    rows = [
        dict(prompt="1", completion="23", reward=0.5, logprobs=[-1.0, -2.0, -3.0]),
        dict(prompt="1", completion="23", reward=1, truncated=True, logprobs=[-1.0, -2.0]),
    ]
    (whole, cut), _ = items_of(rows, CHARS, "trajectories")
    assert whole.completion_ids.tolist() == chars("23", end=True) and not whole.truncated
    assert cut.completion_ids.tolist() == chars("23") and cut.truncated
    assert whole.logprobs.tolist() == [-1, -2, -3] and whole.process_scores is None
    ((short,), _) = items_of(rows[:1], CHARS, "trajectories", 3, overlong="right")
    assert short.truncated and short.logprobs.tolist() == [-1, -2]
    with pytest.raises(InputError, match="'logprobs' has 2 values for 3 tokens"):
        items_of([{**rows[0], "logprobs": [-1.0, -2.0]}], CHARS, "trajectories")


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_process_scores_stand_at_the_ends_of_steps(families, family, truncated):
    tokenizer = families[family]
    steps = ["What is 2 + 3? é😀", "It is five.", "5.5"]
    row = dict(
        prompt=[user("2?")],
        steps=steps,
        reward=1,
        process_scores=[0.25, -0.5, 2.0],
        truncated=truncated,
    )
    ((item,), _) = items_of([row], tokenizer, "trajectories")
    whole = [user("2?"), assistant("\n".join(steps))]
    turns = encode_turns(tokenizer, whole, 1)
    ids = [i for i, m in zip(turns.ids, turns.mask, strict=True) if m]
    if truncated:  # what was sampled, to the letter: no template has finished it
        assert tokenizer.decode(item.completion_ids) == "\n".join(steps)
    else:
        assert item.completion_ids.tolist() == ids
    at = np.flatnonzero(item.process_scores)
    assert item.process_scores[at].tolist() == [0.25, -0.5, 2.0]
    assert at[2] == len(item.completion_ids) - 1
    for t, step in zip(at[:2], steps, strict=False):
        before, through = (tokenizer.decode(item.completion_ids[:n]) for n in (t, t + 1))
        assert step in through and step not in before


# -- rows of a batch --


def checked(arrays) -> Batch:
    return Batch(**arrays).check()


def test_rows_of_pairs_and_triples():
    rows = [
        dict(prompt="1", chosen="2", rejected="34", reference="5", margin=0.5),
        dict(prompt="67", chosen="8", rejected="9", reference="0", margin=2.0),
    ]
    items, _ = items_of(rows, CHARS, "pairs")
    assert longest_row("pairs", items) == 4
    batch = checked(batch_arrays("pairs", items, length=5))
    want = [["1", "2"], ["1", "34"], ["67", "8"], ["67", "9"]]
    for row, (prompt, completion) in enumerate(want):
        ids, n = chars(prompt + completion, end=True), len(prompt)
        pad = [0] * (5 - len(ids))
        assert batch.tokens[row].tolist() == ids + pad
        assert batch.mask[row].tolist() == [0] * n + [1] * (len(ids) - n) + pad
        assert batch.segment_ids[row].tolist() == [1] * len(ids) + pad
        assert batch.positions[row].tolist() == list(range(len(ids))) + pad
    assert batch.scores.tolist() == [0.5, 0, 2, 0] and batch.group.tolist() == [0, 0, 1, 1]
    triples = checked(batch_arrays("pairs", items, length=5, rows_per_example=3))
    np.testing.assert_array_equal(triples.tokens[[1, 2, 4, 5]], batch.tokens)
    assert triples.tokens[3].tolist() == chars("670", end=True) + [0]
    assert triples.scores.tolist() == [0, 0.5, 0, 0, 2, 0]
    assert triples.group.tolist() == [0, 0, 0, 1, 1, 1]
    plain, _ = items_of([dict(chosen="12", rejected="13")], CHARS, "pairs")
    with pytest.raises(InputError, match="no reference completion"):
        batch_arrays("pairs", plain, length=5, rows_per_example=3)
    with pytest.raises(InputError, match="4 tokens"):
        batch_arrays("pairs", items, length=3)
    with pytest.raises(InputError, match="rows_per_example"):
        batch_arrays("pairs", items, length=5, rows_per_example=4)


def test_mismatched_rows_have_the_completion_of_the_row_before():
    rows = [
        dict(prompt="1", completion="23", label=True),
        dict(prompt="456", completion="7", label=False),
        dict(prompt="8", completion="9", label=True),
    ]
    items, _ = items_of(rows, CHARS, "unpaired")
    assert longest_row("unpaired", items) == 5
    batch = checked(batch_arrays("unpaired", items, length=6))
    assert batch.scores.tolist() == [1, -1, 1]
    other = checked(mismatched_arrays(items, length=6))
    for row, text in enumerate(["19", "45623", "87"]):
        n = len(rows[row]["prompt"])
        pad = [0] * (5 - len(text))
        assert other.tokens[row].tolist() == chars(text, end=True) + pad
        assert other.mask[row].tolist() == [0] * n + [1] * (len(text) + 1 - n) + pad
    short = mismatched_arrays(items, length=5)  # a completion is cut where the row ends
    np.testing.assert_array_equal(short["tokens"], other.tokens[:, :5])
    alone = mismatched_arrays(items[:1], length=6)
    assert not alone["mask"].any() and alone["segment_ids"].any()


def test_rows_of_steps_and_trajectories():
    row = dict(prompt="0>", completions=["12", "3"], labels=[True, False])
    items, _ = items_of([row], CHARS, "stepwise")
    batch = checked(batch_arrays("stepwise", items, length=8))
    assert batch.mask.tolist() == [[0, 0, 0, 0, 1, 0, 1, 0]]
    assert batch.process_rewards.tolist() == [[0, 0, 0, 0, 1, 0, -1, 0]]
    rows = [
        dict(prompt="1", completion="23", reward=0.5, logprobs=[-1.0, -2.0, -3.0]),
        dict(prompt="45", completion="6", reward=-1, truncated=True, logprobs=[-4.0]),
    ]
    items, _ = items_of(rows, CHARS, "trajectories")
    assert longest_row("trajectories", items) == 4
    batch = checked(batch_arrays("trajectories", items, length=5))
    assert batch.mask.tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]]
    assert batch.rewards.tolist() == [[0, 0, 0, 0.5, 0], [0, 0, -1, 0, 0]]
    assert batch.sampler_logprobs.tolist() == [[0, -1, -2, -3, 0], [0, 0, -4, 0, 0]]
    assert batch.scores.tolist() == [0.5, -1] and batch.process_rewards is None
    assert batch.finish_reason.tolist() == [FinishReason.STOP, FinishReason.LENGTH]
    scored = dict(prompt="1", steps=["23", "4"], reward=3, process_scores=[0.5, 1.0])
    items, _ = items_of([scored], CHARS, "trajectories")
    batch = checked(batch_arrays("trajectories", items, length=7))
    assert batch.tokens.tolist() == [[*chars("123\n4", end=True), 0]]
    assert batch.rewards.tolist() == [[0, 0, 0.5, 0, 0, 1, 0]]
    assert batch.process_rewards.tolist() == batch.rewards.tolist()
    assert batch.scores.tolist() == [3] and batch.sampler_logprobs is None


@pytest.mark.parametrize("spoken", [True, False])
def test_the_last_of_ended_steps_ends_as_a_response_does(tmp_path, spoken):
    """A conversation ends with the template's end of turn, a text with the end-of-text token."""
    folder = write_tokenizer(tmp_path)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**told, "eos_token": "<|endoftext|>"})
    )
    (folder / "generation_config.json").unlink()
    tokenizer = HuggingFaceTokenizer(folder)
    prompt = [user("q")] if spoken else "q"
    row = dict(prompt=prompt, completions=["one", "two"], labels=[1, -1], ended=True)
    ((item,), _) = items_of([row], tokenizer, "stepwise")
    end = "<|im_end|>" if spoken else "<|endoftext|>"
    assert item.ids[-1] == tokenizer.encode(end)[0]
    assert item.labels[-1] == -1 and item.mask[-1] == 1
