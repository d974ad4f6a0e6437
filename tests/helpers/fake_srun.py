"""An `srun` of one machine: starts the tasks of a job here, with the variables that SLURM sets."""

import os
import subprocess
import sys
import threading


def main(words: list[str]) -> int:
    options = []
    while words[0].startswith("-"):
        options.append(words.pop(0))
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks = []
    for task in range(nodes):
        given = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_TASKS": str(nodes),
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(task),
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        }
        tasks.append(
            subprocess.Popen(words, env={**os.environ, **given}, stdout=subprocess.PIPE, text=True)
        )
    label = "--label" in options
    threads = [
        threading.Thread(target=_copy, args=(f"{k}: " if label else "", task.stdout))
        for k, task in enumerate(tasks)
    ]
    for thread in threads:
        thread.start()
    codes = []
    for task in tasks:
        codes.append(task.wait())
        if codes[-1] and "--kill-on-bad-exit=1" in options:
            for other in tasks:
                other.terminate()
    for thread in threads:
        thread.join()
    return max(codes)


def _copy(label: str, stream) -> None:
    for line in stream:
        sys.stdout.write(label + line)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
