"""A Hugging Face Hub on loopback for the real client: what `huggingface_hub` asks of the hub, it
answers from memory, as the hub does: large files by a redirect to another host, small ones by one
on its own, ETags that are digests, ranges, error codes in headers, commits over LFS.

Xet is off: what this server has is answered over plain HTTP.
"""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator

import huggingface_hub.constants
import pytest

from rljax.hub import client

TOKEN = "hf_" + "r" * 34
_LARGE = (".safetensors", ".parquet", ".bin")


def commit_of(files: dict[str, bytes], parent: str = "") -> str:
    state = [(path, hashlib.sha256(data).hexdigest()) for path, data in sorted(files.items())]
    return hashlib.sha1(repr((parent, state)).encode()).hexdigest()


@dataclasses.dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    refs: dict[str, str] = dataclasses.field(default_factory=dict)
    private: bool = False
    gated: bool = False


@dataclasses.dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


@dataclasses.dataclass
class Fault:
    """What befalls the next `times` requests whose "METHOD /path" fits: a status, or cut (half of
    the body, then the end), changed (a byte of it), silent (no answer)."""

    fits: str
    how: str | int
    times: int = 1


@dataclasses.dataclass
class Answer:
    """Sends what the server is about to send. A body that is no bytes is sent in chunks, without a
    length."""

    method: str
    path: str
    status: int
    headers: dict[str, str]
    body: bytes | Iterable[bytes]


Lie = Callable[[Answer], None]  # changes an answer


class HubServer:
    def __init__(self):
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.large: dict[str, bytes] = {}  # of the LFS store, by SHA-256
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lie: Lie | None = None
        self.sent = 0  # bytes of bodies without a length
        self.ended = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()

    def put(
        self, repository: str, files: dict[str, bytes | str], kind="model", ref="main", **facts
    ):
        """Commits a whole state of a repository -> the commit."""
        repo = self.repositories.setdefault((kind, repository), Repository())
        repo.private = facts.get("private", repo.private)
        repo.gated = facts.get("gated", repo.gated)
        data = {k: v.encode() if isinstance(v, str) else v for k, v in files.items()}
        commit = commit_of(data, repo.refs.get(ref, ""))
        repo.commits[commit] = data
        repo.refs[ref] = commit
        for path, content in data.items():
            if path.endswith(_LARGE):
                self.large[hashlib.sha256(content).hexdigest()] = content
        return commit

    def put_folder(self, repository: str, folder, **facts):
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return self.put(repository, files, **facts)

    def paths(self, method: str = "") -> list[str]:
        return [r.path for r in self.requests if r.method == method or not method]


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body is written after its head

    def log_message(self, *_):
        pass

    def _serve(self):
        if self.hub.ended.is_set():  # a connection that was kept open
            self.close_connection = True
            return None
        hub, path = self.hub, urllib.parse.unquote(self.path.partition("?")[0])
        hub.requests.append(
            Request(self.command, path, {k.lower(): v for k, v in self.headers.items()})
        )
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.fault = None
        for fault in hub.faults:
            if fault.times and re.search(fault.fits, f"{self.command} {path}"):
                fault.times -= 1
                self.fault = fault.how
                break
        if isinstance(self.fault, int):
            return self._answer(b"{}", status=self.fault)
        if self.fault == "silent":
            hub.ended.wait()
            self.close_connection = True
            return None
        for pattern, answer in _ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                return answer(self, *match.groups())
        return self._answer(b"{}", status=404)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    # -- answers --

    def _answer(self, body: bytes = b"", status: int = 200, **headers):
        """Sends an answer; of a range, the part that is asked for."""
        total, asked = len(body), self.headers.get("Range")
        if asked and status == 200:
            begin = int(re.match(r"bytes=(\d+)-", asked)[1])
            body, status = body[begin:], 206
            headers["Content_Range"] = f"bytes {begin}-{total - 1}/{total}"
        if self.fault == "changed" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        headers.setdefault("Content_Length", str(len(body)))
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = Answer(self.command, self.path, status, headers, body)
        if self.hub.lie is not None:
            self.hub.lie(answer)
        if not isinstance(answer.body, bytes):
            return self._chunks(answer)
        self._head(answer)
        body = answer.body
        if self.command == "HEAD":
            return
        if self.fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _head(self, answer: Answer):
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _chunks(self, answer: Answer):
        answer.headers.pop("Content-Length", None)
        answer.headers["Transfer-Encoding"] = "chunked"
        self._head(answer)
        if self.command == "HEAD":
            return
        self.close_connection = True
        with contextlib.suppress(OSError):  # whoever has heard enough hangs up
            for data in answer.body:
                if self.hub.ended.is_set():
                    return
                self.hub.sent += len(data)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")

    def _json(self, value, **headers):
        self._answer(json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _error(self, status: int, code: str, message: str):
        body = json.dumps({"error": message}).encode()
        self._answer(body, status, X_Error_Code=code, X_Error_Message=message)

    def _known(self, kind: str, repository: str) -> Repository | None:
        """The repository; None where an error was sent instead."""
        repo = self.hub.repositories.get((kind, repository))
        sent = self.headers.get("authorization", "")
        if sent and sent != f"Bearer {TOKEN}":
            return self._error(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.private and not sent):
            # Whoever is not logged in is not told which of the two it is.
            return self._error(404 if sent else 401, "RepoNotFound", "Repository not found")
        return repo

    def _state(self, kind: str, repository: str, revision: str, *, content: bool = False):
        """(commit, files), or None where an error was sent."""
        repo = self._known(kind, repository)
        if repo is None:
            return None
        if repo.gated and content:
            sent = self.headers.get("authorization")
            return self._error(403 if sent else 401, "GatedRepo", "Access to model is restricted.")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repo.commits[commit]

    # -- reading --

    def information(self, kinds: str, repository: str, revision: str | None):
        kind = kinds.removesuffix("s")
        found = self._state(kind, repository, revision or "main")
        if found is None:
            return
        commit, files = found
        repo = self.hub.repositories[kind, repository]
        siblings = []
        for path, data in sorted(files.items()):
            one = {"rfilename": path, "size": len(data), "blobId": git_digest(data)}
            if path.endswith(_LARGE):
                sha = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
            siblings.append(one)
        self._json(
            {
                "_id": "0",
                "id": repository,
                "sha": commit,
                "private": repo.private,
                "gated": "manual" if repo.gated else False,
                "siblings": siblings,
                "tags": [],
            }
        )

    def tree(self, kinds: str, repository: str, revision: str):
        found = self._state(kinds.removesuffix("s"), repository, revision)
        if found is not None:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": git_digest(data)}
                    for path, data in sorted(found[1].items())
                ]
            )

    def resolve(self, prefix: str | None, repository: str, revision: str, path: str):
        kind = (prefix or "models/").removesuffix("s/")
        found = self._state(kind, repository, revision, content=True)
        if found is None:
            return
        commit, files = found
        if path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        data = files[path]
        if path.endswith(_LARGE):  # signed, on the host of the store
            sha = hashlib.sha256(data).hexdigest()
            self._answer(
                b"",
                302,
                X_Repo_Commit=commit,
                X_Linked_Etag=f'"{sha}"',
                ETag='"of-the-redirect"',
                X_Linked_Size=str(len(data)),
                Location=f"http://localhost:{self.hub.port}/store/{sha}?Signature=abc",
            )
            return
        where = f"/api/resolve-cache/{kind}s/{repository}/{commit}/{urllib.parse.quote(path)}"
        self._answer(b"", 307, X_Repo_Commit=commit, Location=where)

    def cached(self, kinds: str, repository: str, commit: str, path: str):
        found = self._state(kinds.removesuffix("s"), repository, commit, content=True)
        if found is not None:
            data = found[1][path]
            self._answer(data, X_Repo_Commit=commit, ETag=f'"{git_digest(data)}"')

    def stored(self, sha: str):
        assert "authorization" not in {k.lower() for k in self.headers}  # the token stays at home
        self._answer(self.hub.large[sha], ETag=f'"{sha}"', Accept_Ranges="bytes")

    # -- writing --

    def create(self):
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._error(401, "", "Invalid credentials in Authorization header")
        wanted = json.loads(self.body)
        repository, kind = f"{wanted['organization']}/{wanted['name']}", wanted.get("type", "model")
        if (kind, repository) in self.hub.repositories:
            return self._answer(json.dumps({"url": f"{self.hub.url}/{repository}"}).encode(), 409)
        self.hub.put(repository, {".gitattributes": "*.safetensors filter=lfs"}, kind)
        self.hub.repositories[kind, repository].private = wanted.get("visibility") == "private"
        return self._json({"url": f"{self.hub.url}/{repository}"})

    def validate_yaml(self):
        self._json({"errors": [], "warnings": []})

    def preupload(self, kinds: str, repository: str, revision: str):
        files = json.loads(self.body)["files"]
        self._json(
            {
                "files": [
                    {
                        "path": f["path"],
                        "uploadMode": "lfs" if f["path"].endswith(_LARGE) else "regular",
                        "shouldIgnore": False,
                    }
                    for f in files
                ]
            }
        )

    def batch(self, repository: str):
        objects = []
        for one in json.loads(self.body)["objects"]:
            actions = (
                {}
                if one["oid"] in self.hub.large
                else {
                    "actions": {
                        "upload": {"href": f"http://localhost:{self.hub.port}/put/{one['oid']}"}
                    }
                }
            )
            objects.append({"oid": one["oid"], "size": one["size"], **actions})
        self._json({"transfer": "basic", "objects": objects})

    def store(self, oid: str):
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.large[oid] = self.body
        self._answer()

    def commit(self, kinds: str, repository: str, revision: str):
        kind = kinds.removesuffix("s")
        found = self._state(kind, repository, revision)
        if found is None:
            return
        files = dict(found[1])
        for line in self.body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                files.pop(value["path"])
        commit = self.hub.put(repository, files, kind, revision)
        url = f"{self.hub.url}/{repository}/commit/{commit}"
        self._json({"commitUrl": url, "commitOid": commit, "success": True})


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO, _KIND = r"([^/]+/[^/]+)", r"(models|datasets)"
_ROUTES = (
    (rf"GET /api/{_KIND}/{_REPO}(?:/revision/(.+))?", _Handler.information),
    (rf"GET /api/{_KIND}/{_REPO}/tree/(.+)", _Handler.tree),
    (rf"(?:GET|HEAD) /(datasets/)?{_REPO}/resolve/([^/]+|refs/[^/]+/[^/]+)/(.+)", _Handler.resolve),
    (rf"(?:GET|HEAD) /api/resolve-cache/{_KIND}/{_REPO}/([0-9a-f]+)/(.+)", _Handler.cached),
    (r"(?:GET|HEAD) /store/([0-9a-f]+)", _Handler.stored),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate_yaml),
    (rf"POST /api/{_KIND}/{_REPO}/preupload/(.+)", _Handler.preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /put/([0-9a-f]+)", _Handler.store),
    (rf"POST /api/{_KIND}/{_REPO}/commit/(.+)", _Handler.commit),
)


@contextlib.contextmanager
def running_hub() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


def environment(server: HubServer, home) -> dict[str, str]:
    """What points another process's client to the server."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "60",
        "HF_HUB_DOWNLOAD_TIMEOUT": "60",
    }


def use(server: HubServer, home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points the client of this process, which has read its environment long ago, to the server,
    with an empty cache and nobody logged in."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_ETAG_TIMEOUT": 60,
        "HF_HUB_DOWNLOAD_TIMEOUT": 60,
        "DOWNLOAD_CHUNK_SIZE": 65536,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(client, "_WAIT_S", 0.02)
    forget()


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server that never answers: whoever asks it waits half a second."""
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(huggingface_hub.constants, name, 0.5)


def forget() -> None:
    """As another process begins: nothing is known of what a revision was."""
    client.commit_of.cache_clear()
