"""The folder that a run writes: one that all hosts see, or a local one whose files are copied to
a URL."""

import contextlib
import dataclasses
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from rljax import hosts
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, to_dict
from rljax.data.rows.show import data_page
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.runs.folder import lacks_export, locked, make_folder, removed_if_empty, write_whole
from rljax.runs.mirror import Mirror
from rljax.runs.store import Store, StoreError, is_url, local_path
from rljax.runs.store_lock import StoreLock
from rljax.setup import Setup
from rljax.training.hub_commits import COMMITS
from rljax.training.preflight import OF_HOSTS, TOKEN, shared_folder
from rljax.training.profiling import FOLDER as PROFILE

LOG = logging.getLogger("rljax")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of a run. This host writes its files under `path`; `url` is where they are kept,
    "" for the same place."""

    path: Path
    url: str = ""
    mirror: Mirror | None = None
    lock: StoreLock | None = None

    def __str__(self) -> str:
        return self.url or str(self.path)

    def at(self, name: str) -> str | Path:
        """Returns the path or URL of a file or folder of the run, for code that reads it
        by itself."""
        return f"{self.url}/{name}" if self.url else self.path / name

    def put(self) -> None:
        """Brings the files under the URL up to date; does nothing for a local folder. Raises
        InputError if another run has taken it."""
        if self.lock is not None:
            self.lock.check()
        if self.mirror is not None:
            self.mirror.put()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run folder for this run, on the first host. Raises InputError if another run
        holds it, or the URL cannot be read."""
        if not hosts.first():
            yield
        elif self.lock is None:
            with locked(self.path):
                yield
        else:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self.lock.held())
                    self.mirror.fetch()
                except OSError as error:
                    raise _refused("run_dir cannot be read", self.url, str(error)) from None
                stack.enter_context(self.mirror)
                yield

    def watched(self, config: Config, told: Callable[[], str | None]):
        """Lets the hosts watch each other, and keep in this folder what they print."""
        return hosts.watched(self.path / OF_HOSTS, config.hosts.stall_s, told, self.close)

    def close(self) -> str:
        """Puts all files a last time; returns what could not be kept, "" if all was."""
        try:
            self.put()
        except (OSError, InputError) as error:
            return f"{self.url} does not have all files of the run: {error}; {self.path} has them"
        return ""

    def is_wrapped_up(self, steps: int | None = None, exports: Iterable[str] = ()) -> bool:
        """Returns whether the last of `steps` steps (None: of any number) was followed by summary,
        report and the `exports`, folders of models: the report is the last file."""
        try:
            summary = read_json_object(self.path / "summary.json")
        except InputError:
            return False
        finished = summary.get("status") == "finished" and steps in (None, summary.get("steps"))
        whole = (self.path / "report.html").exists() and not lacks_export(summary, exports)
        return finished and whole


def exports_of(config: Config) -> tuple[str, ...]:
    """Returns the folders that a run of this config exports its model to at its end."""
    if not config.export:
        return ()
    page = resolve(config.dataflow, NAMESPACES["dataflow"])
    model = "policy" if "actor" in page.parameters else "reward_model"
    return (model, *(("adapter",) if config.lora.rank else ()))


@contextlib.contextmanager
def run_folder(run_dir: str, name: str) -> Iterator[RunFolder]:
    """Opens the folder of config.run_dir; `name` is that of a new one under runs/. Raises
    InputError, on every host, if one of them cannot write there, and then removes the folders that
    it has made."""
    if is_url(run_dir):
        with _kept_under(run_dir) as folder:
            yield folder
        return
    path = local_path(run_dir) if run_dir else Path("runs") / name
    with removed_if_empty(path) if hosts.first() else contextlib.nullcontext():
        yield RunFolder(shared_folder(path))


@contextlib.contextmanager
def _kept_under(url: str) -> Iterator[RunFolder]:
    store = _writable(url)
    scratch = Path(tempfile.mkdtemp(prefix="rljax-"))
    # The last part is the name by which trackers and reports know the run.
    path = make_folder(scratch / (store.url.rpartition("/")[2] or "run"))
    folders = () if hosts.first() else (OF_HOSTS, PROFILE)
    lock = StoreLock(store) if hosts.first() else None
    mirror = Mirror(store, path, folders)
    folder = RunFolder(path, store.url, mirror, lock)
    try:
        if hosts.count() > 1:  # their logs go on, as in a folder of a disk
            prefix = f"host-{hosts.index():03d}."
            _tried_by_all(
                lambda: mirror.fetch_from(OF_HOSTS, prefix), "run_dir cannot be read", url
            )
        yield folder
    finally:
        if lost := folder.close():
            LOG.warning("%s", lost)
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _writable(url: str) -> Store:
    """Returns the store of a URL, after every host has put, read, listed and removed a file of its
    own in it, and has read one of the first host: it is the same store for all."""
    probe, token = f"{OF_HOSTS}/probe-{hosts.index()}", f"{OF_HOSTS}/{TOKEN}"
    text = hosts.share(secrets.token_hex(8)).encode()

    def use() -> Store:
        store = Store(url)
        if hosts.first() and hosts.count() > 1:
            store.put(token, text)
        store.put(probe, text)
        if store.read(probe) != text:
            raise StoreError("what was put is not what is read")
        if probe.rpartition("/")[2] not in store.sizes(OF_HOSTS, below=False):
            raise StoreError("what was put is not in the list of files")
        store.remove(probe)
        return store

    def see() -> None:
        if store.read(token) != text:
            raise StoreError(f"{token} is another one than {hosts.names()[0]} has put")

    store = _tried_by_all(use, "run_dir cannot be written", url)
    if hosts.count() > 1:
        try:
            _tried_by_all(see, "run_dir is not the same store", url)
        finally:
            if hosts.first():
                with contextlib.suppress(OSError):
                    store.remove(token)
    return store


def _tried_by_all(action: Callable, subject: str, url: str):
    """Runs an action on every host and returns its result. Raises InputError, on every host, that
    names the hosts where it failed."""
    result, problem = None, ""
    try:
        result = action()
    except (OSError, InputError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = hosts.gather(problem)
    if any(problems):
        outcomes = zip(hosts.names(), problems, strict=True)
        failed = (
            ", ".join(name for name, problem in outcomes if problem) if len(problems) > 1 else ""
        )
        raise _refused(
            subject + (f" by {failed}" if failed else ""), url, next(filter(None, problems))
        )
    return result


def _refused(subject: str, url: str, rule: str) -> InputError:
    return InputError(
        subject,
        value=url,
        rule=rule,
        fix="a place that all hosts reach, where this machine's account has the right to read, "
        "write and list; or try again, or choose another run_dir",
    )


def write_config(folder: Path, config: Config, commits: Mapping[str, str] | None = None) -> None:
    """Writes the config, and the commits of the hub that it names (rljax.training.hub_commits)."""
    write_whole(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")
    if commits:
        write_whole(folder / COMMITS, json.dumps(commits, indent=2) + "\n")


def write_data_page(folder: Path, setup: Setup) -> None:
    """Writes the part of the report about the data: rows as they are learned, what ends a turn."""
    page = data_page(setup.data, setup.tokenizer, seed=setup.config.seed)
    write_whole(folder / "data.json", json.dumps(page, indent=1) + "\n")
