"""Label steps: python launchers/label_steps.py --checkpoints=RUN@100,RUN@200 --out=FOLDER

Programs of each checkpoint (a run folder, RUN@STEP, or a Hugging Face folder), sampled on training
prompts; binary search finds the first line from which no completion by the same checkpoint passes
the tests. FOLDER/train.jsonl and test.jsonl are data for dataflow="process_reward_model":
--config.data.train=FOLDER --config.data.test=FOLDER. A Hugging Face folder needs --data, --reward.
"""

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_list("checkpoints", [], "Run folders, RUN@STEP, or Hugging Face folders")
flags.DEFINE_string("out", "", "Folder for train.jsonl, test.jsonl and labels.json")
flags.DEFINE_string("data", None, "File or task; default: the run's training prompts")
flags.DEFINE_string("reward", None, "Unit tests; default: the run's reward function")
flags.DEFINE_integer("prompts", 256, "Prompts drawn for each checkpoint")
flags.DEFINE_integer("programs_per_prompt", 4, "Programs sampled per prompt")
flags.DEFINE_integer("completions", 20, "At most so many completions of each prefix")
flags.DEFINE_float("held_out", 0.1, "Share of the prompts whose rows go to test.jsonl")
flags.DEFINE_enum("neutral", "zero", ["zero", "drop", "inherit"], "Labels of blank lines, comments")
flags.DEFINE_boolean("code_only", False, "Lines of the last fenced block alone")
flags.DEFINE_boolean("replay", False, "Ask every probe once more, to see how far it can be trusted")
flags.DEFINE_float("temperature", None, "Of programs and completions; default: the run's, or 1.0")
flags.DEFINE_integer("max_prompt_tokens", None, "Default: the run's, or 512")
flags.DEFINE_integer("max_response_tokens", None, "Default: the run's, or 512")
flags.DEFINE_integer("rows_at_once", 256, "Sequences sampled together")
flags.DEFINE_integer("seed", 0, "Of prompts, programs and completions")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")


def main(_: list[str]) -> int:
    from rljax.datagen.steps import LabelOptions, label_saved
    from rljax.tracking import compiles

    names = LabelOptions.__dataclass_fields__
    chosen = {name: _FLAGS[name].value for name in names}
    compiles.use_cache(_FLAGS.compilation_cache)
    result = label_saved(LabelOptions(**{**chosen, "checkpoints": tuple(_FLAGS.checkpoints)}))
    _show(result)
    return 0


def _show(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    found = result["checkpoints"]
    table = Table()
    for column in ("metric", *found):
        table.add_column(column, overflow="fold")
    for name in next(iter(found.values())):
        table.add_row(name, *(f"{one[name]:.4g}" for one in found.values()))
    Console().print(table)
    counts = ", ".join(f"{count} rows in {name}.jsonl" for name, count in result["rows"].items())
    print(f"{result['options']['out']}: {counts}; {result['wall_s']:.0f} s")


if __name__ == "__main__":
    launch.run(main, needs_config=False)
