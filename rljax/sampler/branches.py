"""Continuations of a part of a sample's response: what may be branched, and how they come into the
queue of prompts with what was read of the sample."""

from collections.abc import Sequence

import numpy as np

from rljax.errors import InputError
from rljax.sampler.memory import check_whole
from rljax.sampler.places import Places
from rljax.sampler.prompts import Prompts
from rljax.sampler.requests import Sampling
from rljax.sampler.sample import Sample


def check_branch(
    sample: Sample,
    places: Sequence[int],
    n: int,
    sampling: Sampling | None,
    more: Sequence[int],
    both: bool,
) -> None:
    """Raises InputError where `Sampler.branch` cannot be done; `both`: keep and hold are asked."""
    check_whole("n of a branch", n, 1)
    if sample.images is not None:
        raise InputError("branches of samples with images", fix="prompts of text")
    if both:
        raise InputError(
            "keep and hold", value=(True, True), rule="one of both", fix="set one of the two"
        )
    if sample.finish_reason is None:
        rule, fix = "a finished sample", "submit(hold=True), and branch when it has ended"
        raise InputError("branch", value=f"sample {sample.id}", rule=rule, fix=fix)
    count = len(sample.tokens)
    low, high = (sample.turn, count - 1) if sampling is None else (0, count)
    whole = [isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in places]
    if not places or not all(whole) or not all(low <= p <= high for p in places):
        rule = f"tokens of the response, {low} to {high}"
        if sampling is None:
            rule += ": inside of its last turn, whose limits go on"
        fix = "sampling= begins a new turn there" if sampling is None else "name such a token"
        raise InputError("branch at", value=places[:8], rule=rule, fix=fix)
    if len(more) and sampling is None:
        rule = "a new turn begins behind them"
        raise InputError("branch more", value=list(more)[:8], rule=rule, fix="sampling=")


def add_branches(prompts: Prompts, places: Places, sample: Sample, children: list[Sample]) -> None:
    """Puts continuations of a sample into the queue, with what was read of it: together where what
    a long one needs is what all need."""
    engine = places.engine
    prefix, read = places.read_of(sample)
    sizes = sorted({child.size for child in children})
    groups = [children]
    if not engine.can_go_back(max(read, sizes[-1] - 1)):
        groups = [[child for child in children if child.size == size] for size in sizes]
    for group in groups:
        ids = max(group, key=lambda child: child.size).ids
        known = read if len(groups) == 1 or read == len(ids) - 1 else 0
        again = min(len(ids), sample.size) - 1 - known  # what is behind the sample is new
        places.reread_tokens += max(0, again)
        own = prefix if known else None
        if own is not None and known < len(ids) - 1:  # what is appended goes behind it
            own = engine.widen(own, 0, known)
        prompts.add(ids, group, prefix=own, read=known)
