"""Runs that learn from a file: each kind of data learns, resumes bitwise, evaluates what is held
out, stops early, stores the reference's log-probs; what does not fit is refused."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import lanes
from explained import unexplained
from tiny_offline import metrics_of, offline_config, write_rows
from tiny_run import assert_same_run, train_on_one

from rljax import setup as build
from rljax.batch import Batch
from rljax.command.train import measured_lines
from rljax.config import with_overrides
from rljax.dataflows import preference
from rljax.errors import InputError
from rljax.kernels.logprob import xla
from rljax.roles import Actor, Reference
from rljax.roles import models as roles
from rljax.tasks import letter_feedback
from rljax.training import offline, train
from rljax.training.best_metric import check_best_metric
from rljax.training.run import Run
from rljax.validation import validate

# kind, dataflow, what else it needs, and what the held-out loss must fall below (start: log 2, 0.5,
# about 5.8 nats a token, 1, 0.31 and 0.17).
RUNS = {
    "preference": ("pairs", {}, 0.35),
    "kto": ("unpaired", {"algorithm__preference_loss": "kto()"}, 0.4),
    "bco": ("unpaired", {"algorithm__preference_loss": "bco()"}, 0.6),
    "reward_model": ("pairs", {}, 0.6),
    "process_reward_model": ("stepwise", {"algorithm__reward_loss": "step_regression()"}, 0.9),
    "sft": ("examples", {"offline__packing": True}, 4.5),
    "dqo(beta=0.1)": ("trajectories", {}, 0.15),
    "dro(tau=0.5)": ("trajectories", {}, 0.08),
}


def config_of(folder, dataflow: str, run: str = "run", **fields):
    kind, needs, _ = RUNS[dataflow]
    return offline_config(folder, kind, dataflow, run, **{**needs, **fields})


ONE = jax.devices()[:1]
_GREEDY = {"evaluate__prompts_from": "sort_digits(digits=3)"}


# Lines that are labelled are learned in test_process_models.py.
# What configs/offline trains too is left to test_offline_configs.py, here in the slow lane.
# The runs of pairs below are of one program, that of DPO; a comparison in tests/experiments learns
# from trajectories.
QUICK = ["sft"]


@pytest.mark.parametrize("dataflow", lanes(QUICK, [r for r in RUNS if r not in QUICK]))
def test_the_loss_on_held_out_rows_falls(dataflow, tmp_path):
    summary = train_on_one(config_of(tmp_path, dataflow, steps=12, evaluate__every_steps=6))
    before, after = summary["eval_before"]["eval/loss"], summary["eval_after"]["eval/loss"]
    assert summary["status"] == "finished" and after < RUNS[dataflow][2] < before
    assert summary["accuracy_before"] is None  # nothing was sampled
    assert summary["last_evaluation"] == {
        "step": 12,
        "accuracy": None,
        "eval": summary["eval_after"],
    }
    first, last = measured_lines(summary)
    assert first.startswith("held-out rows: loss ") and first.endswith(", at step 0")
    assert f"loss {after:.4g}" in last and last.endswith(", at step 12")
    rows = metrics_of(tmp_path / "run")
    assert {row["phase"] for row in rows} == {dataflow.partition("(")[0]}
    assert unexplained(*rows) == set()


def test_dro_learns_the_reward_of_a_row_with_process_scores(tmp_path):
    rows = tmp_path / "scored.jsonl"
    row = {"prompt": "1", "steps": ["2", "3"], "process_scores": [-0.75, 0.25], "reward": 1.0}
    rows.write_text(f"{json.dumps(row)}\n" * 16)
    fields = dict(data__train=str(rows), data__test="", offline__step_separator="")
    train_on_one(config_of(tmp_path, "dro(tau=0.5)", steps=1, **fields))
    (line,) = metrics_of(tmp_path / "run")
    assert [v for k, v in line.items() if k.endswith("dro_reward")] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dqo_improves_where_every_prompt_has_one_response(seed, tmp_path):
    """000-27: of 192 prompts half have one right response each, the others a wrong one; the policy
    answers prompts that it has not seen."""
    config = offline_config(
        tmp_path,
        "trajectories",
        "dqo(beta=0.03)",
        "run",
        seed=seed,
        steps=120,
        model="decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, init_std=0.1)",
        tokenizer="",
        data__train="letter_feedback(letters=4, kinds=4, test=64)",
        data__test="",
        data__max_prompt_tokens=5,
        sampler__max_response_tokens=3,
        offline__examples_per_step=32,
        offline__max_tokens=8,
        actor_optimizer__lr=5e-3,
        critic_optimizer__lr=1e-2,
        reward__workers=1,
        evaluate__prompts_from="first_letter(letters=4, kinds=4, test=64)",
        evaluate__prompts=64,
        evaluate__every_steps=0,
    )
    rows = letter_feedback(letters=4, kinds=4, test=64).train
    assert len({row["prompt"] for row in rows}) == len(rows) == 192
    assert sum(row["reward"] for row in rows) == 96
    summary = train_on_one(config)
    assert summary["accuracy_before"]["value"] < 0.1
    assert summary["accuracy_after"]["value"] > 0.85  # greedy, 64 held-out prompts


@pytest.mark.slow
def test_preference_training_lifts_the_chosen_above_the_rejected(tmp_path):
    rows = (
        train_on_one(config_of(tmp_path, "preference", steps=12)),
        metrics_of(tmp_path / "run"),
    )[1]
    gap = [row["logps/chosen"] - row["logps/rejected"] for row in rows]
    assert gap[-1] > gap[0] + 3 and rows[-1]["rewards/accuracies"] > 0.9
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)  # the policy is the reference


@pytest.mark.slow
def test_a_run_is_on_the_devices_that_it_is_given(tmp_path):
    assert train_on_one(config_of(tmp_path, "preference", steps=1))["device"] == "1 x cpu"


@pytest.mark.slow
@pytest.mark.parametrize("dataflow", ["preference", "bco", "dqo(beta=0.1)"])
def test_a_resumed_run_is_bitwise_the_whole_one(dataflow, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fields = {"export": True, "checkpoint__every_steps": 4}
    train_on_one(config_of(tmp_path, dataflow, "whole", **fields))
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "00000006")
    shutil.rmtree(cut / "policy")
    (cut / "report.html").unlink()
    train_on_one(config_of(tmp_path, dataflow, "cut", **fields))
    assert_same_run(whole, cut)


@pytest.mark.slow
def test_stored_reference_logprobs_are_computed_once_and_change_nothing(tmp_path, monkeypatch):
    short = {"steps": 3, "evaluate__every_steps": 2}
    stored = {"offline__reference_logprobs": str(tmp_path / "stored")}
    train_on_one(config_of(tmp_path, "preference", "plain", **short))
    train_on_one(config_of(tmp_path, "preference", "first", **short, **stored))
    files = list((tmp_path / "stored").iterdir())
    assert len(files) == 1
    monkeypatch.setattr(offline, "_reference_logprobs", None)  # a second computation would fail
    train_on_one(config_of(tmp_path, "preference", "second", **short, **stored))
    for run in ("first", "second"):
        for got, want in zip(
            metrics_of(tmp_path / run), metrics_of(tmp_path / "plain"), strict=True
        ):
            for name in {"loss", "grad_norm", "rewards/margins", "eval/loss"} & want.keys():
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
    # Another start is another reference, and so are other rows and another precision.
    monkeypatch.undo()
    for count, other in enumerate(
        ({"seed": 4}, {"model_settings__dtype": "bfloat16"}, {"offline__ties": "both_orders"})
    ):
        config = config_of(tmp_path, "preference", f"other{count}", **{**stored, **other})
        if count == 2:  # the same rows, of which more are read
            line = json.dumps({"prompt": "a ", "chosen": "b", "rejected": "c", "tie": True})
            path = Path(config.data.train.replace("{split}", "train"))
            path.write_text(path.read_text() + "\n" + line)
        Path(config.run_dir).mkdir()
        with Run(build.build(config, ONE), Path(config.run_dir)) as run:
            run.begin(run.setup.main, build.initial_params(config, run.setup.model))
        assert len(list((tmp_path / "stored").iterdir())) == 2 + count


def test_a_damaged_stored_file_is_named(tmp_path):
    stored = {"offline__reference_logprobs": str(tmp_path / "stored")}
    train_on_one(config_of(tmp_path, "preference", "one", steps=1, **stored))
    (file,) = (tmp_path / "stored").iterdir()
    for damage in (file.read_bytes()[:100], b""):
        file.write_bytes(damage)
        with pytest.raises(InputError, match="cannot be read"):
            train_on_one(config_of(tmp_path, "preference", "two", steps=1, **stored))


def test_a_reward_model_does_not_read_the_preference_loss(tmp_path):
    """Neither its rows per example nor whether it fits; nor does preference the reward's loss."""
    for loss in ("tpo()", "kto()"):
        config = config_of(tmp_path, "reward_model", algorithm__preference_loss=loss)
        validate(config)
        assert build.build(config, ONE).rows_per_example == 2
    build.build(config_of(tmp_path, "preference", algorithm__reward_loss="step_regression()"), ONE)


def test_a_stored_file_that_is_gone_is_named_at_the_resume(tmp_path):
    stored = {"offline__reference_logprobs": str(tmp_path / "stored")}
    stored["checkpoint__every_steps"] = 2
    train_on_one(config_of(tmp_path, "preference", steps=4, **stored))
    for file in (tmp_path / "stored").iterdir():
        file.unlink()
    (tmp_path / "run" / "report.html").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000004")
    with pytest.raises(InputError, match="reference's log-probs"):
        train_on_one(config_of(tmp_path, "preference", steps=4, **stored))


def test_rows_that_have_changed_get_their_own_reference(tmp_path):
    """Of a run that goes on with other rows, as many: policy and reference are equal at a learning
    rate of next to nothing, so the loss stays log 2."""
    fields = {"offline__reference_logprobs": str(tmp_path / "stored"), "evaluate__every_steps": 0}
    fields |= {"actor_optimizer__lr": 1e-30, "checkpoint__every_steps": 1}
    config = config_of(tmp_path, "preference", steps=1, **fields)
    train_on_one(config)
    path = Path(config.data.train.replace("{split}", "train"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    turned = [dict(row, chosen=row["rejected"], rejected=row["chosen"] * 2) for row in lines]
    config = config_of(tmp_path, "preference", steps=2, **fields)
    path.write_text("".join(json.dumps(row) + "\n" for row in turned))
    config.checkpoint.allow_changed = ("data", "data.train", "steps")
    train_on_one(config)
    losses = [row["loss"] for row in metrics_of(tmp_path / "run")]
    assert losses == pytest.approx([math.log(2)] * 2, abs=1e-5)
    assert len(list((tmp_path / "stored").iterdir())) == 2


def test_dpo_holds_two_models_and_never_samples(tmp_path, monkeypatch):
    """With stored log-probs it holds one."""
    monkeypatch.setattr(roles, "generate", None)
    for stored, kinds in (("", [Reference, Actor]), (str(tmp_path / "stored"), [Actor])):
        config = config_of(tmp_path, "preference", f"run{len(kinds)}")
        config.offline.reference_logprobs = stored
        Path(config.run_dir).mkdir()
        with Run(build.build(config, ONE), Path(config.run_dir)) as run:
            assert run.reward is None
            run.begin(run.setup.main, build.initial_params(config, run.setup.model))
            assert [type(role) for role in run.roles.values()] == kinds
            run.step()


def test_no_array_of_all_words_is_made_by_a_step(tmp_path, monkeypatch):
    """Rows x tokens x vocabulary: neither forward nor backward."""
    config = config_of(tmp_path, "preference")
    monkeypatch.setattr(xla, "ROWS", 64)
    rows = config.offline.examples_per_step
    config.batch.tokens_per_microbatch = 2 * rows * 48
    setup = build.build(config, ONE)
    model = setup.model
    roles = build.make_roles(setup, setup.main, model.init(jax.random.key(0)))
    items = [{"item": record["item"]} for record in setup.data.sources[0][:rows]]
    batch = offline.offline_rows(setup, items)
    whole = 2 * rows * setup.row_tokens * model.config.vocab_size
    jaxpr = jax.make_jaxpr(
        lambda b, actor, reference: preference.page(
            b, jax.random.key(0), setup.algorithm, actor=actor, reference=reference
        )[1]
    )(batch, roles["actor"], roles["reference"])
    sizes = [int(np.prod(v.aval.shape)) for v in _variables(jaxpr.jaxpr)]
    assert max(sizes) < whole / 2


def _variables(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _variables(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from _variables(inner.jaxpr)


@pytest.mark.slow
def test_patience_ends_a_run_whose_held_out_loss_rises(tmp_path):
    fields = {"actor_optimizer__lr": 0.0, "evaluate__every_steps": 1, "evaluate__patience": 2}
    summary = train_on_one(config_of(tmp_path, "preference", steps=6, **fields))
    assert summary["stopped_early"] and summary["steps"] == 2 and summary["status"] == "finished"
    with pytest.raises(InputError, match="evaluate.patience=2 ended it.*patience.*0"):
        train_on_one(config_of(tmp_path, "preference", steps=6, **fields))
    fields |= {"evaluate__patience": 0, "checkpoint__allow_changed": ("evaluate.patience",)}
    more = config_of(tmp_path, "preference", steps=6, **fields)
    assert train_on_one(more)["steps"] == 6  # as the fix says


@pytest.mark.slow
def test_the_best_checkpoint_by_the_lowest_loss_is_kept(tmp_path):
    fields = {"checkpoint__best_metric": "-eval/loss", "checkpoint__keep": 1}
    fields["checkpoint__every_steps"] = 2
    config = config_of(tmp_path, "preference", steps=6, **fields)
    train_on_one(config)
    losses = {r["step"]: r["eval/loss"] for r in metrics_of(tmp_path / "run") if "eval/loss" in r}
    kept = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()}
    assert min(losses, key=losses.get) in kept


@pytest.mark.parametrize(
    ("name", "fields", "rule", "fix"),
    [
        ("eval_loss", {}, "no metric of this run", "best_metric='eval/loss'"),
        ("-eval_loss", {}, "no metric of this run", "best_metric='-eval/loss'"),
        ("-eval/los", {}, "no evaluation of this run measures it", "best_metric='-eval/loss'"),
        ("eval/grad_norm", {}, "no evaluation of this run measures it", "best_metric="),
        ("eval/accuracy", {}, "no evaluation of this run measures it", "best_metric="),
        ("-eval/loss", {"data__test": ""}, "no evaluation of this run", "by data.test"),
        ("eval_loss", {"data__test": ""}, "no metric of this run", "hold rows out by data.test"),
        ("-lss", {}, "no metric of this run", "best_metric='-loss'"),
        ("-", {}, "no metric of this run", "best_metric=''"),
        ("eval/pass@4", _GREEDY, "no evaluation of this run measures it", "best_metric="),
        ("eval/pass@3", {**_GREEDY, "evaluate__samples": 4}, "no evaluation", "eval/pass@"),
    ],
)
def test_a_best_metric_that_no_step_measures_is_refused(tmp_path, name, fields, rule, fix):
    config = config_of(tmp_path, "preference", checkpoint__best_metric=name, **fields)
    setup = build.build(config, ONE)
    with pytest.raises(InputError, match=rule) as error:
        check_best_metric(setup, {})
    assert fix in str(error.value) and f"checkpoint.best_metric: got {name!r}" in str(error.value)


def test_a_best_metric_that_is_measured_is_taken(tmp_path):
    config = config_of(tmp_path, "preference", **_GREEDY, evaluate__samples=4)
    setup = build.build(config, ONE)
    for name in (
        *("", "loss", "-loss", "-eval/loss", "grad_norm", "rewards/margins", "lr"),
        *("eval/rewards/accuracies", "eval/accuracy", "eval/accuracy_low", "eval/pass@1"),
        *("eval/pass@4", "eval/pass@2_low", "-eval/truncated_fraction"),
    ):
        checkpoint = dataclasses.replace(config.checkpoint, best_metric=name)
        changed = dataclasses.replace(config, checkpoint=checkpoint)
        check_best_metric(dataclasses.replace(setup, config=changed), {})
    setup = build.build(config_of(tmp_path, "reward_model"), ONE)
    for name in ("eval/margin/mean", "eval/loss"):
        setup.config.checkpoint.best_metric = name
        check_best_metric(setup, {})
    stored = {"offline__reference_logprobs": str(tmp_path / "stored")}
    setup = build.build(config_of(tmp_path, "preference", **stored), ONE)
    setup.config.checkpoint.best_metric = "-eval/loss"
    check_best_metric(setup, {})  # the rows of an evaluation have ref_logprobs, too


def test_a_run_in_which_no_step_was_the_best_says_so(tmp_path):
    """Declared, but of runs that sample: the start cannot know, the first step does."""
    fields = {"checkpoint__best_metric": "reward/mean", "steps": 1}
    summary = train_on_one(config_of(tmp_path, "preference", **fields))
    said = [text for text in summary["warnings"] if "checkpoint.best_metric='reward/mean" in text]
    assert "first step did not measure" in said[0] and "no saved step" in said[1]
    config = config_of(tmp_path, "preference", evaluate__every_steps=0)
    config.checkpoint.best_metric = "-eval/loss"
    assert [text for text in validate(config) if "measured at the end alone" in text]


@pytest.mark.slow
def test_pairs_stay_together_in_microbatches(tmp_path):
    """All 16 pairs at once, and 8 at a time on 8 devices: the same losses and gradients."""
    ends = {}
    for tokens in (16 * 2 * 48, 8 * 2 * 48):
        name = f"of{tokens}"
        config = config_of(tmp_path, "preference", name, batch__tokens_per_microbatch=tokens)
        train(dataclasses.replace(config, steps=3))
        ends[tokens] = metrics_of(tmp_path / name)
    for one, other in zip(*ends.values(), strict=True):
        for key in ("loss", "grad_norm", "rewards/margins", "logps/chosen"):
            assert one[key] == pytest.approx(other[key], rel=2e-4), key


@pytest.mark.slow
def test_packed_and_unpacked_examples_give_the_same_loss_and_gradient(tmp_path):
    """All examples in one step: packing changes which rows they stand in, nothing else."""
    found = []
    for packing in (False, True):
        config = offline_config(tmp_path, "examples", "sft", f"packed{packing}", steps=1)
        config.data.test, config.evaluate.every_steps = "", 0
        config.offline.packing = packing
        counts = build.build(config, ONE).data.counts
        config.offline.examples_per_step = counts.get("packed_rows", 64)
        if packing:
            assert 0.5 < counts["packing_efficiency"] <= 1
        train_on_one(config)
        found.append((config.offline.examples_per_step, metrics_of(config.run_dir)[0]))
    (plain_rows, plain), (packed_rows, packed) = found
    assert packed_rows < 0.7 * plain_rows
    for name in ("loss", "grad_norm"):
        assert packed[name] == pytest.approx(plain[name], rel=1e-5), name


@pytest.mark.slow
def test_sources_are_mixed_by_weight(tmp_path):
    config = config_of(tmp_path, "preference", steps=6)
    (tmp_path / "more").mkdir()
    config.data.sources = (write_rows(tmp_path / "more", "pairs"),)
    config.data.weights = (1.0, 3.0)
    train_on_one(config)
    row = metrics_of(tmp_path / "run")[-1]
    assert row[f"data/chance/{config.data.sources[0]}"] == 0.75
    with Run(build.build(dataclasses.replace(config, run_dir=""), ONE), tmp_path / "again") as run:
        drawn = [record["source"] for record in run.source.loader.take(400)]
    assert 0.68 < drawn.count(config.data.sources[0]) / 400 < 0.82


@pytest.mark.slow
def test_adapters_learn_and_the_reference_shares_their_base(tmp_path):
    config = config_of(tmp_path, "preference", steps=12, actor_optimizer__lr=3e-2)
    config.lora.rank, config.lora.base = 8, "float32"
    summary = train_on_one(config)
    assert summary["eval_after"]["eval/loss"] < 0.6


def test_held_out_rows_that_do_not_fill_a_batch_count_alone(tmp_path):
    """23 pairs and rows of padding: the loss is that of the 23, whatever the microbatch."""
    losses = []
    for tokens in (2 * 48 * 8, 2 * 48 * 16):
        config = config_of(tmp_path, "preference", batch__tokens_per_microbatch=tokens)
        config.evaluate.prompts = 23
        setup = build.build(config, ONE)
        roles = build.make_roles(setup, setup.main, setup.model.init(jax.random.key(1)))
        policy = setup.model.init(jax.random.key(2))
        state = dataclasses.replace(roles["actor"].state, params=policy)
        roles["actor"] = dataclasses.replace(roles["actor"], state=state)
        _, found = offline.held_out_step(setup, roles, jax.random.key(0))
        losses.append(found["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] != pytest.approx(0.6931)


REFUSED = [
    ({"dataflow": "kto"}, "reads examples of 2 rows, which unpaired are not"),
    ({"algorithm__preference_loss": "kto()"}, "kto"),
    ({"algorithm__preference_loss": "dop()"}, "did you mean dpo"),
    ({"offline__packing": True}, "packs demonstrations"),
    ({"data__turns": "each"}, "makes an example of each turn"),
    ({"offline__examples_per_step": 15, "mesh__fsdp": 2}, "must divide by mesh.data"),
    ({"batch__tokens_per_microbatch": 50}, "must hold one example: 2 x offline.max_tokens=48"),
    ({"teacher_model": "x"}, "has no teacher"),
    ({"algorithm__preference_loss": "sppo()"}, "the policy's own samples, not as what a file"),
    ({"batch__epochs": 3}, "there is nothing for it to do"),
    (
        {"algorithm__preference_loss": "simpo()", "offline__reference_logprobs": "x"},
        "reads no reference",
    ),
    ({"offline__ties": "keep"}, "one of drop, both_orders"),
    ({"sft__steps": 3}, "so sft.steps need their own"),
    ({"evaluate__patience": -1}, "must be >= 0"),
]


@pytest.mark.parametrize("fields, message", REFUSED)
def test_what_does_not_fit_is_refused(fields, message, tmp_path):
    config = with_overrides(
        config_of(tmp_path, "preference"),
        {name.replace("__", "."): value for name, value in fields.items()},
        "test",
    )
    with pytest.raises(InputError, match=message):
        validate(config)


@pytest.mark.parametrize(
    "field, value", [("kl_in_loss", 0.1), ("entropy_coef", 0.1), ("filters", ("overlong()",))]
)
def test_a_field_that_the_dataflow_does_not_read_is_refused_as_the_run_begins(
    field, value, tmp_path
):
    config = config_of(tmp_path, "preference", **{f"algorithm__{field}": value})
    with pytest.raises(InputError, match=rf"algorithm\.{field}.*preference.*does not read it"):
        Run(build.build(config, ONE), tmp_path)


@pytest.mark.parametrize("dataflow", ["dqo(beta=0.0)", "dqo(lam=2.0)", "dro(tau=0.0)"])
def test_options_out_of_range_are_refused_before_a_model_loads(dataflow, tmp_path):
    config = offline_config(tmp_path, "trajectories", dataflow, "run")
    with pytest.raises(InputError, match=dataflow.partition("(")[2].partition("=")[0]):
        Run(build.build(config, ONE), tmp_path)


def test_the_sampler_is_named_where_no_row_says_what_it_did(tmp_path):
    with pytest.raises(InputError, match="no column 'logprobs'"):
        train_on_one(offline_config(tmp_path, "trajectories", "dqo(behaviour='sampler')", "run"))


def test_a_row_of_the_wrong_kind_is_named_before_a_model_loads(tmp_path):
    config = config_of(tmp_path, "preference", model=str(tmp_path))  # not a model's folder
    (tmp_path / "config.json").write_text("{}")
    bad = [{"prompt": "a ", "chosen": 3, "rejected": "b"}]
    (tmp_path / "bad.jsonl").write_text("\n".join(json.dumps(row) for row in bad))
    config.data.train = str(tmp_path / "bad.jsonl")
    with pytest.raises(InputError, match=r"bad.jsonl: row 0 \(line 1\).*chosen"):
        train_on_one(config)


@pytest.mark.slow
def test_a_trained_reward_model_is_a_folder_that_scores_the_same(tmp_path):
    config = config_of(tmp_path, "reward_model", steps=12, export=True)
    config.evaluate.every_steps = 0
    train_on_one(config)
    again = offline_config(tmp_path, "pairs", "reward_model", "again", steps=1)
    again.model = str(tmp_path / "run" / "reward_model")
    again.critic_model = again.model
    first, last = metrics_of(tmp_path / "run")[-1], train_on_one(again)["eval_before"]
    assert last["eval/accuracy"] > 0.9 and last["eval/loss"] < first["loss"] + 0.2


def test_the_batch_of_pairs_has_them_side_by_side(tmp_path):
    setup = build.build(config_of(tmp_path, "preference"), ONE)
    records = [{"item": record["item"]} for record in setup.data.sources[0][:2]]
    batch = offline.offline_rows(setup, records, rows=8)
    assert isinstance(batch, Batch) and batch.tokens.shape == (8, setup.row_tokens)
    item = records[1]["item"]
    for row, ids in ((2, item.chosen_ids), (3, item.rejected_ids)):
        whole = np.concatenate([item.prompt_ids, ids])
        assert np.asarray(batch.tokens[row, : len(whole)]).tolist() == whole.tolist()
    assert not np.asarray(batch.mask[4:]).any() and not np.asarray(batch.segment_ids[4:]).any()


def test_stored_log_probs_in_a_folder_that_cannot_be_made_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    stored = {"offline__reference_logprobs": str(tmp_path / "file" / "stored")}
    with pytest.raises(InputError, match="a folder that can be written: Not a directory"):
        train_on_one(config_of(tmp_path, "preference", steps=1, **stored))
