"""From a config to the things a run needs: mesh, tokenizer, encoded data, the recipe of a dataflow.

What lives here: construction of all but the roles. Everything that the user can get wrong about
data and model folders is found here, before the first compile.
"""

import dataclasses

from rljax.components import Component, resolve
from rljax.config import HOMES, Config, is_path, microbatch_rows
from rljax.data.curriculum import Curriculum
from rljax.data.encoded import Data, load_data, load_run_tokenizer
from rljax.data.loader import Loader, make_loader
from rljax.data.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.mesh import check_host_memory, make_mesh, row_shards
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.recipe import Recipe, rehearse
from rljax.sampler import Sampling
from rljax.update import Steps


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


def adapter_fields(config: Config) -> dict:
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
    settings = {**dataclasses.asdict(config.model_settings), **adapter_fields(config)}
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
