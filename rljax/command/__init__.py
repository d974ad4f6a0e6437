"""The command line: `rljax COMMAND ...`, and launchers/*.py, which are the same commands.

Each module of this folder is one command: its docstring is its help, main(options, given) its work.
"""

from rljax.command.commands import COMMANDS, main, run

__all__ = ["COMMANDS", "main", "run"]
