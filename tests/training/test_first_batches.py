"""The first batch of every preset: a change that does not mean to move random keys, prompts or
scores leaves each of them as it was recorded.

`python tests/training/test_first_batches.py` records first_batches.json anew, where one is meant to
change; the commit says why.
"""

import dataclasses
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from preset_runs import NEED_TEACHER, PRESETS, Shared, preset_config, set_teachers

# What the model computes, which differs in the last bits between processors.
COMPUTED = (
    *("sampler_logprobs", "sampler_log_kept", "old_logprobs", "ref_logprobs", "values"),
    "teacher_logprobs",
)
RECORDED = Path(__file__).with_name("first_batches.json")


def digest(shared: Shared, name: str) -> str:
    """SHA-256 of the first batch's fields, sampled from the weights after the supervised steps."""
    config = preset_config(name)
    if name in NEED_TEACHER:
        set_teachers(config, shared.teacher())
    params = jax.device_put(shared.start(0, name))
    with shared.run(config) as run:
        run.begin(run.setup.main, jax.device_put(params, run.setup.model.shardings()))
        batch, _ = run.source.next(0, run.roles)
    found = hashlib.sha256()
    for field in dataclasses.fields(batch):
        values = getattr(batch, field.name)
        if values is None or field.name in COMPUTED:
            continue
        found.update(field.name.encode())
        found.update(np.round(np.asarray(values, np.float64), 4).tobytes())
    return found.hexdigest()[:16]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    runs = Shared(tmp_path_factory.mktemp("presets"))
    yield runs
    runs.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_first_batch_is_the_recorded_one(shared, name):
    assert digest(shared, name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        runs = Shared(Path(folder))
        names = sys.argv[1:] or PRESETS
        found = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        for one in names:
            found[one] = digest(runs, one)
            print(one, found[one], flush=True)
        runs.close()
    RECORDED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
