"""House rules for several hosts, by reading the source: one room knows that there are several,
hosts decide alike, and what devices hold reaches the host by `fetch` alone."""

import ast

import pytest
from test_house import FILES, REPO, tree_of

ROOT = REPO / "rljax"

# -- one room knows of several processes

OF_PROCESSES = (
    "multihost_utils",
    "distributed",
    "process_index",
    "process_count",
    "process_indices",
)


def process_words(tree) -> list[str]:
    """What a piece of code imports from, or asks JAX about, several processes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if set(a.name.split(".")) & set(OF_PROCESSES)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name in OF_PROCESSES]
        elif isinstance(node, ast.Attribute) and node.attr in OF_PROCESSES:
            of_jax = ast.unparse(node.value) in ("jax", "jax.experimental")
            found += [ast.unparse(node)] if of_jax else []
    return found


def test_only_the_room_hosts_knows_of_several_processes():
    found = {
        str(path.relative_to(ROOT)): words
        for path in FILES
        if path.relative_to(ROOT).parts[0] != "hosts" and (words := process_words(tree_of(path)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    (
        "from jax.experimental import multihost_utils",
        "import jax.distributed as d",
        "jax.process_index() == 0",
        "from jax._src import distributed",
    ),
)
def test_words_of_processes_are_found(code):
    assert process_words(ast.parse(code))


# -- what devices hold reaches the host by fetch

HOST_ROOMS = (
    "training",
    "rollout",
    "setup",
    "evaluation",
    "sampler",
    "roles",
    "datagen",
    "models",
    "learn",
    "dataflows",
)
READS = {"float", "int", "bool"}
METHODS = {"item", "tolist"}
NUMPY = ("np", "numpy")
FETCHES = {"fetch", "shape", "eval_shape"}


def jitted(tree) -> set[str]:
    """Functions of a module that are compiled programs."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if any(
                "jit" in ast.unparse(d).split("(")[0] or "jax.jit" in ast.unparse(d)
                for d in node.decorator_list
            ):
                names.add(node.name)
        elif isinstance(node, ast.Assign) and "jax.jit(" in ast.unparse(node.value):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def calls(node) -> set[str]:
    """The names of what is called inside."""
    inside = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {getattr(func, "attr", getattr(func, "id", "")) for func in inside}


# Calls whose results lie on devices, and attributes of what does.
MAKE = {"place", "put_whole", "generate", "rollout", "logprobs", "init"}
RESHAPE = {"flattened", "nested", "merged"}  # of trees of arrays
HELD = {"state", "params", "weights"}


ASSIGNS = ast.Assign | ast.For | ast.comprehension


def assigned(node) -> tuple[set[str], ast.AST]:
    """(the names that an assignment, a loop or a comprehension gives a value, the value)."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [n for target in targets for n in getattr(target, "elts", [target])]
    value = node.value if isinstance(node, ast.Assign) else node.iter
    return {n.id for n in names if isinstance(n, ast.Name)}, value


def in_order(function, kinds) -> list:
    """What gives names values, and nodes of `kinds`, by lines; on one line a loop comes first, as
    what it names is read there, and an assignment last."""
    nodes = [n for n in ast.walk(function) if isinstance(n, ASSIGNS | kinds)]

    def line(n):
        return n.iter.lineno if isinstance(n, ast.comprehension) else n.lineno

    def rank(n):
        return 2 * isinstance(n, ast.Assign) - isinstance(n, ASSIGNS)

    return sorted(nodes, key=lambda n: (line(n), rank(n)))


def held_reads(tree) -> list[tuple[str, str]]:
    """(function, expression) of numbers that are read from arrays of devices without fetch."""
    programs, found, held = jitted(tree), [], {"batch", "params"}

    def on_devices(node, local: set[str]) -> bool:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in FETCHES:
                return False
            if name in programs | MAKE:
                return True
            ours = ast.unparse(node.func).partition(".")[0] not in ("jax", "jnp", *RESHAPE)
            return any(on_devices(one, local) for one in [*([] if ours else node.args), node.func])
        if isinstance(node, ast.Attribute):
            if node.attr in ("shape", "dtype", "ndim", "sharding", "rows", "size", "step"):
                return False
            return node.attr in HELD or on_devices(node.value, local)
        if isinstance(node, ast.Name):
            return node.id in local
        return any(on_devices(one, local) for one in ast.iter_child_nodes(node))

    def read_of(node) -> list:
        """What a call reads the numbers of."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in NUMPY:
            return node.args
        return node.args if name in READS else [node.func.value] if name in METHODS else []

    def look(function) -> None:
        local = {argument.arg for argument in function.args.args} & held
        for node in in_order(function, ast.Call):
            if not isinstance(node, ast.Call):
                names, value = assigned(node)
                local = local | names if on_devices(value, local) else local - names
            elif any(on_devices(one, local) for one in read_of(node)):
                found.append((function.name, ast.unparse(node)))

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in programs:
            look(node)
    return found


ALONE = {("training/nonfinite.py", "while_loop"): "rljax replay is for one host"}


def test_numbers_of_devices_are_read_by_fetch():
    found, looked = {}, 0
    for path in FILES:
        inside = path.relative_to(ROOT)
        if inside.parts[0] in HOST_ROOMS:
            looked += 1
            for function, text in held_reads(tree_of(path)):
                found.setdefault((str(inside), function), text)
    assert looked > 80 and {k: v for k, v in found.items() if k not in ALONE} == {}
    assert [name for name in ALONE if name not in found] == []  # none is out of date


@pytest.mark.parametrize(
    "line",
    (
        "x = np.asarray(batch.mask)",
        "x = [float(part) for part in _sums(batch)]",
        "rows = _sums(batch)\n    return np.sum(rows[0])",
        "made = actor.generate(1)\n    n = int(jnp.max(made.tokens))",
        "return batch.tokens.sum().item()",
        "placed = place({}, mesh)\n    return np.array(placed)",
    ),
)
def test_a_read_without_fetch_is_found(line):
    program = "@jax.jit\ndef _sums(x): return x\n"
    function = f"def f(batch, actor, mesh):\n    {line}"
    assert held_reads(ast.parse(program + function)), line
    again = function.replace("_sums(batch)", "fetch(_sums(batch))")
    again = again.replace("batch.", "fetch(batch).").replace("actor.generate(1)", "fetch(actor)")
    again = again.replace("place({}, mesh)", "{}")
    assert held_reads(ast.parse(program + again)) == [], again


# -- hosts decide alike

DECIDING = ("training", "rollout", "dataflows")
# What one host may see otherwise than another: clocks, files, memory, pools, signals, its number.
CLOCKS = {"monotonic", "time", "perf_counter", "process_time", "time_ns"}
FILES_OF = {
    "exists",
    "is_file",
    "is_dir",
    "is_symlink",
    "glob",
    "rglob",
    "iterdir",
    "stat",
    "lexists",
    "listdir",
    "getsize",
    "access",
    "read_text",
    "read_bytes",
    "disk_usage",
    "free_bytes",
}
OTHERS = {
    "device_bytes",
    "memory_stats",
    "getpid",
    "gethostname",
    "cpu_count",
    "urandom",
    "token_hex",
    "poll",
    "done",
    "is_alive",
    "empty",
    "qsize",
    "index",
    "first",
    "mine",
    "getrandbits",
}
OWN = CLOCKS | FILES_OF | OTHERS
OWN_FIELDS = {"received"}  # of Signals
ALIKE = {"agree", "share", "gather", "stop_agreed"}  # the same on all hosts, whatever they pass
MODULES = {"time", "os", "hosts", "shutil", "secrets", "socket", "random"}


def is_own(node, local: set[str]) -> bool:
    """Whether the value of an expression may differ between hosts. `local`: names, of variables and
    of functions, whose value does."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ALIKE:
            return False
        if (
            name in local or name in OWN and not (name == "index" and node.args)
        ):  # a list's index is everybody's
            return True
    if isinstance(node, ast.Attribute) and node.attr in OWN_FIELDS:
        return True
    if isinstance(node, ast.Name):
        return node.id in local
    return any(is_own(one, local) for one in ast.iter_child_nodes(node))


# Calls in which all hosts take part, or which lead there.
TOGETHER = ALIKE | {
    "fetch",
    "place",
    "put_whole",
    "wait",
    "generate",
    "sample_all",
    "sample",
    "run_rollout",
    "greedy_accuracy",
    "held_out_step",
    "evaluate",
    "begin",
    "start",
    "load",
    "save",
    "export",
    "export_adapter",
    "initial_params",
    "step",
    "one_step",
    "whole_step",
    "loop",
    "roll_back",
}
LEAVES = ast.Return | ast.Raise | ast.Break | ast.Continue


def own_decisions(tree) -> list[tuple[str, str]]:
    """(function, test) of every decision that hosts may take differently, and after which they are
    at different places of the program: one side calls what all take part in, or leaves."""
    found, functions = [], [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    together, own = set(TOGETHER), set()
    called = [(function.name, calls(function)) for function in functions]
    returned = [
        (function.name, n.value)
        for function in functions
        for n in ast.walk(function)
        if isinstance(n, ast.Return) and n.value
    ]
    known = None
    while known != (len(together), len(own)):
        known = (len(together), len(own))
        # What calls such a function, or returns what it does, is one itself.
        together |= {name for name, names in called if names & together}
        own |= {name for name, value in returned if is_own(value, own)}
    own -= together

    def parts_them(node) -> bool:
        sides = [node.body, node.orelse]
        inside = [
            n
            for side in sides
            for one in (side if isinstance(side, list) else [side])
            for n in ast.walk(one)
        ]
        names = {name for n in inside for name in calls(n)}
        return bool(names & together) or any(isinstance(n, LEAVES) for n in inside)

    def look(function) -> None:
        local = set(own)
        alone = {
            id(inner)
            for n in ast.walk(function)
            if isinstance(n, ast.If) and ast.unparse(n.test) == "hosts.count() == 1"
            for one in n.body
            for inner in ast.walk(one)
        }
        for node in in_order(function, ast.If | ast.While | ast.IfExp):
            if id(node) in alone:
                continue
            if isinstance(node, ASSIGNS):
                names, value = assigned(node)
                local = local | names if is_own(value, local) else local - names
            elif is_own(node.test, local) and parts_them(node):
                found.append((function.name, ast.unparse(node.test)))

    for function in functions:
        look(function)
    return found


AFTERWARDS = "what follows is the first host's alone"
ENDS_ALL = "a host that raises ends the run on all, with its words"
LISTED = {
    ("training/loop.py", "finish", "not hosts.first()"): AFTERWARDS,
    ("training/loop.py", "finish", "gone"): AFTERWARDS,
    ("training/loop.py", "train_in", "console"): "begin() is the console's",
    ("training/bad_batch.py", "read", "not path.exists()"): "a replay is of one host",
    ("training/preflight.py", "_appears", "file.read_text() == token"): "its result is gathered",
    ("training/preflight.py", "_appears", "time.monotonic() > deadline"): "its result is gathered",
    ("training/program_cache.py", "_put", "self.shared is None or not hosts.first()"): (
        "a thread copies files"
    ),
    ("training/run_folder.py", "locked", "not hosts.first()"): "fetch() is the mirror's",
    ("training/run_folder.py", "_writable", "store.read(probe) != text"): "gathered by the caller",
    ("training/run_folder.py", "_writable", "store.read(token) != text"): "gathered by the caller",
    (
        "training/run_folder.py",
        "_writable",
        "probe.rpartition('/')[2] not in store.sizes(OF_HOSTS, below=False)",
    ): "gathered by the caller",
    ("training/scores.py", "scored_responses", "not pending.done()"): ENDS_ALL,
    ("training/scores.py", "scored_responses", "time.monotonic() > deadline"): ENDS_ALL,
}


def test_hosts_decide_alike():
    found = {
        (str(path.relative_to(ROOT)), *decision)
        for path in FILES
        if path.relative_to(ROOT).parts[0] in DECIDING
        for decision in own_decisions(tree_of(path))
    }
    assert found == LISTED.keys()  # nothing else, and none is out of date


@pytest.mark.parametrize(
    "lines",
    (
        "if time.monotonic() > deadline:\n        raise ValueError()",
        "if path.exists():\n        x = fetch(batch)",
        "late = time.time() - begun > 3\n    if late:\n        hosts.wait('here')",
        "while not pool.done():\n        batch = actor.generate(prompts)",
        "if hosts.first():\n        run.evaluate()",
        "for row in hosts.mine(3):\n        if row:\n            break",
        "stop = signals.received\n    x = fetch(y) if stop else 0",
    ),
)
def test_a_decision_of_one_host_is_found(lines):
    assert own_decisions(ast.parse(f"def f():\n    {lines}")), lines
    same = lines.replace("pool.done()", "agree(pool.done())").replace("hosts.first()", "first")
    for own in ("time.monotonic()", "path.exists()", "hosts.mine(3)", "signals.received"):
        same = same.replace(own, f"hosts.share({own})")
    same = same.replace("time.time() - begun > 3", "hosts.agree(time.time() - begun > 3)")
    assert own_decisions(ast.parse(f"def f():\n    {same}")) == [], same
    assert own_decisions(ast.parse("def f():\n    if hosts.first():\n        print(1)")) == []
