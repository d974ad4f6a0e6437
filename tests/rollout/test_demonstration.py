"""Demonstrations of the data in the groups of the samples: which rows they replace, what stays as
it is, and that a policy learns from them what its samples never find."""

import jax
import numpy as np
import pytest
from tiny_run import metrics_rows, tiny_config, train_on_one

from rljax.batch import NOT_SAMPLED
from rljax.data.text.chat import without_opened_mark
from rljax.errors import InputError
from rljax.setup import build
from rljax.training.run import Run

TASK = '''
from rljax.tasks import Task, sort_digits

def rows(of_each=3, digits=5, test=8):
    """Digits to sort; one row of each `of_each` has no demonstration."""
    task = sort_digits(digits=digits, prompts=1200, test=test)
    for row in task.train:
        row["extra_info"] = {"level": 3}
        if row["index"] % of_each:
            turn = {"role": "assistant", "content": row["ground_truth"]}
            row["extra_info"]["demonstration"] = row["ground_truth"] if row["index"] % 2 else [turn]
    return task


def thought():
    """Prompts that open the reasoning, as chat templates do, and demonstrations that do, too."""
    rows = [
        {"prompt": f"{i}<think>", "ground_truth": "7", "data_source": "x", "index": i}
        | {"extra_info": {"demonstration": "<think></think>7"}}
        for i in range(10)
    ]
    return Task("0123456789</thnk>i", rows, rows[:2], worked_examples=())
'''
MODEL = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.3)"
LUFFY = dict(
    data__train="shown_digits.rows()",
    sft__steps=0,
    evaluate__every_steps=0,
    algorithm__policy_loss="luffy(gamma=0.1)",
)


@pytest.fixture(autouse=True)
def users_task(tmp_path, monkeypatch):
    (tmp_path / "shown_digits.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)


def first_batch(folder, collect: str, **fields):
    """(the first batch, the metrics of sampling)."""
    given = LUFFY | dict(steps=2, batch__sequences_per_optimizer_step=16) | fields
    config = tiny_config(folder, model=MODEL, algorithm__collect=collect, **given)
    with Run(build(config, devices=jax.devices()[:1]), folder) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        batch, metrics = run.source.next(0, run.roles)
        return jax.tree.map(np.asarray, batch), metrics


def test_the_last_row_of_a_prompt_is_its_demonstration(tmp_path):
    plain, _ = first_batch(tmp_path / "plain", "once()")
    batch, metrics = first_batch(tmp_path / "shown", "with_demonstration()")
    last = np.arange(16) % 4 == 3
    shown = last & np.all((batch.policy_version == NOT_SAMPLED) >= (batch.mask > 0), axis=1)
    assert 0 < shown.sum() < 4
    for name in ("tokens", "mask", "sampler_logprobs", "scores", "group", "policy_version"):
        ours, theirs = getattr(batch, name), getattr(plain, name)
        np.testing.assert_array_equal(ours[~shown], theirs[~shown], name)
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(4), 4))
    assert np.all(batch.scores[shown] == 1.0) and np.all(batch.mask[shown].sum(axis=1) == 6)
    assert np.all(plain.scores[shown] < 1.0)
    for row in np.flatnonzero(shown):  # behind the prompt of its group
        prompt = batch.segment_ids[row] * (batch.mask[row] == 0) > 0
        np.testing.assert_array_equal(batch.tokens[row][prompt], plain.tokens[row][prompt])
        digits = batch.tokens[row][batch.mask[row] > 0][:5]
        assert np.all(np.diff(digits) >= 0)
    assert metrics["demonstration/fraction"] == shown.sum() / 4
    assert metrics["demonstration/reward"] == 1.0
    assert metrics["demonstration/reward_of_samples"] == pytest.approx(plain.scores.mean())
    assert metrics["demonstration/truncated_fraction"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("old", ["recomputed", "sampler"])
def test_a_run_in_flight_learns_from_them(tmp_path, old):
    flight = dict(rollouts__max_staleness=1, rollouts__clock="logical(2)", sampler__slots=12)
    fields = dict(algorithm__correction="rollout_correction(level='token')")
    if old == "sampler":
        fields = dict(algorithm__old_logprobs="sampler")
    config = tiny_config(
        tmp_path / "run",
        model=MODEL,
        steps=3,
        algorithm__collect="with_demonstration()",
        **LUFFY | flight | fields,
    )
    train_on_one(config)
    rows = metrics_rows(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        assert row["demonstration/reward"] == 1.0 and row["grad_norm"] > 0
        assert row["staleness/max"] <= 2 * rows.index(row)  # of the samples, two updates a step
        assert 0 < row["demonstration_weight"] < 0.5
    if old == "recomputed":  # a demonstration says nothing of how far sampler and trainer are apart
        first = rows[0]
        assert abs(first["mismatch/mismatch_kl"]) < 1e-4


@pytest.mark.slow
def test_what_no_sample_finds_is_learned_from_demonstrations(tmp_path):
    """From random weights no sample of three digits is right, so that GRPO alone learns nothing."""
    accuracy = {}
    for name, collect in (("alone", "once()"), ("shown", "with_demonstration()")):
        config = tiny_config(
            tmp_path / name,
            model=MODEL.replace("0.3", "0.1"),
            steps=200,
            reward__function="exact_match()",
            algorithm__collect=collect,
            algorithm__advantage="group_relative(std='none')",
            actor_optimizer__lr=5e-3,
            batch__prompts_per_step=16,
            batch__sequences_per_optimizer_step=64,
            evaluate__prompts=64,
            checkpoint__every_steps=0,
            **LUFFY | dict(data__train="shown_digits.rows(of_each=10_000, digits=3, test=64)"),
        )
        accuracy[name] = train_on_one(config)["accuracy_after"]["value"]
    assert accuracy["alone"] < 0.1 < 0.3 < accuracy["shown"], accuracy


def test_what_cannot_be_shown_is_refused(tmp_path):
    with pytest.raises(InputError, match="samples_per_prompt: got 1.*at least 2"):
        first_batch(
            tmp_path / "one",
            "with_demonstration()",
            batch__samples_per_prompt=1,
            batch__prompts_per_step=16,
            algorithm__advantage="reinforce()",
        )
    with pytest.raises(
        InputError, match="a level of the data: got 3; a text, or one message.*or none"
    ):
        first_batch(tmp_path / "number", "with_demonstration(column='level')")


def test_a_demonstration_goes_on_behind_what_the_prompt_opens(tmp_path):
    fields = dict(data__train="shown_digits.thought()", data__max_prompt_tokens=12)
    fields["sampler__max_response_tokens"] = 12
    batch, metrics = first_batch(
        tmp_path / "run", "with_demonstration()", reward__function="exact_match()", **fields
    )
    last = np.arange(16) % 4 == 3
    assert metrics["demonstration/reward"] == 1.0 and metrics["demonstration/fraction"] == 1.0
    assert np.all(batch.mask[last].sum(axis=1) == 10)  # </think>7 and the end


@pytest.mark.parametrize(
    ("prompt", "response", "want"),
    [
        ("Q<|assistant|><think>\n", "<think>\nhm</think>4", "\nhm</think>4"),
        ("Q<|assistant|><think>", "hm</think>4", "hm</think>4"),
        ("Q<|assistant|>", "<think>hm</think>4", "<think>hm</think>4"),
    ],
)
def test_an_opened_mark_is_not_written_again(prompt, response, want):
    assert without_opened_mark(prompt, response) == want
