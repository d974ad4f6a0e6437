"""Runs whose data have images, from a config: SFT and GRPO, a frozen tower, resume, evaluation."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import REPO
from feature_settings import base_config
from PIL import Image
from tiny_run import checkpoint_bytes, flat_bytes, metrics_rows, policy_bytes, train_on_one

from rljax import setup as build
from rljax.config import Config
from rljax.config.flags import load_config_file
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.evaluation.policy import evaluate
from rljax.models.huggingface import save_params
from rljax.policies import load_policy
from rljax.training.run import Run

# (512 worked examples, of which these runs read 32, are seconds of drawing at each start.)
DATA = "drawn_digits(kinds=4, test=8, worked_examples=32)"


def image_config(run_dir, **fields) -> Config:
    """Two supervised steps and one of GRPO on drawn digits."""
    config = Config(dataflow="grpo", steps=1, seed=3, run_dir=str(run_dir))
    config.model = (
        "vision_decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, patch_size=4,"
        " vision_layers=1, vision_embed=32, vision_mlp=32, vision_heads=2, init_std=0.1)"
    )
    config.model_settings.remat, config.model_settings.freeze_vision = "none", True
    config.data.train, config.data.max_prompt_tokens = DATA, 7
    config.sampler.max_response_tokens = 2
    config.sft.steps, config.sft.sequences_per_step, config.sft.optimizer.lr = 2, 16, 3e-3
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 4, 4
    config.batch.sequences_per_optimizer_step = 16
    config.algorithm.kl_in_loss = 0.01  # with a reference
    config.actor_optimizer.lr, config.reward.workers = 1e-3, 1
    config.evaluate.prompts = 8
    config.trackers, config.compilation_cache = (), ""
    for name, value in fields.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    return config


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """The folder of a run of two steps of GRPO."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train_on_one(image_config(folder, steps=2))
    return folder


@pytest.mark.slow
def test_a_resumed_run_is_the_same(two_steps, tmp_path):
    train_on_one(image_config(tmp_path / "half"))
    train_on_one(image_config(tmp_path / "half", steps=2))
    assert metrics_rows(tmp_path / "half")[3:] == metrics_rows(two_steps)[3:]
    assert checkpoint_bytes(tmp_path / "half", 4) == checkpoint_bytes(two_steps, 4)
    assert policy_bytes(tmp_path / "half") == policy_bytes(two_steps)


IN_FLIGHT = dict(
    sampler__slots=10,
    rollouts__max_staleness=2,
    rollouts__ahead=1,
    rollouts__clock="logical(2)",
    evaluate__every_steps=0,
    checkpoint__every_steps=2,
)


@pytest.mark.slow
def test_prompts_with_images_are_sampled_in_flight_and_resumed(tmp_path):
    """What began under older weights goes on: the trainer scores it with the same images as the
    sampler (the weights stand still here), and a checkpoint that has some in flight is resumed."""
    still = dict(IN_FLIGHT, actor_optimizer__lr=1e-12)
    for name, fields in (("still", still), ("whole", IN_FLIGHT)):
        train_on_one(image_config(tmp_path / name, steps=4, **fields))
    rows = metrics_rows(tmp_path / "still")[2:]
    assert max(row["staleness/steps_max"] for row in rows) > 0
    assert all(abs(row["mismatch/abs_logprob_diff_mean"]) < 1e-4 for row in rows)
    train_on_one(image_config(tmp_path / "half", steps=2, **IN_FLIGHT))
    train_on_one(image_config(tmp_path / "half", steps=4, **IN_FLIGHT))
    assert metrics_rows(tmp_path / "half")[-2:] == metrics_rows(tmp_path / "whole")[-2:]
    assert policy_bytes(tmp_path / "half") == policy_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_a_frozen_tower_has_no_state(two_steps):
    saved = checkpoint_bytes(two_steps, 4)
    assert len(saved) > 20 and not [name for name in saved if "vision" in name]
    policy = load_policy(two_steps)
    first = build.initial_params(policy.config, policy.model)
    assert flat_bytes(policy.params["vision"]) == flat_bytes(first["vision"])
    assert flat_bytes(policy.params["layers"]) != flat_bytes(first["layers"])


@pytest.mark.slow
def test_another_tower_learns(tmp_path):
    config = image_config(tmp_path / "free", model_settings__freeze_vision=False)
    with Run(build.build(config, jax.devices()[:1]), tmp_path / "free") as run:
        run.begin(run.phase, build.initial_params(config, run.setup.model))
        before = flat_bytes(run.roles["actor"].state.params["vision"])
        run.step()
        after = flat_bytes(run.roles["actor"].state.params["vision"])
    # (Deepstack is added behind this model's only layer, where nothing attends to it.)
    same = [name for name in before if before[name] == after[name] and "deepstack" not in name]
    assert same == [] and len(before) > 15


@pytest.mark.slow
def test_the_exported_policy_reads_the_same_images(two_steps):
    run, exported = load_policy(two_steps), load_policy(two_steps / "policy")
    here = run.model.config  # remat and freeze_vision are of the run, not of the model
    of_model = dict(remat="full", freeze_vision=False, vision=exported.model.config.vision)
    assert exported.model.config == dataclasses.replace(here, **of_model)
    assert flat_bytes(exported.params) == flat_bytes(run.params)
    prompts, _ = exported.encode(load_prompts(DATA, "test"))
    ready = exported.ready(prompts, max_response_tokens=2)
    with contextlib.closing(exported.player("exact_match()")) as reward:
        found = evaluate(ready, reward, prompts, samples=0, ks=())
    accuracy = json.loads((two_steps / "summary.json").read_text())["accuracy_after"]["value"]
    assert found["greedy_accuracy"]["value"] == accuracy and found["failed_rewards"] == 0


def drawn(folder, count: int, wrong: int) -> list[dict]:
    """Pairs about pictures that are written into the folder; the answer `wrong` further is
    rejected."""
    rows = []
    for record in load_prompts(f"drawn_digits(kinds=4, noise=20, test={count})", "test"):
        name = f"{record['index']}.png"
        Image.fromarray(record["images"][0].pixels()).save(folder / name)
        right = int(record["ground_truth"])
        rows.append(
            {
                "prompt": "<image>?",
                "images": [name],
                "chosen": str(right),
                "rejected": str((right + wrong) % 4),
            }
        )
    return rows


@pytest.mark.slow
def test_dpo_learns_which_digit_is_drawn_from_files(two_steps, tmp_path):
    """From an exported policy. Which of two answers is right is a matter of the picture alone."""
    for name, count in (("train", 512), ("test", 64)):
        (tmp_path / name).mkdir()
        rows = [r for k in (1, 2, 3) for r in drawn(tmp_path / name, count, k)]
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / name / "rows.jsonl").write_text(lines)
    config = Config(dataflow="preference", model=str(two_steps / "policy"), steps=150)
    config.model_settings.remat = "none"
    config.algorithm.preference_loss = "dpo(beta=0.5)"
    train, test = (str(tmp_path / name / "rows.jsonl") for name in ("train", "test"))
    config.data.train, config.data.test = train, test
    config.offline.examples_per_step, config.offline.max_tokens = 64, 10
    config.actor_optimizer.lr, config.evaluate.every_steps = 3e-3, 0
    config.run_dir, config.compilation_cache, config.export = str(tmp_path / "run"), "", False
    config.trackers = ()
    train_on_one(config)
    rows = metrics_rows(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-3)
    assert rows[-1]["loss"] < 0.35, rows[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tiny_model_learns_which_digit_is_drawn(tmp_path, seed):
    config = load_config_file(str(REPO / "configs" / "drawn_digits.py"))
    config.seed, config.run_dir, config.compilation_cache = seed, str(tmp_path), ""
    summary = train_on_one(config)
    before, after = (summary[f"accuracy_{when}"]["value"] for when in ("before", "after"))
    assert after > 0.7 and after > before + 0.15


REFUSED = {"rollouts__replay": "rollouts", "algorithm__collect": "special_token()"}


@pytest.mark.parametrize("field", REFUSED)
def test_what_images_exclude_is_refused_by_its_field(field, tmp_path):
    config = image_config(tmp_path, **{field: REFUSED[field]})
    with pytest.raises(InputError, match=rf"{field.replace('__', '.')} with images in the data"):
        build.build(config, jax.devices()[:1])


@pytest.mark.slow
def test_a_teacher_or_critic_that_reads_no_images_is_refused(two_steps, tmp_path):
    """It would be given the rows of the policy, images among them."""
    text = build.build(base_config(), jax.devices()[:1])
    ids = dict(bos_id=None, eos_ids=(1,), pad_id=0)
    save_params(tmp_path / "text", text.model, text.model.init(jax.random.key(0)), **ids)
    config = image_config(tmp_path, dataflow="on_policy_distil", reward__function="")
    config.algorithm.kl_in_loss = 0.0
    config.teacher_model = str(tmp_path / "text")
    with pytest.raises(InputError, match="teacher_model with images in the data.*reads text"):
        build.build(config, jax.devices()[:1])
    config.teacher_model = str(two_steps / "policy")
    build.build(config, jax.devices()[:1])
    config = image_config(tmp_path, dataflow="ppo", algorithm__advantage="gae()")
    config.critic_model = str(tmp_path / "text")
    with pytest.raises(InputError, match="critic_model with images in the data.*reads text"):
        build.build(config, jax.devices()[:1])


def test_drawn_digits_are_functions_of_their_index():
    one, other = (
        load_prompts("drawn_digits(digits=2, test=4, worked_examples=1)", "test") for _ in range(2)
    )
    assert [r["ground_truth"] for r in one] == [r["ground_truth"] for r in other]
    pixels = [r["images"][0].pixels() for r in one]
    np.testing.assert_array_equal(pixels[0], other[0]["images"][0].pixels())
    assert pixels[0].shape == (16, 32, 3) and not np.array_equal(pixels[0], pixels[1])
    assert all(len(r["ground_truth"]) == 2 for r in one)
