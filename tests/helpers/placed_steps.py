"""GRPO with roles on devices of their own: `placed_steps.py FOLDER PLACEMENT FIELDS`, both JSON.
Two steps, of which the first host prints the metrics; or with FIELDS that have `steps` a run."""

import json
import sys
from pathlib import Path

from rljax import hosts

if __name__ == "__main__":
    hosts.start()
    import jax
    from tiny_run import tiny_config

    from rljax.setup import build, initial_params
    from rljax.tracking.timing import collect
    from rljax.training import train
    from rljax.training.run import Run

    folder, groups, fields = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    config = tiny_config(folder, sft__steps=0, algorithm__kl_in_loss=0.05, **fields)
    config.placement = tuple(groups)
    if "steps" in fields:
        train(config)
        sys.exit()
    setup = build(config, jax.devices())
    with Run(setup, folder) as run:
        run.begin(run.phase, initial_params(config, setup.model))
        for _ in range(2):
            with collect() as timings:
                metrics = {name: float(x) for name, x in run.step().items()}
            metrics |= run.evaluate()
            if hosts.first():
                print(json.dumps({"metrics": metrics, "moves": timings.moves}), flush=True)
