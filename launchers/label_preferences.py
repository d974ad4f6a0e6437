"""Preference labels by a judge: python launchers/label_preferences.py --data=FILE --out=pairs.jsonl
    --judge='my_judges.ask()' | --reward_model=FOLDER   [--policy=RUN_OR_MODEL_FOLDER]

FILE has rows of prompt and first + second, or completions; with --policy it has prompts, which that
policy answers. Every pair is asked in both orders; a judge whose answer turns with the order has
not answered. What is written is data.train of the dataflows preference and reward_model.
"""

from absl import flags

from rljax.config import Config
from rljax.config import flags as launch
from rljax.errors import InputError

_FLAGS = flags.FLAGS
flags.DEFINE_string("data", "", "Rows to compare, or prompts where --policy is set")
flags.DEFINE_string("judge", "", "judge(prompt, first, second) -> P(first is better), as text")
flags.DEFINE_string("reward_model", "", "A reward model's folder, in place of a judge")
flags.DEFINE_string("out", "", "Where the pairs are written, jsonl")
flags.DEFINE_string("policy", "", "Who answers: a run folder, or a Hugging Face folder")
flags.DEFINE_integer("samples", 2, "Completions per prompt; all pairs of them are compared")
flags.DEFINE_float("temperature", 1.0, "Of the samples")
flags.DEFINE_integer("max_prompt_tokens", 512, "Longer prompts are dropped")
flags.DEFINE_integer("max_response_tokens", 512, "Of the samples")
flags.DEFINE_integer("max_tokens", 4096, "Prompt and completion, for --reward_model")
flags.DEFINE_enum("ties", "drop", ["drop", "keep"], "Pairs on which the orders do not agree")
flags.DEFINE_integer("workers", 2, "Processes of the judge")
flags.DEFINE_float("timeout_s", 60.0, "Of one judgement; then its process is killed")
flags.DEFINE_integer("seed", 0, "Of the samples")
flags.DEFINE_string("compilation_cache", Config().compilation_cache, "A folder; empty = off")


def main(_: list[str]) -> int:
    missing = [f"--{name}" for name in ("data", "out") if not _FLAGS[name].value]
    if missing:
        raise InputError(f"{' and '.join(missing)} is not set")
    if bool(_FLAGS.judge) == bool(_FLAGS.reward_model):
        raise InputError("exactly one of --judge and --reward_model says who labels")
    from rljax.datagen import preferences as rlaif
    from rljax.evaluation.saved import load_policy
    from rljax.tracking import compiles

    compiles.use_cache(_FLAGS.compilation_cache)
    if _FLAGS.judge:
        judge = rlaif.text_judge(_FLAGS.judge, workers=_FLAGS.workers, timeout_s=_FLAGS.timeout_s)
    else:
        judge = rlaif.model_judge(_FLAGS.reward_model, max_tokens=_FLAGS.max_tokens)
    if _FLAGS.policy:
        comparisons = rlaif.sample_comparisons(
            load_policy(_FLAGS.policy),
            _FLAGS.data,
            samples=_FLAGS.samples,
            temperature=_FLAGS.temperature,
            max_prompt_tokens=_FLAGS.max_prompt_tokens,
            max_response_tokens=_FLAGS.max_response_tokens,
            seed=_FLAGS.seed,
        )
    else:
        comparisons = rlaif.load_comparisons(_FLAGS.data)
    rows, counts = rlaif.label(comparisons, judge, ties=_FLAGS.ties)
    rlaif.write_pairs(rows, _FLAGS.out)
    for name, count in counts.items():
        print(f"{name} {count:g}")
    return 0


if __name__ == "__main__":
    launch.run(main, needs_config=False)
