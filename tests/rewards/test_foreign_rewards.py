"""Rewards with the signatures of TRL, verl, OpenRLHF and verifiers, as people have them, by name
and by file."""

import json
import pickle
import sys

import numpy as np
import pytest
from rollout_cases import Letters

from rljax.components import resolve
from rljax.data.online.prompts import PromptRecord, encode_prompts
from rljax.data.rows.sources import load_endless_prompts, load_prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.errors import InputError
from rljax.rewards.pool.calling import HOME, call_reward, is_group_reward, wanted_fields
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import Reward

MODULE = '''
import re
WORKED = "6 * 12 = 72\\n#### 72"
from rljax.contracts import contract

# -- TRL: of its documentation, of open-r1, and what else people write

def unique_letters(completions, **kwargs):
    """For a conversation: the content of the first message."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]

def boxed_is(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def longer_than_prompt(prompts, completions, **kwargs):
    return [float(len(c) > len(p)) for p, c in zip(prompts, completions)]

def accuracy(completions, solution, **kwargs):
    """None where it does not apply."""
    return [None if c == "?" else float(c == s) for c, s in zip(completions, solution)]

def by_answer(completions, **kwargs):
    assert len(kwargs["answer"]) == len(kwargs["difficulty"]) == len(completions)
    columns = zip(completions, kwargs["answer"], kwargs["difficulty"])
    return [float(c == a) * d for c, a, d in columns]

def no_kwargs(completions, difficulty, weight=1.0):
    return [weight * d for d in difficulty]

def several(prompts, completions, completion_ids=None, trainer_state=None, **kwargs):
    assert prompts == prompts[:1] * len(prompts) and prompts[0][-1]["role"] == "user"
    return [float(len(completions))] * len(completions)

def by_ids(completions, completion_ids): return [len(ids) for ids in completion_ids]
def of_ids_alone(completion_ids, **kwargs): return [-float(len(ids)) for ids in completion_ids]

def logs(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("length", [len(c) for c in completions])
    log_extra("text", completions)
    log_metric("groups", 1.0)
    return [1.0] * len(completions)

def by_step(completions, trainer_state=None, **kwargs):
    late = trainer_state is not None and trainer_state.global_step > 10
    return [float(late)] * len(completions)

def by_step_of_kwargs(completions, **kwargs): return [kwargs["trainer_state"].epoch]
def needs_state(completions, trainer_state): return [trainer_state.global_step]

async def is_async(completions, **kwargs):
    import asyncio
    await asyncio.sleep(0.001)
    return [float(len(c)) for c in completions]

class Number:
    """As a tensor of one element."""
    def __init__(self, value): self.value = value
    def item(self): return self.value

def tensors(completions, **kwargs):
    return [Number(True if c == "4" else float("nan")) for c in completions]

def lengths(completions, **kwargs):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

def siblings(completions, **kwargs): return [float(len(completions))] * len(completions)
def raises(completions, **kwargs): raise ValueError("no luck")

@contract(on_timeout=0.0)
def slow(response):
    import time
    time.sleep(600 * (response == "hang"))
    return 1.0

def memory(response): return float(len("x" * 10**10)) if response == "large" else 1.0

def only_digits(response, ground_truth):
    return float(response == ground_truth) if response.isdigit() else None

def needs_column(completions, flavour): return [1.0 for _ in completions]

# -- verl

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "toy":
        raise NotImplementedError(data_source)
    return 1.0 if solution_str.strip() == ground_truth else 0.0

def score_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs and extra_info["difficulty"] == 3
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str, "why": None}

def weighed(solution_str, ground_truth, weight): return weight * (solution_str == ground_truth)
def needs_more(solution_str, prompt_str): return 0.0
def text_score(data_source, solution_str, ground_truth): return {"score": "1", "acc": 1.0}

def of_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert not kwargs and set(data_sources) == {"toy"} and extra_infos[-1]["difficulty"] == 3
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [{"score": float(s == gt), "acc": s == gt, "pred": s} for s, gt in pairs]

def bound_batch(solution_strs, ground_truths, weight):
    return [Number(weight * (s == gt)) for s, gt in zip(solution_strs, ground_truths)]

def beside(data_source, solution_str, ground_truth):
    import numpy, torch
    odd = {"nan": float("nan"), "inf": numpy.float32("inf"), "huge": 10**400, "many": torch.ones(2)}
    plain = {"tensor": torch.tensor(0.5), "one": numpy.ones(1), "right": numpy.bool_(True)}
    return {"score": torch.tensor([1.0]), **odd, **plain}

def beside_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [beside(None, one, None) for one in solution_strs]

def beside_rubric(completion, answer): return beside(None, completion, None)
def nan_score(data_source, solution_str, ground_truth): return {"score": float("nan"), "acc": 1}

def logs_nan(completions, log_extra, log_metric, **kwargs):
    import numpy
    log_extra("ppl", [float("nan"), numpy.ones(2), 10**400][:len(completions)])
    log_metric("loss", float("inf"))
    return [1.0 for _ in completions]

# -- OpenRLHF

def beside_rewards(queries, prompts, labels):
    logs = {"n": [float("nan") for _ in queries], "mean": float("inf")}
    return {"rewards": [1.0 for _ in queries], "scores": [float("nan")] * len(queries),
            "extra_logs": logs}

def reward_func(queries, prompts, labels, **kwargs):
    assert not kwargs
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [Number(float(r == label)) for r, label in zip(responses, labels, strict=True)]
    mean = sum(one.value for one in rewards) / len(rewards)
    lengths = [Number(len(r)) for r in responses]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"n": lengths, "mean": mean}}

def queries_alone(queries, labels=None): return [float(len(query)) for query in queries]
def no_rewards(queries, prompts, labels): return {"scores": [1.0 for _ in queries]}
def nan_rewards(queries, prompts, labels): return [float("nan") for _ in queries]
def needs_tokenizer(queries, prompts, labels, tokenizer): return [1.0 for _ in queries]

# -- verifiers

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def correct(completion, answer, **kwargs): return float(text_of(completion) == answer)

async def of_rubric(prompt, completion, answer, state, info, task):
    assert state["prompt"] == prompt and info["difficulty"] == 3 and task == "default"
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return float(asked == "2+2") + float(text_of(state["completion"]) == state["answer"])

def by_column(completion, difficulty): return difficulty * len(completion)
def by_parser(completion, answer, parser): return 1.0
def ours(response, completion=None, queries=()): return float(len(response))

# -- of what a row holds

def member(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str in ground_truth)

def searched(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str in ground_truth["target"])

def counted(solution_str, ground_truth): return float(int(solution_str) == ground_truth)

def same_number(completions, answer, **kwargs):
    return [float(int(c) == a) for c, a in zip(completions, answer)]

def hash_answer(completions, answer, **kwargs):
    gold = [a.split("####")[1].strip() if "####" in a else None for a in answer]
    return [float(c == g) for c, g in zip(completions, gold)]

def of_verls_column(completions, reward_model, ground_truth, **kwargs):
    assert [m["ground_truth"] for m in reward_model] == ground_truth
    return [float(c in g) for c, g in zip(completions, ground_truth)]

def in_solution(completions, solution):
    return [float(c in s) for c, s in zip(completions, solution)]
def labelled(queries, labels): return [float(q[1:] == label) for q, label in zip(queries, labels)]
def batched(solution_strs, ground_truths):
    return [float(s == t) for s, t in zip(solution_strs, ground_truths)]
def of_source(completions, data_source, answer):
    assert set(data_source) == {"toy"}
    return [float(c == a) for c, a in zip(completions, answer)]

def of_entry(completions, extra_info, answer, **kwargs):
    assert {one["answer"] for one in extra_info} == {WORKED}
    return [float(c == a) for c, a in zip(completions, answer)]

def of_info(completion, info, answer):
    assert info["answer"] == WORKED
    return float(completion == answer)

def leveled(completions, level): return [float(c == str(one)) for c, one in zip(completions, level)]
def ours_of_level(response, extra_info): return float(response == str(extra_info["level"]))

def ours_of_text(response, ground_truth):
    assert isinstance(ground_truth, str)
    return float(response == ground_truth)
'''


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    """Scores of responses to one prompt: as a run hands them to its reward."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign_rewards.py").write_text(MODULE)
    sys.path.insert(0, str(folder))

    def scored(text, *responses, messages=None, by_file=False, record=None):
        text = f"{folder / 'foreign_rewards.py'}:{text}" if by_file else f"foreign_rewards.{text}"
        record = record or PromptRecord(
            "2+2", np.ones(1, np.int32), "4", "toy", {"difficulty": 3}, 0, messages=messages
        )
        with RewardPool(text, workers=1) as pool:
            reward = Reward(pool, Letters, None)
            return pool.score(
                [{**reward.fields(record, [0, 1, 2], 0, 7), "response": text} for text in responses]
            )

    yield scored
    sys.path.remove(str(folder))
    sys.modules.pop("foreign_rewards", None)


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"})


@pytest.mark.parametrize(
    ("text", "responses", "messages", "values"),
    [
        ("unique_letters", ("aab", "abc"), CHAT, (2, 3)),
        ("boxed_is", (r"\boxed{4}", r"\boxed{5}", "4"), None, (1, 0, 0)),
        ("by_answer", ("4", "5", "4"), None, (3, 0, 3)),
        ("several", ("a", "b", "c"), CHAT, (3, 3, 3)),
        ("score_dict", ("4", "5"), CHAT, (1, -1)),
        ("weighed(weight=2.0)", ("4", "5"), None, (2, 0)),
        ("of_batch", ("4", "5", "4"), CHAT, (1, 0, 1)),
        ("bound_batch(weight=0.5)", ("5", "4"), None, (0, 0.5)),
        ("reward_func", ("4", "5"), None, (1, 0)),
        ("reward_func", ("4", "5"), CHAT, (1, 0)),
        ("queries_alone", ("4", "55"), None, (4, 5)),
        ("correct", ("4", "5"), None, (1, 0)),
        ("correct", ("4", "5"), CHAT, (1, 0)),
        ("of_rubric", ("4", "5"), None, (2, 1)),
        ("of_rubric", ("4", "5"), CHAT, (2, 1)),
        ("by_column", ("4", "55"), None, (3, 6)),
        ("ours", ("4", "55"), None, (1, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("longer_than_prompt", ("4", "four"), None, (0, 1)),
                ("accuracy", ("4", "5"), None, (1, 0)),
                ("no_kwargs(weight=0.5)", ("4", "5"), None, (1.5, 1.5)),
                ("compute_score", ("4 ", "5"), None, (1, 0)),
            )
        ),
    ],
)
def test_it_is_accepted_as_it_is(score, text, responses, messages, values):
    by_name = score(text, *responses, messages=messages)
    assert [s.status for s in by_name] == ["ok"] * len(responses), by_name
    assert tuple(s.value for s in by_name) == values


def test_it_is_found_by_its_file_and_its_parts_are_the_numbers(score):
    (right, wrong) = score("score_dict", "4", "5", by_file=True)
    assert right.parts == {"score": 1.0, "acc": 1.0} and wrong.parts == {"score": -1.0, "acc": 0.0}
    assert [s.value for s in score("by_answer", "4", by_file=True)] == [3.0]


def test_one_sample_without_a_score_does_not_concern_the_others(score):
    one, none, other = score("accuracy", "4", "?", "5")
    assert (one.value, none.status, other.value) == (1.0, "abstained", 0.0)
    assert "returned None for this response" in none.message
    assert [s.status for s in score("tensors", "4", "5")] == ["ok", "abstained"]  # NaN, as TRL
    (bad,) = score("text_score", "4")
    assert bad.status == "error" and "'1' (str) as 'score'" in bad.message


def test_what_it_needs_and_nobody_has_is_named(score):
    with pytest.raises(InputError, match="signature of TRL and needs 'trainer_state'"):
        score("needs_state", "4")
    for name in ("by_step", "by_step_of_kwargs"):  # not as if there were no state to read
        (found,) = score(name, "4")
        assert found.status == "error" and "the reward reads trainer_state." in found.message
    with pytest.raises(InputError, match="signature of verl and needs 'prompt_str'"):
        score("needs_more", "4")
    (found,) = score("needs_column", "4")
    assert found.status == "error" and "needs the column 'flavour'" in found.message
    assert "'difficulty'" in found.message  # those that there are


def test_what_trls_trainer_hands_over_is_handed_over(score, capfd):
    assert [s.value for s in score("by_ids", "4", "55")] == [3.0, 3.0]
    assert [s.value for s in score("of_ids_alone", "4")] == [-3.0]
    assert [s.value for s in score("is_async", "4", "55")] == [1.0, 2.0]
    one, other = score("logs", "4", "55")
    assert one.parts == {"score": 1.0, "log/length": 1.0, "log/groups": 1.0}
    assert other.parts == {"score": 1.0, "log/length": 2.0, "log/groups": 1.0}
    assert "text: 55" in capfd.readouterr().err


def test_what_openrlhf_and_verl_log_beside_a_score_is_logged(score):
    one, other = score("reward_func", "4", "55")
    assert one.parts == {"score": 1.0, "log/scores": 1.0, "log/n": 1.0, "log/mean": 0.5}
    assert other.parts == {"score": 0.0, "log/scores": 0.0, "log/n": 2.0, "log/mean": 0.5}
    assert score("of_batch", "4")[0].parts == {"score": 1.0, "acc": 1.0}  # numbers alone
    (found,) = score("no_rewards", "4")
    assert found.status == "error" and "a dict without 'rewards': ['scores']" in found.message
    (found,) = score("nan_rewards", "4")  # no abstention, as in TRL
    assert found.status == "error" and "nan" in found.message


def test_what_is_logged_and_is_no_finite_number_costs_no_sample(score, capfd):
    for name in ("beside", "beside_batch", "beside_rubric"):
        assert score(name, "4")[0].parts == {"score": 1.0, "tensor": 0.5, "one": 1.0, "right": 1.0}
    assert [s.parts for s in score("logs_nan", "4", "5", "6")] == [{"score": 1.0}] * 3
    assert [s.parts for s in score("beside_rewards", "4", "5")] == [{"score": 1.0}] * 2
    said = capfd.readouterr().err
    assert all(text in said for text in ("nan: nan", "many: tensor", "ppl: [1. 1.]", "mean: inf"))
    (bad,) = score("nan_score", "4")
    assert bad.status == "error" and "nan as 'score'" in bad.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("needs_tokenizer", "OpenRLHF and needs 'tokenizer'; of its arguments there are queries"),
        ("by_parser", r"verifiers and needs 'parser'.*def my_reward\(.*by_parser\(\.\.\., parser="),
        ("bound_batch", "verl's BatchRewardManager and needs 'weight'.*bound_batch\\(weight="),
    ],
)
def test_what_another_library_would_hand_over_is_named_with_a_fix(score, name, says):
    with pytest.raises(InputError, match=says):
        score(name, "4")


def test_every_signature_adds_up_in_a_mixture(score):
    names = ("of_batch", "reward_func", "correct", "boxed_is")
    found = mixed(score, *names, responses=("4", "5"), messages=None)
    assert [value for value, _ in found] == [3.0, 0.0]


def test_verls_may_be_a_member_of_a_mixture(score):
    mixed = resolve("mixture(rewards=('foreign_rewards.compute_score', 'valid_json'))", HOME)
    assert {"response", "ground_truth", "data_source"} <= set(wanted_fields(mixed)[0])
    with RewardPool(mixed.text, workers=1) as pool:
        sample = {"response": "4", "ground_truth": "4", "data_source": "toy", "extra_info": {}}
        assert pool.score([sample])[0].value == 2.0


# -- several together ------------------------------------------------------------------------------


def mixed(score, *names, weights=(), responses=("4", "55", "?"), more="", messages=None):
    """(value, parts without the score) of each response, None for one without a value."""
    made = tuple(n if "(" in n else f"foreign_rewards.{n}" for n in names)
    text = f"mixture(rewards={made!r}, weights={weights!r}{more})"
    with RewardPool(text, workers=1) as pool:
        reward = Reward(pool, Letters, None)
        record = PromptRecord(
            "2+2", np.ones(1, np.int32), "4", "toy", {"difficulty": 3}, 0, messages=messages
        )
        samples = [{**reward.fields(record, [1], 0, 7), "response": r} for r in responses]
        found = pool.score(samples)
    assert {s.status for s in found} <= {"ok", "abstained"}, found
    return [None if s.status != "ok" else (s.value, {**s.parts, "score": 0.0}) for s in found]


def test_rewards_of_trls_signature_add_up_with_weights(score):
    found = mixed(score, "lengths", "accuracy", weights=(0.1, 1.0), responses=("4", "55"))
    assert [value for value, _ in found] == pytest.approx([1.1, 0.2])
    assert found[0][1] == {"score": 0.0, "lengths": 1.0, "accuracy": 1.0}
    found = mixed(score, "siblings", "exact_match()", "compute_score")  # beside ours and verl's
    assert [value for value, _ in found] == [5.0, 3.0, 3.0]  # asked of all three at once
    chat = mixed(score, "lengths", "exact_match()", messages=CHAT)
    assert [value for value, _ in chat] == [2.0, 2.0, 1.0]
    nested = "mixture(rewards=('foreign_rewards.siblings', 'foreign_rewards.is_async'))"
    assert [v for v, _ in mixed(score, nested, "exact_match()")] == [5.0, 5.0, 4.0]


def test_one_that_abstains_leaves_the_sample_to_the_others(score):
    """As TRL sums: without the ones that say nothing; nobody speaks for `?` in the second."""
    for names in (("accuracy", "lengths"), ("lengths", "accuracy")):
        found = mixed(score, *names, weights=(2.0, 2.0))
        assert [value for value, _ in found] == [4.0, 4.0, 2.0]
        assert found[2][1] == {"score": 0.0, "lengths": 1.0, "abstained/accuracy": 1.0}
        assert "abstained/accuracy" not in found[0][1]
    found = mixed(score, "accuracy", "tensors")
    assert [one and one[0] for one in found] == [2.0, 0.0, None]
    found = mixed(score, "only_digits", "lengths", more=", normalise=True", weights=(3.0, 1.0))
    assert [value for value, _ in found] == [1.0, 0.5, 1.0]  # the mean of those that speak


def test_rewards_that_compare_samples_are_members_of_all_that_name_rewards(score):
    texts = {
        "by_source(sources=(('toy', 'foreign_rewards.siblings'),))": [2.0, 2.0],
        "with_cost(reward='exact_match()', cost='foreign_rewards.lengths')": [1.0, 0.0],
        "with_judges(reward='foreign_rewards.lengths', judges=('exact_match()',))": [1.0, 2.0],
        "mixture(rewards=('diversity()', 'foreign_rewards.lengths'))": [2.0, 3.0],
    }
    for text, values in texts.items():
        found = score_text(text, "4", "55")
        assert [s.value for s in found] == values, text
    (found,) = score_text("mixture(rewards=('foreign_rewards.raises', 'exact_match()'))", "4")
    assert found.status == "error"
    assert "member 'foreign_rewards.raises': ValueError: no luck" in found.message
    with pytest.raises(InputError, match="both compare the samples.*mixture"):
        wanted_fields(resolve("diversity(correct='foreign_rewards.accuracy')", HOME))


def score_text(text, *responses):
    sample = {
        "ground_truth": "4",
        "data_source": "toy",
        "extra_info": {},
        "prompt": "2+2",
        "group": 0,
        "num_tokens": 1,
        "finish_reason": "stop",
    }
    with RewardPool(text, workers=1) as pool:
        return pool.score([{**sample, "response": response} for response in responses])


@pytest.mark.slow
def test_a_member_over_a_limit_is_no_score_of_its_siblings(score):
    """A late member takes the group's worker with it: the group is masked, not paid as late. One
    that runs out of memory is its own."""
    late = "mixture(rewards=('foreign_rewards.siblings', 'foreign_rewards.slow'))"
    rows = [
        {"response": response, "group": group, "prompt": "", "extra_info": {}, "data_source": "toy"}
        for response, group in (("hang", 0), ("a", 1), ("b", 0))
    ]
    with RewardPool(late, workers=1, timeout_s=1.0) as pool:
        assert [s.status for s in pool.score(rows)] == ["timeout", "ok", "timeout"]
    full = late.replace("slow", "memory")
    rows = [row | {"response": r} for row, r in zip(rows, ("large", "a", "b"), strict=True)]
    with RewardPool(full, workers=1, memory_gb=1.0) as pool:
        assert [s.status for s in pool.score(rows)] == ["error", "ok", "ok"]


def test_a_member_is_asked_once_for_a_group_and_one_sample_is_a_group_of_one(score):
    sample = {"response": "55", "ground_truth": "4", "prompt": "2+2", "data_source": "toy"}
    for text in ("foreign_rewards.siblings", "mixture(rewards=('foreign_rewards.siblings',))"):
        assert call_reward(resolve(text, HOME), sample)[0] == 1.0
    twice = "mixture(rewards=('foreign_rewards.siblings', 'foreign_rewards.siblings'))"
    assert [s.value for s in score_text(twice, "4", "5", "6")] == [6.0, 6.0, 6.0]
    assert is_group_reward(resolve(twice, HOME))


def of_verl(truth):
    return {"prompt": "q", "reward_model": {"style": "rule", "ground_truth": truth}}


WORKED = "6 * 12 = 72\n#### 72"
VERLS_GSM8K = {  # as verl's preparation writes it
    **of_verl("72"),
    "extra_info": {"answer": WORKED, "solution": "no", "ground_truth": "no", "question": "q"},
}
OF_ENTRIES = {"extra_info": {"level": 5, "answer": "b", "solution": "x", "data_source": "other"}}
HELD = [  # a row, a reward, a response that is right, one that is wrong
    (of_verl(["Paris", "Lyon"]), "member", "Paris", "a"),
    (of_verl({"target": ["Paris"]}), "searched", "Paris", "a"),
    (of_verl(72), "counted", "72", "7"),
    (of_verl(["Paris", "Lyon"]), "of_verls_column", "Lyon", ", "),
    (of_verl("Paris"), "compute_score", "Paris", "a"),
    ({"prompt": "q", "answer": 72}, "same_number", "72", "7"),
    ({"prompt": "q", "answer": 72, "extra_info": {"answer": "no"}}, "same_number", "72", "7"),
    ({"question": "q", "answer": "6 * 12 = 72\n#### 72"}, "hash_answer", "72", "7"),
    ({"question": "q", "answer": "6 * 12 = 72\n#### 72"}, "compute_score", "72", "7"),
    ({"question": "q", "answer": "6 * 12 = 72\n#### 72"}, "ours_of_text", "72", "7"),
    ({"prompt": "q", "answer": ["72"]}, "ours_of_text", '["72"]', "72"),
    ({"prompt": "q", "answer": 72.0}, "ours_of_text", "72", "72.0"),
]


@pytest.mark.parametrize("stored", [False, True], ids=["loaded", "streamed"])
def test_a_truth_is_what_the_row_holds_and_text_for_ours(score, tmp_path, stored):
    """From a file, through the encoded prompts of a run, to the workers."""
    for number, (row, name, right, wrong) in enumerate(HELD[::5] if stored else HELD):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({**row, "data_source": "toy"}))
        rows = load_endless_prompts(str(path), stored=True) if stored else None
        record = rows[0] if stored else load_prompts(str(path), "train")[0]
        assert json.loads(json.dumps(record))["ground_truth"] == record["ground_truth"]
        (encoded,), _ = encode_prompts([record], CharTokenizer("q"), max_prompt_tokens=9)
        found = score(name, right, wrong, record=pickle.loads(pickle.dumps(encoded)))
        assert [s.value for s in found] == [1.0, 0.0], (row, name, found)


ENTRIES = [  # an entry of extra_info hides neither a column nor the ground truth
    (VERLS_GSM8K, "accuracy", "72", "no"),
    (VERLS_GSM8K, "of_entry", "72", WORKED),
    (VERLS_GSM8K, "of_info", "72", WORKED),
    (VERLS_GSM8K, "labelled", "72", "no"),
    (VERLS_GSM8K, "batched", "72", "no"),
    ({**VERLS_GSM8K, "answer": "73"}, "correct", "73", "72"),  # a column of its own
    ({"prompt": "q", "answer": "72", **OF_ENTRIES}, "of_source", "72", "b"),
    ({"prompt": "q", "answer": "4", "level": 3, **OF_ENTRIES}, "leveled", "3", "5"),
    ({"prompt": "q", "answer": "4", "level": 3, **OF_ENTRIES}, "ours_of_level", "5", "3"),
    ({"prompt": "q", "answer": "4", "level": None, **OF_ENTRIES}, "leveled", "5", "3"),
    ({"prompt": "q", "solution": "so \\boxed{72}", **OF_ENTRIES}, "in_solution", "so", "z"),
    ({"prompt": "q", "answer": "72", "solution": "so 72", **OF_ENTRIES}, "in_solution", "so", "z"),
    ({"question": "q", "answer": WORKED}, "accuracy", "72", "6 * 12 = 72"),
    ({"question": "q", "answer": WORKED}, "hash_answer", "72", "7"),
]


@pytest.mark.parametrize("stored", [False, True], ids=["loaded", "streamed"])
def test_columns_and_the_truth_come_before_entries_of_extra_info(score, tmp_path, stored):
    for row, name, right, wrong in ENTRIES:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({**row, "data_source": "toy"}))
        rows = load_endless_prompts(str(path), stored=True) if stored else None
        record = pickle.loads(
            pickle.dumps(rows[0] if stored else load_prompts(str(path), "train")[0])
        )
        reward = resolve(f"foreign_rewards.{name}", HOME)
        for response, value in ((right, 1.0), (wrong, 0.0)):
            assert call_reward(reward, {**record, "response": response})[0] == value, (row, name)


def test_entries_of_extra_info_are_columns_where_the_row_has_no_truth(score):
    row = {"prompt": "q", "extra_info": {"solution": "72", "level": 3}, "data_source": "toy"}
    (record,) = load_prompts([row], "train", need_ground_truth=False)
    (encoded,), _ = encode_prompts([record], CharTokenizer("q"), max_prompt_tokens=9)
    assert [s.value for s in score("accuracy", "72", "7", record=encoded)] == [1.0, 0.0]
    assert [s.value for s in score("leveled", "3", "7", record=encoded)] == [1.0, 0.0]
    assert record["ground_truth"] == "" and record["ground_truth"].hidden == ()
