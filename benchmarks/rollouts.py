"""The cost of turns: replies that are read between dispatches, and the host's share. Prints JSON.

python benchmarks/rollouts.py [--model=tiny] [--slots=1024] [--replies=256] [--reply_tokens=12]
                              [--repeats=5]

Models: tiny (2 layers of 32, float32, 4,096 words), 27m (that of grpo_step.py, float32), 500m (24
layers of 896, bfloat16, 151,936 words), with random weights. A dispatch is 32 steps in all slots.

(a) dispatches without replies against dispatches with so many of them: every dispatch ends so many
turns, whose samples hold their slots, and all their replies are delivered before the next.
(b) the host's milliseconds of such dispatches, of those without replies, and of those in which so
many samples end and new prompts take their slots; their share of a dispatch of 0.3 s.
(c) twice as many episodes as slots, whose tools answer after two dispatches, with room beside the
slots for half of them: held, parked, and tokens that were read again.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Engine, Sampler, Sampling
from rljax.tracking import compiles

PROMPT, STEPS, DISPATCH_S = 16, 32, 0.3
SIZES = {
    "tiny": dict(vocab=4096, layers=2, embed=32, mlp=64, heads=2, kv_heads=1, head_dim=16),
    "27m": dict(vocab=4096, layers=8, embed=512, mlp=1536, heads=8, kv_heads=4, head_dim=64),
    "500m": dict(vocab=151936, layers=24, embed=896, mlp=4864, heads=14, kv_heads=2, head_dim=64),
}


class Bench:
    def __init__(self, options: argparse.Namespace):
        sizes = dict(SIZES[options.model])
        config = decoder(sizes.pop("vocab"), **sizes)
        if options.model == "500m":
            config = dataclasses.replace(config, dtype="bfloat16", weight_dtype="bfloat16")
        self.model = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
        self.params, self.config = self.model.init(jax.random.key(0)), config
        self.options, self.rng = options, np.random.default_rng(0)
        # Turns end in every dispatch, as many as there are replies, and begin anew.
        self.dispatches = -(-options.slots // options.replies)  # of a turn
        turns = -(-(options.repeats + 4) // self.dispatches) + 1
        self.tokens = PROMPT + turns * (self.dispatches * STEPS + options.reply_tokens)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, self.config.vocab_size, count).tolist()

    def sampler(self, **options) -> Sampler:
        engine = Engine(self.model, self.options.slots, self.tokens, steps=STEPS)
        return Sampler(engine, chunk_tokens=PROMPT, prefill_rows=self.options.slots, **options)

    def filled(self, limits: list[int], hold: bool) -> Sampler:
        """Returns a sampler with a sample in every slot, each with its limit of tokens."""
        sampler = self.sampler()
        for limit in limits:
            sampler.submit(self.ids(PROMPT), Sampling(max_response_tokens=limit), hold=hold)
        return sampler

    def limits(self) -> list[int]:
        """Returns limits of which `replies` are reached in each dispatch."""
        return [(1 + i // self.options.replies) * STEPS for i in range(self.options.slots)]

    def steps(self, sampler: Sampler, between) -> dict:
        """Returns the seconds of a dispatch with the calls before it, after the dispatches that
        fill the slots and compile."""
        rows = {"wall_s": [], "host_ms": [], "cpu_s": []}
        ended, full_dispatches = [], 0
        while len(rows["wall_s"]) < self.options.repeats:
            start, cpu_before, host = time.perf_counter(), time.process_time(), sampler.host_s
            between(sampler, ended)
            outside = time.perf_counter() - start
            events = sampler.step(self.params)
            ended = [e.sample for e in events if e.sample.finish_reason is not None]
            full_dispatches += len(events) == self.options.slots
            if full_dispatches > 2:
                rows["wall_s"].append(time.perf_counter() - start)
                rows["cpu_s"].append(time.process_time() - cpu_before)
                rows["host_ms"].append(1e3 * (sampler.host_s - host + outside))
        return {name: statistics.median(values) for name, values in rows.items()} | {
            "wall_range_s": [min(rows["wall_s"]), max(rows["wall_s"])],
            "ended_per_dispatch": len(ended),
        }

    def deliver(self, sampler: Sampler, ended: list) -> None:
        turn = Sampling(max_response_tokens=self.dispatches * STEPS)
        sampler.deliver([(s, self.ids(self.options.reply_tokens), turn) for s in ended])

    def refill(self, sampler: Sampler, ended: list) -> None:
        turn = Sampling(max_response_tokens=self.dispatches * STEPS)
        for _ in ended:
            sampler.submit(self.ids(PROMPT), turn)

    def replies(self) -> dict:
        """Measures (a) and (b)."""
        before = compiles.count()
        turns = self.steps(self.filled(self.limits(), hold=True), self.deliver)
        programs = compiles.names(before)
        full_limits = [self.tokens - PROMPT] * self.options.slots
        without_replies = self.steps(
            self.filled(full_limits, hold=False), lambda sampler, ended: None
        )
        with_new_prompts = self.steps(self.filled(self.limits(), hold=False), self.refill)
        for row in (without_replies, turns, with_new_prompts):
            row["host_share_of_0.3_s"] = row["host_ms"] / 1e3 / DISPATCH_S
        return {
            "plain": without_replies,
            "with_replies": turns,
            "with_new_prompts": with_new_prompts,
            "replies_over_plain": turns["wall_s"] / without_replies["wall_s"],
            "compiles": len(programs),
            "programs": programs,
        }

    def parking(self) -> dict:
        """Measures (c)."""
        slots, due_replies, turns_left = self.options.slots, [], {}
        sampler = self.sampler(parked_tokens=slots // 2 * self.tokens)
        sampling = Sampling(max_response_tokens=STEPS)
        for i in self.rng.permutation(2 * slots).tolist():
            [sample] = sampler.submit(self.ids(PROMPT), sampling, request_ids=[i], hold=True)
            turns_left[sample] = 2
        greatest = {"held": 0, "parked": 0}
        start = time.perf_counter()
        while turns_left:
            events = sampler.step(self.params) if sampler.pending else []
            greatest = {name: max(greatest[name], getattr(sampler, name)) for name in greatest}
            due_replies.append([e.sample for e in events if e.sample.finish_reason is not None])
            for sample in due_replies.pop(0) if len(due_replies) > 2 else ():
                turns_left[sample] -= 1
                if turns_left[sample]:
                    sampler.deliver([(sample, self.ids(self.options.reply_tokens), sampling)])
                else:
                    sampler.release(sample)
                    del turns_left[sample]
        return {
            "episodes": 2 * slots,
            "turns": 2,
            "wall_s": time.perf_counter() - start,
            "dispatches": sampler.dispatches,
            "most_held": greatest["held"],
            "most_parked": greatest["parked"],
            "reread_tokens": sampler.reread_tokens,
            "occupancy": sampler.live_slot_steps / sampler.slot_steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--replies", type=int, default=256)
    parser.add_argument("--reply_tokens", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    compiles.watch()
    bench = Bench(options)
    report = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        **vars(options),
        "slot_tokens": bench.tokens,
        **bench.replies(),
        "parking": bench.parking(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
