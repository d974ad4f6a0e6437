"""Bytes per device of a run, counted from shapes: the line that a run begins with, and the refusal
of a run that cannot fit.

Parameters, optimizers, references and caches are counted exactly; what programs need besides is
estimated. Nothing is compiled or allocated: the compiler's own numbers are rljax.plan.compiled.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from rljax import hosts
from rljax.config import Config, row_tokens, splits, value_of, with_overrides
from rljax.errors import InputError
from rljax.kernels.logprob.options import CHUNK_LOGITS
from rljax.mesh import HOST_MEMORY, row_shards
from rljax.models.attention import in_a_ring
from rljax.models.model import Model
from rljax.models.padding import copied_elements
from rljax.models.trees import flattened
from rljax.plan.groups import (
    COPY,
    FETCHED,
    IN_FLIGHT,
    KV,
    check_groups_fit,
    fetched_bytes,
    group_bytes,
)
from rljax.policies import ROWS_PER_CALL
from rljax.roles import Actor, Critic, RewardModel
from rljax.runs.units import human_bytes
from rljax.sampler.layout import agree, is_apart, kept_like, weights_like
from rljax.sampler.layout_cost import FACTOR, decode_bytes
from rljax.sampler.memory import device_bytes
from rljax.setup import abstract_roles, abstract_scorers
from rljax.setup.decode_layout import with_decode_layout, workload
from rljax.setup.held import held_bytes, held_parts, of_mesh
from rljax.setup.placement import SAMPLER, sampler_mesh
from rljax.setup.setup import Setup, assemble, load_model, sampled_prompts


def split_bytes(
    weights: float, shards: int, stage: int, *, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12
) -> float:
    """Bytes per device of training W weights on N devices, ZeRO stage 0 to 3 (arXiv 1910.02054):

    W (2 + 2 + K), K = 12 bytes of optimizer. Stage 1 divides K by N, stage 2 the gradients too, and
    stage 3 everything. mesh.fsdp is stage 3 and mesh.data stage 0, or with mesh.shard_optimizer
    stage 1, all with 4 + 4 + 8 bytes: the weights are float32, so that the optimizer needs no copy
    of its own. Raises InputError for another stage, and for no device.
    """
    if stage not in (0, 1, 2, 3) or shards < 1:
        rule, fix = "0 to 3, and >= 1", "stage=3 and the number of devices that share the weights"
        raise InputError("ZeRO stage, shards", value=(stage, shards), rule=rule, fix=fix)
    parts = ((optimizer_bytes, 1), (gradient_bytes, 2), (weight_bytes, 3))
    return weights * sum(size / (shards if stage >= first else 1) for size, first in parts)


@dataclasses.dataclass(frozen=True)
class Training:
    """Bytes per device of the weights, gradients and optimizer of one trained model."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.weights + self.gradients + self.optimizer


def zero_stages(weights: int, devices: int) -> dict[int, Training]:
    """Returns {ZeRO stage: bytes per device} of training a model of so many weights with bfloat16
    weights and gradients."""
    zeros = dict(weight_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    parts = dict(weight_bytes=2), dict(gradient_bytes=2), dict(optimizer_bytes=12)
    return {
        stage: Training(*(split_bytes(weights, devices, stage, **{**zeros, **p}) for p in parts))
        for stage in range(4)
    }


def training_bytes(role) -> Training:
    """Returns the bytes per device of a trained role on its mesh; the gradients are float32."""
    parts = role.parts()
    weights = [parts[name] for name in ("weights", "base") if name in parts]
    gradients = jax.tree.map(_as_float32, role.state.params)
    return Training(held_bytes(weights), held_bytes(gradients), held_bytes(parts["optimizer"]))


def _used_bytes(config, weights: int) -> int:
    """Bytes of the copy of the weights in the dtype of products; 0 where products read them as they
    are. The frozen base of adapters is read in that dtype. `weights`: their bytes in float32."""
    size = jnp.dtype(config.dtype).itemsize
    copied = size < 4 if config.lora else config.dtype != config.weight_dtype
    return weights * size // 4 * copied


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device: `held` from start to end of the run, `generate` and `learn` in addition
    while each of them runs, and `score` while scorers do whose weights wait on the host. `waiting`
    are bytes in the host's memory, `available` those that are free on a device, where it says so.
    `groups`: the same of a device of each group of config.placement, at its peak."""

    held: dict[str, int]
    generate: dict[str, int]
    learn: dict[str, int]
    waiting: int = 0
    available: int | None = None
    score: dict[str, int] = dataclasses.field(default_factory=dict)
    groups: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def resident(self) -> int:
        """Bytes that are held from start to end of the run."""
        return sum(self.held.values())

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        uses = (self.generate, self.learn, self.score)
        return self.resident + max(sum(use.values()) for use in uses)

    @property
    def least(self) -> int:
        """The lowest bytes that the peak can be: caches and gradients are exact, the rest may be
        less by FACTOR."""
        exact = (KV, "gradients", COPY, FETCHED)
        parts = []
        for program in (self.generate, self.learn, self.score):
            sure = sum(size for name, size in program.items() if name in exact)
            parts.append(sure + (sum(program.values()) - sure) / FACTOR)
        return self.resident + int(max(parts))

    @property
    def most(self) -> int:
        """The highest bytes that the peak of learning can be."""
        return self.resident + int(FACTOR * sum(self.learn.values()))

    @property
    def parts(self) -> dict[str, int]:
        """Returns {what: bytes} at the peak of a step; their sum is `total`."""
        peak = max((self.generate, self.learn, self.score), key=lambda use: sum(use.values()))
        return self._held() | peak

    def _held(self) -> dict[str, int]:
        groups = {"weights": 0, "optimizer": 0}
        for name, count in self.held.items():
            kind = "optimizer" if name.endswith("optimizer") else "weights"
            kind = name if name == IN_FLIGHT else kind
            groups[kind] = groups.get(kind, 0) + count
        return groups

    def line(self) -> str:
        """Describes the estimate in one sentence: what is held, and what each program
        needs in addition."""
        uses = {"sampling": self.generate, "learning": self.learn, "scoring": self.score}
        texts = [_listed(self._held())]
        texts += [f"{use} {_listed(parts)}" for use, parts in uses.items() if sum(parts.values())]
        texts += [f"{human_bytes(self.waiting)} on the host"] if self.waiting else []
        cap = f" of {human_bytes(self.available)}" if self.available else ""
        groups = "".join(
            f"; {human_bytes(sum(parts.values()))} per device of {name}"
            for name, parts in self.groups.items()
        )
        return f"{human_bytes(self.total)} per device{cap} at the peak ({'; '.join(texts)}){groups}"


_ACTIVATIONS = ("weights as used", "layers", "one layer", "logits")


def _listed(parts: dict[str, int]) -> str:
    """ "weights 4 GB, optimizer 8 GB", small parts of a pass as one."""
    groups: dict[str, int] = {}
    for name, count in parts.items():
        name = "activations" if name in _ACTIVATIONS else name
        groups[name] = groups.get(name, 0) + count
    return ", ".join(f"{name} {human_bytes(count)}" for name, count in groups.items() if count)


def estimate(setup: Setup, roles: dict | None = None) -> MemoryEstimate:
    """Returns the estimate of the run's main phase. `roles` are those of abstract_roles(setup), if
    they have been made."""
    roles = abstract_roles(setup) if roles is None else roles
    all_parts = held_parts(setup, roles)
    parts = of_mesh(setup.model.mesh, all_parts)
    resident = {name: held_bytes(tree) for name, tree in parts.items()}
    generate, learn = {}, {}
    if setup.needs_reward or "actor" in roles and not setup.learns_offline:
        generate = _generate(setup, roles)
    if setup.config.rollouts.max_staleness and KV in generate:
        # Samples in flight keep their slots while the run learns and while it evaluates: slots for
        # the rows of a step, or with rollouts.ahead up to all rows that have begun.
        rows = sampled_prompts(setup.config) * setup.config.batch.samples_per_prompt
        max_rows = (1 + setup.config.rollouts.steps_ahead) * rows
        resident[IN_FLIGHT] = _slots(setup, min(setup.decoding.slots or rows, max_rows))
        generate[KV] = _slots(setup, min(ROWS_PER_CALL, setup.config.evaluate.prompts))
    for role in [r for r in roles.values() if isinstance(r, (Actor, Critic, RewardModel))]:
        update = _learn(setup, role)
        if sum(update.values()) > sum(learn.values()):
            learn = update  # actor and critic are updated one after the other
    waiting = sum(held_bytes(tree, on_host=True) for tree in parts.values())
    if len(setup.phases) > 1 and "actor" not in roles:  # an earlier phase trains the policy
        resident |= {"actor weights": held_bytes(setup.model.abstract())}
    scorers = of_mesh(setup.model.mesh, abstract_scorers(setup))
    groups, score = group_bytes(setup, all_parts), fetched_bytes(scorers)
    if sampler_mesh(setup.groups) is not None:
        groups[SAMPLER] = {IN_FLIGHT: resident.pop(IN_FLIGHT, 0), **generate}
        generate = {}
    return MemoryEstimate(resident, generate, learn, waiting, score=score, groups=groups)


def _generate(setup: Setup, roles: dict) -> dict[str, int]:
    """Bytes that decoding a whole batch needs in addition to what is held, a copy of the weights in
    the layout of decoding among them."""
    decoding, model = setup.decoding, setup.decoding.of(setup.model)
    needs = decode_bytes(model, workload(setup), decoding)
    weights = roles["actor"].state.weights if "actor" in roles else setup.model.abstract()
    target = weights_like(model, weights, keep_dtypes=not decoding.weight_dtype)
    copied = 0 if agree(setup.model, model, weights, target) else held_bytes(target)
    if copied and not is_apart(setup.model, model):  # what stays is among the parts that are held
        copied -= held_bytes(kept_like(setup.model, model, weights, target))
    return {COPY: copied, **needs} if copied else needs


def in_flight_parts(setup: Setup, roles: dict) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the memory of samples in flight while the run learns, as one array of bytes; {}
    without any."""
    size = estimate(setup, roles).held.get(IN_FLIGHT, 0)
    return {IN_FLIGHT: jax.ShapeDtypeStruct((size,), jnp.uint8)} if size else {}


def _slots(setup: Setup, prompts: int) -> int:
    """Bytes of keys and values in the slots for `prompts` prompts at once, each with one sample."""
    work = dataclasses.replace(workload(setup), prompts=prompts, samples=1)
    return decode_bytes(setup.decoding.of(setup.model), work, setup.decoding)[KV]


def _learn(setup: Setup, role) -> dict[str, int]:
    """Bytes that the update of one role needs in addition to what is held."""
    model, steps = role.model, setup.algorithm.steps
    config, mesh = model.computed, model.mesh
    shards, tensor, context = row_shards(mesh), mesh.shape["tensor"], mesh.shape["context"]
    rows = _split(min(steps.microbatch_rows or steps.rows, steps.rows), shards)
    row_tokens, packing = setup.row_tokens, steps.packing
    if packing is not None:
        rows, row_tokens = packing.rows // shards, packing.blocks * packing.block_tokens
    tokens = rows * row_tokens // context
    size = jnp.dtype(config.dtype).itemsize
    accumulates = packing is not None or steps.microbatch_rows < steps.rows
    weights = _multiplied_bytes(model)
    layer = held_bytes(jax.tree.map(_as_float32, model.abstract()["layers"])) // config.layers
    gathered = 2 * layer * mesh.shape["fsdp"] * size // 4 if mesh.shape["fsdp"] > 1 else 0
    # Weights that are padded need a wider copy, and gradients of it.
    padded = 2 * 4 * copied_elements(model.shapes(), model.config, mesh)
    chunk = min(rows * row_tokens, max(CHUNK_LOGITS // config.vocab_size, rows))
    float32_head = config.head_in_float32 and not config.head_dtype
    head = config.embed * config.vocab_size // tensor * (4 if float32_head else size)
    lm = model.head == "lm"
    gradients = held_bytes(jax.tree.map(_as_float32, role.state.params))
    if accumulates:  # the gradients of one microbatch have the dtype of the weights
        gradients += held_bytes(role.state.params)
    heads, kv = (n // tensor for n in _attention_width(config))
    token_bytes = size * (6 * config.embed + 4 * heads + 4 * kv + 6 * _mlp(config) // tensor)
    if in_a_ring(mesh, config.heads, config.context_attention):
        # The float32 sums of gradients, and what a hop adds to them.
        token_bytes += 4 * 4 * (heads + kv)
    return {
        "gradients": gradients,
        "weights as used": _used_bytes(config, weights) + gathered + padded,
        "layers": config.layers * tokens * _kept(config, tensor, size),
        "one layer": tokens * token_bytes,
        "logits": (3 * 4 * chunk * config.vocab_size // tensor + 2 * head) * lm,
        "batch": 24 * 4 * _split(steps.rows, shards) * setup.row_tokens,
    }


def _split(count: int, shards: int) -> int:
    """Returns how many of `count` rows one device holds."""
    return count // shards if count % shards == 0 else count


def _as_float32(x):
    return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)


def _multiplied_bytes(model: Model) -> int:
    """Bytes on one device, counted in float32, of the weights that a pass multiplies with.
    Of weights that are stored as codes those of one layer count, as layers are decoded one
    after another."""
    leaves = flattened(jax.tree.map(_as_float32, model.abstract())).items()
    return sum(held_bytes(x) // (x.shape[0] if path[-1] == "codes" else 1) for path, x in leaves)


def _attention_width(config) -> tuple[int, int]:
    """Elements per token of all heads, and of all kv heads: the means over layers."""
    if config.latent:
        head_dim = config.latent.nope_dim + config.latent.rope_dim
        return config.heads * head_dim, config.heads * head_dim
    sizes = [config.of(kind) for kind in config.kinds]
    heads = sum(layer.heads * layer.head_dim for layer in sizes)
    kv_heads = sum(layer.kv_heads * layer.head_dim for layer in sizes)
    return heads // config.layers, kv_heads // config.layers


def _kept(config, tensor: int, size: int) -> int:
    """Bytes per layer and token that are kept for the backward pass (rljax.models.remat)."""
    heads, kv = (n // tensor for n in _attention_width(config))
    mlp = _mlp(config) // tensor
    products = heads + 2 * kv + config.embed + 2 * mlp + config.embed
    elements = {
        "offload": 0,
        "full": config.embed,
        "attention": config.embed + heads,
        "dots": config.embed + heads + products,
        "none": 2 * (3 * config.embed + 3 * heads + 4 * kv + 3 * mlp),
    }[config.remat]
    return elements * size


def _mlp(config) -> int:
    """Elements per token of the hidden layer of the feed-forward part."""
    if config.experts is None:
        return config.mlp
    return config.experts.mlp * config.experts.per_token


# -- what the devices have


def available_bytes(setup: Setup) -> int | None:
    """Returns the free bytes of one device of the host that has least; None if none of them reports
    it. Emulated CPU devices share the memory of their host. Every host has to ask."""
    meshes = (setup.model.mesh, *(group.mesh for group in setup.groups))
    devices = [d for mesh in meshes for d in mesh.devices.flat]
    local = [d for d in devices if d in d.client.local_devices()]
    free_bytes = device_bytes(local[0]) if local else None
    if free_bytes is not None and local[0].platform == "cpu":
        free_bytes //= len(local)
    return min((size for size in hosts.gather(free_bytes) if size is not None), default=None)


def check_fits(setup: Setup) -> MemoryEstimate:
    """Returns the estimate of a run. Raises InputError if the devices cannot hold it, with the
    changes of the config with which they can."""
    needs, available = estimate(setup), available_bytes(setup)
    if available is not None:
        check_groups_fit(needs.groups, available)
    if available is None or needs.least <= available:
        return dataclasses.replace(needs, available=available)
    raise InputError(
        f"this run needs {needs.line()}",
        value=f"{human_bytes(available)} left, less than the least it can do with, "
        f"{human_bytes(needs.least)}",
        fix=_how_to_fit(setup, available),
    )


def _how_to_fit(setup: Setup, available: float) -> str:
    """The changes with which a run fits, or else what its largest part asks for."""
    changes, total = nearest_fit(setup, available)
    if total <= available:
        return as_flags(changes)
    flags = as_flags(changes)
    for _ in range(8):  # one part after the other, each cut to the room that the others leave
        needs = _estimate_with(setup, changes, available)
        if needs.total <= available:
            return f"{as_flags(_least_changes(setup, changes, available)[0])}: a smaller step"
        parts = needs.parts
        largest = max(parts, key=parts.get)
        room = (available - needs.total + parts[largest]) / parts[largest]
        smaller = _smaller_step(setup, changes, largest, room)
        if not smaller:
            break
        changes = {**changes, **smaller}
    rank = "" if setup.config.lora.rank else ", adapters (--config.lora.rank=16)"
    devices = setup.model.mesh.size * math.ceil(total / available)
    shortfall = f"with {flags} it still needs {human_bytes(total)}: " if flags else ""
    return f"{shortfall}about {devices} such devices{rank}, or a smaller model"


def _estimate_with(setup: Setup, changes: dict[str, object], available: float) -> MemoryEstimate:
    config = with_overrides(setup.config, changes, "plan")
    return estimate(fewest_microbatches(changed(setup, config), available))


def _smaller_step(setup: Setup, changes: dict, largest: str, room: float) -> dict[str, object]:
    """Changes that cut the largest part to the share `room` of it, at most to half; {} where a step
    of this model has no smaller one."""
    config, share = with_overrides(setup.config, changes, "plan"), min(room * 0.9, 0.5)
    if largest in ("prompts", "batch") and not setup.learns_offline:
        batch, field = config.batch, "batch.prompts_per_step"
        unit = row_shards(setup.model.mesh)
        prompts = int(batch.prompts_per_step * share) // unit * unit
        if prompts < 1:
            return {}
        rows = prompts * batch.samples_per_prompt
        step = batch.sequences_per_optimizer_step
        step_change = {} if rows % step == 0 else {"batch.sequences_per_optimizer_step": rows}
        return {field: prompts, **step_change}
    if largest in (KV, IN_FLIGHT, "prompts", "batch", "layers", "one layer", "logits"):
        field = "offline.max_tokens" if setup.learns_offline else "sampler.max_response_tokens"
        tokens = int(value_of(config, field) * share)
        return {field: tokens} if tokens >= 1 else {}
    return {}


def as_flags(changes: dict[str, object]) -> str:
    """Returns the changes as flags of a launcher."""
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def nearest_fit(setup: Setup, have: float) -> tuple[dict[str, object], int]:
    """Returns {config field: value} with which the estimate fits, the least harmful first, and the
    estimate then; all changes if they are not enough. A change that saves nothing is left out."""
    changes: dict[str, object] = {}
    best = estimate(setup).total
    for name, value in _changes(setup):
        total = _estimate_with(setup, {**changes, name: value}, have).total
        if total < best:
            best, changes = total, {**changes, name: value}
        if best <= have:
            return _least_changes(setup, changes, have)
    return changes, best


def _least_changes(setup: Setup, changes: dict, available: float) -> tuple[dict[str, object], int]:
    """Changes that fit, with what later ones made needless taken back, and the estimate then."""
    for name in reversed(list(changes)):  # the most harmful first
        without = {field: value for field, value in changes.items() if field != name}
        milder = [{**without, name: value} for field, value in _changes(setup) if field == name]
        for fewer in (without, *milder):
            if _estimate_with(setup, fewer, available).total <= available:
                changes = fewer
                break
    return changes, _estimate_with(setup, changes, available).total


def changed(setup: Setup, config: Config) -> Setup:
    """Returns the setup of another config of the same data, model and dataflow."""
    devices = list(setup.model.mesh.devices.flat)
    model = load_model(config, setup.tokenizer, devices)
    inputs = (config, setup.tokenizer, setup.data, model, _row_tokens(setup, config), setup.groups)
    return with_decode_layout(assemble(*inputs))


def _row_tokens(setup: Setup, config: Config) -> int:
    """Columns of a batch with the limits of another config."""
    if setup.learns_offline:
        return min(setup.row_tokens, config.offline.max_tokens)
    if config.environment.function:
        return row_tokens(config)
    shorter = setup.config.sampler.max_response_tokens - config.sampler.max_response_tokens
    return setup.row_tokens - shorter


def fewest_microbatches(setup: Setup, hbm_bytes: float | None, roles: dict | None = None) -> Setup:
    """Returns the setup with the largest microbatch that a device surely holds (Estimate.most), the
    smallest if it holds none, where batch.tokens_per_microbatch=0 leaves that to the plan and the
    chip's memory is known. What is free at the moment does not count: a run that is resumed has the
    same microbatches."""
    if setup.config.batch.tokens_per_microbatch or hbm_bytes is None:
        return setup
    roles = abstract_roles(setup) if roles is None else roles
    steps, unit = setup.algorithm.steps, row_shards(setup.model.mesh) * setup.rows_per_example
    for rows in splits(steps.rows, unit):
        tokens = {"batch.tokens_per_microbatch": rows * setup.row_tokens}
        config = with_overrides(setup.config, tokens, "plan")
        candidate = setup.with_algorithm(steps=changed(setup, config).algorithm.steps)
        if estimate(candidate, roles).most <= hbm_bytes:
            break
    return candidate


def _changes(setup: Setup) -> Iterator[tuple[str, object]]:
    """Changes that save memory: first those that leave the results of a run as they are, up to
    rounding, then those that make it slower."""
    config, mesh = setup.config, setup.model.mesh
    tokens = config.batch.tokens_per_microbatch
    while tokens // 2 >= setup.row_tokens:
        tokens //= 2
        yield "batch.tokens_per_microbatch", tokens
    order = ("none", "dots", "attention", "full")
    if config.model_settings.remat in order[:-1]:
        yield "model_settings.remat", "full"
    rows = config.batch.prompts_per_step * config.batch.samples_per_prompt
    slots = min(config.sampler.slots or rows, rows)
    while not setup.learns_offline and slots // 2 >= row_shards(mesh):
        slots //= 2
        yield "sampler.slots", slots
    on_host = HOST_MEMORY in [m.kind for m in mesh.devices.flat[0].addressable_memories()]
    if on_host and mesh.devices.flat[0].platform != "cpu":
        yield "memory.optimizer_on_host", True
        yield "memory.reference_on_host", True
        yield "model_settings.remat", "offload"
    if setup.model.config.dtype == "float32":
        yield "model_settings.dtype", "bfloat16"
