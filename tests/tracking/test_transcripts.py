"""Transcripts in report.html: whose they are, what each token shows, and that no text of a policy
or of an environment becomes a part of the page."""

import html.parser
import json
import re

import pytest

from rljax.report.page import write_report
from rljax.report.transcripts import MOST_MARKED
from rljax.tracking.episodes import episode_record, turn_record

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></div></section>\x00\x1b[31m\u202e"
    "&lt;b&gt;]]></style>\ud800"
)


def turn(pieces, observation="Guess.", reward=0.0, bad=False, forced=()):
    n = len(pieces)
    return turn_record(
        observation=observation,
        tokens=range(40, 40 + n),
        pieces=pieces,
        text="".join(pieces),
        logprobs=[-0.01, -1.5, -4.0, -0.5][:n] + [-1.0] * (n - 4),
        reward=reward,
        bad=bad,
        chosen=[i not in forced for i in range(n)],
        versions=[7] * n,
    )


def episode(number, group, total, turns, **fields):
    return {
        "step": 20,
        **episode_record(episode=number, group=group, total=total, turns=turns, **fields),
    }


class Page(html.parser.HTMLParser):
    """The elements of a page with their classes and titles, and the text inside; checks that every
    element is closed in its turn."""

    VOID = {"meta", "br", "i"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def classes(self):
        return [attrs.get("class", "") for _, attrs in self.attributes]


@pytest.fixture
def report(tmp_path):
    def written(rows) -> str:
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / "episodes.jsonl").write_text("".join(lines))
        return write_report(tmp_path).read_text()

    return written


def test_episodes_are_shown_turn_by_turn(report):
    best = [turn(["4", "2"], reward=-0.25), turn(["8", " ok", "!", "\n"], "higher", forced=(3,))]
    rows = [
        episode(0, 3, 0.9, best),
        episode(1, 3, 0.1, [turn(["nonsense"], bad=True)], finish="turns"),
        episode(2, 4, None, [turn(["x"])], status="raised", message="ValueError: boom", seat="X"),
        episode(3, 4, 0.5, [turn(["long", " and", " longer"] * 4)]),
        {**episode(9, 0, 0.3, best), "step": 10},
    ]
    text = report(rows)
    page = Page(text)
    said = "".join(page.texts)
    for title in ("Best", "Worst", "Longest", "Failed: raised", "Group 3", "Group 4", "ValueError"):
        assert title in said, title
    assert "of step 20" in said and "step 10: 1 episode, return 0.3 to 0.3" in said
    assert "ended by turns" in said and "episode 2 of group 4, seat X" in said
    assert 'title="id 40, log-prob -0.010, p 99.0 %, version 7">4<' in text
    assert 'title="id 43, log-prob -0.500, p 60.7 %, version 7, forced"' in text
    assert '<span class="t f"' in text and '<span class="t p2"' in text.replace("p3", "p2")
    assert re.search(r'class="margin">1<br>-0.25<', text)
    assert page.classes().count("siblings") == 2
    bad = [c for c in page.classes() if "bad-call" in c and "reply" in c]
    assert len(bad) == 2  # the worst one alone, and in its group
    assert "<h2>Episodes" not in report([])  # a run without an environment has no such section


def test_no_text_becomes_markup(report):
    hostile = [turn([HOSTILE, HOSTILE], HOSTILE, bad=True)]
    names = dict(seat=HOSTILE, status=HOSTILE, finish=HOSTILE, message=HOSTILE)
    rows = [
        episode(0, 0, 1.0, hostile, **names),
        episode(1, 0, 0.0, hostile),
        {"step": 20, "episode": HOSTILE, "group": HOSTILE, "return": HOSTILE, "turns": HOSTILE},
        {
            "step": 20,
            "turns": [
                HOSTILE,
                {
                    "pieces": [{HOSTILE: 1}, None],
                    "logprobs": ["x"],
                    "tokens": {"a": 1},
                    "reward": HOSTILE,
                },
            ],
        },
        {"step": HOSTILE},
        {"step": 20},
    ]
    plain, page = Page(report([episode(0, 0, 1.0, [turn(["a"])])])), Page(report(rows))
    assert set(page.tags) <= {*plain.tags, "pre", "br"}
    assert not {"script", "img"} & set(page.tags)

    def names(page):
        return {name for _, attributes in page.attributes for name in attributes}

    assert names(page) == names(plain)
    said = "".join(page.texts)
    assert "<script>alert(1)</script>" in said  # as text
    assert not re.search("[\x00\x1b\u202e]", said)


def test_the_page_stays_a_page(report):
    """Beyond MOST_MARKED tokens texts are shown without numbers; older steps are counted."""
    many = ["ab "] * 3000
    rows = [episode(i, i, float(i), [turn(many)]) for i in range(3)]
    rows += [{**row, "step": step} for step in range(14, 0, -1) for row in rows[:1]]
    text = report(rows)
    assert text.count('<span class="t p') <= MOST_MARKED + 4  # and those of the legend
    assert "2 more steps are in episodes.jsonl" in text and len(text) < 4e6
