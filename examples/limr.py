"""A map for a data set of your own, in the form of LIMR's rows: {"prompt", "solution", "level"}.

rljax data prepare --source=examples/limr_sample.jsonl \
    --map="examples.limr.make_map_fn(split='train')" --data_source=limr --test_fraction=0.25 \
    --out=data/limr
"""

from rljax.rewards.answers.find import last_boxed

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def make_map_fn(split: str):
    """The map of one split, as verl's make_map_fn returns it."""

    def process(example: dict, index: int) -> dict | None:
        answer = last_boxed(example["solution"])
        if answer is None:
            return None  # no answer to compare with: the row is dropped, and counted
        return {
            "prompt": [{"role": "user", "content": f"{example['prompt']} {INSTRUCTION}"}],
            "ground_truth": answer,
            "ability": "math",
            "extra_info": {"level": example["level"], "split": split},
        }

    return process
