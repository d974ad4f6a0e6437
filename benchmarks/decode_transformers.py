"""transformers in a comparison of greedy decoding (real_decoding.py): `generate`."""

import os
from importlib.metadata import version

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from peer_worker import Worker
from transformers import AutoModelForCausalLM


def main() -> None:
    worker = Worker()
    options = worker.options
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=getattr(torch, options["how"])
    ).eval()
    longest = max(map(len, options["prompts"]))
    ids = torch.zeros((len(options["prompts"]), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(options["prompts"]):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    generation = dict(
        max_new_tokens=options["tokens"], do_sample=False, eos_token_id=None, pad_token_id=0
    )
    versions = {name: version(name) for name in ("transformers", "torch")}
    worker.say({"ready": {"versions": {**versions, "threads": torch.get_num_threads()}}})
    while True:
        worker.wait()
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, **generation)
        tokens = output[:, longest:].tolist()
        worker.generated(sum(map(len, tokens)))
        worker.done(ids=tokens)


if __name__ == "__main__":
    main()
