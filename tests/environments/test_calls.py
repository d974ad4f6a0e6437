"""Tool calls: what a template renders is read back, and so is what models really write; what is no
call is told in words and never raises."""

import importlib.metadata
import json
import random
from pathlib import Path

import pytest
from conftest import lanes
from hostile_calls import long_texts, short_texts
from spent import spent
from tool_families import (
    FORMATS,
    ONE_CALL,
    SCHEMAS,
    calls_message,
    random_arguments,
    write_tool_family,
)

from rljax.data.text.template import ChatTemplate
from rljax.data.text.tokenizer import CharTokenizer, load_tokenizer
from rljax.environments.calls import assistant_message, parser
from rljax.errors import InputError

QUESTION = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: load_tokenizer(write_tool_family(root / family, family)) for family in FORMATS}


def written(tokenizer, message) -> str:
    """What the template writes for the assistant's turn, with its end."""
    options = dict(tools=SCHEMAS)
    text = tokenizer.render_chat([QUESTION, message], add_generation_prompt=False, **options)
    before = tokenizer.render_chat([QUESTION], add_generation_prompt=True, **options)
    common = next((i for i, (a, b) in enumerate(zip(text, before)) if a != b), len(before))  # noqa: B905
    return text[text.rfind("<", 0, common + 1) if common < len(before) else common :]


@pytest.mark.parametrize("family", FORMATS)
def test_auto_is_the_format_that_the_template_writes(tokenizers, family):
    assert parser("auto", tokenizers[family]).name == FORMATS[family]


@pytest.mark.parametrize("family", FORMATS)
def test_what_a_template_renders_is_read_back(tokenizers, family):
    """Ids of the rendered turn, decoded as a reply is, give names and arguments again."""
    tokenizer, rng = tokenizers[family], random.Random(family)
    form = parser(FORMATS[family], tokenizer)
    for round_ in range(40):
        count = 1 if family in ONE_CALL else 1 + round_ % 3
        calls = [
            (rng.choice(["weather", "look_up", "a1"]), random_arguments(rng)) for _ in range(count)
        ]
        ids = tokenizer.encode(written(tokenizer, calls_message(calls)))
        parsed = form.parse(form.decode(tokenizer, ids), SCHEMAS)
        assert not parsed.problem, (calls, parsed)
        assert [(call.name, call.arguments) for call in parsed.calls] == calls
        written_ids = [f"id{number:07d}" for number in range(count)]
        assert [call.id for call in parsed.calls] == (
            written_ids if family.startswith("mistral") else [""] * count
        )


@pytest.mark.parametrize("family", FORMATS)
def test_a_reply_as_a_message_renders_as_it_was_written(tokenizers, family):
    """The call of a reply, put into a message, gives the reply's text again."""
    tokenizer = tokenizers[family]
    form = parser("auto", tokenizer)
    message = calls_message([("weather", {"n": 3, "town": "Ulm"})])
    ids = tokenizer.encode(written(tokenizer, message))
    text = form.decode(tokenizer, ids)
    again = assistant_message(text, form.parse(text, SCHEMAS))
    assert len(again["tool_calls"][0]["id"]) == 9
    assert again["tool_calls"][0]["function"] == message["tool_calls"][0]["function"]
    assert form.parse(form.decode(tokenizer, tokenizer.encode(written(tokenizer, again)))) == (
        form.parse(text)
    )


def test_content_reasoning_and_ends_are_told_apart(tokenizers):
    qwen = tokenizers["qwen3"]
    form = parser("auto", qwen)
    ids = qwen.encode('<think>\nx\n</think>\n\nI look.\n<tool_call>\n{"name": "f"}\n</tool_call>')
    text = form.decode(qwen, [*ids, *qwen.eos_ids])
    parsed = form.parse(text)
    assert parsed.content == "I look." and parsed.reasoning == "x"
    assert parsed.said == "<think>\nx\n</think>\n\nI look." and parsed.calls[0].arguments == {}
    assert form.parse("no call\n\n") == form.parse("no call\n\n").__class__("no call\n\n")
    oss = tokenizers["gpt_oss"]
    form = parser("auto", oss)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"
    parsed = form.parse(form.decode(oss, [*oss.encode(said), oss.eos_ids[0]]))
    assert (parsed.content, parsed.reasoning, parsed.calls) == ("4", "hm", ())
    assert assistant_message(said, parsed) == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "hm",
    }
    assert set(form.stop_ids(oss)) == {oss.encode(t)[0] for t in ("<|return|>", "<|call|>")}
    llama = tokenizers["llama3"]
    assert llama.encode("<|eom_id|>")[0] in parser("llama3", llama).stop_ids(llama)


F = ("f", {"a": 1})
WILD = [  # what models write that no template does
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [F], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> ', [F], ""),
    ("hermes", 'Hm.<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', [F], "Hm."),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x\ny"}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": null}</tool_call>\nDone.',
        [("f", {"a": "x\ny"}), ("g", {})],
        "\nDone.",
    ),
    (
        "qwen3_coder",
        "<function=weather>\n<parameter=n>\n1\n</parameter>",
        [("weather", {"n": 1})],
        "",
    ),
    (
        "qwen3_coder",
        "Go.\n<tool_call>\n<function=weather>\n<parameter=flag>True</parameter>\n"
        "<parameter=town>\n\n1\n\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"flag": True, "town": "\n1\n"})],
        "Go.",
    ),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F], ""),
    (
        "llama3",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [F, ("g", {})],
        "",
    ),
    ("llama3", 'Sure:\n{"type": "function", "name": "f", "parameters": {"a": 1}}', [F], "Sure:"),
    (
        "llama3",
        "<|python_tag|>brave_search.call(query=\"a, 'b'\")",
        [("brave_search", {"query": "a, 'b'"})],
        "",
    ),
    (
        "llama3",
        "[f(a=1), g(b=[True, None], c={'d': -2.5})]",
        [F, ("g", {"b": [True, None], "c": {"d": -2.5}})],
        "",
    ),
    (
        "llama3",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "parameters": {}}]\n',
        [F, ("g", {})],
        "",
    ),
    ("llama3", '[{"name": "Bo", "age": 3}]', [], '[{"name": "Bo", "age": 3}]'),
    ("llama3", "[1, 2]", [], "[1, 2]"),
    (
        "llama3",
        'So: <|python_start|>{"name": "f", "parameters": {"a": 1}}<|python_end|>',
        [F],
        "So:",
    ),
    (
        "call_list",
        'Hm.\n<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</TOOLCALL>\n',
        [F, ("g", {})],
        "Hm.",
    ),
    (
        "call_list",
        '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}\n</tool_calls>',
        [F, ("g", {})],
        "",
    ),
    ("call_list", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', [F], ""),
    (
        "call_list",
        '<tool_calls>[{"name": "f", "arguments": {"a": "</tool_calls>"}}]</tool_calls> Done.',
        [("f", {"a": "</tool_calls>"})],
        " Done.",
    ),
    (
        "call_list",
        '<tool_call>{"name": "f"}</tool_call>',
        [],
        '<tool_call>{"name": "f"}</tool_call>',
    ),
    ("llama3", '{"name": "Bo", "age": 3}', [], '{"name": "Bo", "age": 3}'),
    ("llama3", '{"answer": [1]}', [], '{"answer": [1]}'),
    (
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        [F],
        "",
    ),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', [F], ""),
    (
        "harmony",  # vllm#22519: a header twice, no <|start|>, text behind the channel
        "<|channel|>analysis<|message|>I call.<|end|><|channel|>commentary<|start|>assistant"
        '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}',
        [F],
        "",
    ),
    ("harmony", '<|channel|>commentary to=functions.f code<|message|>{"a":1}<|end|>', [F], ""),
    (
        "harmony",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [("python", {"code": "print(1)"})],
        "",
    ),
    ("harmony", "<|channel|>commentary<|message|>First I look.<|end|>", [], "First I look."),
    ("harmony", "plain", [], "plain"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}] and so', [F], " and so"),
    ("mistral", 'Hm.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', [F, ("g", {})], "Hm."),
    ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}', [F], ""),
    (
        "deepseek_v3",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" '
        'string="false">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [("f", {"a": 1, "b": "2"})],
        "",
    ),
    ("gemma", "Sure.\n```tool_code\nprint(f(a=1))\ng()\n```", [F, ("g", {})], "Sure."),
    (
        "gemma",
        '```tool_code\nf(a=\'it\\\'s\\n\', b="""x"y""", c=r\'\\d\',)',
        [("f", {"a": "it's\n", "b": 'x"y', "c": "\\d"})],
        "",
    ),
    (
        "gemma",
        "<start_function_call>call:f{a:<escape>x}<escape>,b:[1,2.5]}<end_function_call>",
        [("f", {"a": "x}", "b": [1, 2.5]})],
        "",
    ),
    ("python", "So:\n```python\nprint(1)\n```\n", [("python", {"code": "print(1)"})], "So:"),
    ("python", "```py\na\n```\n```python\nb\n```", [("python", {"code": "b"})], "```py\na\n```"),
    ("python(tool='run', argument='x')", "```python\nb\n```", [("run", {"x": "b"})], ""),
    ("python", "```\nb\n```", [], "```\nb\n```"),
    ("tag(name='search')", "I <search> cats </search>", [("search", {"text": "cats"})], "I "),
    (
        "tag(name=('weather', 'calc'), argument='n')",
        "<weather>3</weather><calc>1<calc>",
        [("weather", {"n": 3})],
        "<calc>1<calc>",
    ),
    ("tag(name='weather')", "<weather>Ulm</weather>", [("weather", {"town": "Ulm"})], ""),
    ("", "<tool_call>", [], "<tool_call>"),
]


@pytest.mark.parametrize("name, text, calls, content", WILD)
def test_what_models_really_write_is_read(name, text, calls, content):
    parsed = parser(name, None).parse(text, SCHEMAS)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert parsed.problem == "" and parsed.content == content


BAD = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "JSON is wrong at character 36",
    ),
    ("hermes", '<tool_call>{"name": "f"} so</tool_call>', "stands behind"),
    ("hermes", 'I look: <tool_call>\n{"name": "f", }\n</tool_call>', "JSON is wrong"),
    ("hermes", "<tool_call></tool_call>", "JSON is wrong at character 1: expecting value"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
    ("hermes", '<tool_call>["f"]</tool_call>', "not an object"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "not an object with a value for each name",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}', "number"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}",
        "deeper than 64",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 99999, "deeper than 64"),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>' * 129,
        "call 129: a reply has at most 128 calls",
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", "no closing tag"),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "no function tag"),
    (
        "qwen3_coder",
        "<function=weather><parameter=rows>" + "[" * 99 + "]" * 99 + "</parameter></function>",
        "deeper than 64",
    ),
    (
        "qwen3_coder",
        '<function=weather><parameter=rows>["\\ud800"]</parameter></function>',
        "surrogate",
    ),
    ("call_list", '<tool_calls>[{"name": "f"}] so</tool_calls>', "stands behind"),
    ("call_list", '<TOOLCALL>[{"name": "f"}, 3]</TOOLCALL>', "not an object"),
    ("call_list", "<TOOLCALL>[]</TOOLCALL>", "empty"),
    ("call_list", "<|tool_call|>[", "JSON is wrong"),
    ("call_list", '<tool_calls>\n{"name": "f"}\n{"name": </tool_calls>', "JSON is wrong"),
    ("call_list", f"<tool_calls>{'{}' * 129}</tool_calls>", "names no tool"),
    ("llama3", '{"name": "f", "parameters": {"a": 1}', "JSON is wrong"),
    ("llama3", "<|python_tag|>print(1)", "no object"),
    ("llama3", "<|python_tag|>f.call(a=b)", "no literal"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>a=1<|call|>", "JSON is wrong"),
    ("harmony", "<|channel|>commentary to=functions.f", "message is missing"),
    ("mistral", "[TOOL_CALLS]", "JSON is wrong"),
    ("mistral", "[TOOL_CALLS] 3", "not an object"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f", "missing"),
    ("deepseek_v3", "<｜DSML｜function_calls>", "no invoke tag"),
    ("gemma", "```tool_code\nimport os\n```", "needed"),
    ("gemma", "```tool_code\nf(1)\n```", "name=value"),
    ("gemma", "```tool_code\nf(a='x\n```", "a string has no end"),
    ("gemma", "```tool_code\n\n```", "empty"),
    ("gemma", "<|tool_call>f{}", "call:"),
    ("python", "```python\nprint(1)", "not closed"),
]


@pytest.mark.parametrize("name, text, words", BAD)
def test_a_bad_call_is_told_in_words(name, text, words):
    parsed = parser(name, None).parse(text, SCHEMAS)
    assert words in parsed.problem, parsed
    assert parsed.problem.startswith("call ") and len(parsed.problem) < 200
    # A problem goes back to the policy: no token of a format may be in it.
    assert not any(mark in parsed.problem for mark in ("<", "|", "[", "```"))
    if not parsed.calls:
        assert assistant_message(text, parsed) == {"role": "assistant", "content": text}


def test_many_brackets_are_not_depth():
    flat = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>' % ([[]] * 200)
    assert parser("hermes", None).parse(flat).calls[0].arguments == {"a": [[]] * 200}


def test_calls_before_a_bad_one_are_kept():
    good = '<tool_call>{"name": "f"}</tool_call>'
    parsed = parser("hermes", None).parse(good * 2 + "<tool_call>{" + good)
    assert [call.name for call in parsed.calls] == ["f", "f"]
    assert parsed.problem.startswith("call 3: ")


# -- what is drafted, mentioned or shown

ARGUMENTS = '{"a": 1, "b": 2}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
FENCED = f"function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```"
INVOKED = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">'
    "1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
FORMS = [
    ("hermes", CALL),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    ("llama3", f'{{"name": "add", "parameters": {ARGUMENTS}}}'),
    ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}'),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}"),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]'),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FENCED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("deepseek_v3", INVOKED),
    ("gemma", "```tool_code\nadd(a=1, b=2)\n```"),
    ("gemma", "<|tool_call>call:add{a:1,b:2}<tool_call|>"),
    ("python(tool='add')", "```python\nadd(1, 2)\n```"),
    ("tag(name='add')", "<add>1</add>"),
    ("call_list", f'<tool_calls>[{{"name": "add", "arguments": {ARGUMENTS}}}]</tool_calls>'),
    ("call_list", f'<TOOLCALL>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</TOOLCALL>'),
]
REASONING = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
]


def names_of(name, text, **how):
    parsed = parser(name, None).parse(text, [], **how)
    return [call.name for call in parsed.calls], parsed.problem


@pytest.mark.parametrize("first, last", REASONING)
@pytest.mark.parametrize("name, call", FORMS)
def test_a_draft_is_no_call(name, call, first, last):
    made = (["add"], "")
    for text in (
        f"{first}\nmaybe {call}, no.\n{last}\n\nThe answer is 3.",
        f"{first}\nmaybe\n{call}\nno.\n{last}\n\nThe answer is 3.",
        f"maybe\n{call}\n{last}\n\nThe answer is 3.",  # the prompt has opened it
        f"{first}\nmaybe\n{call}",  # and has not closed it
    ):
        assert names_of(name, text) == ([], ""), text
    assert names_of(name, f"maybe\n{call}", begun=f"{first}\n") == ([], "")
    for text in (
        f"{first}\nplan\n{last}\n\n{call}",
        f"{first}plan{last}{call}",
        f"{first}\nmaybe\n{call}\n{last}\n\n{call}",
        f"maybe\n{call}\n{last}\nI look.\n{call}",
        f"{first}\n\n{last}\n\n{call}",
        f"{first}a{last}\n{call}\n{first}\nor {call}?\n{last}\nDone.",
    ):
        assert names_of(name, text) == made, text
    assert names_of(name, f"maybe\n{call}\n{last}\n{call}", begun=f"{first}\n") == made
    assert names_of(name, call, begun=f"{first}\n") == made  # at once: nothing is drafted


@pytest.mark.parametrize("name, call", FORMS)
def test_what_is_shown_in_code_is_no_call(name, call):
    if name.startswith("python"):
        return  # there a block of code is the call
    if "```" not in call:
        shown = f"A call looks like this:\n```\n{call}\n```\nbut I need none: 3."
        assert names_of(name, shown) == ([], "")
        assert names_of(name, f"{shown}\nNow:\n{call}") == (["add"], "")
        assert names_of(name, f"```\n{call}\n```") == (["add"], "")  # nothing but code is said
    if "\n" not in call:
        assert names_of(name, f"A call looks like `{call}` but I need none: 3.") == ([], "")


@pytest.mark.parametrize(
    "name, tag",
    [
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<tool_call>"),
        ("qwen3_coder", "<function=f>"),
        ("mistral", "[TOOL_CALLS]"),
        ("call_list", "<tool_calls>"),
        ("call_list", "<|tool_call|>"),
        ("llama3", "<|python_tag|>"),
        ("llama3", "<|python_start|>"),
        ("llama3", '{"name": ...}'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>"),
        ("deepseek_v3", "<｜DSML｜function_calls>"),
        ("deepseek_v3", '<｜DSML｜invoke name="f">'),
        ("gemma", "<|tool_call>"),
        ("gemma", "<start_function_call>"),
        ("harmony", "to=functions.f"),
        ("tag(name='f')", "<f>"),
    ],
)
def test_a_mention_of_a_tag_is_text(name, tag):
    for text in (
        f"I would use the {tag} tag for that, but the answer is 3.",
        f"I would use the `{tag}` tag for that, but the answer is 3.",
        f"The tag is {tag}.",
        f"The tag is {tag}",
    ):
        assert names_of(name, text) == ([], ""), text
        assert parser(name, None).parse(text, []).content == text


@pytest.mark.parametrize(
    "text",
    [
        "The form is <tool_call>{...}</tool_call>, but the answer is 3.",
        'The form is\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>\nbut the answer is 3.",
        'It is:\n<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>\nThe answer: 3.',
        "<tool_call>...</tool_call> is the form.",
        "<tool_call> is the tag.",
        "I need no <tool_call></tool_call> tags: 3.",
        'I could write <tool_call>{"name": "f", "arguments": {}}</tool_call>, but 3 it is.',
        'The call is "<tool_call>{"name": "f", "arguments": {}}</tool_call>".',
    ],
)
def test_a_form_is_text(text):
    assert names_of("hermes", text) == ([], "")


@pytest.mark.parametrize(
    "text",
    [
        "</think>",
        "a </think> b",
        "<think>",
        "[/THINK]",
        "<tool_call>",
        "</tool_call>",
        "`x",
        "```",
        "<tool_call>{}</tool_call>",
        "```\nx\n```",
    ],
)
def test_a_tag_in_an_argument_is_text(text):
    quoted = json.dumps({"text": text})
    coder = (
        "<tool_call>\n<function=add>\n<parameter=text>\n%s\n</parameter>\n</function>\n</tool_call>"
    )
    for name, call, between in (
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {quoted}}}\n</tool_call>', "\n"),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{quoted}", ""),
        ("llama3", f'{{"name": "add", "parameters": {quoted}}}', "; "),
        ("qwen3_coder", coder % text, "\n"),
        ("gemma", f'<|tool_call>call:add{{text:<|"|>{text}<|"|>}}<tool_call|>', ""),
    ):
        for said in (call, f"<think>\nhm\n</think>\n\n{call}", call + between + call):
            parsed = parser(name, None).parse(said, [])
            assert not parsed.problem and parsed.calls, said
            assert all(one.arguments == {"text": text} for one in parsed.calls), said
            assert len(parsed.calls) == 1 + (said == call + between + call)


BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}\n</tool_call>'


@pytest.mark.parametrize(
    "name, text, calls",
    [
        ("hermes", f"{BROKEN}\n{CALL}", 1),
        ("hermes", f"{CALL}\n{BROKEN}\n{CALL}", 2),
        ("hermes", f'<tool_call>\n{{"name": "add", "arg\n{CALL}', 1),  # it has no closing tag
        # A call in the texts of one that cannot be read is none.
        (
            "hermes",
            '<tool_call>{"name": "write", "arguments": {"text": "<tool_call>{"name": "rm", '
            '"arguments": {}}</tool_call>"}}</tool_call>',
            0,
        ),
        (
            "qwen3_coder",
            f"<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>\n{FORMS[1][1]}",
            1,
        ),
        ("mistral", f'[TOOL_CALLS]add[ARGS]{{"a": }}[TOOL_CALLS]add[ARGS]{ARGUMENTS}', 1),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "add", "a": }]', 1),
        ("mistral", '[TOOL_CALLS] [{"name": "a"}, {"arguments": {}}, {"name": "b"}]', 2),
        ("llama3", '{"name": "add", "parameters": {"a": }}; {"name": "add", "parameters": {}}', 1),
        ("deepseek_v3", FORMS[6][1].replace('"b": 2', '"b": ') + FORMS[6][1], 1),
        ("gemma", "<|tool_call>call:add{a:<tool_call|><|tool_call>call:add{a:1}<tool_call|>", 1),
        ("gemma", "```tool_code\nadd(a=1)\nadd(1)\n```", 1),
        (
            "harmony",
            '<|channel|>commentary to=functions.f<|message|>{"a": <|call|><|start|>assistant'
            '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
            1,
        ),
    ],
)
def test_a_bad_call_spoils_no_good_one(name, text, calls):
    parsed = parser(name, None).parse(text, [])
    assert len(parsed.calls) == calls and parsed.problem.startswith("call ")


def test_the_answer_and_the_reasoning_of_a_reply():
    parsed = parser("hermes", None).parse(f"<think>\nwhy {CALL}\n</think>\n\nI look.\n{CALL}\nSo.")
    assert (parsed.content, parsed.reasoning) == ("I look.\nSo.", f"why {CALL}")
    assert parsed.said == f"<think>\nwhy {CALL}\n</think>\n\nI look.\nSo."
    parsed = parser("hermes", None).parse("why\n</think>\n3", [])
    assert (parsed.content, parsed.reasoning, parsed.said) == ("3", "why", "why\n</think>\n3")
    unclosed = parser("hermes", None).parse("<think>\nwhy", [])
    assert (unclosed.content, unclosed.reasoning) == ("", "why")
    # A tool may be called by such a tag, and a format of one's own knows no places.
    assert [c.name for c in parser("tag(name='think')", None).parse("<think>hm</think>").calls] == [
        "think"
    ]


ALL = [*dict.fromkeys(FORMATS.values()), "call_list", "python", "tag(name=('search', 'f'))", ""]


@pytest.mark.parametrize("count", lanes([1_000], [10_000]))
@pytest.mark.parametrize("name", ALL)
def test_hostile_texts_never_raise(name, count):
    form = parser(name, None)
    problems = calls = 0
    texts = [*short_texts(count, seed=1)]
    if name == "call_list":  # whose tags are not among the pieces
        texts += [f"<TOOLCALL>[{text}]</TOOLCALL>" for text in texts]
        texts += ['<TOOLCALL>[{"name": "f"}]</TOOLCALL>' + " " * n for n in range(3)]
    for text in texts:
        parsed = form.parse(text, SCHEMAS)
        problems += bool(parsed.problem)
        calls += len(parsed.calls)
        assert isinstance(assistant_message(text, parsed)["content"], str)
    many = count == 10_000
    assert not many or not name or calls > 2, "the texts reach the calls"
    assert problems > (100 if many else 5) or name in ("", "tag(name=('search', 'f'))")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_time_of_a_hostile_text_grows_with_its_length(name):
    """Ten times the length: at most about ten times the processor time, 25 to leave room."""
    form = parser(name, None)

    def seconds(text, times: int) -> float:
        spans = []
        for _ in range(times):
            with spent() as found:
                form.parse(text, SCHEMAS)
            spans += found
        return min(spans)

    for (what, short), (_, long) in zip(long_texts(20_000), long_texts(200_000), strict=True):
        # Once where that is enough, as it nearly always is: there are a thousand texts.
        linear = (seconds(long, n) < 25 * max(seconds(short, n), 2e-4) for n in (1, 3))
        assert any(linear), (name, what)


# -- which format


def test_a_format_of_ones_own_and_unknown_ones(tmp_path, tokenizers):
    own = tmp_path / "own.py"
    own.write_text(
        "from rljax.environments.calls import Format, Parsed\n"
        "def shout(mark='!'):\n    return Format('shout', lambda t, s: Parsed(t.strip(mark)))\n"
        "def wrong():\n    return 3\n"
    )
    assert parser(f"{own}:shout(mark='?')", None).parse("a?").content == "a"
    with pytest.raises(InputError, match="returns no format"):
        parser(f"{own}:wrong", None)
    with pytest.raises(InputError, match="did you mean hermes"):
        parser("hermess", None)
    for bad in ("tag(name='a b')", "tag(name=())"):
        with pytest.raises(InputError, match="tag"):
            parser(bad, None)


def test_auto_without_calls_in_the_template(tmp_path):
    assert parser("auto", CharTokenizer("abc")).name == ""
    gemma = load_tokenizer(write_tool_family(tmp_path / "gemma", "gemma"))
    assert parser("auto", gemma).name == "gemma", "its template renders no calls, it has a way"
    folder = write_tool_family(tmp_path / "other", "qwen3_coder")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert parser("auto", load_tokenizer(folder)).name == ""


@pytest.mark.parametrize(
    "first, between, last, name",
    [
        ("<tool_calls>[", ", ", "]</tool_calls>", "call_list"),  # Apriel 1.5
        ("<tool_calls>\\n", "\\n", "\\n</tool_calls>", "call_list"),  # MiniMax-M1
        ("<TOOLCALL>[", ", ", "]</TOOLCALL>", "call_list"),  # Nemotron Nano 2
        ("<|tool_call|>[", ", ", "]<|/tool_call|>", "call_list"),  # Phi-4-mini
        ("<|tool_call|>[", ", ", "]", "call_list"),  # Granite 3
        ("[", ", ", "]", "llama3"),  # xLAM 2
        ("", "; ", "", "llama3"),
        ("<CALLS>[", ", ", "]</CALLS>", ""),  # not known: its tags would be left as content
        ("call: ", ", ", "", ""),
        ("", ", ", " end", ""),
    ],
)
def test_auto_leaves_nothing_of_a_call_as_content(tmp_path, first, between, last, name):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        f"{{% if m.tool_calls %}}{{{{ '{first}' }}}}{{% for c in m.tool_calls %}}"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
        f"{{{{ '{between}' if not loop.last else '' }}}}{{% endfor %}}"
        f"{{{{ '{last}' }}}}{{% endif %}}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    for opened in ("<think>\n", ""):  # which a finished turn may lack
        tokenizer = PublishedTemplate(template.replace("<think>\n", opened))
        form = parser("auto", tokenizer)
        assert form.name == name
        if name:
            calls = [("weather", {"town": "Ulm"}), ("a1", {"n": [1, {"x": "]"}]})]
            text = tokenizer.render_chat([QUESTION, calls_message(calls)])
            said = text.rpartition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
            parsed = form.parse(said, SCHEMAS)
            assert [(call.name, call.arguments) for call in parsed.calls] == calls
            assert parsed.content == "" and not parsed.problem


PUBLISHED = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "gptoss": "harmony",
    "gemma4": "gemma",
    "gemma4_v5": "gemma",
    "deepseekv3": "deepseek_v3",
    "llama3": "",
    "phi3": "",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_auto_reads_templates_as_they_are_published(name):
    """Those that trl ships, where it is installed: models' own, not ours."""
    try:
        folder = Path(importlib.metadata.distribution("trl").locate_file("trl/chat_templates"))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("trl is not installed")
    tokenizer = PublishedTemplate((folder / f"{name}.jinja").read_text(encoding="utf-8"))
    form = parser("auto", tokenizer)
    assert form.name == PUBLISHED[name]
    rng = random.Random(name)
    for _ in range(10 if form.name else 0):
        calls = [(rng.choice(["weather", "a1"]), random_arguments(rng))]
        parsed = form.parse(written(tokenizer, calls_message(calls)), SCHEMAS)
        assert [(call.name, call.arguments) for call in parsed.calls] == calls


class PublishedTemplate:
    """As much of a tokenizer as "auto" asks."""

    has_chat_template, special_ids = True, frozenset()

    def __init__(self, text: str):
        self._template = ChatTemplate(text, "published.jinja")

    def encode(self, text):
        return [*text.encode()]

    def render_chat(self, messages, **options):
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        options = {"add_generation_prompt": False, **options}
        return self._template.render(messages, special_tokens=special, **options)
