"""GRPO with nothing hidden: a small decoder learns to count letters, on two CPU cores.

python examples/grpo_loop.py [STEPS]: 30 supervised steps teach the form of an answer, then the mean
reward of a step rises from about 0.5 to above 0.9 in 80 steps. Needs no download.
"""

import sys

import jax
import optax

from rljax.advantages import group_relative
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.data.online.loader import Loader
from rljax.data.online.prompts import Prompts, encode_demonstrations, encode_prompts, pad_examples
from rljax.data.text.tokenizer import CharTokenizer
from rljax.learn import Steps, token_mean
from rljax.losses.policy import negative_log_likelihood, ppo_clip
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.rewards.pool.pool import RewardPool
from rljax.roles import Actor, program, start_training
from rljax.rollout import Reward
from rljax.sampler import Sampling
from rljax.tasks import letter_count


@program
def imitate(batch, key, cfg, *, actor):
    actor, metrics = actor.update(batch, negative_log_likelihood, steps=cfg, reduction=token_mean)
    return {"actor": actor}, metrics


@program  # one XLA program, into which the old actor is donated; cfg is static
def learn(batch, key, cfg, *, actor):
    batch = batch.replace(old_logprobs=actor.logprobs(batch))
    batch = batch.replace(advantages=group_relative(batch))
    actor, metrics = actor.update(batch, ppo_clip, steps=cfg, reduction=token_mean)
    return {"actor": actor}, metrics


def main(steps: int = 80) -> None:
    task, mesh, key = letter_count(), make_mesh(), jax.random.key(0)  # "dabfcaed>" -> "2"
    tokenizer = CharTokenizer(task.alphabet)
    optimizer = optax.adamw(optax.linear_schedule(2e-3, 0, 30 + 80), b2=0.99)
    sizes = dict(layers=2, embed=64, mlp=192, heads=2, kv_heads=2, head_dim=32, init_std=0.05)
    model = Model(decoder(tokenizer.vocab_size, **sizes), mesh)
    actor = Actor(start_training(model, model.init(key), optimizer), model, optimizer)
    examples, _ = encode_demonstrations(task.worked_examples, tokenizer, max_tokens=12)
    demonstrations = Loader(examples, batch_size=64, seed=0)
    for _ in range(30):
        batch = place(Batch(**pad_examples(next(demonstrations), length=12)), mesh)
        actor = imitate(batch, key, Steps(64, microbatch_rows=64), actor=actor)[0]["actor"]
    records, _ = encode_prompts(task.train, tokenizer, max_prompt_tokens=10)
    loader = Loader(records, batch_size=64, seed=0)
    sampling = Sampling(max_response_tokens=2, stop_ids=tokenizer.eos_ids)
    with RewardPool("exact_match()") as pool:
        reward = Reward(pool, tokenizer, mesh)
        for step in range(steps):
            prompts = Prompts.from_records(next(loader), length=10)
            batch = actor.generate(prompts, jax.random.fold_in(key, step), sampling, n=8)
            batch, _ = reward(batch, prompts)  # scores [512], rewards on the last tokens
            actor = learn(batch, key, Steps(512, microbatch_rows=512), actor=actor)[0]["actor"]
            print(f"step {step} reward {fetch(batch.scores).mean():.3f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
