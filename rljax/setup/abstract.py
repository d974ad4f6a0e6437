"""A run as shapes and layouts alone: what its programs are compiled for, and its memory counted.

What lives here: the setup and the roles of a config of which no data, tokenizer or weight is read
(of a model's folder config.json alone). What does not: programs, costs (rljax.plan). The roles are
those of rljax.setup.roles, every array a jax.ShapeDtypeStruct.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.data.kinds import data_kind
from rljax.data.online.encoded import Data, load_run_tokenizer
from rljax.learn.optimizers import make_optimizer
from rljax.mesh import on_host, replicated
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.models.trees import flattened, merged, nested
from rljax.roles import (
    Actor,
    Baseline,
    Critic,
    KLController,
    Reference,
    RewardModel,
    training_layout,
)
from rljax.setup.roles import multiplied_in_dtype, optimizer_steps, scalar_head
from rljax.setup.setup import Setup, adapter_fields, assemble, load_model


class _AnyTokenizer:
    """In place of a folder's tokenizer: an id per letter, more than any tokenizer makes."""

    vocab_size, eos_ids = 0, ()

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids, **_) -> str:
        return "?" * len(ids)


def abstract_setup(config: Config, devices=None) -> Setup:
    """The setup of `config` on `devices` (default: all), with rows as long as it allows."""
    tokenizer = _AnyTokenizer() if is_path(config.model) else load_run_tokenizer(config)
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    kind = data_kind(dataflow)
    prompt = config.data.max_prompt_tokens
    row = prompt + config.sampler.max_response_tokens
    data = Data([[]], [], [], {}, prompt, row, digest="", kind=kind)
    model = load_model(config, tokenizer, devices)
    row = row if kind == "prompts" else config.offline.max_tokens
    return assemble(config, tokenizer, dataflow, data, model, row)


def _trained(setup: Setup, kind, model: Model, optimizer, *more):
    """A role with an optimizer, before its first step."""
    waits = setup.config.memory.optimizer_on_host
    layout = training_layout(model, optimizer, optimizer_on_host=waits)
    return kind(layout, model, optimizer, *more)


def _reference(setup: Setup) -> Reference:
    """Frozen weights, rounded where the model rounds them before use; under adapters the base is
    the actor's own."""
    model, config = setup.model, setup.config
    adapters, base = model.split(model.abstract())
    if model.config.lora:
        params = merged(adapters, base)
    else:

        def copy(path, x):
            low = multiplied_in_dtype(path, model.config)
            layout = on_host(x.sharding) if config.memory.reference_on_host else x.sharding
            dtype = config.model_settings.dtype if low else x.dtype
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout)

        params = nested({path: copy(path, x) for path, x in flattened(adapters).items()})
    return Reference(params, model, config.sampler.temperature, setup.decoding)


def _scalar(setup: Setup, name: str) -> Model:
    """The model of a critic or a reward model: critic_model's, or the policy with another head."""
    config, policy = setup.config, setup.model
    found, head = policy.config, scalar_head(setup, name)
    if config.critic_model:
        settings = dataclasses.asdict(config.model_settings) | adapter_fields(config)
        found, head = load_config(config.critic_model, **settings), {**head, "labels": 1}
    return Model(dataclasses.replace(found, **head), policy.mesh, "scalar")


def _number(shape: tuple[int, ...], mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=replicated(mesh))


def _teacher(setup: Setup) -> Reference:
    settings = dataclasses.asdict(setup.config.model_settings)
    model = Model(load_config(setup.config.teacher_model, **settings), setup.model.mesh)
    return Reference(model.abstract(), model, setup.config.sampler.temperature)


def abstract_roles(setup: Setup) -> dict:
    """{name: role} of the dataflow, as rljax.setup.rl_roles makes them."""
    config, named, mesh = setup.config, setup.dataflow.parameters, setup.model.mesh
    total, roles = optimizer_steps(setup), {}
    if "actor" in named:
        optimizer = make_optimizer(config.actor_optimizer, total)
        more = (config.sampler.temperature, setup.decoding)
        roles["actor"] = _trained(setup, Actor, setup.model, optimizer, *more)
    for name, kind in (("critic", Critic), ("reward_model", RewardModel)):
        if name in named:
            optimizer = make_optimizer(config.critic_optimizer, total)
            roles[name] = _trained(setup, kind, _scalar(setup, name), optimizer)
    if setup.needs_reference:
        roles["reference"] = _reference(setup)
    if "teacher" in named:
        roles["teacher"] = _teacher(setup)
    if setup.needs_kl_controller:
        algorithm = config.algorithm
        roles["kl_controller"] = KLController(
            _number((), mesh), algorithm.kl_target, algorithm.kl_horizon
        )
    if setup.needs_baseline:
        roles["baseline"] = Baseline(_number((2,), mesh))
    return roles


def abstract_scorers(setup: Setup) -> dict[str, dict]:
    """{name: weights} of the models that score samples (reward.model, reward.process_model,
    reward.judge_model)."""
    if not setup.needs_reward:
        return {}
    wish, found = setup.config.reward, {}
    for name, folder in (("reward model", wish.model), ("process model", wish.process_model)):
        if folder:
            settings = dataclasses.asdict(setup.config.model_settings)
            facts = dataclasses.replace(load_config(folder, **settings), labels=1)
            found[f"{name} weights"] = Model(facts, setup.model.mesh, "scalar").abstract()
    if wish.judge_model:
        settings = dataclasses.asdict(setup.config.model_settings)
        facts = load_config(wish.judge_model, **settings)
        found["judge weights"] = Model(facts, setup.model.mesh).abstract()
    return found


def abstract_sft_actor(setup: Setup) -> Actor:
    """The actor with the optimizer of the supervised phase."""
    optimizer = make_optimizer(setup.config.sft.optimizer, setup.config.sft.steps)
    more = (setup.config.sampler.temperature, setup.decoding)
    return _trained(setup, Actor, setup.model, optimizer, *more)
