"""rljax in a comparison of greedy decoding (real_decoding.py): `sample_all`."""

import dataclasses

import jax
import numpy as np
from peer_worker import Worker

from rljax.config import Config
from rljax.data.online.prompts import PromptRecord
from rljax.keys import root_key
from rljax.policies import load_policy, sample_all


def sampler_fields(variant: str) -> dict[str, str | int]:
    """The fields of config.sampler of a way to decode."""
    fields = {"int8": {"weight_dtype": "int8"}, "drafts": {"draft_tokens": 4}}
    return fields.get(variant, {"dtype": variant})


def main() -> None:
    worker = Worker()
    options = worker.options
    saved = load_policy(options["model"])
    fields = {**sampler_fields(options["how"]), "max_response_tokens": options["tokens"]}
    sampler = dataclasses.replace(saved.config.sampler, **fields)
    config: Config = dataclasses.replace(saved.config, sampler=sampler)
    prompts = [
        PromptRecord("", np.array(ids, np.int32), "", "", {}, i)
        for i, ids in enumerate(options["prompts"])
    ]
    policy = dataclasses.replace(saved, config=config).ready(prompts).greedy()
    sampling = dataclasses.replace(policy.sampling, stop_ids=(), stop_strings=())
    policy = dataclasses.replace(policy, sampling=sampling)
    worker.say({"ready": {"versions": {"rljax": "this checkout", "jax": jax.__version__}}})
    while True:
        worker.wait()
        samples = sample_all(policy, prompts, key=root_key(0))
        worker.generated(sum(len(sample.ids) for sample in samples))
        worker.done(ids=[list(sample.ids) for sample in samples])


if __name__ == "__main__":
    main()
