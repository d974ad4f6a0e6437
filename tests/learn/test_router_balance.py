"""The load of experts in every update: transformers' load-balance loss, whatever the microbatches,
and DeepSeek-V3's bias update, which no gradient reaches."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import lanes
from tiny_run import tiny_config

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.learn.packing import Packing
from rljax.losses.policy import negative_log_likelihood
from rljax.mesh import make_mesh
from rljax.models.config import LayerKind, LoraConfig, ModelConfig
from rljax.models.experts import ExpertsConfig
from rljax.models.huggingface import load_config, load_params, save_params
from rljax.models.model import Model
from rljax.roles import Actor, Critic, start_training
from rljax.roles.balance import moved_correction, router_aux_loss
from rljax.setup.setup import load_model
from rljax.validation import validate

COEF, LR, ROWS, COLUMNS, VOCAB = 0.5, 0.25, 8, 10, 40
LENGTHS = np.array([10, 7, 4, 9, 10, 5, 8, 6])
SIGMOID = ModelConfig(
    "deepseek_v3",
    vocab_size=VOCAB,
    embed=16,
    mlp=24,
    layers=3,
    heads=2,
    kv_heads=2,
    head_dim=8,
    kinds=(LayerKind(), *[LayerKind(experts=True)] * 2),
    init_std=0.3,
    remat="none",
    experts=ExpertsConfig(8, 2, 8, scores="sigmoid", correction_bias=True, groups=2, shared_mlp=8),
)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def nothing(policy, batch):
    """A policy loss without a gradient, so that an update is that of the load alone."""
    return 0.0 * policy.logprobs, {}


def rows(seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCAB, (ROWS, COLUMNS))
    column = np.arange(COLUMNS)[None]
    inside = column < LENGTHS[:, None]
    return Batch(
        tokens=jnp.asarray(ids, jnp.int32),
        segment_ids=jnp.asarray(inside, jnp.int32),
        positions=jnp.asarray(np.where(inside, column, 0), jnp.int32),
        mask=jnp.asarray(inside & (column > 1), jnp.float32),
        group=jnp.arange(ROWS, dtype=jnp.int32),
    )


def actor_of(config: ModelConfig, params=None, optimizer=None, role=Actor, mesh=None):
    model = Model(config, mesh or one_device(), "lm" if role is Actor else "scalar")
    params = params or model.init(jax.random.key(1))
    optimizer = optimizer or optax.sgd(LR)
    return role(start_training(model, params, optimizer), model, optimizer)


def updated(actor, loss=nothing, batch=None, epochs=1, **steps):
    """(the actor after an update, its metrics)."""
    batch = rows() if batch is None else batch
    steps = Steps(**{"rows": ROWS, "microbatch_rows": ROWS, "epochs": epochs, **steps})
    step = jax.jit(
        lambda actor, batch: actor.update(batch, loss, steps=steps, reduction=token_mean)
    )
    return step(actor, batch)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """(our config, weights; transformers' aux_loss of `rows`, its gradient as a folder of weights
    says it)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=12,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=6,
            num_experts_per_tok=3,
            max_position_embeddings=64,
            initializer_range=0.5,
            output_router_logits=True,
        )
    ).eval()
    folder = tmp_path_factory.mktemp("mixtral")
    theirs.save_pretrained(folder / "weights")
    batch = rows()
    out = theirs(
        input_ids=torch.tensor(np.asarray(batch.tokens), dtype=torch.long),
        attention_mask=torch.tensor(np.asarray(batch.segment_ids), dtype=torch.long),
    )
    out.aux_loss.backward()
    with torch.no_grad():
        for weight in theirs.parameters():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.copy_(grad)
    theirs.save_pretrained(folder / "gradient")
    config = load_config(folder / "weights", remat="none")
    model = Model(config, one_device())

    def load(name):
        return jax.device_get(load_params(folder / name, model))

    return config, load("weights"), float(out.aux_loss.detach()), load("gradient")


@pytest.mark.parametrize("how", lanes(["packed"], ["whole", "microbatches"]))
def test_value_and_gradient_are_transformers(mixtral, how):
    """Over the tokens that are not padding, of a whole optimizer step however it is cut."""
    config, params, value, gradient = mixtral
    config = dataclasses.replace(config, router_aux_loss_coef=COEF)
    steps = {"whole": {}, "microbatches": {"microbatch_rows": 2}}.get(how)
    if how == "packed":
        steps = {"microbatch_rows": 4, "packing": Packing(16, 2, 1, 4, False, one_device())}
    before = actor_of(config, jax.device_put(params))
    after, metrics = updated(before, **steps)
    np.testing.assert_allclose(metrics["router_aux_loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], COEF * value, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: np.asarray(a - b) / LR, params, after.state.params)
    wanted = jax.tree.leaves(gradient)
    assert max(np.abs(x).max() for x in wanted) > 1e-3
    for got, want in zip(jax.tree.leaves(moved), wanted, strict=True):
        np.testing.assert_allclose(got, COEF * want, rtol=1e-3, atol=2e-6)


@pytest.mark.slow
def test_the_bias_counts_and_the_loss_does_not_where_both_are_off():
    """Coefficient 0: neither metric nor gradient, and a smaller program."""
    length = {}
    for coef in (0.0, COEF):
        actor = actor_of(dataclasses.replace(SIGMOID, router_aux_loss_coef=coef))
        after, metrics = updated(actor)
        assert ("router_aux_loss" in metrics) == (coef > 0)
        change = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max()), actor.state.params, after.state.params
        )
        assert (max(jax.tree.leaves(change)) > 0) == (coef > 0)
        steps = Steps(ROWS, ROWS)
        lowered = jax.jit(
            lambda actor, batch, steps=steps: actor.update(
                batch, nothing, steps=steps, reduction=token_mean
            )
        ).lower(actor, rows())
        length[coef] = len(lowered.as_text())
    assert length[0.0] < length[COEF]
    off = dataclasses.replace(SIGMOID, experts=None, kinds=(), router_aux_loss_coef=COEF)
    assert off.router_aux_loss_coef == 0  # nothing reads it: the model has no experts


@pytest.mark.slow
def test_it_evens_out_the_load_beside_the_task():
    """Learning one batch by heart with and without the loss."""
    even = {}
    for coef in (0.0, 1.0):
        config = dataclasses.replace(
            SIGMOID, router_aux_loss_coef=coef, experts=ExpertsConfig(8, 2, 8)
        )
        actor = actor_of(config, optimizer=optax.adam(3e-3))
        after, _ = updated(actor, negative_log_likelihood, epochs=60)
        even[coef] = float(router_aux_loss(load_of(after, rows())))
        assert float(after.logprobs(rows())[:, 2:].mean()) > float(
            actor.logprobs(rows())[:, 2:].mean()
        )
    assert even[1.0] < even[0.0] - 0.02 and abs(even[1.0] - 2) < 0.1


@pytest.mark.slow
def test_critics_have_it_too():
    one_layer = dict(layers=1, kinds=(LayerKind(experts=True),))
    config = dataclasses.replace(SIGMOID, router_aux_loss_coef=COEF, **one_layer)
    critic = actor_of(config, role=Critic)

    def square(values, batch):
        return (values - 1.0) ** 2, {}

    _, metrics = updated(critic, square, microbatch_rows=4)
    assert float(metrics["critic/router_aux_loss"]) > 0
    assert float(metrics["critic/vf_loss"]) == pytest.approx(
        1.0 + COEF * float(metrics["critic/router_aux_loss"]), rel=1e-4
    )


@jax.jit
def load_of(actor, batch) -> dict:
    return actor.model.hidden_and_load(actor.state.weights, batch)[1]


# -- the bias update


def biases(params) -> np.ndarray:
    """[layers with experts, X]."""
    flat = [params["layers"][block]["mlp"] for block in sorted(params["layers"], key=int)]
    return np.concatenate([np.asarray(mlp["correction"]) for mlp in flat if "correction" in mlp])


def chosen(actor, batch) -> np.ndarray:
    """How often each expert of each layer was chosen: [layers with experts, X]."""
    return np.asarray(load_of(actor, batch)["tokens"])


def test_the_rule_by_hand():
    tokens = jnp.asarray([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    bias = jnp.asarray([[0.5, 0.0, -1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    want = [[0.4, 0.1, -1.0, 0.0], [0.0, 1.0, 2.0, 3.0]]
    np.testing.assert_allclose(moved_correction(bias, tokens, 0.1), want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("packed", lanes([False], [True]))
def test_biases_move_by_the_load_of_every_optimizer_step(packed):
    """Two steps of a batch; the optimizer, of momentum and decay, moves no bias."""
    speed, optimizer = 0.03, optax.adamw(1e-2, weight_decay=0.1)
    config = dataclasses.replace(SIGMOID, router_bias_update_speed=speed)
    actor, batch = actor_of(config, optimizer=optimizer), rows()
    packing = Packing(16, 2, 1, 4, False, one_device()) if packed else None
    half = ROWS // 2
    after, metrics = updated(
        actor, negative_log_likelihood, batch, rows=half, microbatch_rows=2, packing=packing
    )
    by_hand = actor
    for part in (jax.tree.map(lambda x, i=i: x[i * half : (i + 1) * half], batch) for i in (0, 1)):
        load, before = chosen(by_hand, part), biases(by_hand.state.params)
        by_hand, _ = updated(
            by_hand, negative_log_likelihood, part, rows=half, microbatch_rows=half
        )
        step = speed * np.sign(load.mean(axis=1, keepdims=True) - load)
        np.testing.assert_allclose(biases(by_hand.state.params), before + step, atol=1e-6)
    np.testing.assert_allclose(biases(after.state.params), biases(by_hand.state.params), atol=1e-6)
    assert len(np.unique(biases(after.state.params))) > 2
    assert float(metrics["expert_load_max"]) > 1
    still, _ = updated(actor_of(SIGMOID, optimizer=optax.adamw(1e-2)), negative_log_likelihood)
    assert not biases(still.state.params).any()


@pytest.mark.slow
def test_biases_even_out_the_load():
    config = dataclasses.replace(SIGMOID, router_bias_update_speed=0.02)
    actor = actor_of(config, optimizer=optax.sgd(0.0))
    after, _ = updated(actor, epochs=60)

    def spread(actor):
        return chosen(actor, rows()).std(axis=1).mean()

    assert spread(after) < 0.6 * spread(actor)


@pytest.mark.slow
def test_a_step_that_is_not_taken_moves_no_bias():
    config = dataclasses.replace(SIGMOID, router_bias_update_speed=0.1)
    actor, batch = actor_of(config), rows()
    for bad in (
        batch.replace(mask=jnp.zeros_like(batch.mask)),
        batch.replace(weights=jnp.full_like(batch.mask, jnp.nan)),
    ):
        after, _ = updated(actor, negative_log_likelihood, bad)
        assert not biases(after.state.params).any()


@pytest.mark.slow
def test_biases_are_exported_and_read_again(tmp_path):
    config = dataclasses.replace(
        SIGMOID, router_bias_update_speed=0.1, latent=None, family="glm4_moe"
    )
    after, _ = updated(actor_of(config), negative_log_likelihood)
    save_params(tmp_path, after.model, after.state.params, eos_ids=(1,))
    names = json.loads((tmp_path / "config.json").read_text())
    assert names["model_type"] == "glm4_moe"
    model = Model(load_config(tmp_path), one_device())
    got = biases(load_params(tmp_path, model))
    np.testing.assert_array_equal(got, biases(after.state.params))
    assert np.abs(got).max() == pytest.approx(0.1)


# -- refusals


def test_what_cannot_be_balanced_is_refused(tmp_path):
    for name in ("router_aux_loss_coef", "router_bias_update_speed"):
        field = {f"model_settings__{name}": 0.01}
        with pytest.raises(InputError, match=f"model_settings.{name}.*experts|expert's"):
            config = tiny_config(tmp_path, **field)
            load_model(config, type("Words", (), {"vocab_size": 12}))
        field = {f"model_settings__{name}": -0.01}
        with pytest.raises(InputError, match=f"model_settings.{name}"):
            validate(tiny_config(tmp_path, **field))
    with pytest.raises(InputError, match="router_bias_update_speed.*lora"):
        validate(tiny_config(tmp_path, model_settings__router_bias_update_speed=0.1, lora__rank=4))
    with pytest.raises(InputError, match="router_bias_update_speed"):
        dataclasses.replace(SIGMOID, router_bias_update_speed=0.1, lora=LoraConfig(2))
