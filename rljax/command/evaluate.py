"""Evaluate: rljax evaluate --checkpoint=RUN_OR_MODEL_FOLDER [--samples=8 --k=1,4,8]
rljax evaluate --checkpoint=RUN_OR_MODEL_FOLDER --suite=gsm8k,math500 [--out=results.json]

Greedy accuracy, pass@k, best-of-k and majority@k with 95 % bootstrap intervals over prompts. What
is not set comes from the run's config.json; a Hugging Face folder needs --data and --reward.

--length_buckets=100,200 adds pass@1 of the prompts with responses of up to 100 tokens, of up to
200, and of more. --against=RUN2 evaluates another policy on the same prompts, and prints how pass@1
differs, prompt by prompt, in all and by the length of the other policy's responses.

--suite runs benchmarks with the prompts, extractors and sampling that are published for them:
gsm8k, math500, aime24, aime25, mmlu_pro, ifeval, livecodebench, or a function of your own, each
with options in brackets: --suite="gsm8k(shots=8),ifeval(data='ifeval.jsonl')". --out gets every
prompt, response and score. docs/guides/evaluation.md says where prompts and extractors are from.
"""

import sys

from rljax.command.launch import print_table
from rljax.config.policy_options import EvaluateOptions
from rljax.report.run_warnings import MOST_TRUNCATED, too_many_truncated


def main(options: EvaluateOptions) -> None:
    """Evaluates a policy and prints its metrics."""
    from rljax.evaluation.benchmarks import evaluate_suites
    from rljax.evaluation.saved import evaluate_saved
    from rljax.files import write_json

    if options.suites:
        result = evaluate_suites(options)
        for suite in result["suites"]:
            details = (
                f"{suite['samples']} x {suite['prompts']} at temperature {suite['temperature']}"
            )
            _print(f"{suite['suite']}: {_title(result)}, {details}", suite["metrics"])
    else:
        result = evaluate_saved(options)
        _print(_title(result), result["metrics"])
        if options.against:
            _print(_title(result["against"]), result["against"]["metrics"])
            _print(f"{options.checkpoint} - {options.against}", result["difference"])
    if options.out:
        write_json(options.out, result)


def _title(result: dict) -> str:
    step = "" if result["step"] is None else f", step {result['step']}"
    return f"{result['checkpoint']}{step}"


def _print(title: str, metrics: dict) -> None:
    rows = [(name, *_cells(value)) for name, value in metrics.items()]
    print_table(("metric", "value", "95 % interval", "prompts"), rows, title)
    share = metrics.get("truncated_fraction", 0.0)
    share = share["value"] if isinstance(share, dict) else share
    if share > MOST_TRUNCATED:
        print(f"warning: {too_many_truncated(share)}", file=sys.stderr)


def _cells(value: dict | float | int) -> tuple[str, str, str]:
    if not isinstance(value, dict):
        return f"{value:.3f}" if isinstance(value, float) else str(value), "", ""
    return f"{value['value']:.3f}", "[{low:.3f}, {high:.3f}]".format(**value), str(value["n"])
