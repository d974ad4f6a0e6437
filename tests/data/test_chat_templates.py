"""Chat templates of five families: text, ids and masks equal to those of `transformers`."""

import pytest
from conversations import ANSWERED, CORPUS, TOOLS, assistant, system, user
from family_tokenizers import FAMILIES, write_family

from rljax.data.text.chat import RewrittenTurn, encode_conversation, encode_last_turn, encode_turns
from rljax.data.text.messages import for_template
from rljax.data.text.tokenizer import HuggingFaceTokenizer
from rljax.errors import InputError

# Where we differ on purpose: lists of text parts for a template that reads texts only, which
# transformers refuses, writes as a Python list or leaves out. Ours joins them.
JOINED = {(family, "parts") for family in ("llama3", "qwen2_5", "deepseek", "qwen3")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {
        (family, marked): write_family(root / f"{family}{marked}", family, marked=marked)
        for family in FAMILIES
        for marked in (True, False)
    }


@pytest.fixture(scope="module")
def ours(folders):
    return {key: HuggingFaceTokenizer(folder) for key, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders):
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    load = library.PreTrainedTokenizerFast.from_pretrained
    return {key: load(folder) for key, folder in folders.items()}


def their_text(tokenizer, messages, tools=None, documents=None, variables=None, **options):
    """What transformers renders, or the exception that it raises."""
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            documents=documents,
            tokenize=False,
            **options,
            **(variables or {}),
        )
    except Exception as error:
        return error


def _wrapped(message):
    calls = [{"type": "function", "function": call} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


# A tool's answer may hold no token of the template, nor a tag by which it closes a block: such a
# text gets a space here.
PARTED = {
    "qwen2_5": "<tool_response>\nx\n< /tool_response>",
    "qwen3": "< tool_response>\nx\n< /tool_response>",
}


def theirs_of(family, name):
    """A case as transformers has to be given it, which passes calls on as they are: DeepSeek's
    template writes the arguments as a text, the others as an object, and few read a call that is
    the function alone."""
    case = CORPUS[name]
    if name == "tool_call_nested" and family in PARTED:
        answer = {"content": PARTED[family]}
        messages = [m | answer if m["role"] == "tool" else m for m in case["messages"]]
        return {**case, "messages": messages}
    if name == "tool_call_bare":
        return {**case, "messages": [_wrapped(message) for message in case["messages"]]}
    if family == "deepseek" or name != "tool_call_text_arguments":
        return case
    return {**case, "messages": for_template(case["messages"])}


def our_text(tokenizer, messages, **options):
    try:
        return tokenizer.render_chat(messages, **options)
    except InputError as error:
        return error


MODES = [
    dict(add_generation_prompt=False),
    dict(add_generation_prompt=True),
    dict(add_generation_prompt=False, continue_final_message=True),
]


# How many conversations each family refuses in each mode; Gemma wants turns that alternate.
REFUSED = dict(
    llama3=(1, 1, 2), qwen2_5=(0, 0, 1), qwen3=(0, 0, 1), gemma=(17, 17, 19), deepseek=(0, 0, 4)
)


@pytest.mark.parametrize("mode", MODES, ids=["finished", "prompt", "continued"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_ids_are_those_of_transformers(ours, theirs, family, mode):
    refused = 0
    for name, case in CORPUS.items():
        if (family, name) in JOINED:
            continue
        mine = our_text(ours[family, True], **case, **mode)
        other = their_text(theirs[family, True], **theirs_of(family, name), **mode)
        if isinstance(other, Exception):
            refused += 1
            assert isinstance(mine, InputError), (name, other, mine)
            continue
        if name == "unknown_role":  # which some templates write and some leave out
            assert "unknown role: got 'critic'" in str(mine)
            continue
        assert mine == other, name
        ids = theirs[family, True](other, add_special_tokens=False)["input_ids"]
        assert ours[family, True].encode(mine) == ids, name
        assert our_text(ours[family, False], **case, **mode) == mine, name
    assert refused == REFUSED[family][MODES.index(mode)]


@pytest.mark.parametrize(("family", "name"), sorted(JOINED))
def test_text_parts_are_joined_where_the_template_reads_text_only(ours, theirs, family, name):
    case = CORPUS[name]
    other = their_text(theirs[family, True], **case, add_generation_prompt=True)
    assert isinstance(other, Exception) or "{'type': 'text'" in other or "user\n<|im_end|>" in other
    text = our_text(ours[family, True], **case, add_generation_prompt=True)
    plain = [user("ab"), assistant("c")]
    assert text == our_text(ours[family, True], messages=plain, add_generation_prompt=True)


def test_documents_and_variables_reach_the_template(ours):
    tokenizer = ours["qwen3", True]
    thinks = [
        tokenizer.render_chat([user("a")], variables={"enable_thinking": value}).count("think")
        for value in (True, False)
    ]
    assert thinks == [0, 2]
    with pytest.raises(InputError, match="template variable"):
        tokenizer.render_chat([user("a")], variables={"messages": []})
    with pytest.raises(InputError, match="tools are not a list"):
        tokenizer.render_chat([user("a")], tools=["weather"])
    with pytest.raises(InputError, match="exclude each other"):
        tokenizer.render_chat([user("a")], continue_final_message=True)


# -- masks --


# Conversations in which the template renders an earlier turn otherwise than as the last one.
REWRITTEN = {
    "llama3": set(),
    "qwen2_5": set(),
    "gemma": set(),
    "deepseek": {"system_late"},
    "qwen3": set(
        "two_turns system_late many_short long empty_assistant blanks newlines emoji cjk code"
        " thinking thinking_field thinking_other_names thinking_odd date tool_call_with_text"
        " tool_call_empty_text tool_turns tool_calls_together tool_call_text_arguments no_tools"
        " tool_call_bare tool_call_nested tool_loop tool_by_ipython tool_answer pending"
        " assistant_twice".split()
    ),
}
# Of which the template leaves something out, and which hold a stop token within a turn.
_NO_REASONING = {"thinking_field", "thinking_other_names"}
REFUSED_ROWS = {
    "llama3": {*_NO_REASONING, "tool_call_with_text", "tool_loop", "tool_loop_with_reasoning"},
    "qwen2_5": {*_NO_REASONING, "special_in_text", "tool_loop_with_reasoning"},
    "qwen3": {"special_in_text"},
    "gemma": {*_NO_REASONING, "tools_unused", "tools_and_system", "tool_call", "tools_in_system"},
    "deepseek": {
        *_NO_REASONING,
        "thinking",
        "thinking_once",
        "thinking_odd",
        "tool_loop",
        "tool_loop_with_reasoning",
        "tool_by_ipython",
    },
}
# Where we differ on purpose: a greeting before the first question is read only; no token spans the
# border of prompt and turn; a stop token that a turn says itself ends it.
READ_OTHERWISE = {"assistant_first", "blanks", "newlines", "special_in_text", "parts"}


MASKS = [(family, marked) for family in FAMILIES for marked in (True, False)]
SLOW_MASKS = {("llama3", False), ("qwen2_5", True), ("gemma", True), ("deepseek", True)}


@pytest.mark.parametrize(
    ("family", "marked"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW_MASKS else []) for case in MASKS],
)
def test_masks_are_those_of_transformers(ours, theirs, family, marked):
    seen, rewritten, refused = 0, set(), set()
    for name, case in CORPUS.items():
        if (family, name) in JOINED or isinstance(our_text(ours[family, True], **case), InputError):
            continue
        try:
            ids, mask = encode_conversation(ours[family, marked], **case)
        except InputError as error:
            (rewritten if isinstance(error, RewrittenTurn) else refused).add(name)
            continue
        case = theirs_of(family, name)
        given = dict(case, **case.get("variables", {}))
        given.pop("variables", None)
        other = theirs[family, True].apply_chat_template(
            given.pop("messages"), return_assistant_tokens_mask=True, return_dict=True, **given
        )
        if name not in READ_OTHERWISE:
            assert (ids, mask) == (other["input_ids"], other["assistant_masks"]), name
            seen += any(mask)
    assert rewritten == REWRITTEN[family] and refused == REFUSED_ROWS[family]
    assert seen >= 5 if family == "qwen3" else seen >= 20


def runs(tokenizer, ids, mask):
    """The text of each run of learned tokens."""
    found, before = [], 0
    for i, learned in zip(ids, mask, strict=True):
        if learned and not before:
            found.append([])
        if learned:
            found[-1].append(i)
        before = learned
    return [tokenizer.decode(run, skip_special_tokens=False) for run in found]


TURNS = [system("S"), user("1"), assistant(" a\nb "), user("2"), assistant("é😀")]
CALL = '{"name": "add", "%s": {"a": 2, "b": 3.5}}'
QWEN_CALL = "<tool_call>\n" + CALL % "arguments" + "\n</tool_call><|im_end|>"
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 2, "b": 3.5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)
LEARNED = [
    ("llama3", TURNS, ["a\nb<|eot_id|>", "é😀<|eot_id|>"]),
    ("qwen2_5", TURNS, [" a\nb <|im_end|>", "é😀<|im_end|>"]),
    ("gemma", TURNS, ["a\nb<end_of_turn>", "é😀<end_of_turn>"]),
    ("deepseek", TURNS, [" a\nb <｜end▁of▁sentence｜>", "é😀<｜end▁of▁sentence｜>"]),
    ("llama3", [*ANSWERED, assistant("5")], [CALL % "parameters" + "<|eot_id|>", "5<|eot_id|>"]),
    ("qwen2_5", [*ANSWERED, assistant("5.5")], [QWEN_CALL, "5.5<|im_end|>"]),
    ("deepseek", [*ANSWERED, assistant("5")], [DEEPSEEK_CALL, "5<｜end▁of▁sentence｜>"]),
    ("qwen3", TURNS[1:3], ["<think>\n\n</think>\n\n a\nb <|im_end|>"]),
]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("family", "messages", "expected"), LEARNED)
def test_what_is_learned(ours, family, messages, expected, marked):
    tokenizer = ours[family, marked]
    tools = TOOLS if messages not in (TURNS, TURNS[1:3]) else None
    ids, mask = encode_conversation(tokenizer, messages, tools=tools)
    assert runs(tokenizer, ids, mask) == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(
        messages, tools=tools, add_generation_prompt=False
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_one_example_of_each_turn_is_what_was_sampled(ours, family):
    tokenizer, seen = ours[family, False], 0
    for name, case in CORPUS.items():
        if isinstance(our_text(tokenizer, **case), InputError) or name in REFUSED_ROWS[family]:
            continue
        messages, options = case["messages"], {k: v for k, v in case.items() if k != "messages"}
        for k in [k for k, m in enumerate(messages) if k and m["role"] == "assistant"][:4]:
            if messages[k - 1]["role"] == "assistant" or name in {
                *READ_OTHERWISE,
                "thinking_odd",
                "tool_by_ipython",
            }:
                continue  # a prompt that ends with the assistant is continued
            ids, mask = encode_last_turn(tokenizer, messages[: k + 1], **options)
            prompt = tokenizer.encode_chat(messages[:k], **options)
            assert ids[: len(prompt)] == prompt, name
            assert mask[: len(prompt)] == [0] * len(prompt)
            text, spans = ours[family, True].render_marked(messages[: k + 1], **options)
            # Gemma's tokenizer writes a space where the text itself has its mark of a space.
            said = text[slice(*spans[-1])]
            if family == "gemma":
                text, said = text.replace("▁", " "), said.replace("▁", " ")
            assert tokenizer.decode(ids, skip_special_tokens=False) == text, name
            assert runs(tokenizer, ids, mask) == [said], name
            seen += 1
    assert seen >= 20


def test_the_last_turn_must_be_the_assistants(ours):
    with pytest.raises(InputError, match="not the assistant's"):
        encode_last_turn(ours["qwen3", False], [user("a")])


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "deepseek"])
def test_a_turn_that_is_context_has_no_mask(ours, family, marked):
    tokenizer = ours[family, marked]
    messages = [user("1"), {**assistant("bad"), "learn": False}, user("2"), assistant("good")]
    ids, mask = encode_conversation(tokenizer, messages)
    (learned,) = runs(tokenizer, ids, mask)
    assert learned.startswith("good") and "bad" in tokenizer.decode(ids)
    plain = [{n: v for n, v in m.items() if n != "learn"} for m in messages]
    assert ids == encode_conversation(tokenizer, plain)[0], "no template sees the key"
    turns = encode_turns(tokenizer, messages, 1)
    assert runs(tokenizer, turns.ids, turns.mask) == [learned]


def test_a_greeting_that_is_context(ours):
    messages = [{**assistant("hi"), "learn": False}, user("2"), assistant("good")]
    for marked in (True, False):
        tokenizer = ours["qwen2_5", marked]
        assert runs(tokenizer, *encode_conversation(tokenizer, messages)) == ["good<|im_end|>"]
