"""Forms of rewards for the device give the scores of their forms of texts."""

import random
import re

import jax
import numpy as np
import pytest

from rljax.batch import FinishReason
from rljax.components import resolve
from rljax.contracts import contract
from rljax.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer
from rljax.errors import InputError
from rljax.reasoning import response_of
from rljax.rewards.on_device import DeviceForm, device_scorer
from rljax.rewards.on_device.automaton import compile_pattern
from rljax.rewards.pool.calling import HOME, call_reward
from rljax.tasks import addition, first_letter, letter_count, letter_quota, sort_digits
from tests.helpers.family_tokenizers import byte_level_bpe, sentencepiece_bpe, write_folder

TEXT = CharTokenizer("".join(map(chr, range(32, 127))) + "\t\n\r\x0b\x0c\x1c\u00a0\u3000é✓")


def scored(reward: str, tokenizer, responses: list[str], truths: list[str], ids=None) -> dict:
    """Scores by the form for the device, behind prompts of different lengths."""
    ids = ids or [[*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in responses]
    starts = np.array([1 + i % 3 for i in range(len(ids))], np.int32)
    lengths = starts + np.array([len(one) for one in ids], np.int32)
    tokens = np.full((len(ids), int(lengths.max()) + 2), 2, np.int32)  # another one's text around
    for row, start, one in zip(tokens, starts, ids, strict=True):
        row[start : start + len(one)] = one
    scorer = device_scorer(reward, tokenizer, tokenizer.vocab_size)
    fields = scorer.fields(truths)
    reasons = np.full(len(ids), FinishReason.STOP, np.int32)
    return jax.device_get(jax.jit(scorer.score)(tokens, starts, lengths, reasons, fields))


def of_texts(reward: str, responses: list[str], truths: list[str], tokens: list[int]) -> list:
    """Scores by the form of texts, (score, parts) each."""
    component = resolve(reward, HOME)
    return [
        call_reward(component, {"response": r, "ground_truth": t, "num_tokens": n})
        for r, t, n in zip(responses, truths, tokens, strict=True)
    ]


def assert_same(reward: str, tokenizer, responses: list[str], truths: list[str], undecided=()):
    """Every score and part is the same but those of `undecided` rows, which are NaN."""
    made = scored(reward, tokenizer, responses, truths)
    lengths = [len(tokenizer.encode(text)) + 1 for text in responses]
    expected = of_texts(reward, responses, truths, lengths)
    for row, (value, parts) in enumerate(expected):
        if row in undecided:
            assert np.isnan(made["score"][row]), responses[row]
            continue
        found = {name: float(made[name][row]) for name in made}
        assert found == pytest.approx({"score": value, **parts}), (responses[row], truths[row])


def around(answer: str, draw: random.Random, alphabet: str) -> list[str]:
    """An answer, what is nearly it, and a random text of the alphabet."""
    other = "".join(draw.choices(alphabet, k=draw.randint(0, len(answer) + 2)))
    return [answer, f"{answer}{answer[:1]}", answer[:-1], answer[::-1], other]


@pytest.mark.parametrize(
    "task",
    [
        letter_count(),
        sort_digits(prompts=400, test=20),
        addition(prompts=400, test=20),
        first_letter(),
        letter_quota(),
    ],
    ids=lambda task: task.train[0]["data_source"],
)
def test_every_row_of_a_task_is_scored_as_its_text_is(task):
    draw, tokenizer = random.Random(0), CharTokenizer(task.alphabet)
    responses, truths = [], []
    for row in task.train[:300]:
        made = around(row["ground_truth"], draw, task.alphabet)
        responses += made
        truths += [row["ground_truth"]] * len(made)
    assert_same(task.reward, tokenizer, responses, truths)


SPACED = [" 72 ", "\t72\n", "7 2", "72\x1c", "", "  ", "72", "-72", "\x0b72\x0c\r", "é72", "é"]


def test_white_space_around_an_answer_is_taken_away():
    truths = ["72"] * len(SPACED)
    assert_same("exact_match()", TEXT, SPACED, truths)
    assert_same("exact_match()", TEXT, SPACED, [" é "] * len(SPACED))
    assert_same("sequence_match(partial=0.5)", TEXT, SPACED, truths, undecided=[9, 10])


def test_a_row_that_the_form_cannot_decide_on_has_no_score():
    wide = ["\u00a072", "72\u3000", "7\u00a02", "72"]
    assert_same("exact_match()", TEXT, wide, ["72"] * 4, undecided=[0, 1])
    reasoned = ["<think>a</think>72", "<THINK>72", "see [THINK]", "72 <thin", "a<b>72", "72"]
    assert_same("exact_match()", TEXT, reasoned, ["72"] * 6, undecided=[0, 1, 2])
    # A reward of whole responses reads the marks as any text.
    assert_same("regex_match(pattern='</?think>')", TEXT, reasoned, ["72"] * 6)


def test_a_target_in_a_list_is_compared_as_its_text_is():
    for truth in ('["72"]', '{"target": ["72"]}', '{"target": "72"}', "[72]"):
        responses = [*SPACED[:9], truth]
        for reward in ("exact_match()", "sequence_match(partial=0.5)", "gsm8k(method='flexible')"):
            assert_same(reward, TEXT, responses, [truth] * len(responses))


NUMBERS = [
    "#### 72",
    "#### -72",
    "a #### 7 #### 72.",
    "#### 1,072",
    "####72",
    "#### $72",
    "#### 72 or 73",
    "72",
    "so 1. and 72",
    "so 72. and .",
    "72 -.",
    "x-72 is",
    "#### -",
    "#### ,",
    "#### 72,",
    "",
    "-5-72",
    "7,2 72,",
    f"{'9' * 299} 72",
    f"#### 72{'x' * 300}",
    f"#### 72{'x' * 292}",
]


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("truth", ["72", "-72", "1072", ".", "-."])
def test_gsm8k_finds_the_number_of_its_form_of_texts(method, truth):
    reward = f"gsm8k(method='{method}', format_score=0.1)"
    assert_same(reward, TEXT, NUMBERS, [truth] * len(NUMBERS))


def test_gsm8k_of_random_texts():
    draw = random.Random(1)
    texts = ["".join(draw.choices("#  -.,0123x", k=draw.randint(0, 24))) for _ in range(400)]
    texts += [f"{text}#### {text[:5]}" for text in texts]
    for method in ("strict", "flexible"):
        found = [re.findall(r"-?[0-9.,]+", text) for text in texts]
        truths = [draw.choice(numbers or ["1"]) for numbers in found]
        assert_same(f"gsm8k(method='{method}')", TEXT, texts, truths)


PATTERNS = [
    "",
    "a",
    "^a",
    "a$",
    "^a$",
    "(ab|c)+d?",
    "a{2,3}b*",
    "[^ab]c",
    "^<answer>.*</answer>$",
    r"^\s*\w+\d\s*$",
    r"\d{3}-\d{4}",
    "é.c",
    "[à-ÿ]",
    "[^à-ÿ]{2}$",
    "(a|b)*?abb",
    r"(?:a\.)\Z",
    r"\W[✓x]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_pattern_is_found_as_re_finds_it(pattern, whole):
    draw = random.Random(2)
    letters = "aabbccd é✓à<>/answer 0123-\n. "
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 12))) for _ in range(150)]
    texts += [
        "a",
        "a\n",
        "ab",
        "555-1234",
        "<answer>é</answer>",
        "<answer></answer>\n",
        "abb",
        "é\nc",
    ]
    automaton = compile_pattern(pattern, whole)
    raw = [text.encode() for text in texts]
    array = np.zeros((len(raw), max(map(len, raw)) + 1), np.uint8)
    for row, one in zip(array, raw, strict=True):
        row[: len(one)] = np.frombuffer(one, np.uint8)
    found = automaton.matches(array, np.array([len(one) for one in raw], np.int32))
    compiled = re.compile(pattern, re.DOTALL)
    expected = [bool(compiled.fullmatch(t) if whole else compiled.search(t)) for t in texts]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("(a", "the pattern is none"),
        (r"(a)\1", "groupref"),
        ("(?=a)b", "assert"),
        ("(?i)a", "IGNORECASE"),
        (r"\ba", "at within it"),
        ("a|^b", "at within it"),
        ("(a|b)*a(a|b){14}", "too large"),
    ],
)
def test_a_pattern_that_is_no_automaton_is_refused_by_name(pattern, said):
    with pytest.raises(InputError, match=said):
        compile_pattern(pattern, False)


def test_a_mixture_has_the_parts_and_the_sum_of_its_members():
    reward = (
        "mixture(rewards=('exact_match()', 'length_under(max_tokens=4)', "
        "'gsm8k(method=\"flexible\")', 'exact_match()'), weights=(1.0, 0.5, 0.25, 2.0))"
    )
    assert_same(reward, TEXT, SPACED[:9], ["72"] * 9)
    made = scored(reward, TEXT, ["<think>72", "72"], ["72", "72"])
    assert np.isnan(made["score"]).tolist() == [True, False]


def halves(responses, fields, *, worth: float):
    """`worth` for each byte of the truth that the text has at its place."""
    width = min(responses.text.shape[1], fields["truth"].shape[1])
    truth = fields["truth"][:, :width]
    return worth * ((responses.text[:, :width] == truth) & (truth > 0)).sum(axis=1)


@contract(
    on_device=DeviceForm(
        halves, lambda truth, worth: {"truth": np.frombuffer(truth.encode(), "u1")}
    )
)
def own_reward(response: str, ground_truth: str, *, worth: float) -> float:
    raise AssertionError("the form for the device is asked")


def test_a_reward_of_ones_own_brings_its_form():
    responses, truths = ["ab", "bb", "ba"], ["a", "bba", "ab"]
    made = scored(f"{__name__}.own_reward(worth=0.5)", CharTokenizer("ab"), responses, truths)
    assert made["score"].tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    "reward, said",
    [
        ("valid_json()", "valid_json.*no form for the device"),
        (
            "mixture(rewards=('exact_match()', 'valid_json()'))",
            "valid_json.*no form for the device",
        ),
    ],
)
def test_a_reward_without_a_form_is_refused_by_name(reward, said):
    with pytest.raises(InputError, match=said):
        device_scorer(reward, TEXT, TEXT.vocab_size)


@pytest.mark.parametrize(
    "reward, truth, said",
    [
        ("gsm8k()", "72", "'numeric'"),
        ("regex_match()", "a", "one pattern"),
        ("letter_quota(quota=2)", "ab", "no single"),
        ("sequence_match(partial=2.0)", "ab", "partial"),
        ("exact_match()", 7, "must be text"),
        ("exact_match()", '["72", "73"]', "several targets"),
        ("sequence_match()", '{"target": ["72", "73"]}', "several targets"),
        ("gsm8k(method='strict')", '["72", "73"]', "several targets"),
        ("letter_quota(quota=2)", '["a", "b"]', "several targets"),
    ],
)
def test_a_ground_truth_that_the_form_cannot_use_is_refused(reward, truth, said):
    with pytest.raises(InputError, match=said):
        device_scorer(reward, TEXT, TEXT.vocab_size).fields([truth])


@pytest.mark.parametrize("kind", [byte_level_bpe, sentencepiece_bpe])
def test_the_texts_of_a_vocabulary_of_words(tmp_path, kind):
    library = kind(["<eos>"])
    folder = write_folder(tmp_path, library, {"eos_token": "<eos>"})
    tokenizer = HuggingFaceTokenizer(folder)
    draw = np.random.default_rng(3)
    ids = [[*draw.integers(0, tokenizer.vocab_size, 6).tolist()] for _ in range(200)]
    ids += [tokenizer.encode(text) for text in ("the answer is 7", " x", "é✓", "a b\n")]
    texts = [tokenizer.decode(one) for one in ids]
    made = scored(
        "exact_match()", tokenizer, texts, [text.replace("\ufffd", "") for text in texts], ids
    )
    # Tokens may be parts of characters: a text that is none has no score.
    whole = np.array(["\ufffd" not in text for text in texts])
    assert 0.1 < whole.mean() < 0.9
    assert (made["score"][whole] == 1.0).all() and np.isnan(made["score"][~whole]).all()


def test_a_mark_of_reasoning_that_is_a_special_token_leaves_a_row_undecided(tmp_path):
    library = byte_level_bpe(["<eos>", "[THINK]", "[/THINK]"])
    tokenizer = HuggingFaceTokenizer(write_folder(tmp_path, library, {"eos_token": "<eos>"}))
    texts = ["[THINK]72[/THINK]", "72[THINK]", "72"]
    ids = [tokenizer.encode(text) for text in texts]
    assert [response_of(tokenizer, one) for one in ids] == ["72", "72", "72"]
    made = scored("exact_match()", tokenizer, texts, ["72"] * 3, ids)["score"]
    assert np.isnan(made).tolist() == [True, True, False] and made[2] == 1.0
    whole = scored("length_under(max_tokens=9)", tokenizer, texts, ["72"] * 3, ids)["score"]
    assert whole.tolist() == [1.0, 1.0, 1.0]  # it reads no answer


def test_a_prompt_that_begins_the_reasoning_is_refused():
    scorer = device_scorer("exact_match()", TEXT, TEXT.vocab_size)
    assert scorer.fields(["72"], [("6 * 12 =", None)])["truth_length"].tolist() == [2]
    with pytest.raises(InputError, match="a prompt begins the reasoning"):
        scorer.fields(["1", "72"], [("6 * 12 =", None), ("6 * 12 = <think>\n", None)])
    length = device_scorer("length_under(max_tokens=9)", TEXT, TEXT.vocab_size)
    assert length.fields(["72"], [("6 * 12 = <think>\n", None)]) == {}


@contract(on_device=True)
def no_form(response: str, ground_truth: str) -> float:
    return 0.0


def test_a_declaration_that_is_no_form_is_refused():
    with pytest.raises(InputError, match="of a reward it is a DeviceForm"):
        device_scorer(f"{__name__}.no_form", TEXT, TEXT.vocab_size)


def test_a_tokenizer_that_rewrites_texts_is_refused(tmp_path):
    library = sentencepiece_bpe(["<eos>"], llama2=True)
    folder = write_folder(tmp_path, library, {"eos_token": "<eos>"})
    with pytest.raises(InputError, match="one after another"):
        device_scorer("exact_match()", HuggingFaceTokenizer(folder), library.get_vocab_size())
