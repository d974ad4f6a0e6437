"""Whole batches that decode in layouts of their own, as a program of one host or of several: prints
what was drawn as one line of JSON."""

import dataclasses
import json
import zlib

import jax
import numpy as np
from sampler_cases import prompts, tiny

from rljax import hosts
from rljax.arrays import fetch
from rljax.mesh import make_mesh
from rljax.sampler import Decoding, Layout, Sampling, generate, held_weights
from rljax.tracking.timing import collect

VOCAB = 32
LAYOUTS = {"data 4": Layout(4, 1, 1), "data 2 x tensor 2": Layout(2, 1, 2)}


def drawn(model, params, decoding: Decoding) -> dict:
    """crc32 of a batch's whole numbers, its log-probs, and the bytes of the weights' copy."""
    tokens, lengths = prompts(4, 5, vocab=VOCAB)
    asked = Sampling(max_response_tokens=6, stop_ids=(1,))
    with collect() as timings, held_weights():
        for _ in range(2):
            batch = generate(
                model, params, tokens, lengths, jax.random.key(5), asked, n=2, decoding=decoding
            )
    assert batch.tokens.sharding.mesh == model.mesh
    batch = fetch(batch)
    names = ("tokens", "mask", "segment_ids", "finish_reason")
    exact = [zlib.crc32(np.ascontiguousarray(getattr(batch, name)).tobytes()) for name in names]
    logprobs = batch.sampler_logprobs.ravel().tolist()
    return {"exact": exact, "bytes": timings.synced_bytes, "logprobs": logprobs}


def main() -> None:
    hosts.start(init_timeout_s=120)
    model = tiny(vocab_size=VOCAB)
    model = dataclasses.replace(model, mesh=make_mesh(1, 4, 1))
    params = model.init(jax.random.key(3))
    found = {"training's own": drawn(model, params, Decoding())}
    for name, layout in LAYOUTS.items():
        for loop in ("device", "host"):
            how = Decoding(loop=loop, layout=layout)
            found[f"{name}, {loop}"] = drawn(model, params, how)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
