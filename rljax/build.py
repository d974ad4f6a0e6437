"""From a config to the things a run needs: mesh, tokenizer, encoded data, roles, the recipe of a
dataflow.

What lives here: construction only. The loop is rljax.train. Everything the user can get wrong about
data and
model folders is found here, before the first compile.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from rljax.components import Component, resolve
from rljax.config import HOMES, Config, is_path, microbatch_rows
from rljax.data.curriculum import Curriculum
from rljax.data.encoded import Data, load_data, load_run_tokenizer
from rljax.data.loader import Loader, make_loader
from rljax.data.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.mesh import check_host_memory, make_mesh, on_host, replicated, row_shards
from rljax.models import lora
from rljax.models.config import LoraConfig, ModelConfig
from rljax.models.huggingface import load_config, load_params, load_with_report
from rljax.models.model import Model
from rljax.models.peft import load_adapter
from rljax.optimizers import make_optimizer
from rljax.recipe import Recipe, rehearse
from rljax.rewards.pool import RewardPool
from rljax.roles import (
    WITH_OPTIMIZER,
    Actor,
    Baseline,
    Critic,
    KLController,
    Reference,
    Reward,
    start_training,
)
from rljax.sampler import Sampling
from rljax.trees import flattened, merged, nested
from rljax.update import Steps, TrainState


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays the same through a run."""

    config: Config
    model: Model
    tokenizer: Tokenizer
    data: Data
    dataflow: Component
    recipe: Recipe
    sft_recipe: Recipe

    @property
    def needs_critic(self) -> bool:
        return "critic" in self.dataflow.parameters

    @property
    def needs_reference(self) -> bool:
        algorithm = self.config.algorithm
        return "reference" in self.dataflow.parameters and (
            algorithm.kl_in_reward > 0 or algorithm.kl_in_loss > 0
        )

    @property
    def needs_kl_controller(self) -> bool:
        wanted = self.needs_reference and self.config.algorithm.kl_target > 0
        return wanted and "kl_controller" in self.dataflow.parameters

    @property
    def needs_baseline(self) -> bool:
        return "baseline" in self.dataflow.parameters

    @property
    def needs_reward(self) -> bool:
        return "reward" in self.dataflow.parameters


def _adapters(config: Config) -> dict:
    """The fields of ModelConfig that lora says."""
    wish = config.lora
    if not wish.rank:
        return {}
    made = LoraConfig(wish.rank, float(wish.alpha), tuple(wish.targets), wish.base)
    return {
        "lora": made,
        "weight_dtype": wish.base if wish.base in ("float32", "bfloat16") else "bfloat16",
    }


def load_model(config: Config, tokenizer: Tokenizer) -> Model:
    """The static model of the config, on its mesh."""
    settings = {**dataclasses.asdict(config.model_settings), **_adapters(config)}
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    wishes = {f"memory.{k}": v for k, v in dataclasses.asdict(config.memory).items()}
    wishes["model_settings.remat='offload'"] = config.model_settings.remat == "offload"
    for name in (name for name, wanted in wishes.items() if wanted):
        check_host_memory(mesh, name)
    if is_path(config.model):
        model_config = load_config(config.model, **settings)
        if tokenizer.vocab_size > model_config.vocab_size:
            raise InputError(
                f"the tokenizer of {config.tokenizer or config.model} has too many ids",
                value=tokenizer.vocab_size,
                rule=f"the model's vocab_size is {model_config.vocab_size}",
                fix="use the tokenizer that came with the model",
            )
    else:
        plain = resolve(config.model, HOMES["model"])(tokenizer.vocab_size)
        model_config = dataclasses.replace(plain, **settings)
    return Model(model_config, mesh)


def check_length(prompt_tokens: int, response_tokens: int, model: Model) -> None:
    """Raises InputError if a row would not fit into the model's context."""
    longest = prompt_tokens + response_tokens
    if longest > model.config.max_tokens:
        raise InputError(
            f"rows have up to {prompt_tokens} prompt + {response_tokens} response tokens",
            value=longest,
            rule=f"the model's context is {model.config.max_tokens} tokens",
            fix="lower data.max_prompt_tokens or sampler.max_response_tokens",
        )


def _steps(config: Config, rows: int, tokens: int, model: Model, epochs: int) -> Steps:
    shards = row_shards(model.mesh)
    if rows % shards:
        raise InputError(
            f"{rows} sequences of an optimizer step do not divide over {shards} devices",
            rule="mesh.data x fsdp x expert splits the rows",
            fix=f"a multiple of {shards}, or a smaller mesh",
        )
    return Steps(
        rows=rows, microbatch_rows=microbatch_rows(config, rows, tokens, shards), epochs=epochs
    )


def _sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    sampler = config.sampler
    thinking = {}
    if sampler.thinking_tokens:
        phrase = tuple(tokenizer.encode(sampler.interrupt_phrase))
        end = tuple(tokenizer.encode(sampler.end_of_thinking))
        left = sampler.max_response_tokens - max(sampler.thinking_tokens) - len(phrase)
        for name, ids in (("interrupt_phrase", phrase), ("end_of_thinking", end)):
            if not ids:
                raise InputError(f"sampler.{name} has no tokens", fix="give it a text")
        if left < 1:
            raise InputError(
                "sampler.max_response_tokens leaves no room for an answer",
                value=sampler.max_response_tokens,
                rule=f"{max(sampler.thinking_tokens)} thinking tokens and {len(phrase)} of "
                "interrupt_phrase come before it",
                fix=f"at least {sampler.max_response_tokens - left + 1}",
            )
        thinking = dict(
            thinking_tokens=tuple(sampler.thinking_tokens),
            end_of_thinking_ids=end,
            interrupt_ids=phrase,
        )
    return Sampling(
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        max_response_tokens=sampler.max_response_tokens,
        stop_ids=tuple(tokenizer.eos_ids),
        **thinking,
    )


def prompt_stream(config: Config, data: Data) -> Loader | Curriculum:
    """The order of the training prompts: a shuffled loader, or a curriculum if the config asks for
    a mixture or for prompts to be retired."""
    size, seed, wish = config.batch.prompts_per_step, config.seed, config.data
    if not (wish.sources or wish.retire_at_pass_rate or wish.drop_above_pass_rate):
        return make_loader(data.prompts, batch_size=size, seed=seed)
    return Curriculum(
        data.sources,
        batch_size=size,
        seed=seed,
        weights=wish.weights,
        final_weights=wish.final_weights,
        horizon_prompts=size * max(config.steps, 1),
        retire_at=wish.retire_at_pass_rate,
    )


def _optional(text: str, stage: str) -> Component | None:
    return resolve(text, HOMES[stage]) if text else None


def _each(texts: tuple[str, ...], stage: str) -> tuple[Component, ...]:
    return tuple(resolve(text, HOMES[stage]) for text in texts)


def build(config: Config) -> Setup:
    """Everything but the weights. Raises InputError for bad data, tokenizer or model folders."""
    tokenizer = load_run_tokenizer(config)
    data = load_data(config, tokenizer)
    model = load_model(config, tokenizer)
    sampler, algorithm, batch = config.sampler, config.algorithm, config.batch
    check_length(data.prompt_tokens, sampler.max_response_tokens, model)
    if config.sft.steps and data.example_tokens > model.config.max_tokens:
        raise InputError(
            "the longest worked example, in tokens",
            value=data.example_tokens,
            rule=f"the model's context is {model.config.max_tokens} tokens",
            fix="shorten the examples, or lower data.max_prompt_tokens",
        )
    recipe = Recipe(
        samples_per_prompt=batch.samples_per_prompt,
        sampling=_sampling(config, tokenizer),
        advantage=resolve(algorithm.advantage, HOMES["advantage"]),
        policy_loss=resolve(algorithm.policy_loss, HOMES["policy_loss"]),
        value_loss=resolve(algorithm.value_loss, HOMES["value_loss"]),
        reduction=resolve(algorithm.reduction, HOMES["reduction"]),
        kl_in_reward=algorithm.kl_in_reward,
        kl_in_loss=algorithm.kl_in_loss,
        kl_estimator=algorithm.kl_estimator,
        kl_reward_estimator=algorithm.kl_reward_estimator,
        kl_importance=algorithm.kl_importance,
        entropy_coef=algorithm.entropy_coef,
        correct_at=config.evaluate.correct_at,
        trust_region=algorithm.trust_region,
        correction=_optional(algorithm.correction, "correction"),
        old_logprobs=algorithm.old_logprobs,
        collect=resolve(algorithm.collect, HOMES["collect"]),
        reward_shaping=_each(algorithm.reward_shaping, "shaping"),
        baseline_filters=_each(algorithm.baseline_filters, "filter"),
        filters=_each(algorithm.filters, "filter"),
        steps=_steps(
            config,
            batch.sequences_per_optimizer_step,
            data.prompt_tokens + sampler.max_response_tokens,
            model,
            batch.epochs,
        ),
    )
    rehearse(recipe)
    sft_recipe = recipe
    if config.sft.steps:
        steps = _steps(config, config.sft.sequences_per_step, data.example_tokens, model, 1)
        sft_recipe = dataclasses.replace(
            recipe, steps=steps, reduction=resolve("token_mean", HOMES["reduction"])
        )
    dataflow = resolve(config.dataflow, HOMES["dataflow"])
    return Setup(config, model, tokenizer, data, dataflow, recipe, sft_recipe)


def initial_params(config: Config, model: Model, record: Path | None = None) -> dict:
    """The weights the run starts from: the Hugging Face folder's, or random ones from the seed;
    with adapters, fresh ones or those of lora.adapter.

    What was loaded (folder, revision, SHA-256 of each file) is written to `record`, if given.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    plain = dataclasses.replace(model, config=lora.without(model.config))
    if is_path(config.model):
        params, report = load_with_report(config.model, plain)
        if record and jax.process_index() == 0:
            record.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    else:
        params = plain.init(key)
    if model.config.lora is None:
        return params
    params = lora.attach(model, params, jax.random.fold_in(key, 1))
    return load_adapter(config.lora.adapter, model, params) if config.lora.adapter else params


def sft_roles(setup: Setup, params) -> dict:
    """The actor with the optimizer of the supervised phase."""
    config = setup.config
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    return {"actor": _actor(setup, params, optimizer)}


def _state(setup: Setup, model: Model, params, optimizer) -> TrainState:
    on_host = setup.config.memory.optimizer_on_host
    return start_training(model, params, optimizer, optimizer_on_host=on_host)


def _actor(setup: Setup, params, optimizer) -> Actor:
    return Actor(
        _state(setup, setup.model, params, optimizer),
        setup.model,
        optimizer,
        setup.config.sampler.temperature,
    )


def optimizer_steps(config: Config) -> int:
    """Optimizer steps of the whole RL phase: what schedules are laid out over."""
    batch = config.batch
    rows = batch.prompts_per_step * batch.samples_per_prompt
    return config.steps * batch.epochs * (rows // batch.sequences_per_optimizer_step)


def _copy(tree):
    """A donated buffer cannot have two owners."""
    return jax.tree.map(jnp.copy, tree)


def _reference_params(setup: Setup, params: dict) -> dict:
    """The policy as it is now. Under adapters it shares the frozen base, and only the adapters are
    copied: fresh ones are exactly off."""
    model = setup.model
    if model.config.lora:
        adapters, base = model.split(params)
        return merged(_copy(adapters), base)
    to_host, low = setup.config.memory.reference_on_host, setup.config.model_settings.dtype

    def copy(path, x):
        dtype = low if _multiplied_in_dtype(path, model.config) else x.dtype
        x = jnp.array(x, dtype, copy=True)
        return jax.device_put(x, on_host(x.sharding)) if to_host else x

    return nested({path: copy(path, x) for path, x in flattened(params).items()})


def _multiplied_in_dtype(path: tuple[str, ...], config: ModelConfig) -> bool:
    """Whether the model rounds this weight to its dtype before use. Rounding a frozen copy then
    changes nothing; every other weight (router, norms, a float32 head) stays what the actor has:
    KL to the reference starts at exactly 0."""
    if path in (("head",), ("embedding",)):
        return not config.head_in_float32
    experts = path[0] == "layers" and path[-2:] in (("mlp", "gate"), ("mlp", "up"), ("mlp", "down"))
    return path[-1] == "weight" or experts


def _critic(config: Config, policy: Model, params: dict) -> tuple[Model, dict]:
    """The reward model of critic_model with its own config.json and head; without one, the policy's
    body and a head of zeros."""
    model = dataclasses.replace(policy, head="scalar")
    if config.critic_model:
        return _reward_model(config, policy)
    body = {k: v for k, v in params.items() if k != "head"}
    head = model.abstract()["head"]
    body["head"] = jax.device_put(jnp.zeros(head.shape, head.dtype), head.sharding)
    trained, base = model.split(body)
    return model, merged(_copy(trained), base)


def _reward_model(config: Config, policy: Model) -> tuple[Model, dict]:
    """An outcome or process reward model as the critic's start. Of two labels (wrong, right) the
    value is the difference of the logits, the log-odds of right."""
    folder = config.critic_model
    settings = {**dataclasses.asdict(config.model_settings), **_adapters(config)}
    wanted = load_config(folder, **settings)
    if wanted.vocab_size != policy.config.vocab_size:
        raise InputError(
            f"critic_model={folder} has another vocabulary",
            value=wanted.vocab_size,
            rule=f"the policy's has {policy.config.vocab_size} words",
        )
    if wanted.labels > 2:
        raise InputError(f"critic_model={folder}", value=wanted.labels, rule="1 or 2 labels")
    plain = Model(lora.without(wanted), policy.mesh, "scalar")
    params = load_params(folder, plain)
    if wanted.labels == 2:
        for name in ("head", "head_bias"):
            if name in params:
                params[name] = params[name][..., 1:] - params[name][..., :1]
    model = Model(dataclasses.replace(wanted, labels=1), policy.mesh, "scalar")
    if wanted.lora:
        key = jax.random.fold_in(jax.random.key(config.seed), 2)
        params = lora.attach(model, params, key)
    return model, params


def rl_roles(setup: Setup, params) -> dict:
    """Fresh optimizer state on `params`, and the other roles of the dataflow, started from `params`
    too."""
    config = setup.config
    total = optimizer_steps(config)
    roles = {}
    if setup.needs_reference:
        frozen = _reference_params(setup, params)
        roles["reference"] = Reference(frozen, setup.model, config.sampler.temperature)
    if setup.needs_critic:
        optimizer = make_optimizer(config.critic_optimizer, total)
        model, body = _critic(config, setup.model, params)
        roles["critic"] = Critic(_state(setup, model, body, optimizer), model, optimizer)
    whole = replicated(setup.model.mesh)
    if setup.needs_kl_controller:
        state = jax.device_put(jnp.ones((), jnp.float32), whole)
        algorithm = config.algorithm
        roles["kl_controller"] = KLController(state, algorithm.kl_target, algorithm.kl_horizon)
    if setup.needs_baseline:
        roles["baseline"] = Baseline(jax.device_put(jnp.zeros(2, jnp.float32), whole))
    roles["actor"] = _actor(setup, params, make_optimizer(config.actor_optimizer, total))
    return roles


def reward_role(setup: Setup, text: str) -> Reward:
    """The reward function `text` in a pool of killable workers."""
    reward = setup.config.reward
    pool = RewardPool(text, workers=reward.workers, timeout_s=reward.timeout_s)
    return Reward(pool, setup.tokenizer, setup.model.mesh)


def role_arrays(roles: dict) -> dict:
    """What a checkpoint keeps of the roles: parameters, optimizer state, counters. A base under
    adapters comes from where it came from, not from the checkpoint."""
    out = {}
    for name, role in sorted(roles.items()):
        if isinstance(role, Reference):
            out[name] = role.model.split(role.params)[0]
        elif isinstance(role, WITH_OPTIMIZER):
            out[name] = dataclasses.replace(role.state, frozen={})
        else:
            out[name] = role.state
    return out


def with_arrays(roles: dict, arrays: dict) -> dict:
    """The roles with the arrays of a checkpoint."""
    out = {}
    for name, role in roles.items():
        new = arrays[name]
        if isinstance(role, Reference):
            new = merged(new, role.model.split(role.params)[1])
            out[name] = dataclasses.replace(role, params=new)
            continue
        if isinstance(role, WITH_OPTIMIZER):
            new = dataclasses.replace(new, frozen=role.state.frozen)
        out[name] = dataclasses.replace(role, state=new)
    return out
