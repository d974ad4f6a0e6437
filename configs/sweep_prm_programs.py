"""A sweep: PPO on program synthesis without and with a process reward model, in four settings.

python launchers/sweep.py --config=configs/sweep_prm_programs.py --out=runs/prm/sweep
python benchmarks/seeds_figure.py runs/prm/sweep --metrics=reward/mean,reward/best_of_k \\
    --figure=docs/process_rewards.svg

Neither, dense reward (DenseReward), the critic's first values (ValueInit), and both, on three seeds
each; the runs that come first are in configs/prm_programs.py. comparison.html in the folder of the
sweep has a curve for each setting, the mean of its seeds with an interval, and the differences.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file

SCORER = "runs/prm/scorer/reward_model"
SEEDS = (0, 1, 2)


def get_config(variant: str = "") -> Config:
    """PPO as in configs/prm_programs.py, in 60 steps of half the samples."""
    config = load_config_file(str(Path(__file__).with_name("prm_programs.py")))
    config.steps, config.checkpoint.every_steps = 60, 0
    config.batch.prompts_per_step, config.batch.sequences_per_optimizer_step = 16, 32
    return config


def sweep():
    """The four settings, each switch on its own, seed after seed."""
    for seed in SEEDS:
        for dense in ("", SCORER):
            for values in ("", SCORER):
                yield {"reward.process_model": dense, "critic_model": values, "seed": seed}
