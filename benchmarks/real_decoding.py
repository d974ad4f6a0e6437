"""Greedy decoding of a real model by rljax, transformers and llama.cpp, in turns: prints JSON.

python benchmarks/real_decoding.py --model=FOLDER [--gguf=FILE] [--llama_python=PYTHON]
    [--sequences=1,16] [--tokens=128] [--repeats=5] [--rows=FILE.jsonl]
    [--systems=rljax:float32,rljax:drafts,rljax:bfloat16,transformers:float32,llama_cpp:file]

FOLDER is a Hugging Face folder, FILE the same model as GGUF, and PYTHON an interpreter with
llama-cpp-python (default: this one; without it the result says "not installed"). llama_cpp:file
reads FILE as it is, and llama_cpp:float32 a copy with its weights written out as float32.

A lap reads the prompts (sums of two numbers, of nearly equal lengths, or the "question" of each row
of --rows, through the model's chat template) and decodes --tokens greedy tokens of each, whether or
not one of them ends a response, so that every system does the same work. Every system is a process
of its own that gets the same token ids, may use all cores (llama.cpp: a thread for each; the
others: their defaults), and takes its laps in turns with the others; a lap before them loads,
compiles and warms up, and is reported alone. Memory is the largest resident set of the process. The
tokens are compared with those of the first system in the same laps: how many sequences are equal,
and how long they agree.

What is not the same work: llama.cpp reads 4-bit weights as such (llama_cpp:file), which are an
eighth of float32's bytes, with activations in 8 bits, so its tokens may differ. rljax:int8 holds
codes of 8 bits of the linear maps, rljax:bfloat16 computes in bfloat16. rljax:drafts decodes by
prompt lookup in float32, 4 drafted tokens a step.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import real_rows
from peers import Failed, Process
from step_shapes import spread

SYSTEMS = {
    "rljax": ("decode_rljax.py", ("float32", "bfloat16", "int8", "drafts")),
    "transformers": ("decode_transformers.py", ("float32", "bfloat16")),
    "llama_cpp": ("decode_llama_cpp.py", ("file", "float32")),
}


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict:
    """Returns how many sequences are the same, and the mean length of their common beginnings."""
    shared = []
    for a, b in zip(ours, theirs, strict=True):
        differ = (i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        shared.append(next(differ, len(a)))
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return {"equal": equal, "sequences": len(ours), "mean_common_tokens": sum(shared) / len(shared)}


def summary(ready: dict, laps: list[dict], sequences: int, tokens: int) -> dict:
    """The spread of a system's laps, the first one apart."""
    first_lap, later_laps = laps[0], laps[1:]
    count = sequences * tokens
    figures = {"versions": ready["versions"], "laps": len(later_laps)}
    for clock in ("wall_s", "cpu_s"):
        figures[clock] = spread([lap["step"][clock] for lap in later_laps])
        figures[f"tokens_per_{clock}"] = spread([count / lap["step"][clock] for lap in later_laps])
        figures[f"first_lap_{clock}"] = first_lap["step"][clock]
    return {**figures, "peak_mb": max(lap["step"]["peak_mb"] for lap in laps)}


def measure(systems: list[str], options: dict, flags: argparse.Namespace, folder: Path) -> dict:
    """Takes laps of `options["sequences"]` sequences; returns {name: summary or {"failed"}}."""
    running, results, laps = {}, {}, {}
    for name in systems:
        kind, _, variant = name.partition(":")
        python = flags.llama_python if kind == "llama_cpp" else sys.executable
        try:
            system_options = {**options, "how": variant, "scratch": str(folder)}
            process = Process(
                SYSTEMS[kind][0], python, system_options, folder / f"{kind}_{variant}.log"
            )
            if "not_installed" in process.ready:
                process.end()
                raise Failed(f"not installed: {process.ready['not_installed']}")
            running[name], laps[name] = process, []
        except (Failed, OSError) as error:
            results[name] = {"failed": str(error)}
    for number in range(flags.repeats + 1):
        for name, process in list(running.items()):
            try:
                laps[name].append(process.step())
                seconds = laps[name][-1]["step"]["wall_s"]
                label = f"{options['sequences']} sequences, lap {number}: {name} {seconds:.2f} s"
                print(label, file=sys.stderr, flush=True)
            except Failed as error:
                del running[name], laps[name]
                results[name] = {"failed": str(error)}
    base = next(iter(laps), None)
    for name, process in running.items():
        results[name] = summary(process.ready, laps[name], options["sequences"], options["tokens"])
        if name != base:
            results[name][f"tokens_like_{base}"] = agreement(
                laps[base][-1]["ids"], laps[name][-1]["ids"]
            )
        process.end()
    return {name: results[name] for name in systems}


def prompt_ids(model: str, count: int, rows: str = "") -> list[list[int]]:
    """Token ids of `count` prompts, through the model's chat template, or as text without one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if rows:
        texts = [row["question"] for row in real_rows.read_rows(rows)]
    else:
        texts = [row["prompt"][0]["content"] for row in real_rows.sums()[1]]
    all_ids = []
    for text in texts[:count]:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        add_special_tokens = not tokenizer.chat_template  # a template writes its own
        all_ids.append(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    return all_ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--gguf", default="", help="the same model, for llama_cpp")
    parser.add_argument("--llama_python", default=sys.executable)
    parser.add_argument("--sequences", default="1,16")
    parser.add_argument("--tokens", type=int, default=128, help="of each sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", default="", help="a .jsonl file with a question in each row")
    choices = [
        f"{kind}:{variant}" for kind, (_, variants) in SYSTEMS.items() for variant in variants
    ]
    parser.add_argument("--systems", default=",".join(choices))
    flags = parser.parse_args()
    systems = flags.systems.split(",")
    if unknown := [name for name in systems if name not in choices]:
        parser.error(f"--systems: {', '.join(unknown)}; there are {', '.join(choices)}")
    if flags.repeats < 1 or flags.tokens < 1:
        parser.error("--repeats and --tokens are at least 1")
    counts = [int(x) for x in flags.sequences.split(",")]
    options = {
        "model": str(Path(flags.model).resolve()),
        "tokens": flags.tokens,
        "rows": flags.rows,
    }
    options["gguf"] = str(Path(flags.gguf).resolve()) if flags.gguf else ""
    before, results = os.getloadavg(), {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            ids = prompt_ids(options["model"], count, flags.rows)
            case_options = {**options, "sequences": count, "prompts": ids}
            results[f"{count} sequences"] = measure(systems, case_options, flags, Path(folder))
    machine = {"cores": os.cpu_count(), "load": [before, os.getloadavg()]}
    print(json.dumps({"given": options, "machine": machine, **results}))


if __name__ == "__main__":
    main()
