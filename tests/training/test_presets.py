"""Every preset: its config is whole, its tiny variant learns, with a flipped sign it does not."""

import ast

import pytest
from conftest import REPO
from explained import unexplained
from preset_runs import (
    NEED_TEACHER,
    NO_REWARD,
    PRESETS,
    SEARCHES,
    Shared,
    mean,
    preset_config,
    set_teachers,
)

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.config.flags import load_config_file
from rljax.validation import validate

MARK = 0.85  # mean score of the last five steps; it starts below 0.6


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("presets"))
    yield runs
    runs.close()


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_is_whole(name, tmp_path):
    """Full size: valid once a model and data are named. Tiny: the same algorithm, valid as is."""
    path = str(REPO / "configs" / "presets" / f"{name}.py")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.parquet").write_bytes(b"")
    config = load_config_file(path)
    config.model = str(tmp_path / "model")
    config.data.train = config.data.test = str(tmp_path / "train.parquet")
    small = preset_config(name)
    if name in NEED_TEACHER:
        set_teachers(config, config.model)
        set_teachers(small, config.model)
    assert validate(config) == []
    assert validate(small) == []
    text = ast.get_docstring(ast.parse(open(path).read()))
    assert f"rljax train presets/{name}:tiny" in text and "not measured" in text
    tiny = preset_config(name).algorithm
    for field in ("policy_loss", "value_loss", "correction", "filters", "kl_in_loss"):
        assert vars(tiny)[field] == vars(config.algorithm)[field]
    for field in ("advantage", "reduction", "collect"):  # their limits in tokens, their rounds
        assert vars(tiny)[field].split("(")[0] == vars(config.algorithm)[field].split("(")[0]


def test_scalerl_is_its_checklist():
    """The parts of the recipe, one line for each."""
    config = load_config_file(str(REPO / "configs" / "presets" / "scalerl.py"))
    algorithm, batch, sampler = config.algorithm, config.batch, config.sampler
    rows = batch.prompts_per_step * batch.samples_per_prompt
    assert (batch.prompts_per_step, batch.samples_per_prompt, rows) == (48, 16, 768)
    # PipelineRL with k = 8: steps of one update each, at most 8 of them ahead, caches kept.
    assert (rows // batch.sequences_per_optimizer_step) * batch.epochs == 1
    assert (config.rollouts.max_staleness, config.rollouts.steps_ahead) == (8, 8)
    assert config.rollouts.in_flight_cache == "keep" and config.rollouts.partial_mask == "none"
    assert algorithm.policy_loss == "cispo(ratio_max=5.0, behaviour='sampler')"
    assert config.model_settings.head_in_float32
    assert algorithm.reduction == "prompt_mean" and algorithm.advantage == "batch_normalised()"
    assert algorithm.filters == ("live_groups()",) and config.data.retire_at_pass_rate == 0.9
    assert sampler.thinking_tokens == (10240, 12288)  # interrupted by force
    assert config.data.max_prompt_tokens + sampler.max_response_tokens == 16384
    assert algorithm.reward_shaping == ("scaled(scale=2.0, shift=-0.5)",)  # rewards of -1 and 1
    assert algorithm.kl_in_loss == algorithm.kl_in_reward == 0


@pytest.mark.parametrize("variant", ["", "filter"])
def test_dapo_is_its_four_switches(variant):
    """Clip-higher, overlong responses punished or filtered, oversampling, a loss of tokens."""
    config = load_config_file(f"{REPO / 'configs' / 'presets' / 'dapo.py'}:{variant}".rstrip(":"))
    algorithm = config.algorithm
    options = resolve(algorithm.policy_loss, NAMESPACES["policy_loss"]).options
    assert 0 < options["clip_low"] < options["clip_high"]
    punished = any("soft_overlong" in rule for rule in algorithm.reward_shaping)
    assert (punished, algorithm.filters) == ((True, ()), (False, ("overlong()",)))[variant != ""]
    assert resolve(algorithm.collect, NAMESPACES["collect"]).options["oversample"] == 3
    assert algorithm.reduction == "token_mean"
    assert algorithm.kl_in_loss == algorithm.kl_in_reward == 0


def test_olmorl_is_its_seven_changes():
    """Groups without a gradient are filtered, active sampling, a loss of tokens, no KL,
    clip-higher, truncated importance weights, no deviation in the advantage."""
    config = load_config_file(str(REPO / "configs" / "presets" / "olmorl.py"))
    algorithm = config.algorithm
    assert algorithm.filters == ("live_groups()",)
    assert algorithm.collect == "active()"
    assert algorithm.reduction in ("", "token_mean")
    assert algorithm.kl_in_loss == algorithm.kl_in_reward == 0
    clip = resolve(algorithm.policy_loss, NAMESPACES["policy_loss"]).options
    assert clip["clip_low"] < clip["clip_high"] and clip["dual_clip"] is None
    weights = resolve(algorithm.correction, NAMESPACES["correction"]).options
    assert (weights["level"], weights["mode"]) == ("token", "truncate")
    assert resolve(algorithm.advantage, NAMESPACES["advantage"]).options["std"] == "none"


# One of every dataflow and of every kind of rule; the slow lane runs all presets on three seeds.
QUICK = ("vapo",)


def learns(shared, name: str, seed: int) -> None:
    rewards, before, after, rows = shared.train(name, seed)
    if name in NO_REWARD:
        name = "teacher/gap" if "teacher/gap" in rows[0] else "loss"
        gaps = [float(r[name]) for r in rows]
        assert before < 0.7 and gaps[-1] < 0.25 * gaps[0], gaps
    else:
        start = before if name in SEARCHES else mean(rewards[:2])
        assert start < (0.7 if name in SEARCHES else 0.6), rewards
        assert mean(rewards[-5:]) > MARK, rewards
    assert after > MARK, after  # greedy, held-out prompts
    assert not sum(r.get("skipped_steps", 0) for r in rows)
    assert unexplained(*rows) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_it_learns(shared, name):
    learns(shared, name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_it_learns_on_three_seeds(shared, name):
    for seed in range(3):
        learns(shared, name, seed)


def unlearns(shared, name: str) -> None:
    """A negative learning rate climbs the loss: what a flipped sign does, for any loss."""
    rewards, _, after, _ = shared.train(name, 0, steps=20, sign=-1.0)
    assert after < MARK and not (rewards and mean(rewards[-5:]) > 0.6), rewards


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vapo"])
def test_with_its_sign_flipped_it_does_not(shared, name):
    unlearns(shared, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_with_its_sign_flipped_no_preset_learns(shared, name):
    unlearns(shared, name)
