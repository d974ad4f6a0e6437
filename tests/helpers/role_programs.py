"""What roles say of a batch, each as one program: op by op, every operation would compile."""

import jax


@jax.jit
def logprobs(role, batch):
    return role.logprobs(batch)


@jax.jit
def values(role, batch):
    return role.values(batch)
