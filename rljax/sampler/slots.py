"""The decode state: slots that requests are put into, and the loop that decodes all of them.

Pure functions of arrays, to be called inside programs. The draw is in `draw`, the layout of a
cache in rljax.models.cache.

A slot's tokens so far are `length` tokens whose keys and values are cached, and `token`, the next
to be read. Axes: B slots, P rows of a prefix, M pairs of a slot and a row of a prefix, k steps of a
dispatch, F tokens of an interruption.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rljax.batch import FinishReason
from rljax.mesh import BATCH_AXES, highest_of_runs, replicated, row_sharding, row_shards
from rljax.models import cache
from rljax.models.cache_ring import taken_back
from rljax.models.model import Model
from rljax.sampler import speculation
from rljax.sampler.draw import Drawn, Rules, mode_of, sample
from rljax.sampler.requests import Sampling
from rljax.sampler.speculation import Drafts


def _struct(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_struct
class Forcing:
    """An interruption per slot: where the marker that ends thinking has not come before token
    `budget`, the phrase is forced."""

    budget: jax.Array  # [B] tokens of prompt and response before the phrase
    phrase: jax.Array  # [B, F], the first phrase_tokens [B] of it
    phrase_tokens: jax.Array
    marker: jax.Array  # [B, F], backwards, the first marker_tokens [B] of it
    marker_tokens: jax.Array
    recent: jax.Array  # [B, F] the newest response tokens, backwards; -1 before the first
    thinking: jax.Array  # [B] bool: may still be interrupted
    forced: jax.Array  # [B] how many tokens of the phrase were


@_struct
class Slots:
    """JetStream's decode state."""

    caches: tuple  # of each model that decodes, one Cache per layer
    length: jax.Array  # [B] int32
    token: jax.Array  # [B] int32
    live: jax.Array  # [B] bool
    limit: jax.Array  # [B] int32: tokens of prompt and response at which it ends
    shift: jax.Array  # [B] int32: position minus column in the slot (images)
    key: jax.Array  # [B, 2] uint32 of the request
    reason: jax.Array  # [B] int32 FinishReason, once not live
    rules: Rules
    forcing: Forcing | None
    table: jax.Array | None = None  # [B, P] int32: the pages of each slot; None: contiguous
    drafts: Drafts | None = None  # where several tokens are read at a time


@_struct
class Tokens:
    """The tokens of a dispatch: [k, B] each. A slot's valid steps come first."""

    ids: jax.Array
    logp: jax.Array
    log_kept: jax.Array
    entropy: jax.Array
    chosen: jax.Array  # bool: sampled, not forced
    valid: jax.Array  # bool
    # [k, B, E, k'], where they are recorded: the experts of the token that each step read, which
    # is the one before the token it drew (Batch.routes).
    routes: jax.Array | None = None


def empty(
    models: list[Model],
    slots: int,
    columns: int,
    kv_dtype: str,
    rules,
    forcing,
    pool=None,
    draft_tokens=0,
) -> Slots:
    """Returns empty slots of `models` (inside a program), of a Pool of pages where there is one.
    `rules` and `forcing` are templates of any number of rows."""

    def whole(value, dtype):
        return jnp.full((slots,), value, dtype)

    def blank(x):
        return jnp.zeros((slots, *x.shape[1:]), x.dtype)

    rules, forcing = jax.tree.map(blank, (rules, forcing))
    return Slots(
        caches=tuple(model.empty_caches(slots, columns, kv_dtype, pool) for model in models),
        length=whole(0, jnp.int32),
        token=whole(0, jnp.int32),
        live=whole(False, bool),
        limit=whole(0, jnp.int32),
        shift=whole(0, jnp.int32),
        key=jnp.zeros((slots, 2), jnp.uint32),
        reason=whole(jnp.int32(FinishReason.ABORT), jnp.int32),
        rules=rules,
        forcing=forcing,
        table=jnp.full((slots, pool.pages_for(columns)), pool.count, jnp.int32) if pool else None,
        drafts=speculation.empty(slots, columns, draft_tokens),
    )


def layout(state: Slots, mesh) -> Slots:
    """Returns the sharding of everything in a decode state: slots over the axes of rows, kv
    heads over tensor."""
    shardings = rows_layout(dataclasses.replace(state, caches=()), mesh)
    caches = tuple(cache.shardings(model_caches, mesh) for model_caches in state.caches)
    return dataclasses.replace(shardings, caches=caches)


def rows_layout(tree, mesh):
    """Returns shardings that split rows where they divide."""
    unsplit, by_row = replicated(mesh), row_sharding(mesh)
    return jax.tree.map(lambda x: unsplit if x.shape[0] % row_shards(mesh) else by_row, tree)


# -- interruptions


def forcing_of(requests: list[Sampling], room: int, budgets, prompt_tokens) -> Forcing:
    """Returns the interruptions of B rows with room for F = `room` tokens: budgets [B] tokens of
    thinking (below 0: no interruption), after prompts of prompt_tokens [B]."""
    count = len(requests)

    def padded(name, backwards=False):
        table = np.full((count, room), -1, np.int32)
        sizes = np.zeros(count, np.int32)
        for row, request in enumerate(requests):
            ids = getattr(request, name) if request.thinking_tokens else ()
            ids = ids[:: -1 if backwards else 1]
            table[row, : len(ids)], sizes[row] = ids, len(ids)
        return table, sizes

    phrase, phrase_tokens = padded("interrupt_ids")
    marker, marker_tokens = padded("end_of_thinking_ids", backwards=True)
    return Forcing(
        budget=jnp.asarray(budgets, jnp.int32) + jnp.asarray(prompt_tokens, jnp.int32),
        phrase=phrase,
        phrase_tokens=phrase_tokens,
        marker=marker,
        marker_tokens=marker_tokens,
        recent=np.full((count, room), -1, np.int32),
        thinking=jnp.asarray(budgets) >= 0,
        forced=np.zeros(count, np.int32),
    )


def forcing_room(requests: list[Sampling]) -> int:
    """Returns F: a few sizes only, so that another phrase does not recompile."""
    longest = max(
        max(len(request.interrupt_ids), len(request.end_of_thinking_ids)) for request in requests
    )
    return max(8, -(-longest // 8) * 8)


def _force(forcing: Forcing, ids, total, live):
    """Replaces the sampled next tokens by those of an interruption, where slots have `total` [B]
    tokens. Returns ids [B], forced [B] bool, and forcing."""
    begins = live & forcing.thinking & (total >= forcing.budget)
    in_phrase = (forcing.forced > 0) & (forcing.forced < forcing.phrase_tokens)
    forced = begins | (live & in_phrase)
    pos = jnp.where(begins, 0, forcing.forced)
    room = forcing.phrase.shape[1]
    token = jnp.take_along_axis(forcing.phrase, jnp.minimum(pos, room - 1)[:, None], axis=1)[:, 0]
    thinking, count = forcing.thinking & ~begins, jnp.where(forced, pos + 1, forcing.forced)
    forcing = dataclasses.replace(forcing, thinking=thinking, forced=count)
    return jnp.where(forced, token, ids), forced, forcing


def _note(forcing: Forcing, ids, emitted) -> Forcing:
    """Records the newest tokens; thinking is over where they are the marker."""
    recent = jnp.concatenate([ids[:, None], forcing.recent[:, :-1]], axis=1)
    recent = jnp.where(emitted[:, None], recent, forcing.recent)
    distance = jnp.arange(recent.shape[1])[None, :]
    matches = (recent == forcing.marker) | (distance >= forcing.marker_tokens[:, None])
    ended = emitted & jnp.all(matches, axis=1)
    return dataclasses.replace(forcing, recent=recent, thinking=forcing.thinking & ~ended)


# -- decoding


def step(models, weight, slots: Slots, mode=None, routed=False) -> tuple[Slots, Tokens]:
    """Reads each live slot's token and draws the next one. models: [(Model, unstacked weights)] of
    one model, or of two whose logits are mixed by `weight`. `mode`: see `sample`. `routed`: the
    Tokens have the routes of the first model."""
    inputs = slots.token[:, None]
    # Keys and values of a slot that is not live are overwritten; a state would move on.
    recurrent = any(model.config.recurrent for model, _ in models)
    counts = slots.live.astype(jnp.int32) if recurrent else None
    logits, caches, routes = _next_logits(models, weight, slots, inputs, counts)
    drawn = sample(logits, slots.key, slots.length + 1, slots.rules, mode, _apart(models))
    slots, tokens = _emit(dataclasses.replace(slots, caches=caches), drawn, slots.live)
    return slots, dataclasses.replace(tokens, routes=routes[:, 0]) if routed else tokens


def _apart(models) -> bool:
    """Returns whether draws record the very log-probs of training."""
    return models[0][0].config.batch_invariant and len(models) == 1


def _emit(slots: Slots, drawn: Drawn, going: jax.Array) -> tuple[Slots, Tokens]:
    """Gives the slots `going` [B], which are live, the token that was drawn for their next
    position, or the one that is forced."""
    total = slots.length + 1
    emitted = going & drawn.finite
    ids, forcing = drawn.ids, slots.forcing
    forced = jnp.zeros_like(emitted)
    if forcing is not None:
        ids, forced, forcing = _force(forcing, ids, total, emitted)
        forcing = _note(forcing, ids, emitted)
    stopped = emitted & ~forced & jnp.any(ids[:, None] == slots.rules.stop_ids, axis=1)
    at_limit = emitted & ~stopped & (total + 1 >= slots.limit)
    ended = FinishReason.STOP
    if forcing is not None:
        ended = jnp.where(forcing.forced > 0, FinishReason.INTERRUPT, FinishReason.STOP)
    reason = jnp.where(stopped, ended, slots.reason)
    reason = jnp.where(at_limit, FinishReason.LENGTH, reason)
    slots = dataclasses.replace(
        slots,
        length=slots.length + emitted,
        token=jnp.where(emitted, ids, slots.token),
        live=jnp.where(going, emitted & ~stopped & ~at_limit, slots.live),
        reason=reason.astype(jnp.int32),
        forcing=forcing,
    )

    def unless_forced(x):
        return jnp.where(forced, 0.0, x)

    numbers = map(unless_forced, (drawn.logp, drawn.log_kept, drawn.entropy))
    return slots, Tokens(ids, *numbers, ~forced, emitted)


def step_with_drafts(models, weight, slots: Slots, mode=None, *, always=False):
    """`step` that reads a draft, too (rljax.sampler.speculation), and draws behind all of it. The
    Tokens are [1 + D, B]. Where no slot has a draft it reads one token, unless `always`: to know
    that, all devices have to exchange a flag."""
    total = slots.length + 1
    room = jnp.where(slots.live, slots.limit - total - 1, 0)  # the last token is never read
    draft, count = speculation.look_up(slots.drafts, total, room)

    def alone(slots: Slots):
        slots, tokens = step(models, weight, slots, mode)
        padding = ((0, draft.shape[1]), (0, 0))
        return slots, jax.tree.map(lambda x: jnp.pad(x[None], padding), tokens)

    def along(slots):
        return _read_along(models, weight, slots, mode, draft, count)

    if always:
        slots, tokens = along(slots)
    else:
        any_draft = highest_of_runs(jnp.any(count > 0))
        slots, tokens = jax.lax.cond(any_draft, along, alone, slots)
    drafts = speculation.recorded(slots.drafts, total, count, tokens.ids, tokens.valid)
    return dataclasses.replace(slots, drafts=drafts), tokens


def _read_along(models, weight, slots: Slots, mode, draft, count) -> tuple[Slots, Tokens]:
    """Reads each slot's token and the first count [B] of draft [B, D]; draws at every position, and
    keeps the drawn tokens as long as they equal the draft."""
    rows, size = draft.shape[0], 1 + draft.shape[1]
    inputs = jnp.concatenate([slots.token[:, None], draft], axis=1)
    logits, caches, _ = _next_logits(models, weight, slots, inputs, 1 + count)
    columns = (slots.length + 1)[:, None] + jnp.arange(size)[None, :]
    key, rules = jax.tree.map(lambda x: jnp.repeat(x, size, axis=0), (slots.key, slots.rules))
    drawn = sample(logits, key, columns.reshape(-1), rules, mode, _apart(models))
    drawn = jax.tree.map(lambda x: x.reshape(rows, size).T, drawn)

    def one(carry, position):
        state, going = carry
        index, drawn, next_draft = position
        state, tokens = _emit(state, drawn, going)
        return (
            state,
            tokens.valid & state.live & (index < count) & (tokens.ids == next_draft),
        ), tokens

    # (Behind the last position nothing was read.)
    positions = (jnp.arange(size), drawn, jnp.pad(draft.T, ((0, 1), (0, 0)), constant_values=-1))
    start = (dataclasses.replace(slots, caches=()), slots.live)
    (state, _), tokens = jax.lax.scan(one, start, positions)
    kept_counts = state.length - slots.length
    caches = tuple(
        [
            taken_back(*layers, slots.length, kept_counts)
            for layers in zip(*model_caches, strict=True)
        ]
        for model_caches in zip(slots.caches, caches, strict=True)
    )
    return dataclasses.replace(state, caches=caches), tokens


def _next_logits(models, weight, slots: Slots, tokens, counts):
    """Returns the logits [B S, V] behind tokens read [B, S], of which counts [B] are real, of the
    one model, or of the mixture, the new caches of each, and where the first one routed the
    tokens."""
    tabled = [cache.with_table(caches, slots.table) for caches in slots.caches]
    outputs = [
        model.decode_routed(weights, tokens, slots.length, counts, caches, slots.shift)
        for (model, weights), caches in zip(models, tabled, strict=True)
    ]
    logits = outputs[0][0]
    if len(outputs) > 1:
        logits = (1 - weight) * logits + weight * outputs[1][0]
    caches = tuple(cache.with_table(caches, None) for _, caches, _ in outputs)
    return logits, caches, outputs[0][2]


def decode(
    models,
    weight,
    slots: Slots,
    steps,
    room: int,
    enough_free=None,
    look_every: int = 1,
    routed=False,
):
    """Decodes up to `steps` <= room steps. Ends early when no slot is live, or when `enough_free`
    of them are not. Returns the slots, Tokens of `room` steps (with drafts: of all tokens that they
    may give a slot), and how many steps were done.

    All devices exchange a flag to know whether it ends. Between slices that takes long: they do it
    every `look_every` steps, and some steps at the end decode nothing.
    """
    count = slots.token.shape[0]
    enough_free = count if enough_free is None else enough_free
    mode = mode_of(slots.rules)  # in the loop all devices would have to exchange it at each step
    start_lengths, drafts = slots.length, slots.drafts
    if drafts is not None:
        room = min(room * (1 + drafts.tokens), drafts.history.shape[1])

    def more(carry):
        steps_done, slots, _ = carry
        live = jnp.sum(slots.live)
        return (steps_done < steps) & highest_of_runs((live > 0) & (count - live < enough_free))

    def one(carry):
        steps_done, slots, tokens = carry
        if drafts is not None:
            written, options = slots.length - start_lengths, dict(always=look_every > 1)
            slots, new_tokens = step_with_drafts(models, weight, slots, mode, **options)

            def put(buffer, values):
                return speculation.put(buffer, values, new_tokens.valid, written)

            return steps_done + 1, slots, jax.tree.map(put, tokens, new_tokens)
        slots, new_tokens = step(models, weight, slots, mode, routed)
        return (
            steps_done + 1,
            slots,
            jax.tree.map(lambda a, x: a.at[steps_done].set(x), tokens, new_tokens),
        )

    def several(carry):
        end = jnp.minimum(carry[0] + look_every, steps)
        return jax.lax.while_loop(lambda carry: carry[0] < end, one, carry)

    zeros, no_flags = jnp.zeros((room, count), jnp.float32), jnp.zeros((room, count), bool)
    tokens = Tokens(jnp.zeros((room, count), jnp.int32), zeros, zeros, zeros, no_flags, no_flags)
    if routed:
        route_struct = jax.eval_shape(lambda slots: step(models, weight, slots, mode, True), slots)[
            1
        ].routes
        tokens = dataclasses.replace(
            tokens, routes=jnp.zeros((room, *route_struct.shape), route_struct.dtype)
        )
    body = one if look_every == 1 else several
    steps_done, slots, tokens = jax.lax.while_loop(more, body, (jnp.int32(0), slots, tokens))
    return slots, tokens, steps_done


# -- filling slots


@_struct
class SlotInputs:
    """The state of a slot besides the caches, to be written: [M] rows each."""

    length: jax.Array
    token: jax.Array
    limit: jax.Array
    shift: jax.Array
    key: jax.Array
    rules: Rules
    forcing: Forcing | None
    which: jax.Array | None = None  # the row of `rules` of each; None: its own
    history: jax.Array | None = None  # [M, columns]: its tokens, for slots that draft


def enter(slots: Slots, inputs: SlotInputs, at: jax.Array, live=True) -> Slots:
    """Makes row i of `inputs` [M] slot at[i], live where `live` [M] says so; what is out of range
    is dropped. Caches are put in by `insert`."""
    if inputs.which is not None:
        rules = jax.tree.map(lambda x: x[inputs.which], inputs.rules)
        inputs = dataclasses.replace(inputs, rules=rules, which=None)
    fields = {
        f.name: jax.tree.map(
            lambda old, new: old.at[at].set(new, mode="drop"),
            getattr(slots, f.name),
            getattr(inputs, f.name),
        )
        for f in dataclasses.fields(SlotInputs)
        if f.name not in ("which", "history")
    }
    fields["drafts"] = speculation.entered(slots.drafts, at, inputs.history)
    live = slots.live.at[at].set(live, mode="drop")
    reason = slots.reason.at[at].set(jnp.int32(FinishReason.ABORT), mode="drop")
    return dataclasses.replace(slots, live=live, reason=reason, **fields)


def insert(slots: Slots, caches: tuple, at, source, mesh, first=None) -> Slots:
    """Puts rows source [M] of a prefix's caches into slots at [M]; of pages all but those of their
    `first` [M] tokens (None: 0)."""
    options = dict(first=first, alone=mesh.size == 1)
    tabled = [cache.with_table(model_caches, slots.table) for model_caches in slots.caches]
    placed = [
        [cache.write_rows(old, new, at, source, **options) for old, new in zip(a, b, strict=True)]
        for a, b in zip(tabled, caches, strict=True)
    ]
    caches = tuple(cache.with_table(model_caches, None) for model_caches in placed)
    return dataclasses.replace(slots, caches=caches)


def take(slots: Slots, at: jax.Array, mesh) -> list:
    """Returns rows at [M] of the first model's caches, contiguous; a slot out of range
    gives an arbitrary row.

    Where slots are split over devices, each device gives its own and a sum joins them: indexing
    would gather the whole cache on every device.
    """
    caches = cache.with_table(slots.caches[0], slots.table)
    count = slots.token.shape[0]
    # (Clipped, as an index out of range would otherwise give a row of NaN.)
    length = jnp.take(slots.length, at, mode="clip")
    if row_shards(mesh) == 1 or count % row_shards(mesh):
        return [cache.take_rows(layer, at, length) for layer in caches]

    def own(caches, index, length):
        slots_per_device = count // row_shards(mesh)
        index = index - jax.lax.axis_index(BATCH_AXES) * slots_per_device
        is_local = (index >= 0) & (index < slots_per_device)

        def give(x):
            local_rows = jnp.where(is_local.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
            return jax.lax.psum(local_rows, BATCH_AXES)

        rows = [
            cache.take_rows(layer, jnp.clip(index, 0, slots_per_device - 1), length)
            for layer in caches
        ]
        return jax.tree.map(give, rows)

    return jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(PartitionSpec(BATCH_AXES), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(BATCH_AXES),
    )(caches, at, length)
