"""Rewards of a whole group: what they are handed, what they may return, the two of the house."""

import math
import sys

import pytest

from rljax.components import resolve
from rljax.errors import InputError
from rljax.rewards.groups import diversity, pairwise
from rljax.rewards.pool.calling import (
    HOME,
    call_group,
    call_reward,
    check_own_limit,
    group_fields,
    prepare,
    wanted_fields,
)
from rljax.rewards.pool.pool import RewardPool

GROUP_REWARDS = '''
import os, time

def longest(responses, num_tokens, finish_reasons, prompt, ground_truth, extra_info, data_source):
    """Who has the most tokens; what was handed over as parts."""
    assert len(responses) == len(num_tokens) == len(finish_reasons)
    assert (prompt, data_source) == ("p", "toy") and extra_info == {"k": 1}
    best = max(num_tokens)
    return [{"score": float(n == best), "siblings": len(responses), "truth": float(ground_truth),
             "stopped": float(why == "stop")} for n, why in zip(num_tokens, finish_reasons)]

def act(responses):
    if "raise" in responses:
        raise ValueError("no luck")
    if "hang" in responses:
        time.sleep(600)
    if "exit" in responses:
        os._exit(3)
    if "too few" in responses:
        return [1.0]
    if "a number" in responses:
        return 1.0
    if "a set" in responses:
        return {1.0, 2.0}
    returned = {"none": None, "nan": float("nan"), "text": "1", "no score": {"a": 1.0}}
    return [returned.get(text, float(len(text))) for text in responses]

def everything(responses, **fields):
    return [float(sorted(fields) == ["extra_info", "finish_reasons", "ground_truth", "num_tokens"])
            for _ in responses]

def raises_for_b(response):
    if response == "b":
        raise ValueError
    return 2.0

def first_is_better(prompt, first, second):
    return 1.0

def alphabetical(prompt, first, second):
    assert prompt == "p"
    return {"score": 0.5 if first == second else float(first < second)}
'''


@pytest.fixture(autouse=True)
def group_rewards(tmp_path, monkeypatch):
    (tmp_path / "group_rewards.py").write_text(GROUP_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "group_rewards", raising=False)


def sample(response, group=None, **fields):
    made = {"response": response, "num_tokens": len(response), "finish_reason": "stop"}
    made |= {"prompt": "p", "ground_truth": "0", "data_source": "toy", "extra_info": {"k": 1}}
    return made | ({} if group is None else {"group": group}) | fields


def test_a_group_is_one_call_with_lists_and_the_prompts_own_fields():
    rows = [
        sample("aaa", 5, ground_truth="7"),
        sample("x", 9),
        sample("bb", 5, ground_truth="7"),
        sample("yyy", 9, finish_reason="length"),
        sample("c", 5, ground_truth="7"),
        sample("alone"),
    ]
    with RewardPool("group_rewards.longest") as pool:
        scores = pool.score(rows)
    assert [s.value for s in scores] == [1, 0, 0, 1, 0, 1]  # in the order of the samples
    assert [s.parts["siblings"] for s in scores] == [3, 2, 3, 2, 3, 1]
    assert [s.parts["truth"] for s in scores] == [7, 0, 7, 0, 7, 0]
    assert [s.parts["stopped"] for s in scores] == [1, 1, 1, 0, 1, 1]


def test_a_failed_sample_is_its_own_and_a_failed_call_its_groups():
    bad = ["none", "nan", "text", "no score"]
    groups = [
        ["a", *bad],
        ["raise", "b"],
        ["hang", "c"],
        ["exit", "d"],
        ["too few", "e"],
        ["a number", "f"],
        ["a set", "h"],
        ["good", "g"],
    ]
    rows = [sample(text, i) for i, texts in enumerate(groups) for text in texts]
    with RewardPool("group_rewards.act", timeout_s=2.0) as pool:
        scores = pool.score(rows)
    by_text = {row["response"]: score for row, score in zip(rows, scores, strict=True)}
    assert {t for t, s in by_text.items() if s.status == "ok"} == {"a", "good", "g"}
    assert {t for t, s in by_text.items() if s.status == "timeout"} == {"hang", "c"}
    assert by_text["a"].value == 1 and by_text["good"].value == 4
    assert all(math.isnan(s.value) and not s.parts for s in scores if s.status != "ok")
    for text, said in {
        "none": "None",
        "nan": "not a finite number",
        "text": "no number",
        "no score": "'score'",
        "b": "ValueError: no luck",
        "d": "exit code 3",
        "e": "1 scores for 2",
        "f": "no list of 2",
        "h": "no list of 2",
    }.items():
        assert said in by_text[text].message
    assert by_text["c"].seconds == by_text["hang"].seconds  # one clock for the group


def test_keyword_rewards_of_a_group_get_every_field():
    rows = [
        {
            "response": t,
            "num_tokens": 1,
            "finish_reason": "stop",
            "group": 1,
            "ground_truth": "",
            "extra_info": {},
        }
        for t in "ab"
    ]
    with RewardPool("group_rewards.everything") as pool:
        assert [s.value for s in pool.score(rows)] == [1.0, 1.0]


def test_what_a_reward_of_a_group_may_declare(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "def both(response, responses): ...\n"
        "def one_reason(responses, finish_reason=None): ...\n"
        "def unknown(responses, tests): ...\n"
        "def bound(response, responses=()): return float(len(responses))\n"
    )
    for name, said in [
        ("both", "declares 'responses' and 'response'.*remove 'response'"),
        ("one_reason", "declares 'responses' and 'finish_reason'.*read 'finish_reasons'"),
        ("unknown", "needs 'tests', which no group has.*responses, .*finish_reasons"),
    ]:
        with pytest.raises(InputError, match=said):
            wanted_fields(resolve(f"wrong.{name}", HOME))
    bound = resolve("wrong.bound(responses=(1, 2))", HOME)
    assert call_reward(bound, {"response": "x"})[0] == 2.0
    with pytest.raises(InputError, match="compares the samples of a prompt"):
        call_reward(resolve("diversity", HOME), sample("x"))
    with RewardPool("pairwise(judge='shorter')") as pool:
        with pytest.raises(InputError, match="needs 'prompt'"):
            pool.score([{"response": "x"}])


PREPARED = """
from rljax.contracts import contract
from rljax.errors import InputError

def _check(options):
    if options["least"] < 1:
        raise InputError("my least", value=options["least"], fix="least=1")
    return {"checked": str(options["least"])}

@contract(prepare=lambda options: lambda: _check(options))
def mine(responses, *, least: int = 2):
    return [1.0 for _ in responses]

def _fails():
    raise AssertionError("of another reward of the module")

@contract(prepare=lambda options: _fails)
def other(response):
    return 1.0
"""


PROBED = """
from rljax.contracts import contract
from rljax.errors import InputError

@contract(probed=True)
def mine(response, *, least: int = 2):
    if least < 1:
        raise InputError("my least", value=least, fix="least=1")
    return 1.0
"""


def test_a_reward_of_ones_own_is_probed_for_its_options(tmp_path, monkeypatch):
    (tmp_path / "probed_reward.py").write_text(PROBED)
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("probed_reward.mine(least=0)", "format_tags(tags=())"):
        with pytest.raises(InputError):
            prepare(resolve(text, HOME))
    assert prepare(resolve("probed_reward.mine()", HOME)) == {}


def test_a_reward_of_ones_own_declares_what_is_done_before_the_first_sample(tmp_path, monkeypatch):
    """As ours do: it has its defaults, is alone with its check in a file of several rewards, and is
    prepared as a member of another, too."""
    (tmp_path / "prepared_reward.py").write_text(PREPARED)
    monkeypatch.syspath_prepend(tmp_path)
    text = "prepared_reward.mine({})"
    for one in (text, f"mixture(rewards=({text!r},))"):
        with RewardPool(one.format("least=3"), workers=1) as pool:
            assert pool.notes == {"checked": "3"}
        with pytest.raises(InputError, match="my least.*got 0.*least=1"):
            RewardPool(one.format("least=0"), workers=1).close()
    assert prepare(resolve(text.format(""), HOME)) == {"checked": "2"}
    for own, message in (("diversity(n=0)", "diversity n"), ("pairwise(judge='x')", "x")):
        with pytest.raises(InputError, match=message):
            prepare(resolve(own, HOME))


def test_diversity_is_one_minus_the_mean_overlap_with_siblings():
    texts = ["a b c d", "a b c e", "a b c d", "x"]
    # Of two words: {ab, bc, cd} and {ab, bc, ce} share 2 of 4, equal texts all, "x" nothing.
    got = [one["score"] for one in diversity(texts, n=2)]
    assert got == pytest.approx([1 - (0.5 + 1 + 0) / 3, 1 - (0.5 + 0.5) / 3, 0.5, 1.0])
    letters = diversity(["abcd", "abce"], n=3, unit="characters")  # {abc, bcd}, {abc, bce}
    assert [one["score"] for one in letters] == pytest.approx([2 / 3, 2 / 3])
    assert [one["score"] for one in diversity(["", "", "a"])] == pytest.approx([0.5, 0.5, 1.0])
    assert diversity(["only"])[0]["score"] == 1.0
    with pytest.raises(InputError, match="diversity n"):
        diversity(["a"], n=0)


def test_diversity_times_correctness_fails_only_where_correctness_does():
    group = group_fields([sample(text, ground_truth="a") for text in ("a", "b", "a", "c")])
    found = call_group(resolve("diversity(correct='exact_match')", HOME), group)
    assert [one[1] for one in found] == pytest.approx([2 / 3, 0, 2 / 3, 0])
    assert [one[2]["correct"] for one in found] == [1, 0, 1, 0]
    found = call_group(resolve("diversity(correct='group_rewards.raises_for_b')", HOME), group)
    assert [one[0] for one in found] == ["ok", "error", "ok", "ok"] and found[3][1] == 2.0
    assert "Error: " in found[1][3]  # the cause is kept
    with pytest.raises(InputError, match="names 'diversity'"):
        wanted_fields(resolve("diversity(correct='diversity')", HOME))
    with pytest.raises(InputError, match="no_such"):  # before the first sample
        wanted_fields(resolve("diversity(correct='no_such()')", HOME))
    with pytest.raises(InputError, match="total_timeout_s"):
        check_own_limit(resolve("diversity(correct='code_tests()')", HOME), 5.0)


def test_pairwise_is_the_win_rate_in_both_orders():
    judge = "group_rewards.alphabetical"
    wins = [one["score"] for one in pairwise(["b", "a", "c", "b"], "p", judge=judge)]
    assert wins == pytest.approx([0.5, 1.0, 0.0, 0.5])
    # A judge that likes the first place says nothing in both orders, and everything in one.
    biased = "group_rewards.first_is_better"
    assert [o["score"] for o in pairwise(["x", "y", "z"], "p", judge=biased)] == [0.5] * 3
    one_order = pairwise(["x", "y", "z"], "p", judge=biased, both_orders=False)
    assert [o["score"] for o in one_order] == [1.0, 0.5, 0.0]
    assert pairwise(["x"], "p", judge=judge)[0]["score"] == 0.5


def test_pairwise_of_drawn_opponents_is_the_same_each_time_and_fewer_matches():
    texts = [f"{i:02}" for i in range(12)]
    judge = "group_rewards.alphabetical"
    found = pairwise(texts, "p", judge=judge, opponents=3)
    assert found == pairwise(texts, "p", judge=judge, opponents=3)
    assert found != pairwise(texts, "p", judge=judge, opponents=3, seed=1)
    assert all(3 <= one["matches"] <= 11 for one in found)
    assert sum(one["matches"] for one in found) < 12 * 11
    assert found[0]["score"] == 1.0 and found[-1]["score"] == 0.0
    with pytest.raises(InputError, match="pairwise opponents"):
        pairwise(texts, "p", judge=judge, opponents=-1)
