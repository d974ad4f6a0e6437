"""rljax config show and diff, and configs in YAML and JSON wherever a config is taken."""

import json
import random

import pytest
import yaml
from conftest import lanes

from rljax.config import Config, changed_fields, field_names, to_dict, value_of
from rljax.config.data_files import read_config, to_yaml
from rljax.config.flags import config_module, listed, load_config_file, shipped_configs
from rljax.errors import InputError
from rljax.experiments.stages import make_stages
from rljax.experiments.sweep import make_members


def variants(name: str) -> list[str]:
    text = shipped_configs()[name].read_text()
    return [name, f"{name}:tiny"] if '== "tiny"' in text or "presets/" in name else [name]


QUICK = ("quickstart", "drawn_digits", "json_output", "offline/dpo", "pipelines/post_training")
QUICK += ("presets/dr_tulu", "presets/expert_iteration", "presets/prime", "real/sums")


@pytest.mark.parametrize(
    "name", lanes(QUICK, [name for name in shipped_configs() if name not in QUICK])
)
def test_every_config_that_ships_is_the_same_in_yaml_and_json(name, rljax_command, tmp_path):
    for path in variants(name):
        config = load_config_file(path)
        for flag, ending in (("--yaml", "yaml"), ("--json", "json")):
            for part in ((), ("--changed",)):
                code, out, err = rljax_command("config", "show", path, flag, *part)
                file = tmp_path / f"c.{ending}"
                file.write_text(out)
                assert (code, err) == (0, "") and load_config_file(str(file)) == config
                # What other programs make of the same file are the same values.
                theirs = yaml.safe_load(out) if ending == "yaml" else json.loads(out)
                assert part or theirs == to_dict(config)


def test_texts_that_yaml_would_read_as_something_else_come_back(tmp_path):
    nasty = [
        "no",
        "null",
        "~",
        "1e-5",
        "0x10",
        "010",
        "true",
        "",
        " a ",
        "a: b",
        "# c",
        "- d",
        "\n",
        "é\u2028\t",
        "'",
        '"',
        "1:30",
        "=",
        "<<",
        "!x",
        "&a",
        "*a",
        "{a}",
        "[a, b]",
        "a, b",
    ]
    config = Config(roles=tuple(nasty))
    config.offline.step_separator, config.sampler.stop_strings = "\n\n", tuple(nasty)
    config.data.weights, config.data.final_weights = (1e-12, 1 / 3, 1e22), ()
    draw = random.Random(0)
    config.sampler.interrupt_phrase = "".join(map(chr, draw.sample(range(32, 0xD000), 500)))
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(config))
    assert read_config(str(file)) == config


PITFALLS = [
    ("actor_optimizer: {lr: 1e-5}", "actor_optimizer.lr", 1e-5),
    ("actor_optimizer.lr: 5E-7", "actor_optimizer.lr", 5e-7),
    ("tokenizer: no", "tokenizer", "no"),
    ("tokenizer: 2026-11-25", "tokenizer", "2026-11-25"),
    ("seed: 007", "seed", 7),
    ("trackers: []", "trackers", ()),
    ("trackers: [console, wandb]", "trackers", ("console", "wandb")),
    ("trackers:\n- console", "trackers", ("console",)),
    ("roles: ['a=number(initial=1)']", "roles", ("a=number(initial=1)",)),
    ("data: {weights: [1, 2.5]}", "data.weights", (1.0, 2.5)),
    ("steps: !!int 3", "steps", 3),
    ("<<: {seed: 4, steps: 1}\nsteps: 2", "seed", 4),
    ("<<: {seed: 4, steps: 1}\nsteps: 2", "steps", 2),
    (
        "actor_optimizer: &o {lr: 1e-5, beta2: 0.9}\ncritic_optimizer: {<<: *o, lr: 2}",
        "critic_optimizer.beta2",
        0.9,
    ),
    ("sft: {optimizer: {<<: [{lr: 1}, {lr: 2}]}}", "sft.optimizer.lr", 1.0),
    ("steps: 0x10", "steps", 16),  # as --config.steps=0x10
    ("steps: 0o17", "steps", 15),
    ("profile_steps: &s [3, 5]\nsampler: {thinking_tokens: *s}", "sampler.thinking_tokens", (3, 5)),
]
REFUSED = [
    ("export: no", "export=no: must be true or false"),
    ("export: yes", "must be true or false"),
    ("steps: 1e3", "steps=1e3: must be a whole number"),
    ("steps: 0x1g", "must be a whole number"),
    ("steps: 0o18", "must be a whole number"),
    ("seed: 9999999999", "seed=9999999999: must be below 2147483648"),
    ("seed: 99999999999999999999", "must be below 2147483648"),
    ("seed: -9999999999", "must be -2147483647 or more"),
    ("steps: null", "there is no null"),
    ("model: ~", "model=null: there is no null"),
    ("model: None", "model=None: there is no null"),
    ("trackers: None", "trackers=None: there is no null"),
    ("actor_optimizer: {lr: fast}", "actor_optimizer.lr=fast: must be a number"),
    ("data: {weights: [1, x]}", "must be a number"),
    ("algorithm: {policy_los: dpo}", "algorithm.policy_los: no such field; did you mean"),
    ("learning_rate: 1e-6", "use `actor_optimizer.lr`"),
    ("steps: 1\nsteps: 2", "'steps' stands twice"),
    ("batch: {epochs: 1}\nbatch.epochs: 2", "'batch.epochs' stands twice"),
    ("model: !!python/name:os.system x", "line 1 has a tag of YAML"),
    ("model: !x y", "has a tag of YAML"),
    ("steps: 1\n---\nsteps: 2", "is not YAML"),
    ("<<: 3", "line 1: << merges mappings"),
    ("'<<': {steps: 1}", "<<.steps: no such field"),
    ("", "is no config; it holds nothing"),
    ("\tsteps: 1", "is not YAML"),
    ("steps: [", "is not YAML"),
]
WRONG_JSON = [
    ('{"steps": "10"}', 'steps="10": must be a whole number'),
    ('{"export": 1}', "export=1: must be true or false"),
    ('{"actor_optimizer": {"lr": "1e-6"}}', 'actor_optimizer.lr="1e-6": must be a number'),
    ('{"trackers": "console"}', 'trackers="console": must be a list of texts'),
    ('{"steps": NaN}', "steps=NaN: must be a whole number"),
    ('{"steps": 1', "Expecting ',' delimiter at line 1"),
    ("", "is not valid JSON"),
]
WRONG_IN_BOTH = [
    ('{"model": null}', "model=null: there is no null"),
    ('{"steps": 3.0}', "steps=3.0: must be a whole number"),
    ('{"steps": {"a": 1}}', "steps=a mapping: must be a whole"),
    ('{"trackers": {"a": "b"}}', "trackers=a mapping: must be a list of texts"),
    ('{"steps": [3]}', "steps=a list: must be a whole number"),
    ('{"actor_optimizer": 3}', "actor_optimizer: a section has no value of its own"),
    ('{"stepps": 3}', "stepps: no such field; did you mean steps?"),
    ("[]", "is no config; it holds a list"),
]


@pytest.mark.parametrize(("text", "field", "value"), PITFALLS)
def test_yaml_means_what_the_field_is(text, field, value, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    read = value_of(load_config_file(str(file)), field)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("ending", "text", "says"),
    [("yaml", *case) for case in REFUSED]
    + [("json", *case) for case in WRONG_JSON]
    + [(ending, *case) for case in WRONG_IN_BOTH for ending in ("json", "yaml")],
)
def test_what_is_no_value_is_refused_with_its_field(ending, text, says, tmp_path, rljax_command):
    file = tmp_path / f"c.{ending}"
    file.write_text(text)
    for command in (["train", str(file)], ["config", "show", str(file)], ["plan", str(file)]):
        code, out, err = rljax_command(*command)
        assert code == 2 and out == "" and says in err and str(file) in err and "Fix: " in err


def test_show_says_what_differs_from_the_defaults(rljax_command):
    code, out, _ = rljax_command("config", "show", "quickstart", "--config.seed=7")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and list(lines) == field_names(Config)
    assert lines["seed"] == "7  (default: 0)" and lines["sampler.top_p"] == "1.0"
    out = rljax_command("config", "show", "quickstart", "--changed")[1]
    assert [line.split()[0] for line in out.splitlines()] == list(
        changed_fields(load_config_file("quickstart"))
    )


def test_diff_compares_configs_files_and_run_folders(rljax_command, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = load_config_file("quickstart")
    config.seed, config.reward.function = 3, "evil.run()"  # it is read, not run
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    (tmp_path / "a.yaml").write_text(to_yaml(load_config_file("quickstart")))
    code, out, _ = rljax_command("config", "diff", str(tmp_path / "a.yaml"), str(run), "--json")
    assert code == 0 and json.loads(out) == {
        "seed": {"a": 0, "b": 3, "default": 0},
        "reward.function": {"a": "exact_match", "b": "evil.run()", "default": ""},
    }
    out = rljax_command("config", "diff", "quickstart", str(run))[1].splitlines()
    assert out[0] == "seed" and [line.split()[-1] for line in out[1:4]] == ["0", "3", "0"]
    assert rljax_command("config", "diff", "quickstart", "quickstart")[1] == "no field differs\n"
    assert rljax_command("config", "show", str(run), "--json")[0] == 0
    code, _, err = rljax_command("train", str(run))
    assert code == 2 and "--trust_code" in err


# -- sweeps and pipelines

LISTED = """
model: decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16)
data: {train: sort_digits(digits=3), max_prompt_tokens: 4}
sampler: {max_response_tokens: 3}
steps: 2
sweep:
  - seed: 0
  - actor_optimizer: {lr: 1e-5}
    trackers: [console]
  - {config: quickstart:tiny, seed: 3}
pipeline:
  - {stage: one, command: train, steps: 1}
  - {stage: two, command: sample, checkpoint: "{one}", samples: 2, keep_truncated: true}
  - {stage: three, command: train, dataflow: sft, data.train: "{two}/samples.jsonl"}
"""


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_sweeps_and_pipelines_in_a_file_of_data(ending, tmp_path):
    file = tmp_path / f"c.{ending}"
    values = yaml.safe_load(LISTED.replace("1e-5", "0.00001"))
    file.write_text(LISTED if ending == "yaml" else json.dumps(values))
    base = load_config_file(str(file))
    members = make_members(base, listed(str(file), "sweep", ""), tmp_path, str(file), False)
    assert [m.config.seed for m in members] == [0, 0, 3] and base.steps == 2
    assert members[1].config.actor_optimizer.lr == 1e-5
    assert members[1].config.trackers == ("console",)
    assert members[2].config.model == load_config_file("quickstart:tiny").model
    entries = listed(str(file), "pipeline", "")
    stages = make_stages(base, entries, tmp_path, str(file), (), False)
    assert [stage.command for stage in stages] == ["train", "sample", "train"]
    assert stages[1].settings.samples == 2 and stages[1].settings.keep_truncated is True
    assert stages[2].needs() == ("two",) and stages[0].config.steps == 1


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("sweep: [{dataflow: evil.run}]", "dataflow='evil.run'"),
        ("sweep: [{config: evil.py}]", "names a Python file"),
        ("sweep: [{stesp: 1}]", "did you mean steps"),
        ("sweep: [{steps: many}]", "sweep[0]:\n  steps=many: must be a whole number"),
        ("sweep: 3", "a list of mappings"),
        ("seed: 0", "has no sweep. Fix: write sweep:"),
        ("pipeline: [{stage: a, command: train, reward.function: evil.run}]", "reward.function="),
        ("pipeline: [{stage: a, command: train, config: evil.py}]", "names a Python file"),
        ("pipeline: [{stage: a, command: sample, checkpoint: ., reward: evil.run}]", "'evil.run'"),
        ("pipeline: [{stage: a, command: sample, checkpoint: ., trust_code: true}]", "trust_code"),
        ("pipeline: [{stage: a, command: evaluate, checkpoint: ., data: e.rows()}]", "data: got"),
    ],
)
def test_what_a_file_of_data_lists_runs_no_code(entry, says, tmp_path, rljax_command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    head = LISTED.partition("sweep:")[0]
    (tmp_path / "c.yaml").write_text(head + entry)
    name = "pipeline" if "pipeline" in entry else "sweep"
    code, out, err = rljax_command(name, "c.yaml", "--dry_run")
    assert code == 2 and says in err and out == ""
    assert not (tmp_path / "ran").exists()


def test_a_python_file_of_ones_own_still_names_what_it_likes(tmp_path):
    file = tmp_path / "c.py"
    file.write_text(
        "from rljax.config.flags import load_config_file\n"
        "def get_config(): return load_config_file('quickstart:tiny')\n"
        "def sweep(): yield {'config': __file__, 'seed': 1}\n"
    )
    members = make_members(
        load_config_file(str(file)), config_module(str(file)).sweep(), tmp_path, str(file)
    )
    assert members[0].config.seed == 1
    with pytest.raises(InputError, match="names a Python file"):
        make_members(members[0].config, [{"config": str(file)}], tmp_path, str(file), False)
