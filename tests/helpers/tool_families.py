"""Model folders of all families whose chat templates render tool calls, and the calls that tests
render: names, ids, arguments of every JSON type and texts that look like parts of a format."""

import json
import random
from pathlib import Path

from family_tokenizers import (
    FAMILIES,
    TEMPLATES,
    byte_level_bpe,
    sentencepiece_bpe,
    write_family,
    write_folder,
)

DEEPSEEK = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]
# Template, the format that reads its calls, bos, eos, other special tokens, further stops.
OTHERS = {
    "qwen3_coder": ("qwen3_coder", None, "<|im_end|>", ["<|im_start|>"], []),
    "gpt_oss": (
        "harmony",
        None,
        "<|return|>",
        ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"],
        ["<|call|>"],
    ),
    "mistral": (
        "mistral",
        "<s>",
        "</s>",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"],
        [],
    ),
    "mistral_args": (
        "mistral",
        "<s>",
        "</s>",
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        [],
    ),
    "deepseek_text": ("deepseek_v3", "<s>", "<｜end▁of▁sentence｜>", DEEPSEEK, []),
    "deepseek_v31": ("deepseek_v3", "<s>", "<｜end▁of▁sentence｜>", DEEPSEEK, []),
    "gemma4": (
        "gemma",
        "<bos>",
        "<eos>",
        [
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            '<|"|>',
            "<|tool_response>",
            "<tool_response|>",
        ],
        ["<turn|>"],
    ),
}
FORMATS = {
    "llama3": "llama3",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "deepseek": "deepseek_v3",
} | {family: row[0] for family, row in OTHERS.items()}
ONE_CALL = {"llama3", "gpt_oss"}  # their templates render one call to a turn


def write_tool_family(folder, family: str) -> Path:
    """A model folder of the family, without {% generation %} blocks."""
    if family in FAMILIES:
        return write_family(folder, family, marked=False)
    _, bos, eos, special, stops = OTHERS[family]
    special = [token for token in (bos, eos) if token] + special
    library = sentencepiece_bpe(special) if family == "gemma4" else byte_level_bpe(special)
    template = (TEMPLATES / "tools" / f"{family}.jinja").read_text(encoding="utf-8")
    config = {"bos_token": bos, "eos_token": eos, "chat_template": template}
    ends = [library.token_to_id(token) for token in (eos, *stops)]
    return write_folder(folder, library, config, {"eos_token_id": ends})


TEXTS = [
    "",
    " ",
    "x",
    "naïve 東京 🏔️",
    'say "hi"',
    "it's",
    "a\\b\\n",
    "two\nlines\n",
    "</tool_call>",
    "<tool_call>",
    "{}",
    '{"name": "f"}',
    "```",
    "```json\n{}\n```",
    "[1]",
    "a, b: c",
    "</function>",
    "<parameter=x>",
    "1 < 2 > 0 & 3",
    "\t",
    "null",
    "print(f(a=1))",
    "[TOOL CALLS]",
    "%s {{x}} {%",
]
NAMES = ["town", "n", "ratio", "deep", "flag", "nothing", "rows"]


def random_arguments(rng: random.Random) -> dict:
    """Up to seven arguments, each of its own type."""
    values = {
        "town": rng.choice(TEXTS),
        "n": rng.choice([0, -7, 12345678901234567890]),
        "ratio": rng.choice([0.5, -1e-9, 2.5e10]),
        "deep": {"a": [1, {"b": rng.choice(TEXTS)}], rng.choice(["k", "é k"]): None},
        "flag": rng.random() < 0.5,
        "nothing": None,
        "rows": [rng.choice(TEXTS) for _ in range(rng.randrange(3))],
    }
    return {name: values[name] for name in NAMES if rng.random() < 0.6}


KINDS = ["string", "integer", "number", "object", "boolean", "null", "array"]
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    argument: {"type": kind, "description": "An argument."}
                    for argument, kind in zip(NAMES, KINDS, strict=True)
                },
                "required": [],
            },
        },
    }
    for name in ("weather", "look_up", "a1")
]


def calls_message(calls: list[tuple[str, dict]], text: str = "") -> dict:
    """An assistant's message that calls tools; ids have nine characters."""
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {
                "id": f"id{number:07d}",
                "type": "function",
                "function": {"name": name, "arguments": json.loads(json.dumps(arguments))},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }
