"""Evaluate: rljax evaluate --checkpoint=RUN_OR_MODEL_FOLDER [--samples=8 --k=1,4,8]

Greedy accuracy, pass@k, best-of-k and majority@k with 95 % bootstrap intervals over prompts. What
is not set comes from the run's config.json; a Hugging Face folder needs --data and --reward.
"""

from rljax.command.launch import print_table
from rljax.config.options import EvaluateOptions


def main(options: EvaluateOptions) -> None:
    from rljax.evaluation.saved import evaluate_saved
    from rljax.files import write_json

    result = evaluate_saved(options)
    step = "" if result["step"] is None else f", step {result['step']}"
    rows = [(name, *_cells(value)) for name, value in result["metrics"].items()]
    columns = ("metric", "value", "95 % interval", "prompts")
    print_table(columns, rows, f"{result['checkpoint']}{step}")
    if options.out:
        write_json(options.out, result)


def _cells(value: dict | float | int) -> tuple[str, str, str]:
    if not isinstance(value, dict):
        return f"{value:.3f}" if isinstance(value, float) else str(value), "", ""
    return f"{value['value']:.3f}", "[{low:.3f}, {high:.3f}]".format(**value), str(value["n"])
