"""rljax.train from Python: its arguments become a config, functions of a notebook become files."""

import dataclasses
import functools
import json
import linecache
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import lanes, one_device_environment
from processes import wait_until
from tiny_run import tiny_config

import rljax
from rljax.components import resolve
from rljax.config import Config, changed_fields
from rljax.config.flags import config_module
from rljax.config.from_python import config_from
from rljax.config.own_functions import component_text
from rljax.data.rows.read import read_rows
from rljax.errors import InputError
from rljax.rewards import exact_match
from rljax.rewards.pool.pool import RewardPool
from rljax.tracking.notebook import NotebookConsole, in_notebook
from rljax.training import TrainedRun
from rljax.validation.unread import unread

CELLS = '''
import functools
import math as m
import re
import time
import xml.etree.ElementTree
from typing import Literal

from rljax.contracts import contract

NUMBER = re.compile(r"(\\d+)", re.IGNORECASE)
WORTH = {"right": 1.0, "near": (0.5, 0.25)}
log = open(__file__)


class Distance:
    """Of two numbers."""

    scale: int = 2

    def __init__(self, truth):
        self.truth = truth

    def of(self, x):
        return m.fabs(x - self.truth) / self.scale


def logged(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def near(x, truth):
    return WORTH["near"][0] if Distance(truth).of(x) < 1 else far(x, truth)


def far(x, truth):
    return 0.0 if x else near(1.0, truth)


worth = near


@contract(on_timeout=-1.0)
def my_reward(
    response, ground_truth, *, mode: Literal["plain", "strict"] = "plain", most=WORTH["right"]
):
    xml.etree.ElementTree.fromstring("<a/>")
    while response == "hang":
        time.sleep(0.01)
    found = NUMBER.search(response)
    WORTH_ = [x for x in (mode, most)]
    if response == ground_truth:
        return WORTH_[1]
    return worth(float(found[1]), float(ground_truth)) if found and mode == "plain" else 0.0


def my_task(size: int = 3):
    from rljax.tasks import Task

    rows = [{"prompt": f"{n}>", "ground_truth": str(n), "data_source": "n"} for n in range(size)]
    return Task("0123456789>", train=rows[1:], test=rows[:1])


@logged
def decorated(response):
    return WORTH["right"]


def reads_a_file(response):
    return float(log.name == response)


def reads_what_is_not_there(response):
    return nowhere


def maker(k):
    def closure(response):
        return k

    return closure


closed, shortened = maker(1.0), lambda response: 1.0
'''


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """The names of a module that no other process can import, as a notebook's."""
    file = tmp_path / "cell.py"
    file.write_text(CELLS)
    module = types.ModuleType("a_notebook")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    exec(compile(CELLS, str(file), "exec"), vars(module))
    yield module
    module.log.close()
    linecache.clearcache()


def test_a_function_of_a_notebook_is_carried_with_what_it_reads_and_killed_when_it_hangs(
    cell, tmp_path
):
    text = component_text(cell.my_reward, tmp_path / "inputs", "reward.function")
    path = Path(text.rpartition(":")[0])
    cell.WORTH["right"] = 9.0  # what is changed later is another run's
    sys.modules.pop("a_notebook")
    samples = [{"response": r, "ground_truth": "7"} for r in ("7", "it is 8", "20", "hang")]
    with RewardPool(text, workers=2, timeout_s=2.0) as pool:
        scores = pool.score(samples)
    assert [s.value for s in scores] == [1.0, 0.5, 0.0, -1.0]
    assert [bool(s.message) for s in scores] == [False, False, False, True]
    assert "log" not in path.read_text() and path.parent == tmp_path / "inputs"


def test_another_version_of_a_function_is_another_file_and_the_same_version_is_one(cell, tmp_path):
    first = component_text(cell.my_reward, tmp_path)
    assert component_text(cell.my_reward, tmp_path) == first
    cell.WORTH["near"] = (0.25, 0.0)
    second = component_text(cell.my_reward, tmp_path)
    assert second != first
    sample = {"response": "7.5", "ground_truth": "7"}
    values = [resolve(text, "rljax.rewards")(**sample) for text in (first, second)]
    assert values == [0.5, 0.25]


def test_options_of_a_partial_and_functions_of_modules(cell, tmp_path):
    strict = functools.partial(cell.my_reward, mode="strict")
    text = component_text(strict, tmp_path)
    assert text.endswith(":my_reward(mode='strict')")
    assert resolve(text, "rljax.rewards")(response="8", ground_truth="7") == 0.0
    numbered = functools.partial(cell.my_reward, mode=np.float32(0.1))
    assert component_text(numbered, tmp_path).endswith(":my_reward(mode=0.1)")
    decorated = component_text(cell.decorated, tmp_path)
    assert resolve(decorated, "rljax.rewards")(response="8") == 1.0
    named = component_text(exact_match, tmp_path / "none")
    assert resolve(named, "rljax.rewards").function is exact_match
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "name, why, fix",
    [
        ("closed", "reads k of the function around it", "functools.partial(closure, ...)"),
        ("shortened", "the source of <lambda> is not known", "write it with def"),
        ("reads_a_file", "it reads log, a TextIOWrapper", "inside a function that it calls"),
        ("reads_what_is_not_there", "reads nowhere, which is not defined", "define nowhere first"),
        ("NUMBER", "is no plain function", "def my_function"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_what_to_do(cell, tmp_path, name, why, fix):
    with pytest.raises(InputError) as error:
        component_text(vars(cell)[name], tmp_path, "reward.function")
    assert "reward.function" in str(error.value) and why in str(error.value)
    assert fix in str(error.value).partition("Fix:")[2]
    assert list(tmp_path.glob("*_????????.py")) == []


def made(config="", model=None, data=None, reward=None, **fields) -> dict:
    return changed_fields(config_from(config, model, data, reward, fields, unread))


def test_fields_are_named_whole_as_a_section_or_by_their_last_part():
    ways = (
        {"batch.samples_per_prompt": 3, "steps": 7},
        {"batch": {"samples_per_prompt": 3}, "steps": 7},
        {"samples_per_prompt": 3, "steps": 7},
    )
    assert [made(**fields) for fields in ways] == [{"batch.samples_per_prompt": 3, "steps": 7}] * 3
    assert made(sft={"optimizer": {"lr": 1}}) == {"sft.optimizer.lr": 1.0}
    found = made(sequences_per_optimizer_step=8)  # not the one of pretraining
    assert found == {"batch.sequences_per_optimizer_step": 8}
    assert made(trackers=["console", "wandb"]) == {"trackers": ("console", "wandb")}


def test_model_data_and_reward_stand_for_their_fields(tmp_path):
    found = made(model=tmp_path, data="letter_count()", reward="exact_match()", steps=2)
    assert found == {
        "model": str(tmp_path),
        "data.train": "letter_count()",
        "reward.function": "exact_match()",
        "steps": 2,
    }
    sections = made(data={"train": "a.jsonl", "test": "b.jsonl"}, reward={"timeout_s": 3})
    assert sections == {"data.train": "a.jsonl", "data.test": "b.jsonl", "reward.timeout_s": 3.0}
    assert made("quickstart", steps=3)["steps"] == 3 and made("quickstart")["steps"] == 160
    base = Config(seed=5)
    assert made(base, steps=9) == {"seed": 5, "steps": 9} and base.steps == 100


def test_a_task_of_a_notebook_is_data(cell, tmp_path):
    named = [cell.my_task, functools.partial(cell.my_task, size=9)]
    texts = [made(data=task, run_dir=str(tmp_path))["data.train"] for task in named]
    assert [len(read_rows(text, "train").rows) for text in texts] == [2, 8]


def test_rows_become_a_file_of_the_run_folder(tmp_path):
    rows = [{"prompt": "2+2=", "ground_truth": "4"}, {"prompt": "ä", "ground_truth": "5"}]
    path = made(data=rows, run_dir=str(tmp_path / "run"))["data.train"]
    assert Path(path).parent == tmp_path / "run" / "inputs"
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == rows
    assert made(data=rows[:1], run_dir=str(tmp_path / "run"))["data.train"] != path
    with pytest.raises(InputError, match="jsonl"):
        made(data=[{"prompt": object()}], run_dir=str(tmp_path))


def test_numbers_of_numpy_and_jax_are_numbers(tmp_path):
    found = made(
        steps=np.int64(3),
        kl_in_loss=np.float32(0.5),
        export=np.bool_(False),
        seed=jax.numpy.int32(4),
        data={"weights": [np.float64(1), 2]},
    )
    assert found == {
        "steps": 3,
        "algorithm.kl_in_loss": 0.5,
        "export": False,
        "seed": 4,
        "data.weights": (1.0, 2),
    }
    assert [type(found[name]) for name in ("steps", "export")] == [int, bool]


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"model": json}, "model: got <module 'json'"),
        ({"model": ["a"]}, "must be a text"),
        ({"steps": {1}}, "must be a whole number"),
        ({"steps": np.arange(3)}, "must be a whole number"),
    ],
)
def test_a_value_that_no_config_can_hold_is_refused(fields, says, tmp_path):
    with pytest.raises(InputError, match="Fix: ") as error:
        made(run_dir=str(tmp_path), **fields)
    assert says in str(error.value), str(error.value)


class CountingTracker:
    """Of a notebook."""

    def __init__(self, folder, config):
        self.count = 0

    def log(self, step, metrics):
        self.count += 1


def test_a_class_is_a_tracker_and_nothing_else(tmp_path):
    (text,) = made(trackers=(CountingTracker,), run_dir=str(tmp_path))["trackers"]
    assert text.endswith("CountingTracker")
    with pytest.raises(InputError, match="is no plain function"):
        made(reward=CountingTracker)


@pytest.mark.parametrize("devices", [[0], [], 3, iter(()), np.array([]), 2 * jax.devices()[:1]])
def test_what_is_no_device_is_refused(devices):
    with pytest.raises(InputError, match=r"Fix: devices=jax.devices\(\)"):
        rljax.train("quickstart:tiny", devices=devices)


def test_what_cannot_be_called_at_the_start_is_refused():
    with pytest.raises(InputError, match="on_start: got 3; a function of the run folder"):
        rljax.train("quickstart:tiny", on_start=3)


@pytest.mark.parametrize(
    "fields, says",
    [
        (
            {"lr": 1, "steps": 2, "dataflow": "ppo"},
            ("actor_optimizer.lr, critic_optimizer.lr", "name one of them whole"),
        ),
        ({"samples_per_promt": 1}, ("did you mean batch.samples_per_prompt",)),
        ({"optimizer.learning_rate": 1}, ("actor_optimizer.lr",)),
        ({"batch": 8}, ("batch is no field", "prompts_per_step", 'batch={"')),
        ({"prompts_per_step": 1, "batch": {"prompts_per_step": 2}}, ("_per_step is given twice",)),
        ({"epochs": 1}, ("epochs: no such field; use `steps`",)),
        ({"num_generations": 8}, ("use `batch.samples_per_prompt`",)),
        (
            {"sft": {"steps": 1}, "dataflow": "ppo", "lr": 1},
            ("lr is any of sft.optimizer.lr, actor_optimizer.lr, critic_optimizer.lr",),
        ),
        ({"batch": {"epoch": 2}}, ("batch.epoch", "did you mean batch.epochs")),
    ],
)
def test_a_field_that_is_none_is_refused_with_the_nearest(fields, says):
    with pytest.raises(InputError) as error:
        made(**fields)
    assert all(text in str(error.value) for text in says), str(error.value)


def test_a_config_that_is_none():
    with pytest.raises(InputError, match="such as 'quickstart'"):
        rljax.train({"steps": 1})
    with pytest.raises(InputError, match="did you mean quickstart"):
        rljax.train("quickstar", steps=1)


def test_a_notebook_shows_an_input_error_without_a_traceback():
    assert InputError("a", fix="b")._render_traceback_() == ["InputError: a. Fix: b"]


def test_what_a_notebook_shows_of_a_run_is_escaped_and_has_its_curves():
    assert not in_notebook()
    console = NotebookConsole(12, busy=lambda: ("compiling the update", 4.0))
    console._start = lambda: None  # no kernel here
    for step in range(1, 6):
        console.log(
            step, {"phase": "rl", "reward/mean": step / 10, "eval/accuracy": 0.5, "loss": 1}
        )
    console.samples(5, [{"prompt": "<script>", "response": "<b>4", "reward": 1.0, "status": "ok"}])
    console.say("resumed <run>")
    page = console.html()
    assert page.count("<svg") == 2 and "Reward" in page and "Evaluation accuracy" in page
    assert (
        "rl step 5/12" in page and "compiling the update" in page and "resumed &lt;run&gt;" in page
    )
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;4" in page
    assert "compiling" not in console.html(ended=True)


@pytest.mark.slow
def test_a_run_by_fields_shows_itself_and_its_report(cell, tmp_path, capsys):
    base = dataclasses.replace(tiny_config(""), trackers=("console",))
    run = rljax.train(
        base,
        reward=cell.my_reward,
        run_dir=str(tmp_path / "run"),
        steps=2,
        sft={"steps": 0},
        samples_every_steps=2,
        evaluate={"every_steps": 0},
        devices=jax.devices()[:1],
    )
    assert "step 2/2" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/config.json").read_text())["reward"]["function"].startswith(
        str(tmp_path / "run" / "inputs" / "my_reward_")
    )
    shown = run._repr_html_()
    assert "Completions before and after" in shown and "Step 1" in shown and "Step 2" in shown
    assert shown.startswith('<iframe sandbox="allow-same-origin" ') and shown.count("<iframe") == 1
    for report in (run.report, run.report()):
        assert report == tmp_path / "run/report.html" and "srcdoc=" in report._repr_html_()


SCRIPT = """
import sys
import rljax
from rljax.data.text.tokenizer import CharTokenizer
from tiny_run import tiny_config

config = tiny_config(sys.argv[1], steps=10_000, sft__steps=0)
rows = [{"prompt": f"{i}>", "ground_truth": str(i)} for i in range(8)]
config.tokenizer = sys.argv[1] + "_characters"  # nothing is held out, so nothing else compiles
CharTokenizer("0123456789>").save(config.tokenizer)
config.evaluate.every_steps = config.checkpoint.every_steps = 0
config.model = "decoder(layers=1, embed=16, mlp=16, heads=1, kv_heads=1, head_dim=16)"
try:
    run = rljax.train(config, data=rows)
except Exception as error:  # a retry: it must not take the signal for a fault
    print(error)
print("the next stage begins")
"""


def test_a_named_config_trains_writes_the_page_of_its_data_and_counts_its_steps(
    tmp_path, capsys, monkeypatch
):
    """The steps of a run whose SFT ends early are counted anew, also by a console that begins at a
    resume. A run also goes on when nobody reads its console any more."""
    how = dict(
        run_dir=str(tmp_path / "run"),
        model="decoder(layers=1, embed=32, mlp=32, heads=1, kv_heads=1, head_dim=32)",
        reward="sequence_match(partial=0.5)",
        sft={"stop_at_accuracy": 0.01, "check_every_steps": 2},
        correct_at=0.01,
        trackers=("console",),
        devices=jax.devices()[:1],
    )
    run = rljax.train("quickstart:tiny", **how, steps=2)
    sft = run.summary["sft_steps"]
    assert sft < 6 and f"step {sft + 2}/{sft + 2} | rl" in capsys.readouterr().out
    page = json.loads((tmp_path / "run/data.json").read_text())
    assert any(learned for row in page["rows"] for _, learned in row["pieces"])
    assert "a response ends with" in page["notes"][0]
    assert "The data as the model reads them" in run.report.read_text()
    rljax.train("quickstart:tiny", **how, steps=3, checkpoint={"allow_changed": ("steps",)})
    assert f"step {sft + 3}/{sft + 3} | rl" in capsys.readouterr().out
    (tmp_path / "run/report.html").unlink()  # so that it is not finished yet
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        run = rljax.train("quickstart:tiny", **how, steps=3)
    assert run.summary["status"] == "finished"


@pytest.mark.parametrize("number", lanes([signal.SIGTERM], [signal.SIGINT]))
def test_what_follows_a_run_that_a_signal_stops_does_not_run(tmp_path, number):
    """The script ends with the code of a preempted run, and finds nothing that looks final."""
    environment = one_device_environment()
    environment["PYTHONPATH"] += f":{Path(__file__).parents[1] / 'helpers'}"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    rows = tmp_path / "run/metrics.jsonl"

    def begun():
        return rows.exists() and rows.stat().st_size > 50

    wait_until(lambda: process.poll() is not None or begun(), "a step", 120)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3 and out == "", (out, err)
    status = json.loads((tmp_path / "run/summary.json").read_text())["status"]
    assert status.startswith(f"stopped by {number.name} at step ") and ", saved at step " in status
    assert f"{status}; the same call goes on from there" in err and "Traceback" not in err
    assert not (tmp_path / "run/policy").exists()


def test_several_rewards_are_a_mixture(tmp_path, monkeypatch):
    """TRL's reward_funcs=[f, g]."""
    monkeypatch.chdir(tmp_path)
    config = config_from("quickstart:tiny", None, None, ["exact_match()", "contains()"], {})
    assert config.reward.function == "mixture(rewards=('exact_match()', 'contains()',))"
    with pytest.raises(InputError, match="got 3; must be a function, or the name of one"):
        config_from("quickstart:tiny", None, None, ["exact_match()", 3], {})


def test_a_stopped_run_has_no_policy(tmp_path):
    """The policy in its folder is of an earlier end of the run."""
    (tmp_path / "policy").mkdir()
    finished, stopped = {"status": "finished"}, {"status": "stopped by SIGTERM at step 3"}
    assert TrainedRun(tmp_path, finished).policy == tmp_path / "policy"
    assert TrainedRun(tmp_path, stopped).policy is None
    finished |= {"steps": 3, "exported": {"policy": 3}}
    assert TrainedRun(tmp_path, finished).policy == tmp_path / "policy"
    finished["steps"] = 5  # with export=False
    assert TrainedRun(tmp_path, finished).policy is None


CLASSES = """
import dataclasses, enum

class Mode(enum.Enum):
    LOW = 0.5

@dataclasses.dataclass
class Part:
    x: float = 1.5

class NoAnswer(Exception):
    pass

class Scorer:
    def score(self):
        return 1.0

class Scorer:
    def score(self):
        return 2.0

def of_enum(response):
    return Mode.LOW.value

def of_dataclass(response):
    return Part().x

def of_exception(response):
    try:
        raise NoAnswer
    except NoAnswer:
        return 2.5

def of_the_second(response):
    return Scorer().score()

if True:
    def of_lines(response):
        return float(len(\'\'\'a
b\'\'\'))
"""


def test_a_function_of_a_config_file_is_carried_with_what_it_reads(tmp_path):
    """No other process finds the module of a config file by its name."""
    path = tmp_path / "own.py"
    path.write_text(
        "class Scale:\n    def of(self):\n        return 2.0\n"
        "def reward(response):\n    return Scale().of()\n"
        "first = reward\n"
        "def reward(response):\n    return 0.0\n"
        "def get_config(): ...\n"
    )
    module = config_module(str(path))
    text = component_text(module.first, tmp_path / "inputs", "reward.function")
    assert "import" not in Path(text.rpartition(":")[0]).read_text().partition('"""')[2]
    assert resolve(text, "rljax.rewards")(response="x") == 2.0
    assert component_text(module.reward, tmp_path) == f"{path}:reward"


# Functions that are more than their `def`, or read what has had several meanings.
MEANINGS = """
import datetime
import enum
import functools
import math
import re
import threading
from random import choice as pick, random
from typing import List as L, NamedTuple, Optional

import jax
from jax.nn import log_sigmoid, relu
from numpy import exp, mean


def half(function):
    lock, calls = threading.Lock(), []
    @functools.wraps(function)
    def inner(*args, **kwargs):
        with lock:
            return 0.5 * function(*args, **kwargs)
    return inner

def score(response):
    return 0.5
strict = score
def score(response):
    return 1.0
def of_a_former(response):
    return score(response) + strict(response)

def wraps_itself(response):
    return 0.5
former = wraps_itself
def wraps_itself(response):
    return former(response) / 2

@half
def decorated(response):
    return 1.0
before = decorated
@half
def decorated(response):
    return 1.0 + before(response)

class Weights:
    right = 1.0
Old = Weights
class Weights:
    right = 0.25
def of_two_classes(response):
    return Old.right + Weights.right

if True:
    class Branch:
        scale = 0.5
else:
    class Branch:
        scale = 2.0
def of_a_branch(response):
    return Branch.scale

def is_even(n):
    return 1.0 if n == 0 else next_odd(n - 1)
def is_odd(n):
    return 0.0 if n == 0 else next_even(n - 1)
next_odd, next_even = is_odd, is_even
def of_each_other(response):
    return next_even(4)

weighted = []
for w in (0.1, 0.2):
    def of_a_loop(response, w=w):
        return w
    weighted.append(of_a_loop)
first_of_a_loop = weighted[0]
bonus, SEEN = 0.5, {}
def of_a_default(response, bonus=bonus, seen=SEEN, *, most=SEEN.get("most", math.inf)):
    seen[response] = bonus
    return bonus + len(SEEN) + min(most, 1.0)
bonus = 2.0

@jax.jit
def twice(x):
    return 2 * x
@functools.lru_cache
def once(x):
    return x
class Label(str, enum.Enum):
    YES = "yes"
    def worth(self):
        return 0.5
class Pair(NamedTuple):
    left: float
    right: float = 0.5
BEST, DAY, LOWEST = Label.YES, datetime.date(2026, 1, 2), float("-inf")
TABLE = {"pairs": [Pair(1.0)], "of": {"log": math.log, "once": once}, "x": re.compile("x", re.I)}
Many, Some, Either, Found = dict[str, Pair], Optional[Pair], Pair | None, L[Label]
def of_values(response, a: Many = None, b: Some = None, c: Either = None, d: Found = None):
    known = TABLE["of"]["once"](1.0) + TABLE["of"]["log"](1.0) + bool(TABLE["x"].match("X"))
    return float(twice(known)) + BEST.worth() + DAY.day + TABLE["pairs"][0].right + max(LOWEST, 1)
def of_imports(response: L[str]):
    return float(mean([exp(0.0), relu(0.5)])) + pick([random, random])() * 0 + float(log_sigmoid(0))

def wrapped_later(response):
    return 1.0
wrapped_later = half(wrapped_later)
def helper(response):
    return 1.0
helper = jax.jit(helper)
def of_a_helper(response):
    return helper(response)
class Settings:
    scale = 1.0
    def worth(self):
        return self.scale
Settings.scale = 0.5
def of_settings(response):
    return Settings.scale
class Patched:
    def worth(self):
        return 1.0
Patched.worth = lambda self: 0.5
def of_a_method(response):
    return Patched().worth()
def of_an_attribute(response):
    return of_an_attribute.scale
of_an_attribute.scale = 0.5
LOG = []
ALSO = LOG
def of_one_list(response):
    LOG.append(response)
    return len(ALSO)
def counted(function):
    calls = {"n": 0}
    @functools.wraps(function)
    def inner(response):
        calls["n"] += 1
        return calls["n"]
    return inner
@counted
def of_a_count(response):
    return 0.0
of_a_count("x")
def renewed(function):
    return half(function)
@renewed
def redecorated(response):
    return 1.0
def renewed(function):
    return function
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A module as a script's, which no other process can import."""
    path = tmp_path / "script.py"
    path.write_text(MEANINGS)
    module = types.ModuleType("a_script")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "a_script", module)
    exec(compile(MEANINGS, str(path), "exec"), vars(module))
    yield module
    linecache.clearcache()


@pytest.mark.parametrize(
    "name, score",
    [
        ("of_a_former", 1.5),
        ("wraps_itself", 0.25),
        ("decorated", 0.75),
        ("of_two_classes", 1.25),
        ("of_a_branch", 0.5),
        ("of_each_other", 1.0),
        ("first_of_a_loop", 0.1),
        ("of_a_loop", 0.2),
        ("of_a_default", 2.5),
        ("of_values", 8.0),
        ("of_imports", 0.75 - np.log(2)),
    ],
)
def test_what_is_carried_is_the_very_function_that_was_given(script, tmp_path, name, score):
    """Names that were used again, defaults as they were bound, values and imports of all kinds."""
    text = component_text(vars(script)[name], tmp_path / "inputs", "reward.function")
    carried = resolve(text, "rljax.rewards").function
    assert [f(response="x") for f in (carried, vars(script)[name])] == pytest.approx([score] * 2)


@pytest.mark.parametrize(
    "name, why",
    [
        ("wrapped_later", "the source of wrapped_later is that of other code"),
        ("of_a_helper", "helper is a PjitFunction, and a function by its source"),
        ("of_settings", "Settings.scale is 0.5, and 1.0 by its source"),
        ("of_a_method", "Patched.worth"),
        ("of_an_attribute", "of_an_attribute.scale was set outside of its source"),
        ("of_one_list", "one object with another name's"),
        ("of_a_count", "calls['n'] is 1, and 0 by its source"),
        ("redecorated", "the source of redecorated is that of other code"),
    ],
)
def test_what_is_more_than_its_source_is_refused(script, tmp_path, name, why):
    with pytest.raises(InputError) as error:
        component_text(vars(script)[name], tmp_path / "inputs", "reward.function")
    assert why in str(error.value) and "is not what its source makes of it" in str(error.value)
    assert "to a file, my_function.py" in str(error.value).partition("Fix:")[2]
    assert not (tmp_path / "inputs").exists()


def test_a_script_that_was_edited_since_is_refused(script, tmp_path):
    path = Path(script.__file__)
    path.write_text(MEANINGS.replace("return 0.5", "return 2.25"))
    for name in ("of_a_former", "wraps_itself"):
        with pytest.raises(InputError, match="is that of other code by now"):
            component_text(vars(script)[name], tmp_path, "reward.function")
    path.write_text("# a line more\n" + MEANINGS)
    text = component_text(script.of_a_former, tmp_path, "reward.function")
    assert resolve(text, "rljax.rewards")(response="x") == 1.5


@pytest.mark.parametrize(
    "name, score",
    [
        ("of_enum", 0.5),
        ("of_dataclass", 1.5),
        ("of_exception", 2.5),
        ("of_the_second", 2.0),
        ("of_lines", 3.0),
    ],
)
def test_a_function_of_a_script_is_carried_with_its_classes(tmp_path, name, score, monkeypatch):
    """Classes without methods, the one of two of a name that is in use, and a definition further
    right with a text of several lines."""
    file = tmp_path / "script.py"
    file.write_text(CLASSES)
    module = types.ModuleType("a_script")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "a_script", module)
    exec(compile(CLASSES, str(file), "exec"), vars(module))
    text = component_text(vars(module)[name], tmp_path / "inputs", "reward.function")
    monkeypatch.delitem(sys.modules, "a_script")
    assert resolve(text, "rljax.rewards")(response="x") == score
    linecache.clearcache()
