"""Train: python launchers/train.py --config=configs/quickstart.py [--config.seed=1 ...]

Another --config.run_dir=DIR starts or resumes the run in DIR. Every field of rljax/config/schema.py
can be set.
"""

from rljax.config import flags as launch


def main(_: list[str]) -> int:
    from rljax.training import train  # after the flags: --help answers without loading JAX

    summary = train(
        launch.parsed_config(), on_start=lambda folder: print(f"run folder: {folder}", flush=True)
    )
    for name in ("accuracy_before", "accuracy_after"):
        if summary[name]:
            print("{}: {value:.3f} [{low:.3f}, {high:.3f}], n={n}".format(name, **summary[name]))
    if "time_split" in summary:
        split = ", ".join(f"{name} {share:.0%}" for name, share in summary["time_split"].items())
        print(f"steady step {summary['step_s']:.3f} s: {split}")
    print(f"{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.1f} s")
    return 0 if summary["status"] == "finished" else 3


if __name__ == "__main__":
    launch.run(main)
