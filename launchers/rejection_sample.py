"""Rejection sampling: python launchers/rejection_sample.py --checkpoint=RUN_OR_MODEL_FOLDER
--out=best.jsonl [--samples=8 --select=best --min_reward=0]

Samples, scores and selects; dataflow="sft" reads the file as data.train. --pairs and --trajectories
write what DPO, KTO, DRO and DQO read. With --iterations=N and --config (how SFT trains) it is RAFT:
sample, select, SFT, N times, in the folder --out.
"""

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", "", "A run folder, or a Hugging Face folder")
flags.DEFINE_string("out", "", "The .jsonl file of examples; with --iterations, a folder")
flags.DEFINE_string("step", "latest", "Of a run: latest, best, or the number of a checkpoint")
flags.DEFINE_string("data", None, "File or task with prompts; default: the run's")
flags.DEFINE_string("split", "train", "Of the data")
flags.DEFINE_string("reward", None, "Reward function; default: the run's")
flags.DEFINE_integer("samples", 8, "Per prompt")
flags.DEFINE_integer("prompts", None, "The first so many prompts; default: all")
flags.DEFINE_float("temperature", None, "Default: the run's, or 1.0")
flags.DEFINE_integer("max_prompt_tokens", None, "Default: the run's, or 512")
flags.DEFINE_integer("max_response_tokens", None, "Default: the run's, or 512")
flags.DEFINE_enum("select", "best", ["best", "top_k", "threshold"], "What is kept of a prompt")
flags.DEFINE_integer("top_k", 1, "With --select=top_k")
flags.DEFINE_float("min_reward", None, "Keep only rewards above it")
flags.DEFINE_integer("per_prompt", 0, "Keep at most so many of a prompt; 0 = no cap")
flags.DEFINE_boolean("dedup", True, "Of equal texts to a prompt keep one")
flags.DEFINE_boolean("keep_truncated", False, "Completions without an end may be kept")
flags.DEFINE_string("pairs", "", "Write best and worst of every prompt here, ties dropped")
flags.DEFINE_string("trajectories", "", "Write every sample, reward and log-probs here")
flags.DEFINE_integer("process_samples", 0, "Completions per prefix for process scores; 0 = none")
flags.DEFINE_integer("seed", 0, "Of the samples")
flags.DEFINE_integer("iterations", 0, "RAFT: so many rounds of sampling and SFT")
flags.DEFINE_integer("epochs", 1, "RAFT: of SFT on each selection")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")


def main(_: list[str]) -> int:
    import dataclasses

    from rljax.datagen.rejection import RejectionOptions, raft, rejection_sample
    from rljax.errors import InputError
    from rljax.tracking import compiles

    names = [field.name for field in dataclasses.fields(RejectionOptions)]
    options = RejectionOptions(**{name: _FLAGS[name].value for name in names})
    compiles.use_cache(_FLAGS.compilation_cache)
    if not _FLAGS.iterations:
        _show([rejection_sample(options)])
        return 0
    config = launch.parsed_config()
    if config is None or not _FLAGS.out:
        raise InputError("RAFT trains", fix="--config says how, --out names its folder")
    options = dataclasses.replace(options, out="")
    iterations, epochs = _FLAGS.iterations, _FLAGS.epochs
    _show(raft(config, options, _FLAGS.out, iterations=iterations, epochs=epochs))
    return 0


def _show(metas: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=metas[-1]["files"]["examples"]["file"], title_justify="left")
    table.add_column("metric")
    for i in range(len(metas)):
        table.add_column("value" if len(metas) == 1 else f"iteration {i}", justify="right")
    for name in metas[0]["metrics"]:
        table.add_row(name, *(f"{meta['metrics'][name]:.4g}" for meta in metas))
    for kind in metas[0]["files"]:
        table.add_row(f"rows of {kind}", *(str(meta["files"][kind]["rows"]) for meta in metas))
    Console().print(table)


if __name__ == "__main__":
    launch.run(main, needs_config=False)
