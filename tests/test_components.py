"""A component named by its file: its function and options, in workers too, and what is refused."""

import os
import pickle
import sys

import pytest

from rljax.components import resolve
from rljax.config import Config, is_path
from rljax.contracts import spec
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.errors import InputError, location_in
from rljax.files import Unreadable
from rljax.rewards.mixing import mixture
from rljax.rewards.pool.calling import HOME
from rljax.rewards.pool.pool import RewardPool

FILE = '''
import os
from rljax.contracts import contract

IMPORTS = []

def shorter(response, *, weight: float = 1.0):
    """As a user writes it."""
    return {"score": -weight * len(response), "own": float(os.getpid())}

@contract(rows=2, whole_step=lambda options: options["whole"])
def loss(policy, batch, *, whole=False):
    return 0.0, {}

def rows(*, count=4):
    alike = {"data_source": "mine", "ground_truth": "1", "prompt": "1+0="}
    made = type("Task", (), {})()
    made.train, made.test = [alike] * count, [alike]
    made.alphabet, made.reward = "01+=", ""
    return made
'''


def test_what_the_text_sets_comes_before_what_a_call_gives():
    component = resolve("fixed(value=3)", "rljax.plan.draws")
    assert component(None, 2, value=7).tolist() == [3, 3]
    assert resolve("fixed", "rljax.plan.draws")(None, 2, value=7).tolist() == [7, 7]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my parts").mkdir()
    path = tmp_path / "my parts" / "parts.v2.py"
    path.write_text(FILE)
    return path


def test_a_function_of_a_file_has_options_like_any_other(file):
    text = "my parts/parts.v2.py:shorter(weight=2.0)"
    component = resolve(text, HOME)
    assert (component.short_name, component.options) == ("shorter", {"weight": 2.0})
    assert component(response="abc")["score"] == -6.0
    assert component == resolve(text, HOME) and hash(component) == hash(resolve(text, HOME))
    absolute = resolve(f" {file}:shorter", HOME)
    assert absolute.function is component.function  # the file is run once
    assert resolve(f"{file}:loss(whole=True)", HOME).options == {"whole": True}
    assert spec(resolve(f"{file}:loss(whole=True)", HOME)).whole_step
    assert spec(resolve(f"{file}:loss", HOME)).rows == 2


def test_it_reaches_the_workers_and_other_rewards(file):
    inner = f"{file}:shorter(weight=0.5)"
    for text in (inner, f"mixture(rewards=({inner!r}, 'exact_match()'))"):
        with RewardPool(text, workers=1) as pool:
            (found,) = pool.score([{"response": "ab", "ground_truth": "ab"}])
        assert found.status == "ok", found
    # Parts are called like the function, whatever the file is called.
    assert found.parts["shorter"] == -1.0 and found.value == 0.0
    assert mixture(rewards=(inner,), response="abcd")["shorter"] == -2.0


def test_a_task_of_a_file_is_no_path_of_rows(file):
    spec = f"{file}:rows(count=3)"
    assert not is_path(spec) and not is_path(f"{file}:rows") and is_path(str(file))
    config = Config()
    config.data.train = spec
    data = load_data(config, load_run_tokenizer(config))
    assert [p.prompt_text for p in data.prompts] == ["1+0="] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere/parts.py:score", "there is no file 'nowhere/parts.py'.*working folder"),
        ("my parts/parts.v2.py:shortr", "has no function 'shortr'.*did you mean 'shorter'"),
        ("my parts/parts.v2.py:IMPORTS", "'IMPORTS' is no function"),
        ("my parts/parts.v2.py:shorter(wieght=1.0)", "no option 'wieght'.*did you mean 'weight'"),
        ("my parts/parts.v2.py:", "a function of it is needed; it defines .*shorter"),
        ("my parts/parts.v2.py:shorter(1)", "positional"),
        (
            "broken.py:score",
            r"fails at import; ZeroDivisionError.*Fix: correct line 3 of .*broken.py",
        ),
        ("unwritten.py:score", r"fails at import; SyntaxError.*unwritten.py:2"),
    ],
)
def test_what_is_refused(file, tmp_path, text, message):
    (tmp_path / "broken.py").write_text("def score(response):\n    return 1.0\nscore(1 / 0)\n")
    (tmp_path / "unwritten.py").write_text("import os\ndef score(response:\n")
    for _ in range(2):  # a file that failed is not taken for one that was imported
        with pytest.raises(InputError, match=message):
            resolve(text, HOME)


# A module -> what mends it. `{here}` is its folder.
MODULES = {
    "absent": ("import no_such_package.sub", "pip install no_such_package"),
    "renamed": ("from sklearn_ import x\nimport os", "pip install sklearn_"),
    "inside": ("import absent", "pip install no_such_package"),
    "circle_a": ("from circle_b import g", "move the import of line 1 of {here}/circle_"),
    "circle_b": ("from circle_a import f\ng = f", "into the function that uses it"),
    "syntax": ("x = (1", "correct line 1 of {here}/syntax.py"),
    "syntax_inside": ("import os\nimport syntax", "correct line 1 of {here}/syntax.py"),
    "name": ("\nx = nothing_of_this_name", "import or define 'nothing_of_this_name' above line 2"),
    "ends": ("import sys\nsys.exit(0)", "below `if __name__ == '__main__':`"),
    "relative": ("from . import other", "without a leading dot"),
    "from_module": ("from json import dump, laods", "did you mean 'loads'?"),
    "part": ("import json.nothing", "correct line 1 of {here}/part.py: json has no part"),
    "file": ("\nopen('not_there.txt')", "correct line 2 of {here}/file.py"),
    "in_a_library": ("import json\n\njson.loads('{')", "correct line 3 of {here}/in_a_library.py"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("form", ["{name}.f", "{name}.py:f"])
def test_a_module_that_fails_at_import_says_what_mends_it(tmp_path, monkeypatch, name, form):
    for other, (body, _) in MODULES.items():
        (tmp_path / f"{other}.py").write_text(f"{body}\n\ndef f(response):\n    return 1.0\n")
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        resolve(form.format(name=name), HOME)
    what, fix = error.value.parts
    assert MODULES[name][1].format(here=tmp_path) in fix and "fails at import" in what
    assert "PYTHONPATH" not in fix and str(error.value).count("Fix: ") == 1


def test_a_module_beside_the_file_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own_helper.py").write_text("x = 1")
    (tmp_path / "sub" / "mine.py").write_text("import own_helper\ndef f(response): return 1.0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"Fix: put {tmp_path}/sub on PYTHONPATH"):
        resolve("sub/mine.py:f", HOME)
    with pytest.raises(InputError, match="Fix: put 'own_helper' on PYTHONPATH or in the working"):
        resolve("own_helper.f", HOME)


@pytest.mark.parametrize(
    "text", ["mine.py", "./mine.py", "{here}/mine.py", "mine.py:", "mine.py()"]
)
def test_a_file_without_a_function_lists_those_that_it_has(tmp_path, monkeypatch, text):
    body = (
        "import nothing\ndef score(r): ...\ndef _own(): ...\nasync def other(r): ...\nclass A: ..."
    )
    (tmp_path / "mine.py").write_text(f"open('ran', 'w')\n{body}")
    monkeypatch.chdir(tmp_path)
    text = text.format(here=tmp_path)
    with pytest.raises(InputError) as error:
        resolve(text, HOME)
    path = text.rstrip(":()")
    assert f"'{path}' is a file" in str(error.value) and "defines score, other" in str(error.value)
    assert error.value.parts[1] == f"{path}:score" and not (tmp_path / "ran").exists()  # only read
    (tmp_path / "mine.py").write_text("x = 1")
    with pytest.raises(InputError, match="it defines none. Fix: define one"):
        resolve(text, HOME)
    with pytest.raises(InputError, match="no file 'mien.py'.*Fix: did you mean 'mine.py'"):
        resolve("mien.py", HOME)


def test_errors_are_pickled_and_placed():
    error = InputError("a is wrong", value="x", rule="b", fix="c")
    for copy in (pickle.loads(pickle.dumps(error)), error.within("")):
        assert isinstance(copy, InputError) and copy.parts == error.parts == (
            "a is wrong: got 'x'; b",
            "c",
        )
    assert str(error.within("f.py:3: ")) == "f.py:3: a is wrong: got 'x'; b. Fix: c"
    assert type(pickle.loads(pickle.dumps(Unreadable("a", fix="b")))) is Unreadable
    with pytest.raises(TypeError, match="fix"):
        InputError("a is wrong")


def test_an_error_is_placed_where_its_cause_was_raised():
    def users():
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("what became of it") from error

    try:
        users()
    except ValueError as error:
        assert location_in(error, [users]).endswith('in users: raise KeyError("the cause"))')
        assert location_in(error, [users], innermost=True) == location_in(error, [users])
        assert location_in(error, [resolve]) == ""


def test_a_file_that_fails_only_in_a_worker_is_named(file):
    file.write_text(FILE + f"\nif os.getpid() != {os.getpid()}:\n    raise OSError('no')\n")
    with pytest.raises(InputError, match="fails at import; OSError: no .*parts.v2.py:"):
        RewardPool(f"{file}:shorter", workers=1)


def test_a_config_written_before_a_room_was_renamed_names_the_same_function():
    now = resolve("rljax.tasks.integers.arithmetic(test=9)", "rljax.tasks")
    before = resolve("rljax.data.tasks.integers.arithmetic(test=9)", "rljax.tasks")
    assert before.function is now.function and before().test == now().test
    for name, rule in (("collect", "once()"), ("vine", "vine()"), ("searched", "critic_search()")):
        found = resolve(f"rljax.rollout.{name}.{rule}", "rljax.rollout")
        assert found.function is resolve(rule, "rljax.rollout").function


def test_what_is_in_a_class_or_in_a_folder_with_brackets_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "of_classes.py").write_text("class A:\n    @staticmethod\n    def g(response): ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match="belongs to the class 'A'.*write a function in 'of_classes'"
    ):
        resolve("of_classes.A.g", "rljax.rewards")
    with pytest.raises(InputError, match="path has brackets"):
        resolve("/project (copy)/r.py:f", "rljax.rewards")


LAZY = """
import os
LOADED = []

def __getattr__(name):
    LOADED.append(name)
    if name == "score":
        from lazy_parts import score
        return score
    if name == "Scores":
        from lazy_parts import Scores
        return Scores
    if name == "broken":
        raise ImportError("no_such_package is needed")
    if name == "system":
        return os.system
    if name == "LIMIT":
        return 3
    raise AttributeError(name)

def __dir__():
    return ["score", "broken"]
"""


@pytest.mark.parametrize("form", ["lazy.{}", "{here}/lazy.py:{}"])
def test_a_function_that_a_module_loads_by_its_getattr_is_found(tmp_path, monkeypatch, form):
    (tmp_path / "lazy.py").write_text(LAZY)
    parts = "def score(response, *, k=1):\n    return k\nclass Scores:\n    f = print"
    (tmp_path / "lazy_parts.py").write_text(parts)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy", "lazy_parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    form = form.replace("{here}", str(tmp_path))
    assert resolve(form.format("score") + "(k=3)", HOME)(response="x") == 3
    refused = {
        "scroe": "has no function 'scroe'.*did you mean 'score'",
        "broken": "'broken': its module fails at import; ImportError: no_such_package is needed",
        "system": "'system' is Python's own",
        "LIMIT": "'LIMIT' is no function",
        "__class__": "has no function '__class__'",
        "__init__": "has no function '__init__'",
    }
    for name, message in refused.items():
        with pytest.raises(InputError, match=message):
            resolve(form.format(name), HOME)
    if form == "lazy.{}":
        with pytest.raises(InputError, match="belongs to the class 'Scores'"):
            resolve("lazy.Scores.f", HOME)


def test_the_documented_name_of_a_reward_of_trl_is_found():
    assert resolve("trl.rewards.accuracy_reward", HOME).function.__name__ == "accuracy_reward"


def test_annotations_that_are_texts_are_read(tmp_path):
    """`from __future__ import annotations` makes texts of them."""
    path = tmp_path / "late.py"
    path.write_text(
        "from __future__ import annotations\nfrom typing import Literal\n"
        "def f(response, *, mode: Literal['a', 'b'] = 'a') -> float:\n    return 1.0\n"
        "def g(response, *, n: NotImported = 1):\n    return 1.0\n"
    )
    with pytest.raises(InputError, match="one of 'a', 'b'"):
        resolve(f"{path}:f(mode='z')", "rljax.rewards")
    assert resolve(f"{path}:f(mode='b')", "rljax.rewards")(response="x") == 1.0
    assert resolve(f"{path}:g(n=2)", "rljax.rewards")(response="x") == 1.0


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("mixture(rewards=('gsm8k()'))", "rewards=('gsm8k()',)"),
        ("mixture(rewards=('gsm8k()',), weights=2)", "weights=(2,)"),
        ("mixture(rewards=(1, 2))", "rewards=('text',)"),
        ("mixture(rewards=('gsm8k()',), weights=('a',))", "weights=(0.5,)"),
        ("language(scripts='zh')", "scripts=('zh',)"),
    ],
)
def test_a_tuple_that_lacks_its_comma_is_shown_with_it(text, fix):
    with pytest.raises(InputError, match="must be a tuple of (str|float), with a comma") as told:
        resolve(text, "rljax.rewards")
    assert f"Fix: {fix}, or another such value" in str(told.value)
