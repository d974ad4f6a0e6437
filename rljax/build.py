"""From a config to the things a run needs: mesh, tokenizer, encoded data, roles, the recipe of a
dataflow.

What lives here: construction only. The loop is rljax.train. Everything the user can get wrong about
data and
model folders is found here, before the first compile.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rljax.components import Component, resolve
from rljax.config import HOMES, Config, is_path, microbatch_rows
from rljax.data.loader import fingerprint
from rljax.data.prompts import encode_prompts, encode_worked_examples
from rljax.data.sources import load_prompts, load_worked_examples
from rljax.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from rljax.errors import InputError
from rljax.mesh import make_mesh, row_shards
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.optimizers import make_optimizer
from rljax.rewards.pool import RewardPool
from rljax.roles import Actor, Critic, Reference, Reward, start_training
from rljax.sampler import Sampling
from rljax.update import Steps


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a dataflow reads: the config's algorithm with its components resolved. Hashable: static
    in jit."""

    samples_per_prompt: int
    sampling: Sampling
    advantage: Component
    policy_loss: Component
    value_loss: Component
    reduction: Component
    kl_in_reward: float
    kl_in_loss: float
    kl_estimator: str
    entropy_coef: float
    steps: Steps

    @property
    def update_options(self) -> dict:
        """The keyword arguments of Actor.update that the config sets."""
        return {
            "steps": self.steps,
            "reduction": self.reduction,
            "kl_in_loss": self.kl_in_loss,
            "kl_estimator": self.kl_estimator,
            "entropy_coef": self.entropy_coef,
        }


@dataclasses.dataclass(frozen=True)
class Data:
    """Encoded once. Lengths are those of the longest row, so that a run has one shape."""

    prompts: list[dict]
    test_prompts: list[dict]
    examples: list
    counts: dict[str, int]
    prompt_tokens: int
    example_tokens: int
    digest: str


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
    def needs_reward(self) -> bool:
        return "reward" in self.dataflow.parameters


def load_run_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer folder of the config, else the model's folder, else the alphabet of the
    task."""
    if config.tokenizer:
        return load_tokenizer(config.tokenizer)
    if is_path(config.model):
        return load_tokenizer(config.model)
    if is_path(config.data.train):
        raise InputError(
            "a built-in model has no tokenizer for a data file",
            value=config.data.train,
            fix="set tokenizer to a folder with tokenizer.json, or model to a Hugging Face folder",
        )
    task = resolve(config.data.train, HOMES["data"])()
    alphabet = vars(task).get("alphabet")
    if not isinstance(alphabet, str):
        raise InputError(
            f"task {config.data.train!r} has no alphabet", fix="set tokenizer to a folder"
        )
    return CharTokenizer(alphabet)


def _load_data(config: Config, tokenizer: Tokenizer) -> Data:
    records = load_prompts(config.data.train, "train")
    limit, overlong = config.data.max_prompt_tokens, config.data.overlong
    prompts, counts = encode_prompts(records, tokenizer, max_prompt_tokens=limit, overlong=overlong)
    test_records, test = [], []
    test_spec = config.data.test or ("" if is_path(config.data.train) else config.data.train)
    if test_spec:
        test_records = load_prompts(test_spec, "test")[: config.evaluate.prompts]
        test, _ = encode_prompts(
            test_records, tokenizer, max_prompt_tokens=limit, overlong=overlong
        )
    worked, examples = [], []
    if config.sft.steps:
        worked = load_worked_examples(config.sft.data or config.data.train, "train")
        total = limit + config.sampler.max_response_tokens
        examples, example_counts = encode_worked_examples(worked, tokenizer, max_tokens=total)
        counts = {**counts, **{f"examples_{k}": v for k, v in example_counts.items()}}
    return Data(
        prompts=prompts,
        test_prompts=test,
        examples=examples,
        counts=counts,
        prompt_tokens=max(len(r["token_ids"]) for r in prompts + test),
        example_tokens=max((len(ids) for ids, _ in examples), default=1),
        digest=fingerprint(
            [*records, *test_records, *worked, {"tokenizer": tokenizer.fingerprint()}]
        ),
    )


def load_model(config: Config, tokenizer: Tokenizer) -> Model:
    """The static model of the config, on its mesh."""
    settings = dataclasses.asdict(config.model_settings)
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
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
            rule="mesh.data x mesh.fsdp splits the rows",
            fix=f"a multiple of {shards}, or a smaller mesh",
        )
    return Steps(
        rows=rows, microbatch_rows=microbatch_rows(config, rows, tokens, shards), epochs=epochs
    )


def build(config: Config) -> Setup:
    """Everything but the weights. Raises InputError for bad data, tokenizer or model folders."""
    tokenizer = load_run_tokenizer(config)
    data = _load_data(config, tokenizer)
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
        sampling=Sampling(
            temperature=sampler.temperature,
            top_k=sampler.top_k,
            top_p=sampler.top_p,
            max_response_tokens=sampler.max_response_tokens,
            stop_ids=tuple(tokenizer.eos_ids),
        ),
        advantage=resolve(algorithm.advantage, HOMES["advantage"]),
        policy_loss=resolve(algorithm.policy_loss, HOMES["policy_loss"]),
        value_loss=resolve(algorithm.value_loss, HOMES["value_loss"]),
        reduction=resolve(algorithm.reduction, HOMES["reduction"]),
        kl_in_reward=algorithm.kl_in_reward,
        kl_in_loss=algorithm.kl_in_loss,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        steps=_steps(
            config,
            batch.sequences_per_optimizer_step,
            data.prompt_tokens + sampler.max_response_tokens,
            model,
            batch.epochs,
        ),
    )
    sft_recipe = recipe
    if config.sft.steps:
        steps = _steps(config, config.sft.sequences_per_step, data.example_tokens, model, 1)
        sft_recipe = dataclasses.replace(
            recipe, steps=steps, reduction=resolve("token_mean", HOMES["reduction"])
        )
    dataflow = resolve(config.dataflow, HOMES["dataflow"])
    return Setup(config, model, tokenizer, data, dataflow, recipe, sft_recipe)


def initial_params(setup: Setup):
    """The weights the run starts from: the Hugging Face folder's, or random ones from the seed."""
    if is_path(setup.config.model):
        return load_params(setup.config.model, setup.model)
    return setup.model.init(jax.random.fold_in(jax.random.key(setup.config.seed), 1))


def sft_roles(setup: Setup, params) -> dict:
    """The actor with the optimizer of the supervised phase."""
    config = setup.config
    optimizer = make_optimizer(config.sft.optimizer, config.sft.steps)
    return {"actor": _actor(setup, params, optimizer)}


def _actor(setup: Setup, params, optimizer) -> Actor:
    return Actor(
        start_training(setup.model, params, optimizer),
        setup.model,
        optimizer,
        setup.config.sampler.temperature,
    )


def optimizer_steps(config: Config) -> int:
    """Optimizer steps of the whole RL phase: what schedules are laid out over."""
    batch = config.batch
    rows = batch.prompts_per_step * batch.samples_per_prompt
    return config.steps * batch.epochs * (rows // batch.sequences_per_optimizer_step)


def rl_roles(setup: Setup, params) -> dict:
    """Fresh optimizer state on `params`, and the other roles of the dataflow, started from `params`
    too."""
    config = setup.config
    total = optimizer_steps(config)
    roles = {}
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731  a donated buffer cannot have two owners
    if setup.needs_reference:
        # A frozen model needs no float32 master weights, but a head that multiplies in float32 must
        # hold the actor's very numbers: KL to the reference starts at exactly 0.
        exact = {"head", "embedding"} if setup.model.config.head_in_float32 else set()
        low = config.model_settings.dtype
        frozen = {
            name: jax.tree.map(
                lambda x, dtype=None if name in exact else low: jnp.array(x, dtype, copy=True), part
            )
            for name, part in params.items()
        }
        roles["reference"] = Reference(frozen, setup.model, config.sampler.temperature)
    if setup.needs_critic:
        optimizer = make_optimizer(config.critic_optimizer, total)
        model = dataclasses.replace(setup.model, head="scalar")
        body = {k: v for k, v in copy(params).items() if k != "head"}
        head = jnp.zeros((model.config.embed, 1), model.config.weight_dtype)
        body["head"] = jax.device_put(head, model.shardings()["head"])
        roles["critic"] = Critic(start_training(model, body, optimizer), model, optimizer)
    roles["actor"] = _actor(setup, params, make_optimizer(config.actor_optimizer, total))
    return roles


def reward_role(setup: Setup, text: str) -> Reward:
    """The reward function `text` in a pool of killable workers."""
    reward = setup.config.reward
    pool = RewardPool(text, workers=reward.workers, timeout_s=reward.timeout_s)
    return Reward(pool, setup.tokenizer, setup.model.mesh)


def role_arrays(roles: dict) -> dict:
    """What a checkpoint keeps of the roles: parameters, optimizer state, counters."""
    return {k: r.params if isinstance(r, Reference) else r.state for k, r in sorted(roles.items())}


def with_arrays(roles: dict, arrays: dict) -> dict:
    """The roles with the arrays of a checkpoint."""
    out = {}
    for name, role in roles.items():
        field = "params" if isinstance(role, Reference) else "state"
        out[name] = dataclasses.replace(role, **{field: arrays[name]})
    return out
