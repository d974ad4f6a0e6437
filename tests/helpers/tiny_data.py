"""A parquet file in verl's GSM8K schema, with sums in place of the published questions."""

from pathlib import Path

import pyarrow
import pyarrow.parquet


def gsm8k_row(i: int) -> dict:
    question = f"Natalia sold {i} clips in April and {i + 1} in May. How many did she sell?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
        "extra_info": {"split": "train", "index": i, "question": question},
    }


def write_gsm8k_parquet(path, n: int) -> Path:
    """Writes `n` rows; returns the path."""
    rows = [gsm8k_row(i) for i in range(n)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    return Path(path)
