"""Whole-batch rollouts by the host's loop: the same samples as the device's loop draws.

Axes: P prompts, L prompt columns, n samples per prompt, R = P n rows, S = L + response columns.
"""

from collections.abc import Callable

import numpy as np

from rljax.arrays import fetch, place
from rljax.batch import Batch, batch_from_rows
from rljax.models.model import Model
from rljax.sampler.engine import Engine
from rljax.sampler.memory import check_whole_rows
from rljax.sampler.prompt_images import of_prompt
from rljax.sampler.requests import Decoding, Sampling, stop_room
from rljax.sampler.sample import Sample
from rljax.sampler.slots import forcing_room
from rljax.sampler.stream import Sampler
from rljax.sampler.whole_batch import with_images
from rljax.tracking import timing


def host_rollout(
    model: Model,
    params,
    prompts: np.ndarray,
    lengths: np.ndarray,
    key,
    sampling: Sampling,
    *,
    n: int,
    version,
    decoding: Decoding,
    images: dict | None = None,
    finished: Callable[[int, list[int], int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Batch:
    """Returns the batch [R, S] of rljax.sampler.generate by the host's loop, for prompts [P, L] of
    lengths [P]. The arguments were checked."""
    count, columns = prompts.shape
    tokens = columns + sampling.max_response_tokens
    engine = engine_of_rows(model, count * n, tokens, sampling, decoding)
    sampler = Sampler(engine, key=key, chunk_tokens=columns, decode=decoding.decode)
    samples = []
    for p in range(count):
        ids = range(p * n, (p + 1) * n)
        prompt = prompts[p, : lengths[p]]
        prompt_images = of_prompt(images, p, len(prompt))
        samples += sampler.submit(prompt, sampling, n=n, request_ids=ids, images=prompt_images)
    _decode(sampler, samples, params, int(version), finished, stop)
    return place(batch_of(samples, engine.tokens, n, images), model.mesh)


def host_branches(
    model: Model,
    params,
    sources: dict[int, Sample],
    branches: list[tuple[int, int]],
    columns: int,
    sampling: Sampling,
    *,
    n: int,
    version,
    decoding: Decoding,
) -> Batch:
    """Returns the batch of rljax.sampler.branch, but for groups, by the host's loop: n
    continuations of each (row, tokens of its response) of `branches`. A row is read once, whatever
    is asked of it."""
    engine = engine_of_rows(model, len(branches) * n, columns, sampling, decoding)
    sampler = Sampler(engine, chunk_tokens=columns, decode=decoding.decode)
    samples: list[Sample | None] = [None] * (len(branches) * n)
    for row, source in sources.items():
        indices = [j for j, (branch_row, _) in enumerate(branches) if branch_row == row]
        ids = [j * n + i for j in indices for i in range(n)]
        ends = [branches[j][1] for j in indices]
        children = sampler.branch(source, ends, n, request_ids=ids)
        for index, child in zip(ids, children, strict=True):
            samples[index] = child
    _decode(sampler, samples, params, int(version))
    return place(batch_of(samples, columns, n), model.mesh)


def _decode(sampler: Sampler, samples, params, version: int, finished=None, stop=None) -> None:
    """Decodes all samples to their ends."""
    engine = sampler.engine
    timing.decoding(engine.slots)
    while sampler.pending:
        events = sampler.step(params, version=version)
        ended = [event.sample for event in events if event.sample.finish_reason is not None]
        timing.decoding(min(engine.slots, sampler.pending))
        for sample in ended if finished is not None else ():
            finished(sample.id, sample.tokens.tolist(), int(sample.finish_reason))
        if stop is not None and stop():
            for sample in samples:
                if sample.finish_reason is None:
                    sampler.abort(sample)
    timing.paged(sampler.page_metrics())
    if engine.draft_tokens:
        timing.drafted(sampler.live_slot_steps, sampler.drafted, sampler.kept_drafts)


def engine_of_rows(
    model: Model, rows: int, tokens: int, sampling: Sampling, decoding: Decoding
) -> Engine:
    """Returns the engine of `rows` rows of at most `tokens` tokens each, at most decoding.slots at
    once. Raises InputError for a row that needs more pages than there are."""
    engine = Engine(
        model,
        min(decoding.slots or rows, rows),
        tokens,
        kv_dtype=decoding.kv_dtype,
        page_tokens=decoding.page_tokens,
        pages=decoding.pages,
        draft_tokens=decoding.draft_tokens,
        stop_ids=stop_room([sampling]),
        forcing_tokens=forcing_room([sampling]) if sampling.thinking_tokens else 0,
    )
    check_whole_rows(engine.pool, engine.tokens)
    return engine


def batch_of(samples: list[Sample], columns: int, n: int, images: dict | None = None) -> Batch:
    """Returns finished samples, n of a prompt, in the order of their rows, as a host batch
    [R, S = columns]. The mask is 0 on tokens of a sample that they continue. `images` are
    those of all prompts."""
    rows = len(samples)
    tokens, versions = (np.zeros((rows, columns), np.int32) for _ in range(2))
    mask, logp, log_kept, entropy = (np.zeros((rows, columns), np.float32) for _ in range(4))
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), sample.size
        tokens[row, :end] = sample.ids
        for array, values in (
            (mask, sample.chosen),
            (logp, sample.logprobs),
            (log_kept, sample.log_kept),
            (entropy, sample.entropy),
            (versions, sample.versions),
        ):
            array[row, start:end] = values
        mask[row, start : start + sample.branched] = 0
    batch = batch_from_rows(
        tokens,
        np.array([sample.size for sample in samples], np.int32),
        mask,
        sampler_logprobs=logp,
        sampler_log_kept=log_kept,
        entropy=entropy,
        policy_version=np.where(mask > 0, versions, 0).astype(np.int32),
        group=np.arange(rows, dtype=np.int32) // n,
        finish_reason=np.array([int(sample.finish_reason) for sample in samples], np.int32),
    )
    if images is not None:
        start = np.array([len(sample.prompt) for sample in samples], np.int32)
        batch = with_images(batch, images, start, np.repeat(images["shift"], n), n)
    return fetch(batch)
