"""Cache of compiled programs: where it is, how many of a run's programs it held, and what has
changed if it held none.

Only the first process writes JAX's cache, and every process reads it. So hosts use one folder that
all of them see. If there is none (the default is on each host's own disk, or the folder is a URL)
each has a copy, which is filled before the first compile, and the first host puts back what is new.
"""

import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jaxlib
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from rljax import heartbeat, hosts
from rljax.config import Config
from rljax.hosts import preflight
from rljax.hosts.programs import same_keys
from rljax.report.starts import read_starts
from rljax.runs.folder import try_to_write
from rljax.runs.store import Store, is_url, local_path
from rljax.tracking import compiles
from rljax.training.run_folder import RunFolder

LOG = logging.getLogger("rljax")
BESIDE = "compilation_cache"  # the folder beside the run folders, for hosts that share no other
PUT_AFTER_STEPS = 3  # every program of a step has run by then
LEAST_S = 0.5  # to compile a program that one process keeps; several hosts keep all
AT_ONCE = 16  # files that are copied side by side


def compiled_for() -> dict[str, str]:
    """Returns what programs depend on beside the config: versions, code, flags, devices."""
    dependencies = preflight.of_this_host() | preflight.devices_of_this_host()
    return dependencies | {"hosts": str(hosts.count())}


class ProgramCache:
    """The cache of the compiled programs of the run in `run_folder`. All hosts open it, and call it
    in the same order. `say` shows a line on the console."""

    def __init__(
        self, config: Config, run_folder: RunFolder, *, say: Callable[[str], None] | None = None
    ):
        self.run_dir, self.say = run_folder.path, say
        self.folder: Path | None = None  # of this host; None: nothing is kept
        self.shared: Store | None = None  # the copy that all hosts see, where that is another
        self.steps, self.since = 0, compiles.count()
        self.least_s = 0.0 if hosts.count() > 1 else LEAST_S
        self._thread = ThreadPoolExecutor(1, "compiled programs")
        compiles.watch()
        text = config.compilation_cache
        if not text:
            return
        cache = Config().compilation_cache if is_url(text) else str(local_path(text))
        self.folder = Path(os.path.expanduser(cache))
        if hosts.count() > 1 or is_url(text):
            self.folder /= _kind()
            fault = next(filter(None, hosts.gather(self._made())), "")
            if fault:
                self.folder = None
                if hosts.first():
                    LOG.warning("compiled programs are not kept: %s", fault)
                return
            if is_url(text):
                self.shared = Store(f"{text.rstrip('/')}/{_kind()}")
            elif not _seen_by_all(self.folder):
                self.shared = Store(f"{_beside(run_folder.url or run_folder.path)}/{_kind()}")
            self._fetch()
            same_keys()
            # A folder of XLA's own in ours, for GPUs: its path is in the key of every program.
            same_path = len(set(hosts.gather(str(self.folder)))) == 1
            cache = "xla_gpu_per_fusion_autotune_cache_dir"
            caches = cache if same_path and jax.default_backend() == "gpu" else "none"
            jax.config.update("jax_persistent_cache_enable_xla_caches", caches)
            reset_cache()  # what this process has used so far
        jax.config.update("jax_compilation_cache_dir", str(self.folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", self.least_s)

    def __enter__(self) -> "ProgramCache":
        return self

    def __exit__(self, kind, *_) -> None:
        """Puts what was compiled later, such as evaluation, beside the rest. A run that fails does
        not wait for it: the other hosts must hear of that."""
        if kind is None:
            self._put()
        self._thread.shutdown(wait=kind is None)

    def after_step(self) -> None:
        """Called after every step of this process: after the first one says what was compiled, and
        after the third puts the programs where the other hosts find them."""
        self.steps += 1
        if self.folder is None:
            return
        if self.steps == 1:
            compiled = compiles.since(self.since)
            counts = [compiles.Compiled(*values) for values in hosts.gather(list(compiled))]
            if self.say is not None:
                self.say(said(counts, hosts.names(), compiles.longest(self.since)))
            if hosts.first() and not compiled.hits and compiled.longest_s >= self.least_s:
                self._tell_change(compiled.programs)
        if self.steps == PUT_AFTER_STEPS:
            with heartbeat.phase("programs"):
                self._put()

    def _tell_change(self, programs: int) -> None:
        """Warns where a run that is resumed finds none of its programs."""
        starts = read_starts(self.run_dir)
        if len(starts) < 2 or not starts[-1].get("step"):
            return
        changes = changed(*(start.get("compiled_for") for start in starts[-2:]))
        machines = [start.get("host") for start in starts[-2:]]
        move = (
            f", and moved from {machines[0]} to {machines[1]}" if machines[0] != machines[1] else ""
        )
        cause = (
            f"what they depend on has changed: {'; '.join(changes)}"
            if changes
            else f"versions, code, flags and devices are as they were{move}: a field of the "
            "config that changes shapes, or another folder than before?"
        )
        text = "none of %d programs came from the compilation cache %s of the start before; %s"
        LOG.warning(text, programs, self.shared or self.folder, cause)

    # -- copies --

    def _made(self) -> str:
        """Makes the folder; returns why it cannot be used, "" if it can."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try_to_write(self.folder)
        except OSError as error:
            return f"{hosts.names()[hosts.index()]}: {self.folder}: {error.strerror}"
        return ""

    def _fetch(self) -> None:
        """Copies the programs that this host lacks. If the store does not answer, they
        are compiled."""
        if self.shared is None:
            return
        try:
            stored = self.shared.sizes()
            missing = [name for name, size in stored.items() if self._size(name) != size]
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(self._fetch_one, missing))
        except OSError as error:
            LOG.warning("compiled programs could not be read: %s", error)

    def _fetch_one(self, name: str) -> None:
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):  # a name of a store: ".."
            return
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self.shared.get_file(name, draft)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except OSError:
            return -1

    def _put(self) -> None:
        """Copies the new programs of the first host to the store, during the steps that follow."""
        if self.shared is None or not hosts.first():
            return
        self._thread.submit(self._put_now)

    def _put_now(self) -> None:
        try:
            stored = self.shared.sizes()
            paths = [p for p in self.folder.rglob("*") if p.is_file() and p.name[0] != "."]
            names = [p.relative_to(self.folder).as_posix() for p in paths]
            missing = [name for name in names if stored.get(name) != self._size(name)]
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(self._put_one, missing))
        except OSError as error:
            LOG.warning("compiled programs could not be kept: %s", error)

    def _put_one(self, name: str) -> None:
        path = self.shared.at(name)
        if not is_url(path):  # a store needs no folders
            local_path(path).parent.mkdir(parents=True, exist_ok=True)
        self.shared.put_file(self.folder / name, name)


def _kind() -> str:
    """The name of a folder of programs that fit each other: chips and versions."""
    device = jax.devices()[0]
    text = (
        f"{device.platform}-{device.device_kind}-{jax.device_count()}x{hosts.count()}"
        f"-jax-{jax.__version__}-{jaxlib.__version__}"
    )
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text)


def _beside(run_dir: str | Path) -> str:
    """The URL of the folder of programs beside the run folder."""
    if is_url(run_dir):
        return f"{str(run_dir).rstrip('/').rpartition('/')[0]}/{BESIDE}"
    return f"file://{Path(os.path.abspath(run_dir)).parent / BESIDE}"


def _seen_by_all(folder: Path) -> bool:
    """Returns whether a file that the first host makes there is seen by every host."""
    token = folder / f".{hosts.share(secrets.token_hex(8))}"
    if hosts.first():
        token.touch()
    hosts.wait("compilation cache")
    visible = all(hosts.gather(token.exists()))
    if hosts.first():
        token.unlink(missing_ok=True)
    return visible


def said(every: list[compiles.Compiled], names, longest: Sequence[tuple[str, float]] = ()) -> str:
    """Returns a line such as "compiled 9 programs in 412 s (learn 300 s, generate 99 s), 0 from the
    cache", and the hosts with other counts."""
    first = every[0]
    slowest = ", ".join(f"{program} {seconds:.0f} s" for program, seconds in longest[:4])
    text = f"compiled {first.programs} programs in {first.seconds:.0f} s"
    text += f" ({slowest})" * bool(slowest) + f", {first.hits} from the cache"
    differing = [
        f"{name}: {counts.programs} and {counts.hits}"
        for counts, name in zip(every, names, strict=True)
        if (counts.programs, counts.hits) != (first.programs, first.hits)
    ]
    remainder = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    if differing:
        return f"{text} ({', '.join(differing[:4])}{remainder})"
    return text + (f", on each of {len(every)} hosts" if len(every) > 1 else "")


def changed(before: object, now: object) -> list[str]:
    """Returns lines such as "jaxlib: 0.10.1 -> 0.10.2", one for each fact that differs between
    two starts."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return []
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{n}: {before.get(n) or 'nothing'} -> {now.get(n) or 'nothing'}" for n in names]
