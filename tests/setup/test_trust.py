"""A folder is data: what a run folder or a JSON config names runs only where the user says so."""

import dataclasses
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, lanes

import rljax
from rljax.command.commands import COMMANDS
from rljax.command.launch import launch
from rljax.components import _is_public_function, resolve
from rljax.config import NAMESPACES, Config, field_names, to_dict, trust, with_overrides
from rljax.config.flags import load_config_file
from rljax.config.schema import FIELDS
from rljax.config.trust import asks_for_trust, is_harmless, refuse_own_code, vouch, vouched
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.policies import load_policy

# Texts that nothing calls: folders and what a model reads or writes.
PLAIN = {
    "tokenizer",
    "run_dir",
    "critic_model",
    "teacher_model",
    "teachers",
    "teacher_sources",
    "reward.model",
    "lora.adapter",
    "reward.process_model",
    "reward.judge_model",
    "reward.cost_model",
    "offline.reference_logprobs",
    "data.target_instruction",
    "offline.step_separator",
    "sampler.stop_strings",
    "sampler.end_of_thinking",
    "sampler.interrupt_phrase",
}
CALLS = (
    "evil.run()",
    "evil.run",
    "os.system(command='touch ran')",
    "evil.py:run()",
    "./evil.py:run(x=1)",
    "mixture(functions=('exact_match', 'evil.run()'))",
    "judge(inner='by_source(default=\\'evil.run\\')')",
    " evil . run ( ) ",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with evil.py, which leaves a file when it is imported or run."""
    (tmp_path / "evil.py").write_text(
        "open('imported', 'w').close()\ndef run(*_, **__): open('ran', 'w').close()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    yield tmp_path
    sys.modules.pop("evil", None)


def saved_run(folder, changes: dict) -> None:
    folder.mkdir(exist_ok=True)
    made = dataclasses.replace(Config(), model="decoder(layers=1)", trackers=())
    made.data.train = "sort_digits()"
    config = with_overrides(made, changes, "test")
    (folder / "config.json").write_text(json.dumps(to_dict(config)))


def nothing_ran(here) -> bool:
    return not ((here / "ran").exists() or (here / "imported").exists())


def texts() -> list[str]:
    """All fields that hold text."""
    config, out = Config(), []
    for name in field_names(config):
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        if isinstance(value, str | tuple):
            out.append(name)
    return out


@pytest.mark.parametrize("every", lanes([5], [1]), ids=lambda every: f"1 of {every} fields")
@pytest.mark.parametrize("call", CALLS)
def test_a_run_folder_that_names_code_in_any_field_is_refused_and_nothing_runs(here, call, every):
    """The calls take the fields in turn; one of them takes all."""
    every = every if call != CALLS[0] else 1
    for field in texts()[CALLS.index(call) % every :: every]:
        old = with_overrides(Config(), {}, "test")
        of_tuple = isinstance(getattr(old, field, None), tuple) or field in (
            "algorithm.filters",
            "algorithm.baseline_filters",
            "algorithm.reward_shaping",
            "data.sources",
        )
        value = f"reference={call}" if field in ("roles", "placement") else call
        saved_run(here / "run", {field: (value,) if of_tuple else value})
        if field in PLAIN:
            with pytest.raises(InputError):  # no checkpoint, or no such folder
                load_policy(here / "run")
        else:
            with pytest.raises(InputError, match="trust_code"):
                load_policy(here / "run")
        assert nothing_ran(here), field


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate.reward": "judge(base_url='http://127.0.0.1:1/v1', model='m')"},
        {"reward.function": "mixture(rewards=('judge(api_key_env=\\'SECRET\\')', 'gsm8k()'))"},
        {"reward.function": "sandbox_fusion(url='http://127.0.0.1:1')"},
        {"compilation_cache": "cache"},
        {"data.test": "tfds:set"},
        {"data.test": "evil.run()"},
        {"data.train": "evil.run()"},
    ],
)
def test_addresses_secrets_and_code_behind_names_of_files_ask_for_trust(here, changes):
    (here / "evil.run()").touch()  # a file that is called as the component is no data file
    (here / "set").mkdir()
    saved_run(here / "run", changes)
    with pytest.raises(InputError, match="trust_code"):
        load_policy(here / "run")
    assert nothing_ran(here)


def test_functions_that_are_made_of_others_are_the_users(here):
    (here / "made.py").write_text(
        "import functools, json\n"
        "def base(response, bonus=0.0): return bonus\n"
        "more = functools.partial(base, bonus=1.0)\n"
        "@functools.wraps(json.dumps)\n"
        "def wrapped(response): return 2.0\n"
    )
    assert resolve("made.more", "rljax.rewards")(response="") == 1.0
    assert resolve("made.wrapped", "rljax.rewards")(response="") == 2.0
    sys.modules.pop("made")


def test_the_flag_trusts_a_folder(here):
    saved_run(here / "run", {"data.train": "evil.run()"})
    with pytest.raises(InputError) as caught:
        load_policy(here / "run", trust_code=True)
    assert "trust_code" not in str(caught.value)


PYTHONS = (
    "os.system(command='touch ran')",
    "subprocess.run(args='x')",
    "builtins.exec(source='1')",
    "alias.call(command='touch ran')",
    "posix.system()",
    "alias.py:call(command='touch ran')",
    'numpy.testing.runstring(astr=\'open("ran", "w")\', dict=None)',
    "pip.main()",
    "torch.load(f='x')",
)


@pytest.mark.parametrize("call", PYTHONS)
def test_pythons_own_functions_never_run_whoever_names_them(here, call):
    (here / "alias.py").write_text("from os import system as call\n")
    with pytest.raises(InputError, match="Python's own"):
        resolve(call, "rljax.tasks")()
    assert nothing_ran(here)


@pytest.mark.parametrize("command", ["inspect", "demo", "train"])
@pytest.mark.parametrize("suffix", [".json", ".JSON", ".yaml"])
def test_a_config_in_json_or_yaml_is_data(here, suffix, command, capsys):
    saved_run(here / "run", {"reward.function": "evil.run"})
    text = (here / "run" / "config.json").read_text()
    (here / f"own{suffix}").write_text(text)
    assert launch(COMMANDS[command], [f"--config=own{suffix}"], f"rljax {command}") == 2
    assert "trust_code" in capsys.readouterr().err and nothing_ran(here)


def test_names_and_paths_that_are_no_code_are_not_refused(here):
    (here / "rows.v2.jsonl").write_text("")
    for changes in (
        {},
        {"data.train": "rows.v2.jsonl", "model": "./Qwen2.5-0.5B"},
        {"data.train": "tfds:gsm8k", "data.test": "data/x.parquet"},
        {"sampler.stop_strings": ("Q: ", "</s>."), "sampler.end_of_thinking": "a.b"},
        {"reward.function": "judge(model='gpt-4.1-mini')"},
        {"roles": ("implicit=trained_policy(lr=1e-6)",)},
    ):
        refuse_own_code(with_overrides(Config(), changes, "test"), "test")


def test_a_module_of_the_working_folder_hides_no_library(here):
    (here / "tokenizers.py").write_text("def my_reward(response): return 1.0\n")
    with pytest.raises(InputError, match="hidden by a library"):
        resolve("tokenizers.my_reward", "rljax.rewards")
    assert resolve("tokenizers.py:my_reward", "rljax.rewards")(response="") == 1.0


def namespaces() -> dict[str, dict]:
    """{module: {name: function}} of everything that a bare name can mean."""
    homes = {*NAMESPACES.values(), "rljax.sampler.layout", "rljax.environments.calls"}
    out = {}
    for home in homes:
        values = vars(importlib.import_module(home)).items()
        out[home] = {
            name: value for name, value in values if _is_public_function(name, value, home)
        }
    return out


def test_every_field_has_a_rule_and_one_to_come_asks():
    words = {field for field in texts() if FIELDS[field].kind in (str, tuple[str, ...])}
    assert {field for field in words if trust._rule_of(FIELDS[field]) is None} == {
        "compilation_cache"
    }
    assert asks_for_trust("a_field.to_come", "anything")
    assert asks_for_trust("a_field.to_come", {"a": 1}) and asks_for_trust("profile_port", 9999)
    assert asks_for_trust("model", "tfds:gsm8k") and not asks_for_trust("data.train", "tfds:gsm8k")
    for field in words:
        assert not asks_for_trust(field, ""), field
        for text in ("./evil.py:run()", "a.b.c(x=1)"):
            assert (field in PLAIN) != asks_for_trust(field, text), (field, text)


def test_a_component_that_does_not_declare_it_is_refused():
    """Asks, of everything that a bare name can mean, those alone that are declared safe, beside
    their definition, may be named by anyone; and of their options those whose annotation says
    so."""
    unsafe, options = [], 0
    for home, functions in namespaces().items():
        for name, function in functions.items():
            safe = spec(function).safe
            assert is_harmless(name, home) == safe, name
            assert is_harmless(f" {name} ( ) ", home) == safe, name
            if not safe:
                unsafe.append(name)
                continue
            for option, parameter in inspect.signature(function).parameters.items():
                kind, texts = str(parameter.annotation), ["os.system", "./evil.py:run(x=1)"]
                if "Home(" not in kind:  # there these are names of nothing
                    texts += ["program(command='x')", "http://a/b", "evil_module:X-v0"]
                for text in texts:
                    options += 1
                    harmless = is_harmless(f"{name}({option}={text!r})", home)
                    assert not harmless or "PlainText" in kind, (name, option, text)
    known = {"program", "mcp", "gymnasium", "of_class", "verifiers", "openenv", "tinker", "search"}
    known |= {
        "reasoning_gym_score",
        "textarena",
        "pairwise",
        "wandb",
        "sandbox_fusion",
        "evolving_rubrics",
    }
    assert known <= set(unsafe) and options > 1000


def test_a_new_component_asks(monkeypatch):
    def to_come(response): ...

    to_come.__module__ = "rljax.rewards.to_come"
    monkeypatch.setattr("rljax.rewards.to_come", to_come, raising=False)
    assert not is_harmless("to_come", "rljax.rewards") and is_harmless("nobody", "rljax.rewards")


FOLDERS = [
    {"environment.function": "program(command='touch ran')"},
    {"environment.function": "mcp(server='touch ran')"},
    {"environment.function": "gymnasium(id='evil:X-v0')"},
    {"environment.function": "gymnasium_vector(id='evil:X-v0')"},
    {"environment.function": "verifiers(id='x', env='evil')"},
    {"environment.function": "of_class(cls='evil')"},
    {"environment.function": "textarena(game='evil:X')"},
    {"environment.function": "openenv(url='http://127.0.0.1:1')"},
    {"environment.function": "tools(functions=('calc()', 'search(corpus=\\'/etc/passwd\\')'))"},
    {"data.train": "evil.py:f.jsonl"},
    {"data.train": "./evil.py:f.jsonl"},
    {"data.train": "s3://bucket/rows.jsonl"},
    {"data.test": "HTTP://127.0.0.1:1/rows.jsonl"},
    {"data.sources": ("sort_digits()", "memory://rows.parquet")},
    {"data.train": "gsm8k(path='/etc/passwd')"},
    {"data.train": "prompt_texts(of='evil.run()')"},
    {"model": "s3://bucket/model"},
    {"tokenizer": "https://127.0.0.1:1/tokenizer"},
    {"roles": ("evil.f",)},
    {"roles": ("guide=value_model(folder='http://127.0.0.1:1')",)},
    {"roles": ("guide=trained_policy(optimizer='evil.run')",)},
    {"placement": ("evil.f",)},
    {"placement": ("reference=evil.f(devices=1)",)},
    {"reward.function": "by_source(sources=(('a', 'evil.run'),))"},
    {"reward.function": "code_tests(allow_unsafe_execution=True)"},
    {"reward.function": "json_schema(schema='/etc/passwd')"},
    {"reward.rubrics": "evolving_rubrics(generator='evil.run')"},
    {"algorithm.collect": "critic_search(method='evil.run')"},
    {"sampler.layout": "evil.mesh()"},
    {"environment.calls": "evil.run"},
    {"environment.calls": "./evil.py:run"},
    {"compilation_cache": "/tmp/of_others"},
    {"profile_port": 9999},
    {"run_dir": "s3://bucket/run"},
    {"run_dir": "../elsewhere"},
    {"run_dir": "~/.config/autostart"},
    {"trackers": ("wandb(project='mine')",)},
    {"trackers": ("evil.Tracker",)},
    {"offline.reference_logprobs": "/var/somewhere"},
]


@pytest.mark.parametrize("changes", FOLDERS, ids=str)
def test_no_command_uses_what_a_folder_names_unless_the_user_says_so(here, changes, capsys):
    saved_run(here / "run", changes)
    of_a_run = set(changes) & {"run_dir", "trackers", "profile_port"} and "evil" not in str(changes)
    commands = [["train", "--config=run", "--dry_run"], ["inspect", "--config=run"]]
    if not of_a_run:  # what nothing is written to, or told, is not looked at
        commands += [["evaluate", "run"], ["sample", "run", "--out=x.jsonl"]]
        # (It scores nothing.)
        commands += [] if all(name.startswith("reward.") for name in changes) else [["chat", "run"]]
        played = "--config.environment.function=guess_number()"
        commands += [["play", "--policy=run", "--config=quickstart", played]]
    for name, *arguments in commands:
        assert launch(COMMANDS[name], arguments, f"rljax {name}") == 2, name
        assert "trust_code" in capsys.readouterr().err, name
        assert nothing_ran(here), name
    with pytest.raises(InputError, match="trust_code"):
        rljax.train(here / "run")
    assert nothing_ran(here)


@pytest.mark.parametrize(
    ("changes", "says"),
    [(FOLDERS[0], "trust_code"), ({"reward.function": "evil.run"}, "holds no checkpoint")],
)
def test_a_server_runs_nothing_that_a_folder_names(here, changes, says):
    """It calls no reward: one of anybody's asks for no trust."""
    saved_run(here / "run", changes)
    command = [sys.executable, "-m", "rljax", "serve", "run", "--port=0"]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    ran = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2 and says in ran.stderr and nothing_ran(here), ran.stderr


STAGES = (
    {"command": "evaluate", "checkpoint": "model", "suites": ["evil.suite()"]},
    {"command": "evaluate", "checkpoint": "model", "suites": "gsm8k(data='/etc/passwd')"},
    {"command": "evaluate", "checkpoint": "model", "search": "evil.run()"},
    {"command": "evaluate", "checkpoint": "model", "reward": "judge(base_url='http://a')"},
    {"command": "evaluate", "checkpoint": "s3://bucket/run"},
    {"command": "evaluate", "checkpoint": "model", "data": "s3://bucket/rows.jsonl"},
    {"command": "label preferences", "data": "x.jsonl", "judge": "ask(base_url='http://a')"},
    {"command": "sample", "checkpoint": "model", "compilation_cache": "cache_of_others"},
    {"command": "train", "environment.function": "program(command='touch ran')"},
    {"command": "train", "config": "evil.py"},
)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_pipeline_of_data_is_a_strangers_too(here, stage, capsys):
    values = {"pipeline": [{"stage": "a", **stage}], "data.train": "sort_digits()"}
    (here / "model").mkdir()
    (here / "own.json").write_text(json.dumps(values | {"model": "decoder(layers=1)"}))
    assert launch(COMMANDS["pipeline"], ["--config=own.json", "--dry_run"], "rljax pipeline") == 2
    assert "trust_code" in capsys.readouterr().err and nothing_ran(here)


def test_what_the_user_began_here_needs_no_trust(here):
    """A note in the user's own cache tells, which no folder can write: for this place and these
    bytes, of the config and of the functions that the run was given from a notebook."""
    saved_run(here / "run", {"reward.function": "evil.run"})
    config = here / "run" / "config.json"
    (here / "run" / "inputs").mkdir()
    function = here / "run" / "inputs" / "mine_1a2b3c4d.py"
    function.write_text("def mine(response): return 1.0\n")

    def read():
        return load_config_file(str(config))

    assert not vouched(read(), config) and vouch(read(), config) and vouched(read(), config)
    with pytest.raises(InputError, match="no checkpoint"):
        load_policy("run")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "evil.py").write_text((here / "evil.py").read_text())
    os.chdir(here / "elsewhere")  # where the name means another file
    with pytest.raises(InputError, match="trust_code"):
        load_policy("../run")
    os.chdir(here)
    other = config.read_text().replace('"seed": 0', '"seed": 1')
    for file, text in ((config, other), (function, "import os\n")):
        before = file.read_text()
        file.write_text(text)
        with pytest.raises(InputError, match="trust_code"):
            load_policy("run")
        file.write_text(before)
    shutil.copytree(here / "run", here / "copy")
    with pytest.raises(InputError, match="trust_code"):
        load_policy("copy")
    place = "s3://b/run/config.json"
    assert vouched(read(), config) and vouch(read(), place, here / "run")
    assert vouched(read(), place, here / "run") and not vouched(read(), place.replace("b", "c"))


REWARDS = [
    {"reward.function": "evil.run"},
    {"reward.function": "evil.py:run(x=1)", "evaluate.reward": "evil.run"},
    {"reward.function": "mixture(rewards=('judge(api_key_env=\\'SECRET\\')', 'evil.run'))"},
    {"reward.rubrics": "evolving_rubrics(generator='evil.run')"},
    {"reward.process_reward": "nowhere.run", "reward.model": "s3://bucket/model"},
]


@pytest.mark.parametrize("changes", REWARDS, ids=str)
def test_what_scores_nothing_asks_for_no_trust_in_a_reward(here, changes, capsys):
    for more, says in (({}, "holds no checkpoint"), ({"model": "evil.run"}, "trust_code")):
        saved_run(here / "run", changes | more)
        assert launch(COMMANDS["chat"], ["run"], "rljax chat") == 2
        assert says in capsys.readouterr().err and nothing_ran(here)


@pytest.mark.parametrize(
    ("name", "began"), [("tr.py:f", "/began"), ("own/tr.py:f", ""), ("unknown_here.f", "/began")]
)
def test_a_function_of_another_working_folder_is_not_found_rather_than_mistrusted(
    here, name, began, capsys
):
    saved_run(here / "run", {"reward.function": f"by_source(sources=(('a', '{name}'),))"})
    if began:
        starts = ({"time": 1.0, "working_folder": "/a"}, {"time": 2.0, "working_folder": began})
        lines = "".join(json.dumps(start) + "\n" for start in starts)
        (here / "run" / "starts.jsonl").write_text(lines)
    assert launch(COMMANDS["evaluate"], ["run"], "rljax evaluate") == 2
    err = capsys.readouterr().err
    assert f"not found here: got '{name}'" in err and str(here) in err and "could harm" not in err
    assert f"began in {began}. Fix: run the command in {began}," in err if began else "Fix" in err
    (here / "run" / "starts.jsonl").write_text("[1]\n" * 2)
    assert launch(COMMANDS["evaluate"], ["run"], "rljax evaluate") == 2
    assert "the folder where the run began" in capsys.readouterr().err
    saved_run(here / "run", {"reward.function": "evil.run"})  # it is here, and a stranger's
    assert launch(COMMANDS["evaluate"], ["run"], "rljax evaluate") == 2
    assert "could harm this machine" in capsys.readouterr().err and nothing_ran(here)


def test_a_config_that_was_trusted_once_is_not_asked_again(here, capsys):
    """A YAML file of one's own that names a function beside it is run with --trust_code once."""
    (here / "reward.py").write_text("def mine(response): return 1.0\n")
    text = "model: decoder(layers=1)\ndata.train: sort_digits(prompts=1000, test=64)\n"
    text += "reward.function: reward.mine\n"
    (here / "own.yaml").write_text(text)
    arguments = ["--config=own.yaml"]
    assert launch(COMMANDS["inspect"], arguments, "rljax inspect") == 2
    err = capsys.readouterr().err
    assert "reward.function='reward.mine'" in err and "add --trust_code" in err
    for more in (["--trust_code"], []):
        assert launch(COMMANDS["inspect"], [*arguments, *more], "rljax inspect") == 0
    (here / "own.yaml").write_text(text + "seed: 1\n")
    assert launch(COMMANDS["inspect"], arguments, "rljax inspect") == 2


@pytest.mark.parametrize("seed_and_count", lanes([(0, 500)], [(1, 10_000)]), ids=str)
def test_hundreds_of_configs_run_nothing(here, seed_and_count):
    """Audited: no import, no exec, no file, no address and no process, whatever texts are known."""
    env = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{here}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(REPO / "tests/setup/fuzz_trust.py"), *map(str, seed_and_count)]
    ran = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    assert found["seen"] == [] and not found["evil"] and nothing_ran(here), found
    assert 0.03 < found["accepted"] / seed_and_count[1] < 0.7, found  # both kinds were met


def test_a_file_that_is_no_config_is_not_run_as_one(here, capsys):
    """Python is what ends in .py; a colon in a name that is there parts no variant from it."""
    code = "open('ran', 'w').close()\n"
    for name in ("rows.jsonl", "rows.csv", "notes.txt", "page.html", "c.toml", "c.json5", "noend"):
        (here / name).write_text(code)
        for command in ("inspect", "plan", "train"):
            assert launch(COMMANDS[command], [name], f"rljax {command}") == 2
            assert "no config" in capsys.readouterr().err and nothing_ran(here), name
    saved_run(here / "run:1", {})
    (here / "run").write_text(code)
    (here / "run.py").write_text(code)
    saved_run(here / "evil.py:f", {})
    for name in ("run:1", "run:1/config.json", "evil.py:f"):
        assert launch(COMMANDS["config show"], [name], "rljax config show") == 0
        assert nothing_ran(here), name


def test_what_was_read_is_what_is_looked_at(here, monkeypatch, capsys):
    """A config that changes on the disk behind the reading is judged as it was read."""
    saved_run(here / "run", {"reward.function": "evil.run"})
    load = load_config_file

    def swapped(path, *_):
        config = load(path)
        saved_run(here / "run", {})
        return config

    monkeypatch.setattr("rljax.command.launch.load_config_file", swapped)
    assert launch(COMMANDS["train"], ["--config=run", "--dry_run"], "rljax train") == 2
    assert "trust_code" in capsys.readouterr().err and nothing_ran(here)


@pytest.mark.parametrize(
    "arguments",
    lanes([("train", "--config=.", "--dry_run")], [("evaluate", "."), ("report", ".")]),
    ids=" ".join,
)
def test_modules_of_a_strangers_folder_are_not_imported(here, arguments):
    """The working folder is no place of modules until something of it is named and trusted."""
    names = (
        "nvidia",
        "cython",
        "jax_cuda12_plugin",
        "nest_asyncio",
        "argcomplete",
        "libtpu",
        "tensorflow_datasets",
        "jax_plugins",
        "zstandard",
        "reasoning_gym",
    )
    for name in names:
        (here / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\n")
    saved_run(here / "run", {"data.train": "tfds:mnist"})
    shutil.copy(here / "run" / "config.json", here / "config.json")
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "rljax", *arguments]
    ran = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=300)
    assert not (here / "ran").exists(), ((here / "ran").read_text(), ran.stderr[-500:])
