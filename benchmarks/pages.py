"""Contiguous slots against pages on one device: CPU seconds, memory, decode steps. Prints JSON.

python benchmarks/pages.py [--slots=32] [--tokens=512] [--prompts=8] [--samples=8] [--repeats=3]

A model of 27 million random weights in float32. Responses have geometric lengths (mean 33, at most
128); slots are refilled as they end. Settings take turns, so that a busy machine is busy for all.
`static_steps` is what batches of as many rows would take, each until its longest row ends.
"""

import argparse
import json
import time

import jax
import numpy as np

from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Engine, Sampler, Sampling
from rljax.sampler.memory import slots_bytes

SETTINGS = {
    "contiguous": {},
    "pages of 16": dict(page_tokens=16),
    "pages of 64": dict(page_tokens=64),
    "40 % of the pages of 64": dict(page_tokens=64, share=0.4),
}


def run(model: Model, params, engine: Engine, prompts, lengths) -> tuple[float, Sampler]:
    """(CPU seconds of all threads, the sampler) of one rollout."""
    sampler = Sampler(engine, chunk_tokens=128, prefill_rows=8)
    for number, length in enumerate(lengths.flat):
        prompt = prompts[number // lengths.shape[1]]
        sampler.submit(prompt, Sampling(max_response_tokens=int(length)), request_ids=[number])
    start = time.process_time()
    list(sampler.run(params))
    return time.process_time() - start, sampler


def main(options: argparse.Namespace) -> None:
    vocab = 4096
    config = decoder(vocab, layers=8, embed=512, mlp=1536, heads=8, kv_heads=4, head_dim=64)
    model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    params, rng = model.init(jax.random.key(0)), np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, n) for n in rng.integers(20, 120, options.prompts)]
    lengths = np.minimum(rng.geometric(0.03, (options.prompts, options.samples)), 128)
    engines = {}
    for name, engine_options in SETTINGS.items():
        engine_options = dict(engine_options)
        if share := engine_options.pop("share", 0):
            all_pages = -(-options.tokens // engine_options["page_tokens"]) * options.slots
            engine_options["pages"] = int(share * all_pages)
        engines[name] = Engine(model, options.slots, options.tokens, steps=16, **engine_options)
    seconds = {name: [] for name in engines}
    for repeat in range(1 + options.repeats):  # the first one compiles
        for name, engine in engines.items():
            cpu_s, sampler = run(model, params, engine, prompts, lengths)
            seconds[name] += [cpu_s] if repeat else []
            if repeat < options.repeats:
                continue
            size = slots_bytes(model, engine.slots, engine.tokens, pool=engine.pool)
            static = np.resize(lengths, -(-lengths.size // engine.slots) * engine.slots)
            row = {
                "setting": name,
                "cpu_s": [round(s, 2) for s in seconds[name]],
                "cpu_ratio": round(min(seconds[name]) / min(seconds["contiguous"]), 3),
                "mib": round(size / 2**20, 1),
                "steps": sampler.slot_steps // engine.slots,
                "static_steps": int(static.reshape(-1, engine.slots).max(axis=1).sum()),
                "read_again": sampler.reread_tokens,
            }
            print(json.dumps(row | sampler.page_metrics()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in dict(slots=32, tokens=512, prompts=8, samples=8, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    main(parser.parse_args())
