"""Pipeline: rljax pipeline pipelines/post_training [--config.seed=1 ...]

Runs the stages that the config file's pipeline() yields, or the list `pipeline` of a JSON or YAML
file holds, each from what the ones before it made:
train, sample, label preferences, label steps, evaluate. OUT/lineage.json says of every stage what
it was made of, by SHA-256, and pipeline.html shows it. The same command again goes on: finished
stages are kept, and an interrupted run resumes at its last checkpoint. A stage whose settings or
input files have changed is refused by name; --redo=STAGE makes it and what reads it again.
--dry_run checks the stages and prints the command of each.
"""

import shlex
import time
from pathlib import Path

from rljax.command.launch import ConfigSource
from rljax.config.flags import is_data, listed, split_config
from rljax.config.run_options import PipelineOptions
from rljax.runs.units import interval_text


def main(options: PipelineOptions, source: ConfigSource) -> int:
    """Runs the stages; returns the exit code."""
    from rljax.experiments.pipeline import run_stages
    from rljax.experiments.stages import make_stages
    from rljax.experiments.sweep import Stopped, require_unset
    from rljax.report.pipeline import PAGE
    from rljax.tracking import compiles

    file, variant = split_config(source.path)
    fix = 'define pipeline() that yields {"stage": "sft", "command": "train", ...} for each'
    entries = listed(source.path, "pipeline", fix, variant)
    trusted = options.trust_code or not is_data(source.path)
    arguments = source.config_arguments(trust_code=options.trust_code)
    folder = Path(options.out or Path("runs") / Path(file).stem)
    made_with = (arguments, trusted, source.fields)
    stages = make_stages(source.config, entries, folder, source.path, *made_with)
    trained = [(stage.name, stage.values) for stage in stages if stage.config is not None]
    require_unset(source.fields, trained, "stage", source.path)
    if options.dry_run:
        for stage in stages:
            print(f"{stage.name}: {shlex.join(stage.command_line())}")
        return 0
    compiles.use_cache(source.config.compilation_cache)
    stage_started = time.monotonic()
    try:
        for stage, record, was_finished in run_stages(stages, source.path, options.redo):
            seconds = f"{time.monotonic() - stage_started:.0f} s"
            state = "was finished" if was_finished else seconds
            print(f"{stage.name}: {state}{_score(record['metrics'])}", flush=True)
            stage_started = time.monotonic()
    except Stopped as signal:
        print(f"stopped by {signal}; the same command goes on")
        return 3
    print(folder / PAGE)
    return 0


def _score(metrics: dict) -> str:
    for name in ("greedy_accuracy", "accuracy_after", "accuracy_before"):
        if isinstance(metrics.get(name), dict):
            return f", accuracy {interval_text(metrics[name])}"
    return ""
