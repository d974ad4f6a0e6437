"""Whole GRPO steps of a 27 M-parameter decoder, and their parts: prints JSON.

python benchmarks/grpo_step.py [--prompt=32] [--response=128] [--ragged] [--repeats=5]

Model: embed 512, mlp 1536, 8 layers, 8 heads, 4 kv heads, head_dim 64, vocabulary 4096, float32,
random weights. 4 prompts x 8 samples; every response has all its tokens. `--ragged`: 32 prompts of
8 to 32 tokens x 8 samples, of whose tokens 1 in 33 ends the response (at most 128), and 32 slots.
A step is that of a run: `Run.step` of a config whose fields are the defaults but for the sizes,
model_settings.remat="none" and 32 sequences in a microbatch. "generate" is the source of the batch
(sampling, and a reward that costs nothing), "learn" the dataflow, "logprobs" a pass without
gradients by itself.

Useful FLOPs of learning are those of one forward and backward pass over the positions that are
needed: each prompt once in its group, each token of a response once, nothing else; attention over
the pairs that see each other. A second figure has the prompt once for every response.
"computed_positions" are those of the microbatches that the program computes. FLOPs are compared
with a plain float32 product of the model's own sizes, read between laps.
"""

import argparse
import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from step_shapes import SHAPES, Cost, Shape, forget_peak, lap, spent, spread, spreads, task_text

from rljax.arrays import fetch
from rljax.config import BatchConfig, Config, DataConfig, ModelSettings, SamplerConfig
from rljax.learn.packing import pack
from rljax.setup import build, initial_params
from rljax.tracking import compiles
from rljax.training.run import Run

READINGS = 5  # of the matmul rate between two laps
CLOCKS = ("wall_s", "cpu_s")


def make_config(
    shape: Shape, folder: str, tokens_per_microbatch: int = 0, dtype: str = "float32"
) -> Config:
    """The run of a shape, with products of a dtype."""
    sizes = dataclasses.asdict(shape.decoder)
    sizes.pop("vocabulary")
    sizes = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return Config(
        model=f"decoder({sizes}, max_tokens={shape.columns})",
        steps=10**6,
        run_dir=folder,
        export=False,
        compilation_cache="",
        data=DataConfig(train=task_text(shape), max_prompt_tokens=shape.longest_prompt),
        batch=BatchConfig(
            prompts_per_step=shape.prompts,
            samples_per_prompt=shape.samples,
            sequences_per_optimizer_step=shape.rows,
            tokens_per_microbatch=tokens_per_microbatch or shape.microbatch * shape.columns,
        ),
        sampler=SamplerConfig(max_response_tokens=shape.response, slots=shape.slots),
        model_settings=ModelSettings(dtype=dtype, remat="none"),
    )


def make_run(shape: Shape, folder: str, tokens_per_microbatch: int = 0, dtype="float32") -> Run:
    """A run of the shape before its first step. Its stop ids are the shape's."""
    setup = build(make_config(shape, folder, tokens_per_microbatch, dtype))
    sampling = dataclasses.replace(setup.rollouts.sampling, stop_ids=shape.stop_ids())
    setup = dataclasses.replace(setup, rollouts=setup.rollouts.replace(sampling=sampling))
    run = Run(setup, Path(folder))
    run.begin(run.phase, initial_params(setup.config, setup.model))
    return run


class Steps:
    """Laps of the steps of a run, and of their parts; the last batch and metrics."""

    def __init__(self, run: Run):
        self.run, self.batch, self.metrics = run, None, {}
        self.laps: dict[str, list[Cost]] = {"generate": [], "learn": [], "step": []}
        self._generate, run.source.next = run.source.next, self._next
        self._generated = spent()

    def _next(self, step: int, roles: dict):
        before = spent()
        self.batch, metrics = jax.block_until_ready(self._generate(step, roles))
        self._generated = spent()
        self.laps["generate"].append(self._generated.since(before))
        forget_peak()
        return self.batch, metrics

    def take(self) -> None:
        """One step."""
        forget_peak()
        before = spent()
        self.metrics = self.run.step()
        jax.block_until_ready(self.run.roles)
        after = spent()
        step, learn = after.since(before), after.since(self._generated)
        step.peak_mb = max(step.peak_mb, self.laps["generate"][-1].peak_mb)
        self.laps["learn"].append(learn)
        self.laps["step"].append(step)

    def logprobs_laps(self, repeats: int) -> list[Cost]:
        """Laps of the actor's log-probs of the last batch, after one that compiles."""
        actor, steps = self.run.roles["actor"], self.run.phase.algorithm.steps
        logprobs = jax.jit(lambda actor, batch: actor.logprobs(batch, steps))

        def call():
            return jax.block_until_ready(logprobs(actor, self.batch))

        call()
        return [lap(call) for _ in range(repeats)]


def needed_tokens(batch, samples: int) -> dict[str, int]:
    """Tokens of a batch whose rows are prompts and responses in groups of `samples`, and pairs of a
    token and one that it sees: with the prompt of a group once, and once for every response."""
    mask, real = fetch(batch.mask) > 0, fetch(batch.segment_ids) > 0
    response = mask.sum(axis=1)
    prompt = real.sum(axis=1) - response
    response_pairs = response * prompt + response * (response + 1) // 2
    prompt_pairs = prompt * (prompt + 1) // 2
    return {
        "response_tokens": int(response.sum()),
        "positions": int(prompt[::samples].sum() + response.sum()),
        "pairs": int(prompt_pairs[::samples].sum() + response_pairs.sum()),
        "row_positions": int(real.sum()),
        "row_pairs": int((prompt_pairs + response_pairs).sum()),
        "padded_positions": mask.size,
    }


@functools.partial(jax.jit, static_argnums=1)
def _microbatches(batch, packing):
    return pack(batch, packing).count


def computed_positions(batch, steps) -> int:
    """Positions of all microbatches of a pass of learning over the batch, padding included."""
    if steps.packing is None:
        return batch.tokens.size
    size = steps.packing.rows * steps.packing.blocks * steps.packing.block_tokens
    return int(_microbatches(batch, steps.packing)) * size


class MatmulRate:
    """Readings of x @ w with the model's largest weight: [rows, embed] x [embed, mlp]."""

    def __init__(self, shape: Shape):
        sizes, rows = shape.decoder, shape.microbatch * shape.columns
        self.flops = 2 * rows * sizes.embed * sizes.mlp
        self.arrays = jnp.ones((rows, sizes.embed)), jnp.ones((sizes.embed, sizes.mlp))
        self.product = jax.jit(lambda x, w: x @ w)
        jax.block_until_ready(self.product(*self.arrays))
        self.laps: list[Cost] = []

    def read(self) -> None:
        def call():
            return jax.block_until_ready(self.product(*self.arrays))

        self.laps += [lap(call) for _ in range(READINGS)]

    def gflop_per(self, clock: str) -> dict:
        """The spread over the laps of GFLOP per second of a clock of `Cost`."""
        return rates(self.flops, self.laps, clock)


def rates(flops: float, laps: list[Cost], clock: str) -> dict:
    return spread([flops / 1e9 / max(vars(x)[clock], 1e-9) for x in laps])


class Compiles:
    """Counts of XLA's compiles, and the seconds of tracing, lowering and compiling."""

    def __init__(self):
        compiles.watch()
        self.compiles_before, self.seconds, self.start = compiles.count(), {}, spent()
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_) -> None:
        for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile"):
            if event == f"/jax/core/compile/{name}_duration":
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def so_far(self) -> dict:
        return {
            "compiles": compiles.count() - self.compiles_before,
            "seconds": dict(self.seconds),
            "wall_s": spent().since(self.start).wall_s,
            "programs": compiles.names(self.compiles_before),
        }


def learning(shape: Shape, tokens: dict, laps: list[Cost], matmul: MatmulRate) -> dict:
    """Useful FLOPs of learning, their rate, and its share of the matmul's median rate, by the wall
    and by CPU seconds, which other processes disturb less."""
    figures = {}
    for name, prefix in (("", ""), ("_with_a_prompt_for_every_response", "row_")):
        sizes = tokens[f"{prefix}positions"], tokens["response_tokens"], tokens[f"{prefix}pairs"]
        flops = 3 * shape.decoder.forward_flops(*sizes)
        figures[f"useful_gflop{name}"] = flops / 1e9
        for clock in CLOCKS:
            reached = rates(flops, laps, clock)
            median = matmul.gflop_per(clock)["median"]
            figures[f"useful_gflop_per_{clock}{name}"] = reached
            share = {statistic: rate / median for statistic, rate in reached.items()}
            figures[f"share_of_matmul_by_{clock}{name}"] = share
    return figures


def measure(shape: Shape, repeats: int, tokens_per_microbatch: int = 0) -> dict:
    """The result of the benchmark."""
    compiled = Compiles()
    with (
        tempfile.TemporaryDirectory() as folder,
        make_run(shape, folder, tokens_per_microbatch) as run,
    ):
        steps, counts = Steps(run), []
        steps.take()
        before_second = compiled.so_far()
        matmul = MatmulRate(shape)
        for laps in steps.laps.values():
            laps.clear()
        compiles_before, steps_of_learning = compiles.count(), run.phase.algorithm.steps
        for _ in range(repeats):
            steps.take()
            computed = {"computed_positions": computed_positions(steps.batch, steps_of_learning)}
            counts.append(needed_tokens(steps.batch, shape.samples) | computed)
            matmul.read()
        late_compiles = [
            name for name in compiles.names(compiles_before) if name != "jit(_microbatches)"
        ]
        logprobs = steps.logprobs_laps(repeats)
    tokens = {name: sum(x[name] for x in counts) / repeats for name in counts[0]}
    laps, response = steps.laps, [x["response_tokens"] for x in counts]

    def tokens_per_s(part):
        return spread([count / x.wall_s for count, x in zip(response, laps[part], strict=True)])

    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "shape": dataclasses.asdict(shape),
        "repeats": repeats,
        "tokens": tokens,
        **{
            name: spreads(laps_of_part)
            for name, laps_of_part in {**laps, "logprobs": logprobs}.items()
        },
        "response_tokens_per_s": tokens_per_s("step"),
        "generated_tokens_per_s": tokens_per_s("generate"),
        **{f"matmul_gflop_per_{clock}": matmul.gflop_per(clock) for clock in CLOCKS},
        "learning": learning(shape, tokens, laps["learn"], matmul),
        "before_the_second_step": before_second,
        "compiled_later": late_compiles,
    }


def shape_of(flags) -> Shape:
    """The shape that the flags name."""
    if flags.ragged:
        return SHAPES["ragged"]
    return dataclasses.replace(
        SHAPES["fixed"],
        shortest_prompt=flags.prompt,
        longest_prompt=flags.prompt,
        response=flags.response,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--response", type=int, default=128, help="tokens")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens_per_microbatch", type=int, default=0, help="0: 32 sequences")
    flags = parser.parse_args()
    print(
        json.dumps(measure(shape_of(flags), flags.repeats, flags.tokens_per_microbatch), indent=2)
    )


if __name__ == "__main__":
    main()
