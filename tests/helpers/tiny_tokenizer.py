"""A real byte-level BPE tokenizer of at most 320 ids, written as a Hugging Face model folder."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

QWEN_LIKE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Writes BOS itself, ends turns without a newline, and has two newlines before the content.
LLAMA_LIKE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n\\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""
# Drops the reasoning of all but the last turn, as several published templates do.
FORGETFUL = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and not loop.last %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEXT = (
    "the answer is 42 and the question is how many apples are left",
    "Natalia sold clips to 48 of her friends in April\nHow many clips did she sell?",
    "sort the digits: 3 1 2 -> 1 2 3\nuser assistant system\n\n",
)


def write_tokenizer(
    folder, chat_template=QWEN_LIKE, *, bos: str | None = None, trim_offsets: bool = False
) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json; returns the folder.

    The pad token is an end token, and there are two end tokens. With `bos` that token exists and
    tokenizer.json puts it in front of plain text.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = [*SPECIAL, *([bos] if bos else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXT, trainer)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        tokens = [(bos, library.token_to_id(bos))]
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=tokens))
    library.post_processor = processors.Sequence(steps)
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    if bos:
        config["bos_token"] = bos
    if chat_template is not None:
        config["chat_template"] = chat_template
    ends = [library.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    return folder


def write_json(path, value) -> None:
    Path(path).write_text(json.dumps(value), encoding="utf-8")
