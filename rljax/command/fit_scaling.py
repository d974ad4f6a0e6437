"""Fit scaling curves: rljax scaling RUN_DIR [RUN_DIR ...] [--until=200 --to=2000]

Fits the sigmoid of performance over compute (ScaleRL, arXiv 2510.13786) to a metric of each run's
metrics.jsonl, by default the held-out accuracy over the steps, and prints a table and the same as
JSON. --until fits the points up to a compute and compares the prediction with those after it; --to
predicts the value at a compute. --compute=NAME sums another metric, such as batch/tokens.
"""

import json

from rljax.command.launch import print_table
from rljax.config.run_options import ScalingOptions


def main(options: ScalingOptions) -> None:
    """Fits the curves of the runs and prints the table."""
    from rljax.evaluation.scaling import fit_runs
    from rljax.files import write_json

    fits = fit_runs(options)
    names = list(dict.fromkeys(name for fit in fits.values() for name in fit))
    rows = [
        (folder, *(f"{fit[name]:.4g}" if name in fit else "" for name in names))
        for folder, fit in fits.items()
    ]
    print_table(("run", *names), rows, f"{options.metric} over {options.compute}")
    print(json.dumps(fits, indent=2))
    if options.out:
        write_json(options.out, fits)
