"""Hosts that decode in another layout than training's draw what one process draws: the weights
cross from host to host by the reshard program, and the batch comes back the same way."""

import json

import numpy as np
import pytest
from on_hosts import all_well, on_hosts

pytestmark = pytest.mark.hosts


def sampled(hosts: int, devices: int) -> list[dict]:
    done = all_well(on_hosts(hosts, devices, ["tests/helpers/hosts_layouts.py"], timeout_s=400))
    return [json.loads(one.out.splitlines()[-1]) for one in done]


def test_two_hosts_sample_in_every_layout_what_one_process_samples():
    [alone], both = sampled(1, 4), sampled(2, 2)
    own = alone["training's own"]
    assert own["bytes"] == 0 and len(alone) == 5
    for found in (alone, *both):
        for name, one in found.items():
            assert one["exact"] == own["exact"], name
            np.testing.assert_allclose(one["logprobs"], own["logprobs"], atol=1e-5)
            assert one["bytes"] == alone[name]["bytes"]
            assert (one["bytes"] > 0) == (name != "training's own")
