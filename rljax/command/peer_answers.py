"""Greedy answers of transformers, in a process of its own, whose memory is given back.

Reads JSON, {folder, prompts, max_tokens}, from standard input and writes a list of texts as JSON
to standard output. A prompt is a text or a list of chat messages.
"""

import json
import sys


def main() -> None:
    """Answers the prompts on standard input."""
    request = json.load(sys.stdin)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=torch.float32)
    texts = []
    for prompt in request["prompts"]:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt")
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        output = model.generate(**ids, do_sample=False, max_new_tokens=request["max_tokens"])
        answer_ids = output[0, ids["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(answer_ids, skip_special_tokens=True))
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
