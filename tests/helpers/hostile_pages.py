"""Every kind of page that rljax writes, made of files in which every text is a given one."""

import copy
import itertools
import json
import random
from pathlib import Path

from rljax.datagen.rejection import _write_report
from rljax.policies import Completion
from rljax.report.card import model_card
from rljax.report.comparison import write_comparison
from rljax.report.inline import frame, inline
from rljax.report.page import write_report
from rljax.report.pipeline import write_pipeline_page
from rljax.report.run_folder import read_run
from rljax.report.style import document
from rljax.tracking.episodes import episode_record, turn_record
from rljax.tracking.notebook import NotebookConsole

ACTIONS = (
    "alert(1)",
    "parent.alert(2)",
    "fetch('http://127.0.0.1:9/leak')",
    "document.title='owned'",
    "new Image().src='//127.0.0.1:9/x'",
)
FORMS = (
    "<script>{}</script>",
    '<img src=x onerror="{}">',
    "<svg onload={}>",
    "<svg/onload={}//",
    "<iframe srcdoc='<script>{}</script>'></iframe>",
    "<iframe src=javascript:{}></iframe>",
    "<body onload={}>",
    "<details open ontoggle={}>",
    "<video><source onerror={}></video>",
    '<object data="javascript:{}">',
    "<embed src=//127.0.0.1:9/e>",
    "<base href=//127.0.0.1:9/>",
    "<link rel=stylesheet href=http://127.0.0.1:9/s.css>",
    "<meta http-equiv=refresh content=0;url=//127.0.0.1:9>",
    "<form action=javascript:{}><button autofocus onfocus={}>",
    '<a href="javascript:{}">x</a>',
    "<style>@import 'http://127.0.0.1:9/i.css'</style>",
    "<style>*{{background:url(//127.0.0.1:9/b)}}</style>",
    "<math><mtext></mtext><script>{}</script></math>",
    "<template><script>{}</script></template>",
    "<input autofocus onfocus={}>",
    "<select onfocus={} autofocus>",
    "<marquee onstart={}>",
    "[x](javascript:{})",
    "![x](http://127.0.0.1:9/i.png)",
    "<http://127.0.0.1:9/>",
    "javascript:{}",
    '[ref]: javascript:{} "x"',
    "```\n<script>{}</script>\n```",
    "|x|<script>{}</script>|",
    "# <script>{}</script>",
)
FRONTS = (
    "",
    '"',
    "'",
    '">',
    "'>",
    "</title>",
    "</style>",
    "</textarea>",
    "</pre></details>",
    "-->",
    "]]>",
    "</td></tr></table>",
    "</span>",
    "`",
    "``",
    "```\n",
    "\n\n",
    "&quot;>",
    "&#34;>",
    '" onmouseover="',
    "' onfocus='",
    "\\",
    "\x00",
    "\t",
    "{{",
    "</svg>",
    "</section>",
    "</script>",
    "|",
    "\u2028",
    "\u202e",
    "&lt;",
    "<!--",
    "<![CDATA[",
)


def hostile_texts(count: int, seed: int = 0) -> list[str]:
    """Different texts, each of which does something where it is taken for HTML or Markdown."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        text = rng.choice(FRONTS) + rng.choice(FORMS).format(*[rng.choice(ACTIONS)] * 2)
        if rng.random() < 0.3:
            text += rng.choice(FRONTS) + rng.choice(FORMS).format(*[rng.choice(ACTIONS)] * 2)
        if rng.random() < 0.2:
            text = "".join(rng.choice((c.upper(), c)) for c in text)
        found[text] = None
    return list(found)


class Texts:
    """Texts one after another, again and again; with `numbers`, one number in eight is one, too."""

    def __init__(self, given: list[str], numbers: bool = False):
        self._given, self._numbers, self._seen = itertools.cycle(given), numbers, 0

    def __iter__(self):
        return self

    def __next__(self) -> str:
        return next(self._given)

    def instead(self, number):
        """The number, or a text in its place."""
        self._seen += self._numbers
        return next(self) if self._numbers and self._seen % 8 == 0 else number


def filled(value, texts: Texts):
    """A value of a file with a text in place of each of its own, and one more key in each
    object."""
    if isinstance(value, dict):
        return {k: filled(v, texts) for k, v in value.items()} | {next(texts): next(texts)}
    if isinstance(value, list):
        return [filled(v, texts) for v in value]
    if isinstance(value, str):
        return next(texts)
    return texts.instead(value) if isinstance(value, (int, float)) else value


CONFIG = {
    "name": "n",
    "model": "m",
    "dataflow": "d",
    "data": {"train": "t", "test": "s"},
    "reward": {"function": "f"},
    "algorithm": {"policy_loss": "p", "advantage": "a"},
    "actor_optimizer": {"lr": 0.1, "name": "o"},
    "evaluate": {"reward": "r"},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "seed": 1,
    "steps": 3,
    "sampler": {"stop_strings": ["x"], "temperature": 1.0},
    "dataset": "d",
}
ESTIMATE = {"value": 0.4, "low": 0.3, "high": 0.5, "n": 20}
SUMMARY = {
    "accuracy_before": ESTIMATE,
    "accuracy_after": {**ESTIMATE, "value": 0.45},
    "eval_before": {"loss": 1.0},
    "eval_after": {"loss": 0.5},
    "status": "finished",
    "device": "cpu",
    "wall_s": 12.0,
    "versions": {"jax": "1"},
    "memory": {"peak_bytes": 10},
    "seed": 1,
    "completions": 3,
    "faults": {"skipped": 1},
    "reward/errors": "e",
    "steps": 3,
}
START = {
    "time": 1.7e9,
    "command": "c",
    "working_folder": "w",
    "git": {"commit": "0" * 40, "dirty": True},
    "rljax": "1",
    "python": "3",
    "host": "h",
    "device": "cpu",
    "memory": "1",
    "step": 0,
}
SAMPLE = {
    "prompt": "p",
    "response": "r",
    "ground_truth": "t",
    "reward": 0.5,
    "status": "ok",
    "message": "m",
    "step": 1,
    "phase": "rl",
    "prompt_mean": 0.4,
}
ROW = {"title": "t", "tokens": 3, "fields": {"f": "v"}, "pieces": [["a", False], ["b", True]]}
DATA = {"notes": ["n"], "lengths": {"prompt": [1, 2, 3, 4]}, "rows": [ROW]}
TIMELINE = [
    {
        "step": 1,
        "seconds": 1.0,
        "spans": {"sample": [[0.0, 0.5]], "s": [[0.0, 0.1]]},
        "decoding": [[0.0, 2.0]],
        "scoring": [[0.0, 1.0, 1.0]],
    }
]
METRICS = ("reward/mean", "loss", "eval/accuracy", "time/learn_s", "reward/errors", "skipped_steps")
SHA = "0123456789abcdef" * 4
STAGE = {
    "stage": "s",
    "command": "train",
    "inputs": {"data": {"a.jsonl": SHA}},
    "outputs": {"b": SHA},
    "status": "finished",
    "started": 1.0,
    "ended": 9.0,
    "by_hand": "no",
    "settings_sha256": SHA,
    "git": {"commit": SHA},
    "versions": {"jax": "1"},
    "metrics": {
        "accuracy_before": ESTIMATE,
        "accuracy_after": ESTIMATE,
        "mean_reward_all": 1.0,
        "last_step": {"reward/mean": 1.0},
    },
}


def episode(texts):
    n = 3
    turn = turn_record(
        observation=next(texts),
        tokens=range(n),
        pieces=[next(texts) for _ in range(n)],
        text=next(texts),
        logprobs=[-0.1] * n,
        reward=0.5,
        bad=True,
        chosen=[True, False, True],
        versions=[1] * n,
    )
    row = episode_record(
        episode=1,
        group=0,
        total=0.5,
        turns=[turn],
        seat=next(texts),
        status=next(texts),
        finish=next(texts),
        message=next(texts),
    )
    return {"step": 2, **row}


def write_run(folder: Path, texts: Texts) -> Path:
    """A run folder in whose files every text is one of `texts`."""
    folder.mkdir(parents=True, exist_ok=True)

    def put(name, *values):
        made = [filled(value, texts) for value in values]
        lines = [json.dumps(value) for value in made]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    put("config.json", CONFIG)
    put("summary.json", SUMMARY)
    put("starts.jsonl", START, START)
    put("data.json", DATA)
    (folder / "timeline.json").write_text(json.dumps(filled(TIMELINE, texts)))
    meaning = {"meaning": "m", "unit": "u", "limits": [0.0, 0.1], "advice": "a"}
    put("meanings.json", {name: meaning for name in METRICS})
    put("model.json", {"files": {"weights": {"sha256": SHA}}})
    rows = [
        {
            "step": step,
            "phase": "rl",
            **dict.fromkeys(METRICS, step / 9),
            **{
                key + next(texts): step / 7
                for key in ("eval/difficulty/", "eval/source/", "time/", "reward/", "eval/", "")
            },
        }
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{**SAMPLE, "step": step, "reward": r} for step in (1, 3) for r in (0.1, 0.9)]
    kept = ("step", "reward", "phase")
    made = [{**filled(s, texts), **{k: s[k] for k in kept}} for s in samples]
    made += [{**one, "status": "ok", "prompt": made[0]["prompt"]} for one in made]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    episodes = [episode(texts), {**episode(texts), "status": "ok"}]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    return folder


def write_pages(root: Path, given: list[str], numbers: bool = False) -> dict[str, Path]:
    """{kind: page} of all kinds, made of these texts."""
    texts = Texts(given, numbers)
    first, second = (write_run(root / f"run{i}", texts) for i in (1, 2))
    pages = {"report": write_report(first)}
    write_report(second)
    pages["comparison"] = write_comparison([first, second], root / "comparison.html")
    folder = root / "pipeline"
    folder.mkdir()
    stages = [filled(STAGE, texts) | {"status": s} for s in ("finished", "x")]
    for stage in stages:
        stage["inputs"] = {next(texts): {next(texts): next(texts)} for _ in range(2)}
        stage["metrics"] = copy.deepcopy(STAGE["metrics"]) | {next(texts): next(texts)}
    names = [stage["stage"] for stage in stages]
    estimates = dict.fromkeys(names, ESTIMATE)
    asked = (next(texts), [{"role": "user", "content": next(texts)}])
    prompts = [
        {"prompt": p, "responses": [next(texts), next(texts)], "right": [1, 0]} for p in asked
    ]
    suite = {"stages": names, "accuracy": estimates, "difference": estimates, "prompts": prompts}
    lineage = {"pipeline": next(texts), "stages": stages, "same_prompts": [suite]}
    (folder / "lineage.json").write_text(json.dumps(lineage))
    pages["pipeline"] = write_pipeline_page(folder)
    pages["samples"] = _samples(root, texts)
    pages["inline"] = _page(root / "inline.html", inline(first))
    framed = frame(pages["report"].read_text(encoding="utf-8"), 720)
    pages["framed"] = _page(root / "framed.html", framed)
    pages["live"] = _page(root / "live.html", _live(texts))
    return pages


def _page(path: Path, body: str) -> Path:
    path.write_bytes(document("page", body).encode("utf-8", "replace"))
    return path


def _samples(root: Path, texts) -> Path:
    """The page of rejection sampling."""

    class Prompt:
        def __init__(self):
            self.prompt_text, self.ground_truth = next(texts), next(texts)

    groups = [
        [Completion(0, next(texts), (), (), "stop", reward) for reward in (0.0, 0.5, 1.0)]
        for _ in range(3)
    ]
    facts = {next(texts): 1.0, "mean_reward": 0.5}
    return _write_report(str(root / "out.jsonl"), [Prompt() for _ in groups], groups, facts)


def _live(texts) -> str:
    """Draws a run in a notebook."""
    console = NotebookConsole(9, busy=lambda: (next(texts), 30.0))
    console._start = lambda: None  # nothing is drawn by itself
    console.log(1, {"reward/mean": 0.5, "loss": 1.0})
    console.say(next(texts))
    with console.lock:
        console.phase = next(texts)
        console.rows = [
            {"prompt": next(texts), "response": next(texts), "reward": 0.5, "status": next(texts)}
            for _ in range(3)
        ]
    return console.html()


def card(root: Path, given: list[str]) -> str:
    """A model card as Markdown."""
    texts = Texts(given)
    run = read_run(write_run(root / "run", texts))
    result = {
        "checkpoint": next(texts),
        "metrics": {next(texts): ESTIMATE, "m": ESTIMATE},
        "data": next(texts),
        "reward": next(texts),
        "samples": next(texts),
        "temperature": next(texts),
        "max_response_tokens": next(texts),
        "suite": next(texts),
    }
    return model_card(
        run,
        "policy",
        "owner/name",
        base=None,
        license=next(texts),
        evaluations=[(next(texts), result)],
        report=True,
        generation=True,
    )
