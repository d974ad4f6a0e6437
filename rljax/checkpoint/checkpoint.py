"""Checkpoints: roles, optimizer state, data position, random keys and trackers' offsets, in one
folder for each step, on disk or in a store.

`state.json` holds everything that is not an array. `manifest.json` holds a SHA-256 of every file
and is written last: a folder without it is no checkpoint. A save copies the arrays to host memory
and goes on in a thread; an error in it is raised at the next step.
"""

import contextlib
import itertools
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax import hosts
from rljax.checkpoint.disk import ARRAYS, MANIFEST, STATE, DiskFolder
from rljax.checkpoint.pieces import Damaged
from rljax.checkpoint.store import StoreFolder
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, fingerprints
from rljax.errors import InputError
from rljax.files import Unreadable, leads_nowhere, parse_json
from rljax.runs.folder import not_written
from rljax.runs.store import is_url, local_path

__all__ = ["ARRAYS", "STATE", "Checkpoints", "Damaged", "check_fingerprints", "reads_steps"]

LOG = logging.getLogger("rljax")
# The saves of this process, whichever folder they go to: hosts speak of one by its number.
_SAVES = itertools.count(1)
_NO_DAMAGE = (OSError, Unreadable)  # but for a file that is not there
POLL_S = 5.0  # between two looks at whether a host that others wait for has failed


class Checkpoints:
    """The checkpoints of one run: `folder/00000012/...`, a path or a URL. The `keep` newest are
    kept, and the best.

    On several hosts all call `prepare`, `latest`, `save`, `start_save`, `wait` and `read_arrays`.
    `before_commit` is called, on the first host, when the arrays are written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        best_metric: str = "",
        before_commit: Callable[[], None] | None = None,
    ):
        storage = StoreFolder(str(folder)) if is_url(folder) else DiskFolder(local_path(folder))
        self.storage, self.folder = storage, storage.folder
        self.keep, self.best_metric, self.before_commit = keep, best_metric, before_commit
        self.whole: int | None = None  # the newest step that is known to be whole
        self.damaged: dict[int, str] = {}  # steps whose damage showed when they were read, and what
        self._last_save = 0  # its number
        self._saving: threading.Thread | None = None
        self._fault: BaseException | None = None

    def prepare(self) -> None:
        """Makes the folder and removes saves that were killed half-way. Only the run may call
        it: another reader would remove a save in progress. Raises InputError, on all hosts, if
        it cannot."""
        _on_first(self.storage.prepare)

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, oldest first, complete or not."""
        return self.storage.steps()

    def path(self, step: int) -> str | Path:
        """Returns the path or URL of the checkpoint of a step."""
        return self.storage.at(step)

    def check_room(self, needed: int) -> None:
        """Raises InputError unless there is room for two checkpoints of `needed` bytes."""
        _on_first(lambda: self.storage.check_room(needed))

    # -- saving --

    def save(self, step: int, arrays, state: dict) -> str | Path:
        """Writes everything of `step` and waits for it; `state` is JSON. Returns the folder once it
        is complete. A save that fails leaves nothing, and raises InputError."""
        self.start_save(step, arrays, state)
        self.wait()
        return self.path(step)

    def start_save(self, step: int, arrays, state: dict) -> None:
        """Copies everything of `step` to host memory and writes it during the steps that follow.
        Raises InputError if it cannot begin, or if the save before has failed."""
        self.wait()
        text = json.dumps({"step": step, "hosts": hosts.count(), **state}, indent=1)
        try:
            if hosts.first():
                self.storage.clear(step)
            number = hosts.share(next(_SAVES))  # nobody writes before there is room
            written = self.storage.begin(step, arrays)
        except (OSError, ValueError) as error:  # ValueError: TensorStore's
            if hosts.first():
                self.storage.abandon(step)
            raise self._not_written(step, error) from None
        run = (number, step, written, text)
        self._saving = threading.Thread(target=self._save, args=run, name="checkpoint", daemon=True)
        self._saving.start()

    def wait(self) -> None:
        """Waits until the save that was begun is on the disk or in the store. Raises its error, if
        it has failed."""
        if self._saving is not None:
            self._saving.join()
        self.check()

    def check(self) -> None:
        """Raises the error of a save that has failed; does not wait."""
        if self._saving is not None and not self._saving.is_alive():
            self._saving, fault, self._fault = None, self._fault, None
            if fault is not None:
                raise fault

    def close(self) -> None:
        """Waits for a save without raising its error, which was raised before."""
        if self._saving is not None:
            self._saving.join()

    def _not_written(self, step: int, error: BaseException) -> InputError:
        last = "there is none" if self.whole is None else f"that of step {self.whole}"
        fix = f"make room or give it permissions; the same command goes on from {last}"
        return not_written(f"the checkpoint of step {step}", self.folder, error, fix)

    def _save(self, number: int, step: int, written: Callable[[], dict], state: str) -> None:
        """The part of a save that runs in a thread: no collective of the devices, and no exception
        that is lost."""
        fault = None
        try:
            files = written()
        except Exception as error:
            fault, files = error, None
        try:
            told = self._meeting(number, step, files, fault, state)
            if told and fault is None:
                fault = InputError.of_text(told)
        except Exception as error:
            fault = error
        if fault is None:
            self.whole = step
            hosts.saved(step)
            return
        if isinstance(fault, OSError | ValueError) and not isinstance(fault, InputError):
            fault = self._not_written(step, fault)
        self._fault = fault.with_traceback(None) if isinstance(fault, InputError) else fault
        LOG.warning("step %d is not saved: %s", step, fault)

    def _meeting(
        self, number: int, step: int, files: dict | None, fault: Exception | None, state: str
    ) -> str:
        """Reports what this host has written to the first one, which commits and answers "" or why
        not. By the hosts' key-value store: an exchange is for the main thread."""
        told = "" if fault is None else str(self._not_written(step, fault))
        client, here = hosts.client(), f"rljax/checkpoint/{number}/"
        if not hosts.first():
            client.set(f"{here}{hosts.index()}", json.dumps([told, files]))
            end = _value(f"{here}end")
            client.delete(f"{here}{hosts.index()}")
            return end
        everyone = [[told, files]]
        everyone += [json.loads(_value(f"{here}{k}")) for k in range(1, hosts.count())]
        told = next((told for told, _ in everyone if told), "")
        try:
            if not told:
                self._commit(step, {k: v for _, own in everyone for k, v in own.items()}, state)
        except Exception as error:
            told = str(self._not_written(step, error))
            raise
        finally:
            if told:
                self.storage.abandon(step)
            if client is not None:
                client.set(f"{here}end", told)
                # All have read how the save before ended: they wait for it before they begin one.
                client.delete(f"rljax/checkpoint/{self._last_save}/")
                self._last_save = number
        return told

    def _commit(self, step: int, files: dict[str, dict], state: str) -> None:
        if self.before_commit is not None:
            self.before_commit()
        self.storage.commit(step, files, state)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Removes steps beyond those to keep. One newer than the newest whole step is damaged and
        does not count."""
        try:
            steps, best, rest = self.steps(), self.best(), self.storage.left_over()
        except _NO_DAMAGE as error:  # the new one is whole, and nothing goes unseen
            warnings.warn(f"old checkpoints stay: {error}", stacklevel=2)
            return
        kept = set([step for step in steps if step <= newest][-self.keep :])
        if best is not None and best <= newest:
            kept.add(best)
        for step in [*steps, *rest]:
            if step not in kept:
                try:
                    self.storage.remove(step)
                except OSError as error:  # the new one is whole
                    warnings.warn(f"checkpoint of step {step} stays: {error}", stacklevel=2)

    def best(self) -> int | None:
        """Returns the step whose state has the highest `best_metric` ("-name": the lowest); ties go
        to the earlier one."""
        if not self.best_metric:
            return None
        scored, name = [], self.best_metric.removeprefix("-")
        sign = -1.0 if self.best_metric.startswith("-") else 1.0
        for step in self.steps():
            try:
                value = self.read_state(step)["metrics"][name]
                scored.append((sign * float(value), -step))
            except Unreadable:
                raise
            except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
                continue  # not measured at that step, or damaged: never the best
        return -max(scored)[1] if scored else None

    # -- reading --

    def damage(self, step: int) -> str:
        """Finds damage in a checkpoint ("" if there is none): the first file that is missing or
        altered. On several hosts each looks at its share of the files."""
        if step in self.damaged:
            return self.damaged[step]
        problem, listed = _on_first(lambda: self._structure(step))
        if not problem:
            names = list(listed)
            own = (self._altered(step, names[i], listed) for i in hosts.mine(len(names)))
            problem = self._told_by_any(step, lambda: next(filter(None, own), ""))
        return problem or _on_first(lambda: self._wrong_state(step))

    def _told_by_any(self, step: int, look: Callable[[], str]) -> str:
        """Shares the damage that the first host which sees some has found. Raises Unreadable, on
        all hosts, where one of them could not look."""
        problem = unread = ""
        try:
            with self._readable(step):
                problem = look()
        except Unreadable as error:
            unread = str(error)
        everyone = zip(*hosts.gather([problem, unread]), strict=True)
        problem, unread = (next(filter(None, told), "") for told in everyone)
        if unread and not problem:
            raise Unreadable.of_text(unread)
        return problem

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Raises Unreadable for a file that is there and cannot be read: that is no damage. A run
        that took it for damage would go on from an older step and remove this one."""
        try:
            yield
        except _NO_DAMAGE as error:
            if leads_nowhere(error):
                raise
            fix = "; if it stays so, move its folder away to go on from the step before"
            raise _unreadable(f"the checkpoint of step {step}", error, fix) from None

    def _altered(self, step: int, name: str, listed: dict) -> str:
        try:
            with self._readable(step):
                return self.storage.altered(step, name, listed[name]["sha256"])
        except Unreadable:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{self.storage.at(step, MANIFEST)} is not readable ({error})"

    def _structure(self, step: int) -> tuple[str, dict]:
        """Returns (problem, files of the manifest) by names and sizes; reads no content yet."""
        storage, listed = self.storage, {}
        try:
            with self._readable(step):
                manifest, found = self._json(step, MANIFEST), storage.sizes(step)
            if manifest["step"] != step:
                return f"{storage.at(step, MANIFEST)} is that of step {manifest['step']}", {}
            listed = manifest["files"]
            if STATE not in listed or not any(name.startswith(ARRAYS) for name in listed):
                what = "does not list the files of a checkpoint"
                return f"{storage.at(step, MANIFEST)} {what}", {}
            for name in sorted(listed.keys() - found.keys()):
                return f"{storage.at(step, name)} is missing", {}
            for name in sorted(found.keys() - listed.keys()):
                return f"{storage.at(step, name)} is not in the manifest", {}
            for name, facts in listed.items():
                if found[name] != facts["bytes"]:
                    what = f"has {found[name]} bytes instead of {facts['bytes']}"
                    return f"{storage.at(step, name)} {what}", {}
        except Unreadable:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{storage.at(step, MANIFEST)} is not readable ({error})", {}
        return "", listed

    def _json(self, step: int, name: str):
        return parse_json(self.storage.read(step, name), str(self.storage.at(step, name)))

    def _wrong_state(self, step: int) -> str:
        """Checks the content of state.json, whatever its hash says -> the fault, or "": it must be
        that of `step`."""
        path = self.storage.at(step, STATE)
        try:
            with self._readable(step):
                state = self._json(step, STATE)
            own = {state["step"]} if "step" in state else set()  # older ones: in progress alone
            if "progress" in state or not own:
                own.add(sum(state["progress"]["taken"].values()))
        except Unreadable:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{path} is not the state of a run ({type(error).__name__}: {error})"
        return "" if own == {step} else f"{path} is that of step {' and '.join(map(str, own))}"

    def latest(self) -> int | None:
        """Returns the newest undamaged checkpoint, None if there is none at all; warns of damaged
        ones that it passes over. Raises InputError if all are damaged."""
        steps = _on_first(self.steps)
        for step in reversed(steps):
            problem = self.damage(step)
            if not problem:
                self.whole = step
                return step
            if hosts.first():
                warnings.warn(
                    f"checkpoint of step {step} is damaged: {problem}; trying the one before",
                    stacklevel=2,
                )
        if steps:
            raise InputError(
                f"{self.folder}: all {len(steps)} checkpoints are damaged",
                value=self.damage(steps[-1]),
                fix="start a new run_dir, or copy the checkpoint from a backup",
            )
        return None

    def read_state(self, step: int) -> dict:
        """Returns the content of state.json. Raises InputError if it cannot be read."""
        with self._readable(step):
            text = self.storage.read_state(step)
        return parse_json(text, str(self.storage.at(step, STATE)))

    def read_arrays(self, step: int, like, *, some: bool = False):
        """Returns the arrays of `step`, with the shapes, dtypes and shardings of `like`; `some`: it
        may hold others beside them. Raises InputError if they do not fit `like`.

        Raises Damaged, on all hosts, if a store's arrays are not those that were saved: that shows
        only now, and `latest` passes over them from then on.
        """
        path = self.storage.at(step, ARRAYS)

        def misfit(rule: str) -> InputError:
            return InputError(
                f"{path} does not fit the model and optimizer of this config",
                rule=rule,
                fix="restore the settings that the checkpoint was made with",
            )

        read, arrays = (self.storage.read_some if some else self.storage.read_arrays), None

        def look() -> str:
            nonlocal arrays
            try:
                arrays = read(step, like, misfit)
            except Damaged as error:
                return error.parts[0]
            except FileNotFoundError as error:
                return str(error)
            return ""

        if problem := self._told_by_any(step, look):
            self.damaged[step] = problem
            raise Damaged(
                f"the checkpoint of step {step} is damaged: {problem}", fix="use another step"
            )
        if not some:
            self._say_hosts(step)
        return arrays

    def _say_hosts(self, step: int) -> None:
        """Says that a run goes on with other hosts than it was saved by."""
        saved, now = self.read_state(step).get("hosts", 1), hosts.count()
        if saved != now and hosts.first():
            text = "step %d was saved by %s host%s, and %d go%s on: the same data in the same order"
            text += ", sums in another one, so not bitwise what the others would have computed"
            LOG.warning(text, step, saved, "s" * (saved != 1), now, "es" * (now == 1))


def _value(key: str) -> str:
    """Waits for what another host is about to write under a key. Raises HostFailed where one has
    ended."""
    while (text := hosts.client().get(key, POLL_S)) is None:
        hosts.raise_if_failed()
    return text


def _on_first(look: Callable):
    """Shares the result of the first host with all of them; an InputError that it raises for the
    user is raised on all."""
    found, problem, unread = None, "", False
    if hosts.first():
        try:
            found = look()
        except InputError as error:
            if hosts.count() == 1:
                raise
            problem, unread = str(error), isinstance(error, Unreadable)
        except OSError as error:
            problem, unread = str(_unreadable("the folder of checkpoints", error)), True
    found, problem, unread = hosts.share([found, problem, unread])
    if problem:
        raise (Unreadable if unread else InputError).of_text(problem)
    return found


def _unreadable(what: str, error: BaseException, more: str = "") -> Unreadable:
    rule = str(error).partition("\n")[0][:300]
    fix = f"try again; this machine's account needs the rights to read, write and list{more}"
    return Unreadable(f"{what} cannot be read now", rule=rule, fix=fix)


def check_fingerprints(
    saved: dict[str, str], now: dict[str, str], allowed: tuple[str, ...]
) -> None:
    """Raises InputError if the config or the data are not those of the checkpoint, unless the
    change is allowed by name.

    A field that the checkpoint's version of the code did not have was at its default then.
    """
    saved = {**fingerprints(Config()), **saved}
    changed = sorted(k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k))
    refused = [name for name in changed if name not in allowed]
    if refused:
        rule = "a resumed run continues the same experiment"
        if refused == ["steps"]:
            rule = "the learning rate, data.final_weights or evaluate.patience depends on it, so "
            rule += "the steps that were trained are not those of a run of this length"
        raise InputError(
            "this run's checkpoint was made with other settings",
            value=refused,
            rule=rule,
            fix="restore them, use a new run_dir, or allow them: "
            f"--config.checkpoint.allow_changed={','.join(changed)}",
        )


def reads_steps(config: Config) -> bool:
    """Returns whether the first steps of a run may depend on the number of all its steps: a
    schedule, a mixture or a role of the user's own is spread over it, or an evaluation at the end
    counts for patience."""
    optimizers = (config.actor_optimizer, config.critic_optimizer)
    schedules = [resolve(one.schedule, NAMESPACES["schedule"]) for one in optimizers]
    spread = any("steps" in schedule.parameters for schedule in schedules)
    return bool(spread or config.data.final_weights or config.roles or config.evaluate.patience)
