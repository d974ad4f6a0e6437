"""Every kind of page, made of files in which every text would do something: the page holds what its
template wrote and text, by a strict parser and by a browser."""

import html.parser
import json
import re
import urllib.parse

import browser
import pytest
from conftest import REPO
from hostile_pages import ACTIONS, STAGE, Texts, card, hostile_texts, write_pages, write_run

from rljax.report.comparison import write_comparison
from rljax.report.pipeline import write_pipeline_page
from rljax.report.samples import of_prompts
from rljax.report.style import document

TEXTS = hostile_texts(2_000)
HARMLESS = [f"plain {k}" for k in range(2_000)]
VOID = {"meta", "br"}
APART = 250  # as many as a page surely shows
KINDS = ("report", "comparison", "pipeline", "samples", "inline", "framed", "live")
# Attributes that hold numbers and names of the template's own.
FREE = {"title", "aria-label", "srcdoc"}


class Page(html.parser.HTMLParser):
    """Returns what a page is made of: its elements with their attributes, and its texts. Raises
    AssertionError for an element that is not closed in its turn."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.made, self.values, self.targets, self.frames = [], set(), set(), [], []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        self.made.add((tag, tuple(sorted(name for name, _ in attributes))))
        for name, value in attributes:
            if name == "href":
                self.targets.append(value)
            elif name == "srcdoc":
                self.frames.append(Page(value))
            elif name not in FREE:
                self.values.add((tag, name, re.sub(r"-?[\d.]+(?:e-?\d+)?", "0", value or "")))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data[:40]}")

    def handle_pi(self, data):
        raise AssertionError(f"an instruction: {data[:40]}")

    def unknown_decl(self, data):
        raise AssertionError(f"a declaration: {data[:40]}")

    def handle_data(self, data):
        self.texts.append(data)

    def parts(self) -> set:
        """All that is no text, of the frames in it, too. Coordinates count as one."""
        own = {("element", *one) for one in self.made} | {
            ("value", tag, name, re.sub(r"[0 ,]+", "0", value)) for tag, name, value in self.values
        }
        return own.union(*(frame.parts() for frame in self.frames))

    def links(self) -> list:
        return self.targets + [link for frame in self.frames for link in frame.links()]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{name: {kind: page}} of harmless and of hostile texts; in "numbers" texts stand in place of
    some numbers, too."""
    root = tmp_path_factory.mktemp("pages")
    given = {"harmless": HARMLESS, "harmless, in numbers": HARMLESS, "in numbers": TEXTS[::-1]}
    given |= {f"texts from {at}": TEXTS[at : at + APART] for at in range(0, len(TEXTS), APART)}
    return {
        name: write_pages(root / name, texts, numbers="numbers" in name)
        for name, texts in given.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_holds_what_its_template_writes_and_text(pages, kind):
    read = {name: Page(made[kind].read_text(encoding="utf-8")) for name, made in pages.items()}
    known = read.pop("harmless").parts() | read.pop("harmless, in numbers").parts()
    for page in read.values():
        assert page.parts() <= known, sorted(page.parts() - known)[:5]
        for link in page.links():
            assert not re.match(r"\w+:|//|#", urllib.parse.unquote(link)) and ":" not in link, link
        shown = "".join(page.texts + [t for frame in page.frames for t in frame.texts])
        assert any(action in shown for action in ACTIONS)


@pytest.mark.slow
def test_the_texts_reach_the_pages(pages):
    """A field that is left out would prove nothing. Some are shortened, or stand in names of
    files."""
    shown = "".join(
        "".join(page.texts + [t for frame in page.frames for t in frame.texts])
        for made in pages.values()
        for page in (Page(p.read_text(encoding="utf-8")) for p in made.values())
    )
    squeezed = "".join(shown.split())
    found = [text for text in TEXTS if "".join(text.split()).replace("\0", "\ufffd") in squeezed]
    assert len(found) > 1_300


def test_one_function_escapes():
    """No page is made with another."""
    found = [
        path.relative_to(REPO)
        for path in sorted((REPO / "rljax").rglob("*.py"))
        if re.search(r"\bhtml\.escape\(|\bsaxutils\b|\bxml_escape\b|markupsafe", path.read_text())
    ]
    assert [str(path) for path in found] == ["rljax/tracking/charts.py"]


def test_a_folder_is_no_address(tmp_path):
    """A link to a folder quotes its name; one of another folder is not linked."""
    texts = Texts(HARMLESS)
    folders = [tmp_path / name for name in ("javascript:alert(1)", 'x" onclick="alert(1)')]
    for folder in folders:
        (write_run(folder, texts) / "report.html").write_text("x")
    names = [*(folder.name for folder in folders), "//127.0.0.1", "../run"]
    stages = [STAGE | {"stage": name, "metrics": {}} for name in names]
    lineage = {"pipeline": "p", "stages": stages, "same_prompts": []}
    (tmp_path / "lineage.json").write_text(json.dumps(lineage))
    for page in (write_pipeline_page(tmp_path), write_comparison(folders, tmp_path / "c.html")):
        links = Page(page.read_text(encoding="utf-8")).links()
        assert len(links) == 2 and not any(":" in one or one.startswith("/") for one in links)
        assert all((tmp_path / urllib.parse.unquote(one)).is_file() for one in links)


def rendered(tmp_path, texts) -> str:
    markdown = pytest.importorskip("markdown", reason="python-markdown renders the card")
    whole = card(tmp_path, texts)
    assert whole.startswith("---\n")
    body = whole.partition("\n---\n")[2]
    return markdown.markdown(body, extensions=["tables", "fenced_code"])


def test_a_card_holds_what_its_template_writes_and_text(tmp_path):
    known = Page(rendered(tmp_path / "harmless", HARMLESS))
    for at in range(0, len(TEXTS), 100):
        page = Page(rendered(tmp_path / f"hostile{at}", TEXTS[at : at + 100]))
        assert {tag for tag, _ in page.made} <= {tag for tag, _ in known.made}
        assert page.targets == known.targets, page.targets


def test_a_card_has_one_front_matter(tmp_path):
    import yaml

    text = card(tmp_path, ["---\nlicense: mit\n---\n", "a: b\n---\n<script>", "\n---\n\n# x"])
    head = yaml.safe_load(text.partition("\n---\n")[0].removeprefix("---\n"))
    assert set(head) <= {"license", "datasets", "library_name", "pipeline_tag", "tags"}


# -- in a browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    opened = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.skipif(browser.path() is None, reason="no Chromium is installed")
def test_a_browser_sees_what_an_unescaped_text_does(chromium, tmp_path):
    """The listener hears: a page with such texts as they are opens dialogs and asks the network."""
    page = tmp_path / "unescaped.html"
    body = "".join(f"<p>{text}</p>" for text in TEXTS[:150] if "refresh" not in text.lower())
    page.write_bytes(document("bad", body).encode("utf-8", "replace"))
    did, said = chromium.open(page)
    kinds = {one.partition(" ")[0] for one in did}
    assert {"dialog", "request"} <= kinds and said["bad"]


@pytest.mark.slow
@pytest.mark.skipif(browser.path() is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "columns"), [(320, 1), (400, 1), (700, 2), (1180, 3)])
def test_completions_beside_each_other_are_whole_in_every_window(
    chromium, tmp_path, width, columns
):
    samples = [
        {"step": 1, "prompt": "p" * 90, "response": f"{'word ' * 40}{'r' * 900}{i}", "reward": i}
        for i in range(3)
    ]
    page = tmp_path / "siblings.html"
    page.write_text(document("a run", of_prompts(samples, 1)), encoding="utf-8")
    expression = """(() => {
      const cells = [...document.querySelectorAll('.siblings > *')]
        .map(e => e.getBoundingClientRect());
      const edge = Math.max(...cells.map(e => e.right)), sides = new Set(cells.map(e => e.left));
      const scroll = document.documentElement.scrollWidth;
      return JSON.stringify([cells.length, edge <= innerWidth && scroll <= innerWidth, sides.size]);
    })()"""
    assert json.loads(chromium.measure(page, expression, width)) == [3, True, columns]


@pytest.mark.slow
@pytest.mark.skipif(browser.path() is None, reason="no Chromium is installed")
def test_nothing_happens_in_a_browser(chromium, pages, tmp_path):
    every = {
        f"{kind} of {name}": page
        for name, made in pages.items()
        if not name.startswith("harmless")
        for kind, page in made.items()
    }
    card_page = tmp_path / "card.html"
    body = rendered(tmp_path / "run", TEXTS)
    card_page.write_bytes(document("card", body).encode("utf-8", "replace"))
    for name, page in (every | {"card": card_page}).items():
        did, said = chromium.open(page)
        assert did == [], (name, did[:5])
        assert said["bad"] == [] and said["elements"] > 10, (name, said["bad"][:5])
        assert said["title"] != "owned"
