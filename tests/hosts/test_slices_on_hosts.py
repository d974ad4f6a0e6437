"""Hosts as slices: each has whole weights, and only sums of gradients go from one to the other."""

import numpy as np
import pytest
from hosts_run import config_file
from on_hosts import all_well, on_hosts
from tiny_run import RATES, metrics_rows

HELPER = "tests/helpers/train_configs.py"
RUNS = {
    "one slice": dict(mesh__slices=1),
    "two slices": dict(mesh__slices=2),
    "split moments": dict(mesh__slices=2, mesh__shard_optimizer=True),
}


CASES = [(1, "one slice"), (1, "two slices"), (1, "split moments"), (2, "split moments")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """(hosts, name of a run) -> its metrics: four devices, data 2 x fsdp 2."""
    out = {}
    for hosts in (1, 2):
        top, files = tmp_path_factory.mktemp(f"on{hosts}"), []
        names = [name for count, name in CASES if count == hosts]
        for name in names:
            (top / name).mkdir()
            # One optimizer step of all rows in two microbatches: steps of fewer move rows between
            # devices beside other loops, which XLA's CPU backend may run in two orders and hang.
            fields = RUNS[name] | dict(
                batch__sequences_per_optimizer_step=16, batch__tokens_per_microbatch=120
            )
            files.append(config_file(top / name, mesh__data=2, mesh__fsdp=2, **fields))
        all_well(on_hosts(hosts, 4 // hosts, [HELPER, *map(str, files)], timeout_s=400))
        for name in names:
            out[hosts, name] = metrics_rows(top / name / "run")
    return out


@pytest.mark.hosts
@pytest.mark.parametrize(("hosts", "name"), CASES)
def test_slices_of_hosts_learn_what_one_slice_learns(rows, hosts, name):
    want, got = rows[1, "one slice"], rows[hosts, name]
    assert len(got) == len(want) > 4 and [row.keys() for row in got] == [r.keys() for r in want]
    for one, other in zip(got, want, strict=True):
        for key in set(one) - set(RATES):
            if isinstance(one[key], float) and not key.endswith(("_s", "_per_s", "_gb")):
                np.testing.assert_allclose(
                    one[key], other[key], rtol=1e-3, atol=1e-5, err_msg=f"{hosts} {name} {key}"
                )
