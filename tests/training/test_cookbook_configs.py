"""The configs of docs/cookbook that are no presets: valid, and they learn past a mark."""

import numpy as np
import pytest
from conftest import REPO
from tiny_run import metrics_rows, train_on_one

from rljax.config.flags import load_config_file
from rljax.validation import validate

# Held-out greedy accuracy before GRPO at most, after it at least.
MARKS = {"json_output": (0.5, 0.7), "code_tests": (0.7, 0.75), "length_control": (0.2, 0.5)}


def config_of(name: str, variant: str = ""):
    return load_config_file(str(REPO / "configs" / f"{name}.py") + variant)


@pytest.mark.parametrize("name", MARKS)
def test_the_config_is_valid_and_its_tiny_variant_is_the_same_algorithm(name):
    config, small = config_of(name), config_of(name, ":tiny")
    assert validate(config) == validate(small) == []
    assert config.algorithm == small.algorithm and config.data == small.data
    assert config.reward == small.reward


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKS)
def test_it_learns(name, tmp_path):
    config = config_of(name)
    config.run_dir, config.trackers, config.export = str(tmp_path), (), False
    summary = train_on_one(config)
    most, least = MARKS[name]
    before, after = (summary[f"accuracy_{when}"]["value"] for when in ("before", "after"))
    assert before < most and after > least, (before, after)
    if name == "length_control":
        errors = [r[part] for r in metrics_rows(tmp_path) if (part := ERROR) in r]
        assert np.mean(errors[:5]) > 1.5 and np.mean(errors[-5:]) < 1.0, errors


ERROR = "reward/part/length_error"
