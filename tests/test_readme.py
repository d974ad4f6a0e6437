"""README and docs: short enough to read, every link leads somewhere, and what ships is named."""

import functools
import re

import pytest
from conftest import REPO

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
