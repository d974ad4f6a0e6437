"""Evaluate: python launchers/evaluate.py --checkpoint=RUN_OR_MODEL_FOLDER [--samples=8 --k=1,4,8]

Greedy accuracy, pass@k, best-of-k and majority@k with 95 % bootstrap intervals over prompts. What
is not set comes from the run's config.json; a Hugging Face folder needs --data and --reward.
"""

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", "", "A run folder, or a Hugging Face folder")
flags.DEFINE_string("step", "latest", "Of a run: latest, best, or the number of a checkpoint")
flags.DEFINE_string("data", None, "File or task; default: the run's held-out prompts")
flags.DEFINE_string("reward", None, "Reward function; default: the run's")
flags.DEFINE_integer("samples", 8, "Samples per prompt; 0 = greedy accuracy only")
flags.DEFINE_string("k", "1,4,8", "For pass@k, best-of-k and majority@k")
flags.DEFINE_integer("prompts", None, "The first so many prompts; default: the run's, or 256")
flags.DEFINE_float("temperature", None, "Of the samples; default: the run's, or 1.0")
flags.DEFINE_integer("max_prompt_tokens", None, "Default: the run's, or 512")
flags.DEFINE_integer("max_response_tokens", None, "Default: the run's, or 512")
flags.DEFINE_integer("seed", 0, "Of the samples")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")
flags.DEFINE_string("out", "", "Write the result to this file, as JSON")


def main(_: list[str]) -> int:
    from rljax.evaluation.saved import EvaluateOptions, evaluate_saved, parse_ks, write_result
    from rljax.tracking import compiles

    options = EvaluateOptions(
        checkpoint=_FLAGS.checkpoint,
        step=_FLAGS.step,
        data=_FLAGS.data,
        reward=_FLAGS.reward,
        samples=_FLAGS.samples,
        ks=parse_ks(_FLAGS.k),
        prompts=_FLAGS.prompts,
        temperature=_FLAGS.temperature,
        max_prompt_tokens=_FLAGS.max_prompt_tokens,
        max_response_tokens=_FLAGS.max_response_tokens,
        seed=_FLAGS.seed,
    )
    compiles.use_cache(_FLAGS.compilation_cache)
    result = evaluate_saved(options)
    _show(result)
    if _FLAGS.out:
        write_result(result, _FLAGS.out)
    return 0


def _show(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    step = "" if result["step"] is None else f", step {result['step']}"
    table = Table(title=f"{result['checkpoint']}{step}", title_justify="left")
    for column in ("metric", "value", "95 % interval", "prompts"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, value in result["metrics"].items():
        if isinstance(value, dict):
            interval = "[{low:.3f}, {high:.3f}]".format(**value)
            table.add_row(name, f"{value['value']:.3f}", interval, str(value["n"]))
        else:
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value), "", "")
    Console().print(table)


if __name__ == "__main__":
    launch.run(main, needs_config=False)
