"""A sweep: PPO on program synthesis without and with a process reward model, in four settings.

rljax sweep sweep_prm_programs --out=runs/prm/sweep
python benchmarks/seeds_figure.py runs/prm/sweep --figure=docs/figures/process_rewards.svg \\
    --metrics=reward/part/all_passed,reward/best_of_k

Neither, dense reward (DenseReward), the critic's first values (ValueInit), and both, on three seeds
each; the runs that come first are in configs/prm_programs.py. comparison.html in the folder of the
sweep has a curve for each setting, the mean of its seeds with an interval, and the differences.

Measured 2026-11-24, one of 2 CPU cores shared with other work (load 8 to 13; about 40 s a run),
with the reward model of configs/prm_programs.py. docs/figures/process_rewards.svg has the four
curves. Means over three seeds with Student's 95 % interval, the difference to "neither", seed by
seed, and the seeds that would settle a difference of this size (80 % power, from the measured
spread). The best of 4 is a reward, from -1 to 1, on the training prompts of the step:

samples that pass    mean of all 60 steps    difference              seeds   last 20 steps
neither              0.334 [0.316, 0.352]                                    0.527 [0.525, 0.529]
first values         0.344 [0.327, 0.360]    0.010 [-0.008, 0.028]       7   0.536 [0.502, 0.570]
dense                0.369 [0.351, 0.387]    0.035 [0.027, 0.042]        3   0.565 [0.555, 0.575]
both                 0.373 [0.351, 0.396]    0.039 [0.018, 0.060]        3   0.580 [0.528, 0.632]

best of 4
neither              0.284 [0.253, 0.315]                                    0.703 [0.635, 0.771]
first values         0.307 [0.218, 0.395]    0.023 [-0.060, 0.106]      20   0.712 [0.593, 0.830]
dense                0.359 [0.280, 0.438]    0.075 [0.007, 0.144]        4   0.750 [0.649, 0.851]
both                 0.366 [0.302, 0.429]    0.082 [0.023, 0.140]        3   0.781 [0.652, 0.911]

So dense rewards help and both help most; that first values alone do is not shown on three seeds.
How far `:start` is trained, lr and steps were chosen on seed 9, which the table leaves out. With a
start of which 0.16 pass, lr 1e-4 and 40 steps "both" is above "neither", too, on seeds 0 to 2: in
the last 10 steps by 0.017 [0.002, 0.032] of the samples and 0.033 [0.015, 0.051] of the best of 4.

By the length of the response (3 to 6 lines are 9 to 18 tokens), pass@1 of "both" minus that of
"neither" at the end, on the same 256 held-out prompts, 16 samples each: seeds 0, 1, 2 and mean

rljax evaluate runs/prm/sweep/BOTH --against=runs/prm/sweep/NEITHER --samples=16 \\
    --length_buckets=10,13,16

                                           difference            seeds
up to 10 tokens      -0.007, 0.019, 0.023     0.012 [-0.029, 0.052]    18
11 to 13             -0.014, 0.035, 0.048     0.023 [-0.058, 0.104]    18
14 to 16              0.009, 0.010, 0.055     0.025 [-0.041, 0.090]    11
more than 16          0.032, -0.001, 0.113    0.048 [-0.098, 0.194]    14

The mean gain grows with the length; three seeds do not tell it from 0 in any of the buckets.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file

SCORER = "runs/prm/scorer/reward_model"
SEEDS = (0, 1, 2)


def get_config(variant: str = "") -> Config:
    """PPO as in configs/prm_programs.py, in 60 steps."""
    config = load_config_file(str(Path(__file__).with_name("prm_programs.py")))
    config.steps, config.checkpoint.every_steps = 60, 0
    return config


def sweep():
    """The four settings, each switch on its own, seed after seed."""
    for seed in SEEDS:
        for dense in ("", SCORER):
            for values in ("", SCORER):
                yield {"reward.process_model": dense, "critic_model": values, "seed": seed}
