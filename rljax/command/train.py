"""Train: rljax train quickstart [--config.seed=1 ...]

Another --config.run_dir=DIR starts or resumes the run in DIR. Every field of rljax/config/schema.py
can be set. Exit code 0: finished; 2: an error that the message tells how to mend; 3: stopped by a
signal and saved, or finished but not all files could be kept; 130: Ctrl-C twice, nothing saved.
Of several hosts, 143: stopped by SIGTERM or the cloud, and saved; 170: nothing moved any more; 171:
another host failed. The same command goes on after each of these.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from rljax.command.launch import Given
from rljax.config import Config
from rljax.config.checks import refuse_early
from rljax.config.flags import load_config_file, shipped_config
from rljax.config.run_options import TrainOptions
from rljax.config.trust import asks, unscored, untrained, vouched
from rljax.errors import InputError
from rljax.files import is_whole_number, read_json_object
from rljax.runs.mirror import local_copy
from rljax.runs.store import Store, is_url
from rljax.runs.units import interval_text

# What is printed of the metrics of held-out rows, as far as the dataflow has them.
_HELD_OUT = ("loss", "accuracy", "token_accuracy", "rewards/accuracies", "rewards/margins")
# Where one host of several may lack a file, all hear of it, from validate, once they are connected.
_OF_SEVERAL = {"RLJAX_HOSTS", "TPU_WORKER_HOSTNAMES", "SLURM_NTASKS", "SKYPILOT_NUM_NODES"}


def main(options: TrainOptions, given: Given) -> int:
    """Trains, or with --dry_run shows what a run would begin with; returns the exit code."""
    if not options.dry_run:
        return train_and_tell(given, options.trust_code)[1]
    _refuse_early(given)
    from rljax.tracking.screen import Terminal
    from rljax.training.preview import preview

    preview(given.config, Terminal(), shipped=shipped_config(given.path or ""))
    _say("dry run: nothing was trained")
    return 0


def _refuse_early(given: Given) -> None:
    if not _OF_SEVERAL.intersection(os.environ):
        refuse_early(given.config)


def train_and_tell(given: Given, trust_code: bool = False) -> tuple:
    """Trains, and prints the results; returns (the TrainedRun, the exit code)."""
    _refuse_early(given)
    # Only now: a mistyped path is answered without loading JAX.
    from rljax.report.run_warnings import fault_lines
    from rljax.training import RunStopped
    from rljax.training.loop import train

    code = 3  # where not all files could be kept
    try:
        run = train(
            given.config,
            on_start=lambda folder: _say(f"run folder: {folder}"),
            shipped=shipped_config(given.path or ""),
        )
    except RunStopped as stop:
        run, code = stop.run, stop.code
    summary = run.summary
    for line in measured_lines(summary):
        _say(line)
    if "time_split" in summary:
        split = ", ".join(f"{name} {share:.0%}" for name, share in summary["time_split"].items())
        _say(f"steady step {summary['step_s']:.3f} s: {split}")
    counted = fault_lines(summary["faults"], summary["fault_steps"], summary["steps"])
    for warning in (*summary["warnings"], *counted):
        _say(f"warning: {warning}")
    _say(f"{summary['status']}: {summary['steps']} steps in {summary['wall_s']:.1f} s")
    finished = summary["status"] == "finished"
    _say("\n".join(next_steps(run.folder, given, finished, trust_code)))
    return run, 0 if finished else code


def _say(text: str) -> None:
    """Prints on the first host: what it says is of the whole run."""
    from rljax import hosts  # with JAX, which is there by now

    if hosts.first():
        print(text, flush=True)


def measured_lines(summary: Mapping) -> Iterator[str]:
    """Yields lines about the evaluations, each number with its step. "After the last update" is
    said of an evaluation that came after it."""
    first, steps = summary["sft_steps"], summary["steps"]
    last = summary["last_evaluation"] or {"step": first, "accuracy": None, "eval": None}
    came_after = steps - last["step"]
    behind = f"the last evaluation; steps taken since: {came_after}" if came_after else ""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before:
        yield f"accuracy_before: {_interval(before)}, at step {first}"
    if after:
        yield f"accuracy_after: {_interval(after)}, at step {steps}"
    elif behind and last["accuracy"] and last["step"] > first:
        yield f"accuracy: {_interval(last['accuracy'])}, at step {last['step']}, {behind}"
    elif before and steps > first:
        yield "accuracy_after: not measured after the last update"
    losses = {first: summary["eval_before"], last["step"]: last["eval"]}
    for step, metrics in sorted(losses.items()):
        if known := [
            f"{n} {metrics[f'eval/{n}']:.4g}" for n in _HELD_OUT if f"eval/{n}" in (metrics or {})
        ]:
            late = f", {behind}" if behind and step == last["step"] else ""
            yield f"held-out rows: {', '.join(known)}, at step {step}{late}"


def _interval(accuracy: Mapping) -> str:
    return f"{interval_text(accuracy)}, n={accuracy['n']}"


def next_steps(
    folder: Path | str, given: Given, finished: bool, trust_code: bool = False
) -> Iterator[str]:
    """Yields lines that name the files that a run has written, into a folder or a URL, and the
    commands that go on from there."""
    there, checkpoints = _written(folder)
    for name, path in (
        ("report", "report.html"),
        ("policy", "policy"),
        ("reward model", "reward_model"),
        ("checkpoint", f"checkpoints/{checkpoints[-1]}" if checkpoints else ""),
        ("rewards said", "rewards.log"),
    ):
        if path.partition("/")[0] in there:
            look = "  (open it in a browser)" if name == "report" else ""
            yield f"{name + ':':<14}{folder}/{path}{look}"
    if not finished:
        run_dir = f"--config.run_dir={folder}"
        others = given.config_arguments(trust_code=trust_code)
        others = [a for a in others if not a.startswith("--config.run_dir=")]
        yield f"{'resume:':<14}rljax train {shlex.join([*others, run_dir])}"
    if checkpoints and "policy" in there:
        more, trust = "", {}
        with local_copy(folder) as here:
            if (here / "config.json").is_file():
                made = load_config_file(str(here / "config.json"))
                if not vouched(made, f"{folder}/config.json", here):
                    used = {"evaluate": untrained(made), "serve": unscored(made)}
                    trust = {n: " --trust_code" for n, config in used.items() if asks(config)}
                more = _limits(made, here) + _left_to_say(made)
        quoted = shlex.quote(str(folder))
        yield f"{'evaluate:':<14}rljax evaluate {quoted}{trust.get('evaluate', '')}{more}"
        yield f"{'serve:':<14}rljax serve {quoted}{trust.get('serve', '')}"


def _left_to_say(config: Config) -> str:
    """The flags of `rljax evaluate` for what a run does not say: rows, where it held out none, and
    a reward, where only a model scored it."""
    from rljax.data.online.default_rewards import evaluation_text
    from rljax.data.rows.sources import load_prompts
    from rljax.data.rows.split import held_out_fraction
    from rljax.evaluation.saved import held_out_data, kind_of_data

    reward = "" if evaluation_text(config) else " --reward='exact_match()'"
    try:
        data = held_out_data(config)
        if data and kind_of_data(config) == "examples":  # which need no answers to be learned from
            load_prompts(data, "test", test_fraction=held_out_fraction(config, data))
    except InputError:
        data = ""
    if data:
        return reward
    why = "prompts with answers, which it was not trained on; it held out none"
    return f" --data=FILE{reward}  (FILE: {why})"


def _limits(config: Config, folder: Path) -> str:
    """The flags of `rljax evaluate` with which prompts and responses fit into the model's context:
    a run that samples nothing has not been held to it."""
    from rljax.data.kinds import SAMPLED
    from rljax.evaluation.saved import kind_of_data

    path = folder / "policy" / "config.json"
    values = read_json_object(path) if path.is_file() else {}
    context = values.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.sampler.max_response_tokens
    if not isinstance(context, int) or prompt + response <= context:
        return ""
    if config.evaluate.prompts_from or kind_of_data(config) in SAMPLED:
        return ""
    prompt = min(prompt, max(context // 2, context - response))
    return f" --max_prompt_tokens={prompt} --max_response_tokens={context - prompt}"


def _written(folder: Path | str) -> tuple[set[str], list[str]]:
    """Lists the files of a run folder, and the names of its checkpoints."""
    if is_url(folder):
        store = Store(str(folder))
        there = {name.partition("/")[0] for name in store.sizes()}
        return there, [name for name in store.folders("checkpoints") if is_whole_number(name)]
    there = {path.name for path in Path(folder).iterdir()}
    return there, sorted(p.name for p in Path(folder, "checkpoints").glob("[0-9]*"))
