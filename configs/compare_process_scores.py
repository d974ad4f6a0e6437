"""DQO from outcomes alone and with process scores, on answers of five steps.

python launchers/compare_offline.py --config=configs/compare_process_scores.py \\
    --out=runs/compare_process_scores --prompts=512 --process_samples=8

Why a longer answer: under the policy that sampled, the pass rate of a growing prefix is a
martingale. The scores from step j of N on sum up to (N - j + 1) (pass rate of prefix j - that of
the prompt) in the mean, so they point where the outcome points, only with less noise, and three
steps have little noise to lose: in configs/compare_offline.py 4 completions of each prefix gave
41.6 against 42.5 on two seeds, within intervals of +- 5. On six steps (running_sum(terms=7)) a base
of 300 steps was at chance (sampled 10.2 % on seed 0), where no method has anything to learn from.
The table of this config on three seeds: not measured.
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
