"""Tree search: a simulation by columns of one slot against one by a copy of the root. Prints JSON.

python benchmarks/search.py [--prompt=64,512] [--sentences=4] [--simulations=32] [--new=4]
                            [--repeats=3]

A policy and a critic of 4 layers of 256 with random weights, in float32. One search is done and its
calls are kept; then both evaluators answer the same calls in turns, so that a busy machine is busy
for both. `ratio` is columns / copies, of the medians of CPU seconds (all threads) and wall seconds.
`largest_difference` is over log-probs and values.
"""

import argparse
import dataclasses
import json
import time

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.sampler import Decoding, Sampling
from rljax.sampler.inputs import request_keys
from rljax.search.evaluators import Value
from rljax.search.mcts import mcts
from rljax.search.problem import SearchProblem

FORMS = ("copies", "columns")


class RecordingEvaluator:
    """An evaluator that keeps the calls that it passes on."""

    def __init__(self, evaluator):
        self.evaluator, self.width, self.calls = evaluator, evaluator.width, []

    def __call__(self, leaves):
        self.calls.append((leaves,))
        return self.evaluator(leaves)

    def move_root(self, *arguments):
        self.calls.append(arguments)
        self.evaluator.move_root(*arguments)


@dataclasses.dataclass(frozen=True)
class RecordedTask(SearchProblem):
    """A task that gives one evaluator, which has read its prompts."""

    recorder: RecordingEvaluator | None = None

    def evaluator(self, *_, **__):
        return self.recorder


def models(vocab: int = 2048):
    config = decoder(vocab, layers=4, embed=256, mlp=768, heads=8, kv_heads=4, head_dim=32)
    policy = Model(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    critic = dataclasses.replace(policy, head="scalar")
    params = critic.init(jax.random.key(1))
    head = jax.random.normal(jax.random.key(2), params["head"].shape)
    return policy, policy.init(jax.random.key(0)), Value(critic, params | {"head": head}, "critic")


def task_of(policy, params, value, prompt: int, options) -> SearchProblem:
    rng, rows = np.random.default_rng(prompt), options.sentences
    tokens = rng.integers(0, policy.config.vocab_size, (rows, prompt)).astype(np.int32)
    keys = fetch(request_keys(jax.random.key(3), rows))
    sampling = Sampling(max_response_tokens=options.new, temperature=0.0)
    lengths = np.full(rows, prompt, np.int32)
    return SearchProblem(policy, params, tokens, lengths, keys, sampling, Decoding(), value)


def evaluator_of(task: SearchProblem, form: str, options):
    return task.evaluator(options.width, nodes=options.simulations if form == "columns" else 0)


def answered(evaluator, calls) -> tuple[float, float, list]:
    """Returns (CPU seconds, wall seconds, answers) of the calls of a search."""
    answers, wall, cpu = [], time.perf_counter(), time.process_time()
    for call in calls:
        if len(call) == 1:
            answers.append((call[0].live, fetch(evaluator(*call))))
        else:
            evaluator.move_root(*call)
    return time.process_time() - cpu, time.perf_counter() - wall, answers


def difference(answers) -> float:
    """Returns the largest difference of log-probs and values between the forms, at equal tokens."""
    largest = 0.0
    for (live, ours), (_, theirs) in zip(*answers, strict=True):
        np.testing.assert_array_equal(ours.tokens[live], theirs.tokens[live])
        for name in ("logprobs", "value"):
            differences = getattr(ours, name)[live] - getattr(theirs, name)[live]
            largest = max(largest, float(np.abs(differences).max(initial=0)))
    return largest


def measure(task: SearchProblem, options) -> dict:
    recorder = RecordingEvaluator(evaluator_of(task, "columns", options))
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    mcts(
        RecordedTask(**fields, recorder=recorder),
        simulations=options.simulations,
        width=options.width,
    )
    searched = [call[0] for call in recorder.calls if len(call) == 1]
    seconds = {form: [] for form in FORMS}
    for repeat in range(1 + options.repeats):  # the first one compiles
        answers = []
        for form in FORMS:
            *times, answer = answered(evaluator_of(task, form, options), recorder.calls)
            seconds[form] += [times] if repeat else []
            answers.append(answer)
    medians = {form: np.median(seconds[form], axis=0) / len(searched) for form in FORMS}
    ratio = medians["columns"] / medians["copies"]
    return {
        "prompt_tokens": int(task.prompts.shape[1]),
        "simulations": len(searched),
        "mean_depth": round(float(np.mean([x.depth[x.live].mean() for x in searched])), 2),
        "largest_depth": int(max(x.depth.max() for x in searched)),
        "ms_per_simulation": {
            form: {"cpu": round(1e3 * x[0], 2), "wall": round(1e3 * x[1], 2)}
            for form, x in medians.items()
        },
        "ratio": {"cpu": round(float(ratio[0]), 3), "wall": round(float(ratio[1]), 3)},
        "largest_difference": difference(answers),
    }


def main(options: argparse.Namespace) -> None:
    parts = models()
    for prompt in map(int, options.prompt.split(",")):
        print(json.dumps(measure(task_of(*parts, prompt, options), options)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="64,512", help="tokens, several after commas")
    for name, value in dict(sentences=4, simulations=32, width=4, new=4, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    main(parser.parse_args())
