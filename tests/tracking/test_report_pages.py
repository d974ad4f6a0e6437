"""Reports of runs that go on, where they come from, what is folded, and comparisons of runs."""

import json
import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import alive, wait_until
from test_report import _rows, _sample, _text, _write

from rljax.errors import InputError
from rljax.report import live
from rljax.report.__main__ import main as report_command
from rljax.report.comparison import run_folders, write_comparison
from rljax.report.live import renewed_report
from rljax.report.page import write_report
from rljax.report.run_folder import read_run
from rljax.report.samples import MOST_CHARACTERS, MOST_STEPS
from rljax.report.starts import git_state, read_starts, record_start
from rljax.runs.folder import _boot, locked
from rljax.tracking import charts

CONFIG = {
    "dataflow": "grpo",
    "steps": 100,
    "sft": {"steps": 20},
    "model": "/models/Qwen2.5-0.5B",
    "data": {"train": "digits(n=3)"},
    "run_dir": "runs/x",
}


def _started(folder, **fields):
    record_start(folder, device="4 x cpu", memory="1 GB", step=0, **fields)
    return read_starts(folder)[-1]["time"]


def _page(folder) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def _figures(page: str) -> dict[str, str]:
    """The charts of a page by their titles."""
    found = (part.split("</figure>")[0] for part in page.split("<figure")[1:])
    return {re.search(r'class="name">([^<]*)', one)[1].strip(): one for one in found}


# --- drawing ---


@pytest.mark.parametrize(
    "low, high",
    [
        (-3e-8, 2e-8),
        (-1e-300, 1e-300),
        (-1e300, 1e300),
        (-12345.6, 99),
        (-0.00012, -0.00011),
        (1 - 1e-9, 1),
        (0, 1),
        (-5, -5),
        (1e12, 2e12),
        (-0.123456, 0.0),
    ],
)
@pytest.mark.parametrize("last", [3, 7, 99, 12345, 10_000_000])
def test_no_label_of_an_axis_is_cut_off_or_on_another(low, high, last):
    x = np.array([1, last // 2 + 1, last])
    y = np.array([low, low / 2 + high / 2, high])
    svg = charts.line_chart("t", "", [charts.Series("loss", x, y)], spans=[charts.Span("S", 1, 2)])
    pattern = r'<text x="([-\d.]+)" y="([-\d.]+)" class="(end|mid)[^>]*>([^<]*)<'
    boxes = []
    for left, top, anchor, text in re.findall(pattern, svg):
        width = 5.8 * len(text)  # of digits of 10 pixels in common fonts
        begin = float(left) - width / (1 if anchor == "end" else 2)
        assert begin >= 0 and begin + width <= charts.WIDTH + 2, text
        boxes.append((float(top), begin, begin + width, text))
    for one in boxes:
        for other in boxes:
            apart = abs(one[0] - other[0]) > 7 or one[2] <= other[1] + 1 or other[2] <= one[1] + 1
            assert one is other or apart, (one, other)
    labels = [text for _, _, _, text in boxes]
    line = max(top for top, _, _, _ in boxes)  # the labels of x stand on one
    for axis in (True, False):
        texts = [text for top, _, _, text in boxes if (top == line) is axis]
        assert len(set(texts)) == len(texts) > 1 and ("step" in texts) is axis
    if low < 0 < high and high < 1e299:
        assert any(text.startswith("-") for text in labels)


def test_averages_are_drawn_where_values_are_noisy_alone():
    def lines(y):
        svg = charts.line_chart("t", "", [charts.Series("y", np.arange(len(y)), np.asarray(y))])
        return svg.count("<polyline")

    steps = np.arange(300)
    schedule = np.minimum(steps / 20, 1 - steps / 400)
    assert lines(schedule) == lines(steps // 7) == lines(np.cos(steps / 30)) == 1
    noise = np.random.default_rng(0).normal(size=300)
    assert lines(noise) == lines(schedule + 0.01 * noise) == 2


def test_values_stand_under_the_pointer():
    y = np.arange(500.0) / 10
    svg = charts.line_chart("t", "", [charts.Series("a<b", np.arange(500), y)])
    titles = re.findall(r'<rect class="hover" x="([\d.]+)" [^>]*><title>([^<]*)</title>', svg)
    assert 30 <= len(titles) <= charts.HOVERED and titles[0][1] == "step 0\na&lt;b 0"
    assert titles[-1][1] == "step 499\na&lt;b 49.9"
    left = [float(x) for x, _ in titles]
    assert left == sorted(left) and len(svg) < 30_000


# --- what a chart says ---


def test_charts_say_where_they_begin_and_what_they_mean(tmp_path):
    figures = _figures(_page(_write(tmp_path, _rows())))
    assert "from step 21, after SFT" in figures["Reward"]
    assert "from step 21" in figures["Loss (RL)"] and "from step" not in figures["Loss (SFT)"]
    assert "Mean score of the step&#x27;s completions" in figures["Reward"]
    assert "Healthy:" in figures["Entropy"] and "Healthy:" not in figures["odd/metric"]
    assert 'class="what"' not in figures["odd/metric"]  # the user's own
    assert 'title="' not in figures["odd/metric"].split("<svg")[0]


def test_a_value_outside_of_its_healthy_range_says_where_to_look(tmp_path):
    rows = [(s, {"mismatch/mismatch_k3_kl": k}) for s, k in enumerate((0.01, 0.5), start=1)]
    text = _text(_write(tmp_path / "sick", rows))
    assert "Outside: sampler and trainer are different policies" in text
    assert "Outside" not in _text(_write(tmp_path / "well", rows[:1]))


def test_mismatch_is_folded_but_for_three(tmp_path):
    names = [f"mismatch/mismatch_{n}" for n in ("kl", "k3_kl", "chi2_token", "chi2_seq")]
    names += ["mismatch/probability_correlation", "mismatch/abs_logprob_diff_max"]
    names += ["mismatch/rollout_is_eff_sample_size", "mismatch/rollout_is_mean"]
    page = _page(_write(tmp_path, [(s, dict.fromkeys(names, 1.0)) for s in (1, 2)]))
    shown, _, folded = page.partition("Sampler against trainer")[2].partition("<details>")
    assert len(_figures(shown)) == 3 and "mismatch_k3_kl" in shown
    assert len(_figures(folded.split("</details>")[0])) == 5


def test_parts_that_repeat_the_reward_are_left_out(tmp_path):
    row = {"reward/mean": 0.5, "reward/part/score": 0.5, "reward/source/one": 0.5}
    page = _page(_write(tmp_path / "same", [(1, row), (2, row)]))
    assert "Reward parts" not in page and "Reward by source" not in page
    assert "All other metrics" not in page
    other = {**row, "reward/part/format": 0.7, "reward/part/score": 0.4}
    figures = _figures(_page(_write(tmp_path / "other", [(1, row), (2, other)])))
    assert "reward/part/score" in figures["Reward parts"]


# --- a run that goes on, was killed, has ended ---


def test_a_run_that_goes_on_says_so_and_one_that_was_killed_too(tmp_path):
    _write(tmp_path, _rows(rl=40), config=CONFIG)
    started = _started(tmp_path)
    with locked(tmp_path):
        text = _text(tmp_path)
        assert re.search(r"Still running: step 60 of 120, as of 20\d\d-\d\d-\d\d \d\d:", text)
        assert "steps 60 of 120" in text and "without an end" not in text
    # What a killed run leaves on this host, and one on another host that is dead or alive.
    lock, boot = tmp_path / ".lock", _boot()
    for holder, age, runs in ((boot, 0, False), ("elsewhere", 1e3, False), ("elsewhere", 0, True)):
        lock.write_text(json.dumps({"host": "h", "pid": 1, "started": "x", "boot": holder}))
        os.utime(lock, (time.time() - age,) * 2)
        assert read_run(tmp_path).running() is runs
    lock.unlink()
    text = _text(tmp_path)
    assert "This run stopped without an end. Last step: 60 of 120, at 20" in text
    assert "Still running" not in text
    # A summary of this start ends it; one of an earlier start, before a resume, does not.
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "started": started}))
    assert "without an end" not in _text(tmp_path)
    _started(tmp_path)
    assert "stopped without an end" in _text(tmp_path)
    with locked(tmp_path):
        assert "Still running" in _text(tmp_path)


def test_sft_that_ends_early_shortens_the_run(tmp_path):
    assert read_run(_write(tmp_path / "a", _rows(5, 0), config=CONFIG)).steps() == (5, 120)
    assert read_run(_write(tmp_path / "b", _rows(5, 10), config=CONFIG)).steps() == (15, 105)


@pytest.fixture
def writers(monkeypatch):
    """The processes that write reports."""
    started, start = [], subprocess.Popen

    def note(*args, **options):
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(live.subprocess, "Popen", note)
    return started


@pytest.mark.slow
def test_the_report_is_renewed_while_the_run_goes_on_and_never_after_it(tmp_path, writers):
    folder = _write(tmp_path / "a run, with 'odd' names", _rows(rl=5), config=CONFIG)
    report = folder / "report.html"
    with renewed_report(folder, 0.001):
        wait_until(report.exists, "a report")
        first = report.stat().st_ino  # it is replaced, not written over
        wait_until(lambda: report.stat().st_ino != first, "another one")
        begun = len(writers)
        wait_until(lambda: len(writers) > begun, "the next one")
    assert sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]
    assert not any(alive(process.pid) for process in writers)


def test_a_report_that_cannot_be_written_costs_the_run_nothing(tmp_path, monkeypatch, writers):
    with renewed_report(tmp_path / "gone", 0.001):
        wait_until(lambda: len(writers) > 1, "another try")
    assert writers[0].returncode > 0 and not any(alive(process.pid) for process in writers)
    begun = len(writers)
    with renewed_report(tmp_path, 0.0):  # never
        pass
    monkeypatch.setattr(live, "FIRST_MINUTES", 60.0)
    with pytest.raises(KeyError), renewed_report(tmp_path, 60.0):  # the end is not waited for
        raise KeyError
    assert not list(tmp_path.iterdir()) and len(writers) == begun


# --- where it comes from ---


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_page_names_command_commit_version_host_and_devices(tmp_path, monkeypatch):
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    _write(run, _rows(), config=CONFIG)
    _git(work, "init", "-q")
    assert git_state(work) == {}  # no commit yet
    (work / "mine.py").write_text("a = 1\n")
    _git(work, "add", ".")
    _git(work, "commit", "-qm", "first")
    commit = git_state(work)["commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit) and not git_state(work)["dirty"]
    (work / "mine.py").write_text("a = 2\n")
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--config.x=a 'b' <c>"])
    _started(run)
    text = _text(run)
    assert f"{work}: git commit {commit}, with changes that are not committed (dirty)" in text
    assert "python train.py '--config.x=a '\"'\"'b'\"'\"' <c>'" in text
    assert re.search(r"rljax (\d|\(not installed)", text) and "4 x cpu" in text and "1 GB" in text
    assert text.startswith("SFT and GRPO of Qwen2.5-0.5B on digitsrun folder run")
    monkeypatch.chdir(run)
    _started(run)  # resumed: both starts stand there, the last one first
    text = _text(run)
    assert "in no git repository" in text and commit in text
    assert text.index("in no git repository") < text.index(commit)


def test_odd_lines_of_starts_are_left_out(tmp_path):
    _write(tmp_path, _rows(), config=CONFIG)
    odd = ['{"time": "x"}', "[]", '{"time": 1e300}', '{"time": NaN}', '{"time": 5, "git": 7}', "{"]
    (tmp_path / "starts.jsonl").write_text("\n".join(odd))
    assert "at an unknown time" in _text(tmp_path) and len(read_starts(tmp_path)) == 3
    (tmp_path / "starts.jsonl").unlink()
    (tmp_path / "starts.jsonl").mkdir()
    record_start(tmp_path, device="1 x cpu", memory="", step=0)  # a warning, no exception
    assert read_starts(tmp_path) == [] and "Resolved config" in _text(tmp_path)


def test_links_go_to_the_files_that_there_are(tmp_path):
    _write(tmp_path, _rows(), config=CONFIG)
    (tmp_path / "policy").mkdir()
    (tmp_path / "samples.jsonl").unlink()
    text = _text(tmp_path)  # the checker follows every link
    page = (tmp_path / "report.html").read_text()
    assert re.findall('href="([^"]*)"', page) == ["config.json", "metrics.jsonl", "policy/"]
    assert re.search(r"metrics\.jsonl \([\d.]+ kB\)", text)


def test_cost_and_memory(tmp_path):
    summary = {"device": "8 x TPU v5e", "wall_s": 1800, "memory": {"device_bytes": 3.2e9}}
    text = _text(_write(tmp_path, _rows(), summary=summary))
    assert "device hours 4" in text and "most memory, device 3.2 GB" in text
    assert "device-seconds on 8 devices" in text and "device-seconds 32" in text  # 3 + 1 s


# --- samples ---


def test_samples_are_browsed_by_step(tmp_path):
    rows = [(s, _sample(r)) for s in (10, 20) for r in (0.1, 0.9)]
    rows += [(20, {**_sample(math.nan, status="error"), "message": "KeyError: 'x'"})]
    rows += [(30, {**_sample(1.0), "response": "y" * (MOST_CHARACTERS + 5)})]
    page = _page(_write(tmp_path, samples=rows))
    folds = [fold.split("</details>")[0] for fold in page.split('<details class="step">')[1:]]
    heads = [re.search("<summary>(.*?)</summary>", fold)[1] for fold in folds]
    assert heads == [
        "step 30: 1 completion, reward 1 to 1",
        "step 20: 3 completions, reward 0.1 to 0.9",
        "step 10: 2 completions, reward 0.1 to 0.9",
    ]
    assert folds[1].index("reward 0.9</b>") < folds[1].index("reward 0.1</b>")
    assert "error · KeyError: &#x27;x&#x27;" in folds[1]
    assert "5 more characters are in samples.jsonl" in folds[0]


def test_a_long_run_makes_a_page_not_a_database(tmp_path):
    sample = {"prompt": "p" * 5000, "reward": 1.0, "status": "ok"}
    rows = [(s, {**sample, "response": f"{s}" * 3000}) for s in range(400)]
    page = _page(_write(tmp_path, [(s, {"loss": 1.0}) for s in range(400)], rows))
    assert page.count('<details class="step">') == MOST_STEPS and len(page) < 1_000_000
    assert "350 more steps are in samples.jsonl" in page
    assert "step 399:" in page and "step 0:" in page  # the ends are among them


# --- several runs ---


def _pair(tmp_path):
    for name, lr, after in (("a", 1e-5, 0.6), ("b", 3e-5, 0.7)):
        accuracy = {"value": after, "low": after - 0.1, "high": after + 0.1, "n": 100}
        summary = {
            "status": "finished",
            "accuracy_after": accuracy,
            "device": "2 x cpu",
            "wall_s": 3600,
        }
        config = {**CONFIG, "run_dir": name, "actor_optimizer": {"lr": lr, "beta2": 0.99}}
        _write(tmp_path / name, _rows(), config=config, summary=summary)
    return tmp_path / "a", tmp_path / "b"


def test_a_comparison_shows_numbers_differences_and_curves(tmp_path):
    one, two = _pair(tmp_path)
    write_report(one)
    page = write_comparison([one, two], tmp_path / "both.html")
    text = _text(tmp_path, page)
    assert text.startswith("2 runs compared") and "finished" in text
    assert "60.0 % [50.0, 70.0]" in text and "70.0 % [60.0, 80.0]" in text
    assert "actor_optimizer.lr 1e-05 3e-05" in text and "device hours" in text
    assert "beta2" not in text and "run_dir" not in text  # the same, and of no interest
    html = page.read_text()
    assert 'href="a/report.html"' in html and 'href="b/' not in html
    reward = _figures(html)["reward/mean"]
    assert reward.count("<polyline") == 4 and ">a <b>" in reward and ">b <b>" in reward
    assert "Mean score of the step" in reward
    assert not re.search("improved|better than|best", text)


def test_a_sweep_is_the_runs_inside(tmp_path):
    one, two = _pair(tmp_path / "sweep,lr=1")
    (tmp_path / "sweep,lr=1" / "sweep.json").write_text("[]")
    (tmp_path / "sweep,lr=1" / "empty").mkdir()
    assert run_folders([tmp_path / "sweep,lr=1"]) == [one, two]
    assert run_folders([one, tmp_path / "sweep,lr=1"]) == [one, one, two]
    path = write_comparison([tmp_path / "sweep,lr=1"])
    assert path == tmp_path / "sweep,lr=1" / "comparison.html"
    assert "2 runs compared" in _text(path.parent, path)


def test_many_runs_look_different_and_are_named_once(tmp_path):
    runs = [_write(tmp_path / f"run{i:02d}", _rows(2, 8), config=CONFIG) for i in range(12)]
    html = write_comparison(runs, tmp_path / "many.html").read_text()
    looks = re.findall(r"<th>(<i.*?</i>|<svg.*?</svg>) run\d\d", html)
    assert len(set(looks)) == len(looks) == 12
    assert "run07 <b>" not in html and "Settings that differ</h2><p>None" in html


def test_runs_of_one_name_are_told_apart_and_everything_is_escaped(tmp_path):
    evil = "<b>&\"'x"
    runs = [tmp_path / above / evil for above in ("one", "two")]
    for i, run in enumerate(runs):
        run.parent.mkdir()
        _write(run, [(1, {evil: 1.0, "loss": float(i)})], config={evil: evil + str(i)})
        write_report(run)
    text = _text(tmp_path, write_comparison(runs, tmp_path / "page.html"))
    assert "one/<b>" in text and "two/<b>" in text


def test_runs_without_anything_and_folders_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    page = write_comparison([tmp_path / "empty"], tmp_path / "page.html")
    assert "1 run compared" in _text(tmp_path, page)
    with pytest.raises(InputError, match="no such run folder"):
        write_comparison([tmp_path / "empty", tmp_path / "nowhere"])
    with pytest.raises(InputError, match="nothing to compare"):
        write_comparison([])


def test_the_commands_report_one_run_and_compare_several(tmp_path, monkeypatch, rljax_command):
    one, two = _pair(tmp_path / "sweep")

    def call(*arguments):
        command = [sys.executable, "-m", "rljax.report", *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert "Traceback" not in done.stderr and (done.returncode == 0) == (not done.stderr)
        return done.returncode, done.stdout.strip()

    assert call(one, two) == (0, "comparison.html") and (tmp_path / "comparison.html").exists()
    assert call(one, "--out=no/x.html")[0] == 2
    monkeypatch.chdir(tmp_path)

    def main_of_report(*arguments):
        return report_command([str(one) for one in arguments])

    def rljax_report(*arguments):
        return rljax_command("report", *map(str, arguments))[0]

    for main in (main_of_report, rljax_report):
        assert main(one) == 0 and (one / "report.html").exists()
        (one / "report.html").unlink()
        assert main(tmp_path / "sweep") == 0
        (tmp_path / "sweep" / "comparison.html").unlink()
        assert main(tmp_path / "nowhere") == main() == main(one, "--nonsense") == 2
        assert main(one, "--out=no/x.html") == 2


# --- files from elsewhere ---

JUNK = (None, "x", "<b>", 5, -1e308, True, [], {}, [[1]], {"a": {"b": []}}, 10**400, "inf")
JUNK += ("\ud800",)


def _whole_folder(folder):
    """A run folder with every file that a report reads."""
    sample = {**_sample(1.0), "message": "m", "ground_truth": "g"}
    accuracy = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 9}
    summary = {
        "status": "finished",
        "accuracy_before": accuracy,
        "accuracy_after": accuracy,
        "difference": accuracy,
        "wall_s": 10.0,
        "device": "2 x cpu",
        "steps": 4,
        "memory": {"host_bytes": 5},
        "versions": {"jax": "1"},
        "seed": 0,
        "started": 1.0,
        "faults": {"rollbacks": 1.0},
        "skipped_steps": 1,
    }
    rows = [
        (
            s,
            {
                "loss": 1.0,
                "phase": "rl",
                "reward/mean": 0.5,
                "eval/accuracy": 0.5,
                "eval/accuracy_low": 0.4,
                "time/learn_s": 1.0,
                "mismatch/mismatch_kl": 0.0,
                "reward/errors": 1.0,
                "batch/completions": 2.0,
                "reward/all_equal": 1.0,
                "reward/source/a": 0.5,
            },
        )
        for s in range(1, 5)
    ]
    _write(folder, rows, [(2, sample)] * 3, summary=summary, config=CONFIG)
    start = {
        "time": 1.0,
        "command": "c",
        "git": {"commit": "a", "dirty": True},
        "step": 0,
        "host": "h",
        "device": "2 x cpu",
        "memory": "1 GB",
        "rljax": "1",
    }
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    record = {
        "step": 1,
        "seconds": 2.0,
        "spans": {"generate": [[0.0, 1.0]]},
        "decoding": [[0.5, 3]],
        "scoring": [[0.5, 1, 2]],
    }
    (folder / "timeline.json").write_text(json.dumps([record]))
    return folder


def _places(value, path=()):
    """Every place of a JSON value, the whole of it first."""
    yield path
    items = value if isinstance(value, dict) else {}
    items = dict(enumerate(value)) if isinstance(value, list) else items
    for key, item in items.items():
        yield from _places(item, (*path, key))


def _replaced(value, path, junk):
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], junk)
    return copy


def _junk_at_every_place(folder, every: int):
    """Every `every`-th of all ways to put junk at a place of a file of the folder."""
    count = 0
    for name in ("metrics", "samples", "starts", "summary", "config", "timeline"):
        path = folder / next(p.name for p in folder.glob(f"{name}.json*"))
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        value = json.loads(lines[0])
        for place in _places(value):
            for junk in JUNK:
                count += 1
                if count % every == 0:
                    lines[0] = json.dumps(_replaced(value, place, junk))
                    path.write_text("\n".join(lines) + "\n")
                    yield name, place, junk
        path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_junk_at_any_place_of_any_file_makes_a_page(tmp_path, every):
    folder, other = _whole_folder(tmp_path / "run"), _whole_folder(tmp_path / "other")
    tried = 0
    for where in _junk_at_every_place(folder, every):
        try:
            _text(folder)
            if tried % 4 == 0:
                write_comparison([folder, other], tmp_path / "page.html")
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        tried += 1
    assert tried > 1000 / every


@pytest.mark.parametrize("text", ['{"a":' * 900 + "1" + "}" * 900, "[" * 5000, "9" * 10_000, "\0"])
def test_files_that_are_deep_or_no_json_make_a_page(tmp_path, text):
    folder = _whole_folder(tmp_path)
    for name in ("config.json", "summary.json", "timeline.json", "starts.jsonl", "metrics.jsonl"):
        kept = (folder / name).read_text()
        (folder / name).write_text(text)
        assert "<h1>" in _page(folder), name
        write_comparison([folder, folder], tmp_path / "page.html")
        (folder / name).write_text(kept)
