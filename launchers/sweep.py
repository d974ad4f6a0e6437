"""Sweep: python launchers/sweep.py --config=configs/sweep_quickstart.py [--config.steps=10 ...]

Runs every member that the config file's sweep() yields, one after the other, and prints a table.
The same command again goes on: finished members are kept, an interrupted one resumes. --dry_run
lists the members and their commands only.
"""

import shlex
import sys
from pathlib import Path

from rljax.config import flags as launch
from rljax.config.options import SweepOptions

_OURS = ("--out", "--dry_run", "--nodry_run")


def _arguments() -> list[str]:
    """The flags of the command line that are the training launcher's."""
    kept, rest = [], iter(sys.argv[1:])
    for argument in rest:
        if argument.partition("=")[0] not in _OURS:
            kept.append(argument)
        elif argument == "--out":
            next(rest, None)
    return kept


def main(options: SweepOptions) -> int:
    from rich.console import Console

    from rljax.experiments import sweep

    path = launch.config_path(sys.argv[1:])
    module = launch.config_module(path)
    launch.require_sweep(module, path)
    folder = Path(options.out or Path("runs") / Path(path.partition(":")[0]).stem)
    members = sweep.make_members(launch.parsed_config(), module.sweep(), folder, path)
    launcher, arguments = Path(__file__).with_name("train.py"), _arguments()
    if options.dry_run:
        for member in members:
            print(shlex.join(sweep.command(launcher, arguments, member)))
        return 0
    stopped = ""
    try:
        for member, code in sweep.run_members(members, arguments, launcher=launcher):
            print(f"{member.name}: " + ("was finished" if code is None else f"exit code {code}"))
            sweep.write_result(sweep.result_rows(members), folder)
    except sweep.Stopped as signal:
        stopped = f"stopped by {signal}; the same command goes on"
    rows = sweep.result_rows(members)
    print(f"{sweep.write_result(rows, folder)}:")
    Console().print(sweep.table(rows))
    print(stopped, end="\n" if stopped else "")
    return 0 if all(member.finished() for member in members) else 3


if __name__ == "__main__":
    launch.command(main, SweepOptions, needs_config=True)
