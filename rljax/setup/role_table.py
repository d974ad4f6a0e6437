"""The role table: every role of a run in one declaration, by which it is made, planned and kept.

A role is made by a function (inputs, **options) -> Role, whether its weights are loaded or only
their shapes are wanted. `config.roles` adds roles of the user's own (rljax.setup.role_makers).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import moved, put_whole
from rljax.batch import Batch
from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, OptimizerConfig, model_fields
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.keys import root_key, stream
from rljax.learn.optimizers import make_optimizer
from rljax.learn.state import DataParallel, TrainState
from rljax.mesh import on_host, replicated, row_sharding, row_shards, slice_count
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.models.trees import flattened, merged, nested
from rljax.roles import (
    Actor,
    Baseline,
    Critic,
    EntropyController,
    EntropySchedule,
    KLController,
    Pretraining,
    Reference,
    RewardModel,
    Role,
    SeatBaseline,
    SelfTeacher,
    Teachers,
    start_training,
    training_layout,
)
from rljax.roles.placed import PlacedReference
from rljax.setup.setup import Phase, Setup, adapter_fields
from rljax.setup.weights import multiplied_in_dtype, reading_same_ids, scalar_model


@dataclasses.dataclass(frozen=True)
class RoleInputs:
    """Inputs of a role's maker. `params` are the policy's weights as the phase begins; with
    `abstract` they, and all that a method returns, are jax.ShapeDtypeStructs of the same layout."""

    name: str
    setup: Setup
    phase: Phase
    params: dict
    abstract: bool = False

    @property
    def config(self) -> Config:
        """Config of the run."""
        return self.setup.config

    def optimizer(self, settings: OptimizerConfig):
        """Returns the optax optimizer of these settings, its schedule laid out over the phase."""
        return make_optimizer(settings, self.phase.optimizer_steps)

    def training(self, model: Model, params: dict, optimizer) -> TrainState:
        """Returns fresh optimizer state around `params`, on the layout that programs keep."""
        mesh = self.config.mesh
        crosses = slice_count(model.mesh, mesh.slices) > 1
        options = dict(
            optimizer_on_host=self.config.memory.optimizer_on_host,
            spread=DataParallel(moments=mesh.shard_optimizer, sum_once=crosses),
        )
        if self.abstract:
            return training_layout(model, optimizer, **options)
        rounding = None
        if model.config.weight_dtype == "bfloat16" and not model.config.lora:
            purpose = f"rounding {self.phase.name} {self.name}"
            rounding = stream(root_key(self.config.seed), purpose)
        return start_training(model, params, optimizer, rounding=rounding, **options)

    def loaded(self, folder: str, model: Model) -> dict:
        """Returns the weights of a Hugging Face folder."""
        return model.abstract() if self.abstract else load_params(folder, model)

    def copied(self, params: dict) -> dict:
        """Returns the weights in buffers of their own: a donated buffer cannot have two owners."""
        return params if self.abstract else _copied(params)

    def number(self, value) -> jax.Array:
        """Returns a value of any shape as a float32 array on every device, for small roles."""
        value, layout = np.asarray(value, np.float32), replicated(self.setup.model.mesh)
        if self.abstract:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=layout)
        return put_whole(value, layout)

    def frozen(self, model: Model, *, mean: bool = False) -> dict:
        """Returns the policy as it is now, in the dtype that the model multiplies in, on the mesh
        of `model`; for a moving `mean`, to which little is added at once, in float32. Under
        adapters the base is shared on the same mesh, and only the adapters are copied: fresh ones
        add exactly 0."""
        trained, base = model.split(self.params)
        elsewhere = model.mesh != self.setup.model.mesh
        if model.config.lora and not elsewhere:
            return merged(self.copied(trained), base)
        keeps_on_host, layouts = self.config.memory.reference_on_host, flattened(model.shardings())

        def rounded(path, x):
            low = multiplied_in_dtype(path, model.config) and not model.config.lora
            dtype = jnp.dtype(self.config.model_settings.dtype)
            dtype = dtype if low and dtype.itemsize < x.dtype.itemsize else x.dtype
            dtype = jnp.promote_types(x.dtype, jnp.float32) if mean else dtype
            layout = layouts[path] if elsewhere else x.sharding
            layout = on_host(layout) if keeps_on_host else layout
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout)

        like = nested({path: rounded(path, x) for path, x in flattened(self.params).items()})
        return like if self.abstract else _copied(self.params, like)


def _copy(tree: dict, dtypes: tuple) -> dict:
    leaves, structure = jax.tree.flatten(tree)
    copies = [jnp.array(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, copies)


def _copied(tree: dict, like: dict | None = None) -> dict:
    """The arrays in buffers of their own, with dtypes and memory of `like`, by one program."""
    like = tree if like is None else like
    layout = jax.tree.map(lambda x: x.sharding, tree)
    dtypes = tuple(x.dtype for x in jax.tree.leaves(like))
    copies = jax.jit(_copy, static_argnames="dtypes", out_shardings=layout)(tree, dtypes=dtypes)

    def put(x, y):
        return x if y.sharding == x.sharding else moved(x, y.sharding)

    return jax.tree.map(put, copies, like)


@dataclasses.dataclass(frozen=True)
class RoleSpec:
    """A role's maker and conditions. `needed` decides whether a dataflow that names the role with
    default None gets it."""

    make: Callable[[RoleInputs], Role]
    needed: Callable[[Setup], bool] = lambda setup: True


def make_actor(inputs: RoleInputs, *, prefix: str = "", settings=None) -> Actor:
    """Makes the policy that is trained, from the weights of the phase. `prefix`: before the names
    of its metrics."""
    model = inputs.setup.model
    optimizer = inputs.optimizer(settings or inputs.phase.actor_optimizer)
    state = inputs.training(model, inputs.params, optimizer)
    temperature = inputs.config.sampler.temperature
    return Actor(state, model, optimizer, temperature, inputs.setup.decoding, prefix)


def scalar_start(
    inputs: RoleInputs,
    labels: int = 1,
    squash: str | None = None,
    *,
    folder: str = "",
    field: str = "critic_model",
) -> tuple[Model, dict]:
    """Returns the model and weights that a critic or reward model starts from: the reward model
    of `folder`, else of critic_model, with its own config.json and head; without one, the
    policy's body and a head of zeros, of `labels` labels. `squash`: the function applied to its
    scores; None = as its config.json says. Raises InputError for a model that reads other ids
    than the policy."""
    config, policy = inputs.config, inputs.setup.model
    squashed = {} if squash is None else {"squash": squash}
    if folder := folder or config.critic_model:
        settings = model_fields(config) | adapter_fields(config)
        tokenizer = inputs.setup.tokenizer
        if inputs.abstract:
            model_config = load_config(folder, **settings)
            model_config = reading_same_ids(field, folder, model_config, policy, tokenizer)
            # The difference of two logits is one number.
            model_config = dataclasses.replace(model_config, labels=1, **squashed)
            model = Model(model_config, policy.mesh, "scalar")
            return model, model.abstract()
        loaded, params = scalar_model(config, policy, tokenizer, field, folder, trained=True)
        scalar_config = dataclasses.replace(loaded.config, **squashed)
        return dataclasses.replace(loaded, config=scalar_config), params
    scalar_config = dataclasses.replace(policy.config, labels=labels, **squashed)
    model = dataclasses.replace(policy, head="scalar", config=scalar_config)
    if inputs.abstract:
        return model, model.abstract()
    body = {k: v for k, v in inputs.params.items() if k != "head"}
    head = model.abstract()["head"]
    body["head"] = put_whole(np.zeros(head.shape, head.dtype), head.sharding)
    trained, base = model.split(body)
    return model, merged(inputs.copied(trained), base)


def make_critic(inputs: RoleInputs) -> Critic:
    """Makes the critic, which starts from critic_model or from the policy."""
    optimizer = inputs.optimizer(inputs.config.critic_optimizer)
    model, body = scalar_start(inputs)
    return Critic(inputs.training(model, body, optimizer), model, optimizer)


def make_reward_model(inputs: RoleInputs) -> RewardModel:
    """Makes the reward model that is trained, with the labels and the squashing function
    of algorithm.reward_loss."""
    optimizer = inputs.optimizer(inputs.config.critic_optimizer)
    declared = spec(inputs.phase.algorithm.reward_loss)
    model, body = scalar_start(inputs, declared.labels, declared.squash)
    return RewardModel(inputs.training(model, body, optimizer), model, optimizer)


def make_reference(inputs: RoleInputs) -> Reference:
    """Makes the reference: the policy as the phase begins, frozen."""
    setup, model = inputs.setup, inputs.setup.model_on(inputs.name)
    parts = (inputs.frozen(model), model, inputs.config.sampler.temperature, setup.decoding)
    if model is setup.model:
        return Reference(*parts)
    steps = setup.steps_on(inputs.name)
    return PlacedReference(*parts, home=setup.model.mesh, steps=steps)


def frozen_folder(inputs: RoleInputs, field: str, folder: str) -> Reference:
    """Makes a frozen model of another folder, of its own size and family and the policy's
    vocabulary. Raises InputError if it reads other ids than the policy."""
    policy, tokenizer = inputs.setup.model, inputs.setup.tokenizer
    model_config = load_config(folder, **model_fields(inputs.config))
    model_config = reading_same_ids(field, folder, model_config, policy, tokenizer)
    model = Model(model_config, policy.mesh)
    temperature = inputs.config.sampler.temperature
    return Reference(inputs.loaded(folder, model), model, temperature, checkpointed=False)


def make_teacher(inputs: RoleInputs) -> Reference | Teachers | SelfTeacher:
    """Makes the teacher: the frozen model of teacher_model, or all of them, if there are
    `teachers`, those first, then that of the other prompts; without any, the policy itself."""
    config, field = inputs.config, "teacher_model"
    if not config.teachers and not config.teacher_model:
        setup, rate = inputs.setup, config.algorithm.teacher_rate
        params = inputs.frozen(setup.model, mean=0 < rate < 1)
        parts = (params, setup.model, config.sampler.temperature, setup.decoding)
        return SelfTeacher(*parts, rate=rate)
    if not config.teachers:
        return frozen_folder(inputs, field, config.teacher_model)
    members = [frozen_folder(inputs, "teachers", folder) for folder in config.teachers]
    names = list(config.teacher_sources)
    if config.teacher_model:
        members.append(frozen_folder(inputs, field, config.teacher_model))
        names.append(field)
    return Teachers(tuple(members), tuple(names))


def make_kl_controller(inputs: RoleInputs) -> KLController:
    """Makes the controller of the KL coefficient (algorithm.kl_target, kl_horizon)."""
    settings = inputs.config.algorithm
    return KLController(inputs.number(1.0), settings.kl_target, settings.kl_horizon)


def make_entropy_controller(inputs: RoleInputs) -> EntropyController | EntropySchedule:
    """Makes what moves the entropy coefficient (algorithm.entropy_target, entropy_schedule)."""
    settings = inputs.config.algorithm
    if settings.entropy_schedule:
        start = inputs.number([settings.entropy_coef, 0.0])
        return EntropySchedule(start, settings.entropy_schedule, inputs.config.steps)
    return EntropyController(
        inputs.number(settings.entropy_coef),
        settings.entropy_target,
        settings.entropy_coef_step,
        settings.entropy_coef_max,
    )


def make_baseline(inputs: RoleInputs) -> Baseline:
    """Makes the moving mean of returns that serves as a baseline."""
    return Baseline(inputs.number([0.0, 0.0]))


def make_seat_baseline(inputs: RoleInputs) -> SeatBaseline:
    """Makes the moving means of returns, one for each seat of the environment."""
    text = inputs.config.environment.function
    seats = spec(resolve(text, NAMESPACES["environment"])).seats if text else ("",)
    return SeatBaseline(inputs.number(np.zeros((len(seats), 2))))


def make_pretraining(inputs: RoleInputs) -> Pretraining:
    """Makes the role of pretraining.data with empty rows, which the run replaces by the examples of
    each step."""
    setup = inputs.setup
    mesh, rows = setup.model.mesh, setup.pretraining_rows
    layout = row_sharding(mesh) if rows % row_shards(mesh) == 0 else replicated(mesh)

    def empty(dtype):
        shape = rows, setup.data.pretraining_tokens
        if inputs.abstract:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)
        return put_whole(np.zeros(shape, dtype), layout)

    ids = {name: empty(np.int32) for name in ("tokens", "segment_ids", "positions")}
    batch = Batch(**ids, mask=empty(np.float32))
    settings = inputs.config.pretraining
    decaying_steps = max(inputs.phase.optimizer_steps - settings.warmup_steps, 1)
    return Pretraining(
        batch,
        settings.coef,
        setup.pretraining,
        loss=resolve(settings.loss, NAMESPACES["policy_loss"]),
        mixed=settings.mixed,
        schedule=settings.schedule,
        warmup_steps=settings.warmup_steps,
        schedule_steps=settings.schedule_steps or decaying_steps,
    )


def needs_reference(setup: Setup) -> bool:
    """Returns whether a KL coefficient is set (sampled batches), or the loss reads ref_logprobs
    that are not stored on disk (batches of a file)."""
    settings = setup.config.algorithm
    if not setup.learns_offline:
        reads = "ref_logprobs" in spec(setup.algorithm.policy_loss).reads
        return settings.kl_in_reward > 0 or settings.kl_in_loss > 0 or reads
    pairs = setup.main.data == "pairs"
    reads = not pairs or "ref_logprobs" in spec(setup.algorithm.preference_loss).reads
    return reads and not setup.config.offline.reference_logprobs


def needs_kl_controller(setup: Setup) -> bool:
    """Returns whether a reference is needed and algorithm.kl_target is above 0."""
    return needs_reference(setup) and setup.config.algorithm.kl_target > 0


def needs_entropy_controller(setup: Setup) -> bool:
    """Returns whether the entropy coefficient changes during the run."""
    settings = setup.config.algorithm
    return settings.entropy_target > 0 or bool(settings.entropy_schedule)


ROLES: dict[str, RoleSpec] = {
    "actor": RoleSpec(make_actor),
    "critic": RoleSpec(make_critic, lambda setup: False),  # optional: where another part asks it
    "reward_model": RoleSpec(make_reward_model),
    "reference": RoleSpec(make_reference, needs_reference),
    # Optional where its log-probs are a part of the advantage.
    "teacher": RoleSpec(make_teacher, lambda setup: setup.config.algorithm.teacher_coef > 0),
    "kl_controller": RoleSpec(make_kl_controller, needs_kl_controller),
    "entropy_controller": RoleSpec(make_entropy_controller, needs_entropy_controller),
    "baseline": RoleSpec(make_baseline),
    "seat_baseline": RoleSpec(make_seat_baseline),
    "pretraining": RoleSpec(make_pretraining, lambda setup: setup.pretraining is not None),
}


def own_roles(config: Config) -> dict[str, Component]:
    """Returns {name: maker} of config.roles. Raises InputError for a text that is not
    name=maker(...), and for a name that another role has."""
    makers: dict[str, Component] = {}
    for text in config.roles:
        name, equals, maker = text.partition("=")
        name = name.strip()
        rule = 'name=maker(...), such as "implicit=trained_policy(lr=1e-6)"'
        if not equals or not name.isidentifier():
            raise InputError(
                "a role of config.roles", value=text, rule=rule, fix="write it in this form"
            )
        if name in ROLES or name in makers or name in ("reward", "sample"):
            rule, fix = "a name of its own", "choose a name that no other role has"
            raise InputError("a role of config.roles", value=name, rule=rule, fix=fix)
        makers[name] = resolve(maker.strip(), NAMESPACES["role"])
    return makers


def role_table(config: Config) -> dict[str, RoleSpec]:
    """Returns {name: RoleSpec} of the built-in roles and those of config.roles."""
    return {**ROLES, **{name: RoleSpec(maker) for name, maker in own_roles(config).items()}}


def role_names(setup: Setup, phase: Phase) -> list[str]:
    """Returns the names of the roles that the phase's dataflow, or the rollout of its batches, asks
    for and needs. A rollout that calls `sample` has the actor, too."""
    readers = [phase.dataflow, *([setup.rollout] if phase.samples else [])]
    drawing = "actor" if any("sample" in reader.parameters for reader in readers) else None
    names = []
    for name, role in role_table(setup.config).items():
        parameters = [r.signature.parameters[name] for r in readers if name in r.parameters]
        always = name == drawing or any(parameter.default is not None for parameter in parameters)
        if always or (parameters and role.needed(setup)):
            names.append(name)
    return names


def make_roles(setup: Setup, phase: Phase, params: dict) -> dict[str, Role]:
    """Returns {name: role} of a phase, each with fresh optimizer state, started from `params`."""
    table = role_table(setup.config)
    # The actor last: its state takes the very buffers that the others copied.
    names = sorted(role_names(setup, phase), key=lambda name: name == "actor")
    return {name: table[name].make(RoleInputs(name, setup, phase, params)) for name in names}


def abstract_roles(setup: Setup, phase: Phase | None = None) -> dict[str, Role]:
    """Returns the roles of `make_roles` without weights: every array is a jax.ShapeDtypeStruct."""
    phase, table = phase or setup.main, role_table(setup.config)
    params = setup.model.abstract()
    return {
        name: table[name].make(RoleInputs(name, setup, phase, params, abstract=True))
        for name in role_names(setup, phase)
    }


def role_arrays(roles: dict[str, Role]) -> dict:
    """Returns {name: arrays} that a checkpoint keeps."""
    return {name: role.arrays() for name, role in sorted(roles.items()) if role.checkpointed}


def with_arrays(roles: dict[str, Role], arrays: dict) -> dict[str, Role]:
    """Returns the roles with the arrays of a checkpoint."""
    return {
        name: role.with_arrays(arrays[name]) if name in arrays else role
        for name, role in roles.items()
    }
