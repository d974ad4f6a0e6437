"""From a config to the things a run needs: mesh, tokenizer, encoded data, the recipe of a dataflow.

What lives here: construction of all but the roles. Everything that the user can get wrong about
data and model folders is found here, before the first compile.
"""

import dataclasses
import functools

from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, is_path, microbatch_rows
from rljax.data.kinds import data_kind
from rljax.data.offline.batches import longest_row
from rljax.data.online.curriculum import Curriculum
from rljax.data.online.encoded import Data, load_data, load_run_tokenizer
from rljax.data.online.loader import Loader, make_loader
from rljax.data.online.stream import StreamLoader
from rljax.data.text.tokenizer import Tokenizer
from rljax.dataflows.algorithm import Recipe, rehearse, rehearse_compared
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.mesh import check_host_memory, make_mesh, row_shards
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.roles import rows_per_example, trait
from rljax.sampler import Decoding, Sampling


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
    decoding: Decoding = Decoding()
    row_tokens: int = 0  # columns of a batch
    rows_per_example: int = 1  # of an offline batch

    @property
    def learns_offline(self) -> bool:
        return self.data.kind != "prompts"

    @property
    def needs_reference(self) -> bool:
        """A dataflow that names it without a default always has one. Else an online one has it for
        its KL, an offline one for its loss, unless the reference's log-probs are on disk."""
        parameter = self.dataflow.signature.parameters.get("reference")
        if parameter is None or parameter.default is not None:
            return parameter is not None
        if self.learns_offline:
            stored = bool(self.config.offline.reference_logprobs)
            reads = self.data.kind != "pairs" or trait(
                self.recipe.preference_loss, "needs_reference"
            )
            return reads and not stored
        return self.config.algorithm.kl_in_reward > 0 or self.config.algorithm.kl_in_loss > 0

    @property
    def starts_from_policy(self) -> bool:
        """Whether any role begins with the weights of `model`: not where a reward model is trained
        on from critic_model."""
        return self.trains == "actor" or self.config.sft.steps > 0 or not self.config.critic_model

    @property
    def trains(self) -> str:
        """The role that the run is about: what is exported and evaluated."""
        return "actor" if "actor" in self.dataflow.parameters else "reward_model"

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


def load_model(config: Config, tokenizer: Tokenizer, devices=None) -> Model:
    """The static model of the config, on its mesh over `devices` (default: all there are)."""
    settings = {**dataclasses.asdict(config.model_settings), **adapter_fields(config)}
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
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
        plain = resolve(config.model, NAMESPACES["model"])(tokenizer.vocab_size)
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


def _steps(
    config: Config, rows: int, tokens: int, model: Model, epochs: int, together: int = 1
) -> Steps:
    """`together` rows are one example and stay in one microbatch."""
    shards = row_shards(model.mesh) * together
    if rows % shards:
        raise InputError(
            f"{rows} sequences of an optimizer step do not divide over {shards} devices",
            rule="mesh.data x fsdp x expert splits the rows"
            + (f", and {together} of them are one example" if together > 1 else ""),
            fix=f"a multiple of {shards}, or a smaller mesh",
        )
    return Steps(
        rows=rows, microbatch_rows=microbatch_rows(config, rows, tokens, shards), epochs=epochs
    )


def sampling_of(config: Config, tokenizer: Tokenizer) -> Sampling:
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
        min_p=sampler.min_p,
        stop_strings=tuple(sampler.stop_strings),
        max_response_tokens=sampler.max_response_tokens,
        stop_ids=tuple(tokenizer.eos_ids),
        **thinking,
    )


def decoding_of(config: Config, tokenizer: Tokenizer) -> Decoding:
    """How whole batches are decoded."""
    sampler = config.sampler
    # A stop string may be a special token's.
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return Decoding(
        sampler.slots, sampler.loop, sampler.kv_dtype, decode if sampler.stop_strings else None
    )


def data_stream(config: Config, data: Data) -> Loader | StreamLoader | Curriculum:
    """The order of the training data: a shuffled loader, or a curriculum if the config asks for
    a mixture or for prompts to be retired."""
    seed, wish = config.seed, config.data
    online = data.kind == "prompts"
    size = config.batch.prompts_per_step if online else config.offline.examples_per_step
    for name in ("retire_at_pass_rate", "drop_above_pass_rate"):
        if data.endless and getattr(wish, name):
            raise InputError(
                f"data.{name}", value=getattr(wish, name),
                rule="a prompt of an endless stream comes once: there is nothing to leave out",
                fix=f"data.{name}=0, or a fixed number of prompts: prompts=5000 in the task's "
                "brackets (reasoning_gym: size=5000)",
            )  # fmt: skip
    if not (wish.sources or wish.retire_at_pass_rate or wish.drop_above_pass_rate):
        return make_loader(data.sources[0], batch_size=size, seed=seed)
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
    return resolve(text, NAMESPACES[stage]) if text else None


def _each(texts: tuple[str, ...], stage: str) -> tuple[Component, ...]:
    return tuple(resolve(text, NAMESPACES[stage]) for text in texts)


def _recipe(config: Config, tokenizer: Tokenizer, steps: Steps) -> Recipe:
    algorithm = config.algorithm
    return Recipe(
        samples_per_prompt=config.batch.samples_per_prompt,
        sampling=sampling_of(config, tokenizer),
        advantage=resolve(algorithm.advantage, NAMESPACES["advantage"]),
        policy_loss=resolve(algorithm.policy_loss, NAMESPACES["policy_loss"]),
        value_loss=resolve(algorithm.value_loss, NAMESPACES["value_loss"]),
        preference_loss=resolve(algorithm.preference_loss, NAMESPACES["preference_loss"]),
        reward_loss=resolve(algorithm.reward_loss, NAMESPACES["reward_loss"]),
        reduction=resolve(algorithm.reduction, NAMESPACES["reduction"]),
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
        collect=resolve(algorithm.collect, NAMESPACES["collect"]),
        reward_shaping=_each(algorithm.reward_shaping, "shaping"),
        baseline_filters=_each(algorithm.baseline_filters, "filter"),
        filters=_each(algorithm.filters, "filter"),
        steps=steps,
    )


def _check_context(what: str, tokens: int, model: Model, fix: str) -> None:
    if tokens > model.config.max_tokens:
        rule = f"the model's context is {model.config.max_tokens} tokens"
        raise InputError(f"the longest {what}, in tokens", value=tokens, rule=rule, fix=fix)


def build(config: Config) -> Setup:
    """Everything but the weights. Raises InputError for bad data, tokenizer or model folders."""
    tokenizer = load_run_tokenizer(config)
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    data = load_data(config, tokenizer, data_kind(dataflow))
    model = load_model(config, tokenizer)
    row = data.prompt_tokens + config.sampler.max_response_tokens
    if data.kind != "prompts":
        every = [x["item"] for source in data.sources for x in source]
        every += [x["item"] for x in data.held_out]
        row = longest_row(data.kind, every)
    return assemble(config, tokenizer, dataflow, data, model, row)


def assemble(
    config: Config, tokenizer: Tokenizer, dataflow: Component, data: Data, model: Model, row: int
) -> Setup:
    """The setup of what was loaded; rows have `row` tokens. Every component is called once, on
    shapes alone."""
    response, batch, together = config.sampler.max_response_tokens, config.batch, 1
    if config.sft.steps:
        fix = "shorten the examples, or lower data.max_prompt_tokens"
        _check_context("worked example", data.example_tokens, model, fix)
    if data.test_prompts or data.kind == "prompts":
        check_length(data.prompt_tokens, response, model)
    if data.kind == "prompts":
        rows = batch.sequences_per_optimizer_step
        steps = _steps(config, rows, row, model, batch.epochs)
    else:
        _check_context("row", row, model, "lower offline.max_tokens, or shorten the rows")
        together = example_rows(config, dataflow, data.kind)
        rows = config.offline.examples_per_step * together
        steps = _steps(config, rows, row, model, 1, together)
    recipe = _recipe(config, tokenizer, steps)
    rehearse(recipe, data.kind, dataflow)
    rehearse_compared(recipe, dataflow)
    sft_recipe = recipe
    if config.sft.steps:
        steps = _steps(config, config.sft.sequences_per_step, data.example_tokens, model, 1)
        sft_recipe = recipe.replace(
            steps=steps, reduction=resolve("token_mean", NAMESPACES["reduction"])
        )
    decoding = decoding_of(config, tokenizer)
    return Setup(
        config, model, tokenizer, data, dataflow, recipe, sft_recipe, decoding, row, together
    )


def example_rows(config: Config, dataflow: Component, kind: str) -> int:
    """Rows that follow each other and are one example: 2 of a pair, 3 with a reference one, which
    the preference loss of a policy may read."""
    if kind != "pairs":
        return 1
    if "actor" not in dataflow.parameters:
        return 2
    loss = resolve(config.algorithm.preference_loss, NAMESPACES["preference_loss"])
    return max(rows_per_example(loss), 2)
