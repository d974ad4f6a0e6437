"""Score steps: python launchers/score_steps.py --reward_model=RUN/reward_model --data=FOLDER

A process reward model on labelled lines, such as launchers/label_steps.py writes: mean squared
error and sign accuracy over all rows of a split, and for the first rows each line beside its score.
"""

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch

_FLAGS = flags.FLAGS
flags.DEFINE_string("reward_model", "", "A folder of a process reward model")
flags.DEFINE_string("data", "", "File or folder of rows with completions and labels")
flags.DEFINE_string("split", "test", "Of the data: train or test")
flags.DEFINE_integer("show", 4, "Print a table of lines for the first so many rows")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")
flags.DEFINE_string("out", "", "Write the result to this file, as JSON")


def main(_: list[str]) -> int:
    from rich.console import Console

    from rljax.errors import InputError
    from rljax.evaluation.process_models import evaluate_scorer, score_table
    from rljax.evaluation.saved import write_result
    from rljax.tracking import compiles

    for name in ("reward_model", "data"):
        if not _FLAGS[name].value:
            raise InputError(f"--{name} is not set", fix=f"--{name}=FOLDER")
    compiles.use_cache(_FLAGS.compilation_cache)
    result = evaluate_scorer(_FLAGS.reward_model, _FLAGS.data, split=_FLAGS.split)
    for row in result["rows"][: max(_FLAGS.show, 0)]:
        print(row["prompt"])
        Console().print(score_table(row["lines"], row["scores"], row["labels"]))
    for name, value in result["metrics"].items():
        print(f"{name}: {value:.4g}")
    if _FLAGS.out:
        write_result(result, _FLAGS.out)
    return 0


if __name__ == "__main__":
    launch.run(main, needs_config=False)
