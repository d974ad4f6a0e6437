"""Names that people bring from other trainers: every one of them leads to something that is there,
and a name that resembles nothing gets no suggestion."""

import importlib
import inspect
import re
import typing

import pytest

import rljax
from rljax.components import Component, is_own_code, ranges_of, resolve
from rljax.config import NAMESPACES, Config, with_overrides
from rljax.config.checks import check_bare_name, components_of
from rljax.config.flags import config_flag, config_flags, load_config_file, shipped_configs
from rljax.config.names import field_names, nearest_fields, unknown_field
from rljax.config.schema import FIELDS as DECLARED
from rljax.config.texts import value_of_text, with_texts
from rljax.errors import InputError
from rljax.suggest import FIELDS, VALUES, elsewhere, near_names, other_value
from rljax.validation.problems import Problems

KNOWN = field_names(Config)


def from_flags(*arguments: str) -> Config:
    path, texts, _ = config_flags(arguments)
    config = load_config_file(path) if path else Config()
    return with_texts(config, texts, "these flags cannot be used", "--config.")


def check_target(target: str) -> None:
    """A field, a field with a value that it takes, or a config that ships."""
    if target.startswith("presets/"):
        assert target in shipped_configs(), target
        return
    field, equals, text = target.partition("=")
    assert field in KNOWN, target
    if not equals:
        return
    value = value_of_text(text.strip('"'), DECLARED[field].kind)
    for one in value if isinstance(value, tuple) else (value,):
        stage = DECLARED[field].component
        if stage and not (stage == "tracker" and one == "console"):
            assert not is_own_code(one.partition("(")[0])
            assert isinstance(resolve(one, NAMESPACES[stage]), Component)


def targets_of(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_table_is_large_and_every_target_of_it_exists():
    assert len(FIELDS) >= 80
    for name, text in FIELDS.items():
        targets = targets_of(text)
        assert targets or text.startswith("nothing: "), name
        for target in targets:
            check_target(target)


def test_of_a_dotted_name_the_longest_end_counts():
    assert elsewhere("critic.model.path") == FIELDS["critic.model.path"] != FIELDS["model.path"]
    assert elsewhere("actor_rollout_ref.model.path") == FIELDS["model.path"]
    name = "actor_rollout_ref.rollout.val_kwargs.n"
    assert elsewhere(name) == FIELDS["val_kwargs.n"] != FIELDS["n"]


@pytest.mark.parametrize("field", VALUES)
def test_every_target_of_a_value_exists(field):
    for value in VALUES[field]:
        text = other_value(field, value)
        assert "{" not in text and targets_of(text), value
        for target in targets_of(text):
            check_target(target)
        known = components_of(NAMESPACES[DECLARED[field].component])
        assert value not in known, "it is a component here: nothing would ask for this line"


# (name, what is said of it): of GRPOConfig, verl's overrides, Tunix and OpenRLHF.
BROUGHT = [
    ("num_generations", "`batch.samples_per_prompt`"),
    ("max_completion_length", "`sampler.max_response_tokens`"),
    ("beta", "`algorithm.kl_in_loss`"),
    ("rewards", "`evaluate.reward`"),
    ("num_train_epochs", "`steps`"),
    ("epsilon_high", "ppo_clip("),
    ("loss_type", "`presets/dapo`"),
    ("per_device_train_batch_size", "`batch.prompts_per_step`"),
    ("gradient_accumulation_steps", "nothing stands for it"),
    ("scale_rewards", "group_relative(std="),
    ("report_to", "`trackers`"),
    ("save_steps", "`checkpoint.every_steps`"),
    ("actor_rollout_ref.rollout.n", "`batch.samples_per_prompt`"),
    ("data.train_batch_size", "`batch.prompts_per_step`"),
    ("algorithm.kl_ctrl.kl_coef", "`algorithm.kl_in_reward`"),
    ("trainer.total_epochs", "`steps`"),
    ("num-generations", "`batch.samples_per_prompt`"),
    ("+actor_rollout_ref.actor.clip_ratio_high", "ppo_clip("),
    ("total_generation_steps", "`sampler.max_response_tokens`"),
    ("wandb_project", "wandb(project="),
    ("num_generation", "`batch.samples_per_prompt`"),  # misspelt
    ("bf16", "`model_settings.dtype=bfloat16`"),
    ("n_samples_per_prompt", "`batch.samples_per_prompt`"),
    ("reward_model.enable", "`reward.model`"),
    ("use_lora", "`lora.rank`"),
    ("n_epochs", "`steps`: a run"),
    ("rewards", "`reward.function`"),
    ("missing_eos_penalty", "a response that is cut is not fined"),
    ("processing_class", "`tokenizer`"),
    ("reward_function", "`reward.function`"),
    ("grad_accum", "nothing stands for it"),
    ("kl_penalty_coef", "`algorithm.kl_in_loss`"),
    ("learning_rate_critic", "`critic_optimizer.lr`"),
    ("save_dir", "`run_dir`"),
    ("validation_file", "`data.test`"),
    ("val_batch_size", "nothing stands for it: evaluation"),
    ("mesh_shape", "`mesh.data`"),
    ("reference_model", "nothing stands for it: the reference"),
    ("stop_sequences", "`sampler.stop_strings`"),
    ("generation_kwargs", "`sampler.temperature`"),
]


@pytest.mark.parametrize(("name", "says"), BROUGHT)
def test_a_name_of_another_trainer_is_answered_in_flags_yaml_and_python(name, says, tmp_path):
    flagged = says.replace("`", "`--config.", 1).replace("--config.presets", "--config=presets")
    flagged = flagged if says.startswith("`") else says
    with pytest.raises(InputError) as error:
        from_flags(f"--config.{name}=1")
    assert flagged in str(error.value)
    file = tmp_path / "mine.yaml"
    file.write_text(f'"{name}": 1\n')
    for call in (lambda: from_flags(f"--config={file}"), lambda: rljax.train(**{name: 1})):
        with pytest.raises(InputError) as error:
            call()
        assert says in str(error.value).replace("`reward=`", "`reward.function`")
    if name.isidentifier():
        prefixed = says.replace("`", "`Config.", 1).replace("Config.presets", "presets")
        with pytest.raises(InputError) as error:
            Config(**{name: 1})
        assert (prefixed if says.startswith("`") else says) in str(error.value)


def test_all_unknown_arguments_of_a_call_are_named_at_once():
    with pytest.raises(InputError) as error:
        rljax.train(reward_funcs=[len], train_dataset=[], args=object(), steps=2, nothing_known=1)
    assert str(error.value).splitlines()[:5] == [
        "rljax.train: these are no arguments:",
        "  reward_funcs: no such field; use `reward=`",
        "  train_dataset: no such field; use `data=`",
        "  args: no such field; nothing stands for it: every setting is a field of its own, such "
        "as `steps`, `actor_optimizer.lr` and `batch.samples_per_prompt`",
        "  nothing_known: no such field",
    ]
    for name, value, says in (
        ("reward", 3, "a function, or the name of one"),
        ("data", 7, "must be rows ("),
        ("data", True, "must be rows ("),
    ):
        with pytest.raises(InputError, match=f"{name}.*{re.escape(says)}"):
            rljax.train(**{name: value})
    with pytest.raises(InputError, match=r"did you mean Config.steps\?.*rljax.Config\(\)"):
        Config(step=3)


@pytest.mark.parametrize(
    "name",
    [
        "foo_bar",
        "reward_threshold",
        "min_response_tokens",
        "top_n",
        "n_agents",
        "use_rope",
        "checkpoint_every",
        "warm",
        "x",
        "max_gpus",
        "entropy_floor",
        "profiler.enable",
        "enable",
        "critic.enabled",
    ],
)
def test_what_resembles_nothing_gets_no_suggestion(name):
    said = unknown_field(name, KNOWN)
    assert said == f"{name}: no such field" or name == "warm" and "warmup" in said, said


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("stpes", "steps"),
        ("step", "steps"),
        ("seeed", "seed"),
        ("batch.sample_per_prompt", "batch.samples_per_prompt"),
        ("modle", "model"),
        ("sampler.maxresponsetokens", "sampler.max_response_tokens"),
        ("temperatur", "sampler.temperature"),
    ],
)
def test_a_misspelling_is_found(typed, meant):
    assert nearest_fields(typed, KNOWN) == [meant]


def test_words_are_compared_one_by_one():
    assert near_names("min_tokens", ["max_tokens"]) == []
    assert near_names("dpo", ["ppo", "xpo"]) == [] and near_names("dop", ["dpo"]) == ["dpo"]
    assert near_names("gpro", ["grpo", "gspo"]) == ["grpo"]
    assert near_names("temp", ["template_variables"]) == []


def test_flags_of_the_config_without_config():
    assert "--config.steps=VALUE" in config_flag("steps")
    assert "--config.actor_optimizer.lr=VALUE" in config_flag("lr")
    assert "--config.model=VALUE" in config_flag("model")
    assert "`--config.batch.samples_per_prompt`" in config_flag("num-generations")
    assert config_flag("no_such_thing_at_all") == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config.steps=1", "--config.steps=2"],
        ["--config=a", "--config=b"],
        ["--noconfig.export", "--config.export=true"],
    ],
)
def test_a_flag_that_is_given_twice_is_refused(arguments):
    with pytest.raises(InputError, match="is given twice"):
        config_flags(arguments)


def test_a_component_of_another_stage_or_trainer_names_its_place():
    for name in components_of(NAMESPACES["preference_loss"]):
        if name not in components_of(NAMESPACES["dataflow"]) and name in VALUES["dataflow"]:
            assert f'`algorithm.preference_loss="{name}()"`' in other_value("dataflow", name)
    problems = Problems()
    assert not check_bare_name("dataflow", "kl_cov(fraction=0.1)", problems)
    assert 'algorithm.policy_loss="kl_cov()"' in problems[0]


@pytest.mark.parametrize("kind", ["empty", "without", "run", "unfinished", "model"])
def test_a_folder_that_holds_no_model_says_what_it_holds(kind, tmp_path):
    if kind == "without":
        (tmp_path / "notes.txt").write_text("x")
    if kind in ("run", "unfinished"):
        (tmp_path / "starts.jsonl").write_text("{}\n")
        (tmp_path / "config.json").write_text("{}")
    if kind == "run":
        (tmp_path / "policy").mkdir()
    if kind == "model":
        (tmp_path / "config.json").write_text("{}")
    says = {
        "empty": "is an empty folder",
        "without": "without a config.json",
        "model": "",
        "run": f"its model is {tmp_path / 'policy'}",
        "unfinished": "is a run, not a model",
    }[kind]
    from rljax.config.checks import check_paths

    for field in ("model", "teacher_model"):
        problems = Problems()
        check_paths(with_overrides(Config(), {field: str(tmp_path)}, "test"), problems)
        assert [says in problem for problem in problems] == ([True] if says else []), problems


# Options of a number that may be any number: what a score is moved by, limits of scores.
ANY_NUMBER = {
    "baseline",
    "shift",
    "scale",
    "low",
    "high",
    "tau",
    "unfinished",
    "correct_at",
    "pass_above",
    "min_score",
    "log_z",
    "gradient_norm",
    "center",
}
STAGES = (
    "dataflow",
    "advantage",
    "policy_loss",
    "value_loss",
    "correction",
    "collect",
    "schedule",
    "filter",
    "shaping",
    "process_reward",
    "constrained",
)


def test_every_number_of_the_algorithm_has_a_range():
    """Or is one that may be any number; -1e9 is then no mistake that could be seen."""
    seen = 0
    for stage in STAGES:
        module = importlib.import_module(NAMESPACES[stage])
        for name in components_of(NAMESPACES[stage]):
            function = getattr(module, name)
            for option in inspect.signature(function).parameters.values():
                kind = option.annotation
                inner = [kind, *typing.get_args(kind)]
                number = float in inner or any(map(ranges_of, inner))
                listed = typing.get_origin(kind) is tuple
                if option.kind is not option.KEYWORD_ONLY or listed or not number:
                    continue
                if option.name in ANY_NUMBER:
                    continue
                seen += 1
                assert ranges_of(kind), f"{stage} {name}({option.name})"
                with pytest.raises(InputError, match="must be"):
                    resolve(f"{name}({option.name}=-1e9)", NAMESPACES[stage])
    assert seen > 60


def test_an_unknown_name_of_nothing_is_no_name_of_others():
    assert elsewhere("steps") == "" and elsewhere("lr") == ""
