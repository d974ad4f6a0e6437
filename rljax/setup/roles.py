"""The roles of a run: initial weights, what each role starts from, what a checkpoint keeps of them.

What lives here: construction of roles and nothing of the data. What does not: the rest of the setup
(rljax.setup.setup), the loop (rljax.train).
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.learn.optimizers import make_optimizer
from rljax.learn.state import TrainState
from rljax.mesh import on_host, replicated
from rljax.models.adapters import lora
from rljax.models.config import ModelConfig
from rljax.models.huggingface import load_config, load_params, load_with_report
from rljax.models.huggingface.peft import load_adapter
from rljax.models.model import Model
from rljax.models.trees import flattened, merged, nested
from rljax.rewards.judges.judges import judge
from rljax.rewards.judges.rubrics import rubric, rubrics_of
from rljax.rewards.pool.pool import RewardPool
from rljax.roles import (
    WITH_OPTIMIZER,
    Actor,
    Baseline,
    Critic,
    KLController,
    Reference,
    RewardModel,
    labels,
    start_training,
)
from rljax.rollout import MeshJudge, ModelScorer, ProcessScorer, Reward
from rljax.setup.setup import Setup, adapter_fields


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
        setup.decoding,
    )


def optimizer_steps(setup: Setup) -> int:
    """Optimizer steps of the whole phase after the supervised one: what schedules are laid out
    over."""
    config, batch = setup.config, setup.config.batch
    if setup.learns_offline:
        return config.steps
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
        dtype = low if multiplied_in_dtype(path, model.config) else x.dtype
        x = jnp.array(x, dtype, copy=True)
        return jax.device_put(x, on_host(x.sharding)) if to_host else x

    return nested({path: copy(path, x) for path, x in flattened(params).items()})


def multiplied_in_dtype(path: tuple[str, ...], config: ModelConfig) -> bool:
    """Whether the model rounds this weight to its dtype before use. Rounding a frozen copy then
    changes nothing; every other weight (router, norms, a float32 head) stays what the actor has:
    KL to the reference starts at exactly 0."""
    if path in (("head",), ("embedding",)):
        return not config.head_in_float32
    experts = path[0] == "layers" and path[-2:] in (("mlp", "gate"), ("mlp", "up"), ("mlp", "down"))
    return path[-1] == "weight" or experts


def _critic(config: Config, policy: Model, params: dict, count: int) -> tuple[Model, dict]:
    """The reward model of critic_model with its own config.json and head; without one, the policy's
    body and a head of zeros, of `count` labels."""
    model = dataclasses.replace(
        policy, head="scalar", config=dataclasses.replace(policy.config, labels=count)
    )
    if config.critic_model:
        return scalar_model(config, policy, "critic_model", config.critic_model, adapted=True)
    body = {k: v for k, v in params.items() if k != "head"}
    head = model.abstract()["head"]
    body["head"] = jax.device_put(jnp.zeros(head.shape, head.dtype), head.sharding)
    trained, base = model.split(body)
    return model, merged(_copy(trained), base)


def load_scalar(field: str, folder: str, wanted: ModelConfig, mesh) -> tuple[Model, dict]:
    """A reward model as one with a single label: of two (wrong, right) the value is the difference
    of the logits."""
    if wanted.labels > 2:
        raise InputError(f"{field}={folder}", value=wanted.labels, rule="1 or 2 labels")
    params = load_params(folder, Model(wanted, mesh, "scalar"))
    if wanted.labels == 2:
        for name in ("head", "head_bias"):
            if name in params:
                params[name] = params[name][..., 1:] - params[name][..., :1]
    return Model(dataclasses.replace(wanted, labels=1), mesh, "scalar"), params


def scalar_model(
    config: Config, policy: Model, field: str, folder: str, *, adapted: bool
) -> tuple[Model, dict]:
    """An outcome or process reward model of a folder. Of two labels (wrong, right) the value is the
    difference of the logits, the log-odds of right."""
    settings = dataclasses.asdict(config.model_settings)
    settings |= adapter_fields(config) if adapted else {}
    wanted = load_config(folder, **settings)
    _same_vocabulary(field, folder, wanted, policy)
    params = load_scalar(field, folder, lora.without(wanted), policy.mesh)[1]
    model = Model(dataclasses.replace(wanted, labels=1), policy.mesh, "scalar")
    if wanted.lora:
        key = jax.random.fold_in(jax.random.key(config.seed), 2)
        params = lora.attach(model, params, key)
    return model, params


def _same_vocabulary(field: str, folder: str, wanted: ModelConfig, policy: Model) -> None:
    if wanted.vocab_size != policy.config.vocab_size:
        raise InputError(
            f"{field}={folder} has another vocabulary",
            value=wanted.vocab_size,
            rule=f"the policy's has {policy.config.vocab_size} words: both read the same ids",
        )


def reference_role(setup: Setup, params: dict) -> Reference:
    """The policy as it is now, frozen."""
    frozen = _reference_params(setup, params)
    temperature = setup.config.sampler.temperature
    return Reference(frozen, setup.model, temperature, setup.decoding)


def _teacher(setup: Setup) -> Reference:
    """The model that is distilled, of its own size and family."""
    config, folder = setup.config, setup.config.teacher_model
    wanted = load_config(folder, **dataclasses.asdict(config.model_settings))
    _same_vocabulary("teacher_model", folder, wanted, setup.model)
    model = Model(wanted, setup.model.mesh)
    return Reference(load_params(folder, model), model, config.sampler.temperature)


def rl_roles(setup: Setup, params) -> dict:
    """Fresh optimizer state on `params`, and the other roles of the dataflow, started from `params`
    too."""
    config, named = setup.config, setup.dataflow.parameters
    total = optimizer_steps(setup)
    roles = {}
    if setup.needs_reference:
        roles["reference"] = reference_role(setup, params)
    if "teacher" in named:
        roles["teacher"] = _teacher(setup)
    for name, kind in (("critic", Critic), ("reward_model", RewardModel)):
        if name in named:
            optimizer = make_optimizer(config.critic_optimizer, total)
            wanted = labels(setup.recipe.reward_loss) if name == "reward_model" else 1
            model, body = _critic(config, setup.model, params, wanted)
            roles[name] = kind(_state(setup, model, body, optimizer), model, optimizer)
    whole = replicated(setup.model.mesh)
    if setup.needs_kl_controller:
        state = jax.device_put(jnp.ones((), jnp.float32), whole)
        algorithm = config.algorithm
        roles["kl_controller"] = KLController(state, algorithm.kl_target, algorithm.kl_horizon)
    if setup.needs_baseline:
        roles["baseline"] = Baseline(jax.device_put(jnp.zeros(2, jnp.float32), whole))
    if "actor" in named:
        roles["actor"] = _actor(setup, params, make_optimizer(config.actor_optimizer, total))
    return roles


def reward_role(setup: Setup, text: str, *, dense: bool = False) -> Reward:
    """The reward function `text` in a pool of killable workers or, for judge and rubric, asked of
    reward.judge_model; where it is "" the model of reward.model. `dense`, for training, adds the
    scores of lines by reward.process_model and the rubrics that evolve, if there are any."""
    reward, mesh = setup.config.reward, setup.model.mesh
    rows = max(setup.recipe.steps.microbatch_rows, 1)
    if text:
        evolving = dense and bool(reward.rubrics)
        if resolve(text, NAMESPACES["reward"]).function is rubric and not evolving:
            _check_rubrics(setup)
        pool = text_scorer(setup.config, text, mesh)
    else:
        model, params = scalar_model(
            setup.config, setup.model, "reward.model", reward.model, adapted=False
        )
        pool = ModelScorer(model, params, rows)
    scored = _process_scorer(setup, rows) if dense and reward.process_model else None
    rubrics = None
    if dense and reward.rubrics:
        rubrics = resolve(reward.rubrics, NAMESPACES["rubrics"])(reward.workers)
    return Reward(pool, setup.tokenizer, mesh, scored, rubrics)


def _check_rubrics(setup: Setup) -> None:
    """Every prompt has rubrics: else its samples would fail one by one, steps later."""
    prompts = [p for source in setup.data.sources for p in source if "extra_info" in p]
    for prompt in [*prompts, *setup.data.test_prompts]:
        try:
            rubrics_of(prompt["extra_info"])
        except ValueError as error:
            raise InputError(
                f"row {prompt['index']} of {prompt['data_source']!r} cannot be judged by rubrics",
                rule=str(error),
                fix="put them into extra_info of every row, or set reward.rubrics",
            ) from None


def text_scorer(config: Config, text: str, mesh) -> RewardPool | MeshJudge:
    """What scores samples by the reward `text`: workers, or reward.judge_model for what it can
    answer."""
    reward, component = config.reward, resolve(text, NAMESPACES["reward"])
    if not reward.judge_model or component.function not in (judge, rubric):
        return RewardPool(text, workers=reward.workers, timeout_s=reward.timeout_s)
    folder = reward.judge_model
    tokenizer = load_tokenizer(folder)
    model = Model(load_config(folder, **dataclasses.asdict(config.model_settings)), mesh)
    tokens = config.batch.tokens_per_microbatch
    return MeshJudge(
        model, load_params(folder, model), tokenizer, component, grades=reward.judge_grades,
        tokens_per_call=tokens,
    )  # fmt: skip


def _process_scorer(setup: Setup, rows: int) -> ProcessScorer:
    """The model of reward.process_model, which scores lines."""
    wish, home = setup.config.reward, NAMESPACES["process_reward"]
    model, params = scalar_model(
        setup.config, setup.model, "reward.process_model", wish.process_model, adapted=False
    )
    return ProcessScorer(
        model, params, rows, setup.tokenizer,
        lines=resolve(wish.process_lines, home), reward=resolve(wish.process_reward, home),
    )  # fmt: skip


def role_arrays(roles: dict) -> dict:
    """What a checkpoint keeps of the roles: parameters, optimizer state, counters. A base under
    adapters comes from where it came from, not from the checkpoint."""
    out = {}
    for name, role in sorted(roles.items()):
        if name == "teacher":
            continue  # never moved: it comes from its folder
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
        if name not in arrays:
            out[name] = role
            continue
        new = arrays[name]
        if isinstance(role, Reference):
            new = merged(new, role.model.split(role.params)[1])
            out[name] = dataclasses.replace(role, params=new)
            continue
        if isinstance(role, WITH_OPTIMIZER):
            new = dataclasses.replace(new, frozen=role.state.frozen)
        out[name] = dataclasses.replace(role, state=new)
    return out
