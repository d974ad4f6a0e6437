"""Experts against Hugging Face's own blocks and a loop over tokens; the mesh changes nothing."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from flax import nnx

from rljax.errors import InputError
from rljax.kernels import grouped_matmul as grouped
from rljax.kernels.grouped_matmul import grouped_matmul
from rljax.mesh import RULES, make_mesh, weight_sharding
from rljax.models import experts
from rljax.models.experts import Experts, ExpertsConfig, load_metrics, route

EMBED, HIDDEN = 16, 8
PLAIN = ExpertsConfig(count=8, per_token=2, mlp=HIDDEN)
FAMILIES = {
    "mixtral": PLAIN,
    "qwen3_moe": dataclasses.replace(PLAIN, per_token=3, normalise=False),
    "deepseek_v3": dataclasses.replace(
        PLAIN,
        per_token=3,
        scores="sigmoid",
        scale=2.5,
        groups=4,
        groups_kept=2,
        correction_bias=True,
        shared_mlp=12,
    ),
    "gpt_oss": dataclasses.replace(
        PLAIN, gated="clamped_swiglu", limit=1.5, router_bias=True, expert_bias=True
    ),
}
EVERYTHING = dataclasses.replace(
    FAMILIES["deepseek_v3"], gated="clamped_swiglu", router_bias=True, expert_bias=True
)


def one_device():
    return make_mesh(1, 1, 1, devices=jax.devices()[:1])


def sizes(config: ExpertsConfig, weight_dtype="float32"):
    """What a layer of experts reads of its model's config."""
    return types.SimpleNamespace(
        embed=EMBED, experts=config, weight_dtype=weight_dtype, init_std=0.02, batch_invariant=False
    )


@functools.cache  # one function per config: programs of equal shapes are then one
def definition(config: ExpertsConfig, weight_dtype: str):
    """(apply(params, x, mesh, keep), the shapes of params)."""
    model = sizes(config, weight_dtype)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(nnx.Rngs(0), model)))

    def apply(params, x, mesh, keep=None):
        return nnx.merge(graph, params)(x, mesh, keep)

    return apply, nnx.to_pure_dict(state)


def build(config: ExpertsConfig, *, seed=0, weight_dtype="float32"):
    """(apply(params, x, mesh, keep), params) with every weight random, biases too."""
    apply, shapes = definition(config, weight_dtype)
    rng = np.random.default_rng(seed)
    return apply, jax.tree.map(
        lambda a: jnp.asarray(0.4 * rng.standard_normal(a.shape), a.dtype), shapes
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(apply, params, x, mesh, keep=None):
    """Output and statistics."""
    return apply(params, x, mesh, keep)


def tokens(rows=4, columns=6, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((rows, columns, EMBED)), jnp.float32)


def value_and_gradients(apply, params, x, mesh, keep=None, *, balanced=True):
    """Output, statistics, and the gradient of a scalar that depends on every element of both; if
    not `balanced`, of the output alone."""
    return differentiated(apply, params, x, mesh, keep, np.float32(balanced))


@functools.partial(jax.jit, static_argnums=(0, 3))
def differentiated(apply, params, x, mesh, keep, share):
    direction = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def total(params, x):
        y, stats = apply(params, x, mesh, keep)
        balance = load_metrics(stats)["load_balance_loss"]
        return jnp.sum(y.astype(jnp.float32) * direction) + share * balance, (y, stats)

    (_, (y, stats)), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)
    return y, stats, gradients


def close(got, want, tolerance=1e-5):
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want)
    for (path, a), (_, b) in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )


# -- Hugging Face's own blocks


def hf_block(family: str, config: ExpertsConfig):
    """transformers' module of one family with the sizes of `config`."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    shared = dict(
        hidden_size=EMBED,
        num_experts_per_tok=config.per_token,
        hidden_act="silu",
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        made = transformers.MixtralConfig(
            **shared, intermediate_size=config.mlp, num_local_experts=config.count
        )
    elif family == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        made = transformers.Qwen3MoeConfig(
            **shared,
            moe_intermediate_size=config.mlp,
            num_experts=config.count,
            norm_topk_prob=config.normalise,
        )
    elif family == "deepseek_v3":
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as Block

        made = transformers.DeepseekV3Config(
            **shared,
            moe_intermediate_size=HIDDEN,
            n_routed_experts=config.count,
            n_shared_experts=1,
            n_group=config.groups,
            topk_group=config.groups_kept,
            norm_topk_prob=config.normalise,
            routed_scaling_factor=config.scale,
        )
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP as Block

        made = transformers.GptOssConfig(
            **shared, intermediate_size=config.mlp, num_local_experts=config.count
        )
        made.swiglu_alpha, made.swiglu_limit = config.alpha, config.limit
    made._experts_implementation = "eager"
    return Block(made)


def from_hf(named: dict) -> dict:
    """Tensors (or gradients) of a block by name -> the pytree of Experts."""
    named = {name: np.asarray(value) for name, value in named.items()}
    out = {}
    router = next(name for name in ("gate", "router") if f"{name}.weight" in named)
    out["router"] = named[f"{router}.weight"].T
    fused, down = named["experts.gate_up_proj"], named["experts.down_proj"]
    if f"{router}.bias" in named:  # gpt-oss: [X, D, 2F], gate and up interleaved
        out |= {"gate": fused[..., ::2], "up": fused[..., 1::2], "down": down}
        out["router_bias"] = named[f"{router}.bias"]
        bias = named["experts.gate_up_proj_bias"]
        out |= {"gate_bias": bias[..., ::2], "up_bias": bias[..., 1::2]}
        out["down_bias"] = named["experts.down_proj_bias"]
    else:  # [X, 2F, D], gate before up
        gate, up = np.split(fused, 2, axis=1)
        out |= {"gate": gate, "up": up, "down": down}
        out |= {k: out[k].transpose(0, 2, 1) for k in ("gate", "up", "down")}
    if f"{router}.e_score_correction_bias" in named:
        out["correction"] = named[f"{router}.e_score_correction_bias"]
    for kind in ("gate", "up", "down"):
        if f"shared_experts.{kind}_proj.weight" in named:
            out[f"shared_{kind}"] = {"weight": named[f"shared_experts.{kind}_proj.weight"].T}
    return jax.tree.map(jnp.asarray, out)


@pytest.mark.slow
@pytest.mark.parametrize("family", lanes(["deepseek_v3", "gpt_oss"], ["mixtral", "qwen3_moe"]))
def test_output_and_gradients_equal_hugging_face(family):
    config = FAMILIES[family]
    config = dataclasses.replace(config, shared_mlp=HIDDEN if config.shared_mlp else 0)
    block = hf_block(family, config)
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in [*block.parameters(), *block.buffers()]:
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    apply, ours = build(config)
    theirs = from_hf({k: v.detach() for k, v in block.state_dict().items()})
    assert jax.tree.map(jnp.shape, theirs) == jax.tree.map(jnp.shape, ours)
    x = tokens()
    y, _, (by_params, by_x) = value_and_gradients(apply, theirs, x, one_device(), balanced=False)

    torch_x = torch.tensor(np.asarray(x), requires_grad=True)
    out = block(torch_x)
    out = out[0] if isinstance(out, tuple) else out
    direction = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    (out * torch.tensor(direction)).sum().backward()
    close(y, out.detach().numpy())
    close(by_x, torch_x.grad.numpy())
    wanted = {name: weight.grad for name, weight in block.named_parameters()}
    wanted |= {name: torch.zeros_like(buffer) for name, buffer in block.named_buffers()}
    close(by_params, from_hf(wanted))


def test_the_balance_loss_is_hugging_faces_over_k():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    apply, params = build(PLAIN)
    x, keep = tokens(), np.arange(6)[None, :] < np.array([6, 4, 1, 3])[:, None]
    _, stats = forward(apply, params, x, one_device(), keep)
    logits = torch.tensor(np.asarray(x).reshape(-1, EMBED) @ np.asarray(params["router"]))
    want = load_balancing_loss_func((logits,), 8, 2, torch.tensor(np.asarray(keep)))
    np.testing.assert_allclose(measured(stats)["load_balance_loss"], want / 2, rtol=1e-5)


# -- a loop over tokens, in numpy


def route_one(logits, correction, c: ExpertsConfig):
    """{expert: weight} of one token, from the words of the papers."""
    exp = np.exp(logits - logits.max())
    scores = exp / exp.sum() if c.scores == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores + (0 if correction is None else correction)
    size = c.count // c.groups
    best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(c.groups)]
    kept = np.argsort(best)[-c.groups_kept :] if c.groups > 1 else [0]
    allowed = [e for e in range(c.count) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: c.per_token]
    total = sum(scores[e] for e in chosen) if c.normalise else 1.0
    return {e: scores[e] / total * c.scale for e in chosen}


def experts_loop(params, x, c: ExpertsConfig):
    x = np.asarray(x, np.float64)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    def gated(g, u):
        if c.gated == "silu":
            return g * sigmoid(g) * u
        g, u = np.minimum(g, c.limit), np.clip(u, -c.limit, c.limit)
        return (u + 1) * g * sigmoid(c.alpha * g)

    out = np.zeros((*x.shape[:2], EMBED))
    for b, s in np.ndindex(*x.shape[:2]):
        v = x[b, s]
        chosen = route_one(v @ p["router"] + p.get("router_bias", 0), p.get("correction"), c)
        for e, share in chosen.items():

            def bias(name, e=e):
                return p[name][e] if name in p else 0

            g, u = v @ p["gate"][e] + bias("gate_bias"), v @ p["up"][e] + bias("up_bias")
            out[b, s] += share * (gated(g, u) @ p["down"][e] + bias("down_bias"))
        if c.shared_mlp:
            g, u = v @ p["shared_gate"]["weight"], v @ p["shared_up"]["weight"]
            out[b, s] += gated(g, u) @ p["shared_down"]["weight"]
    return out


@pytest.mark.parametrize(
    "config",
    lanes(
        [FAMILIES["gpt_oss"], EVERYTHING],
        [FAMILIES[name] for name in ("mixtral", "qwen3_moe", "deepseek_v3")],
    ),
)
def test_output_equals_a_loop_over_tokens(config):
    apply, params = build(config)
    x = tokens()
    y, _, _ = value_and_gradients(apply, params, x, one_device())
    close(y, experts_loop(params, x, config))


routed = jax.jit(route, static_argnums=2)


@pytest.mark.parametrize("config", [*FAMILIES.values(), EVERYTHING])
def test_routing_equals_the_rule_token_by_token(config):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, 8)).astype(np.float32)
    correction = rng.standard_normal(8).astype(np.float32) if config.correction_bias else None
    ids, weights = map(np.asarray, routed(logits, correction, config))
    for n in range(40):
        want = route_one(logits[n].astype(np.float64), correction, config)
        assert [int(i) for i in ids[n]] == list(want)  # best first
        np.testing.assert_allclose(weights[n], list(want.values()), rtol=1e-5)


def test_the_correction_moves_the_choice_and_gets_no_gradient():
    config = dataclasses.replace(PLAIN, per_token=1, scores="sigmoid", normalise=False)
    logits = jnp.array([[3.0, 1.0, 0, 0, 0, 0, 0, 0]])
    ids, weights = routed(logits, np.float32([0, 5, 0, 0, 0, 0, 0, 0]), config)
    assert ids.tolist() == [[1]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-1.0)), rtol=1e-6)

    def total(c):
        return jnp.sum(route(logits, c, config)[1])

    assert not np.any(jax.jit(jax.grad(total))(jnp.zeros(8)))


def test_equal_scores_go_to_the_lower_id_and_tiny_ones_stay_finite():
    ids, weights = routed(jnp.zeros((1, 8)), None, PLAIN)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]]
    sigmoid = dataclasses.replace(PLAIN, scores="sigmoid")

    def first(z):
        return route(z, None, sigmoid)[1][0, 0]

    value, gradient = jax.jit(jax.value_and_grad(first))(jnp.full((1, 8), -200.0))
    close((value, gradient), (0.5, np.array([[0.25, -0.25, 0, 0, 0, 0, 0, 0]])))


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    apply, params = build(PLAIN)
    x = tokens(4, 32)
    params["router"] = jnp.zeros_like(params["router"])  # ties: experts 0 and 1, one half each
    for mesh in (one_device(), make_mesh(1, 1, 2, expert=4)):
        y, stats = forward(apply, params, x, mesh)
        assert stats["tokens"].tolist() == [128, 128, 0, 0, 0, 0, 0, 0]
        close(y, experts_loop(params, x, PLAIN))


# -- the mesh

MESHES = {
    "expert=4": dict(data=2, fsdp=1, expert=4),
    "expert=2 tensor=2": dict(data=2, fsdp=1, expert=2, tensor=2),
    "fsdp=2 expert=2 tensor=2": dict(data=1, fsdp=2, expert=2, tensor=2),
    "context=2 expert=2": dict(data=1, fsdp=2, context=2, expert=2),
}


def placed(params, mesh, config):
    """The parameters where rljax.mesh's rules put them."""
    model = sizes(config)
    state = nnx.split(nnx.eval_shape(lambda: Experts(nnx.Rngs(0), model)))[1]
    axes = {path: leaf.get_metadata()["axes"] for path, leaf in nnx.to_flat_state(state)}

    def put(path, value):
        path = tuple(key.key for key in path)
        return jax.device_put(value, weight_sharding(mesh, path[-1], value.shape, axes[path]))

    return jax.tree_util.tree_map_with_path(put, params)


# One fast mesh has every axis that matters; test_sharding.py meets the others.
FAST_MESHES = ("fsdp=2 expert=2 tensor=2",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [pytest.param(m, marks=() if m in FAST_MESHES else pytest.mark.slow) for m in MESHES]
)
def test_the_mesh_changes_no_value_and_no_gradient(sizes):
    config = dataclasses.replace(EVERYTHING, shared_mlp=16)
    apply, params = build(config)
    x = tokens(8, 4)
    keep = np.arange(4)[None, :] < np.array([4, 1, 2, 3, 4, 4, 0, 2])[:, None]
    want = value_and_gradients(apply, params, x, one_device(), keep)
    mesh = make_mesh(**MESHES[sizes])
    got = value_and_gradients(apply, placed(params, mesh, config), x, mesh, keep)
    close(got, want)
    gradient = got[2][0]["gate"]
    if mesh.shape["expert"] > 1:
        assert "expert" in jax.tree.leaves(tuple(gradient.sharding.spec))


def interpreted(x, w, sizes, platform):
    """The product of a TPU, its kernels run by the interpreter."""
    return grouped._on_tpu(x, w, sizes, True)


@pytest.mark.slow
def test_the_kernels_of_a_tpu_have_the_same_gradients_on_a_mesh(monkeypatch):
    apply, params = build(EVERYTHING)
    x = tokens(8, 4)
    want = value_and_gradients(apply, params, x, one_device())
    on_device = grouped._on_device

    def without_axes(kernel, *arrays):
        # Pallas' interpreter compares the axes that its buffers vary over, and loses them itself.
        return on_device(lambda *a: kernel(*(v + jnp.zeros((), v.dtype) for v in a)), *arrays)

    monkeypatch.setattr(grouped, "_on_device", without_axes)
    monkeypatch.setattr(experts, "grouped_matmul", interpreted)
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    apply, _ = definition.__wrapped__(EVERYTHING, "float32")  # one that no program is kept of
    close(value_and_gradients(apply, placed(params, mesh, EVERYTHING), x, mesh), want, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(3, 5), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1, 4), (8, 1), (2, 1)))]
)
def test_rows_that_do_not_divide_work_too(shape):
    apply, params = build(EVERYTHING)
    x = tokens(*shape)
    want = value_and_gradients(apply, params, x, one_device())
    mesh = make_mesh(1, 2, 1, expert=2, context=2)
    close(value_and_gradients(apply, placed(params, mesh, EVERYTHING), x, mesh), want)


@pytest.mark.parametrize(
    "rows, meshes",
    [
        (8, ["fsdp=2 expert=2 tensor=2"]),
        pytest.param(1, ["expert=4"], marks=pytest.mark.slow),
        pytest.param(8, [*MESHES], marks=pytest.mark.slow),
    ],
)
def test_every_token_is_sent_to_the_same_experts_on_every_mesh(rows, meshes):
    """With down = 0 and a unit vector per expert as its bias, output [.., e] is e's weight."""
    apply, params = build(EVERYTHING)
    params["down"] = jnp.zeros_like(params["down"])
    params["down_bias"] = jnp.eye(8, EMBED)
    params["shared_down"]["weight"] = jnp.zeros_like(params["shared_down"]["weight"])
    x = tokens(rows, 16)

    def sent(mesh):
        return np.asarray(forward(apply, params, x, mesh)[0])

    want = sent(one_device())
    assert (want > 0).sum() == rows * 16 * 3 and not want[..., 8:].any()
    for name in meshes:
        got = sent(make_mesh(**MESHES[name]))
        np.testing.assert_array_equal(got > 0, want > 0)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow  # a stack of layers with experts, on a mesh: test_sharding
def test_stacked_layers_under_scan_and_remat_equal_one_device():
    apply, _ = build(PLAIN)
    params = jax.tree.map(lambda *a: np.stack(a), *(build(PLAIN, seed=i)[1] for i in range(3)))
    x = tokens(4, 4)

    def total(params, mesh):
        def layer(x, weights):
            y, stats = apply(weights, jnp.tanh(x), mesh)
            return x + y, stats

        y, stats = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.sum(jnp.sin(y)) + load_metrics(stats)["load_balance_loss"], stats

    step = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    want, got = step(params, one_device()), step(params, make_mesh(1, 2, 2, expert=2))
    assert want[0][1]["tokens"].shape == (3, 8)
    close(got, want)


def test_a_mesh_that_does_not_divide_is_refused_with_the_fix():
    apply, params = build(dataclasses.replace(PLAIN, count=6))
    with pytest.raises(InputError, match="experts.count of 6 .*mesh.expert=4.*divisors of 6"):
        apply(params, tokens(), make_mesh(2, 1, 1, expert=4))
    apply, params = build(dataclasses.replace(PLAIN, mlp=6))
    with pytest.raises(InputError, match="experts.mlp of 6 .*mesh.tensor=4.*divisors of 6"):
        apply(params, tokens(), make_mesh(2, 1, 4))


def test_impossible_configs_are_refused():
    for change, pattern in (
        ({"per_token": 9}, "experts.per_token"),
        ({"per_token": 5, "groups": 4, "groups_kept": 2}, "experts.per_token"),
        ({"groups": 3}, "experts.groups"),
        ({"groups": 8}, "experts.groups"),
        ({"groups_kept": 2}, "experts.groups_kept"),
        ({"scores": "tanh"}, "experts.scores"),
        ({"gated": "relu"}, "experts.gated"),
        ({"count": 0}, "experts.count"),
    ):
        with pytest.raises(InputError, match=pattern):
            dataclasses.replace(PLAIN, **change)


def test_every_logical_axis_has_a_rule():
    model = sizes(EVERYTHING)
    state = nnx.split(nnx.eval_shape(lambda: Experts(nnx.Rngs(0), model)))[1]
    for _, leaf in nnx.to_flat_state(state):
        axes = leaf.get_metadata()["axes"]
        assert len(axes) == len(leaf.shape) and set(axes) <= set(RULES)


# -- the load

measured = jax.jit(load_metrics)


def test_a_uniform_router_and_the_most_uneven_load():
    apply, params = build(PLAIN)
    params["router"] = jnp.zeros_like(params["router"])
    metrics = measured(forward(apply, params, tokens(), one_device())[1])
    want = dict(expert_load_max=4.0, expert_load_min=0.0)  # all to 2 of 8
    want |= dict(router_entropy=np.log(8), load_balance_loss=1.0)
    close(metrics, want)
    sure = {"tokens": jnp.array([10.0, 0, 0, 0]), "probabilities": jnp.array([10.0, 0, 0, 0])}
    sure |= {"entropy": jnp.array(0.0), "kept": jnp.array(10.0)}
    assert float(measured(sure)["load_balance_loss"]) == 4.0
    even = {"tokens": np.full((2, 4), 5.0), "probabilities": np.full((2, 4), 2.5)}
    even |= {"entropy": np.full(2, 10 * np.log(4)), "kept": np.full(2, 10.0)}
    even = jax.tree.map(np.float32, even)
    want = dict(expert_load_max=1.0, expert_load_min=1.0)
    close(measured(even), want | dict(router_entropy=np.log(4), load_balance_loss=1.0))
    nothing = jax.tree.map(np.zeros_like, even)
    assert all(np.isfinite(v) for v in measured(nothing).values())


@pytest.mark.parametrize("scores", lanes(["sigmoid"], ["softmax"]))
def test_padding_does_not_count_and_microbatches_add_up(scores):
    apply, params = build(dataclasses.replace(PLAIN, scores=scores))
    x, keep = np.asarray(tokens(4, 6)), np.arange(6)[None, :] < np.array([6, 4, 0, 3])[:, None]

    def stats(params, x, keep):
        load = forward(apply, params, x, one_device(), keep)[1]
        return {k: np.asarray(v) for k, v in load.items() if k != "ids"}

    padded = stats(params, np.where(keep[..., None], x, np.float32(np.nan)), keep)
    alone = stats(params, x[keep][None], np.ones((1, 13), bool))
    close(padded, alone)
    assert float(padded["kept"]) == 13 and float(padded["tokens"].sum()) == 26
    np.testing.assert_allclose(padded["probabilities"].sum(), 13, rtol=1e-5)
    halves = [stats(params, x[i : i + 2], keep[i : i + 2]) for i in (0, 2)]
    close(jax.tree.map(np.add, *halves), padded)


# -- precision, and the grouped product


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ({}, jnp.bfloat16),
        pytest.param({"expert": 4, "tensor": 2}, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param({}, jnp.float16, marks=pytest.mark.slow),
    ],
)
def test_numbers_of_two_bytes_are_close_to_float32(sizes, dtype):
    apply, params = build(FAMILIES["gpt_oss"])
    mesh = make_mesh(1, 1, **sizes) if "tensor" in sizes else one_device()
    x = tokens(4, 8).astype(dtype)
    y, _, (by_params, by_x) = value_and_gradients(apply, params, x, mesh)
    want_y, _, (want_p, want_x) = value_and_gradients(
        apply, params, x.astype(jnp.float32), one_device()
    )
    assert y.dtype == by_x.dtype == dtype and by_params["gate"].dtype == jnp.float32
    for got, want in ((y, want_y), (by_x, want_x), *((by_params[k], want_p[k]) for k in want_p)):
        got, want = np.asarray(got, np.float32), np.asarray(want)
        assert np.abs(got - want).max() < 0.03 * np.abs(want).max() + 1e-3


@functools.partial(jax.jit, static_argnums=4)
def product_and_gradient(x, w, g, sizes, platform):
    product = interpreted if platform == "tpu" else grouped_matmul
    y, back = jax.vjp(lambda x, w: product(x, w, sizes, platform=platform), x, w)
    return y, *back(g)


SIZES = [[3, 0, 9, 1], [0, 0, 0, 20], [20, 0, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0], [150, 2, 0, 9]]
PRODUCTS = [*itertools.product(SIZES[:-1], ["float32"], ["cpu", "gpu", "tpu"])]
PRODUCTS += [*itertools.product(SIZES[:-1], ["bfloat16"], ["tpu"]), (SIZES[-1], "float32", "tpu")]
FURTHER = [*itertools.product(SIZES, ["float32", "bfloat16"], ["cpu", "gpu", "tpu"])]


@pytest.mark.parametrize(
    ("sizes", "dtype", "platform"),
    [*PRODUCTS, *(pytest.param(*p, marks=pytest.mark.slow) for p in FURTHER if p not in PRODUCTS)],
)
def test_the_grouped_product_and_its_gradient(platform, dtype, sizes):
    rows = 20 if sum(sizes) <= 20 else 170
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 6))
    w = jnp.asarray(rng.standard_normal((4, 6, 5)), dtype)
    g = rng.standard_normal((rows, 5))
    real = (np.arange(rows) < sum(sizes))[:, None]
    # Past the groups: garbage.
    x, g = (jnp.asarray(np.where(real, a, np.nan), dtype) for a in (x, g))
    y, dx, dw = product_and_gradient(x, w, g, np.asarray(sizes, np.int32), platform)
    assert y.dtype == dx.dtype == dw.dtype == jnp.dtype(dtype)
    ends = np.cumsum(sizes)
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    want = [np.zeros((rows, 5)), np.zeros((rows, 6)), np.zeros((4, 6, 5))]
    for e in range(4):
        at = slice(ends[e] - sizes[e], ends[e])
        want[0][at], want[1][at] = x[at] @ w[e], g[at] @ w[e].T
        want[2][e] = x[at].T @ g[at]
    close((y, dx, dw), tuple(want), 1e-5 if dtype == "float32" else 0.05)
