"""A run that is killed at random moments and started again, until it is finished.

python killed_runs.py CONFIG.json KILLS SEED

Imports once and forks for each start, before JAX has devices. Each start is killed by SIGKILL at a
random moment of the first steps that it takes; the last one is left alone.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path


def killed_run(config, kills: int, seed: int = 0) -> Path:
    """The folder of a run of `config` that was killed so often, from a process of its own."""
    from rljax.config import to_dict

    folder, here = Path(config.run_dir), Path(__file__).resolve()
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(to_dict(config)))
    command = [sys.executable, str(here), str(file), str(kills), str(seed)]
    paths = os.pathsep.join([str(here.parents[2]), str(here.parent)])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest(folder: Path) -> int:
    names = [path.name for path in (folder / "checkpoints").glob("[0-9]*")]
    return max(map(int, names), default=0)


def started(config) -> int:
    """The process id of a fork that trains."""
    from rljax.training import train

    if pid := os.fork():
        return pid
    code = 1
    try:
        import jax

        code = 0 if train(config, devices=jax.devices()[:1]).summary["status"] == "finished" else 2
    finally:
        os._exit(code)


def main(config, kills: int, chance: random.Random) -> None:
    folder = Path(config.run_dir)
    for _ in range(kills):
        begun = newest(folder)  # a resumed run cuts the lines behind it
        pid, more = started(config), chance.randint(1, 4)
        while lines(folder) != begun and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        while lines(folder) < begun + more:
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                sys.exit(f"a run ended by itself at step {lines(folder)}")
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    pid = started(config)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    import rljax.training  # noqa: F401  (the seconds of the imports, once)
    from rljax.config import from_dict

    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    settings = from_dict(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1])
    main(settings, int(sys.argv[2]), random.Random(int(sys.argv[3])))
