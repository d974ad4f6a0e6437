"""The command line: `rljax COMMAND ...`, and launchers/*.py, which are the same commands.

Each module of this folder is one command: its docstring is its help, and main(options, source)
runs it.
"""

import os
import signal
import sys
import threading

from rljax.tracking.signals import quit_now

_DISTRIBUTIONS = {"absl": "absl-py", "yaml": "pyyaml"}  # of packages, by what is imported

# What is imported here takes a moment, in which a Ctrl-C ends a command as it does later.
_ANSWERS_CTRL_C = (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
    and threading.current_thread() is threading.main_thread()
)
if _ANSWERS_CTRL_C:
    signal.signal(signal.SIGINT, quit_now)

try:
    from rljax.command.commands import COMMANDS, main, run
except (ImportError, AttributeError) as _error:
    _MISSING = (_error.name or "").partition(".")[0] if isinstance(_error, ImportError) else ""
    # A file named as a module of Python itself, before which PYTHONPATH puts it, breaks libraries.
    _FILES = [
        os.path.join(folder, name)
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if os.path.isdir(folder)
        for name in sorted(os.listdir(folder))
        if name.endswith(".py") and name[:-3] in sys.stdlib_module_names
    ]
    if not _FILES and isinstance(_error, ModuleNotFoundError) and _MISSING not in ("", "rljax"):
        _ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        _VENV_PYTHON = os.path.join(_ROOT, ".venv", "bin", "python")
        _FIX = f"{sys.executable} -m pip install {_DISTRIBUTIONS.get(_MISSING, _MISSING)}"
        if os.path.isfile(os.path.join(_ROOT, "pyproject.toml")):
            _FIX = f"{sys.executable} -m pip install -e {_ROOT}"
        if os.path.isfile(_VENV_PYTHON) and _VENV_PYTHON != sys.executable:
            _FIX = f"start with {_VENV_PYTHON}, or {_FIX}"
        sys.stderr.write(f"error: {sys.executable} has no package {_MISSING!r}. Fix: {_FIX}\n")
        sys.exit(2)
    if not _FILES:
        raise
    _MODULES = ", ".join(repr(os.path.basename(file)[:-3]) for file in _FILES)
    sys.stderr.write(f"error: {', '.join(_FILES)} hides Python's own {_MODULES}. Fix: rename it\n")
    sys.exit(2)

if _ANSWERS_CTRL_C:  # whoever imports the package without running a command has a handler already
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["COMMANDS", "main", "run"]
