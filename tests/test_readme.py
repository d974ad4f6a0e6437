"""README and docs: short enough to read, every link leads somewhere, what ships is named, commands
are written in one way, pictures scale, and headings are words."""

import functools
import re
import struct
import sys
from xml.etree import ElementTree

import pytest
from conftest import REPO

from rljax.command import COMMANDS

sys.path.append(str(REPO / "docs"))
import hooks  # noqa: E402
import pictures  # noqa: E402

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", path.read_text())


@functools.cache
def anchors(path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.*)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).lower() for h in headings)
    return {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_every_link_of_a_page_leads_somewhere(path):
    lost = []
    for target in _LINK.findall(prose(path)):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert not lost


def test_the_readme_is_short_and_shows_the_loop_as_it_is():
    text = (REPO / "README.md").read_text()
    assert len(text.splitlines()) <= 190
    shown = re.search(r"<!-- examples/grpo_loop.py -->\n```python\n(.*?)\n```", text, re.DOTALL)[1]
    assert shown in (REPO / "examples" / "grpo_loop.py").read_text()


def test_every_preset_and_agent_is_named():
    methods = (REPO / "docs" / "methods" / "presets.md").read_text()
    environments = (REPO / "docs" / "guides" / "environments.md").read_text()
    presets = {p.stem for p in (REPO / "configs" / "presets").glob("*.py")}
    agents = {p.stem for p in (REPO / "configs" / "agents").glob("*.py")}
    assert [n for n in sorted(presets) if not re.search(rf"\b{n}\b", methods)] == []
    assert [n for n in sorted(agents) if not re.search(rf"\b{n}\b", environments)] == []


# -- the first hour

FIRST_HOUR = 3_000  # words


def first_hour() -> list:
    """The pages that the site's first page lists, in order, itself first."""
    index = REPO / "docs" / "index.md"
    part = re.search(r"^## The first hour\n(.*?)^## ", index.read_text(), re.S | re.M)[1]
    found = re.findall(r"^(\d+)\. \[[^\]]+\]\((\S+)\)", part, re.M)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [index, *(index.parent / target for _, target in found)]


def test_the_first_hour_is_short_enough():
    pages = first_hour()
    words = {path.name: len(path.read_text().split()) for path in pages}
    named = [path.relative_to(REPO / "docs").as_posix() for path in pages[1:]]
    assert list(dict(hooks.TABS)["Start"][: len(named)]) == named  # so does the navigation
    assert 4 <= len(pages) <= 8 and 1_500 < sum(words.values()) <= FIRST_HOUR, words


@pytest.mark.parametrize("path", [REPO / "README.md", REPO / "docs" / "index.md"], ids=str)
def test_the_first_screen_shows_what_it_is(path):
    """Both pictures and an installation before anything else, then the commands in a table."""
    text = path.read_text()
    start = " ".join(text.split()[:260])
    assert start.index("figures/report.png") < start.index("figures/panel.svg")
    assert re.search(r"pip install \.", start) and "rljax-lm" in text
    table = re.search(r"^## Commands\n\n((?:\|.*\n)+)", text, re.M)[1]
    named = set(re.findall(r"`rljax ([a-z]+)", table))
    assert len(named) >= 10 and named <= {name.split()[0] for name in COMMANDS}
    assert named >= {"train", "demo", "evaluate", "report", "doctor"}


# -- one dialect


def of_readers() -> dict:
    """{page: text} of what readers are given: pages, docstrings of configs, notebooks."""
    files = [*PAGES, *(REPO / "configs").rglob("*.py"), *(REPO / "notebooks").glob("*.ipynb")]
    return {str(path.relative_to(REPO)): path.read_text() for path in files}


def other_dialect(text: str) -> list[str]:
    """Commands that are written in another way than `rljax COMMAND CONFIG`."""
    return re.findall(
        r"(?:python3? |bin/python )launchers/\w+\.py|launchers/\w+\.py --|bin/rljax\b"
        r"|(?<!\w/)rljax (?:train|plan|sweep|play|inspect|pipeline)[^\n`]*? --config=\S+",
        text,
    )


# The quickstart has no environment that is on PATH; one page says what a clone's launchers are.
ALLOWED = {
    "README.md": [".venv/bin/rljax"],
    "docs/reference/commands.md": ["python launchers/train.py"],
}


def test_commands_are_written_in_one_way():
    for name, text in of_readers().items():
        found = [f".venv/{x}" if x == "bin/rljax" else x for x in other_dialect(text)]
        assert found == ALLOWED.get(name, []), name
        if not name.endswith(("README.md", "install.md")):  # which make the environment
            assert ".venv/bin/" not in text, name


def test_another_dialect_is_found():
    for line in (
        ".venv/bin/python launchers/train.py --config=configs/quickstart.py",
        "`launchers/push.py --to=ME/NAME`",
        "venv/bin/rljax train x",
        "rljax train --config=configs/a.py",
    ):
        assert other_dialect(line), line
    for line in ("rljax train quickstart --config.seed=1", "launchers/*.py", "`RUN/config.json`"):
        assert not other_dialect(line), line


def test_no_page_refers_to_documents_that_are_not_here():
    """Names in capitals with a chapter, as of a design document that is kept elsewhere."""
    sources = {str(p): p.read_text() for p in (REPO / "rljax").rglob("*.py")}
    for name, text in {**of_readers(), **sources}.items():
        assert not re.search(r"\b(ALGORITHMS|DESIGN|CHECKLIST|PITFALLS)\b", text), name


def path_headings(text: str) -> list[str]:
    """Headings that are, or hold, the path of a file or of a folder."""
    headings = re.findall(r"^#{1,6} (.*)$", _FENCE.sub("", text), re.M)
    return [
        h
        for h in headings
        if re.search(r"\w/\w*[`)\]]|\w+\.(?:py|md|sh|json)\b|`\w+/", h)
        and not re.fullmatch(r"\[[^\]`/]+\]\([\w/]+\.md\)", h)
    ]


def test_no_heading_is_a_path():
    assert {path.name: found for path in PAGES if (found := path_headings(path.read_text()))} == {}
    for bad in (
        "## rljax/batch.py",
        "### Batch ([`rljax/batch.py`](../rljax/batch.py))",
        "# `rljax/roles/`",
        "## See hooks.py",
    ):
        assert path_headings(bad), bad
    for good in ("## Reward", "## [From a file](offline.md)", "## Sampler and trainer"):
        assert not path_headings(good), good


def test_diagrams_are_pictures_that_scale():
    """No drawing out of characters, which is cut off on a narrow screen."""
    for path in PAGES:
        assert not re.search(r"[\u2500-\u257f\u25b2\u25ba\u25bc\u25c4]", path.read_text()), path
    for name, diagram in pictures.DIAGRAMS.items():
        assert (pictures.FIGURES / name).read_text() == pictures.draw(*diagram)
        width, _, boxes, _ = diagram
        for x, _, wide, title, lines in boxes:  # no text is wider than its box
            assert x + wide < width
            assert max(9.5 * len(title), *(7.2 * len(line) for line in lines)) < wide, title


@pytest.mark.parametrize("path", sorted(pictures.FIGURES.iterdir()), ids=lambda p: p.name)
def test_pictures_are_small_and_load_nothing(path):
    assert path.stat().st_size < 200_000
    if path.suffix == ".svg":
        text = path.read_text()
        assert ElementTree.fromstring(text).get("viewBox")
        assert "@font-face" not in text and "@import" not in text and "url(http" not in text
        assert not re.search(r"(?:href|src)=[\"']https?:", text)
    else:
        assert path.suffix == ".png" and path.read_bytes()[12:16] == b"IHDR"
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (pictures.WIDTH, pictures.HEIGHT)
