"""Trains configs one after the other: python train_configs.py CONFIG.json ... ; run by each host of
a run. Prints a line of JSON for each."""

import json
import sys
from pathlib import Path

from rljax.config import from_dict
from rljax.training import train

for path in sys.argv[1:]:
    run = train(from_dict(json.loads(Path(path).read_text()), path))
    print(json.dumps({"folder": str(run.folder), "summary": run.summary}), flush=True)
