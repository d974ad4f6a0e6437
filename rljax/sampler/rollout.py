"""Whole-batch rollouts as one jitted program: prefill each prompt once, decode in slots that refill
on the device as rows end.

What lives here: the program, and the public `generate`. It holds no weights: parameters are an
argument of every call. Axes: P prompts, L prompt columns, n samples per prompt, R = P n rows, B
slots, S = L + response columns. Token t of a row lives in column t of the row and of its slot.

Where the rows are split over devices, so are the slots, and a slot serves the rows of its own
device alone: no key or value moves between devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batch import Batch, FinishReason, batch_from_rows
from rljax.errors import InputError
from rljax.mesh import (
    constrain_rows,
    make_mesh,
    replicated,
    row_sharding,
    row_shards,
    shard_rows,
)
from rljax.models import cache
from rljax.models.model import Model
from rljax.recording import Call, calls
from rljax.sampler import slots as slot
from rljax.sampler.engine import Engine
from rljax.sampler.host_rollout import host_rollout
from rljax.sampler.keys import budgets, request_keys
from rljax.sampler.memory import check_memory
from rljax.sampler.requests import Decoding, Sampling, rules_of
from rljax.sampler.stop_strings import cut_at_stop_strings

# Steps between two refills at most, and how many slots of B wait for one: B / REFILL.
REFILL_STEPS, REFILL = 64, 8


WHOLE_BATCH = Decoding()


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "weight"], meta_fields=["model"]
)
@dataclasses.dataclass(frozen=True)
class Mixed:
    """A second model that decodes along. The next word is drawn from the geometric mixture of both,
    softmax(((1 - weight) z + weight z_second) / temperature), and so is its log-prob. One
    vocabulary."""

    model: Model
    params: dict
    weight: float | jax.Array


_IMAGE_FIELDS = ("pixels", "patch_coords", "rope_positions")


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static half of the program."""

    n: int
    slots: int
    response_tokens: int
    kv_dtype: str


@functools.partial(jax.jit, static_argnames=("model", "shape"))
def _rollout(
    model: Model, shape: _Shape, params, prompts, lengths, keys, rules, version, forcing, images,
    mixed,
):  # fmt: skip
    """The program. prompts [P, L], lengths [P], keys [R, 2], rules and forcing of R rows; forcing,
    images and mixed are None, or arrays."""
    n, count, total = shape.n, shape.slots, prompts.shape[1] + shape.response_tokens
    rows = prompts.shape[0] * n
    seen, shift = _prompts(prompts, lengths, images)
    models = [(model, params)] + ([(mixed.model, mixed.params)] if mixed else [])
    prefix = tuple(one.prefill(p, seen, prompts.shape[1], shape.kv_dtype) for one, p in models)
    unstacked = [(one, one.unstack(weights)) for one, weights in models]
    queue = _Queue(prefix, prompts, lengths, shift, keys, rules, forcing)
    shards = _shards(model, prompts.shape[0], count)
    whole = count == rows
    room = shape.response_tokens if whole else min(REFILL_STEPS, shape.response_tokens)
    enough_free = count if whole else max(1, count // REFILL)

    def more(carry):
        slots, _, taken, _ = carry
        return jnp.any(slots.live) | (jnp.min(taken) < rows // shards)

    def once(carry):
        slots, owner, taken, out = carry
        slots, owner, taken = _refill(slots, owner, taken, queue, n, shape, shards)
        before = slots.length
        waiting = jnp.min(taken) < rows // shards
        # What is free now stays free: its shard has no rows left.
        free = jnp.where(waiting, jnp.sum(~slots.live) + enough_free, count)
        weight = mixed.weight if mixed else 0.0
        slots, tokens, done = slot.decode(unstacked, weight, slots, room, room, free)
        # Adds 0, and says so to nobody: what is sent for the record waits for the loop. Side by
        # side, devices may begin one or the other and wait for each other for ever.
        owner, before = (x + jnp.minimum(done, 0) for x in (owner, before))
        return slots, owner, taken, _record(out, owner, before, slots, tokens)

    first = slot.empty([one for one, _ in models], count, total, shape.kv_dtype, rules, forcing)
    out = _empty_record(jnp.repeat(prompts, n, axis=0), jnp.repeat(lengths, n), shape)
    taken = jnp.zeros((shards,), jnp.int32)
    carry = (first, jnp.full((count,), rows, jnp.int32), taken, out)
    out = jax.lax.while_loop(more, once, carry)[3]
    return _batch(model, shape, out, lengths, version, images, seen, shift)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Queue:
    """What waits: everything of P prompts, and of R rows."""

    prefix: tuple
    prompts: jax.Array
    lengths: jax.Array
    shift: jax.Array
    keys: jax.Array
    rules: slot.Rules
    forcing: slot.Forcing | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Record:
    """What was decoded, row by row: [R, S] and [R]."""

    tokens: jax.Array
    logp: jax.Array
    log_kept: jax.Array
    entropy: jax.Array
    chosen: jax.Array
    length: jax.Array
    reason: jax.Array


def _shards(model: Model, prompts: int, slots: int) -> int:
    """Into how many parts prompts, rows and slots are split over devices alike."""
    shards = row_shards(model.mesh)
    return shards if prompts % shards == 0 and slots % shards == 0 else 1


def _pick(x: jax.Array, index: jax.Array, shards: int) -> jax.Array:
    """x[index] where shard d of index [B] counts within shard d of x's rows."""
    parts = x.reshape(shards, -1, *x.shape[1:])
    picked = jax.vmap(lambda a, i: a[i])(parts, index.reshape(shards, -1))
    return picked.reshape(-1, *x.shape[1:])


def _refill(slots, owner, taken, queue: _Queue, n: int, shape: _Shape, shards: int):
    """Every free slot takes the next waiting row of its shard: slots, the rows that own them [B]
    (R: nobody), and how many rows each shard has taken."""
    rows = queue.keys.shape[0] // shards
    free = ~slots.live.reshape(shards, -1)
    row = taken[:, None] + jnp.cumsum(free, axis=1) - 1
    take = (free & (row < rows)).reshape(-1)
    taken = jnp.minimum(taken + jnp.sum(free, axis=1), rows).astype(jnp.int32)
    row = jnp.clip(row, 0, rows - 1)
    base = (jnp.arange(shards) * rows)[:, None]
    kept = jnp.where(slots.live, owner, queue.keys.shape[0])
    owner = jnp.where(take, (row + base).reshape(-1), kept)
    row, prompt = row.reshape(-1), (row // n).reshape(-1)
    pick = lambda x, index: _pick(x, index, shards)  # noqa: E731

    def choose(old, new):
        where = take.reshape((-1,) + (1,) * (old.ndim - 1))
        if old.shape == new.shape:
            return jnp.where(where, new, old)
        # A prefix has fewer columns; those behind it are garbage that nobody reads.
        head = tuple(slice(0, size) for size in new.shape)
        return old.at[head].set(jnp.where(where, new, old[head]))

    # Where a row ended for logits that are not finite, its last column is not, either; those before
    # it were finite or lie in the prompt's columns.
    clean = tuple([cache.forget(one, slots.length) for one in each] for each in slots.caches)
    caches = jax.tree.map(lambda old, new: choose(old, pick(new, prompt)), clean, queue.prefix)
    length = pick(queue.lengths, prompt)
    last = pick(
        jnp.take_along_axis(queue.prompts, queue.lengths[:, None] - 1, axis=1)[:, 0], prompt
    )
    fresh = dataclasses.replace(
        slots,
        caches=caches,
        # The prompt's last token is read again: its column is written with the same numbers.
        length=choose(slots.length, length - 1),
        token=choose(slots.token, last),
        limit=choose(slots.limit, length + shape.response_tokens),
        shift=choose(slots.shift, pick(queue.shift, prompt)),
        key=choose(slots.key, pick(queue.keys, row)),
        live=slots.live | take,
        reason=jnp.where(take, FinishReason.ABORT, slots.reason).astype(jnp.int32),
        rules=jax.tree.map(lambda a, b: choose(a, pick(b, row)), slots.rules, queue.rules),
        forcing=jax.tree.map(lambda a, b: choose(a, pick(b, row)), slots.forcing, queue.forcing),
    )
    return fresh, owner, taken


def _empty_record(prompts, lengths, shape: _Shape) -> _Record:
    rows, total = prompts.shape[0], prompts.shape[1] + shape.response_tokens
    number = jnp.zeros((rows, total), jnp.float32)
    return _Record(
        tokens=jnp.pad(prompts, ((0, 0), (0, shape.response_tokens))),
        logp=number,
        log_kept=number,
        entropy=number,
        chosen=jnp.zeros((rows, total), bool),
        length=lengths,
        reason=jnp.full((rows,), FinishReason.ABORT, jnp.int32),
    )


def _record(out: _Record, owner, before, slots, tokens: slot.Tokens) -> _Record:
    """What a dispatch decoded, at its rows and columns; `before` [B] is each slot's length then."""
    steps, total = tokens.ids.shape[0], out.tokens.shape[1]
    column = before[None, :] + 1 + jnp.arange(steps)[:, None]
    column = jnp.where(tokens.valid, column, total)
    row = jnp.broadcast_to(owner[None, :], column.shape)
    put = lambda old, new: old.at[row, column].set(new, mode="drop")  # noqa: E731
    per_row = lambda old, new: old.at[owner].set(new, mode="drop")  # noqa: E731
    return _Record(
        tokens=put(out.tokens, tokens.ids),
        logp=put(out.logp, tokens.logp),
        log_kept=put(out.log_kept, tokens.log_kept),
        entropy=put(out.entropy, tokens.entropy),
        chosen=put(out.chosen, tokens.chosen),
        length=per_row(out.length, slots.length + 1),
        reason=per_row(out.reason, slots.reason),
    )


def _batch(model, shape: _Shape, out: _Record, lengths, version, images, seen, shift) -> Batch:
    index = jnp.arange(out.tokens.shape[1])[None, :]
    mask = out.chosen.astype(jnp.float32)
    batch = batch_from_rows(
        jnp.where(index < out.length[:, None], out.tokens, 0),
        out.length,
        mask,
        sampler_logprobs=out.logp,
        sampler_log_kept=out.log_kept,
        entropy=out.entropy,
        policy_version=jnp.where(mask > 0, version, 0).astype(jnp.int32),
        group=jnp.repeat(jnp.arange(lengths.shape[0], dtype=jnp.int32), shape.n),
        finish_reason=out.reason,
    )
    batch = jax.tree.map(lambda x: constrain_rows(x, model.mesh), batch)
    if images is None:
        return batch
    start, shift = (jnp.repeat(x, shape.n) for x in (lengths, shift))
    return _with_images(batch, seen, start, shift, shape.n)


def _prompts(tokens, lengths, images):
    """(the prompts as a batch, by how much a sample's positions differ from its columns [P])."""
    seen = batch_from_rows(tokens, lengths, jnp.zeros(tokens.shape, jnp.float32))
    if images is None:
        return seen, jnp.zeros_like(lengths)
    return seen.replace(**{name: images[name] for name in _IMAGE_FIELDS}), images["shift"]


def _with_images(batch: Batch, seen: Batch, start, shift, n: int) -> Batch:
    """Every sample with the images of its prompt, and positions that go on after it."""
    of_prompt = {name: jnp.repeat(getattr(seen, name), n, axis=0) for name in _IMAGE_FIELDS}
    after = (batch.positions + shift[:, None])[..., None]
    room = [(0, 0), (0, batch.tokens.shape[1] - seen.tokens.shape[1]), (0, 0)]
    prompt = jnp.pad(of_prompt["rope_positions"], room)
    inside = jnp.arange(batch.tokens.shape[1])[None, :, None] < start[:, None, None]
    of_prompt["rope_positions"] = jnp.where(inside, prompt, after).astype(jnp.int32)
    return batch.replace(**of_prompt)


def generate(
    model: Model,
    params,
    prompts,
    lengths,
    key,
    sampling: Sampling,
    *,
    n: int = 1,
    version=0,
    decoding: Decoding = WHOLE_BATCH,
    images: dict | None = None,
    mixed: Mixed | None = None,
) -> Batch:
    """Sample n responses to each prompt: prompts [P, L] int32 right-padded, lengths [P] -> Batch of
    R = P n rows.

    Row p n + s is sample s of prompt p; `group` is p. EOS is part of the response. A draw depends
    on (key, row, place) alone: `decoding` changes none while keys and values are held as they are
    computed, nor does its loop (a host's dispatches, or one program that every host of a pod runs
    unchanged). `images` are those of the prompts (rljax.data.prompts). `mixed`: a second model to
    draw from together. A row whose logits are not finite ends there, with FinishReason.ABORT.
    """
    prompts, lengths = np.asarray(prompts), np.asarray(lengths, np.int32)
    _check(model, prompts, lengths, sampling, n, decoding)
    _check_mixed(model, mixed)
    prompts = prompts.astype(np.int32)
    rows = prompts.shape[0] * n
    if (noted := calls()) is not None:
        return _noted(noted, model, params, prompts, sampling, n, decoding, mixed)
    if decoding.loop == "host":
        _refuse_on_host(images, mixed)
        asked = (prompts, lengths, key, sampling)
        return host_rollout(model, params, *asked, n=n, version=version, decoding=decoding)
    slots = min(decoding.slots or rows, rows)
    shape = _Shape(n, slots, sampling.max_response_tokens, decoding.kv_dtype)
    columns = prompts.shape[1] + sampling.max_response_tokens
    check_memory(model, slots, columns, decoding.kv_dtype)
    key = key if sampling.seed is None else jax.random.key(sampling.seed)
    keys = request_keys(key, rows)
    forcing = None
    if sampling.thinking_tokens:
        asked = [sampling] * rows
        room = slot.forcing_room(asked)
        spent = budgets(keys, sampling)
        forcing = slot.forcing_of(asked, room, spent, np.repeat(lengths, n))
    rules = rules_of([sampling] * rows, model.config.vocab_size)
    queue = (prompts, lengths, keys, rules)
    if _shards(model, prompts.shape[0], slots) > 1:
        placed = shard_rows(queue, model.mesh)
    else:  # every device serves any row: whole there, nothing of it is sent while prompts are read
        placed = jax.device_put(queue, replicated(model.mesh))
    images = images and shard_rows(images, model.mesh)
    batch = _rollout(
        model, shape, params, *placed, jnp.asarray(version, jnp.int32), forcing, images, mixed
    )
    if sampling.stop_strings:
        starts = np.repeat(lengths, n)
        batch = cut_at_stop_strings(batch, starts, sampling.stop_strings, decoding.decode)
    return batch


def _noted(calls: list, model: Model, params, prompts, sampling, n, decoding, mixed) -> Batch:
    """Instead of decoding: the program and its arguments as shapes (rljax.recording) -> rows of
    zeros of this host, each with all its tokens."""
    count, columns = prompts.shape
    rows, response = count * n, sampling.max_response_tokens
    slots = min(decoding.slots or rows, rows)
    shape, asked = _Shape(n, slots, response, decoding.kv_dtype), [sampling] * rows
    forcing = None
    if sampling.thinking_tokens:
        none = np.zeros(rows, np.int32)
        forcing = slot.forcing_of(asked, slot.forcing_room(asked), none, none)
    split = _shards(model, count, slots) > 1
    layout = (row_sharding if split else replicated)(model.mesh)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=layout)  # noqa: E731
    rules = jax.tree.map(
        lambda x: array(x.shape, x.dtype), rules_of(asked, model.config.vocab_size)
    )
    queue = (array((count, columns), jnp.int32), array((count,), jnp.int32))
    queue += (array((rows, 2), jnp.uint32), rules, np.zeros((), np.int32))
    arguments = (model, shape, params, *queue, forcing, None, mixed)
    if decoding.loop == "host":
        engine = Engine(model, slots, columns + response, kv_dtype=decoding.kv_dtype)
        calls += engine.calls(params, count, columns, turns=-(-rows // slots) * response)
    else:
        calls.append(Call("generate", _rollout, arguments, -(-rows // slots) * response))
    found = jax.eval_shape(functools.partial(_rollout, model, shape), *arguments[2:])
    found = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), found)
    chosen = np.arange(columns + response) >= columns
    found = found.replace(
        segment_ids=np.ones_like(found.tokens),
        mask=np.broadcast_to(chosen, found.tokens.shape).astype(np.float32),
        group=np.repeat(np.arange(count, dtype=np.int32), n),
    )
    return shard_rows(found, make_mesh(1, 1, 1, devices=jax.local_devices(backend="cpu")[:1]))


def _check(model, prompts, lengths, sampling: Sampling, n, decoding: Decoding) -> None:
    if n < 1:
        raise InputError("samples per prompt", value=n, rule=">= 1")
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1] or not prompts.size:
        raise InputError(
            "prompts and lengths",
            value=(prompts.shape, lengths.shape),
            rule="[P, L] and [P], at least one prompt",
        )
    if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
        raise InputError(
            "prompt lengths",
            value=lengths.tolist(),
            rule=f"between 1 and the {prompts.shape[1]} columns",
        )
    words = model.config.vocab_size
    real = prompts[np.arange(prompts.shape[1])[None, :] < lengths[:, None]]
    if real.min() < 0 or real.max() >= words:
        bad = real[(real < 0) | (real >= words)][0]
        raise InputError("prompt", value=int(bad), rule=f"ids from 0 to {words - 1}")
    if sampling.stop_strings and decoding.decode is None:
        raise InputError("sampler stop_strings need a tokenizer", fix="pass Decoding(decode=)")
    sampling.check_words(words)


def _check_mixed(model: Model, mixed: Mixed | None) -> None:
    words = model.config.vocab_size
    if mixed is not None and mixed.model.config.vocab_size != words:
        raise InputError(
            "words of the second model", value=mixed.model.config.vocab_size, rule=f"{words}, too"
        )


def _refuse_on_host(images, mixed) -> None:
    for name, value in (("images", images), ("a mixture of two models", mixed)):
        if value is not None:
            raise InputError(
                f"{name} cannot be decoded by the host's loop", fix="sampler.loop='device'"
            )
    if jax.process_count() > 1:
        raise InputError(
            "sampler loop", value="host", rule="one process", fix="sampler.loop='device'"
        )
