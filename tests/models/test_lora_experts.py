"""Adapters of routed experts: parity with peft, on a mesh, over a base of codes, in the sampler."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import golden, lanes
from test_lora import adapted, moved, tokens

from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.learn.update_rules import muon
from rljax.losses.policy import negative_log_likelihood
from rljax.mesh import make_mesh
from rljax.models.adapters import lora
from rljax.models.huggingface.peft import load_adapter, save_adapter
from rljax.models.trees import flattened
from rljax.roles import Actor, start_training
from rljax.sampler import Decoding, Sampling, generate

ROUTED = ("*.experts.*",)
BOTH = ("self_attn.*", "*.experts.*")


def of_experts(params) -> dict:
    return {path: x for path, x in flattened(params).items() if "adapters" in path}


def parity(got, want, atol=1e-3):
    np.testing.assert_allclose(got, want, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["mixtral"], ["deepseek_v3", "gpt_oss", "qwen3_moe"]))
def test_fresh_ones_change_nothing_and_merged_ones_are_plain_weights(family):
    model, params, plain, base = adapted(golden("hf", family), targets=ROUTED)
    batch, shapes = tokens(), {path[-2:]: x.shape for path, x in of_experts(params).items()}
    assert set(shapes) == {(name, leaf) for name in ("gate", "up", "down") for leaf in lora.LEAVES}
    count, rank = model.config.experts.count, model.config.lora.rank
    assert shapes["gate", "lora_a"][1:] == (count, model.config.embed, rank)
    before = jax.jit(plain.logits)(base, batch)
    np.testing.assert_array_equal(jax.jit(model.logits)(params, batch), before)
    params = moved(params)
    after = jax.jit(model.logits)(params, batch)
    assert np.abs(after - before).max() > 0.02
    whole = lora.merge(model, params)
    assert jax.tree.structure(whole) == jax.tree.structure(base)
    parity(jax.jit(plain.logits)(whole, batch), after, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    lanes(
        [("gpt_oss", ("*.experts.down_proj", "q_proj"))],
        [
            ("qwen3_moe", BOTH),
            ("mixtral", ROUTED),
            ("gpt_oss", BOTH),
            ("deepseek_v3", BOTH),
            ("mixtral", ("*.experts.gate_up_proj",)),
        ],
    ),
)
def test_peft_computes_the_same_with_what_we_saved(case, tmp_path):
    family, targets = case
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = golden("hf", family)
    model, params, _, _ = adapted(folder, targets=targets)
    params, batch = moved(params), tokens()
    save_adapter(tmp_path, model, params, base=str(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    assert any("experts" in name for name, _ in theirs.named_parameters() if "lora" in name)
    with torch.no_grad():
        want = theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    parity(jax.jit(model.logits)(params, batch), want)
    fresh = adapted(folder, targets=targets)[1]
    read = flattened(load_adapter(tmp_path, model, fresh))
    for path, x in flattened(params).items():
        np.testing.assert_array_equal(read[path], x)


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["mixtral"], ["gpt_oss"]))
def test_we_compute_the_same_with_what_peft_saved(family, tmp_path):
    """Of its own rank, which gate and up share."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, batch = golden("hf", family), tokens()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    wish = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    theirs = peft.get_peft_model(theirs, wish)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.add_(0.05 * torch.randn_like(weight))
        want = theirs(torch.tensor(np.asarray(batch.tokens))).logits.numpy()
    theirs.save_pretrained(tmp_path)
    model, params, _, _ = adapted(folder, rank=3, alpha=6.0, targets=("q_proj", *ROUTED))
    read = load_adapter(tmp_path, model, params)
    parity(jax.jit(model.logits)(read, batch), want)


def total(model):
    def loss(own, base, batch):
        weights = lora.nested(flattened(own) | flattened(base))
        return jnp.sum(jnp.sin(model.logprobs(weights, batch)[0]))

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    lanes(
        [("gpt_oss", (2, 1, 2, 1, 2))], [("mixtral", (1, 2, 2, 1, 2)), ("gpt_oss", (1, 4, 1, 1, 2))]
    ),
)
def test_a_mesh_changes_nothing(case):
    family, sizes = case
    model, params, _, _ = adapted(golden("hf", family), targets=BOTH)
    params, batch = moved(params), tokens(rows=8)
    loss, gradient = total(model)(*model.split(params), batch)
    names = ("data", "fsdp", "expert", "context", "tensor")
    spread = dataclasses.replace(model, mesh=make_mesh(**dict(zip(names, sizes, strict=True))))
    placed = jax.device_put(jax.device_get(params), spread.shardings())
    got, by_shard = total(spread)(*spread.split(placed), batch)
    parity(got, loss, 1e-3)
    assert max(np.abs(x).max() for x in of_experts(gradient).values()) > 1e-3
    for path, want in flattened(gradient).items():
        np.testing.assert_allclose(flattened(by_shard)[path], want, rtol=1e-3, atol=2e-4)
    sampling, prompts = Sampling(max_response_tokens=3), np.asarray(batch.tokens)[:, :4]
    how = (prompts, np.full(8, 4), jax.random.key(0), sampling)
    out = jax.device_get(generate(spread, placed, *how))
    keep = np.asarray(out.mask) > 0
    parity(out.sampler_logprobs[keep], jax.jit(model.logprobs)(params, out)[0][keep])


@pytest.mark.slow
@pytest.mark.parametrize("base", lanes(["int8"], ["nf4"]))
def test_a_base_of_codes_computes_what_its_merged_weights_compute(base):
    model, params, plain, weights = adapted(golden("hf", "mixtral"), targets=BOTH, base=base)
    held = {path[-2:]: x for path, x in flattened(params).items() if "quantised" in path}
    dtype = {"int8": jnp.int8, "nf4": jnp.uint4}[base]
    assert len(held) == 6 and all(
        held[name, "codes"].dtype == dtype for name in ("gate", "up", "down")
    )
    assert not any(path[-2:] == ("mlp", "gate") for path in flattened(params))
    params, batch = moved(params), tokens()
    whole = lora.merge(model, params)
    assert jax.tree.structure(whole) == jax.tree.structure(weights)
    got = jax.jit(model.logits)(params, batch)
    parity(got, jax.jit(plain.logits)(whole, batch), 5e-4)
    coded = lora.merge(model, adapted(golden("hf", "mixtral"), targets=BOTH, base=base)[1])
    far = np.abs(jax.jit(plain.logits)(coded, batch) - jax.jit(plain.logits)(weights, batch))
    assert 0 < far.mean() < 0.5
    sampling = Sampling(max_response_tokens=4)
    prompts = np.asarray(batch.tokens)[:, :4]
    for decoding in (Decoding(), Decoding(weight_dtype="int8")):
        out = generate(
            model, params, prompts, np.full(2, 4), jax.random.key(0), sampling, decoding=decoding
        )
        keep = np.asarray(out.mask) > 0
        parity(out.sampler_logprobs[keep], jax.jit(model.logprobs)(params, out)[0][keep], 5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", lanes(["adam"], ["muon"]))
def test_only_adapters_are_trained_and_they_learn(optimizer):
    model, params, _, _ = adapted(golden("hf", "mixtral"), targets=ROUTED, base="nf4")
    rule = optax.adam(1e-2) if optimizer == "adam" else muon(lambda step: 1e-2, 0.0)
    actor = Actor(start_training(model, params, rule), model, rule)
    assert {path[-3] for path in flattened(actor.state.params)} == {"adapters"}
    batch, steps = tokens(rows=4), Steps(4, 2, epochs=15)
    step = jax.jit(
        lambda actor, batch: actor.update(
            batch, negative_log_likelihood, steps=steps, reduction=token_mean
        )
    )
    after, metrics = step(actor, batch)
    before, learned = (jax.jit(model.logprobs)(a.state.weights, batch)[0] for a in (actor, after))
    assert float(learned.mean()) > float(before.mean()) + 0.2
    assert all(
        np.abs(x).max() > 0 for p, x in of_experts(after.state.params).items() if p[-1] == "lora_b"
    )


def test_experts_are_reached_by_name_alone():
    """A star is every linear map: adapters of all experts are many."""
    folder = golden("hf", "mixtral")
    model, params, _, _ = adapted(folder, targets=("*",))
    assert not of_experts(params)
    model, params, _, _ = adapted(folder, targets=("mlp.experts.down_proj",))
    assert {path[-2] for path in of_experts(params)} == {"down"}
    with pytest.raises(InputError, match=r"lora.targets.*mlp.experts.gate_up_proj"):
        adapted(folder, targets=("*.experts.gate",))[0].shapes()
