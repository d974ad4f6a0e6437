"""Every benchmark starts by its documented command, in its smallest form, and prints JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
BENCHMARKS = REPO / "benchmarks"
MODEL = REPO / "tests" / "golden" / "hf" / "qwen3"
# Smallest forms. The rest compares with other systems, draws what others measured, or is a part of
# one of these; tests/test_benchmarks.py has tests of it.
COMMANDS = {
    "accelerator.py": "--tiny --parts=device",
    "claims.py": "--seeds=1 --experiments=winner",
    "code_sandbox.py": "--seconds=0.2 --repeats=1",
    "correction.py": "--repeats=1",
    "experts.py": "--repeats=1",
    "gae.py": "--repeats=1 --rows=4 --tokens=256",
    "grpo_step.py": "--prompt=4 --response=4 --repeats=1",
    "hosts.py": "--hosts=2 --steps=1 --prompts=4 --samples=2",
    "judge_endpoint.py": "--latency_s=0.01 --samples=4 --workers 2 --repeats=1",
    "loading.py": "--gigabytes=0.05 --shard_megabytes=20",
    "logprob.py": "--repeats=1",
    "memory.py": "--devices=2 --repeats=1 --rows=2 --columns=32",
    "model.py": "--repeats=1 --rows=2 --depths=2",
    "one_program.py": "--steps=2 --laps=1 --embed=32 --rows=32",
    "pages.py": "--slots=4 --tokens=512 --prompts=2 --samples=2 --repeats=1",
    "placement.py": "--devices=2 --reward-s 0 --steps=1 --prompts=2 --samples=2 --max-tokens=4",
    "precision.py": f"{MODEL} --prompts=2 --samples=1 --prompt_tokens=4 --new_tokens=4",
    "reward_overlap.py": "--reward-s 0 --workers=1 --repeats=1 --prompts=2 --samples=2"
    " --max-tokens=8",
    "reward_pool.py": "--workers=1 --samples=100 --repeats=1",
    "rewards.py": "--repeats=1 --samples=20",
    "rollouts.py": "--slots=8 --replies=4 --reply_tokens=4 --repeats=1",
    "sampler.py": "--model=tiny --parts=a,b,d,e --slots=8 --repeats=1",
    "search.py": "--prompt=16 --sentences=2 --simulations=2 --new=2 --repeats=1",
    "simulate.py": "--etas=0,1 --embed=32 --slots=4 --prompts=2 --samples=2 --steps=8",
    "staleness.py": "--eta=0,1 --model=tiny --slots=8 --prompts=2 --steps=1 --rounds=1",
    "sync.py": "--rows=8 --new=4 --repeats=1 --layers=1 --embed=64",
    "tasks.py": "--seconds=0.05",
    "training_precision.py": "--presets=offline/sft --seeds=1",
}
OF_THE_COMPILER = {
    "gae.py": "--chips=v5e:2x4 --rows=8 --tokens=256",
    "logprob.py": "--tpu=v5e",
    "memory.py": "--topology=v5e:2x4 --model=qwen2.5-0.5b --rows=8 --columns=512",
    "one_program.py": "--topology=v5e:2x4 --steps=2 --rows=64",
    "plan_scaling.py": "--topologies=v5p:2x2x4",
    "tpu_decode.py": "--layers=1,2 --to=2",
    "tpu_learn.py": "--layers=2 --to=4",
}
WITH_OTHERS = {
    "decode_llama_cpp.py", "decode_rljax.py", "decode_transformers.py", "history.py", "peers.py",
    "plan_real.py", "real.py", "real_decoding.py", "real_rows.py", "real_tasks.py",
    "seeds_figure.py", "staleness_sweep.py",
}  # fmt: skip


def printed(name: str, options: str) -> str:
    """What a benchmark prints."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    command = [sys.executable, f"benchmarks/{name}", *options.split()]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def values(text: str) -> list:
    """The JSON values that stand in a text one after another."""
    found, text = [], text.strip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        found, text = [*found, value], text[end:].strip()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_in_its_smallest_form(name):
    found = values(printed(name, COMMANDS[name]))
    assert found and all(isinstance(value, dict | list) and value for value in found)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", OF_THE_COMPILER)
def test_a_benchmark_of_the_tpu_compiler_runs(name):
    pytest.importorskip("libtpu", reason='libtpu is absent: pip install "jax[tpu]"')
    assert values(printed(name, OF_THE_COMPILER[name]))


def test_every_benchmark_is_started_by_a_test():
    scripts = {p.name: p.read_text() for p in BENCHMARKS.glob("*.py")}
    started = {name for name, text in scripts.items() if "add_argument" in text}
    tested = {*COMMANDS, *OF_THE_COMPILER, *WITH_OTHERS}
    assert started - tested == {"accelerator_parts.py"} and tested <= set(scripts)
