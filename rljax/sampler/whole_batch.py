"""The programs of whole-batch rollouts: prefill each prompt once, decode in slots that refill on
the device as rows end.

One program for all of it, and the same in dispatches, between which the host learns which rows have
ended. Parameters are an argument of every call. Token t of a row lives in column t of the row and
of its slot.

Axes: P prompts, L prompt columns, n samples per prompt, R = P n rows, B slots,
S = L + response columns.

Where the rows are split over devices, so are the slots, and a slot serves the rows of its own
device alone: no key or value moves between devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from rljax import hosts
from rljax.arrays import fetch, told_to_stop
from rljax.batch import Batch, FinishReason, batch_from_rows
from rljax.mesh import constrain_rows, highest_of_runs, replicated, row_shards
from rljax.models import cache
from rljax.models.model import Model
from rljax.sampler import slots as slot
from rljax.sampler import speculation
from rljax.sampler.inputs import request_keys
from rljax.tracking import timing

# Steps between two refills at most, and how many slots of B wait for one: B / REFILL.
REFILL_STEPS, REFILL = 64, 8
# Steps of a dispatch at most: how late the host may learn that a row has ended.
DISPATCH_STEPS = 32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "weight"], meta_fields=["model"]
)
@dataclasses.dataclass(frozen=True)
class SecondModel:
    """A second model that decodes along. The next token is drawn from the geometric mixture of
    both, softmax(((1 - weight) z + weight z_second) / temperature), and its log-prob is of that
    mixture, too. Both have one vocabulary."""

    model: Model
    params: dict
    weight: float | jax.Array


_IMAGE_FIELDS = ("pixels", "patch_coords", "rope_positions")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static half of the program."""

    n: int
    slots: int
    response_tokens: int
    kv_dtype: str
    look_every: int = 1
    draft_tokens: int = 0
    columns: int = 0  # of a row; 0 = those of the prompts, and response_tokens
    record_routes: bool = False  # which experts of the model each token went to


@functools.partial(jax.jit, static_argnames=("model", "shape"))
def rollout(
    model: Model,
    shape: Shape,
    params,
    prompts,
    lengths,
    keys,
    rules,
    version,
    forcing,
    images,
    second,
    limits=None,
):
    """Decodes a whole batch in one program.

    Args:
      model: the model as it decodes.
      shape: the static half of the program.
      params: the weights of the model.
      prompts: [P, L] int32, right-padded.
      lengths: [P] int32.
      keys: [R, 2] uint32, or the data [2] of one key, under which row r has the key of request r.
      rules: of R rows.
      version: int32 scalar.
      forcing: interruptions of R rows, or None.
      images: those of the prompts, or None.
      second: a model that decodes along, or None.
      limits: [P] tokens of prompt and response at which the rows of a prompt end; None:
        response_tokens behind the prompt.

    Returns the batch [R, S], and the counts of drafts (speculation.totals).
    """
    rows, count = prompts.shape[0] * shape.n, shape.slots
    inputs = (prompts, lengths, keys, rules, forcing, images, second, limits)
    prompt_batch, queue, carry = _start(model, shape, params, *inputs)
    models = _unstacked(model, params, second, steps=shape.response_tokens)
    all_fit = count == rows
    room = shape.response_tokens if all_fit else min(REFILL_STEPS, shape.response_tokens)
    shards = shard_count(model, prompts.shape[0], count)

    def more(carry):
        slots, _, taken_rows, _ = carry
        return highest_of_runs(jnp.any(slots.live) | (jnp.min(taken_rows) < rows // shards))

    def once(carry):
        carry = _refill_all(carry, queue, shape, shards)
        return _decode(models, second, carry, shape, room, shards)[0]

    slots, *_, record = jax.lax.while_loop(more, once, carry)
    batch = _batch(model, shape, record, lengths, version, images, prompt_batch, queue.shift)
    return batch, speculation.totals(slots.drafts)


def _start(
    model, shape: Shape, params, prompts, lengths, keys, rules, forcing, images, second, limits
):
    """Reads every prompt. Returns the prompts as a batch, the queue, and the state of the loop:
    slots, their owners, how many rows each shard has taken, the record."""
    count, total = shape.slots, shape.columns or prompts.shape[1] + shape.response_tokens
    rows = prompts.shape[0] * shape.n
    prompt_batch, shift = _prompts(prompts, lengths, images)
    models, arguments = (
        _models(model, params, second),
        (prompt_batch, prompts.shape[1], shape.kv_dtype),
    )
    reading = [member.prefill_routed(weights, *arguments) for member, weights in models]
    prefix = tuple(caches for caches, _ in reading)
    routes = reading[0][1] if shape.record_routes else None
    limits = lengths + shape.response_tokens if limits is None else limits
    if keys.ndim == 1:
        keys = constrain_rows(request_keys(jax.random.wrap_key_data(keys), rows), model.mesh)
    queue = _Queue(prefix, prompts, lengths, limits, shift, keys, rules, forcing)
    arguments = (count, total, shape.kv_dtype, rules, forcing, None, shape.draft_tokens)
    slots = slot.empty([member for member, _ in models], *arguments)
    record = _empty_record(prompts, lengths, routes, shape.n, total)
    taken_rows = jnp.zeros((shard_count(model, prompts.shape[0], count),), jnp.int32)
    return prompt_batch, queue, (slots, jnp.full((count,), rows, jnp.int32), taken_rows, record)


def _models(model, params, second) -> list[tuple]:
    return [(model, params)] + ([(second.model, second.params)] if second else [])


def _unstacked(*models, steps: int):
    return [(member, member.unstack(weights, steps)) for member, weights in _models(*models)]


def _refill_all(carry, queue: "_Queue", shape: Shape, shards: int):
    slots, owner, taken_rows, record = carry
    return *_refill(slots, owner, taken_rows, queue, shape.n, shape, shards), record


def _decode(models, second, carry, shape: Shape, room: int, shards: int):
    """Decodes up to `room` steps, or until enough slots are free for others. Returns the state of
    the loop, and Tokens."""
    slots, owner, taken_rows, record = carry
    count, rows = shape.slots, record.length.shape[0]
    enough_free = count if count == rows else max(1, count // REFILL)
    start_lengths = slots.length
    waiting = jnp.min(taken_rows) < rows // shards
    # Slots that are free now stay free: their shard has no rows left.
    free = jnp.where(waiting, jnp.sum(~slots.live) + enough_free, count)
    weight = second.weight if second else 0.0
    arguments = (room, room, free, shape.look_every, shape.record_routes)
    slots, tokens, steps_done = slot.decode(models, weight, slots, *arguments)
    # Adds 0 without the compiler knowing: the communication of the record then waits for the
    # loop. Side by side, devices may begin one or the other and wait for each other for ever.
    owner, start_lengths = (x + jnp.minimum(steps_done, 0) for x in (owner, start_lengths))
    return (
        slots,
        owner,
        taken_rows,
        _record(record, owner, start_lengths, slots, tokens, shards),
    ), tokens


# -- the same in dispatches


def fits_a_dispatch(shape: Shape, rows: int) -> bool:
    """Returns whether every row ends in the first dispatch, so that no row can be reported before
    the batch is done."""
    return shape.slots == rows and shape.response_tokens <= DISPATCH_STEPS


@functools.partial(jax.jit, static_argnames=("model", "shape"))
def _begin(model, shape: Shape, params, *inputs):
    prompt_batch, queue, carry = _start(model, shape, params, *inputs)
    if shape.slots == queue.keys.shape[0]:  # every row has a slot: nothing is refilled later
        shards = shard_count(model, queue.prompts.shape[0], shape.slots)
        carry = _refill_all(carry, queue, shape, shards)
    return prompt_batch, queue, _pinned(carry, model)


@functools.partial(jax.jit, static_argnames=("model", "shape"), donate_argnames=("carry",))
def _dispatch(model, shape: Shape, params, second, queue: "_Queue", carry, stop_flags):
    """Runs one dispatch. Returns the state of the loop, and what the host reads of it. `stop_flags`
    says of each device whether its host was told to stop; None with one process."""
    shards = shard_count(model, queue.prompts.shape[0], shape.slots)
    if shape.slots < queue.keys.shape[0]:
        carry = _refill_all(carry, queue, shape, shards)
    room = min(DISPATCH_STEPS, shape.response_tokens)
    models = _unstacked(model, params, second, steps=room)
    carry, tokens = _decode(models, second, carry, shape, room, shards)
    slots, owner, taken_rows, record = carry
    waiting = jnp.min(taken_rows) < record.length.shape[0] // shards
    stop = None if stop_flags is None else jnp.any(stop_flags)
    look = (owner, slots.live, slots.reason, tokens.ids, tokens.valid, waiting, stop)
    # Replicated, as every host of a pod reads all of it.
    return _pinned(carry, model), jax.lax.with_sharding_constraint(look, replicated(model.mesh))


def _pinned(carry, model: Model):
    """Returns the state with its first split, so that donated buffers can be written in place."""
    slots, *rest = carry
    shardings = (slot.layout(slots, model.mesh), *slot.rows_layout(rest, model.mesh))
    return jax.lax.with_sharding_constraint(tuple(carry), shardings)


def in_dispatches(
    model: Model,
    shape: Shape,
    params,
    prompts,
    lengths,
    keys,
    rules,
    version,
    forcing,
    images,
    second,
    limits=None,
    *,
    finished: Callable[[int, list[int], int], None],
    stop: Callable[[], bool] | None,
):
    """Decodes in dispatches and returns as `rollout`. `finished(row, ids, reason)` is called as
    rows end, on every host for every row, while the devices decode the next dispatch; once `stop`
    says so, that dispatch is the last. Where hosts were told to stop, all of them do so between the
    same two dispatches."""
    start = (prompts, lengths, keys, rules, forcing, images, second, limits)
    prompt_batch, queue, carry = _begin(model, shape, params, *start)
    responses = _Responses(prompts.shape[0] * shape.n)
    timing.decoding(shape.slots)
    program = (model, shape, params, second, queue)
    carry, look = _dispatch(*program, carry, told_to_stop(model.mesh))
    while True:
        owner, live, reason, ids, valid, waiting, must_stop = fetch(look)
        if must_stop:
            hosts.stop_here()
        going = bool(waiting or live.any())
        if going:
            carry, look = _dispatch(*program, carry, told_to_stop(model.mesh))
        timing.decoding(shape.slots if waiting else int(live.sum()))
        for row, response, end_reason in responses.take(owner, live, reason, ids, valid):
            finished(row, response, end_reason)
        if not going or (stop is not None and stop()):
            arguments = (queue.lengths, version, images, prompt_batch, queue.shift)
            batch = _batch(model, shape, carry[3], *arguments)
            return batch, speculation.totals(carry[0].drafts)


class _Responses:
    """The responses so far, row by row, on the host."""

    def __init__(self, rows: int):
        self._ids: list[list[int] | None] = [[] for _ in range(rows)]  # None: it was reported

    def take(self, owner, live, reason, ids, valid) -> Iterator[tuple[int, list[int], int]]:
        """Yields (row, ids, reason) of the rows that end with the slots' new tokens [k, B]."""
        for index, row in enumerate(owner):
            response = self._ids[row] if row < len(self._ids) else None
            if response is None:  # no row, or one that ended in an earlier dispatch
                continue
            response += ids[valid[:, index], index].tolist()
            if not live[index]:
                self._ids[row] = None
                yield int(row), response, int(reason[index])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Queue:
    """The waiting rows: prefixes of P prompts; keys, rules and forcing of R rows."""

    prefix: tuple
    prompts: jax.Array
    lengths: jax.Array
    limits: jax.Array
    shift: jax.Array
    keys: jax.Array
    rules: slot.Rules
    forcing: slot.Forcing | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Record:
    """The decoded tokens, row by row: [R, S] and [R]; routes [R, S, E, k] of what was read."""

    tokens: jax.Array
    logp: jax.Array
    log_kept: jax.Array
    entropy: jax.Array
    chosen: jax.Array
    length: jax.Array
    reason: jax.Array
    routes: jax.Array | None = None


def shard_count(model: Model, prompts: int, slots: int) -> int:
    """Returns into how many parts prompts, rows and slots are split over devices alike."""
    shards = row_shards(model.mesh)
    return shards if prompts % shards == 0 and slots % shards == 0 else 1


def _pick(x: jax.Array, index: jax.Array, shards: int) -> jax.Array:
    """x[index] where shard d of index [B] counts within shard d of x's rows."""
    by_shard = x.reshape(shards, -1, *x.shape[1:])
    picked = jax.vmap(lambda a, i: a[i])(by_shard, index.reshape(shards, -1))
    return picked.reshape(-1, *x.shape[1:])


def _refill(slots, owner, taken_rows, queue: _Queue, n: int, shape: Shape, shards: int):
    """Gives every free slot the next waiting row of its shard. Returns the slots, the rows that own
    them [B] (R: none), and how many rows each shard has taken."""
    rows = queue.keys.shape[0] // shards
    free = ~slots.live.reshape(shards, -1)
    row = taken_rows[:, None] + jnp.cumsum(free, axis=1) - 1
    refilled = (free & (row < rows)).reshape(-1)
    taken_rows = jnp.minimum(taken_rows + jnp.sum(free, axis=1), rows).astype(jnp.int32)
    row = jnp.clip(row, 0, rows - 1)
    base = (jnp.arange(shards) * rows)[:, None]
    live_owner = jnp.where(slots.live, owner, queue.keys.shape[0])
    owner = jnp.where(refilled, (row + base).reshape(-1), live_owner)
    row, prompt = row.reshape(-1), (row // n).reshape(-1)

    def pick(x, index):
        return _pick(x, index, shards)

    def choose(old, new):
        mask = refilled.reshape((-1,) + (1,) * (old.ndim - 1))
        if old.shape == new.shape:
            return jnp.where(mask, new, old)
        # A prefix has fewer columns; those behind it are garbage that is never read.
        head = tuple(slice(0, size) for size in new.shape)
        return old.at[head].set(jnp.where(mask, new, old[head]))

    # Where a row ended for logits that are not finite, its last column is not, either, nor are
    # those of a draft; those before it were finite or lie in the prompt's columns.
    columns = 1 + shape.draft_tokens
    clean = tuple(
        [cache.forget(layer, slots.length, columns) for layer in layers] for layers in slots.caches
    )
    caches = jax.tree.map(lambda old, new: choose(old, pick(new, prompt)), clean, queue.prefix)
    length = pick(queue.lengths, prompt)
    last_tokens = jnp.take_along_axis(queue.prompts, queue.lengths[:, None] - 1, axis=1)[:, 0]
    fresh = dataclasses.replace(
        slots,
        caches=caches,
        # The prompt's last token is read again: its column is written with the same numbers.
        length=choose(slots.length, length - 1),
        token=choose(slots.token, pick(last_tokens, prompt)),
        limit=choose(slots.limit, pick(queue.limits, prompt)),
        shift=choose(slots.shift, pick(queue.shift, prompt)),
        key=choose(slots.key, pick(queue.keys, row)),
        live=slots.live | refilled,
        reason=jnp.where(refilled, FinishReason.ABORT, slots.reason).astype(jnp.int32),
        rules=jax.tree.map(lambda a, b: choose(a, pick(b, row)), slots.rules, queue.rules),
        forcing=jax.tree.map(lambda a, b: choose(a, pick(b, row)), slots.forcing, queue.forcing),
    )
    if (drafts := slots.drafts) is not None:
        history = choose(drafts.history, pick(queue.prompts, prompt))
        fresh = dataclasses.replace(fresh, drafts=dataclasses.replace(drafts, history=history))
    return fresh, owner, taken_rows


def _empty_record(prompts, lengths, routes, n: int, total: int) -> _Record:
    """Returns the record of n rows of each prompt, before anything is decoded. routes: those of the
    prompts, or None."""
    if routes is not None:  # -1: not read yet
        in_prompt = jnp.arange(routes.shape[1])[None, :] < lengths[:, None]
        routes = jnp.where(in_prompt[..., None, None], routes, -1)
        room = [(0, 0), (0, total - routes.shape[1]), (0, 0), (0, 0)]
        routes = jnp.pad(routes, room, constant_values=-1)
    of_prompts = (prompts, lengths, routes)
    prompts, lengths, routes = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), of_prompts)
    rows = prompts.shape[0]
    number = jnp.zeros((rows, total), jnp.float32)
    return _Record(
        tokens=jnp.pad(prompts, ((0, 0), (0, total - prompts.shape[1]))),
        logp=number,
        log_kept=number,
        entropy=number,
        chosen=jnp.zeros((rows, total), bool),
        length=lengths,
        reason=jnp.full((rows,), FinishReason.ABORT, jnp.int32),
        routes=routes,
    )


def _record(
    record: _Record, owner, start_lengths, slots, tokens: slot.Tokens, shards: int
) -> _Record:
    """Writes what a dispatch decoded at its rows and columns; `start_lengths` [B] are the lengths
    of the slots before it. A shard's slots hold its own rows: nothing is moved."""
    steps, (rows, total) = tokens.ids.shape[0], record.tokens.shape
    column = start_lengths[None, :] + 1 + jnp.arange(steps)[:, None]
    column = jnp.where(tokens.valid, column, total)

    def parts(x, axis=0):
        return x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :])

    first_rows = (jnp.arange(shards) * (rows // shards))[:, None]
    local_rows = parts(owner) - first_rows
    local_rows = jnp.where(
        local_rows < rows // shards, local_rows, rows
    )  # the rows of no slot: dropped

    def put(old, new, column=column):
        def write(old, row, column, new):
            return old.at[row[None], column].set(new, mode="drop")

        write = jax.vmap(write, in_axes=(0, 0, 1, 1))
        return write(parts(old), local_rows, parts(column, 1), parts(new, 1)).reshape(old.shape)

    def per_row(old, new):
        write = jax.vmap(lambda old, row, new: old.at[row].set(new, mode="drop"))
        return write(parts(old), local_rows, parts(new)).reshape(old.shape)

    read_columns = jnp.where(
        tokens.valid, column - 1, total
    )  # a step reads the token before its own
    return _Record(
        routes=None if record.routes is None else put(record.routes, tokens.routes, read_columns),
        tokens=put(record.tokens, tokens.ids),
        logp=put(record.logp, tokens.logp),
        log_kept=put(record.log_kept, tokens.log_kept),
        entropy=put(record.entropy, tokens.entropy),
        chosen=put(record.chosen, tokens.chosen),
        length=per_row(record.length, slots.length + 1),
        reason=per_row(record.reason, slots.reason),
    )


@functools.partial(jax.jit, static_argnames=("model", "shape"))
def _batch(
    model, shape: Shape, record: _Record, lengths, version, images, prompt_batch, shift
) -> Batch:
    """Returns the rows that were decoded as a Batch."""
    index = jnp.arange(record.tokens.shape[1])[None, :]
    mask = record.chosen.astype(jnp.float32)
    batch = batch_from_rows(
        jnp.where(index < record.length[:, None], record.tokens, 0),
        record.length,
        mask,
        sampler_logprobs=record.logp,
        sampler_log_kept=record.log_kept,
        entropy=record.entropy,
        policy_version=jnp.where(mask > 0, version, 0).astype(jnp.int32),
        group=jnp.repeat(jnp.arange(lengths.shape[0], dtype=jnp.int32), shape.n),
        finish_reason=record.reason.astype(jnp.int32),  # never weakly typed: one program learns
        routes=record.routes,
    )
    batch = jax.tree.map(lambda x: constrain_rows(x, model.mesh), batch)
    if images is None:
        return batch
    start, shift = (jnp.repeat(x, shape.n) for x in (lengths, shift))
    prompt_images = {name: getattr(prompt_batch, name) for name in _IMAGE_FIELDS}
    return with_images(batch, prompt_images, start, shift, shape.n)


def _prompts(tokens, lengths, images):
    """Returns (the prompts as a batch, the numbers [P] by which a sample's positions differ from
    its columns)."""
    batch = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
    if images is None:
        return batch, jnp.zeros_like(lengths)
    return batch.replace(**{name: images[name] for name in _IMAGE_FIELDS}), images["shift"]


def with_images(batch: Batch, images: dict, start, shift, n: int) -> Batch:
    """Returns the batch with the images of each row's prompt, of which `images` has those of all
    prompts, and positions that go on behind the prompt: start [R] is the prompts' length, and shift
    [R] by how much positions and columns differ there."""
    of_prompt = {name: jnp.repeat(images[name], n, axis=0) for name in _IMAGE_FIELDS}
    next_positions = (batch.positions + shift[:, None])[..., None]
    prompt = of_prompt["rope_positions"]
    prompt = jnp.pad(prompt, [(0, 0), (0, batch.tokens.shape[1] - prompt.shape[1]), (0, 0)])
    in_prompt = jnp.arange(batch.tokens.shape[1])[None, :, None] < start[:, None, None]
    of_prompt["rope_positions"] = jnp.where(in_prompt, prompt, next_positions).astype(jnp.int32)
    return batch.replace(**of_prompt)
