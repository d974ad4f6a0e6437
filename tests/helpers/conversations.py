"""Conversations as data: what people and tools write to chat models, odd and ordinary.

Each is a name and the arguments of a rendering: messages, and where it has them tools, documents
and variables of the template. Nothing is rendered here.
"""


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def schema(name, description, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = schema(
    "weather",
    "Wetter & <Temperatur> in °C",
    city={"type": "string", "description": "e.g. Zürich 🏔️"},
    unit={"type": "string", "enum": ["°C", "°F"]},
)
ADD = schema(
    "add", "Adds two numbers.", a={"type": "number"}, b={"type": "number", "default": None}
)
TOOLS = [WEATHER, ADD]
ASK = [user("What is 2 + 3?")]
CALLS = [assistant(None, tool_calls=[call("add", {"a": 2, "b": 3.5}, id="call_1")])]
ANSWERED = [*ASK, *CALLS, tool("5.5", name="add", tool_call_id="call_1")]
THINK = "<think>\nfirst this,\n\nthen that\n</think>\n\n"
HEBREW, ARABIC = "שלום עולם!", "مرحبا \u202bبالعالم\u202c"
MARKUP = '<b>"a" & \'b\'</b> \\n \\u0041 {"k": [1, {"x": null}]}'
CODE = "```python\ndef f(x):\n\treturn {'a': x}  # {{ x }}\n```\n"
LONG = [m for i in range(40) for m in (user(f"turn {i} " + "ab " * i), assistant(f"{i} {'z' * i}"))]

PLAIN = dict(
    one_user=ASK,
    one_turn=[*ASK, assistant("5")],
    two_turns=[*ASK, assistant("It is 5."), user("and 3 * 4?"), assistant("12")],
    pending=[*ASK, assistant("5"), user("sure?")],
    system_first=[system("Answer in one word."), *ASK, assistant("five")],
    system_only=[system("Answer in one word.")],
    system_twice=[system("a"), system("b"), *ASK, assistant("5")],
    system_late=[*ASK, assistant("5"), system("Now in French."), user("again"), assistant("cinq")],
    system_empty=[system(""), *ASK, assistant("5")],
    long=LONG,
    very_long=[user("lorem ipsum " * 3000), assistant("dolor " * 2000)],
    many_short=[m for _ in range(60) for m in (user("a"), assistant("b"))],
    empty_user=[user(""), assistant("What?")],
    empty_assistant=[*ASK, assistant(""), user("?"), assistant("5")],
    blanks=[user("  \n two  \n\n"), assistant("\t\n tab \n\n\n"), user(" "), assistant("x ")],
    newlines=[user("\n\na\r\nb\rc\n"), assistant("\n"), user("\u2028\u0085"), assistant("\f")],
    assistant_first=[assistant("Hello, I am a model."), *ASK, assistant("5")],
    assistant_twice=[*ASK, assistant("5"), assistant("That is five.")],
    user_twice=[*ASK, user("Please."), assistant("5")],
    unknown_role=[user("a"), {"role": "critic", "content": "bad"}, assistant("b")],
    emoji=[user("👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é😀"), assistant("😀" * 50), user("🇨🇭?"), assistant("🇫🇷")],
    right_to_left=[system(HEBREW), user(ARABIC), assistant(HEBREW + ARABIC)],
    combining=[user("e\u0301 a\u0308\u0304 Z\u0351\u036b\u0343"), assistant("é ≠ e\u0301 ﬁ ①")],
    cjk=[system("你是助手。"), user("漢字かな、한국어"), assistant("答：四十二。"), user("谢谢")],
    indic=[user("नमस्ते दुनिया क्षत्रिय"), assistant("ขอบคุณ ภาษาไทย")],
    controls=[user("a\x00b\x07c\x1b[0m\x7f"), assistant("\u200b\ufeff\u00a0x\u00ad")],
    private_use=[user("\ue000\uf8ff\U0010fffd"), assistant("\ue000\ue001a\ue002")],
    astral=[user("𝔘𝔫𝔦 𐍈 𝟙"), assistant("𓀀")],
    code=[user("Write f:\n" + CODE), assistant(CODE + "Done."), user("`x`"), assistant("~~~")],
    jinja_text=[user("{{ messages }} {% for %} {# no #}"), assistant("{%- raw -%}{{ 7*7 }}")],
    markup=[system(MARKUP), user(MARKUP), assistant(MARKUP)],
    sentinels=[user("CONTINUE_FINAL_MESSAGE_TAG "), assistant("CONTINUE_FINAL_MESSAGE_TAG x")],
    math=[user(r"\frac{1}{2} $x^2$ \n"), assistant(r"\boxed{42} \u00e9 % # &")],
    special_in_text=[
        user("<|im_end|> <|eot_id|><end_of_turn><｜User｜> <s></s><eos> <bos>"),
        assistant("<|im_start|>user\nhi<|im_end|> <start_of_turn> <｜end▁of▁sentence｜>"),
    ],
    almost_special=[user("<|im_end| > <| eot_id|> <|im_"), assistant("<end_of_turn <pad")],
    thinking=[*ASK, assistant(THINK + "5"), user("why?"), assistant(THINK + "because")],
    thinking_once=[*ASK, assistant(THINK + "5")],
    thinking_field=[*ASK, assistant("5", reasoning_content="\nI add\n"), user("k"), assistant("!")],
    thinking_other_names=[
        *ASK,
        assistant("5", thinking="a"),
        user("b"),
        assistant("c", reasoning="d"),
    ],
    thinking_odd=[*ASK, assistant("</think>a</think>b<think>"), user("?"), assistant("<think>x")],
    more_keys=[user("a", name="Bo", weight=0.5), assistant("b", prefix=True, tool_calls=None)],
    none_keys=[user("a", name=None), assistant("b", reasoning_content=None, tool_calls=None)],
    parts=[user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), assistant("c")],
)
WITH_TOOLS = dict(
    tools_unused=[*ASK, assistant("5")],
    tools_and_system=[system("Use tools."), *ASK, assistant("5")],
    tool_call=[*ASK, *CALLS],
    tool_answer=ANSWERED,
    tool_turns=[*ANSWERED, assistant("It is 5.5."), user("thanks"), assistant("bye")],
    tool_call_with_text=[
        *ASK,
        assistant("Let me see.", tool_calls=[call("add", {"a": -1, "b": 1e-9})]),
        tool("0"),
        assistant("zero"),
    ],
    tool_call_empty_text=[
        *ASK,
        assistant("", tool_calls=[call("add", {})]),
        tool(""),
        assistant("nothing"),
    ],
    tool_calls_together=[
        *ASK,
        assistant(None, tool_calls=[call("add", {"a": 1}), call("weather", {"c": "東京"})]),
        tool("1"),
        tool('{"t": "21 °C", "ok": true}'),
        assistant("21 °C in 東京"),
    ],
    tool_call_text_arguments=[
        *ASK,
        assistant(None, tool_calls=[call("add", '{"a": 1, "b": "ä"}')]),
        tool("1\r\n2"),
        assistant("1"),
    ],
    tool_call_bare=[
        *ASK,
        assistant(None, tool_calls=[{"name": "add", "arguments": {"a": 1}}]),
        tool("1"),
        assistant("1"),
    ],
    tool_call_nested=[
        *ASK,
        assistant(None, tool_calls=[call("f", {"x": [1, None, True, {"y": '"\\\n<&>'}], "é": 0})]),
        tool("<tool_response>\nx\n</tool_response>"),
        assistant("ok"),
    ],
    tool_loop=[
        *ANSWERED,
        assistant(THINK, tool_calls=[call("add", {"a": 1, "b": 1})]),
        tool("2"),
        assistant(THINK + "7.5"),
    ],
    tool_loop_with_reasoning=[
        *ASK,
        assistant(None, reasoning_content="call", tool_calls=[call("add", {"a": 1, "b": 1})]),
        tool("2"),
        assistant("2", reasoning_content="done"),
    ],
    tool_by_ipython=[*ASK, *CALLS, {"role": "ipython", "content": "5"}, assistant("5")],
)
VARIABLES = dict(
    no_thinking=dict(messages=ASK, variables={"enable_thinking": False}),
    with_thinking=dict(messages=ASK, variables={"enable_thinking": True, "thinking": True}),
    last_thinking=dict(
        messages=[*ASK, assistant(THINK + "5")], variables={"keep_last_thinking": True}
    ),
    date=dict(messages=PLAIN["two_turns"], variables={"date_string": "1 Jan 1970"}),
    tools_in_system=dict(
        messages=PLAIN["system_first"], tools=TOOLS, variables={"tools_in_user_message": False}
    ),
    own_tools=dict(messages=ASK, variables={"custom_tools": [ADD], "unused": {"a": [1, None]}}),
    own_bos=dict(messages=ASK, variables={"bos_token": "[BOS]"}),
    documents=dict(messages=ASK, documents=[{"title": "Añ", "text": "{{ x }}"}]),
    no_tools=dict(messages=PLAIN["two_turns"], tools=[]),
    rich_tools=dict(
        messages=ASK,
        tools=[
            schema("näme", "x" * 500, a={"anyOf": [{"type": "null"}, {"const": 1.0}]}),
            schema("no_arguments", ""),
        ],
    ),
)
CORPUS = (
    {name: dict(messages=messages) for name, messages in PLAIN.items()}
    | {name: dict(messages=messages, tools=TOOLS) for name, messages in WITH_TOOLS.items()}
    | VARIABLES
)
