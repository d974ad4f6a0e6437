"""Score steps: rljax score steps --reward_model=RUN/reward_model --data=FOLDER

A process reward model on labelled lines, such as `rljax label steps` writes: mean squared
error and sign accuracy over all rows of a split, and for the first rows each line beside its score.
"""

from rljax.config.policy_options import ScoreOptions


def main(options: ScoreOptions) -> None:
    """Scores the lines and prints the metrics."""
    from rljax.evaluation.process_models import evaluate_scorer, score_table
    from rljax.files import write_json
    from rljax.tracking.screen import Terminal

    result = evaluate_scorer(options.reward_model, options.data, split=options.split)
    for row in result["rows"][: options.show]:
        print(row["prompt"])
        Terminal().print(score_table(row["lines"], row["scores"], row["labels"]))
    for name, value in result["metrics"].items():
        print(f"{name}: {value:.4g}")
    if options.out:
        write_json(options.out, result)
