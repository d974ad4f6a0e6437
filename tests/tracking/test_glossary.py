"""The glossary: every metric that rljax logs has a meaning, and a user's own has none."""

import ast
import fnmatch
import json
import math
import re

import jax
import pytest
from conftest import REPO, lanes
from explained import unexplained
from preset_runs import NEED_TEACHER, PRESETS, preset_config
from tiny_offline import offline_config
from tiny_run import tiny_config, train_on_one

from rljax import setup as build
from rljax.report.curves import GROUPS
from rljax.report.glossary import METRICS, MISMATCH
from rljax.report.meanings import health_warnings, meaning
from rljax.report.page import FAULTS
from rljax.rewards.sandbox.tiers import ALL_TIERS
from rljax.setup.dry_run import dry_run

# The rooms that make metrics, and names with a slash there that are none.
ROOMS = (
    "correction", "dataflows", "evaluation/policy.py", "learn", "losses", "roles", "rollout",
    "shaping", "training",
)  # fmt: skip
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


def _written_names() -> dict[str, str]:
    """Every string of the rooms that looks like the name of a metric, and its file."""
    names = {}
    for room in ROOMS:
        place = REPO / "rljax" / room
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            tree = ast.parse(path.read_text())
            inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
                      for part in node.values}  # fmt: skip
            for node in ast.walk(tree):
                text = "" if id(node) in inside else _text(node)
                if METRIC.fullmatch(text):
                    names[text] = str(path.relative_to(REPO))
    return names


def test_every_name_with_a_slash_in_the_code_has_a_meaning():
    names = _written_names()
    assert len(names) > 100 and "reward/mean" not in unexplained(names)
    assert {"collect/rounds", "mismatch/mismatch_*", "data/chance/*", "ref_kl/*"} <= names.keys()
    # A star is tried as names that it stands for; where it stands for none of ours, as any name.
    unknown = {}
    for name, path in names.items():
        pattern = re.compile(re.escape(name).replace(r"\*", ".+"))
        if meaning(name) is None and not any(pattern.fullmatch(known) for known in METRICS):
            unknown[name] = path
    assert unknown.keys() - PARTS - NONE == set(), f"without rljax/report/glossary.py: {unknown}"


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
    return {name for phase in setup.phases for name in dry_run(setup, phase)[1]}


@pytest.mark.parametrize("name", lanes(QUICK, OTHERS))
def test_every_metric_of_a_preset_has_a_meaning(name):
    names = _logged(preset_config(name))
    assert len(names) > 40 and unexplained(names) == set()


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
    ["my_ratio", "my_rollout/tries", "student/my_number", "mismatch/mine", "eval/mine", "",
     "reward/", "critic/", "eval/eval/mine", "loss/mine", "a/b/c", "time/mine"],
)  # fmt: skip
def test_a_metric_of_the_users_own_has_no_meaning(name):
    assert meaning(name) is None


def test_prefixes_say_whose_metric_it_is():
    plain = meaning("grad_norm").text
    assert meaning("critic/grad_norm").text == f"of critic: {plain}"
    assert meaning("student/grad_norm").text == f"of student: {plain}"
    assert meaning("eval/loss").text.startswith("of held-out rows: ")
    assert meaning("eval/critic/vf_loss").text.startswith("of held-out rows: of critic: ")
    assert "gsm8k" in meaning("reward/source/gsm8k").text
    assert "a/b part" in meaning("reward/part/a/b_part").text


def test_charts_are_of_metrics_that_there_are():
    # Of a loss on held-out rows, and of a role with a prefix, too.
    names = {*METRICS, *(f"{prefix}/{name}" for prefix in ("eval", "critic") for name in METRICS)}
    patterns = [(c.title, p) for _, charts in GROUPS for c in charts for p in c.patterns]
    for title, pattern in [*patterns, *(("faults", pattern) for pattern in FAULTS)]:
        assert any(fnmatch.fnmatchcase(name, pattern) for name in names), (title, pattern)


def test_entries_are_whole():
    for name, (text, unit, healthy) in METRICS.items():
        assert text and text[0] == text[0].strip() and not text.endswith("."), name
        assert isinstance(unit, str) and ("{}" in text) <= ("*" in name), name
        if not isinstance(healthy, str):
            low, high, advice = healthy
            assert low < high and len(advice) > 20, name


def test_the_sandbox_tiers_are_numbered_as_they_are_logged():
    numbered = [f"{number} {tier}" for number, tier in enumerate(ALL_TIERS)]
    assert meaning("reward/sandbox_tier").text.endswith(", ".join(numbered))


def test_every_range_warns_below_and_above_and_for_nan():
    limited = [name for name in MISMATCH if not isinstance(MISMATCH[name][2], str)]
    assert len(limited) == 10
    for name in limited:
        low, high, advice = MISMATCH[name][2]
        for value in (low - 0.01, high + 0.01, math.nan):
            [text] = health_warnings({f"mismatch/{name}": value})
            assert text.startswith(f"mismatch/{name} is ") and text.endswith(advice)
        assert health_warnings({f"mismatch/{name}": value for value in (low, high)}) == []
