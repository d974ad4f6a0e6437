"""Declarations: every metric that rljax logs has one, and a user's own where a contract has it."""

import ast
import fnmatch
import json
import math
import re
import sys

import jax
import pytest
from conftest import REPO, lanes
from explained import NO_METRICS, declared, meaning, unexplained
from preset_runs import NEED_TEACHER, PRESETS, preset_config
from tiny_offline import offline_config
from tiny_run import tiny_config, train_on_one

from rljax import setup as build
from rljax.contracts import contract, spec
from rljax.correction.health import LIMITED, health_warnings
from rljax.errors import InputError
from rljax.metric import Metric, find_metric
from rljax.report.curves import GROUPS
from rljax.report.page import FAULTS, write_report
from rljax.report.run_folder import read_run
from rljax.rewards.sandbox.tiers import ALL_TIERS
from rljax.setup.dry_run import dry_run
from rljax.tracking.meanings import Meanings
from rljax.training.health import own_metrics

# The rooms that make metrics, and names with a slash there that are none.
ROOMS = (
    "correction",
    "dataflows",
    "evaluation/policy.py",
    "learn",
    "losses",
    "roles",
    "rollout",
    "shaping",
    "training",
)
PARTS = {"judge/grade_mass", "rubric/*", "format/extracted"}  # of a reward: logged as reward/part/
# Of a fault, of a part that the page takes out again, of a prefix.
NONE = {"unhealthy/*", "response_tokens/std", "critic/dqo_target", "critic/*"}
METRIC = re.compile(r"[a-z_]+(/[a-z_*0-9]+)+")


def _text(node) -> str:
    """A string of the source; what is formatted into it is a star."""
    if isinstance(node, ast.JoinedStr):
        values = node.values
        return "".join(v.value if isinstance(v, ast.Constant) else "*" for v in values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _tables(tree: ast.Module) -> list[ast.Assign]:
    """The declarations of a module, which are no place where a metric is made."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) in ("METRICS", "_OF_A_STEP")
    ]


def _written_names() -> dict[str, str]:
    """Every string of the rooms that looks like the name of a metric, and its file."""
    names = {}
    for room in ROOMS:
        place = REPO / "rljax" / room
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            tree = ast.parse(path.read_text())
            inside = {
                id(part)
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for part in node.values
            }
            inside |= {id(part) for table in _tables(tree) for part in ast.walk(table)}
            for node in ast.walk(tree):
                text = "" if id(node) in inside else _text(node)
                if METRIC.fullmatch(text):
                    names[text] = str(path.relative_to(REPO))
    return names


@pytest.mark.smoke
def test_every_name_with_a_slash_in_the_code_has_a_meaning():
    names = _written_names()
    assert len(names) > 100 and "reward/mean" not in unexplained(names)
    assert {"collect/rounds", "mismatch/mismatch_*", "data/chance/*", "ref_kl/*"} <= names.keys()
    # A star is tried as names that it stands for; where it stands for none of ours, as any name.
    unknown = {}
    for name, path in names.items():
        pattern = re.compile(re.escape(name).replace(r"\*", ".+"))
        if meaning(name) is None and not any(pattern.fullmatch(known) for known in declared()):
            unknown[name] = path
    assert unknown.keys() - PARTS - NONE == set(), f"without a declaration: {unknown}"


# What losses hand to a dataflow that makes metrics of it.
INTERMEDIATE = {
    "dqo_value_residual",
    "dqo_value_residual_square",
    "dqo_target",
    "dqo_target_square",
    "bootstrap_truncated",
    "sign_correct",
    "non_neutral",
}


def test_every_metric_of_a_loss_is_declared():
    keys = set()
    for path in sorted((REPO / "rljax/losses").rglob("*.py")):
        tree = ast.parse(path.read_text())
        declared_here = {id(part) for table in _tables(tree) for part in ast.walk(table)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and id(node) not in declared_here:
                keys |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                keys |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    assert len(keys) > 60 and {"ppo_kl", "pg_clipfrac", "rewards/margins"} <= keys
    assert unexplained(keys) == INTERMEDIATE


def test_a_name_that_two_modules_declare_means_the_same():
    declared()  # loads all modules
    found = {}
    for name, module in sorted(sys.modules.items()):
        for metric in vars(module).get("METRICS", {}) if name.startswith("rljax.") else ():
            found.setdefault(metric, {})[name] = vars(module)["METRICS"][metric]
    assert len(found) > 350
    several = {name: homes for name, homes in found.items() if len(set(homes.values())) > 1}
    assert several == {}


KINDS = {
    "kto": ("unpaired", {"algorithm__preference_loss": "kto()"}),
    "reward_model": ("pairs", {}),
    "process_reward_model": ("stepwise", {"algorithm__reward_loss": "step_regression()"}),
    "dqo(beta=0.1)": ("trajectories", {}),
    "preference": ("pairs", {}),
    "bco": ("unpaired", {"algorithm__preference_loss": "bco()"}),
    "sft": ("examples", {"offline__packing": True}),
    "dro(tau=0.5)": ("trajectories", {}),
}
# The runs of test_presets and test_offline are held against the glossary, too.
QUICK = ("reinforce_pp_baseline",)  # a correction, with all that it logs
OTHERS = [p for p in PRESETS if p not in (*QUICK, *NEED_TEACHER)]


def _logged(config) -> set[str]:
    """The metrics of every phase's update, from shapes alone."""
    setup = build.build(config, jax.devices()[:1])
    return {name for phase in setup.phases for name in dry_run(setup, phase)[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(QUICK, OTHERS))
def test_every_metric_of_a_preset_has_a_meaning(name):
    names = _logged(preset_config(name))
    assert len(names) >= 30 and unexplained(names) == set()


@pytest.mark.parametrize("dataflow", lanes(["kto"], [kind for kind in KINDS if kind != "kto"]))
def test_every_metric_of_learning_from_a_file_has_a_meaning(dataflow, tmp_path):
    kind, fields = KINDS[dataflow]
    names = _logged(offline_config(tmp_path, kind, dataflow, "run", **fields))
    assert "loss" in names and unexplained(names, {f"eval/{name}" for name in names}) == set()


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["", "rollout_correction(mode='mask')"])
def test_every_metric_of_a_run_has_a_meaning(correction, tmp_path):
    train_on_one(tiny_config(tmp_path, steps=3, algorithm__correction=correction))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("reward/mean" in row for row in rows) and unexplained(*rows) == set()


@pytest.mark.parametrize(
    "name",
    [
        "my_ratio",
        "my_rollout/tries",
        "student/my_number",
        "mismatch/mine",
        "eval/mine",
        "",
        "reward/",
        "critic/",
        "eval/eval/mine",
        "loss/mine",
        "a/b/c",
        "time/mine",
        "bogus/entropy",
        "my_rollout/grad_norm",
    ],
)
def test_a_metric_of_the_users_own_has_no_meaning(name):
    assert meaning(name) is None


def test_prefixes_say_whose_metric_it_is():
    plain = meaning("grad_norm").meaning
    assert meaning("critic/grad_norm").meaning == f"of critic: {plain}"
    assert meaning("student/grad_norm").meaning == f"of student: {plain}"
    assert meaning("eval/loss").meaning.startswith("of held-out rows: ")
    assert meaning("eval/critic/vf_loss").meaning.startswith("of held-out rows: of critic: ")
    assert "gsm8k" in meaning("reward/source/gsm8k").meaning
    assert "a/b part" in meaning("reward/part/a/b_part").meaning


def test_the_most_specific_pattern_counts():
    table = {"score/*": Metric("score of {}"), "score/late_*": Metric("score of a late {}")}
    assert find_metric("score/late_row", table).meaning == "score of a late row"
    assert find_metric("score/row", table).meaning == "score of row"


def test_charts_are_of_metrics_that_there_are():
    # Of a loss on held-out rows, and of a role with a prefix, too.
    names = {*declared(), *(f"{p}/{name}" for p in ("eval", "critic") for name in declared())}
    patterns = [(c.title, p) for charts in GROUPS.values() for c in charts for p in c.patterns]
    for title, pattern in [*patterns, *(("faults", pattern) for pattern in FAULTS)]:
        assert any(fnmatch.fnmatchcase(name, pattern) for name in names), (title, pattern)


def test_entries_are_whole():
    for name, metric in declared().items():
        text = metric.meaning
        assert text and text[0] == text[0].strip() and not text.endswith("."), name
        assert isinstance(metric.unit, str) and ("{}" in text) <= ("*" in name), name
        assert name.count("*") <= 1, name
        if metric.limits is not None:
            low, high = metric.limits
            assert low < high and len(metric.advice) > 20, name


def test_the_sandbox_tiers_are_numbered_as_they_are_logged():
    numbered = [f"{number} {tier}" for number, tier in enumerate(ALL_TIERS)]
    assert meaning("reward/sandbox_tier").meaning.endswith(", ".join(numbered))


def test_every_range_warns_below_and_above_and_for_nan():
    assert len(LIMITED) == 10
    for name, metric in LIMITED.items():
        low, high = metric.limits
        for value in (low - 0.01, high + 0.01, math.nan):
            [text] = health_warnings({name: value})
            assert text.startswith(f"{name} is ") and text.endswith(metric.advice)
        assert health_warnings({name: low}) == [] == health_warnings({name: high})


OWN = """
import jax.numpy as jnp

from rljax.contracts import contract
from rljax.metric import Metric

METRICS = {
    "my_ratio": Metric("new over <old> probability", "ratio", limits=(2.0, 3.0),
                       advice="look at what my_loss divides by"),
    "my_share": Metric("tokens that my_loss holds", "share", "above 0.7"),
}


@contract(reads=("advantages", "old_logprobs"), metrics=METRICS)
def my_loss(policy, batch):
    ratio = jnp.exp(policy.logprobs - batch.old_logprobs)
    return -batch.advantages * ratio, {"my_ratio": ratio, "my_share": 1 + 0 * ratio, "mine": ratio}
"""


@pytest.mark.slow
def test_the_metrics_of_a_users_contract_reach_the_report_and_warn(tmp_path):
    (tmp_path / "own_loss.py").write_text(OWN)
    run = tmp_path / "run"
    own = f"{tmp_path}/own_loss.py:my_loss"
    config = tiny_config(
        run,
        model="decoder(layers=1, embed=32, mlp=32, heads=1, kv_heads=1, head_dim=32)",
        steps=2,
        sft__steps=0,
        evaluate__prompts=4,
        evaluate__every_steps=0,
        algorithm__policy_loss=own,
    )
    summary = train_on_one(config)
    assert summary["faults"]["unhealthy/my_ratio"] == 2
    meanings = json.loads((run / "meanings.json").read_text())
    assert meanings["my_share"] == {
        "meaning": "tokens that my_loss holds",
        "unit": "share",
        "healthy": "above 0.7",
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {name for row in rows for name in row} - NO_METRICS
    assert logged - meanings.keys() == {"mine"}  # the rest is declared by modules of rljax
    page = (run / "report.html").read_text()
    assert "New over &lt;old&gt; probability. Healthy: 2 to 3" in page
    assert "Outside: look at what my_loss divides by" in page
    assert "Tokens that my_loss holds" in page and "Mean score of the step&#x27;s" in page
    # Another machine has the folder alone, and a run that goes on keeps what it has said.
    (run / "meanings.json").unlink()
    assert "Healthy:" not in write_report(run).read_text()
    Meanings(run, {}).log(3, {"loss": 1.0, "my_share": 1.0})
    goes_on = Meanings(run, {"my_share": Metric("a", "b", "c")})
    goes_on.log(4, {"my_share": 1.0})
    assert read_run(run).meanings.keys() == {"loss", "my_share"}


def test_metrics_of_a_contract_are_those_for_the_options_of_the_config(tmp_path):
    (tmp_path / "own.py").write_text(
        "from rljax.contracts import contract\n"
        "from rljax.metric import Metric\n"
        "@contract(metrics=lambda o: {f\"m_{o['width']}\": Metric('a')})\n"
        "def my_loss(policy, batch, *, width): ...\n"
        "@contract(metrics={'inner': Metric('b')})\n"
        "def my_part(policy, batch): ...\n"
    )
    file = f"{tmp_path}/own.py"
    loss = f"{file}:my_loss(width=7)"
    config = tiny_config(
        tmp_path, algorithm__policy_loss=loss, dataflow=f"cgpo(x='{file}:my_part')"
    )
    assert own_metrics(config).keys() == {"m_7", "inner"}


def test_a_contract_declares_metrics_and_nothing_else():
    for wrong in ({"my_ratio": "a ratio"}, ["my_ratio"]):
        with pytest.raises(InputError, match="contract\\(metrics"):
            spec(contract(metrics=wrong)(lambda policy, batch: None))
    known = {"my_ratio": Metric("a ratio", limits=(1, math.inf), advice="none")}
    assert spec(contract(metrics=known)(lambda policy, batch: None)).metrics == known
    assert known["my_ratio"].healthy == "1 or more"


@pytest.mark.parametrize(
    "row, metric",
    [
        ({"meaning": "m"}, Metric("m")),
        ({"meaning": "m", "limits": ["-inf", 2]}, Metric("m", limits=(-math.inf, 2.0))),
        ({"meaning": "m", "unit": 3, "other": [1]}, Metric("m", "3")),
        ({"meaning": "m", "limits": [1, 2, 3]}, None),
        ({"meaning": "m", "limits": ["x", 2]}, None),
        ({"meaning": "m", "limits": {"a": 1}}, None),
        ({"meaning": ["m"]}, None),
        ("m", None),
    ],
)
def test_declarations_of_a_strangers_folder_are_read_as_far_as_they_are_some(row, metric, tmp_path):
    (tmp_path / "meanings.json").write_text(json.dumps({"x": row, "y": {"meaning": "n"}}))
    found = read_run(tmp_path).meanings
    assert found == ({"x": metric} if metric else {}) | {"y": Metric("n")}
