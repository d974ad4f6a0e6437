"""Search: a way of decoding, which `rljax.sampler.generate` calls in place of sampling.

A method of search is a function (problem, *, options) -> [Response], one for each row; a
config names it as text, such as "mcts(simulations=32, width=4)". Axes: R rows, L columns of
prompts, M children.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax import heartbeat
from rljax.arrays import fetch, place
from rljax.batch import Batch, FinishReason, batch_from_rows
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.models.model import Model
from rljax.sampler.engine import Engine
from rljax.sampler.inputs import request_keys
from rljax.sampler.requests import Decoding, Sampling, rules_of, stop_room
from rljax.search.columns import Columns, why_not
from rljax.search.evaluators import Forked, Value

Ids = Sequence[int]
# scored(rows, responses as (ids, FinishReason)) -> their scores, NaN where the reward failed
Scored = Callable[[Sequence[int], Sequence[tuple[Ids, int]]], np.ndarray]


@dataclasses.dataclass
class SearchedResponse:
    """A response as a method returns it. `logprobs` are those with which the method chose the
    tokens. A search by visit counts also tells, for each token, the children of the root [M] with
    their share of the visits, and the mean value that the simulations found there."""

    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: int = int(FinishReason.ABORT)
    target_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    target_probs: list[np.ndarray] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)

    def add(self, token: int, logprob: float) -> None:
        """Appends a token and the log-prob of its choice, in nats."""
        self.ids.append(int(token))
        self.logprobs.append(float(logprob))


@dataclasses.dataclass(frozen=True)
class SearchProblem:
    """The problem that a method searches: a policy, prompts [R, L] right-padded, one row for each
    response, and what tells it how good a text is. All draws of a row are functions of its key
    alone."""

    model: Model
    params: Any
    prompts: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray  # [R, 2] uint32
    sampling: Sampling
    decoding: Decoding
    value: Value | None = None
    scored: Scored | None = None
    batch_rows: Sequence[int] = ()  # [R] of the batch, for `scored`

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self.lengths)

    @property
    def limit(self) -> int:
        """Tokens that a response may have."""
        return self.sampling.max_response_tokens

    def evaluator(
        self, width: int, sampling: Sampling | None = None, *, nodes: int = 0
    ) -> Forked | Columns:
        """Returns an evaluator that has read the prompts (see `unread`)."""
        evaluator = self.unread(width, sampling, nodes=nodes)
        evaluator.start(self.prompts, self.lengths)
        return evaluator

    def unread(
        self, width: int, sampling: Sampling | None = None, *, nodes: int = 0
    ) -> Forked | Columns:
        """Returns an evaluator that has read nothing yet; `params` may be shapes. For trees
        of at most so many nodes it is one by columns, where the models can; for other paths
        (0) and models it is one by copies of the root. Raises InputError for a width above
        the vocabulary."""
        sampling, vocab = sampling or self.sampling, self.model.config.ids
        if not 1 <= width <= vocab:
            rule = f"1 to the {vocab} tokens there are"
            fix = "lower the width of the search"
            raise InputError("search width", value=width, rule=rule, fix=fix)
        tokens = self.prompts.shape[1] + self.limit
        rules = rules_of([sampling] * self.rows, vocab, whole=True, room=stop_room([sampling]))
        models = [self.model] if self.value is None else [self.model, self.value.model]
        if nodes and not any(map(why_not, models)):
            sizes = dict(tokens=tokens, nodes=nodes, kv_dtype=self.decoding.kv_dtype)
            return Columns(self.model, self.params, rules, width, self.value, **sizes)
        engine = Engine(self.model, self.rows, tokens, kv_dtype=self.decoding.kv_dtype)
        return Forked(engine, self.params, rules, width, self.value)

    def score(self, rows: Sequence[int], responses: Sequence[tuple[Ids, int]]) -> np.ndarray:
        """Returns the rewards, one for each, of complete responses to the prompts of these rows of
        the problem: shape [len(rows)]."""
        return self.scored([int(self.batch_rows[row]) for row in rows], responses)

    def reason(self, ids: Ids) -> FinishReason | None:
        """Returns why a response ends with its last token; None if it goes on."""
        if len(ids) and ids[-1] in self.sampling.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= self.limit else None


@dataclasses.dataclass(frozen=True)
class Search:
    """A method, and what tells it how good a text is: a model, the reward of complete responses
    `scored`, or both."""

    method: Callable
    value: Value | None = None
    scored: Scored | None = None

    def __call__(
        self,
        model: Model,
        params,
        prompts: np.ndarray,
        lengths: np.ndarray,
        key,
        sampling: Sampling,
        *,
        n: int,
        version: int,
        decoding: Decoding,
    ) -> Batch:
        """Returns the batch of `rljax.sampler.generate`: n responses to each prompt, row p n + s.
        `decoding.slots` of them are searched at a time, which does not change them."""
        _check(sampling)
        if self.value is not None and self.value.model.mesh != model.mesh:
            rule = "none with a search, whose value model lies where training does"
            raise InputError(
                "a mesh of decoding of its own",
                value=model.mesh.shape,
                rule=rule,
                fix="clear sampler.layout and rollouts.sampler_devices",
            )
        rows = len(lengths) * n
        keys, row = fetch(request_keys(key, rows)), np.arange(rows)
        size, responses = min(decoding.slots or rows, rows), []
        for start in range(0, rows, size):
            indices = np.minimum(row[start : start + size], rows - 1)
            indices = np.pad(indices, (0, size - len(indices)), mode="edge")  # one shape
            inputs = prompts[indices // n], lengths[indices // n], keys[indices]
            settings = sampling, decoding, self.value, self.scored, indices
            problem = SearchProblem(model, params, *inputs, *settings)
            heartbeat.beat()
            responses += self.method(problem)[: rows - start]
        repeated = np.repeat(prompts, n, axis=0), np.repeat(lengths, n)
        columns = prompts.shape[1] + sampling.max_response_tokens
        return place(_batch(responses, *repeated, columns, n, version), model.mesh)

    def planned(
        self,
        model: Model,
        params,
        shape: tuple[int, int],
        sampling: Sampling,
        *,
        n: int,
        decoding: Decoding,
    ) -> tuple[dict[str, tuple], Batch]:
        """Returns the programs that a call would run, for a plan, with prompts of `shape` [P, L]:
        ({program: (jitted function, its arguments as shapes, 1)}, rows of zeros with all their
        tokens). The longest path is a whole response; a step runs the look once for each
        simulation."""
        _check(sampling)
        (count, columns), limit = shape, sampling.max_response_tokens
        rows, width = count * n, max(1, spec(self.method).targets)
        size = min(decoding.slots or rows, rows)
        prompts, lengths = np.zeros((size, columns), np.int32), np.full(size, columns, np.int32)
        settings = sampling, decoding, self.value
        problem = SearchProblem(model, params, prompts, lengths, None, *settings)
        nodes = 0 if self.value is None else spec(self.method).nodes
        programs = problem.unread(width, nodes=nodes).programs(columns, limit)
        blank = SearchedResponse([0] * limit, [0.0] * limit, int(FinishReason.LENGTH))
        if spec(self.method).targets:
            blank.target_ids = [np.zeros(width, np.int32)] * limit
            blank.target_probs = [np.eye(1, width, dtype=np.float32)[0]] * limit
            blank.values = [0.0] * limit
        blank_prompts = np.zeros((rows, columns), np.int32), np.full(rows, columns, np.int32)
        return programs, fetch(_batch([blank] * rows, *blank_prompts, columns + limit, n, 0))


def _check(sampling: Sampling) -> None:
    for name in ("stop_strings", "thinking_tokens"):
        if value := getattr(sampling, name):
            rule = "none with a search, which ends a response at stop ids and its limit alone"
            fix = f"clear sampler.{name}, or sample without a search"
            raise InputError(f"sampler {name}", value=value, rule=rule, fix=fix)


def _batch(
    responses: list[SearchedResponse], prompts, lengths, columns: int, n: int, version
) -> Batch:
    rows = len(responses)
    tokens, mask, logp, entropy, values = (np.zeros((rows, columns), np.float32) for _ in range(5))
    tokens = tokens.astype(np.int32)
    first_targets = responses[0].target_ids
    width = len(first_targets[0]) if first_targets else 0
    targets = np.zeros((rows, columns, width), np.int32)
    probs = np.zeros((rows, columns, width), np.float32)
    for row, (response, length) in enumerate(zip(responses, lengths, strict=True)):
        span = slice(length, length + len(response.ids))
        tokens[row, :length], tokens[row, span] = prompts[row, :length], response.ids
        mask[row, span], logp[row, span] = 1, response.logprobs
        if response.ids and width:
            targets[row, span], probs[row, span] = response.target_ids, response.target_probs
            values[row, span] = response.values
    entropy = -np.sum(np.where(probs > 0, probs * np.log(np.maximum(probs, 1e-30)), 0), axis=-1)
    search_fields = (
        dict(target_ids=targets, target_probs=probs, search_values=values) if width else {}
    )
    return batch_from_rows(
        tokens,
        (lengths + [len(response.ids) for response in responses]).astype(np.int32),
        mask,
        sampler_logprobs=logp,
        sampler_log_kept=np.zeros_like(logp),
        entropy=entropy.astype(np.float32),
        policy_version=np.where(mask > 0, version, 0).astype(np.int32),
        group=np.arange(rows, dtype=np.int32) // n,
        finish_reason=np.array([int(response.reason) for response in responses], np.int32),
        **search_fields,
    )
