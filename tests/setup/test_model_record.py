"""model.json: a run that goes on reads the very weights of the models that no checkpoint holds."""

import dataclasses
import json
import shutil

import jax
import pytest
from test_same_ids import READERS, config_of, folders  # noqa: F401

from rljax import setup as build
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import load_config, save_params
from rljax.models.model import Model
from rljax.setup.weights import check_weights

_GUIDED = dict(algorithm__collect="guided_search()")
# {field: (head of the model that it names, the fields of a config)}
FROZEN = {
    "reward.model": READERS["reward.model"],
    "reward.process_model": READERS["reward.process_model"],
    "reward.judge_model": ("lm", lambda f: dict(reward__judge_model=f)),
    "teacher_model": READERS["teacher_model"],
    "teachers": (
        "lm",
        lambda f: dict(dataflow="on_policy_distil", teachers=(f,), teacher_sources=("rows",)),
    ),
    "critic_model": ("scalar", lambda f: dict(dataflow="ppo", critic_model=f, lora__rank=2)),
    "roles": ("scalar", lambda f: dict(roles=(f"guide=value_model(folder='{f}')",), **_GUIDED)),
}


def write_weights(folder, head: str, seed: int):
    """Writes a model of the same config.json again, as if it had been trained again."""
    model = Model(load_config(folder), make_mesh(devices=jax.devices()[:1]), head)
    save_params(folder, model, model.init(jax.random.key(seed)), eos_ids=(1,), pad_id=0)


@pytest.mark.parametrize("field", FROZEN)
def test_other_weights_of_a_frozen_model_are_noticed_by_a_resume(
    folders,  # noqa: F811
    field,
    tmp_path,
    caplog,
):
    head, fields = FROZEN[field]
    folder, record = tmp_path / "model", tmp_path / "model.json"
    shutil.copytree(folders[f"same-{head}"], folder)
    setup = build.build(config_of(folders, tmp_path, **fields(f"{folder}/")), jax.devices()[:1])
    build.record_models(setup, record)
    build.check_models(setup, record)
    write_weights(folder, head, seed=0)
    build.check_models(setup, record)  # written again, and the same
    write_weights(folder, head, seed=1)
    caplog.clear()
    expected = rf"weights of {field}=.*model.safetensors: another SHA-256 .*allow_changed={field}$"
    with pytest.raises(InputError, match=expected):
        build.check_models(setup, record)
    assert caplog.text == ""
    setup.config.checkpoint.allow_changed = (field,)
    build.check_models(setup, record)
    assert caplog.text.count(f"the weights of {field}=") == 1
    setup.config.checkpoint.allow_changed = ()
    content = json.loads(record.read_text())
    for entry in (None, 3, {field: 3}, {field: [3]}, {field: [{"files": 3}]}):
        record.write_text(json.dumps({**content, "frozen": entry}))
        build.check_models(setup, record)  # of an earlier version, or a stranger's


def test_what_a_checkpoint_holds_is_not_compared(folders, tmp_path):  # noqa: F811
    """A critic of which every weight is trained goes on with its own."""
    folder, record = tmp_path / "model", tmp_path / "model.json"
    shutil.copytree(folders["same-scalar"], folder)
    config = config_of(folders, tmp_path, dataflow="ppo", critic_model=f"{folder}/")
    setup = build.build(config, jax.devices()[:1])
    build.record_models(setup, record)
    write_weights(folder, "scalar", seed=1)
    build.check_models(setup, record)
    assert "frozen" not in json.loads(record.read_text())


def test_the_spread_of_random_weights_is_no_part_of_a_loaded_model(
    folders,  # noqa: F811
    tmp_path,
):
    folder, record = tmp_path / "model", tmp_path / "model.json"
    shutil.copytree(folders["same-lm"], folder)
    config = config_of(folders, tmp_path, dataflow="on_policy_distil", teacher_model=f"{folder}/")
    setup = build.build(config, jax.devices()[:1])
    build.record_models(setup, record)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"initializer_range": 0.5}))
    build.check_models(setup, record)
    path.write_text(json.dumps(content | {"rms_norm_eps": 0.5}))
    with pytest.raises(InputError, match="rms_norm_eps=0.5"):
        build.check_models(setup, record)


@pytest.mark.parametrize("field", ["reward.model", "reward.cost_model", "reward.process_model"])
def test_a_language_model_is_no_scorer(folders, field, tmp_path):  # noqa: F811
    config = config_of(folders, tmp_path)
    setattr(config.reward, field.removeprefix("reward."), f"{folders['same-scalar']}/")
    model = build.load_model(config, load_tokenizer(folders["same-lm"]))
    check_weights(config, model)
    setattr(config.reward, field.removeprefix("reward."), f"{folders['same-lm']}/")
    with pytest.raises(InputError, match=f"{field}=.* is a language model; it has no score.weight"):
        check_weights(config, model)


def test_a_language_model_scores_nothing_untrained_and_warns_as_a_critic(
    folders,  # noqa: F811
    tmp_path,
    caplog,
):
    folder, mesh = str(folders["same-lm"]), make_mesh(devices=jax.devices()[:1])
    with pytest.raises(InputError, match="the reward model=.* is a language model"):
        build.load_scalar("the reward model", folder, load_config(folder), mesh)
    config = config_of(folders, tmp_path, dataflow="ppo", critic_model=f"{folder}/")
    setup = build.build(config, jax.devices()[:1])
    inputs = build.RoleInputs("critic", setup, setup.main, {})
    caplog.clear()
    build.role_table(config)["critic"].make(inputs)
    assert caplog.text.count("is a language model (it has no score.weight): its scores start") == 1
    guided = dataclasses.replace(config, roles=(f"guide=value_model(folder='{folder}/')",))
    inputs = dataclasses.replace(inputs, name="guide")
    with pytest.raises(InputError, match="role guide=.* is a language model"):
        build.role_table(guided)["guide"].make(inputs)
