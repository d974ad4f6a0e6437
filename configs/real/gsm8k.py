"""GSM8K with a small pretrained model on two CPU cores: SFT on worked solutions, then GRPO.

The rows are those of openai/grade-school-math (MIT), train.jsonl and test.jsonl with question and
answer in a FOLDER of yours. The prompt is the question and verl's 'Let's think step by step and
output the final answer after "####".', as a chat; the suite gsm8k asks in the same words.

rljax evaluate MODEL_FOLDER --suite=gsm8k --data=FOLDER/test.jsonl --prompts=400 \\
    --samples=8 --k=1,8 --temperature=0.7 --max_response_tokens=256
DATA="gsm8k(path='FOLDER', chat=True)"
rljax train real/gsm8k:sft --config.model=MODEL_FOLDER \\
    --config.data.train="$DATA" --config.data.test="$DATA" --config.run_dir=runs/gsm8k_sft
rljax train real/gsm8k --config.model=runs/gsm8k_sft/policy \\
    --config.data.train="$DATA" --config.run_dir=runs/gsm8k_grpo

Files of other names are given as path='FOLDER/gsm8k_{split}.jsonl'. The first command gives avg@8
(pass@1), pass@8 and maj@8 with intervals, and with --samples=0 the greedy accuracy, also of
runs/gsm8k_sft/policy and of runs/gsm8k_grpo/policy.

A base model without a chat template (Gemma 3 270M) is first asked as lm-eval does, with eight
solved questions, --suite="gsm8k(shots=8)" --data=FOLDER. Its SFT and GRPO get
"gsm8k(path='FOLDER', instruction='\\nAnswer:\\n')", and are then evaluated with
--suite="gsm8k(instruction='\\nAnswer:\\n')".

SFT: 100 optimizer steps of 8 packed rows of 512 tokens, of two or three solutions each. GRPO: 40
steps of 8 prompts x 8 samples, one optimizer step each. All weights are trained, in float32.

Hardware: sized for SmolLM2-135M, two CPU cores and 8 GB. Time and accuracy: docs/measurements.md.
"""

from rljax.config import Config, OptimizerConfig


def get_config(variant: str = "") -> Config:
    """`:sft` learns from the worked solutions; without a variant it is GRPO."""
    config = Config(dataflow="sft" if variant == "sft" else "grpo")
    config.data.max_prompt_tokens = 256
    config.sampler.max_response_tokens = 256
    config.checkpoint.every_steps, config.checkpoint.keep = 20, 1
    if variant == "sft":
        config.steps = 100
        config.offline.examples_per_step, config.offline.max_tokens = 8, 512
        config.offline.packing = True
        config.actor_optimizer = OptimizerConfig(lr=5e-5, schedule="cosine", warmup_steps=5)
        config.evaluate.prompts, config.evaluate.every_steps = 64, 25
        return config
    config.steps = 40
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 8, 8
    config.batch.sequences_per_optimizer_step = 64
    config.batch.tokens_per_microbatch = 8192
    config.algorithm.policy_loss = "ppo_clip(clip_low=0.2, clip_high=0.28)"
    config.actor_optimizer.lr = 1e-5
    config.reward.function, config.reward.workers = "gsm8k(method='strict')", 1
    config.evaluate.prompts, config.evaluate.every_steps = 100, 20
    config.samples_every_steps = 5
    return config
