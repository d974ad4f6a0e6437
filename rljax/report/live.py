"""Renews report.html while a run goes on, in a process of its own: `python -m rljax.report RUN`.

The run never waits for it and cannot fail by it; it takes about one second of one core in
several minutes.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

LOG = logging.getLogger("rljax")
PACKAGE = Path(__file__).resolve().parents[2]  # that rljax is imported from
FIRST_MINUTES = 1.0  # a first look comes soon
LONGEST_S = 600.0  # of one report


@contextlib.contextmanager
def renewed_report(folder: Path, every_minutes: float) -> Iterator[None]:
    """Writes the report of `folder` after a minute and then every `every_minutes` until the block
    ends; 0 = never. After the block nothing writes there any more."""
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(folder, every_minutes, ended), daemon=True)
    if every_minutes:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if every_minutes:
            thread.join()


def _renew(folder: Path, every_minutes: float, ended: threading.Event) -> None:
    wait = min(FIRST_MINUTES, every_minutes)
    while not ended.wait(60 * wait):
        wait = every_minutes
        try:
            _write(folder, ended)
        except OSError as error:  # no process, no memory: another time
            LOG.info("the report is not renewed: %s", error)


def _write(folder: Path, ended: threading.Event) -> None:
    """Writes one report by another process, which is killed when the run ends: the run writes the
    last report itself."""
    # -P: modules of the working folder must not stand in for others.
    command = [sys.executable, "-P", "-m", "rljax.report", str(folder.resolve())]
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A session of its own: a Ctrl-C for the run is not one for it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    waited = 0.0
    while process.poll() is None and waited < LONGEST_S and not ended.wait(0.2):
        waited += 0.2
    process.kill()
    process.wait()
    (folder / f"report.html.{process.pid}.tmp").unlink(missing_ok=True)
