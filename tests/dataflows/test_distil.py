"""Distillation dataflows: the values of the golden-checked loss, its gradient, memory, and that a
student comes near its teacher."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import lanes
from preset_runs import preset_config
from tiny_run import train_on_one
from tiny_tokenizer import write_tokenizer

from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, AlgorithmConfig, Config, SFTConfig
from rljax.data.online.encoded import load_run_tokenizer
from rljax.dataflows.distil import distil
from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.losses import distillation as loss
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.roles import Actor, Reference, start_training
from rljax.setup import build as build_setup
from rljax.training.run import Run
from rljax.validation import validate

KEY = jax.random.key(0)
STUDENT = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.3)"
TEACHER = "decoder(layers=1, embed=32, mlp=48, heads=2, kv_heads=1, head_dim=16, init_std=0.3)"


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What the dataflow reads of its cfg."""

    steps: Steps
    reduction: object = token_mean


def model_of(text: str, vocab: int, **changes) -> Model:
    config = dataclasses.replace(resolve(text, NAMESPACES["model"])(vocab), remat="none", **changes)
    return Model(config, make_mesh(devices=jax.devices()[:1]))


def pair_of(vocab: int, optimizer=None, **changes):
    """(actor, teacher) with random weights; one SGD step of length 1 is minus the gradient."""
    optimizer = optimizer or optax.sgd(1.0)
    student, teacher = model_of(STUDENT, vocab, **changes), model_of(TEACHER, vocab, **changes)
    params = student.init(jax.random.key(0))
    actor = Actor(start_training(student, params, optimizer), student, optimizer, 1.0)
    return actor, Reference(teacher.init(jax.random.key(1)), teacher, 1.0)


def rows(count: int, tokens: int, vocab: int, seed: int = 0):
    """Rows of several lengths, with holes in the mask."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, tokens + 1, count).astype(np.int32)
    mask = rng.integers(0, 2, (count, tokens)) * (np.arange(tokens)[None, :] < lengths[:, None])
    mask[:, 0] = 0
    ids = rng.integers(0, vocab, (count, tokens)).astype(np.int32)
    return batch_from_rows(jnp.asarray(ids), jnp.asarray(lengths), jnp.asarray(mask, jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("case", lanes([(0.3, 2)], [(0.0, 8), (1.0, 2)]))
def test_values_and_gradient_are_those_of_the_loss_on_all_logits(case):
    beta, microbatch = case
    batch, temperature, vocab = rows(8, 9, 23), 1.3, 23
    actor, teacher = pair_of(vocab, final_soft_cap=3.0)
    start = jax.device_get(actor.state.params)

    def dense(params):
        def log_probs(model, params):
            z = model.logits(params, batch)
            # Logits at t say what comes at t + 1.
            z = jnp.pad(z[:, :-1], ((0, 0), (1, 0), (0, 0)))
            return jax.nn.log_softmax(z / temperature)

        both = log_probs(actor.model, params), log_probs(teacher.model, teacher.params)
        terms = jnp.sum(loss.jsd_terms(*both, beta=beta), axis=-1)
        return jnp.sum(jnp.where(batch.mask > 0, terms, 0.0)) / jnp.sum(batch.mask)

    want, gradient = jax.value_and_grad(dense)(start)
    cfg, options = Algorithm(Steps(8, microbatch)), dict(beta=beta, temperature=temperature)
    new, metrics = distil(batch, KEY, cfg, actor=_copy(actor), teacher=teacher, **options)
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5) and want > 0.05
    moved = jax.tree.map(lambda a, b: a - b, start, jax.device_get(new["actor"].state.params))
    for got, wanted in zip(jax.tree.leaves(moved), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    if beta == 0.3:  # held-out data: the same loss, and nothing moves
        cfg = Algorithm(Steps(8, microbatch, learn=False))
        held, found = distil(batch, KEY, cfg, actor=_copy(actor), teacher=teacher, **options)
        assert float(found["loss"]) == pytest.approx(float(want), rel=1e-5)
        assert _same(held["actor"].state.params, start)


def _copy(role):
    return jax.tree.map(jnp.copy, role)  # programs donate


def _same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)


@pytest.mark.slow
def test_no_array_of_all_tokens_times_the_vocabulary(monkeypatch):
    """Of the compiled program, backward pass and teacher included."""
    count, tokens, vocab = 8, 96, 2048
    batch, (actor, teacher) = rows(count, tokens, vocab), pair_of(vocab)
    whole = 4 * count * tokens * vocab

    def compiled(chunk_logits: int, temperature: float):
        monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk_logits)
        cfg, roles = Algorithm(Steps(count, count)), dict(actor=actor, teacher=teacher)
        given, static = distil.arguments(batch, KEY, cfg, **roles, temperature=temperature)
        return distil.run.lower(*given, **static).compile()

    def largest(program) -> int:
        shapes = re.findall(r"f32\[([\d,]+)\]", program.as_text())
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    large, small = compiled(1 << 23, 1.0), compiled(4 * count * vocab, 1.1)
    assert largest(large) >= whole // 4  # the check sees one
    assert large.memory_analysis().temp_size_in_bytes > whole
    assert largest(small) < whole // 4 // 8
    assert small.memory_analysis().temp_size_in_bytes < whole


# -- runs --


def write_teacher(folder, vocab: int, eos_ids=(1,)):
    model = model_of(TEACHER, vocab)
    params = model.init(jax.random.key(5))
    save_params(folder, model, params, bos_id=None, eos_ids=eos_ids, pad_id=0)
    return str(folder)


def on_policy(tmp_path, **changes) -> Config:
    config = preset_config("grpo")
    config.dataflow, config.steps, config.run_dir = "on_policy_distil()", 30, str(tmp_path / "run")
    config.algorithm, config.sft = AlgorithmConfig(), SFTConfig()
    config.model, config.actor_optimizer.lr = STUDENT, 1e-2
    config.teacher_model = write_teacher(tmp_path / "teacher", 7)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def steps_of(config, folder, sign: float = 1.0) -> list[dict]:
    config.actor_optimizer.lr *= sign
    with Run(build_setup(config, jax.devices()[:1]), folder) as run:
        from rljax import setup as build

        words = run.setup.tokenizer.vocab_size
        assert run.setup.model.config.vocab_size == words
        run.begin(run.setup.main, build.initial_params(config, run.setup.model))
        frozen = jax.device_get(run.roles["teacher"].params)
        found = [run.step() for _ in range(config.steps)]
        assert _same(frozen, run.roles["teacher"].params)
        assert "teacher" not in build.role_arrays(run.roles)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dataflow", lanes(["on_policy_distil(beta=0.5)"], ["on_policy_distil()"]))
def test_a_student_comes_near_its_teacher_on_its_own_samples(tmp_path, dataflow):
    found = steps_of(on_policy(tmp_path, dataflow=dataflow), tmp_path)
    losses = [float(x["loss"]) for x in found]
    assert losses[0] > 0.05 and np.mean(losses[-3:]) < 0.25 * losses[0], losses
    assert found[-1]["same_first_word"] > found[0]["same_first_word"]
    assert 0 < found[0]["response_tokens/mean"] <= 3


@pytest.mark.slow
def test_with_its_sign_flipped_it_goes_away(tmp_path):
    losses = [float(x["loss"]) for x in steps_of(on_policy(tmp_path), tmp_path, sign=-1.0)]
    assert np.mean(losses[-3:]) > losses[0], losses


@pytest.mark.slow
def test_a_student_comes_near_its_teacher_on_given_completions(tmp_path):
    """Through train(): held-out loss, and a resume that is refused nothing."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    words = ["apples", "friends", "clips", "digits"]
    for split, count in (("train", 64), ("test", 16)):
        lines = [
            {"prompt": f"how many {words[i % 4]}? ", "completion": words[(i * i) % 4]}
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = Config(dataflow="distil(beta=0.0)", steps=25, model=STUDENT)
    config.tokenizer = str(tokenizer if tokenizer else tmp_path / "tokenizer")
    config.data.train = str(tmp_path / "{split}.jsonl")
    config.data.test = config.data.train
    config.offline.examples_per_step, config.offline.max_tokens = 16, 48
    config.offline.packing = False
    config.actor_optimizer.lr, config.model_settings.remat = 1e-2, "none"
    config.trackers, config.export, config.compilation_cache = (), False, ""
    config.run_dir = str(tmp_path / "run")
    vocab = load_run_tokenizer(config).vocab_size
    config.teacher_model = write_teacher(tmp_path / "teacher", vocab)
    summary = train_on_one(config)
    before, after = (summary[k]["eval/loss"] for k in ("eval_before", "eval_after"))
    assert before > 0.2 and after < 0.3 * before, (before, after)


def test_what_does_not_fit_is_said(tmp_path):
    config = on_policy(tmp_path)
    assert validate(config) == []
    config.algorithm.kl_in_loss = 0.1
    with pytest.raises(InputError, match="kl_in_loss"):
        validate(config)
    config = on_policy(tmp_path, teacher_model="")
    with pytest.raises(InputError, match="teacher"):
        validate(config)
    config = on_policy(tmp_path, teacher_model=write_teacher(tmp_path / "other", 9))
    with pytest.raises(InputError, match="another vocabulary"):
        with Run(build_setup(config, jax.devices()[:1]), tmp_path) as run:
            run.begin(run.setup.main, run.setup.model.init(jax.random.key(0)))
