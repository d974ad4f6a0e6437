"""The command line: `rljax COMMAND ...`, and launchers/*.py, which are the same commands.

Each module of this folder is one command: its docstring is its help, main(options, given) its work.
"""

import os
import sys

try:
    from rljax.command.commands import COMMANDS, main, run
except (ImportError, AttributeError):
    # A file named as a module of Python itself, before which PYTHONPATH puts it, breaks libraries.
    _FILES = [
        os.path.join(folder, name)
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isdir(folder)
        for name in sorted(os.listdir(folder))
        if name.endswith(".py") and name[:-3] in sys.stdlib_module_names
    ]  # fmt: skip
    if not _FILES:
        raise
    _MODULES = ", ".join(repr(os.path.basename(file)[:-3]) for file in _FILES)
    sys.stderr.write(f"error: {', '.join(_FILES)} hides Python's own {_MODULES}. Fix: rename it\n")
    sys.exit(2)

__all__ = ["COMMANDS", "main", "run"]
