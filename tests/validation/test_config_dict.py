"""A config as an ml_collections.ConfigDict: there and back, from files, from Python, refused."""

import functools
import json
import re
import subprocess
import sys

import ml_collections
import numpy as np
import pytest
from conftest import REPO
from ml_collections import config_dict, config_flags
from test_config_files import another

from rljax import Config, InputError, validate
from rljax.config import as_config, changed_fields, field_names, value_of, with_overrides
from rljax.config.flags import load_config_file, shipped_configs
from rljax.config.from_python import config_from
from rljax.rewards import exact_match

SMALL = {"model": "decoder(layers=1)", "data": {"train": "sort_digits()"}}
SHIPPED = [name for name, file in shipped_configs().items() if "def get_config" in file.read_text()]


def of(**fields) -> Config:
    return Config.from_config_dict(ml_collections.ConfigDict(fields))


def refused(**fields) -> str:
    with pytest.raises(InputError) as error:
        of(**fields)
    return str(error.value)


def in_a_file(folder, *lines: str) -> str:
    path = folder / "mine.py"
    head = ["import ml_collections", "import rljax", "def get_config():"]
    path.write_text("\n".join([*head, *(f"    {line}" for line in lines)]) + "\n")
    return str(path)


# -- there and back


@pytest.mark.parametrize("name", SHIPPED)
def test_every_config_that_ships_comes_back(name):
    made = load_config_file(name)
    as_dict = made.to_config_dict()
    assert as_dict.is_locked and Config.from_config_dict(as_dict) == made
    assert Config.from_config_dict(as_dict).to_config_dict() == as_dict
    frozen = ml_collections.FrozenConfigDict(as_dict)
    assert Config.from_config_dict(frozen) == made


def test_every_field_comes_back_with_its_type():
    made = Config()
    for name in field_names(Config):
        section, _, last = name.rpartition(".")
        node = value_of(made, section)
        kind = type(node).__dataclass_fields__[last].type
        setattr(node, last, another(getattr(node, last), kind))
    back = Config.from_config_dict(made.to_config_dict())
    assert back == made and set(changed_fields(back)) == set(field_names(Config))
    for name in field_names(Config):
        assert type(value_of(back, name)) is type(value_of(made, name)), name


def test_fields_that_are_not_there_or_none_have_their_defaults():
    made = of(steps=None, batch={"epochs": 2, "prompts_per_step": None}, teacher_model=None)
    assert made == with_overrides(Config(), {"batch.epochs": 2}, "test")
    assert of(**{"actor_optimizer": {}}) == Config()


def test_values_are_cast_as_a_config_dict_casts_them():
    made = of(actor_optimizer={"lr": 1}, trackers=["console", "wandb"])
    assert isinstance(made.actor_optimizer.lr, float) and made.trackers == ("console", "wandb")
    config = Config()
    config.actor_optimizer.lr, config.trackers = 1, ["console", "wandb"]
    assert isinstance(config.actor_optimizer.lr, float) and config.trackers == made.trackers


def test_references_and_placeholders_are_resolved():
    values = ml_collections.ConfigDict(dict(seed=3, batch=dict(prompts_per_step=4)))
    prompts = values.batch.get_ref("prompts_per_step")
    values.batch.sequences_per_optimizer_step = prompts * 8
    values.steps = values.get_ref("seed")
    values.profile_steps = (values.get_ref("seed"), 5)
    values.teacher_model = config_dict.placeholder(str)
    values.batch.prompts_per_step, values.seed = 16, 4
    made = Config.from_config_dict(values)
    assert made.batch.sequences_per_optimizer_step == 128 and made.profile_steps == (4, 5)
    assert (made.steps, made.seed, made.teacher_model) == (4, 4, "")


def test_a_required_placeholder_is_named_unless_a_flag_sets_it(
    tmp_path, monkeypatch, rljax_command
):
    unset = config_dict.required_placeholder(int)
    text = refused(steps=unset, batch={"epochs": config_dict.required_placeholder(int)})
    assert "required placeholders are not set: batch.epochs, steps" in text
    path = in_a_file(
        tmp_path,
        "config = ml_collections.ConfigDict()",
        "config.steps = ml_collections.config_dict.required_placeholder(int)",
        "return config",
    )
    monkeypatch.chdir(tmp_path)
    code, _, err = rljax_command("train", path)
    assert code == 2 and "not set: steps" in err and "--config.steps=VALUE" in err
    code, out, _ = rljax_command("train", path, "--config.steps=7", "--print_config=changed")
    assert code == 0 and json.loads(out) == {"steps": 7}
    path = in_a_file(
        tmp_path,
        "config = ml_collections.ConfigDict()",
        "config.steps = ml_collections.config_dict.required_placeholder(int)",
        "return config.lock()",
    )
    with pytest.raises(InputError, match=r"mine.py:6: a required placeholder has no value"):
        load_config_file(path)


def test_functions_become_texts(tmp_path, monkeypatch):
    name = f"{exact_match.__module__}.exact_match"
    assert of(reward={"function": exact_match}).reward.function == name
    with_option = functools.partial(exact_match, ignore_case=True)
    assert of(reward={"function": with_option}).reward.function == f"{name}(ignore_case=True)"
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "with_reward.py"
    path.write_text(
        "import ml_collections\n\n\ndef mine(response):\n    return 1.0\n\n\ndef get_config():\n"
        "    return ml_collections.ConfigDict({'reward': {'function': mine}})\n"
    )
    made = load_config_file("with_reward.py")
    assert made.reward.function == "with_reward.py:mine"
    assert Config.from_config_dict(made.to_config_dict()) == made
    written = {file.name for file in tmp_path.iterdir()} - {"__pycache__"}  # Python's own
    assert written == {path.name}  # nothing is written for it


def test_a_config_dict_that_holds_itself_is_refused():
    values = ml_collections.ConfigDict({"batch": {"epochs": 1}})
    values.batch.batch = values
    with pytest.raises(InputError, match="batch.batch"):
        Config.from_config_dict(values)


# -- refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stpes": 3}, "stpes: no such field; did you mean steps?"),
        ({"batch": {"epoch": 3}}, "batch.epoch: no such field; did you mean batch.epochs?"),
        ({"trainer": {"adv_estimator": "x"}}, "use `algorithm.advantage`"),
        ({"batch": 3}, "batch: a section has no value of its own"),
        ({"batch": {3: 1}}, "batch.3: no such field"),
        ({"batch": {3: 1, "epochs": 2}}, "names of fields are texts"),
        ({"steps": "ten"}, "steps='ten': must be a whole number. Fix: write a whole number"),
        ({"steps": 2.5}, "steps=2.5: must be a whole number"),
        ({"steps": True}, "steps=True: must be a whole number"),
        ({"steps": {"a": 1}}, "must be a whole number"),
        ({"trackers": "console"}, "trackers='console': must be a list of texts"),
        ({"actor_optimizer": {"lr": float("nan")}}, "actor_optimizer.lr=nan: must be a finite"),
        ({"model": b"x"}, "model=b'x': must be a text"),
        (
            {"model_settings": {"dtype": np.float32}},
            "dtype=<class 'numpy.float32'>: must be a text",
        ),
        ({"reward": {"function": lambda x: x}}, "reward.function: the source of <lambda>"),
    ],
)
def test_what_no_config_can_hold_names_its_field(fields, says):
    assert says in refused(**fields)


def test_a_reference_that_cannot_be_computed_names_its_field():
    rows = config_dict.FieldReference(4)
    values = ml_collections.ConfigDict({"batch": {"prompts_per_step": 8 // rows}})
    rows.set(0)
    with pytest.raises(InputError, match="batch.prompts_per_step; ZeroDivisionError: .*Fix: "):
        Config.from_config_dict(values)


def test_all_wrong_types_are_listed_and_what_is_out_of_range_as_of_a_config():
    assert refused(steps="9", seed=1.5).count("must be") == 2
    values = {"actor_optimizer": {"lr": -1.0}, **SMALL}
    with pytest.raises(InputError) as of_dict:
        validate(ml_collections.ConfigDict(values))
    config = Config(model="decoder(layers=1)")
    config.data.train, config.actor_optimizer.lr = "sort_digits()", -1.0
    with pytest.raises(InputError) as of_config:
        validate(config)
    assert str(of_dict.value) == str(of_config.value) and "actor_optimizer.lr=-1" in str(
        of_dict.value
    )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("steps", "ten", "Config.steps: got 'ten'; must be a whole number"),
        ("steps", 1.5, "Config.steps: got 1.5; must be a whole number"),
        ("steps", True, "must be a whole number"),
        ("steps", None, "Config.steps=None; must be a whole number"),
        ("seed", 2**31, "must be below 2147483648"),
        ("export", 1, "must be true or false"),
        ("trackers", "console", "must be a list of texts"),
        ("trackers", (1,), "must be a list of texts"),
        ("batch", None, "must be a BatchConfig"),
        ("batch", {"epochs": 2}, "must be a BatchConfig"),
        ("report_every_minutes", float("inf"), "must be a finite number"),
    ],
)
def test_a_config_is_typed_where_it_is_written(name, value, says):
    for action in (lambda: setattr(Config(), name, value), lambda: Config(**{name: value})):
        with pytest.raises(InputError) as error:
            action()
        assert says in str(error.value) and "Fix: " in str(error.value)


# -- where configs enter


def test_a_file_may_return_either(tmp_path):
    path = in_a_file(
        tmp_path, "return ml_collections.ConfigDict({'steps': 3, 'batch': {'epochs': 2}})"
    )
    assert changed_fields(load_config_file(path)) == {"steps": 3, "batch.epochs": 2}
    path = in_a_file(
        tmp_path,
        "config = rljax.Config().to_config_dict()",
        "config.batch.epochs = 2",
        "return config",
    )
    assert changed_fields(load_config_file(path)) == {"batch.epochs": 2}
    with pytest.raises(InputError, match="rljax.config.Config or ml_collections.ConfigDict: got"):
        load_config_file(in_a_file(tmp_path, "return {'steps': 3}"))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["return ml_collections.ConfigDict({'stpes': 3})"], "did you mean steps?"),
        (["return ml_collections.ConfigDict({'steps': 'x'})"], "steps='x': must be a whole number"),
        (
            ["config = rljax.Config().to_config_dict()", "config.stpes = 3", "return config"],
            "mine.py:5: stpes: no such field; did you mean steps?",
        ),
        (
            ["config = rljax.Config().to_config_dict()", "config.steps = 'x'", "return config"],
            "mine.py:5: get_config('') failed; TypeError: Could not override field 'steps'",
        ),
        (["config = rljax.Config(steps='x')", "return config"], "mine.py:4: Config.steps: got 'x'"),
    ],
)
def test_a_mistake_in_a_file_is_a_message_and_exit_code_2(lines, says, tmp_path, rljax_command):
    code, out, err = rljax_command("train", in_a_file(tmp_path, *lines))
    assert (code, out) == (2, "") and says in err and "Fix: " in err and "Traceback" not in err


def test_python_takes_either():
    values = ml_collections.ConfigDict(SMALL)
    assert validate(values.lock()) == validate(as_config(values, "test"))
    made = config_from(values, None, None, None, {"steps": 3})
    assert (made.model, made.steps) == ("decoder(layers=1)", 3)
    assert config_from(ml_collections.ConfigDict(), None, None, None, {}) == Config()
    with pytest.raises(InputError, match="rljax.train: the ConfigDict has unknown fields"):
        config_from(ml_collections.ConfigDict({"stpes": 3}), None, None, None, {})


def test_config_flags_of_a_script_read_a_config_as_they_read_others():
    """DEFINE_config_dataclass and DEFINE_config_dict on what is ours."""
    from absl import flags

    arguments = [
        "",
        "--config.batch.epochs=3",
        "--config.actor_optimizer.lr=1",
        "--noconfig.export",
    ]
    for define, config in (
        (config_flags.DEFINE_config_dataclass, Config()),
        (config_flags.DEFINE_config_dict, Config().to_config_dict()),
    ):
        into = flags.FlagValues()
        define("config", config, flag_values=into, sys_argv=arguments)
        into(arguments)
        made = as_config(into["config"].value, "test")
        expected = {"batch.epochs": 3, "actor_optimizer.lr": 1.0, "export": False}
        assert changed_fields(made) == expected
    with pytest.raises(flags.Error):
        into(["", "--config.batch.epochs=x"])


# -- what is not imported, and the page


def test_nothing_imports_the_library_before_a_config_needs_it():
    code = (
        "import sys, rljax, rljax.config.flags\n"
        "rljax.config.flags.load_config_file('quickstart')\n"
        "print([m for m in ('absl', 'ml_collections') if m in sys.modules])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True
    )
    assert out.stdout.strip() == "[]"


def test_variants_may_have_a_default_or_none(tmp_path):
    """As ml_collections hands them on: get_config("a"), and an error where one is missing."""
    body = "    return ConfigDict({'steps': {'a': 1, 'b': 2}.get(size, 1)})"
    for name, head in (("some", "size='a'"), ("always", "size")):
        text = f"from ml_collections import ConfigDict\ndef get_config({head}):\n{body}\n"
        (tmp_path / f"{name}.py").write_text(text)
    some, always = (str(tmp_path / f"{name}.py") for name in ("some", "always"))
    assert load_config_file(f"{some}:a") == load_config_file(some)
    assert load_config_file(f"{always}:a").steps == 1
    assert [load_config_file(f"{file}:b").steps for file in (some, always)] == [2, 2]
    with pytest.raises(InputError, match="has no variant 'c'"):
        load_config_file(f"{some}:c")
    with pytest.raises(InputError, match="without a default.*Fix: --config=.*always.py:VARIANT"):
        load_config_file(always)


def test_data_of_strangers_makes_no_config_dict(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: !!python/object:ml_collections.config_dict.config_dict.ConfigDict {}\n")
    with pytest.raises(InputError, match="has a tag of YAML"):
        load_config_file(str(path))


def test_the_example_of_the_guide_runs(tmp_path, monkeypatch, rljax_command):
    page = (REPO / "docs/guides/command.md").read_text(encoding="utf-8")
    for name in ("my_digits", "train_digits"):
        (block,) = re.findall(
            rf"^```python\n(# {name}\.py\n.*?)^```", page, re.DOTALL | re.MULTILINE
        )
        (tmp_path / f"{name}.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    made = load_config_file("my_digits.py:tiny")
    assert made.reward.function == "my_digits.py:sorted_digits"
    assert made.batch.sequences_per_optimizer_step == 4 * 8
    flags = ("--config.actor_optimizer.lr=3e-3", "--config.run_dir=runs/digits")
    flags += ("--config.model=decoder(layers=1)",)
    code, out, err = rljax_command("train", "my_digits.py:tiny", *flags, "--dry_run")
    assert code == 0, err
    code, out, err = rljax_command("config", "show", "my_digits.py:tiny", *flags)
    assert code == 0 and re.search(r"^actor_optimizer\.lr +0\.003\b", out, re.MULTILINE), err
    code = subprocess.run(
        [sys.executable, "train_digits.py", "--config.steps=3"],
        env={"PYTHONPATH": str(REPO), "PATH": "", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert code.returncode == 0, code.stderr
