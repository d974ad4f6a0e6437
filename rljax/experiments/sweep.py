"""Sweep: run what a config file's `sweep()` yields, one training run per member, resumably.

Each member is a process of its own, `rljax train`, so that a crash of one stops no other and each
can be repeated by hand. JAX is never initialised here: the device belongs to the member that runs.

On several hosts every host runs the sweep, and the children of a member find each other. What is
finished is read from the folder that the hosts share; no member begins before all of its hosts have
left the last one, so they read the same.

    def sweep():                                    # in the config file
        for lr in (1e-6, 3e-6):
            yield {"actor_optimizer.lr": lr}        # dotted fields of rljax.config.Config

A member may start from another config file: {"config": "configs/presets/dapo.py:tiny", "seed": 1}.
"""

import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rljax.config import Config, fingerprints, from_dict, value_of, with_overrides
from rljax.config.flags import load_named_config
from rljax.config.own_functions import plain_value
from rljax.config.trust import refuse_own_code
from rljax.errors import InputError
from rljax.files import make_folder, read_json_object, write_json
from rljax.report.run_warnings import fault_meaning
from rljax.report.starts import last_start
from rljax.runs.folder import lacks_export
from rljax.runs.units import interval_text
from rljax.training.run_folder import exports_of
from rljax.validation import validate

RESULT = "sweep.json"
STOP_S = 60  # seconds in which a member that is stopped by an error saves
STOPPED = 143  # exit code of a member that a notice has stopped on one of its hosts
ALONE = {"RLJAX_HOSTS": "1"}  # variables of a member that one host runs by itself
TRAIN = (sys.executable, "-m", "rljax", "train")


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of the sweep; `name` is the name of its folder, `setting` that without its seed."""

    name: str
    setting: str
    overrides: Mapping[str, object]
    config: Config

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run_dir)

    def summary(self) -> dict:
        """Returns summary.json of the run; {} if it cannot be read."""
        try:
            return read_json_object(self.folder / "summary.json")
        except InputError:
            return {}

    def changed(self) -> list[str]:
        """Returns the fields that change a run and whose values are not those of the run in the
        folder; [] if there is none. Raises InputError if its config.json cannot be read."""
        path = self.folder / "config.json"
        if not path.exists():
            return []
        try:
            saved = fingerprints(from_dict(read_json_object(path), str(path)))
        except ValueError as error:
            problem = f"{path} is not a run's config"
            raise InputError(problem, rule=str(error), fix="move it") from None
        now = fingerprints(from_dict(dataclasses.asdict(self.config), self.name))
        return sorted(name for name in now if saved.get(name) != now[name])

    def finished(self) -> bool:
        """Returns whether the run has finished, and nothing that checkpoint.allow_changed names,
        such as more steps, and no export is left to do."""
        summary = self.summary()
        if summary.get("status") != "finished" or lacks_export(summary, exports_of(self.config)):
            return False
        # A run that goes on leaves the summary of its earlier end in the folder.
        is_of_last_start = summary.get("started") in (None, last_start(self.folder))
        return is_of_last_start and not self.changed()


def member_name(overrides: Mapping[str, object], whole: Collection[str] = ()) -> str:
    """Returns the name of a folder for the overrides: "lr=1e-05,seed=1", the last part of each
    field, but of those in `whole`; a config file of the member's own comes first, "dapo,seed=1", or
    "presets_dapo,seed=1" where config is in `whole`."""

    def part(name: str, value: object) -> str:
        if name != "config":
            return f"{name if name in whole else name.rpartition('.')[2]}={value}"
        file, _, variant = str(value).partition(":")
        return (
            f"{Path(file).with_suffix('')} {variant}".strip() if name in whole else Path(file).stem
        )

    parts = [part(name, value) for name, value in overrides.items()]
    name = re.sub(r"[^\w.,=+-]+", "_", ",".join(parts)) or "base"
    if len(name) > 100:  # file systems end at 255
        name = f"{name[:90]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def _is_entry(item: object) -> bool:
    """Returns whether a sweep may yield it: a dict of fields."""
    return isinstance(item, Mapping) and all(isinstance(name, str) for name in item)


def _ambiguous_fields(entries: Sequence[Mapping[str, object]]) -> set[str]:
    """Returns the fields that two entries of a sweep would need for a name of their own: those
    with the last part of another one, as actor_optimizer.lr and critic_optimizer.lr, and "config"
    where two files, or two variants of one, have one name."""
    by_name: dict[str, Mapping] = {}
    if all(by_name.setdefault(member_name(entry), entry) == entry for entry in entries):
        return set()
    fields = {field for entry in entries for field in entry}
    last_parts = [field.rpartition(".")[2] for field in fields]
    files = {str(entry["config"]) for entry in entries if "config" in entry}
    names = {member_name({"config": file}) for file in files}
    ambiguous = {field for field in fields if last_parts.count(field.rpartition(".")[2]) > 1}
    return ambiguous | ({"config"} if len(names) < len(files) else set())


def config_of(
    base: Config,
    item: Mapping,
    run_dir: str,
    *,
    flags: Collection[str],
    location: str,
    trusted: bool,
) -> Config:
    """Returns the config of a member of a sweep or a stage of a pipeline.

    It is `base`; or, if `item` has the field `config`, that of another file with the fields of
    `base` that `flags` have set, whatever their values were. The other fields of `item` are set in
    it. Raises InputError for unknown fields, and for code of others unless `trusted`.
    """
    if "config" in item:
        other = load_named_config(str(item["config"]), trusted)
        base = with_overrides(other, {name: value_of(base, name) for name in flags}, location)
    fields = {name: value for name, value in item.items() if name != "config"}
    config = with_overrides(base, {**fields, "run_dir": run_dir}, location)
    if not trusted:  # the folder is our own choice
        refuse_own_code(with_overrides(config, {"run_dir": ""}, location), location)
    return config


def make_members(
    base: Config,
    listed: object,
    folder: Path,
    where: str,
    trusted: bool = True,
    seeds: Sequence[int] = (),
    flags: Collection[str] = (),
) -> list[Member]:
    """Returns the valid members. Raises InputError that lists every problem of every member.

    `trusted`: they may name code of others. `seeds`: each is run with these. `flags`: the fields
    that --config.FIELD has set in `base`, which hold for members of other config files, too.
    """
    try:
        overrides = list(listed)
    except TypeError:
        fix = 'write `yield {"run_dir": ..., FIELD: VALUE}` for each member'
        raise InputError(f"{where}: sweep() must yield dicts", value=listed, fix=fix) from None
    except Exception as error:  # a generator runs the user's code here
        rule = f"{type(error).__name__}: {error}"
        fix = f"correct sweep() in {where} so that it yields its members"
        raise InputError(f"{where}: sweep() failed", rule=rule, fix=fix) from error
    if not overrides:
        raise InputError(f"{where}: sweep() yields nothing", fix="yield {'seed': 0}, for example")
    if seeds and any(isinstance(item, Mapping) and "seed" in item for item in overrides):
        problem = f"{where}: a member of sweep() sets a seed beside --seeds={len(seeds)}"
        rule = "one of both says which seeds a member is run with"
        raise InputError(problem, rule=rule, fix="leave --seeds out, or the seed of the member")
    if seeds:
        overrides = [
            {**item, "seed": seed} if isinstance(item, Mapping) else item
            for item in overrides
            for seed in seeds
        ]
    # Numbers of NumPy are written as such into flags and names of folders.
    overrides = [
        {name: plain_value(value) for name, value in item.items()} if _is_entry(item) else item
        for item in overrides
    ]
    whole = _ambiguous_fields([item for item in overrides if _is_entry(item)])
    members, problems, shared = [], [], {}
    for i, item in enumerate(overrides):
        location = f"{where}: member {i} of sweep()"
        try:
            if not _is_entry(item):
                fix = 'write {"actor_optimizer.lr": 1e-5}: fields with their section, and values'
                raise InputError(f"{location} is no dict of dotted fields", value=item, fix=fix)
            if "run_dir" in item:
                raise InputError(f"{location} sets run_dir", fix="leave it out: the sweep sets it")
            name = member_name(item, whole)
            how = dict(flags=flags, location=location, trusted=trusted)
            config = config_of(base, item, str(folder / name), **how)
            validate(config)
            setting = member_name({k: v for k, v in item.items() if k != "seed"}, whole)
            members.append(Member(name, setting, dict(item), config))
        except InputError as error:
            text = str(error)
            if location in text:
                problems.append(text)
            else:  # a problem of the base is one of every member: list it once
                shared.setdefault(text, []).append(f"{location}, {dict(item)}")
    for text, locations in shared.items():
        more = f" and {len(locations) - 1} more" if len(locations) > 1 else ""
        problems.append(f"{locations[0]}{more}: {text}")
    names = [m.name for m in members]
    for double in sorted({n for n in names if names.count(n) > 1}):
        same = " and ".join(str(m.overrides) for m in members if m.name == double)
        problems.append(
            f"{where}: {same} are called {double!r}: names of folders are made of what members set,"
            " with _ for spaces, slashes and quotes"
        )
    if problems:
        raise InputError(
            "the sweep cannot run:\n" + "\n".join(problems), fix=f"correct these members of {where}"
        )
    for member in members:
        _check_same_run(member)
    return members


def _check_same_run(member: Member) -> None:
    """A folder that holds a run must hold this one, but for what checkpoint.allow_changed names:
    results of two experiments are never mixed."""
    changed = member.changed()
    if refused := [name for name in changed if name not in allowed_changes(member.config)]:
        raise InputError(
            f"{member.folder} holds a run with other settings",
            value=refused,
            rule="a resumed sweep continues the same experiments",
            fix="another --out, restore the settings, or allow them: "
            f"--config.checkpoint.allow_changed={','.join(changed)}",
        )


def allowed_changes(config: Config) -> set[str]:
    """Returns the fields that a run may go on with other values of: checkpoint.allow_changed, and
    the fields that name rows where that has "data"."""
    allowed = set(config.checkpoint.allow_changed)
    return allowed | ({"data.train", "data.test", "data.sources"} if "data" in allowed else set())


def flag(name: str, value: object) -> str:
    """Returns the command-line flag that sets a field."""
    if isinstance(value, (tuple, list)):
        value = repr(tuple(value))
    return f"--config.{name}={value}"


def require_unset(
    fields: Collection[str], entries: Iterable[tuple[str, Mapping]], what: str, where: str
) -> None:
    """Raises InputError for `fields` that a flag sets for every run and that an entry, a (name,
    fields) of a sweep or pipeline, sets, too: the entry's value would be run, or neither."""
    lines = []
    if "run_dir" in fields:
        lines.append(f"--config.run_dir: each {what} has a folder of its own, below --out")
    for field in fields:
        names = [name for name, item in entries if field in item and field != "run_dir"]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"--config.{field}: {what} {names[0]!r}{more} of {where} sets it, too")
    if lines:
        text = "\n  ".join(["these flags cannot be used:", *lines])
        raise InputError(text, fix=f"leave them out, or set the fields in {where}")


def command(arguments: Sequence[str], member: Member, launcher: Sequence[str] = TRAIN) -> list[str]:
    """Returns the command that runs one member; `arguments` hold --config and the flags of
    all members, of which those of fields that the member sets are left out: --seeds counts from
    --config.seed."""
    overrides = {**member.overrides, "run_dir": member.config.run_dir}
    set_here = tuple(f"--config.{name}=" for name in overrides)
    arguments = [argument for argument in arguments if not argument.startswith(set_here)]
    own = overrides.pop("config", None)
    if own is not None:
        arguments = [f"--config={own}", *without_config(arguments)]
    flags = [flag(name, value) for name, value in overrides.items()]
    return [*launcher, *arguments, *flags]


def without_config(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without --config and its value."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument == "--config":
            next(rest, None)
        elif not argument.startswith("--config="):
            kept.append(argument)
    return kept


class Stopped(Exception):
    """Raised for SIGTERM or SIGINT, here or at another host: the member got it and has saved."""


def _run_one(arguments: list[str], log: Path, env: Mapping[str, str]) -> int:
    """Run a member to its end, its output in `log`, too; a signal to this process is passed on."""
    received = []
    try:
        file = log.open("ab", buffering=0)  # closing it has nothing left to write
    except OSError as error:
        raise _log_fault(log, error) from None
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    child = subprocess.Popen(arguments, env={**os.environ, **env}, **output)

    def pass_on(number, _frame):
        received.append(number)
        child.send_signal(signal.SIGTERM)

    old = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        with child.stdout, file:
            for line in child.stdout:
                try:
                    file.write(line.encode())
                except OSError as error:
                    raise _log_fault(log, error) from None
                print("  " + line, end="", flush=True)
        code = child.wait()
    except BaseException:
        child.terminate()  # it saves and ends, and does not go on alone
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if received or code == STOPPED:
        raise Stopped(signal.Signals(received[0] if received else signal.SIGTERM).name)
    return code


def _log_fault(log: Path, error: OSError) -> InputError:
    fix = "make room and move away what has its name; the same command goes on"
    return InputError(f"{log} cannot be written", rule=str(error.strerror or error), fix=fix)


def run_members(
    members: Sequence[Member],
    arguments: Sequence[str],
    *,
    launcher: Sequence[str] = TRAIN,
    host: int = 0,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Member, int | None]]:
    """Runs each member that is not finished, in order; yields (member, exit code), None for one
    that was finished. Raises Stopped if a signal has stopped a member.

    `host`: the number of this one of the hosts that run a member together. `env`: variables of the
    members' processes.
    """
    name = f"log-{host:03d}.txt" if host else "log.txt"
    for member in members:
        if member.finished():
            yield member, None
            continue
        make_folder(member.folder)
        line = command(arguments, member, launcher)
        yield member, _run_one(line, member.folder / name, env or {})


def check_together(members: Sequence[Member]) -> list[list[Member]]:
    """Returns the members in groups that one program trains. Raises InputError for settings that
    cannot be trained in this way."""
    from rljax.training import together
    from rljax.training.run_numbers import split_numbers

    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(repr(split_numbers(member.config)[0]), []).append(member)
    for group in groups.values():
        together.check_together([member.config for member in group])
    return list(groups.values())


def run_together(
    members: Sequence[Member], env: Mapping[str, str] | None = None
) -> Iterator[tuple[Member, int | None]]:
    """As `run_members`, in this process: members that differ in nothing but their seed and in
    numbers take their steps in one program (rljax.training.together). A line for each program, and
    the warnings of all runs behind the last. Raises InputError for settings that cannot be trained
    in this way, before any member begins."""
    from rljax.training.result import RunStopped
    from rljax.training.together import train_together

    groups = check_together(members)
    os.environ.update(env or {})
    for group in groups:
        left = [member for member in group if not member.finished()]
        ended = train_together([member.config for member in left]) if left else []
        yield from ((member, None) for member in group if member not in left)
        said: dict[str, int] = {}
        for member, end in zip(left, ended, strict=True):
            if isinstance(end, InputError):
                print(f"{member.name}: {end}")
                yield member, 2
                continue
            summary = (end.run if isinstance(end, RunStopped) else end).summary
            for line in [*summary["warnings"], *map(fault_meaning, summary["faults"])]:
                said[line] = said.get(line, 0) + bool(line)
            yield member, 0 if summary["status"] == "finished" else 3
        for line, count in said.items():
            print(f"warning in {count} of {len(left)} runs: {line}")
        if stopped := [end for end in ended if isinstance(end, RunStopped)]:
            raise Stopped(stopped[0].signal)


def result_rows(members: Sequence[Member]) -> list[dict]:
    """Returns one row per member, from its summary.json."""
    rows = []
    for member in members:
        summary = member.summary()
        status = summary.get("status", "not finished" if member.folder.exists() else "not started")
        keys = ("accuracy_before", "accuracy_after", "difference", "steps", "wall_s")
        row = {"name": member.name, "overrides": dict(member.overrides), "status": status}
        rows.append({**row, **{key: summary.get(key) for key in keys}})
    return rows


def write_result(rows: list[dict], folder: Path, share: int = 0) -> Path:
    """Writes sweep.json. Machines with a share each may write at the same time: the last is right,
    and none reads half of another one."""
    own = folder / f".{RESULT}-{share}"
    write_json(own, rows)
    os.replace(own, folder / RESULT)
    return folder / RESULT


def table(rows: list[dict]):
    """Returns the summary as a rich table; the highest accuracy after training is bold."""
    from rich.table import Table

    def shown(value: dict | None) -> str:
        return interval_text(value) if value else ""

    best = max((r["accuracy_after"]["value"] for r in rows if r["accuracy_after"]), default=None)
    out = Table()
    for name in ("run", "status", "steps", "accuracy before", "after", "difference", "time"):
        out.add_column(name, overflow="fold")
    for row in rows:
        after = row["accuracy_after"]
        seconds = "" if row["wall_s"] is None else f"{row['wall_s']:.0f} s"
        cells = (row["name"], row["status"], row["steps"], shown(row["accuracy_before"]))
        cells += (shown(after), shown(row["difference"]), seconds)
        style = "bold" if after and after["value"] == best else None
        out.add_row(*("" if c is None else str(c) for c in cells), style=style)
    return out
