"""The documentation as a site: it builds strictly, its generated pages are current, and every
config field, metric, component, preset and command has its place on some page."""

import os
import re
import sys

import pytest
from conftest import REPO
from explained import declared

os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort  # noqa: E402

from rljax.command import COMMANDS  # noqa: E402
from rljax.config import Config, field_names  # noqa: E402

DOCS = REPO / "docs"
sys.path.append(str(DOCS))
import generate  # noqa: E402


@pytest.fixture(scope="module")
def text() -> str:
    """What all pages say."""
    return "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """{path: text} of the generated pages."""
    return generate.pages()


def site(tmp_path, docs=DOCS):
    config = load_config(
        str(REPO / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(tmp_path / "site")
    )
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.on_shutdown()
    return config


def test_the_site_builds_strictly_with_every_page(tmp_path):
    site(tmp_path)
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    notebooks = {
        path.relative_to(REPO).with_suffix(".html") for path in REPO.glob("notebooks/*.ipynb")
    }
    assert len(notebooks) > 6
    pages |= notebooks
    assert {page for page in pages if not (tmp_path / "site" / page).is_file()} == set()
    made = (tmp_path / "site" / "architecture.html").read_text()
    for page in sorted(pages):  # every page is in the navigation, whoever added it
        assert page.name in made, f"{page} is in no tab of docs/hooks.py"
    for page in (tmp_path / "site").rglob("*.html"):  # nothing is loaded from elsewhere
        text = page.read_text()
        loaded = re.findall(r"<(?:img|script|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//", text)
        loaded += re.findall(r"<link[^>]*rel=[\"']?(?:stylesheet|preconnect)[^>]*//", text)
        assert loaded == [], page
    ppo = (tmp_path / "site" / "notebooks" / "ppo.html").read_text()
    assert "rljax" in ppo and "<code>" in ppo


def test_links_that_lead_nowhere_end_the_build(tmp_path, caplog):
    docs, lost = tmp_path / "docs", ["nowhere.md", "other.md#not", "nowhere.svg", "#here"]
    docs.mkdir()
    (docs / "other.md").write_text("# Other\n\n## There\n\n[a](index.md) [b](#there)\n")
    (docs / "index.md").write_text("# Page\n\n[a](other.md#there)\n")
    site(tmp_path, docs)
    assert caplog.text == ""
    (docs / "index.md").write_text("# Page\n\n" + "".join(f"![a]({x}) [b]({x})\n" for x in lost))
    with pytest.raises(Abort):
        site(tmp_path, docs)
    assert [x for x in lost if x not in caplog.text] == []


def test_generated_pages_are_current(made):
    stale = [
        path
        for path, text in made.items()
        if not (DOCS / path).is_file() or (DOCS / path).read_text() != text
    ]
    assert stale == [], f"run `python docs/generate.py`: {stale}"


def test_everything_is_mentioned(text):
    parts = {f.__name__ for functions in generate.components().values() for f in functions}
    shipped = {preset.name for of in ("presets", "offline") for preset in generate.presets(of)}
    shipped |= {path.stem for path in (REPO / "configs" / "agents").glob("*.py")}
    for kind, names in {
        "fields": field_names(Config()),
        "metrics": declared(),
        "components": parts,
        "configs": shipped,
    }.items():
        assert len(names) > 5
        assert [name for name in sorted(names) if f"`{name}`" not in text] == [], kind
    assert [name for name in COMMANDS if f"## rljax {name}\n" not in text] == []


def test_every_preset_is_in_one_family(made):
    for preset in generate.presets("presets"):
        homes = [page for page, text in made.items() if f"\n## {preset.name}\n" in text]
        assert len(homes) == 1, (preset.name, preset.config.dataflow, homes)


def test_errors_are_listed_with_rule_and_fix(tmp_path, made):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(
        "def f(n):\n"
        "    fix = 'first'\n"
        "    if n:\n"
        "        raise InputError(f'{n} is bad', rule='<' + ' 3', fix=fix)\n"
        "    fix, other = 'second', 1\n"
        "    def g():\n"
        "        raise InputError('worse', value=n, fix=fix)\n"
        "    problems.check(n > 0, 'batch.epochs', n, 'must be > 0', '1')\n"
        "    raise InputError(n)\n"
    )
    errors = generate.listed_errors(tmp_path)["room"]
    assert [(e.what, e.rule, e.fix) for e in errors] == [
        ("batch.epochs", "must be > 0", "1"),
        ("worse", "", "second"),
        ("… is bad", "< 3", "first"),
    ]
    assert made["guides/errors.md"].count("\n| ") > 900
