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

from rljax.command.launch import ConfigSource
from rljax.config import Config
from rljax.config.checks import refuse_early
from rljax.config.flags import load_config_file, shipped_config
from rljax.config.run_options import TrainOptions
from rljax.config.trust import asks, unscored, untrained, vouched
from rljax.errors import InputError
from rljax.files import is_whole_number, read_json_object
from rljax.runs.folder import exported_steps
from rljax.runs.mirror import local_copy
from rljax.runs.store import Store, is_url
from rljax.runs.units import interval_text

# Metrics of held-out rows that are printed, as far as the dataflow has them.
_HELD_OUT = ("loss", "accuracy", "token_accuracy", "rewards/accuracies", "rewards/margins")
# Variables of runs of several hosts. One of these may lack a file; validate tells all of them, once
# they are connected.
_SEVERAL_HOSTS = {"RLJAX_HOSTS", "TPU_WORKER_HOSTNAMES", "SLURM_NTASKS", "SKYPILOT_NUM_NODES"}


def main(options: TrainOptions, source: ConfigSource) -> int:
    """Trains, or with --dry_run shows what a run would begin with; returns the exit code."""
    if not options.dry_run:
        return train_and_tell(source, options.trust_code)[1]
    _refuse_early(source)
    from rljax.tracking.screen import Terminal
    from rljax.training.preview import preview

    preview(source.config, Terminal(), shipped=shipped_config(source.path or ""))
    _say("dry run: nothing was trained")
    return 0


def _refuse_early(source: ConfigSource) -> None:
    if not _SEVERAL_HOSTS.intersection(os.environ):
        refuse_early(source.config)


def train_and_tell(source: ConfigSource, trust_code: bool = False) -> tuple:
    """Trains, and prints the results; returns (the TrainedRun, the exit code)."""
    _refuse_early(source)
    # Only now: a mistyped path is answered without loading JAX.
    from rljax.report.run_warnings import fault_lines
    from rljax.training import RunStopped
    from rljax.training.loop import train

    code = 3  # where not all files could be kept
    try:
        run = train(
            source.config,
            on_start=lambda folder: _say(f"run folder: {folder}"),
            shipped=shipped_config(source.path or ""),
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
    _say("\n".join(next_steps(run.folder, source, finished, trust_code)))
    return run, 0 if finished else code


def _say(text: str) -> None:
    """Prints on the first host alone: the text is about the whole run."""
    from rljax import hosts  # with JAX, which is there by now

    if hosts.first():
        print(text, flush=True)


def measured_lines(summary: Mapping) -> Iterator[str]:
    """Yields lines about the evaluations, each number with its step. "After the last update" is
    said of an evaluation that came after it."""
    first_step, steps = summary["sft_steps"], summary["steps"]
    unmeasured = {"step": first_step, "accuracy": None, "eval": None}
    evaluation = summary["last_evaluation"] or unmeasured
    last_step, last_accuracy = evaluation["step"], evaluation["accuracy"]
    came_after = steps - last_step
    behind = f"the last evaluation; steps taken since: {came_after}" if came_after else ""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before:
        yield f"accuracy_before: {_interval(before)}, at step {first_step}"
    if after:
        yield f"accuracy_after: {_interval(after)}, at step {steps}"
    elif behind and last_accuracy and last_step > first_step:
        yield f"accuracy: {_interval(last_accuracy)}, at step {last_step}, {behind}"
    elif before and steps > first_step:
        yield "accuracy_after: not measured after the last update"
    losses = {first_step: summary["eval_before"], last_step: evaluation["eval"]}
    for step, metrics in sorted(losses.items()):
        if shown_metrics := [
            f"{name} {metrics[f'eval/{name}']:.4g}"
            for name in _HELD_OUT
            if f"eval/{name}" in (metrics or {})
        ]:
            behind_text = f", {behind}" if behind and step == last_step else ""
            yield f"held-out rows: {', '.join(shown_metrics)}, at step {step}{behind_text}"


def _interval(accuracy: Mapping) -> str:
    return f"{interval_text(accuracy)}, n={accuracy['n']}"


def next_steps(
    folder: Path | str, source: ConfigSource, finished: bool, trust_code: bool = False
) -> Iterator[str]:
    """Yields lines that name the files that a run has written, into a folder or a URL, and the
    commands that go on from there."""
    files, checkpoints = _written_files(folder)
    older = _older_exports(folder)
    for name, path in (
        ("report", "report.html"),
        ("policy", "policy"),
        ("reward model", "reward_model"),
        ("checkpoint", f"checkpoints/{checkpoints[-1]}" if checkpoints else ""),
        ("rewards said", "rewards.log"),
    ):
        if path.partition("/")[0] in files:
            note = "  (open it in a browser)" if name == "report" else ""
            note = f"  (of step {older[path]})" if path in older else note
            yield f"{name + ':':<14}{folder}/{path}{note}"
    if not finished:
        run_dir = f"--config.run_dir={folder}"
        arguments = source.config_arguments(trust_code=trust_code)
        arguments = [a for a in arguments if not a.startswith("--config.run_dir=")]
        yield f"{'resume:':<14}rljax train {shlex.join([*arguments, run_dir])}"
    if checkpoints and "policy" in files:
        flags, trust = "", {}
        with local_copy(folder) as local_folder:
            if (local_folder / "config.json").is_file():
                saved = load_config_file(str(local_folder / "config.json"))
                if not vouched(saved, f"{folder}/config.json", local_folder):
                    configs = {"evaluate": untrained(saved), "serve": unscored(saved)}
                    trust = {n: " --trust_code" for n, config in configs.items() if asks(config)}
                flags = _limit_flags(saved, local_folder) + _missing_flags(saved)
        quoted = shlex.quote(str(folder))
        yield f"{'evaluate:':<14}rljax evaluate {quoted}{trust.get('evaluate', '')}{flags}"
        yield f"{'serve:':<14}rljax serve {quoted}{trust.get('serve', '')}"


def _older_exports(folder: Path | str) -> dict[str, int]:
    """Returns {folder: step} of the models that an earlier end of the run has exported."""
    with local_copy(folder) as local_folder:
        path = local_folder / "summary.json"
        summary = read_json_object(path) if path.is_file() else {}
    exported = exported_steps(summary) or {}
    return {name: step for name, step in exported.items() if step != summary.get("steps")}


def _missing_flags(config: Config) -> str:
    """Returns the flags of `rljax evaluate` that a run does not determine: rows, where it held out
    none, and a reward, where only a model scored it."""
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
    explanation = "prompts with answers, which it was not trained on; it held out none"
    return f" --data=FILE{reward}  (FILE: {explanation})"


def _limit_flags(config: Config, folder: Path) -> str:
    """Returns the flags of `rljax evaluate` with which prompts and responses fit into the model's
    context: a run that samples nothing has not been held to it."""
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


def _written_files(folder: Path | str) -> tuple[set[str], list[str]]:
    """Returns (the names in a run folder, the names of its checkpoints)."""
    if is_url(folder):
        store = Store(str(folder))
        files = {name.partition("/")[0] for name in store.sizes()}
        return files, [name for name in store.folders("checkpoints") if is_whole_number(name)]
    files = {path.name for path in Path(folder).iterdir()}
    return files, sorted(p.name for p in Path(folder, "checkpoints").glob("[0-9]*"))
