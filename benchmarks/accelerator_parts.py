"""The parts of accelerator.py: python benchmarks/accelerator_parts.py PART [--tiny]

Each part prints {row: figures} as JSON, a line for each row, as soon as they are measured. Times
are medians of calls that wait for their results. Shares are relative to the rate of a plain product
or of a copy, which each part measures again, because the clocks of a device change.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from accelerator import PARTS
from logprob import plain as plain_logprobs
from stopwatch import seconds_of

# Peaks of a chip by its maker's data sheet: FLOP/s of dense bfloat16 products, bytes/s of memory.
PEAKS = {
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
}


def say(row: str, **figures) -> None:
    """Prints one row."""
    print(json.dumps({row: figures}), flush=True)


def attempt(row: str, function) -> None:
    """Says what `function` returns, or how it failed: the rows behind it are measured anyway."""
    try:
        say(row, **function())
    except Exception as error:
        say(row, failed=f"{type(error).__name__}: {error}"[:1500])


def kind() -> str:
    """Name of the device."""
    return jax.devices()[0].device_kind


def seconds(function, *args, repeats: int = 10) -> float:
    """Median seconds of a call, after two that compile and warm up."""
    for _ in range(2):
        seconds_of(function, *args)
    return statistics.median(seconds_of(function, *args) for _ in range(repeats))


def normal(seed: int, *shape: int, dtype=jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Random numbers, made on the device."""
    draw = jax.jit(lambda key: (scale * jax.random.normal(key, shape)).astype(dtype))
    return draw(jax.random.key(seed))


@functools.cache
def product_rate(tiny: bool) -> float:
    """FLOP/s of a square bfloat16 product of random numbers."""
    size = 256 if tiny else 8192
    x, y = normal(0, size, size), normal(1, size, size)
    return 2 * size**3 / seconds(jax.jit(jnp.dot), x, y)


@functools.cache
def copy_rate(tiny: bool) -> float:
    """Bytes/s, read and written, of a copy that fits no cache."""
    x = normal(0, 2**18 if tiny else 2**30)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def peaks() -> tuple[float, float] | None:
    """(FLOP/s, bytes/s) of this chip's data sheet, None where it is not known here."""
    from rljax.chips import chip_of

    if chip := chip_of(jax.devices()):
        return chip.flops_per_s, chip.hbm_bytes_per_s
    return PEAKS.get(kind())


def device(tiny: bool) -> None:
    chip = jax.devices()[0]
    say(
        "device",
        kind=kind(),
        platform=chip.platform,
        devices=jax.device_count(),
        memory_gb=(chip.memory_stats() or {}).get("bytes_limit", 0) / 1e9,
        back_end=chip.client.platform_version.splitlines()[0],
    )
    say(
        "rates",
        product_tflop_per_s=product_rate(tiny) / 1e12,
        copy_gb_per_s=copy_rate(tiny) / 1e9,
        data_sheet=peaks() and [peaks()[0] / 1e12, peaks()[1] / 1e9],
    )


def error_of(values, reference) -> float:
    """|found - wanted| / |wanted|, of all entries together, in float32."""
    values, reference = (np.asarray(x, np.float32).ravel() for x in (values, reference))
    return float(np.linalg.norm(values - reference) / max(np.linalg.norm(reference), 1e-30))


# -- the fused log-prob


def _logprob_forms() -> dict:
    """{name: form} of what runs on this platform; on a CPU the kernel is interpreted."""
    from rljax.kernels.logprob import pallas_gpu, token_logprobs

    platform = jax.default_backend()
    if platform == "cpu":
        for name in ("forward", "backward"):
            interpreted = functools.partial(vars(pallas_gpu)[name], interpret=True)
            setattr(pallas_gpu, name, interpreted)
    kernel = "pallas_tpu" if platform == "tpu" else "pallas_gpu"

    def form(hidden, head, targets, *, impl):
        return token_logprobs(hidden, head, targets, temperature=0.7, impl=impl)[:2]

    forms = {impl: functools.partial(form, impl=impl) for impl in (kernel, "xla")}
    return forms | {"plain": functools.partial(plain_logprobs, soft_cap=0.0)}


def _with_gradients(form):
    def run(hidden, head, targets, *cotangents):
        outputs, backward = jax.vjp(lambda h, w: form(h, w, targets), hidden, head)
        return outputs, backward(cotangents)

    return jax.jit(run)


def _logprob_figures(form, reference, hidden, head, targets, weights, tiny: bool) -> dict:
    """Errors of the first rows against `wanted`, and times of all of them."""
    first_rows, run = slice(len(reference[0][0])), _with_gradients(form)
    (value, entropy), gradients = run(
        hidden[first_rows], head, targets[first_rows], *(weight[first_rows] for weight in weights)
    )
    figures = {
        "logprob_error_nats": float(np.abs(value - reference[0][0]).max()),
        "entropy_error_nats": float(np.abs(entropy - reference[0][1]).max()),
        "hidden_gradient_error": error_of(gradients[0], reference[1][0]),
        "head_gradient_error": error_of(gradients[1], reference[1][1]),
    }
    del value, entropy, gradients
    forward = seconds(jax.jit(form), hidden, head, targets)
    with_gradients = seconds(run, hidden, head, targets, *weights)
    product = 2 * hidden.size * head.shape[1] / product_rate(tiny)  # seconds
    return figures | {
        "forward_ms": 1e3 * forward,
        "forward_share_of_product": product / forward,
        "with_gradients_ms": 1e3 * with_gradients,
        # Useful products: that of the logits and those of both gradients.
        "with_gradients_share_of_product": 3 * product / with_gradients,
    }


def logprob(tiny: bool) -> None:
    sizes = {"0.5b": (8192, 896, 151936), "8b": (8192, 4096, 151936)}
    sizes, forms = {"tiny": (256, 64, 512)} if tiny else sizes, _logprob_forms()
    for size, (rows, embed, vocab) in sizes.items():
        hidden, head = normal(0, rows, embed), normal(1, embed, vocab, scale=embed**-0.5)
        targets = jax.random.randint(jax.random.key(2), (rows,), 0, vocab)
        weights = [normal(3 + i, rows, dtype=jnp.float32) for i in range(2)]
        first_rows = slice(512)
        exact = [array.astype(jnp.float32) for array in (hidden[first_rows], head)]
        with jax.default_matmul_precision("highest"):
            plain_form = _with_gradients(forms["plain"])
            reference = plain_form(
                *exact, targets[first_rows], *(array[first_rows] for array in weights)
            )
        reference = jax.tree.map(np.asarray, reference)
        del exact
        arguments = reference, hidden, head, targets, weights, tiny
        for name, form in forms.items():
            row = f"{name} {size} {rows}x{embed}x{vocab}"
            attempt(row, functools.partial(_logprob_figures, form, *arguments))


# -- attention


def _attend(impl: str, q, k, v, segments):
    from rljax.mesh import make_mesh
    from rljax.models.attention import attention as run

    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    return run(q, k, v, segments, mesh=mesh, scale=q.shape[-1] ** -0.5, impl=impl)


def _attend_with_gradients(impl: str, q, k, v, segments, cotangent):
    output, backward = jax.vjp(lambda q, k, v: _attend(impl, q, k, v, segments), q, k, v)
    return output, backward(cotangent)


def _attention_figures(impl, reference, arrays, cotangent, flops: float, tiny: bool) -> dict:
    """Errors of the first row against `wanted`, and times of all rows. `flops`: of the forward
    pass."""
    forward, with_gradients = (
        jax.jit(functools.partial(function, impl)) for function in (_attend, _attend_with_gradients)
    )
    values = with_gradients(*(x[:1] for x in arrays), cotangent[:1])
    forward_s = seconds(forward, *arrays)
    with_gradients_s = seconds(with_gradients, *arrays, cotangent)
    gradients = zip("qkv", values[1], reference[1], strict=True)
    product = flops / product_rate(tiny)  # seconds
    return {
        "error": error_of(values[0], reference[0]),
        **{f"{name}_gradient_error": error_of(x, y) for name, x, y in gradients},
        "forward_ms": 1e3 * forward_s,
        "forward_share_of_product": product / forward_s,
        "with_gradients_ms": 1e3 * with_gradients_s,
        # Two products forwards, five backwards: flash attention computes the scores again.
        "with_gradients_share_of_product": 3.5 * product / with_gradients_s,
    }


def attention(tiny: bool) -> None:
    sizes = {"0.5b": (16, 2048, 14, 2, 64), "8b": (4, 4096, 32, 8, 128)}
    sizes = {"tiny": (2, 64, 4, 2, 16)} if tiny else sizes
    fast = {"gpu": ["cudnn"], "tpu": ["splash"]}.get(jax.default_backend(), [])
    for size, (rows, tokens, heads, kv_heads, width) in sizes.items():
        shapes = [(rows, tokens, n, width) for n in (heads, kv_heads, kv_heads)]
        qkv = [normal(i, *shape) for i, shape in enumerate(shapes)]
        cotangent = normal(3, *shapes[0])
        # One sequence a row, and four of equal length, as packing makes them.
        for sequences in (1, 4):
            row = 1 + np.arange(tokens, dtype=np.int32) * sequences // tokens
            segments = jnp.broadcast_to(jnp.asarray(row), (rows, tokens))
            exact = [x[:1].astype(jnp.float32) for x in (*qkv, cotangent)]
            with jax.default_matmul_precision("highest"):
                reference = jax.jit(functools.partial(_attend_with_gradients, "reference"))
                reference_values = reference(*exact[:3], segments[:1], exact[3])
            # Two products over the pairs that see each other: half of those of a sequence.
            flops = 4 * heads * width * rows * tokens**2 / 2 / sequences
            arguments = (
                jax.tree.map(np.asarray, reference_values),
                (*qkv, segments),
                cotangent,
                flops,
                tiny,
            )
            for impl in [*fast, "xla"]:
                what = f"{rows}x{tokens} in {sequences}, {heads}/{kv_heads} heads of {width}"
                figures = functools.partial(_attention_figures, impl, *arguments)
                attempt(f"{impl} {size} {what}", figures)


# -- GAE


def gae(tiny: bool) -> None:
    from gae import arguments

    from rljax.kernels.gae import gae as run
    from rljax.kernels.gae import pallas_gpu

    rows, tokens = (4, 160) if tiny else (512, 8192)
    rewards, values, mask, ids, *_ = arguments("gae", rows, tokens)
    if jax.default_backend() == "cpu":
        pallas_gpu.gae = functools.partial(pallas_gpu.gae, interpret=True)
    kernel = "pallas_tpu" if jax.default_backend() == "tpu" else "pallas_gpu"

    def program(impl):
        options = dict(gamma=0.99, lam=0.95, segment_ids=ids, impl=impl)
        return jax.jit(lambda r, v, m: run(r, v, m, **options))

    reference = jax.tree.map(np.asarray, program("reference")(rewards, values, mask))
    moved = 6 * rewards.nbytes  # rewards, values, mask and ids in, advantages and returns out

    def figures(impl):
        function = program(impl)
        found = function(rewards, values, mask)
        gae_s = seconds(function, rewards, values, mask)
        return {
            "advantage_error": error_of(found[0], reference[0]),
            "return_error": error_of(found[1], reference[1]),
            "ms": 1e3 * gae_s,
            "share_of_copy": moved / gae_s / copy_rate(tiny),
        }

    for impl in (kernel, "xla"):
        attempt(f"{impl} {rows}x{tokens}", functools.partial(figures, impl))


# -- decoding


def _decode(name: str, slots: int, prompt: int) -> None:
    from sampler import NEW, Bench

    bench = Bench(name, repeats=3)

    def figures():
        row = bench.fixed(slots, prompt)
        return {
            "tokens_per_s": row["tokens_per_s"],
            "step_ms": row["step_ms"],
            "share_of_bandwidth_floor": row["bandwidth_step_ms"] / row["step_ms"],
            "share_of_floor": row["share_of_floor"],
            "prefill_s": row["prefill_s"],
            "read_gb_per_s": row["bytes_per_s"] / 1e9,
        }

    attempt(f"{name}, {slots} rows of {prompt} + {NEW} tokens", figures)


def decode(tiny: bool) -> None:
    if tiny:
        return _decode("tiny", 4, 16)
    for slots in (64, 256):
        _decode("0.5b", slots, 256)


def decode_8b(tiny: bool) -> None:
    _decode(*(("tiny", 2, 16) if tiny else ("8b", 64, 256)))


# -- whole steps


def step_shape(tiny: bool):
    """The shape of Qwen2.5-0.5B, or one that a CPU takes."""
    from step_shapes import Decoder, Shape

    if tiny:
        tiny_decoder = Decoder(64, 1, 32, 64, 2, 1, 16, tie_embeddings=True)
        sizes = dict(shortest_prompt=4, longest_prompt=4, response=8, microbatch=4)
        return Shape("tiny", prompts=2, samples=4, **sizes, decoder=tiny_decoder)
    qwen = Decoder(151936, 24, 896, 4864, 14, 2, 64, tie_embeddings=True)
    sizes = dict(shortest_prompt=256, longest_prompt=256, response=512, microbatch=16)
    return Shape("0.5b", prompts=8, samples=8, **sizes, decoder=qwen)


def step(tiny: bool) -> None:
    import grpo_step

    from rljax.plan.chips import local_devices
    from rljax.plan.compiled import make_plan

    shape, repeats = step_shape(tiny), 1 if tiny else 4
    with (
        tempfile.TemporaryDirectory() as folder,
        grpo_step.make_run(shape, folder, dtype="bfloat16") as run,
    ):
        steps, tokens = grpo_step.Steps(run), []
        steps.take()
        first_lap, peak = steps.laps["step"][0], steps.laps["step"][0].peak_mb
        say("first step, with its compilation", s=first_lap.wall_s)
        for laps in steps.laps.values():
            laps.clear()
        for _ in range(repeats):
            steps.take()
            tokens.append(grpo_step.needed_tokens(steps.batch, shape.samples))
            peak = max(peak, steps.laps["step"][-1].peak_mb)
        walls = {part: [lap.wall_s for lap in laps] for part, laps in steps.laps.items()}
        medians = {part: statistics.median(wall) for part, wall in walls.items()}
        mean_tokens = {name: statistics.fmean(row[name] for row in tokens) for name in tokens[0]}
        say(
            f"step of {shape.rows} x ({shape.longest_prompt} + {shape.response}) tokens",
            **{f"{part}_s": s for part, s in medians.items()},
            response_tokens_per_s=mean_tokens["response_tokens"] / medians["step"],
        )
        # Useful work alone: a prompt once in its group, no padding, nothing computed again.
        flops = 3 * shape.decoder.forward_flops(
            mean_tokens["positions"], mean_tokens["response_tokens"], mean_tokens["pairs"]
        )
        figures = {"tflop_per_s": flops / medians["learn"] / 1e12}
        figures["share_of_product"] = flops / medians["learn"] / product_rate(tiny)
        if peaks():
            figures["mfu"] = flops / medians["learn"] / peaks()[0]
        say("learning", **figures)
        device_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        config = run.setup.config

    def memory():
        devices, chip = local_devices()
        plan = make_plan(config, devices, chip, kind())
        measured = device_peak or peak * 2**20
        planned = plan.total + (0 if device_peak else plan.process_bytes)
        figures = dict(planned_gb=planned / 1e9, peak_gb=measured / 1e9)
        return figures | {"planned_over_measured": planned / measured}

    attempt("peak memory" if device_peak else "peak memory of the process", memory)


def in_flight(tiny: bool) -> None:
    import staleness

    sizes = dict(model="27m", slots=32, prompts=24, steps=3, rounds=3)
    if tiny:
        sizes = dict(model="tiny", slots=8, prompts=2, steps=1, rounds=1)
    options = argparse.Namespace(mode="lengths", eta="0,1", samples=8, devices=1, **sizes)
    ratios = staleness.measured(options)["1"]["over_eta_0"]
    for row, name in (("step", "tokens_per_s"), ("rollout", "rollout_tokens_per_s")):
        median, least, greatest = ratios[name]
        say(f"{row}, {sizes['model']}", speed_up=median, least=least, most=greatest)


def trl(tiny: bool) -> None:
    import peers

    os.environ["PEER_DEVICE"] = "gpu" if jax.default_backend() == "gpu" else "cpu"
    shape, laps = step_shape(tiny), []
    with tempfile.TemporaryDirectory() as folder:
        fields = dataclasses.asdict(shape)
        process = peers.Process("peer_trl.py", sys.executable, fields, Path(folder) / "log")
        say("versions", **process.ready)
        say("first step", s=process.step()["step"]["wall_s"])
        for _ in range(1 if tiny else 3):
            laps.append(process.step())
            medians = {p: statistics.median(lap[p]["wall_s"] for lap in laps) for p in peers.PARTS}
            tokens_per_s = statistics.median(
                lap["response_tokens"] / lap["step"]["wall_s"] for lap in laps
            )
            size = f"{shape.rows} x ({shape.longest_prompt} + {shape.response}) tokens"
            figures = {f"{part}_s": s for part, s in medians.items()}
            say(f"step of {size}", **figures, response_tokens_per_s=tokens_per_s, laps=len(laps))
        process.end()


def doctor(tiny: bool) -> None:
    from rljax.command import main as rljax

    output, code = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            code = rljax(["doctor"])
        except SystemExit as ended:
            code = ended.code
    lines = output.getvalue().strip().splitlines()
    say("doctor", exit_code=code, says=[line for line in lines if not line.startswith("ok ")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    globals()[options.part](options.tiny)


if __name__ == "__main__":
    main()
