"""Texts that a policy may write where a tool call is read: pieces of every format in any order, and
long ones made to cost a careless reader quadratic time."""

import random
from collections.abc import Iterator

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<TOOLCALL>[",
    "<tool_call>\n<function=f>\n",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<function=",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "parameters": {',
    '{"name": ',
    '{"function": {"name": "f"}}',
    '{"type": "function"',
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    ":",
    ",",
    ";",
    "(",
    ")",
    "=",
    "\n",
    " ",
    "\t",
    "```",
    "```json\n",
    "```python\n",
    "```py\n",
    "\n```",
    "```tool_code\n",
    "print(",
    "f(a=1)",
    "f(a='",
    "a.b",
    "<|python_tag|>",
    "brave.call(",
    "[f(a=1)]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>json",
    "assistant",
    "commentary",
    "analysis",
    "final",
    " to=functions.f ",
    " to=python",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f[ARGS]{",
    "[CALL_ID]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "function",
    '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "<|tool_call>call:f{",
    "<tool_call|>",
    '<|"|>',
    "<escape>",
    "<start_function_call>call:f{a:",
    "<search>",
    "</search>",
    "<",
    ">",
    "\x00",
    "\ud800",
    "\\ud800",
    "\\u00",
    "🏔️",
    "é",
    "NaN",
    "1e999",
    "-" * 9,
    "9" * 5000,
    "null",
    "True",
    "0x1F",
    "1_000",
    "1e",
    "r'",
    'b"',
    '"""',
    "'''",
]


def short_texts(count: int, seed: int) -> Iterator[str]:
    """Random pieces behind one another, one to thirty of them."""
    rng = random.Random(seed)
    for _ in range(count):
        few = rng.sample(PIECES, rng.randrange(1, 9))
        yield "".join(rng.choice(few) for _ in range(rng.randrange(1, 31)))


def long_texts(characters: int) -> Iterator[tuple[str, str]]:
    """(what it is, a text of about so many characters)."""

    def filled(piece: str, front: str = "", back: str = "") -> str:
        return front + piece * (characters // len(piece)) + back

    for piece in PIECES:
        yield f"{piece!r:.30} again and again", filled(piece)
    fronts = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>',
        "calls": '<tool_calls>[{"name": "f", "arguments": {"a": %s}}]</tool_calls>',
        "objects": '[{"name": "f", "arguments": {"a": %s}}]',
        "llama": '{"name": "f", "parameters": {"a": %s}}',
        "coder": "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>",
        "harmony": "<|channel|>commentary to=functions.f<|message|>%s<|call|>",
        "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": %s}}]',
        "args": "[TOOL_CALLS]f[ARGS]%s",
        "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
        "dsml": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">%s</｜DSML｜parameter>',
        "code": "```tool_code\nf(a=%s)\n```",
        "gemma": "<|tool_call>call:f{a:%s}<tool_call|>",
        "python": "```python\n%s\n```",
        "list": "[f(a=%s)]",
        "tag": "<search>%s</search>",
    }
    insides = [
        "[",
        "1,",
        "[1],",
        '"a",',
        "{",
        '{"a":',
        "-",
        "9",
        "(",
        " ",
        "\n",
        "\\u0041",
        '"',
        "'",
    ]
    insides += ["x", "1 ", '\\"', "0.5,", "</parameter> ", "</parameter>", "```\n", "#", "é"]
    for name, front in fronts.items():
        for inside in insides:
            yield f"{name} with {inside!r}", front % filled(inside)
            yield f"{name} with a list of {inside!r}", front % filled(inside, "[", "0]")
            yield f"{name} with a text of {inside!r}", front % filled(inside, '"', '"')
        yield f"{name} again and again", filled(front % "1")
        yield f"{name} with objects", filled(front % "{}")
