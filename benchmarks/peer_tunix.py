"""Tunix in a comparison (peers.py): `GRPOLearner.train` on random weights with its vanilla sampler
and beta 0. Its packing of sequences is off: it needs the splash kernel of a TPU, as attention
elsewhere does not read segment ids."""

import itertools
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from peer_worker import Worker, reward
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


class Tokenizer:
    """Texts are ids with spaces between them. The sampler puts the first id of a text before it by
    itself, as its beginning of sequence."""

    def __init__(self, first: int):
        self.first = first

    def encode(self, text, **_):
        return [int(i) for i in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(int(i)) for i in ids)

    def pad_id(self):
        return 0

    def bos_id(self):
        return self.first

    def eos_id(self):
        return -1  # no token: RolloutConfig.eos_tokens says what ends a response


def make_model(shape, mesh) -> qwen3.Qwen3:
    sizes = shape.decoder
    config = qwen3.ModelConfig(
        num_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        embed_dim=sizes.embed,
        hidden_dim=sizes.mlp,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_kv_heads=sizes.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=sizes.tie_embeddings,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    draw = np.random.default_rng(0)

    def fill(x):  # its own initial weights of MLPs are zero
        if x.ndim < 2:
            return jnp.ones(x.shape, jnp.float32)
        return jnp.asarray(draw.normal(0, 0.02, x.shape), jnp.float32)

    with mesh:
        graph, state = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
        return nnx.merge(graph, jax.tree.map(fill, state))


def make_cluster(shape, model, mesh) -> rl_cluster.RLCluster:
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    stops = shape.stop_ids()
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5)),
        eval_every_n_steps=10**9,
        max_steps=10**6,
        mini_batch_size=shape.prompts,
        train_micro_batch_size=shape.microbatch // shape.samples,
        rollout_micro_batch_size=shape.prompts,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=shape.response,
        max_prompt_length=shape.longest_prompt,
        kv_cache_size=shape.columns,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=list(stops) or [-1],
    )
    return rl_cluster.RLCluster(
        actor=model,
        tokenizer=Tokenizer(shape.decoder.vocabulary - 1),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in roles},
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=training,
            rollout_config=rollout,
        ),
    )


def batches(shape):
    """Prompts without their first id, of which the tokenizer makes one."""
    for step in itertools.count():
        indices = range(step * shape.prompts, (step + 1) * shape.prompts)
        yield {"prompts": np.array([" ".join(map(str, shape.prompt_ids(i)[1:])) for i in indices])}


def main() -> None:
    worker = Worker()
    shape = worker.shape
    devices = np.array(jax.devices()).reshape(-1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    cluster = make_cluster(shape, make_model(shape, mesh), mesh)
    settings = grpo_learner.GRPOConfig(
        num_generations=shape.samples, num_iterations=1, beta=0.0, loss_agg_mode="token-mean"
    )
    learner = grpo_learner.GRPOLearner(
        cluster,
        settings,
        reward_fns=lambda prompts, completions, **_: [reward(x.split()) for x in completions],
    )
    generate, update = cluster.generate, cluster.update_actor
    left = microbatches = shape.rows // shape.microbatch

    def watched_generate(*args, **options):
        outputs = generate(*args, **options)
        # Its tokens come without the one that ended the response.
        worker.generated(sum(min(len(x) + 1, shape.response) for x in outputs.tokens))
        return outputs

    def watched_update(*args, **options):
        nonlocal left
        update(*args, **options)
        left -= 1
        if not left:
            jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
            worker.done()
            worker.wait()
            left = microbatches

    cluster.generate, cluster.update_actor = watched_generate, watched_update
    worker.say({"ready": {name: version(name) for name in ("google-tunix", "jax", "flax")}})
    worker.wait()
    learner.train(batches(shape))


if __name__ == "__main__":
    main()
