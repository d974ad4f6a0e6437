"""Optimizers and schedules by name: optax's numbers, one matrix at a time whatever is stacked, the
same step on every layout, counted bytes, and a bitwise continuation from a checkpoint."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import golden, lanes
from flax import nnx
from sampler_cases import convolving, recurrent
from tiny_run import flat_bytes, metrics_rows, tiny_config

from rljax.checkpoint.checkpoint import Checkpoints
from rljax.config import OptimizerConfig
from rljax.learn.matrices import is_hidden, is_matrix, matrix_axes
from rljax.learn.optimizers import current_learning_rate, learning_rate, make_optimizer
from rljax.learn.state import optimizer_step
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.config import ExpertsConfig
from rljax.models.decoder import Decoder
from rljax.models.huggingface import load_config
from rljax.models.layers import Linear
from rljax.models.model import Model
from rljax.models.trees import flattened, nested
from rljax.roles import start_training, training_layout
from rljax.setup import build, role_arrays
from rljax.setup.held import held_bytes
from rljax.suggest import other_value
from rljax.training import train
from rljax.training.run import Run

# -- schedules


def rates(total: int, steps=None, **fields) -> np.ndarray:
    config = OptimizerConfig(**{"lr": 1.0, **fields})
    return np.array([float(current_learning_rate(config, total, i)) for i in range(steps or total)])


def test_warm_up_and_what_follows():
    line = rates(10, schedule="linear", warmup_steps=2)
    np.testing.assert_allclose(line, [0, 0.5, *np.linspace(1, 0, 9)[:-1]], atol=1e-7)
    held = rates(6, schedule="constant", warmup_steps=4, warmup_from=0.5)
    np.testing.assert_allclose(held, [0.5, 0.625, 0.75, 0.875, 1, 1], atol=1e-7)
    half = rates(9, schedule="cosine(final=0.2)", lr=2.0)
    turn = np.cos(np.pi * np.arange(9) / 9)
    np.testing.assert_allclose(half, 2 * (0.2 + 0.8 * (1 + turn) / 2), atol=1e-6)
    whole = rates(8, 9, schedule="cosine(cycles=1.0)")
    np.testing.assert_allclose(whole[[0, 4, 8]], [1, 0, 1], atol=1e-6)


def test_warm_up_stable_decay():
    line = rates(12, 14, schedule="wsd(decay=0.5, final=0.1)", warmup_steps=2)
    np.testing.assert_allclose(line[:8], [0, 0.5, *[1] * 6], atol=1e-7)
    np.testing.assert_allclose(line[7:], [*np.linspace(1, 0.1, 6), 0.1], atol=1e-6)
    round_off = rates(10, 11, schedule="wsd(decay=0.5, shape='cosine')")
    np.testing.assert_allclose(round_off[5:], (1 + np.cos(np.pi * np.arange(6) / 5)) / 2, atol=1e-6)


def test_a_cosine_without_options_is_optax():
    config = OptimizerConfig(lr=3e-6, schedule="cosine", warmup_steps=0)
    ours, theirs = learning_rate(config, 50), optax.cosine_decay_schedule(3e-6, 50)
    steps = jnp.arange(60)
    np.testing.assert_array_equal(jax.vmap(ours)(steps), jax.vmap(theirs)(steps))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant", {}),
        ("cosine_with_restarts", {}),
        ("polynomial", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 9}),
    ],
)
def test_what_is_proposed_for_a_schedule_of_transformers_is_that_schedule(name, arguments):
    """Of each the defaults of transformers, and 10 of 100 steps of warm-up."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = dict(num_warmup_steps=0 if name == "constant" else 10, num_training_steps=100)
    how = dict(scheduler_specific_kwargs=arguments) if arguments else {}
    scheduler, theirs = transformers.get_scheduler(name, optimizer, **steps, **how), []
    for _ in range(100):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    proposed = re.match(r'`[\w.]+="?([^"`]+)', other_value("actor_optimizer.schedule", name))
    ours = rates(
        100, schedule=proposed[1] if proposed else name, warmup_steps=steps["num_warmup_steps"]
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_a_schedule_of_ones_own():
    found = rates(8, schedule="tiny_optimizer.staircase(height=4.0)")
    np.testing.assert_allclose(found, [1] * 4 + [0.25] * 4)


def test_equal_configs_are_one_optimizer():
    one = make_optimizer(OptimizerConfig(name="lion(beta2=0.9)"), 10)
    assert make_optimizer(OptimizerConfig(name="lion(beta2=0.9)"), 99) is one  # lr is constant
    assert make_optimizer(OptimizerConfig(name="lion(beta2=0.8)"), 10) is not one
    wsd = OptimizerConfig(schedule="wsd")
    assert make_optimizer(wsd, 10) is make_optimizer(OptimizerConfig(schedule="wsd"), 10)
    assert make_optimizer(wsd, 10) is not make_optimizer(wsd, 11)


# -- the rules are optax's


LR, DECAY = 0.1, 0.3
PLAIN = {
    "layer": {"weight": (6, 10), "bias": (10,)},
    "tall": {"weight": (12, 4)},
    "embedding": (9, 6),
}


def draw(seed: int, shapes=PLAIN):
    """Arrays of these shapes, of mean square 1."""
    rng = np.random.default_rng(seed)
    return nested(
        {
            path: jnp.asarray(rng.standard_normal(shape), jnp.float32)
            for path, shape in flattened(shapes).items()
        }
    )


def walked(optimizer, params, seeds=(1, 2, 3)):
    """Parameters after three given gradients."""

    @jax.jit  # op by op, every operation compiles for every shape
    def step(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for seed in seeds:
        gradient = draw(seed, jax.tree.map(lambda x: x.shape, params))
        params, state = step(gradient, state, params)
    return jax.device_get(params)


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def hidden(params):
    two = optax.contrib.MuonDimensionNumbers()
    return {"layer": {"weight": two, "bias": None}, "tall": {"weight": two}, "embedding": None}


def with_decay(optimizer):
    """The decay of matrices, which optax's own adds at another place."""
    return optax.chain(optimizer, add_decay())


def add_decay():
    return optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda u, p, m: u - LR * DECAY * p * m, updates, params, matrices(params)
        )
    )


SAME = {
    "adamw(beta2=0.9)": optax.adamw(LR, b2=0.9, weight_decay=DECAY, mask=matrices),
    "adamw(nesterov=True, mu_dtype='bfloat16')": optax.adamw(
        LR, weight_decay=DECAY, mask=matrices, nesterov=True, mu_dtype="bfloat16"
    ),
    "lion(beta1=0.8)": optax.lion(LR, b1=0.8, weight_decay=DECAY, mask=matrices),
    "sgd(momentum=0.9, nesterov=True)": with_decay(optax.sgd(LR, 0.9, nesterov=True)),
    "adafactor(min_dim_size_to_factor=4)": with_decay(
        optax.adafactor(LR, min_dim_size_to_factor=4)
    ),
    "adafactor(momentum=0.5, clipping_threshold=0.0, multiply_by_parameter_scale=False)": (
        with_decay(
            optax.adafactor(
                LR, momentum=0.5, clipping_threshold=None, multiply_by_parameter_scale=False
            )
        )
    ),
    "muon()": with_decay(
        optax.contrib.muon(LR, consistent_rms=0.2, muon_weight_dimension_numbers=hidden)
    ),
    "muon(beta=0.8, nesterov=False, ns_steps=3, consistent_rms=0.0)": with_decay(
        optax.contrib.muon(
            LR, beta=0.8, nesterov=False, ns_steps=3, muon_weight_dimension_numbers=hidden
        )
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_three_steps_are_optaxs(name):
    config = OptimizerConfig(name=name, lr=LR, weight_decay=DECAY, clip_norm=0.0)
    params = draw(0)
    got, want = walked(make_optimizer(config, 0), params), walked(SAME[name], params)
    for a, b, start in zip(*map(jax.tree.leaves, (got, want, params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        assert np.max(np.abs(a - np.asarray(start))) > 1e-3


def test_an_optimizer_of_ones_own_or_of_optax():
    params = draw(0)
    plain = dict(lr=LR, clip_norm=0.0)
    own = OptimizerConfig(name="tiny_optimizer.halved(power=1.0)", weight_decay=DECAY, **plain)
    sgd = OptimizerConfig(name="sgd", weight_decay=DECAY, **plain)
    got, want = (walked(make_optimizer(config, 0), params) for config in (own, sgd))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    got = walked(make_optimizer(OptimizerConfig(name="optax.adamax(b1=0.8)", **plain), 0), params)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(walked(optax.adamax(LR, b1=0.8), params)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_gradient_is_clipped_whatever_the_optimizer():
    params = draw(0)
    config = OptimizerConfig(name="sgd", lr=1.0, clip_norm=0.5)
    optimizer = make_optimizer(config, 0)
    step = jax.jit(
        lambda gradient, params: optimizer.update(gradient, optimizer.init(params), params)
    )
    updates, _ = step(draw(1), params)
    assert float(optax.tree.norm(jax.device_get(updates))) == pytest.approx(0.5, rel=1e-5)


# -- matrices of a model


FAMILIES = ("qwen3", "gpt_oss", "deepseek_v3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "lfm2")
RECURRENT = {"qwen3_5": recurrent, "lfm2": convolving}  # without a folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_axes_of_every_weight(family):
    """By the definition of the model: linear maps know what they sum over, weights their logical
    axes."""
    if family in RECURRENT:
        model = RECURRENT[family]()
    else:
        model = Model(load_config(golden("hf", family), remat="none"), None)
    graph = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), model.config, "lm"))
    linear = {
        tuple(map(str, path)): module.contract
        for path, module in nnx.iter_modules(graph)
        if isinstance(module, Linear)
    }
    assert len(linear) >= 7
    for path, (shape, axes) in model.shapes().items():
        stacked, inside = matrix_axes(path, len(shape))
        stack = path[0] == "layers" or path[:2] in (("vision", "blocks"), ("vision", "deepstack"))
        assert stacked == stack + ("experts" in axes[:2]), (path, axes)
        if path[:-1] in linear and path[-1] == "weight":
            assert inside == linear[path[:-1]], path
        elif is_matrix(path):
            assert inside == 1 and (len(shape) == stacked + 2 or "taps" in axes), (path, shape)
        else:
            assert inside == 0, path
        others = {"vocab", "patch", "position", "taps"}
        assert is_hidden(path) == (is_matrix(path) and not others & {*axes})
        if path[-1] in ("log_decay", "step_bias"):
            assert not is_matrix(path)


def test_adapters_are_matrices_of_their_rank():
    path = ("layers", "0", "attention", "o")
    assert matrix_axes((*path, "lora_a"), 4) == (1, 2)  # [L, H, E, r]
    assert matrix_axes((*path, "lora_b"), 3) == (1, 1)  # [L, r, D]
    path = ("layers", "0", "attention", "q")
    assert matrix_axes((*path, "lora_a"), 3) == (1, 1)  # [L, D, r]
    assert matrix_axes((*path, "lora_b"), 4) == (1, 1)  # [L, r, H, E]


@pytest.mark.parametrize("name", ["muon", "adafactor(min_dim_size_to_factor=4)"])
def test_every_layer_and_expert_is_a_matrix_of_its_own(name):
    """The step of stacked weights is that of each matrix alone; heads are one axis of it."""
    optimizer = make_optimizer(OptimizerConfig(name=name, lr=LR, clip_norm=0.0), 0)
    shapes = {
        "layers": {
            "0": {
                "attention": {"q": {"weight": (2, 8, 4, 3)}, "o": {"weight": (2, 4, 3, 8)}},
                "mlp": {"gate": (2, 3, 8, 6), "router": (2, 8, 3)},
                "mlp_norm": {"scale": (2, 8)},
            }
        }
    }
    alone_shape = {"q": (8, 12), "o": (12, 8), "gate": (8, 6), "router": (8, 3), "scale": (8,)}
    params = flattened(draw(0, shapes))
    # Layers of other sizes: a statistic over the stack would show.
    params = {
        path: np.asarray(x) * np.expand_dims(np.float32([1, 30]), tuple(range(1, x.ndim)))
        for path, x in params.items()
    }
    params, gradients = nested(params), jax.device_get(draw(1, shapes))
    run = jax.jit(lambda gradient, p: optimizer.update(gradient, optimizer.init(p), p)[0])
    updates = jax.device_get(run(gradients, params))
    for path, update in flattened(updates).items():
        kind = next(key for key in alone_shape if key in path)
        leaf = "scale" if kind == "scale" else "weight"
        stack = update.shape[: 1 + (kind == "gate")]
        for index in np.ndindex(stack):

            def pick(tree, p=path, i=index, k=kind):
                return flattened(tree)[p][i].reshape(alone_shape[k])

            one, gradient = {"x": {leaf: pick(params)}}, {"x": {leaf: pick(gradients)}}
            want = run(gradient, one)
            np.testing.assert_allclose(
                pick(updates), want["x"][leaf], rtol=1e-4, atol=1e-6, err_msg=str((path, index))
            )


# -- on a mesh


NAMES = (
    "adamw",
    "adafactor(min_dim_size_to_factor=16, momentum=0.9)",
    "lion",
    "sgd(momentum=0.9)",
    "muon",
)
CONFIG = dataclasses.replace(
    decoder(64, layers=2, embed=32, mlp=64, heads=4, kv_heads=2, head_dim=16, init_std=0.3),
    family="qwen3_moe",
    experts=ExpertsConfig(count=4, per_token=2, mlp=32),
)
MESHES = {"fsdp=4,tensor=2": dict(fsdp=4, tensor=2), "fsdp=2,expert=4": dict(fsdp=2, expert=4)}


def gradient_of(params, turn):
    """Numbers of a weight's own values: the same on every layout."""
    return jax.tree.map(lambda x: jnp.sin(37.0 * x + turn), params)


@functools.cache
def program(model, optimizer, **how):
    """One step, on the layout that training has."""

    def step(state):
        gradient = gradient_of(state.params, state.step.astype(jnp.float32))
        return optimizer_step(state, gradient, jnp.ones(()), optimizer)[0]

    layout = training_layout(model, optimizer, **how)
    return jax.jit(step, out_shardings=jax.tree.map(lambda x: x.sharding, layout))


def trained(model, optimizer, weights, steps=2, state=None, **how):
    """The state after some steps."""
    if state is None:
        state = start_training(model, jax.device_put(weights, model.shardings()), optimizer, **how)
    for _ in range(steps):
        state = program(model, optimizer, **how)(state)
    return state


def optimizer_of(name):
    """The same for all tests: each is a program, on one device and on the mesh."""
    schedule = dict(schedule="wsd(decay=0.5)", warmup_steps=1)
    return make_optimizer(OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, **schedule), 6)


@pytest.fixture(scope="module")
def one_device():
    """(model, weights on the host)."""
    model = Model(CONFIG, make_mesh(fsdp=1, devices=jax.devices()[:1]))
    return model, jax.device_get(model.init(jax.random.key(0)))


def per_device(tree) -> int:
    """Bytes on the fullest device."""
    of = {device: 0 for device in jax.devices()}
    for x in jax.tree.leaves(tree):
        for part in x.addressable_shards:
            of[part.device] += part.data.nbytes
    return max(of.values())


QUICK = ("muon",)  # of all matrices of a layer, on every device: the others have less to go wrong
ON_MESHES = [
    pytest.param(name, "fsdp=4,tensor=2", marks=() if name in QUICK else pytest.mark.slow)
    for name in NAMES
]
ON_MESHES += [
    pytest.param(name, "fsdp=2,expert=4", marks=pytest.mark.slow)
    for name in NAMES
    if name.startswith(("adafactor", "muon"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), ON_MESHES)
def test_a_sharded_step_is_the_step_of_one_device(name, mesh, one_device, tmp_path):
    alone, weights = one_device
    optimizer = optimizer_of(name)
    want = trained(alone, optimizer, weights)
    model = Model(CONFIG, make_mesh(**MESHES[mesh]))
    got = trained(model, optimizer, weights)
    for (path, a), b, start in zip(
        jax.tree_util.tree_leaves_with_path(got.params),
        jax.tree.leaves(want.params),
        jax.tree.leaves(weights),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=str(path))
        assert np.max(np.abs(np.asarray(b) - start)) > 1e-5, path

    # The plan counts what the arrays take, and no moment lies whole on every device.
    layout = training_layout(model, optimizer)
    assert held_bytes(layout.opt_state) == per_device(got.opt_state)
    for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(layout), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    whole = training_layout(alone, optimizer)
    share = held_bytes(layout.params) / held_bytes(whole.params)
    assert held_bytes(layout.opt_state) < 1.25 * share * held_bytes(whole.opt_state) + 500

    # A checkpoint continues bitwise, with the moments where they lay.
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, got, {})
    fresh = start_training(model, jax.device_put(weights, model.shardings()), optimizer)
    back = checkpoints.read_arrays(2, fresh)
    straight = trained(model, optimizer, weights, 1, got)
    again = trained(model, optimizer, weights, 1, back)
    assert flat_bytes(again) == flat_bytes(straight) != flat_bytes(got)


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes(QUICK, [name for name in NAMES if name not in QUICK]))
def test_moments_on_the_host_make_the_same_steps(name, one_device):
    _, weights = one_device
    model = Model(CONFIG, make_mesh(fsdp=4, tensor=2))
    optimizer = optimizer_of(name)
    here = trained(model, optimizer, weights)
    there = trained(model, optimizer, weights, optimizer_on_host=True)
    for a, b in zip(*map(jax.tree.leaves, (there.params, here.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    moments = [x for x in jax.tree.leaves(there.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    layout = training_layout(model, optimizer, optimizer_on_host=True)
    waiting = held_bytes(layout.opt_state, on_host=True)
    assert waiting == per_device(moments) > 0
    assert waiting + held_bytes(layout.opt_state) == per_device(here.opt_state)


def test_factored_moments_are_smaller(one_device):
    alone, _ = one_device
    sizes = {
        name: held_bytes(training_layout(alone, make_optimizer(OptimizerConfig(name=name), 0)))
        for name in ("adamw", "adafactor(min_dim_size_to_factor=16)", "lion", "sgd")
    }
    weights = held_bytes(alone.abstract())
    assert sizes["adamw"] == pytest.approx(3 * weights, rel=1e-3)
    assert sizes["lion"] == pytest.approx(2 * weights, rel=1e-3)
    assert sizes["sgd"] == pytest.approx(weights, rel=1e-3)
    assert weights < sizes["adafactor(min_dim_size_to_factor=16)"] < 1.2 * weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"actor_optimizer__name": "muon", "lora__rank": 4, "lora__base": "int8"},
        {"actor_optimizer__name": "adafactor(min_dim_size_to_factor=8)"},
    ],
    ids=["muon on adapters", "adafactor"],
)
def test_a_run_goes_on_bitwise(fields, tmp_path):
    config = tiny_config(
        tmp_path,
        steps=3,
        sft__steps=0,
        evaluate__every_steps=0,
        evaluate__prompts=4,
        checkpoint__every_steps=1,
        checkpoint__keep=9,
        actor_optimizer__schedule="wsd(decay=0.5)",
        actor_optimizer__warmup_steps=1,
        **fields,
    )
    train(config)
    rates = [row["lr"] for row in metrics_rows(tmp_path)]
    peak = config.actor_optimizer.lr  # two optimizer steps per step; the last one's rate
    np.testing.assert_allclose(rates, [peak, peak, peak / 3], rtol=1e-5)
    with Run(build(config), tmp_path) as run:
        run.load(3)
        end = flat_bytes(role_arrays(run.roles))
        run.load(2)
        assert flat_bytes(role_arrays(run.roles)) != end
        run.step()
        assert flat_bytes(role_arrays(run.roles)) == end
