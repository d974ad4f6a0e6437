"""Sweep: rljax sweep --config=configs/sweep_quickstart.py [--config.steps=10 ...]

Runs every member that the config file's sweep() yields, one after the other, prints a table, and
compares the runs on one page, comparison.html. The same command again goes on: finished members are
kept, an interrupted one resumes. --dry_run lists the members and their commands only.
"""

import shlex
from pathlib import Path

from rljax.command.launch import Given
from rljax.config.flags import config_module
from rljax.config.options import SweepOptions
from rljax.errors import InputError


def main(options: SweepOptions, given: Given) -> int:
    from rich.console import Console

    from rljax.experiments import sweep
    from rljax.report.comparison import write_pages

    path, arguments = given.path, given.config_arguments()
    module = config_module(path)
    if not callable(vars(module).get("sweep")):
        fix = "define sweep() that yields {'dotted.field': value, ...} for each run"
        raise InputError(f"{path.partition(':')[0]} has no sweep()", fix=fix)
    folder = Path(options.out or Path("runs") / Path(path.partition(":")[0]).stem)
    members = sweep.make_members(given.config, module.sweep(), folder, path)
    if options.dry_run:
        for member in members:
            print(shlex.join(sweep.command(arguments, member)))
        return 0
    stopped = ""
    try:
        for member, code in sweep.run_members(members, arguments):
            print(f"{member.name}: " + ("was finished" if code is None else f"exit code {code}"))
            sweep.write_result(sweep.result_rows(members), folder)
    except sweep.Stopped as signal:
        stopped = f"stopped by {signal}; the same command goes on"
    rows = sweep.result_rows(members)
    print(f"{sweep.write_result(rows, folder)}:")
    Console().print(sweep.table(rows))
    if begun := [member.folder for member in members if member.folder.is_dir()]:
        print(write_pages(begun, folder / "comparison.html"))
    print(stopped, end="\n" if stopped else "")
    return 0 if all(member.finished() for member in members) else 3
