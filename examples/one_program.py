"""GRPO as one XLA program: sampling, scoring and learning of all steps, without the host.

python examples/one_program.py [STEPS]: 30 supervised steps teach the form of an answer. Then one
`jax.lax.scan` takes 80 steps, whose mean rewards are printed at its end. Needs no download.
"""

import sys

import jax
import jax.numpy as jnp
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
from rljax.rewards.on_device import device_scorer
from rljax.roles import Actor, program, start_training
from rljax.rollout.scoring.reward import with_rewards
from rljax.sampler import Decoding, Sampling, generate_in_program
from rljax.tasks import letter_count

P, N = 64, 8  # prompts of a step, and samples of each


@program
def imitate(batch, key, cfg, *, actor):
    actor, metrics = actor.update(batch, negative_log_likelihood, steps=cfg, reduction=token_mean)
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
    records = Loader(records, batch_size=P * steps, seed=0).take(P * steps)
    prompts = Prompts.from_records(records, length=10)
    scorer = device_scorer("exact_match()", tokenizer, tokenizer.vocab_size)
    fields = scorer.fields([record.ground_truth for record in records])
    sampling = Sampling(max_response_tokens=2, stop_ids=tokenizer.eos_ids)

    def step(actor, given):
        (tokens, lengths, fields), key = given
        read = (actor.model, actor.state.weights, tokens, lengths, key, sampling)
        how = dict(n=N, version=actor.state.step, decoding=Decoding())
        batch = generate_in_program(*read, **how)
        starts, fields = jax.tree.map(lambda x: jnp.repeat(x, N, axis=0), (lengths, fields))
        ends = jnp.sum(batch.segment_ids > 0, axis=1)
        scores = scorer.score(batch.tokens, starts, ends, batch.finish_reason, fields)["score"]
        batch = with_rewards(batch, scores, None, jnp.isfinite(scores), batch.group)
        batch = batch.replace(old_logprobs=actor.logprobs(batch))
        batch = batch.replace(advantages=group_relative(batch))
        how = dict(steps=Steps(P * N, microbatch_rows=P * N), reduction=token_mean)
        return actor.update(batch, ppo_clip, **how)[0], scores.mean()

    given = (prompts.tokens, prompts.lengths, fields)
    given = jax.tree.map(lambda x: x.reshape(steps, P, *x.shape[1:]), given)
    run = jax.jit(lambda actor, given: jax.lax.scan(step, actor, given))
    _, rewards = run(actor, (given, jax.random.split(key, steps)))
    print("\n".join(f"step {i} reward {x:.3f}" for i, x in enumerate(fetch(rewards))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
