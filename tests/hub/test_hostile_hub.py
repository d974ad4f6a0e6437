"""A hub that lies: whatever it answers, nothing outside of the cache is written or removed, what is
read is what was listed, and the error is written for users. The client is the real one.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import huggingface_hub.constants
import pytest
from conftest import REPO, lanes
from hub_server import TOKEN, Answer, environment, forget, git_digest, running_hub, use
from test_hub_models import SCRIPT, log_in

from rljax import hub
from rljax.errors import InputError
from rljax.hub import client

FILES = {
    "config.json": "{}",
    "tokenizer.json": '{"a": 1}',
    "model.safetensors": bytes(range(256)) * 40,
    "README.md": "---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n---\n",
}
ROWS = {"train.jsonl": '{"prompt": "a"}\n', "more.parquet": b"PAR1" * 9, "README.md": "# none"}
PRECIOUS = "a key that must stay"


@pytest.fixture
def server(tmp_path, monkeypatch):
    with running_hub() as running:
        use(running, tmp_path / "home", monkeypatch)
        monkeypatch.setattr(client, "_WAIT_S", 0.0)
        running.commit = running.put("me/tiny", FILES)
        running.put("me/rows", ROWS, kind="dataset")
        yield running


@pytest.fixture
def outside(tmp_path, server):
    """A function that asserts that nothing but the cache has changed."""
    (tmp_path / "precious.txt").write_text(PRECIOUS)
    (tmp_path / "shell").mkdir()
    (tmp_path / "shell" / ".profile").write_text(PRECIOUS)

    def tree() -> dict[str, bytes | None]:
        cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
        paths = [p for p in tmp_path.rglob("*") if not p.is_relative_to(cache) and p != cache]
        return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(paths)}

    (tmp_path / "home").mkdir(exist_ok=True)
    before = tree()

    def check():
        assert tree() == before
        for path in Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("*"):
            assert path.resolve().is_relative_to(tmp_path / "home" / "hub"), path

    return check


READS = {
    "a model": lambda: hub.model_folder("me/tiny"),
    "its config": lambda: hub.model_folder("hf://me/tiny", hub.CONFIG),
    "its tokenizer": lambda: hub.model_folder("hf://me/tiny", hub.TOKENIZER),
    "its card": lambda: hub.model_card(hub.parse("hf://me/tiny")),
    "rows": lambda: hub.split_files("hf://datasets/me/rows", "train"),
}


def refused(read, match: str = ".") -> str:
    forget()
    with pytest.raises(InputError, match=match) as told:
        read()
    assert len(str(told.value)) < 2000
    return str(told.value)


def tags(folder: Path) -> list[str]:
    """Values of a header that names a file of the cache where it is believed."""
    up = "../" * 12
    return [
        "../../../../precious.txt",
        "../../../../shell/.profile",
        f"{up}{folder}/precious.txt",
        str(folder / "precious.txt"),
        str(folder / "new.txt"),
        str(folder / "shell"),
        "../../../shell/new",
        "..",
        ".",
        "",
        "a/b",
        "x" * 5000,
        "0" * 39,
        "0" * 41,
        "g" * 40,
        "0" * 40 + "/../../../../../precious.txt",
        "%2e%2e%2fprecious.txt",
    ]


WHEN = {
    "always": lambda answer, seen: True,
    "to HEAD": lambda answer, seen: answer.method == "HEAD",
    "to GET": lambda answer, seen: answer.method == "GET",
    "the second time": lambda answer, seen: seen > 1,
    "of the listing": lambda answer, seen: (
        answer.path.startswith("/api/") and "cache" not in answer.path
    ),
}


# Of each header, and at each time.
QUICK = (
    *(("X-Repo-Commit", when) for when in ("always", "to GET", "of the listing")),
    *(("ETag", when) for when in ("to GET", "the second time", "of the listing")),
    *(("X-Linked-Etag", when) for when in ("to GET", "the second time", "of the listing")),
)
LIES = [*itertools.product(("ETag", "X-Linked-Etag", "X-Repo-Commit"), WHEN)]


@pytest.mark.parametrize(
    "header_when", lanes(QUICK, [lie for lie in LIES if lie not in QUICK]), ids="-".join
)
def test_a_header_names_no_file(server, outside, tmp_path, header_when):
    """Lies in every answer, of every kind of file, at any time: a client that asks twice and trusts
    the second answer falls for the third case."""
    (header, when), counts = header_when, {}
    believed = when in ("always", "to HEAD", "the second time")
    for tag in tags(tmp_path) if believed else tags(tmp_path)[:4]:

        def lie(answer: Answer, tag=tag):
            counts[answer.method, answer.path] = seen = counts.get((answer.method, answer.path), 0)
            counts[answer.method, answer.path] += 1
            if WHEN[when](answer, seen + 1):
                answer.headers[header] = f'"{tag}"' if "Etag" in header.title() else tag

        server.lie = lie
        for read in READS.values():
            forget()
            counts.clear()
            try:
                read()
            except InputError as error:
                assert "commit" in str(error) or "ETag" in str(error), error
            outside()
        if when in ("always", "to HEAD") and header != "X-Linked-Etag":
            assert not list(Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("blobs/*"))
    server.lie = None
    forget()
    assert (READS["a model"]() / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_there_leaves_no_note_outside(server, outside, tmp_path, name):
    """huggingface_hub notes such files under the commit that the answer names."""

    def lie(answer: Answer):
        if f"/{name}" in answer.path:
            answer.status, answer.body = 404, b"{}"
            answer.headers |= {
                "X-Error-Code": "EntryNotFound",
                "Content-Length": "2",
                "X-Repo-Commit": "../../../../shell",
            }

    server.lie = lie
    for read in READS.values():
        forget()
        try:
            read()
        except InputError:
            pass
        outside()


def test_another_process_by_its_environment(server, outside, tmp_path):
    """As a user meets it: HF_ENDPOINT names the mirror, and nothing else was set."""

    def lie(answer: Answer):
        answer.headers["ETag"] = answer.headers["X-Linked-Etag"] = str(tmp_path / "precious.txt")

    server.lie = lie
    own = {**environment(server, tmp_path / "home"), "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=own, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "ETag" in done.stderr and "Traceback" not in done.stderr
    outside()


PACKED = zlib.compress(b"\0" * (1 << 24), wbits=31)


def endless(piece: bytes = b"x" * 65536):
    return itertools.repeat(piece)


@pytest.mark.parametrize("what", ["endless", "one byte more", "a length that is a lie", "packed"])
def test_a_body_ends_where_the_listing_says(server, outside, what):
    def lie(answer: Answer):
        if answer.method != "GET" or "blobs=true" in answer.path or not answer.body:
            return
        if what == "endless":
            answer.body = endless()
        elif what == "one byte more":
            answer.body = iter([answer.body, b"x"])
        elif what == "packed":
            answer.headers["Content-Encoding"] = "gzip"
            answer.body = iter([PACKED])
        else:
            answer.headers["Content-Length"] = str(1 << 60)

    server.lie = lie
    for name in ("a model", "its config", "rows"):
        told = refused(READS[name], "could not be downloaded|is not the file")
        assert "packs" in told or "more than" in told
        outside()
    assert not any("agent" in path for path in server.paths())  # what the library asks by itself
    parts = Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("blobs/*")
    assert not list(parts) and server.sent < 50_000_000


def test_a_body_that_drips_is_given_up(server, outside, monkeypatch):
    monkeypatch.setattr(client, "_SLOW_S", 0.5)

    def drops():
        while not server.ended.wait(0.05):
            yield b" "

    def drip(answer: Answer):
        if "config.json" in answer.path and answer.method == "GET":
            answer.body = drops()

    server.put("me/tiny", {**FILES, "config.json": " " * 300})
    server.lie = drip
    assert "bytes have come in" in refused(READS["its config"])

    def drip_listing(answer: Answer):
        answer.body = drops()

    server.lie = drip_listing
    assert "bytes have come in" in refused(lambda: hub.model_folder("hf://me/tiny@v2", hub.CONFIG))


COMMIT = "c" * 40
ENTRY = {"rfilename": "config.json", "size": 2, "blobId": git_digest(b"{}")}
LARGE = {"rfilename": "model.safetensors", "size": 1, "lfs": {"sha256": "a" * 64}}


def listing(*entries, sha: object = COMMIT) -> dict:
    return {"sha": sha, "siblings": list(entries)}


LISTINGS = {
    "no object": [],
    "null": None,
    "a text": "x",
    "a number": 1,
    "nothing": {},
    "no list": {"sha": COMMIT, "siblings": {"config.json": 1}},
    "a commit by another type": listing(ENTRY, sha=5),
    "a commit that is a path": listing(ENTRY, sha="../../../../shell"),
    "a commit with an end of line": listing(ENTRY, sha=COMMIT + "\n"),
    "a file named 5": listing({**ENTRY, "rfilename": 5}),
    "a file named null": listing({**ENTRY, "rfilename": None}),
    "a file without a name": listing({"size": 1}),
    "a file that is a text": listing("config.json"),
    "a file that is a list": listing([["config.json"]]),
    **{
        f"size {size!r:.12}": listing({**ENTRY, "size": size})
        for size in ("x", None, -1, 1.5, True, [], {}, 10**300, float("nan"), "2")
    },
    **{
        f"blobId {blob!r:.12}": listing({**ENTRY, "blobId": blob})
        for blob in (None, 5, "", "../../../../precious.txt", "0" * 39, "G" * 40, ["0" * 40])
    },
    **{
        f"lfs {large!r:.24}": listing(ENTRY, {**LARGE, "lfs": large})
        for large in (
            5,
            "x",
            [],
            {},
            {"sha256": None},
            {"sha256": 5},
            {"sha256": "../precious.txt"},
            {"sha256": "a" * 63},
            {"sha256": ["a" * 64]},
        )
    },
    **{
        f"name {name!r:.16}": listing({**ENTRY, "rfilename": name})
        for name in (
            "x" * 5000,
            "a/" * 900 + "b",
            "../../../precious.txt",
            "/etc/passwd",
            "a\0b",
            "a\\..\\b",
            "..",
            ".",
            "",
            "a//b",
            "\ud800",
            "a\nb",
            "é" * 200,
        )
    },
}
TEXTS = {
    "brackets": b"[" * 100_000,
    "closed brackets": b"[" * 50_000 + b"]" * 50_000,
    "brackets inside": b'{"sha": ' + b'{"a":' * 50_000,
    "no UTF-8": b'{"sha": "\xff"}',
    "empty": b"",
    "1e400": json.dumps(listing({**ENTRY, "size": 777})).encode().replace(b"777", b"1e400"),
    "digits": json.dumps(listing({**ENTRY, "size": 777})).encode().replace(b"777", b"9" * 5000),
    "cut": json.dumps(listing(ENTRY)).encode()[:-9],
    "page": b"<html>no hub here</html>",
    "twice": json.dumps(listing(ENTRY)).encode() * 2,
}


@pytest.mark.parametrize("name", [*LISTINGS, *TEXTS])
def test_a_listing_of_another_kind_is_refused(server, outside, name):
    body = TEXTS[name] if name in TEXTS else json.dumps(LISTINGS[name]).encode()

    def lie(answer: Answer):
        answer.body, answer.headers["Content-Length"] = body, str(len(body))

    server.lie = lie
    told = refused(lambda: hub.model_folder("hf://me/tiny", hub.WEIGHTS))
    assert "its answer cannot be used" in told or "has no" in told
    outside()


@pytest.mark.parametrize("what", ["bytes", "entries", "values"])
def test_a_listing_without_end_is_refused(server, outside, what):
    begins, many = b'{"sha": "%b", "siblings": [' % COMMIT.encode(), [b"{}"] * 100_001
    values = b",".join([b"[]"] * 4_000_000)
    body = {
        "bytes": lambda: itertools.chain([begins], endless(b" " * 65536)),
        "entries": lambda: iter([begins, b",".join(many), b"]}"]),
        "values": lambda: iter([begins, values, b"]}"]),
    }[what]

    def lie(answer: Answer):
        answer.body = body()

    server.lie = lie
    refused(READS["its config"], "more than|holds")
    assert server.sent < 120_000_000
    outside()


def test_another_commit_than_asked_is_refused(server, outside):
    """By the listing, and by the answers for a file."""
    other = server.put("me/tiny", {**FILES, "config.json": '{"other": 1}'}, ref="v2")
    asked = f"hf://me/tiny@{server.commit}"

    def swap(answer: Answer):
        if answer.path.startswith("/api/models/"):
            text = answer.body.replace(server.commit.encode(), other.encode())
            answer.body, answer.headers["Content-Length"] = text, str(len(text))

    server.lie = swap
    assert other in refused(lambda: hub.model_folder(asked, hub.CONFIG))

    def of_a_file(answer: Answer):
        if "config.json" in answer.path:
            answer.headers["X-Repo-Commit"] = other

    server.lie = of_a_file
    assert other in refused(lambda: hub.model_folder(asked, hub.CONFIG))
    outside()


LOCATIONS = [
    "",
    "?again",
    "#",
    "/api/models/me/tiny",
    "//127.0.0.1:1/",
    "http://127.0.0.1:1/x",
    "file:///etc/passwd",
    "ftp://127.0.0.1/x",
    "gopher://x",
    "http://",
    "http://[::1",
    "\t",
    "http://a:99999999/",
    "http://\ud8ff",
    "javascript:alert(1)",
    "data:,{}",
    "http://exa mple/",
    "http://127.0.0.1:1/" + "a" * 20_000,
]


@pytest.mark.parametrize("where", lanes(["/api/models/me/tiny", "/resolve/"], ["/resolve-cache/"]))
def test_redirects_end(server, outside, where):
    for status, target in itertools.product((301, 302, 307, 308, 399), LOCATIONS):

        def lie(answer: Answer, status=status, target=target):
            if where in answer.path:
                location = target.encode("utf-8", "surrogatepass").decode("latin-1")
                answer.status, answer.headers["Location"] = status, location

        server.lie = lie
        server.requests.clear()
        refused(READS["its config"])
        assert len(server.requests) <= 14, (target, server.paths())
    outside()


def test_a_chain_of_redirects_ends(server, outside):
    numbers = itertools.count()

    def lie(answer: Answer):
        answer.status = 302
        answer.headers["Location"] = f"/api/models/me/tiny?step={next(numbers)}"
        answer.body = endless()  # which nobody reads

    server.lie = lie
    assert "without end" in refused(READS["its config"])
    assert len(server.requests) <= 7 and server.sent < 100_000_000  # what waits in sockets


def test_the_token_stays_with_the_hub(server, outside):
    """Wherever an answer sends the client."""
    log_in(TOKEN)
    with running_hub() as thief:
        for where, method in itertools.product(("/api/models", "/resolve", "cache"), "GH"):

            def lie(answer: Answer, where=where, method=method):
                if where in answer.path and answer.method[0] == method:
                    answer.status = 307
                    answer.headers["Location"] = f"{thief.url}/api/models/me/tiny"

            server.lie = lie
            forget()
            shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE, ignore_errors=True)
            with contextlib.suppress(InputError):  # some of them are asked for nothing
                READS["its config"]()
        assert len(thief.requests) > 2
        for request in thief.requests:
            assert TOKEN not in str(request.headers)
    assert any(TOKEN in str(request.headers) for request in server.requests)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 416, 429, 500, 503])
def test_a_refusal_without_end_is_read_at_its_beginning(server, outside, status):
    for body in (
        endless(),
        iter([b"[" * 90_000]),
        iter([b'{"error": 1e400}']),
        iter([b"\xff" * 9]),
    ):

        def lie(answer: Answer, body=body):
            answer.status, answer.body = status, body

        server.lie = lie
        assert "\x1b" not in refused(READS["its config"])
    assert server.sent < 60_000_000


def test_what_a_hub_left_in_the_cache_leads_nowhere(server, outside, tmp_path):
    """Another program may have trusted the hub before, and written links and names from it."""
    folder = client.home(hub.parse("hf://me/tiny"))
    snapshot = folder / "snapshots" / server.commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(tmp_path / "precious.txt")
    refused(READS["its config"], "is not the file")
    (snapshot / "tokenizer.json").symlink_to("../../../../../precious.txt")
    refused(READS["its tokenizer"], "is not the file")
    assert (READS["a model"]() / "config.json").read_text() == "{}"
    outside()

    deep = server.put("me/tiny", {"shell/.profile": "evil", "shell/new.json": "{}", **FILES})
    (folder / "snapshots" / deep).mkdir()
    link = folder / "snapshots" / deep / "shell"
    link.symlink_to(tmp_path / "shell")
    for name in ("shell/.profile", "shell/new.json"):
        refused(
            lambda name=name: client.fetch(hub.parse(f"hf://me/tiny@{deep}"), [name]),
            "leads out of the cache",
        )
    link.unlink()
    outside()


def test_what_a_hub_left_in_the_notes_of_the_cache_is_not_believed(server, outside, monkeypatch):
    folder = client.home(hub.parse("hf://me/tiny"))
    record = folder / "rljax" / f"{server.commit}.json"
    for files in (
        {"config.json": {"size": 2, "sha256": "", "git": "../../../../precious.txt"}},
        {"../../../precious.txt": {"size": 2, "sha256": "a" * 64, "git": ""}},
        {"config.json": {"size": "2", "sha256": "a" * 64, "git": ""}},
        {"config.json": 5},
        [],
    ):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"files": files, "compared": []}))
        named = hub.parse(f"hf://me/tiny@{server.commit}")
        assert set(client.listing(named)) == set(FILES)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("../../../../shell")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(READS["its config"], "HF_HUB_OFFLINE")
    outside()


def test_a_file_and_a_folder_of_one_name(server, outside):
    server.put("me/tiny", {**FILES, "a": "1", "a/b": "2"})
    name = hub.parse(hub.pinned("hf://me/tiny"))
    refused(lambda: client.fetch(name, ["a"]) and client.fetch(name, ["a/b"]), "cannot be written")
    outside()


def test_a_blob_of_another_file_is_not_removed(server, outside):
    """A hub that names another file's digest for one of its own."""
    folder = READS["a model"]()
    blob = (folder / "model.safetensors").resolve()

    def lie(answer: Answer):
        answer.headers["ETag"] = answer.headers["X-Linked-Etag"] = f'"{blob.name}"'
        if "/store/" in answer.path or "config.json" in answer.path:
            answer.body = b"[]" if answer.body == b"{}" else answer.body

    server.put("me/tiny", {**FILES, "config.json": "{} "})
    server.lie = lie
    forget()
    READS["its config"]()
    assert blob.exists() and os.path.getsize(blob) == len(FILES["model.safetensors"])
    outside()


# -- pushing --


def pushed(folder: Path) -> str:
    return hub.upload(hub.parse("hf://me/new"), folder, private=True, message="one")


BODIES = {
    "brackets": b"[" * 100_000,
    "no object": b"[]",
    "null": b"null",
    "a number": b"1e400",
    "nothing": b"{}",
    "no UTF-8": b"\xff\xfe",
    "empty": b"",
    "text": b'"x"',
    "keys of other kinds": b'{"files": 5, "objects": "x", "url": [], "commitUrl": {}, "sha": 1}',
    "lists": b'{"files": [[]], "objects": [5], "url": 5, "commitUrl": 5, "siblings": [1]}',
}


@pytest.mark.parametrize(
    "where",
    [
        "GET /api/models",
        "/repos/create",
        "/validate-yaml",
        "/preupload/",
        "/info/lfs",
        "/put/",
        "/commit/",
        "/tree/",
    ],
)
def test_a_push_survives_any_answer(server, outside, tmp_path, where, monkeypatch):
    log_in(TOKEN)
    (tmp_path / "home" / "out").mkdir()
    folder = tmp_path / "home" / "out"
    (folder / "README.md").write_text("# card")
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    monkeypatch.setattr(sys.modules["rljax.hub.upload"], "_MOST_SAID", 1_000_000)
    for body in (*BODIES.values(), None):

        def lie(answer: Answer, body=body):
            if where in f"{answer.method} {answer.path}":
                answer.body = endless() if body is None else body
                answer.headers["Content-Length"] = str(len(body or b""))
                answer.headers["ETag"] = str(tmp_path / "precious.txt")

        server.repositories.pop(("model", "me/new"), None)
        server.large.clear()
        server.lie = lie
        try:
            url = pushed(folder)
            assert url.startswith(server.url)
        except InputError as error:
            assert len(str(error)) < 2000
        assert (tmp_path / "precious.txt").read_text() == PRECIOUS
    assert server.sent < 60_000_000


def test_the_address_of_a_commit_is_an_address(server, outside, tmp_path):
    log_in(TOKEN)
    (tmp_path / "home" / "out").mkdir()
    (tmp_path / "home" / "out" / "README.md").write_text("# card")
    for address in ("\x1b[2Jx", "javascript:alert(1)", 5, "https://x y"):

        def lie(answer: Answer, address=address):
            if "/commit/" in answer.path:
                answer.body = json.dumps({"commitUrl": address, "commitOid": "a" * 40}).encode()
                answer.headers["Content-Length"] = str(len(answer.body))

        server.lie = lie
        try:
            assert pushed(tmp_path / "home" / "out") == f"{server.url}/me/new"
        except InputError as error:
            assert "\x1b" not in str(error)
