"""Train: rljax train --config=configs/quickstart.py [--config.seed=1 ...]

Another --config.run_dir=DIR starts or resumes the run in DIR. Every field of rljax/config/schema.py
can be set.
"""

from rljax.command.launch import Given
from rljax.config.checks import refuse_early
from rljax.config.options import TrainOptions


def main(options: TrainOptions, given: Given) -> int:
    refuse_early(given.config)
    from rljax.training import train  # only now: a mistyped path is answered without loading JAX

    summary = train(
        given.config, on_start=lambda folder: print(f"run folder: {folder}", flush=True)
    )
    for name in ("accuracy_before", "accuracy_after"):
        if summary[name]:
            print("{}: {value:.3f} [{low:.3f}, {high:.3f}], n={n}".format(name, **summary[name]))
    if "time_split" in summary:
        split = ", ".join(f"{name} {share:.0%}" for name, share in summary["time_split"].items())
        print(f"steady step {summary['step_s']:.3f} s: {split}")
    print(f"{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.1f} s")
    return 0 if summary["status"] == "finished" else 3
