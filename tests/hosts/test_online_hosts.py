"""Online learning on several hosts is that of one process: the same prompts, samples, rewards and
statuses, and the same weights to the last bit where sums are made in the same order."""

import dataclasses
import json

import jax
import pytest
from hosts_online import config_of
from on_hosts import all_well, free_port, on_hosts
from tiny_tokenizer import write_tokenizer

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.setup import build, prompt_order

pytestmark = pytest.mark.hosts
# As much the machine's as the run's.
OWN = ("tokens_per_s", "generate_tokens_per_s", "compiles", "learning_programs")
SIXTEEN = {"preset": "grpo", "steps": 1, "evaluate.reward": "hosts_rewards.logged()"}
# Rows decode for more than a turn, in slots that are refilled; stop strings, interruptions;
# prompts that are dropped and retired.
LONG = {
    "preset": "grpo",
    "steps": 3,
    "sampler.max_response_tokens": 40,
    "sampler.slots": 64,
    "sampler.stop_strings": ["cc", "bd"],
    "sampler.thinking_tokens": [2, 9],
    "sampler.end_of_thinking": ">",
    "sampler.interrupt_phrase": "a>",
    "data.retire_at_pass_rate": 0.6,
    "data.drop_above_pass_rate": 0.75,
    "data.pass_rate_samples": 2,
}
# Which groups are complete first depends on the speed of each host.
FIRST_LIVE = {
    **LONG,
    "steps": 2,
    "algorithm.collect": "first_live(oversample=2.0)",
    "reward.function": "hosts_rewards.logged()",
    "data.drop_above_pass_rate": 0.0,
}
RUBRICS = {
    "preset": "grpo",
    "steps": 5,
    "evaluate.reward": "hosts_rewards.logged()",
    "reward.function": "hosts_rewards.by_rubric()",
    "reward.rubrics": "evolving_rubrics(generator='hosts_rewards.generator', cap=3)",
}
METHODS = ("grpo", "ppo", "remax", "dapo")


def program(folder, jobs: list[dict]) -> list:
    return ["tests/helpers/hosts_online.py", folder, json.dumps(jobs)]


def learned(hosts: int, devices: int, jobs: dict[str, dict], folder, **env) -> list[dict]:
    """What the jobs did, on each host: {name of the job: ...}."""
    command = program(folder, [*jobs.values()])
    done = all_well(on_hosts(hosts, devices, command, timeout_s=580, **env))
    return [dict(zip(jobs, json.loads(one.out.splitlines()[-1]), strict=True)) for one in done]


def same(run: dict) -> dict:
    """What hosts, and layouts, have in common."""
    steps = [
        {
            **{name: x for name, x in step.items() if not name.endswith("_here")},
            "metrics": {
                name: x
                for name, x in step["metrics"].items()
                if not name.startswith("time/") and name not in OWN
            },
        }
        for step in run["steps"]
    ]
    return {**run, "steps": steps}


def asked(folder, name: str, hosts: int) -> list[list[str]]:
    """Of each host the samples that its reward `logged` was asked about, in a job."""
    return [(folder / f"{name}.{k}").read_text().splitlines() for k in range(hosts)]


def model_folders(folder) -> tuple[str, str]:
    """A chat model, and one with a scalar head that reads the policy's tokens; random weights."""
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.5)"
    make, mesh = resolve(text, NAMESPACES["model"]), make_mesh(1, 1, 1, devices=jax.devices()[:1])
    chat, scalar = write_tokenizer(folder / "chat"), folder / "scalar"
    words = len(json.loads((chat / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    for path, model in (
        (chat, Model(make(words), mesh)),
        (scalar, Model(dataclasses.replace(make(7), labels=1), mesh, "scalar")),
    ):
        save_params(path, model, model.init(jax.random.key(3)), bos_id=None, eos_ids=(1,), pad_id=0)
    return str(chat), str(scalar)


def drawn_first() -> list[str]:
    """The prompts of the first step of a job, in their order."""
    config = config_of({**SIXTEEN, "mesh.data": 1})
    setup = build(config, jax.devices()[:1])
    return [record.prompt_text for record in prompt_order(config, setup.data).take(16)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A function of a folder: every job by name; `logged` rewards write there."""
    chat, scalar = model_folders(tmp_path_factory.mktemp("models"))
    fails = tuple(drawn_first()[1:6:2])  # three prompts of host 1 of 2

    def of(folder) -> dict[str, dict]:
        def logged(name):
            return f"hosts_rewards.logged(file={str(folder / name)!r})"

        methods = {
            name: {"preset": name, "steps": 2, "reward.function": "hosts_rewards.logged()"}
            for name in METHODS
        }
        methods["grpo"]["steps"] = 6
        judged = {
            "preset": "ppo",
            "steps": 2,
            "batch.prompts_per_step": 32,
            "batch.sequences_per_optimizer_step": 32,
            "reward.function": "judge()",
            "reward.judge_model": chat,
            "reward.judge_grades": ["0", "1", "2"],
            "reward.process_model": scalar,
            "evaluate.reward": "hosts_rewards.logged()",
        }
        failing = {
            **SIXTEEN,
            "steps": 2,
            "reward.timeout_s": 2.0,
            "reward.function": f"hosts_rewards.failing(fails={fails!r})",
        }
        return {
            **methods,
            "once": {**SIXTEEN, "reward.function": logged("once")},
            "failing": failing,
            "long": {**LONG, "reward.function": logged("long")},
            "rubrics": RUBRICS,
            "judged": judged,
        }

    return of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in ("one", "two", "four")}


@pytest.fixture(scope="module")
def one(jobs, folders):
    """One process of four devices that adds as several do."""
    port = str(free_port())
    return learned(1, 4, jobs(folders["one"]), folders["one"], GLOO_PORT=port)[0]


@pytest.fixture(scope="module")
def two(jobs, folders):
    """Two hosts of two devices."""
    more = {"first_live": FIRST_LIVE}
    return learned(2, 2, jobs(folders["two"]) | more, folders["two"])


@pytest.fixture(scope="module")
def four(jobs, folders):
    """Four hosts of a device each."""
    every = jobs(folders["four"])
    return learned(4, 1, {name: every[name] for name in ("ppo", "dapo", "once")}, folders["four"])


@pytest.mark.parametrize("name", METHODS)
def test_two_hosts_are_bitwise_one_process(one, two, name):
    assert [same(host[name]) for host in two] == [same(one[name])] * 2
    parts = {part for step in one[name]["steps"] for row in step["parts"] for part in row}
    assert {"hit", "miss"} <= parts  # of several hosts
    # Each host reads its own prompts' responses and no others.
    rows = len(one[name]["steps"][0]["values"])
    assert [host[name]["steps"][0]["decoded_here"] for host in two] == [rows // 2] * 2


@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_four_hosts_are_bitwise_one_process(one, four, name):
    assert [same(host[name]) for host in four] == [same(one[name])] * 4


def test_the_devices_of_one_process_add_in_another_order(one, jobs, tmp_path):
    """Without gloo one process adds four devices in their order, and losses differ by rounding;
    what is sampled and scored does not. A sum of two is the same in any order."""
    ours = learned(1, 4, {"grpo": jobs(tmp_path)["grpo"]}, tmp_path)[0]["grpo"]
    for step, wanted in zip(ours["steps"], one["grpo"]["steps"], strict=True):
        for name in ("prompts", "values", "statuses", "tokens", "group"):
            assert step[name] == wanted[name]
        loss, expected = (float(x["metrics"]["loss"]) for x in (step, wanted))
        assert loss == pytest.approx(expected, abs=1e-6)
    assert ours["policy"] != one["grpo"]["policy"]


def test_each_prompt_is_scored_once_by_one_host(one, four, folders):
    (everything,), of_hosts = (asked(folders[k], "once", n) for k, n in (("one", 1), ("four", 4)))
    assert sorted(line for of_host in of_hosts for line in of_host) == sorted(everything)
    prompts = [{line.partition("\t")[0] for line in of_host} for of_host in of_hosts]
    assert len(set().union(*prompts)) == 16 and {len(of_host) for of_host in prompts} == {4}
    assert [same(host["once"]) for host in four] == [same(one["once"])] * 4


def test_rewards_that_fail_on_one_host_are_masked_on_all(one, two):
    """Samples of three prompts of host 1 raise, hang and end their worker."""
    statuses = one["failing"]["steps"][0]["statuses"]
    assert statuses.count("error") == 16 and statuses.count("timeout") == 8
    assert [same(host["failing"]) for host in two] == [same(one["failing"])] * 2


def test_samples_are_scored_beside_decoding_on_every_host(one, two, folders):
    assert [same(host["long"]) for host in two] == [same(one["long"])] * 2
    assert all(host["long"]["steps"][0]["early_here"] > 0 for host in two)
    of_hosts = asked(folders["two"], "long", 2)
    (everything,) = asked(folders["one"], "long", 1)
    assert all(of_hosts) and sorted(of_hosts[0] + of_hosts[1]) == sorted(everything)
    assert one["long"]["order"]["retired"] or one["long"]["order"]["dropped"]


@pytest.mark.parametrize("name", ["rubrics", "judged"])
def test_judges_and_rubrics_of_several_hosts(one, two, name):
    assert [same(host[name]) for host in two] == [same(one[name])] * 2


def test_rubrics_evolved_and_lines_were_scored(one):
    active = [prompt["active"] for prompt in one["rubrics"]["rubrics"]["prompts"].values()]
    assert len(active) > 16 and max(map(len, active)) == 3  # of prompts that came twice
    assert "process/finite" in one["judged"]["steps"][0]["metrics"]


def test_hosts_abort_the_same_rows_at_the_same_turn(two):
    first, second = (host["first_live"] for host in two)
    assert same(first) == same(second)


def test_the_loop_of_one_process_is_refused(tmp_path):
    done = on_hosts(2, 1, program(tmp_path, [{**SIXTEEN, "sampler.loop": "host"}]))
    for host in done:
        assert host.code and "by the loop of one process: got '2 hosts'" in host.err
