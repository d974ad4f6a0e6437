"""Chat templates: what they render, which tokens the assistant wrote, what broken ones say."""

import datetime

import pytest
from tiny_refusal import refused
from tiny_tokenizer import FORGETFUL, LLAMA_LIKE, QWEN_LIKE, write_tokenizer

from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.text.chat import ChatTemplate, RewrittenTurn, encode_conversation, validate_messages
from rljax.data.text.tokenizer import HuggingFaceTokenizer
from rljax.errors import InputError


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


USER = chat(("user", "hi"))
CHAT = chat(
    ("system", "sort"),
    ("user", "3 1 2"),
    ("assistant", " the answer\nis 1 2 3 "),
    ("user", "and é😀?"),
    ("assistant", "é😀\n\n"),
    ("tool", "42"),
    ("assistant", "done"),
)


def render(template, messages=USER, tools=None, documents=None, **special_tokens):
    return ChatTemplate(template, "test.jinja").render(
        messages,
        special_tokens=special_tokens,
        add_generation_prompt=True,
        tools=tools,
        documents=documents,
    )


def test_chatml_text():
    messages = chat(("user", "hi"), ("assistant", "yo"))
    assert render(QWEN_LIKE, messages) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'a': 'é<&', 'b': [1]} | tojson }}", '{"a": "é<&", "b": [1]}'),
        ("{{ tools[0].function | tojson(indent=2) }}", '{\n  "name": "f"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{% if x %}\n    y\n{% endif %}\nz\n", "z"),
        ("{{ bos_token }}|{{ missing_token }}", "<s>|"),
        ("{{ messages[0]['content'].split('h')[-1] ~ '-' * 3 ~ 2 ** 3 }}", "i---8"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", "5"),
    ],
)
def test_what_templates_may_use(template, expected):
    assert render(template, tools=[{"name": "f"}], bos_token="<s>") == expected


@pytest.mark.parametrize(("name", "form"), [("tools", "parameters"), ("documents", "title")])
def test_tools_and_documents_that_fail_are_named(name, form):
    """Without them the template renders, so it is not the messages' roles."""
    template = f"{{% for x in {name} or [] %}}{{{{ x.a.b.c }}}}{{% endfor %}}x"
    error = refused(lambda: render(template, **{name: [{"odd": 1}]}), f"fails on the '{name}'")
    assert form in error and "roles" not in error
    broken = f"{{{{ messages[0].a.b }}}}{template}"
    refused(lambda: render(broken, **{name: [{"odd": 1}]}), "fails on 1 messages with roles")


def test_the_date_is_the_one_given():
    now = datetime.datetime(2024, 7, 26)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "t", now=now)
    text = template.render(USER, special_tokens={}, add_generation_prompt=True)
    assert text == "26 Jul 2024"


def test_text_parts_are_joined_and_other_keys_survive():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    checked = validate_messages([{"role": "user", "content": parts, "name": "Bo"}, calls])
    assert checked[0] == {"role": "user", "content": "ab", "name": "Bo"}
    assert checked[1] == {"role": "assistant", "tool_calls": [{"name": "f"}]}


def expected_of(tokenizer, pieces):
    """Ids and mask of separately encoded pieces (text, 0 or 1)."""
    ids, mask = [], []
    for text, learned in pieces:
        piece = tokenizer.encode(text)
        ids += piece
        mask += [learned] * len(piece)
    return ids, mask


@pytest.mark.smoke
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_mask_token_by_token_chatml(tmp_path, trim_offsets):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, trim_offsets=trim_offsets))
    pieces = []
    for message in CHAT:
        pieces.append((f"<|im_start|>{message['role']}\n", 0))
        pieces.append((message["content"] + "<|im_end|>", int(message["role"] == "assistant")))
        pieces.append(("\n", 0))
    assert encode_conversation(tokenizer, CHAT) == expected_of(tokenizer, pieces)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_mask_token_by_token_with_bos_and_no_newline_after_turns(tmp_path, trim_offsets):
    folder = write_tokenizer(tmp_path, LLAMA_LIKE, bos="<s>", trim_offsets=trim_offsets)
    tokenizer = HuggingFaceTokenizer(folder)
    pieces = [("<s>", 0)]
    for message in CHAT:
        pieces.append((f"<|im_start|>{message['role']}\n\n", 0))
        content = message["content"].strip() + "<|im_end|>"
        pieces.append((content, int(message["role"] == "assistant")))
    assert encode_conversation(tokenizer, CHAT) == expected_of(tokenizer, pieces)


@pytest.mark.smoke
@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("end", ["\n", " "])
def test_a_turn_without_an_end_of_its_own_ends_with_the_end_token(tmp_path, trim_offsets, end):
    # " 4" would be one token, but the sampler is given a prompt that ends with the space.
    template = (
        f"{{% set end = '{end}' %}}"
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ end }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    folder = write_tokenizer(tmp_path, template, trim_offsets=trim_offsets)
    tokenizer = HuggingFaceTokenizer(folder)
    messages = chat(("user", "x"), ("assistant", "42"))
    ids, mask = encode_conversation(tokenizer, messages)
    prompt = tokenizer.encode_chat(messages[:1])
    assert (ids, mask) == (prompt + tokenizer.encode("42<|im_end|>"), [0] * len(prompt) + [1, 1, 1])
    with pytest.raises(RewrittenTurn):  # the first turn has no end at which decoding stops
        encode_conversation(tokenizer, messages + messages)


def test_prompt_of_the_sampler_is_the_prefix_of_the_conversation(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    ids, mask = encode_conversation(tokenizer, CHAT[:3])
    prompt = tokenizer.encode_chat(CHAT[:2])
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt)] == [0] * len(prompt) and mask[len(prompt)] == 1


def test_no_assistant_no_mask(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    assert sum(encode_conversation(tokenizer, CHAT[:2])[1]) == 0


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, FORGETFUL))
    thinking = chat(
        ("user", "a"), ("assistant", "<think>x</think>1"), ("user", "b"), ("assistant", "2")
    )
    encode_conversation(tokenizer, thinking[:2])
    with pytest.raises(InputError, match="not append-only: message 1 "):
        encode_conversation(tokenizer, thinking)


def learned_text(tokenizer, ids, mask):
    return tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], False)


@pytest.mark.parametrize(
    ("supplied", "said", "learned"),
    [
        ("<think>\\n", "1", "\n</think>\n\n1<|im_end|>"),
        ("<think>\\n", "<think>\nR\n</think>\n\n1", "R\n</think>\n\n1<|im_end|>"),
        ("<think>\\n", "R\n</think>\n\n1", "R\n</think>\n\n1<|im_end|>"),
        ("<think>", "<think>R</think>1", "R</think>1<|im_end|>"),
        ("<think>\\n\\n</think>\\n\\n", "1", "1<|im_end|>"),
    ],
)
def test_what_the_generation_prompt_supplies_is_not_learned(tmp_path, supplied, said, learned):
    """DeepSeek R1's template: the prompt opens the reasoning, and the history has none."""
    template = QWEN_LIKE.replace("assistant\\n'", f"assistant\\n{supplied}'").replace(
        "+ message.content", "+ message.content.split('</think>')[-1].lstrip()"
    )
    assert template.count("think") > 1
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    ids, mask = encode_conversation(tokenizer, chat(("user", "a"), ("assistant", said)))
    prompt = tokenizer.encode_chat(chat(("user", "a")))
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])
    assert learned_text(tokenizer, ids, mask) == learned


def test_reasoning_behind_a_prompt_that_has_closed_it_is_refused(tmp_path):
    template = QWEN_LIKE.replace(
        "assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'"
    ).replace("+ message.content", "+ message.content.split('</think>')[-1].lstrip()")
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    thought = chat(("user", "a"), ("assistant", "<think>because</think>1"))
    with pytest.raises(InputError, match="leaves out the reasoning of message 1"):
        encode_conversation(tokenizer, thought)


def test_a_turn_that_begins_otherwise_than_its_prompt_is_refused(tmp_path):
    template = QWEN_LIKE.replace("assistant\\n'", "model\\n'")
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    with pytest.raises(InputError, match="otherwise than its generation prompt"):
        encode_conversation(tokenizer, chat(("user", "a"), ("assistant", "1")))


def test_a_greeting_before_the_first_question_is_read_only(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    hello = chat(("assistant", "Hello"), ("user", "a"), ("assistant", "1"))
    assert learned_text(tokenizer, *encode_conversation(tokenizer, hello)) == "1<|im_end|>"
    assert not any(encode_conversation(tokenizer, hello[:1])[1])


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("greetings", [["Hello"], ["Hello", "there"]])
def test_a_greeting_behind_instructions_is_read_only(tmp_path, role, greetings):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    hello = chat((role, "kind"), *(("assistant", text) for text in greetings))
    talk = hello + chat(("user", "a"), ("assistant", "1"))
    assert learned_text(tokenizer, *encode_conversation(tokenizer, talk)) == "1<|im_end|>"
    kept, counts = encode_rows(
        load_rows([{"messages": talk}], "rows", "examples"), tokenizer, "examples", max_tokens=99
    )
    assert [learned_text(tokenizer, *item) for item in kept] == ["1<|im_end|>"]
    assert counts["unasked_turns"] == len(greetings)


@pytest.mark.parametrize(
    "talk",
    [
        chat(("system", "a?"), ("assistant", "1")),
        chat(("system", "a?"), ("assistant", "1"), ("tool", "b"), ("assistant", "1")),
    ],
    ids=["an instruction alone", "an agent's task"],
)
def test_an_instruction_that_no_question_follows_is_answered(tmp_path, talk):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    turns = sum(message["role"] == "assistant" for message in talk)
    learned = learned_text(tokenizer, *encode_conversation(tokenizer, talk))
    assert learned == turns * "1<|im_end|>"


# Writes messages of the assistant in a row, and what tools answer between them, as one turn.
JOINED = """\
{%- set ns = namespace(open=false) %}
{%- for m in messages %}
    {%- if m.role not in ('assistant', 'tool') or not ns.open %}
        {{- '<|im_end|>\\n' if not loop.first }}
        {{- '<|im_start|>' + ('assistant' if m.role == 'tool' else m.role) + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- SEPARATOR }}
    {%- endif %}
    {%- set ns.open = m.role in ('assistant', 'tool') %}
    {{- '<answer>' + m.content + '</answer>' if m.role == 'tool' else m.content }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def learned_of(tokenizer, row, kind="examples"):
    items, _ = encode_rows(load_rows([row], "rows", kind), tokenizer, kind, max_tokens=999)
    if kind == "pairs":
        return [learned_text(tokenizer, i.chosen_ids, i.chosen_mask) for i in items]
    return [learned_text(tokenizer, *item) for item in items]


@pytest.mark.parametrize("separator", ["''", "'\\n\\n'"])
def test_joined_turns_are_each_learned_alone(tmp_path, separator):
    """Also behind a turn that is context only, and a tool's answer within the turn."""
    template = JOINED.replace("SEPARATOR", separator)
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    asked, (one, two, three) = chat(("user", "a")), chat(*(("assistant", x) for x in "123"))
    assert learned_of(tokenizer, {"messages": [*asked, one, two, three]}) == [
        "1<|im_end|>",
        "2<|im_end|>",
        "3<|im_end|>",
    ]
    context = {**one, "weight": 0}
    assert learned_of(tokenizer, {"messages": [*asked, context, two]}) == ["2<|im_end|>"]
    told = [*asked, context, *chat(("tool", "7")), two]
    assert learned_of(tokenizer, {"messages": told}) == ["2<|im_end|>"]
    pair = {"prompt": asked, "chosen": [one, two], "rejected": [one, three]}
    assert learned_of(tokenizer, pair, "pairs") == ["1<|im_end|>2<|im_end|>"]


def test_turns_in_a_row_that_do_not_continue_the_prompt_are_refused_with_a_fix(tmp_path):
    """OLMo 2 writes a line break behind an answer that is not the last message."""
    between = "+ ('' if loop.last and message.role == 'assistant' else '\\n') }}"
    template = QWEN_LIKE.replace("+ '\\n' }}", between)
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    asked, turns = chat(("user", "a")), chat(("assistant", "1"), ("assistant", "2"))
    one = [*asked, *chat(("assistant", "12"))]
    assert learned_text(tokenizer, *encode_conversation(tokenizer, one)) == "12<|im_end|>"
    with pytest.raises(InputError, match="write both turns of the assistant in a row as one"):
        encode_conversation(tokenizer, [*asked, *turns])


# Mistral's own: the system message is written into the last message of the user, if that is last.
INSTRUCTED = """\
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>' + (BEFORE if loop.last else '') + m.content }}
        {{- (AFTER if loop.last else '') + '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{- ' ' }}
        {%- generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TEXT = "messages[0].content + '\\n\\n'"


@pytest.mark.parametrize(("before", "after"), [(TEXT, "''"), ("''", TEXT)])
@pytest.mark.parametrize("marked", [True, False])
def test_a_system_message_that_moves_to_the_last_question(tmp_path, before, after, marked):
    template = INSTRUCTED.replace("BEFORE", before).replace("AFTER", after)
    if not marked:
        template = template.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    told, asked = chat(("system", "kind")), chat(("user", "a"))
    turn, more = chat(("assistant", "1")), chat(("user", "b"), ("assistant", "2"))
    for row in (
        {"messages": [*told, *asked, *turn]},
        {"prompt": [*told, *asked], "completion": turn},
        {"messages": [*told, *asked, *turn, *more]},
    ):
        texts = [" 1<|im_end|>", " 2<|im_end|>"][: 1 + (len(row.get("messages", ())) > 3)]
        assert learned_of(tokenizer, row) == texts
    (item,), _ = encode_rows(
        load_rows([{"messages": [*told, *asked, *turn]}], "rows", "examples"),
        tokenizer,
        "examples",
        max_tokens=99,
    )
    read = tokenizer.decode([i for i, m in zip(*item, strict=True) if not m], False)
    assert read == tokenizer.render_chat([*told, *asked]) and "kind" in read
    pair = {"prompt": [*told, *asked], "chosen": turn, "rejected": more[1:]}
    assert learned_of(tokenizer, pair, "pairs") == [" 1<|im_end|>"]
    pair = {"prompt": [*told, *asked], "chosen": [*turn, *more], "rejected": turn}
    assert learned_of(tokenizer, pair, "pairs") == [" 1<|im_end|> 2<|im_end|>"]


def test_a_system_message_that_no_prompt_has_is_refused(tmp_path):
    template = INSTRUCTED.replace("BEFORE", "''").replace("AFTER", "''")
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    talk = chat(("system", "kind"), ("user", "a"), ("assistant", "1"))
    with pytest.raises(InputError, match="content of message 0, of role 'system'") as caught:
        encode_conversation(tokenizer, talk)
    assert "write it into a message of the user" in str(caught.value)


def test_a_stop_token_within_a_turn_is_refused(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    with pytest.raises(InputError, match="holds the stop token '<|im_end|>'"):
        encode_conversation(tokenizer, chat(("user", "a"), ("assistant", "1<|im_end|>2")))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", "not a list"),
        ({"role": "user", "content": "hi"}, "not a list"),
        (None, "not a list"),
        ([], "empty"),
        (["hi"], "message 0 is not an object"),
        ([*USER, None], "message 1 is not an object"),
        ([{"content": "hi"}], "'role'"),
        ([{"role": "", "content": "hi"}], "'role'"),
        ([{"role": 1, "content": "hi"}], "'role'"),
        ([{"role": "user"}], "'content'"),
        ([{"role": "user", "content": None}], "'content'"),
        ([{"role": "user", "content": 5}], "'content'"),
        ([{"role": "user", "content": {"text": "hi"}}], "'content'"),
        ([{"role": "user", "content": ["hi"]}], "part that is not text"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "not text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "not text"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_malformed_messages(messages, says):
    with pytest.raises(InputError) as caught:
        validate_messages(messages, where="data.jsonl: row 3")
    assert "data.jsonl: row 3" in str(caught.value) and says in str(caught.value)


BROKEN_TEMPLATES = [
    ("{% for m in messages %}", "syntax error in line 1"),
    ("a\nb\n{{ messages[0 }}", "syntax error in line 3"),
    ("{% unknown %}", "syntax error"),
    ("{{ messages | nosuchfilter }}", "nosuchfilter"),
    ("{{ 'x' ", "syntax error"),
    ("(" * 3 + "{{ " + "(" * 5000 + " }}", "chat template"),
    ("{{ raise_exception('Only user roles!') }}", "Only user roles!"),
    ("{{ missing.attribute }}", "missing"),
    ("{{ missing() }}", "missing"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ 'a' + 1 }}", "TypeError"),
    ("{{ messages[0]['content'].__class__.__mro__ }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{% include 'other' %}", "chat template"),
    ("{% for i in range(9999) %}{{ 'abc' * 33333 }}{% endfor %}", "writes more than"),
    ("{{ 'a' * 9999999999 }}", "too much memory"),
    ("{{ messages | tojson(indent='x', nonsense=1) }}", "TypeError"),
    ("{{ {'a': raise_exception} | tojson }}", "TypeError"),
    ("{{ '\\ud800' }}", "surrogate"),
]


@pytest.mark.parametrize(("template", "says"), BROKEN_TEMPLATES)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_broken_template(tmp_path, name, template, says):
    in_config = name == "tokenizer_config.json"
    write_tokenizer(tmp_path, template if in_config else None)
    if not in_config:
        (tmp_path / name).write_text(template)
    with pytest.raises(InputError) as caught:
        HuggingFaceTokenizer(tmp_path).encode_chat(USER)
    message = str(caught.value).replace(str(tmp_path), "")
    assert name in message and says in message


def test_no_template_at_all(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "qwen", None))
    with pytest.raises(InputError, match="qwen has no chat template"):
        tokenizer.encode_chat(USER)
    named = [{"name": "rag", "template": "x"}]
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "named", named))
    with pytest.raises(InputError, match="only .'rag'"):
        tokenizer.encode_chat(USER)


def test_no_template_sees_which_turns_are_learned():
    messages = [*USER, {"role": "assistant", "content": "b", "learn": False}]
    text = render("{{ messages | tojson }}", messages)
    assert text == render("{{ messages | tojson }}", [*USER, {**messages[1]} | {"learn": None}])
    assert "learn" not in text and '"content": "b"' in text
