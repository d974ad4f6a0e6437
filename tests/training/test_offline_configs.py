"""Every config of configs/offline: it is valid, its docstring says how it is run, and its tiny
variant, run as a user would, brings the loss on held-out rows down."""

import pytest
from conftest import REPO, lanes
from tiny_run import train_on_one

from rljax.config import is_path
from rljax.config.flags import load_config_file
from rljax.validation import validate

NAMES = sorted(p.stem for p in (REPO / "configs" / "offline").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_its_docstring_says_how_to_run_it_and_its_fields_are_valid(name):
    path = REPO / "configs" / "offline" / f"{name}.py"
    text = path.read_text()
    assert f"rljax train offline/{name}:tiny" in text and "not measured" in text
    config = load_config_file(str(path))
    config.model, config.data.train = "decoder(layers=1)", "letter_feedback()"
    assert [w for w in validate(config) if "held out" not in w] == []


# The others' dataflows learn in test_offline.py, so their configs do in the slow lane.
QUICK = ["kto"]


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(QUICK, [n for n in NAMES if n not in QUICK]))
def test_the_tiny_variant_learns(name, tmp_path):
    config = load_config_file(str(REPO / "configs" / "offline" / f"{name}.py") + ":tiny")
    assert not is_path(config.data.train)
    config.run_dir, config.trackers, config.compilation_cache = str(tmp_path), (), ""
    config.export = False
    summary = train_on_one(config)
    before, after = summary["eval_before"]["eval/loss"], summary["eval_after"]["eval/loss"]
    assert after < 0.85 * before, (before, after)
