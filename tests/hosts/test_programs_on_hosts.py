"""Compiled programs on several hosts: a second start finds all of them, on every host, also where
the hosts share no folder but that of the run."""

import json

import pytest
from on_hosts import all_well, on_hosts

pytestmark = pytest.mark.hosts

# Milliseconds each: keys, numbers and slices that a host computes for itself.
OF_ONE_DEVICE = {f"jit({name})" for name in ("fold_in", "lr", "slice")}
# A run, and what this process compiled: the last line that is printed.
TRAIN = """
import json, sys
from tiny_run import tiny_config
from rljax import train
from rljax.tracking import compiles
options = json.loads(sys.argv[1])
config = tiny_config(
    options["run_dir"], steps=options["steps"], sft__steps=0, evaluate__prompts=8,
    evaluate__every_steps=0, checkpoint__every_steps=0, export=False,
    model="decoder(layers=1, embed=32, mlp=32, heads=1, kv_heads=1, head_dim=32)",
)
config.compilation_cache = options["cache"]
config.trackers = ("console",)
config.checkpoint.allow_changed = ("steps",)
train(config)
print(json.dumps([*compiles.since(0)[:2], compiles.missed(0)]))
"""


def start(folder, run, *, steps=3, cache="~/.cache/rljax/jax", **others):
    """One start of `run` on two hosts, each with a home of its own -> of each host (programs,
    hits, names of the rest), and all that was printed."""
    options = json.dumps({"run_dir": str(folder / run), "steps": steps, "cache": cache})
    environment = dict(others, TF_CPP_MIN_LOG_LEVEL="3")
    script = (
        "import os, sys; "
        f"os.environ['HOME'] = os.path.join({str(folder)!r}, 'home' + os.environ['RLJAX_HOST']); "
        "os.environ.pop('JAX_COMPILATION_CACHE_DIR', None); "
        f"sys.argv = ['', {options!r}]\n{TRAIN}"
    )
    ended = all_well(on_hosts(2, 2, script, timeout_s=300, **environment))
    counts = [json.loads(host.out.splitlines()[-1]) for host in ended]
    return counts, "\n".join(host.out + host.err for host in ended)


def test_a_second_start_finds_every_program_on_every_host(tmp_path):
    (first, other), said = start(tmp_path, "first")
    assert first[0] > 9 and first[1] == other[1] == 0
    assert "0 from the cache, on each of 2 hosts" in said
    assert list((tmp_path / "compilation_cache").rglob("*-cache"))  # beside the run
    for path in (tmp_path / "home0" / ".cache").rglob("*-cache"):  # a machine that is new
        path.unlink()
    (first, other), said = start(tmp_path, "second")
    assert first[2] == [] and first[0] == first[1] > 9
    # Only the first process writes: what runs on a device of another host alone is that host's own.
    assert set(other[2]) <= OF_ONE_DEVICE, other
    assert other[1] >= other[0] / 2 and "none of" not in said
