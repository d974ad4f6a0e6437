"""brittle://NAME/...: an object store of this machine that fails, truncates, is slow and kills.

A file system of fsspec over the folder $BRITTLE: a put is seen whole or not at all, there is no
append and no rename. `FAULTS` and the environment variable BRITTLE_FAULTS ("fail=3,kill=7") say
what goes wrong; puts are counted over the life of a process.
"""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import fsspec
from fsspec.spec import AbstractFileSystem

# Numbers of puts: every `fail`-th raises, of every `truncate`-th half arrives, number `kill` kills
# the process before anything of it arrives, and `killed_after` when all has. Each put takes
# `slow_ms`. Of a `broken` store every put fails, of a `forbidden` one for lack of rights; into the
# checkpoint of `broken_step` every one. Every `fail_look`-th look at a file or into a folder fails,
# and with `unlisted` each into a folder for lack of rights.
FAULTS = {
    name: 0
    for name in (
        "fail",
        "truncate",
        "kill",
        "killed_after",
        "slow_ms",
        "broken",
        "broken_step",
        "forbidden",
        "fail_read",
        "fail_look",
        "unlisted",
    )
}


def configure(text: str) -> None:
    for part in filter(None, text.split(",")):
        name, value = part.split("=")
        assert name in FAULTS
        FAULTS[name] = int(value)


class Brittle(AbstractFileSystem):
    protocol = "brittle"
    cachable = False
    puts = reads = looks = 0
    lock = threading.Lock()
    hold = threading.Event()  # cleared: puts wait
    hold.set()

    @property
    def top(self) -> Path:
        return Path(os.environ["BRITTLE"])

    def _file(self, path: str) -> Path:
        return self.top / self._strip_protocol(path).strip("/")

    def _look(self) -> None:
        with self.lock:
            Brittle.looks += 1
            number = Brittle.looks
        if FAULTS["fail_look"] and number % FAULTS["fail_look"] == 0:
            raise ConnectionError("503 the service is not available")

    def ls(self, path, detail=True, **_):
        self._look()
        if FAULTS["unlisted"]:
            raise PermissionError(f"no permission to list {path}")
        here = self._file(path)
        if not here.exists():
            raise FileNotFoundError(path)
        inside = [here] if here.is_file() else sorted(here.iterdir())
        found = [self._facts(str(p.relative_to(self.top))) for p in inside if p.name[0] != "\0"]
        return found if detail else [facts["name"] for facts in found]

    def info(self, path, **_):
        self._look()
        return self._facts(path)

    def _facts(self, path) -> dict:
        here = self._file(path)
        if not here.exists():
            raise FileNotFoundError(path)
        kind = "directory" if here.is_dir() else "file"
        size = 0 if here.is_dir() else here.stat().st_size
        return {"name": str(here.relative_to(self.top)), "size": size, "type": kind}

    def cat_file(self, path, start=None, end=None, **_):
        with self.lock:
            Brittle.reads += 1
            number = Brittle.reads
        if FAULTS["fail_read"] and number % FAULTS["fail_read"] == 0:
            raise ConnectionError("the connection was reset")
        if not self._file(path).is_file():
            raise FileNotFoundError(path)
        return self._file(path).read_bytes()[start:end]

    def get_file(self, rpath, lpath, **_):
        Path(lpath).write_bytes(self.cat_file(rpath))

    def put_file(self, lpath, rpath, **_):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path, value, **_):
        with self.lock:
            Brittle.puts += 1
            number = Brittle.puts
        self.hold.wait()
        if FAULTS["forbidden"]:
            raise PermissionError(f"no permission to write {path}")
        if number == FAULTS["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FAULTS["slow_ms"] / 1000)
        step = FAULTS["broken_step"]
        broken = FAULTS["broken"] or step and f"checkpoints/{step:08d}" in path
        if broken or FAULTS["fail"] and number % FAULTS["fail"] == 0:
            raise ConnectionError("503 the service is not available")
        if FAULTS["truncate"] and number % FAULTS["truncate"] == 0:
            value = value[: len(value) // 2]
        here = self._file(path)
        here.parent.mkdir(parents=True, exist_ok=True)
        draft = self.top / f".draft-{os.getpid()}-{number}"
        draft.write_bytes(value)
        draft.replace(here)
        if number == FAULTS["killed_after"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def rm_file(self, path):
        here = self._file(path)
        if here.is_dir():
            shutil.rmtree(here)
        elif here.exists():
            here.unlink()
        else:
            raise FileNotFoundError(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self.rm_file(path)


fsspec.register_implementation("brittle", Brittle, clobber=True)
configure(os.environ.get("BRITTLE_FAULTS", ""))
