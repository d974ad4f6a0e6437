"""Messages of a row against what the chat template makes of them: what is left out is named, and
what a template writes in its own way is no difference."""

import json

import pytest
from family_tokenizers import FAMILIES, write_family
from tiny_tokenizer import QWEN_LIKE, write_tokenizer

from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.text.chat import encode_conversation, prompt_text
from rljax.data.text.contents import split_reasoning, unwritten_tools
from rljax.data.text.tokenizer import CharTokenizer, HuggingFaceTokenizer
from rljax.errors import InputError
from rljax.serving.fields import RequestLimits, read_chat

USER = {"role": "user", "content": "What is 2 + 2?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "two"}}}],
}
KNOWN = "{% if m.role in ('system', 'user', 'assistant') %}"


def of(tmp_path, inside, before=""):
    """A tokenizer whose template writes `inside` of each message m."""
    template = (
        f"{before}{{% for m in messages %}}{inside}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return HuggingFaceTokenizer(write_tokenizer(tmp_path, template))


WRITTEN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


@pytest.mark.parametrize("text", ["be brief and nothing else, please", "No", "a"])
def test_a_role_that_the_template_drops(tmp_path, text):
    """Also of a text so short that it stands in the rendering by chance."""
    tokenizer = of(tmp_path, KNOWN + WRITTEN + "{% endif %}")
    messages = [{"role": "developer", "content": text}, USER]
    with pytest.raises(InputError) as caught:
        prompt_text(tokenizer, messages)
    assert "leaves out the content of message 0, of role 'developer'" in str(caught.value)
    assert "rename the role 'developer'" in str(caught.value)
    assert prompt_text(tokenizer, [{"role": "system", "content": text}, USER])


def test_a_long_text_of_which_a_part_is_dropped(tmp_path):
    tokenizer = of(tmp_path, "<|im_start|>{{ m.role }}\n{{ m.content[:20] }}<|im_end|>\n")
    with pytest.raises(InputError, match="content of message 0"):
        prompt_text(tokenizer, [{"role": "user", "content": "one two three four five six seven"}])


def test_the_tools_of_which_a_template_writes_nothing(tmp_path):
    """Also of a model with images, whose messages are not asked about by probes."""
    first = "{% if tools %}{{ tools[0] | tojson }}{% endif %}"
    tokenizer = of(tmp_path, WRITTEN, first)
    second = {**TOOL, "function": {**TOOL["function"], "name": "What"}}  # a word of the question
    options = {"tools": [TOOL, second]}
    assert unwritten_tools(tokenizer, [USER], options) == ["What"]
    assert unwritten_tools(tokenizer, [USER], {}) == []
    tokenizer.image_mark = "<image>"
    with pytest.raises(InputError, match="writes nothing of the tools: got .'What'"):
        prompt_text(tokenizer, [USER], **options)


def test_variables_that_a_template_reads(tmp_path):
    inside = "{% set other = 1 %}{{ m.content }}{% if enable_thinking is defined %}x{% endif %}"
    tokenizer = of(tmp_path, inside)
    reads = {name: tokenizer.reads_variable(name) for name in ("enable_thinking", "other", "x")}
    assert reads == {"enable_thinking": True, "other": False, "x": False}
    assert not CharTokenizer("ab").reads_variable("enable_thinking")
    with pytest.raises(InputError, match="does not read a variable"):
        HuggingFaceTokenizer(tokenizer.folder, variables={"thinking": True})


def test_tools_and_calls_that_the_template_drops(tmp_path):
    tokenizer = of(tmp_path, WRITTEN)
    with pytest.raises(InputError, match="writes nothing of the tools: got .'add'"):
        prompt_text(tokenizer, [{**USER, "content": "please add them"}], tools=[TOOL])
    assert prompt_text(tokenizer, [USER], tools=[TOOL], needs_tools=False)
    asked = [{**USER, "content": "add two, please"}, CALL, {**USER, "content": "and now?"}]
    with pytest.raises(InputError, match="tool_calls of message 1"):
        prompt_text(tokenizer, asked)  # the words stand in the question
    told = of(tmp_path / "told", WRITTEN, "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}")
    assert "Adds." in prompt_text(told, [USER], tools=[TOOL])


@pytest.mark.parametrize(
    "written",
    [
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ m.content | tojson | tojson }}",
        "{{ m.content | e }}",
        "{{ m.content | replace('\n', ' ') }}",
        "{{ m.content | indent(4) }}",
    ],
)
def test_what_a_template_writes_in_its_own_way_is_there(tmp_path, written):
    tokenizer = of(tmp_path, "<|im_start|>{{ m.role }}\n" + written + "<|im_end|>\n")
    for text in (
        "  a \n\n b\t c  ",
        "say \"é <b> & \\ 'x'\" \U0001f600",
        "{'a': 1}",
        "\\n literally",
    ):
        assert prompt_text(tokenizer, [{**USER, "content": text}])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_history_may_lose_its_reasoning(tmp_path, family):
    """Templates leave it out, and so they do where the policy is asked."""
    tokenizer = HuggingFaceTokenizer(write_family(tmp_path, family, marked=False))
    answered = {"role": "assistant", "content": "<think>\nadd them up\n</think>\n\n4"}
    kept = {"role": "assistant", "content": "4", "reasoning_content": "add them up"}
    for turn in (answered, kept):
        text = prompt_text(tokenizer, [USER, turn, {**USER, "content": "and 3 + 3?"}])
        assert "4" in text and "and 3 + 3?" in text


def test_reasoning_that_is_learned_is_there_or_named(tmp_path):
    turn = {"role": "assistant", "content": "4", "reasoning_content": "so"}
    with pytest.raises(InputError, match="reasoning of message 1") as caught:
        encode_conversation(HuggingFaceTokenizer(write_tokenizer(tmp_path)), [USER, turn])
    assert "template_variables" in str(caught.value)
    written = QWEN_LIKE.replace(
        "+ message.content", "+ (message.reasoning_content or '') + message.content"
    )
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "written", written))
    assert any(encode_conversation(tokenizer, [USER, turn])[1])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "<think>\na\n</think>\n\nb"}, ("a", "b")),
        ({"content": "a\n</think>\n\nb"}, ("a", "b")),
        ({"content": "[THINK]a[/THINK]b"}, ("a", "b")),
        ({"content": "b", "reasoning_content": "a"}, ("a", "b")),
        ({"content": "b", "thinking": "a"}, ("a", "b")),
        ({"content": "no tags"}, ("", "no tags")),
        ({"content": "<think>never closed"}, ("", "<think>never closed")),
        ({"content": None, "reasoning": "a"}, ("a", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(message, expected):
    assert split_reasoning(message) == expected


def test_a_template_that_needs_a_system_message_tells_its_end(tmp_path):
    refuses = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = of(tmp_path, WRITTEN.replace("<|im_end|>", "<|stop|>"), refuses)
    assert not tokenizer.turn_ends  # <|stop|> is no token
    write_tokenizer(tmp_path / "base", refuses + QWEN_LIKE)
    told = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    (tmp_path / "base/tokenizer_config.json").write_text(
        json.dumps({**told, "eos_token": "<|endoftext|>"})
    )
    (tmp_path / "base/generation_config.json").unlink()
    base = HuggingFaceTokenizer(tmp_path / "base")
    assert base.decode(base.eos_ids, skip_special_tokens=False) == "<|endoftext|><|im_end|>"


def test_reasoning_whose_text_stands_in_the_answer_too(tmp_path):
    turn = {"role": "assistant", "content": "2+2=4, so it is 4.", "reasoning_content": "2+2=4"}
    with pytest.raises(InputError, match="reasoning of message 1"):
        encode_conversation(HuggingFaceTokenizer(write_tokenizer(tmp_path)), [USER, turn])


def test_the_reasoning_that_says_something_counts(tmp_path):
    written = QWEN_LIKE.replace("+ message.content", "+ (message.thinking or '') + message.content")
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, written))
    turn = {"role": "assistant", "content": "4", "reasoning_content": "", "thinking": "I count"}
    ids, mask = encode_conversation(tokenizer, [USER, turn])
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "I count4"


def test_the_second_of_two_tools(tmp_path):
    first = "{% if tools %}{{ tools[0] | tojson }}{% endif %}"
    other = {**TOOL, "function": {**TOOL["function"], "name": "subtract"}}
    with pytest.raises(InputError, match="nothing of the tools"):
        prompt_text(of(tmp_path, WRITTEN, first), [USER], tools=[TOOL, other])


class Told(CharTokenizer):
    """Writes each message, and the names of the tools."""

    writes_tools = True

    def render_chat(self, messages, *, tools=None, **options):
        names = [tool["function"]["name"] for tool in tools or ()] if self.writes_tools else []
        return " ".join([*names, *(message["content"] for message in messages)])


class Deaf(Told):
    """Writes each message alone."""

    writes_tools = False


def test_a_verdict_is_never_that_of_another_tokenizer():
    """Also where a new one stands at the address of one that is gone."""
    messages = [{"role": "user", "content": "please add them"}]

    def refused(tokenizer):
        try:
            prompt_text(tokenizer, messages, tools=[TOOL])
        except InputError as error:
            return "nothing of the tools" in str(error)
        return False

    for _ in range(20):
        assert [refused(kind("a")) for kind in (Told, Told, Deaf, Deaf)] == [
            False,
            False,
            True,
            True,
        ]


def test_a_verdict_is_never_that_of_messages_with_other_keys(tmp_path):
    """A message with a name, which this template refuses to write beside the others."""
    named = "{% if m.name %}{{ m.name }}{% else %}" + WRITTEN + "{% endif %}"
    tokenizer = of(tmp_path, named)
    assert prompt_text(tokenizer, [{**USER, "content": "so"}])
    with pytest.raises(InputError, match="content of message 0"):
        prompt_text(tokenizer, [{**USER, "content": "so", "name": "so"}])


DONE = {"role": "assistant", "content": "done"}
SPOKEN = {**CALL, "content": "Let me add."}
LONGER = {**CALL, "content": "Let me add these two numbers for you."}
ADDED = {"role": "tool", "name": "add", "content": "5.5"}
# gpt-oss's rule: what is said beside a call is left out behind a later answer.
SPOKEN_ONCE = (
    "{% set ns = namespace(answered=false) %}{% for k in messages[loop.index0:] %}"
    "{% if k.role == 'assistant' and not k.tool_calls %}{% set ns.answered = true %}{% endif %}"
    "{% endfor %}<|im_start|>{{ m.role }}\n"
    "{% if not (m.tool_calls and ns.answered) %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"


@pytest.mark.parametrize("said", [SPOKEN, LONGER], ids=["short", "long"])
def test_words_beside_a_call_that_the_history_loses(tmp_path, said):
    """Each turn is an example of its own, read as the policy is asked for it."""
    tokenizer = of(tmp_path, SPOKEN_ONCE, TOOLS)
    talk = [USER, said, ADDED, said, ADDED, DONE]
    whole = [*talk, {**USER, "content": "And now?"}, {**DONE, "content": "Nothing."}]
    for turns, number in (("auto", 4), ("each", 4), ("last", 1)):
        rows = load_rows([{"messages": whole, "tools": [TOOL]}], "train", "examples")
        items, _ = encode_rows(rows, tokenizer, "examples", max_tokens=999, turns=turns)
        texts = [
            tokenizer.decode([i for i, m in zip(*item, strict=True) if m], False) for item in items
        ]
        assert len(texts) == number and texts[-1] == "Nothing.<|im_end|>"
        assert all(text.startswith(said["content"]) for text in texts[:-2])
        read = tokenizer.decode(items[-2].ids, False) if number > 1 else ""
        assert read.count(said["content"]) == 2 * (number > 1)  # as the policy read it
    assert said["content"] not in prompt_text(tokenizer, whole[:-1], tools=[TOOL])
    row = dict(prompt=[USER], chosen=talk[1:], rejected=[said], tools=[TOOL])
    ((item,), _) = encode_rows(
        load_rows([row], "train", "pairs"), tokenizer, "pairs", max_tokens=999
    )
    text = tokenizer.decode(item.chosen_ids, skip_special_tokens=False)
    assert text.count(said["content"]) == 2 and text.endswith("done<|im_end|>")


@pytest.mark.parametrize("said", [SPOKEN, LONGER], ids=["short", "long"])
def test_words_beside_a_call_that_are_never_written(tmp_path, said):
    never = SPOKEN_ONCE.replace("m.tool_calls and ns.answered", "m.tool_calls")
    tokenizer = of(tmp_path, never, TOOLS)
    with pytest.raises(InputError, match="content of message 1, of role 'assistant'"):
        prompt_text(tokenizer, [USER, said, ADDED, DONE, USER], tools=[TOOL])


def test_an_answer_that_the_history_loses_is_named(tmp_path):
    last = "{% if loop.last or m.role != 'assistant' %}" + WRITTEN + "{% endif %}"
    with pytest.raises(InputError, match="content of message 1, of role 'assistant'"):
        prompt_text(of(tmp_path, last), [USER, {**DONE, "content": "It is four, I think."}, USER])


CALLED = [USER, CALL, {"role": "tool", "content": "22 degrees"}]


def test_several_turns_of_a_pair_are_as_a_rollout_has_them(tmp_path):
    """Qwen 3 renders the call otherwise once an answer follows."""
    tokenizer = HuggingFaceTokenizer(write_family(tmp_path, "qwen3", marked=False))
    row = dict(
        prompt=[USER], chosen=[*CALLED[1:], DONE], rejected=[CALL, CALLED[2], CALL], tools=[TOOL]
    )
    ((item,), _) = encode_rows(
        load_rows([row], "train", "pairs"), tokenizer, "pairs", max_tokens=999
    )
    text = tokenizer.decode(item.chosen_ids, skip_special_tokens=False)
    assert text.count("<think>") == 2 and "22 degrees" in text and text.endswith("done<|im_end|>")
    told = tokenizer.decode(item.chosen_ids[item.chosen_mask == 0], skip_special_tokens=False)
    assert "22 degrees" in told and "done" not in told and "add" not in told


def test_a_cut_trajectory_is_what_was_sampled(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_family(tmp_path, "qwen3", marked=False))
    row = dict(prompt=[USER], completion="<think>\nI was", reward=0, truncated=True)
    ((item,), _) = encode_rows(
        load_rows([row], "train", "trajectories"), tokenizer, "trajectories", max_tokens=999
    )
    assert tokenizer.decode(item.completion_ids, skip_special_tokens=False) == "<think>\nI was"
    assert item.completion_mask.all()


def test_two_turns_of_the_assistant_are_no_prefill(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_family(tmp_path, "qwen3", marked=False))
    turns = [{"role": "assistant", "content": text} for text in ("one", "two")]
    rows = load_rows([{"messages": [USER, *turns]}], "train", "examples")
    items, _ = encode_rows(rows, tokenizer, "examples", max_tokens=999)
    whole = [tokenizer.decode(item.ids, skip_special_tokens=False).strip() for item in items]
    opened = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert whole[1].endswith(f"one<|im_end|>\n{opened}two<|im_end|>")
    row = dict(prompt=[USER, turns[0]], completion=[turns[1]])
    (prefilled,) = load_rows([row], "train", "examples")
    ((item,), _) = encode_rows([prefilled], tokenizer, "examples", max_tokens=999)
    text = tokenizer.decode(item.ids, skip_special_tokens=False).strip()
    assert text.endswith(f"{opened}onetwo<|im_end|>")


# -- the form in which a template reads a message --

IF_TEXT = "{% if m.content is string %}{{ m.content }}{% else %}"
EACH_PART = "{% for part in m.content %}{{ part.text }}{% endfor %}"
OF_TEXTS = {
    "writes nothing of a list": "{{ m.content if m.content is string else '' }}",
    "writes a list as Python does": "{{ m.content }}",
    "writes a list as JSON": IF_TEXT + "{{ m.content | tojson }}{% endif %}",
    "writes a list as HTML": IF_TEXT + "{{ m.content | string | e }}{% endif %}",
    "writes the first part": IF_TEXT + "{{ m.content[0].text }}{% endif %}",
    "fails on a list": "{{ m.content + '' }}",
}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def said(role, *texts):
    return {"role": role, "content": parts(*texts)}


PARTED = {
    "a letter of a role": [said("user", "a")],
    "a word of another message": [{"role": "system", "content": "helpful"}, said("user", "help")],
    "an answer that the question names": [USER, said("assistant", "2"), said("user", "Sure?")],
    "two parts": [said("user", "What is ", "2 + 2?"), said("assistant", "4", "!"), USER],
    "blank": [said("user", "a", " "), said("assistant"), USER],
    "a tool's": [USER, CALL, said("tool", "4"), USER],
}


@pytest.mark.parametrize("written", OF_TEXTS)
def test_parts_are_the_text_of_rows_where_a_template_reads_texts(tmp_path, written):
    """A short part may stand elsewhere in the rendering, and be lost."""
    begun = "<|im_start|>{{ m.role }}\n" + "{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    tokenizer = of(tmp_path, begun + OF_TEXTS[written] + "<|im_end|>\n")
    for name, messages in PARTED.items():
        texts = [
            {**m, "content": "".join(part["text"] for part in m["content"])}
            if isinstance(m["content"], list)
            else m
            for m in messages
        ]
        want = prompt_text(tokenizer, texts)
        assert prompt_text(tokenizer, messages) == want, name
        served = read_chat({"messages": messages}, tokenizer, "m", RequestLimits(4000, 4))
        assert served.requests[0][0] == tokenizer.encode(want), name


# Mistral Small 3.2 and Pixtral: some roles are texts alone, and the end of a turn is added to one.
BY_ROLE = (
    "{% if m.role == 'system' %}<|im_start|>{{ m.content + '\n' }}"
    "{% elif m.role == 'tool' %}[TOOL]{{ m.content | string }}[/TOOL]"
    f"{{% elif m.role == 'user' %}}{IF_TEXT}{EACH_PART}{{% endif %}}"
    f"{{% else %}}{IF_TEXT}{EACH_PART}{{% endif %}}{{{{ eos_token + today }}}}{{% endif %}}"
)
BY_ROLE_ALONE = BY_ROLE.replace(
    IF_TEXT + EACH_PART + "{% endif %}{% else %}", EACH_PART + "{% else %}"
)


@pytest.mark.parametrize("inside", [BY_ROLE, BY_ROLE_ALONE], ids=["either", "users in parts"])
def test_each_message_is_in_the_form_that_its_role_is_read_in(tmp_path, inside):
    """The template is asked with the special tokens, variables and tools of the rendering."""
    before = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    template = before + "{% for m in messages %}" + inside + "{% endfor %}"
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, template))
    more = dict(tools=[TOOL], variables={"today": "TODAY"}, add_generation_prompt=False)
    texts = [("system", "Be"), ("user", "e"), ("assistant", "a"), ("tool", "t"), ("user", "s")]
    flat = [{"role": role, "content": text} for role, text in texts]
    want = "<|im_start|>Be\nea<|im_end|>TODAY[TOOL]t[/TOOL]s"
    for kinds in ([str] * 5, [list] * 5, [str, list] * 2 + [str], [list, str] * 2 + [list]):
        messages = [
            m if kind is str else said(m["role"], m["content"])
            for m, kind in zip(flat, kinds, strict=True)
        ]
        assert tokenizer.render_chat(messages, **more).endswith("}" + want), kinds


def test_a_list_that_a_template_reads_reaches_it(tmp_path):
    mark = "{% if part.type == 'image' %}[IMG]{% else %}<{{ part.text }}>{% endif %}"
    inside = IF_TEXT + "{% for part in m.content %}" + mark + "{% endfor %}{% endif %}"
    tokenizer = of(tmp_path, "<|im_start|>" + inside)
    image = {"role": "user", "content": [{"type": "image"}, *parts("a", "b")]}
    assert tokenizer.render_chat([image], add_generation_prompt=False) == "<|im_start|>[IMG]<a><b>"
    assert "<a><b>" in tokenizer.render_chat([said("user", "a", "b")])
    for name, written in OF_TEXTS.items():
        with pytest.raises(InputError, match="writes no images"):
            of(tmp_path / name, "<|im_start|>" + written).render_chat([image])


def test_a_short_part_that_the_template_drops(tmp_path):
    """Also between images, and beside a call."""
    tokenizer = of(tmp_path, KNOWN + WRITTEN + "{% endif %}")
    with pytest.raises(InputError, match="content of message 0, of role 'developer'"):
        prompt_text(tokenizer, [said("developer", "a"), USER])
    half = of(tmp_path / "half", "<|im_start|>{{ m.content.split('#')[0] }}<|im_end|>\n")
    half.image_mark = "#"
    with pytest.raises(InputError, match="content of message 0, of role 'user': got 'im #m'"):
        prompt_text(half, [{"role": "user", "content": "im #m"}])
    spoken = of(tmp_path / "spoken", SPOKEN_ONCE, TOOLS)
    asked = [USER, {**CALL, "content": parts("Let me add.")}, ADDED, DONE, USER]
    assert "done" in prompt_text(spoken, asked, tools=[TOOL])
