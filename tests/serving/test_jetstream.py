"""JetStream's surface: called as JetStream calls it, it gives what the engine gives.

The lane `-m jetstream` runs JetStream's own Driver and orchestrator in an environment of its own,
which it installs with pip (or takes from RLJAX_JETSTREAM_PYTHON, the python of one)."""

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import types
import uuid
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import REPO

from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Engine, Sampler, Sampling
from rljax.serving.jetstream import BUCKETS, JetStreamEngine, JetStreamHeadEngine, ResultTokens

STEPS, SLOTS, ROOM = 3, 2, 40
PROMPT = [3, 4, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = decoder(13, layers=1, embed=16, mlp=32, heads=4, kv_heads=2, head_dim=8, init_std=0.5)
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    return Engine(model, SLOTS, ROOM, steps=STEPS)


@pytest.fixture(scope="module")
def params(engine):
    return engine.model.init(jax.random.key(3))


@pytest.fixture(scope="module")
def greedy(engine, params):
    """tokens and log-probs that the engine's own sampler draws greedily after a prompt."""

    def ask(prompt, count):
        sampler = Sampler(engine, chunk_tokens=16)
        asked = Sampling(temperature=0.0, max_response_tokens=count)
        sample = sampler.submit(prompt, asked)[0]
        list(sampler.run(params))
        return sample.tokens.tolist(), sample.logprobs

    return ask


def padded(tokens, size=16) -> np.ndarray:
    return np.pad(np.asarray(tokens, np.int32), (0, size - len(tokens)))


def delete(prefix) -> None:
    """What the Driver does with a prefix after its insert."""
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def decoded(adapter, params, state, slot, dispatches):
    """A slot's valid tokens, their log-probs and the lengths that JetStream is told."""
    tokens, logprobs, lengths = [], [], []
    for _ in range(dispatches):
        state, results = adapter.generate(params, state)
        results.copy_to_host_async()
        data = results.convert_to_numpy().get_result_at_slot(slot)
        assert data.tokens.shape == data.valid.shape == data.log_prob.shape == (1, STEPS)
        valid = data.valid[0] > 0
        tokens += data.tokens[0][valid].tolist()
        logprobs += data.log_prob[0][valid].tolist()
        lengths += data.lengths.tolist()
    return tokens, logprobs, lengths, state


@pytest.mark.slow
def test_release_0_2_2_prefill_insert_generate(engine, params, greedy):
    adapter = JetStreamEngine(engine, lambda: params)
    assert adapter.load_params() is params
    state = adapter.init_decode_state()
    prefix = adapter.prefill(params=params, padded_tokens=padded(PROMPT), true_length=6)
    state = adapter.insert(prefix, state, slot=1)
    delete(prefix)
    other = adapter.prefill(params=params, padded_tokens=padded([9, 2]), true_length=2)
    tokens, logprobs, lengths, state = decoded(adapter, params, state, 1, 2)
    # Another prompt comes in mid-decode, as in the Driver.
    state = adapter.insert(other, state, slot=0)
    delete(other)
    more = decoded(adapter, params, state, 1, 2)
    want, want_logprobs = greedy(PROMPT, 12)
    assert tokens + more[0] == want
    np.testing.assert_allclose(logprobs + more[1], want_logprobs, atol=1e-5)
    # The length at the first token of each dispatch: JetStream keeps it while length <= max_tokens.
    assert lengths + more[2] == [1, 4, 7, 10]
    second = decoded(adapter, params, more[3], 0, 1)
    assert second[0] == greedy([9, 2], 9)[0][6:] and second[2] == [7]


@pytest.mark.slow
def test_the_array_is_tokens_valid_length(engine, params):
    adapter = JetStreamEngine(engine, lambda: params)
    prefix = adapter.prefill(params=params, padded_tokens=padded(PROMPT), true_length=6)
    state = adapter.insert(prefix, adapter.init_decode_state(), 0)
    _, results = adapter.generate(params, state)
    assert [f.name for f in dataclasses.fields(ResultTokens)] == [
        "data",
        "tokens_idx",
        "valid_idx",
        "length_idx",
        "samples_per_slot",
        "log_prob",
    ]
    assert results.data.shape == (SLOTS, 2 * STEPS + 1) and results.data.dtype == np.int32
    assert results.tokens_idx == (0, 3) and results.valid_idx == (3, 6)
    assert results.length_idx == (6, 7) and results.samples_per_slot == 1
    np.testing.assert_array_equal(results.data[:, 3:6], [[1, 1, 1], [0, 0, 0]])
    whole = results.get_result_at_slots((1, 0))
    np.testing.assert_array_equal(whole.tokens[1], results.get_result_at_slot(0).tokens[0])
    assert whole.lengths.shape == (2,) and int(whole.lengths[1]) == 1


@pytest.mark.slow
def test_a_full_slot_and_a_stop_id_end_with_valid_zero(engine, params, greedy):
    want, _ = greedy(PROMPT, ROOM - 6)
    adapter = JetStreamEngine(engine, lambda: params)
    prefix = adapter.prefill(params=params, padded_tokens=padded(PROMPT), true_length=6)
    state = adapter.insert(prefix, adapter.init_decode_state(), 0)
    tokens, _, lengths, _ = decoded(adapter, params, state, 0, 13)
    assert tokens == want and len(tokens) == 34 and lengths[-1] == lengths[-2] + 1
    stop = JetStreamEngine(
        engine, lambda: params, sampling=Sampling(temperature=0.0, stop_ids=(want[4],))
    )
    prefix = stop.prefill(params=params, padded_tokens=padded(PROMPT), true_length=6)
    state = stop.insert(prefix, stop.init_decode_state(), 0)
    assert decoded(stop, params, state, 0, 4)[0] == want[: want.index(want[4]) + 1]


def test_an_existing_prefix_goes_on_and_stays_as_it_was(engine, params, greedy):
    adapter = JetStreamEngine(engine, lambda: params)
    begun = adapter.prefill(params=params, padded_tokens=padded(PROMPT[:4]), true_length=4)
    for _ in range(2):
        whole = adapter.prefill(
            params=params, existing_prefix=begun, padded_tokens=padded(PROMPT[4:]), true_length=2
        )
        state = adapter.insert(whole, adapter.init_decode_state(), 0)
        assert decoded(adapter, params, state, 0, 2)[0] == greedy(PROMPT, 6)[0]


def test_one_prefix_into_many_slots_with_draws_of_their_own(engine, params):
    adapter = JetStreamEngine(engine, lambda: params, sampling=Sampling(temperature=4.0), seed=5)
    prefix = adapter.prefill(params=params, padded_tokens=padded(PROMPT), true_length=6)
    state = adapter.bulk_insert(prefix, adapter.init_decode_state(), [1, 0])
    first, _, _, _ = decoded(adapter, params, state, 0, 1)
    again = JetStreamEngine(engine, lambda: params, sampling=Sampling(temperature=4.0), seed=5)
    prefix = again.prefill(params=params, padded_tokens=padded(PROMPT), true_length=6)
    state = again.bulk_insert(prefix, again.init_decode_state(), [1, 0])
    _, results = again.generate(params, state)
    tokens = np.asarray(results.data)[:, :STEPS].tolist()
    assert tokens[0] == first and tokens[0] != tokens[1]
    with pytest.raises(InputError, match="one per row"):
        wide = {"cache": jax.tree.map(lambda x: np.repeat(x, 3, 0), prefix["cache"])}
        again.bulk_insert(wide, again.init_decode_state(), [0, 1])


def test_a_prompt_that_jetstream_cut_is_read_as_far_as_it_is_there(engine, params, greedy):
    adapter = JetStreamEngine(engine, lambda: params)
    tokens = np.array([3, 4, 5, 6] * 4, np.int32)
    prefix = adapter.prefill(params=params, padded_tokens=tokens, true_length=99)
    state = adapter.insert(prefix, adapter.init_decode_state(), 0)
    assert decoded(adapter, params, state, 0, 1)[0] == greedy(tokens, 3)[0]
    with pytest.raises(InputError, match="at least one token"):
        adapter.prefill(params=params, padded_tokens=tokens, true_length=0)
    long = adapter.prefill(
        params=params, existing_prefix=prefix, padded_tokens=tokens, true_length=16
    )
    with pytest.raises(InputError, match="got 48; below 40"):
        adapter.prefill(params=params, existing_prefix=long, padded_tokens=tokens, true_length=16)


# -- the last source, 0.3


def test_head_draws_the_first_token_in_prefill(engine, params, greedy):
    adapter = JetStreamHeadEngine(engine, lambda: params)
    prefix, first = adapter.prefill(
        params=params, padded_tokens=padded(PROMPT), true_length=6, request_id=uuid.UUID(int=7)
    )
    want, logprobs = greedy(PROMPT, 7)
    data = first.convert_to_numpy().get_result_at_slot(0)
    assert data.tokens.tolist() == [[want[0]]] and data.valid.tolist() == [[1]]
    assert data.lengths.tolist() == [1]
    np.testing.assert_allclose(data.log_prob, [[logprobs[0]]], atol=1e-5)
    state = adapter.init_decode_state()
    state = adapter.insert(prefix, state, slot=1, request_id=uuid.UUID(int=7))
    delete(prefix)
    tokens, _, lengths, _ = decoded(adapter, params, state, 1, 2)
    assert tokens == want[1:] and lengths == [2, 5]
    assert adapter.free_resource(1) is None


def test_head_reads_in_chunks_as_its_orchestrator_does(engine, params, greedy):
    adapter = JetStreamHeadEngine(engine, lambda: params)
    prefix = existing = None
    for start in range(0, 6, 2):
        chunk = PROMPT[start : start + 2]
        prefix, first = adapter.prefill(
            params=params, existing_prefix=existing, padded_tokens=padded(chunk), true_length=2
        )
        existing = types.SimpleNamespace(
            cache=prefix["cache"], common_prefix_tokens=np.array(PROMPT[: start + 2])
        )
    want, _ = greedy(PROMPT, 4)
    assert np.asarray(first.data)[0, 0] == want[0]
    state = adapter.insert(prefix, adapter.init_decode_state(), 0)
    assert decoded(adapter, params, state, 0, 1)[0] == want[1:]
    with pytest.raises(InputError, match="common_prefix_tokens: got 7"):
        existing.common_prefix_tokens = np.arange(7)
        adapter.prefill(
            params=params, existing_prefix=existing, padded_tokens=padded([3]), true_length=1
        )


def test_head_draws_many_first_tokens_of_one_prompt(engine, params):
    asked = dict(sampling=Sampling(temperature=4.0), seed=3)
    adapter = JetStreamHeadEngine(engine, lambda: params, **asked)
    call = dict(params=params, padded_tokens=padded(PROMPT), true_length=6)
    rng = jax.random.PRNGKey(4)
    prefix, first = adapter.prefill_multisampling(**call, rng=rng, num_samples=2)
    assert np.asarray(first.data)[:, 1:].tolist() == [[1, 1], [1, 1]]
    state = adapter.bulk_insert(prefix, adapter.init_decode_state(), [0, 1])
    _, results = adapter.generate(params, state)
    rows = np.concatenate([first.data[:, :1], results.data[:, :STEPS]], axis=1).tolist()
    # A sample is a function of its key alone: the same by the way of 0.2.2.
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(jax.random.key(4), i)))(
        np.arange(2)
    )
    plain = JetStreamEngine(engine, lambda: params, **asked)
    for row in range(2):
        prefix = plain.prefill(**call) | {"keys": keys[row : row + 1]}
        state = plain.insert(prefix, plain.init_decode_state(), row)
        assert decoded(plain, params, state, row, 2)[0][:4] == rows[row]
    assert rows[0] != rows[1]
    with pytest.raises(InputError, match="sampler function"):
        adapter.prefill(**call, sampler=lambda logits: logits)


def test_limits_that_jetstream_must_know(engine, params):
    adapter = JetStreamEngine(engine, lambda: params)
    assert adapter.max_concurrent_decodes == SLOTS and adapter.max_prefill_length == 32
    assert adapter.max_prefill_length in BUCKETS and adapter.samples_per_slot == 1
    assert adapter.mesh is engine.model.mesh and adapter.colocated_cpus is None
    with pytest.raises(InputError, match="more than 16"):
        JetStreamEngine(dataclasses.replace(engine, tokens=16), lambda: params)
    with pytest.raises(InputError, match="says nothing of pages"):
        JetStreamEngine(dataclasses.replace(engine, page_tokens=8), lambda: params)
    with pytest.raises(InputError, match="draft_tokens"):
        JetStreamEngine(dataclasses.replace(engine, draft_tokens=3), lambda: params)
    with pytest.raises(InputError, match="without a tokenizer"):
        adapter.build_tokenizer(None)
    with pytest.raises(InputError, match="no stop strings"):
        JetStreamEngine(engine, lambda: params, sampling=Sampling(stop_strings=("x",)))


# -- JetStream itself

PACKAGES = ("grpcio", "tiktoken", "shortuuid", "prometheus-client", "protobuf")
SEQIO = "class Vocabulary:\n    pass\n\n\nclass SentencePieceVocabulary(Vocabulary):\n    pass\n"


@pytest.fixture(scope="session")
def jetstream_python(tmp_path_factory) -> str:
    """A python with google-jetstream 0.2.2 and without TensorFlow, over the packages of this
    one."""
    if given := os.environ.get("RLJAX_JETSTREAM_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("jetstream")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    for what in (["--no-deps", "google-jetstream==0.2.2"], PACKAGES):
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *what], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"pip cannot install {' '.join(what)}: {done.stderr[-300:]}")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    site = Path(own.stdout.strip())
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "seqio").mkdir()
    (site / "seqio" / "__init__.py").write_text("")
    (site / "seqio" / "vocabularies.py").write_text(SEQIO)
    return python


@pytest.mark.jetstream
@pytest.mark.parametrize("interleaved", [False, True])
def test_jetstreams_own_driver_gives_the_tokens_that_we_give(jetstream_python, interleaved):
    """Six concurrent requests over four slots, greedy, through its orchestrator."""
    command = [jetstream_python, f"{REPO}/tests/helpers/jetstream_driver.py", str(int(interleaved))]
    env = {**os.environ, "PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    # Among its log lines, which go to stdout too.
    told = next(json.loads(x) for x in done.stdout.splitlines() if x.startswith("{"))
    assert told["jetstream"] == "0.2.2" and told["tensorflow"] is False
    assert len(told["ours"]) == 6 and told["theirs"] == told["ours"]
    assert len({tuple(tokens) for tokens in told["ours"]}) > 1
    assert told["text"]
