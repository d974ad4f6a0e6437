"""Batch: the struct that flows between stages, its axes, and statistics that respect its mask.

Axes: B rows, S tokens in a row, M children of a search, G samples per prompt, P prompts,
V vocabulary entries, L layers with experts, J experts of a token.

Conventions, stated once:
- `x[b, t]` always describes `tokens[b, t]`; column 0 of a log-prob or a value carries nothing.
- `mask` is 1 exactly where the policy chose the token, and 0 at prompt, tool output, forced text
  and padding.
- What stands at mask 0 may be garbage, NaN included: select with `where` before `exp` or `log`.
- Everything but ids is float32. `None` means that the stage which fills the field has not run.
- Tokens are the record: nothing is ever inferred from an id (padding may equal EOS).

    example: prompt "2+3=" (4 tokens), response "5" and EOS, one column of padding
    tokens       [ 2  +  3  =  5 eos  . ]
    segment_ids  [ 1  1  1  1  1  1   0 ]
    positions    [ 0  1  2  3  4  5   0 ]
    mask         [ 0  0  0  0  1  1   0 ]
    rewards      [ 0  0  0  0  0  1   0 ]
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp

from rljax.errors import InputError
from rljax.kernels import gae as recurrences
from rljax.suggest import near_names


class FinishReason(enum.IntEnum):
    """The reason why a response ended, recorded by the sampler and never inferred from a length."""

    STOP = 0
    LENGTH = 1
    INTERRUPT = 2
    ABORT = 3
    TURNS = 4  # of an episode: its turns were used up
    TIME = 5  # of an episode: its seconds were


class UnfilledFields(InputError):
    """Fields of a batch that a stage needs, and that no stage has filled."""


NOT_SAMPLED = -2  # the policy_version of tokens that no policy drew: texts of the data
LIMITS = (FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TIME)


def _field(axes: str, dtype, *, required: bool = False):
    options = {} if required else {"default": None}
    return dataclasses.field(
        metadata=dict(axes=tuple(axes.split()), dtype=jnp.dtype(dtype)), **options
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Trajectories, and the results of later stages about them. Fields are arrays or None."""

    tokens: jax.Array = _field("B S", jnp.int32, required=True)
    segment_ids: jax.Array = _field("B S", jnp.int32, required=True)
    positions: jax.Array = _field("B S", jnp.int32, required=True)
    mask: jax.Array = _field("B S", jnp.float32, required=True)
    # Images (rljax.data.images.rows): N patches of C pixel values per row, right-padded;
    # image id + 1 (0 = padding), frame, row and column of each; time, row and column of every
    # token.
    pixels: jax.Array | None = _field("B N C", jnp.float32)
    patch_coords: jax.Array | None = _field("B N F", jnp.int32)
    rope_positions: jax.Array | None = _field("B S R", jnp.int32)
    # Packed rows alone (rljax.learn.packing), W blocks to a row, several sequences to a block: the
    # segment id of the prefix that a token continues (0 = none), which block of the row holds the
    # prefixes of each block, the column whose hidden state predicts each token.
    prefix_ids: jax.Array | None = _field("B S", jnp.int32)
    prefix_blocks: jax.Array | None = _field("B W", jnp.int32)
    previous: jax.Array | None = _field("B S", jnp.int32)
    sampler_logprobs: jax.Array | None = _field("B S", jnp.float32)
    # The log of the mass that top-k, top-p and the like kept, by which sampler_logprobs are above
    # the log-probs that the tokens were drawn with; 0 without them.
    sampler_log_kept: jax.Array | None = _field("B S", jnp.float32)
    # The optimizer step of the weights that drew the token. -1: those of another run. NOT_SAMPLED:
    # nobody's; sampler_logprobs say nothing there.
    policy_version: jax.Array | None = _field("B S", jnp.int32)
    group: jax.Array | None = _field("B", jnp.int32)
    finish_reason: jax.Array | None = _field("B", jnp.int32)
    rewards: jax.Array | None = _field("B S", jnp.float32)
    old_logprobs: jax.Array | None = _field("B S", jnp.float32)
    ref_logprobs: jax.Array | None = _field("B S", jnp.float32)
    # The teacher of the row, the same at all of its tokens, which are packed: 0 = none, 1.. = its
    # number among the teachers; and log teacher(token).
    teacher: jax.Array | None = _field("B S", jnp.int32)
    teacher_logprobs: jax.Array | None = _field("B S", jnp.float32)
    values: jax.Array | None = _field("B S", jnp.float32)
    advantages: jax.Array | None = _field("B S", jnp.float32)
    returns: jax.Array | None = _field("B S", jnp.float32)
    weights: jax.Array | None = _field("B S", jnp.float32)
    # Fields that some estimators need besides (rljax.advantages says which):
    scores: jax.Array | None = _field("B", jnp.float32)  # the reward's own, before any shaping
    reward_parts: jax.Array | None = _field("B K", jnp.float32)  # K named parts of the reward
    process_rewards: jax.Array | None = _field("B S", jnp.float32)
    # The rewards, values and returns of a constraint (rljax.dataflows.safe_rlhf); `costs` of
    # labelled rows are +1 (unsafe) or -1 (safe).
    costs: jax.Array | None = _field("B S", jnp.float32)
    cost_values: jax.Array | None = _field("B S", jnp.float32)
    cost_returns: jax.Array | None = _field("B S", jnp.float32)
    step_ids: jax.Array | None = _field("B S", jnp.int32)  # 0 = none; 1.. = steps of the response
    # Equal ids = the same state of the environment where the turn begins; 0 = none known.
    state_ids: jax.Array | None = _field("B S", jnp.int32)
    # Equal = rows of one episode and seat: one sequence, cut where its history was rewritten. Then
    # scores, finish_reason and reward_parts are those of the episode on each row. None: every row
    # is one.
    episode: jax.Array | None = _field("B", jnp.int32)
    # The number of tokens that this row's response continues from another row's: the policy chose
    # them there, and this row's mask leaves them out. None: 0.
    kept_tokens: jax.Array | None = _field("B", jnp.int32)
    seat: jax.Array | None = _field("B", jnp.int32)  # who played the row, by number
    # The results of a tree search: M next tokens at the state before each token, the share of the
    # simulations that went through each, and the mean value that they found there (not a critic's:
    # `values`).
    target_ids: jax.Array | None = _field("B S M", jnp.int32)
    target_probs: jax.Array | None = _field("B S M", jnp.float32)
    search_values: jax.Array | None = _field("B S", jnp.float32)
    # The J experts that each token went to in each of the L layers with experts of a mixture, where
    # the sampler recorded them; -1 = not known.
    routes: jax.Array | None = _field("B S L J", jnp.int8)
    task: jax.Array | None = _field("B", jnp.int32)  # the number in the config of a task of CGPO
    sum_pi_squared: jax.Array | None = _field("B S", jnp.float32)  # sum over the vocabulary of pi^2
    # The entropy of the choice: the sampler's, else that of the pass that fills old_logprobs.
    entropy: jax.Array | None = _field("B S", jnp.float32)

    def replace(self, **fields) -> "Batch":
        """Returns a copy with these fields. Raises InputError for unknown names and wrong axes."""
        field_names = [f.name for f in dataclasses.fields(self)]
        for name in fields:
            if name not in field_names:
                close = near_names(name, field_names, 1)
                rule = f"its fields are {', '.join(field_names)}"
                fix = f"did you mean {close[0]!r}?" if close else "name one of these"
                raise InputError(f"Batch has no field {name!r}", rule=rule, fix=fix)
        return dataclasses.replace(self, **fields).check()

    def check(self) -> "Batch":
        """Returns self; raises InputError where shapes or dtypes differ from the declared axes.
        Runs while tracing."""
        sizes: dict[str, int] = {}
        for field in dataclasses.fields(self):
            value, axes = self.__dict__[field.name], field.metadata["axes"]
            if value is None:
                if field.default is dataclasses.MISSING:
                    fix = f"give it an array: Batch({field.name}=...)"
                    raise InputError(f"Batch.{field.name} is required", value=None, fix=fix)
                continue
            if len(value.shape) != len(axes):
                problem = f"Batch.{field.name} has the wrong number of axes"
                rule = f"its axes are [{', '.join(axes)}]"
                fix = f"reshape it to one axis for each of {', '.join(axes)}"
                raise InputError(problem, value=tuple(value.shape), rule=rule, fix=fix)
            for axis, size in zip(axes, value.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    problem = f"Batch.{field.name} disagrees about axis {axis}"
                    rule = f"{axis} is {sizes[axis]} in the fields before it"
                    fix = "make all fields of a batch from the same rows and columns"
                    raise InputError(problem, value=tuple(value.shape), rule=rule, fix=fix)
            dtype = field.metadata["dtype"]  # wider ones are let through: tests run in float64
            if jnp.dtype(value.dtype).kind != dtype.kind or value.dtype.itemsize < dtype.itemsize:
                problem = f"Batch.{field.name} has the wrong dtype"
                fix = f"x.astype({str(dtype)!r})"
                raise InputError(problem, value=str(value.dtype), rule=f"it is {dtype}", fix=fix)
        return self

    def require(self, *names: str, by: str) -> "Batch":
        """Returns self; raises InputError that names the stage `by` and the missing fields if any
        of `names` is None."""
        missing = [n for n in names if self.__dict__[n] is None]
        if missing:
            filled = [f.name for f in dataclasses.fields(self) if self.__dict__[f.name] is not None]
            problem = f"{by} needs batch field {', '.join(missing)}, which no stage has filled"
            fix = "run the stage that fills it first: the dataflow decides the order"
            rule = f"the batch has {', '.join(filled)}"
            raise UnfilledFields(problem, rule=rule, fix=fix)
        return self

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return self.tokens.shape[0]


def is_sampled(batch: Batch) -> jax.Array | bool:
    """Returns whether a policy drew the token, this one or another: [B, S], or True for all."""
    return True if batch.policy_version is None else batch.policy_version != NOT_SAMPLED


def sampler_logprobs(batch: Batch, *, by: str) -> jax.Array:
    """Returns the log-probs by the policy that drew the token: [B, S], in nats. Tokens that none
    drew have the old ones, so that they differ from the trainer's in nothing. Raises InputError
    where the batch has none."""
    batch.require("sampler_logprobs", by=by)
    if batch.policy_version is None or batch.old_logprobs is None:
        return batch.sampler_logprobs
    return jnp.where(is_sampled(batch), batch.sampler_logprobs, batch.old_logprobs)


def behaviour_logprobs(batch: Batch, *, by: str) -> jax.Array:
    """Returns the log-probs that tokens were drawn with: the sampler's, over the mass that its
    top-k, top-p and min-p kept: [B, S], in nats. Raises InputError where the batch has none."""
    logprobs = sampler_logprobs(batch, by=by)
    return logprobs if batch.sampler_log_kept is None else logprobs - batch.sampler_log_kept


def batch_from_rows(tokens, lengths, mask, **fields) -> Batch:
    """Returns the Batch of unpacked rows: tokens [B, S], lengths [B] (prompt and
    response), mask [B, S]."""
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    valid = column < lengths[:, None]
    return Batch(
        tokens=tokens,
        segment_ids=valid.astype(jnp.int32),
        positions=jnp.where(valid, column, 0),
        mask=mask,
        **fields,
    ).check()


def take_rows(batch: Batch, rows) -> Batch:
    """Returns the batch of these rows in this order; `rows` are indices [R] or a slice."""
    return jax.tree.map(lambda x: x[rows], batch)


# -- masked statistics (formulas: masked_mean = sum m x / max(sum m, 1))


def masked_sum(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """Returns the sum of x over the mask, in the shape of x without `axis` (None: a scalar);
    garbage at mask 0, NaN included, is never read."""
    return jnp.sum(jnp.where(mask > 0, x, 0.0), axis=axis)


def masked_mean(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
    """Returns sum m x / sum m, and exactly 0 where the mask is empty; shaped as masked_sum."""
    return masked_sum(x, mask, axis) / jnp.maximum(jnp.sum(mask > 0, axis=axis), 1)


def masked_variance(x: jax.Array, mask: jax.Array, *, ddof: int = 0) -> jax.Array:
    """Returns sum m (x - mean)^2 / (n - ddof) over all of the mask, a scalar; 0 when n <= ddof."""
    n = jnp.sum(mask > 0)
    centred = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    return jnp.where(n > ddof, jnp.sum(centred**2) / jnp.maximum(n - ddof, 1), 0.0)


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the maximum of x over the mask, a scalar; 0 where the mask is empty."""
    return jnp.where(jnp.any(mask > 0), jnp.max(jnp.where(mask > 0, x, -jnp.inf)), 0.0)


def whiten(
    x: jax.Array, mask: jax.Array, *, eps: float = 1e-8, ddof: int = 1, shift_mean: bool = True
):
    """Returns m (x - mean) / sqrt(var + eps) over the global batch, in the shape of x; zeros where
    fewer than two tokens count."""
    mean = masked_mean(x, mask)
    scaled = jnp.where(mask > 0, x - mean, 0.0) * jax.lax.rsqrt(
        masked_variance(x, mask, ddof=ddof) + eps
    )
    if not shift_mean:
        scaled = jnp.where(mask > 0, scaled + mean, 0.0)
    return jnp.where(jnp.sum(mask > 0) > 1, scaled, 0.0)


# -- segments: a packed row holds several sequences; an unpacked row holds one


def segment_sum(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns the sum of x over the policy tokens of each token's own segment, at every token: [B,
    S]."""
    values = jnp.where(batch.mask > 0, x, 0.0)
    size = batch.tokens.shape[1] + 1

    def one_row(row, ids):
        return jax.ops.segment_sum(row, ids, num_segments=size)[ids]

    return jax.vmap(one_row)(values, batch.segment_ids)


def segment_tokens(batch: Batch) -> jax.Array:
    """Returns the number of policy tokens in each token's own segment: [B, S], float32."""
    return segment_sum(jnp.ones_like(batch.mask), batch)


def segment_order(batch: Batch) -> jax.Array:
    """Returns the number of policy tokens before each token in its own segment: [B, S], int32."""
    chosen = (batch.mask > 0).astype(jnp.int32)
    preceding = jnp.cumsum(chosen, axis=1) - chosen
    size = batch.tokens.shape[1] + 1

    def one_row(row, ids):
        return row - jax.ops.segment_min(row, ids, num_segments=size)[ids]

    return jax.vmap(one_row)(preceding, batch.segment_ids)


def segment_count(batch: Batch) -> jax.Array:
    """Returns B+, a scalar: the number of segments with at least one policy token, over the whole
    batch."""
    # Every token of a segment with n policy tokens holds a share 1/n, so the shares add up to the
    # count.
    n = segment_tokens(batch)
    return masked_sum(1.0 / jnp.maximum(n, 1.0), batch.mask)


def row_sum(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns the sum of x over the policy tokens of each row: [B, S] -> [B]."""
    return masked_sum(x, batch.mask, axis=1)


def truncated(batch: Batch) -> jax.Array:
    """Returns whether a limit (tokens, turns, seconds) ended the row or its episode: bool [B]."""
    return functools.reduce(jnp.logical_or, [batch.finish_reason == limit for limit in LIMITS])


# -- episodes: an unpacked batch with `episode` has sequences of one row or more, in the order of
# their turns. Without it every row is a sequence.


def dense_ids(*keys: jax.Array) -> jax.Array:
    """Gives equal tuples of keys the same id in 0..N-1: keys [N] each, any values -> int32 [N]."""
    order = jnp.lexsort(keys)
    sorted_keys = [key[order] for key in keys]
    starts = functools.reduce(jnp.logical_or, [key[1:] != key[:-1] for key in sorted_keys])
    ranks = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(starts, dtype=jnp.int32)])
    return jnp.zeros(order.shape, jnp.int32).at[order].set(ranks)


def _in_time(batch: Batch) -> jax.Array:
    """Returns the order of rows that puts those of an episode together, first turns first, and
    those without policy tokens last: indices [B]."""
    index, is_policy = jnp.arange(batch.rows), batch.mask > 0
    turn = index
    if batch.step_ids is not None:
        turn = jnp.min(jnp.where(is_policy, batch.step_ids, jnp.iinfo(jnp.int32).max), axis=1)
    return jnp.lexsort((index, turn, ~jnp.any(is_policy, axis=1), batch.episode))


def _along_episodes(function, batch: Batch, *per_row: jax.Array) -> jax.Array:
    """Applies function(*per_row [1, B], mask, segment ids) to the rows as if they were the tokens
    of one row, a segment to an episode: [B] -> [B]."""
    order = _in_time(batch)
    live = jnp.any(batch.mask > 0, axis=1)
    rows = [x[order][None] for x in (*per_row, live, batch.episode)]
    return jnp.zeros_like(per_row[0]).at[order].set(function(*rows)[0])


def first_of_sequence(batch: Batch) -> jax.Array:
    """Returns whether a row is the first one of its sequence, [B]. Whoever counts sequences counts
    these rows."""
    if batch.episode is None:
        return jnp.ones((batch.rows,), bool)
    order = _in_time(batch)
    episode = batch.episode[order]
    starts = jnp.concatenate([jnp.ones((1,), bool), episode[1:] != episode[:-1]])
    return jnp.zeros_like(starts).at[order].set(starts)


def over_rows(x: jax.Array, batch: Batch) -> jax.Array:
    """Sum of x over the rows of each row's sequence: [B] -> [B]."""
    if batch.episode is None:
        return x
    ids = dense_ids(batch.episode)
    return jax.ops.segment_sum(x, ids, num_segments=batch.rows)[ids]


def sequence_sum(x: jax.Array, batch: Batch) -> jax.Array:
    """Sum of x over the policy tokens of each row's sequence: [B, S] -> [B]."""
    return over_rows(row_sum(x, batch), batch)


def of_whole_sequences(keep: jax.Array, batch: Batch) -> jax.Array:
    """Returns `keep` [B], 1 or 0 for each row, with 0 for every row of a sequence that has a row
    with 0: [B]."""
    if batch.episode is None:
        return keep
    return (over_rows((keep == 0).astype(jnp.int32), batch) == 0).astype(batch.mask.dtype)


def sequence_tokens(batch: Batch) -> jax.Array:
    """Returns the number of policy tokens in the segment of each token, or in its episode: [B, S],
    float32."""
    if batch.episode is None:
        return segment_tokens(batch)
    return jnp.broadcast_to(sequence_sum(batch.mask, batch)[:, None], batch.mask.shape)


def sequence_count(batch: Batch) -> jax.Array:
    """Returns B+, a scalar: the number of segments, or of episodes, with a policy token, over the
    whole batch."""
    if batch.episode is None:
        return segment_count(batch)
    counted = first_of_sequence(batch) & jnp.any(batch.mask > 0, axis=1)
    return jnp.sum(counted).astype(batch.mask.dtype)


def row_scores(batch: Batch) -> jax.Array:
    """Returns the sum of the rewards of each row's sequence; `scores` where that has no policy
    token to carry one: [B]."""
    batch.require("rewards", by="row_scores")
    total = sequence_sum(batch.rewards, batch)
    if batch.scores is None:
        return total
    return jnp.where(sequence_sum(batch.mask, batch) > 0, total, batch.scores)


def _last_of_row(batch: Batch) -> jax.Array:
    column = jnp.arange(batch.tokens.shape[1])[None, :]
    last_column = jnp.max(jnp.where(batch.mask > 0, column, -1), axis=1, keepdims=True)
    return column == last_column


def observed_tokens(batch: Batch) -> jax.Array:
    """Returns whether a token is part of what the environment said between two turns of a row that
    is learned from: bool [B, S].

    What stands before the first turn is the prompt, and what follows the last one is no answer to
    it. Raises InputError where the batch has no `step_ids`, which number the turns of episodes.

        step_ids   [ 0  0  1  1  0  0  2  0 ]
        observed   [ .  .  .  .  1  1  .  . ]
    """
    batch.require("step_ids", by="observed_tokens")
    in_turn = batch.step_ids > 0
    begun = jax.lax.cummax(in_turn.astype(jnp.int32), axis=1) > 0
    goes_on = jax.lax.cummax(in_turn.astype(jnp.int32), axis=1, reverse=True) > 0
    is_learned = jnp.any(batch.mask > 0, axis=1, keepdims=True)
    return begun & goes_on & ~in_turn & is_learned


def last_token(batch: Batch) -> jax.Array:
    """Returns 1 at the last policy token of every sequence (row, or episode) that has one, else 0:
    [B, S]."""
    is_last = _last_of_row(batch)
    if batch.episode is not None:
        ones = jnp.ones((batch.rows,), batch.mask.dtype)
        another = _along_episodes(recurrences.next_chosen, batch, ones)
        is_last = is_last & (another == 0)[:, None]
    return is_last.astype(batch.mask.dtype)


def first_token(batch: Batch) -> jax.Array:
    """Returns whether a token is the first policy token of its sequence (segment, or episode): bool
    [B, S]."""
    is_first = (segment_order(batch) == 0) & (batch.mask > 0)
    return is_first if batch.episode is None else is_first & first_of_sequence(batch)[:, None]


def at_last_token(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns x [B, S, ...] at the last token of each row, whoever chose it: [B, ...]."""
    column = jnp.arange(x.shape[1])[None, :]
    last_column = jnp.max(jnp.where(batch.segment_ids > 0, column, 0), axis=1)
    return jnp.take_along_axis(x, last_column.reshape(-1, 1, *(1,) * (x.ndim - 2)), axis=1)[:, 0]


def _at_first(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns x at the first policy token of each row, 0 where there is none: [B, S] -> [B]."""
    is_first = (segment_order(batch) == 0) & (batch.mask > 0)
    return jnp.sum(jnp.where(is_first, x, jnp.zeros((), x.dtype)), axis=1, dtype=x.dtype)


def next_policy_token(x: jax.Array, batch: Batch) -> jax.Array:
    """Returns x at the next policy token of the same sequence, 0 after the last one: [B, S] -> [B,
    S].

    Tokens the policy did not choose (tool output, forced text) are skipped.
    """
    y = recurrences.next_chosen(x, batch.mask, batch.segment_ids)
    if batch.episode is None:
        return y
    later = _along_episodes(recurrences.next_chosen, batch, _at_first(x, batch))
    return jnp.where(_last_of_row(batch), later[:, None], y)


def discounted_sum(x: jax.Array, batch: Batch, decay) -> jax.Array:
    """Returns y_t = x_t + decay_t y_{t+} on policy tokens, else 0: x [B, S], decay a number or [B,
    S]. t+ is the next policy token of the segment, or of the episode, which may be in another
    row."""
    sum_within = functools.partial(
        recurrences.discounted_sum, mask=batch.mask, segment_ids=batch.segment_ids
    )
    y = sum_within(x, decay)
    if batch.episode is None:
        return y
    # A reward of 1 behind the row counts this much at t: the decays from t to the end of the row.
    decay = jnp.broadcast_to(jnp.asarray(decay, y.dtype), y.shape)
    tail_factor = sum_within(jnp.where(_last_of_row(batch), decay, 0.0), decay)
    rows = (_at_first(y, batch), _at_first(tail_factor, batch))
    row_sums = _along_episodes(recurrences.discounted_sum, batch, *rows)
    later = _along_episodes(recurrences.next_chosen, batch, row_sums)
    return y + jnp.where(batch.mask > 0, tail_factor * later[:, None], 0.0)
