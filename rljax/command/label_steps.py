"""Label steps: rljax label steps --checkpoints=RUN@100,RUN@200 --out=FOLDER

Programs of each checkpoint (a run folder, RUN@STEP, or a Hugging Face folder), sampled on training
prompts; binary search finds the first line from which no completion by the same checkpoint passes
the tests. With --search="mcts(simulations=32)" the programs are those that a tree search comes to,
and a line's label is 2 W / N - 1 of the N scored responses that begin so, of which W pass.
FOLDER/train.jsonl and test.jsonl are data for dataflow="process_reward_model":
--config.data.train=FOLDER --config.data.test=FOLDER. A Hugging Face folder needs --data, --reward.
"""

from rljax.command.launch import print_table
from rljax.config.policy_options import LabelOptions


def main(options: LabelOptions) -> None:
    """Labels the lines and prints the metrics of each checkpoint."""
    from rljax.datagen.saved_labels import label_saved

    result = label_saved(options)
    metrics = result["checkpoints"]
    names = next(iter(metrics.values()))
    rows = [(name, *(f"{values[name]:.4g}" for values in metrics.values())) for name in names]
    print_table(("metric", *metrics), rows)
    counts = ", ".join(f"{count} rows in {name}.jsonl" for name, count in result["rows"].items())
    print(f"{options.out}: {counts}; {result['wall_s']:.0f} s")
