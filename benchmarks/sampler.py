"""The cost of decoding against the machine's floor: prints JSON.

python benchmarks/sampler.py [--model=27m] [--parts=a,b,c,d,e] [--slots=32,128] [--repeats=3]

Models: 27m (that of grpo_step.py, float32), 0.5b (Qwen2.5's, bfloat16), 1b (8 layers, bfloat16), 8b
(36 layers, bfloat16), tiny (float32), with random weights. Prompts of 32 tokens, temperature 1.

(a) 128 new tokens in every slot. (b) 256 requests, groups of 8, over 32 slots, lengths geometric
with mean 32 and at most 128 (1 token in 32 stops a response): slots that refill (on the device, and
from the host) against batches of 32 that wait for their longest row. (c) as (a) behind 896 tokens.
(d) time to the first token of one request alone, prompts of 32 and 896 tokens. (e) decoding with
drafts against decoding without, on text that repeats itself and on text that does not.

The floor of a step is compute plus memory: FLOPs (2 per weight but the embedding, and per cached
number) over the rate of a matmul of 4,096 rows of the model's own sizes, plus bytes (weights,
keys and values so far) over the rate of summing an array that fits no cache, all measured in the
same process. CPU seconds are of the process.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from stopwatch import best_seconds

from rljax.mesh import make_mesh
from rljax.models import cache
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Decoding, Engine, Sampler, Sampling, generate
from rljax.sampler.requests import STOP_IDS
from rljax.tracking import compiles

PROMPT, NEW, LONG, COPIED = 32, 128, 896, 256
SIZES = {
    "tiny": dict(vocab=64, layers=1, embed=32, mlp=64, heads=2, kv_heads=1, head_dim=16),
    "27m": dict(vocab=4096, layers=8, embed=512, mlp=1536, heads=8, kv_heads=4, head_dim=64),
    "0.5b": dict(vocab=151936, layers=24, embed=896, mlp=4864, heads=14, kv_heads=2, head_dim=64)
    | dict(tie_embeddings=True),
    "1b": dict(vocab=32768, layers=8, embed=3072, mlp=8192, heads=24, kv_heads=8, head_dim=128),
    "8b": dict(vocab=151936, layers=36, embed=4096, mlp=12288, heads=32, kv_heads=8, head_dim=128),
}


def best_rate(amount: float, function, *args, repeats: int = 5) -> float:
    """`amount` per second of the fastest of a few calls."""
    return amount / best_seconds(function, *args, repeats=repeats)


def machine(config) -> dict:
    """FLOP/s of a large matmul and bytes/s of a large sum."""
    dtype = jnp.dtype(config.dtype)
    x = jnp.ones((4096, config.embed), dtype)
    w = jnp.ones((config.embed, config.mlp), dtype)
    flops = best_rate(2 * x.size * config.mlp, jax.jit(lambda x, w: x @ w), x, w)
    large = jnp.ones((2**28 // dtype.itemsize,), dtype)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    return {"flops_per_s": flops, "bytes_per_s": best_rate(large.nbytes, total, large)}


def floors_s(config, params, rates: dict, slots: int, context: float) -> tuple[float, float]:
    """Seconds of the products and of the memory of one decode step at the machine's rates, with
    `context` cached tokens per slot."""
    weights = sum(x.size for x in jax.tree.leaves(params))
    read_weights = weights - (0 if config.tie_embeddings else config.vocab_size * config.embed)
    cached = slots * context * 2 * config.kv_heads * config.head_dim * config.layers
    group = config.heads // config.kv_heads
    compute = 2 * slots * read_weights + 2 * cached * group
    cache_bytes = slots * cache.slot_bytes(config, 1) * context
    memory = read_weights * jnp.dtype(config.weight_dtype).itemsize + cache_bytes
    return compute / rates["flops_per_s"], memory / rates["bytes_per_s"]


def measured(function, repeats: int) -> dict:
    """Median and range of wall and CPU seconds of `function`, after one call that compiles."""
    jax.block_until_ready(function())
    wall, cpu = [], []
    for _ in range(repeats):
        start, cpu_before = time.perf_counter(), time.process_time()
        jax.block_until_ready(function())
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_before)
    return {
        "wall_s": statistics.median(wall),
        "wall_range_s": [min(wall), max(wall)],
        "cpu_s": statistics.median(cpu),
        "cpu_range_s": [min(cpu), max(cpu)],
    }


class Bench:
    def __init__(self, name: str, repeats: int):
        sizes = dict(SIZES[name])
        vocab = sizes.pop("vocab")
        config = decoder(vocab, max_tokens=LONG + NEW, **sizes)
        if name not in ("tiny", "27m"):
            config = dataclasses.replace(config, dtype="bfloat16", weight_dtype="bfloat16")
        self.model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
        self.params, self.config = self.model.init(jax.random.key(0)), config
        self.repeats, self.rng = repeats, np.random.default_rng(0)

    def prompts(self, count: int, tokens: int):
        ids = self.rng.integers(0, self.config.vocab_size, (count, tokens)).astype(np.int32)
        return ids, np.full(count, tokens, np.int32)

    def fixed(self, slots: int, prompt: int) -> dict:
        """Measures (a) and (c): every slot decodes NEW tokens."""
        prompts = self.prompts(slots, prompt)
        sampling = Sampling(max_response_tokens=NEW)

        def run():
            return generate(self.model, self.params, *prompts, jax.random.key(1), sampling).tokens

        engine = Engine(self.model, slots, prompt + NEW, steps=NEW)
        row = measured(run, self.repeats)
        prefill = measured(lambda: engine.prefill(self.params, *prompts).length, self.repeats)
        rates = machine(self.config)
        decode_s = row["wall_s"] - prefill["wall_s"]
        compute, memory = floors_s(self.config, self.params, rates, slots, prompt + NEW / 2)
        floor = compute + memory
        return row | {
            "slots": slots,
            "prompt_tokens": prompt,
            "new_tokens": NEW,
            "prefill_s": prefill["wall_s"],
            "tokens_per_s": slots * NEW / row["wall_s"],
            "tokens_per_cpu_s": slots * NEW / row["cpu_s"],
            "step_ms": 1e3 * decode_s / NEW,
            "bandwidth_step_ms": 1e3 * memory,
            "floor_step_ms": 1e3 * floor,
            "share_of_floor": floor / (decode_s / NEW),
            **rates,
        }

    def ragged(self) -> dict:
        """Measures (b): refilled slots against batches that wait."""
        count, n, slots = 32, 8, 32
        prompts, lengths = self.prompts(count, PROMPT)
        # A random model's tokens are nearly equally likely: 1 in 32 of them ends a response.
        stops = tuple(range(0, self.config.vocab_size, 32))
        sampling = Sampling(max_response_tokens=NEW, stop_ids=stops)
        key, tokens = jax.random.key(2), {}

        def refilled(loop):
            decoding = Decoding(slots=slots, loop=loop)
            batch = generate(
                self.model, self.params, prompts, lengths, key, sampling, n=n, decoding=decoding
            )
            tokens[loop] = float(batch.mask.sum())
            return batch.tokens

        def static_batches():
            total, batches = 0.0, []
            for start in range(0, count, slots // n):
                part = slice(start, start + slots // n)
                batch = generate(
                    self.model,
                    self.params,
                    prompts[part],
                    lengths[part],
                    jax.random.fold_in(key, start),
                    sampling,
                    n=n,
                )
                total += float(batch.mask.sum())
                batches.append(batch.tokens)
            tokens["static"] = total
            return batches

        rows = {}
        for name, run in (
            ("device", lambda: refilled("device")),
            ("host", lambda: refilled("host")),
            ("static", static_batches),
        ):
            times = measured(run, self.repeats)
            rows[name] = times | {"tokens_per_s": tokens[name] / times["wall_s"]}
        sampler = self.sampler(slots, PROMPT + NEW, stops=len(stops))
        before = compiles.count()
        for p in range(count):
            sampler.submit(prompts[p], sampling, n=n)
        while_waiting = [0, 0]  # slot-steps, and tokens of them, while requests wait for a slot
        while sampler.pending:
            requests_wait = sampler.pending > slots
            counted = sampler.slot_steps, sampler.live_slot_steps
            sampler.step(self.params)
            if requests_wait:
                while_waiting[0] += sampler.slot_steps - counted[0]
                while_waiting[1] += sampler.live_slot_steps - counted[1]
        static = rows["static"]["tokens_per_s"]
        return rows | {
            "requests": count * n,
            "slots": slots,
            "mean_tokens": tokens["device"] / (count * n),
            "occupancy_while_requests_wait": while_waiting[1] / while_waiting[0],
            "occupancy": sampler.live_slot_steps / sampler.slot_steps,
            "host_share": sampler.host_s / (sampler.host_s + sampler.device_s),
            "dispatches": sampler.dispatches,
            "compiles_of_the_stream": compiles.count() - before,
            "device_over_static_cpu": rows["static"]["cpu_s"] / rows["device"]["cpu_s"],
            "device_over_static": rows["device"]["tokens_per_s"] / static,
            "host_over_static": rows["host"]["tokens_per_s"] / static,
        }

    def sampler(self, slots: int, tokens: int, steps=32, chunk=PROMPT, stops=STOP_IDS) -> Sampler:
        engine = Engine(self.model, slots, tokens, steps=steps, stop_ids=stops)
        return Sampler(engine, chunk_tokens=chunk)

    def first_token(self) -> dict:
        """Measures (d): one request in an empty sampler of 32 slots, a step per dispatch."""
        rows = {}
        for tokens in (PROMPT, LONG):
            sampler = self.sampler(32, LONG + NEW, steps=1, chunk=256)
            prompt = self.prompts(1, tokens)[0][0]
            seconds = []
            for _ in range(self.repeats + 1):
                [sample] = sampler.submit(prompt, Sampling(max_response_tokens=8))
                list(sampler.run(self.params))
                seconds.append(sample.first_token_s - sample.submitted_s)
            seconds = seconds[1:]  # the first compiles
            rows[f"prompt_{tokens}"] = {
                "first_token_s": statistics.median(seconds),
                "range_s": [min(seconds), max(seconds)],
            }
        return rows

    def drafted(self) -> dict:
        """Measures (e): one slot and eight, with drafts of 0, 4 and 8 tokens in turn.

        Text that repeats itself: greedy, of a model without attention, whose next token depends on
        the newest alone, so that it goes round in a circle, behind a prompt that holds the circle,
        as text that is copied does. Text that does not repeat itself: temperature 1 of the random
        model."""

        def zero(path, x):
            return x * ("['o']" not in jax.tree_util.keystr(path))

        circles = jax.tree_util.tree_map_with_path(zero, self.params)
        texts = {"repeats": (circles, 0.0), "does_not_repeat": (self.params, 1.0)}
        rows: dict = {name: [] for name in texts}
        for (name, (params, temperature)), slots in itertools.product(texts.items(), (1, 8)):
            prompts = list(self.prompts(slots, PROMPT)[0])
            sampling = Sampling(max_response_tokens=NEW, temperature=temperature)
            if name == "repeats":
                prompts = self._circles(params, prompts)
            runs = {
                draft_tokens: self._drafting(params, prompts, sampling, draft_tokens)
                for draft_tokens in (0, 4, 8)
            }
            for run in runs.values():
                run()  # compiles
            results = {draft_tokens: [] for draft_tokens in runs}
            for _ in range(self.repeats):
                for draft_tokens, run in runs.items():
                    results[draft_tokens].append(run())
            for draft_tokens, all_runs in results.items():
                wall, cpu = (
                    statistics.median(run_result[i] for run_result in all_runs) for i in (0, 1)
                )
                without_drafts = [
                    statistics.median(run_result[i] for run_result in results[0]) for i in (0, 1)
                ]
                rows[name].append(
                    {
                        "slots": slots,
                        "draft_tokens": draft_tokens,
                        "steps_of_a_slot": all_runs[0][2] / slots,
                        "wall_s": wall,
                        "plain_over_wall": without_drafts[0] / wall,
                        "plain_over_cpu": without_drafts[1] / cpu,
                    }
                )
        return rows

    def _circles(self, params, prompts) -> list:
        """Returns COPIED tokens that the model writes behind each prompt once it goes round."""
        sampler = Sampler(Engine(self.model, len(prompts), PROMPT + 3 * COPIED))
        sampling = Sampling(max_response_tokens=3 * COPIED, temperature=0.0)
        samples = [sampler.submit(prompt, sampling)[0] for prompt in prompts]
        list(sampler.run(params))
        return [sample.tokens[-COPIED:] for sample in samples]

    def _drafting(self, params, prompts, sampling: Sampling, draft_tokens: int):
        """Returns a function that samples once of each prompt, and returns (wall seconds, CPU
        seconds, slot-steps)."""
        slots, length = len(prompts), len(prompts[0])
        engine = Engine(self.model, slots, length + NEW, steps=NEW, draft_tokens=draft_tokens)

        def run():
            sampler = Sampler(engine, chunk_tokens=length, prefill_rows=slots)
            for prompt in prompts:
                sampler.submit(prompt, sampling)
            start, cpu_s = time.perf_counter(), time.process_time()
            list(sampler.run(params))
            cpu_s = time.process_time() - cpu_s
            return time.perf_counter() - start, cpu_s, sampler.live_slot_steps

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="27m")
    parser.add_argument("--parts", default="a,b,c,d,e")
    parser.add_argument("--slots", default="32,128")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    compiles.watch()
    bench, parts = Bench(options.model, options.repeats), options.parts.split(",")
    slots = [int(x) for x in options.slots.split(",")]
    report = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "model": options.model,
        "repeats": options.repeats,
    }
    if "a" in parts:
        report["a_fixed"] = [bench.fixed(count, PROMPT) for count in slots]
    if "b" in parts:
        report["b_ragged"] = bench.ragged()
    if "c" in parts:
        report["c_long_context"] = [bench.fixed(slots[0], LONG)]
    if "d" in parts:
        report["d_first_token"] = bench.first_token()
    if "e" in parts:
        report["e_drafts"] = bench.drafted()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
