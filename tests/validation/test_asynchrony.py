"""Samples in flight: what is refused by name, what is warned of, and what is fine."""

import re

import pytest
from test_config import problems_of, valid

from rljax.validation import validate

CORRECTED = {"algorithm__correction": "rollout_correction(level='token', upper=2.0)"}


def in_flight(**overrides):
    return valid(**{"rollouts__max_staleness": 2, **CORRECTED, **overrides})


def test_a_run_in_flight_is_valid():
    assert validate(in_flight()) == []
    # The host's loop decodes what is in flight, whatever decodes the rest.
    assert validate(in_flight(sampler__page_tokens=16)) == []


@pytest.mark.parametrize(
    ("overrides", "field", "says"),
    [
        ({"rollouts__max_staleness": -1}, "rollouts.max_staleness", "must be >= 0"),
        ({"rollouts__max_staleness": 1.5}, "rollouts.max_staleness", "must be a whole number"),
        ({"rollouts__ahead": 3}, "rollouts.ahead", "from 0 to max_staleness, 2. Fix: -1"),
        ({"rollouts__ahead": -2}, "rollouts.ahead", "from 0 to max_staleness, 2"),
        ({"rollouts__in_flight_cache": "drop"}, "rollouts.in_flight_cache", "keep, reread"),
        ({"rollouts__partial_mask": "old"}, "rollouts.partial_mask", "none, stale"),
        ({"rollouts__clock": "logical(0)"}, "rollouts.clock", "the second dispatch"),
        ({"rollouts__clock": "turns"}, "rollouts.clock", r"'wall', or 'logical\(2\)'"),
        (
            {"dataflow": "xpo", "algorithm__preference_loss": "xpo()"},
            "rollouts.max_staleness",
            "from an opponent.*Fix: rollouts.max_staleness=0",
        ),
        (
            {
                "dataflow": "prime()",
                "roles": ("implicit=trained_policy(lr=1e-6)",),
                "algorithm__advantage": "prime()",
            },
            "rollouts.max_staleness",
            "samples of one version of the policy. Fix: rollouts.max",
        ),
        (
            {
                "reward__judge_model": "tests",
                "algorithm__collect": "dynamic()",
                "reward__function": "judge()",
            },
            "reward.judge_model",
            "replaces dead ones as soon as they have ended",
        ),
        (
            {"reward__model": "tests", "algorithm__collect": "active()"},
            "reward.model",
            r"Fix: 'once\(\)'",
        ),
        (
            {
                "dataflow": "on_policy_distil",
                "teacher_model": "tests",
                "algorithm__collect": "dynamic()",
                "algorithm__correction": "",
            },
            "algorithm.collect",
            "reads no reward",
        ),
        (
            {"algorithm__collect": "toy.chooses_groups()"},
            "algorithm.collect",
            "does not say how many may be dropped",
        ),
        (
            {"algorithm__collect": "search()"},
            "rollouts.max_staleness",
            "searches the responses of a step together",
        ),
        (
            {"dataflow": "sft", "algorithm__correction": ""},
            "rollouts.max_staleness",
            "learns from a file",
        ),
    ],
)
def test_what_does_not_go_in_flight_is_refused_by_name(overrides, field, says):
    found = problems_of(in_flight(**overrides))
    assert re.search(rf"{re.escape(field)}=.*{says}", found), found


def test_stored_rollouts_alone_are_never_in_flight(tmp_path):
    file = tmp_path / "stored.jsonl"
    file.write_text("{}\n")
    config = in_flight(rollouts__replay=str(file))
    assert "replay_share=1.0: nothing is sampled" in problems_of(config)
    config.rollouts.replay_share = 0.5
    assert validate(config) == []


def test_what_nothing_reads_without_staleness_is_said():
    config = valid(rollouts__ahead=1, rollouts__clock="logical(2)")
    (warning,) = validate(config)
    assert (
        "rollouts.ahead=1, rollouts.clock=" in warning
        and "rollouts.max_staleness is off" in warning
    )


@pytest.mark.parametrize(
    ("overrides", "weighs"),
    [
        ({}, False),
        ({"algorithm__policy_loss": "policy_gradient()"}, False),
        ({"algorithm__policy_loss": "cispo()"}, False),
        ({"algorithm__correction": "rollout_correction(mode='off')"}, False),
        ({"algorithm__policy_loss": "cispo(behaviour='sampler')"}, True),
        ({"algorithm__policy_loss": "decoupled_ppo()"}, True),
        ({"algorithm__old_logprobs": "sampler"}, True),
        (CORRECTED, True),
        (
            {
                "dataflow": "online_dpo",
                "batch__samples_per_prompt": 4,
                "algorithm__preference_loss": "dpo()",
            },
            True,
        ),
    ],
)
def test_a_loss_that_ignores_versions_is_warned_of(overrides, weighs):
    """A weight that depends on the sampler's log-probs, or none."""
    config = valid(**{"rollouts__max_staleness": 1, **overrides})
    warnings = validate(config)
    assert [("NeMo-RL PR 1098" in text) for text in warnings] == ([] if weighs else [True])
    config.rollouts.max_staleness = 0
    assert validate(config) == []


def test_prompts_that_do_not_begin_ahead_are_warned_of():
    (warning,) = validate(in_flight(rollouts__ahead=0))
    assert "changes nothing" in warning
