"""Preference labels by a judge: rljax label preferences --data=FILE --out=pairs.jsonl
    --judge='my_judges.ask()' | --reward_model=FOLDER   [--policy=RUN_OR_MODEL_FOLDER]

FILE has rows of prompt and first + second, or completions; with --policy it has prompts, which that
policy answers. Every pair is judged in both orders; a judge whose answer turns with the order has
not answered. The pairs that are written are data.train of the dataflows preference and
reward_model.
"""

from rljax.config.policy_options import PreferenceOptions


def main(options: PreferenceOptions) -> None:
    """Labels the pairs and prints the counts."""
    from rljax.datagen.preferences import label_preferences

    for name, count in label_preferences(options).items():
        print(f"{name} {count:g}")
