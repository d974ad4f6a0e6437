"""Sweep: rljax sweep sweep_quickstart [--config.steps=10 ...]

Runs every member that the config file's sweep() yields, or the list `sweep` of a JSON or YAML file
holds, one after the other, prints a table, and compares the runs on one page, comparison.html. The
same command again goes on: finished members are kept, an interrupted one resumes. --dry_run lists
the members and their commands only; with --together also which of them share a program.

--seeds=8 runs every member with eight seeds; a config without sweep() is then the only member.
With --together, members that differ in nothing but their seed and in numbers, such as a learning
rate, are trained in this process, and one program takes the next config.program_steps steps of all
of them. Each is the run that it would be by itself, with a folder of its own.

--until="A better than B by 0.02", of two members without their seeds, runs one seed of all members
after the other (with --together eight), and ends with code 0 once the interval of the difference in
accuracy, which is valid however often one looks, has answered it; else it says about how many more
seeds would.

On a pod, run it on every host: its hosts run each member together. A member that ends with a code
that says "start again", such as 143 after SIGTERM, ends the sweep with that code there. With
--member_of=INDEX/COUNT machines that share the folder each run their part of the members, alone.
"""

import functools
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from rljax.command.launch import ConfigSource
from rljax.config.flags import is_data, listed, split_config
from rljax.config.run_options import SweepOptions
from rljax.pods.supervise import INPUT, LAST_WORDS, RESTARTS, code_of_the_failure

TOGETHER = 8  # seeds that a sweep with --together and --until trains before it looks


def main(options: SweepOptions, source: ConfigSource) -> int:
    """Runs the members and prints the table; returns the exit code."""
    from rljax.experiments import sweep, until
    from rljax.hosts.cluster import find
    from rljax.report.comparison import write_pages
    from rljax.tracking.screen import Terminal

    path, arguments = source.path, source.config_arguments(trust_code=options.trust_code)
    fix = "define sweep() that yields {'dotted.field': value, ...} for each run"
    trusted = options.trust_code or not is_data(path)
    entries = listed(path, "sweep", fix, default=[{}] if options.seeds else None)
    seeds = range(source.config.seed, source.config.seed + options.seeds)
    cluster = None if options.member_of else find(os.environ)
    host, share = cluster.host if cluster else 0, options.share()
    folder = Path(options.out or Path("runs") / Path(split_config(path)[0]).stem)
    made_with = (trusted, seeds, source.fields)
    members = sweep.make_members(source.config, entries, folder, path, *made_with)
    counted_fields = {"seed"} if options.seeds else set()  # --seeds counts from --config.seed on
    entries = [(member.name, member.overrides) for member in members]
    sweep.require_unset(source.fields.keys() - counted_fields, entries, "member", path)
    selected = members[share[0] :: share[1]] if share else members
    question = until.question_of(options.until, members) if options.until else None
    groups = sweep.check_together(selected) if options.together else []
    if options.dry_run:
        for number, group in enumerate(groups, start=1):
            names = ", ".join(member.name for member in group)
            print(f"program {number} of {len(groups)} trains {len(group)} runs: {names}")
        if groups:
            print("Each run by itself:")
        for member in selected:
            print(shlex.join(sweep.command(arguments, member)))
        return 0
    group_size = TOGETHER if options.together else 1
    stopped, exit_code = "", 0
    writer = share[0] if share else 0
    words_file = Path(tempfile.mkdtemp(prefix="rljax-")) / "words"
    try:
        env = sweep.ALONE if share else {LAST_WORDS: str(words_file)} if cluster else {}
        run = functools.partial(sweep.run_members, arguments=arguments, host=host, env=env)
        if options.together:
            run = functools.partial(sweep.run_together, env=env)
        runs = run(selected)
        if question:
            runs = until.run_until(question, selected, run, group_size, members)
        for member, code in runs:
            print(f"{member.name}: " + ("was finished" if code is None else f"exit code {code}"))
            if not host:
                sweep.write_result(sweep.result_rows(members), folder, writer)
            if cluster and (exit_code := _start_again(code, words_file)):
                stopped = f"{member.name} can go on: exit code {exit_code}"
                break
            words_file.unlink(missing_ok=True)
    except sweep.Stopped as signal:
        stopped = f"stopped by {signal}; the same command goes on"
        exit_code = sweep.STOPPED if cluster and str(signal) == "SIGTERM" else 0
    finally:
        shutil.rmtree(words_file.parent, ignore_errors=True)
    rows = sweep.result_rows(members)
    if not host:
        print(f"{sweep.write_result(rows, folder, writer)}:")
        Terminal().print(sweep.table(rows))
    started_folders = [member.folder for member in members if member.folder.is_dir()]
    if started_folders and not host and not writer:
        print(write_pages(started_folders, folder / "comparison.html"))
    print(stopped, end="\n" if stopped else "")
    finished = (
        question.answer(members).known
        if question
        else all(member.finished() for member in selected)
    )
    return exit_code or (0 if finished else 3)


def _start_again(code: int | None, words_file: Path) -> int:
    """Returns the exit code of a member of several hosts where a new start can mend it; else 0. An
    error of the input on one host ends the others with 171: all of them go on to the next
    member."""
    code = 128 - code if code and code < 0 else code or 0
    return code if code in RESTARTS and code_of_the_failure(str(words_file)) != INPUT else 0
