"""Draws the pictures of README, the first page of the site and the architecture page.

python docs/pictures.py            diagrams, and the two pictures of a real run of the quickstart
python docs/pictures.py diagrams   the diagrams alone

It trains the quickstart (about a minute on two CPU cores) and writes panel.svg, the terminal panel
as it stood at step 60 of GRPO, and report.png, the head of the run's report.html. The report is
photographed by Chromium (`apt-get install chromium`) and its colours reduced by Pillow
(`pip install pillow`). No picture loads anything from elsewhere.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import rich.console

import rljax
from rljax.errors import InputError
from rljax.tracking.console import Console

FIGURES = Path(__file__).resolve().parent / "figures"
COLUMNS, ROWS = 92, 32  # of the terminal that the panel is drawn for
PANEL_STEP = 60  # of GRPO: the trends have a shape, and the run is not at its end
WIDTH, HEIGHT = 1100, 935  # of the report's picture, in CSS pixels
COLOURS = 64  # of the report's picture

# --- diagrams: {file: (width, height, boxes, arrows)} in units of which a letter is 7.5 wide.
# A box is (x, y, width, title, lines). An arrow is a path and the place and text of its label.

BOX = 76  # the height of one
DIAGRAMS = {
    "overview.svg": (
        660,
        300,
        [
            (20, 30, 170, "Prompts", ["files, the hub,", "or a task"]),
            (245, 30, 170, "Sampler", ["responses, or", "episodes with tools"]),
            (470, 30, 170, "Rewards", ["your function, in", "worker processes"]),
            (
                245,
                194,
                395,
                "Training step",
                ["log-probs, advantages, all optimizer steps:", "one compiled JAX function"],
            ),
            (20, 194, 170, "Results", ["accuracy, report,", "checkpoints, policy"]),
        ],
        [
            ("M190 68 H237", None),
            ("M415 68 H462", None),
            ("M555 106 V186", None),
            ("M300 194 V114", (314, 154, "the same weights, not a copy")),
            ("M245 232 H198", None),
        ],
    ),
    "architecture.svg": (
        660,
        300,
        [
            (20, 30, 180, "Source", ["rows of a file, or a", "rollout with rewards"]),
            (240, 30, 180, "Batch", ["tokens [B, S], mask,", "rewards, group, ..."]),
            (460, 30, 180, "Dataflow", ["one page of code,", "one compiled function"]),
            (460, 194, 180, "Roles", ["Actor, Critic,", "Reference, ..."]),
        ],
        [
            ("M200 68 H232", None),
            ("M420 68 H452", None),
            ("M550 106 V186", (538, 150, "new weights, metrics")),
            ("M460 232 H110 V114", (124, 222, "the actor that samples: the same arrays")),
        ],
    ),
}
STYLE = """
rect { fill: #f3f5fb; stroke: #5c6bc0; stroke-width: 1.5 }
path { fill: none; stroke: #37474f; stroke-width: 2; marker-end: url(#head) }
text { font-family: system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; font-size: 14px }
text { fill: #37474f }
.title { font-size: 17px; font-weight: 600; fill: #1a237e }
.label { font-style: italic }
"""


def draw(width: int, height: int, boxes, arrows) -> str:
    """An SVG that scales, on a light card that is read in both colour schemes."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><polygon points="0,0 8,4 0,8" fill="#37474f"/>'
        "</marker></defs>",
        f'<rect width="{width}" height="{height}" rx="10" style="fill:#ffffff;stroke:none"/>',
    ]
    for x, y, wide, title, lines in boxes:
        middle = x + wide / 2
        parts.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{BOX}" rx="6"/>')
        for n, (text, kind) in enumerate([(title, ' class="title"'), *((t, "") for t in lines)]):
            parts.append(
                f'<text x="{middle:g}" y="{y + 24 + 20 * n}" text-anchor="middle"{kind}>'
                f"{escape(text)}</text>"
            )
    for path, label in arrows:
        parts.append(f'<path d="{path}"/>')
        if label:
            x, y, text = label
            side = ' text-anchor="end"' if text.startswith("new") else ""
            parts.append(f'<text class="label" x="{x}" y="{y}"{side}>{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def bands(width: int, rows: list[tuple[str, list[tuple[float, float, str]]]], note: str) -> str:
    """An SVG of tracks, top to bottom: (name, its boxes as (left, right, text) in shares of the
    track), and a line of text below."""
    left, high, step = 150, 34, 46
    boxes, height = [], 18 + step * len(rows)
    for n, (name, spans) in enumerate(rows):
        y = 14 + step * n
        boxes.append(
            f'<text x="{left - 12}" y="{y + 22}" text-anchor="end" class="title" '
            f'style="font-size:14px">{escape(name)}</text>'
        )
        for start, end, text in spans:
            x, wide = (left + share * (width - left - 16) for share in (start, end))
            boxes.append(
                f'<rect x="{x:g}" y="{y}" width="{wide - x:g}" height="{high}" rx="5"/>'
                f'<text x="{(x + wide) / 2:g}" y="{y + 22}" text-anchor="middle" '
                f'style="font-size:13px">{escape(text)}</text>'
            )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width} {height + 26}" role="img">',
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height + 26}" rx="10" '
            f'style="fill:#ffffff;stroke:none"/>',
            *boxes,
            f'<text class="label" x="{left}" y="{height + 14}">{escape(note)}</text>',
            "</svg>",
            "",
        ]
    )


# One step: when each part of the machine works, in shares of the step.
STEP = [
    (
        "sampler",
        [(0.0, 0.38, "decode responses"), (0.44, 1.0, "with sampler devices: later steps")],
    ),
    ("reward workers", [(0.1, 0.44, "score each response as it ends")]),
    (
        "program",
        [(0.44, 0.55, "log-probs"), (0.555, 0.68, "advantages"), (0.685, 0.86, "optimizer steps")],
    ),
    ("host", [(0.0, 0.1, "prompts"), (0.86, 1.0, "metrics, save")]),
]
# The rooms of tests/test_house.py by floor, each floor with the name of its lowest room.
FLOORS = [
    ("ground", "errors"),
    ("services", "hub"),
    ("formulas", "kernels"),
    ("models, data", "models"),
    ("sampling", "learn"),
    ("algorithms", "roles"),
    ("a run's parts", "checkpoint"),
    ("runs, servers", "plan"),
    ("commands", "datagen"),
]


def floors() -> str:
    """The rooms by floor, lowest at the bottom, as tests/test_house.py orders them."""
    sys.path.insert(0, str(FIGURES.parents[1] / "tests"))
    from test_house import ORDER

    rooms, starts = [], {name: title for title, name in FLOORS}
    for level in ORDER:
        opened = [starts[name] for name in level if name in starts]
        if opened:
            rooms.append((opened[0], []))
        rooms[-1][1].extend(level)
    rows = []
    for title, names in reversed(rooms):
        share = 1 / len(names)
        rows.append(
            (
                title,
                [
                    (n * share + 0.004, (n + 1) * share - 0.004, name)
                    for n, name in enumerate(names)
                ],
            )
        )
    return bands(
        1100, rows, "A module imports packages to the left of its own, and those of levels below."
    )


def logo() -> str:
    """A rising line, for the corner of the site."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 48 48">\n'
        '<rect width="48" height="48" rx="10" fill="#5c6bc0"/>\n'
        '<g fill="none" stroke="#ffffff" stroke-width="4" stroke-linecap="round" '
        'stroke-linejoin="round">\n'
        '<path d="M11 34 L20 25 L27 30 L38 14"/>\n<path d="M29 13 H38.5 V22.5"/>\n</g>\n</svg>\n'
    )


# --- pictures of a run


class Panel(Console):
    """The console of a run on a terminal that is recorded, for `trackers`."""

    def __init__(self, run_dir, config):
        screen = rich.console.Console(
            file=io.StringIO(),
            record=True,
            force_terminal=True,
            color_system="truecolor",
            width=COLUMNS,
            height=ROWS,
            legacy_windows=False,
        )
        super().__init__(config["sft"]["steps"] + config["steps"], live=False, console=screen)
        self.grpo_steps = 0

    def log(self, step, metrics):
        super().log(step, metrics)
        self.grpo_steps += "reward/mean" in metrics
        if self.grpo_steps == PANEL_STEP and "reward/mean" in metrics:
            self.console.export_text()  # forgets the lines before
            self.console.print(self._render())
            svg = self.console.export_svg(title="rljax train quickstart", unique_id="panel")
            (FIGURES / "panel.svg").write_text(_self_contained(svg), encoding="utf-8")


def _self_contained(svg: str) -> str:
    """The SVG without the fonts that rich would load from elsewhere."""
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def photograph(report: Path, picture: Path) -> None:
    """Writes the head of a report as a PNG of WIDTH x HEIGHT."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), "")
    if not browser:
        raise InputError(
            "no browser takes the picture of the report",
            rule="Chromium is looked for on PATH",
            fix="apt-get install chromium",
        )
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "report.png"
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={folder}",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={taken}",
                report.resolve().as_uri(),
            ],
            check=True,
            timeout=120,
            capture_output=True,
        )
        image = Image.open(taken).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        image.save(picture, optimize=True)


def main(what: str = "") -> None:
    for name, diagram in DIAGRAMS.items():
        (FIGURES / name).write_text(draw(*diagram), encoding="utf-8")
    (FIGURES / "step.svg").write_text(bands(900, STEP, "time of one step"), encoding="utf-8")
    (FIGURES / "rooms.svg").write_text(floors(), encoding="utf-8")
    (FIGURES / "logo.svg").write_text(logo(), encoding="utf-8")
    if what == "diagrams":
        return
    with tempfile.TemporaryDirectory() as folder:
        tracker = f"{Path(__file__).resolve()}:Panel"
        run = rljax.train(
            "quickstart", run_dir=f"{folder}/quickstart", trackers=("console", tracker)
        )
        photograph(Path(run.folder) / "report.html", FIGURES / "report.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
