"""Process supervision on program synthesis: PPO with a process reward model (arXiv 2410.17621).

The task: "3>5,>4,>8,,,,,,,,,,:" -> "+2\\n-1\\n+4", a program of 3 to 6 lines in a tiny language
that makes of 3 what the prompt says, line by line, judged by unit tests as a whole (-1 or +1). A
process reward model of the lines can be a dense reward (reward.process_model), the critic's first
values (critic_model), or both; configs/sweep_prm_programs.py compares the four.

rljax train prm_programs:start --config.run_dir=runs/prm/start
rljax train prm_programs:completer \\
    --config.run_dir=runs/prm/completer
rljax label steps --out=runs/prm/steps --completer=runs/prm/completer \\
    --checkpoints=runs/prm/completer@60,runs/prm/completer@70,runs/prm/completer@80 \\
    --prompts=1000 --completions=2
rljax train prm_programs:scorer --config.run_dir=runs/prm/scorer
rljax score steps --reward_model=runs/prm/scorer/reward_model --data=runs/prm/steps
rljax sweep sweep_prm_programs --out=runs/prm/sweep

Hardware: one of 2 CPU cores shared with other work (load 5 to 13), 2026-11-24, seed 0. On 256
held-out prompts `:start` is right in 0.359 [0.301, 0.418], greedy (of its samples on training
prompts 0.12 pass), and `:completer` in 1.000. Labels: 166 s for 11,649 programs of the three
checkpoints, of which 0.057, 0.270 and 0.586 pass; the first error is at 0.46, 0.58 and 0.65 of
their lines, and 0.997 of the labels are what the unit tests of the lines alone would say.

`:scorer` (400 steps) has the right sign on 0.929 of the 4,739 lines of held-out prompts, of which
0.481 are positive; mse 0.215. On 1,000 of the programs it is 0.706 after 100 steps, 0.796 after 200
and 0.915 after 300. To judge a line is to find its two values, to check it, and to know whether an
earlier line was wrong. What was tried on the way, with 8,300 to 15,800 programs: values of another
width than lines ("3>5,4,8:"), two heads, numbers up to 5: 0.735 with two layers, 0.753 with three;
values as wide as lines, numbers up to 9: 0.676 with two layers of two heads, 0.795 with three
layers of four heads in 600 steps. Numbers up to 5 made the difference then.
"""

from rljax.config import Config

FOLDER = "runs/prm"
TASK = (
    "program_synthesis(lines=6, min_lines=3, max_constant=5, operations='+-', with_input=False, "
    "show='trace', prompts=6000, worked_examples=2000, test=256)"
)
DECODER = "decoder(layers=3, embed=64, mlp=192, heads=4, kv_heads=4, head_dim=16, init_std=0.1)"


def get_config(variant: str = "", folder: str = FOLDER) -> Config:
    """`:start` learns the form of programs from examples, `:completer` longer, `:scorer` learns the
    scores of labelled lines, and without a variant PPO trains the policy of `:start`. `folder`
    holds their runs."""
    config = Config(dataflow="ppo", steps=100, samples_every_steps=50)
    config.model = DECODER
    config.model_settings.remat = "none"
    config.data.train = TASK
    config.data.max_prompt_tokens = 20
    config.sampler.max_response_tokens = 18
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 4
    config.batch.sequences_per_optimizer_step = 64
    config.actor_optimizer.lr, config.critic_optimizer.lr = 2e-4, 1e-3
    config.actor_optimizer.warmup_steps = 5  # the critic begins first
    config.reward.function = "program_tests(passed=1, failed=-1)"
    config.evaluate.prompts, config.evaluate.every_steps = 256, 0
    config.checkpoint.every_steps, config.checkpoint.keep = 10, 16
    if variant != "scorer":
        config.algorithm.advantage = "gae(gamma=1.0, lam=0.95, whiten=True)"
        config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.28)"
        config.algorithm.entropy_coef = 0.003
    if variant in ("start", "completer"):
        config.steps = 0
        config.sft.steps = 63 if variant == "start" else 200
        config.sft.optimizer.lr = 2e-3
        config.sft.optimizer.warmup_steps = 10
    elif variant == "scorer":
        config.dataflow, config.steps = "process_reward_model", 400
        config.model = f"{folder}/completer/policy"  # who knows the right line sees a wrong one
        config.data.train = config.data.test = f"{folder}/steps"
        config.offline.examples_per_step, config.offline.max_tokens = 64, 64
        config.algorithm.reward_loss = "step_regression()"
        config.critic_optimizer.lr, config.critic_optimizer.schedule = 1e-3, "cosine"
        config.critic_optimizer.warmup_steps = 20
        config.evaluate.prompts, config.evaluate.every_steps = 1000, 100
        config.checkpoint.every_steps = 0
    else:
        config.model = f"{folder}/start/policy"
    return config
