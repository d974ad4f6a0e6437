"""Compiles the programs of a shipped config, with few of its layers, for a TPU that need not be
there: planned_for_tpu.py CONFIG TOPOLOGY LAYERS PROGRAM ... What the compiler warns of goes to
stderr, the names of the programs to stdout as JSON."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

# libtpu says its warnings to a file of its own unless it is told otherwise before it is loaded.
os.environ |= {"TPU_STDERR_LOG_LEVEL": "0", "TPU_MIN_LOG_LEVEL": "0", "JAX_PLATFORMS": "cpu"}


def main(path: str, topology: str, layers: str, *programs: str) -> None:
    import jax

    from rljax.config import with_overrides
    from rljax.config.flags import load_config_file
    from rljax.plan.chips import topology_devices
    from rljax.plan.compiled import make_plan

    jax.config.update("jax_enable_compilation_cache", False)
    config = load_config_file(path)
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(config.model, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": int(layers)}))
    config = with_overrides(config, {"model": str(folder)}, "test")
    devices, chip = topology_devices(topology)
    plan = make_plan(config, devices, chip, topology, only=programs)
    shutil.rmtree(folder.parent)
    print(json.dumps([r.name for r in plan.reports]))


if __name__ == "__main__":
    main(*sys.argv[1:])
