"""The experiments of benchmarks/claims.py show, on one seed, what docs/claims.md says of three."""

import sys

import pytest
from conftest import REPO

sys.path.append(str(REPO / "benchmarks"))
import claims

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """claims_tasks is found by the processes of rewards, too."""
    claims.find_tasks(monkeypatch.setenv)


def test_few_demonstrations_teach_the_form_and_not_the_sums(tmp_path):
    """000-04: 96 records to a loss below 0.05; more than 0.9 of held-out answers have the form."""
    found = claims.small_sft(tmp_path, 0)
    assert found["loss, last step"] < 0.05 < 1 < found["loss, first step"]
    assert found["held-out well-formed"] > 0.9 > 0.5 > found["held-out right"]


def test_a_kl_keeps_entropy_and_holds_the_policy(tmp_path):
    """001-12"""
    found = claims.kl(tmp_path, 0)
    assert found["entropy, on - off"] > 0.1 and found["KL to the reference, on - off"] < -0.1
    assert found["reward, on"] > 0.99 < found["reward, off"]


def test_the_form_is_learned_before_the_answers(tmp_path):
    """002-14"""
    found = claims.format_first(tmp_path, 0)
    assert found["right, first step"] < 0.2 and found["right, last steps"] > 0.9
    assert found["steps from well-formed to right 0.5"] > 0
    assert found["steps from well-formed to right 0.9"] > 0
    assert found["its gap, last steps"] < found["its gap, first steps"]  # 004-06


def test_a_mixture_keeps_a_policy_from_a_constant_answer(tmp_path):
    """004-70: RL runs with data.sources."""
    found = claims.mixture(tmp_path, 0)
    assert found["own source, alone"] > 0.9 and found["others, alone"] < 0.3
    assert found["own source, mixed"] > 0.9 and found["others, mixed"] > 0.9


def test_the_chosen_log_prob_falls_without_an_sft_term(tmp_path):
    """001-39"""
    found = claims.winner(tmp_path, 0)
    change = "log-prob of the chosen, change, "
    assert found[change + "dpo"] < -0.5
    assert found[change + "dpo and sft"] > found[change + "dpo"] + 0.5
    assert found[change + "dpo and sft"] > -0.05


def test_a_base_model_answers_with_a_question_and_sft_makes_it_add(tmp_path):
    """004-03"""
    found = claims.answers(tmp_path, 0)
    assert found["2+2= base"].strip() != "4" and found["2+2= post-trained"].strip() == "4"
    assert found["right, base"] < 0.1
