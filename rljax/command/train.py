"""Train: rljax train --config=configs/quickstart.py [--config.seed=1 ...]

Another --config.run_dir=DIR starts or resumes the run in DIR. Every field of rljax/config/schema.py
can be set. Exit code 0: finished; 2: an error that the message tells how to mend; 3: stopped by a
signal and saved, or finished but not all files could be kept; 130: Ctrl-C twice, nothing saved.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rljax.command.launch import Given
from rljax.config.checks import refuse_early
from rljax.config.options import TrainOptions


def main(options: TrainOptions, given: Given) -> int:
    refuse_early(given.config)
    from rljax.training import train  # only now: a mistyped path is answered without loading JAX

    if options.dry_run:
        from rich.console import Console

        from rljax.training.preview import preview

        preview(given.config, Console())
        print("dry run: nothing was trained")
        return 0
    run = train(given.config, on_start=lambda folder: print(f"run folder: {folder}", flush=True))
    summary = run.summary
    for name in ("accuracy_before", "accuracy_after"):
        if summary[name]:
            print("{}: {value:.3f} [{low:.3f}, {high:.3f}], n={n}".format(name, **summary[name]))
    if "time_split" in summary:
        split = ", ".join(f"{name} {share:.0%}" for name, share in summary["time_split"].items())
        print(f"steady step {summary['step_s']:.3f} s: {split}")
    print(f"{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.1f} s")
    finished = summary["status"] == "finished"
    print("\n".join(next_steps(run.folder, given, finished)))
    return 0 if finished else 3


def next_steps(folder: Path, given: Given, finished: bool) -> Iterator[str]:
    """Lines that name what a run has written and the commands that go on from there."""
    checkpoints = sorted((folder / "checkpoints").glob("[0-9]*"))
    for name, path in (
        ("report", folder / "report.html"),
        ("policy", folder / "policy"),
        ("reward model", folder / "reward_model"),
        ("checkpoint", checkpoints[-1] if checkpoints else None),
        ("rewards said", folder / "rewards.log"),
    ):
        if path is not None and path.exists():
            yield f"{name + ':':<14}{path}"
    if not finished:
        place = f"--config.run_dir={folder}"
        others = [a for a in given.config_arguments() if not a.startswith("--config.run_dir=")]
        yield f"{'resume:':<14}rljax train {shlex.join([*others, place])}"
    if checkpoints and (folder / "policy").exists():
        quoted = shlex.quote(str(folder))
        yield f"{'evaluate:':<14}rljax evaluate {quoted}"
        yield f"{'serve:':<14}rljax serve {quoted}"
