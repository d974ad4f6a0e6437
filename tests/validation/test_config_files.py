"""Configs as files and flags: no experiment runs other than the one that is written."""

import copy
import dataclasses
import json
import pickle
import re
import typing

import pytest
import yaml

from rljax.config import (
    Config,
    OptimizerConfig,
    changed_fields,
    field_names,
    schema,
    to_dict,
    value_of,
    with_overrides,
)
from rljax.config.flags import config_flags, load_config_file
from rljax.config.texts import with_texts
from rljax.errors import InputError
from rljax.experiments.sweep import make_members

SECTIONS = [kind for kind in vars(schema).values() if dataclasses.is_dataclass(kind)]


def misspelt(name: str) -> str:
    """The name with two letters exchanged, or one more where they are equal."""
    other = name[:-2] + name[-1] + name[-2]
    return other if other != name else name + name[-1]


# -- unknown fields


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_a_name_that_is_no_field_is_refused_in_every_section(kind):
    node = kind()
    for field in dataclasses.fields(kind):
        wrong = misspelt(field.name)
        if wrong in kind.__dataclass_fields__:
            continue
        for action in (
            lambda wrong=wrong: setattr(node, wrong, 1),
            lambda wrong=wrong: kind(**{wrong: 1}),
            lambda wrong=wrong: dataclasses.replace(node, **{wrong: 1}),
            lambda wrong=wrong: getattr(node, wrong),
        ):
            with pytest.raises(InputError, match=f"{kind.__name__}.{wrong}: no such field"):
                action()
    assert node == kind() and not hasattr(node, "nothing_like_it")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("config.batch.sample_per_prompt = 99", "BatchConfig.samples_per_prompt"),
        ("config.actor_optimiser = 'x'", "Config.actor_optimizer"),
        ("config.algorithm.kl_coef = 0.5", "algorithm.kl_in_loss"),
        ("config.lr = 1e-3", "Config.actor_optimizer.lr"),
        ("config.bacth.epochs = 2", "Config.batch"),
        ("config.sft.optimizer.learning_rate = 1", "actor_optimizer.lr"),
        ("config.model_settings = OptimizerConfig(shedule='linear')", "OptimizerConfig.schedule"),
        ("config.actor_optimizer.warmup = 3", "OptimizerConfig.warmup_steps"),
    ],
)
def test_a_config_file_with_an_unknown_field_names_line_and_field(line, meant, tmp_path):
    text = "from rljax.config import Config, OptimizerConfig\n\n\ndef get_config():\n"
    path = tmp_path / "mine.py"
    path.write_text(f"{text}    config = Config()\n    {line}\n    return config\n")
    with pytest.raises(InputError) as error:
        load_config_file(str(path))
    assert f"{path}:6: " in str(error.value) and meant in str(error.value)


def test_what_python_does_with_dataclasses_goes_on():
    config = with_overrides(Config(), {"batch.epochs": 3, "trackers": ("wandb",)}, "x")
    config.actor_optimizer = OptimizerConfig(lr=1.0)
    for other in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and other.batch.epochs == 3
    assert dataclasses.asdict(config)["batch"]["epochs"] == 3
    assert dataclasses.replace(config, seed=2).seed == 2
    assert changed_fields(config) == {
        "trackers": ("wandb",),
        "batch.epochs": 3,
        "actor_optimizer.lr": 1.0,
    }


def test_a_sweep_and_its_members_refuse_unknown_fields(tmp_path):
    def members():
        config = Config()
        config.batch.epoch = 2
        yield {"seed": 1}

    with pytest.raises(InputError, match="BatchConfig.epoch: no such field; did you mean"):
        make_members(Config(), members(), tmp_path, "x.py")


# -- JSON and YAML


def another(value, kind):
    """A value of a field that is not its default."""
    if typing.get_origin(kind) is tuple:
        return tuple(another(None, typing.get_args(kind)[0]) for _ in range(2))
    if kind is bool:
        return not value
    return {int: 7, float: 2.5e-07, str: "mixture(a='x, y', b=(1, 2))"}[kind]


@pytest.fixture(scope="module")
def changed() -> Config:
    """A config none of whose fields has its default."""
    config = Config()
    for name in field_names(Config):
        section, _, last = name.rpartition(".")
        node = value_of(config, section)
        kind = type(node).__dataclass_fields__[last].type
        setattr(node, last, another(getattr(node, last), kind))
    assert set(changed_fields(config)) == set(field_names(Config))
    return config


@pytest.mark.parametrize("ending", ["json", "yaml", "yml"])
def test_every_field_survives_a_file(changed, ending, tmp_path):
    path = tmp_path / f"config.{ending}"
    write = json.dumps if ending == "json" else yaml.safe_dump
    path.write_text(write(to_dict(changed)))
    assert load_config_file(str(path)) == changed
    path.write_text(write({"batch": {"epochs": 2}}))
    assert changed_fields(load_config_file(str(path))) == {"batch.epochs": 2}


def test_yaml_is_read_by_the_types_of_the_fields(tmp_path):
    """YAML itself takes 1e-6 for a text, `on` for true and 010 for 8."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "seed: 010\nsampler: {head_in_float32: on, stop_strings: [a, '1']}\nexport: false\n"
        "actor_optimizer:\n  lr: 1e-6\n  beta2: 1\ntrackers: console, wandb\nmodel:\n"
    )
    config = load_config_file(str(path))
    assert (config.seed, config.export, config.trackers) == (10, False, ("console", "wandb"))
    assert config.sampler.head_in_float32 == "on" and config.sampler.stop_strings == ("a", "1")
    assert (config.actor_optimizer.lr, config.actor_optimizer.beta2) == (1e-6, 1.0)


FILES = {
    "x.json": [
        ("{", "is not valid JSON"),
        ("[]", "is no config; it holds"),
        ('{"steps": 1, "steps": 2}', "'steps' stands twice"),
        ('{"batch": {"epochs": 1}, "batch.epochs": 2}', "'batch.epochs' stands twice"),
        ('{"stpes": 1}', "stpes: no such field; did you mean steps"),
        ('{"batch": {"epoch": 1}}', "batch.epoch: no such field; did you mean batch.epochs"),
        ('{"batch": 3}', "batch: a section has no value"),
        ("[" * 100_000, "nested too deeply"),
        ("\xff", "x.json"),
    ],
    "x.yaml": [
        ("a: [", "is not YAML"),
        ("- a", "is no config; it holds"),
        ("", "is no config; it holds"),
        ("steps: 1\nsteps: 2", "'steps' stands twice"),
        ("stpes: 1", "stpes: no such field; did you mean steps"),
        ("steps: many", "steps=many: must be a whole number"),
        ("steps: [1]", "must be a whole number"),
        ("trackers: {a: b}", "trackers"),
        ("? [a]\n: 1", "is not YAML"),
        ("a: &a [*a]", "x.yaml"),
        ("!!python/object/apply:os.system ['true']", "x.yaml"),
        ("{" * 20_000, "x.yaml"),
        (
            "b: &b [x, x]\n"
            + "".join(
                f"{c}: &{c} [*{p}, *{p}]\n"
                for p, c in zip("bcdefghijklmnopqrstuvw", "cdefghijklmnopqrstuvwx", strict=True)
            )
            + "steps: *x",
            "values where its aliases stand",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [(name, text, says) for name, cases in FILES.items() for text, says in cases],
    ids=lambda x: repr(x[:30]),
)
def test_files_that_hold_no_config(name, text, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as error:
        load_config_file(str(path))
    assert says in str(error.value) and len(str(error.value)) < 5000


# -- flags


def flags(*arguments: str, base: Config | None = None) -> Config:
    _, texts, others = config_flags(arguments)
    assert others == []
    return with_texts(base or Config(), texts, "flags", "--config.")


def test_every_field_can_be_written_as_a_flag(changed):
    lists = {}
    for name in field_names(Config):
        value = value_of(changed, name)
        if isinstance(value, tuple):
            lists[name] = f"--config.{name}={','.join(map(str, value))}"
    plain = [f"--config.{n}={value_of(changed, n)}" for n in field_names(Config)]
    commas = [lists.get(flag.partition("=")[0].removeprefix("--config."), flag) for flag in plain]
    assert len(lists) > 10 and flags(*plain) == flags(*commas) == changed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ()),
        ("()", ()),
        ("[]", ()),
        ("console", ("console",)),
        ("console,", ("console",)),
        ("a, b ,c", ("a", "b", "c")),
        ("('a', 'b,c')", ("a", "b,c")),
        ("['a']", ("a",)),
        ("'a','b'", ("a", "b")),
        ("mixture(a=1, b=2)", ("mixture(a=1, b=2)",)),
        (
            "mixture(a=(1, 2), b='x, )'), f([1, {2: 3}]),g",
            ("mixture(a=(1, 2), b='x, )')", "f([1, {2: 3}])", "g"),
        ),
        ("f(a='it\\'s, so'), g", ("f(a='it\\'s, so')", "g")),
        ("my.module.f(x='(', y=1),g()", ("my.module.f(x='(', y=1)", "g()")),
        ("don't,stop", ("don't", "stop")),
        (" END", (" END",)),
        ("[</s>,<|end|>]", ("</s>", "<|end|>")),  # ["</s>","<|end|>"], which a shell has read
        ("[ a , b ,]", ("a", "b")),
        ("(A,B)", ("A", "B")),
        ("[a,]", ("a",)),
        ("[f(a=1, b=[2, 3]), g()]", ("f(a=1, b=[2, 3])", "g()")),
        ('["</s>",<|end|>]', ("</s>", "<|end|>")),
        ("['a,b',\"c]\",d]", ("a,b", "c]", "d")),
        ("'a,b',c", ("a,b", "c")),
        ("[:),:(]", (":)", ":(")),
        ("[/INST],[END]", ("[/INST]", "[END]")),
        ("[[INST],[/INST]]", ("[INST]", "[/INST]")),
        ("('[END]',)", ("[END]",)),
        ("a,[b]", ("a", "[b]")),
        ("[", ("[",)),
        ("[/INST] x", ("[/INST] x",)),
        ("],}", ("]", "}")),
    ],
)
def test_lists_are_written_with_commas(text, value):
    assert flags(f"--config.algorithm.filters={text}").algorithm.filters == value
    assert flags("--config.algorithm.filters", text).algorithm.filters == value


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[END]", "a list of one is written END, a text in brackets ('[END]',)"),
        ("(x=1)", "a list of one is written x=1"),
        ("[a,b", "first bracket does not close"),
        ("[[a,b],c]", "an item is a list"),
        ("[(a,b)]", "a list of one is written (a,b)"),
        ("[['a'],'b']", "neither a text nor a number"),
        ("[None]", "neither a text nor a number"),
        ("[a,,b]", "an item is empty"),
        ("(,)", "an item is empty"),
    ],
)
def test_a_list_in_brackets_that_may_mean_something_else_is_refused(tmp_path, text, rule):
    for field in ("algorithm.filters", "sampler.stop_strings"):
        with pytest.raises(InputError) as error:
            flags(f"--config.{field}={text}")
        assert f"--config.{field}={text}" in str(error.value) and rule in str(error.value)
    file = tmp_path / "a.yaml"
    file.write_text(f"trackers: {json.dumps(text)}\n")
    with pytest.raises(InputError, match=re.escape(rule)):
        load_config_file(str(file))


def test_lists_of_numbers():
    config = flags("--config.data.weights=1,2.5", "--config.data.target_tokens=(1, 2)")
    assert config.data.weights == (1.0, 2.5) and config.data.target_tokens == (1, 2)
    config = flags("--config.data.weights=[1,2.5]", "--config.data.target_tokens=[1, 2,]")
    assert config.data.weights == (1.0, 2.5) and config.data.target_tokens == (1, 2)


def test_spellings_of_flags():
    path, texts, others = config_flags(
        [
            "--config",
            "a.py",
            "-config.steps",
            "3",
            "--config.export",
            "--noconfig.lora.base",
            "--out",
            "x",
            "--config.mesh.fsdp",
            "-1",
            "--",
            "--config.seed=1",
        ]
    )
    assert (path, others) == ("a.py", ["--out", "x", "--", "--config.seed=1"])
    assert texts == {"steps": "3", "export": "true", "lora.base": "false", "mesh.fsdp": "-1"}


def test_all_texts_that_are_no_such_value_are_listed():
    with pytest.raises(InputError) as error:
        flags(
            "--config.steps=1e3",
            "--config.export=maybe",
            "--config.actor_optimizer.lr=small",
            "--config.data.weights=1,x",
            "--config.filters=a",
            "--config.trackers=a,,b",
        )
    assert [line.partition(": ")[0] for line in str(error.value).splitlines()[1:-1]] == [
        "  --config.steps=1e3",
        "  --config.export=maybe",
        "  --config.actor_optimizer.lr=small",
        "  --config.data.weights=1,x",
        "  --config.filters",
        "  --config.trackers=a,,b",
    ]
