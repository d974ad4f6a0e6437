"""Process supervision on program synthesis: PPO with a process reward model (arXiv 2410.17621).

The task: "3x-1:" -> "+x\\n+x\\n-1", a program of at most 4 lines in a tiny language, judged by unit
tests (-1 or +1). A process reward model of the lines can be a dense reward (reward.process_model),
the critic's first values (critic_model), or both; configs/sweep_prm_programs.py compares the four.

python launchers/train.py --config=configs/prm_programs.py:start --config.run_dir=runs/prm/start
python launchers/train.py --config=configs/prm_programs.py --config.run_dir=runs/prm/baseline
python launchers/label_steps.py --out=runs/prm/steps \\
    --checkpoints=runs/prm/baseline@20,runs/prm/baseline@60,runs/prm/baseline@120
python launchers/train.py --config=configs/prm_programs.py:scorer --config.run_dir=runs/prm/scorer
python launchers/score_steps.py --reward_model=runs/prm/scorer/reward_model --data=runs/prm/steps
python launchers/sweep.py --config=configs/sweep_prm_programs.py --out=runs/prm/sweep

Hardware: 2 CPU cores under load 6 to 10. Measured, seed 0: `:start` 73 s; PPO without a process
reward model, 120 steps, 264 s: training samples that pass, mean of 20 steps each, 0.050, 0.075,
0.092, 0.115, 0.159, 0.205; greedy accuracy on the 32 held-out prompts 0.000 before and after.
Labels of 752 programs of three checkpoints (--prompts=64 --completions=8): 110 s, 1.8 to 2.0 probes
per program. The four settings of the sweep: not measured.
"""

from rljax.config import Config

FOLDER = "runs/prm"
TASK = (
    "program_synthesis(lines=4, max_constant=4, operations='+-', prompts=20000, "
    "worked_examples=96, test=32)"
)
DECODER = "decoder(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)"


def get_config(variant: str = "", folder: str = FOLDER) -> Config:
    """`:start` learns the form of programs from examples, `:scorer` the scores of labelled lines,
    and without a variant PPO trains the policy of `:start`. `folder` holds their runs."""
    config = Config(dataflow="ppo", steps=120, samples_every_steps=20)
    config.model = DECODER
    config.model_settings.remat = "none"
    config.data.train = TASK
    config.data.max_prompt_tokens = 12
    config.sampler.max_response_tokens = 14
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 32, 4
    config.batch.sequences_per_optimizer_step = 64
    config.algorithm.advantage = "gae(gamma=1.0, lam=0.95, whiten=True)"
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.28)"
    config.algorithm.entropy_coef = 0.003
    config.actor_optimizer.lr, config.critic_optimizer.lr = 3e-4, 1e-3
    config.reward.function = "program_tests(passed=1, failed=-1)"
    config.evaluate.prompts, config.evaluate.every_steps = 32, 20
    config.checkpoint.every_steps, config.checkpoint.keep = 20, 8
    if variant == "start":
        config.steps = 0
        config.sft.steps, config.sft.optimizer.lr = 80, 2e-3
        config.sft.optimizer.schedule, config.sft.optimizer.warmup_steps = "cosine", 10
    elif variant == "scorer":
        config.dataflow, config.steps = "process_reward_model", 400
        config.algorithm.entropy_coef = 0.0  # PPO's alone
        config.model = f"{folder}/start/policy"
        config.data.train = config.data.test = f"{folder}/steps"
        config.offline.examples_per_step, config.offline.max_tokens = 64, 64
        config.algorithm.reward_loss = "step_regression()"
        config.critic_optimizer.lr, config.critic_optimizer.schedule = 1e-3, "cosine"
        config.critic_optimizer.warmup_steps = 20
        config.evaluate.prompts, config.evaluate.every_steps = 1000, 50
        config.checkpoint.every_steps = 100
    else:
        config.model = f"{folder}/start/policy"
    return config
