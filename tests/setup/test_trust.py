"""A folder is data: what a run folder or a JSON config names runs only where the user says so."""

import dataclasses
import json
import sys

import pytest

from rljax.command.commands import COMMANDS
from rljax.command.launch import launch
from rljax.components import resolve
from rljax.config import Config, field_names, to_dict, with_overrides
from rljax.config.trust import refuse_own_code
from rljax.errors import InputError
from rljax.setup.policies import load_policy

# Texts that nothing calls: folders and what a model reads or writes.
PLAIN = {
    "tokenizer", "run_dir", "critic_model", "teacher_model", "reward.model", "lora.adapter",
    "reward.process_model", "reward.judge_model", "reward.cost_model", "offline.reference_logprobs",
    "data.target_instruction", "offline.step_separator", "sampler.stop_strings",
    "sampler.end_of_thinking", "sampler.interrupt_phrase",
}  # fmt: skip
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


@pytest.mark.parametrize("call", CALLS)
def test_a_run_folder_that_names_code_in_any_field_is_refused_and_nothing_runs(here, call):
    for field in texts():
        old = with_overrides(Config(), {}, "test")
        of_tuple = isinstance(getattr(old, field, None), tuple) or field in (
            "algorithm.filters", "algorithm.baseline_filters", "algorithm.reward_shaping",
            "data.sources",
        )  # fmt: skip
        value = f"reference={call}" if field in ("roles", "placement") else call
        saved_run(here / "run", {field: (value,) if of_tuple else value})
        if field in PLAIN:
            with pytest.raises(InputError):  # no checkpoint, or no such folder
                load_policy(here / "run")
        else:
            with pytest.raises(InputError, match="trust_code"):
                load_policy(here / "run")
        assert nothing_ran(here), field


@pytest.mark.parametrize("changes", [
    {"evaluate.reward": "judge(base_url='http://127.0.0.1:1/v1', model='m')"},
    {"reward.function": "mixture(rewards=('judge(api_key_env=\\'SECRET\\')', 'gsm8k()'))"},
    {"reward.function": "sandbox_fusion(url='http://127.0.0.1:1')"},
    {"compilation_cache": "cache"},
    {"data.test": "tfds:set"},
    {"data.test": "evil.run()"},
    {"data.train": "evil.run()"},
])  # fmt: skip
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
    "os.system(command='touch ran')", "subprocess.run(args='x')", "builtins.exec(source='1')",
    "alias.call(command='touch ran')", "posix.system()", "alias.py:call(command='touch ran')",
    "numpy.testing.runstring(astr='open(\"ran\", \"w\")', dict=None)",
    "pip.main()", "torch.load(f='x')",
)  # fmt: skip


@pytest.mark.parametrize("call", PYTHONS)
def test_pythons_own_functions_never_run_whoever_names_them(here, call):
    (here / "alias.py").write_text("from os import system as call\n")
    with pytest.raises(InputError, match="Python's own"):
        resolve(call, "rljax.data.tasks")()
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
