"""Hosts that make the same calls on a Sampler draw what one process draws: turns, parking, new
parameters, a pause, an abort; and whole batches by the host's loop."""

import json

import numpy as np
import pytest
from on_hosts import all_well, on_hosts

pytestmark = pytest.mark.hosts


def played(hosts: int, devices: int) -> list[dict]:
    done = all_well(on_hosts(hosts, devices, ["tests/helpers/hosts_turns.py"], timeout_s=400))
    return [json.loads(one.out.splitlines()[-1]) for one in done]


def test_two_hosts_draw_what_one_process_draws():
    [alone], both = played(1, 4), played(2, 2)
    assert alone["kept"]["tokens"] != alone["reread"]["tokens"]
    assert alone["reread"]["reread"] > alone["kept"]["reread"] > 0
    assert max(max(row, default=0) for row in alone["kept"]["versions"]) > 1
    assert not all(all(row) for row in alone["kept"]["chosen"])
    for of_host in both:
        for name, want in alone.items():
            found = of_host[name]
            np.testing.assert_allclose(found.pop("logprobs"), want["logprobs"], atol=1e-5)
            assert found == {k: v for k, v in want.items() if k != "logprobs"}, name
