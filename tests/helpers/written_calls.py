"""A call as each format writes it, and random arguments that hold the formats' own marks."""

import json
import random
from collections.abc import Callable

PYTHON_CODE = (
    "",
    "x = 1",
    'print("""\n```\n""")',
    "s = '''\n```python\nx\n```\n'''\nprint(s)",
    "# ```\nx = 2",
    'print("```")',
    "a = '\\\n```'",
    'f"""{x}\n```"""\n',
    "def f():\n    '''\n    ```\n    x\n    ```\n    '''",
    "print('it\\'s')",
    "x = \"#\"  # it's '''",
    "r'''\\\n```\n'''",
    "print(1)\n",
)
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<|python_tag|>",
    ";",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|start|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    '<｜DSML｜parameter name="a">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<escape>",
    "<start_function_call>",
    "<end_function_call>",
    "call:f{",
    "```",
    "```json",
    "```python",
    "```tool_code",
    "\n```\n",
    "\n```",
    "~~~",
    "`",
    "<search>",
    "</search>",
    "<think>",
    "</think>",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"',
    "'",
    '"""',
    "'''",
    "\\",
    "\\n",
    "\\u00e9",
    "\n",
    "\r\n",
    "\t",
    " ",
    ":",
    ",",
    "=",
    "a:1",
    "},",
    '"}',
    "<",
    ">",
    "&lt;",
    "&amp;",
    "é",
    "東京",
    "🏔️",
    "\u2028",
    "null",
    "true",
    "1",
    "1e5",
    '{"name": "f", "arguments": {}}',
    "f(a=1)",
    "x",
    "word",
    "{}",
    "[]",
    "%",
    "|",
)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(MARKS) for _ in range(rng.randrange(7)))


def random_value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind < 5:
        return random_text(rng)
    if kind < 7:
        numbers = (0, -7, 12345678901234567890, 0.5, -1e-9, 2.5e10, True, False, None)
        return rng.choice(numbers)
    if kind < 8:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ("a", "é k", "b_1", "x-y")
    return {rng.choice(names): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name, arguments) -> str:
    return f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama3(name, arguments) -> str:
    return f"<|python_tag|>{_json({'name': name, 'parameters': arguments})}"


def llama3_bare(name, arguments) -> str:
    return _json({"name": name, "parameters": arguments})


def harmony(name, arguments) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{_json(arguments)}<|call|>"


def deepseek(name, arguments) -> str:
    head = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return f"{head}{_json(arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek_v31(name, arguments) -> str:
    head = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
    return f"{head}{_json(arguments)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek_v32(name, arguments) -> str:
    lines = []
    for key, value in arguments.items():
        text = isinstance(value, str)
        shown = value if text else _json(value)
        head = f'<｜DSML｜parameter name="{key}" string="{str(text).lower()}">'
        lines.append(f"{head}{shown}</｜DSML｜parameter>\n")
    inside = f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>\n{inside}</｜DSML｜function_calls>"


def mistral(name, arguments) -> str:
    call = {"name": name, "arguments": arguments, "id": "id0000000"}
    return f"[TOOL_CALLS] [{_json(call)}]"


def mistral_args(name, arguments) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]id0000000[ARGS]{_json(arguments)}"


def qwen3_coder(name, arguments) -> str:
    lines = [f"<tool_call>\n<function={name}>\n"]
    for key, value in arguments.items():
        shown = value if isinstance(value, str) else _json(value)
        lines.append(f"<parameter={key}>\n{shown}\n</parameter>\n")
    return "".join([*lines, "</function>\n</tool_call>"])


def _gemma(value, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        inside = (f"{quote}{k}{quote}:{_gemma(v, quote)}" for k, v in value.items())
        return "{" + ",".join(inside) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(v, quote) for v in value) + "]"
    return _json(value)


def _gemma_call(name, arguments, quote) -> str:
    return f"call:{name}{{{','.join(f'{k}:{_gemma(v, quote)}' for k, v in arguments.items())}}}"


def gemma4(name, arguments) -> str:
    return f"<|tool_call>{_gemma_call(name, arguments, QUOTES[0])}<tool_call|>"


def gemma_function(name, arguments) -> str:
    called = _gemma_call(name, arguments, QUOTES[1])
    return f"<start_function_call>{called}<end_function_call>"


QUOTES = ('<|"|>', "<escape>")


def gemma_code(name, arguments) -> str:
    inside = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"```tool_code\nprint({name}({inside}))\n```"


WRITERS: dict[Callable, str] = {  # how a call is written -> the parser that reads it
    hermes: "hermes",
    llama3: "llama3",
    llama3_bare: "llama3",
    harmony: "harmony",
    deepseek: "deepseek_v3",
    deepseek_v31: "deepseek_v3",
    deepseek_v32: "deepseek_v3",
    mistral: "mistral",
    mistral_args: "mistral",
    qwen3_coder: "qwen3_coder",
    gemma4: "gemma",
    gemma_function: "gemma",
    gemma_code: "gemma",
}


def python_block(code: str) -> str:
    return f"```python\n{code}\n```"


# What ends an argument in formats that write texts as they are: one that holds this, and what goes
# on as a call does, can be read in two ways.
AMBIGUOUS = {
    deepseek_v32: r"</｜DSML｜parameter>\s*(?:</?｜DSML｜|$)",
    qwen3_coder: r"</parameter>\s*(?:<parameter=[abc]>|</function>|</tool_call>|$)"
    r"|</function>\s*</tool_call>",
    gemma4: r'<\|"\|>\s*(?:[,:}\]]|$)',
    gemma_function: r"<escape>\s*(?:[,:}\]]|$)",
}
OWN_MARK = {
    deepseek_v32: "</｜DSML｜parameter>",
    qwen3_coder: "</parameter>",
    gemma4: '<|"|>',
    gemma_function: "<escape>",
}


def types_of(arguments: dict) -> list[dict]:
    """The schema of a tool with these arguments."""
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    properties = {name: {"type": kinds[type(value)]} for name, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
