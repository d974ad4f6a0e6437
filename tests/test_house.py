"""The house rules: imports point one way, names shadow nothing, nothing heavy happens at import."""

import ast
import collections
import functools
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from breaks import BREAKS
from conftest import REPO

FILES = sorted((REPO / "rljax").rglob("*.py"))
LAUNCHERS = sorted((REPO / "launchers").glob("*.py"))
# Every room, lowest first: a module may import rooms of the lines before its own, and its own.
ORDER = [
    ("answer_columns", "errors", "heartbeat", "metric", "reasoning", "suggest"),
    ("files",),
    ("components", "gguf", "hosts", "pods"),
    ("contracts",),
    ("hub", "runs"),
    ("tracking",),
    ("config", "mesh", "keys", "chips"),
    ("arrays", "workers"),
    ("kernels", "rewards", "report"),
    ("batch",),
    ("advantages", "losses", "correction", "shaping"),
    ("models",),
    ("data",),
    ("tasks",),
    ("learn", "sampler", "environments"),
    ("roles", "search"),
    ("rollout",),
    ("dataflows",),
    ("checkpoint", "setup"),
    ("policies",),
    ("validation",),
    ("plan", "evaluation", "doctor"),
    ("training", "serving"),
    ("datagen",),
    ("experiments",),
    ("command",),
]
LEVEL = {name: i for i, rooms in enumerate(ORDER) for name in rooms}
# What the rooms with the formulas may import at all, beside those of FREE and their own room.
PURE = {name: set() for name in ("advantages", "losses", "correction", "shaping")}
FREE = {"batch", "contracts", "errors", "kernels", "metric", "suggest"}


def room(module: str) -> str:
    """rljax.losses.kl -> losses; the package itself and how it is run are no room."""
    return module.split(".")[1] if "." in module and module != "rljax.__main__" else ""


@functools.cache
def tree_of(path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path) -> set[str]:
    """Every module of ours that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in MODULES and name != "rljax"}


def module_name(path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


@functools.cache
def graph() -> dict[str, set[str]]:
    """{module: the modules of ours that it imports}. Not read while tests are collected: each
    process of a run collects all of them."""
    return {module_name(path): imports(path) for path in FILES}


def test_the_graph_is_read():
    assert (
        "rljax.batch" in graph()["rljax.advantages"]
        and "rljax.roles" in graph()["rljax.setup.role_table"]
    )
    assert "rljax.losses.kl" in graph()["rljax.roles.models"] and len(graph()) > 40


@pytest.mark.smoke
def test_every_room_has_its_place():
    rooms = {room(module) for module in graph()} - {""}
    assert rooms == set(LEVEL)


@pytest.mark.smoke
def test_imports_point_one_way():
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if room(module) and room(module) != room(other)
        if LEVEL[room(other)] >= LEVEL[room(module)]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", PURE)
def test_formulas_import_the_batch_only(name):
    modules = [m for m in graph() if room(m) == name]
    assert modules
    others = {room(other) for module in modules for other in graph()[module]} - {name, ""}
    assert others <= FREE | PURE[name]


@pytest.mark.smoke
def test_nothing_imports_in_a_circle():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for other in graph()[module] - {module}:
                if not module.startswith(f"{other}.") and not other.startswith(f"{module}."):
                    visit(other)
            path.pop()
            done.add(module)

    for module in graph():
        visit(module)


def test_every_deliberate_break_can_be_made_and_every_room_has_three():
    """tests/breaks.py runs at night: here that a text has moved, or stands twice, is seen at
    once."""
    moved, count = [], collections.Counter()
    for name, (file, old, new, arguments) in BREAKS.items():
        if (REPO / file).read_text().count(old) != 1 or old == new:
            moved.append(name)
        if not all((REPO / one).exists() for one in arguments if one.startswith("tests/")):
            moved.append(f"{name}: its tests")
        count[file.split("/")[1].removesuffix(".py")] += 1
    assert moved == []
    assert [room for room in LEVEL if count[room] < 3] == []


HEAVY = ("jax", "flax", "rljax.models", "rljax.roles")
# What each import brings: the first must stay light, the second without kernels for other chips.
IMPORTS = """
import json, sys
import rljax, rljax.config, rljax.config.flags
light = list(sys.modules)
import rljax.roles
print(json.dumps([light, list(sys.modules)]))
"""


@pytest.fixture(scope="module")
def imported():
    return [set(modules) for modules in json.loads(run(sys.executable, "-c", IMPORTS).stdout)]


@pytest.mark.parametrize("heavy", HEAVY)
def test_config_and_launch_import_no_model_code(imported, heavy):
    assert "rljax.config.flags" in imported[0] and heavy not in imported[0]


def test_kernels_of_other_platforms_are_not_imported_before_they_are_asked_for(imported):
    assert "rljax.roles" in imported[1] and "jax.experimental.pallas" not in imported[1]


def run(*command, standard_input=""):
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    how = dict(input=standard_input, capture_output=True, text=True, timeout=120)
    return subprocess.run(command, env=environment, **how)


def test_no_file_is_called_like_a_module_of_the_standard_library():
    assert [str(p) for p in FILES + LAUNCHERS if p.stem in sys.stdlib_module_names] == []


# Imports every module of ours; then each launcher's --help in a process of its own, forked from
# this one: imports are most of what it waits for. Any backend that is created is named on stderr
# and ends the process.
HELP = """
import importlib, json, os, runpy, sys, tempfile
import jax._src.xla_bridge as bridge

def refuse(*_, **__):
    print("a JAX backend was initialised", file=sys.stderr)
    os._exit(99)

bridge.backends = refuse
for module in sys.stdin.read().split():
    importlib.import_module(module)
results = {}
for path in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv = [path, "--help"]
            sys.path.insert(0, os.path.dirname(path))
            runpy.run_path(path, run_name="__main__")
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        results[path] = code, *(file.seek(0) or file.read() for file in (out, err))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    wrong = tmp_path_factory.mktemp("wrong") / "uses_jax.py"
    wrong.write_text("import jax; print(jax.devices())")
    paths = [str(path) for path in (*LAUNCHERS, wrong)]
    modules = sorted(module for module in graph() if not module.endswith("__main__"))
    return run(sys.executable, "-c", HELP, *paths, standard_input="\n".join(modules))


@pytest.fixture(scope="module")
def helps(guarded):
    """path -> (exit status, stdout, stderr); the last one is a program that does use a backend."""
    assert guarded.returncode == 0, guarded.stderr[-2000:]
    return json.loads(guarded.stdout)


def test_importing_everything_initialises_no_backend(guarded):
    assert guarded.returncode == 0, guarded.stderr[-2000:]


def test_the_guard_works(helps):
    code, _, stderr = next(value for path, value in helps.items() if path.endswith("uses_jax.py"))
    assert code == 99 and "a JAX backend" in stderr


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_help_initialises_no_backend(path, helps):
    code, stdout, stderr = helps[str(path)]
    assert code in (0, 1), stderr
    assert "a JAX backend" not in stderr and "Traceback" not in stderr
    assert f"launchers/{path.name}" in stdout and len(stdout) > 200


# -- one place for what several devices and hosts must agree on


def names_of(node) -> list[str]:
    """Every name that a piece of code speaks of."""
    names = []
    for one in ast.walk(node):
        if isinstance(one, ast.ImportFrom):
            names += [*one.module.split("."), *(alias.name for alias in one.names)]
        for field in ("id", "attr", "arg"):
            names += [value] if isinstance(value := getattr(one, field, None), str) else []
    return names


OF_DEVICES = ("mesh", "shard", "device", "constrain_")


def test_a_dataflow_page_speaks_of_no_device():
    """Rows are laid out by the roles' verbs: a page reads the same on one device and on many."""
    pages = sorted((REPO / "rljax/dataflows").glob("*.py"))
    said = [
        f"{path.name}: {name}"
        for path in pages
        for name in names_of(tree_of(path))
        if name in ("place", "fetch") or any(part in name.lower() for part in OF_DEVICES)
    ]
    assert len(pages) > 10 and said == []


# Rooms whose arrays never leave the devices' side, or that make the layouts.
WITH_DEVICES = ("arrays.py", "mesh.py", "models", "kernels", "plan")
# Weights and queues that are placed on a layout of their own, which `place` does not know.
EXCEPTIONS = {("sampler/generate.py", "_arguments"): "a queue that every device reads whole"}


def crossings(tree) -> list[tuple[str, str]]:
    """(function, expression) of arrays that leave or enter the devices past fetch and place."""
    found = []

    def visit(node, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Attribute) and node.attr in ("device_get", "device_put"):
            found.append((function, ast.unparse(node)))
        numpys = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        numpys = numpys and node.func.attr in ("asarray", "array")
        if numpys and ast.unparse(node.func.value) == "np":
            text = ast.unparse(node)
            if "batch." in text and "fetch" not in names_of(node):
                found.append((function, text))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def test_host_code_reads_and_places_arrays_by_fetch_and_place_alone():
    found = {}
    for path in FILES:
        inside = path.relative_to(REPO / "rljax")
        if inside.parts[0] not in WITH_DEVICES:
            for function, text in crossings(tree_of(path)):
                found.setdefault((str(inside), function), text)
    assert {k: v for k, v in found.items() if k not in EXCEPTIONS} == {}
    assert [name for name in EXCEPTIONS if name not in found] == []  # none is out of date


def test_what_goes_past_fetch_and_place_is_found():
    code = "def f(batch):\n    a = np.asarray(batch.mask)\n    return jax.device_get(a)"
    assert crossings(ast.parse(code)) == [("f", "np.asarray(batch.mask)"), ("f", "jax.device_get")]
    assert crossings(ast.parse("np.asarray(fetch(batch.mask))")) == []
    page = "from rljax.mesh import constrain_rows\ndef f(x, actor): return actor.model.mesh"
    assert {"mesh", "constrain_rows"} <= set(names_of(ast.parse(page)))


def test_every_room_has_a_test_in_the_smoke_lane():
    files = [p for p in (REPO / "tests").rglob("test_*.py") if "mark.smoke" in p.read_text()]
    met = {p.parent.name for p in files} | {room(name) for p in files for name in imports(p)}
    rooms = {path.parent.name for path in (REPO / "rljax").glob("*/__init__.py")}
    assert rooms <= met and rooms <= LEVEL.keys(), rooms - met


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone: of two that are equal it collects one."""
    names = collections.Counter(path.name for path in (REPO / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


# What pip would take from an index: the name, alone or with extras or a version, but not "@ URL".
BY_NAME = re.compile(
    r"""pip install\b[^`\n]*?[ '"]rljax(?:\\?\[[^]\n]*\])?(?![\w\-./\[\\]|[ ]*@)"""
)


def installs(text: str) -> list[str]:
    return [found[0] for found in BY_NAME.finditer(text)]


def test_nothing_says_to_install_rljax_by_its_name():
    """On the public index the name is another project's; ours is rljax-lm. The libraries of an
    extra, which errors name, are those of pyproject.toml."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    known = {one for extra in project["optional-dependencies"].values() for one in extra}
    pages = [*(REPO / "docs").rglob("*.md"), *(REPO / "notebooks").glob("*.ipynb")]
    texts = {path: path.read_text() for path in [*FILES, *LAUNCHERS, *pages, REPO / "README.md"]}
    assert {str(path): found for path, text in texts.items() if (found := installs(text))} == {}
    named = [one for text in texts.values() for one in re.findall(r"'([\w\[\]-]+>=[\d.]+)'", text)]
    assert len(named) > 20 and set(named) <= known


def test_an_installation_by_name_is_found():
    for bad in (
        "pip install rljax",
        "pip install 'rljax[hub]'",
        "%pip install -q -c x rljax",
        'pip install -U "rljax>=0.1"',
        "pip install rljax\\[tpu,gcs\\]",
    ):
        assert installs(bad), bad
    for good in (
        "pip install -e '.[hub]'",
        "pip install ./rljax_lm-0.1.0-py3-none-any.whl",
        "pip install 'rljax-lm[hub]'",
        "pip install 'rljax-lm[hub] @ git+https://h/o/rljax'",
    ):
        assert not installs(good), good


# -- each error says what mends it

ERRORS = ("InputError", "UnknownField", "Unreadable", "HostsLate", "UnknownModel", "Damaged")


def without_fix(tree) -> list[str]:
    """The calls that make an error without a fix, or with one that may be empty."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        checked = isinstance(called, ast.Attribute) and called.attr in ("check", "check_field")
        checked = checked and isinstance(called.value, ast.Attribute | ast.Name)
        checked = checked and ast.unparse(called.value).rpartition(".")[2] in ("problems", "others")
        if not checked and not (isinstance(called, ast.Name) and called.id in ERRORS):
            continue
        fixes = [word.value for word in node.keywords if word.arg == "fix"]
        fixes = fixes or (node.args[4 if called.attr == "check" else 3 :][:1] if checked else [])
        whole = any(word.arg is None for word in node.keywords)  # **{...}, of a message
        nothing = [
            one
            for fix in fixes
            for one in ast.walk(fix)
            if isinstance(fix, ast.Constant | ast.IfExp)
            and one in parts_of(fix)
            and isinstance(one, ast.Constant)
            and one.value == ""
        ]
        if not whole and (not fixes or nothing):
            wrong.append(f"{node.lineno}: {ast.unparse(node)[:80]}")
    return wrong


def parts_of(fix) -> list:
    """Yields what a fix may be: itself, or the sides of a choice."""
    if isinstance(fix, ast.IfExp):
        return [*parts_of(fix.body), *parts_of(fix.orelse)]
    return [fix]


def test_every_error_has_a_fix():
    files = [*FILES, *(REPO / "configs").rglob("*.py"), *(REPO / "examples").rglob("*.py")]
    wrong = [
        f"{path.relative_to(REPO)}:{one}" for path in files for one in without_fix(tree_of(path))
    ]
    assert wrong == []


def test_an_error_without_a_fix_is_found():
    for code in (
        "raise InputError('a', value=1, rule='b')",
        "InputError('a', fix='')",
        "Damaged(f'{a} is gone')",
        "problems.check(a > 0, 'field', a, 'above 0')",
        "InputError('a', fix='b' if c else '')",
        "problems.check(a, 'field', a, 'rule', '')",
        "problems.check_field(a, 'field', 'rule')",
    ):
        assert len(without_fix(ast.parse(code))) == 1, code
    for code in (
        "InputError('a', fix=f'write {b}')",
        "InputError('a', fix='b' if c else 'd')",
        "reader.check(ids, mask, images)",
        "problems.check(a, 'f', a, 'rule', 'fix')",
        "problems.check_field(a, 'f', 'rule', 'fix')",
    ):
        assert without_fix(ast.parse(code)) == [], code


def test_flags_fields_and_commands_of_fixes_are_there():
    sys.path.insert(0, str(REPO / "docs"))
    try:
        from error_list import listed_errors
    finally:
        sys.path.pop(0)
    from rljax.command.commands import COMMANDS
    from rljax.config import Config
    from rljax.config.declare import declared
    from rljax.config.names import field_names

    fields = set(field_names(Config))
    flags = {o.flag for command in COMMANDS.values() for o in declared(command.options).values()}
    flags |= {f"no{flag}" for flag in flags}  # off
    flags |= {"config", "help", "print_config", "FLAG"}
    flags |= {"ntasks-per-node", "worker"}  # of srun and gcloud
    wrong, seen = [], 0
    for room, errors in listed_errors(REPO / "rljax").items():
        for error in errors:
            for name in re.findall(r"--config\.([a-z_0-9.]+[a-z0-9])(?=[=\s,:)`'\"]|$)", error.fix):
                seen += 1
                wrong += [] if name in fields else [f"{room}: --config.{name}: {error.fix}"]
            for name in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)(?=[=\s,:)`'\"]|$)", error.fix):
                seen += 1
                wrong += [] if name in flags else [f"{room}: --{name}: {error.fix}"]
            for words in re.findall(r"`?rljax ([a-z]+(?: [a-z]+)?)(?= [A-Z-]|`|$)", error.fix):
                seen += 1
                known = words in COMMANDS or words.split()[0] in COMMANDS
                wrong += [] if known else [f"{room}: rljax {words}: {error.fix}"]
    assert seen > 60
    assert not wrong, "\n".join(wrong)


# Clauses that no docstring and no help text begins with.
CLAUSE = re.compile(r"\W*(What|Whatever|Whether|How|Of|Where|Who|Whose|Which|When|Why)\b", re.I)


@pytest.mark.smoke
def test_a_docstring_begins_with_a_verb_or_with_what_is_returned():
    """Not with a clause: What, Whether, How, Of, Where, ..."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(REPO)}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and CLAUSE.match(text)
    ]
    assert found == []


@pytest.mark.smoke
def test_a_help_text_begins_with_what_the_field_is():
    """A field of the config or an option of a command: "Number of ...", "Folder of ...",
    "Writes ...", not a clause."""
    from rljax.command.commands import COMMANDS
    from rljax.config.declare import declared
    from rljax.config.schema import FIELDS

    classes = {command.options for command in COMMANDS.values()}
    options = {
        f"{kind.__name__}.{name}": spec.help
        for kind in classes
        for name, spec in declared(kind).items()
    }
    fields = {name: spec.help for name, spec in FIELDS.items()}
    assert len(options) > 100 and len(fields) > 150
    texts = options | fields
    assert {name: text for name, text in texts.items() if CLAUSE.match(text)} == {}
    assert {name: text for name, text in fields.items() if not text.endswith(".")} == {}


def test_a_clause_is_found():
    for bad in ("What is stored", "of rljax.losses", '"How" it is', "Why it ended", "WHOSE step"):
        assert CLAUSE.match(bad), bad
    for good in ("Number of steps", "Offset of a row", "(low, high): range", "Wheel"):
        assert not CLAUSE.match(good), good


def public_functions(path):
    """Functions of a module and methods of its classes, without those whose name, class or module
    is private."""
    if path.stem.startswith("_") and path.stem != "__init__":
        return
    bodies = [tree_of(path).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bodies.append(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("_"):
                    yield node


def raises_itself(function) -> bool:
    inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
    own = set(ast.walk(function)).difference(*map(ast.walk, inner))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in own)


def lacking(function) -> str:
    """What a public function's docstring should say, and does not."""
    text = ast.get_docstring(function) or ""
    if not text:
        return "a docstring"
    arguments = [*function.args.args, *function.args.kwonlyargs]
    hints = [a.annotation for a in arguments if a.annotation] + [function.returns or ast.Name("")]
    arrays = any(re.search(r"\b(Array|ArrayLike|ndarray)\b", ast.unparse(hint)) for hint in hints)
    if arrays and not re.search(r"\[|scalar|shape|random key|tree|leaf|leaves", text):
        return "shapes"
    if raises_itself(function) and not re.search("[Rr]aise|[Ee]rror|[Rr]efuse", text):
        return "what it raises"
    return ""


# The docstring of a tool is the schema that a policy reads.
TOOLS = REPO / "rljax" / "environments" / "functions"


def test_a_public_function_says_its_shapes_and_what_it_raises():
    found = [
        f"{path.relative_to(REPO)}:{function.lineno} {function.name} lacks {lacking(function)}"
        for path in FILES
        if TOOLS not in path.parents
        for function in public_functions(path)
        if lacking(function)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("def f(x):\n    return x", "a docstring"),
        ('def f(x: jax.Array):\n    "The mean."', "shapes"),
        ('def f(x: jax.Array):\n    "The mean of x [B]."', ""),
        ('def f():\n    "Nothing."\n    raise ValueError()', "what it raises"),
        ('def f():\n    "Nothing."\n    def g():\n        raise ValueError()', ""),
    ],
)
def test_what_a_docstring_lacks_is_found(code, lacks):
    assert lacking(ast.parse(code).body[0]) == lacks
