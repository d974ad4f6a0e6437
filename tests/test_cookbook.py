"""docs/cookbook: every recipe has its parts, and every command is one that a run would take."""

import re
import shlex

import pytest
from conftest import REPO
from explained import unexplained

from rljax.config.flags import config_flags, load_config_file
from rljax.config.texts import with_texts
from rljax.validation import validate

FOLDER = REPO / "docs" / "cookbook"
RECIPES = [
    "math",
    "code",
    "json_output",
    "preference_pairs",
    "reward_model",
    "process_reward_model",
    "judge",
    "distillation",
    "length_control",
    "images",
]
PARTS = ("When", "Data", "Here, without a download", "With a model", "Result", "Watch", "Change it")
_OWN = re.compile(r"_FOLDER|\.jsonl|\.parquet")  # what a user brings
_EARLIER = re.compile(r"(?<!run_dir)=runs/")  # what the command before has written


def commands(name: str) -> list[list[str]]:
    """The training commands of a recipe."""
    blocks = re.findall(r"```bash\n(.*?)```", (FOLDER / f"{name}.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        shlex.split(line.split("rljax train ", 1)[1]) for line in lines if "rljax train " in line
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_parts_in_order_and_is_a_screen_long(name):
    text = (FOLDER / f"{name}.md").read_text()
    assert text.startswith("# ") and len(text.split()) < 700
    places = [re.search(rf"^\*\*{re.escape(part)}\b", text, re.MULTILINE) for part in PARTS]
    assert all(places), [part for part, at in zip(PARTS, places, strict=True) if not at]
    assert [at.start() for at in places] == sorted(at.start() for at in places)
    result = text.split("**Result.**")[1].split("**Watch")[0]
    assert re.search(r"\d\.\d", result) and "2026-11-2" in result and "not measured" in result


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_recipe_are_configs_with_their_fields(name):
    own = here = 0
    for arguments in commands(name):
        _, texts, (path, *rest) = config_flags(arguments)
        assert not rest, arguments
        config = with_texts(load_config_file(path), texts, "the page", "--config.")
        if _OWN.search(" ".join(arguments)):
            own += 1  # the files are not there, the fields are
            continue
        here += 1
        if not _EARLIER.search(" ".join(arguments)):
            assert validate(config) == []
    assert own and here


def test_the_index_names_every_recipe():
    linked = re.findall(r"\]\((\w+)\.md\)", (FOLDER / "index.md").read_text())
    assert linked[: len(RECIPES)] == RECIPES


def test_metrics_that_the_recipes_say_to_watch_are_known():
    """Names with a slash, in the paragraphs that say what to look at."""
    for name in RECIPES:
        text = (FOLDER / f"{name}.md").read_text()
        watched = text.split("**Watch")[1].split("**Change it")[0]
        names = set(re.findall(r"`([a-z_]+/[a-z_/]+)`", watched))
        assert unexplained(dict.fromkeys(names, 0.0)) == set(), name
