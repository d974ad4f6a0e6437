"""Tiny tokenizers of the kinds that model families use, written as Hugging Face model folders."""

import json
from pathlib import Path

import tokenizers
from tiny_tokenizer import TEXT, write_json
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEMPLATES = Path(__file__).resolve().parent / "templates"
FAMILIES = {  # bos, eos, pad, other special tokens, further stop tokens
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        None,
        ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eom_id|>"],
        ["<|end_of_text|>", "<|eom_id|>"],
    ),
    "qwen2_5": (None, "<|im_end|>", "<|endoftext|>", ["<|im_start|>"], ["<|endoftext|>"]),
    "qwen3": (None, "<|im_end|>", "<|endoftext|>", ["<|im_start|>"], ["<|endoftext|>"]),
    "gemma": ("<bos>", "<eos>", "<pad>", ["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
    "deepseek": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        [
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ],
        [],
    ),
}
_GLM = ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>"]
NEWER = {  # the same of families that test_newer_templates reads
    "olmo2": (
        "<|endoftext|>",
        "<|endoftext|>",
        "<|pad|>",
        ["<|system|>", "<|user|>", "<|assistant|>"],
        [],
    ),
    "olmo3": (None, "<|im_end|>", "<|pad|>", ["<|im_start|>"], ["<|endoftext|>"]),
    "phi4": (None, "<|im_end|>", "<|dummy_85|>", ["<|im_start|>", "<|im_sep|>"], ["<|endoftext|>"]),
    "phi4_mini": (
        None,
        "<|endoftext|>",
        None,
        ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>"],
        ["<|end|>"],
    ),
    "smollm3": (None, "<|im_end|>", None, ["<|im_start|>"], []),
    "granite": (
        None,
        "<|end_of_text|>",
        None,
        ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
        [],
    ),
    "glm4": (None, "<|endoftext|>", None, _GLM, ["<|user|>", "<|observation|>"]),
    "glm4_5": (None, "<|endoftext|>", None, _GLM, ["<|user|>", "<|observation|>"]),
    "llama4": (
        "<|begin_of_text|>",
        "<|eot|>",
        "<|finetune_right_pad|>",
        ["<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>", "<|image|>"],
        ["<|end_of_text|>", "<|eom|>"],
    ),
}
NOT_SPECIAL = {  # added tokens that decoding keeps
    "qwen2_5": ["<tool_call>", "</tool_call>"],
    "qwen3": [
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ],
}
WORDS = (*TEXT, 'What is 2 + 3? It is five. 5.5 turn ab ab ab\n\n {"name": "add"}')


def family_template(family: str, *, marked: bool) -> str:
    """The family's template; unmarked, its {% generation %} tags are comments."""
    text = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    assert "{%- generation -%}" in text and "{%- endgeneration -%}" in text
    if marked:
        return text
    return text.replace("{%- generation -%}", "{#- -#}").replace("{%- endgeneration -%}", "{#- -#}")


def write_family(folder, family: str, *, marked: bool = True) -> Path:
    """A model folder with the family's template, its special tokens and its kind of tokenizer."""
    bos, eos, pad, special, stops = {**FAMILIES, **NEWER}[family]
    special = (
        [token for token in dict.fromkeys((pad, bos, eos)) if token]
        + [token for token in special if token not in (bos, eos, pad)]
        + [token for token in stops if token not in special and token not in (bos, eos, pad)]
    )
    library = sentencepiece_bpe(special) if family == "gemma" else byte_level_bpe(special)
    library.add_tokens(
        [tokenizers.AddedToken(token, normalized=False) for token in NOT_SPECIAL.get(family, [])]
    )
    if bos and family not in ("deepseek", "olmo2"):
        library.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))]
        )
    config = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    config["chat_template"] = family_template(family, marked=marked)
    ends = [library.token_to_id(token) for token in (eos, *stops)]
    return write_folder(folder, library, config, {"eos_token_id": ends})


def write_folder(folder, library, config: dict, generation: dict | None = None) -> Path:
    """tokenizer.json, tokenizer_config.json and, where it is given, generation_config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return folder


# How Llama 3 and Qwen cut a text into words: newlines go with the spaces before them.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_bpe(special=(), *, size=700) -> tokenizers.Tokenizer:
    """Bytes merged to words, as Llama 3, Qwen and DeepSeek do."""
    library = tokenizers.Tokenizer(models.BPE())
    steps = [
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(WORDS, trainer)
    return library


def sentencepiece_bpe(special=(), *, size=700, llama2: bool = False) -> tokenizers.Tokenizer:
    """Characters merged to words, bytes for unknown ones, spaces as ▁: Gemma's way or Llama 2's.

    Llama 2 puts a ▁ in front of every text, Gemma does not.
    """
    model = models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    steps = [normalizers.Replace(" ", "▁")]
    if llama2:
        steps = [normalizers.Prepend("▁"), *steps]
    library.normalizer = normalizers.Sequence(steps)
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*after, *([decoders.Strip(" ", 1, 0)] if llama2 else [])])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", *special, *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    library.train_from_iterator(WORDS, trainer)
    # The trainer calls bytes special; in a real file they are words of the vocabulary only.
    content = json.loads(library.to_str())
    content["added_tokens"] = [
        t for t in content["added_tokens"] if t["content"] not in byte_tokens
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(content))
