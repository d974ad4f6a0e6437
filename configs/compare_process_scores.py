"""DQO from outcomes alone and with process scores, on programs of three to six lines.

python launchers/compare_offline.py --config=configs/compare_process_scores.py \\
    --out=runs/compare_process_scores --prompts=512 --process_samples=8

Not measured.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file


def get_config() -> Config:
    """The base policy: `:start` of configs/prm_programs.py as one SFT, a little longer."""
    programs = load_config_file(str(Path(__file__).with_name("prm_programs.py")) + ":start")
    config = Config(dataflow="sft", steps=80, model=programs.model, trackers=())
    config.model_settings.remat = "none"
    config.data.train = config.evaluate.prompts_from = programs.data.train
    config.data.max_prompt_tokens = programs.data.max_prompt_tokens
    config.sampler.max_response_tokens = programs.sampler.max_response_tokens
    config.offline.examples_per_step, config.offline.max_tokens = 64, 38
    config.reward.function, config.reward.workers = "program_tests(passed=1, failed=0)", 1
    config.actor_optimizer.lr = config.critic_optimizer.lr = 2e-3
    config.actor_optimizer.warmup_steps = 10
    config.evaluate.prompts, config.checkpoint.every_steps = 256, 0
    return config


def methods():
    """The same dataflow with the same options: what differs is the rewards of the file."""
    shared = {
        "dataflow": "dqo(beta=0.1)", "actor_optimizer.lr": 3e-4, "critic_optimizer.lr": 2e-3,
    }  # fmt: skip
    yield {"name": "DQO", "rows": "outcome", **shared}
    yield {"name": "DQO w/ process scores", "rows": "process", **shared}
