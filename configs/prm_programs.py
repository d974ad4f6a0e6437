"""Process supervision on program synthesis: PPO with a process reward model (arXiv 2410.17621).

The task: "3>5,4,8:" -> "+2\\n-1\\n+4", a program of 3 to 6 lines in a tiny language that makes of 3
what the prompt says, line by line, judged by unit tests as a whole (-1 or +1). A process
reward model of the lines can be a dense reward (reward.process_model), the critic's first values
(critic_model), or both; configs/sweep_prm_programs.py compares the four.

python launchers/train.py --config=configs/prm_programs.py:start --config.run_dir=runs/prm/start
python launchers/train.py --config=configs/prm_programs.py:completer \\
    --config.run_dir=runs/prm/completer
python launchers/label_steps.py --out=runs/prm/steps --completer=runs/prm/completer \\
    --checkpoints=runs/prm/completer@150,runs/prm/completer@175,runs/prm/completer@225 \\
    --prompts=700 --completions=3
python launchers/train.py --config=configs/prm_programs.py:scorer --config.run_dir=runs/prm/scorer
python launchers/score_steps.py --reward_model=runs/prm/scorer/reward_model --data=runs/prm/steps
python launchers/sweep.py --config=configs/sweep_prm_programs.py --out=runs/prm/sweep

Hardware: 2 CPU cores shared with much other work (load 15 to 23), 2026-11-24, seed 0. On 256
held-out prompts `:start` is right in 0.375 [0.320, 0.434], greedy, and `:completer` in 0.887
[0.848, 0.922]; of the samples of `:start` 0.207 pass (128 held-out prompts, 4 samples each).
Labels: 253 s for 8,284 programs of the three checkpoints, of which 0.083, 0.194 and 0.426 pass; the
first error is at 0.52, 0.63 and 0.64 of their lines.

PPO without a process reward model learns from `:start`: in 40 steps (seed 0) the share of samples
that pass rises from 0.22 in the first five steps to 0.36 in the last five, held-out greedy accuracy
by 0.109 [0.047, 0.168]. (From a start of which 3.6 % pass, with lr 3e-4, it lost all of it within
ten steps.)

The process reward model is not good enough yet. `:scorer` has the right sign on 0.735 of the 3,266
lines of held-out prompts, where 0.496 are positive, and on no more of those it trains on (0.70 to
0.75 from step 100 on), so it is not short of programs, as it was with 2,119 of them (0.63 held out,
0.78 in training). What is likely to be short is depth: two layers find the numbers before and after
a line, and whether an earlier line was wrong takes a third. Not tried yet: a DECODER of three
layers, with all of the above from the beginning.
"""

from rljax.config import Config

FOLDER = "runs/prm"
TASK = (
    "program_synthesis(lines=6, min_lines=3, max_constant=5, operations='+-', with_input=False, "
    "show='trace', prompts=6000, worked_examples=2000, test=256)"
)
DECODER = "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"


def get_config(variant: str = "", folder: str = FOLDER) -> Config:
    """`:start` learns the form of programs from examples, `:completer` longer, `:scorer` learns the
    scores of labelled lines, and without a variant PPO trains the policy of `:start`. `folder`
    holds their runs."""
    config = Config(dataflow="ppo", steps=100, samples_every_steps=50)
    config.model = DECODER
    config.model_settings.remat = "none"
    config.data.train = TASK
    config.data.max_prompt_tokens = 14
    config.sampler.max_response_tokens = 18
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 4
    config.batch.sequences_per_optimizer_step = 64
    config.actor_optimizer.lr, config.critic_optimizer.lr = 1e-4, 1e-3
    config.actor_optimizer.warmup_steps = 5  # the critic begins first
    config.reward.function = "program_tests(passed=1, failed=-1)"
    config.evaluate.prompts, config.evaluate.every_steps = 256, 0
    config.checkpoint.every_steps, config.checkpoint.keep = 25, 16
    if variant != "scorer":
        config.algorithm.advantage = "gae(gamma=1.0, lam=0.95, whiten=True)"
        config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.28)"
        config.algorithm.entropy_coef = 0.003
    if variant in ("start", "completer"):
        config.steps = 0
        config.sft.steps = 175 if variant == "start" else 400
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
