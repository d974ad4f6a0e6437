"""DQO from outcomes alone and with process scores, on answers of five steps.

python launchers/compare_offline.py --config=configs/compare_process_scores.py \\
    --out=runs/compare_process_scores --prompts=512 --process_samples=8

not measured
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file

TASK = "running_sum(terms=6, worked_examples=3000)"


def get_config() -> Config:
    """The base policy of configs/compare_offline.py, on longer sums."""
    config = load_config_file(str(Path(__file__).with_name("compare_offline.py")))
    config.data.train = config.evaluate.prompts_from = TASK
    config.sampler.max_response_tokens, config.offline.max_tokens = 12, 26
    config.steps = 800
    return config


def methods():
    """The same dataflow with the same options: what differs is the rewards of the file."""
    shared = {
        "dataflow": "dqo(beta=0.1)", "actor_optimizer.lr": 1e-4, "critic_optimizer.lr": 2e-3,
    }  # fmt: skip
    yield {"name": "DQO", "rows": "outcome", **shared}
    yield {"name": "DQO w/ process scores", "rows": "process", **shared}
