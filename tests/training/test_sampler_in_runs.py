"""The sampler's settings in a run: they change what a step costs, and not what it samples."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from sampler_cases import prompts, tiny, weights
from tiny_run import metrics_rows, policy_bytes, tiny_config

from rljax.batch import behaviour_logprobs
from rljax.correction.ratios import log_ratio
from rljax.errors import InputError
from rljax.evaluation.saved import load_policy
from rljax.policies import sample_all
from rljax.sampler import Sampling, generate
from rljax.sampler.layout import copied_bytes
from rljax.setup import build
from rljax.tracking.timing import collect
from rljax.training import train
from rljax.validation import validate


def run(folder, **fields):
    config = tiny_config(
        folder, steps=2, sft__steps=0, evaluate__every_steps=0, samples_every_steps=1, **fields
    )
    train(config)
    lines = (Path(folder) / "samples.jsonl").read_text().splitlines()
    rows = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], [json.loads(row) for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole") / "run", mesh__data=1, mesh__fsdp=8)


@pytest.mark.slow
@pytest.mark.parametrize("loop", lanes(["host"], ["device"]))
def test_a_run_with_few_slots_samples_what_a_run_with_one_per_row_does(whole, loop, tmp_path):
    samples, metrics = run(tmp_path / "run", sampler__slots=8, sampler__loop=loop)
    assert [x["response"] for x in samples] == [x["response"] for x in whole[0]]
    for ours, theirs in zip(metrics, whole[1], strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], atol=1e-4)


@pytest.mark.slow
def test_stop_strings_end_responses_in_a_run(tmp_path):
    samples, _ = run(tmp_path / "run", sampler__stop_strings=("1", "23"))
    texts = [x["response"] for x in samples]
    assert any(text.endswith("1") for text in texts)
    assert not any("1" in text[:-1] or "23" in text[:-1] for text in texts)


@pytest.mark.slow
def test_the_sampler_may_compute_in_another_dtype_than_the_trainer(tmp_path):
    """Its log-probs are its own, so that the mismatch shows."""
    fields = dict(mesh__data=1, mesh__fsdp=8)
    exact, rounded = (
        run(tmp_path / f"run{dtype}", sampler__dtype=dtype, **fields)[1]
        for dtype in ("", "bfloat16")
    )
    difference = "mismatch/abs_logprob_diff_mean"
    assert max(row[difference] for row in exact) < 1e-5
    assert all(1e-4 < row[difference] < 0.1 for row in rounded)
    assert all(1e-8 < row["mismatch/mismatch_k3_kl"] < 0.1 for row in rounded)
    # What is read from the folder samples as the run did.
    config = json.loads((tmp_path / "runbfloat16" / "config.json").read_text())
    assert config["sampler"]["dtype"] == "bfloat16"
    policy = load_policy(tmp_path / "runbfloat16")
    assert policy.actor().decoding.dtype == "bfloat16" and policy.model.config.dtype == "float32"


@pytest.mark.parametrize(
    "name, value",
    [
        ("min_p", 1.5),
        ("slots", -1),
        ("loop", "hosts"),
        ("kv_dtype", "int4"),
        ("weight_dtype", "int4"),
        ("layout", "data=8"),
        ("layout", "mesh(data=0)"),
        ("layout", "mesh(data=-1, fsdp=-1)"),
        ("layout", "os.getcwd()"),
        ("dtype", "float8"),
        ("head_in_float32", "yes"),
        ("stop_strings", ("",)),
    ],
)
def test_bad_settings_are_listed_before_anything_loads(name, value, tmp_path):
    with pytest.raises(InputError, match=f"sampler.{name}"):
        validate(tiny_config(tmp_path, **{f"sampler__{name}": value}))


@pytest.mark.slow
def test_the_correction_weighs_by_the_mass_that_was_kept():
    """Truncated samples: trainer over behaviour is the kept mass, to rounding; with nothing
    truncated it is 1."""
    model, (tokens, lengths) = tiny(), prompts(3)
    params = weights(model)
    logprobs, logits_of = jax.jit(model.logprobs), jax.jit(model.logits)
    for top_k in (0, 3):
        how = Sampling(top_k=top_k, max_response_tokens=6)
        batch = generate(model, params, tokens, lengths, jax.random.key(0), how, n=8)
        logp, _ = logprobs(params, batch)
        batch = batch.replace(old_logprobs=logp)
        ratio = np.asarray(jnp.exp(log_ratio(batch, by="test")))[np.asarray(batch.mask) > 0]
        logits = np.asarray(logits_of(params, batch))[:, :-1]
        p = np.asarray(jax.nn.softmax(logits, axis=-1))
        kept = np.sort(p, axis=-1)[..., -(top_k or p.shape[-1]) :].sum(axis=-1)
        want = kept[np.asarray(batch.mask)[:, 1:] > 0]
        np.testing.assert_allclose(ratio, want, rtol=1e-4)
        drawn = np.asarray(behaviour_logprobs(batch, by="test"))
        assert (drawn >= np.asarray(batch.sampler_logprobs) - 1e-6).all()


@pytest.mark.slow
def test_a_run_whose_decoding_has_a_layout_samples_the_same(whole, tmp_path):
    """One reshard in a step, its bytes logged; and none where decoding reads training's arrays."""
    samples, metrics = run(
        tmp_path / "run", mesh__data=1, mesh__fsdp=8, sampler__layout="mesh(data=4, fsdp=2)"
    )
    assert [x["response"] for x in samples] == [x["response"] for x in whole[0]]
    for ours, theirs in zip(metrics, whole[1], strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], atol=1e-4)
    model = load_policy(tmp_path / "run").model
    size = sum(x.size * 4 for x in jax.tree.leaves(model.abstract()))
    assert {row["sync/bytes"] for row in whole[1]} == {0.0}
    (copied,) = {row["sync/bytes"] for row in metrics}
    # Split over fsdp or not split at all: norms are whole on each of the eight.
    assert 4 * size <= copied < 4.2 * size
    assert all(0 < row["sync/seconds"] < row["time/generate_s"] for row in metrics)


@pytest.mark.slow
def test_a_run_with_a_layout_and_narrow_weights_resumes_bitwise(tmp_path):
    """One step and one more are two; what the sampler rounded shows in the mismatch. Evaluation,
    with several calls, brings the weights there once."""
    fields = dict(
        mesh__data=1,
        mesh__fsdp=8,
        sampler__layout="mesh(data=8)",
        sampler__weight_dtype="int8",
        sft__steps=0,
        steps=2,
        checkpoint__every_steps=1,
        evaluate__every_steps=0,
    )
    train(tiny_config(tmp_path / "whole", **fields))
    train(tiny_config(tmp_path / "parts", **{**fields, "steps": 1}))
    train(tiny_config(tmp_path / "parts", **fields))
    assert policy_bytes(tmp_path / "parts") == policy_bytes(tmp_path / "whole")
    rows = metrics_rows(tmp_path / "whole")
    assert rows[-1] == metrics_rows(tmp_path / "parts")[-1]
    assert all(1e-4 < row["mismatch/abs_logprob_diff_mean"] < 0.1 for row in rows)

    policy = load_policy(tmp_path / "whole")  # on any devices: the layout was that of the run's
    assert policy.actor().decoding.layout is None
    row = dict(prompt="12>", ground_truth="", data_source="", extra_info={}, index=0)
    records, _ = policy.encode([row] * 3)
    ready = policy.ready(records, max_response_tokens=2)
    with collect() as timings:
        samples = sample_all(ready, records, key=jax.random.key(0), prompts_per_call=1)
    like = policy.actor().decoding.of(policy.model).abstract()
    assert len(samples) == 3 and timings.synced_bytes == copied_bytes(like)


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_compiled(tmp_path):
    with pytest.raises(InputError, match="its sizes divide the 8 devices"):
        build(tiny_config(tmp_path, sampler__layout="mesh(data=3)"))
