"""The tool `python`: a program of the policy, run in the sandbox of rljax.rewards."""

from collections.abc import Callable

from rljax.contracts import contract
from rljax.environments.toolbox import without_addresses
from rljax.rewards.sandbox.tiers import ProcessLimits, run_program, sandbox_tier

_OUTPUT_BYTES = 1 << 16  # bytes of stdout and of stderr
# Runs the last cell in the names that those before it leave. Their output was shown before; what
# one of them raised was, too. Random numbers are equal each time, so that the names are. The code
# is parsed in the sandbox, not here: a parser may fall over what a policy writes.
_RUNNER = """
def _run(cells):
    import ast, io, linecache, random, sys, traceback, types

    class Nothing(io.TextIOBase):
        def write(self, text):
            return len(text)

    def run(cell, name):
        linecache.cache[name] = len(cell), None, cell.splitlines(True), name
        tree = ast.parse(cell, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last is not None:
            code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            value = eval(code, names)
            if value is not None:
                print(repr(value))

    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    random.seed(0)
    sys.stdout.reconfigure(line_buffering=True)  # what a stopped program said is shown
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = Nothing()
    for cell in cells[:-1]:
        try:
            run(cell, "cell")
        except BaseException:
            pass
    sys.stdout, sys.stderr = streams
    try:
        run(cells[-1], "code")
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename not in ("code", "cell"):
            frames = frames.tb_next
        sys.stdout.flush()
        traceback.print_exception(type(error), error, frames)
        sys.exit(1)
"""


@contract(safe=True)
def python(*, session: bool = False, timeout_s: float = 5.0, memory_mb: int = 512) -> Callable:
    """A tool that runs Python in a sandbox and answers with what it prints, and with the value of
    an expression in the last line.

    Each call is a program of its own. With `session` the earlier calls of the episode are run again
    before it, so that their names are there; their time counts, and one that was stopped is left
    out. `random` is seeded; clocks and numpy's own generator are not.
    """
    size = dict(memory_bytes=memory_mb << 20, max_output_bytes=_OUTPUT_BYTES)
    limits = ProcessLimits(timeout_s=timeout_s, cpu_s=timeout_s, **size)
    sandbox_tier()  # raises InputError where there is none
    cells: list[str] = []

    def python(code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line.

        Args:
            code: The program.
        """
        cells.append(code)
        result = run_program(f"{_RUNNER}\n_run({cells!r})\n", limits=limits)
        if not session or result.status not in ("ok", "error"):
            del cells[-1]
        return _report(result)

    return python


def _report(result) -> str:
    """Reports a program's output, and how it ended if not by itself."""
    parts = [result.stdout, result.stderr]
    texts = [part.decode("utf-8", "replace").strip("\n") for part in parts]
    if result.status not in ("ok", "error"):
        texts.append(f"The program was stopped: {result.message}")
    return without_addresses("\n".join(text for text in texts if text)) or "[no output]"
