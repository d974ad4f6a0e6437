"""Asks the hub over the session of `huggingface_hub`, and keeps the files in that library's cache.

The server at HF_ENDPOINT may lie. So an answer is read up to a limit; a file gets its name in the
cache from the digest that the hub lists, once its bytes have that digest; and nothing in an answer
becomes a path before it was checked.

Beside a repository's snapshots lies rljax/COMMIT.json: the files of the commit, their SHA-256 (of
small files git's own digest), and which of them were compared with it here. So a commit that was
read once needs no network, and a copy that is cut short is never taken for a whole one.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

from rljax import heartbeat
from rljax.errors import InputError
from rljax.files import (
    LARGEST_OBJECT,
    open_file,
    parse_json,
    read_data,
    read_json_object,
    write_json,
    write_text,
)
from rljax.hub.names import COMMIT, HubName, is_path

LOG = logging.getLogger("rljax")
LOG_IN = "hf auth login, or HF_TOKEN=... of an account that may read it"
_TRIES, _WAIT_S = 4, 0.5  # of a request to a server in trouble; the wait doubles each time
_AT_ONCE = 4  # files
_LOOK_S = 5.0  # between two looks at whether they grow
_DEFAULT = "main"
_HUB = ("https", "huggingface.co")
_LONGEST_REF = 200  # bytes
_MOST_REDIRECTS = 5
_LARGEST_REFUSAL = 100_000  # bytes of the text of one
_LARGEST_LISTING = LARGEST_OBJECT
_MOST_FILES = 100_000
_LARGEST_FILE = 1 << 50  # bytes
_SLOW_S, _SLOW_BYTES = 60.0, 10_000  # an answer that brings less in that time is given up
_PROGRESS = 1 << 20  # bytes after which a connection that breaks again is taken up anew
_SHA256 = re.compile("[0-9a-f]{64}")
_DIGEST = re.compile("[0-9a-fA-F]{40}|[0-9a-fA-F]{64}")


@dataclasses.dataclass(frozen=True)
class RepoFile:
    """A file of a repository as the hub lists it. `sha256` is set for a file in its large storage;
    else it is "" and `git` is the SHA-1 by which git knows the content."""

    size: int
    sha256: str = ""
    git: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of a file in the large storage, else the SHA-1 of git."""
        return self.sha256 or self.git


def library():
    """Returns the package huggingface_hub. Raises InputError if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        problem = "the package huggingface_hub is not installed"
        rule = "it reads and writes hf:// paths"
        raise InputError(problem, rule=rule, fix="pip install 'huggingface_hub>=2.4'") from None
    return huggingface_hub


def page(name: HubName) -> str:
    """Returns the address of the repository's page."""
    prefix = "datasets/" if name.kind == "dataset" else ""
    return f"{library().constants.ENDPOINT}/{prefix}{name.repository}"


def home(name: HubName) -> Path:
    """Returns the repository's folder in the cache."""
    folder = f"{name.kind}s--{name.repository.replace('/', '--')}"
    return Path(library().constants.HF_HUB_CACHE).expanduser() / folder


# -- asking --


class Unreachable(Exception):
    """An error for a hub that gives no answer, or none that is its own."""


def ask(name: HubName, question: Callable):
    """Asks the hub, again if a server is in trouble; returns the answer of `question`. Raises
    Unreachable, and InputError for a refusal."""
    library()
    from huggingface_hub import errors

    for attempt in range(1, _TRIES + 1):
        try:
            return question()
        except errors.HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 500
            if status < 500 and status not in (408, 429):
                raise _refused(name, error, status) from None
            problem = f"it answers with status {status}"
        except errors.OfflineModeIsEnabled:
            raise Unreachable("HF_HUB_OFFLINE is set") from None
        except (errors.HTTPError, OSError) as error:  # no network, no such host, no answer in time
            kind = type(error).__name__
            problem = f"{kind}: {error}"
            if "Timeout" in kind or "ConnectError" in kind:  # it would only be waited for again
                break
        except Exception as error:  # whatever a client makes of an answer that is no hub's
            reason = f"{type(error).__name__}: {error}"
            raise Unreachable(f"its answer cannot be used ({reason})") from None
        if attempt < _TRIES:
            time.sleep(_WAIT_S * 2 ** (attempt - 1))
    raise Unreachable(problem)


@contextlib.contextmanager
def _opened(method: str, url: str, timeout_s: float, start: int = 0) -> Iterator:
    """Yields the answer to a request for what follows the byte `start`, its body unread.

    Redirects are followed; those of a HEAD only to the same server or to huggingface.co, for which
    a mirror may stand, because what the hub says of a file is in its own last answer. The token
    goes to HF_ENDPOINT and nowhere else.
    """
    from huggingface_hub.utils import get_session

    constants, session, visited = library().constants, get_session(), set()
    while True:
        if url in visited or len(visited) > _MOST_REDIRECTS:
            raise ValueError("it redirects in a circle, or without end")
        visited.add(url)
        # Not packed: a kilobyte could become a gigabyte. Not those of the library: to make them
        # it asks the hub for a list, and reads whatever comes.
        headers = {"User-Agent": "rljax", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if _server(url) == _server(constants.ENDPOINT) and (token := _token()):
            headers["Authorization"] = f"Bearer {token}"
        request = session.build_request(method, url, headers=headers, timeout=timeout_s)
        answer = session.send(request, stream=True, follow_redirects=False)
        with contextlib.closing(answer):
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError("it packs an answer that was to be plain bytes")
            target = answer.headers.get("Location") if answer.is_redirect else None
            target = None if target is None else urljoin(url, target)
            if target is None or (method == "HEAD" and _server(target) not in (_server(url), _HUB)):
                _raise_for_status(answer)
                yield answer
                return
            if urlsplit(target).scheme not in ("https", urlsplit(url).scheme):
                raise ValueError(f"it redirects to {target[:100]!r}")
        url = target


def _token() -> str | None:
    hub = library()
    return None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()


def _server(url: str) -> tuple[str, str]:
    return urlsplit(url)[:2]


def _raise_for_status(answer) -> None:
    """Raises the error that `huggingface_hub` has for a status, with the beginning of its text."""
    from huggingface_hub.utils import hf_raise_for_status

    content = b""
    with contextlib.suppress(ValueError):  # its beginning will do
        for data in _body(answer, _LARGEST_REFUSAL) if answer.is_error else ():
            content += data
    # A copy with that text alone: the library would read all of it.
    fields = {"headers": answer.headers, "content": content, "request": answer.request}
    hf_raise_for_status(type(answer)(answer.status_code, **fields))


def _body(answer, max_bytes: int) -> Iterator[bytes]:
    """Yields the bytes of an answer as they come. Raises ValueError for more than `max_bytes` of
    them, TimeoutError where they come too slowly."""
    start, received, remaining = time.monotonic(), 0, max_bytes
    announced = answer.headers.get("Content-Length", "")
    too_long = ValueError(f"it sends more than {max_bytes} bytes")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_long
    for data in answer.iter_raw():
        remaining -= len(data)
        if remaining < 0:
            raise too_long
        yield data
        received += len(data)
        if (waited := time.monotonic() - start) > _SLOW_S:
            if received < _SLOW_BYTES:
                raise TimeoutError(f"{received} bytes have come in {waited:.0f} s")
            start, received = time.monotonic(), 0


def information(name: HubName) -> dict:
    """Returns the JSON object with which the hub answers for a repository at a revision, for `ask`.
    Only its size is checked; raises ValueError for an answer that is no object."""
    revision = f"/revision/{quote(name.revision, safe='')}" if name.revision else ""
    constants = library().constants
    url = f"{constants.ENDPOINT}/api/{name.kind}s/{name.repository}{revision}?blobs=true"
    with _opened("GET", url, constants.HF_HUB_ETAG_TIMEOUT) as answer:
        text = b"".join(_body(answer, _LARGEST_LISTING)).decode()
    value = parse_json(text, "its listing", _MOST_FILES * 32)
    if not isinstance(value, dict):
        raise ValueError("its listing is no object")
    return value


def _refused(name: HubName, error, status: int) -> InputError:
    from huggingface_hub import errors, get_token

    noun, address = ("data set" if name.kind == "dataset" else "model"), page(name)
    logged_in = bool(get_token())
    if isinstance(error, errors.RevisionNotFoundError):
        problem = f"{name.repository} has no revision {name.revision!r}"
        fix = f"one of {address}/commits, or none for the default branch"
        return InputError(problem, rule="a branch, a tag or a commit of the repository", fix=fix)
    if isinstance(error, errors.GatedRepoError):
        return InputError(
            f"the {noun} {name.repository} is gated",
            rule="its owner asks every reader to accept terms"
            + ("; the account of your token has not, or waits for an answer" if logged_in else ""),
            fix=f"accept them at {address}" + ("" if logged_in else f", then {LOG_IN}"),
        )
    if isinstance(error, errors.EntryNotFoundError):
        return InputError(
            f"{name} is not there",
            rule=str(error.args[0]).split("\n")[0],
            fix=f"look at https://huggingface.co/{name.repository} for the spelling and the "
            "revision",
        )
    missing = isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404)
    if missing and not (status == 401 and logged_in):
        rule = "it does not exist, or it is private and " + (
            "the account of your token may not read it" if logged_in else "nobody is logged in"
        )
        fix = f"check the name; of a private one: {LOG_IN}"
        fix = "check the name; of a private one, a token that may read it" if logged_in else fix
        return InputError(f"the hub has no {noun} {name.repository}", rule=rule, fix=fix)
    if status in (401, 403):
        problem = f"the hub refuses {name.repository} (status {status})"
        rule = "the token is not valid" if status == 401 else "the token has no right to do that"
        return InputError(problem, rule=rule, fix="hf auth login anew, or another HF_TOKEN")
    message = error.server_message or str(error).strip().split("\n")[0]
    fix = "run it again later; https://status.huggingface.co says how the hub is"
    return InputError(f"the hub refuses {name.repository} (status {status})", rule=message, fix=fix)


# -- which commit, and what it holds --


def resolve(name: HubName) -> str:
    """Returns the commit of a repository's revision, the same throughout a process. Without a
    network it is the last one that the revision had here. Raises InputError if the repository
    cannot be found."""
    return name.revision if name.pinned else commit_of(dataclasses.replace(name, path=""))


@functools.cache
def commit_of(name: HubName) -> str:
    """Returns what `resolve` does, for a name without a path that is no commit. Raises InputError
    if the repository cannot be found."""
    revision = name.revision or _DEFAULT
    ref = home(name).joinpath("refs", *revision.split("/"))
    try:
        commit, _ = _information(name)
    except Unreachable as problem:
        with contextlib.suppress(InputError):
            commit = read_data(ref, _LONGEST_REF).decode("ascii", errors="replace").strip()
            if COMMIT.fullmatch(commit):  # another program may have written what a hub said
                text = "%s: the hub is not asked (%s): the copy of %s is used"
                LOG.warning(text, name, problem, commit)
                return commit
        raise _not_here(name, str(problem)) from None
    with contextlib.suppress(InputError):  # a cache that nobody may write
        write_text(ref, commit)
    return commit


def _information(name: HubName) -> tuple[str, dict[str, RepoFile]]:
    """(commit, the files) of a revision; both are written into the cache."""
    commit, entries = ask(name, lambda: _checked(name, information(name)))
    _write_record(name.at(commit), entries, _record(name.at(commit))[1])
    return commit, entries


def _checked(name: HubName, value: dict) -> tuple[str, dict[str, RepoFile]]:
    """Returns the same from the hub's answer. Raises ValueError for an answer that no hub gives."""
    commit, siblings = value.get("sha"), value.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise ValueError("it names no commit")
    if name.pinned and commit != name.revision:
        raise ValueError(f"it answers for the commit {commit}")
    if not isinstance(siblings, list) or len(siblings) > _MOST_FILES:
        raise ValueError(f"it lists no files, or more than {_MOST_FILES}")
    entries = {}
    for sibling in siblings:
        if not isinstance(sibling, dict):
            raise ValueError("it lists what is no file")
        if is_path(path := sibling.get("rfilename")):
            entries[path] = _entry(path, sibling)
    return commit, entries


def _entry(path: str, fields: dict) -> RepoFile:
    """A file as the hub lists it: its digest becomes its name in the cache."""
    size, large, git = fields.get("size"), fields.get("lfs"), fields.get("blobId")
    sha256 = large.get("sha256") if isinstance(large, dict) else ""
    entry = RepoFile(size, sha256, "" if sha256 else git)
    if not _is_entry(entry):
        raise ValueError(f"it lists {path} without a size, a SHA-256 or git's SHA-1")
    return entry


def _is_entry(entry: RepoFile) -> bool:
    texts = isinstance(entry.sha256, str) and isinstance(entry.git, str)
    has_digest = texts and (_SHA256.fullmatch(entry.sha256) or COMMIT.fullmatch(entry.git))
    return bool(has_digest) and type(entry.size) is int and 0 <= entry.size <= _LARGEST_FILE


def _not_here(name: HubName, problem: str) -> InputError:
    endpoint = library().constants.ENDPOINT
    online = f"check the network and HF_ENDPOINT ({endpoint}), or name a local folder"
    fix = "once without it, with a network" if "HF_HUB_OFFLINE" in problem else online
    return InputError(
        f"{name} is not in the cache, and the hub is not reached", rule=problem, fix=fix
    )


def listing(name: HubName) -> dict[str, RepoFile]:
    """Returns {path: RepoFile} of the files of a commit. Raises InputError if they are not known
    here and the hub gives no answer."""
    entries = _record(name)[0]
    if entries:
        return entries
    try:
        return _information(name)[1]
    except Unreachable as problem:
        raise _not_here(name, str(problem)) from None


def _record_file(name: HubName) -> Path:
    return home(name) / "rljax" / f"{name.revision}.json"


def _record(name: HubName) -> tuple[dict[str, RepoFile], set[str]]:
    """Returns (the files of a commit, those that were compared here) as the cache has
    recorded them."""
    try:
        value = read_json_object(_record_file(name))
        entries = {path: RepoFile(**entry) for path, entry in value["files"].items()}
        if not all(map(is_path, entries)) or not all(map(_is_entry, entries.values())):
            return {}, set()
        return entries, set(value["compared"])
    except (InputError, KeyError, TypeError, AttributeError):
        return {}, set()


def _write_record(name: HubName, entries: dict[str, RepoFile], compared: set[str]) -> None:
    files = {path: dataclasses.asdict(entry) for path, entry in entries.items()}
    with contextlib.suppress(InputError):  # a cache that nobody may write is read all the same
        write_json(_record_file(name), {"files": files, "compared": sorted(compared)})


# -- files --


def fetch(name: HubName, paths: Iterable[str]) -> Path:
    """Downloads the files of a commit that are not here, and compares each with the digest that the
    hub lists; returns the folder of the commit. Raises InputError for a file that the commit does
    not have, or whose bytes are wrong, and for a disk without room."""
    entries, folder = listing(name), home(name) / "snapshots" / name.revision
    compared = _record(name)[1]
    paths = list(paths)
    for path in paths:
        if path not in entries:
            problem = f"{name.repository} has no file {path!r}"
            rule, fix = f"at revision {name.revision}", f"one of {page(name)}/tree/{name.revision}"
            raise InputError(problem, value=sorted(entries)[:10], rule=rule, fix=fix)
    missing = [path for path in paths if not (folder / path).exists()]
    _check_room(name, sum(entries[path].size for path in missing))
    pending = [path for path in paths if path in missing or path not in compared]
    if not pending:
        return folder
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=_AT_ONCE)
    try:
        with heartbeat.phase("download"):
            _wait({pool.submit(_file, name, path, entries[path]) for path in pending}, home(name))
    finally:
        pool.shutdown(cancel_futures=True)
    _write_record(name, entries, _record(name)[1] | set(pending))
    return folder


def _wait(pending: set[concurrent.futures.Future], folder: Path) -> None:
    """Waits until all files are there. While one of them grows it gives signs of life, because a
    large file takes minutes, and a host that is silent among several is taken to hang."""
    previous: list = []
    while pending:
        done, pending = concurrent.futures.wait(
            pending, _LOOK_S, concurrent.futures.FIRST_EXCEPTION
        )
        for future in done:
            future.result()
        parts = (folder / "blobs").glob("*.incomplete")
        growing = [(p.name, s.st_size, s.st_mtime_ns) for p in parts if (s := _status(p))]
        if done or growing != previous:
            heartbeat.beat()
        previous = growing


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # it has just become the whole file
        return None


def _file(name: HubName, path: str, entry: RepoFile) -> None:
    """Downloads a file, if it is not there, and compares it."""
    link = home(name) / "snapshots" / name.revision / path
    blob = home(name) / "blobs" / entry.digest
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(parents=True, exist_ok=True)
        is_inside = link.parent.resolve().is_relative_to(home(name).resolve() / "snapshots")
        if not is_inside:  # by a link that another program was made to leave there
            raise OSError(0, "a link leads out of the cache")
        if not link.exists():
            _into_the_cache(name, path, entry, blob)
            _point(link, blob)
        elif (digest := file_digest(link, entry)) != entry.digest:
            if link.resolve().parent == blob.parent.resolve():
                link.resolve().unlink(missing_ok=True)
            link.unlink(missing_ok=True)
            raise _other_file(name, path, entry, digest)
    except OSError as error:
        rule = error.strerror or str(error)
        fix = "make room or give permissions; HF_HOME names another folder"
        raise InputError(f"{link} cannot be written", rule=rule, fix=fix) from None


def _into_the_cache(name: HubName, path: str, entry: RepoFile, blob: Path) -> None:
    """Downloads the content of a file, unless another commit had it."""
    from huggingface_hub.utils import WeakFileLock

    lock = home(name).parent / ".locks" / home(name).name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.{uuid.uuid4().hex[:8]}.incomplete")
    with WeakFileLock(lock):  # other programs take the same one
        if blob.is_file() and file_digest(blob, entry) == entry.digest:
            return
        try:
            _download(name, path, entry, part)
            digest = file_digest(part, entry)
            if digest != entry.digest:
                raise _other_file(name, path, entry, digest)
            os.replace(part, blob)
        finally:
            part.unlink(missing_ok=True)


def _download(name: HubName, path: str, entry: RepoFile, part: Path) -> None:
    """Writes what the hub sends as a file. It goes on where the connection broke."""
    from huggingface_hub.utils import tqdm

    url = library().hf_hub_url(name.repository, path, repo_type=name.kind, revision=name.revision)
    part.touch()
    with tqdm(total=entry.size, unit="B", unit_scale=True, desc=path[-40:]) as bar:
        while True:
            size = part.stat().st_size
            try:
                return ask(name, lambda: _go_on(name, url, entry, part, bar))
            except Unreachable as problem:
                if part.stat().st_size < size + _PROGRESS:
                    fix = "start again: files that are complete are kept"
                    what = f"{name.repository}: {path} could not be downloaded"
                    raise InputError(what, rule=str(problem), fix=fix) from None


def _go_on(name: HubName, url: str, entry: RepoFile, part: Path, bar) -> None:
    """Downloads the rest of a file and appends it. It is a question for `ask`."""
    constants = library().constants
    with _opened("HEAD", url, constants.HF_HUB_ETAG_TIMEOUT) as answer:
        _check_metadata(name, entry, answer.headers)
        redirect = answer.headers.get("Location", "") if answer.is_redirect else ""
        source = urljoin(str(answer.url), redirect)
    with open(part, "ab") as file:
        offset = file.tell()
        with _opened("GET", source, constants.HF_HUB_DOWNLOAD_TIMEOUT, offset) as answer:
            if offset and answer.status_code != 206:  # it begins anew
                file.truncate(0)
                offset = 0
            bar.update(offset - bar.n)
            for data in _body(answer, entry.size - offset):
                file.write(data)
                bar.update(len(data))
        if file.tell() < entry.size:
            raise OSError(f"the connection ended after {file.tell()} of {entry.size} bytes")


def _check_metadata(name: HubName, entry: RepoFile, headers) -> None:
    """Raises ValueError for a file of another commit, or one that no hub has."""
    commit = headers.get("X-Repo-Commit")
    if commit != name.revision:
        raise ValueError(f"it answers for the commit {commit!r:.80}")
    etag = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/")
    if not _DIGEST.fullmatch(etag.strip('"')):
        raise ValueError(f"its ETag {etag!r:.80} is no digest")
    size = headers.get("X-Linked-Size")
    if size is not None and size != str(entry.size):
        raise ValueError(f"it says {size!r:.40} bytes of a file that it lists with {entry.size}")


def _point(link: Path, blob: Path) -> None:
    """Links a name in a snapshot to its content."""
    hidden = link.with_name(f".{uuid.uuid4().hex[:8]}.link")
    try:
        os.symlink(os.path.relpath(blob.resolve(), link.parent.resolve()), hidden)
    except OSError:  # a file system without links
        hidden = blob
    os.replace(hidden, link)


def _other_file(name: HubName, path: str, entry: RepoFile, digest: str) -> InputError:
    return InputError(
        f"{name.repository}: {path} is not the file that the hub lists",
        value=digest,
        rule=f"its {'SHA-256' if entry.sha256 else 'git SHA-1'} is {entry.digest}",
        fix="the copy is removed: start again; if it stays, what is between you and the hub "
        "changes files",
    )


def file_digest(path: str | Path, entry: RepoFile) -> str:
    """Returns the digest of a file, of the kind that its entry has."""
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
    folder = next(p for p in (home(name), *home(name).parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        problem = f"{name.repository} needs {size:,} bytes in {folder}"
        fix = "make room, or set HF_HOME to a folder on a larger disk"
        raise InputError(problem, value=free, rule="bytes that are free", fix=fix)
