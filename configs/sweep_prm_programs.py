"""A sweep: PPO on program synthesis without and with a process reward model, in four settings.

python launchers/sweep.py --config=configs/sweep_prm_programs.py --out=runs/prm/sweep
python benchmarks/seeds_figure.py runs/prm/sweep --figure=docs/process_rewards.svg \\
    --metrics=reward/part/all_passed,reward/best_of_k

Neither, dense reward (DenseReward), the critic's first values (ValueInit), and both, on three seeds
each; the runs that come first are in configs/prm_programs.py. comparison.html in the folder of the
sweep has a curve for each setting, the mean of its seeds with an interval, and the differences.

This sweep has not been run to its end: only seed 0 without a process reward model (40 steps; see
configs/prm_programs.py), and 30 steps of seed 0 with first values, in which the share of samples
that pass, averaged over five steps at a time, differed by at most 0.010.

What was run in full is an earlier toy (2 CPU cores, 2026-11-24): max_constant=9, a start of which
3.6 % of the samples pass, a scorer with the right sign on 0.63 of the lines of held-out prompts,
lr 3e-4, 60 steps of 16 x 4 samples. docs/process_rewards.svg has its four curves. There is no
effect to see, as all settings lose what they started with. Means over seeds of the last 20 steps
with Student's 95 % interval, the difference to "neither", seed by seed, and the seeds that would
settle a difference of this size (80 % power, from the measured spread):

                 samples that pass         best of 4 (-1 to 1)       difference, best of 4    seeds
neither          0.016 [-0.030, 0.061]     -0.912 [-1.167, -0.658]
first values     0.003 [-0.032, 0.038]     -0.981 [-1.219, -0.743]   -0.113 [-1.224, 0.999]      10
dense            0.002 [-0.002, 0.006]     -0.992 [-1.015, -0.968]   -0.079 [-0.315, 0.157]      12
both             0.012 [-0.016, 0.039]     -0.937 [-1.065, -0.810]   -0.025 [-0.298, 0.248]     152

(first values: 2 seeds, the third was stopped at step 49; the others 3.)
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file

SCORER = "runs/prm/scorer/reward_model"
SEEDS = (0, 1, 2)


def get_config(variant: str = "") -> Config:
    """PPO as in configs/prm_programs.py, in 40 steps."""
    config = load_config_file(str(Path(__file__).with_name("prm_programs.py")))
    config.steps, config.checkpoint.every_steps = 40, 0
    return config


def sweep():
    """The four settings, each switch on its own, seed after seed."""
    for seed in SEEDS:
        for dense in ("", SCORER):
            for values in ("", SCORER):
                yield {"reward.process_model": dense, "critic_model": values, "seed": seed}
