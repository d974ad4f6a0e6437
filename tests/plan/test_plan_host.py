"""Checks the plan of this host's own processors: seconds of products and memory, bytes of the
process."""

import json
import resource
import time

import jax
import jax.numpy as jnp
import pytest
from test_plan import ONE_LAYER, tiny

from rljax.config import with_overrides
from rljax.plan.compiled import make_plan
from rljax.plan.flops import flops_of
from rljax.plan.host import expected_seconds, process_bytes, product_seconds
from rljax.plan.table import plan_json, plan_text


def layers(x, w):
    """Eight products in a loop, one of another shape behind it, and what is no product."""
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=8)
    return jnp.einsum("nd,md->nm", x, x)


def test_every_product_is_counted_as_often_as_it_is_made():
    x, w = jnp.ones((256, 512)), jnp.ones((512, 512))
    done = flops_of(layers, x, w)
    assert sorted(done.products.values()) == [1, 8]
    assert sum(one.flops * count for one, count in done.products.items()) == done.flops
    [often] = [one for one, count in done.products.items() if count == 8]
    assert (often.left, often.right, often.dtype) == ((256, 512), (512, 512), "float32")
    assert often.bytes == 4 * (2 * 256 * 512 + 512 * 512)
    assert (done * 2.0 + done).products[often] == 24


@pytest.mark.slow
def test_the_expected_seconds_are_those_of_the_program_run_here():
    """Of the processor, which other work changes least; bounds are wide all the same."""
    x, w = jnp.ones((512, 1024)), jnp.full((1024, 1024), 1e-3)
    done = flops_of(layers, x, w)
    run = jax.jit(layers)
    jax.block_until_ready(run(x, w))
    times = []
    for _ in range(5):
        begun = time.process_time()
        jax.block_until_ready(run(x, w))
        times.append(time.process_time() - begun)
    parts = expected_seconds(done.products, 8 * 2 * x.nbytes)
    expected = sum(one.cpu for one in parts.values())
    assert min(times) / 4 < expected < 4 * min(times)


def test_seconds_grow_with_counts_and_bytes():
    x, w = jnp.ones((128, 256)), jnp.ones((256, 256))
    done = flops_of(layers, x, w)
    once, often = (expected_seconds((done * n).products, 0.0) for n in (1.0, 10.0))
    assert often["products"] == pytest.approx(once["products"].times(10))
    assert once["memory"].wall == 0 and all(product_seconds(p).wall > 0 for p in done.products)
    moved = [expected_seconds(done.products, size)["memory"].wall for size in (1e9, 2e9)]
    assert 0 < moved[0] < moved[1]


def test_rare_products_are_counted_at_the_rate_of_the_others():
    large, small = jnp.ones((512, 512)), jnp.ones((4, 4))
    one, two = flops_of(jnp.dot, large, large), flops_of(jnp.dot, small, small)
    seconds = expected_seconds((one + two).products, 0.0)["products"].wall
    alone = expected_seconds(one.products, 0.0)["products"].wall
    assert alone < seconds < 1.001 * alone


def test_the_bytes_of_the_process_are_what_the_system_says():
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert most / 20 < process_bytes() <= 1.01 * most
    before, held = process_bytes(), jnp.ones(2**25).block_until_ready()
    assert process_bytes() > before + held.nbytes / 2


@pytest.mark.slow
def test_a_plan_of_this_machine_says_what_the_process_takes():
    one = {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.data": 1, "algorithm.kl_in_loss": 0.0}
    rows = {"batch.prompts_per_step": 4, "batch.sequences_per_optimizer_step": 8}
    config = with_overrides(tiny(model=ONE_LAYER), one | rows, "test")
    plan = make_plan(config, jax.devices()[:1], None, "1 x cpu", only=("learn",), measure=True)
    out, text = json.loads(json.dumps(plan_json(plan))), plan_text(plan)
    assert out["process_peak_bytes"] == out["process_bytes"] + out["total"]
    assert out["process_bytes"] > 2**26 and "the process at its peak" in text
    steps = [one["expected_s"] for one in out["programs"] if one["name"] != "sft"]
    assert out["expected_s"] == pytest.approx(sum(steps)) and min(steps) > 0
    assert "a step of responses at full length: about" in text
