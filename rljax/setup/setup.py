"""Makes everything that a run needs but its roles: mesh, tokenizer, data, algorithm, phases.

Everything that the user can get wrong about data and model folders is found here, before the
first compile.
"""

import dataclasses

from rljax.components import Component, resolve
from rljax.config import (
    NAMESPACES,
    Config,
    OptimizerConfig,
    is_path,
    microbatch_rows,
    model_fields,
    value_of,
)
from rljax.config.schema import FIELDS
from rljax.contracts import spec
from rljax.data.kinds import PAIRED, SAMPLED
from rljax.data.online.curriculum import Curriculum
from rljax.data.online.encoded import Data
from rljax.data.online.loader import Loader
from rljax.data.text.tokenizer import Tokenizer
from rljax.dataflows.algorithm import Algorithm
from rljax.errors import InputError
from rljax.learn import Steps
from rljax.learn.packing import packing_for
from rljax.mesh import check_host_memory, make_mesh, row_shards
from rljax.models.attention import in_a_ring
from rljax.models.config import LoraConfig, ModelConfig
from rljax.models.huggingface import load_config
from rljax.models.model import Model
from rljax.rollout import RolloutConfig
from rljax.sampler import Decoding, Sampling
from rljax.sampler.stop_strings import stop_tokens
from rljax.setup.decoding import check_slots, decoding_on
from rljax.setup.placement import RoleGroup, dividing, sampler_mesh
from rljax.setup.same_ids import differing_ids, tokenizer_of


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run: `steps` steps of one dataflow, with fresh optimizers."""

    name: str  # "sft" or "rl"; counts its steps in a run's progress
    dataflow: Component
    algorithm: Algorithm
    steps: int
    optimizer_steps: int  # number of all its optimizer steps, the length of its schedules
    actor_optimizer: OptimizerConfig
    data: str  # rljax.data.kinds

    @property
    def samples(self) -> bool:
        """Returns whether its batches are sampled, not read from a file."""
        return self.data in SAMPLED

    @property
    def label(self) -> str:
        """Name in metrics: the dataflow if it learns from a file."""
        return self.name if self.samples or self.name == "sft" else self.dataflow.name

    @property
    def trains(self) -> str:
        """Name of the role that is exported and evaluated."""
        return "actor" if "actor" in self.dataflow.parameters else "reward_model"


@dataclasses.dataclass(frozen=True)
class Setup:
    """The objects that stay the same through a run."""

    config: Config
    model: Model
    tokenizer: Tokenizer
    data: Data
    phases: tuple[Phase, ...]
    rollout: Component
    rollouts: RolloutConfig
    decoding: Decoding = Decoding()
    row_tokens: int = 0  # columns of a batch of the last phase
    rows_per_example: int = 1  # rows of an example in an offline batch
    groups: tuple[RoleGroup, ...] = ()  # roles on devices of their own
    pretraining: Steps | None = None  # steps of pretraining.data, beside the last phase

    def model_on(self, role: str) -> Model:
        """Returns the model on the mesh of a role: its group's, or the one of all others."""
        meshes = [group.mesh for group in self.groups if role in group.roles]
        return dataclasses.replace(self.model, mesh=meshes[0]) if meshes else self.model

    def steps_on(self, role: str) -> Steps:
        """Returns how the rows of the last phase are packed on the mesh of a role. Raises
        InputError if the rows of an optimizer step do not divide over its devices."""
        model, rows = self.model_on(role), self.algorithm.steps.rows
        if model is self.model:
            return self.algorithm.steps
        shards = row_shards(model.mesh) * self.rows_per_example
        if rows % shards:
            raise InputError(
                f"{role} of config.placement: {rows} sequences of an optimizer step do not divide "
                f"over its {row_shards(model.mesh)} devices",
                rule="data x fsdp x expert of a group splits the rows",
                fix=f"so many of these, the others as tensor=...: "
                f"{dividing(rows // self.rows_per_example, model.mesh.size)}",
            )
        setup = assemble(self.config, self.tokenizer, self.data, model, self.row_tokens)
        return setup.algorithm.steps

    @property
    def main(self) -> Phase:
        """The last phase, which the config's `dataflow` names."""
        return self.phases[-1]

    @property
    def dataflow(self) -> Component:
        """Dataflow of the last phase."""
        return self.main.dataflow

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm of the last phase."""
        return self.main.algorithm

    def with_algorithm(self, **fields) -> "Setup":
        """Returns a copy whose last phase has an algorithm with these fields replaced."""
        algorithm = self.algorithm.replace(**fields)
        main = dataclasses.replace(self.main, algorithm=algorithm)
        return dataclasses.replace(self, phases=(*self.phases[:-1], main))

    def phase(self, name: str) -> Phase:
        """Returns the phase of this name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def learns_offline(self) -> bool:
        """Returns whether the last phase learns from a file."""
        return not self.main.samples

    @property
    def starts_from_policy(self) -> bool:
        """Returns whether any role begins with the weights of `model`: none does if a reward model
        is trained from critic_model."""
        return any(phase.trains == "actor" for phase in self.phases) or not self.config.critic_model

    @property
    def needs_reward(self) -> bool:
        """Returns whether the last phase samples responses that a reward must score."""
        return self.main.data == "rollouts" and sampled_prompts(self.config) > 0

    @property
    def needs_costs(self) -> bool:
        """Returns whether the dataflow reads what samples cost."""
        return self.needs_reward and "costs" in spec(self.dataflow).reads

    @property
    def pretraining_rows(self) -> int:
        """Number of examples of pretraining.data that come with a batch."""
        batch = self.config.batch
        generated = batch.prompts_per_step * batch.samples_per_prompt
        return self.pretraining.rows * (generated // batch.sequences_per_optimizer_step)


def sampled_prompts(config: Config) -> int:
    """Returns the number of prompts of a step that the policy answers; the others come with
    stored rollouts."""
    prompts, share = config.batch.prompts_per_step, config.rollouts.replay_share
    if not config.rollouts.replay or share == 1:
        return 0 if config.rollouts.replay else prompts
    return prompts - min(max(round(share * prompts), 1), prompts - 1)


def adapter_fields(config: Config) -> dict:
    """Returns the fields of ModelConfig that config.lora sets."""
    lora = config.lora
    if not lora.rank:
        return {}
    adapters = LoraConfig(lora.rank, float(lora.alpha), tuple(lora.targets), lora.base)
    return {
        "lora": adapters,
        "weight_dtype": lora.base if lora.base in ("float32", "bfloat16") else "bfloat16",
    }


def load_model(config: Config, tokenizer: Tokenizer, devices=None) -> Model:
    """Returns the static model of the config, on its mesh over `devices` (default: all). Raises
    InputError if the mesh does not fit the devices or they lack a host memory that
    config.memory asks for, if the tokenizer has more ids than the model, and for a lora.rank
    above the model's width."""
    settings = {**model_fields(config), **adapter_fields(config)}
    mesh = make_mesh(**config.mesh.sizes(), slices=config.mesh.slices, devices=devices)
    wanted_memory = {f"memory.{k}": v for k, v in dataclasses.asdict(config.memory).items()}
    wanted_memory["model_settings.remat='offload'"] = config.model_settings.remat == "offload"
    for name in (name for name, is_set in wanted_memory.items() if is_set):
        check_host_memory(mesh, name)
    if is_path(config.model):
        model_config = load_config(config.model, **settings)
        if tokenizer.vocab_size > model_config.vocab_size:
            problem = f"the tokenizer of {config.tokenizer or config.model} has too many ids"
            rule = f"the model's vocab_size is {model_config.vocab_size}"
            fix = "use the tokenizer that came with the model"
            raise InputError(problem, value=tokenizer.vocab_size, rule=rule, fix=fix)
        if config.tokenizer and tokenizer.vocab_size:
            _check_own_tokenizer(config, tokenizer)
        model_config = dataclasses.replace(model_config, known_ids=tokenizer.vocab_size)
    else:
        base_config = resolve(config.model, NAMESPACES["model"])(tokenizer.vocab_size)
        if vision := base_config.vision:
            remat = "none" if settings["remat"] == "none" else "full"
            vision = dataclasses.replace(vision, dtype=settings["dtype"], remat=remat)
        model_config = dataclasses.replace(base_config, vision=vision, **settings)
    _check_balance(config, model_config)
    rank, width = config.lora.rank, model_config.embed
    if rank > width:
        rule = f"the model is {width} wide: adapters of that rank are all of it"
        raise InputError("lora.rank", value=rank, rule=rule, fix=f"lora.rank={min(16, width)}")
    return Model(model_config, mesh)


def _check_own_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Raises InputError where the model's own tokenizer, if its folder has one, has other tokens at
    the ids of the run's, which may have more: padding of the embedding is there for new tokens."""
    model_tokenizer = tokenizer_of(config.model)
    if isinstance(model_tokenizer, str):
        return
    if difference := differing_ids(tokenizer, model_tokenizer, may_lack=True):
        problem = f"the tokenizer of {config.tokenizer} is not that of {config.model}"
        rule = "the model would read its ids as other words"
        fix = "tokenizer='' takes the model's own; a copy of it may have another template"
        raise InputError(problem, value=difference, rule=rule, fix=fix)


def _check_balance(config: Config, model: ModelConfig) -> None:
    """Raises InputError where the load of experts is to be balanced in a model that cannot."""
    for name, rule in (
        ("router_aux_loss_coef", "it balances the load of experts, and the model has none"),
        (
            "router_bias_update_speed",
            "it moves the bias of each expert's score, which families like deepseek_v3 and "
            "glm4_moe have",
        ),
    ):
        value = getattr(config.model_settings, name)
        if value and not getattr(model, name):
            problem = f"model_settings.{name}"
            fix = f"model_settings.{name}=0"
            raise InputError(problem, value=value, rule=f"{rule} (family {model.family})", fix=fix)
    if config.sampler.router_replay and model.experts is None:
        rule = f"it replays routes to experts, and the model has none (family {model.family})"
        raise InputError(
            "sampler.router_replay", value=True, rule=rule, fix="sampler.router_replay=False"
        )


def check_length(
    prompt_tokens: int,
    response_tokens: int,
    model: Model,
    fields: tuple[str, str] = ("data.max_prompt_tokens", "sampler.max_response_tokens"),
) -> None:
    """Raises InputError if a prompt and its response, in tokens, would not fit into the
    model's context; `fields` limit them."""
    longest = prompt_tokens + response_tokens
    if longest > model.config.max_tokens:
        problem = f"rows have up to {prompt_tokens} prompt + {response_tokens} response tokens"
        rule = f"the model's context is {model.config.max_tokens} tokens"
        raise InputError(problem, value=longest, rule=rule, fix=f"lower {fields[0]} or {fields[1]}")


def _steps(
    config: Config,
    rows: int,
    tokens: int,
    model: Model,
    epochs: int,
    rows_per_example: int = 1,
    **shared,
) -> Steps:
    """Returns the steps that divide `rows` rows into microbatches. `rows_per_example` rows are one
    example and stay in one microbatch. `shared` says which part of a row is a prompt that other
    rows have as well (rljax.learn.packing)."""
    shards = row_shards(model.mesh) * rows_per_example
    if rows % shards:
        raise InputError(
            f"{rows} sequences of an optimizer step do not divide over {shards} devices",
            rule="mesh.data x fsdp x expert splits the rows"
            + (f", and {rows_per_example} of them are one example" if rows_per_example > 1 else ""),
            fix=f"a multiple of {shards}, or a smaller mesh",
        )
    part, packing = microbatch_rows(config, rows, tokens, shards), None
    if config.batch.packing:
        ring = in_a_ring(model.mesh, model.config.heads, model.config.context_attention)
        if ring or model.config.recurrent:
            shared = {}  # no kernel reads shared prefixes there, and no state begins with one
        packing = packing_for(
            rows, tokens, part, model.mesh, rows_per_example=rows_per_example, **shared
        )
    return Steps(rows=rows, microbatch_rows=part, epochs=epochs, packing=packing)


def make_sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    """Returns the sampling that config.sampler describes. Raises InputError if interrupt_phrase or
    end_of_thinking has no tokens, and if thinking_tokens leave no room for an answer."""
    sampler = config.sampler
    thinking = {}
    if sampler.thinking_tokens:
        phrase = tuple(tokenizer.encode(sampler.interrupt_phrase))
        end = tuple(tokenizer.encode(sampler.end_of_thinking))
        answer_tokens = sampler.max_response_tokens - max(sampler.thinking_tokens) - len(phrase)
        for name, ids in (("interrupt_phrase", phrase), ("end_of_thinking", end)):
            if not ids:
                raise InputError(f"sampler.{name} has no tokens", fix="give it a text")
        if answer_tokens < 1:
            raise InputError(
                "sampler.max_response_tokens leaves no room for an answer",
                value=sampler.max_response_tokens,
                rule=f"{max(sampler.thinking_tokens)} thinking tokens and {len(phrase)} of "
                "interrupt_phrase come before it",
                fix=f"at least {sampler.max_response_tokens - answer_tokens + 1}",
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
        stop_ids=tuple(
            dict.fromkeys((*tokenizer.eos_ids, *stop_tokens(tokenizer, sampler.stop_strings)))
        ),
        **thinking,
    )


def prompt_order(config: Config, data: Data) -> Loader | Curriculum:
    """Returns the order of the training data: a shuffled loader, or a curriculum if the config asks
    for a mixture or for prompts to be retired. Raises InputError if prompts of an endless stream
    are to be retired or dropped."""
    seed, settings = config.seed, config.data
    online = data.kind in SAMPLED
    size = config.batch.prompts_per_step if online else config.offline.examples_per_step
    for name in ("retire_at_pass_rate", "drop_above_pass_rate"):
        if data.endless and getattr(settings, name):
            raise InputError(
                f"data.{name}",
                value=getattr(settings, name),
                rule="the prompts of a stream are not known before: there is nothing to leave out",
                fix=f"data.{name}=0, or a fixed number of prompts: prompts=5000 in the task's "
                "brackets (reasoning_gym: size=5000), data.stream=False",
            )
    if not (settings.sources or settings.retire_at_pass_rate or settings.drop_above_pass_rate):
        return Loader(data.sources[0], batch_size=size, seed=seed)
    return Curriculum(
        data.sources,
        batch_size=size,
        seed=seed,
        weights=settings.weights,
        final_weights=settings.final_weights,
        horizon_prompts=size * max(config.steps, 1),
        retire_at=settings.retire_at_pass_rate,
    )


def make_algorithm(config: Config, steps: Steps) -> Algorithm:
    """Returns the fields of a config that are declared with `learn`, their components resolved."""
    fields = {}
    for name, field in FIELDS.items():
        if field.learn:
            value, stage = value_of(config, name), field.component
            fields[name.rpartition(".")[2]] = _resolved(value, stage) if stage else value
    return Algorithm(steps=steps, **fields)


def _resolved(value: str | tuple[str, ...], stage: str) -> Component | tuple[Component, ...] | None:
    """The components that a field names; None of an empty text."""
    if isinstance(value, str):
        return resolve(value, NAMESPACES[stage]) if value else None
    return tuple(resolve(text, NAMESPACES[stage]) for text in value)


def rollout_of(config: Config, dataflow: Component) -> Component:
    """Returns the rollout of a config: algorithm.collect, in the one that its dataflow needs."""
    outer = spec(dataflow).rollout
    if not outer:
        return resolve(config.algorithm.collect, NAMESPACES["collect"])
    options = resolve(outer, NAMESPACES["collect"]).options
    options = {**options, "inner": config.algorithm.collect}
    name = outer.partition("(")[0]
    text = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return resolve(f"{name}({text})", NAMESPACES["collect"])


def fields_by_settings(config: Config) -> set[str]:
    """Returns the batch fields of samples that the process model and the environment of a config
    fill."""
    fields = {"step_ids", "process_rewards"} if config.reward.process_model else set()
    if config.environment.function:
        fields |= {"step_ids", "state_ids", "episode", "seat"}
    return fields


def check_context(what: str, tokens: int, model: Model, fix: str) -> None:
    """Raises InputError if `tokens`, the longest of `what`, are more than the model's context.
    `fix`: the end of the message."""
    if tokens > model.config.max_tokens:
        rule = f"the model's context is {model.config.max_tokens} tokens"
        raise InputError(f"the longest {what}, in tokens", value=tokens, rule=rule, fix=fix)


def assemble(
    config: Config, tokenizer: Tokenizer, data: Data, model: Model, row: int, groups: tuple = ()
) -> Setup:
    """Returns the setup of loaded parts; rows of the last phase have `row` tokens. Raises
    InputError if rows do not divide over devices, or are longer than the model's context."""
    dataflow = resolve(config.dataflow, NAMESPACES["dataflow"])
    batch, together, optimizer_steps = config.batch, 1, config.steps
    sampled = data.kind in SAMPLED
    if (data.test_prompts or sampled) and not config.environment.function:
        check_length(data.prompt_tokens, config.sampler.max_response_tokens, model)
    if sampled:
        rows = batch.sequences_per_optimizer_step
        # Environments set their own prompts, whose length is not known: assume half of a row.
        prompt = row // 2 if config.environment.function else data.prompt_tokens
        shared = dict(prompt_tokens=prompt, samples=batch.samples_per_prompt)
        steps = _steps(config, rows, row, model, batch.epochs, **shared)
        generated = batch.prompts_per_step * batch.samples_per_prompt
        optimizer_steps *= batch.epochs * (generated // rows)
    else:
        check_context("row", row, model, "lower offline.max_tokens, or shorten the rows")
        together = example_rows(config, dataflow, data.kind)
        rows = config.offline.examples_per_step * (1 if data.kind == "unpaired" else together)
        unit = 1 if data.kind == "unpaired" else together
        # The rows of a pair begin with one prompt: half of the longest row has room for most.
        pair_prefix = dict(prompt_tokens=row // 2, samples=together) if data.kind in PAIRED else {}
        steps = _steps(config, rows, row, model, 1, unit, **pair_prefix)
    algorithm = make_algorithm(config, steps)
    main = Phase(
        "rl", dataflow, algorithm, config.steps, optimizer_steps, config.actor_optimizer, data.kind
    )
    sft_phases = (_sft_phase(config, data, model, algorithm),) if config.sft.steps else ()
    rollouts = RolloutConfig(
        prompts_per_step=batch.prompts_per_step,
        samples_per_prompt=batch.samples_per_prompt,
        sampling=make_sampling(config, tokenizer),
        correct_at=config.evaluate.correct_at,
        reward_shaping=algorithm.reward_shaping,
        advantage=algorithm.advantage,
        microbatch_rows=algorithm.steps.microbatch_rows,
    )
    decoding = decoding_on(model, config, tokenizer, sampler_mesh(groups))
    check_slots(decoding, model, sampled_prompts(config) * batch.samples_per_prompt)
    return Setup(
        config,
        model,
        tokenizer,
        data,
        (*sft_phases, main),
        rollout_of(config, dataflow),
        rollouts,
        decoding,
        row,
        together,
        groups,
        _pretraining_steps(config, data, model),
    )


def _sft_phase(config: Config, data: Data, model: Model, algorithm: Algorithm) -> Phase:
    """The supervised steps before the last phase."""
    fix = "shorten the examples, or lower data.max_prompt_tokens"
    check_context("demonstration", data.example_tokens, model, fix)
    steps = _steps(config, config.sft.sequences_per_step, data.example_tokens, model, 1)
    reduction = resolve("token_mean", NAMESPACES["reduction"])
    return Phase(
        "sft",
        resolve("sft()", NAMESPACES["dataflow"]),
        algorithm.replace(steps=steps, reduction=reduction),
        config.sft.steps,
        config.sft.steps,
        config.sft.optimizer,
        "examples",
    )


def _pretraining_steps(config: Config, data: Data, model: Model) -> Steps | None:
    """Returns how the examples of pretraining.data are computed; None without any."""
    if not config.pretraining.data:
        return None
    check_context("example", data.pretraining_tokens, model, "lower pretraining.max_tokens")
    rows = config.pretraining.sequences_per_optimizer_step
    return _steps(config, rows, data.pretraining_tokens, model, 1)


def example_rows(config: Config, dataflow: Component, kind: str) -> int:
    """Returns the number of consecutive rows of a batch that are one example of the file: those of
    the dataflow's contract, or of its preference loss if that reads more."""
    rows = spec(dataflow).rows
    if kind != "pairs" or "actor" not in dataflow.parameters:
        return rows
    loss = resolve(config.algorithm.preference_loss, NAMESPACES["preference_loss"])
    return max(spec(loss).rows, rows)
