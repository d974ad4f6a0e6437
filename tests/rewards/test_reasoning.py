"""Answers behind a reasoning: where it ends, and which rewards read what stands behind it."""

import json
import pickle

import numpy as np
import pytest
from family_tokenizers import byte_level_bpe
from spent import at_most
from tiny_tokenizer import write_json

from rljax import rewards
from rljax.components import resolve
from rljax.contracts import contract, spec
from rljax.data.online.prompts import PromptRecord
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.evaluation.policy import final_answer
from rljax.reasoning import (
    Response,
    answer_of,
    beginning_of,
    cut_reasoning,
    reasoning_spans,
    response_of,
)
from rljax.rewards.judges.judging import shorter
from rljax.rewards.pool.calling import HOME, call_reward
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import Reward

FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    "response, answer",
    [
        ("b", "b"),
        ("", ""),
        ("<think>a</think> b", " b"),
        ("<think>\na\n</think>\n\nb", "b"),
        ("<think>\n\n</think>\n\n    return x", "    return x"),  # code keeps its indentation
        ("a</think>b", "b"),  # the prompt opened it
        ("<think>a", ""),
        ("<think>a</think>", ""),
        ("I see. <think>72", ""),
        ("<think>a</think>x<think>b</think>y", "y"),
        ("<think>a</think>x<think>b", ""),
        ("<think>a</think>x<think>b</think>\n", "x"),
        ("x\n<think>a</think>", "x\n"),
        ("<answer>4</answer><reasoning>why</reasoning>", "<answer>4</answer>"),
        ("<think>a <reasoning>b</reasoning> 5", ""),  # another family's mark closes nothing
        # Mentions: of a quoted mark, of one in a sentence, of one that closes nothing.
        ("<think>I close with `</think>`. 5 </think> 72", " 72"),
        ("<think>I write </think> then. 5 </think> 72", " 72"),
        ("<think>a</think> Use the <think> tag: 72", " Use the <think> tag: 72"),
        ('Write "</think>" there.', 'Write "</think>" there.'),
        ('re.sub(r"<think>.*?</think>", "", s)', 're.sub(r"<think>.*?</think>", "", s)'),
        ('<think>It is "Paris"</think>"Paris"', '"Paris"'),
        # Other families.
        ("<thinking>a</thinking>b", "b"),
        ("<THINK>a</THINK>b", "b"),
        ("<reasoning>a</reasoning>b", "b"),
        ("<thought>a</thought>b", "b"),
        ("<seed:think>a</seed:think>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("[THINK]a", ""),
        ("◁think▷a◁/think▷b", "b"),
        ("<|channel>thought\na\n<channel|>b", "b"),
        ("<|channel>thought\na", ""),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "b"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", "b"),
        ("<think>a</think><response>b</response>", "b"),
        ("Here is my thought process: a\nHere is my response: b", " b"),
        ("Here is my thought process: 72", "Here is my thought process: 72"),
        (f"<|channel|>analysis<|message|>a<|end|>{FINAL}b<|return|>", "b"),
        ("<|channel|>analysis<|message|>a<|end|>", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
            " to=functions.f <|constrain|>json<|message|>{}<|call|>",
            "",
        ),
        (" to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", "b"),
    ],
)
def test_an_answer_is_what_stands_behind_the_reasoning(response, answer):
    assert answer_of(response) == answer
    assert cut_reasoning(cut_reasoning(response)) == answer  # not cut twice


WRONG = "I do not know."
CODE = json.dumps({"inputs": ["1"], "outputs": ["2"]})
READERS = {  # a call of the response, an answer that is right, one that is wrong
    "gsm8k": (lambda r: rewards.gsm8k(r, "72"), "#### 72", "#### 5"),
    "gsm8k, strict": (lambda r: rewards.gsm8k(r, "72", method="strict"), "#### 72", "#### 5"),
    "gsm8k, flexible": (lambda r: rewards.gsm8k(r, "72", method="flexible"), "72", "5"),
    "boxed": (lambda r: rewards.boxed(r, "72"), r"\boxed{72}", r"\boxed{5}"),
    "math_verify": (lambda r: rewards.math_verify(r, "72"), r"\boxed{72}", r"\boxed{5}"),
    "dapo": (lambda r: rewards.dapo(r, "72"), "Answer: 72", "Answer: 5"),
    "dapo, strict": (
        lambda r: rewards.dapo(r, "72", strict_box_verify=True),
        r"\boxed{72}",
        r"\boxed{5}",
    ),
    "countdown": (
        lambda r: rewards.countdown(r, '{"target": 5, "numbers": [2, 3]}'),
        "<answer>2+3</answer>",
        "<answer>2-3</answer>",
    ),
    "list_match": (lambda r: rewards.list_match(r, "1 2 3"), "1, 2, 3", "3, 2, 1"),
    "qa_exact_match": (
        lambda r: rewards.qa_exact_match(r, "Paris"),
        "<answer>Paris</answer>",
        "<answer>Rome</answer>",
    ),
    "token_f1": (lambda r: rewards.token_f1(r, "Paris"), "Paris", "Rome"),
    "choice": (lambda r: rewards.choice(r, "B"), "The answer is B", "The answer is C"),
    "mmlu_pro": (lambda r: rewards.mmlu_pro(r, "B"), "The answer is (B)", "The answer is (C)"),
    "integer_answer": (lambda r: rewards.integer_answer(r, "25"), r"\boxed{025}", r"\boxed{26}"),
    "contains": (lambda r: rewards.contains(r, "Paris"), "It is Paris.", "It is Rome."),
    "regex_match": (lambda r: rewards.regex_match(r, "Par.s"), "Paris", "Rome"),
    "exact_match": (lambda r: rewards.exact_match(r, "Paris"), "Paris", "Rome"),
    "last_line": (lambda r: rewards.last_line(r, "72"), "so\n72", "so\n5"),
    "sequence_match": (lambda r: rewards.sequence_match(r, "72"), "72", "5"),
    "json_match": (lambda r: rewards.json_match(r, '{"a": 1}'), '{"a": 1}', '{"a": 2}'),
    "json_schema": (
        lambda r: rewards.json_schema(r, schema='{"type": "object"}'),
        '{"a": 1}',
        "[1]",
    ),
    "valid_json": (rewards.valid_json, '{"a": 1}', "{a: 1}"),
    "instruction_following": (
        lambda r: rewards.instruction_following(
            r, {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
        ),
        '"yes"',
        "yes",
    ),
    "program_tests": (
        lambda r: rewards.program_tests(r, '{"tests": [[2, 5]], "max_lines": 3}'),
        "*x\n+1",
        "+1",
    ),
    "code_tests": (
        lambda r: rewards.code_tests(r, CODE),
        "```python\nprint(int(input()) + 1)\n```",
        "```python\nprint(3)\n```",
    ),
}
WHOLE = {  # rewards of the whole response
    *("format_tags", "language", "repetition", "looping", "letter_quota"),
    *("length_under", "soft_overlong", "l1_exact", "l1_max", "diversity", "reward_model"),
    # They hand the response on: to other rewards, or to a judge, which cuts it.
    *("mixture", "by_source", "with_cost", "with_judges", "pairwise"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reward_of_an_answer_reads_nothing_of_the_reasoning(name):
    function, right, wrong = READERS[name]
    cases = {
        f"<think>\n{right}\n</think>\n\n{WRONG}": False,
        f"<think>\n{right}\n</think>\n\n{wrong}": False,
        f"{right}\n</think>\n\n{WRONG}": False,
        f"<think>\n{right}": False,
        f"[THINK]{right}[/THINK]{wrong}": False,
        f"<|channel|>analysis<|message|>{right}<|end|>{FINAL}{wrong}<|return|>": False,
        f"<think>\n{wrong}\n</think>\n\n{right}": True,
        f"{wrong}\n</think>\n\n{right}": True,
        f"<|channel|>analysis<|message|>{wrong}<|end|>{FINAL}{right}<|return|>": True,
        right: True,
    }
    for response, pays in cases.items():
        returned = function(response)
        score = returned["score"] if isinstance(returned, dict) else float(returned)
        assert (score >= 1.0) == pays, (response, score)


def test_every_reward_says_what_it_reads():
    covered = {name.partition(",")[0] for name in READERS} | WHOLE
    asked = {"judge", "rubric", "sandbox_fusion", "reasoning_gym_score"}  # tested where they are
    assert covered | asked == set(rewards.__all__)
    for name in {*READERS, *asked} - {"regex_match"}:
        name = name.partition(",")[0]
        options = {"sandbox_fusion": "url='http://x'"}.get(name, "")
        assert spec(resolve(f"{name}({options})", HOME)).reads == "answer", name
    assert all(spec(getattr(rewards, name)).reads != "answer" for name in WHOLE)


@pytest.mark.parametrize(
    "text, response",
    [
        ("gsm8k(method='strict', whole_response=True)", "<think>#### 72</think> no"),
        ("boxed(whole_response=True)", r"<think>\boxed{72}</think> no"),
        ("dapo(whole_response=True)", "<think>Answer: 72\n</think> no"),
        ("qa_exact_match(whole_response=True)", "<think><answer>72</answer></think> no"),
        ("regex_match(pattern='^<think>.*</think>')", "<think>72</think> no"),
    ],
)
def test_a_published_rule_and_a_format_may_read_all_of_it(text, response):
    for asked in (text, f"mixture(rewards=({text!r},))", f"by_source(sources=(('x', {text!r}),))"):
        sample = {"response": response, "ground_truth": "72", "data_source": "x"}
        assert call_reward(resolve(asked, HOME), sample)[0] == 1.0


def test_rewards_that_name_others_hand_the_whole_response_on():
    """The format is read of the response, the answer behind it, in one mixture."""
    text = "mixture(rewards=('exact_match()', 'format_tags(tags=(\"think\",), only=False)'))"
    for response, parts in (
        ("<think>x</think>\n72", (1.0, 1.0)),
        ("<think>72</think>\n5", (0.0, 1.0)),
        ("72", (1.0, 0.0)),
        ("<think>72", (0.0, 0.0)),
    ):
        _, got = call_reward(resolve(text, HOME), {"response": response, "ground_truth": "72"})
        assert (got["exact_match"], got["format_tags"]) == parts


# -- a reward of one's own ------------------------------------------------------------------------

MODULE = """
from rljax.contracts import contract

def plain(response): return float(response == "<think>4</think>\\n5")

@contract(reads="answer")
def declared(response, ground_truth): return float(response == ground_truth)

@contract(reads="answer")
def of_a_group(responses): return [float(text == "5") for text in responses]

@contract(reads="answer")
def of_verl(data_source, solution_str, ground_truth): return float(solution_str == ground_truth)

@contract(reads="answer")
def of_trl(completions, **kwargs):
    if isinstance(completions[0], str):
        return [float(text == "5") for text in completions]
    wanted = {"role": "assistant", "content": "5", "reasoning_content": "4"}
    return [float(messages == [wanted]) for messages in completions]

def of_trl_as_before(completions, **kwargs):
    return [float(m == [{"role": "assistant", "content": "<think>4</think>\\n5"}])
            for m in completions]
"""


def test_a_reward_of_ones_own_gets_the_response_unless_it_asks_for_the_answer(
    tmp_path, monkeypatch
):
    (tmp_path / "own_readers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sample = {"response": "<think>4</think>\n5", "ground_truth": "5", "data_source": "x"}
    chat = ({"role": "user", "content": "?"},)
    names = ("plain", "declared", "of_a_group", "of_verl", "of_trl")
    for name in names:
        with RewardPool(f"own_readers.{name}", workers=1) as pool:
            assert pool.score([sample])[0].value == 1.0, name
    texts = tuple(f"own_readers.{name}" for name in names)
    with RewardPool(f"mixture(rewards={texts!r})", workers=1) as pool:
        assert pool.score([sample])[0].value == 5.0
    for name in ("of_trl", "of_trl_as_before"):
        with RewardPool(f"own_readers.{name}", workers=1) as pool:
            assert pool.score([sample | {"messages": chat}])[0].value == 1.0, name


def test_a_contract_that_cannot_be_kept_is_refused():
    with pytest.raises(TypeError, match="is of a function of one of"):
        contract(reads="answer")(lambda text: 1.0)
    with pytest.raises(TypeError, match="is a text: 'answer', 'response'"):
        contract(reads=("answer",))
    with pytest.raises(InputError, match="tuple of names"):
        spec(contract(reads="answers")(lambda response: 1.0))


def test_a_length_is_that_of_the_response_and_votes_are_of_answers():
    assert shorter("?", "<think>aaaa</think>b", "ccc") == 0.0
    assert final_answer("<think>\\boxed{3}</think> It is \\boxed{4}.") == "4"
    assert final_answer("<think>\\boxed{3}") is None
    assert final_answer("\\boxed{\\text{B: Paris}}") == final_answer("\\boxed{(B)}") == "B"


# -- what the text does not show ------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, messages, begun",
    [
        ("<|user|>Hi<|assistant|>\n<think>\n", "Hi", "<think>"),
        ("<|user|>think<|assistant|>\n<think>\n", "think", "<think>"),
        ("<|user|>Hi<|assistant|>\n<|channel>thought\n", "Hi", "<|channel>thought"),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            "Hi",
            "<|channel|>analysis<|message|>",
        ),
        ("<|start|>assistant<|channel|>analysis<|message|>So", ("Hi", "So"), ""),
        (
            "Hi<|end|><|start|>assistant<|channel|>analysis<|message|>So",
            ("Hi", "So"),
            "<|end|><|start|>assistant<|channel|>analysis<|message|>So",
        ),
        (
            "<|user|>Hi<|assistant|>\n<think>\n\n</think>\n",
            "Hi",
            "<|assistant|>\n<think>\n\n</think>\n",
        ),
        ("<|user|>Hi<|assistant|>\n", "Hi", ""),
        ("<|user|>Begin with <think><|assistant|>", "Begin with <think>", ""),
        ("<|user|>Hi<|assistant|><think>So", ("Hi", "<think>So"), "<|assistant|><think>So"),
        ("User: Hi\nAssistant: <think>\n", None, "<think>"),
        ("User: Put it between <think> and </think>", None, ""),
        ("User: Hi", None, ""),
    ],
)
def test_a_prompt_may_begin_the_reasoning(prompt, messages, begun):
    texts = (messages,) if isinstance(messages, str) else messages or ()
    said = [{"role": role, "content": t} for role, t in zip(("user", "assistant"), texts)]  # noqa: B905
    assert beginning_of(prompt, said) == begun


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A vocabulary in which the marks of several families are special tokens."""
    folder = tmp_path_factory.mktemp("special_marks")
    special = [
        "<|end|>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|return|>",
        "[THINK]",
        "[/THINK]",
        "<|im_end|>",
    ]
    byte_level_bpe(special).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": special.index("<|im_end|>")})
    return load_tokenizer(folder)


def test_marks_that_are_special_tokens_part_an_answer_from_its_reasoning(tokenizer):
    """The text that a reward reads is what it was; the answer is known beside it."""
    for said, text, answer in (
        (
            f"<|channel|>analysis<|message|>5<|end|>{FINAL}72<|return|>",
            "analysis5assistantfinal72",
            "72",
        ),
        ("<|channel|>analysis<|message|>72", "analysis72", ""),
        ("[THINK]5[/THINK]72<|im_end|>", "572", "72"),
        ("72<|im_end|>", "72", "72"),
    ):
        response = response_of(tokenizer, tokenizer.encode(said), "72?")
        assert response == text and answer_of(response) == answer
        sent = pickle.loads(pickle.dumps(response, protocol=5))
        assert sent == text and answer_of(sent) == answer


def test_a_sample_of_a_run_knows_its_answer(tokenizer):
    """Through the reward's sample, the pool and a mixture: reasoning that the prompt began and the
    response did not end holds no answer."""
    record = PromptRecord(
        "<|start|>72?<|end|>[THINK]",
        np.ones(1, np.int32),
        "72",
        "x",
        {},
        0,
        messages=({"role": "user", "content": "72?"},),
    )
    texts = ("exact_match()", "contains()", "regex_match(pattern='7')")
    with RewardPool(f"mixture(rewards={texts!r})", workers=1) as pool:
        reward = Reward(pool, tokenizer, None)
        samples = [
            reward.fields(record, tokenizer.encode(said), 0, 0)
            for said in ("I see: 72", "5[/THINK]72", "7")
        ]
        scores = pool.score(samples)
    assert [s.value for s in scores] == [1.0, 3.0, 1.0]
    assert [s.parts["contains"] for s in scores] == [0.0, 1.0, 0.0]
    assert type(samples[0]["response"]) is Response and samples[1]["response"] == "572"


def test_messages_get_their_reasoning_as_servers_give_it():
    messages = [
        {"role": "assistant", "content": "<think>a</think>b", "tool_calls": []},
        {"role": "tool", "content": "<think>"},
        {"role": "assistant", "content": "c"},
    ]
    assert cut_reasoning([messages]) == [
        [
            {"role": "assistant", "content": "b", "tool_calls": [], "reasoning_content": "a"},
            {"role": "tool", "content": "<think>"},
            {"role": "assistant", "content": "c"},
        ]
    ]


def test_many_marks_in_an_open_fence_take_no_longer_than_their_text():
    """Each asks whether a fence of code is open."""
    text = "```json\n{}\n" + "<think>" * 30_000
    with at_most(5):  # 0.4; 30 where each mark looks for all fences before it
        assert reasoning_spans(text) == []


@pytest.mark.parametrize(
    "text, reasoning",
    {
        "a type": ("a List<Thought> of mine", ""),
        "a block behind a word": ("x<Thought>hm</Thought>4", "<Thought>hm</Thought>"),
        "brackets with spaces": ("( <think> ) is a tag", ""),
        "below a comment": ("# a title\n<think>hm</think>4", "<think>hm</think>"),
        "in a comment": ("a\n# <think>\n4", ""),
        "behind a fence of a block": (
            "<think>\n```\na</think><think>b</think>4",
            "<think>\n```\na</think><think>b</think>",
        ),
    }.values(),
)
def test_a_mark_is_a_word_or_opens_a_block_by_its_own_line(text, reasoning):
    assert "".join(text[a:b] for a, b in reasoning_spans(text)) == reasoning
