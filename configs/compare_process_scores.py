"""DQO from outcomes alone and with process scores, on programs of three to six lines.

rljax compare --config=compare_process_scores \\
    --out=runs/compare_process_scores --prompts=512 --process_samples=8

Under the policy that sampled, the pass rate of a growing prefix is a martingale. The scores from
step j of N on sum up to (N - j + 1) (pass rate of prefix j - that of the prompt) in the mean, so
they point where the outcome points, with other noise and a larger size.

Measured 2026-11-24, seeds 0, 1 and 2, 256 held-out prompts, 8 samples each; accuracy in % of each
seed and the mean; one of 2 CPU cores shared with other work (load 13 to 16), 2 minutes a seed:

    method                  sampled                    greedy
    base                    60.0  32.1  81.4   57.8    88.3  64.8  98.4   83.9
    DQO                     79.8  53.3  89.9   74.3    96.5  81.6  98.8   92.3
    DQO w/ process scores   79.2  54.1  90.1   74.5    96.5  80.5  99.2   92.1

Process scores neither help nor hurt here: the difference, seed by seed, is 0.11 [-1.59, 1.81]
sampled and -0.26 [-2.28, 1.76] greedy (Student's 95 % interval). If that were the effect, about 300
and 79 seeds would settle it (80 % power, from the measured spread).

Chosen on seed 9, which the table leaves out (base 22.3 sampled), where process scores are better
with small steps and worse with large ones: beta 0.3 with lr 1e-4 43.8 from outcomes and 44.8 with
process scores, with lr 3e-4 53.2 and 53.4; beta 0.1 with lr 3e-4 60.5 and 51.3, of 96 prompts with
16 completions 27.8 and 12.4; beta 0.3 with lr 3e-4 on 128 prompts of 16 samples 47.7 and 36.6;
lam=0.9 with beta 0.1 and lr 3e-4 50.7 and 49.7. A likely cause, not shown: the critic explains
nothing of the returns with process scores within 100 steps (explained variance below 0.01, from
outcomes 0.05 to 0.11), so that a return that is several times as large also moves tokens that
decide nothing.
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
    shared = {"dataflow": "dqo(beta=0.3)", "actor_optimizer.lr": 1e-4, "critic_optimizer.lr": 2e-3}
    yield {"name": "DQO", "rows": "outcome", **shared}
    yield {"name": "DQO w/ process scores", "rows": "process", **shared}
