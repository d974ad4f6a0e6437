"""Requests and turns in one Sampler, as a program of one host or of several that make the same
calls: prints what was drawn as one line of JSON."""

import dataclasses
import json
import zlib

import jax
import numpy as np
from sampler_cases import VOCAB, prompts, tiny

from rljax import hosts
from rljax.arrays import fetch
from rljax.mesh import make_mesh
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate

LETTERS = "_abcdefghijklmnopqrstuvwxyz01"


def decode(ids) -> str:
    return "".join(LETTERS[i] for i in ids)


def drawn(samples) -> dict:
    """What hosts and layouts have in common exactly, and log-probs, which they have nearly."""
    return {
        "tokens": [sample.tokens.tolist() for sample in samples],
        "chosen": [sample.chosen.tolist() for sample in samples],
        "versions": [sample.versions.tolist() for sample in samples],
        "logprobs": np.concatenate([sample.logprobs for sample in samples]).tolist(),
    }


def play(model, versions, *, slots: int, parked: int, keep_cache: bool, **pages) -> dict:
    """Turns of 10 episodes, with replies that come late, new parameters, a pause and an abort."""
    engine = Engine(model, slots, 64, steps=3, forcing_tokens=8, **pages)
    sampler = Sampler(engine, chunk_tokens=6, decode=decode, parked_tokens=parked)
    asked = Sampling(
        max_response_tokens=6,
        stop_ids=(1,),
        stop_strings=("b", "cd"),
        thinking_tokens=(3, 4),
        end_of_thinking_ids=(7,),
        interrupt_ids=(9, 7),
    )
    rng, samples = np.random.default_rng(0), []
    for i in rng.permutation(10).tolist():
        prompt = rng.integers(2, VOCAB, rng.integers(1, 12))
        samples += sampler.submit(prompt, asked, request_ids=[i], hold=i % 5 > 0)
    left, owed, step = {s: 3 for s in samples if s.hold}, [], 0
    while sampler.pending or left:
        step += 1
        if step == 4:
            going = next(s for s in samples if s.finish_reason is None and len(s.tokens))
            sampler.resume(sampler.pause(going))
            sampler.abort(samples[-1])
            left.pop(samples[-1], None)
        version = step // 5
        how = dict(version=version, keep_cache=keep_cache)
        events = sampler.step(versions[version % 2], **how) if sampler.pending else []
        owed.append([e.sample for e in events if e.sample.finish_reason is not None])
        for sample in owed.pop(0) if len(owed) > 2 else ():
            if sample not in left:
                continue
            left[sample] -= 1
            if not left[sample]:
                sampler.release(sample)
                del left[sample]
                continue
            more = rng.integers(2, VOCAB, rng.integers(0, 9)).tolist()
            turn = dataclasses.replace(asked, max_response_tokens=int(rng.integers(1, 7)))
            sampler.deliver([(sample, more, turn)])
    return drawn(samples) | {"reread": sampler.reread_tokens, "steps": step}


def whole(model, params) -> dict:
    """A batch by the host's loop: crc32 of its whole numbers, and its log-probs."""
    tokens, lengths = prompts()
    told = []
    how = Decoding(loop="host", slots=6, decode=decode)
    asked = Sampling(max_response_tokens=12, stop_ids=(1,), stop_strings=("bc",))
    batch = generate(
        model,
        params,
        tokens,
        lengths,
        jax.random.key(5),
        asked,
        n=2,
        decoding=how,
        finished=lambda row, ids, reason: told.append([row, len(ids), reason]),
    )
    batch = fetch(batch)
    names = ("tokens", "mask", "segment_ids", "finish_reason")
    exact = [zlib.crc32(np.ascontiguousarray(getattr(batch, name)).tobytes()) for name in names]
    return {"exact": exact, "told": told, "logprobs": batch.sampler_logprobs.ravel().tolist()}


def main() -> None:
    hosts.start(init_timeout_s=120)
    model = dataclasses.replace(tiny(window=4), mesh=make_mesh(4, 1, 1))
    flat = dataclasses.replace(tiny(), mesh=model.mesh)
    flat_versions = [flat.init(jax.random.key(seed)) for seed in (3, 4)]
    versions = [model.init(jax.random.key(seed)) for seed in (3, 4)]
    print(
        json.dumps(
            {
                "kept": play(model, versions, slots=8, parked=0, keep_cache=True),
                "parked": play(model, versions, slots=4, parked=256, keep_cache=True),
                "reread": play(model, versions, slots=3, parked=0, keep_cache=False),
                # Each of 4 devices has 2 slots and pages for little more than one of them.
                "paged": play(
                    flat, flat_versions, slots=8, parked=0, keep_cache=True, page_tokens=4, pages=72
                ),
                "whole": whole(model, versions[0]),
            }
        )
    )


if __name__ == "__main__":
    main()
