"""Asks the hub through `huggingface_hub`, and keeps what it answers in that library's own cache.

Beside a repository's snapshots lies rljax/COMMIT.json: which files the commit has, their SHA-256
(of small files git's own digest), and which of them were compared with it here. So a commit that
was read once needs no network, and a copy that is cut short is never taken for a whole one.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rljax import beats
from rljax.errors import InputError
from rljax.files import open_file, read_data, read_json_object, write_json, write_text
from rljax.hub.names import COMMIT, HubName

LOG = logging.getLogger("rljax")
LOG_IN = "hf auth login, or HF_TOKEN=... of an account that may read it"
_TRIES, _WAIT_S = 4, 0.5  # of a request that a server in trouble has refused; doubled each time
_AT_ONCE = 4  # files
_LOOK_S = 5.0  # between two looks at whether they grow
_DEFAULT = "main"
_LONGEST_REF = 200  # bytes


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of a repository as the hub lists it. `sha256` of a file in its large storage, else ""
    and `git` is the SHA-1 by which git knows the content."""

    size: int
    sha256: str = ""
    git: str = ""

    @property
    def digest(self) -> str:
        return self.sha256 or self.git


def library():
    """The package huggingface_hub. Raises InputError where it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise InputError(
            "the package huggingface_hub is not installed",
            rule="it reads and writes hf:// paths",
            fix="pip install 'huggingface_hub>=2.4'",
        ) from None
    return huggingface_hub


def page(name: HubName) -> str:
    """The address of the repository's page."""
    prefix = "datasets/" if name.kind == "dataset" else ""
    return f"{library().constants.ENDPOINT}/{prefix}{name.repository}"


def home(name: HubName) -> Path:
    """The repository's folder in the cache."""
    folder = f"{name.kind}s--{name.repository.replace('/', '--')}"
    return Path(library().constants.HF_HUB_CACHE).expanduser() / folder


# -- asking --


class Unreachable(Exception):
    """The hub gives no answer at all, or none that is its own."""


def ask(name: HubName, question: Callable):
    """What a question to the hub returns, asked again where a server is in trouble. Raises
    Unreachable, or InputError for an answer that is a refusal."""
    library()
    from huggingface_hub import errors

    for tried in range(1, _TRIES + 1):
        try:
            return question()
        except errors.HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 500
            if status < 500 and status not in (408, 429):
                raise _refused(name, error, status) from None
            problem = f"it answers with status {status}"
        except errors.OfflineModeIsEnabled:
            raise Unreachable("HF_HUB_OFFLINE is set") from None
        except errors.LocalEntryNotFoundError as error:  # it has tried again by itself
            cause = error.__cause__ or error
            offline = isinstance(cause, errors.OfflineModeIsEnabled)
            told = "HF_HUB_OFFLINE is set" if offline else f"{type(cause).__name__}: {cause}"
            raise Unreachable(told.split("\n")[0]) from None
        except (errors.HTTPError, OSError) as error:  # no network, no such host, no answer in time
            problem = f"{type(error).__name__}: {error}"
            if not _may_pass(error):
                break
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            told = f"{type(error).__name__}: {error}"
            raise Unreachable(f"its answer cannot be used ({told})") from None
        if tried < _TRIES:
            time.sleep(_WAIT_S * 2 ** (tried - 1))
    raise Unreachable(problem)


def _may_pass(error: Exception) -> bool:
    """Whether the next try may find another state: a connection that broke, not one that is never
    answered, which would be waited for again."""
    return "Timeout" not in type(error).__name__ and "ConnectError" not in type(error).__name__


def _refused(name: HubName, error, status: int) -> InputError:
    from huggingface_hub import errors, get_token

    what, where = ("data set" if name.kind == "dataset" else "model"), page(name)
    known = bool(get_token())
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(
            f"{name.repository} has no revision {name.revision!r}",
            rule="a branch, a tag or a commit of the repository",
            fix=f"one of {where}/commits, or none for the default branch",
        )
    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"the {what} {name.repository} is gated",
            rule="its owner asks every reader to accept terms"
            + ("; the account of your token has not, or waits for an answer" if known else ""),
            fix=f"accept them at {where}" + ("" if known else f", then {LOG_IN}"),
        )
    if isinstance(error, errors.EntryNotFoundError):
        return InputError(
            f"{name} is not there",
            rule=str(error.args[0]).split("\n")[0],
            fix=f"look at https://huggingface.co/{name.repository} for the spelling and the "
            "revision",
        )
    missing = isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404)
    if missing and not (status == 401 and known):
        rule = "it does not exist, or it is private and " + (
            "the account of your token may not read it" if known else "nobody is logged in"
        )
        fix = "check the name" + (
            "; of a private one, a token that may read it"
            if known
            else f"; of a private one: {LOG_IN}"
        )
        return InputError(f"the hub has no {what} {name.repository}", rule=rule, fix=fix)
    if status in (401, 403):
        return InputError(
            f"the hub refuses {name.repository} (status {status})",
            rule="the token is not valid" if status == 401 else "the token has no right to do that",
            fix="hf auth login anew, or another HF_TOKEN",
        )
    said = error.server_message or str(error).strip().split("\n")[0]
    return InputError(
        f"the hub refuses {name.repository} (status {status})",
        rule=said,
        fix="run it again later; `rljax doctor` says whether the hub and your token work from here",
    )


# -- which commit, and what it holds --


def resolve(name: HubName) -> str:
    """The commit of a repository's revision: of one process always the same. Without a network, the
    commit that the revision was here at last."""
    return name.revision if name.pinned else commit_of(dataclasses.replace(name, path=""))


@functools.cache
def commit_of(name: HubName) -> str:
    """resolve, of a name without a path that is no commit."""
    revision = name.revision or _DEFAULT
    ref = home(name).joinpath("refs", *revision.split("/"))
    try:
        commit, _ = _information(name)
    except Unreachable as problem:
        with contextlib.suppress(InputError):
            commit = read_data(ref, _LONGEST_REF).decode("ascii", errors="replace").strip()
            LOG.warning(
                "%s: the hub is not asked (%s): the copy of %s is used", name, problem, commit
            )
            return commit
        raise _not_here(name, str(problem)) from None
    with contextlib.suppress(InputError):  # a cache that nobody may write
        write_text(ref, commit)
    return commit


def _information(name: HubName) -> tuple[str, dict[str, Entry]]:
    """(commit, the files) of a revision; both are written into the cache."""
    hub = library()
    info = ask(
        name,
        lambda: hub.HfApi().repo_info(
            name.repository, repo_type=name.kind, revision=name.revision or None,
            files_metadata=True, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT,
        ),
    )  # fmt: skip
    entries = {
        one.rfilename: Entry(
            one.size or 0, one.lfs.sha256 if one.lfs else "", "" if one.lfs else one.blob_id or ""
        )
        for one in info.siblings or ()
        if not {"", ".", ".."} & {*one.rfilename.split("/")} and "\\" not in one.rfilename
    }
    if not COMMIT.fullmatch(str(info.sha)):
        raise Unreachable("its answer cannot be used: it names no commit")
    _write_record(name.at(info.sha), entries, _record(name.at(info.sha))[1])
    return info.sha, entries


def _not_here(name: HubName, problem: str) -> InputError:
    endpoint = library().constants.ENDPOINT
    online = f"check the network and HF_ENDPOINT ({endpoint}), or name a local folder"
    fix = "once without it, with a network" if "HF_HUB_OFFLINE" in problem else online
    return InputError(
        f"{name} is not in the cache, and the hub is not reached", rule=problem, fix=fix
    )


def listing(name: HubName) -> dict[str, Entry]:
    """{path: Entry} of the files of a commit."""
    entries = _record(name)[0]
    if entries:
        return entries
    try:
        return _information(name)[1]
    except Unreachable as problem:
        raise _not_here(name, str(problem)) from None


def _record_file(name: HubName) -> Path:
    return home(name) / "rljax" / f"{name.revision}.json"


def _record(name: HubName) -> tuple[dict[str, Entry], set[str]]:
    """(the files of a commit, those that were compared here) as they were written down."""
    try:
        value = read_json_object(_record_file(name))
        entries = {path: Entry(**entry) for path, entry in value["files"].items()}
        return entries, set(value["compared"])
    except (InputError, KeyError, TypeError, AttributeError):
        return {}, set()


def _write_record(name: HubName, entries: dict[str, Entry], compared: set[str]) -> None:
    files = {path: dataclasses.asdict(entry) for path, entry in entries.items()}
    with contextlib.suppress(InputError):  # a cache that nobody may write is read all the same
        write_json(_record_file(name), {"files": files, "compared": sorted(compared)})


# -- files --


def fetch(name: HubName, paths: Iterable[str]) -> Path:
    """The folder of a commit in which these files of it are, each of them compared with the digest
    that the hub lists. Files that are there already are not asked for."""
    entries, folder = listing(name), home(name) / "snapshots" / name.revision
    compared = _record(name)[1]
    paths = list(paths)
    for path in paths:
        if path not in entries:
            raise InputError(
                f"{name.repository} has no file {path!r}",
                value=sorted(entries)[:10],
                rule=f"at revision {name.revision}",
                fix=f"one of {page(name)}/tree/{name.revision}",
            )
    missing = [path for path in paths if not (folder / path).exists()]
    _check_room(name, sum(entries[path].size for path in missing))
    todo = [path for path in paths if path in missing or path not in compared]
    if not todo:
        return folder
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=_AT_ONCE)
    try:
        with beats.phase("download"):
            _wait({pool.submit(_file, name, path, entries[path]) for path in todo}, home(name))
    finally:
        pool.shutdown(cancel_futures=True)
    _write_record(name, entries, _record(name)[1] | set(todo))
    return folder


def _wait(left: set[concurrent.futures.Future], folder: Path) -> None:
    """Returns when all files are there. As long as one of them grows there are signs of life: of a
    large one minutes may pass, and of several hosts a silent one is taken for hung."""
    before: list = []
    while left:
        done, left = concurrent.futures.wait(left, _LOOK_S, concurrent.futures.FIRST_EXCEPTION)
        for one in done:
            one.result()
        parts = (folder / "blobs").glob("*.incomplete")
        growing = [(p.name, s.st_size, s.st_mtime_ns) for p in parts if (s := _status(p))]
        if done or growing != before:
            beats.beat()
        before = growing


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # it has just become the whole file
        return None


def _file(name: HubName, path: str, entry: Entry) -> None:
    """Downloads a file, if it is not there, and compares it."""
    hub = library()
    try:
        here = ask(
            name,
            lambda: hub.hf_hub_download(
                name.repository, path, repo_type=name.kind, revision=name.revision,
                etag_timeout=hub.constants.HF_HUB_ETAG_TIMEOUT,
            ),
        )  # fmt: skip
    except Unreachable as problem:
        raise InputError(
            f"{name.repository}: {path} could not be downloaded",
            rule=str(problem),
            fix="start again: files that are complete are kept",
        ) from None
    digest = file_digest(here, entry)
    if digest != entry.digest:
        for place in {Path(here).resolve(), Path(here)}:
            place.unlink(missing_ok=True)
        raise InputError(
            f"{name.repository}: {path} is not the file that the hub lists",
            value=digest,
            rule=f"its {'SHA-256' if entry.sha256 else 'git SHA-1'} is {entry.digest}",
            fix="the copy is removed: start again; if it stays, what is between you and the hub "
            "changes files",
        )


def file_digest(path: str | Path, entry: Entry) -> str:
    """The digest of a file, of the kind that its entry has."""
    if entry.sha256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {os.path.getsize(path)}\0".encode(), usedforsecurity=False)
    with os.fdopen(open_file(path), "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _check_room(name: HubName, size: int) -> None:
    """Raises InputError where the disk has not `size` bytes left."""
    place = next(p for p in (home(name), *home(name).parents) if p.exists())
    free = shutil.disk_usage(place).free
    if size > free:
        raise InputError(
            f"{name.repository} needs {size:,} bytes in {place}",
            value=free,
            rule="bytes that are free",
            fix="make room, or set HF_HOME to a folder on a larger disk",
        )
