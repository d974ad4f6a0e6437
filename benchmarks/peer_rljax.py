"""rljax in a comparison (peers.py): the steps of `grpo_step.py`."""

import tempfile

import jax
from grpo_step import make_run, needed_tokens
from peer_worker import Worker


def main() -> None:
    worker = Worker()
    with tempfile.TemporaryDirectory() as folder, make_run(worker.shape, folder) as run:
        source, generate = run.source, run.source.next

        def watched(step, roles):
            batch, metrics = jax.block_until_ready(generate(step, roles))
            worker.generated(needed_tokens(batch, worker.shape.samples)["response_tokens"])
            return batch, metrics

        source.next = watched
        worker.say({"ready": {"rljax": "this checkout", "jax": jax.__version__}})
        while True:
            worker.wait()
            run.step()
            jax.block_until_ready(run.roles)
            worker.done()


if __name__ == "__main__":
    main()
